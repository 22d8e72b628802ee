"""One round of decoding over a batch of rows: draft, verify, accept, commit. Plain decoding is a round without drafts.

The target's feature of the anchor does not exist before it is verified, so no round can use it (decode_state.py).

B rows · Q drafts of this round · T = Q+1 tokens verified · D hidden · C feature width · V vocabulary
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from domino_core.decode_state import DecodeState, DraftModel, text_logits
from domino_core.fused_drafter import FusedHead
from domino_core.penalties import Walk, adjusted_logits
from domino_core.sampling import (
    AcceptRule,
    RowSampling,
    accept,
    count_accepted,
    draft_noise,
    draw,
    processed_logits,
    target_noise,
)
from domino_core.target_model import Target

# In float32, passes of different widths give logits that differ by up to about 3e-5. Where the best score leads by less
# than this, the token is drawn from a pass over the row's whole text, which is the same whatever was drafted.
TIE = 5e-4


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


@dataclass(frozen=True)
class RoundShape:
    """The first rows of a state, the drafts Q to make and verify, and a bound: no row's length + Q + 1 exceeds it."""

    num_rows: int
    num_drafts: int
    num_keys: int


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What a round gave, on the device. drawn: of each row, how many drafts were accepted, and then its T tokens, of
    which those drafts and one more count. logits: the target's, as it gave them.
    """

    drawn_BX: Tensor
    logits_BTV: Tensor


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round gave each row, and the target's logits."""

    tokens: list[list[int]]
    num_drafts: int
    logits_BTV: Tensor


@torch.inference_mode()
def speculative_round(
    target: Target,
    drafter: DraftModel | None,
    state: DecodeState,
    sampling: RowSampling,
    num_rows: int,
    num_verify: int | None = None,
) -> Round:
    """Advance the first `num_rows` rows by one to Q+1 tokens each, and wait for them.

    num_verify drafts are made and verified (None: all of the block; 0, or no drafter: plain decoding). Output does not
    depend on it: the tokens are the target's draws, drafts only decide how many of them one pass of the target gives.
    """
    num_drafts = drafts_to_verify(drafter, num_verify)
    shape = RoundShape(num_rows, num_drafts, max(state.lengths[:num_rows]) + num_drafts + 1)
    drawn = advance(target, drafter, state, sampling, shape)
    state.reserve(num_rows, num_drafts + 1)
    tokens = tokens_of(drawn)
    for row, new in enumerate(tokens):
        state.commit(row, new, num_drafts + 1)
    return Round(tokens=tokens, num_drafts=num_drafts, logits_BTV=drawn.logits_BTV)


def drafts_to_verify(drafter: DraftModel | None, num_verify: int | None) -> int:
    """Q: of the block's drafts, as many as asked for, or all."""
    available = drafter.config.num_drafts if drafter is not None else 0
    return available if num_verify is None else min(num_verify, available)


def tokens_of(drawn: Drawn) -> list[list[int]]:
    """The tokens that count of each row. Waits for the device."""
    rows: list[list[int]] = drawn.drawn_BX.tolist()
    return [tokens[: accepted + 1] for accepted, *tokens in rows]


