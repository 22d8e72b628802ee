"""Training of the embedded target (`python -m jobs.tiny_target`): corpus, model, loop, measurement.

The model is deep rather than wide, so that a drafter of one or two layers is cheap beside it, as with the real targets.
Letters: B rows of a batch, S tokens of a row, V vocabulary.
"""

import math
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from jobs.tiny_target_card import Facts, check_out, greedy_answers, measure_answers, write_model
from jobs.tiny_target_data import (
    END_OF_TEXT,
    PAD,
    TURN_END,
    Module,
    TurnLimits,
    cut_turns,
    more_prompts,
    read_modules,
    render_turn,
    shipped_prompts,
    split_modules,
    train_tokenizer,
    write_prompts,
)

MAX_POSITIONS = 2048
VOCAB_SIZE = 2048


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    steps: int = 1600
    batch: int = 128  # rows; half of them running text, half chat turns
    length: int = 512  # tokens of a row
    peak_learning_rate: float = 3e-3
    warmup_steps: int = 200
    weight_decay: float = 0.5
    clip_norm: float = 1.0
    evaluations: int = 12  # over the whole run; the best weights are kept
    eval_tokens: int = 400_000
    prompts: tuple[int, int] = (1000, 64)  # shipped training and held-out prompts
    seed: int = 0
    device: str = "cpu"
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "eval_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.length > MAX_POSITIONS:
            raise ValueError(f"--length {self.length} exceeds the {MAX_POSITIONS} positions of the model")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token streams on the device. Rows of running text start anywhere, rows of chat where a conversation starts."""

    text_T: torch.Tensor
    chat_T: torch.Tensor
    chat_starts_X: torch.Tensor
    held_out_T: torch.Tensor
    token_bytes_V: torch.Tensor  # bytes of text that a token stands for; 0 for special tokens


def build_model(tokenizer: Any) -> Any:
    """Qwen3ForCausalLM with fresh float32 weights."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=14,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    model = Qwen3ForCausalLM(config)
    # A turn's end stops an answer; so does the document's end, in running text.
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    return model


def build_corpus(train: list[Module], held_out: list[Module], tokenizer: Any, options: TrainOptions) -> Corpus:
    """Tokenises everything once. Library code gives three turns a function, its tests one."""
    rng = random.Random(options.seed)
    limits = TurnLimits()
    turns = [t for m in train for t in cut_turns(m, tokenizer, limits, per_piece=1 if m.is_test else 3, rng=rng)]
    if not turns:
        raise ValueError("no function in the source is long enough for a chat turn: use a larger --source")
    rng.shuffle(turns)
    chats = encode([render_turn(turn) for turn in turns], tokenizer)
    ends = torch.tensor([len(chat) for chat in chats]).cumsum(0)

    def stream(documents: list[list[int]]) -> torch.Tensor:
        ids = torch.tensor([token for document in documents for token in document], dtype=torch.int32)
        # Short streams (tiny sources) are repeated, so that a row always fits.
        repeats = math.ceil((options.length + 1) * 2 / max(1, len(ids)))
        return ids.repeat(repeats).to(options.device)

    chat_T = stream(chats)
    starts_X = torch.cat([ends.new_zeros(1), ends[:-1]])
    starts_X = starts_X[starts_X + options.length < len(chat_T)].to(options.device)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    texts = [[[end_of_text, *ids] for ids in encode([m.text for m in part], tokenizer)] for part in (train, held_out)]
    return Corpus(
        text_T=stream(texts[0]),
        chat_T=chat_T,
        chat_starts_X=starts_X,
        held_out_T=stream(texts[1]),
        token_bytes_V=token_bytes(tokenizer).to(options.device),
    )


def encode(texts: list[str], tokenizer: Any) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def token_bytes(tokenizer: Any) -> torch.Tensor:
    """[V] length of each token in bytes: byte-level BPE writes one character a byte."""
    lengths_V = torch.zeros(VOCAB_SIZE)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token, index in tokenizer.get_vocab().items():
        lengths_V[index] = 0 if token in special else len(token)
    return lengths_V


def draw_rows(corpus: Corpus, options: TrainOptions, generator: torch.Generator) -> torch.Tensor:
    """ids [B, S+1]: the first half running text, the rest chat turns packed one after another, from a turn's start."""
    num_text = options.batch // 2
    device = corpus.text_T.device
    last = len(corpus.text_T) - options.length
    text_starts_B = torch.randint(last, (num_text,), generator=generator, device=device)
    chosen_B = torch.randint(len(corpus.chat_starts_X), (options.batch - num_text,), generator=generator, device=device)
    offsets_S = torch.arange(options.length + 1, device=device)
    text_BS = corpus.text_T[text_starts_B[:, None] + offsets_S]
    chat_BS = corpus.chat_T[corpus.chat_starts_X[chosen_B][:, None] + offsets_S]
    return torch.cat([text_BS, chat_BS]).long()


def learning_rate(step: int, options: TrainOptions) -> float:
    """Linear warm-up, then a cosine to zero."""
    warmup = min(options.warmup_steps, max(1, options.steps // 10))
    if step < warmup:
        return options.peak_learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, options.steps - warmup)
    return options.peak_learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


@torch.compiler.set_stance("force_eager")  # another batch shape must not recompile the layers
@torch.no_grad()
def bits_per_byte(model: Any, corpus: Corpus, options: TrainOptions) -> float:
    """Loss on held-out running text, every token scored once with at most `length` tokens before it, over its bytes."""
    ids_T = corpus.held_out_T[: options.eval_tokens + 1].long()
    num_rows = (len(ids_T) - 1) // options.length
    inputs_XS = ids_T[: num_rows * options.length].view(num_rows, options.length)
    labels_XS = ids_T[1 : num_rows * options.length + 1].view(num_rows, options.length)
    nats = 0.0
    for inputs_BS, labels_BS in zip(inputs_XS.split(options.batch), labels_XS.split(options.batch), strict=True):
        with autocast(options.device):
            logits_BSV = model(input_ids=inputs_BS, use_cache=False).logits
        nats += functional.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), reduction="sum").item()
    return nats / math.log(2) / corpus.token_bytes_V[labels_XS.flatten()].sum().item()


