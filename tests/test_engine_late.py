"""The engine as it runs on a card, reading a round when the next one is on its way, with graphs that are none."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_core.decode import Drawn, RoundShape
from domino_core.decode_state import PASS_LENGTHS, DecodeState, PromptChunk
from domino_core.engine import Engine
from domino_core.request import Request
from domino_core.round_graphs import RoundGraphs, _Graph, row_counts
from domino_core.sampling import RowSampling
from domino_core.sampling_params import SamplingParams
from domino_core.target import load_target
from domino_core.target_model import random_target
from tests.serving import KnownTexts
from tests.test_engine import MAX_TOKENS, PROMPTS, REQUESTS, drain, plain_texts, tokens_of


class LateRounds:
    """Stands where RoundGraphs does: rounds of padded batches, whose logits the next one overwrites.

    The bound on the keys is checked and then made exact, as a lone row's attention on a CPU wants it.
    """

    runs: list[int]  # rows of each round of the engine that was made last
    pool = None

    def __init__(self, advance: Callable[..., Drawn], state: DecodeState, max_rows: int) -> None:
        self.advance, self.state, self.row_counts = advance, state, row_counts(max_rows)
        LateRounds.runs = []

    def run(self, settings: list[SamplingParams], num_drafts: int, num_keys: int) -> Drawn:
        state, active = self.state, len(settings)
        num_rows = next(count for count in self.row_counts if count >= active)
        lengths = state.length_B[:num_rows].tolist()
        if any(state.active_B):  # not while warming up, which knows no rows
            assert all(length <= known for length, known in zip(lengths[:active], state.lengths, strict=False))
            assert state.active_B[:num_rows].tolist() == [1] * active + [0] * (num_rows - active)
        assert lengths[active:] == [0] * (num_rows - active)
        assert max(lengths) + num_drafts + 1 <= num_keys <= state.target_cache.length
        sampling = RowSampling.stack([*settings, *[SamplingParams()] * (num_rows - active)])
        LateRounds.runs.append(active)
        return self.advance(sampling, RoundShape(num_rows, num_drafts, max(lengths) + num_drafts + 1))


class LatePrompts:
    """Stands where PromptGraphs does: its result is overwritten by the next one."""

    def __init__(self, take_in: Callable[[PromptChunk], Tensor], length: int, device: torch.device, pool: Any) -> None:
        self.take_in, self.length, self.last_1D = take_in, length, torch.zeros(0)

    @torch.inference_mode()
    def __call__(self, inputs: list[int], num_keys: int) -> Tensor:
        assert len(inputs) - 2 in PASS_LENGTHS
        assert num_keys == inputs[-2] + len(inputs) - 2 <= self.length
        self.last_1D.fill_(torch.nan)
        self.last_1D = self.take_in(PromptChunk.of(torch.tensor(inputs), num_keys))
        return self.last_1D


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("domino_core.rounds.RoundGraphs", LateRounds)
    monkeypatch.setattr("domino_core.rounds.PromptGraphs", LatePrompts)
    for module in ("rounds", "decode_state"):
        monkeypatch.setattr(f"domino_core.{module}.on_card", lambda tensor: True)


@pytest.fixture(scope="module")
def target(reference_dir):
    return load_target(reference_dir / "target")


@pytest.fixture(scope="module")
def texts(target):
    """Of rounds that are read at once."""
    return plain_texts(target)


@pytest.fixture
def drafter(reference_dir, texts):
    """Of its drafts none to all are right, by turns."""
    return KnownTexts(reference_dir / "target", [[*p, *text] for p, text in zip(PROMPTS, texts, strict=True)])


def test_a_round_is_read_when_the_next_one_is_on_its_way(target, texts, drafter):
    engine = Engine(target, drafter, max_rows=1, max_length=64)
    request_id = engine.add(REQUESTS[0])
    outputs = engine.step()
    assert (tokens_of(outputs, request_id), LateRounds.runs) == (
        texts[0][:1],
        [1],
    )  # the round is on its way
    outputs += engine.step()
    assert (engine.acceptance.rounds, LateRounds.runs) == (1, [1, 1])
    outputs += drain(engine)
    assert tokens_of(outputs, request_id) == texts[0][: MAX_TOKENS[0]]
    assert engine.acceptance.accepted > 0
    assert engine.acceptance.rounds <= len(LateRounds.runs) <= engine.acceptance.rounds + 1
    assert (engine.num_running, engine.has_work) == (0, False)


def test_no_round_is_launched_that_would_run_beyond_the_end_of_every_row(target):
    engine = Engine(target, None, max_rows=2, max_length=64)
    engine.generate([Request(prompt_ids=PROMPTS[0], max_tokens=9), Request(prompt_ids=PROMPTS[1], max_tokens=1)])
    assert len(LateRounds.runs) == 8  # the first token is the prompt's


def test_there_is_work_while_a_round_of_rows_that_are_gone_is_on_its_way(target):
    engine = Engine(target, None, max_rows=2, max_length=64)
    request_id = engine.add(Request(prompt_ids=PROMPTS[0], max_tokens=9))
    engine.step()
    engine.cancel(request_id)
    assert (engine.num_running, engine.has_work) == (0, True)
    with pytest.raises(AssertionError, match="warm_up needs the engine for itself"):
        engine.warm_up()
    assert engine.step() == []
    assert not engine.has_work
    assert engine.acceptance.rounds == 0


def test_a_text_may_use_the_whole_length_and_its_last_round_the_room_behind(target, texts, drafter):
    """A row that is at its end goes through one more round, from wherever the one before took it."""
    for tokens in range(14, 21):
        engine = Engine(target, drafter, max_rows=2, max_length=len(PROMPTS[0]) + tokens)
        ended = replace(REQUESTS[0], max_tokens=tokens)
        longer = Request(prompt_ids=PROMPTS[1], max_tokens=engine.max_length - 1)  # keeps rounds coming
        assert engine.generate([ended, longer])[0].tokens == texts[0][:tokens]


def arrivals(texts: list[list[int]], chance: random.Random) -> Iterator[tuple[Request, list[int]]]:
    """Requests in any order, three times each, some with a stop token or log-probabilities; what each should get."""
    indices = [*range(len(REQUESTS))] * 3
    chance.shuffle(indices)
    for index in indices:
        text, stop = texts[index][: MAX_TOKENS[index]], ()
        if chance.random() < 0.4:
            stop = (chance.choice(text),)
            text = text[: text.index(stop[0]) + 1]
        yield replace(REQUESTS[index], stop_token_ids=stop, logprobs=chance.choice((None, None, None, 2))), text


@pytest.mark.parametrize("max_rows", [1, 3, 6])
@pytest.mark.parametrize("with_drafter", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_whoever_comes_and_goes_every_output_is_plain_decodings(target, texts, drafter, with_drafter, seed, max_rows):
    """Rows leave by their budget, by a stop token and by being cancelled, others move and join, all under way."""
    chance = random.Random(f"{seed} {with_drafter} {max_rows}")
    engine = Engine(target, drafter if with_drafter else None, max_rows=max_rows, max_length=50)
    waiting = arrivals(texts, chance)
    wanted: dict[int, list[int]] = {}
    outputs, cancelled, arriving = [], set(), True
    while engine.has_work or arriving:
        while arriving and chance.random() < 0.4:
            arrival = next(waiting, None)
            arriving = arrival is not None
            if arrival is not None:
                wanted[engine.add(arrival[0])] = arrival[1]
        if wanted and chance.random() < 0.15:
            cancelled.add(request_id := chance.choice([*wanted]))
            engine.cancel(request_id)
        if chance.random() < 0.2:
            engine.num_verify = chance.choice((None, 0, 1, 4))
        heard = engine.step()
        assert not {output.request_id for output in heard} & cancelled
        outputs += heard
    for request_id, text in wanted.items():
        got = tokens_of(outputs, request_id)
        finished = [o for o in outputs if o.request_id == request_id and o.finish_reason]
        assert got == text[: len(got)]
        assert (len(finished) == 1) == (got == text) or request_id in cancelled
        assert got == text or request_id in cancelled
        for output in outputs:
            if output.request_id == request_id and output.logprobs is not None:
                assert [entry.token for entry in output.logprobs] == output.tokens
                assert all(entry.logprob <= 0 for entry in output.logprobs)
    own = {request_id: [o.acceptance for o in outputs if o.request_id == request_id][-1:] for request_id in wanted}
    heard_rounds = sum(each.rounds for acceptances in own.values() for each in acceptances)
    assert engine.acceptance.rounds == heard_rounds
    assert engine.num_running == engine.num_waiting == 0


def test_log_probabilities_are_those_of_rounds_read_at_once(target, texts, drafter, monkeypatch):
    wanted = [replace(request, logprobs=count) for request, count in zip(REQUESTS, (None, 3, 0, 5, 1), strict=True)]
    late = Engine(target, drafter, max_rows=3, max_length=64).generate(wanted)
    monkeypatch.setattr("domino_core.rounds.on_card", lambda tensor: False)
    for one, other in zip(late, Engine(target, drafter, max_rows=3, max_length=64).generate(wanted), strict=True):
        assert one.tokens == other.tokens
        assert [entry.logprob for entry in one.logprobs or []] == pytest.approx(
            [entry.logprob for entry in other.logprobs or []], abs=1e-4
        )


@pytest.mark.parametrize("num_verify", [None, 2, "auto"])
def test_warming_up_runs_every_batch_size_and_changes_no_output(target, texts, drafter, num_verify):
    engine = Engine(target, drafter, max_rows=6, max_length=64, num_verify=num_verify)
    steps = engine.warm_up_steps()
    assert LateRounds.runs == []
    for step in steps:
        step()
    assert set(LateRounds.runs) == {6, 4, 2, 1}
    assert LateRounds.runs == sorted(LateRounds.runs, reverse=True)  # the largest takes the memory that all share
    number = len(LateRounds.runs)
    for request, text, completion in zip(REQUESTS, texts, engine.generate(REQUESTS), strict=True):
        assert completion.tokens == text[: request.max_tokens]
    assert len(LateRounds.runs) - number <= engine.acceptance.rounds + 1  # nothing was measured a second time


def test_an_engine_that_is_dropped_leaves_nothing_behind(target, drafter):
    """Its caches may be most of a card's memory: they are not to wait until Python looks for circles."""
    gc.collect()
    gc.disable()
    try:
        engine = Engine(target, drafter, max_rows=2, max_length=64)
        engine.warm_up()
        engine.generate(REQUESTS[:2])
        cache = weakref.ref(engine._state.target_cache)
        del engine
        assert cache() is None
    finally:
        gc.enable()


