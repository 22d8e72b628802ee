"""The routes with the real engine, over HTTP, called by the openai client; drafts are accepted at every length."""

import threading

import httpx
import openai
import pytest
import torch

from domino_core.engine import Completion, Engine, Request
from domino_core.sampling_params import SamplingParams
from domino_core.target import load_target, load_tokenizer, read_target_config, render_chat
from serve.config import ServeConfig
from serve.server import Server
from serve.text import read_vocabulary
from tests.serving import KnownTexts, listening, member, wait_until

PROMPTS = ["import os\n\ndef ", "class Reader:\n    def __init__", "for name in sorted("]
MESSAGES = [{"role": "user", "content": "def read(path):"}]
MAX_TOKENS = 40
MAX_LENGTH = 512


@pytest.fixture(scope="module")
def tokenizer(embedded_target):
    return load_tokenizer(embedded_target)


@pytest.fixture(scope="module")
def target(embedded_target):
    return load_target(embedded_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(target, tokenizer):
    """Plain decoding, one request at a time: what every answer is compared with."""
    engine = Engine(target, None, max_rows=1, max_length=MAX_LENGTH)

    def decode(prompt: list[int], max_tokens=MAX_TOKENS, stop_token_ids=(), logprobs=None, **sampling) -> Completion:
        request = Request(
            prompt_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(**sampling),
            stop_token_ids=stop_token_ids,
            logprobs=logprobs,
        )
        return engine.generate([request])[0]

    return decode


@pytest.fixture(scope="module")
def server(embedded_target, target, tokenizer, plain):
    """Version "7" of its drafter knows the greedy answers and errs at every place in turn."""
    config = ServeConfig(target=str(embedded_target), drafter="none", max_rows=3, max_length=MAX_LENGTH)
    server = Server(config)
    chat = render_chat(tokenizer, MESSAGES)
    prompts = [*(tokenizer.encode(prompt) for prompt in PROMPTS), chat]
    texts = [prompt + plain(prompt, max_tokens=300).tokens for prompt in prompts]
    server.loop.promote(member(target, KnownTexts(embedded_target, texts), "7"))
    return server


@pytest.fixture(scope="module")
def url(server):
    with listening(server) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def text_of(tokenizer):
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def greedy(**fields) -> dict:
    return {"model": "tiny-qwen3", "temperature": 0, "max_tokens": MAX_TOKENS} | fields


def stream_choice(stream) -> tuple[str, str | None, list, object]:
    """Text, finish reason, pieces and usage of a streamed completion or chat with one choice."""
    pieces, reason, usage = [], None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.text if hasattr(choice, "text") else choice.delta.content or "")
            assert reason is None, "a chunk came after the last"
            reason = choice.finish_reason
    return "".join(pieces), reason, pieces, usage


@pytest.mark.parametrize("prompt", PROMPTS)
def test_whole_streamed_and_plain_are_one_text(client, tokenizer, plain, text_of, prompt):
    expected = plain(tokenizer.encode(prompt))
    whole = client.completions.create(prompt=prompt, **greedy())
    assert whole.choices[0].text == text_of(expected.tokens)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == MAX_TOKENS
    assert whole.usage.prompt_tokens == len(tokenizer.encode(prompt))
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + MAX_TOKENS
    stream = client.completions.create(prompt=prompt, stream=True, stream_options={"include_usage": True}, **greedy())
    text, reason, pieces, usage = stream_choice(stream)
    assert (text, reason, usage) == (whole.choices[0].text, "length", whole.usage)
    assert len(pieces) < MAX_TOKENS, "a chunk carries a round, which commits several tokens"


def test_chat_whole_and_streamed(client, tokenizer, plain, text_of):
    eos = (tokenizer.eos_token_id,)
    expected = plain(render_chat(tokenizer, MESSAGES), stop_token_ids=eos)
    whole = client.chat.completions.create(messages=MESSAGES, **greedy())
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == text_of(expected.tokens)
    assert whole.choices[0].finish_reason == expected.finish_reason
    stream = client.chat.completions.create(messages=MESSAGES, stream=True, **greedy())
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks)
    assert stream_choice(iter(chunks))[:2] == (whole.choices[0].message.content, whole.choices[0].finish_reason)


