"""JSON that users and other programs wrote: read, or refused with the name of its file."""

import json
import math
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """ValueError, which says which file it is, for what is no JSON."""
    try:  # a damaged file is the user's to repair
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # no UTF-8 either; brackets nested by the thousand
        raise ValueError(f"{path} is damaged: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """ValueError for anything but a JSON object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return content


def is_kind(kind: Any, value: Any) -> bool:
    """Whether a value from JSON is of a field's type. true is no number there, and 1 is as good as 1.0."""
    if kind is float:
        try:  # JSON's whole numbers have no end, and floats have
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        except OverflowError:
            return False
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
