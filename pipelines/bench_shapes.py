"""Shapes that are benchmarked without a checkpoint, and what their passes must read and compute at the least.

The floors count weights, caches and logits that have to pass through the device's memory once, and the operations of
the matrix products. Activations are left out: they are small, and stay in the chip's own memory in the best case.

D hidden · H, J query and key/value heads · d head width · G GRU width · R low rank
"""

from dataclasses import dataclass

import torch

from domino_core.config import DrafterConfig, default_target_layer_ids
from domino_core.drafter import Drafter
from domino_core.target_model import Target, TargetConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A target and the drafter that is published for it."""

    target: TargetConfig
    drafter: DrafterConfig


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least that a pass can do."""

    bytes: float
    operations: float


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device gave in the same run: bytes read and written, and operations of a large product, per second."""

    bytes_per_s: float
    operations_per_s: float

    def floor_ms(self, work: Work) -> float:
        return 1e3 * max(work.bytes / self.bytes_per_s, work.operations / self.operations_per_s)


def _qwen3(*, hidden: int, inner: int, tied: bool, layers: int = 36, heads: int = 32) -> Shape:
    """Qwen3 models differ in these numbers; drafters as in the published Domino checkpoints with blocks of 16."""
    target = TargetConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
    )
    taps = default_target_layer_ids(layers, 5)
    return Shape(target=target, drafter=_drafter(target, layers=5, taps=taps, mask=151669, rank=256, gru=1024))


def _tiny() -> Shape:
    """For tests: everything is there, nothing takes time."""
    target = TargetConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return Shape(target=target, drafter=_drafter(target, layers=1, taps=(1, 2), mask=3, rank=8, gru=16))


def _drafter(
    target: TargetConfig, *, layers: int, taps: tuple[int, ...], mask: int, rank: int, gru: int
) -> DrafterConfig:
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=taps,
        mask_token_id=mask,
        block_size=16,
        emb_dim=rank,
        gru_hidden_dim=gru,
    )


SHAPES = {
    "qwen3_8b": _qwen3(hidden=4096, inner=12288, tied=False),
    "qwen3_4b": _qwen3(hidden=2560, inner=9728, tied=True),
    "qwen3_0_6b": _qwen3(hidden=1024, inner=3072, tied=True, layers=28, heads=16),
    "tiny": _tiny(),
}


def random_drafter(config: DrafterConfig, target: Target) -> Drafter:
    """A drafter with fresh weights, made where the target lies: seconds for gigabytes, on a GPU."""
    with torch.device(target.device), torch.random.fork_rng(_cuda_devices(target.device)):
        torch.manual_seed(0)
        drafter = Drafter(config, target.embed_VD, target.lm_head_VD).to(target.dtype)
    return drafter.requires_grad_(False).eval()


def _cuda_devices(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []


def layer_matrices(config: TargetConfig | DrafterConfig) -> int:
    """Elements of the matrices of one block: q, k, v, out; gate, up, down."""
    D, d = config.hidden_size, config.head_dim
    H, J = config.num_attention_heads, config.num_key_value_heads
    return D * (H + 2 * J) * d + H * d * D + 3 * D * config.intermediate_size


def pass_weights(config: TargetConfig | DrafterConfig) -> int:
    """Elements that a pass multiplies with: all blocks and the output matrix; of the embedding it reads a few rows."""
    return config.num_hidden_layers * layer_matrices(config) + config.vocab_size * config.hidden_size


def token_kv(config: TargetConfig | DrafterConfig) -> int:
    """Elements of the keys and values of one token in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def pass_work(config: TargetConfig, *, rows: int, tokens: int, context: int, itemsize: int) -> Work:
    """A pass of the target over `tokens` new tokens a row behind `context` cached ones, logits of all included."""
    products = 2 * rows * tokens * pass_weights(config)
    keys = rows * tokens * (context + (tokens + 1) / 2)  # a token sees itself and what is before it
    return Work(
        bytes=itemsize * (pass_weights(config) + rows * (context + tokens) * token_kv(config)),
        operations=products + keys * _attention_operations(config),
    )


def draft_work(config: DrafterConfig, *, rows: int, context: int, itemsize: int) -> Work:
    """The backbone's pass over a block a row, and the base logits of its drafts: slots see all of the block."""
    slots = config.block_size
    products = 2 * rows * slots * config.num_hidden_layers * layer_matrices(config)
    products += 2 * rows * config.num_drafts * config.vocab_size * config.hidden_size
    keys = rows * slots * (context + slots)
    return Work(
        bytes=itemsize * (pass_weights(config) + rows * (context + slots) * token_kv(config)),
        operations=products + keys * _attention_operations(config),
    )


def head_step_weights(config: DrafterConfig) -> int:
    """Elements that a step of the head multiplies with: the GRU's state matrix, the state's share of W1, and W2.

    The embedding's products with the GRU's input matrix could come from a table, and W1's share of the backbone state
    is computed for all drafts at once: neither belongs to a step.
    """
    G, R = config.gru_hidden_dim, config.emb_dim
    return 3 * G * G + G * R + R * config.vocab_size


def head_work(config: DrafterConfig, *, rows: int, itemsize: int) -> Work:
    """The rollout: one step after the other, since each reads the draft before it; no cache holds W2 from step to step.

    (W2 of Qwen3 is 78 MB, an H100's cache 50 MB.)
    """
    steps = config.num_drafts - config.pure_draft_prefix_len
    return Work(
        bytes=itemsize * steps * head_step_weights(config), operations=2 * rows * steps * head_step_weights(config)
    )


def pooled_head_work(config: DrafterConfig, *, rows: int, pool: int, itemsize: int) -> Work:
    """The rollout over `pool` candidates a slot: the base logits are read once to find them, and of W2 their rows."""
    steps = config.num_drafts - config.pure_draft_prefix_len
    step = head_step_weights(config) - config.vocab_size * config.emb_dim
    candidates = rows * pool * config.emb_dim
    read = steps * (step + candidates) + rows * config.num_drafts * config.vocab_size
    return Work(bytes=itemsize * read, operations=2 * steps * (rows * step + candidates))


def extend_work(config: DrafterConfig, *, rows: int, tokens: int, itemsize: int) -> Work:
    """Features of `tokens` tokens a row to keys and values of all draft layers."""
    weights = config.feature_width * config.hidden_size + config.hidden_size * token_kv(config)
    moved = rows * tokens * (config.feature_width + token_kv(config))
    return Work(bytes=itemsize * (weights + moved), operations=2 * rows * tokens * weights)


def accept_work(config: TargetConfig, *, rows: int, tokens: int, itemsize: int) -> Work:
    """Reading the logits once."""
    return Work(bytes=itemsize * rows * tokens * config.vocab_size, operations=rows * tokens * config.vocab_size)


def _attention_operations(config: TargetConfig | DrafterConfig) -> int:
    """Per query and key, in all layers: a product with the key and one with the value."""
    return 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
