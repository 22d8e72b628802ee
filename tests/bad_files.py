"""Files and folders as users hand them in by mistake, or on purpose: what tests/test_bad_inputs.py gives to jobs."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

ROW = {"id": "a", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self._path, "ran")


def make(root: Path, drafter: Path, target: Path) -> None:
    """Everything below `root`; drafter, target: good ones, which are copied and spoilt."""
    prompts(root)
    drafters(root, drafter)
    targets(root, target)
    (root / "empty").mkdir()
    (root / "features").mkdir()
    (root / "features" / "manifest.json").write_text("{")
    (root / "short-key").write_text("short\n")
    (root / "no-key").write_text("\n")
    (root / "a-file").write_text("x")
    pickled_columns(root)


def pickled_columns(root: Path) -> None:
    """A Parquet file whose column asks Ray Data to unpickle it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    field = pa.field(
        "text",
        pa.large_binary(),
        metadata={"ARROW:extension:name": "ray.data.arrow_pickled_object", "ARROW:extension:metadata": ""},
    )
    rows = pa.array([pickle.dumps(Bomb(root / "ran"))], pa.large_binary())
    pq.write_table(pa.table([rows], schema=pa.schema([field])), root / "pickled.parquet")


def prompts(root: Path) -> None:
    lines = {
        "empty.jsonl": "",
        "broken.jsonl": json.dumps(ROW) + "\n{",
        "number.jsonl": "5\n",
        "nested.jsonl": "[" * 100_000,
        "nothing.jsonl": json.dumps({"id": "a"}),
        "twice.jsonl": f"{json.dumps(ROW)}\n{json.dumps(ROW)}",
        "role.jsonl": json.dumps({"id": "a", "messages": [{"role": "robot", "content": "x"}]}),
        "content.jsonl": json.dumps({"id": "a", "messages": [{"role": "user", "content": 5}]}),
        "no-messages.jsonl": json.dumps({"id": "a", "messages": []}),
        "ids-range.jsonl": json.dumps({"id": "a", "input_ids": [1, 10**6], "loss_mask": [0, 1]}),
        "ids-short.jsonl": json.dumps({"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1]}),
        "ids-mask.jsonl": json.dumps({"id": "a", "input_ids": [1, 2], "loss_mask": [0, 7]}),
    }
    for name, text in lines.items():
        (root / name).write_text(text)
    (root / "latin.jsonl").write_bytes(json.dumps(ROW).encode() + b"\xff\n")
    (root / "prompts.csv").write_text("id,text\n")
    (root / "no.parquet").write_bytes(b"PAR1 not really")


def drafters(root: Path, good: Path) -> None:
    def spoilt(name: str) -> Path:
        return Path(shutil.copytree(good, root / name))

    (spoilt("cut") / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes()[:-64])
    (spoilt("no-config") / "config.json").unlink()
    (spoilt("config-broken") / "config.json").write_text("{")
    config = json.loads((good / "config.json").read_text())
    (spoilt("unknown-key") / "config.json").write_text(json.dumps(config | {"surprise": 1}))
    (spoilt("other-size") / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    pickled = spoilt("pickled")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(root / "ran")))
    outside = spoilt("outside")
    (outside / "model.safetensors").unlink()
    index = {"weight_map": {"a": "../cut/model.safetensors"}}
    (outside / "model.safetensors.index.json").write_text(json.dumps(index))


def targets(root: Path, good: Path) -> None:
    def spoilt(name: str, **changes: Any) -> Path:
        folder = Path(shutil.copytree(good, root / name, ignore=shutil.ignore_patterns("prompts", "*.md")))
        config = json.loads((good / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    spoilt("target-kind", architectures=["BertForCausalLM"])
    lacking = spoilt("target-lacking") / "config.json"
    lacking.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (spoilt("target-weightless") / "model.safetensors").unlink()
    outside = spoilt("target-outside")
    (outside / "model.safetensors").unlink()
    (outside / "model.safetensors.index.json").write_text('{"weight_map": {"a": "/etc/passwd"}}')
    (spoilt("target-broken") / "config.json").write_text("{")
    (spoilt("target-no-tokenizer") / "tokenizer.json").unlink()
