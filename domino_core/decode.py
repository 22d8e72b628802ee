"""One round of decoding over a batch of rows: draft, verify, accept, commit. Plain decoding is a round without drafts.

Between rounds a row has emitted tokens 0..drawn-1. The last of them, the anchor, is in no cache yet: its position in
the text is `length`, the number of entries that count in the row's target cache and draft context alike. The target's
feature of the anchor does not exist before it is verified, so no round can use it.

B rows · Q drafts of this round · T = Q+1 tokens verified · P prompt tokens · D hidden · C feature width · V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from domino_core.drafter import Drafter
from domino_core.fused_drafter import FusedDrafter
from domino_core.layers import KVCache
from domino_core.penalties import TokenCounts, Walk, adjusted_logits
from domino_core.sampling import RowSampling, accept, draft_noise, draw, processed_logits, target_noise
from domino_core.target_model import Target

DraftModel = Drafter | FusedDrafter

# Prompt tokens per pass; bounds the memory of the mask and of the features on the way to the drafter.
PREFILL_CHUNK = 512


@dataclass(kw_only=True)
class Acceptance:
    """Counts over rounds, before stop and length cuts; the token that prefill gives belongs to no round."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list[int])
    """How many rounds accepted draft i, for each i."""

    def count(self, drafted: int, accepted: int) -> None:
        """Add one round of one row."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for index in range(accepted):
            self.accepted_at[index] += 1

    def merge(self, other: "Acceptance") -> None:
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.accepted_at += [0] * (len(other.accepted_at) - len(self.accepted_at))
        for index, count in enumerate(other.accepted_at):
            self.accepted_at[index] += count

    def copy(self) -> "Acceptance":
        counts = (self.rounds, self.drafted, self.accepted)
        return Acceptance(rounds=counts[0], drafted=counts[1], accepted=counts[2], accepted_at=self.accepted_at.copy())

    @property
    def tau(self) -> float:
        """Mean tokens per round, the target's own included; 1.0 before any round."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    def to_dict(self) -> dict[str, Any]:
        counts = {"rounds": self.rounds, "drafted": self.drafted, "accepted": self.accepted}
        return {"tau": self.tau, **counts, "accepted_at": list(self.accepted_at)}


@dataclass(kw_only=True)
class DecodeState:
    """Slots for rows that decode together. `lengths` and `context_lengths` are the host's own copies of the lengths.

    counts: None until a row asks for penalties.
    """

    target_cache: KVCache
    draft_cache: KVCache | None
    length_B: Tensor
    anchor_B: Tensor
    drawn_B: Tensor
    lengths: list[int]
    context_lengths: list[int]
    counts: TokenCounts | None = None

    @classmethod
    def allocate(cls, target: Target, drafter: DraftModel | None, rows: int, length: int) -> "DecodeState":
        """Room for texts of up to `length` tokens; a round may write a block beyond it before it is cut."""
        overrun = drafter.config.num_drafts if drafter is not None else 0
        zeros_B = torch.zeros(rows, dtype=torch.int64, device=target.device)
        return cls(
            target_cache=target.new_cache(rows, length + overrun),
            draft_cache=drafter.new_cache(rows, length) if drafter is not None else None,
            length_B=zeros_B,
            anchor_B=zeros_B.clone(),
            drawn_B=zeros_B.clone(),
            lengths=[0] * rows,
            context_lengths=[0] * rows,
        )

    def move_row(self, src: int, dst: int) -> None:
        """Copy row src over row dst."""
        self.target_cache.move_row(src, dst, self.lengths[src])
        if self.draft_cache is not None:
            self.draft_cache.move_row(src, dst, self.context_lengths[src])
        if self.counts is not None:
            self.counts.move_row(src, dst)
        for values_B in (self.length_B, self.anchor_B, self.drawn_B):
            values_B[dst] = values_B[src]
        for values in (self.lengths, self.context_lengths):
            values[dst] = values[src]


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round gave: per row its accepted drafts and one more token of the target's; and the target's logits."""

    tokens: list[list[int]]
    num_drafts: int
    logits_BTV: Tensor


@torch.inference_mode()
def prefill_chunk(
    target: Target, drafter: DraftModel | None, state: DecodeState, row: int, prompt_ids: Sequence[int], begin: int
) -> tuple[int, Tensor]:
    """Take a prompt's tokens from `begin` on into a row's caches, PREFILL_CHUNK at most: (the end, its hidden [1, D]).

    Chunks begin at multiples of their size, so what a prompt gives does not depend on when its chunks were run.
    The draft context gets the features of every prompt token: a drafter that misses some silently accepts less.
    """
    end = min(begin + PREFILL_CHUNK, len(prompt_ids))
    ids_1T = torch.tensor([prompt_ids[begin:end]], dtype=torch.int64, device=target.device)
    positions_1T = torch.arange(begin, end, device=target.device)[None]
    taps = drafter.config.target_layer_ids if drafter is not None else ()
    hidden_1TD, features_1TC = target.forward(
        ids_1T, positions_1T[:, 0], state.target_cache.row(row), taps, num_keys=end
    )
    if drafter is not None:
        assert state.draft_cache is not None
        assert features_1TC is not None
        drafter.extend_context(state.draft_cache.row(row), features_1TC, positions_1T)
    state.lengths[row] = state.context_lengths[row] = end
    return end, hidden_1TD[:, -1]


@torch.inference_mode()
def first_token(
    target: Target,
    state: DecodeState,
    row: int,
    prompt_ids: Sequence[int],
    sampling: RowSampling,
    hidden_1D: Tensor,
) -> tuple[int, Tensor]:
    """Draw what follows a prompt that is in the row's caches: (token, logits [V]). sampling: of this row alone."""
    logits_11V = target.logits(hidden_1D[:, None])
    if sampling.adjustment is not None and len(sampling.adjustment.row_X):
        state.counts = state.counts or TokenCounts.allocate(len(state.lengths), logits_11V.shape[-1], target.device)
        state.counts.start(row, torch.tensor(prompt_ids, device=target.device))
    counts = state.counts.row(row) if state.counts is not None else None
    first_11 = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    asked_11V = adjusted_logits(logits_11V, first_11[:, :0], sampling.adjustment, counts)
    noise_11V = target_noise(sampling, first_11, logits_11V.shape[-1])
    token_11 = draw(processed_logits(asked_11V, sampling), noise_11V)
    if sampling.adjustment is not None and counts is not None:
        counts.add(sampling.adjustment, token_11, torch.ones_like(token_11[0]))
    token = int(token_11)
    state.length_B[row], state.anchor_B[row], state.drawn_B[row] = len(prompt_ids), token, 1
    return token, logits_11V[0, 0]


