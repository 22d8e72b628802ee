"""What training makes of a prompt file, for people to look at before anything is paid for.

Every row goes through the functions that the stream itself calls: the file check (`prompt_files.check_rows`) and
`prompts.prepare_row`. Nothing here decides anything; it counts.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pipelines.build_features import ROWS_TRIED_FIRST
from pipelines.capture import CaptureConfig
from pipelines.prompt_files import check_rows
from pipelines.prompt_rows import Row, is_conversation, reasoning, tools, turns
from pipelines.prompts import TokenRow, UnusableRow, answer_prompt, prepare_row
from pipelines.regenerate import AnswerConfig

FIRST_IDS = 3


@dataclass(kw_only=True)
class Dropped:
    """Rows that are left out for one reason, in the words of the first of them."""

    count: int = 0
    first_ids: list[str] = field(default_factory=list)
    reason: str = ""

    def add(self, sample_id: str, reason: str) -> None:
        """Count one more row."""
        self.count += 1
        self.reason = self.reason or reason
        self.first_ids += [sample_id] if len(self.first_ids) < FIRST_IDS else []


@dataclass(kw_only=True)
class Inspection:
    """Figures of a prompt file. Tokens and reasons are of the `sampled` first rows, the rest is of all `rows`."""

    data: str
    max_length: int
    enable_thinking: bool
    rows: int = 0
    sampled: int = 0
    usable: int = 0
    to_answer: int = 0  # of the usable rows: the target answers them first
    tokens: int = 0  # of usable rows, after the cut
    supervised: int = 0  # of these
    truncated: int = 0
    truncated_tokens: int = 0
    lengths: dict[str, list[int]] = field(default_factory=dict)  # "up to": [rows before the cut, usable rows after it]
    problems: dict[str, Dropped] = field(default_factory=dict)  # training refuses the file
    dropped: dict[str, Dropped] = field(default_factory=dict)
    duplicate_ids: dict[str, int] = field(default_factory=dict)
    roles: dict[str, int] = field(default_factory=dict)
    with_thoughts: int = 0
    thoughts_supervised: int = 0
    with_tools: int = 0
    not_as_served: list[str] = field(default_factory=list)  # ids: the prompt that serving sends does not begin the row
    refusal: str | None = None  # why nothing would be trained on
    warnings: list[str] = field(default_factory=list)

    @property
    def supervised_share(self) -> float:
        """Supervised tokens of all usable tokens that are there already (answers to come are not)."""
        return self.supervised / self.tokens if self.tokens else 0.0


def inspect_prompts(
    data: str | Path,
    tokenizer: Any,
    answer: AnswerConfig,
    capture: CaptureConfig,
    *,
    num_rows: int | None = None,
    sample: int = 20_000,
    keep: int = 0,
) -> tuple[Inspection, list[TokenRow]]:
    """Check all rows, tokenise the first `sample`; the figures, and the first `keep` rows as training gets them.

    ValueError if the file cannot be read at all.
    """
    found = Inspection(data=str(data), max_length=capture.max_length, enable_thinking=answer.enable_thinking)
    kept: list[TokenRow] = []
    seen: Counter[str] = Counter()
    before: list[int] = []
    after: list[int] = []
    roles: Counter[str] = Counter()
    first_failure = None
    for checked in check_rows(data, num_rows):
        found.rows += 1
        row = checked.row
        if row is not None:
            seen[row["sample_id"]] += 1
        if checked.problem or row is None:
            problem = checked.problem or "could not be read"
            _note(found.problems, row["sample_id"] if row else f"line {checked.line}", problem)
            continue
        roles.update(_roles(row))
        if found.sampled >= sample:
            continue
        found.sampled += 1
        prepared = prepare_row(row, tokenizer, answer, capture)
        if prepared.full_length is not None:
            before.append(prepared.full_length)
        if isinstance(prepared, UnusableRow):
            _note(found.dropped, prepared.sample_id, prepared.reason)
            if prepared.failed and found.rows <= ROWS_TRIED_FIRST:
                first_failure = first_failure or prepared.reason
            continue
        after.append(len(prepared.input_ids))
        _count(found, row, prepared, tokenizer, answer)
        kept += [prepared] if len(kept) < keep else []
    found.duplicate_ids = {sample_id: count for sample_id, count in seen.items() if count > 1}
    found.roles = dict(roles.most_common())
    found.lengths = _histogram(before, after)
    found.refusal = _refusal(found, first_failure)
    found.warnings = _warnings(found)
    return found, kept


def render_row(row: TokenRow, tokenizer: Any, *, colour: bool, limit: int = 600) -> str:
    """A row's text with what is supervised in green, or between [[ and ]]. Long stretches are shortened to `limit`."""
    pieces: list[str] = []
    mask = row.loss_mask or [0] * len(row.input_ids)
    start = 0
    for end in range(1, len(mask) + 1):
        if end < len(mask) and mask[end] == mask[start]:
            continue
        text = tokenizer.decode(row.input_ids[start:end], skip_special_tokens=False)
        if len(text) > limit:
            text = f"{text[: limit // 2]} …{len(text) - limit:,} characters… {text[-(limit - limit // 2) :]}"
        marks = ("\033[30;42m", "\033[0m") if colour else ("[[", "]]")
        text = printable(text)
        pieces.append(text.join(marks) if mask[start] else text)
        start = end
    return "".join(pieces)