def test_adapting_asked_for_while_rows_decode_verifies_all_until_they_are_through(target, texts, drafter):
    engine = Engine(target, drafter, max_rows=2, max_length=64, num_verify=1)
    first = engine.add(REQUESTS[0])
    outputs = engine.step()
    engine.num_verify = "auto"
    outputs += engine.step() + engine.step()
    assert engine.last_verify == drafter.config.num_drafts
    outputs += drain(engine)
    assert tokens_of(outputs, first) == texts[0][: MAX_TOKENS[0]]
    before = len(LateRounds.runs)
    assert engine.generate([REQUESTS[2]])[0].tokens == texts[2][: MAX_TOKENS[2]]
    assert len(LateRounds.runs) - before > 31  # it was measured first


def test_nothing_is_measured_where_nothing_is_drafted(target):
    engine = Engine(target, None, max_rows=2, max_length=64, num_verify="auto")
    engine.generate([Request(prompt_ids=PROMPTS[0], max_tokens=5)])
    assert len(LateRounds.runs) == 4
    assert engine.last_verify == 0


def test_graphs_are_as_many_as_the_limit_and_the_longest_unused_goes_first(target, monkeypatch):
    """The keeping alone: what is captured here is nothing."""
    captured: list[int] = []
    nothing: Any = SimpleNamespace(replay=lambda: None)

    def capture(self, sampling, loaded, shape):
        captured.append(shape.num_drafts)
        return _Graph(graph=nothing, sampling=sampling, loaded=loaded, drawn=nothing)

    monkeypatch.setattr(RoundGraphs, "_capture", capture)
    monkeypatch.setattr("domino_core.round_graphs.MOST_GRAPHS", 2)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs = RoundGraphs(nothing, DecodeState.allocate(target, None, 2, 30), 2)
    settings = [SamplingParams()]
    for num_drafts in (0, 1, 0, 2, 0, 1):
        graphs.run(settings, num_drafts, 20)
    assert captured == [0, 1, 2, 1]


