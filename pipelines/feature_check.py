"""Whether hidden states of unknown origin are those of a target's layers: computed again and compared.

Letters: S tokens of a row · L tapped layers, in ascending depth · D hidden size · C = L * D · K hidden states of a
target: its embeddings and the outputs of all its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from domino_core.features import FeatureMeta
from domino_core.target_model import Target
from pipelines.feature_files import ID_OFFSET, Kind, Source

CHECKED_TOKENS = 64
# Of the median token's relative error. bfloat16 engines and float8 files stay below 0.03; the output of a neighbouring
# block is further off.
TOLERANCE = 0.08


@torch.no_grad()
def target_states(target: Target, input_ids: Sequence[int]) -> Tensor:
    """All hidden states of a text, states_SKD: k = 0 the embeddings, k = i + 1 the output of block i."""
    ids_1S = torch.tensor([list(input_ids)], device=target.device)
    start_1 = torch.zeros(1, dtype=torch.long, device=target.device)
    blocks = range(target.config.num_hidden_layers)
    _, taps_1SC = target.forward(ids_1S, start_1, target.new_cache(1, ids_1S.shape[1]), blocks)
    assert taps_1SC is not None
    return torch.cat((target.embed_VD[ids_1S[0]][:, None], taps_1SC[0].unflatten(1, (len(blocks), -1))), dim=1)


def check_states(source: Source, meta: FeatureMeta, target: Target, kind: Kind, rows: int) -> float:
    """Compare the first tokens of some rows with the target's own states; the largest error of a layer is returned.

    Errors are relative, of the median token: a few tokens are hundreds of times larger than all others. ValueError if
    another layer of the target is nearer than the one that was named, or none is near.
    """
    picked = range(0, len(source), max(1, len(source) // max(1, rows)))[:rows]
    errors: list[Tensor] = []
    for index in picked:
        row = source.read(index)
        given_SLD = row["features"][:CHECKED_TOKENS].float()
        known_SKD = target_states(target, row["input_ids"][:CHECKED_TOKENS]).float().cpu()
        distance_SLK = (given_SLD[:, :, None] - known_SKD[:, None]).norm(dim=-1)
        errors.append((distance_SLK / known_SKD.norm(dim=-1)[:, None]).median(dim=0).values)
    error_LK = torch.stack(errors).mean(dim=0)
    nearest = error_LK.argmin(dim=1)
    named = torch.tensor(meta.layer_ids) + 1
    worst = float(error_LK[torch.arange(len(named)), named].max())
    if bool((nearest == named).all()) and worst < TOLERANCE:
        return worst
    if bool((error_LK.min(dim=1).values < TOLERANCE).all()):
        found, given = ([k - 1 + ID_OFFSET[kind] for k in layers.tolist()] for layers in (nearest, named))
        how = "shifted by one" if set((nearest - named).tolist()) in ({1}, {-1}) else "wrong"
        raise ValueError(f"the layer ids look {how}: the states are those of ids {found} of {kind}, not {given}")
    raise ValueError(
        f"the hidden states are not those of {meta.target} (relative error {worst:.2f}, accepted up to {TOLERANCE}): "
        "another target, other weights, a state after the final norm, or other layers"
    )


def with_final_layer(rows: Iterable[dict[str, Any]], target: Target) -> Iterator[dict[str, Any]]:
    """Rows with the output of the target's last block behind their layers, computed: speculators wants it there."""
    for row in rows:
        final_SD = target_states(target, row["input_ids"])[:, -1].float().cpu()
        yield row | {"features": torch.cat((row["features"], final_SD[:, None]), dim=1)}
