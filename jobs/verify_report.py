"""The losslessness report as a page: what was claimed, how much was looked at, what was found."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.report import INK, MUTED, PAGE, describe


def write_page(path: Path, result: Mapping[str, Any]) -> None:
    """Write the page for a result of jobs.verify (the dictionary that `--result` stores) to `path`."""
    found = result["defects"]
    verdict = "No defect was found." if not found else f"{found} defects were found: this drafter changes the output."
    if result["untested"]:
        verdict += f" {result['untested']} things could not be tested with these prompts and this drafter; see below."
    rows = [
        f"<tr><td>{html.escape(check['name'])}</td><td>{html.escape(check['statement'])}</td>"
        f"<td>{'holds' if not check['defects'] else str(len(check['defects'])) + ' defects'}</td></tr>"
        for check in result["checks"]
    ]
    body = [
        f"<p><strong>{verdict}</strong> {result['greedy_prompts']} prompts, {result['sampling_draws']:,} draws; the "
        f"smallest of all corrected p-values is {result['min_corrected_p']:.2g}; {result['near_ties']} near-ties in "
        "the served type. What is not marked with another type was checked in float32.</p>",
        "<table class='words'><tr><th>check</th><th>statement</th><th>found</th></tr>" + "".join(rows) + "</table>",
        *(_details(check) for check in result["checks"]),
        f"<p class='muted'>{html.escape(describe(result['environment']))}</p>",
    ]
    page = PAGE.format(
        title=html.escape(f"Losslessness of {result['drafter']} with {Path(result['target']).name}"),
        subtitle=html.escape(
            f"drafter {result['drafter_digest'][:12]}, target {result['target_hash'][:12]}, {result['seconds']:.0f} s"
        ),
        body="\n".join(body),
        ink=INK,
        muted=MUTED,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _details(check: Mapping[str, Any]) -> str:
    """The figures of a check, and each of its defects."""
    lines = [f"{name}: {_short(value)}" for name, value in check["figures"].items()] + check["defects"]
    lines += [f"untested: {each}" for each in check["untested"]]
    return f"<h2>{html.escape(check['name'])}</h2><pre>{html.escape(chr(10).join(lines))}</pre>"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "".join(f"\n    {name}: {_short(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_short(inner) for inner in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
