"""Plain decoding against Domino by the engine that serves, on random weights with an imposed acceptance (imposed.py).

Only rounds are timed: prompts are in before. A window is a number of rounds in which a row gets about `tokens` tokens,
so that all arms decode behind the same contexts. Plain decoding is the same engine without a drafter.
"""

import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from domino_core.drafter import Drafter
from domino_core.engine import Engine, Request
from domino_core.target_model import Target
from pipelines.bench_parts import synchronize
from pipelines.imposed import ImposedAcceptance

Tell = Callable[[str], None]
Table = dict[int, dict[str, Any]]
SETTLE = 6  # rounds before windows: outputs may come a round late, and a choice of length has to see the new τ
FEWEST_ROUNDS = 10
HEADLINE_TAU = 7.17  # published for Qwen3-8B


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    taus: tuple[float, ...] = (3.87, 5.18, HEADLINE_TAU, 10.03)
    contexts: tuple[int, ...] = (128, 1024, 2048, 4096, 8192)  # of `single`
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # of `load`
    load_context: int = 512  # with all windows below 1024: the engine prepares rounds by powers of two of the context
    tokens: int = 96  # of a row in a window of `load`, and of plain decoding
    single_tokens: int = 256  # of a row in a window of `single`: a lone row needs more rounds to have its τ
    repeats: int = 3
    parts_context: int = 1024
    parts_repeats: int = 20


