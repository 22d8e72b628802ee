"""Acceptance and speed of a drafter on held-out prompts, through the engine that serves (`domino_core.engine`).

τ has one definition: 1 + accepted drafts per round, pooled over all rounds of all prompts, counted before stop and
length cuts; the token that prefill gives is not counted. Plain decoding is the same engine without a drafter, so a
speed-up compares nothing else. Both arms are timed in turns, and medians are reported: a machine's speed drifts.
"""

import dataclasses
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from domino_core.checkpoint import load_drafter, read_config
from domino_core.decode import Acceptance
from domino_core.drafter import Drafter
from domino_core.engine import Engine, Request
from domino_core.sampling_params import GREEDY_TEMPERATURE, DraftRule, SamplingParams
from domino_core.target import load_target, load_tokenizer, read_target_config
from domino_core.target_model import Target
from pipelines.measurement import Measurement, Mismatch
from pipelines.near_ties import parting, score_gap
from pipelines.prompts import answer_prompt, read_prompts

Prompt = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What to generate and how to time it."""

    num_prompts: int = 64
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    rule: DraftRule = "shared_noise"  # how sampled requests draft and accept
    concurrency: int = 1  # rows decoded at once
    repeats: int = 3  # timed passes of each arm, in turns
    num_verify: int | Literal["auto"] | None = None  # drafts verified a round; None: all; auto: what pays
    enable_thinking: bool = False
    num_threads: int | None = None  # of torch on a CPU (serving replicas have cpus_per_replica); None: torch's choice
    device: str = "auto"  # cuda where there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # float32 on a CPU, bfloat16 on a GPU

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "concurrency", "repeats", "num_threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"evaluate.{name} must be at least 1, got {getattr(self, name)}")
        if self.temperature < 0:
            raise ValueError(f"evaluate.temperature must not be negative, got {self.temperature}")

    @property
    def keeps_output(self) -> bool:
        """Is the output to be plain decoding's? Rejection sampling promises its distribution and no more."""
        return self.rule != "rejection" or self.temperature < GREEDY_TEMPERATURE


def measure(target: Target, drafter: Drafter, prompts: Sequence[Prompt], config: EvalConfig) -> Measurement:
    """Decode all prompts with and without the drafter, in turns, and compare speed and every token.

    prompts: rendered and tokenised. ValueError if there are none, or one is too long for the target.
    """
    return measure_arms(target, {"": drafter}, prompts, config)[""]


def measure_arms(
    target: Target, drafters: Mapping[str, Drafter], prompts: Sequence[Prompt], config: EvalConfig
) -> dict[str, Measurement]:
    """`measure` for several drafters: a turn is a pass of plain decoding and one of every arm, one baseline for all."""
    return _measure(target, {name: (drafter, config) for name, drafter in drafters.items()}, prompts, config)


def measure_rules(
    target: Target, drafter: Drafter, prompts: Sequence[Prompt], config: EvalConfig
) -> dict[str, Measurement]:
    """`measure` for every draft rule, in turns."""
    arms = {rule: (drafter, dataclasses.replace(config, rule=rule)) for rule in get_args(DraftRule)}
    return _measure(target, arms, prompts, config)


def _measure(
    target: Target, drafted: Mapping[str, tuple[Drafter, EvalConfig]], prompts: Sequence[Prompt], config: EvalConfig
) -> dict[str, Measurement]:
    if not prompts:
        raise ValueError("no prompts to measure on")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    arms: dict[str | None, tuple[Drafter | None, EvalConfig]] = {None: (None, config), **drafted}
    seconds: dict[str | None, list[float]] = {name: [] for name in arms}
    outputs: dict[str | None, list[list[int]]] = {}
    acceptance: dict[str | None, Acceptance] = {}
    for drafter, settings in arms.values():
        _pass(target, drafter, prompts[:1], settings)  # first calls compile, allocate and page in
    for _ in range(config.repeats):
        for name, (drafter, settings) in arms.items():
            outputs[name], elapsed, acceptance[name] = _pass(target, drafter, prompts, settings)
            seconds[name].append(elapsed)
    plain = outputs[None]
    plain_rate = sum(map(len, plain)) / statistics.median(seconds[None])
    found: dict[str, Measurement] = {}
    for name, (_, settings) in drafted.items():
        mismatches = [
            _first_mismatch(target, number, prompt, own, other, settings)
            for number, (prompt, own, other) in enumerate(zip(prompts, plain, outputs[name], strict=True))
            if own != other and settings.keeps_output
        ]
        num_tokens, counts = sum(map(len, outputs[name])), acceptance[name]
        rate = num_tokens / statistics.median(seconds[name])
        found[name] = Measurement(
            tau=counts.tau,
            acceptance=counts.to_dict(),
            acceptance_by_position=[count / max(1, counts.rounds) for count in counts.accepted_at],
            plain_tokens_per_s=plain_rate,
            tokens_per_s=rate,
            speedup=rate / plain_rate,
            identical=not mismatches if settings.keeps_output else None,
            mismatches=mismatches,
            num_prompts=len(prompts),
            num_tokens=num_tokens,
            plain_seconds=seconds[None],
            seconds=seconds[name],
            dtype=str(target.dtype).removeprefix("torch."),
            device=_device_name(target.device),
            settings=dataclasses.asdict(settings),
        )
    return found


