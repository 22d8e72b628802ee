"""The endpoint on vLLM's engine, through a real Ray Serve: vLLM's routes with our drafter in it, followed by alias."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import torch

from domino_core.checkpoint import load_drafter, save_drafter
from domino_core.drafter import Drafter
from domino_core.engine import Completion, Engine, Request
from domino_core.sampling_params import SamplingParams
from domino_core.target import load_target, load_tokenizer, render_chat, target_hash
from jobs.drill_ground import free_port
from serve.config import ServeConfig
from tests.serving import Registry, damage, wait_until
from tests.trained import drafter_config, train_drafter, written_texts

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MESSAGES = [{"role": "user", "content": "def read(path):"}]
LONG = [
    {"role": "user", "content": "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n" * 4}
]
PROMPT = "class Reader:\n    def __init__"
TOOL = {
    "name": "weigh",
    "parameters": {
        "type": "object",
        "properties": {"heavy": {"type": "boolean"}},
        "required": ["heavy"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def target(embedded_target):
    return load_target(embedded_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(embedded_target):
    return load_tokenizer(embedded_target)


@pytest.fixture(scope="module")
def plain(target, tokenizer):
    """Plain decoding by the torch engine: what every answer is compared with."""
    engine = Engine(target, None, max_rows=1, max_length=512)

    def decode(prompt: list[int], max_tokens: int = 32, logprobs: int | None = None) -> Completion:
        request = Request(
            prompt_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(),
            stop_token_ids=(tokenizer.eos_token_id,),
            logprobs=logprobs,
        )
        return engine.generate([request])[0]

    return decode


@pytest.fixture(scope="module")
def registry(tmp_path_factory, embedded_target, target, tokenizer):
    """1 drafts noise, 2 is trained, 3 is damaged, 4 is another target's, 5 has longer blocks. 1 is champion."""
    root = tmp_path_factory.mktemp("registry")
    registry = Registry(root, embedded_target)
    made_for = {"target_hash": target_hash(embedded_target)}
    torch.manual_seed(0)
    config = drafter_config(target)

    def noise(name: str, **changes: int) -> Path:
        drafter = Drafter(replace(config, **changes), target.embed_VD, target.lm_head_VD)
        return save_drafter(drafter, root / name, made_for)

    texts = written_texts(target, [render_chat(tokenizer, LONG), tokenizer.encode(PROMPT)], 48)
    trained = train_drafter(root / "trained", embedded_target, texts, 25)
    folders = (noise("1"), trained, damage(noise("3")), noise("4"), noise("5", block_size=6))
    assert [registry.add(folder) for folder in folders] == ["1", "2", "3", "4", "5"]
    registry.tag("4", target_hash="of another")
    registry.promote("1")
    return registry


@pytest.fixture(scope="module")
def by_torch(registry, target, tokenizer):
    """Rounds and accepted drafts of the torch engine with version 2, for LONG."""
    folder = registry.root / "trained"
    engine = Engine(target, load_drafter(folder, target.embed_VD, target.lm_head_VD), max_rows=1, max_length=512)
    prompt = tuple(render_chat(tokenizer, LONG))
    engine.generate([Request(prompt_ids=prompt, max_tokens=32, stop_token_ids=(tokenizer.eos_token_id,))])
    return engine.acceptance.rounds, engine.acceptance.accepted


@pytest.fixture(scope="module")
def url(local_ray, registry, embedded_target, tmp_path_factory):
    from ray import serve as ray_serve

    from serve.deployment import check_registry, deploy

    config = ServeConfig(
        target=str(embedded_target),
        engine="vllm",
        vllm_args="--block-size 32 --enable-auto-tool-choice --tool-call-parser hermes "
        """--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'""",
        drafter=registry.champion,
        tracking_uri=registry.uri,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        poll_seconds=0.5,
        port=free_port(),
        max_length=512,
        max_rows=4,
        max_replicas=1,
        target_ongoing_requests=8,
        max_ongoing_requests=8,
        max_queued_requests=4,
    )
    assert "now version 1" in check_registry(config)
    yield deploy(config).removesuffix("/v1")
    ray_serve.shutdown()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **fields):
    request = {"model": "tiny-qwen3", "messages": MESSAGES, "temperature": 0, "max_tokens": 32}
    return client.chat.completions.create(**(request | fields))


