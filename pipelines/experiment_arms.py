"""The arms of the experiment: what each drafter is and how it is trained. Presets are functions; an arm is its name.

Sizes and steps that all arms share are a Scale: `full` for a card, `tiny` for the embedded target on a CPU.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Literal

import torch

from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.target_model import TargetConfig
from pipelines.prepare import DrafterShape, drafter_config
from pipelines.train_config import TrainConfig

REACH = 0.5  # share of the confidence in the slot weights, of the arms that have it
# Of both optimisers, times the published learning rate, which was chosen for larger drafters.
RATES: dict[Literal["adamw", "muon"], tuple[int, ...]] = {"adamw": (2,), "muon": (1, 2, 4, 8)}
RATE_OF_EAGLE = 4  # of Muon
LIKELY = 8  # soft labels of a draft, of the arms that have them


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the arms have in common. The drafter's sizes are those of the published setting (`published_*` arms)."""

    num_layers: int = 4
    num_taps: int = 4
    block_size: int = 8
    gru_hidden_dim: int = 256
    emb_dim: int = 128
    block_sizes: tuple[int, ...] = (4, 16)  # of further Domino arms
    data_shares: tuple[float, ...] = (0.25, 0.5)  # likewise
    train: TrainConfig = dataclasses.field(
        default_factory=lambda: TrainConfig(
            steps=1500, batch_size=32, num_anchors=128, chunk_blocks=1024, checkpoint_every=1_000_000, log_every=100
        )
    )
    published_steps: int = 1500
    published_anchors: int = 64


def full() -> Scale:
    """SmolLM2-135M on an H100."""
    return Scale()


def tiny() -> Scale:
    """The embedded target on a CPU: does it run?"""
    train = TrainConfig(
        steps=6, batch_size=2, num_anchors=8, precision="float32", checkpoint_every=1_000_000, log_every=3
    )
    return Scale(
        num_layers=1,
        num_taps=2,
        block_size=4,
        gru_hidden_dim=16,
        emb_dim=8,
        block_sizes=(2,),
        data_shares=(0.5,),
        train=train,
        published_steps=4,
        published_anchors=4,
    )


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A drafter and its training. soft_labels, data_share: experiment_batches, Conversations.share."""

    drafter: DrafterConfig
    train: TrainConfig
    kind: Literal["domino", "eagle", "medusa"] = "domino"  # domino: domino_core's drafter, with its head or without
    soft_labels: int = 0
    data_share: float = 1.0


def make_arms(target: TargetConfig, mask_token_id: int, scale: Scale) -> dict[str, Arm]:
    """Every arm by its name."""
    domino = Arm(drafter=_domino(target, mask_token_id, scale), train=scale.train)
    dflash = replace(domino, drafter=replace(domino.drafter, head=False))
    wide = replace(dflash, drafter=as_large_as(domino.drafter, dflash.drafter))
    published = replace(scale.train, steps=scale.published_steps, num_anchors=scale.published_anchors)
    arms = {
        "published_dflash": replace(dflash, train=published),
        "published_setting": replace(domino, train=published),
        "dflash": dflash,
        "dflash_wide": wide,
        "domino_no_curriculum": replace(domino, train=replace(domino.train, lambda_base_start=0.0)),
        "domino": domino,
    }
    followed = replace(domino, train=replace(domino.train, reach=REACH))
    arms |= {"domino_acceptance": followed, "domino_soft": replace(domino, soft_labels=LIKELY)}
    for name, arm in (("dflash", dflash), ("domino", domino)):
        both = replace(arm, soft_labels=LIKELY, train=replace(arm.train, reach=REACH))
        warm = replace(both.train, warm_start_layers=_outermost(target, arm.drafter))
        arms |= {f"{name}_both": both, f"{name}_warm": replace(both, train=warm)}
        for optimizer, factors in RATES.items():
            arms |= {f"{name}_{optimizer}_{factor}": at_rate(both, optimizer, factor) for factor in factors}
    for size in scale.block_sizes:
        arms[f"domino_b{size}"] = replace(domino, drafter=replace(domino.drafter, block_size=size))
    for share in scale.data_shares:
        arms[f"domino_data_{share:g}"] = replace(domino, data_share=share)
    return arms | baseline_arms(target, domino)


def at_rate(arm: Arm, optimizer: Literal["adamw", "muon"], factor: int) -> Arm:
    """`arm` by another optimiser, at so many times its learning rate."""
    return replace(arm, train=replace(arm.train, optimizer=optimizer, learning_rate=factor * arm.train.learning_rate))


def baseline_arms(target: TargetConfig, domino: Arm) -> dict[str, Arm]:
    """Other ways to draft (experiment_baselines.py), about as large as the DFlash drafter and trained as long.

    EAGLE has the drafter's layers in one: their MLPs side by side. Its attention is multi-head. Medusa's heads have as
    many residual blocks as there are layers, and read the target's last layer alone.
    """
    shape = domino.drafter
    # One loss, and layers that are not those which are compiled.
    train = replace(domino.train, lambda_base_start=0.0, compile=False)
    eagle = replace(
        shape,
        num_hidden_layers=1,
        intermediate_size=shape.intermediate_size * shape.num_hidden_layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_attention_heads,
        pure_draft_prefix_len=min(1, shape.num_drafts - 1),
    )
    medusa = replace(shape, head=False, target_layer_ids=(target.num_hidden_layers - 1,))
    autoregressive = Arm(kind="eagle", drafter=eagle, train=train)
    return {
        "eagle": autoregressive,
        f"eagle_muon_{RATE_OF_EAGLE}": at_rate(autoregressive, "muon", RATE_OF_EAGLE),
        "medusa": Arm(kind="medusa", drafter=medusa, train=train),
    }


def _outermost(target: TargetConfig, drafter: DrafterConfig) -> tuple[int, ...]:
    """The target's first and last layers, half of each: what reads words, and what writes them."""
    first, last = drafter.num_hidden_layers // 2, target.num_hidden_layers
    return (*range(first), *range(last - drafter.num_hidden_layers + first, last))


def _domino(target: TargetConfig, mask_token_id: int, scale: Scale) -> DrafterConfig:
    shape = DrafterShape(
        block_size=scale.block_size,
        num_hidden_layers=scale.num_layers,
        num_taps=scale.num_taps,
        mask_token_id=mask_token_id,
        emb_dim=scale.emb_dim,
        gru_hidden_dim=scale.gru_hidden_dim,
    )
    return drafter_config(shape, target, tokenizer=None)


def as_large_as(large: DrafterConfig, small: DrafterConfig) -> DrafterConfig:
    """`small` with so many layers that its parameters come nearest to those of `large`."""
    own, more = (num_parameters(replace(small, num_hidden_layers=small.num_hidden_layers + n)) for n in (0, 1))
    extra = round((num_parameters(large) - own) / (more - own))
    return replace(small, num_hidden_layers=small.num_hidden_layers + extra)


def num_parameters(config: DrafterConfig) -> int:
    """Trainable ones of domino_core's drafter."""
    with torch.device("meta"):
        vocabulary = torch.empty(config.vocab_size, config.hidden_size)
        return sum(each.numel() for each in Drafter(config, vocabulary, vocabulary).parameters())
