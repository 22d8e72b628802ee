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

# Of other families, for what must hold for every template: ChatML with a system turn that nobody asked for (SmolLM2),
# and Llama 3, which begins with a token of its own, has the date in its system turn and trims what is said.
CHATML_DEFAULT = """
{%- if messages[0].role != "system" -%}
{{- "<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n" -}}
{%- endif -%}
{%- for turn in messages -%}{{- "<|im_start|>" + turn.role + "\\n" + turn.content + "<|im_end|>\\n" -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""
LLAMA3 = """
{%- set said = messages[0].content if messages[0].role == "system" else "" -%}
{{- "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + strftime_now("%d %b %Y") -}}
{{- "\\n\\n" + said | trim + "<|eot_id|>" -}}
{%- for turn in messages if turn.role != "system" -%}
{{- "<|start_header_id|>" + turn.role + "<|end_header_id|>\\n\\n" + turn.content | trim + "<|eot_id|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" -}}{%- endif -%}
"""
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_SPECIAL = ("<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")


def small_tokenizer(template: str, special: tuple[str, ...] = QWEN_SPECIAL) -> Any:
    """A byte-level BPE with a family's special tokens (Qwen3's): end of text, a mark, end of turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=list(special), initial_alphabet=alphabet)
    bpe.train_from_iterator(["be brief", "what is two and two", "it is four", "and three", "seven\n"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[2], pad_token=special[0])
    # As in Qwen3: words of the vocabulary, but not special ones.
    names = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    fast.add_tokens(list(names))
    fast.chat_template = template
    return fast
