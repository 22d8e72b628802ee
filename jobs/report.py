"""The page that `jobs.quickstart` leaves behind: curves of the training, τ by position, the arms side by side.

One self-contained HTML file: the charts are inline SVG drawn by matplotlib, nothing is fetched when it is opened.
"""

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INK, MUTED = "#1f2430", "#6b7280"
COLOURS = {"Domino": "#c2410c", "head off": "#a3a3a3", "DFlash": "#2563eb", "plain": "#1f2430"}

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: {ink}; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin-bottom: .2rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .35rem .6rem; border-bottom: 1px solid #e5e7eb; }}
th:first-child, td:first-child {{ text-align: left; }} th {{ color: {muted}; font-weight: 600; }}
figure {{ margin: 1rem 0; }} figure svg {{ width: 100%; height: auto; }}
figcaption, .muted {{ color: {muted}; font-size: .9rem; }}
pre {{ background: #f6f7f9; padding: .8rem; overflow-x: auto; font-size: .85rem; border-radius: 6px; }}
</style></head><body>
<h1>{title}</h1><p class="muted">{subtitle}</p>
{body}
</body></html>
"""


def write_report(path: Path, result: Mapping[str, Any]) -> None:
    """Write the page for a quickstart result (the dictionary that `--result` stores) to `path`."""
    environment = result["environment"]
    identical = "every output is" if result["greedy_identical"] else "NOT every output is"
    body = [
        f"<p>On {result['num_prompts']} held-out prompts, greedy, {identical} token for token the target's own.</p>",
        arms_table(result["arms"]),
        "<p class='muted'>τ: tokens per round, the accepted drafts and one of the target's own. <i>head off</i>: the "
        "same drafter without its head. So small a target shows that output does not change, and hardly any speed.</p>",
        "<h2>Acceptance by position</h2>",
        figure(acceptance_chart(result["arms"]), "Share of rounds that accept at least this many drafted tokens."),
        "<h2>Training</h2>",
        figure(
            loss_chart(result["history"]),
            "Cross-entropy over the optimiser steps; λ moves from the base loss to the final one.",
        ),
        figure(
            accuracy_chart(result["history"]),
            "Share of drafted tokens that are the target's own, given the target's own tokens before them.",
        ),
        "<h2>What it wrote</h2>",
        *(f"<pre>{html.escape(sample)}</pre>" for sample in result.get("samples", [])),
        f"<p class='muted'>{html.escape(describe(environment))}</p>",
    ]
    title = f"Domino drafter for {result['target_name']}"
    version = f"{result['registered_model']} version {result['version']}"
    subtitle = f"{version} · {result['run_seconds']:.0f} s from start to served answer"
    page = PAGE.format(
        title=html.escape(title), subtitle=html.escape(subtitle), body="\n".join(body), ink=INK, muted=MUTED
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def describe(environment: Mapping[str, Any]) -> str:
    """One line on the machine and the software behind the figures."""
    machine = f"{environment.get('gpu') or environment['cpu']}, {environment['cores']} cores"
    software = f"Python {environment['python']}, torch {environment['torch']}, commit {environment.get('commit')}"
    return f"{machine}, {environment['memory_gb']:.0f} GB · {software}"


def arms_table(arms: Sequence[Mapping[str, Any]]) -> str:
    """HTML table of the arms: τ, tokens per second, ratio to plain decoding by the same engine."""
    rows = [
        f"<tr><td>{html.escape(arm['name'])}</td><td>{arm['tau']:.2f}</td><td>{arm['tokens_per_s']:.0f}</td><td>{arm['speedup']:.2f}×</td></tr>"
        for arm in arms
    ]
    return "<table><tr><th>arm</th><th>τ</th><th>tokens/s</th><th>against plain</th></tr>" + "".join(rows) + "</table>"


def figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def acceptance_chart(arms: Sequence[Mapping[str, Any]]) -> str:
    """Survival of the draft by position, one line per drafting arm."""
    fig, (axis,) = _axes(1)
    for arm in arms:
        if survival := arm.get("acceptance_by_position"):
            axis.plot(
                range(1, len(survival) + 1), survival, marker="o", label=arm["name"], color=COLOURS.get(arm["name"])
            )
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="draft position", ylabel="share of rounds", ylim=(0, 1))
    axis.legend(frameon=False)
    return _svg(fig)


def loss_chart(history: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Losses of each trained arm, and λ of the Domino arm."""
    fig, (losses, weight) = _axes(2)
    for arm, steps in history.items():
        x = [step["step"] for step in steps]
        losses.plot(
            x, [step["base_loss"] for step in steps], linestyle="--", label=f"{arm}: base", color=COLOURS.get(arm)
        )
        if arm != "DFlash":
            losses.plot(x, [step["final_loss"] for step in steps], label=f"{arm}: final", color=COLOURS.get(arm))
            weight.plot(x, [step["lambda_base"] for step in steps], color=COLOURS.get(arm))
    losses.set(xlabel="step", ylabel="loss (nats)")
    losses.legend(frameon=False)
    weight.set(xlabel="step", ylabel="λ (weight of the base loss)", ylim=(-0.05, 1.05))
    return _svg(fig)


def accuracy_chart(history: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Token accuracy of base and final logits over the steps."""
    fig, (axis,) = _axes(1)
    for arm, steps in history.items():
        x = [step["step"] for step in steps]
        axis.plot(
            x, [step["base_accuracy"] for step in steps], linestyle="--", label=f"{arm}: base", color=COLOURS.get(arm)
        )
        if arm != "DFlash":
            axis.plot(x, [step["final_accuracy"] for step in steps], label=f"{arm}: final", color=COLOURS.get(arm))
    axis.set(xlabel="step", ylabel="accuracy")
    axis.legend(frameon=False)
    return _svg(fig)


def _axes(columns: int):
    from matplotlib.figure import Figure  # the object interface: no global state, no display

    fig = Figure(figsize=(9, 3.2), layout="constrained")
    axes = fig.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    return fig, axes


def _svg(fig: Any) -> str:
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
