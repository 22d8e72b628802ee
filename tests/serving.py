"""What the serving tests share: a drafter that fits the embedded target, one that knows answers, the app over HTTP."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from torch import Tensor

from domino_core.config import DrafterConfig, default_target_layer_ids
from domino_core.engine import Engine
from domino_core.layers import KVCache
from domino_core.target import read_target_config
from domino_core.target_model import Target
from serve.admission import digests
from serve.app import admitted
from serve.replica import Member
from serve.server import Server

HTTP = httpx.Client(timeout=60)
"""For all requests: `httpx.post` makes a client for each, which reads the certificates of the whole world first."""


class Registry:
    """A real registry of one target's drafters, on SQLite below `root`."""

    def __init__(self, root: Path, target: Path) -> None:
        from pipelines.registry import registered_name
        from pipelines.tracking import connect, tracking_uri

        self.uri = tracking_uri(None, root)
        self.name = registered_name(str(target))
        self.root, self._target = root, target
        self._client = connect(self.uri)

    def add(self, folder: Path) -> str:
        """The number of the version that the folder became."""
        from pipelines.registry import register

        return register(self._client, folder, str(self._target), self.root)

    def promote(self, version: str, alias: str = "champion") -> None:
        self._client.set_registered_model_alias(self.name, alias, version)

    def try_out(self, version: str) -> None:
        """Begin the version's canary."""
        from pipelines import canary

        canary.begin(self._client, canary.look(self._client, self.name, version), time.time())

    def tag(self, version: str, **tags: str) -> None:
        for name, value in tags.items():
            self._client.set_model_version_tag(self.name, version, name, value)

    @property
    def champion(self) -> str:
        return f"models:/{self.name}@champion"


def damage(folder: Path) -> Path:
    """Cut the end off the weights."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    return folder


def drafter_config(target_dir: Path, *, block_size: int = 5) -> DrafterConfig:
    target = read_target_config(target_dir)
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=default_target_layer_ids(target.num_hidden_layers, 2),
        mask_token_id=1,
        block_size=block_size,
        emb_dim=16,
        gru_hidden_dim=16,
        dtype="float32",
    )


class KnownTexts:
    """Drafts what plain decoding gave for known texts, with a mistake at a place that moves: 0 to Q are right.

    It stands where a Drafter does in the engine, and can be slowed down and made to fail.
    """

    head = None
    dtype = torch.float32

    def __init__(self, target_dir: Path, texts: Sequence[Sequence[int]] = ()) -> None:
        self.config = replace(drafter_config(target_dir), head=False)
        self.texts = texts
        self.delay_s = 0.0
        self.failure: Exception | None = None

    def new_cache(self, rows: int, length: int) -> KVCache:
        return KVCache.allocate(1, rows, length, 1, 1, torch.float32)

    def extend_context(self, cache: KVCache, features_BTC: Tensor, positions_BT: Tensor) -> None:
        """The texts are known by their last token and length."""

    def draft_hidden(self, cache: KVCache, anchor_B: Tensor, start_B: Tensor, num_context: int | None = None) -> Tensor:
        """The drafted ids themselves, [B, Q, 1]."""
        if self.failure is not None:
            raise self.failure
        time.sleep(self.delay_s)
        drafts_BQ = torch.zeros(len(anchor_B), self.config.num_drafts, dtype=torch.int64)
        for row, (anchor, start) in enumerate(zip(anchor_B.tolist(), start_B.tolist(), strict=True)):
            for text in self.texts:
                if text[start : start + 1] == [anchor]:
                    known = text[start + 1 : start + 1 + self.config.num_drafts]
                    drafts_BQ[row, : len(known)] = torch.tensor(known)
                    wrong = start % (self.config.num_drafts + 1)
                    drafts_BQ[row, wrong:] = 0
        return drafts_BQ[..., None]

    def base_logits(self, z_XD: Tensor) -> Tensor:
        """So sure of them that noise, bias and penalties change no draft."""
        return 1e4 * torch.nn.functional.one_hot(z_XD[..., 0], self.config.vocab_size).float()


def member(target: Target, drafter: Any, version: str, *, max_rows: int = 3, max_length: int = 512) -> Member:
    """An engine to promote in a running server."""
    return Member(Engine(target, drafter, max_rows=max_rows, max_length=max_length), version)


@contextmanager
def listening(server: Server, *keys: str) -> Iterator[str]:
    """The app, behind keys if there are any, on a free port of the loopback interface."""
    config = uvicorn.Config(admitted(server, digests(keys)), host="127.0.0.1", port=0, log_level="warning")
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not http.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    http.should_exit = True
    thread.join()
    server.close()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0, *, every: float = 0.01) -> None:
    """every: seconds between looks; more where looking takes time from what is waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every)
