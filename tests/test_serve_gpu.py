"""The served endpoint on a card, on either engine, through a real Ray Serve.

The torch engine's answers are those of its plain decoding, in the bfloat16 that is served. vLLM's passes of different
widths round differently, so of its texts most are asked for, compared with its own plain decoding.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import torch

from domino_core.engine import Engine, Request
from domino_core.target import load_target, load_tokenizer, render_chat
from jobs.drill_ground import free_port
from serve.config import ServeConfig
from tests.trained import train_drafter, written_texts

pytestmark = [pytest.mark.gpu, pytest.mark.cluster, pytest.mark.slow]
MAX_TOKENS = 64
SAME = {"torch": 1.0, "vllm": 0.6}  # of the greedy answers, at least


@dataclass(frozen=True)
class Endpoint:
    """engine: its name. url: without /v1. plain: what it answers without a drafter, a text for each conversation."""

    engine: str
    url: str
    plain: list[str]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def conversations(embedded_target) -> list[list[dict]]:
    lines = (embedded_target / "prompts" / "heldout.jsonl").read_text().splitlines()[:16]
    return [json.loads(line)["messages"] for line in lines]


@pytest.fixture(scope="module")
def drafter(embedded_target, conversations, tmp_path_factory) -> Path:
    tokenizer = load_tokenizer(embedded_target)
    prompts = [render_chat(tokenizer, messages) for messages in conversations]
    texts = written_texts(load_target(embedded_target, dtype=torch.float32), prompts, MAX_TOKENS)
    return train_drafter(tmp_path_factory.mktemp("drafter") / "trained", embedded_target, texts, 40)


def ask(client: openai.OpenAI, messages: list[dict], **fields):
    request = {"model": "tiny-qwen3", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    return client.chat.completions.create(**(request | fields))


def ask_all(client: openai.OpenAI, conversations: list[list[dict]], **fields) -> list:
    """At once, so that they share rounds."""
    with ThreadPoolExecutor(len(conversations)) as asking:
        return list(asking.map(lambda messages: ask(client, messages, **fields), conversations))


def decoded_in_process(model: Path, conversations: list[list[dict]]) -> list[str]:
    """Plain decoding by the torch engine in this process, in the type that is served."""
    tokenizer = load_tokenizer(model)
    engine = Engine(load_target(model, device="cuda", dtype=torch.bfloat16), None, max_rows=1, max_length=512)
    requests = [
        Request(
            prompt_ids=tuple(render_chat(tokenizer, messages)),
            max_tokens=MAX_TOKENS,
            stop_token_ids=(tokenizer.eos_token_id,),
        )
        for messages in conversations
    ]
    return [tokenizer.decode(done.tokens, skip_special_tokens=True) for done in engine.generate(requests)]


@pytest.fixture(scope="module", params=["torch", "vllm"])
def endpoint(request, local_ray, embedded_target, conversations, drafter):
    from ray import serve as ray_serve

    from serve.deployment import check_registry, deploy

    def deployed(drafter: str) -> str:
        config = ServeConfig(
            target=str(embedded_target),
            engine=request.param,
            vllm_args="--gpu-memory-utilization 0.1 --kv-cache-memory-bytes 536870912"
            if request.param == "vllm"
            else "",
            drafter=drafter,
            port=port,
            max_length=512,
            max_rows=16,
            max_replicas=1,
            gpus_per_replica=1.0,
        )
        check_registry(config)
        return deploy(config).removesuffix("/v1")

    port = free_port()
    if request.param == "torch":
        plain = decoded_in_process(embedded_target, conversations)
    else:
        with openai.OpenAI(base_url=f"{deployed('none')}/v1", api_key="none", timeout=120) as client:
            plain = [answer.choices[0].message.content for answer in ask_all(client, conversations)]
    yield Endpoint(request.param, deployed(str(drafter)), plain)
    ray_serve.shutdown()


def count(endpoint: Endpoint, name: str) -> float:
    """What /metrics says of a counter, over all labels."""
    lines = httpx.get(f"{endpoint.url}/metrics", timeout=30).text.splitlines()
    found = [line for line in lines if line.startswith(f"vllm:spec_decode_num_{name}_total{{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_answers_are_those_of_plain_decoding(endpoint, conversations):
    before = count(endpoint, "drafts"), count(endpoint, "accepted_tokens")
    with endpoint.client() as client:
        texts = [answer.choices[0].message.content for answer in ask_all(client, conversations)]
    same = sum(text == other for text, other in zip(texts, endpoint.plain, strict=True))
    assert same >= SAME[endpoint.engine] * len(conversations)
    rounds, accepted = count(endpoint, "drafts") - before[0], count(endpoint, "accepted_tokens") - before[1]
    assert accepted > 0.3 * rounds > 0, "hardly a draft was accepted"


def test_a_stream_is_the_whole_answer(endpoint, conversations):
    with endpoint.client() as client:
        whole = ask(client, conversations[0]).choices[0].message.content
        chunks = list(ask(client, conversations[0], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def test_a_seed_repeats_a_sampled_answer_alone_and_among_others(endpoint, conversations):
    """vLLM promises that for one batch alone."""
    with endpoint.client() as client:
        alone = ask(client, conversations[0], temperature=1, seed=7).choices[0].message.content
        again = ask(client, conversations[0], temperature=1, seed=7).choices[0].message.content
        other = ask(client, conversations[0], temperature=1, seed=8).choices[0].message.content
        assert alone != other
        if endpoint.engine == "torch":
            assert alone == again
            among = ask_all(client, [conversations[0]] * 8, temperature=1, seed=7)
            assert {answer.choices[0].message.content for answer in among} == {alone}


def test_health_is_ok(endpoint):
    assert httpx.get(f"{endpoint.url}/health", timeout=30).json()["status"] == "ok"
