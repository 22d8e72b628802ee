"""One raw row of a prompt file: its shape, its turns, its tools and its tokens, checked.

Five shapes: messages, conversations (role/content or from/value), text, and input_ids with loss_mask. What stands in a
row and is not understood is a ValueError that names file, line and turn, never left out in silence.
"""

from __future__ import annotations

import json
from typing import Any

ID_KEYS = ("id", "sample_id", "conversation_id", "primary_id", "uuid", "prompt_id")
SHAPES = "messages, conversations, text, or input_ids with loss_mask"
# The names that datasets use, and the one that chat templates know. A developer turn is a system turn: Qwen3's
# template leaves out roles that it does not know.
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user"}
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant")
ROLES |= dict.fromkeys(("tool", "observation", "function", "tool_response"), "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

Row = dict[str, Any]


def check_shape(row: Row) -> None:
    """ValueError unless the row has one of the accepted shapes and its parts have the right types."""
    where = row["source"]
    _check_encodable(row.get("sample_id", ""), f"{where}: id")
    if row.get("input_ids") is not None or row.get("loss_mask") is not None:
        token_lists(row)
    elif is_conversation(row):
        turns(row)
        tools(row)
    elif not isinstance(row.get("text"), str):
        raise ValueError(f"{where}: keys {sorted(set(row) - {'sample_id', 'source'})}, expected {SHAPES}")
    else:
        _check_encodable(row["text"], f"{where}: text")


def is_conversation(row: Row) -> bool:
    """Whether there are turns in the row, perhaps beside tokens."""
    return row.get("messages") is not None or row.get("conversations") is not None


def token_lists(row: Row) -> tuple[list[Any], list[Any]]:
    """input_ids and loss_mask of a row, of equal length; a batch of one ([[1, 2]]) is taken out of its batch."""
    where = row["source"]
    if not isinstance(row.get("input_ids"), list) or not isinstance(row.get("loss_mask"), list):
        raise ValueError(f"{where}: a pre-tokenised row needs both input_ids and loss_mask, as lists")
    ids, mask = (
        values[0] if len(values) == 1 and isinstance(values[0], list) else values
        for values in (row["input_ids"], row["loss_mask"])
    )
    if len(ids) != len(mask):
        lengths = f"{len(ids)} input_ids, {len(mask)} mask values"
        raise ValueError(f"{where}: {lengths}; give one mask value for each token")
    return ids, mask


def turns(row: Row) -> list[dict[str, Any]]:
    """The conversation of a row: [{"role", "content", "reasoning_content"?, "tool_calls"?, ...}], as templates take it.

    ValueError names the wrong turn.
    """
    where = row["source"]
    raw = row["messages"] if row.get("messages") is not None else row["conversations"]
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"{where}: the conversation is {raw!r:.60}, expected a list of turns")
    return [_turn(turn, f"{where}: turn {number}") for number, turn in enumerate(raw, 1)]


def tools(row: Row) -> list[dict[str, Any]] | None:
    """The functions that the conversation may call, from a list or its JSON text; None if there are none."""
    found = _json_list(row.get("tools"), f"{row['source']}: tools")
    _check_encodable(json.dumps(found, ensure_ascii=False), f"{row['source']}: tools")
    return found or None


def reasoning(message: dict[str, Any]) -> str:
    """The thought of an assistant turn, from its own field or from a <think> block; "" if there is none."""
    if message.get("reasoning_content"):
        return message["reasoning_content"].strip()
    thought, separator, _ = message["content"].partition("</think>")
    return thought.rpartition("<think>")[2].strip() if separator else ""


def answer_text(message: dict[str, Any]) -> str:
    """What an assistant turn says once it has thought."""
    _, separator, answer = message["content"].rpartition("</think>")
    return answer.lstrip("\n") if separator else message["content"]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is {turn!r:.60}, expected an object with role and content")
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{where} has role {role!r}; known are {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": ROLES[role]}
    calls = _json_list(turn.get("tool_calls"), f"{where}: tool_calls")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    message["content"] = "" if content is None and calls else _plain_text(content, where)
    given = [turn[key] for key in REASONING_KEYS if isinstance(turn.get(key), str) and turn[key].strip()]
    if given and message["role"] == "assistant":
        message["reasoning_content"] = given[0]
    if calls:
        if message["role"] != "assistant":
            raise ValueError(f"{where} has tool_calls and role {role!r}; only the assistant calls tools")
        for call in calls:
            function = call.get("function", call)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"{where}: tool call {call!r:.60} names no function")
        message["tool_calls"] = calls
    message |= {key: turn[key] for key in ("tool_call_id", "name") if isinstance(turn.get(key), str)}
    _check_encodable(json.dumps(message, ensure_ascii=False), where)
    return message


def _plain_text(content: Any, where: str) -> str:
    """A string, or OpenAI's list of text parts, joined as serving joins it."""
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where} has content {content!r:.60}; only plain text can be used")
    return content


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _json_list(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects, given as such or as JSON text (the only way to keep mixed objects in a table)."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{where} is no JSON ({error}); give a list of objects, or its JSON text") from None
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{where} is {value!r:.60}; give a list of objects, or its JSON text")
    return value


def _check_encodable(text: str, where: str) -> None:
    """JSON can spell half of a surrogate pair ("\\ud800"), which is no character and has no tokens."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{where} contains an unpaired surrogate, which is no character; remove or repair the row")
