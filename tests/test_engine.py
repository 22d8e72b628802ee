"""Continuous batching: what a request gets does not depend on its company, and nothing is emitted beyond its end."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from domino_core.checkpoint import load_drafter
from domino_core.engine import Engine, Request
from domino_core.sampling_params import SamplingParams
from domino_core.target import load_target, read_target_config
from domino_core.target_model import random_target
from tests.scripted import ScriptedDrafter

PROMPTS = [(8, 42, 227, 149, 23, 50, 94), (3,), (250, 7, 7, 1, 90, 12, 33, 61, 200, 5, 5, 5, 19), (100, 101), (4, 5, 6)]
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=-5),
    SamplingParams(temperature=1.3, top_p=0.8, seed=11),
    SamplingParams(temperature=0.9, seed=4, presence_penalty=0.9, repetition_penalty=1.3, rule="greedy_draft"),
]
MAX_TOKENS = [20, 7, 31, 1, 12]
REQUESTS = [
    Request(prompt_ids=prompt, max_tokens=count, sampling=sampling)
    for prompt, count, sampling in zip(PROMPTS, MAX_TOKENS, SETTINGS, strict=True)
]


@pytest.fixture(scope="module")
def target(reference_dir):
    return load_target(reference_dir / "target")


def plain_texts(target):
    """Each request's plain output, far beyond what the requests ask for."""
    engine = Engine(target, None, max_rows=1, max_length=100)
    return [
        engine.generate([Request(prompt_ids=request.prompt_ids, max_tokens=60, sampling=request.sampling)])[0].tokens
        for request in REQUESTS
    ]


@pytest.fixture(scope="module")
def texts(target):
    return plain_texts(target)


@pytest.fixture
def scripted(target, texts):
    return ScriptedDrafter(target, list(zip(PROMPTS, texts, strict=True)), lambda text, block: (2 * text + block) % 6)


@pytest.fixture(scope="module")
def real_drafter(target, reference_dir):
    return load_drafter(reference_dir / "draft_shift1_p1", target.embed_VD, target.lm_head_VD)


def drain(engine, between=lambda step: None):
    """All outputs until the engine is idle; `between` acts after each step."""
    outputs, step = [], 0
    while engine.has_work:
        outputs += engine.step()
        step += 1
        between(step)
    return outputs


def tokens_of(outputs, request_id):
    return [token for output in outputs if output.request_id == request_id for token in output.tokens]


@pytest.mark.parametrize("max_rows", [1, 2, 8])
@pytest.mark.parametrize("kind", ["plain", "scripted", "real"])
def test_outputs_are_the_plain_texts_cut_at_their_length(target, texts, scripted, real_drafter, kind, max_rows):
    drafter = {"plain": None, "scripted": scripted, "real": real_drafter}[kind]
    engine = Engine(target, drafter, max_rows=max_rows, max_length=64)
    for request, text, completion in zip(REQUESTS, texts, engine.generate(REQUESTS), strict=True):
        assert completion.tokens == text[: request.max_tokens]
        assert completion.finish_reason == "length"
        assert completion.logprobs is None
    assert not engine.has_work
    assert engine.num_running == 0


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_arrival_order_and_time_do_not_matter(target, texts, scripted, order):
    engine = Engine(target, scripted, max_rows=3, max_length=64)
    ids, left = {}, list(order)

    def arrive(step):
        if left:
            index = left.pop(0)
            ids[index] = engine.add(REQUESTS[index])

    arrive(0)
    outputs = drain(engine, arrive)
    for index, request_id in ids.items():
        assert tokens_of(outputs, request_id) == texts[index][: MAX_TOKENS[index]]
    finished = [output.request_id for output in outputs if output.finish_reason]
    assert sorted(finished) == sorted(ids.values())


def test_cancelled_requests_fall_silent_and_free_their_place(target, texts, scripted):
    engine = Engine(target, scripted, max_rows=2, max_length=64)
    ids = [engine.add(REQUESTS[index]) for index in (0, 2, 4, 1)]
    first = engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 2)
    engine.cancel(ids[0])  # running
    engine.cancel(ids[2])  # waiting
    engine.cancel(12345)  # never was
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    rest = drain(engine)
    engine.cancel(ids[1])  # is over
    assert {output.request_id for output in rest} == {ids[1], ids[3]}
    assert tokens_of(first + rest, ids[1]) == texts[2][: MAX_TOKENS[2]]
    assert tokens_of(rest, ids[3]) == texts[1][: MAX_TOKENS[1]]