def test_after_warming_up_short_requests_capture_nothing(target, monkeypatch):
    """Also where a quarter of the longest text is another graph's."""
    captured: list[RoundShape] = []
    nothing: Any = SimpleNamespace(replay=lambda: None)

    def capture(self, sampling, loaded, shape):
        captured.append(shape)
        drawn = Drawn(
            drawn_BX=torch.zeros(shape.num_rows, shape.num_drafts + 2, dtype=torch.int64),
            logits_BTV=torch.zeros(shape.num_rows, shape.num_drafts + 1, 8),
        )
        return _Graph(graph=nothing, sampling=sampling, loaded=loaded, drawn=drawn)

    monkeypatch.setattr(RoundGraphs, "_capture", capture)
    monkeypatch.setattr("domino_core.rounds.RoundGraphs", RoundGraphs)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    roomy = random_target(replace(target.config, max_position_embeddings=4096))
    engine = Engine(roomy, None, max_rows=2, max_length=2048)
    sampled = SamplingParams(temperature=1.0)
    engine.warm_up([sampled])
    warm = len(captured)
    assert warm > 0
    engine.generate([Request(prompt_ids=(1, 2, 3), max_tokens=4), Request(prompt_ids=(4,), max_tokens=9)])
    engine.generate([Request(prompt_ids=(1, 2, 3), max_tokens=4, sampling=replace(sampled, seed=7))])
    assert len(captured) == warm
    engine.generate([Request(prompt_ids=(5,) * 600, max_tokens=3)])
    assert [shape.num_keys for shape in captured[warm:]] == [1024]