def complete(client: openai.OpenAI, **fields):
    request = {"model": "tiny-qwen3", "prompt": PROMPT, "temperature": 0, "max_tokens": 32}
    return client.completions.create(**(request | fields))


def health(url: str) -> dict:
    return httpx.get(f"{url}/health", timeout=30).json()


def count(url: str, name: str, *labels: str) -> float:
    """What /metrics says of a counter, over all lines that have these labels."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{") and all(label in line for label in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_chat_and_completion_whole_and_streamed_are_the_text_of_plain_decoding(client, plain, tokenizer):
    prompt_ids = render_chat(tokenizer, MESSAGES)
    text = tokenizer.decode(plain(prompt_ids).tokens, skip_special_tokens=True)
    whole = ask(client)
    assert whole.choices[0].message.content == text
    assert whole.usage.prompt_tokens == len(prompt_ids)
    assert whole.system_fingerprint.endswith("-drafter-1")
    assert whole.metrics["speculative_decoding"]["num_spec_tokens"] == 5
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage

    text = tokenizer.decode(plain(tokenizer.encode(PROMPT)).tokens, skip_special_tokens=True)
    assert complete(client).choices[0].text == text
    assert "".join(chunk.choices[0].text for chunk in complete(client, stream=True)) == text


def test_log_probabilities_are_those_of_plain_decoding(client, plain, tokenizer):
    expected = [entry.logprob for entry in plain(render_chat(tokenizer, MESSAGES), 8, logprobs=2).logprobs]
    entries = ask(client, max_tokens=8, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-3)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_stop_strings_end_an_answer_inside_a_block(client):
    text = complete(client).choices[0].text
    stop = text[10:13]
    cut = complete(client, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")


def test_tools_and_structured_output_are_vllms(client):
    answer = ask(client, tools=[{"type": "function", "function": TOOL}], tool_choice="required", max_tokens=128)
    assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"weigh"}
    schema = {"name": "answer", "schema": TOOL["parameters"]}
    answer = ask(client, response_format={"type": "json_schema", "json_schema": schema}, max_tokens=64)
    assert list(json.loads(answer.choices[0].message.content)) == ["heavy"]


@pytest.mark.parametrize("stream", [False, True])
def test_sampled_requests_are_refused_and_the_engine_lives(client, url, stream):
    for asking in (ask, complete):
        with pytest.raises(openai.BadRequestError, match="CPU build") as caught:
            asking(client, temperature=0.7, stream=stream)
        assert caught.value.param == "temperature"
    assert health(url)["status"] == "ok"
    assert ask(client).choices[0].message.content


def test_other_refusals_are_in_openais_shape(client):
    with pytest.raises(openai.NotFoundError):
        ask(client, model="other")
    with pytest.raises(openai.BadRequestError, match="n must be 1"):
        ask(client, n=2)
    with pytest.raises(openai.BadRequestError, match="512"):
        ask(client, max_tokens=1000)
    assert [model.id for model in client.models.list()] == ["tiny-qwen3"]


def test_clients_that_leave_free_their_requests_streamed_or_not(url):
    body = {"model": "tiny-qwen3", "prompt": ["x"] * 4, "max_tokens": 500, "temperature": 0, "ignore_eos": True}

    def unfinished() -> int:
        return health(url)["requests"]["unfinished"]

    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60) as response:
        lines = response.iter_lines()  # kept: dropping it closes the response
        next(lines)
        assert unfinished() == 4
    wait_until(lambda: unfinished() == 0, 5)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.7))
    wait_until(lambda: unfinished() == 0, 5)
    generated = count(url, "vllm:generation_tokens_total")
    time.sleep(1)
    assert count(url, "vllm:generation_tokens_total") == generated, "the engine goes on for nobody"


def test_overload_is_refused_with_503(url):
    body = {"model": "tiny-qwen3", "prompt": "x", "max_tokens": 80, "temperature": 0, "ignore_eos": True}

    def status(_: int) -> int:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code

    with ThreadPoolExecutor(24) as asking:
        statuses = Counter(asking.map(status, range(24)))
    assert set(statuses) == {200, 503}
    assert statuses[200] >= 8


def test_canary_route_says_why_there_is_none(url):
    (report,) = httpx.get(f"{url}/canary", timeout=30).json()["replicas"]
    assert "promote without --canary" in report["unable"]


def test_metrics_have_vllms_names_and_our_labels(client, url, embedded_target):
    before = count(url, "vllm:generation_tokens_total", 'drafter_version="1"', target_hash(embedded_target))
    ask(client, max_tokens=7)
    assert count(url, "vllm:generation_tokens_total", 'drafter_version="1"', target_hash(embedded_target)) == before + 7
    for name in ("time_to_first_token_seconds_count", "spec_decode_num_drafts_total", "request_success_total"):
        assert count(url, f"vllm:{name}", 'drafter_version="1"', 'model_name="tiny-qwen3"') > 0
    accepted = "vllm:spec_decode_num_accepted_tokens"
    page = httpx.get(f"{url}/metrics", timeout=30).text
    assert page.count(f"{accepted}_per_pos_total{{") == 5
    per_position = [
        count(url, f"{accepted}_per_pos_total", f'position="{position}"', 'drafter_version="1"')
        for position in range(5)
    ]
    assert per_position == sorted(per_position, reverse=True)
    assert sum(per_position) == count(url, f"{accepted}_total", 'drafter_version="1"')
    gauges = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running{")]
    assert len(gauges) == 1
    assert target_hash(embedded_target) in gauges[0]
    assert "drafter_version" not in gauges[0]
    assert 'drafter_version="none"' not in page


def test_promotion_under_load_drops_no_request_and_bad_versions_change_nothing(client, url, registry, by_torch):
    """Version 2 stays."""

    def accepted(version: str) -> tuple[float, float]:
        names = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total")
        accepted, drafts = (count(url, name, f'drafter_version="{version}"') for name in names)
        return accepted, drafts

    before, drafts_before = accepted("1")
    expected = ask(client, messages=LONG).choices[0].message.content
    seen: list[str] = []
    failures: list[Exception] = []
    done = threading.Event()

    def keep_asking(stream: bool) -> None:
        while not done.is_set():
            try:
                if stream:
                    chunks = list(ask(client, messages=LONG, stream=True))
                    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                    version = next(chunk.system_fingerprint for chunk in reversed(chunks) if chunk.system_fingerprint)
                else:
                    answer = ask(client, messages=LONG)
                    text, version = answer.choices[0].message.content, answer.system_fingerprint
                assert text == expected
                seen.append(version.rpartition("-")[2])
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=keep_asking, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(seen) >= 4, 60)
        registry.promote("2")
        wait_until(lambda: seen[-4:] == ["2"] * 4 or bool(failures), 60)
        for version, reason in (("3", "damaged"), ("4", "of another"), ("5", "another block_size")):
            registry.promote(version)
            told = f"version {version} is refused"
            wait_until(lambda told=told: told in health(url)["drafter"]["problem"], 60)
            assert reason in health(url)["drafter"]["problem"]
        answered = len(seen)
        wait_until(lambda: len(seen) >= answered + 4 or bool(failures), 60)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert set(seen) == {"1", "2"}
    state = health(url)
    assert (state["status"], state["drafter"]["live"]) == ("ok", "2")
    page = httpx.get(f"{url}/metrics", timeout=30).text
    assert page.count("\nvllm:num_requests_running{") == 1, "the gauge of version 1 is still shown"

    (old, drafts), (new, later_drafts) = accepted("1"), accepted("2")
    assert (old - before) / (drafts - drafts_before) < 0.5 < new / later_drafts, "version 2 is shown and 1 drafts"
    registry.promote("2")
    wait_until(lambda: health(url)["drafter"]["problem"] == "", 30)
    # Nothing that version 1 made of the prompt is read: 64 of its tokens were in the prefix cache before.
    report = ask(client, messages=LONG).metrics["speculative_decoding"]
    assert (report["num_spec_steps"], report["num_accepted_draft_tokens"]) == by_torch


def test_requests_of_an_engine_that_is_killed_get_503_with_a_time_to_come_back(url):
    """Last of all."""
    body = {"model": "tiny-qwen3", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60) for _ in range(4)]
        wait_until(lambda: health(url)["requests"]["unfinished"] == 4, 30)
        (engine,) = [each for each in psutil.Process().children(recursive=True) if each.name().startswith("VLLM::Eng")]
        engine.kill()
        found = [answer.result() for answer in answers]
    assert {(answer.status_code, answer.headers.get("retry-after")) for answer in found} == {(503, "2")}
    assert {answer.json()["error"]["code"] for answer in found} == {"engine_down"}
