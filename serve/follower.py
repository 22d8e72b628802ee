"""Which drafter version is served: an alias in the MLflow registry, followed while the server runs.

    alias --look_up--> Version --fetch--> folder --accept--> loaded beside the live engine, self-checked, swapped

Accepting is the server's (serve/server.py). A version that fails on the way is refused with its reason and the one
before stays live; a registry that does not answer changes nothing. The last version that was accepted is remembered
beside the downloads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from domino_core.redact import redacted
from serve.drafter_cache import DrafterCache
from serve.registry_alias import Alias, RegistryUnavailableError, Version, look_up

# Under Serve's own logger, so that lines land in the replica's log file.
logger = logging.getLogger("ray.serve.domino")


class NotYetError(ValueError):
    """There is no room for another version before an older one has gone, which says nothing about the version."""


@dataclass(kw_only=True)
class FollowerState:
    """What /health shows: the alias, the live version, and why another one is not served."""

    alias: str
    live: str = ""
    problem: str = ""  # "" when the live version is the alias's
    looked_up: int = 0  # times that the registry answered


class Follower:
    """Looks an alias up every few seconds on a thread of its own and brings new versions to `accept`.

    `accept(folder, version)` loads, checks and swaps; whatever it raises is the reason why the version is refused. A
    version whose gate failed is refused, too, as long as there is another. A refused version is not tried again until
    the alias has named another one, or the gate has another result; after NotYetError it is, at the next look.
    `then()` is called on the same thread after every look, so that no two versions are loaded at once.
    """

    def __init__(
        self,
        alias: Alias,
        cache: DrafterCache,
        accept: Callable[[Path, Version], None],
        then: Callable[[], None] | None = None,
    ) -> None:
        self.state = FollowerState(alias=str(alias))
        self._alias, self._cache, self._accept, self._then = alias, cache, accept, then
        self._live: Version | None = None
        self._refused: Version | None = None
        self._refusal = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, poll_seconds: float) -> None:
        """Bring the first version live, then follow. ValueError if neither the alias nor a remembered version works."""
        self.poll()
        remembered = self._cache.last_accepted(self._alias) if self._live is None else None
        if remembered is not None and remembered != self._refused:
            problem = self.state.problem
            self._try(remembered)
            self.state.problem = f"started with version {remembered.number}, accepted earlier: {problem}"
        if self._live is None:
            raise ValueError(f"no drafter can be served: {self.state.problem}")
        self._thread = threading.Thread(target=self._run, args=(poll_seconds,), name="drafter-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> None:
        """One look. Never raises: a failure here must not disturb what is being served."""
        try:  # the boundary to the registry
            version = look_up(self._alias)
        except Exception as error:
            self._report(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            return
        self.state.looked_up += 1
        if self._refused is not None and version == self._refused and version.gate == self._refused.gate:
            self.state.problem = self._refusal
            return
        self._refused = None
        if version == self._live:
            self.state.problem = ""
        else:
            self._try(version)

    def _try(self, version: Version) -> None:
        # An alias that was moved by hand does not undo the gate; where there is nothing else, slow is better.
        stays = self._live or self._cache.last_accepted(self._alias)
        if version.gate.startswith("failed") and stays not in (None, version):
            self._refuse(version, f"its gate {version.gate}")
            return
        try:
            folder = self._cache.fetch(self._alias, version)
        except (RegistryUnavailableError, OSError) as error:  # says nothing about the version: it is tried again
            self._report(str(error))
            return
        try:  # the boundary to foreign checkpoints: any error is the reason of a refusal, not a crash
            self._accept(folder, version)
        except NotYetError as error:
            self._report(str(error))
            return
        except Exception as error:
            self._refuse(version, str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            return
        logger.info("%s: version %s is live (before: %s)", self._alias, version.number, self.state.live or "none")
        self._live = version
        self.state.live, self.state.problem = version.number, ""
        try:
            self._cache.remember(self._alias, version)
        except OSError as error:  # it is live all the same
            self._report(f"version {version.number} could not be noted for the next start: {error}")

    def _refuse(self, version: Version, reason: str) -> None:
        self._refused, self._refusal = version, redacted(f"version {version.number} is refused: {reason}")
        self._report(self._refusal)

    def _report(self, problem: str) -> None:
        problem = redacted(problem)  # /health shows it to everybody
        if problem != self.state.problem:
            logger.error("%s: %s (version %s stays)", self._alias, problem, self.state.live or "none")
        self.state.problem = problem

    def _run(self, poll_seconds: float) -> None:
        while not self._stop.wait(poll_seconds):
            self.poll()
            if self._then is not None:
                self._then()
