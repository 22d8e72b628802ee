"""Domino inside vLLM's CPU build: the text of plain decoding, and as many accepted drafts as the torch engine has."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_core.checkpoint import load_drafter
from domino_core.engine import Engine, Request
from domino_core.target import load_target, load_tokenizer, render_chat
from tests.trained import train_drafter, written_texts
from tests.vllm_served import Counts, Served, num_drafts

pytestmark = pytest.mark.slow

CASES = {
    "shifted": {},
    "unshifted": {"shift_label": False, "pure_draft_prefix_len": 2},
    "corrected from the first": {"pure_draft_prefix_len": 0},
    "headless, shifted": {"head": False},
    "headless, unshifted": {"head": False, "shift_label": False},
}
MAX_TOKENS = 48


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


class Drafters(dict[str, Path]):
    """Trained when they are asked for, and for so few steps that they are often wrong."""

    def __init__(self, folder: Path, target: Path, texts: list[list[int]]) -> None:
        super().__init__()
        self.folder, self.target, self.texts = folder, target, texts

    def __missing__(self, case: str) -> Path:
        changes = CASES[case]
        steps = 25 if changes.get("shift_label", True) else 45
        self[case] = train_drafter(self.folder / f"case-{len(self)}", self.target, self.texts, steps, **changes)
        return self[case]


@pytest.fixture(scope="module")
def drafters(embedded_target, texts, tmp_path_factory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"), embedded_target, texts)


@pytest.fixture(scope="module")
def plain(embedded_target, prompts) -> list[list[int]]:
    served = Served(embedded_target, None)
    texts = served.answer(prompts, MAX_TOKENS).texts
    served.close()
    return texts


@pytest.fixture(scope="module")
def expect(target, drafters):
    """(texts, counts) of the torch engine for a case. slots: of a block, where it is not the trained number."""

    def run(case: str, prompts: list[list[int]], slots: int | None = None) -> tuple[list[list[int]], Counts]:
        drafter = load_drafter(drafters[case], target.embed_VD, target.lm_head_VD)
        drafter.config = replace(drafter.config, block_size=slots or drafter.config.block_size)
        engine = Engine(target, drafter, max_rows=len(prompts), max_length=512)
        done = engine.generate([Request(prompt_ids=tuple(prompt), max_tokens=MAX_TOKENS) for prompt in prompts])
        counts = engine.acceptance
        return [each.tokens for each in done], (counts.rounds, counts.accepted, counts.accepted_at)

    return run


@pytest.fixture(scope="module")
def long_prompts(texts) -> list[list[int]]:
    """Of 195 to 246 tokens; the first 140 or so are the same in all."""
    return [[*texts[0], *text][:length] for text, length in zip(texts[1:5], (195, 210, 230, 246), strict=True)]


def cases(*names: str, default: str) -> list[Any]:
    """One that every run of the tests sees, the others on request."""
    return [name if name == default else pytest.param(name, marks=pytest.mark.matrix) for name in names]


@pytest.mark.parametrize("case", cases(*CASES, default="shifted"))
def test_same_text_as_plain_decoding_and_same_acceptance_as_the_torch_engine(
    embedded_target, prompts, plain, drafters, expect, case
):
    texts, counts = expect(case, prompts)
    served = Served(embedded_target, drafters[case], num_drafts(drafters[case]))
    got = served.answer(prompts, MAX_TOKENS)
    served.close()
    assert got.texts == plain == texts
    assert got.counts == counts
    rounds, accepted, _ = counts
    assert 0.3 < accepted / rounds < num_drafts(drafters[case]) - 0.3


@pytest.mark.parametrize("case", cases("shifted", "unshifted", default="unshifted"))
def test_prompts_in_chunks_and_requests_of_all_lengths_that_come_and_go(
    embedded_target, prompts, long_prompts, plain, drafters, expect, case
):
    mixed = [*long_prompts[:2], *prompts[:4], *long_prompts[2:]]
    served = Served(
        embedded_target,
        drafters[case],
        num_drafts(drafters[case]),
        max_num_batched_tokens=40,
        max_num_seqs=3,
        enable_prefix_caching=False,
    )
    got = served.answer(mixed, MAX_TOKENS)
    budgets = [5, 48, 1, 17, 30, 2, 9, 40]
    cut = served.answer(mixed, budgets)
    served.close()
    texts, counts = expect(case, mixed)
    assert got.texts == texts
    assert got.texts[2:6] == plain[:4]
    assert got.counts == counts
    assert cut.texts == [text[:budget] for text, budget in zip(texts, budgets, strict=True)]


@pytest.mark.matrix
def test_two_ranks_draft_the_same_and_as_one_does(embedded_target, prompts, drafters, expect, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two ranks may have one core
    folder = drafters["shifted"]
    texts, counts = expect("shifted", prompts)
    served = Served(
        embedded_target,
        folder,
        num_drafts(folder),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls="tests.vllm_served.Drafted",
    )
    for _ in range(2):  # the second time with weights taken over, each rank's share of them
        got = served.answer(prompts, MAX_TOKENS)
        assert got.texts == texts
        assert got.counts == counts
        one, other = served.llm.collective_rpc("last_drafts")
        assert one == other != []
        served.llm.collective_rpc("load_drafter", args=(str(folder),))
        served.llm.reset_prefix_cache()
    served.close()


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["shifted", "unshifted"])
def test_cached_prefixes_bring_the_context_of_the_drafter(embedded_target, long_prompts, drafters, expect, case):
    """τ would fall if blocks of the cache that a request did not fill itself lacked the drafter's keys and values."""
    served = Served(
        embedded_target,
        drafters[case],
        num_drafts(drafters[case]),
        max_num_batched_tokens=100,
        block_size=32,
        enable_prefix_caching=True,
    )
    first, again = served.answer(long_prompts[:1], MAX_TOKENS), served.answer(long_prompts, MAX_TOKENS)
    served.close()
    texts, counts = expect(case, long_prompts)
    assert first.texts == texts[:1]
    assert first.cached == [0]
    assert min(again.cached) >= 96
    assert again.texts == texts
    assert again.counts == counts


