"""Domino inside vLLM's CPU build: the text of plain decoding, and as many accepted drafts as the torch engine has."""

import gc
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from domino_core.checkpoint import load_drafter
from domino_core.engine import Engine, Request
from domino_core.target import load_target, load_tokenizer, render_chat
from domino_core.vllm.plugin import register
from tests.trained import train_drafter, written_texts

pytestmark = pytest.mark.slow

CASES = {
    "shifted": {},
    "unshifted": {"shift_label": False, "pure_draft_prefix_len": 2},
    "corrected from the first": {"pure_draft_prefix_len": 0},
    "headless, shifted": {"head": False},
    "headless, unshifted": {"head": False, "shift_label": False},
}
MAX_TOKENS = 48


@dataclass(frozen=True)
class Answers:
    """Of one engine: output tokens per prompt and what vLLM counted of drafting since it started."""

    texts: list[list[int]]
    rounds: int
    accepted: int
    accepted_at: list[int]


class Served:
    """An engine in this process."""

    def __init__(self, target: Path, drafter: Path | None, num_drafts: int = 0, **changes) -> None:
        import vllm

        register()
        settings = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 512}
        if drafter is not None:
            settings["speculative_config"] = {
                "method": "dflash",
                "model": str(drafter),
                "num_speculative_tokens": num_drafts,
                **changes.pop("speculative", {}),
            }
        self.llm = vllm.LLM(str(target), seed=0, disable_log_stats=False, **{**settings, **changes})

    def answer(self, prompts: list[list[int]], max_tokens: int | list[int] = MAX_TOKENS, **sampling) -> Answers:
        import vllm

        counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        params = [
            vllm.SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, **{"temperature": 0.0, **sampling})
            for count in counts
        ]
        before = self._counts()
        given = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        after = self._counts()
        rounds, accepted, *accepted_at = (late - early for late, early in zip(after, before, strict=True))
        texts = [list(output.outputs[0].token_ids) for output in given]
        return Answers(texts=texts, rounds=rounds, accepted=accepted, accepted_at=accepted_at)

    def _counts(self) -> list[int]:
        counts = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in self.llm.get_metrics()}
        if "drafts" not in counts:
            return [0, 0]
        single = [getattr(counts[name], "value") for name in ("drafts", "accepted_tokens")]  # noqa: B009
        return [*single, *getattr(counts["accepted_tokens_per_pos"], "values")]  # noqa: B009

    def close(self) -> None:
        del self.llm
        gc.collect()


@pytest.fixture(scope="module")
def target(embedded_target):
    return load_target(embedded_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(embedded_target) -> list[list[int]]:
    """Of 33 to 103 tokens, several blocks of the cache, all different."""
    tokenizer = load_tokenizer(embedded_target)
    lines = (embedded_target / "prompts" / "heldout.jsonl").read_text().splitlines()[:10]
    return [render_chat(tokenizer, json.loads(line)["messages"]) for line in lines]


@pytest.fixture(scope="module")
def texts(target, prompts) -> list[list[int]]:
    return written_texts(target, prompts, MAX_TOKENS)


@pytest.fixture(scope="module")
def drafters(embedded_target, texts, tmp_path_factory) -> dict[str, Path]:
    """Trained for so few steps that they are often wrong."""
    folder = tmp_path_factory.mktemp("drafters")
    found: dict[str, Path] = {}
    for number, (name, changes) in enumerate(CASES.items()):
        steps = 25 if changes.get("shift_label", True) else 45
        found[name] = train_drafter(folder / f"case-{number}", embedded_target, texts, steps, **changes)
    return found


@pytest.fixture(scope="module")
def plain(embedded_target, prompts) -> list[list[int]]:
    served = Served(embedded_target, None)
    texts = served.answer(prompts).texts
    served.close()
    return texts


@pytest.mark.parametrize("case", CASES)
def test_same_text_as_plain_decoding_and_same_acceptance_as_the_torch_engine(
    embedded_target, target, prompts, plain, drafters, case
):
    drafter = load_drafter(drafters[case], target.embed_VD, target.lm_head_VD)
    engine = Engine(target, drafter, max_rows=len(prompts), max_length=256)
    engine.generate([Request(prompt_ids=tuple(prompt), max_tokens=MAX_TOKENS) for prompt in prompts])
    expected = engine.acceptance
    served = Served(embedded_target, drafters[case], drafter.config.num_drafts)
    got = served.answer(prompts)
    served.close()
    assert got.texts == plain
    assert 1.5 < expected.tau < drafter.config.num_drafts + 0.5
    assert (got.rounds, got.accepted, got.accepted_at) == (expected.rounds, expected.accepted, expected.accepted_at)
