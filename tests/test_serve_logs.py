"""What the endpoint logs of a request: its id, figures and end, through Ray's own JSON formatter, and no text of it."""

import json
import logging

import pytest
from ray._common.formatters import JSONFormatter

from serve.config import ServeConfig
from serve.request_log import LONGEST_ID
from serve.server import Server
from tests.serving import HTTP, listening, wait_until

BODY = {"model": "tiny-qwen3", "prompt": "def a_secret_name(path):", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def url(embedded_target):
    with listening(Server(ServeConfig(target=str(embedded_target), drafter="none", max_rows=2))) as url:
        yield url


@pytest.fixture
def lines():
    """The request's lines so far, read as whoever collects logs reads them."""
    logger, written = logging.getLogger("ray.serve.domino"), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    handler, level = Keep(), logger.level
    handler.setFormatter(JSONFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [found for line in written if "event" in (found := json.loads(line))]
    logger.removeHandler(handler)
    logger.setLevel(level)


def events(lines, request_id: str) -> list[str]:
    return [line["event"] for line in lines() if line["request_id"] == request_id]


@pytest.mark.parametrize("stream", [False, True])
def test_start_and_finish_have_the_clients_id_and_the_answers_figures(url, lines, stream):
    headers = {"X-Request-Id": f"client-{stream}"}
    answer = HTTP.post(f"{url}/v1/completions", json=BODY | {"n": 2, "stream": stream}, headers=headers)
    assert answer.status_code == 200
    wait_until(lambda: len(lines()) == 2)
    start, finish = lines()
    assert [start["event"], finish["event"]] == ["start", "finish"]
    assert {start["request_id"], finish["request_id"]} == {f"client-{stream}"}
    assert (start["answers"], start["stream"]) == (2, stream)
    if not stream:
        usage = answer.json()["usage"]
        assert start["prompt_tokens"] == usage["prompt_tokens"]
        assert finish["completion_tokens"] == usage["completion_tokens"]
    assert finish["reason"] == "length"
    assert finish["tau"] == 1.0  # without a drafter a round is a token
    assert finish["seconds"] > 0
    assert finish["drafter_version"] == "none"


def test_without_an_id_one_is_made(url, lines):
    for _ in range(2):
        HTTP.post(f"{url}/v1/completions", json=BODY)
    first, second = (line["request_id"] for line in lines() if line["event"] == "finish")
    assert first != second
    assert events(lines, first) == ["start", "finish"]


def test_a_client_that_leaves_is_told_apart(url, lines):
    body = BODY | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{url}/v1/completions", json=body, headers={"X-Request-Id": "left"}) as response:
        next(response.iter_lines())
    wait_until(lambda: events(lines, "left") == ["start", "finish"])
    assert lines()[-1]["reason"] == "abort"


@pytest.mark.parametrize("bad", ["", "two words", "x" * (LONGEST_ID + 1), "tab\there"])
def test_an_id_that_no_log_should_hold_is_refused_by_name(url, lines, bad):
    answer = HTTP.post(f"{url}/v1/completions", json=BODY, headers={"X-Request-Id": bad})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-id"
    (line,) = lines()
    assert (line["event"], line["request_id"], line["status"]) == ("refuse", "invalid", 400)


def test_refusals_have_id_and_parameter_and_nothing_has_the_text(url, lines):
    secret = "a_secret_name"
    bodies = [
        BODY | {"temperature": 9},
        BODY | {"model": secret},
        BODY | {"logit_bias": {secret: 1}},
        BODY | {"response_format": {"schema": secret}},
        BODY | {"x" * 5000: 1},
    ]
    for number, body in enumerate([*bodies, BODY]):
        HTTP.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": f"id-{number}"})
    HTTP.post(f"{url}/v1/completions", content=f'{{"prompt": "{secret}', headers={"X-Request-Id": "id-json"})
    HTTP.get(f"{url}/{secret}", headers={"X-Request-Id": "id-path"})
    told = {line["request_id"]: line for line in lines() if line["event"] == "refuse"}
    assert {name: line["status"] for name, line in told.items()} == {
        **{f"id-{number}": 404 if number == 1 else 400 for number in range(len(bodies))},
        "id-json": 400,
        "id-path": 404,
    }
    assert [told[f"id-{number}"]["param"] for number in range(4)] == [
        "temperature", "model", "logit_bias", "response_format",
    ]  # fmt: skip
    assert len(told["id-4"]["param"]) < 100
    assert secret not in json.dumps(lines())
