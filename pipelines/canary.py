"""A canary in the registry: which version is tried out, against which champion, since when, and how it ended.

All of it is in the version's tags and in the alias `challenger`, so a job that is killed goes on where it was.

    canary=running, canary_against=3, canary_started=<epoch seconds>     replicas give it its share
    canary=ended, canary_verdict=..., canary_tau=..., ...                and the alias is gone
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines import registry
from pipelines.registry import CANARY, CHALLENGER, CHAMPION, RUNNING, alias_of

if TYPE_CHECKING:
    from pipelines.registry import MlflowClient, ModelVersion

AGAINST, STARTED, VERDICT = "canary_against", "canary_started", "canary_verdict"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A version's canary as the registry has it now. champion, challenger: who has the aliases; "" for nobody."""

    version: ModelVersion
    champion: str
    challenger: str

    @property
    def number(self) -> str:
        return str(self.version.version)

    @property
    def running(self) -> bool:
        return self.challenger == self.number and self.version.tags.get(CANARY) == RUNNING

    @property
    def unfinished(self) -> bool:
        """Running, or made champion and not yet marked as ended."""
        return self.version.tags.get(CANARY) == RUNNING and self.number in (self.challenger, self.champion)

    @property
    def against(self) -> str:
        return self.version.tags.get(AGAINST, "")

    @property
    def started(self) -> float | None:
        """Seconds since the epoch; None for a tag that is no time."""
        try:  # a tag that anybody may have written
            found = float(self.version.tags.get(STARTED, ""))
        except ValueError:
            return None
        return found if math.isfinite(found) else None

    @property
    def pair(self) -> tuple[str, str, str]:
        """What figures have to be of, as replicas name it: champion, challenger, and when their time began."""
        return self.against, self.number, self.version.tags.get(STARTED, "")


def look(client: MlflowClient, name: str, number: str) -> Trial:
    champion, challenger = alias_of(client, name, CHAMPION), alias_of(client, name, CHALLENGER)
    return Trial(
        version=registry.find_version(client, name, version=number),
        champion=str(champion.version) if champion is not None else "",
        challenger=str(challenger.version) if challenger is not None else "",
    )


def running(client: MlflowClient, name: str) -> Trial | None:
    """The canary of this target's drafters that has begun and not ended."""
    challenger = alias_of(client, name, CHALLENGER)
    trial = look(client, name, str(challenger.version)) if challenger is not None else None
    return trial if trial is not None and trial.running else None


def begin(client: MlflowClient, trial: Trial, now: float) -> None:
    """Let replicas give the version its share from now on, and compare it with the champion of now.

    Again for a canary that runs: its time starts anew.
    """
    name, number = trial.version.name, trial.number
    tags = {AGAINST: trial.champion, STARTED: f"{now:.1f}", VERDICT: "none yet"}
    for key, value in tags.items():
        client.set_model_version_tag(name, number, key, value)
    client.set_registered_model_alias(name, CHALLENGER, number)
    client.set_model_version_tag(name, number, CANARY, RUNNING)


def conclude(client: MlflowClient, trial: Trial, verdict: str, figures: Mapping[str, str], *, promoted: bool) -> None:
    """Write down how it ended and move the aliases. What was interrupted may be done again."""
    name, number = trial.version.name, trial.number
    for key, value in {VERDICT: verdict, **{f"canary_{key}": value for key, value in figures.items()}}.items():
        client.set_model_version_tag(name, number, key, value[:5000])
    if promoted:
        registry.promote(client, trial.version)
    client.set_model_version_tag(name, number, CANARY, "ended")
    challenger = alias_of(client, name, CHALLENGER)
    if challenger is not None and str(challenger.version) == number:
        client.delete_registered_model_alias(name, CHALLENGER)
