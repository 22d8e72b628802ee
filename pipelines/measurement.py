"""What was measured of a drafter: its figures, in words, in its provenance and as a file."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_core.atomic_files import write_atomically
from domino_core.checkpoint import PROVENANCE, read_provenance


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
    path.write_text(json.dumps(measurement.to_dict(), indent=2) + "\n")  # also into a pipe, which the user may name
    return path