@pytest.mark.parametrize("with_drafter", [False, True])
def test_a_long_prompt_joins_piece_by_piece_while_others_decode(target, real_drafter, monkeypatch, with_drafter):
    """Rows that decode get their round at every step; what the long one says is what it says alone."""
    long = Request(prompt_ids=tuple(range(1, 60)), max_tokens=9, sampling=SETTINGS[1])
    drafter = real_drafter if with_drafter else None
    alone = Engine(target, drafter, max_rows=1, max_length=80).generate([long])[0].tokens
    for module in ("engine", "decode_state"):
        monkeypatch.setattr(f"domino_core.{module}.PREFILL_CHUNK", 10)
    engine = Engine(target, drafter, max_rows=2, max_length=80)
    short = engine.add(Request(prompt_ids=PROMPTS[1], max_tokens=40))
    outputs = engine.step()
    joining = engine.add(long)
    engine.add(REQUESTS[0])
    for _ in range(5):
        step = engine.step()
        assert [output.request_id for output in step] == [short]
        assert (engine.num_running, engine.num_waiting) == (1, 2)
        outputs += step
    outputs += engine.step()
    assert engine.num_running == 2
    outputs += drain(engine)
    assert tokens_of(outputs, joining) == alone


def test_a_request_cancelled_while_its_prompt_is_taken_in_leaves_no_trace(target, texts, real_drafter, monkeypatch):
    for module in ("engine", "decode_state"):
        monkeypatch.setattr(f"domino_core.{module}.PREFILL_CHUNK", 10)
    engine = Engine(target, real_drafter, max_rows=2, max_length=80)
    first = engine.add(REQUESTS[0])
    outputs = engine.step()
    doomed = engine.add(Request(prompt_ids=tuple(range(1, 60)), max_tokens=9))
    outputs += engine.step()
    engine.cancel(doomed)
    assert (engine.num_running, engine.num_waiting) == (1, 0)
    second = engine.add(REQUESTS[2])
    outputs += drain(engine)
    assert {output.request_id for output in outputs} == {first, second}
    assert tokens_of(outputs, first) == texts[0][: MAX_TOKENS[0]]
    assert tokens_of(outputs, second) == texts[2][: MAX_TOKENS[2]]