def test_max_completion_tokens_is_read(client):
    answer = client.chat.completions.create(
        model="tiny-qwen3", messages=MESSAGES, temperature=0, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 3


def test_acceptance_comes_in_vllms_fields_and_adds_up(client):
    answer = client.completions.create(prompt=PROMPTS[0], **greedy())
    figures = answer.metrics["speculative_decoding"]
    histogram = figures["acceptance_histogram"]
    assert len(histogram) == figures["num_spec_tokens"] + 1 == 6
    assert sum(histogram) == figures["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == figures["num_accepted_draft_tokens"] > 0
    assert figures["num_draft_tokens"] == 5 * figures["num_spec_steps"]
    assert figures["mean_acceptance_length"] == 1 + figures["num_accepted_draft_tokens"] / figures["num_spec_steps"]
    stream = client.completions.create(
        prompt=PROMPTS[0], stream=True, stream_options={"include_usage": True}, **greedy()
    )
    assert list(stream)[-1].metrics["speculative_decoding"] == figures


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("start", [3, 17, 40, 61])
def test_stop_strings_cut_at_the_token_that_plain_decoding_would_stop_at(
    client, tokenizer, plain, text_of, start, length
):
    tokens = plain(tokenizer.encode(PROMPTS[0])).tokens
    text = text_of(tokens)
    stop = text[start : start + length]
    used = next(count for count in range(1, len(tokens) + 1) if stop in text_of(tokens[:count]))
    request = greedy(prompt=PROMPTS[0], stop=["\0never", stop])
    whole = client.completions.create(**request)
    assert whole.choices[0].text == text[: text.index(stop)]
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("stop", used)
    streamed = stream_choice(client.completions.create(stream=True, stream_options={"include_usage": True}, **request))
    assert streamed[0] == whole.choices[0].text
    assert streamed[1] == "stop"
    assert streamed[3] == whole.usage


def test_a_stop_that_never_comes_holds_nothing_back_at_the_end(client, plain, tokenizer, text_of):
    text = text_of(plain(tokenizer.encode(PROMPTS[0])).tokens)
    answer = client.completions.create(prompt=PROMPTS[0], stop=text[-1:] + "\0", stream=True, **greedy())
    assert stream_choice(answer)[:2] == (text, "length")


def test_stop_token_is_counted_and_not_shown(client, plain, tokenizer, text_of):
    tokens = plain(tokenizer.encode(PROMPTS[0])).tokens
    stop = tokens[7]
    first = tokens.index(stop)
    answer = client.completions.create(prompt=PROMPTS[0], extra_body={"stop_token_ids": [stop]}, **greedy())
    assert answer.choices[0].text == text_of(tokens[:first])
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", first + 1)


SAMPLED = {"model": "tiny-qwen3", "max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "extra_body": {"top_k": 40}}


def test_sampled_answer_is_the_plain_engines_for_that_seed(client, plain, tokenizer, text_of):
    expected = plain(
        tokenizer.encode(PROMPTS[1]), max_tokens=24, temperature=0.9, top_p=0.95, top_k=40, seed=11,
        stop_token_ids=(tokenizer.eos_token_id,),
    )  # fmt: skip
    answer = client.completions.create(prompt=PROMPTS[1], seed=11, **SAMPLED)
    assert answer.choices[0].text == text_of(expected.tokens)
    assert answer.choices[0].seed == 11


def test_unseeded_answers_say_their_seed_and_n_answers_can_be_had_one_by_one(client):
    answers = client.completions.create(prompt=PROMPTS[1], n=3, **SAMPLED)
    assert [choice.index for choice in answers.choices] == [0, 1, 2]
    assert len({choice.text for choice in answers.choices}) > 1
    for choice in answers.choices:
        again = client.completions.create(prompt=PROMPTS[1], seed=choice.seed, **SAMPLED)
        assert again.choices[0].text == choice.text
    assert client.completions.create(prompt=PROMPTS[1], **greedy()).choices[0].seed is None
    first, second = (client.completions.create(prompt=PROMPTS[1], **SAMPLED).choices[0].seed for _ in range(2))
    assert first != second


def test_n_answers_stream_with_their_index(client):
    whole = client.completions.create(prompt=PROMPTS[1], n=3, seed=5, **SAMPLED)
    texts = ["", "", ""]
    for chunk in client.completions.create(prompt=PROMPTS[1], n=3, seed=5, stream=True, **SAMPLED):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_prompts_as_text_ids_and_lists_give_the_same(client, tokenizer):
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    by_text = client.completions.create(prompt=PROMPTS[:2], **greedy())
    by_ids = client.completions.create(prompt=ids, **greedy())
    alone = client.completions.create(prompt=ids[1], **greedy())
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices]
    assert by_text.choices[1].text == alone.choices[0].text
    assert by_text.usage.prompt_tokens == sum(map(len, ids))
    assert by_text.usage.completion_tokens == 2 * MAX_TOKENS


def test_token_ids_are_returned_when_asked_for(client, plain, tokenizer):
    ids = tokenizer.encode(PROMPTS[0])
    answer = client.completions.create(prompt=ids, extra_body={"return_token_ids": True}, **greedy())
    assert answer.choices[0].token_ids == plain(ids).tokens


def test_completion_logprobs_are_the_targets(client, plain, tokenizer):
    expected = plain(tokenizer.encode(PROMPTS[0]), logprobs=2)
    vocabulary = read_vocabulary(tokenizer)
    answer = client.completions.create(prompt=PROMPTS[0], logprobs=2, **greedy())
    got = answer.choices[0].logprobs
    names = [vocabulary.spelled(token).decode(errors="replace") for token in expected.tokens]
    assert got.tokens == names
    assert got.token_logprobs == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-4)
    assert [max(top, key=top.get) for top in got.top_logprobs] == names  # greedy: the token is the likeliest
    assert got.text_offset == [len("".join(names[:index])) for index in range(len(names))]
    assert "".join(names) == answer.choices[0].text
    parts = list(client.completions.create(prompt=PROMPTS[0], logprobs=2, stream=True, **greedy()))
    assert [offset for part in parts for offset in part.choices[0].logprobs.text_offset] == got.text_offset
    assert [name for part in parts for name in part.choices[0].logprobs.tokens] == names


def test_chat_logprobs_have_bytes_and_alternatives_and_stop_with_the_text(client):
    request = greedy(messages=MESSAGES, logprobs=True, top_logprobs=3)
    whole = client.chat.completions.create(**request)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in content)
    shown = content if whole.choices[0].finish_reason == "length" else content[:-1]
    assert b"".join(bytes(entry.bytes) for entry in shown).decode() == whole.choices[0].message.content
    chunks = client.chat.completions.create(stream=True, **request)
    streamed = [entry for chunk in chunks for choice in chunk.choices for entry in choice.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


BAD_REQUESTS = [
    ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo", "echo=True"),
    ("/v1/completions", {"prompt": "x", "promt": "x"}, 400, "promt", "unknown parameter"),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature", "temperature"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt", "no tokens"),
    ("/v1/completions", {"prompt": []}, 400, "prompt", "no tokens"),
    ("/v1/completions", {"prompt": [99999]}, 400, "prompt", "99999"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt", "-1"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 512}, 400, "prompt", "512"),
    ("/v1/completions", {"prompt": [5] * 600}, 400, "prompt", "600"),
    ("/v1/completions", {"prompt": "x", "n": 65}, 400, "n", "65"),
    ("/v1/completions", {"model": "gpt", "prompt": "x"}, 404, "model", "'gpt' does not exist"),
    ("/v1/completions", {}, 400, "prompt", "prompt"),
    ("/v1/completions", [1], 400, None, "object"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages", "messages"),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{}]}, 400, "tools", "tools"),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream_options": {}}, 400, "stream_options", "stream"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 600}]}, 400, "messages", "512"),
    ("/v1/embeddings", {"input": "x"}, 404, None, "/v1/embeddings"),
    ("/v1/models", {}, 405, None, "/v1/models"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), BAD_REQUESTS)
