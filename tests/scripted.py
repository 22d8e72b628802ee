"""A drafter with a script, for decode and engine tests: it drafts what the target will say and errs where it should.

Random drafters are never accepted, so they show little. This one has the interface of domino_core.drafter.Drafter,
keeps the features it is given in a real KVCache, and checks before each block that they are those of the text so far.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from domino_core.config import DrafterConfig
from domino_core.layers import KVCache
from domino_core.target_model import Target


class ScriptedDrafter:
    """texts: (prompt, its output) per request; the outputs must reach a block beyond what will be asked for.

    error_at(text, block) says which draft of a text's n-th block is wrong (num_drafts: none); later ones are right.
    """

    head = None
    dtype = torch.float32

    def __init__(
        self,
        target: Target,
        texts: Sequence[tuple[Sequence[int], Sequence[int]]],
        error_at: Callable[[int, int], int],
        *,
        num_drafts: int = 5,
        target_layer_ids: tuple[int, ...] = (0, 2),
    ) -> None:
        shape = target.config
        self.config = DrafterConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=2,
            num_target_layers=shape.num_hidden_layers,
            target_layer_ids=target_layer_ids,
            mask_token_id=0,
            block_size=num_drafts,
            head=False,
            shift_label=True,
        )
        self.prompt_lengths = [len(prompt) for prompt, _ in texts]
        self.texts = [[*prompt, *output] for prompt, output in texts]
        self.features = [_features(target, text, target_layer_ids) for text in self.texts]
        self.error_at = error_at
        self.blocks = [0] * len(texts)
        self.errors: list[list[int]] = [[] for _ in texts]

    def new_cache(self, rows: int, length: int) -> KVCache:
        slack = self.config.block_size + 1
        return KVCache.allocate(1, rows, length + slack, 1, self.config.feature_width, dtype=torch.float32)

    def extend_context(self, cache: KVCache, features_BTC: Tensor, positions_BT: Tensor) -> None:
        cache.write(0, features_BTC[:, :, None], features_BTC[:, :, None], positions_BT)

    def draft_hidden(self, cache: KVCache, anchor_B: Tensor, start_B: Tensor, num_context: int | None = None) -> Tensor:
        """The drafted ids themselves, [B, Q, 1]."""
        assert num_context in (None, start_B.max())
        rows = [
            self._drafts(cache.k[0, row, :start, 0], anchor, start)
            for row, (anchor, start) in enumerate(zip(anchor_B.tolist(), start_B.tolist(), strict=True))
        ]
        return torch.tensor(rows)[..., None]

    def base_logits(self, z: Tensor) -> Tensor:
        return 1e4 * torch.nn.functional.one_hot(z[..., 0], self.config.vocab_size).float()

    def embed(self, ids: Tensor) -> Tensor:
        raise AssertionError("only a head reads tokens")

    def _drafts(self, context_SC: Tensor, anchor: int, start: int) -> list[int]:
        found = [
            index
            for index, (text, features_SC) in enumerate(zip(self.texts, self.features, strict=True))
            if len(text) > start
            and text[start] == anchor
            and torch.allclose(context_SC, features_SC[:start], rtol=1e-3, atol=1e-3)
        ]
        assert len(found) == 1, f"the context of {start} tokens before {anchor} is that of texts {found}"
        index = found[0]
        drafts = self.texts[index][start + 1 : start + 1 + self.config.num_drafts]
        assert len(drafts) == self.config.num_drafts, "the script is too short"
        error = self.error_at(index, self.blocks[index])
        self.blocks[index] += 1
        self.errors[index].append(error)
        if error < len(drafts):
            drafts[error] = (drafts[error] + 1) % self.config.vocab_size
        return drafts


@torch.inference_mode()
def _features(target: Target, text: Sequence[int], layer_ids: tuple[int, ...]) -> Tensor:
    cache = target.new_cache(1, len(text))
    _, features_BSC = target.forward(torch.tensor([text]), torch.zeros(1, dtype=torch.int64), cache, layer_ids)
    assert features_BSC is not None
    return features_BSC[0]
