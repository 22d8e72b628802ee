"""Batches whose features are computed where they are used: the frozen target runs on them in the training step.

B rows · S tokens of the longest row, padded · T tokens of all rows, end to end · C feature width · D hidden ·
J likely tokens · V vocabulary
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from domino_core.fused import LONG_PASS
from domino_core.target_model import Target
from pipelines.batches import Batch
from pipelines.experiment_data import Conversation

LOGIT_TOKENS = 4096  # whose logits exist at once
ROUND_TO = 64  # padded lengths, so that few shapes come up


class TargetBatches:
    """`batches_of` of train_loop.train: an epoch's rows in an order of (seed, epoch), with the target's features.

    soft_labels: J, also the target's J most likely tokens in the place of every supervised one, at temperature 1,
    their shares made to sum to one; 0: none.
    """

    def __init__(
        self,
        target: Target,
        rows: Sequence[Conversation],
        tap_layers: tuple[int, ...],
        *,
        batch_size: int,
        seed: int,
        soft_labels: int = 0,
    ) -> None:
        self.target, self.rows, self.tap_layers = target, rows, tap_layers
        self.batch_size, self.seed, self.soft_labels = batch_size, seed, soft_labels
        longest = max(len(row.prompt_ids) + len(row.answer_ids) for row in rows)
        self.cache = target.new_cache(batch_size, _padded(longest))

    def __call__(self, epoch: int, skip: frozenset[str]) -> Iterator[Batch]:
        order = list(range(len(self.rows)))
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        wanted = [index for index in order if str(index) not in skip]
        for start in range(0, len(wanted), self.batch_size):
            yield self.batch(wanted[start : start + self.batch_size])

    # Not inference_mode, whose tensors no gradient may be computed from.
    @torch.no_grad()
    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows of these numbers. Tokens and mask stay on the host, where anchors are drawn."""
        rows, device = [self.rows[index] for index in indices], self.target.device
        lengths = [len(row.prompt_ids) + len(row.answer_ids) for row in rows]
        ids_T = torch.tensor([token for row in rows for token in (*row.prompt_ids, *row.answer_ids)])
        mask_T = torch.cat([torch.arange(n) >= len(row.prompt_ids) for n, row in zip(lengths, rows, strict=True)])
        length = _padded(max(lengths))
        real_BS = torch.arange(length) < torch.tensor(lengths)[:, None]
        ids_BS = torch.zeros(real_BS.shape, dtype=torch.long).masked_scatter_(real_BS, ids_T)
        place_T = real_BS.flatten().nonzero()[:, 0].to(device)
        hidden_BSD, features_BSC = self.target.forward(
            ids_BS.to(device),
            torch.zeros(len(rows), dtype=torch.long, device=device),
            self.cache.view(len(rows)),
            self.tap_layers,
            num_keys=length,
        )
        assert features_BSC is not None
        likely_TJ = shares_TJ = None
        if self.soft_labels:
            likely_TJ, shares_TJ = self._likely(hidden_BSD.flatten(0, 1)[place_T], ids_T.to(device), mask_T)
        return Batch(
            sample_ids=[str(index) for index in indices],
            lengths=lengths,
            input_ids_T=ids_T,
            loss_mask_T=mask_T,
            features_TC=features_BSC.flatten(0, 1)[place_T],
            likely_TJ=likely_TJ,
            shares_TJ=shares_TJ,
        )

    def _likely(self, hidden_TD: Tensor, ids_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, shares) [T, J]. What is not supervised is its own only label, which is never looked at."""
        likely_TJ = ids_T[:, None].repeat(1, self.soft_labels)
        shares_TJ = torch.zeros(likely_TJ.shape, device=ids_T.device)
        shares_TJ[:, 0] = 1.0
        # A prompt has at least one token, so what predicts a supervised one is in the same row.
        for part in mask_T.nonzero()[:, 0].to(ids_T.device).split(LOGIT_TOKENS):
            top = self.target.logits(hidden_TD[part - 1]).topk(self.soft_labels)
            likely_TJ[part], shares_TJ[part] = top.indices, top.values.float().softmax(-1)
        return likely_TJ, shares_TJ


def _padded(length: int) -> int:
    """From LONG_PASS on, passes use kernels that are made for many tokens."""
    return max(LONG_PASS, -(-length // ROUND_TO) * ROUND_TO)
