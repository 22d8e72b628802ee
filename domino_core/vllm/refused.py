"""What a Domino drafter is loaded as in a version of vLLM that is not known: an error that says which are."""

from typing import Any

from torch import Tensor, nn

from domino_core.vllm.plugin import version_problem


class Refused(nn.Module):
    """Looks like a text model as far as vLLM asks before it makes one. ValueError when it does.

    So no method is ever called: they are there to be found.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        raise ValueError(version_problem())

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError
