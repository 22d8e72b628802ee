"""A tiny drafter, rows that it can learn, and their reader: what tests of the training loop share."""

from collections.abc import Iterator
from typing import Any

import torch

from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from pipelines.batches import Batch
from pipelines.train_config import TrainConfig
from pipelines.train_loop import Progress

VOCAB, HIDDEN = 61, 24


def drafter(**changes) -> Drafter:
    torch.manual_seed(3)
    config = DrafterConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=12, num_target_layers=4, target_layer_ids=(1, 2), mask_token_id=60,
        block_size=4, emb_dim=8, gru_hidden_dim=16, dtype="float32", **changes,
    )  # fmt: skip
    return Drafter(config, torch.randn(VOCAB, HIDDEN) * 0.3, torch.randn(VOCAB, HIDDEN) * 0.3)


def dataset(count: int) -> list[Batch]:
    """Rows of different lengths whose features foretell the next tokens; one batch of one row each."""
    generator = torch.Generator().manual_seed(11)
    table = torch.randn(VOCAB, 2 * HIDDEN, generator=generator)
    rows = []
    for index in range(count):
        length = 14 + index % 5
        start = int(torch.randint(0, 50, (1,), generator=generator))
        ids = torch.tensor([(start + 3 * i) % 59 for i in range(length)])
        mask = torch.ones(length, dtype=torch.uint8)
        mask[: 2 + index % 3] = 0
        row = {"input_ids_T": ids, "loss_mask_T": mask, "features_TC": table[ids]}
        rows.append(Batch(sample_ids=[f"row-{index}"], lengths=[length], **row))
    return rows


def collate(rows: list[Batch]) -> Batch:
    names = ("input_ids_T", "loss_mask_T", "features_TC")
    joined = {name: torch.cat([getattr(row, name) for row in rows]) for name in names}
    ids, lengths = ([each for row in rows for each in getattr(row, name)] for name in ("sample_ids", "lengths"))
    return Batch(sample_ids=ids, lengths=lengths, **joined)


def source(rows: list[Batch], batch_size: int, rank: int = 0, world: int = 1):
    """batches_of for rows dealt out in blocks of `batch_size`, in order, like the deterministic reader of the cache."""

    def batches_of(epoch: int, skip: frozenset[str]) -> Iterator[Batch]:
        first = epoch % max(1, len(rows))
        shifted = rows[first:] + rows[:first]
        left = [row for row in shifted if row.sample_ids[0] not in skip]
        for number, start in enumerate(range(0, len(left), batch_size)):
            if number % world == rank:
                yield collate(left[start : start + batch_size])

    return batches_of


def config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {"batch_size": 2, "num_anchors": 5, "learning_rate": 5e-3, "precision": "float32"}
    values |= {"use_gpu": False, "log_every": 1, "checkpoint_every": 1000}
    return TrainConfig(**(values | changes))


def curve(progress: Progress, key: str = "final_loss") -> list[float]:
    return [line[key] for line in progress.history]
