"""The forward pass of a frozen target with taps on its layers: Qwen3 and Llama architectures.

Written out, and not taken from `transformers` (which the tests hold it equal to), so that decoding can use static
caches, views and fused projections. Loading is in target.py.

B rows · T tokens of this pass · X = B·T · M cache length · D hidden · C width of the tapped features · V vocabulary ·
H, J query and key/value heads · d head width · I width of the MLP · N = H + 2J
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_core.layers import KVCache, attend


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLayer:
    """One pre-norm block. Matrices are [in, out] and fused: qkv [D, (H+2J)·d], gate_up [D, 2I]; qk_norm is [H+J, d]."""

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Where the tokens of one pass lie: what is the same for all layers. Mask: true = visible, None = everything is."""

    cache: KVCache
    positions_BT: Tensor
    cos_X1d: Tensor
    sin_X1d: Tensor
    mask_BTM: Tensor | None
    num_keys: int


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
        self.layers = [self._read_layer(read, f"model.layers.{index}.") for index in range(config.num_hidden_layers)]
        self.norm = self._place(read("model.norm.weight", hidden))
        tied = config.tie_word_embeddings
        self.lm_head_VD = self.embed_VD if tied else self._place(read("lm_head.weight", vocabulary, hidden))
        self.rotary_table = self._rotary_table(0)

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)

    def _matrix(self, *parts_OD: Tensor) -> Tensor:
        """Stack [out, in] matrices and turn them to [in, out]."""
        stacked = self._place(torch.cat(parts_OD)).t()
        # Small products on a CPU take up to 40 % longer from the transposed view; GPUs do not care.
        return stacked.contiguous() if self.device.type == "cpu" else stacked

    def _read_layer(self, read: Callable[..., Tensor], prefix: str) -> TargetLayer:
        config = self.config
        D, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
        H, J = config.num_attention_heads, config.num_key_value_heads
        attention = prefix + "self_attn."
        norms: list[Tensor] = []
        if config.qk_norm:
            norms = [
                read(attention + "q_norm.weight", d).expand(H, d),
                read(attention + "k_norm.weight", d).expand(J, d),
            ]
        return TargetLayer(
            input_norm=self._place(read(prefix + "input_layernorm.weight", D)),
            qkv=self._matrix(
                read(attention + "q_proj.weight", H * d, D),
                read(attention + "k_proj.weight", J * d, D),
                read(attention + "v_proj.weight", J * d, D),
            ),
            qk_norm=self._place(torch.cat(norms)) if norms else None,
            out=self._matrix(read(attention + "o_proj.weight", D, H * d)),
            mlp_norm=self._place(read(prefix + "post_attention_layernorm.weight", D)),
            gate_up=self._matrix(
                read(prefix + "mlp.gate_proj.weight", inner, D), read(prefix + "mlp.up_proj.weight", inner, D)
            ),
            down=self._matrix(read(prefix + "mlp.down_proj.weight", D, inner)),
        )

    def new_cache(self, rows: int, length: int) -> KVCache:
        """An empty cache for `rows` texts of up to `length` tokens."""
        config = self.config
        if length > self.rotary_table.shape[1]:
            self.rotary_table = self._rotary_table(length)
        return KVCache.allocate(
            config.num_hidden_layers, rows, length, config.num_key_value_heads, config.head_dim, self.dtype, self.device
        )

    def _rotary_table(self, length: int) -> Tensor:
        """[2, length, 1, d]: cos, and sin with the sign of rotate-half; in the model's type, as in transformers."""
        config = self.config
        frequency = 1.0 / config.rope_theta ** (
            torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        )
        if config.rope_llama3 is not None:
            frequency = _llama3_frequency(frequency, config.rope_llama3)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        return self._place(torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))[:, :, None])

    def forward(
        self,
        ids_BT: Tensor,
        start_B: Tensor,
        cache: KVCache,
        tap_layers: Sequence[int] = (),
        num_keys: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run T new tokens per row behind the first `start` cached ones, which stay; their keys and values are added.

        num_keys = max(start) + T, for callers that know it: reading it from the device stalls a GPU. Returns the
        final-normed hidden states [B, T, D] and the features [B, T, C]: the residual stream after each of `tap_layers`,
        ascending (transformers' hidden_states[layer + 1]), or None without taps.
        """
        B, T = ids_BT.shape
        num_keys = int(start_B.max()) + T if num_keys is None else num_keys
        assert num_keys <= min(cache.length, self.rotary_table.shape[1]), (
            f"{num_keys} tokens in a cache of {cache.length}"
        )
        positions_BT = start_B[:, None] + torch.arange(T, device=start_B.device)
        cos_X1d, sin_X1d = self.rotary_table[:, positions_BT.flatten()]
        # A lone token of a lone row sees every key; nothing else needs no mask, rows being of different lengths.
        mask_BTM = None if B * T == 1 else torch.arange(num_keys, device=start_B.device) <= positions_BT[..., None]
        span = Span(
            cache=cache,
            positions_BT=positions_BT,
            cos_X1d=cos_X1d,
            sin_X1d=sin_X1d,
            mask_BTM=mask_BTM,
            num_keys=num_keys,
        )
        x_XD = F.embedding(ids_BT.flatten(), self.embed_VD)
        taps: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            attended_XD = self._attention(index, layer, self._norm(x_XD, layer.input_norm), span)
            x_XD = torch.addmm(x_XD, attended_XD, layer.out)
            gate_XI, up_XI = self._norm(x_XD, layer.mlp_norm).mm(layer.gate_up).chunk(2, -1)
            x_XD = torch.addmm(x_XD, F.silu(gate_XI).mul_(up_XI), layer.down)
            if index in tap_layers:
                taps.append(x_XD)
        features_BTC = torch.cat(taps, -1).view(B, T, -1) if taps else None
        return self._norm(x_XD, self.norm).view(B, T, -1), features_BTC

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] → [..., V], in the model's type."""
        return F.linear(hidden, self.lm_head_VD)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.config.rms_norm_eps) * weight

    def _attention(self, index: int, layer: TargetLayer, x_XD: Tensor, span: Span) -> Tensor:
        """Everything between the first norm and the output projection, [X, H·d]; writes the new keys and values."""
        H, J, d = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        qkv_XNd = x_XD.mm(layer.qkv).view(-1, H + 2 * J, d)
        qk_XNd = qkv_XNd[:, : H + J]
        if layer.qk_norm is not None:
            qk_XNd = self._norm(qk_XNd, layer.qk_norm)
        qk_XNd = torch.addcmul(qk_XNd * span.cos_X1d, qk_XNd.roll(d // 2, -1), span.sin_X1d)
        shape = (*span.positions_BT.shape, -1, d)
        span.cache.write(index, qk_XNd[:, H:].view(shape), qkv_XNd[:, H + J :].view(shape), span.positions_BT)
        k_BMJd, v_BMJd = span.cache.k[index, :, : span.num_keys], span.cache.v[index, :, : span.num_keys]
        return attend(qk_XNd[:, :H].view(shape), k_BMJd, v_BMJd, span.mask_BTM).reshape(-1, H * d)


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
