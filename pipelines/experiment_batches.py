"""Batches whose features are computed where they are used, by the frozen target on the same card.

B rows · S tokens of the longest row, padded · T tokens of all rows, end to end · C feature width · D hidden ·
J likely tokens · V vocabulary
"""

from __future__ import annotations

import random
from collections import ChainMap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from domino_core.fused import LONG_PASS
from domino_core.target_model import Target
from pipelines.batches import Batch
from pipelines.experiment_data import Conversation

LOGIT_TOKENS = 4096  # whose logits exist at once
ROUND_TO = 64  # padded lengths, so that few shapes come up


class KnownRows:
    """What the target says of rows, by their numbers, so that it is computed once and not in every epoch of every arm.

    most_bytes: further rows are computed whenever they are wanted; None: all are kept. Of the last layers asked for.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._what: dict[str, object] = {}
        self._rows: dict[str, dict[int, Tensor]] = {}

    def of(self, kind: str, what: object) -> dict[int, Tensor]:
        """The rows known of a kind; of something else of this kind they are forgotten."""
        if self._what.get(kind) != what:
            self.bytes -= sum(each.nbytes for each in self._rows.get(kind, {}).values())
            self._what[kind], self._rows[kind] = what, {}
        return self._rows[kind]

    def keep(self, rows: dict[int, Tensor], found: dict[int, Tensor]) -> None:
        for index, tensor in found.items():
            if self.most_bytes is None or self.bytes + tensor.nbytes <= self.most_bytes:
                rows[index] = tensor
                self.bytes += tensor.nbytes


class TargetBatches:
    """`batches_of` of train_loop.train: an epoch's rows in an order of (seed, epoch), with the target's features.

    soft_labels: J, also the target's J most likely tokens in the place of every supervised one, at temperature 1,
    their shares made to sum to one; 0: none. known: of these rows or more, shared between arms.
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
        known: KnownRows | None = None,
    ) -> None:
        self.target, self.rows, self.tap_layers = target, rows, tap_layers
        self.batch_size, self.seed, self.soft_labels = batch_size, seed, soft_labels
        self.lengths = [len(row.prompt_ids) + len(row.answer_ids) for row in rows]
        self.cache = target.new_cache(batch_size, _padded(max(self.lengths)))
        self.known = known or KnownRows(0)

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
        features = self.known.of("features", self.tap_layers)
        likely, shares = (self.known.of(kind, self.soft_labels) for kind in ("likely", "shares"))
        missing = [index for index in indices if index not in features or (self.soft_labels and index not in likely)]
        found = self._ask(missing) if missing else ({}, {}, {})
        for rows, new in zip((features, likely, shares), found, strict=True):
            self.known.keep(rows, new)
        features, likely, shares = map(ChainMap, (features, likely, shares), found)
        ids_T, mask_T = self._tokens(indices)
        return Batch(
            sample_ids=[str(index) for index in indices],
            lengths=[self.lengths[index] for index in indices],
            input_ids_T=ids_T,
            loss_mask_T=mask_T,
            features_TC=torch.cat([features[index] for index in indices]),
            likely_TJ=torch.cat([likely[index] for index in indices]) if self.soft_labels else None,
            shares_TJ=torch.cat([shares[index] for index in indices]) if self.soft_labels else None,
        )

    def _tokens(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(tokens, which are supervised) of rows, [T]."""
        rows = [self.rows[index] for index in indices]
        ids_T = torch.tensor([token for row in rows for token in (*row.prompt_ids, *row.answer_ids)])
        supervised = [torch.arange(self.lengths[i]) >= len(self.rows[i].prompt_ids) for i in indices]
        return ids_T, torch.cat(supervised)

    def _ask(self, indices: Sequence[int]) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
        """The target's (features, likely tokens, shares) of rows, from one pass."""
        (ids_T, mask_T), device = self._tokens(indices), self.target.device
        lengths = [self.lengths[index] for index in indices]
        length = _padded(max(lengths))
        real_BS = torch.arange(length) < torch.tensor(lengths)[:, None]
        ids_BS = torch.zeros(real_BS.shape, dtype=torch.long).masked_scatter_(real_BS, ids_T)
        place_T = real_BS.flatten().nonzero()[:, 0].to(device)
        hidden_BSD, features_BSC = self.target.forward(
            ids_BS.to(device),
            torch.zeros(len(lengths), dtype=torch.long, device=device),
            self.cache.view(len(lengths)),
            self.tap_layers,
            num_keys=length,
        )
        assert features_BSC is not None

        def by_row(all_T: Tensor) -> dict[int, Tensor]:
            return dict(zip(indices, all_T.split(lengths), strict=True))

        features = by_row(features_BSC.flatten(0, 1)[place_T])
        if not self.soft_labels:
            return features, {}, {}
        likely_TJ, shares_TJ = self._likely(hidden_BSD.flatten(0, 1)[place_T], ids_T.to(device), mask_T)
        return features, by_row(likely_TJ), by_row(shares_TJ)

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
