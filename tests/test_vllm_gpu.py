"""Domino inside vLLM on a card, in both model runners.

bfloat16, because vLLM's non-causal attention has no float32 there. Passes of different widths then round differently,
so texts may part at a near-tie; what is asked is that most do not, and that acceptance is the torch engine's within a
few percent.
"""

import json

import pytest
import torch

from domino_core.checkpoint import load_drafter
from domino_core.engine import Engine, Request
from domino_core.target import load_target, load_tokenizer, render_chat
from domino_core.vllm.plugin import FIRST, SECOND, TESTED, base_version
from domino_core.vllm.reload import WORKER_EXTENSION
from tests.trained import train_drafter, written_texts
from tests.vllm_served import Served, num_drafts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CASES = {
    "shifted": {},
    "unshifted": {"shift_label": False, "pure_draft_prefix_len": 2},
    "headless": {"head": False},
}
MAX_TOKENS = 64
SETTINGS = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "kv_cache_memory_bytes": 512 << 20,
    "gpu_memory_utilization": 0.1,  # that much has to be free
}


@pytest.fixture(scope="module", params=[FIRST, SECOND])
def runner(request):
    import vllm
    from vllm.compilation import monitor

    if request.param not in TESTED[base_version(vllm.__version__)]:
        pytest.skip(f"vLLM {vllm.__version__} has no {request.param} runner for Domino")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0" if request.param == FIRST else "1")
        # The first runner forbids graphs once it has its own, in the whole process, and the second one does not ask.
        monitor.set_cudagraph_capturing_enabled(True)
        yield request.param


@pytest.fixture(scope="module")
def prompts(embedded_target) -> list[list[int]]:
    tokenizer = load_tokenizer(embedded_target)
    lines = (embedded_target / "prompts" / "heldout.jsonl").read_text().splitlines()[:16]
    return [render_chat(tokenizer, json.loads(line)["messages"]) for line in lines]


@pytest.fixture(scope="module")
def drafters(embedded_target, prompts, tmp_path_factory):
    texts = written_texts(load_target(embedded_target, dtype=torch.float32), prompts, MAX_TOKENS)
    folder = tmp_path_factory.mktemp("drafters")
    return {
        name: train_drafter(folder / name, embedded_target, texts, 40, **changes) for name, changes in CASES.items()
    }


@pytest.fixture(scope="module")
def plain(embedded_target, prompts, runner):
    served = Served(embedded_target, None, **SETTINGS)
    texts = served.answer(prompts, MAX_TOKENS).texts
    served.close()
    return texts


@pytest.mark.parametrize("case", CASES)
def test_text_and_acceptance(embedded_target, prompts, plain, drafters, case, runner):
    target = load_target(embedded_target, device="cuda", dtype=torch.bfloat16)
    drafter = load_drafter(drafters[case], target.embed_VD, target.lm_head_VD, device="cuda", dtype=torch.bfloat16)
    engine = Engine(target, drafter, max_rows=len(prompts), max_length=512)
    engine.generate([Request(prompt_ids=tuple(prompt), max_tokens=MAX_TOKENS) for prompt in prompts])
    served = Served(embedded_target, drafters[case], num_drafts(drafters[case]), **SETTINGS)
    got = served.answer(prompts, MAX_TOKENS)
    again = served.answer(prompts, MAX_TOKENS)  # from cached prefixes
    served.close()
    for answers in (got, again):
        same = sum(text == other for text, other in zip(answers.texts, plain, strict=True))
        assert same >= 0.6 * len(prompts)
        assert 1 + answers.accepted / answers.rounds == pytest.approx(engine.acceptance.tau, rel=0.06)


def test_weights_taken_over_are_those_that_draft(embedded_target, prompts, drafters, runner, tmp_path):
    """A drafter of the same shape into the running engine: also captured graphs read its weights."""
    other = train_drafter(tmp_path / "other", embedded_target, prompts[:1], 0)
    served = Served(embedded_target, other, num_drafts(other), worker_extension_cls=WORKER_EXTENSION, **SETTINGS)
    counts = []
    for folder in (drafters["shifted"], other):
        served.llm.collective_rpc("load_drafter", args=(str(folder),))
        served.llm.reset_prefix_cache()
        counts.append(served.answer(prompts, MAX_TOKENS))
    served.close()
    fresh = Served(embedded_target, drafters["shifted"], num_drafts(other), **SETTINGS)
    expected = fresh.answer(prompts, MAX_TOKENS)
    fresh.close()
    assert counts[0].accepted > 2 * counts[1].accepted
    assert counts[0].accepted / counts[0].rounds == pytest.approx(expected.accepted / expected.rounds, rel=0.06)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_tokens_have_the_targets_distribution(embedded_target, prompts, drafters, method, runner):
    """The third token's frequencies, over 1,500 requests without a seed, with and without a drafter."""
    crowd = [prompts[0]] * 1500
    counts = []
    for drafter in (None, drafters["shifted"]):
        served = Served(embedded_target, drafter, 5, speculative={"draft_sample_method": method}, **SETTINGS)
        texts = served.answer(crowd, 4, temperature=1.0).texts
        served.close()
        counts.append(torch.bincount(torch.tensor([text[2] for text in texts]), minlength=2048) / len(crowd))
    # Two samples of that size differ by about 0.05 in total variation where a handful of tokens share the mass.
    assert (counts[0] - counts[1]).abs().sum() / 2 < 0.15
