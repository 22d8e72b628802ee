"""Muon for the matrices of a drafter's layers, AdamW for the rest: as one optimiser, with one learning rate.

Muon (Jordan et al. 2024) steps along the orthogonalised momentum of a matrix, so that all its directions move alike.
Its steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), which makes AdamW's learning rates fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and AdamW side by side over one state, which saves and loads as any optimiser's does."""

    def __init__(
        self, matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], *, lr: float, weight_decay: float
    ) -> None:
        fused = others[0].device.type == "cuda"
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, fused=fused)
        super().__init__(self.muon.param_groups + self.adamw.param_groups, {})
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.muon.step()
        self.adamw.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Both work on this one's groups and state: loading replaces them."""
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self.muon.state = self.adamw.state = self.state


def is_matrix(parameter: nn.Parameter, vocab_size: int) -> bool:
    """Whether Muon is for it: not for vectors, nor for a table whose rows stand for tokens."""
    return parameter.ndim == 2 and vocab_size not in parameter.shape