def test_bad_requests_get_openais_error_shape(url, path, body, status, param, message):
    if isinstance(body, dict):
        body = {"model": "tiny-qwen3"} | body
    response = httpx.post(url + path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"] or None) == (status, param)
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_body_that_is_no_json(url):
    response = httpx.post(f"{url}/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_a_parameter_name_that_cannot_be_encoded_is_a_400(url):
    content = b'{"model": "tiny-qwen3", "prompt": "x", "\\ud800": 1}'
    response = httpx.post(f"{url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "\\ud800")


def test_a_top_k_of_any_size_is_every_token_and_ends_no_engine(url):
    body = {"model": "tiny-qwen3", "prompt": "x", "max_tokens": 4, "seed": 3}
    every, huge = (httpx.post(f"{url}/v1/completions", json=body | {"top_k": k}) for k in (0, 2**63))
    assert huge.status_code == 200
    assert huge.json()["choices"] == every.json()["choices"]


def test_models_and_health(client, url):
    assert [model.id for model in client.models.list()] == ["tiny-qwen3"]
    assert client.models.retrieve("tiny-qwen3").id == "tiny-qwen3"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    health = httpx.get(f"{url}/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    assert health.json()["drafter"]["live"] == "7"


def test_more_requests_than_rows_all_get_their_own_answer(client, plain, tokenizer, text_of):
    expected = [text_of(plain(tokenizer.encode(prompt)).tokens) for prompt in PROMPTS]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = client.completions.create(prompt=PROMPTS[number % 3], **greedy()).choices[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[number] for number in range(12)] == expected * 4


def test_client_that_leaves_frees_its_rows(server, url):
    body = greedy(prompt=PROMPTS, max_tokens=450, stream=True)
    server.loop.live.engine.drafter.delay_s = 0.05
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()  # kept: dropping it closes the response
            next(lines)
            wait_until(lambda: server.loop.counts() == (3, 0))
        wait_until(lambda: server.loop.counts() == (0, 0), seconds=5)
    finally:
        server.loop.live.engine.drafter.delay_s = 0.0
    assert 'finished_reason="abort"' in httpx.get(f"{url}/metrics").text


def counter(page: str, name: str, **labels: str) -> float:
    """Sum of the samples with these labels."""
    found = [line for line in page.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in found if all(f'{k}="{v}"' in line for k, v in labels.items()))


def test_metrics_count_what_the_responses_say(client, url, server):
    before = httpx.get(f"{url}/metrics").text
    answer = client.completions.create(prompt=PROMPTS[0], stop="\n", **greedy())
    after = httpx.get(f"{url}/metrics").text
    figures = answer.metrics["speculative_decoding"]
    labels = {"drafter_version": "7", "target": server.target_hash, "model_name": "tiny-qwen3"}

    def grown(name: str, **more: str) -> float:
        return counter(after, name, **labels, **more) - counter(before, name, **labels, **more)

    assert grown("vllm:generation_tokens_total") == answer.usage.completion_tokens
    assert grown("vllm:prompt_tokens_total") == answer.usage.prompt_tokens
    assert grown("vllm:spec_decode_num_drafts_total") == figures["num_spec_steps"]
    assert grown("vllm:spec_decode_num_draft_tokens_total") == figures["num_draft_tokens"]
    assert grown("vllm:spec_decode_num_accepted_tokens_total") == figures["num_accepted_draft_tokens"]
    at_least_one = figures["num_spec_steps"] - figures["acceptance_histogram"][0]
    assert grown("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0") == at_least_one
    assert grown("vllm:request_success_total", finished_reason="stop") == 1
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("vllm:e2e_request_latency_seconds_count") == 1
    assert counter(after, "vllm:num_requests_running") == 0


def test_server_refuses_what_the_target_cannot_do(embedded_target):
    length = read_target_config(embedded_target).max_position_embeddings + 1
    with pytest.raises(ValueError, match=f"max_length={length}"):
        Server(ServeConfig(target=str(embedded_target), drafter="none", max_length=length))
