"""Data of the embedded target: Python modules, a byte-level BPE tokenizer with a ChatML template, turns cut from code.

A chat turn is the head of a function or class (the user) and what follows it up to a natural end (the assistant). Whole
modules, their tests with them, are held out, so that nothing of a held-out prompt was read in training.
"""

import ast
import hashlib
import json
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PAD)  # ids 0 to 3
MASK = "<|mask|>"  # last row of the vocabulary, see `train_tokenizer`

# Qwen's split without its English contractions: one leading non-letter joins a word (" return", ".append", "_name"),
# digits stand alone, punctuation joins its line end, and the indentation before a word is one run of blanks.
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# `enable_thinking` may be passed, as to Qwen3's template, and changes nothing: this model does not think.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# Tables, generated text and broken samples teach a small model little Python.
SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "encodings", "pydoc_data", "lib2to3"})


@dataclass(frozen=True, kw_only=True)
class Module:
    """One source file: dotted name below the source folder, and the name of the group that is held out together."""

    name: str
    group: str
    is_test: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class Turn:
    """`prompt` is the head of a piece of code, `answer` what follows it; both dedented, without a final newline."""

    id: str
    prompt: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """Bounds in tokens. An answer ends with the first statement of the body that ends at `settle` tokens or later."""

    min_prompt: int = 8
    max_prompt: int = 160
    min_answer: int = 30
    settle: int = 60
    max_answer: int = 140


def read_modules(source: Path) -> list[Module]:
    """Every module below `source` that parses, in the order of its name, equal texts once. ValueError for none."""
    if not source.is_dir():
        raise ValueError(f"--source {source} is not a folder; give one that holds Python modules")
    modules: dict[str, Module] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts):
            continue
        try:  # Library tests contain files that are wrong on purpose: odd encodings, syntax errors.
            text = path.read_bytes().decode("utf-8")
            parse(text)
        except (SyntaxError, ValueError):
            continue
        is_test = any(part in ("test", "tests", "idle_test") or part.startswith("test_") for part in parts)
        text = text.replace("\r\n", "\n").strip("\n") + "\n"
        modules.setdefault(text, Module(name=".".join(parts), group=group_name(parts), is_test=is_test, text=text))
    if not modules:
        raise ValueError(f"--source {source} has no readable Python module (*.py, UTF-8)")
    return list(modules.values())


def group_name(parts: Sequence[str]) -> str:
    """Top-level module that a file belongs to: `json/decoder.py` and `test/test_json/test_scan.py` are both `json`."""
    name = parts[1] if parts[0] == "test" and len(parts) > 1 else parts[0]
    return name.removeprefix("_").removeprefix("test_") or name