def printable(text: str, keep: str = "\n\t") -> str:
    """Text of a file as a terminal may have it: what it would obey, hide or turn around is escaped, save `keep`.

    Two joiners without a width stay: they are spelling in some scripts, and hold emoji together.
    """
    shown = keep + "\u200c\u200d"
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in shown
        else character
        for character in text
    )


def printable_id(sample_id: str) -> str:
    """An id on one line."""
    return printable(sample_id, keep="")


def _count(found: Inspection, row: Row, prepared: TokenRow, tokenizer: Any, answer: AnswerConfig) -> None:
    """Add a usable row to the figures."""
    found.usable += 1
    found.to_answer += prepared.needs_answer
    found.tokens += len(prepared.input_ids)
    found.supervised += sum(prepared.loss_mask)
    cut = prepared.full_length - len(prepared.input_ids)
    found.truncated += cut > 0
    found.truncated_tokens += cut
    if not is_conversation(row) or row.get("input_ids") is not None:
        return
    found.with_tools += tools(row) is not None
    if prepared.needs_answer:
        return
    messages = turns(row)
    thoughts = [reasoning(message) for message in messages if message["role"] == "assistant"]
    if any(thoughts):
        found.with_thoughts += 1
        supervised = [token for token, value in zip(prepared.input_ids, prepared.loss_mask, strict=True) if value]
        text = tokenizer.decode(supervised, skip_special_tokens=False)
        found.thoughts_supervised += any(thought and thought[:80] in text for thought in thoughts)
    if messages[-1]["role"] == "assistant" and any(message["role"] == "user" for message in messages):
        prompt = answer_prompt(row, tokenizer, enable_thinking=answer.enable_thinking)[: len(prepared.input_ids)]
        if prepared.input_ids[: len(prompt)] != prompt:
            found.not_as_served.append(row["sample_id"])


def _refusal(found: Inspection, first_failure: str | None) -> str | None:
    """Why training would refuse the file or be left without rows."""
    if found.problems:
        first = next(iter(found.problems.values()))
        return f"training refuses the file until all its rows are in order; the first: {first.reason}"
    if first_failure:
        return (
            f"training stops before it starts when one of the first {ROWS_TRIED_FIRST} rows is wrong: {first_failure}"
        )
    if not found.usable:
        commonest = max(found.dropped.values(), key=lambda dropped: dropped.count)
        return f"none of {found.sampled:,} rows can be trained on; most often: {commonest.reason}"
    return None


def _warnings(found: Inspection) -> list[str]:
    """What training would do without complaint and may not be meant."""
    warnings: list[str] = []
    dropped = sum(reason.count for reason in found.dropped.values())
    if dropped > 0.05 * found.sampled:
        warnings.append(f"{dropped:,} of {found.sampled:,} rows are dropped")
    if found.truncated > 0.05 * max(1, found.usable):
        warnings.append(
            f"{found.truncated:,} rows are cut at capture.max_length={found.max_length}: the ends of their answers, "
            "and so their end-of-turn tokens, are not learnt"
        )
    if found.with_thoughts > found.thoughts_supervised:
        warnings.append(
            f"{found.with_thoughts - found.thoughts_supervised:,} rows have thoughts that the chat template leaves "
            "out (those of earlier turns, or all): they are not learnt"
        )
    if found.thoughts_supervised and not found.enable_thinking:
        warnings.append(
            f"{found.thoughts_supervised:,} rows teach thoughts, but answer.enable_thinking=false: set it to true if "
            "the drafter will serve thinking requests"
        )
    if found.enable_thinking and found.usable - found.to_answer > found.thoughts_supervised:
        warnings.append(
            f"{found.usable - found.to_answer - found.thoughts_supervised:,} rows have answers without a thought to "
            "learn, but answer.enable_thinking=true: let the target answer (answer.when=always)"
        )
    if found.not_as_served:
        ids = ", ".join(map(printable_id, found.not_as_served[:FIRST_IDS]))
        warnings.append(
            f"{len(found.not_as_served):,} rows do not begin with the prompt that serving sends with "
            f"enable_thinking={str(found.enable_thinking).lower()} ({ids})"
        )
    share = found.supervised_share
    if found.usable > found.to_answer and share < 0.05:
        warnings.append(f"only {share:.1%} of the tokens are supervised: check roles, or use shorter prompts")
    if found.to_answer and found.usable > found.to_answer:
        warnings.append(
            f"{found.to_answer:,} rows are answered by the target, {found.usable - found.to_answer:,} keep answers "
            "that may be another model's: answer.when=always lets the target answer all"
        )
    return warnings


