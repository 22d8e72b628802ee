"""What a request asks for in sampling, over HTTP: every answer is plain decoding's, whoever drafts and whoever is near.

Drafts are scripted from plain decoding's own output, so that long blocks are accepted; some tests let all of them be.
"""

import json
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from domino_core.drafter import Drafter
from domino_core.engine import Completion, Engine, Request
from domino_core.sampling_params import SamplingParams
from domino_core.target import load_target, load_tokenizer
from serve.config import ServeConfig
from serve.server import Server
from tests.scripted import ScriptedDrafter
from tests.serving import HTTP, KnownTexts, drafter_config, listening, member

MAX_LENGTH = 256
NUM_DRAFTS = 5
PROMPT = "import os\n\ndef "
EOS_BIAS = {"2": 6}  # lets plain decoding end an answer to PROMPT in its 34th token

# Fields of a body; each comes with what it is to be told apart from.
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 1, "seed": 3}
CASES = {
    "min_p": (SAMPLED | {"min_p": 0.3}, SAMPLED),
    "presence": (GREEDY | {"presence_penalty": 1.5}, GREEDY),
    "frequency": (GREEDY | {"frequency_penalty": 0.8}, GREEDY),
    "repetition": (GREEDY | {"repetition_penalty": 1.3}, GREEDY),
    "negative": (GREEDY | {"presence_penalty": -2, "frequency_penalty": -0.5, "repetition_penalty": 0.8}, GREEDY),
    "bias": (GREEDY | {"logit_bias": {"290": -100, "437": 2.5}}, GREEDY),
    "sampled bias": (SAMPLED | {"logit_bias": {"432": -100, "262": 3}}, SAMPLED),
    "all": (
        {"temperature": 0.8, "seed": -7, "top_p": 0.95, "top_k": 60, "min_p": 0.02, "presence_penalty": 0.4,
         "frequency_penalty": 0.3, "repetition_penalty": 1.1, "logit_bias": {"262": 1.5, "11": -3}},
        {"temperature": 0.8, "seed": -7, "top_p": 0.95, "top_k": 60},
    ),
}  # fmt: skip


def params_of(fields: dict) -> SamplingParams:
    """The engine's settings for a body's, read by hand."""
    bias = tuple((int(token), float(value)) for token, value in fields.get("logit_bias", {}).items())
    settings: dict[str, Any] = {"temperature": 1.0} | fields | {"logit_bias": bias}
    return SamplingParams(**settings)


@pytest.fixture(scope="module")
def tokenizer(embedded_target):
    return load_tokenizer(embedded_target)


@pytest.fixture(scope="module")
def prompt(tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT)


