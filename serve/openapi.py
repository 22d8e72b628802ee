"""What the routes answer, for /openapi.json. FastAPI knows their requests, and of answers only what it makes itself."""

from typing import Any

_TEXT = {"type": "string"}
_MAYBE_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT},
        }
    },
}
_CHOICE = {
    "type": "object",
    "required": ["index", "finish_reason"],
    "properties": {"index": {"type": "integer"}, "finish_reason": {"enum": ["stop", "length"]}},
}
_USAGE = {"prompt_tokens": {"type": "integer"}, "completion_tokens": {"type": "integer"}}
_ANSWER = {
    "type": "object",
    "required": ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"],
    "properties": {
        **dict.fromkeys(("id", "model", "system_fingerprint"), _TEXT),
        "object": {"enum": ["text_completion", "chat.completion"]},
        "created": {"type": "integer"},
        "choices": {"type": "array", "minItems": 1, "items": _CHOICE},
        "usage": {"type": "object", "required": list(_USAGE), "properties": _USAGE},
    },
}


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ERROR}}}


Responses = dict[int | str, dict[str, Any]]

REFUSED: Responses = {"4XX": _error("Refused, in OpenAI's shape. 400 names the parameter; 404: no such model.")}
ANSWERS: Responses = {
    200: {
        "description": "The answer, or with stream=true its chunks as server-sent events.",
        "content": {"application/json": {"schema": _ANSWER}, "text/event-stream": {"schema": _TEXT}},
    },
    **REFUSED,
    503: _error("The engine is down, or too many requests wait: send it again later."),
}
HEALTH: Responses = {503: {"description": "The engine has failed, and Serve replaces the replica."}}
