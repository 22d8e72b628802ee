"""The file of the experiment's results, where a run goes on: only with what it began with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from domino_core.json_files import read_object
from domino_core.target import target_hash
from pipelines.experiment_data import info_file
from pipelines.experiment_run import RunPlan, Setting
from pipelines.experiment_summary import summarise

PARTS_OF_RUN = {"tau", "parameters", "training_seconds", "settings"}


def read_result(path: Path) -> dict[str, Any]:
    """Empty if there is no file. ValueError for any other file, which is left as it is."""
    if not path.exists():
        return {}
    try:  # the boundary: any file may have been named
        found: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--out {path} is there and holds no JSON ({error}); name another file") from error
    parts = [found.get(name) if isinstance(found, dict) else None for name in ("runs", "data", "measure")]
    if not all(isinstance(part, dict) for part in parts) or not all(map(_is_run, found["runs"].items())):
        raise ValueError(f"--out {path} is there and no result of this experiment; name another file")
    try:  # its parts may be damaged one by one
        summarise(found)
        found["commands"] = [*found.get("commands", [])]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"--out {path} is damaged ({type(error).__name__}: {error}); name another file") from error
    return found


def _is_run(entry: tuple[str, Any]) -> bool:
    name, _, seed = entry[0].partition("/")
    return bool(name) and seed.isdecimal() and isinstance(entry[1], dict) and entry[1].keys() >= PARTS_OF_RUN


def basis(plan: RunPlan, setting: Setting) -> dict[str, Any]:
    """What all runs of a result share, as JSON has it."""
    described = info_file(Path(plan.data))
    data: dict[str, Any] = {"statistics": setting.data.statistics()}
    if described.exists():
        data = read_object(described)
    data["digest"] = hashlib.sha256(Path(plan.data).read_bytes()).hexdigest()[:16]
    return _plain({"target_hash": target_hash(plan.target), "data": data, "measure": asdict(plan.measure)})


def check_continues(result: dict[str, Any], plan: RunPlan, setting: Setting) -> None:
    """ValueError if runs of this plan would stand beside runs that another one gave, or not be run at all for them."""
    if not result:
        return
    shared = basis(plan, setting)
    # Results of before there were digests tell their data by its statistics.
    known = "digest" if "digest" in result["data"] else "statistics"
    before = {"measure": result["measure"], "data": {known: result["data"].get(known)}}
    before |= {"target_hash": result.get("target_hash", shared["target_hash"])}
    changed = list(_changed(before, shared))
    sets = sorted(f"{name}/T{temperature:g}" for name in setting.sets for temperature in plan.measure.temperatures)
    for key, run in result["runs"].items():
        if sorted(run["tau"]) != sets:
            changed.append(f"prompts of {key}: {', '.join(sorted(run['tau']))}, now {', '.join(sets)}")
        arm = setting.arms.get(key.partition("/")[0])
        if arm is not None:
            changed += _changed({key: run["settings"]}, _plain({key: asdict(arm)}))
    if changed:
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ValueError(f"--out holds runs of other settings ({changed[0]}{more}); name another file")


def _changed(before: Any, now: Any, name: str = "") -> Iterable[str]:
    """What differs in what both have: settings come and go with versions."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() & now.keys()):
            yield from _changed(before[key], now[key], f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name}: {before}, now {now}"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
