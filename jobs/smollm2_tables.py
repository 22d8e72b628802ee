"""The experiment's result as Markdown: what docs/experiment.md shows, which a test holds to the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

MAIN = (
    "published_dflash",
    "published_setting",
    "dflash",
    "dflash_wide",
    "domino_no_curriculum",
    "domino",
    "dflash_both",
    "domino_acceptance",
    "domino_soft",
    "domino_both",
    "dflash_warm",
    "domino_warm",
    "domino_adamw_2",
    "domino_muon_1",
    "dflash_muon_2",
    "domino_muon_2",
    "dflash_muon_4",
    "domino_muon_4",
    "dflash_muon_8",
    "domino_muon_8",
    "eagle",
    "eagle_muon_4",
    "medusa",
)
SIZES = ("domino_b4", "domino", "domino_b16")
SHARES = ("domino_data_0.25", "domino_data_0.5", "domino")
GAINS = {"gain_over_dflash": "over dflash", "gain_over_twin": "over its twin"}
CLOSER = ("dflash", "domino", "domino_muon_8")  # by position, by context, by prompt set


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Each table by its name; arms that the result lacks are left out of them, and tables that would be empty."""
    arms = result["arms"]
    found = {name: _arms(arms, names) for name, names in (("arms", MAIN), ("block sizes", SIZES), ("data", SHARES))}
    if any(name in arms for name in CLOSER):
        found |= {"position": _by_position(arms), "context": _by_context(arms), "prompts": _by_set(arms)}
    return found


def _arms(arms: dict[str, Any], names: Sequence[str]) -> str:
    rows = []
    for name in (name for name in names if name in arms):
        arm = arms[name]
        rows.append(
            (
                name,
                f"{arm['parameters'] / 1e6:.1f} M",
                str(arm["tau"]["seeds"]),
                with_interval(arm["tau"], "{:.3f}"),
                with_interval(arm["tau_by_set"]["heldout/T1"], "{:.3f}"),
                *(with_interval(arm[gain], "{:+.1%}") if gain in arm else "" for gain in GAINS),
                f"{arm['draft_ms']:.2f}" if "draft_ms" in arm else "",
                f"{arm['speedup']:.2f}×" if "speedup" in arm else "",
            )
        )
    head = ("arm", "parameters", "seeds", "τ, greedy", "τ, T = 1", *GAINS.values(), "draft, ms", "speed-up")
    return _markdown(head, rows)


def _by_position(arms: dict[str, Any]) -> str:
    names = [name for name in CLOSER if name in arms]
    drafts = range(max(len(arms[name]["tau_by_position"]) for name in names))
    rows = [(name, *(f"{share:.3f}" for share in arms[name]["tau_by_position"])) for name in names]
    return _markdown(("rounds that accept at least", *(str(draft + 1) for draft in drafts)), rows)


def _by_context(arms: dict[str, Any]) -> str:
    names = [name for name in CLOSER if name in arms]
    ends = sorted({end for name in names for end in arms[name]["tau_by_context"]}, key=int)
    rows = [
        (name, *(f"{arms[name]['tau_by_context'].get(end, {}).get('tau', float('nan')):.3f}" for end in ends))
        for name in names
    ]
    return _markdown(("tokens before the round, up to", *ends), rows)


def _by_set(arms: dict[str, Any]) -> str:
    names = [name for name in CLOSER if name in arms]
    rows = [
        (key.removesuffix("/T0"), *(with_interval(arms[name]["tau_by_set"][key], "{:.3f}") for name in names))
        for key in arms[names[0]]["tau_by_set"]
        if key.endswith("/T0")
    ]
    return _markdown(("prompts", *names), rows)


def with_interval(value: dict[str, Any], form: str) -> str:
    """Mean ± half of the 95 % interval; the mean alone of a single seed."""
    mean = form.format(value["mean"])
    return mean if value["interval"] is None else f"{mean} ± {form.format(value['interval']).lstrip('+')}"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
