"""The embedded target: tokenizer, template, prompts and card as shipped; turns cut from code; the command."""

import ast
import json
import math
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jobs.tiny_target_card import check_out
from jobs.tiny_target_data import (
    MASK,
    SPECIAL_TOKENS,
    Module,
    Turn,
    TurnLimits,
    cut_turns,
    group_name,
    read_modules,
    render_prompt,
    render_turn,
    shipped_prompts,
    split_modules,
)
from jobs.tiny_target_train import (
    TrainOptions,
    bits_per_byte,
    build_corpus,
    build_model,
    draw_rows,
    learning_rate,
    write_more_prompts,
)

ROOT = Path(__file__).resolve().parent.parent
ASSET = ROOT / "assets" / "tiny-qwen3"

CODE = '''
class Shelf:
    """Books by title."""

    def __init__(self, owner, books=()):
        """Take the owner's name and the first books."""
        self.owner = owner
        self.books = {book.title: book for book in books}
        self.lent = {}
        self.history = [(book.title, "bought", None) for book in books]

    @property
    def titles(self):
        # Lent books count, too.
        found = sorted(self.books)
        for title in self.lent:
            if title not in found:
                found.append(title)
        return [title.strip() for title in found if title]


def lend(shelf, title, reader, *, days=14):
    """Hand a book to a reader."""
    if title not in shelf.books:
        raise KeyError(f"{shelf.owner} has no book called {title}")
    book = shelf.books.pop(title)
    shelf.lent[title] = (reader, days)
    shelf.history.append((title, "lent", reader))
    if days > 100:
        shelf.history.append((title, "given away", reader))
        del shelf.lent[title]
    return book
'''

HELD_OUT_CODE = '''
    def decode(self, s, _w=WHITESPACE.match):
        """Return the Python representation of ``s`` (a ``str`` instance
        containing a JSON document).

        """
        obj, end = self.raw_decode(s, idx=_w(s, 0).end())
        end = _w(s, end).end()
        if end != len(s):
            raise JSONDecodeError("Extra data", s, end)
        return obj
'''


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ASSET)


