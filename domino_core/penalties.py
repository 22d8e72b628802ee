"""Bias and penalties, exact at every slot of a block: the change that a request asks for in the target's raw logits.

A penalty depends on the tokens before a position, so each slot of a block has its own: `Walk` goes along the block and
counts every token before it changes the logits behind it. Target and drafter walk alike, each over its own logits.

B rows · X rows that ask for penalties · Y biased (row, token) pairs · T tokens of a pass · Q drafts · V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_core.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """What the rows of a batch ask for, as tensors."""

    bias_row_Y: Tensor
    bias_token_Y: Tensor
    bias_Y: Tensor
    row_X: Tensor
    repetition_X11: Tensor
    frequency_X11: Tensor
    presence_X11: Tensor

    @classmethod
    def stack(cls, rows: Sequence[SamplingParams], device: torch.device | str = "cpu") -> "Adjustment | None":
        """None if no row asks for anything."""
        bias = [(row, token, value) for row, params in enumerate(rows) for token, value in params.logit_bias]
        penalised = [(row, params) for row, params in enumerate(rows) if params.penalised]
        if not bias and not penalised:
            return None

        def per_row(name: str) -> Tensor:
            values = [float(getattr(params, name)) for _, params in penalised]
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]

        return cls(
            bias_row_Y=torch.tensor([row for row, _, _ in bias], dtype=torch.int64, device=device),
            bias_token_Y=torch.tensor([token for _, token, _ in bias], dtype=torch.int64, device=device),
            bias_Y=torch.tensor([value for _, _, value in bias], dtype=torch.float32, device=device),
            row_X=torch.tensor([row for row, _ in penalised], dtype=torch.int64, device=device),
            repetition_X11=per_row("repetition_penalty"),
            frequency_X11=per_row("frequency_penalty"),
            presence_X11=per_row("presence_penalty"),
        )


@dataclass(kw_only=True)
class TokenCounts:
    """What penalties read of the rows of a DecodeState: how often each token was emitted, and which the prompt has.

    Kept for penalised rows alone: a row's entries mean nothing before `start`.
    """

    output_BV: Tensor
    prompt_BV: Tensor

    @classmethod
    def allocate(cls, rows: int, vocabulary: int, device: torch.device) -> "TokenCounts":
        with torch.inference_mode(False):  # a tensor made inside could not be changed outside, as cancelling does
            return cls(
                output_BV=torch.zeros(rows, vocabulary, dtype=torch.int32, device=device),
                prompt_BV=torch.zeros(rows, vocabulary, dtype=torch.bool, device=device),
            )

    def start(self, row: int, prompt_P: Tensor) -> None:
        """A row begins: nothing said yet, and this prompt."""
        self.output_BV[row] = 0
        self.prompt_BV[row] = False
        self.prompt_BV[row, prompt_P] = True

    def add(self, adjustment: Adjustment, tokens_BT: Tensor, count_B: Tensor) -> None:
        """Count the first count[b] of each penalised row's tokens as emitted."""
        row_X = adjustment.row_X
        tokens_XT = tokens_BT[row_X]
        kept_XT = torch.arange(tokens_XT.shape[1], device=row_X.device) < count_B[row_X, None]
        self.output_BV.index_put_((row_X[:, None].expand_as(tokens_XT), tokens_XT), kept_XT.int(), accumulate=True)

    def move_row(self, src: int, dst: int) -> None:
        self.output_BV[dst] = self.output_BV[src]
        self.prompt_BV[dst] = self.prompt_BV[src]

    def row(self, row: int) -> "TokenCounts":
        return TokenCounts(output_BV=self.output_BV[row : row + 1], prompt_BV=self.prompt_BV[row : row + 1])


class Walk:
    """From the last emitted token of each row along its block. counts: of the batch's rows; needed if one is penalised.

    The state's counts stay as they are: what was drafted is not yet said.
    """

    def __init__(self, adjustment: Adjustment, counts: TokenCounts | None) -> None:
        self.adjustment = adjustment
        if len(adjustment.row_X):
            assert counts is not None, "penalised rows need their token counts"
            self.output_XV = counts.output_BV[adjustment.row_X]
            self.prompt_XV = counts.prompt_BV[adjustment.row_X]

    def read(self, token_B: Tensor) -> None:
        """Count one more token of every row."""
        if len(self.adjustment.row_X):
            token_X1 = token_B[self.adjustment.row_X, None]
            self.output_XV.scatter_add_(1, token_X1, torch.ones_like(token_X1, dtype=torch.int32))

    def apply(self, logits_BTV: Tensor) -> Tensor:
        """The logits, changed, in float32, for positions that all follow the tokens read so far."""
        asked = self.adjustment
        changed_BTV = logits_BTV.to(torch.float32, copy=True)
        if len(asked.bias_Y):
            changed_BTV[asked.bias_row_Y, :, asked.bias_token_Y] += asked.bias_Y[:, None]
        if len(asked.row_X):
            x_XTV = changed_BTV[asked.row_X]
            output_X1V = self.output_XV[:, None]
            said_X1V = output_X1V > 0
            repeated_XTV = torch.where(x_XTV > 0, x_XTV / asked.repetition_X11, x_XTV * asked.repetition_X11)
            x_XTV = torch.where(said_X1V | self.prompt_XV[:, None], repeated_XTV, x_XTV)
            x_XTV = x_XTV - asked.frequency_X11 * output_X1V - asked.presence_X11 * said_X1V
            changed_BTV[asked.row_X] = x_XTV
        return changed_BTV


def adjusted_logits(
    logits_BTV: Tensor, drafts_BQ: Tensor, adjustment: Adjustment | None, counts: TokenCounts | None
) -> Tensor:
    """The target's logits of a block as its rows asked for them: slot t follows the first t drafts. T = Q+1."""
    if adjustment is None:
        return logits_BTV
    walk = Walk(adjustment, counts)
    slots = [walk.apply(logits_BTV[:, :1])]
    for index, token_B in enumerate(drafts_BQ.unbind(1), start=1):
        walk.read(token_B)
        slots.append(walk.apply(logits_BTV[:, index : index + 1]))
    return torch.cat(slots, dim=1)
