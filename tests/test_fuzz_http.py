"""Requests made from the endpoint's own /openapi.json: none is answered with a 500, every answer fits the schema."""

import json

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from serve.config import ServeConfig
from serve.server import Server
from tests.fuzzing import JSON, damaged, damaged_bytes, fuzz
from tests.serving import HTTP, listening

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
MODEL = "tiny-qwen3"
BODIES = [
    {"model": MODEL, "prompt": "def read(path):", "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "seed": 1},
    {"model": MODEL, "prompt": [[1, 2], [3]], "max_tokens": 1, "logprobs": 2, "n": 2, "logit_bias": {"5": 1.0}},
    {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True},
    {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 1,
     "stream": True, "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": True}},
]  # fmt: skip


@pytest.fixture(scope="module")
def url(embedded_target):
    # Short texts: it is the routes that are tried, and a request that asks for all that fits asks for little.
    config = ServeConfig(target=str(embedded_target), drafter="none", max_rows=8, max_length=48, max_choices=4)
    with listening(Server(config)) as url:
        yield url


@pytest.fixture(scope="module")
def api(url):
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/canary"),
]


def test_all_routes_are_tried(api):
    described = {(result.ok().method.upper(), result.ok().path) for result in api.get_all_operations()}
    assert described == set(ROUTES)


TRIED = [(method, path, GenerationMode.POSITIVE) for method, path in ROUTES]
TRIED += [(method, path, GenerationMode.NEGATIVE) for method, path in ROUTES if method == "POST"]


# Not schemathesis's own pytest plugin: of 4.32.5 it does not run under pytest 9.2.
@pytest.mark.parametrize(("method", "path", "mode"), TRIED)
def test_requests_by_the_schema(method, path, mode, api):
    @fuzz(40)
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def each(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    each()


@fuzz(150)
@given(body=st.sampled_from(BODIES).flatmap(damaged) | JSON)
def test_damaged_bodies(body, url):
    route = "chat/completions" if isinstance(body, dict) and "messages" in body else "completions"
    check(HTTP.post(f"{url}/v1/{route}", content=json.dumps(body)))


@fuzz(80)
@given(data=damaged_bytes(json.dumps(BODIES[0]).encode()) | st.binary(max_size=60))
def test_bodies_of_any_bytes(data, url):
    check(HTTP.post(f"{url}/v1/completions", content=data))


def check(answer: httpx.Response) -> None:
    """200 with an answer in it, or a refusal in OpenAI's shape."""
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text[:300])
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] is None or isinstance(error["param"], str)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"]
