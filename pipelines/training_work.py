"""What a training step must compute and move at the least, from its shapes; what is computed twice counts once.

T tokens of all rows · X blocks · K slots · Q drafts of a block · p drafts that are not corrected · D hidden ·
C feature width · H, J query and key/value heads · d head width · G GRU width · R low rank · V vocabulary
"""

from dataclasses import dataclass

from domino_core.blocks import PackedRows
from domino_core.config import DrafterConfig
from pipelines.bench_shapes import layer_matrices


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """Operations (two per multiply and add) of forward and backward, by part; bytes of the optimiser's step."""

    context: float  # features to every layer's keys and values
    layers: float  # matrices of the draft layers, over the slots
    attention: float
    vocabulary: float  # base logits, and what they tell z
    head: float  # GRU, W1 and W2
    optimiser_bytes: float

    @property
    def operations(self) -> float:
        return self.context + self.layers + self.attention + self.vocabulary + self.head


def training_work(config: DrafterConfig, rows: PackedRows) -> TrainingWork:
    """Of one step over the given rows."""
    context = int((rows.anchors_X - rows.starts_X).sum())
    return step_work(config, tokens=len(rows.input_ids_T), blocks=len(rows.anchors_X), context=context)


def step_work(config: DrafterConfig, *, tokens: float, blocks: float, context: float) -> TrainingWork:
    """Of one step over so many tokens and blocks. context: tokens before the anchor, summed over the blocks.

    A matrix with a gradient costs three products where its input has a gradient too (output, input's gradient, own
    gradient), two where the input is data (features, embeddings), and two where it is frozen (the output matrix).
    """
    D, G, R, V = config.hidden_size, config.gru_hidden_dim, config.emb_dim, config.vocab_size
    layers, d = config.num_hidden_layers, config.head_dim
    keys_values = layers * 2 * D * config.num_key_value_heads * d
    slots, drafts = blocks * config.block_size, blocks * config.num_drafts
    corrected = blocks * (config.num_drafts - config.pure_draft_prefix_len)
    visible = config.block_size * (context + blocks * config.block_size)
    head = 0.0
    if config.head:
        head = 2.0 * (
            drafts * (2 * D * 3 * G + 3 * G * 3 * G)  # the GRU reads embeddings and its own state
            + corrected * 3 * ((D + G) * R + R * V)
        )
    return TrainingWork(
        context=2.0 * tokens * (2 * config.feature_width * D + 3 * keys_values),
        layers=2.0 * slots * 3 * layers * layer_matrices(config),
        attention=3.0 * 4 * layers * config.num_attention_heads * d * visible,
        vocabulary=2.0 * drafts * 2 * D * V,
        head=head,
        # AdamW in float32: weight and two moments read and written, gradient read; and the weight's copy in bfloat16.
        optimiser_bytes=30.0 * num_parameters(config),
    )


def num_parameters(config: DrafterConfig) -> int:
    """Trainable ones; norms left out."""
    D, G, R = config.hidden_size, config.gru_hidden_dim, config.emb_dim
    head = 3 * G * (D + G) + R * (D + G) + R * config.vocab_size
    return config.feature_width * D + config.num_hidden_layers * layer_matrices(config) + (head if config.head else 0)
