"""Acceptance and speed of a drafter on held-out prompts, through the engine that serves (`domino_core.engine`).

τ has one definition: 1 + accepted drafts per round, pooled over all rounds of all prompts, counted before stop and
length cuts; the token that prefill gives is not counted. Plain decoding is the same engine without a drafter, so a
speed-up compares nothing else. Both arms are timed in turns, and medians are reported: a machine's speed drifts.
"""

import dataclasses
import json
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from domino_core.atomic_files import write_atomically
from domino_core.checkpoint import PROVENANCE, load_drafter, read_config, read_provenance
from domino_core.decode import Acceptance
from domino_core.drafter import Drafter
from domino_core.engine import Engine, Request
from domino_core.sampling_params import GREEDY_TEMPERATURE, DraftRule, SamplingParams
from domino_core.target import load_target, load_tokenizer, read_target_config
from domino_core.target_model import Target
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
    num_threads: int | None = (
        None  # of torch on a CPU, where serving replicas have cpus_per_replica; None: torch's choice
    )
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


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first token where speculation and plain decoding part.

    gap: between the scores of the two tokens there: logits as asked for, with a sampled request's noise at temperature.
    """

    prompt: int
    position: int  # in the output
    plain: int | None  # None: that output had ended
    speculative: int | None
    gap: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What `measure` found; `to_dict` is what evaluation.json and provenance.json hold."""

    tau: float
    acceptance: dict[str, Any]  # raw counters: rounds, drafted, accepted, accepted_at
    acceptance_by_position: list[float]  # share of rounds in which draft i was accepted
    plain_tokens_per_s: float
    tokens_per_s: float
    speedup: float
    identical: bool | None  # every output is token for token the one of plain decoding; None: that is no claim
    mismatches: list[Mismatch]
    num_prompts: int
    num_tokens: int  # of one pass
    plain_seconds: list[float]
    seconds: list[float]
    dtype: str
    device: str
    settings: dict[str, Any]

    @property
    def greedy_identical(self) -> bool | None:
        """`identical` at temperature 0; None where sampling was measured."""
        return self.identical if self.settings["temperature"] == 0 else None

    @property
    def largest_gap(self) -> float:
        """The largest gap between the two tokens' scores where outputs part; 0 without mismatches."""
        return max((mismatch.gap for mismatch in self.mismatches), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        own = dataclasses.asdict(self)
        return own | {"greedy_identical": self.greedy_identical, "largest_gap": self.largest_gap}


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


def summary(measurement: Measurement) -> str:
    """A measurement in a few lines."""
    positions = " ".join(f"{share:.2f}" for share in measurement.acceptance_by_position)
    same = "every output is the target's own"
    if measurement.identical is None:
        same = "outputs are not compared: rejection sampling keeps plain decoding's distribution, not its draws"
    elif measurement.mismatches:
        same = _parted(measurement)
    return (
        f"tau {measurement.tau:.3f} over {measurement.acceptance['rounds']} rounds, accepted by position {positions}\n"
        f"{measurement.tokens_per_s:.1f} tokens/s, plain decoding {measurement.plain_tokens_per_s:.1f}: "
        f"{measurement.speedup:.2f}x ({measurement.num_prompts} prompts, {measurement.num_tokens} tokens, "
        f"{measurement.dtype}, {measurement.device})\n{same}"
    )


def _parted(measurement: Measurement) -> str:
    first = measurement.mismatches[0]
    return (
        f"{len(measurement.mismatches)} of {measurement.num_prompts} outputs differ from plain decoding, the first one "
        f"at token {first.position} of prompt {first.prompt}; largest gap between two tokens' scores: "
        f"{measurement.largest_gap:.3g}"
    )


def note_measurement(folder: str | Path, measurement: Measurement, prompt_file: str | Path) -> None:
    """Add what was measured to the provenance of a drafter; its weights and configuration stay as they are."""
    noted = {key: value for key, value in measurement.to_dict().items() if not isinstance(value, list)}
    made = read_provenance(folder) | {"evaluation": {"prompts": str(prompt_file), **noted}}
    write_atomically(Path(folder) / PROVENANCE, (json.dumps(made, indent=2) + "\n").encode())


def write_measurement(path: str | Path, measurement: Measurement) -> Path:
    """Store a measurement as JSON."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(measurement.to_dict(), indent=2) + "\n")
    return path


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
