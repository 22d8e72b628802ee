"""Many clients of one endpoint for as long as one likes: requests of every kind, and what must hold of answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from jobs.drill_load import PROMPTS

PATIENCE_S = 120.0  # a request that is refused for so long is lost
LEAVE = 0.1  # the share of requests whose client goes away, at any moment up to LEAVE_WITHIN_S
LEAVE_WITHIN_S = 1.5
BUSY = frozenset({429, 503})  # come back later

# What an answer is, however it was sent: (text, finish_reason) of each choice.
Choices = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request. repeats: greedy or seeded, so its answer is the same at any time; status: what it must be told."""

    name: str
    route: str
    body: dict[str, Any]
    repeats: bool = True
    status: int = 200


def asks(model: str, count: int = 48) -> list[Ask]:
    """The same list at every call: greedy, seeded and free, in all lengths and settings, and a few that are refused."""
    draw, found = random.Random(0), list[Ask]()
    for number in range(count):
        chat = number % 3 == 0
        body: dict[str, Any] = {"model": model, "max_tokens": draw.choice([1, 4, 8, 16, 16, 40, 96])}
        prompt = "\n".join(draw.choices(PROMPTS, k=draw.choice([1, 1, 2, 6])))
        if chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = [prompt, draw.choice(PROMPTS)] if draw.random() < 0.15 else prompt
        how = ("greedy", "seeded", "seeded", "free")[number % 4]
        body["temperature"] = 0.0 if how == "greedy" else draw.choice([0.3, 0.7, 1.0, 1.5])
        if how == "seeded":
            body["seed"] = draw.randrange(2**53)
        if how != "greedy":
            body |= draw.choice([{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 50}])
        chance = draw.random()
        if chance < 0.2:
            body["stop"] = draw.choice([["\n\n"], ["self", ":"], [")", "return"]])
        elif chance < 0.4:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
        elif chance < 0.5:
            body["logit_bias"] = {"11": -50.0, "42": 3.0}
        if draw.random() < 0.25:
            body |= {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
        if draw.random() < 0.2:
            body["n"] = draw.choice([2, 3])
        if draw.random() < 0.3:
            body["ignore_eos"] = True
        route = "chat/completions" if chat else "completions"
        found.append(Ask(name=f"{how}-{number}", route=route, body=body, repeats=how != "free"))
    good = {"model": model, "prompt": PROMPTS[0]}
    refused = [({"temperature": 3}, 400), ({"model": "another"}, 404), ({"max_tokens": 10**6}, 400)]
    refused += [({"no_such": 1}, 400), ({"n": 10**4}, 400), ({"prompt": []}, 400), ({"stop": ""}, 400)]
    for number, (change, status) in enumerate(refused):
        found.append(Ask(name=f"refused-{number}", route="completions", body=good | change, status=status))
    return found


@dataclass(kw_only=True)
class Soak:
    """What the clients have seen so far. http: relative to the endpoint's /v1/."""

    http: httpx.AsyncClient
    asks: Sequence[Ask]
    expected: dict[str, Choices] = field(default_factory=dict)  # of a quiet endpoint
    requests: int = 0
    answered: int = 0
    tokens: int = 0
    left: int = 0  # clients that went away
    refused: int = 0  # for what they asked, and rightly
    busy: Counter[str] = field(default_factory=Counter)  # 429 and 503, which were asked again
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def learn(self) -> None:
        """Ask one after the other what repeats, for the answers that are expected from now on."""
        for ask in self.asks:
            if ask.status == 200 and ask.repeats:
                self.expected[ask.name] = choices_of([(await self._sent(ask, stream=False)).json()])

    async def run(self, clients: int, seconds: float) -> None:
        """So many clients ask without a pause; each finishes its last request."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._keep_asking(random.Random(number), until) for number in range(clients)))

    async def _keep_asking(self, draw: random.Random, until: float) -> None:
        while time.monotonic() < until:
            ask = draw.choice(self.asks)
            stream, leaves = draw.random() < 0.5, draw.random() < LEAVE
            self.requests += 1
            try:  # the boundary to the endpoint: whatever goes wrong there is told and counted
                async with asyncio.timeout(draw.uniform(0, LEAVE_WITHIN_S) if leaves else None):
                    await self._until_answered(ask, stream)
            except TimeoutError:
                self.left += 1
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.errors.append(f"{ask.name}, stream={stream}: {type(error).__name__}: {error}")

    async def _until_answered(self, ask: Ask, stream: bool) -> None:
        """ValueError or KeyError: an answer that is none."""
        until = time.monotonic() + PATIENCE_S
        while (response := await self._sent(ask, stream)).status_code in BUSY:
            self.busy[str(response.status_code)] += 1
            if time.monotonic() > until:
                raise ValueError(f"{response.status_code} for {PATIENCE_S:.0f} s")
            await asyncio.sleep(min(float(response.headers.get("retry-after", 0.25)), 5.0))
        if response.status_code != ask.status:
            raise ValueError(f"{response.status_code}, not {ask.status}: {response.text[:300]}")
        if ask.status != 200:
            self.refused += 1
            return
        chunks = events(response.text) if stream else [response.json()]
        found, usage = choices_of(chunks), chunks[-1]["usage"]
        self.answered += 1
        self.tokens += usage["completion_tokens"]
        self.wrong += [f"{ask.name}, stream={stream}: {what}" for what in self.problems(ask, chunks, found)]

    def problems(self, ask: Ask, chunks: list[dict[str, Any]], found: Choices) -> list[str]:
        """What is wrong with an answer: in itself, and beside the one of a quiet endpoint."""
        body, told = ask.body, list[str]()
        prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        if len(found) != prompts * body.get("n", 1):
            told.append(f"{len(found)} choices for {prompts} prompts and n={body.get('n', 1)}")
        if not 1 <= chunks[-1]["usage"]["completion_tokens"] <= body["max_tokens"] * len(found):
            told.append(f"{chunks[-1]['usage']} for max_tokens={body['max_tokens']}")
        if any(stop in text for stop in body.get("stop", []) for text, _ in found):
            told.append(f"a stop string is in {found}")
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        if "logprobs" in body and not any(choice.get("logprobs") for choice in choices):
            told.append("log-probabilities are missing")
        if ask.repeats and found != self.expected[ask.name]:
            told.append(f"{found}, not {self.expected[ask.name]}")
        return told

    async def _sent(self, ask: Ask, stream: bool) -> httpx.Response:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return await self.http.post(ask.route, json=ask.body | options)


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream. ValueError for one that says what went wrong, or just stops."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise ValueError(f"the stream ends with {lines[-1][:300] if lines else 'nothing'}")
    return [json.loads(line) for line in lines[:-1]]


def choices_of(chunks: Sequence[dict[str, Any]]) -> Choices:
    """The choices of a whole body (then it is the only chunk) or of a stream's chunks. ValueError: one has no end."""
    texts, reasons = dict[int, str](), dict[int, str]()
    for chunk in chunks:
        for choice in chunk["choices"]:
            index, part = choice["index"], choice.get("message") or choice.get("delta") or choice
            texts[index] = texts.get(index, "") + (part.get("text") or part.get("content") or "")
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    if set(reasons) != set(texts) or not texts:
        raise ValueError(f"choices {sorted(texts)} have begun, {sorted(reasons)} have ended")
    return [(texts[index], reasons[index]) for index in sorted(texts)]