@pytest.fixture(scope="module")
def target(embedded_target):
    return load_target(embedded_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(target):
    engine = Engine(target, None, max_rows=1, max_length=MAX_LENGTH)
    answer = cache(lambda request: engine.generate([request])[0])  # many tests ask for the same

    def decode(prompt: Sequence[int], max_tokens: int = 40, **request) -> Completion:
        fields = {name: request.pop(name) for name in list(request) if name not in ("stop_token_ids", "logprobs")}
        return answer(Request(prompt_ids=tuple(prompt), max_tokens=max_tokens, sampling=params_of(fields), **request))

    return decode


@pytest.fixture(scope="module")
def server(embedded_target):
    return Server(ServeConfig(target=str(embedded_target), drafter="none", max_rows=8, max_length=MAX_LENGTH))


@pytest.fixture(scope="module")
def url(server):
    with listening(server) as url:
        yield url


@pytest.fixture
def script(server, target, plain, prompt):
    """Serve with a drafter that knows the answer to a prompt with these settings; each block errs one place later."""

    def serve(fields: dict, *, all_right: bool = False, prompt: Sequence[int] = prompt) -> ScriptedDrafter:
        drafter = ScriptedDrafter(
            target,
            [(prompt, plain(prompt, max_tokens=60, **fields).tokens)],
            lambda text, block: NUM_DRAFTS if all_right else block % (NUM_DRAFTS + 1),
        )
        server.loop.promote(member(target, drafter, "scripted", max_length=MAX_LENGTH))
        return drafter

    return serve


def ask(url: str, **body) -> dict:
    """A whole completion."""
    body = {"model": "tiny-qwen3", "prompt": PROMPT, "max_tokens": 40, "return_token_ids": True} | body
    response = HTTP.post(f"{url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def ask_streamed(url: str, **body) -> dict:
    """The same, put together from its chunks."""
    body = {"model": "tiny-qwen3", "prompt": PROMPT, "max_tokens": 40, "return_token_ids": True} | body
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with HTTP.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    *chunks, last = map(json.loads, lines)
    choices = [chunk["choices"][0] for chunk in chunks]
    whole = choices[-1] | {
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": [token for choice in choices for token in choice["token_ids"]],
    }
    if choices[0]["logprobs"] is not None:
        names = choices[0]["logprobs"].keys()
        whole["logprobs"] = {name: [x for choice in choices for x in choice["logprobs"][name]] for name in names}
    return last | {"choices": [whole]}


def same_answer(one: dict, other: dict) -> bool:
    return (one["choices"], one["usage"], one["metrics"]) == (other["choices"], other["usage"], other["metrics"])


@pytest.mark.parametrize("name", CASES)
def test_every_setting_gives_plain_decodings_answer_and_another_than_without(url, plain, prompt, script, name):
    fields, without = CASES[name]
    eos = {"stop_token_ids": (2, 0)}
    expected = plain(prompt, **fields, **eos)
    assert expected.tokens != plain(prompt, **without, **eos).tokens, "this setting changes nothing here"
    drafter = script(fields)
    answer = ask(url, **fields)
    assert answer["choices"][0]["token_ids"] == expected.tokens
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason
    assert answer["choices"][0]["seed"] == fields.get("seed")
    figures = answer["metrics"]["speculative_decoding"]
    assert figures["num_accepted_draft_tokens"] == sum(drafter.errors[0]) > 0
    drafter.blocks[0] = 0  # the script errs at the same places again
    assert same_answer(ask_streamed(url, **fields), answer)


@pytest.mark.parametrize("name", ["min_p", "bias", "all"])
def test_chats_are_asked_for_the_same(url, server, plain, script, name):
    fields, without = CASES[name]
    messages = [{"role": "user", "content": "def read(path):"}]
    rendered = server.render_chat(messages, False)
    expected = plain(rendered, stop_token_ids=(2, 0), **fields).tokens
    assert expected != plain(rendered, stop_token_ids=(2, 0), **without).tokens
    script(fields, prompt=rendered)
    body = {"model": "tiny-qwen3", "messages": messages, "max_tokens": 40, "return_token_ids": True} | fields
    answer = HTTP.post(f"{url}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


@torch.inference_mode()
@pytest.mark.parametrize("name", ["presence", "repetition", "bias", "all"])
def test_logprobs_are_of_the_targets_raw_logits(url, target, tokenizer, plain, prompt, script, name):
    """Whatever changes the logits before the draw: the values are those of one pass of the target over the text."""
    fields, _ = CASES[name]
    script(fields)
    answer = ask(url, logprobs=3, ignore_eos=True, **fields)["choices"][0]
    tokens = answer["token_ids"]
    ids_1T = torch.tensor([[*prompt, *tokens[:-1]]])
    hidden_1TD, _ = target.forward(ids_1T, torch.zeros(1, dtype=torch.int64), target.new_cache(1, ids_1T.shape[1]))
    raw_TV = target.logits(hidden_1TD)[0, len(prompt) - 1 :].log_softmax(-1)
    own = raw_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert answer["logprobs"]["token_logprobs"] == pytest.approx(own.tolist(), abs=1e-4)
    best_T3 = raw_TV.topk(3).values
    for top, values_3 in zip(answer["logprobs"]["top_logprobs"], best_T3, strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(values_3.tolist(), abs=1e-4)
    unlikely = own < best_T3[:, 0] - 1e-3
    assert unlikely.any(), "no token here that the raw logits do not put first"


@pytest.mark.parametrize("offset", range(NUM_DRAFTS + 2))
@pytest.mark.parametrize("name", ["frequency", "all"])
def test_nothing_behind_an_end_inside_an_accepted_block(url, tokenizer, plain, prompt, script, name, offset):
    """The end lies at every place of a block in turn, by length, token and text: not shown, counted or in logprobs."""
    fields, _ = CASES[name]
    tokens = plain(prompt, **fields).tokens
    script(fields, all_right=True)
    place = next(i for i in range(7 + offset, 40) if tokens.index(tokens[i]) == i and tokens[i] > 2)
    text = tokenizer.decode(tokens[: place + 1])
    stop = text[-1:]
    for last in range(40):  # the same character may come earlier
        if stop in tokenizer.decode(tokens[: last + 1]):
            break
    asked = [
        ({"max_tokens": place + 1}, place + 1, "length", text),
        ({"stop_token_ids": [tokens[place]]}, place + 1, "stop", tokenizer.decode(tokens[:place])),
        ({"stop": stop}, last + 1, "stop", text[: text.index(stop)]),
        ({"stop": text[-6:]}, place + 1, "stop", text[: text.index(text[-6:])]),
    ]
    for extra, count, reason, shown in asked:
        body = fields | {"ignore_eos": True, "logprobs": 1} | extra
        answer = ask(url, **body)
        choice = answer["choices"][0]
        assert choice["token_ids"] == tokens[:count]
        assert (choice["text"], choice["finish_reason"]) == (shown, reason)
        assert answer["usage"]["completion_tokens"] == count == len(choice["logprobs"]["tokens"])
        figures = answer["metrics"]["speculative_decoding"]
        assert figures["num_accepted_draft_tokens"] == NUM_DRAFTS * figures["num_spec_steps"], "a draft was wrong"
        assert same_answer(ask_streamed(url, **body), answer)


@pytest.mark.parametrize("shift", range(NUM_DRAFTS + 1))
def test_end_of_sequence_inside_an_accepted_block(url, plain, tokenizer, server, target, prompt, shift):
    """The prompt takes in more and more of the answer, which moves the end through the block."""
    fields = GREEDY | {"logit_bias": EOS_BIAS}
    output = plain(prompt, max_tokens=60, **fields).tokens
    end = output.index(2)
    longer = [*prompt, *output[:shift]]
    drafter = ScriptedDrafter(target, [(longer, output[shift:])], lambda text, block: NUM_DRAFTS)
    server.loop.promote(member(target, drafter, "scripted", max_length=MAX_LENGTH))
    answer = ask(url, prompt=longer, logprobs=0, **fields)
    choice = answer["choices"][0]
    assert choice["token_ids"] == output[shift : end + 1]
    assert (choice["text"], choice["finish_reason"]) == (tokenizer.decode(output[shift:end]), "stop")
    assert answer["usage"]["completion_tokens"] == end + 1 - shift == len(choice["logprobs"]["tokens"])
    figures = answer["metrics"]["speculative_decoding"]
    assert figures["num_accepted_draft_tokens"] == NUM_DRAFTS * figures["num_spec_steps"], "a draft was wrong"
    assert same_answer(ask_streamed(url, prompt=longer, logprobs=0, **fields), answer)


@contextmanager
def serving_all(server, target, drafter, num_verify=None, rule="shared_noise"):
    """Another drafter, verified length and rule for unseeded requests, for a while."""
    before, server.config = server.config, replace(server.config, unseeded_rule=rule)
    live = member(target, drafter, "other", max_rows=8, max_length=MAX_LENGTH)
    live.engine.num_verify = num_verify
    server.loop.promote(live)
    yield live
    server.config = before


@pytest.fixture(scope="module")
def known(embedded_target, plain, prompt):
    """Knows the texts of all cases and errs at a place that moves."""
    outputs = [plain(prompt, max_tokens=60, **fields).tokens for fields, _ in CASES.values()]
    return KnownTexts(embedded_target, [[*prompt, *output] for output in outputs])


@pytest.fixture(scope="module")
def untrained(embedded_target, target):
    torch.manual_seed(0)
    return Drafter(drafter_config(embedded_target), target.embed_VD, target.lm_head_VD).eval()


@pytest.mark.parametrize("num_verify", [None, 1, 3])
@pytest.mark.parametrize("kind", ["none", "known", "untrained"])
def test_an_answer_does_not_depend_on_company_drafter_or_verified_length(
    server, url, target, plain, prompt, known, untrained, kind, num_verify
):
    """All settings decode in one batch, beside unseeded requests under rejection sampling."""
    drafter = {"none": None, "known": known, "untrained": untrained}[kind]
    company = [{"temperature": 1.2, "presence_penalty": 2, "logit_bias": {"11": 100}}, {"temperature": 0.5, "n": 2}]
    bodies = [*company, *(fields for fields, _ in CASES.values()), *company]
    with (
        serving_all(server, target, drafter, num_verify, "rejection"),
        ThreadPoolExecutor(len(bodies)) as pool,
    ):
        answers = list(pool.map(lambda fields: ask(url, **fields), bodies))
    for fields, answer in zip(bodies, answers, strict=True):
        if fields in company:
            assert [choice["seed"] for choice in answer["choices"]] == [None] * fields.get("n", 1)
            continue
        assert answer["choices"][0]["token_ids"] == plain(prompt, stop_token_ids=(2, 0), **fields).tokens


@pytest.mark.parametrize("rule", ["shared_noise", "greedy_draft"])
def test_an_unseeded_answer_says_the_seed_that_gives_it_again(server, url, target, plain, prompt, known, rule):
    settings = {"temperature": 0.8, "frequency_penalty": 0.4, "logit_bias": {"262": 1}}
    with serving_all(server, target, known, rule=rule):
        choices = ask(url, prompt=[prompt, prompt], n=2, **settings)["choices"]
        again = [ask(url, seed=choice["seed"], **settings)["choices"][0] for choice in choices]
    assert len({choice["seed"] for choice in choices}) == 4, "the same prompt twice has two answers"
    for choice, second in zip(choices, again, strict=True):
        expected = plain(prompt, stop_token_ids=(2, 0), seed=choice["seed"], **settings).tokens
        assert choice["token_ids"] == expected == second["token_ids"]


def test_under_rejection_sampling_no_seed_is_claimed(server, url, target, plain, prompt, embedded_target, monkeypatch):
    """The seed that was drawn would give another text when sent back, since a given seed's is plain decoding's."""
    fields = {"temperature": 1.0, "max_tokens": 30, "ignore_eos": True}
    expected = plain(prompt, max_tokens=30, temperature=1.0, seed=11).tokens
    drafter = KnownTexts(embedded_target, [[*prompt, *expected]])  # right drafts, which are not sure to be accepted
    monkeypatch.setattr(secrets, "randbits", lambda bits: 11)
    with serving_all(server, target, drafter, rule="rejection"):
        unseeded, seeded = ask(url, **fields)["choices"][0], ask(url, seed=11, **fields)["choices"][0]
        greedy = ask(url, temperature=0)["choices"][0]
    engine = member(target, drafter, "alone", max_length=MAX_LENGTH).engine
    sampling = SamplingParams(temperature=1.0, seed=11, rule="rejection")
    request = Request(prompt_ids=tuple(prompt), max_tokens=30, sampling=sampling)
    assert unseeded["token_ids"] == engine.generate([request])[0].tokens
    assert seeded["token_ids"] == expected != unseeded["token_ids"]
    assert (unseeded["seed"], seeded["seed"], greedy["seed"]) == (None, 11, None)
    assert greedy["token_ids"] == plain(prompt, temperature=0, stop_token_ids=(2, 0)).tokens


def test_n_answers_have_the_seeds_behind_the_first(server, url, target, plain, prompt, known):
    fields, _ = CASES["all"]
    with serving_all(server, target, known):
        choices = ask(url, n=4, **fields)["choices"]
    assert [choice["seed"] for choice in choices] == [-7, -6, -5, -4]
    expected = [plain(prompt, stop_token_ids=(2, 0), **fields | {"seed": seed}).tokens for seed in range(-7, -3)]
    assert [choice["token_ids"] for choice in choices] == expected


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('"logit_bias": {"2048": 1}', "logit_bias"),
        ('"logit_bias": {"999999999999999999": 1}', "logit_bias"),
        ('"logit_bias": {"5": NaN}', "logit_bias"),
        ('"logit_bias": {"\\ud800": 1}', "logit_bias"),
        ('"logit_bias": {"-1": 1}', "logit_bias"),
        ('"min_p": NaN', "min_p"),
        ('"presence_penalty": -Infinity', "presence_penalty"),
        ('"frequency_penalty": 1e999', "frequency_penalty"),
        ('"repetition_penalty": 0', "repetition_penalty"),
    ],
)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_what_cannot_be_honoured_is_a_400_that_names_it(url, route, content, named):
    asked = '"prompt": "x"' if route == "completions" else '"messages": [{"role": "user", "content": "x"}]'
    response = HTTP.post(
        f"{url}/v1/{route}",
        content=f'{{"model": "tiny-qwen3", {asked}, {content}}}',
        headers={"Content-Type": "application/json"},
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, named)
    assert named in error["message"]


@pytest.mark.parametrize("extreme", [1e-300, 1e300])
def test_extreme_penalties_end_no_engine(server, url, target, plain, prompt, known, extreme):
    fields = GREEDY | {"repetition_penalty": extreme}
    with serving_all(server, target, known):
        answer = ask(url, ignore_eos=True, **fields)["choices"][0]
        assert answer["token_ids"] == plain(prompt, **fields).tokens
    assert HTTP.get(f"{url}/health").json()["status"] == "ok"