@pytest.mark.parametrize("stop_index", range(9))
def test_nothing_behind_a_stop_token_is_emitted_or_counted(target, texts, stop_index):
    """Whole blocks are accepted, and the stop token lies at every place of one in turn, the target's own included."""
    text = texts[0]
    assert text.index(text[stop_index]) == stop_index
    drafter: Any = ScriptedDrafter(target, list(zip(PROMPTS, texts, strict=True)), lambda text, block: 5)
    engine = Engine(target, drafter, max_rows=2, max_length=64)
    stopping = Request(prompt_ids=PROMPTS[0], max_tokens=40, stop_token_ids=(text[stop_index],), logprobs=0)
    stopped, other = engine.generate([stopping, REQUESTS[2]])
    assert stopped.tokens == text[: stop_index + 1]
    assert stopped.finish_reason == "stop"
    assert [entry.token for entry in stopped.logprobs or []] == stopped.tokens
    assert other.tokens == texts[2][: MAX_TOKENS[2]]
    # Prefill gives the first token, then each round six; acceptance is counted before the cut.
    rounds = -(-stop_index // 6)
    assert stopped.acceptance.to_dict() == {
        "tau": 6.0 if rounds else 1.0,
        "rounds": rounds,
        "drafted": 5 * rounds,
        "accepted": 5 * rounds,
        "accepted_at": [rounds] * 5 if rounds else [],
    }


def test_a_stop_token_at_the_last_allowed_place_is_a_stop(target, texts):
    request = Request(prompt_ids=PROMPTS[0], max_tokens=4, stop_token_ids=(texts[0][3],))
    assert Engine(target, None, max_rows=1, max_length=32).generate([request])[0].finish_reason == "stop"


def test_acceptance_of_requests_adds_up_to_the_engines(target, texts, scripted):
    engine = Engine(target, scripted, max_rows=4, max_length=64)
    completions = engine.generate(REQUESTS)
    total = engine.acceptance
    assert total.rounds == sum(completion.acceptance.rounds for completion in completions)
    assert total.accepted == sum(completion.acceptance.accepted for completion in completions)
    errors = [error for errors in scripted.errors for error in errors]
    assert total.accepted == sum(errors)
    assert total.drafted == 5 * len(errors)
    assert total.accepted_at == [sum(error > index for error in errors) for index in range(5)]
    assert completions[3].acceptance.rounds == 0  # max_tokens=1: prefill was all


@pytest.mark.parametrize("num_verify", [0, 2, 5, 99, "auto"])
def test_verified_length_changes_speed_only_also_while_running(target, texts, scripted, real_drafter, num_verify):
    # Measuring itself, an engine decodes texts that the scripted drafter has not seen.
    drafter = real_drafter if num_verify == "auto" else scripted
    engine = Engine(target, drafter, max_rows=3, max_length=64, num_verify=num_verify)
    ids = [engine.add(request) for request in REQUESTS]

    def change(step):
        assert engine.last_verify <= drafter.config.num_drafts
        if num_verify != "auto":
            engine.num_verify = (None, 1, 0, 4)[step % 4]

    outputs = drain(engine, change)
    for index, request_id in enumerate(ids):
        assert tokens_of(outputs, request_id) == texts[index][: MAX_TOKENS[index]]


@torch.inference_mode()
@pytest.mark.parametrize("with_drafter", [False, True])
def test_logprobs_are_those_of_the_target_alone(target, texts, scripted, with_drafter):
    engine = Engine(target, scripted if with_drafter else None, max_rows=4, max_length=64)
    wanted = [
        Request(prompt_ids=r.prompt_ids, max_tokens=15, sampling=r.sampling, logprobs=n)
        for r, n in zip(REQUESTS, (None, 3, 0, 5, 1), strict=True)
    ]
    for request, completion, text in zip(wanted, engine.generate(wanted), texts, strict=True):
        if request.logprobs is None:
            assert completion.logprobs is None
            continue
        ids = torch.tensor([[*request.prompt_ids, *text[:14]]])
        hidden, _ = target.forward(ids, torch.zeros(1, dtype=torch.int64), target.new_cache(1, ids.shape[1]))
        logprobs = target.logits(hidden)[0, len(request.prompt_ids) - 1 :].log_softmax(-1)
        assert completion.logprobs is not None
        assert len(completion.logprobs) == 15
        for entry, token, row in zip(completion.logprobs, text, logprobs, strict=False):
            assert entry.token == token
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
            values, indices = row.topk(request.logprobs)
            assert [index for index, _ in entry.top] == indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_request_may_use_the_whole_length(target, texts, scripted):
    engine = Engine(target, scripted, max_rows=1, max_length=len(PROMPTS[0]) + 20)
    assert engine.generate([REQUESTS[0]])[0].tokens == texts[0][:20]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "prompt is empty"),
        ({"prompt_ids": (1, 257)}, r"must be in 0\.\.256"),
        ({"prompt_ids": (-1,)}, r"must be in 0\.\.256"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 62}, "3 prompt tokens and max_tokens=62 exceed max_length=64"),
        ({"logprobs": -1}, "logprobs=-1"),
    ],
)
def test_requests_that_can_never_run_are_refused(target, change, message):
    engine = Engine(target, None, max_rows=1, max_length=64)
    with pytest.raises(ValueError, match=message):
        engine.add(Request(**{"prompt_ids": (1, 2, 3), "max_tokens": 5} | change))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 513}, "max_length=513"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"num_verify": -1}, "num_verify=-1"),
        ({"num_verify": "fast"}, "num_verify='fast'"),
    ],
)
def test_engines_that_cannot_work_are_refused(target, change, message):
    with pytest.raises(ValueError, match=message):
        Engine(target, None, **{"max_rows": 1, "max_length": 64} | change)


def test_a_drafter_of_another_target_is_refused(tiny_target_dir, real_drafter):
    with pytest.raises(ValueError, match="hidden_size is 64 in the drafter, 48 in the target"):
        Engine(load_target(tiny_target_dir), real_drafter, max_rows=1, max_length=64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["draft_shift1_p1", "draft_shift0_p2"])
