"""A drafter's folder, from any format that is read to one that is written; the weights keep every bit."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from domino_core import foreign
from domino_core.checkpoint import (
    folder_digest,
    provenance,
    read_config,
    read_format,
    read_provenance,
    read_state,
    write_checkpoint,
)
from domino_core.config import DrafterConfig
from domino_core.published_config import to_published
from domino_core.target import load_vocabulary, read_target_config


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was done: formats, digests (checkpoint.folder_digest) and the configuration that both folders mean."""

    source: Path
    source_format: str
    source_digest: str
    folder: Path
    format: str
    digest: str
    config: DrafterConfig
    num_tensors: int
    verifier: str | None  # the target by name, as a speculators file says it

    def describe(self) -> str:
        config = self.config
        kind, shifted = "Domino" if config.head else "DFlash", str(config.shift_label).lower()
        lines = [
            f"{self.source} ({self.source_format}, sha256 {self.source_digest[:12]}) -> {self.folder} ({self.format}, "
            f"sha256 {self.digest[:12]})",
            f"{kind} drafter, {self.num_tensors} tensors with every bit kept, {config.num_drafts} drafts a block "
            f"(shift_label {shifted}), taps after target layers {list(config.target_layer_ids)}",
        ]
        if self.format == foreign.SPECULATORS and self.verifier is None:
            lines.append("no target is named in it: give --target, or name the target where it is served")
        if self.format == foreign.SPECULATORS and config.head:
            lines.append("no release of vLLM or speculators reads a Domino head; docs/formats.md names the branch")
        return "\n".join(lines)


def convert_drafter(source: str | Path, folder: str | Path, to: str, target: str | None = None) -> Conversion:
    """Write the drafter in `source` to `folder`, which must not exist, in the format `to` (foreign.FORMATS).

    target: Hub id or folder. Needed only if the source repeats the target's embeddings, which are then compared, or
    does not say how many layers its target has and the published layout has to. ValueError for all that is not so.
    """
    source, folder = Path(source).expanduser(), Path(folder).expanduser()
    if to not in foreign.FORMATS:
        raise ValueError(f"format {to!r} is not one of {', '.join(foreign.FORMATS)}")
    config, made = read_config(source), read_provenance(source)
    _check_place(folder)
    architectures: list[str] = []
    if target is not None:
        shape = read_target_config(target)
        config.check_fits(shape)
        config, architectures = replace(config, num_target_layers=shape.num_hidden_layers), [shape.architecture]
    verifier = target or (str(made["target"]) if made.get("target") else None)
    if to == foreign.SPECULATORS:
        written = foreign.to_speculators(config, verifier, architectures)
    elif config.num_target_layers is None:
        raise ValueError(f"{source} does not say num_target_layers, and the published layout has to: give --target")
    else:
        written = to_published(config)
    state = read_state(source, _vocabulary(source, target))
    origin = {"folder": str(source), "format": read_format(source), "digest": folder_digest(source)}
    tensors = {foreign.tensor_name(name, to): tensor for name, tensor in state.items()}
    write_checkpoint(folder, written, tensors, {**made, "converted": provenance(source=origin, format=to)})
    return Conversion(
        source=source,
        source_format=origin["format"],
        source_digest=origin["digest"],
        folder=folder,
        format=to,
        digest=folder_digest(folder),
        config=config,
        num_tensors=len(tensors),
        verifier=verifier,
    )


def _check_place(folder: Path) -> None:
    """Make the folder's parents, and see that it can be made itself. ValueError if it cannot, or is there already."""
    try:  # the file system decides, and says why
        if folder.is_symlink() and not folder.exists():
            raise ValueError(f"{folder} is a link to what does not exist; name another folder, or remove the link")
        if folder.exists():
            raise ValueError(f"{folder} exists; name a folder that does not, or remove it first")
        folder.mkdir(parents=True)
        folder.rmdir()
    except OSError as error:
        raise ValueError(f"{folder} cannot be created: {error.strerror or error}; name another folder") from error


def _vocabulary(source: Path, target: str | None) -> dict[str, Tensor] | None:
    """The target's embedding table and output matrix, loaded only if the source has tensors to compare with them."""
    if target is None or not foreign.repeats_target(source):
        return None
    return dict(zip(foreign.SHARED, load_vocabulary(target), strict=True))
