"""What a worker of vLLM learns through `worker_extension_cls`: to take over another version's weights while it runs."""

# A worker's attributes are vLLM's: strict checking of this one module would be noise.
# pyright: basic

from __future__ import annotations

from typing import Any

import torch

WORKER_EXTENSION = f"{__name__}.DrafterLoader"


class DrafterLoader:
    """Becomes a base class of vLLM's worker. Called in every worker, between two steps (`collective_rpc`)."""

    def load_drafter(self, folder: str) -> None:
        """Draft with the weights in `folder`, of a drafter with the same configuration, from the next step on."""
        worker: Any = self
        with torch.inference_mode():
            worker.get_draft_model().take_over(folder)
