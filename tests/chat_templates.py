"""Chat templates that behave as Qwen3's do, written from their behaviour, and a tokenizer to use them with.

Three behaviours are in use: the first Qwen3 models (HYBRID) think or not, as `enable_thinking` says; the later Instruct
models (INSTRUCT) know no thoughts; the later Thinking models (THINKING) have every prompt open a thought.
"""

from typing import Any

# Tools and a system turn first; tool results as a user's turn; a thought only after the last question, and there an
# empty one if the last answer has none; tool calls after the words.
_BODY = """
{%- macro called(call) -%}
{%- set function = call.function or call -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endmacro -%}
{%- set asked = namespace(at=messages | length - 1) -%}
{%- for turn in messages if turn.role == "user" and not turn.content.startswith("<tool_response>") -%}
{%- if loop.last -%}{%- set asked.at = messages.index(turn) -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- "<|im_start|>system\\n" + (messages[0].content + "\\n\\n" if messages[0].role == "system" else "") + "<tools>" -}}
{%- for tool in tools -%}{{- "\\n" + (tool | tojson) -}}{%- endfor -%}
{{- "\\n</tools><|im_end|>\\n" -}}
{%- endif -%}
{%- for turn in messages -%}
{%- if turn.role == "user" or (turn.role == "system" and not (loop.first and tools)) -%}
{{- "<|im_start|>" + turn.role + "\\n" + turn.content + "<|im_end|>\\n" -}}
{%- elif turn.role == "tool" -%}
{{- "<|im_start|>user" if loop.previtem is not defined or loop.previtem.role != "tool" else "" -}}
{{- "\\n<tool_response>\\n" + turn.content + "\\n</tool_response>" -}}
{{- "<|im_end|>\\n" if loop.last or loop.nextitem.role != "tool" else "" -}}
{%- elif turn.role == "assistant" -%}
ANSWER
{%- for call in turn.tool_calls or [] -%}
{{- ("\\n" if said or not loop.first else "") + called(call) -}}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}PROMPT{%- endif -%}
"""
_THOUGHT = """
{%- set said = turn.content -%}
{%- set thought = turn.reasoning_content or "" -%}
{%- if not turn.reasoning_content and "</think>" in said -%}
{%- set thought = said.split("</think>")[0].split("<think>")[-1].strip("\\n") -%}
{%- set said = said.split("</think>")[-1].lstrip("\\n") -%}
{%- endif -%}
{{- "<|im_start|>assistant\\n" -}}
{%- if loop.index0 > asked.at and (loop.last or thought) -%}
{{- "<think>\\n" + thought.strip("\\n") + "\\n</think>\\n\\n" + said.lstrip("\\n") -}}
{%- else -%}{{- said -}}{%- endif -%}
"""
_PLAIN = '{%- set said = turn.content -%}{{- "<|im_start|>assistant\\n" + said -}}'
_EMPTY = (
    '{%- if enable_thinking is defined and not enable_thinking -%}{{- "<think>\\n\\n</think>\\n\\n" -}}{%- endif -%}'
)

HYBRID = _BODY.replace("ANSWER", _THOUGHT).replace("PROMPT", _EMPTY)
INSTRUCT = _BODY.replace("ANSWER", _PLAIN).replace("PROMPT", "")
THINKING = _BODY.replace("ANSWER", _THOUGHT).replace("PROMPT", '{{- "<think>\\n" -}}')


def small_tokenizer(template: str) -> Any:
    """A byte-level BPE with Qwen3's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(["be brief", "what is two and two", "it is four", "and three", "seven\n"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    # As in Qwen3: words of the vocabulary, but not special ones.
    names = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    fast.add_tokens(list(names))
    fast.chat_template = template
    return fast