PLANS = {
    "full": Plan(),
    "quick": Plan(taus=(HEADLINE_TAU,), contexts=(128, 2048), concurrencies=(1, 8, 32, 64), repeats=1, parts_repeats=8),
    "tiny": Plan(
        taus=(3.87, HEADLINE_TAU),
        contexts=(8, 24),
        concurrencies=(1, 3),
        load_context=12,
        tokens=24,
        single_tokens=48,
        repeats=2,
        parts_context=16,
        parts_repeats=2,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Window:
    """What was counted while rounds were timed. drafts: rounds by the number of drafts that they verified."""

    rows: int
    rounds: int
    seconds: float
    tokens: int
    tau: float
    drafts: dict[int, int]


@dataclass(kw_only=True)
class Arm:
    """An engine with the rows of one measurement. rule: None for plain decoding."""

    engine: Engine
    rule: ImposedAcceptance | None
    ids: list[int] = dataclasses.field(default_factory=list)

    def impose(self, tau: float) -> None:
        assert self.rule is not None, "plain decoding accepts no drafts"
        self.rule.impose(tau)

    def fill(self, rows: int, context: int, max_tokens: int) -> None:
        """Drop all rows and take in new ones, until all of them decode."""
        for request_id in self.ids:
            self.engine.cancel(request_id)
        vocabulary, length = self.engine.target.config.vocab_size, self.engine.num_verify
        prompts = [tuple((7 + 31 * row + 17 * i) % vocabulary for i in range(context)) for row in range(rows)]
        self.ids = [self.engine.add(Request(prompt_ids=prompt, max_tokens=max_tokens)) for prompt in prompts]
        self.engine.num_verify = 0  # rows that are in early decode beside the others' prompts: by one token a step
        while self.engine.num_running < rows:
            self.engine.step()
        self.engine.num_verify = length
        for _ in range(SETTLE):
            self.engine.step()

    def window(self, rounds: int) -> Window:
        """Time a number of rounds of the rows that are in."""
        engine, device, drafts = self.engine, self.engine.target.device, Counter[int]()
        rows, before, tokens = engine.num_running, engine.acceptance.copy(), 0
        synchronize(device)
        started = time.perf_counter()
        for _ in range(rounds):
            tokens += sum(len(output.tokens) for output in engine.step())
            drafts[engine.last_verify] += 1
        synchronize(device)
        seconds = time.perf_counter() - started
        assert engine.num_running == rows == len(self.ids), "a row ended within the window"
        counted, accepted = engine.acceptance.rounds - before.rounds, engine.acceptance.accepted - before.accepted
        return Window(
            rows=rows, rounds=rounds, seconds=seconds, tokens=tokens, tau=1 + accepted / counted, drafts=dict(drafts)
        )


def plain_arm(target: Target, *, max_rows: int, max_length: int) -> Arm:
    return Arm(engine=_ready(Engine(target, None, max_rows=max_rows, max_length=max_length)), rule=None)


def imposed_arm(
    target: Target, drafter: Drafter, *, max_rows: int, max_length: int, num_verify: Literal["auto"] | None
) -> Arm:
    rule = ImposedAcceptance(drafter.config.num_drafts, max_rows, target.device)
    rule.impose(HEADLINE_TAU)
    engine = Engine(target, drafter, max_rows=max_rows, max_length=max_length, num_verify=num_verify, accept=rule)
    return Arm(engine=_ready(engine), rule=rule)


def _ready(engine: Engine) -> Engine:
    """The engine with everything set up that its first rounds would set up."""
    engine.warm_up()
    return engine


def rounds_for(tokens: int, tau: float) -> int:
    """Rounds of a window."""
    return max(FEWEST_ROUNDS, math.ceil(tokens / tau))


def room_for(plan: Plan, tokens: int, *, windows: int, rows: int, num_drafts: int) -> int:
    """Tokens that a row may get while it is measured: in windows, while they settle and while other rows join."""
    most = max(plan.tokens, *(rounds_for(tokens, tau) * tau for tau in plan.taus))
    return math.ceil(windows * most + SETTLE * max(plan.taus)) + rows + 4 * (num_drafts + 1)


def figures(windows: Sequence[Window]) -> dict[str, Any]:
    """Of all windows of a point. ms_per_round: their median; tokens_per_s: tokens of all their rounds, at that pace."""
    rounds = sum(window.rounds for window in windows)
    drafts = sum((Counter(window.drafts) for window in windows), Counter[int]())
    seconds_per_round = statistics.median(window.seconds / window.rounds for window in windows)
    return {
        "tokens_per_s": sum(window.tokens for window in windows) / rounds / seconds_per_round,
        "ms_per_round": 1e3 * seconds_per_round,
        "tau": sum(window.tau * window.rounds for window in windows) / rounds,
        "verified": sum(length * count for length, count in drafts.items()) / rounds,
        "rounds": [window.rounds for window in windows],
        "seconds": [window.seconds for window in windows],
    }


def single_table(target: Target, drafter: Drafter, plan: Plan, table: Table, tell: Tell) -> None:
    """One row: by context, plain decoding and each τ with whole blocks verified, in turns. Fills `table`."""
    room = room_for(plan, plan.single_tokens, windows=1, rows=1, num_drafts=drafter.config.num_drafts)
    max_length = max(plan.contexts) + room
    plain = plain_arm(target, max_rows=1, max_length=max_length)
    imposed = imposed_arm(target, drafter, max_rows=1, max_length=max_length, num_verify=None)
    tell(f"context  {_HEAD}")
    for context in plan.contexts:
        plain_windows: list[Window] = []
        windows: dict[float, list[Window]] = {tau: [] for tau in plan.taus}
        for _ in range(plan.repeats):
            plain.fill(1, context, room)
            plain_windows.append(plain.window(plan.tokens))
            for tau, measured in windows.items():
                imposed.impose(tau)
                imposed.fill(1, context, room)
                measured.append(imposed.window(rounds_for(plan.single_tokens, tau)))
        base = figures(plain_windows)
        table[context] = {"plain": base, "domino": {}}
        for tau, measured in windows.items():
            found = _against(base, measured, tau)
            table[context]["domino"][f"{tau:g}"] = found
            tell(f"{context:7}  {_line(base, found)}")


def load_table(target: Target, drafter: Drafter, plan: Plan, table: Table, tell: Tell) -> None:
    """By rows decoded together: plain decoding, and each τ with whole blocks verified and with as much as pays.

    Fills `table`. The engine learns what acceptance it has, so τ is the outer loop, and within it many rows come first.
    """
    most = max(plan.concurrencies)
    room = room_for(plan, plan.tokens, windows=plan.repeats, rows=most, num_drafts=drafter.config.num_drafts)
    context, max_length = plan.load_context, plan.load_context + room
    plain = plain_arm(target, max_rows=most, max_length=max_length)
    for rows in plan.concurrencies:
        plain.fill(rows, context, room)
        found = figures([plain.window(plan.tokens) for _ in range(plan.repeats)])
        table[rows] = {"plain": found, "fixed": {}, "auto": {}}
    del plain  # its caches make room for the other arm's
    imposed = imposed_arm(target, drafter, max_rows=most, max_length=max_length, num_verify="auto")
    lengths: dict[str, Literal["auto"] | None] = {"fixed": None, "auto": "auto"}
    tell(f"rows  length  {_HEAD}")
    for tau in plan.taus:
        imposed.impose(tau)
        for rows in sorted(plan.concurrencies, reverse=True):
            for name, length in lengths.items():
                imposed.engine.num_verify = length
                windows: list[Window] = []
                for _ in range(max(1, 4 // rows)):  # few rows need more rounds to have their τ
                    imposed.fill(rows, context, room)
                    windows += [imposed.window(rounds_for(plan.tokens, tau)) for _ in range(plan.repeats)]
                found = _against(table[rows]["plain"], windows, tau)
                table[rows][name][f"{tau:g}"] = found
                tell(f"{rows:4}  {name:6}  {_line(table[rows]['plain'], found)}")


def _against(plain: dict[str, Any], windows: Sequence[Window], tau: float) -> dict[str, Any]:
    found = figures(windows)
    return {"aim": tau, "speedup": found["tokens_per_s"] / plain["tokens_per_s"], **found}


_HEAD = "τ aim  τ had   plain tok/s   Domino tok/s   ratio   ms/round   drafts"


def _line(plain: dict[str, Any], found: dict[str, Any]) -> str:
    return (
        f"{found['aim']:5.2f}  {found['tau']:5.2f}   {plain['tokens_per_s']:11.1f}   {found['tokens_per_s']:12.1f}   "
        f"{found['speedup']:5.2f}   {found['ms_per_round']:8.2f}   {found['verified']:6.1f}"
    )
