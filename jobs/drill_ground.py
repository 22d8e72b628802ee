"""Where a drill takes place: a folder, commands as a user gives them, and the processes that are killed.

A drill's processes are known by a mark in their environment, which whatever they start inherits: nothing else is ever
signalled, and nothing stays.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).resolve().parent.parent
MARK = "DOMINO_DRILL"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a drill found. problems: everything that did not hold; lost, wrong: samples or requests."""

    problems: list[str] = field(default_factory=list)
    seconds_to_recover: float | None = None  # None: nothing had stopped
    lost: int = 0
    wrong: int = 0
    seen: dict[str, Any] = field(default_factory=dict)  # what was observed, JSON-ready
    skipped: str = ""  # why this machine cannot show it

    @property
    def held(self) -> bool:
        return not (self.problems or self.lost or self.wrong or self.skipped)


@dataclass(frozen=True, kw_only=True)
class Ground:
    """One drill's place. inputs: a folder that drills share, with what the first that needs it has made."""

    folder: Path
    inputs: Path
    tell: Callable[[str], None] = print
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def environment(self, **changes: str) -> dict[str, str]:
        # SPT_NOENV: renaming themselves, Ray's workers would otherwise write over the mark.
        own = {MARK: self.mark, "SPT_NOENV": "1", "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled"}
        own |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # Ray gives way to others by default
        # A drill leaves the user's registry alone, and does not ask for the key of the user's endpoint.
        own |= dict.fromkeys(("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "DOMINO_API_KEY", "DOMINO_HOME"), "")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        merged = os.environ | own | {"PATH": path} | changes
        return {name: value for name, value in merged.items() if value}  # "": not set

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """`python -m COMMAND` from the repository's root, its output in NAME.log of the drill's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=self.environment(**environment),
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours to pass on
            )

    def run(self, name: str, *command: str, code: int = 0, seconds: float = 400) -> str:
        """A command to its end; what it printed. RuntimeError for another exit code, with the end of the output."""
        process = self.start(name, *command)
        try:
            found = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            found = f"none after {seconds:.0f} s"
        if found != code:
            raise RuntimeError(f"{command[0]} ended with {found}, not {code}: …{self.text(name)[-1500:]}")
        return self.text(name)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def text(self, name: str) -> str:
        return self.log(name).read_text(errors="replace")

    def family(self, title: str = "") -> list[psutil.Process]:
        """The drill's living processes, those whose command line contains `title`; oldest first."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # processes end while we look at them
                if process.environ().get(MARK) == self.mark and title in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def kill(self, title: str) -> psutil.Process:
        """SIGKILL the youngest process with this title: a shell that started it has it, too. RuntimeError: none has."""
        found = self.family(title)
        if not found:
            raise RuntimeError(f"there is no process {title!r} to kill")
        found[-1].send_signal(signal.SIGKILL)
        self.tell(f"killed {title} (process {found[-1].pid})")
        return found[-1]

    def end(self) -> None:
        """Stop whatever is left; nothing for what has ended by itself."""
        for _ in range(3):  # what is being started while we look
            left = self.family()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)


def wait_until(condition: Callable[[], T], seconds: float, what: str, every: float = 0.05) -> T:
    """The first true value of `condition`. RuntimeError after `seconds`, which names what was waited for."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise RuntimeError(f"not within {seconds:.0f} s: {what}")
        time.sleep(every)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def clock() -> Iterator[Callable[[], float]]:
    """Seconds since the block was entered, to a tenth."""
    started = time.monotonic()
    yield lambda: round(time.monotonic() - started, 1)
