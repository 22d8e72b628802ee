"""The rows that decode together, and how a prompt becomes one of them.

Between rounds a row has emitted tokens 0..drawn-1. The last of them, the anchor, is in no cache yet: its position in
the text is `length`, the number of entries that count in the row's target cache and draft context alike.

B rows · T tokens of a pass · D hidden · C feature width · V vocabulary
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.fused import LONG_PASS, on_card
from domino_core.fused_drafter import FusedDrafter
from domino_core.layers import KVCache
from domino_core.penalties import TokenCounts, adjusted_logits
from domino_core.sampling import RowSampling, draw, processed_logits, target_noise
from domino_core.target_model import Target

DraftModel = Drafter | FusedDrafter

# Prompt tokens per pass; bounds the memory of the mask and of the features on the way to the drafter.
PREFILL_CHUNK = 512

# Lengths of passes over prompts on a card, so that a few CUDA graphs serve them all. A chunk is filled up to the next
# one: never from below LONG_PASS to above it, where sums may take another order.
PASS_LENGTHS = (16, 32, 64, LONG_PASS - 1, *range(LONG_PASS, PREFILL_CHUNK + 1, 64))


def overrun(drafter: DrafterConfig | None) -> int:
    """Tokens that rounds may write behind a text's end: a block, and one more where the host reads a round behind."""
    return 2 * (drafter.num_drafts + 1 if drafter is not None else 1)


@dataclass(kw_only=True)
class DecodeState:
    """Slots for rows that decode together. active: 1 for rows whose lengths a round moves on, 0 for empty slots.

    `lengths` is the host's own account: never less than length_B, and more only while a round's tokens are not yet
    read. texts: prompt and output of each row, at most max_length. counts: None until a row asks for penalties.
    """

    target_cache: KVCache
    draft_cache: KVCache | None
    length_B: Tensor
    anchor_B: Tensor
    drawn_B: Tensor
    active_B: Tensor
    lengths: list[int]
    texts: list[list[int]]
    max_length: int
    counts: TokenCounts | None = None

    @classmethod
    def allocate(cls, target: Target, drafter: DraftModel | None, rows: int, length: int) -> "DecodeState":
        """Room for texts of up to `length` tokens, and for what rounds write beyond it before the text is cut."""
        room = length + overrun(drafter.config if drafter is not None else None)
        zeros_B = torch.zeros(rows, dtype=torch.int64, device=target.device)
        return cls(
            target_cache=target.new_cache(rows, room),
            draft_cache=drafter.new_cache(rows, room) if drafter is not None else None,
            length_B=zeros_B,
            anchor_B=zeros_B.clone(),
            drawn_B=zeros_B.clone(),
            active_B=torch.ones_like(zeros_B),
            lengths=[0] * rows,
            texts=[[] for _ in range(rows)],
            max_length=length,
        )

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """A round of the first rows is on its way, that may give each up to num_tokens tokens."""
        for row in range(num_rows):
            self.lengths[row] += num_tokens

    def commit(self, row: int, tokens: Sequence[int], reserved: int) -> None:
        """A round gave the row these tokens, where `reserved` were reserved."""
        self.lengths[row] += len(tokens) - reserved
        self.texts[row] += tokens

    def move_row(self, src: int, dst: int) -> None:
        """Copy row src over row dst."""
        for cache in (self.target_cache, self.draft_cache):
            if cache is not None:
                cache.move_row(src, dst, self.lengths[src])
        if self.counts is not None:
            self.counts.move_row(src, dst)
        for values_B in (self.length_B, self.anchor_B, self.drawn_B):
            values_B[dst] = values_B[src]
        self.lengths[dst] = self.lengths[src]
        self.texts[dst] = list(self.texts[src])


@dataclass(frozen=True, kw_only=True)
class PromptChunk:
    """A pass over some of a prompt's tokens, and what fills them up, whose entries lie behind the text's own.

    start [1]: position of the first; last [1]: index of the last that is the prompt's. num_keys: start + T, or on a
    card more.
    """

    ids_1T: Tensor
    start_1: Tensor
    last_1: Tensor
    num_keys: int

    @classmethod
    def of(cls, inputs_X: Tensor, num_keys: int) -> "PromptChunk":
        """Views of one tensor [T + 2]: ids, start, last."""
        return cls(ids_1T=inputs_X[None, :-2], start_1=inputs_X[-2:-1], last_1=inputs_X[-1:], num_keys=num_keys)


TakeIn = Callable[[list[int], int], Tensor]
"""(inputs of a PromptChunk, num_keys) -> hidden state [1, D] of the last token, once a row's caches have the rest."""


