"""Prompts for a target whose user has none: the target writes them itself, in the place of a user (Magpie).

The target goes on from where its chat template lets a user speak, until the turn ends. Draw number i is seeded by
(seed, i) and filters go through the draws in order, so what is kept depends neither on batches nor on interruptions.
Draws stay in a folder beside the output: another number of prompts, or another filter, draws no more than it has to.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from domino_core.atomic_files import write_atomically
from domino_core.json_files import read_json, read_object
from pipelines.capture import CaptureConfig
from pipelines.feature_store import digest
from pipelines.self_prompts_draw import DrawParts, draw_on_engines, draws_in_order
from pipelines.self_prompts_filters import FILTERS, Prompt, Sieve, statistics, user_texts
from pipelines.self_prompts_near import LOWEST_THRESHOLD
from pipelines.self_prompts_turn import UserTurn, user_turn, with_prefix

# What decides a draw, beside the target. The rest decides which draws are kept, and may change from run to run.
_DRAWING = ("system_prompt", "temperature", "top_p", "top_k", "seed", "max_tokens")
_ROWS = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ]
)


@dataclass(frozen=True, kw_only=True)
class SelfPromptConfig:
    """How the target draws prompts, and which of them are kept."""

    system_prompt: str = ""  # before the user's turn; "": what the template writes there by itself
    keep_system_prompt: bool = False  # write it into the rows, so that answers are given under it too
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0
    max_tokens: int = 512  # of a draw; one that has not ended by then is no prompt
    max_draws: int | None = None  # None: ten for every prompt that is asked for

    min_tokens: int = 4
    longest: int | None = None  # tokens of a prompt; None: all that ended
    min_distinct: float = 0.5  # share of different token 3-grams below which a text repeats itself
    near_duplicate: float = 0.7  # Jaccard index of word 3-grams from which two prompts are the same; 1: identical sets
    exclude: tuple[str, ...] = ()  # prompt files (evaluation sets) whose near-copies are dropped

    def __post_init__(self) -> None:
        if self.temperature <= 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            values = f"temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k}"
            raise ValueError(f"self_prompts: {values}; need temperature > 0, 0 < top_p <= 1, top_k >= 0 (0 is off)")
        longest = self.max_tokens if self.longest is None else self.longest
        if not 1 <= self.min_tokens <= longest <= self.max_tokens or self.max_tokens < 2:
            values = f"min_tokens={self.min_tokens}, longest={self.longest}, max_tokens={self.max_tokens}"
            raise ValueError(
                f"self_prompts: {values}; need 1 <= min_tokens <= longest <= max_tokens, and max_tokens > 1"
            )
        if self.max_draws is not None and self.max_draws < 1:
            raise ValueError(f"self_prompts.max_draws={self.max_draws}: expected at least 1, or none")
        if not 0 <= self.min_distinct <= 1:
            raise ValueError(f"self_prompts.min_distinct={self.min_distinct}: expected a share, from 0 (off) to 1")
        if not LOWEST_THRESHOLD <= self.near_duplicate <= 1:
            expected = f"expected {LOWEST_THRESHOLD} (below, pairs would be missed) to 1 (the same n-grams)"
            raise ValueError(f"self_prompts.near_duplicate={self.near_duplicate}: {expected}")
        if self.keep_system_prompt and not self.system_prompt:
            raise ValueError("self_prompts.keep_system_prompt=true without self_prompts.system_prompt: give one")


@dataclass(frozen=True, kw_only=True)
class PromptRun:
    """One file of prompts to be drawn, and perhaps a second one, held out."""

    target: str
    num: int  # prompts in the output, after all filters
    output: str  # .jsonl or .parquet
    heldout: int = 0
    heldout_output: str | None = None
    config: SelfPromptConfig
    capture: CaptureConfig  # the engines; nothing is captured
    turn: UserTurn

    @property
    def draws(self) -> Path:
        """The draws, in files named by the first of them and how many they are."""
        return Path(f"{self.output}.draws")

    @property
    def enough(self) -> Path:
        """There when no more draws are wanted: engines then let the rest of their work be."""
        return self.draws / "enough"

    @property
    def info(self) -> Path:
        """What was asked of whom, and what came of it."""
        return Path(f"{self.output}.info.json")

    @property
    def wanted(self) -> int:
        """Prompts in both files."""
        return self.num + self.heldout

    @property
    def max_draws(self) -> int:
        """After which the run gives up."""
        return self.config.max_draws or 10 * self.wanted

    @cached_property
    def asked(self) -> dict[str, Any]:
        """Every setting, the target and its chat template."""
        from domino_core.target import load_tokenizer, target_hash, tokenizer_hash

        tokenizer = load_tokenizer(self.target)
        identity = {"target_hash": target_hash(self.target), "tokenizer_hash": tokenizer_hash(tokenizer)}
        files = {"num": self.num, "heldout": self.heldout, "heldout_output": self.heldout_output}
        return {"target": self.target, **identity, **files, **asdict(self.config)}

    @property
    def drawing(self) -> dict[str, Any]:
        """What of it decides the draws."""
        return {key: self.asked[key] for key in ("target_hash", "tokenizer_hash", *_DRAWING)}

    def summary(self) -> str:
        """Counts of a finished run, for people."""
        info = read_json(self.info)
        counts, figures = info["counts"], info["statistics"]
        lines = [describe_counts(counts)]
        lines.append("tokens      " + ", ".join(f"{name} {value}" for name, value in figures["tokens"].items()))
        frequent = [f"{opening!r} {count}" for opening, count in list(figures["frequent_openings"].items())[:5]]
        lines.append(f"openings    {figures['distinct_openings']:.1%} different; {', '.join(frequent)}")
        lines.append(f"written     {self.num:,} prompts: {self.output}")
        if self.heldout:
            lines.append(f"held out    {self.heldout:,} prompts: {self.heldout_output}")
        return "\n".join(lines)


def prompt_run(
    *,
    target: str,
    num: int,
    output: str | Path,
    config: SelfPromptConfig,
    capture: CaptureConfig,
    heldout: int = 0,
    heldout_output: str | Path | None = None,
) -> PromptRun:
    """Check before work starts. ValueError: no place to draw at, bad outputs or settings, or draws there to others."""
    from domino_core.target import load_tokenizer, read_target_config

    if num < 1 or heldout < 0:
        raise ValueError(f"--num {num}, --heldout {heldout}: need at least one prompt, and no negative number held out")
    if bool(heldout) != bool(heldout_output):
        raise ValueError(f"--heldout {heldout}, --heldout-output {heldout_output}: give both or neither")
    files = [Path(path) for path in (output, heldout_output) if path]
    if len({path.resolve() for path in files}) < len(files):
        raise ValueError(f"--output and --heldout-output are both {output}; name two files")
    for path in files:
        if path.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"output {path}: name it .jsonl or .parquet")
    found = read_target_config(target)
    if capture.max_length >= found.max_position_embeddings:
        limit = found.max_position_embeddings
        raise ValueError(f"capture.max_length={capture.max_length}: {target} takes {limit} positions; one stays free")
    tokenizer = load_tokenizer(target)
    turn = user_turn(tokenizer, found.eos_token_ids, config.system_prompt)
    room = capture.max_length - len(turn.prefix_ids)
    if config.max_tokens > room:
        before = (
            f"{len(turn.prefix_ids)} tokens before a prompt leave {room} of capture.max_length={capture.max_length}"
        )
        raise ValueError(
            f"self_prompts.max_tokens={config.max_tokens}: {before}; lower it, or raise capture.max_length"
        )
    for path in config.exclude:
        if not any(True for _ in user_texts(path)):
            raise ValueError(f"{path}: self_prompts.exclude names it, and no user says anything in it")
    run = PromptRun(
        target=str(target),
        num=num,
        output=str(output),
        heldout=heldout,
        heldout_output=str(heldout_output) if heldout_output else None,
        config=config,
        capture=capture,
        turn=turn,
    )
    return _resumed(run, files, tokenizer)


def _resumed(run: PromptRun, files: list[Path], tokenizer: Any) -> PromptRun:
    """The run, going on from what is there. ValueError if what is there is not its own."""
    before = read_object(run.info) if run.info.exists() else {}
    if before and not (isinstance(before.get("prefix"), str) and isinstance(before.get("asked"), dict)):
        raise ValueError(f"{run.info} belongs to another job; give another output")
    ours = {run.output, before["asked"].get("heldout_output")} if before else set()
    for path in files:
        if path.exists() and str(path) not in ours:
            raise ValueError(f"{path} is there already and was not made by this command; give another output")
    if not before:
        return run
    changed = [key for key, value in run.drawing.items() if before["asked"].get(key) != value]
    if changed:
        remedy = f"give another output, or remove what begins with {run.output}"
        raise ValueError(f"{run.output} was begun with other settings ({', '.join(changed)}); {remedy}")
    # Some templates write the date of the day: a run that goes on tomorrow must go on with today's.
    return replace(run, turn=with_prefix(run.turn, before["prefix"], tokenizer))


def make_prompts(run: PromptRun, draw_parts: DrawParts = draw_on_engines) -> Generator[tuple[int, int]]:
    """Draw until there are enough prompts, and write them; yields (prompts, draws) so far.

    `draw_parts` writes the parts that are missing, in their order. ValueError with the counts if max_draws are not
    enough; the draws stay, and a run with more of them goes on.
    """
    from domino_core.target import load_tokenizer

    tokenizer = load_tokenizer(run.target)
    sieve = Sieve(config=run.config, turn=run.turn, tokenizer=tokenizer)
    if not run.info.exists():
        _write_info(run, {})
    with closing(draws_in_order(run, draw_parts)) as parts:
        for part in parts:
            for draw in part:
                sieve.take(draw)
                if len(sieve.kept) == run.wanted:
                    break
            yield len(sieve.kept), sieve.num_draws
            if len(sieve.kept) == run.wanted:
                run.enough.touch()
                break
    counts = {"draws": sieve.num_draws, "kept": len(sieve.kept)}
    counts |= {name: sieve.counts[name] for name in FILTERS}
    if len(sieve.kept) == run.wanted:
        _write(run, sieve.kept)
    _write_info(
        run,
        {"counts": counts, "statistics": statistics(sieve.kept, sieve.counts), "examples": sieve.examples},
    )
    if len(sieve.kept) < run.wanted:
        remedy = f"raise self_prompts.max_draws, or see in {run.info} what was dropped and change the settings"
        raise ValueError(f"{run.wanted:,} prompts were asked for; {describe_counts(counts)}; {remedy}")


def describe_counts(counts: dict[str, int]) -> str:
    """`500 prompts of 731 draws (68.4%): 120 unfinished, …`"""
    dropped = [f"{counts[name]:,} {name}" for name in FILTERS if counts[name]]
    share = counts["kept"] / max(1, counts["draws"])
    return (
        f"{counts['kept']:,} prompts of {counts['draws']:,} draws ({share:.1%}): {', '.join(dropped) or 'none dropped'}"
    )


def _write(run: PromptRun, prompts: list[Prompt]) -> None:
    """Both files. The first prompts are held out, so that asking for more of the others leaves them as they are."""
    # Of the run, so that files of several targets or seeds can be put together.
    mark = digest([json.dumps(run.drawing, sort_keys=True), run.turn.prefix])[:8]
    config = run.config
    system = [{"role": "system", "content": config.system_prompt}] if config.keep_system_prompt else []
    rows = [
        {"id": f"self-{mark}-{prompt.index}", "messages": [*system, {"role": "user", "content": prompt.text}]}
        for prompt in prompts
    ]
    if run.heldout_output:
        _write_rows(Path(run.heldout_output), rows[: run.heldout])
    _write_rows(Path(run.output), rows[run.heldout :])


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    beside = Path(f"{path}.tmp")
    if path.suffix == ".jsonl":
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows, schema=_ROWS), beside)
    beside.replace(path)


def _write_info(run: PromptRun, found: dict[str, Any]) -> None:
    place = {"prefix": run.turn.prefix, "end": run.turn.end}
    text = json.dumps({"asked": run.asked, **place, **found}, indent=1, ensure_ascii=False)
    write_atomically(run.info, text.encode())
