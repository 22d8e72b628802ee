"""Where a user's turn begins in a chat template: the text after which a target writes prompts of its own.

An instruct model that is given a conversation up to there goes on as the user would (Magpie, Xu et al. 2024,
arXiv:2406.08464). The place is found by rendering, so that it is right for every template; a template that has no such
place, or that changes what a user says, is a ValueError and never guessed at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

# Private-use characters, which no template writes. Between them what templates have been seen to change: case, quotes,
# brackets, blank lines.
_PLACE = "\ue000aB <i>&\"'\n\nc\ue001"
# Of other families too: a model that has read their logs writes them as plain text.
_FOREIGN = r"<\|[\w .:/-]{1,40}\|>|\[/?INST\]|<</?SYS>>|</?(?:start|end)_of_turn>"


@dataclass(frozen=True, kw_only=True)
class UserTurn:
    """The text before a user's words, and the tokens that come after them."""

    prefix: str  # all before the words: "<|im_start|>user\n", and a system turn before it if there is one
    prefix_ids: list[int]
    end: str  # the token that the template puts after the words: "<|im_end|>"
    end_ids: frozenset[int]  # that one and the target's own ends of text: the prompt is finished
    ends_answers: bool  # whether the target's answers end with it too; those of a base model do not
    control_ids: frozenset[int]  # every other special token: it has left the turn without ending it

    @property
    def stop_ids(self) -> list[int]:
        """Where drawing stops; nothing that comes after a control token can be of use."""
        return sorted(self.end_ids | self.control_ids)


def user_turn(tokenizer: Any, eos_token_ids: tuple[int, ...], system_prompt: str = "") -> UserTurn:
    """The user's turn of a tokenizer's chat template. ValueError if it has no place where a prompt could be drawn.

    system_prompt "": the system turn that the template writes by itself, or none.
    """
    from domino_core.target import apply_chat_template

    name = tokenizer.name_or_path
    if not getattr(tokenizer, "chat_template", None):
        remedy = "use the instruct version of the target, or give prompts with data="
        raise ValueError(f"the tokenizer of {name} has no chat template, so no user's turn can be drawn; {remedy}")
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    text = apply_chat_template(
        tokenizer,
        [*system, {"role": "user", "content": _PLACE}],
        enable_thinking=False,
        add_generation_prompt=True,  # which begins where the turn has ended, if nothing else ends it
    )
    prefix, *others = text.split(_PLACE)
    if len(others) != 1:
        what = "changes what the user says, or leaves it out" if not others else "writes the user's words twice"
        raise ValueError(
            f"the chat template of {name} {what}, so no prompt can be drawn there; give prompts with data="
        )
    if system_prompt.strip() not in prefix:
        remedy = "leave out self_prompts.system_prompt"
        raise ValueError(f"the chat template of {name} leaves out or changes the system prompt; {remedy}")
    if not prefix:
        raise ValueError(f"the chat template of {name} writes nothing before a user's words; give prompts with data=")
    special = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    after = _encode(tokenizer, others[0].lstrip())
    if not after or after[0] not in special:
        ends = f"ends a user's turn with {others[0]!r:.40}, which is no special token"
        raise ValueError(f"the chat template of {name} {ends}, so nothing says where a prompt is complete")
    end_ids = frozenset((after[0], *eos_token_ids))
    return UserTurn(
        prefix=prefix,
        prefix_ids=_encode(tokenizer, prefix),
        end=special[after[0]],
        end_ids=end_ids,
        ends_answers=after[0] in eos_token_ids,
        control_ids=frozenset(special) - end_ids,
    )


def with_prefix(turn: UserTurn, prefix: str, tokenizer: Any) -> UserTurn:
    """The turn behind another text: that of the day when a run began, for templates that write the date."""
    return replace(turn, prefix=prefix, prefix_ids=_encode(tokenizer, prefix))


def markers(tokenizer: Any) -> re.Pattern[str]:
    """Matches what belongs to templates and not to a user's words: this tokenizer's own marks, and other families'."""
    names = {str(token.content).strip() for token in tokenizer.added_tokens_decoder.values()}
    # Some vocabularies add runs of spaces or whole words, which are text.
    names = {name for name in names if len(name) >= 3 and not name.isalnum()}
    return re.compile("|".join([*map(re.escape, sorted(names, key=lambda name: (-len(name), name))), _FOREIGN]))


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