@pytest.mark.matrix
def test_fewer_drafts_than_a_block_holds_shorten_the_block(embedded_target, prompts, plain, drafters, expect):
    served = Served(embedded_target, drafters["unshifted"], 3)
    got = served.answer(prompts, MAX_TOKENS)
    served.close()
    texts, counts = expect("unshifted", prompts, slots=4)
    assert got.texts == plain == texts
    assert got.counts == counts


@pytest.mark.matrix
def test_fewer_drafts_under_load_come_from_the_whole_block(embedded_target, target, prompts, plain, drafters):
    schedule = {"num_speculative_tokens_per_batch_size": [(1, 1, 5), (2, 16, 2)]}
    served = Served(embedded_target, drafters["shifted"], 5, speculative=schedule, max_num_seqs=16)
    got = served.answer(prompts, MAX_TOKENS)
    served.close()
    assert got.texts == plain
    drafter = load_drafter(drafters["shifted"], target.embed_VD, target.lm_head_VD)
    engine = Engine(target, drafter, max_rows=len(prompts), max_length=256, num_verify=2)
    engine.generate([Request(prompt_ids=tuple(prompt), max_tokens=MAX_TOKENS) for prompt in prompts])
    assert got.accepted / got.rounds == pytest.approx(engine.acceptance.tau - 1, rel=0.1)


@pytest.mark.matrix
def test_released_files_that_say_dflash_and_files_that_are(embedded_target, prompts, plain, drafters, tmp_path):
    """The architecture's name does not tell them apart: a head does, and having been made here."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
    from vllm.v1.spec_decode.dflash import DFlashProposer

    from domino_core.vllm.drafting import DominoProposer

    kinds = {}
    for case in ("shifted", "headless, unshifted"):
        folder = shutil.copytree(drafters[case], tmp_path / case.replace(", ", "-"))
        (folder / "provenance.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["DFlashDraftModel"]}))
        served = Served(embedded_target, folder, num_drafts(folder))
        drafter = served.llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter  # pyright: ignore
        kinds[case] = type(drafter), type(drafter.model)
        assert served.answer(prompts, MAX_TOKENS).texts == plain
        del drafter
        served.close()
    assert kinds["shifted"][0] is DominoProposer
    assert kinds["headless, unshifted"] == (DFlashProposer, DFlashQwen3ForCausalLM)


def test_what_cannot_be_right_is_refused_with_its_reason(embedded_target, drafters, reference_dir):
    with pytest.raises(ValueError, match="does not fit the target: hidden_size"):
        Served(embedded_target, reference_dir / "draft_shift1_p1", 1)
    with pytest.raises(ValueError, match="hold 1 to 5 drafts"):
        Served(embedded_target, drafters["shifted"], 6)
    served = Served(embedded_target, drafters["shifted"], 5)
    with pytest.raises(ValueError, match=r"CPU build .* temperature 0"):
        served.answer([[5, 6, 7]], 8, temperature=1.0)
    served.close()
