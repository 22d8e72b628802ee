"""The endpoint under load: clients that ask again when they are refused or cut off, and compare the answers."""

import contextlib
import re
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from jobs.drill_ground import ROOT, Ground, free_port, wait_until

PROMPTS = ["def read(path):", "class Queue:", "import json\n\ndef main(argv):", "def test_sum():", "for line in file:"]
TARGET = ROOT / "assets" / "tiny-qwen3"
HUNG = "no word in time"
REPLICA, CONTROLLER, PROXY = "ray::ServeReplica:domino", "ray::ServeController", "ray::ProxyActor"


@dataclass(kw_only=True)
class Load:
    """What clients of one endpoint have seen. An answer counts when it ended by itself; else its client asks again."""

    url: str
    patience: float = 120.0  # seconds after which a request is lost
    timeout: float = 60.0  # seconds without a word after which it is sent again
    expected: dict[str, str] = field(default_factory=dict)  # the answers before anything happened
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    repeated: Counter[str] = field(default_factory=Counter)  # why requests were sent again
    versions: list[str] = field(default_factory=list)  # drafter versions, answer by answer
    answered_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self) -> None:
        """Ask every prompt once, for the text that is expected from now on."""
        with openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60) as client:
            for prompt in PROMPTS:
                self.expected[prompt] = one_answer(client, prompt, stream=False)[0]

    @contextlib.contextmanager
    def running(self, clients: int = 4) -> Iterator[None]:
        """Clients ask without a pause, half of them streaming, until the block ends; each finishes its last request."""
        done = threading.Event()
        threads = [threading.Thread(target=self._keep_asking, args=(n, done), daemon=True) for n in range(clients)]
        for thread in threads:
            thread.start()
        try:  # whatever happens the clients stop
            yield
        finally:
            done.set()
            for thread in threads:
                thread.join()

    def _keep_asking(self, number: int, done: threading.Event) -> None:
        with openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=self.timeout) as client:
            count = number
            while not done.is_set():
                self._until_answered(client, PROMPTS[count % len(PROMPTS)], stream=number % 2 == 0)
                count += 1

    def _until_answered(self, client: openai.OpenAI, prompt: str, stream: bool) -> None:
        until, why = time.monotonic() + self.patience, ""
        while time.monotonic() < until:
            try:  # the boundary to an endpoint that is being disturbed
                text, version = one_answer(client, prompt, stream)
            except openai.APIStatusError as error:
                why = str(error.status_code)
                if error.status_code < 500:  # a refusal for good
                    break
            except (openai.APITimeoutError, httpx.TimeoutException):
                why = HUNG
            except openai.APIConnectionError:
                why = "no connection"
            except (openai.APIError, httpx.HTTPError):
                why = "cut off"
            except Exception as error:  # an answer that is none; its client must not end unseen
                with self._lock:
                    self.wrong.append(f"{prompt!r}: {type(error).__name__}: {error}")
                return
            else:
                with self._lock:
                    self.answered, self.answered_at = self.answered + 1, time.monotonic()
                    self.versions.append(version)
                    if text != self.expected[prompt]:
                        self.wrong.append(f"{prompt!r}: {text!r}")
                return
            with self._lock:
                self.repeated[why] += 1
            time.sleep(0.25)
        with self._lock:
            self.lost.append(f"{prompt!r}: {why}")

    def wait_for_answers(self, count: int = 8, seconds: float = 120) -> float:
        """Until so many answers more have come; seconds from now to the first of them."""
        started, before = time.monotonic(), self.answered
        wait_until(lambda: self.answered > before, seconds, "an answer")
        first = time.monotonic() - started
        wait_until(lambda: self.answered >= before + count, seconds, f"{count} answers")
        return first

    def seen(self) -> dict[str, Any]:
        return {"answered": self.answered, "repeated": dict(self.repeated)}


def one_answer(client: openai.OpenAI, prompt: str, stream: bool) -> tuple[str, str]:
    """(text, drafter version) of one greedy answer. httpx.RemoteProtocolError for a stream that just stops."""
    request: dict[str, Any] = {"model": TARGET.name, "prompt": prompt, "max_tokens": 48, "temperature": 0}
    request |= {"extra_body": {"ignore_eos": True}}
    if not stream:
        answer = client.completions.create(**request)
        return answer.choices[0].text, str(answer.system_fingerprint).rpartition("-")[2]
    text, version, ended = "", "", False
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            text, ended = text + (choice.text or ""), ended or choice.finish_reason is not None
        version = str(chunk.system_fingerprint).rpartition("-")[2]
    if not ended:
        raise httpx.RemoteProtocolError("the stream stopped without a finish_reason")
    return text, version


@contextlib.contextmanager
def endpoint(ground: Ground, *overrides: str) -> Iterator[str]:
    """The URL of what `jobs.deploy` serves, by default with an untrained drafter."""
    port = free_port()
    drafter = []
    if not any("serve.drafter" in each for each in overrides):
        drafter = [f"serve.drafter={untrained(ground, TARGET, 'served')}"]
    settings = [f"root={ground.folder}", f"serve.port={port}", "serve.max_length=256", *drafter, *overrides]
    process = ground.start("deploy", "jobs.deploy", *settings)
    try:  # the process is ours to end
        wait_until(lambda: process.poll() is not None or "Ctrl-C" in ground.text("deploy"), 240, "the endpoint", 0.5)
        if process.poll() is not None:
            raise RuntimeError(f"jobs.deploy ended: …{ground.text('deploy')[-1500:]}")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def untrained(ground: Ground, target: Path, name: str) -> Path:
    """The folder of a drafter that drafts noise: answers are the target's all the same, and it takes no training."""
    import torch

    from domino_core.checkpoint import save_drafter
    from domino_core.drafter import Drafter
    from domino_core.target import load_tokenizer, load_vocabulary, read_target_config, target_hash
    from jobs.presets import tiny
    from pipelines.prepare import drafter_config

    torch.manual_seed(0)
    config = drafter_config(tiny().drafter, read_target_config(target), load_tokenizer(target))
    drafter = Drafter(config, *load_vocabulary(target))
    return save_drafter(drafter, ground.folder / name / "drafter", {"target_hash": target_hash(target)})


def answers_since(url: str) -> float:
    """When the replica that happens to be asked began to generate, by its own clock; 0 for one that has not yet."""
    try:  # nobody may listen
        with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=5) as response:
            page = response.read().decode()
    except OSError:
        return 0.0
    return max(
        (float(each) for each in re.findall(r"^vllm:generation_tokens_created\{.*\} (\S+)$", page, re.M)), default=0.0
    )


def health(url: str) -> dict[str, Any]:
    """What /health says; {} while nobody answers."""
    import json

    try:  # nobody may listen
        with urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=5) as response:
            return json.load(response)
    except OSError:
        return {}
