"""vLLM in this process, with or without a drafter, and what it counts."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from domino_core.checkpoint import read_config
from domino_core.vllm.plugin import register
from domino_core.vllm.reload import DrafterLoader

Counts = tuple[int, int, list[int]]


def num_drafts(drafter: Path) -> int:
    return read_config(drafter).num_drafts


@dataclass(frozen=True)
class Answers:
    """Output tokens per prompt, how many tokens of each came from the prefix cache, and what vLLM counted."""

    texts: list[list[int]]
    cached: list[int]
    rounds: int
    accepted: int
    accepted_at: list[int]

    @property
    def counts(self) -> Counts:
        return self.rounds, self.accepted, self.accepted_at


class Drafted(DrafterLoader):
    """A worker's extension that shows what its rank drafted last."""

    def last_drafts(self) -> list[list[int]]:
        worker: Any = self
        drafts = worker.model_runner._draft_token_ids
        return drafts.tolist() if isinstance(drafts, torch.Tensor) else drafts


class Served:
    """An engine in this process."""

    def __init__(self, target: Path, drafter: Path | None, num_drafts: int = 0, **changes) -> None:
        import vllm

        register()
        settings = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 512}
        speculative = changes.pop("speculative", {})
        if drafter is not None:
            settings["speculative_config"] = {
                "method": "dflash",
                "model": str(drafter),
                "num_speculative_tokens": num_drafts,
                **speculative,
            }
        self.llm = vllm.LLM(str(target), seed=0, disable_log_stats=False, **{**settings, **changes})

    def answer(self, prompts: list[list[int]], max_tokens: int | list[int], **sampling) -> Answers:
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
        cached = [output.num_cached_tokens or 0 for output in given]
        return Answers(texts=texts, cached=cached, rounds=rounds, accepted=accepted, accepted_at=accepted_at)

    def _counts(self) -> list[int]:
        counts = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in self.llm.get_metrics()}
        if "drafts" not in counts:
            return [0, 0]
        single = [getattr(counts[name], "value") for name in ("drafts", "accepted_tokens")]  # noqa: B009
        return [*single, *getattr(counts["accepted_tokens_per_pos"], "values")]  # noqa: B009

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()  # ranks are processes
        del self.llm
        gc.collect()
