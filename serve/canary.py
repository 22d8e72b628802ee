"""The challenger of a replica: found in the registry, loaded beside the champion, given its share of the requests.

    alias `challenger` --Follower's thread--> Version --prepare--> a second engine --choose--> a share of the requests

A replica decides nothing: it reports what it serves and what became of it, and `jobs.promote --canary` compares and
moves the aliases. When the alias or its canary has gone, so has the engine, as soon as its requests are answered.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from domino_core.redact import redacted
from serve.drafter_cache import DrafterCache
from serve.figures import Figures
from serve.follower import NotYetError
from serve.registry_alias import Alias, RegistryUnavailableError, Version, find
from serve.replica import EngineLoop, Member

logger = logging.getLogger("ray.serve.domino")

CHALLENGER, CHAMPION = "challenger", "champion"

State = Literal["none", "waiting", "running", "refused", "failed"]


def in_share(request_id: str, version: str, share: float) -> bool:
    """Whether a request is one of the challenger's: the same answer in every replica and at every retry.

    The version is in it so that not the same clients try out every version.
    """
    digest = hashlib.sha256(f"{version}/{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


class Canary:
    """One replica's challenger. `poll` and `take` on the follower's thread; `choose` and `report` on any.

    `prepare(folder, version)` loads and checks; whatever it raises is the reason why the version is refused here.
    """

    def __init__(
        self,
        champion: Alias,
        cache: DrafterCache,
        loop: EngineLoop,
        prepare: Callable[[Path, Version], Member],
        share: float,
    ) -> None:
        self._alias = replace(champion, alias=CHALLENGER)
        self._cache, self._loop, self._prepare, self._share = cache, loop, prepare, share
        self._version: Version | None = None  # the one that is tried, or was refused
        self._state: State = "none"
        self._problem = ""  # /health shows it to everybody

    def poll(self) -> None:
        """One look. Never raises; while the registry does not answer, everything stays as it is."""
        try:  # the boundary to the registry
            version = find(self._alias)
        except Exception as error:
            if self._state != "refused":  # whose reason is the verdict's, and is not found again
                unavailable = isinstance(error, RegistryUnavailableError)
                self._problem = redacted(str(error) if unavailable else f"{type(error).__name__}: {error}")
            return
        known = self._version
        if version is None or not version.canary or version.number == self._loop.live.version:
            self._withdraw()
        elif (
            known is None
            or version != known
            or self._state == "waiting"
            or (version.canary != known.canary and self._unusable)
        ):
            self._withdraw()
            self._try(version)
        elif version.canary != known.canary:  # its time began anew
            self._count_anew(version)
        elif self._state == "running":
            self._problem = ""

    @property
    def _unusable(self) -> bool:
        return self._loop.canary is None or bool(self._loop.canary.failure)

    def _count_anew(self, version: Version) -> None:
        """Both versions' figures, from the same moment on."""
        self._version = version
        for member in (self._loop.live, self._loop.canary):
            if member is not None:
                member.figures = Figures()

    def _try(self, version: Version) -> None:
        self._version, self._state = version, "waiting"
        try:  # as in Follower: an outage or a lack of room says nothing about the version, all else does
            member = self._prepare(self._cache.fetch(self._alias, version), version)
        except (RegistryUnavailableError, NotYetError, OSError) as error:
            self._problem = redacted(str(error))
            return
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self._state, self._problem = "refused", redacted(f"version {version.number} is refused: {reason}")
            logger.error("%s: %s", self._alias, self._problem)
            return
        self._loop.try_out(member)
        self._count_anew(version)
        self._state, self._problem = "running", ""
        logger.info("%s: version %s gets %g of the requests", self._alias, version.number, self._share)

    def take(self, version: Version) -> Member | None:
        """The engine of this version, which is about to become the live one; any other challenger's is given up."""
        member = self._loop.canary
        if member is not None and version == self._version and not member.failure:
            self._version, self._state, self._problem = None, "none", ""
            return member
        self._withdraw()
        return None

    def _withdraw(self) -> None:
        if self._loop.canary is not None:
            logger.info("%s: version %s gets no more requests", self._alias, self._loop.canary.version)
            self._loop.try_out(None)
        self._version, self._state, self._problem = None, "none", ""

    def choose(self, request_id: str) -> Member:
        """The engine for a request. A challenger whose engine failed gets none."""
        canary = self._loop.canary
        if canary is not None and not canary.failure and in_share(request_id, canary.version, self._share):
            return canary
        return self._loop.live

    def state(self) -> dict[str, Any]:
        """For people: /health."""
        canary, state, version = self._loop.canary, self._state, self._version
        failed = canary.failure if canary is not None else ""
        return {
            "version": version.number if version is not None else "",
            "since": version.canary if version is not None else "",
            "state": "failed" if failed else state,
            "problem": failed or self._problem,
            "share": self._share,
        }

    def report(self) -> dict[str, Any]:
        """For the job that decides: the state, and both versions' figures since this challenger came."""
        live, canary = self._loop.live, self._loop.canary
        arms = {CHAMPION: live.figures.to_dict()}
        if canary is not None:
            arms[CHALLENGER] = canary.figures.to_dict()
        named = {"registered_model": self._alias.name, "champion": live.version}
        return self.state() | named | {"figures": arms, "unable": ""}