def take_in(target: Target, drafter: DraftModel | None, state: DecodeState, row: int, chunk: PromptChunk) -> Tensor:
    """Run a chunk into a row's caches: the hidden state [1, D] of its last token.

    The draft context gets the features of every prompt token: a drafter that misses some silently accepts less.
    """
    taps = drafter.config.target_layer_ids if drafter is not None else ()
    hidden_1TD, features_1TC = target.forward(
        chunk.ids_1T, chunk.start_1, state.target_cache.row(row), taps, num_keys=chunk.num_keys
    )
    if drafter is not None:
        assert state.draft_cache is not None
        assert features_1TC is not None
        positions_1T = chunk.start_1[:, None] + torch.arange(chunk.ids_1T.shape[1], device=target.device)
        drafter.extend_context(state.draft_cache.row(row), features_1TC, positions_1T)
    return hidden_1TD.index_select(1, chunk.last_1)[:, 0]


def pass_length(tokens: int, begin: int, max_length: int) -> int:
    """How long a pass on a card is that takes in so many tokens. Not filled up where a text may not reach."""
    length = next((length for length in PASS_LENGTHS if length >= tokens), tokens)
    return length if begin + length <= max_length else tokens


@torch.inference_mode()
def prefill_chunk(
    target: Target,
    drafter: DraftModel | None,
    state: DecodeState,
    row: int,
    prompt_ids: Sequence[int],
    begin: int,
    by_graph: TakeIn | None = None,
) -> tuple[int, Tensor]:
    """Take a prompt's tokens from `begin` on into a row's caches, PREFILL_CHUNK at most: (the end, its hidden [1, D]).

    Chunks begin at multiples of their size, and how they are filled up depends on the prompt and max_length alone: so
    does what it gives, whenever its chunks were run. by_graph: take_in for this row and passes of PASS_LENGTHS.
    """
    end = min(begin + PREFILL_CHUNK, len(prompt_ids))
    length = end - begin
    if on_card(target.embed_VD):
        length = pass_length(end - begin, begin, state.max_length)
    inputs = [*prompt_ids[begin:end], *[0] * (length - (end - begin)), begin, end - begin - 1]
    if by_graph is not None and length in PASS_LENGTHS:
        hidden_1D = by_graph(inputs, begin + length)
    else:
        chunk = PromptChunk.of(torch.tensor(inputs, device=target.device), begin + length)
        hidden_1D = take_in(target, drafter, state, row, chunk)
    state.lengths[row] = end
    return end, hidden_1D


def prefill_chunks(
    target: Target, drafter: DraftModel | None, state: DecodeState, row: int, prompt_ids: Sequence[int]
) -> Tensor:
    """All of a prompt into a row's caches, chunk after chunk: the hidden state [1, D] of its last token."""
    end, hidden_1D = prefill_chunk(target, drafter, state, row, prompt_ids, 0)
    while end < len(prompt_ids):
        end, hidden_1D = prefill_chunk(target, drafter, state, row, prompt_ids, end)
    return hidden_1D


def draw_first(logits_B1V: Tensor, sampling: RowSampling, counts: TokenCounts | None) -> Tensor:
    """The first token [B, 1] of each row's output."""
    first_B1 = torch.zeros(logits_B1V.shape[:2], dtype=torch.int64, device=logits_B1V.device)
    asked_B1V = adjusted_logits(logits_B1V, first_B1[:, :0], sampling.adjustment, counts)
    noise_B1V = target_noise(sampling, first_B1, logits_B1V.shape[-1])
    return draw(processed_logits(asked_B1V, sampling), noise_B1V)


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
    token_11 = draw_first(logits_11V, sampling, counts)
    if sampling.adjustment is not None and counts is not None:
        counts.add(sampling.adjustment, token_11, torch.ones_like(token_11[0]))
    token = int(token_11)
    state.length_B[row], state.anchor_B[row], state.drawn_B[row] = len(prompt_ids), token, 1
    state.texts[row] = [*prompt_ids, token]
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
    hidden_1D = prefill_chunks(target, drafter, state, row, prompt_ids)
    return first_token(target, state, row, prompt_ids, sampling, hidden_1D)


def text_logits(target: Target, text: Sequence[int]) -> Tensor:
    """The logits [V] behind a text, from a pass over all of it in a cache of its own."""
    scratch = DecodeState.allocate(target, None, 1, len(text))
    hidden_1D = prefill_chunks(target, None, scratch, 0, text)
    return target.logits(hidden_1D[:, None])[0, 0]
