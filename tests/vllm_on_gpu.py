"""A real target and drafter inside vLLM on one card: text against plain decoding, τ, tokens per second.

    VLLM_USE_V2_MODEL_RUNNER=0 python -m tests.vllm_on_gpu TARGET DRAFTER [PROMPTS.jsonl]

One line of JSON per engine: plain, greedy drafts, sampled drafts. "same": texts equal to plain decoding's, of all;
"agree": mean share of a text before it parts from plain decoding's (bfloat16 near-ties, see docs/exactness.md).
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

from domino_core.target import load_tokenizer, render_chat
from tests.vllm_served import Answers, Served, num_drafts

MAX_TOKENS = 256
SETTINGS = {"dtype": "bfloat16", "enforce_eager": False, "kv_cache_memory_bytes": 8 << 30, "max_model_len": 4096}


def main(target: str, drafter: str, data: str = "assets/tiny-qwen3/prompts/heldout.jsonl") -> None:
    tokenizer = load_tokenizer(target)
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()[:32]]
    prompts = [render_chat(tokenizer, row["messages"]) for row in rows]
    plain = measure("plain", Served(Path(target), None, **SETTINGS), prompts, None, 0.0)
    for name, method, temperature in (("greedy", "greedy", 0.0), ("sampled", "probabilistic", 1.0)):
        speculative = {"draft_sample_method": method}
        served = Served(Path(target), Path(drafter), num_drafts(Path(drafter)), speculative=speculative, **SETTINGS)
        measure(name, served, prompts, plain if name == "greedy" else None, temperature)


def measure(name: str, served: Served, prompts: list[list[int]], plain: Answers | None, temperature: float) -> Answers:
    """Warm once, then time all prompts together and the first four one by one."""
    served.answer(prompts, MAX_TOKENS, temperature=temperature)
    began = time.perf_counter()
    together = served.answer(prompts, MAX_TOKENS, temperature=temperature)
    middle = time.perf_counter()
    for prompt in prompts[:4]:
        served.answer([prompt], MAX_TOKENS, temperature=temperature)
    ended = time.perf_counter()
    served.close()
    told = {
        "engine": name,
        "tau": round(1 + together.accepted / together.rounds, 3) if together.rounds else 1.0,
        "accepted_at": together.accepted_at,
        "tokens_per_second_all": round(len(prompts) * MAX_TOKENS / (middle - began), 1),
        "tokens_per_second_one": round(4 * MAX_TOKENS / (ended - middle), 1),
    }
    if plain is not None:
        pairs = list(zip(together.texts, plain.texts, strict=True))
        parted = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), MAX_TOKENS) for pair in pairs]
        told |= {
            "same": f"{sum(text == other for text, other in pairs)} of {len(pairs)}",
            "agree": round(sum(parted) / len(parted) / MAX_TOKENS, 3),
        }
    print(json.dumps(told), flush=True)
    return together


if __name__ == "__main__":
    main(*sys.argv[1:])
