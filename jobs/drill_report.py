"""The result of jobs.drill as a page: what was done, what must hold, what was found."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.report import INK, MUTED, PAGE, describe


def write_page(path: Path, result: Mapping[str, Any]) -> None:
    """Write the page for a result of jobs.drill (the dictionary that `--out` stores) to `path`."""
    from jobs.drill import DRILLS
    from jobs.drill_training import described

    drills = {name: found for name, found in result["drills"].items() if name in DRILLS}
    rows: list[str] = []
    for name, found in drills.items():
        what, holds, observed = described(DRILLS[name])
        verdict = "held" if found["held"] else f"skipped: {found['skipped']}" if found["skipped"] else "does not hold"
        words = [name, what, holds, observed, "; ".join([verdict, *found["problems"]]), found["seconds_to_recover"]]
        cells = [*words, found["lost"], found["wrong"]]
        rows.append("<tr>" + "".join(f"<td>{html.escape('' if c is None else str(c))}</td>" for c in cells) + "</tr>")
    heads = ["drill", "what is done", "must hold", "observed by", "result", "s to recover", "lost", "wrong"]
    table = "<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>" + "".join(rows)
    body = f"<table>{table}</table><p class='muted'>{html.escape(describe(result['environment']))}</p>"
    held = sum(found["held"] for found in drills.values())
    page = PAGE.format(title="Drills", subtitle=f"{held} of {len(drills)} held", body=body, ink=INK, muted=MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