def split_modules(modules: list[Module], *, one_in: int = 16) -> tuple[list[Module], list[Module]]:
    """(training, held out): one group in `one_in`, chosen by the hash of its name, is held out whole."""
    groups = sorted({module.group for module in modules}, key=lambda name: hashlib.sha256(name.encode()).digest())
    if len(groups) < 2:
        raise ValueError(f"the source has one top-level module ({groups[0]}): at least two are needed to hold one out")
    held_out = set(groups[: max(1, len(groups) // one_in)])
    return [m for m in modules if m.group not in held_out], [m for m in modules if m.group in held_out]


def parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources are not our business
        return ast.parse(text)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text comes back unchanged, because all 256 bytes are entries and nothing is normalised.

    The mask entry is appended to the vocabulary without a merge that leads to it and without being a special token, so
    that no text, not even its own name, encodes to it. Its row of the embedding is what a drafter reads as "unknown".
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    layout = json.loads(tokenizer.to_str())
    layout["model"]["vocab"][MASK] = tokenizer.get_vocab_size()
    return Tokenizer.from_str(json.dumps(layout))


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, readable by transformers' AutoTokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "additional_special_tokens": [END_OF_TEXT, TURN_START],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def cut_turns(
    module: Module, tokenizer: Tokenizer, limits: TurnLimits, *, per_piece: int, rng: random.Random
) -> Iterator[Turn]:
    """Turns from the functions and classes of one module: at most `per_piece` cuts of each, drawn from all that fit.

    A cut stands before a statement that starts its line. Token counts are summed over lines, a few off the exact ones.
    """
    lines = module.text.splitlines()
    tokens_before = [0, *accumulate(len(line) for line in tokenizer.encode_batch([line + "\n" for line in lines]))]
    for name, node in definitions(parse(module.text)):
        first = first_line(node)
        ends = [statement.end_lineno or 0 for statement in node.body]
        fitting: list[tuple[int, int]] = []
        for cut in cut_lines(node, lines):
            prompt = tokens_before[cut - 1] - tokens_before[first - 1]
            end = next(e for e in ends if e == ends[-1] or tokens_before[e] - tokens_before[cut - 1] >= limits.settle)
            answer = tokens_before[end] - tokens_before[cut - 1]
            prompt_fits = limits.min_prompt <= prompt <= limits.max_prompt
            if prompt_fits and end >= cut and limits.min_answer <= answer <= limits.max_answer:
                fitting.append((cut, end))
        for cut, end in sorted(rng.sample(fitting, min(per_piece, len(fitting)))):
            piece = dedented(lines[first - 1 : end], node.col_offset)
            if piece is not None:
                prompt, answer = piece[: cut - first], piece[cut - first :]
                turn_id = f"{module.name}:{name}:{cut}"
                yield Turn(id=turn_id, prompt="\n".join(prompt).rstrip(), answer="\n".join(answer).rstrip())


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Every function and class with its dotted name, outer ones first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node  # pyright: ignore[reportReturnType]  (async ones have the same fields)
            yield from definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.stmt):
            yield from definitions(node, prefix)


def first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def cut_lines(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> list[int]:
    """Lines (from 1) where a statement of the body, however deep, starts; the docstring never starts the answer."""
    skip_docstring = 1 if ast.get_docstring(node, clean=False) is not None else 0
    inner = (child for statement in node.body[skip_docstring:] for child in ast.walk(statement))
    starts = {first_line(child) for child in inner if isinstance(child, ast.stmt)}
    return sorted(start for start in starts if start > node.lineno and re.match(r"\s*[\w@]", lines[start - 1]))


def dedented(lines: list[str], indent: int) -> list[str] | None:
    """Lines moved left by `indent` blanks, or None where a line (of a multi-line string) stands further left."""
    if any(line[:indent].strip() for line in lines):
        return None
    return [line[indent:] for line in lines]


def distinct_turns(turns: Iterable[Turn]) -> list[Turn]:
    """First turn of every prompt."""
    by_prompt: dict[str, Turn] = {}
    for turn in turns:
        by_prompt.setdefault(turn.prompt, turn)
    return list(by_prompt.values())


def spread_over_modules(turns: list[Turn], count: int, rng: random.Random) -> list[Turn]:
    """`count` turns (or all), taken from the modules in turn, so that a large module does not crowd out small ones."""
    by_module: dict[str, list[Turn]] = {}
    for turn in rng.sample(turns, len(turns)):
        by_module.setdefault(turn.id.split(":")[0], []).append(turn)
    chosen: list[Turn] = []
    while len(chosen) < min(count, len(turns)):
        for queue in by_module.values():
            if queue and len(chosen) < count:
                chosen.append(queue.pop())
    return chosen


def shipped_prompts(
    train: list[Module], held_out: list[Module], tokenizer: Tokenizer, *, counts: tuple[int, int], seed: int
) -> tuple[list[Turn], list[Turn]]:
    """(training, held-out) turns whose prompts ship with the model: library code, tests left out, one per function.

    A held-out prompt that is found in the training text (a copied helper) is dropped.
    ValueError when the held-out modules give none.
    """
    rng = random.Random(seed)
    # A prompt worth showing is more than a signature: it names the thing and says a little about it.
    limits = TurnLimits(min_prompt=24, max_prompt=120)

    def turns(modules: list[Module]) -> list[Turn]:
        library = (module for module in modules if not module.is_test)
        found = distinct_turns(t for m in library for t in cut_turns(m, tokenizer, limits, per_piece=1, rng=rng))
        # After a comment the natural thing is more comment; addresses of others' servers need not travel with us.
        return [
            turn
            for turn in found
            if not turn.prompt.rpartition("\n")[2].lstrip().startswith("#") and "://" not in turn.prompt
        ]

    def words(text: str) -> str:
        return " ".join(text.split())

    train_words = words("\n".join(module.text for module in train))
    candidates = spread_over_modules(turns(held_out), 2 * counts[1], rng)
    unseen = [turn for turn in candidates if words(turn.prompt) not in train_words][: counts[1]]
    if not unseen:
        raise ValueError(f"the held-out modules {[m.name for m in held_out]} give no prompt: use a larger --source")
    return spread_over_modules(turns(train), counts[0], rng), unseen


def more_prompts(train: list[Module], tokenizer: Tokenizer, count: int, seed: int) -> list[Turn]:
    """Up to `count` prompts of the training modules, tests too and several per function, for runs that need more."""
    rng = random.Random(seed)
    limits = TurnLimits(min_prompt=16, max_prompt=160)
    turns = distinct_turns(t for m in train for t in cut_turns(m, tokenizer, limits, per_piece=6, rng=rng))
    return spread_over_modules(turns, count, rng)


def render_prompt(turn: Turn) -> str:
    """What the chat template makes of the user's message, up to where the answer starts."""
    return f"{TURN_START}user\n{turn.prompt}{TURN_END}\n{TURN_START}assistant\n"


def render_turn(turn: Turn) -> str:
    """The whole exchange. Tests compare both with the template itself; Jinja would take minutes on the corpus."""
    return f"{render_prompt(turn)}{turn.answer}{TURN_END}\n"


def write_prompts(turns: list[Turn], path: Path) -> None:
    """One JSON row a line: {"id", "messages": [the user's turn]}. The answer is the target's to give."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"id": t.id, "messages": t.messages[:1]} for t in turns)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