def autocast(device: str) -> torch.autocast:
    return torch.autocast("cuda" if device.startswith("cuda") else "cpu", torch.bfloat16, device.startswith("cuda"))


def train(model: Any, corpus: Corpus, options: TrainOptions) -> Iterator[dict[str, float]]:
    """Trains in place, yields a record after each evaluation, and leaves the best held-out weights in the model."""
    from tqdm import tqdm

    generator = torch.Generator(options.device).manual_seed(options.seed)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=options.device.startswith("cuda"))
    if options.compile:
        for layer in model.model.layers:
            layer.compile()  # one layer at a time: the fourteen share one compilation
    every = max(1, options.steps // options.evaluations)
    best, best_weights = math.inf, {}
    since, steps_before = time.monotonic(), 0
    bar = tqdm(range(options.steps), desc="train", unit="step", mininterval=2.0)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        ids_BS = draw_rows(corpus, options, generator)
        with autocast(options.device):
            logits_BSV = model(input_ids=ids_BS[:, :-1], use_cache=False).logits
            loss = functional.cross_entropy(logits_BSV.flatten(0, 1), ids_BS[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0 or step + 1 == options.steps:
            model.eval()
            held_out = bits_per_byte(model, corpus, options)
            model.train()
            if held_out < best:
                best = held_out
                best_weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            bar.set_postfix(loss=f"{loss.item():.3f}", held_out_bpb=f"{held_out:.4f}")
            rate = (step + 1 - steps_before) * options.batch * options.length / (time.monotonic() - since)
            yield {"step": step + 1, "train_loss": loss.item(), "held_out_bpb": held_out, "tokens_per_s": rate}
            since, steps_before = time.monotonic(), step + 1
    model.load_state_dict(best_weights)


def make(options: TrainOptions, *, source: Path, source_name: str, out: Path, command: str) -> None:
    """The whole run: read, split, tokenise, train, measure, write `out`."""
    from tokenizers import Tokenizer

    check_out(out)
    torch.manual_seed(options.seed)
    modules = read_modules(source)
    train_modules, held_out = split_modules(modules)
    print(f"{len(train_modules)} modules to train on, {len(held_out)} held out; training the tokenizer", flush=True)
    tokenizer: Tokenizer = train_tokenizer((m.text for m in train_modules), vocab_size=VOCAB_SIZE)
    prompts = shipped_prompts(train_modules, held_out, tokenizer, counts=options.prompts, seed=options.seed)
    corpus = build_corpus(train_modules, held_out, tokenizer, options)
    turns = f"{len(corpus.chat_T):,} in {len(corpus.chat_starts_X):,} turns"
    print(f"{len(corpus.text_T):,} tokens of text, {turns}; {len(corpus.held_out_T):,} held out", flush=True)

    model = build_model(tokenizer).to(options.device)
    started = time.monotonic()
    for record in train(model, corpus, options):
        print("\n" + "  ".join(f"{name} {value:.5g}" for name, value in record.items()), flush=True)
    seconds = time.monotonic() - started

    model.to(torch.bfloat16).eval()  # what is published is what is measured
    answers = greedy_answers(model, tokenizer, prompts[1])
    facts = Facts(
        command=command,
        source=source_name,
        train_modules=train_modules,
        held_out=held_out,
        parameters=sum(p.numel() for p in model.parameters()),
        num_turns=len(corpus.chat_starts_X),
        stream_tokens=len(corpus.text_T) + len(corpus.chat_T),
        steps=options.steps,
        trained_tokens=options.steps * options.batch * options.length,
        seconds=seconds,
        device=torch.cuda.get_device_name() if options.device.startswith("cuda") else f"CPU ({platform.machine()})",
        bits_per_byte=bits_per_byte(model, corpus, options),
        answers=measure_answers(answers, prompts[1], tokenizer),
        shown=(prompts[1][0], tokenizer.decode(answers[0])),
    )
    write_model(out, model, tokenizer, prompts, facts, max_positions=MAX_POSITIONS)
    for turn, answer in list(zip(prompts[1], answers, strict=True))[:12]:
        print(f"--- {turn.id}\n{turn.prompt}\n>>>\n{tokenizer.decode(answer, skip_special_tokens=False)}")
    print(f"held-out bits per byte {facts.bits_per_byte:.4f}, {facts.answers}, {seconds:.0f} s; wrote {out}")


def write_more_prompts(source: Path, count: int, out: Path, seed: int) -> None:
    """Prompts beyond the shipped ones, counted in tokens of the shipped tokenizer; held-out modules stay held out."""
    from tokenizers import Tokenizer

    if out.suffix != ".jsonl" or count < 1:
        raise ValueError(f"--prompts {count} --out {out}: expected a positive number and a file that ends in .jsonl")
    tokenizer = Tokenizer.from_file("assets/tiny-qwen3/tokenizer.json")
    turns = more_prompts(split_modules(read_modules(source))[0], tokenizer, count, seed)
    write_prompts(turns, out)
    print(f"{len(turns)} prompts in {out}")
