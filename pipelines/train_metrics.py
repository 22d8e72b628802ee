"""What a training run shows of itself: losses, accuracies, accepted lengths, throughput and waiting, over all ranks."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import fields

import torch
import torch.distributed as dist

from domino_core.losses import BlockLosses


def all_sum(values: list[float], device: torch.device) -> list[float]:
    """Sums over the ranks, in float64."""
    if not dist.is_initialized():
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


class Window:
    """Sums of losses, counts and seconds since the last log line."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.losses: BlockLosses | None = None
        self.rows = self.tokens = 0
        self.waited = 0.0
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent inside counts as waiting for data."""
        since = time.perf_counter()
        yield
        self.waited += time.perf_counter() - since

    def add(self, step_losses: list[BlockLosses], rows: int, tokens: int) -> None:
        """Add one optimiser step; nothing is read back from the device here."""
        for losses in step_losses:
            self.losses = losses if self.losses is None else self.losses + losses
        self.rows += rows
        self.tokens += tokens

    def reduce(self) -> dict[str, float]:
        """Means over all ranks. Throughput is of all ranks together; `demand` is what training alone could take."""
        elapsed = time.perf_counter() - self.started
        names = [field.name for field in fields(BlockLosses)]
        local = [0.0 if self.losses is None else float(getattr(self.losses, name)) for name in names]
        world = dist.get_world_size() if dist.is_initialized() else 1
        *sums, rows, tokens, waited = all_sum([*local, self.rows, self.tokens, self.waited], self.device)
        total = dict(zip(names, sums, strict=True))
        weight, labels, blocks = (max(total[name], 1e-6) for name in ("weight_sum", "num_labels", "num_blocks"))
        waited = min(waited / world, elapsed)
        return {
            "final_loss": total["final_sum"] / weight,
            "base_loss": total["base_sum"] / weight,
            "final_accuracy": total["correct_final_sum"] / labels,
            "base_accuracy": total["correct_base_sum"] / labels,
            "final_accepted": total["accepted_final_sum"] / blocks,
            "base_accepted": total["accepted_base_sum"] / blocks,
            "samples_per_s": rows / elapsed,
            "tokens_per_s": tokens / elapsed,
            "demand_samples_per_s": rows / max(elapsed - waited, 1e-6),
            "demand_tokens_per_s": tokens / max(elapsed - waited, 1e-6),
            "window_s": elapsed,
            "data_wait_s": waited,
            "data_wait_share": waited / elapsed,
        }
