"""Command lines of the jobs: `--preset NAME section.field=value ... [--plan]` becomes one checked JobConfig.

Presets (and torch with them) are imported after the arguments are parsed, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import select
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_core.redact import redacted

if TYPE_CHECKING:
    from jobs.presets import JobConfig

PRESET_NAMES = ("tiny", "tiny_gpu", "qwen3_4b", "qwen3_8b")


def job_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every job has; a job adds its own flags before `load`."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every key and its value: --plan. Example: --preset tiny train.steps=10 root=/data/runs",
    )
    parser.add_argument("--preset", default="tiny", choices=PRESET_NAMES, help="recipe to start from (default: tiny)")
    parser.add_argument("--plan", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override one field of the recipe")
    return parser


def resolve(
    argv: Sequence[str], description: str | None, required: Sequence[str] = ("target", "data")
) -> tuple[JobConfig, bool]:
    """Parse, apply and check. Returns the configuration and whether only the plan is wanted."""
    args = job_parser(description).parse_intermixed_args(argv)
    return load(args, required), args.plan


def load(args: argparse.Namespace, required: Sequence[str] = ("target", "data")) -> JobConfig:
    """The preset with the overrides of parsed arguments. ValueError for unknown keys, wrong values, missing fields."""
    from jobs import presets

    config = apply(getattr(presets, args.preset)(), args.overrides)
    for field in required:
        if not getattr(config, field):
            raise ValueError(f"{field}= is required with --preset {args.preset} ({REQUIRED_HINTS[field]})")
    return anchor_paths(config)


REQUIRED_HINTS = {
    "target": "a model id such as target=Qwen/Qwen3-8B, or a local folder",
    "data": "a .jsonl, .json or .parquet file of prompts, data=prompts.jsonl",
    "eval_data": "held-out prompts, eval_data=heldout.jsonl",
}


def run_job(main: Callable[[Sequence[str]], int | None]) -> int:
    """Run a job's `main(argv)`; a ValueError, which is how we report a user's mistake, becomes one line and code 2.

    Ctrl-C is 130, and output that nobody reads any more (`| head`) 141, as shells count them.
    """
    try:  # the end of the process: what comes as far as this is for a person to read
        code = main(sys.argv[1:]) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        if os.environ.get("DOMINO_TRACEBACK"):
            raise
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _reader_has_gone():  # some other connection's, which is no end in peace
            raise
        return 141
    except ValueError as error:
        if os.environ.get("DOMINO_TRACEBACK"):
            raise
        print(f"error: {redacted(str(error))}\n(DOMINO_TRACEBACK=1 shows where)", file=sys.stderr)
        return 2


def _reader_has_gone() -> bool:
    """Whether nobody reads our output. It then goes nowhere, or Python would complain of the rest when it ends."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    gone = any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def writable(path: str | Path) -> Path:
    """The path, its folder made, if a file can be written there. ValueError now, and not when hours of work are done.

    What is in the file already stays, and where there was none there is none afterwards.
    """
    file = Path(path)
    try:  # the file system decides, and says why
        new = not file.exists()
        file.parent.mkdir(parents=True, exist_ok=True)
        if new or file.is_file() or file.is_dir():  # a pipe is not opened twice: its reader would take that for the end
            file.open("ab").close()
        if new:
            file.resolve().unlink()  # resolved: a link to a file that is not there yet stays
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}; name another file") from error
    return file