def prefill(
    target: Target,
    drafter: DraftModel | None,
    state: DecodeState,
    row: int,
    prompt_ids: Sequence[int],
    sampling: RowSampling,
) -> tuple[int, Tensor]:
    """All of a prompt at once, and its first token: (token, logits [V])."""
    end, hidden_1D = prefill_chunk(target, drafter, state, row, prompt_ids, 0)
    while end < len(prompt_ids):
        end, hidden_1D = prefill_chunk(target, drafter, state, row, prompt_ids, end)
    return first_token(target, state, row, prompt_ids, sampling, hidden_1D)


@torch.inference_mode()
def speculative_round(
    target: Target,
    drafter: DraftModel | None,
    state: DecodeState,
    sampling: RowSampling,
    num_rows: int,
    num_verify: int | None = None,
) -> Round:
    """Advance the first `num_rows` rows by one to Q+1 tokens each.

    num_verify drafts are made and verified (None: all of the block; 0, or no drafter: plain decoding). Output does not
    depend on it: the tokens are the target's draws, drafts only decide how many of them one pass of the target gives.
    """
    length_B, anchor_B, drawn_B = (values[:num_rows] for values in (state.length_B, state.anchor_B, state.drawn_B))
    available = drafter.config.num_drafts if drafter is not None else 0
    num_drafts = available if num_verify is None else min(num_verify, available)
    offset_T = torch.arange(num_drafts + 1, device=target.device)
    position_BT = drawn_B[:, None] + offset_T
    noise_BTV = target_noise(sampling, position_BT, target.config.vocab_size)

    # Draft: from the context of positions before the anchor, with the noise of the positions that the drafts are for.
    drafts_BQ, draft_logits_BQV = anchor_B[:, None][:, :0], None
    if drafter is not None and num_drafts:
        assert state.context_lengths[:num_rows] == state.lengths[:num_rows], "draft context must end before the anchor"
        noise_BQV = draft_noise(sampling, position_BT[:, :-1], None if noise_BTV is None else noise_BTV[:, :-1])
        drafts_BQ, draft_logits_BQV = draft_block(drafter, state, sampling, noise_BQV, num_rows, num_drafts)

    # Verify: the target's own token behind the anchor and behind every draft, as if all drafts before it were right.
    hidden_BTD, features_BTC = target.forward(
        torch.cat((anchor_B[:, None], drafts_BQ), dim=1),
        length_B,
        state.target_cache.view(num_rows),
        drafter.config.target_layer_ids if drafter is not None else (),
        num_keys=max(state.lengths[:num_rows]) + num_drafts + 1,
    )
    logits_BTV = target.logits(hidden_BTD)
    processed_BTV = processed_logits(
        adjusted_logits(logits_BTV, drafts_BQ, sampling.adjustment, state.counts), sampling
    )

    # Accept: drafts count while the row's rule has them; one more token comes on top and is the new anchor.
    accepted_B, tokens_BT = accept(sampling, drafts_BQ, draft_logits_BQV, processed_BTV, noise_BTV, position_BT)

    # Commit: what rejected drafts left in the caches lies behind the new length: masked, then overwritten.
    if drafter is not None:
        assert state.draft_cache is not None
        assert features_BTC is not None
        drafter.extend_context(state.draft_cache.view(num_rows), features_BTC, length_B[:, None] + offset_T)
    anchor_B.copy_(tokens_BT.gather(1, accepted_B[:, None])[:, 0])
    if sampling.adjustment is not None and state.counts is not None:
        state.counts.add(sampling.adjustment, tokens_BT, accepted_B + 1)
    length_B += accepted_B + 1
    drawn_B += accepted_B + 1
    rows: list[list[int]] = torch.cat((accepted_B[:, None], tokens_BT), dim=1).tolist()  # the only wait for the device
    for row, (accepted, *_) in enumerate(rows):
        state.lengths[row] += accepted + 1
        state.context_lengths[row] = state.lengths[row] if drafter is not None else 0
    tokens = [tokens[: accepted + 1] for accepted, *tokens in rows]
    return Round(tokens=tokens, num_drafts=num_drafts, logits_BTV=logits_BTV)


