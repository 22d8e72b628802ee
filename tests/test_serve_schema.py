"""Request bodies and ServeConfig: what is refused is named, what asks for nothing passes, nothing is ignored."""

import pytest
from pydantic import ValidationError

from serve.config import ServeConfig, read_config
from serve.schema import NO_EFFECT, ChatRequest, CompletionRequest

COMPLETION = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}

# Extra fields of a completion body, and what the refusal must name.
BAD_COMPLETIONS = [
    ({"promt": "x"}, "promt"),
    ({"echo": True}, "echo"),
    ({"suffix": "y"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 513}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"messages": []}, "messages"),
    *(
        ({name: value}, name)
        for name, low, high in (
            ("min_p", -0.01, 1.01),
            ("presence_penalty", -2.01, 2.01),
            ("frequency_penalty", -2.01, 2.01),
            ("repetition_penalty", 0, float("inf")),
        )
        for value in (low, high, 10**400, float("nan"), "1", True, [1])
    ),
    *(
        ({"logit_bias": value}, "logit_bias")
        for value in (
            {"5": 100.1},
            {"5": -101},
            {"5": float("nan")},
            {"5": "1"},
            {"5": True},
            {"5": None},
            {"-5": 1},
            {"": 1},
            {"5.0": 1},
            {"05": 1},
            {" 5": 1},
            {"5_0": 1},
            {"٥": 1},
            {"five": 1},
            {"\ud800": 1},
            {"9" * 5000: 1},
            {str(token): 1 for token in range(301)},
            {"5": 1, "x": 1},
            [1],
            "5",
        )
    ),
]

BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages"),
    ({"prompt": "x"}, "prompt"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
]


def refused(kind, body) -> str:
    """Where the refusal points."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    first = caught.value.errors()[0]
    return str(first.get("ctx", {}).get("param") or first["loc"][0])


@pytest.mark.parametrize(("extra", "named"), BAD_COMPLETIONS)
def test_bad_completion_bodies_are_refused_by_name(extra, named):
    assert refused(CompletionRequest, COMPLETION | extra) == named


@pytest.mark.parametrize(("extra", "named"), BAD_CHATS)
def test_bad_chat_bodies_are_refused_by_name(extra, named):
    assert refused(ChatRequest, CHAT | extra) == named


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_missing_fields_are_named(missing):
    assert refused(CompletionRequest, {key: value for key, value in COMPLETION.items() if key != missing}) == missing


def test_values_that_ask_for_nothing_pass_and_null_is_not_given():
    neutral = {name: values[0] for name, values in NO_EFFECT.items() if values}
    nulls = {name: None for name in (*NO_EFFECT, "seed", "temperature", "stop", "stream_options", "logprobs")}
    for kind, body in ((CompletionRequest, COMPLETION), (ChatRequest, CHAT)):
        assert kind.model_validate(body | neutral) == kind.model_validate(body | nulls) == kind.model_validate(body)


def test_the_widest_values_pass():
    bias = {str(token): (-1) ** token * 100 for token in range(300)}
    for value in ({"min_p": 1, "presence_penalty": 2, "frequency_penalty": -2.0, "repetition_penalty": 1e-3}, {}):
        body = CompletionRequest.model_validate(COMPLETION | value | {"logit_bias": bias})
        assert body.logit_bias == bias


def test_defaults_are_openais():
    body = CompletionRequest.model_validate(COMPLETION)
    assert (body.temperature, body.top_p, body.n, body.completion_limit) == (1.0, 1.0, 1, 16)
    assert ChatRequest.model_validate(CHAT).completion_limit is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("x", ["x"]), (["x", "y"], ["x", "y"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompt_shapes(prompt, prompts):
    assert CompletionRequest.model_validate(COMPLETION | {"prompt": prompt}).prompts == prompts


def test_text_parts_and_the_clients_own_message_objects_are_read():
    echoed = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None, "annotations": []}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "c"}]}
    body = ChatRequest.model_validate(CHAT | {"messages": [parts, echoed]})
    assert [message.text for message in body.messages] == ["ac", "b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": 0}, "port=0"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"max_length": 1}, "max_length=1"),
        ({"min_replicas": 0}, "min_replicas=0"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas=2"),
        ({"target_ongoing_requests": 64}, "max_ongoing_requests=32"),
        ({"device": "cuda"}, "gpus_per_replica"),
        ({"num_verify": 0}, "num_verify=0"),
        ({"poll_seconds": 0}, "poll_seconds=0"),
    ],
)
def test_serve_config_names_the_value_that_cannot_work(fields, message):
    with pytest.raises(ValueError, match=message):
        ServeConfig(**fields)


def test_builder_arguments_may_be_text_and_unknown_ones_fail():
    # `serve run` passes every key=value as text.
    config = read_config({"target": "t", "port": "8123", "num_verify": "4", "gpus_per_replica": "0.5"})
    assert (config.port, config.num_verify, config.gpus_per_replica) == (8123, 4, 0.5)
    for field in ("num_verify", "max_rows"):
        for text, value in (("auto", "auto"), ("none", None), (None, None), ("7", 7)):
            assert getattr(read_config({"target": "t", field: text}), field) == value
        with pytest.raises(ValueError, match=f"^{field}"):
            read_config({"target": "t", field: "most"})
    assert [ServeConfig(max_rows=rows).fixed_rows for rows in ("auto", None, 7)] == [None, None, 7]
    with pytest.raises(ValueError, match=r"^prot: "):
        read_config({"target": "t", "prot": "8123"})
    with pytest.raises(ValueError, match=r"^unseeded_rule: "):
        read_config({"target": "t", "unseeded_rule": "greedy"})


@pytest.mark.parametrize(
    ("target", "name"), [("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("/models/x/", "x"), ("./a/b", "b"), ("~/b", "b")]
)
def test_served_name(target, name):
    assert ServeConfig(target=target).served_name == name
    assert ServeConfig(target=target, model_name="other").served_name == "other"
