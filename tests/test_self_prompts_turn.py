"""Where a user's turn begins, under the templates of several families; what cannot be used is refused by name."""

import pytest

from domino_core.target import apply_chat_template
from pipelines.self_prompts_turn import markers, user_turn, with_prefix
from tests.chat_templates import (
    CHATML_DEFAULT,
    HYBRID,
    INSTRUCT,
    LLAMA3,
    LLAMA_SPECIAL,
    QWEN_SPECIAL,
    THINKING,
    small_tokenizer,
)

CHATML = "<|im_start|>user\n"
DEFAULT = "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
ASKED = "<|im_start|>system\nYou teach maths.<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "system", "prefix"),
    [
        (HYBRID, "", CHATML),
        (INSTRUCT, "", CHATML),
        (THINKING, "", CHATML),
        (HYBRID, "You teach maths.", ASKED + CHATML),
        (CHATML_DEFAULT, "", DEFAULT + CHATML),
        (CHATML_DEFAULT, "You teach maths.", ASKED + CHATML),
    ],
)
def test_chatml(template, system, prefix):
    fast = small_tokenizer(template)
    turn = user_turn(fast, (2, 0), system)
    assert turn.prefix == prefix
    assert fast.decode(turn.prefix_ids) == prefix
    assert (turn.end, turn.end_ids, turn.control_ids, turn.ends_answers) == ("<|im_end|>", {0, 2}, {1}, True)
    assert turn.stop_ids == [0, 1, 2]


def test_llama3_with_the_date_of_the_run():
    fast = small_tokenizer(LLAMA3, LLAMA_SPECIAL)
    turn = user_turn(fast, (0,), "Be brief.")
    assert turn.prefix.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: ")
    assert turn.prefix.endswith("\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n")
    assert turn.prefix_ids[:2] == [1, 3]
    # The turn ends with its own token although the target's texts do not: a base model.
    assert (turn.end, turn.end_ids, turn.control_ids, turn.ends_answers) == ("<|eot_id|>", {0, 2}, {1, 3, 4}, False)
    yesterday = with_prefix(turn, turn.prefix.replace("Today Date: ", "Today Date: 1 "), fast)
    assert fast.decode(yesterday.prefix_ids) == yesterday.prefix != turn.prefix


@pytest.mark.parametrize("template", [HYBRID, THINKING, CHATML_DEFAULT])
def test_a_question_follows_the_prefix(template):
    fast = small_tokenizer(template)
    text = apply_chat_template(
        fast, [{"role": "user", "content": "two?"}], enable_thinking=False, add_generation_prompt=True
    )
    turn = user_turn(fast, (2,))
    assert text.startswith(turn.prefix + "two?" + turn.end)


PLAIN = '{%- for turn in messages -%}{{- "<|im_start|>" + turn.role + "\\n" + SAID + "<|im_end|>" -}}{%- endfor -%}'
CHANGES = "changes what the user says, or leaves it out"


@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        (None, "", "has no chat template, so no user's turn can be drawn; use the instruct version"),
        (PLAIN.replace("SAID", "turn.content | upper"), "", CHANGES),
        (PLAIN.replace("SAID", "turn.content | lower"), "", CHANGES),
        (PLAIN.replace("SAID", "turn.content | tojson"), "", CHANGES),
        (PLAIN.replace("SAID", "turn.content | replace('\\n\\n', '\\n')"), "", CHANGES),
        (PLAIN.replace("SAID", "'?'"), "", CHANGES),
        (PLAIN.replace("SAID", "turn.content + turn.content"), "", "writes the user's words twice"),
        ("{{- messages[-1].content + '<|im_end|>' -}}", "", "writes nothing before a user's words"),
        (
            "{{- 'user: ' + messages[-1].content + '\\nassistant: ' -}}",
            "",
            "'.nassistant: ', which is no special token",
        ),
        ("{{- '<|im_start|>' + messages[-1].content -}}", "", "ends a user's turn with '', which is no special token"),
        (PLAIN.replace("SAID", "turn.content[:9]"), "Be brief and kind.", CHANGES),
        ("{{- '<|im_start|>' + messages[-1].content + '<|im_end|>' -}}", "Be brief.", "the system prompt; leave out"),
        ("{{- raise_exception('never') -}}", "", "refuses the conversation: never"),
    ],
)
def test_no_place_to_draw_at(template, system, message):
    fast = small_tokenizer(HYBRID)
    fast.chat_template = template
    with pytest.raises(ValueError, match=r".") as error:
        user_turn(fast, (2, 0), system)
    assert message in str(error.value).replace("\\n", ".n")


def test_marks_of_templates_are_told_from_text():
    fast = small_tokenizer(HYBRID)
    fast.add_tokens(["    ", "hello"])  # as some vocabularies have them
    pattern = markers(fast)
    for text in (*QWEN_SPECIAL, "<think>", "so <|user|> said", "[INST] hi", "<<SYS>>", "<start_of_turn>user"):
        assert pattern.search(text), text
    for text in ("if a <b and c> d: print('a|b')", "    hello", "<|", "[1] INST", "x <|> y", "<html>"):
        assert not pattern.search(text), text