@torch.inference_mode()
def advance(
    target: Target,
    drafter: DraftModel | None,
    state: DecodeState,
    sampling: RowSampling,
    shape: RoundShape,
    *,
    rule: AcceptRule | None = None,
    settle: bool = True,
) -> Drawn:
    """The round itself: draft, verify, accept, commit, all on the device.

    rule: in place of `accept`, for benchmarks. settle: settle_ties, where the target computes in float32; nothing else
    here waits for the device.
    """
    num_rows, num_drafts = shape.num_rows, shape.num_drafts
    length_B, anchor_B, drawn_B = (values[:num_rows] for values in (state.length_B, state.anchor_B, state.drawn_B))
    offset_T = torch.arange(num_drafts + 1, device=target.device)
    position_BT = drawn_B[:, None] + offset_T
    noise_BTV = target_noise(sampling, position_BT, target.config.vocab_size)

    # Draft: from the context of positions before the anchor, with the noise of the positions that the drafts are for.
    drafts_BQ, draft_logits_BQV = anchor_B[:, None][:, :0], None
    if drafter is not None and num_drafts:
        noise_BQV = draft_noise(sampling, position_BT[:, :-1], None if noise_BTV is None else noise_BTV[:, :-1])
        drafts_BQ, draft_logits_BQV = draft_block(drafter, state, sampling, noise_BQV, shape)

    # Verify: the target's own token behind the anchor and behind every draft, as if all drafts before it were right.
    hidden_BTD, features_BTC = target.forward(
        torch.cat((anchor_B[:, None], drafts_BQ), dim=1),
        length_B,
        state.target_cache.view(num_rows),
        drafter.config.target_layer_ids if drafter is not None else (),
        num_keys=shape.num_keys,
    )
    logits_BTV = target.logits(hidden_BTD)
    processed_BTV = processed_logits(
        adjusted_logits(logits_BTV, drafts_BQ, sampling.adjustment, state.counts), sampling
    )
    if settle and target.dtype == torch.float32:
        processed_BTV = settle_ties(target, state, sampling, logits_BTV, processed_BTV, noise_BTV, drafts_BQ)

    # Accept: drafts count while the row's rule has them; one more token comes on top and is the new anchor.
    decide = accept if rule is None else rule
    accepted_B, tokens_BT = decide(sampling, drafts_BQ, draft_logits_BQV, processed_BTV, noise_BTV, position_BT)

    # Commit: what rejected drafts left in the caches lies behind the new length: masked, then overwritten.
    if drafter is not None:
        assert state.draft_cache is not None
        assert features_BTC is not None
        drafter.extend_context(state.draft_cache.view(num_rows), features_BTC, length_B[:, None] + offset_T)
    anchor_B.copy_(tokens_BT.gather(1, accepted_B[:, None])[:, 0])
    if sampling.adjustment is not None and state.counts is not None:
        state.counts.add(sampling.adjustment, tokens_BT, accepted_B + 1)
    moved_B = (accepted_B + 1) * state.active_B[:num_rows]
    length_B += moved_B
    drawn_B += moved_B
    return Drawn(drawn_BX=torch.cat((accepted_B[:, None], tokens_BT), dim=1), logits_BTV=logits_BTV)


def settle_ties(
    target: Target,
    state: DecodeState,
    sampling: RowSampling,
    logits_BTV: Tensor,
    processed_BTV: Tensor,
    noise_BTV: Tensor | None,
    drafts_BQ: Tensor,
) -> Tensor:
    """The processed logits, those of near-ties computed afresh from the row's text alone. logits: changed in place.

    So rounding, which depends on how many drafts and rows shared a pass, does not choose between two tokens: plain
    decoding and any speculation settle the same tie by the same numbers. Only slots that may count are looked at: those
    whose drafts are right so far.
    """
    settled: set[tuple[int, int]] = set()
    offset_T = torch.arange(logits_BTV.shape[1], device=logits_BTV.device)
    while True:
        scores_BTV = processed_BTV if noise_BTV is None else processed_BTV + noise_BTV
        best_BT, tokens_BT = scores_BTV.max(-1)
        # Temperature divides the logits, and their rounding errors with them.
        floor_BT = best_BT - TIE / sampling.temperature_B[:, None]
        tied_BT = (scores_BTV > floor_BT[..., None]).sum(-1) > 1
        tied_BT &= offset_T <= count_accepted(drafts_BQ, tokens_BT)[:, None]
        open_ties = [(row, slot) for row, slot in tied_BT.nonzero().tolist() if (row, slot) not in settled]
        if not open_ties:
            return processed_BTV
        for row, slot in open_ties:
            text = state.texts[row] + drafts_BQ[row, :slot].tolist()
            logits_BTV[row, slot] = text_logits(target, text)
        settled.update(open_ties)
        processed_BTV = processed_logits(
            adjusted_logits(logits_BTV, drafts_BQ, sampling.adjustment, state.counts), sampling
        )


def draft_block(
    drafter: DraftModel,
    state: DecodeState,
    sampling: RowSampling,
    noise_BQV: Tensor | None,
    shape: RoundShape,
) -> tuple[Tensor, Tensor | None]:
    """The first Q tokens of a block for each row, [B, Q], and the processed logits that they came from.

    The backbone gives the base logits of all at once. The first p drafts are drawn from those alone, each later one
    after the head has read all tokens before it and corrected its logits. The logits are returned if rejection sampling
    needs them.
    """
    assert state.draft_cache is not None
    num_rows, num_drafts = shape.num_rows, shape.num_drafts
    num_context = shape.num_keys - num_drafts - 1
    anchor_B = state.anchor_B[:num_rows]
    cache = state.draft_cache.view(num_rows)
    z_BQD = drafter.draft_hidden(cache, anchor_B, state.length_B[:num_rows], num_context)[:, :num_drafts]
    base_BQV = drafter.base_logits(z_BQD)
    head = drafter.head
    if isinstance(head, FusedHead) and head.rolls_out(sampling):
        return head.rollout(anchor_B, base_BQV, head.hidden_part(z_BQD), sampling, noise_BQV), None
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
