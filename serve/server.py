"""One loaded target with its engine loop: what the routes call, and how a drafter version goes live while it serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI

from domino_core.checkpoint import load_drafter
from domino_core.decode import Acceptance
from domino_core.drafter import Drafter
from domino_core.engine import Engine
from domino_core.memory import drafter_bytes, free_bytes
from domino_core.request import Request
from domino_core.sampling_params import SamplingParams
from domino_core.self_check import SelfCheck, shortfall
from domino_core.target import load_target, load_tokenizer, render_chat, target_hash
from serve.canary import CHAMPION, Canary
from serve.config import ServeConfig
from serve.drafter_cache import DrafterCache
from serve.figures import Figures
from serve.follower import Follower, NotYetError
from serve.generation import Generation
from serve.metrics import FirstTokens, Metrics
from serve.openai_routes import http_app
from serve.registry_alias import Version, check_target, parse_alias
from serve.replica import EngineLoop, Member
from serve.text import read_vocabulary

logger = logging.getLogger("ray.serve.domino")

CHECK_TEXT = "import os\n\ndef main(argv):\n"
CHECK_TOKENS = 32
CHECK_TIMEOUT_S = 120.0
# Passes of different widths round differently in bfloat16: two log-probabilities this close may change places.
TIE_GAP = {"float32": 0.0, "bfloat16": 0.25}


class Server:
    """Loads the target, brings the configured drafter live, follows its alias. ValueError for what does not fit."""

    def __init__(self, config: ServeConfig, *, with_ray: bool = False) -> None:
        self.config = config
        self.created = int(time.time())
        self.target_hash = target_hash(config.target)
        self.tokenizer = load_tokenizer(config.target)
        self.vocabulary = read_vocabulary(self.tokenizer)
        self._dtype = getattr(torch, config.resolved_dtype)
        self._target = load_target(config.target, device=config.resolved_device, dtype=self._dtype)
        if config.max_length > self._target.config.max_position_embeddings:
            raise ValueError(
                f"max_length={config.max_length} exceeds the target's "
                f"max_position_embeddings={self._target.config.max_position_embeddings}"
            )
        # Captured before traffic on a card, besides greedy rounds: sampling by default, and as Qwen3 recommends it.
        rule = config.unseeded_rule
        self._kinds = (
            SamplingParams(temperature=1.0, rule=rule),
            SamplingParams(temperature=0.7, top_p=0.8, top_k=20, rule=rule),
        )
        alias = parse_alias(config.drafter, config.tracking_uri)
        self._followed = alias is not None
        check_ids = self.tokenizer.encode(CHECK_TEXT)
        self._check = Request(
            prompt_ids=tuple(check_ids[: config.max_length // 2]),
            max_tokens=max(1, min(CHECK_TOKENS, config.max_length // 2)),
            sampling=SamplingParams(),
            logprobs=2,
        )
        # Plain decoding: what is served without a drafter, and what every drafter must agree with.
        plain = Engine(
            self._target,
            None,
            max_rows=config.fixed_rows if config.drafter == "none" else 1,
            max_length=config.max_length,
            memory=self._free_bytes(),
        )
        if config.drafter == "none":
            plain.warm_up(self._kinds)
        self.loop = EngineLoop(plain, "none")
        self._expected = self.loop.generate(self._check, self.loop.live, CHECK_TIMEOUT_S)
        self.metrics = Metrics(config.served_name, self.target_hash, with_ray)
        self.metrics.watch("num_requests_running", "Requests that have a row.", lambda: self.loop.counts()[0])
        self.metrics.watch("num_requests_waiting", "Requests that wait for a row.", lambda: self.loop.counts()[1])
        self.metrics.watch(
            "spec_decode_verified_drafts",
            "Drafts that the last round verified.",
            lambda: self.loop.live.engine.last_verify,
        )
        self.follower: Follower | None = None
        self.canary: Canary | None = None
        self.canary_reports = self._own_report  # under Serve: those of all replicas
        try:
            if alias is not None:
                cache = DrafterCache(config.cache_dir)
                if alias.alias == CHAMPION and config.canary_share > 0:
                    self.canary = Canary(alias, cache, self.loop, self.prepare, config.canary_share)
                then = self.canary.poll if self.canary is not None else None
                self.follower = Follower(alias, cache, self.accept, then)
                self.follower.start(config.poll_seconds)
            elif config.drafter != "none":
                folder = Path(config.drafter).expanduser()
                self.accept(folder, Version(number=folder.name, source=str(folder)))
        except Exception:
            self.close()  # the engine's thread would outlive us
            raise

    def accept(self, folder: Path, version: Version) -> None:
        """Load a drafter beside the live engine, check it there, swap. If it is not right: raise and change nothing.

        A challenger that won has all of that behind it; any other one makes room.
        """
        ready = self.canary.take(version) if self.canary is not None else None
        self.loop.promote(ready or self.prepare(folder, version))

    def prepare(self, folder: Path, version: Version) -> Member:
        """An engine with the drafter, warm and checked, that takes no requests yet. Raises what speaks against it."""
        try:  # counted wherever it is raised
            return self._prepare(folder, version)
        except NotYetError:
            raise
        except Exception:
            self.metrics.refused(version.number)
            raise

    def _prepare(self, folder: Path, version: Version) -> Member:
        check_target(folder, version, self.target_hash)
        if self.loop.draining:
            raise NotYetError(
                f"version {version.number} waits until the last requests of version {self.loop.draining} are answered"
            )
        engine = self.loop.call(lambda: self._new_engine(self._load(folder)))
        # Before it takes traffic, so that no request waits for what is done once; and in pieces, so that those which
        # are being answered wait for one of them at a time.
        for step in self.loop.call(lambda: engine.warm_up_steps(self._kinds)):
            self.loop.call(step)
        member = Member(engine, version.number)
        self.self_check(member)
        self.check_acceptance(member, version.self_check)
        member.figures = Figures()  # the checks are nobody's requests
        return member

    def _load(self, folder: Path) -> Drafter:
        target = self._target
        drafter = load_drafter(
            folder, target.embed_VD, target.lm_head_VD, device=self.config.resolved_device, dtype=self._dtype
        )
        drafter.config.check_fits(target.config)
        return drafter

    def _new_engine(self, drafter: Drafter) -> Engine:
        """An engine for a version, with room left for its successor: the two are there at once while one drains.

        So the first plans with half of what is free, of which the weights come off, and every later one has its rows.
        """
        before = self.loop.live.engine
        first, free = before.drafter is None, self._free_bytes()
        shares = 2 if first and self._followed else 1
        return Engine(
            self._target,
            drafter,
            max_rows=self.config.fixed_rows if first else before.max_rows,
            max_length=self.config.max_length,
            num_verify=self.config.num_verify,
            memory=None if free is None else free // shares - drafter_bytes(drafter),
        )

    def _free_bytes(self) -> int | None:
        """What is left of the replica's share of a card: another replica may have the rest."""
        return free_bytes(self._target.device, min(1.0, self.config.gpus_per_replica or 1.0))

    def self_check(self, member: Member) -> None:
        """Greedy output with the drafter is the target's own, up to the ties that the serving dtype has."""
        outputs = self.loop.generate(self._check, member, CHECK_TIMEOUT_S)
        checked = [token for output in outputs for token in output.tokens]
        expected = [token for output in self._expected for token in output.tokens]
        if checked == expected:
            return
        where = next(i for i, (ours, theirs) in enumerate(zip(checked, expected, strict=False)) if ours != theirs)
        choices = [entry for output in self._expected for entry in output.logprobs or ()][where].top
        by_token = dict(choices)
        gap = choices[0][1] - by_token[checked[where]] if checked[where] in by_token else float("inf")
        if gap > TIE_GAP[self.config.resolved_dtype]:
            raise ValueError(
                f"self-check: token {where} is {checked[where]} with drafter {member.version} and "
                f"{expected[where]} without (log-probability gap {gap:.3g})"
            )

    def check_acceptance(self, member: Member, stored: str) -> None:
        """ValueError where the drafter accepts less of the prompts of its gate than it did there."""
        if not stored:
            logger.warning("drafter %s has no self-check stored, gate it to have one", member.version)
            return
        check, engine, found = SelfCheck.from_json(stored), member.engine, Acceptance()
        requests = check.requests(self.config.max_length)
        if not requests:
            logger.warning(
                "drafter %s: no prompt of its self-check fits into %d tokens", member.version, engine.max_length
            )
            return
        chosen = engine.num_verify
        fixed = None if isinstance(chosen, str) else chosen  # or it might verify nothing, where that pays
        engine.num_verify = fixed
        for request in requests:
            found.merge(self.loop.generate(request, member, CHECK_TIMEOUT_S)[-1].acceptance)
        engine.num_verify = chosen
        expected = check.expected(requests, fixed)
        if problem := shortfall(found, expected):
            raise ValueError(f"self-check: {problem}")
        logger.info(
            "drafter %s: tau %.3f on its stored prompts, at its gate %.3f", member.version, found.tau, 1 + expected
        )

    def close(self) -> None:
        """End both threads; requests still running get an error."""
        if self.follower is not None:
            self.follower.close()
        self.loop.close()

    @property
    def failure(self) -> str:
        """Why this replica has to be replaced; "" when all is well."""
        return self.loop.failure

    @property
    def first_tokens(self) -> FirstTokens:
        return self.metrics.first_tokens

    # What the routes need

    def generation(self, requests: list[Request], stops: Sequence[str], request_id: str) -> Generation:
        member = self.canary.choose(request_id) if self.canary is not None else self.loop.live
        return Generation(self.loop, member, self.metrics, self.vocabulary, requests, stops, request_id)

    def render_chat(self, messages: list[dict[str, str]], enable_thinking: bool) -> list[int]:
        return render_chat(self.tokenizer, messages, enable_thinking=enable_thinking)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def eos_token_ids(self) -> tuple[int, ...]:
        return self._target.config.eos_token_ids

    def vocab_size(self) -> int:
        return self._target.config.vocab_size

    def fingerprint(self, version: str) -> str:
        """OpenAI's system_fingerprint: target and drafter version that an answer came from."""
        return f"{self.target_hash}-drafter-{version}"

    def http_app(self) -> FastAPI:
        return http_app(self)

    def metrics_page(self) -> bytes:
        return self.metrics.page()

    def canary_report(self) -> dict[str, Any]:
        """This replica's part of /canary. `unable` says why it can try out no challenger."""
        if self.canary is None:
            off = "serve.canary_share=0" if self.config.canary_share == 0 else f"serve.drafter={self.config.drafter}"
            return {"unable": f"the endpoint runs with {off}: deploy it with a share, and with {CHAMPION} followed"}
        if self.config.max_ongoing_requests < 2:  # whoever collects the reports is answering a request itself
            return {"unable": "the endpoint runs with serve.max_ongoing_requests=1, so no replica can be asked: give 2"}
        return self.canary.report() | {"same_length": self.config.num_verify != "auto"}

    async def _own_report(self) -> list[dict[str, Any]]:
        return [self.canary_report()]

    def health(self) -> dict[str, Any]:
        """status is ok or failed; `drafter.problem` says why a newer version is not live, which is no failure."""
        running, waiting = self.loop.counts()
        return {
            "status": "failed" if self.loop.failure else "ok",
            "failure": self.loop.failure,
            "model": self.config.served_name,
            "target_hash": self.target_hash,
            "drafter": {"live": self.loop.live.version, "verified_drafts": self.loop.live.engine.last_verify}
            | (asdict(self.follower.state) if self.follower else {}),
            "canary": self.canary.state() if self.canary else None,
            "requests": {"running": running, "waiting": waiting, "rows": self.loop.live.engine.max_rows},
        }