def _roles(row: Row) -> Iterable[str]:
    if not is_conversation(row):
        return ["tokens" if row.get("input_ids") is not None else "text"]
    return [turn["role"] for turn in turns(row)]


def _note(reasons: dict[str, Dropped], sample_id: str, reason: str) -> None:
    """Count a reason; figures, quotes and places differ from row to row, and are left out to tell reasons apart."""
    kind = re.sub(r"^\S+:\d+: ", "", reason)
    kind = re.sub(r"'[^']*'?|\"[^\"]*\"?|\([^)]*\)|\d[\d,.]*|\[[^\]]*\]?|\{[^}]*\}?", "…", kind)
    reasons.setdefault(kind, Dropped()).add(sample_id, reason)


def _histogram(before: Sequence[int], after: Sequence[int]) -> dict[str, list[int]]:
    """Rows by length, before and after the cut, in steps of two: {"up to 64": [before, after]}."""
    longest = max([*before, *after], default=0)
    bounds = [64]
    while bounds[-1] < longest:
        bounds.append(2 * bounds[-1])
    counts = {bound: [0, 0] for bound in bounds}
    for side, lengths in enumerate((before, after)):
        for length in lengths:
            counts[next(bound for bound in bounds if length <= bound)][side] += 1
    return {f"up to {bound:,}": both for bound, both in counts.items()}


def describe_inspection(found: Inspection) -> str:
    """The figures for people."""
    readable = found.rows - sum(problem.count for problem in found.problems.values())
    rest = "" if found.sampled == readable else f", tokens of the first {found.sampled:,}"
    kept = found.usable - found.to_answer
    lines = [
        f"rows        {found.rows:,}{rest}: {kept:,} with answers, {found.to_answer:,} that the target answers first",
        f"tokens      {found.tokens:,}, {found.supervised:,} of them supervised ({found.supervised_share:.1%})"
        + (", answers to come not counted" if found.to_answer else ""),
        f"cut         {found.truncated:,} rows at capture.max_length={found.max_length}"
        + (f", {found.truncated_tokens:,} tokens in all" if found.truncated else ""),
        "roles       " + (", ".join(f"{role} {count:,}" for role, count in found.roles.items()) or "none"),
        f"thoughts    {found.with_thoughts:,} rows have some, {found.thoughts_supervised:,} teach one"
        f" (answer.enable_thinking={str(found.enable_thinking).lower()}); {found.with_tools:,} rows have tools",
        "",
        "length, tokens            rows   after the cut",
        *(f"  {name:>16} {counts[0]:>11,} {counts[1]:>15,}" for name, counts in found.lengths.items()),
    ]
    for title, reasons in (("wrong in the file", found.problems), ("dropped", found.dropped)):
        lines += ["", title] if reasons else []
        for reason in sorted(reasons.values(), key=lambda reason: -reason.count):
            more = ", …" if reason.count > len(reason.first_ids) else ""
            ids = ", ".join(map(printable_id, reason.first_ids))
            lines.append(f"  {reason.count:>7,}  {printable(reason.reason)}  [{ids}{more}]")
    if found.duplicate_ids:
        ids = [
            f"{printable_id(sample_id)} ({count}x)"
            for sample_id, count in islice(found.duplicate_ids.items(), FIRST_IDS)
        ]
        lines += ["", f"ids that are not unique: {len(found.duplicate_ids):,}, such as {', '.join(ids)}"]
    lines += [f"\nwarning: {warning}" for warning in found.warnings]
    return "\n".join(lines)