def inside_submitted_job() -> bool:
    """Whether this process is the entry point of `ray job submit` (its working directory is a throw-away copy)."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def anchor_paths(config: JobConfig) -> JobConfig:
    """Make local paths absolute, because Ray's workers need not share our working directory.

    In a submitted job they do share it (each node unpacks its own copy), so inputs stay relative there, and a relative
    `root` is refused: whatever is written into the copy is lost with it.
    """
    root = Path(config.root).expanduser()
    if root.exists() and not root.is_dir():
        raise ValueError(f"root={config.root} is a file: name the folder where runs go")
    if inside_submitted_job():
        if not root.is_absolute():
            raise ValueError(
                f"root={config.root} is relative, and a submitted job runs in a copy that is thrown away: "
                "give root=/absolute/folder on storage that all nodes share, or set DOMINO_HOME to it"
            )
        return dataclasses.replace(config, root=str(root))
    local = {
        field: str(Path(value).expanduser().resolve())
        for field in ("target", "data", "features", "eval_data")
        if (value := getattr(config, field)) and Path(value).expanduser().exists()
    }
    return dataclasses.replace(config, root=str(root.resolve()), **local)


def apply(config: Any, overrides: Sequence[str]) -> Any:
    """A copy of a (nested, frozen) dataclass with `section.field=value` strings applied; values are parsed by type."""
    changes: dict[tuple[str, ...], dict[str, Any]] = {}
    types_by_key = field_types(config)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ValueError(f"{override!r} is not key=value: write section.field=value; --plan lists every key")
        if key not in types_by_key:
            # A bare field name finds its section: "steps" is close to "train.steps".
            close = [name for name in types_by_key if name.rpartition(".")[2] == key.rpartition(".")[2]]
            close += [name for name in difflib.get_close_matches(key, types_by_key, n=3) if name not in close]
            hint = f"; did you mean {' or '.join(close)}?" if close else "; --plan lists every key"
            raise ValueError(f"unknown key {key!r}{hint}")
        *section, field = key.split(".")
        changes.setdefault(tuple(section), {})[field] = parse_value(key, text, types_by_key[key])
    # Deepest first; all fields of a section at once, so that checks across fields see the final values.
    for section in sorted(changes, key=len, reverse=True):
        config = replace_in(config, section, changes[section])
    return config


def replace_in(config: Any, section: tuple[str, ...], values: dict[str, Any]) -> Any:
    """dataclasses.replace at a path of field names; the dataclass checks its fields again."""
    if section:
        head, *rest = section
        return dataclasses.replace(config, **{head: replace_in(getattr(config, head), tuple(rest), values)})
    return dataclasses.replace(config, **values)


def field_types(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every settable key with its type, e.g. {"target": str, "train.steps": int | None}."""
    hints = typing.get_type_hints(type(config))
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= field_types(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = hints[field.name]
    return found


def parse_value(key: str, text: str, kind: Any) -> Any:
    """Text of the command line to a value of the field's type; ValueError names field, text and what was expected."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("none", "null", ""):
            return None
        words = [choice for choice in arguments if typing.get_origin(choice) is typing.Literal]
        if any(text in typing.get_args(choice) for choice in words):
            return text
        (kind,) = (choice for choice in arguments if choice is not type(None) and choice not in words)
        return parse_value(key, text, kind)
    if origin is typing.Literal:
        if text not in arguments:
            raise ValueError(f"{key}={text}: expected one of {', '.join(map(str, arguments))}")
        return text
    if origin is tuple:
        parts = [part for part in text.strip("()[] ").split(",") if part.strip()]
        return tuple(parse_value(key, part.strip(), arguments[0]) for part in parts)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(f"{key}={text}: expected true or false")
        return text.lower() in ("true", "1", "yes")
    expected = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
    if kind not in expected:
        raise ValueError(f"{key} cannot be set on the command line (it is a {kind})")
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{key}={text}: expected {expected[kind]}") from None
    # "nan" and "inf" are floats to Python, and no limit that they are compared with would ever fail.
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{key}={text}: expected a finite number")
    return value


def describe(config: Any, prefix: str = "") -> str:
    """The resolved configuration, one `key = value` a line, as --plan prints it; passwords in it are masked."""
    lines: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            lines.append(describe(value, f"{prefix}{field.name}."))
        else:
            lines.append(f"{prefix}{field.name} = {redacted(str(value))}")
    return "\n".join(lines)
