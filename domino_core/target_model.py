"""The forward pass of a frozen target with taps on its layers: Qwen3 and Llama architectures.

Written out, and not taken from `transformers` (which the tests hold it equal to), so that decoding can use static
caches, views and fused projections. Loading is in target.py.

B rows · T tokens of this pass · X = B·T · M cache length · D hidden · C width of the tapped features · V vocabulary ·
H, J query and key/value heads · d head width · I width of the MLP · N = H + 2J
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_core.fused import (
    Block,
    Norm,
    Stack,
    matrix,
    output_matrix,
    product,
    rotary_frequency,
    rotary_table,
    run_blocks,
)
from domino_core.layers import KVCache


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """The frequency rescaling of Llama 3.1 and later (rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """What of a target's config.json decides its computation, and where its texts end."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_llama3: Llama3Rope | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each head's query and key."""
        return self.architecture == "Qwen3ForCausalLM"


class Target:
    """The frozen model. Its caches are static; how much of a row counts is the caller's `start`, see layers.KVCache."""

    def __init__(
        self, config: TargetConfig, read: Callable[..., Tensor], *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """`read(name, *shape)` gives the tensors under their published names."""
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        hidden, vocabulary = config.hidden_size, config.vocab_size
        self.embed_VD = self._place(read("model.embed_tokens.weight", vocabulary, hidden))
        self.stack = Stack(
            blocks=[self._read_block(read, f"model.layers.{index}.") for index in range(config.num_hidden_layers)],
            norm=self._norm(read("model.norm.weight", hidden)),
        )
        tied = config.tie_word_embeddings
        self.lm_head_VD = self.embed_VD if tied else self._place(read("lm_head.weight", vocabulary, hidden))
        self.output_DV = output_matrix(self.lm_head_VD)
        self.rotary = self._rotary(0)  # of the longest cache so far

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)

    def _norm(self, weight: Tensor) -> Norm:
        return Norm(self._place(weight), self.config.rms_norm_eps)

    def _read_block(self, read: Callable[..., Tensor], prefix: str) -> Block:
        config = self.config
        D, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
        H, J = config.num_attention_heads, config.num_key_value_heads

        def place(name: str, *shape: int) -> Tensor:
            return self._place(read(f"{prefix}{name}.weight", *shape))

        qk_norm = None
        if config.qk_norm:
            q_norm, k_norm = place("self_attn.q_norm", d), place("self_attn.k_norm", d)
            qk_norm = self._norm(torch.cat((q_norm.expand(H, d), k_norm.expand(J, d))))
        qkv = [place(f"self_attn.{name}_proj", heads * d, D) for name, heads in (("q", H), ("k", J), ("v", J))]
        return Block(
            input_norm=self._norm(place("input_layernorm", D)),
            qkv=matrix(*qkv),
            qk_norm=qk_norm,
            out=matrix(place("self_attn.o_proj", D, H * d)),
            mlp_norm=self._norm(place("post_attention_layernorm", D)),
            gate_up=matrix(place("mlp.gate_proj", inner, D), place("mlp.up_proj", inner, D)),
            down=matrix(place("mlp.down_proj", D, inner)),
        )

    def new_cache(self, rows: int, length: int) -> KVCache:
        """An empty cache for `rows` texts of up to `length` tokens."""
        config = self.config
        if length > self.rotary.shape[1]:
            self.rotary = self._rotary(length)
        shape = (config.num_hidden_layers, rows, length, config.num_key_value_heads, config.head_dim)
        return replace(KVCache.allocate(*shape, dtype=self.dtype, device=self.device), rotary=self.rotary)

    def _rotary(self, length: int) -> Tensor:
        """In the model's type, as transformers has it."""
        config = self.config
        frequency = rotary_frequency(config.head_dim, config.rope_theta)
        if config.rope_llama3 is not None:
            frequency = _llama3_frequency(frequency, config.rope_llama3)
        return rotary_table(frequency, length, self.dtype, self.device)

    def forward(
        self,
        ids_BT: Tensor,
        start_B: Tensor,
        cache: KVCache,
        tap_layers: Sequence[int] = (),
        num_keys: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run T new tokens per row behind the first `start` cached ones, which stay; their keys and values are added.

        num_keys ≥ max(start) + T, for callers that know it: reading it from the device stalls a GPU. Returns the
        final-normed hidden states [B, T, D] and the features [B, T, C]: the residual stream after each of `tap_layers`,
        ascending (transformers' hidden_states[layer + 1]), or None without taps.
        """
        B, T = ids_BT.shape
        num_keys = int(start_B.max()) + T if num_keys is None else num_keys
        x_XD = F.embedding(ids_BT.flatten(), self.embed_VD)
        hidden_XD, taps = run_blocks(self.stack, x_XD, cache, start_B, num_keys, causal=True, tap_layers=tap_layers)
        features_BTC = torch.cat(taps, -1).view(B, T, -1) if taps else None
        return hidden_XD.view(B, T, -1), features_BTC

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] → [..., V], in the model's type."""
        return product(hidden, self.output_DV)


def _llama3_frequency(frequency: Tensor, rope: Llama3Rope) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
    share_kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - share_kept) * frequency / rope.factor + share_kept * frequency


def random_target(
    config: TargetConfig, *, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Target:
    """A target of any shape without a checkpoint, for measuring speed: normal weights, unit norms."""
    generator = torch.Generator(device).manual_seed(seed)

    def read(name: str, *shape: int) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device)
        scale = 1.0 if name.startswith("model.embed") else shape[-1] ** -0.5
        return torch.randn(shape, generator=generator, device=device, dtype=dtype) * scale

    return Target(config, read, device=device, dtype=dtype)