def _pass(
    target: Target, drafter: Drafter | None, prompts: Sequence[Prompt], config: EvalConfig
) -> tuple[list[list[int]], float, Acceptance]:
    """All prompts through a fresh engine: (output tokens of each prompt, seconds, acceptance counters)."""
    engine = Engine(
        target,
        drafter,
        max_rows=min(config.concurrency, len(prompts)),
        max_length=max(map(len, prompts)) + config.max_tokens,
        num_verify=config.num_verify,
    )
    engine.warm_up()  # a server's engine is warm as well
    requests = [
        Request(
            prompt_ids=prompt,
            max_tokens=config.max_tokens,
            sampling=_sampling(config, number),
            stop_token_ids=target.config.eos_token_ids,
        )
        for number, prompt in enumerate(prompts)
    ]
    _synchronise(target.device)
    started = time.perf_counter()
    completions = engine.generate(requests)
    _synchronise(target.device)
    return [each.tokens for each in completions], time.perf_counter() - started, engine.acceptance


def _sampling(config: EvalConfig, number: int) -> SamplingParams:
    """The settings of prompt `number`."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed + number,
        rule=config.rule,
    )


def _first_mismatch(
    target: Target, number: int, prompt: Prompt, plain: list[int], drafted: list[int], config: EvalConfig
) -> Mismatch:
    """Where two outputs part, and how sure the target was there: rounding may flip a choice between near-ties."""
    place = parting(plain, drafted)
    assert place is not None
    one, other = (tokens[place] if place < len(tokens) else None for tokens in (plain, drafted))
    request = Request(prompt_ids=prompt, max_tokens=config.max_tokens, sampling=_sampling(config, number))
    gap = score_gap(target, request, plain[:place], one, other)
    return Mismatch(prompt=number, position=place, plain=one, speculative=other, gap=gap)


def evaluate_drafter(
    folder: str | Path, model: str | Path, prompt_file: str | Path, config: EvalConfig, *, head: bool = True
) -> Measurement:
    """Load target and drafter, read held-out prompts, measure. head=False measures the backbone's own drafts.

    ValueError where they do not fit each other, naming the sizes, or where the file has no usable prompt.
    """
    target, drafter, prompts = load_arms(folder, model, prompt_file, config)
    return measure(target, drafter if head else without_head(drafter), prompts, config)


def load_arms(
    folder: str | Path, model: str | Path, prompt_file: str | Path, config: EvalConfig
) -> tuple[Target, Drafter, list[Prompt]]:
    """Target, drafter and held-out prompts of a measurement. ValueError as `evaluate_drafter`."""
    read_config(folder).check_fits(read_target_config(model))
    prompts = held_out_prompts(prompt_file, load_tokenizer(model), config)
    device, dtype = placement(config)
    target = load_target(model, device=device, dtype=dtype)
    drafter = load_drafter(folder, target.embed_VD, target.lm_head_VD, device=device, dtype=dtype)
    return target, drafter, prompts


def held_out_prompts(path: str | Path, tokenizer: Any, config: EvalConfig) -> list[Prompt]:
    """The first `num_prompts` prompts of a file, cut where the target's answer begins. ValueError naming bad lines."""
    prompts: list[Prompt] = []
    for row in read_prompts(path):
        if len(prompts) == config.num_prompts:
            break
        prompts.append(tuple(answer_prompt(row, tokenizer, enable_thinking=config.enable_thinking)))
    return prompts


def without_head(drafter: Drafter) -> Drafter:
    """The same backbone without the correction, sharing all weights: what the head is measured against."""
    with torch.device("meta"):
        bare = Drafter(dataclasses.replace(drafter.config, head=False), drafter.embed_VD, drafter.lm_head_VD)
    bare.backbone = drafter.backbone
    return bare.eval()


def placement(config: EvalConfig) -> tuple[torch.device, torch.dtype]:
    """Device and type of the weights for `device` and `dtype`, resolving "auto"."""
    name = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"evaluate.device={config.device}, but torch sees no GPU here: use evaluate.device=cpu")
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if name.startswith("cuda") else "float32"
    return torch.device(name), getattr(torch, dtype)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