@pytest.fixture(scope="module")
def fast() -> Tokenizer:
    return Tokenizer.from_file(str(ASSET / "tokenizer.json"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight modules that say about the same, one with its test, one broken and one in a skipped folder."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "test/test_alpha"):
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(CODE.replace("Shelf", name.rpartition("/")[2].title()).replace("lend", f"lend_{path.stem}"))
    (folder / "broken.py").write_text("def (:\n")
    (folder / "encodings").mkdir()
    (folder / "encodings" / "table.py").write_text("table = {1: 2}\n")
    return folder


def code_module() -> Module:
    return Module(name="shelf", group="shelf", is_test=False, text=CODE)


def prompt_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ASSET / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_and_never_holds_the_mask(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id(MASK) not in ids


def test_every_byte_and_code_with_blanks_come_back_through_transformers(tokenizer: Any, fast: Tokenizer) -> None:
    letters, blanks = "日本語 🙂 é e\u0301 \r\n\t x", "        x\n\n\n    y = 1234567890  \n"
    texts = ["".join(map(chr, range(0x300))), letters, blanks, CODE]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        # transformers may rebuild a tokenizer of a known model type with that model's own rules.
        assert ids == fast.encode(text).ids


def test_indentation_is_one_token_and_digits_stand_alone(fast: Tokenizer) -> None:
    for width in (4, 8, 12):
        tokens = fast.encode("\n" + " " * width + "return").ids
        assert [fast.decode([token]) for token in tokens] == ["\n", " " * (width - 1), " return"]
    assert len(fast.encode("2048").ids) == 4


def test_mask_has_a_row_and_no_text_reaches_it(tokenizer: Any) -> None:
    mask = tokenizer.convert_tokens_to_ids(MASK)
    config = json.loads((ASSET / "config.json").read_text())
    assert mask == config["vocab_size"] - 1 == len(tokenizer) - 1
    assert mask not in tokenizer(MASK, add_special_tokens=False)["input_ids"]
    assert mask not in tokenizer.all_special_ids
    assert tokenizer.decode(tokenizer(MASK, add_special_tokens=False)["input_ids"]) == MASK


def test_chat_template_is_chatml_and_ignores_thinking(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "def f():\n    x"},
        {"role": "assistant", "content": "    return x"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\ndef f():\n    x<|im_end|>\n"
        "<|im_start|>assistant\n    return x<|im_end|>\n"
    )
    for thinking in (False, True):
        prompt = tokenizer.apply_chat_template(
            messages[:2], tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert rendered.startswith(prompt)
        assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    turn = Turn(id="x", prompt=messages[1]["content"], answer=messages[2]["content"])
    assert render_turn(turn) == tokenizer.apply_chat_template(turn.messages, tokenize=False)
    generation = tokenizer.apply_chat_template(turn.messages[:1], tokenize=False, add_generation_prompt=True)
    assert render_prompt(turn) == generation


def test_special_tokens_are_told_apart(tokenizer: Any) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    generation = json.loads((ASSET / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert generation["pad_token_id"] == 3


def test_asset_is_small_and_complete() -> None:
    files = [path for path in ASSET.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert {path.relative_to(ASSET).as_posix() for path in files} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "prompts/heldout.jsonl",
        "prompts/train.jsonl",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_card_states_its_fields() -> None:
    card = (ASSET / "README.md").read_text(encoding="utf-8")
    for field in ("data", "held out", "steps", "time", "device", "held-out loss", "licence"):
        value = card.partition(f"\n| {field} | ")[2].partition(" |")[0]
        assert value, field
    assert 0 < float(card.partition("| held-out loss | ")[2].split()[0]) < 1.2
    assert "PSF License" in card
    assert "Apache-2.0" in card


def test_held_out_prompts_come_from_modules_that_were_not_trained_on() -> None:
    train, held_out = prompt_rows("train"), prompt_rows("heldout")
    assert len(train) == 997
    assert len(held_out) == 64
    groups = [{group_name(row["id"].split(":")[0].split(".")) for row in rows} for rows in (train, held_out)]
    assert groups[1]
    assert not groups[0] & groups[1]
    stated = (ASSET / "README.md").read_text(encoding="utf-8").partition("\n| held out | ")[2].partition("\n")[0]
    assert all(f"`{group}`" in stated for group in groups[1])
    assert not any(f"`{group}`" in stated for group in groups[0])
    contents = [row["messages"][0]["content"] for row in train + held_out]
    assert len(set(contents)) == len(contents)
    for row in train + held_out:
        assert set(row) == {"id", "messages"}
        assert [message["role"] for message in row["messages"]] == ["user"]


def test_published_weights_predict_a_held_out_function(tokenizer: Any) -> None:
    """One function of json.decoder (CPython 3.11): weights saved in a wrong layout would cost several bits a byte."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32)
    ids = torch.tensor([[0, *tokenizer(HELD_OUT_CODE)["input_ids"]]])
    with torch.no_grad():
        nats = model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    assert nats / math.log(2) / len(HELD_OUT_CODE.encode()) < 1.6


def test_shipped_model_answers_with_code_and_stops(tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32)
    ended = 0
    for row in prompt_rows("train")[:6]:
        ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        output = model.generate(ids, max_new_tokens=160, do_sample=False)[0, ids.shape[1] :].tolist()
        ended += output[-1] == tokenizer.eos_token_id
    assert ended >= 3


def test_turns_split_code_where_a_statement_starts(fast: Tokenizer) -> None:
    limits = TurnLimits(min_prompt=4, min_answer=8)
    turns = list(cut_turns(code_module(), fast, limits, per_piece=100, rng=random.Random(0)))
    assert {turn.id.split(":")[1] for turn in turns} == {"Shelf", "Shelf.__init__", "Shelf.titles", "lend"}
    for turn in turns:
        ast.parse(f"{turn.prompt}\n{turn.answer}\n")
        assert turn.prompt.startswith(("def ", "class ", "@property"))
        assert turn.answer.startswith("    ")
        line = int(turn.id.split(":")[2])
        assert CODE.splitlines()[line - 1].strip() == turn.answer.splitlines()[0].strip()
        assert not turn.answer.lstrip().startswith('"""')


def test_answers_keep_their_limits_and_end_once_settled(fast: Tokenizer) -> None:
    limits = TurnLimits(min_prompt=4, min_answer=8, settle=25, max_answer=80)
    turns = list(cut_turns(code_module(), fast, limits, per_piece=100, rng=random.Random(0)))
    lengths = [len(fast.encode(turn.answer).ids) for turn in turns]
    assert min(lengths) >= limits.min_answer - 4
    assert max(lengths) <= limits.max_answer + 4
    whole = textwrap.dedent(CODE).strip()
    cut_short = [turn for turn in turns if turn.id.split(":")[1] == "lend" and not whole.endswith(turn.answer)]
    # Statements of the body before the last one: without the last, the answer is still short of `settle`.
    assert cut_short
    for turn in cut_short:
        assert len(fast.encode(turn.answer).ids) >= limits.settle - 4


def test_one_cut_a_piece_when_asked(fast: Tokenizer) -> None:
    turns = list(cut_turns(code_module(), fast, TurnLimits(min_answer=8), per_piece=1, rng=random.Random(0)))
    names = [turn.id.split(":")[1] for turn in turns]
    assert len(names) == len(set(names))


def test_modules_are_held_out_with_their_tests(source: Path) -> None:
    modules = read_modules(source)
    names = {module.name for module in modules}
    assert "broken" not in names
    assert "encodings.table" not in names
    assert next(m for m in modules if m.name == "test.test_alpha").is_test
    for one_in in (2, 4, 16):
        train, held_out = split_modules(modules, one_in=one_in)
        assert held_out
        assert not {m.group for m in train} & {m.group for m in held_out}
        assert len(train) + len(held_out) == len(modules)
    groups = {m.name: m.group for m in modules}
    assert groups["alpha"] == groups["test.test_alpha"] == "alpha"


def test_held_out_prompts_that_were_seen_in_training_are_dropped(fast: Tokenizer) -> None:
    other = Module(name="other", group="other", is_test=False, text=CODE.replace("lend", "borrow"))
    held_out = Module(name="held", group="held", is_test=False, text=CODE)
    _, prompts = shipped_prompts([other], [held_out], fast, counts=(10, 10), seed=0)
    assert prompts
    assert all("def lend" in turn.prompt for turn in prompts)
    with pytest.raises(ValueError, match="give no prompt"):
        shipped_prompts([held_out], [held_out], fast, counts=(10, 10), seed=0)


def test_rows_of_chat_start_with_a_turn(source: Path, fast: Tokenizer) -> None:
    train, held_out = split_modules(read_modules(source))
    options = TrainOptions(batch=8, length=64)
    corpus = build_corpus(train, held_out, fast, options)
    ids_BS = draw_rows(corpus, options, torch.Generator().manual_seed(0))
    assert ids_BS.shape == (8, 65)
    assert (ids_BS[4:, 0] == fast.token_to_id("<|im_start|>")).all()
    assert not (ids_BS[:4] == fast.token_to_id("<|im_start|>")).any()


def test_bits_per_byte_of_a_uniform_model(source: Path, fast: Tokenizer) -> None:
    train, held_out = split_modules(read_modules(source))
    options = TrainOptions(batch=4, length=64, eval_tokens=640)
    corpus = build_corpus(train, held_out, fast, options)
    model = build_model(fast)
    torch.nn.init.zeros_(model.model.embed_tokens.weight)  # tied: all logits are equal, 11 bits a token
    num_scored = min(640, (len(corpus.held_out_T) - 1) // 64 * 64)
    ids = corpus.held_out_T[1 : num_scored + 1].tolist()
    num_bytes = len(fast.decode(ids, skip_special_tokens=True).encode())
    assert bits_per_byte(model, corpus, options) == pytest.approx(11 * num_scored / num_bytes, rel=1e-4)


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    options = TrainOptions(steps=1000, warmup_steps=100)
    rates = [learning_rate(step, options) for step in range(1000)]
    assert max(rates) == pytest.approx(options.peak_learning_rate)
    assert rates.index(max(rates)) in (99, 100)
    assert rates[0] == pytest.approx(options.peak_learning_rate / 100)
    assert rates[-1] < options.peak_learning_rate * 1e-4


def test_user_errors_name_value_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--steps must be at least 1, got 0"):
        TrainOptions(steps=0)
    with pytest.raises(ValueError, match="--length 4096 exceeds the 2048 positions"):
        TrainOptions(length=4096)
    with pytest.raises(ValueError, match="is not a folder"):
        read_modules(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no readable Python module"):
        read_modules(tmp_path)
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="one top-level module"):
        split_modules(read_modules(tmp_path))
    with pytest.raises(ValueError, match="is not a model folder"):
        check_out(tmp_path)


def test_command_trains_a_loadable_model_on_the_cpu(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "model"
    command = [sys.executable, "-m", "jobs.tiny_target", "--device", "cpu", "--steps", "4", "--batch", "2"]
    command += ["--length", "64", "--eval-tokens", "256", "--source", str(source), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    out.mkdir()
    (out / "config.json").write_text("{}")  # an old model folder, which is replaced
    (out / "stale.txt").touch()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (out / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert len(tokenizer) <= model.config.vocab_size
    with torch.no_grad():
        assert model(**tokenizer("def f(x):", return_tensors="pt")).logits.isfinite().all()
    assert (out / "prompts" / "heldout.jsonl").read_text()
    assert "| held-out loss | " in (out / "README.md").read_text(encoding="utf-8")


def test_more_prompts_come_from_training_modules_alone(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    body = "\n".join(f"    value_{i} = compute(value_{i - 1}, {i}) if value_{i - 1} else None" for i in range(1, 40))
    names = [f"module_{i}" for i in range(40)]
    for name in names:
        (source / f"{name}.py").write_text(
            f'def run_{name}(value_0):\n    """Walk {name}."""\n{body}\n    return value_1\n'
        )
    held_out = {module.name for module in split_modules(read_modules(source))[1]}
    assert held_out
    out = tmp_path / "more.jsonl"
    write_more_prompts(source, 30, out, seed=0)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 30
    assert {row["id"].split(":")[0] for row in rows}.isdisjoint(held_out)
    assert len({row["messages"][0]["content"] for row in rows}) == 30
    with pytest.raises(ValueError, match="ends in"):
        write_more_prompts(source, 30, tmp_path / "folder", seed=0)