def test_on_a_gpu_a_request_gets_the_same_alone_in_company_and_with_drafts(reference_dir, texts, case, dtype):
    """In float32 the CPU's text as well; in bfloat16 the same bits, by kernels that do not depend on the batch."""
    target = load_target(reference_dir / "target", device="cuda", dtype=dtype)
    drafter = load_drafter(
        reference_dir / case, target.embed_VD, target.lm_head_VD, device=torch.device("cuda"), dtype=dtype
    )
    alone = Engine(target, None, max_rows=1, max_length=64)
    wanted = [alone.generate([request])[0].tokens for request in REQUESTS]
    if dtype == torch.float32:
        assert wanted == [text[:count] for text, count in zip(texts, MAX_TOKENS, strict=True)]
    for model, max_rows, num_verify in [(None, 3, None), (drafter, 1, None), (drafter, 3, None), (drafter, 8, "auto")]:
        engine = Engine(target, model, max_rows=max_rows, max_length=64, num_verify=num_verify)
        engine.warm_up()
        for _ in range(2):  # the second time all graphs are there
            assert [completion.tokens for completion in engine.generate(REQUESTS)] == wanted
    # Rows come, go and change places while rounds are under way.
    engine = Engine(target, drafter, max_rows=3, max_length=64)
    ids = {}

    def disturb(step):
        if step % 2 and len(ids) < len(REQUESTS):
            ids[engine.add(REQUESTS[len(ids)])] = len(ids)
        if step % 3 == 0:
            engine.cancel(engine.add(Request(prompt_ids=(9, 9), max_tokens=30)))
        engine.num_verify = (None, 1, 0, 4)[step % 4]

    doomed = engine.add(Request(prompt_ids=(7, 8, 9), max_tokens=40))
    disturb(1)
    outputs = engine.step()
    engine.cancel(doomed)
    outputs += drain(engine, lambda step: disturb(step + 1))
    assert {index: tokens_of(outputs, request_id) for request_id, index in ids.items()} == dict(enumerate(wanted))


@pytest.mark.gpu
def test_on_a_gpu_logprobs_and_penalties_leave_the_graphs_and_come_back(reference_dir):
    target = load_target(reference_dir / "target", device="cuda", dtype=torch.bfloat16)
    folder = reference_dir / "draft_shift1_p1"
    drafter = load_drafter(
        folder, target.embed_VD, target.lm_head_VD, device=torch.device("cuda"), dtype=torch.bfloat16
    )
    wanted = [
        Request(prompt_ids=r.prompt_ids, max_tokens=15, sampling=r.sampling, logprobs=n)
        for r, n in zip(REQUESTS, (None, 3, 0, 5, 1), strict=True)
    ]
    plain = Engine(target, None, max_rows=2, max_length=64).generate(wanted)
    drafted = Engine(target, drafter, max_rows=4, max_length=64).generate(wanted)
    assert [(one.tokens, one.logprobs) for one in drafted] == [(one.tokens, one.logprobs) for one in plain]


@pytest.mark.gpu
def test_on_a_gpu_prompts_by_graph_are_prompts(reference_dir):
    """Of every length; what they fill passes up with changes nothing, nor does the drafter."""
    config = read_target_config(reference_dir / "target")
    target = random_target(replace(config, max_position_embeddings=2048), device="cuda", dtype=torch.bfloat16)
    folder = reference_dir / "draft_shift1_p1"
    drafter = load_drafter(
        folder, target.embed_VD, target.lm_head_VD, device=torch.device("cuda"), dtype=torch.bfloat16
    )
    lengths = (1, 16, 17, 64, 100, 127, 128, 129, 300, 511, 512, 513, 640, 900)
    requests = [
        Request(prompt_ids=tuple((7 * i + n) % 250 for i in range(n)), max_tokens=12, logprobs=1) for n in lengths
    ]
    operations = Engine(target, None, max_rows=4, max_length=1200)
    operations._prompts = None
    wanted = [(each.tokens, each.logprobs) for each in operations.generate(requests)]
    for model in (None, drafter):
        engine = Engine(target, model, max_rows=4, max_length=1200)
        for _ in range(2):  # the second time all graphs are there
            assert [(each.tokens, each.logprobs) for each in engine.generate(requests)] == wanted
    engine.warm_up()
    assert [(each.tokens, each.logprobs) for each in engine.generate(requests)] == wanted