def draft_block(
    drafter: DraftModel,
    state: DecodeState,
    sampling: RowSampling,
    noise_BQV: Tensor | None,
    num_rows: int,
    num_drafts: int,
) -> tuple[Tensor, Tensor | None]:
    """The first `num_drafts` tokens of a block for each row, [B, Q], and the processed logits that they came from.

    The backbone gives the base logits of all at once. The first p drafts are drawn from those alone, each later one
    after the head has read all tokens before it and corrected its logits. The logits are returned if rejection sampling
    needs them.
    """
    assert state.draft_cache is not None
    anchor_B = state.anchor_B[:num_rows]
    cache = state.draft_cache.view(num_rows)
    num_context = max(state.lengths[:num_rows])
    z_BQD = drafter.draft_hidden(cache, anchor_B, state.length_B[:num_rows], num_context)[:, :num_drafts]
    base_BQV = drafter.base_logits(z_BQD)
    head = drafter.head
    prefix = num_drafts if head is None else min(drafter.config.pure_draft_prefix_len, num_drafts)
    walk = Walk(sampling.adjustment, state.counts) if sampling.adjustment is not None else None
    drawn_from: list[Tensor] = []

    def draw_at(logits_BTV: Tensor, first: int, last: int) -> Tensor:
        asked_BTV = logits_BTV if walk is None else walk.apply(logits_BTV)
        processed_BTV = processed_logits(asked_BTV, sampling)
        if sampling.rejection:
            drawn_from.append(processed_BTV)
        tokens_BT = draw(processed_BTV, None if noise_BQV is None else noise_BQV[:, first:last])
        if walk is not None:
            for token_B in tokens_BT.unbind(1):
                walk.read(token_B)
        return tokens_BT

    tokens = [anchor_B[:, None], draw_at(base_BQV[:, :prefix], 0, prefix)]
    if head is not None and prefix < num_drafts:
        hidden_part_BQR = head.hidden_part(z_BQD)
        memory: Any = head.initial_state(num_rows)  # the GRU's state, in the form that this head keeps it
        for token_B in torch.cat(tokens, dim=1).unbind(1):
            memory = head.advance(drafter.embed(token_B), memory)
        for index in range(prefix, num_drafts):
            delta_BV = head.correction_from(hidden_part_BQR[:, index], memory)
            token_B1 = draw_at((base_BQV[:, index] + delta_BV)[:, None], index, index + 1)
            tokens.append(token_B1)
            if index + 1 < num_drafts:
                memory = head.advance(drafter.embed(token_B1[:, 0]), memory)
    drafts_BQ = torch.cat(tokens, dim=1)[:, 1:]
    return drafts_BQ, torch.cat(drawn_from, dim=1) if drawn_from else None
