"""What the fuzz tests share: how much they try, damaged JSON and bytes, and what a reader may raise.

The suite tries the same few hundred inputs each time. DOMINO_FUZZ=20000 tries so many of each kind, and others each
time:

    DOMINO_FUZZ=20000 python -m pytest tests/test_fuzz_readers.py
"""

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("DOMINO_FUZZ", "0"))


def fuzz(few: int) -> settings:
    """Settings of a test that tries `few` inputs in the suite. A reader that takes five seconds has hung."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=EXAMPLES or few,
        derandomize=not EXAMPLES,
        database=None,
        deadline=5000,
        suppress_health_check=checks,
    )


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**31, 2**63, 10**30, -(2**64), 0.5, -0.0, 1e308, float("nan"), float("inf")])
    | st.text(max_size=6)
    | st.sampled_from(["", "\ud800", "user", "assistant", "default", "bfloat16", "float8_e4m3fn", "a" * 3000, "../x"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: Any, valid: Any) -> Any:
    """A valid JSON value with up to three parts of it replaced, removed, doubled or added, wherever they are."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        if not places:
            return draw(JSON)
        inside, key = draw(st.sampled_from(places))
        what = draw(st.sampled_from(["replace", "replace", "remove", "add", "nest"]))
        if what == "replace":
            inside[key] = draw(JSON)
        elif what == "remove":
            del inside[key]
        elif what == "nest":
            inside[key] = [inside[key]]
        elif isinstance(inside, list):
            inside.insert(key, draw(JSON))
        else:
            inside[draw(st.text(max_size=8))] = draw(JSON)
    return value


def _places(value: Any) -> Any:
    """(container, key) of everything in a JSON value."""
    keys: Sequence[Any] = (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    )
    for key in keys:
        yield value, key
        yield from _places(value[key])


@st.composite
def damaged_bytes(draw: Any, valid: bytes, first: int = 4096) -> bytes:
    """A valid file cut short, or with up to three of its bytes (of the `first`, or the last) changed or added."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        if not data:
            break
        what = draw(st.sampled_from(["cut", "flip", "flip", "late", "insert"]))
        at = draw(st.integers(0, min(first, len(data)) - 1))
        if what == "cut":
            del data[at:]
        elif what == "flip":
            data[at] = draw(st.integers(0, 255))
        elif what == "late":
            data[len(data) - 1 - at] = draw(st.integers(0, 255))
        else:
            data[at:at] = draw(st.binary(min_size=1, max_size=4))
    return bytes(data)


def read_or_refused(read: Callable[[], Any], *names: str) -> Any:
    """What `read` gives; None if it refuses: with a ValueError of ours, no parser's own, which has one of the names."""
    try:  # the property itself
        return read()
    except ValueError as error:
        refusal = error
    assert type(refusal) is ValueError, f"{type(refusal).__name__}: {refusal}"
    assert any(name in str(refusal) for name in names), f"{names} are not named: {refusal}"
    return None
