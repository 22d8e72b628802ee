"""Capture against `transformers`: the right layers, every token, in the order and batch that were asked for."""

import gc
import os
import time
import weakref

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock

from domino_core.features import quantize
from domino_core.vllm import hidden_states
from pipelines.capture import SLICES_AHEAD, CaptureConfig, TargetActor, answer_seed
from pipelines.regenerate import AnswerConfig

LAYERS = (1, 6, 12)
LENGTHS = (1, 2, 15, 16, 17, 40, 128, 5, 5, 255)


@pytest.fixture(scope="module")
def actor(embedded_target):
    """One engine for the tests of this module: a start costs tens of seconds."""
    config = CaptureConfig(max_length=256, max_num_seqs=64, max_num_batched_tokens=512, kv_cache_bytes=256 << 20)
    return TargetActor(str(embedded_target), LAYERS, config)


@pytest.fixture(scope="module")
def reference(embedded_target):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded_target, dtype=torch.float32)


def sequences(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 2048, (length,), generator=generator).tolist() for length in lengths]


def taps(reference, sequence: list[int]) -> torch.Tensor:
    """[S, L, D]: hidden_states[i + 1] of transformers is the output of block i, before any final norm."""
    with torch.no_grad():
        states = reference(torch.tensor([sequence]), output_hidden_states=True).hidden_states
    return torch.stack([states[i + 1][0] for i in LAYERS], dim=1)


@pytest.mark.slow
def test_every_token_of_several_lengths_in_one_batch(actor, reference):
    asked = sequences()
    captured = actor.capture(asked)
    assert [len(states) for states in captured] == list(LENGTHS)
    for sequence, states_SLD in zip(asked, captured, strict=True):
        expected_SLD = taps(reference, sequence)
        assert (states_SLD - expected_SLD).abs().max() < 1e-3
        # The tolerance tells layers apart: every other tap is much further away.
        for wrong in (expected_SLD.roll(1, dims=1), expected_SLD.flip(1)):
            assert (states_SLD - wrong).abs().amax(dim=(0, 2)).max() > 0.1


@pytest.mark.slow
def test_repeated_prefixes_are_computed_again(actor, reference):
    # With prefix caching, rows of tokens seen before would be missing (or stale).
    (long,) = sequences((96,))
    again = [long, long[:64], [*long[:80], 7, 8, 9], long]
    actor.capture([long])
    for sequence, states_SLD in zip(again, actor.capture(again), strict=True):
        assert len(states_SLD) == len(sequence)
        assert (states_SLD - taps(reference, sequence)).abs().max() < 1e-3
    assert actor.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching is False


def assert_nothing_is_left(actor) -> None:
    """No request, no block but the null block, and nothing of ours waits for a state."""
    scheduler = actor.llm.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler.requests
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    worker = get_kv_transfer_group()
    held = ("receivers", "_req_copy_events", "_req_futures", "_accumulated_finished_req_ids")
    assert not any(getattr(worker, name) for name in held)
    assert not scheduler.connector._pending_saves
    assert not scheduler.connector._request_filenames
    assert actor.handover.pending == 0


@pytest.fixture
def no_files(monkeypatch):
    """Writing a file, of states or a lock, is an error."""

    def refuse(*arguments, **settings):
        raise AssertionError(f"a file is written: {arguments[1:]}")

    monkeypatch.setattr(stock, "save_file", refuse)
    monkeypatch.setattr(os, "makedirs", refuse)


@pytest.mark.slow
def test_states_are_handed_over_in_memory_and_nothing_is_left_behind(actor, no_files):
    made = [weakref.ref(actor.capture(sequences())[-1].untyped_storage()) for _ in range(3)]
    assert_nothing_is_left(actor)
    assert actor.folder is None
    gc.collect()
    assert [ref() for ref in made] == [None, None, None]


@pytest.mark.slow
def test_a_stream_of_slices_is_the_same_as_one_capture(actor):
    asked = sequences()
    expected = actor.capture(asked)
    parts = [asked[:3], asked[3:4], asked[4:]]
    found = []
    for part, captured in zip(parts, actor.stream(parts, torch.bfloat16), strict=True):
        assert captured.wait() == [True] * len(part)
        found += captured.values_TLD.split([len(sequence) for sequence in part])
    assert captured.scales_TL is None
    for states_SLD, expected_SLD in zip(found, expected, strict=True):
        assert torch.equal(states_SLD, expected_SLD.bfloat16())
    (packed,) = actor.stream([asked[-1:]], torch.float8_e4m3fn)
    values_SLD, scales_SL = quantize(expected[-1])
    assert torch.equal(packed.values_TLD.view(torch.uint8), values_SLD.view(torch.uint8))
    assert torch.equal(packed.scales_TL, scales_SL)
    assert_nothing_is_left(actor)


@pytest.mark.slow
def test_an_engine_goes_on_while_its_results_are_carried_away_but_not_for_ever(actor):
    parts = [[tokens] for tokens in sequences([200] * 12)]
    stream, before = actor.stream(parts, torch.bfloat16), actor.clock.rows
    next(stream)
    deadline = time.monotonic() + 20
    while actor.clock.rows - before < SLICES_AHEAD + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    blocked = actor.clock.blocked
    time.sleep(0.3)
    assert actor.clock.rows - before == SLICES_AHEAD + 1  # the one that is held, and what may wait
    assert len(list(stream)) == 11
    assert actor.clock.blocked - blocked >= 0.25


@pytest.mark.slow
def test_an_engine_that_fails_leaves_nothing_behind_and_can_be_used_again(actor, monkeypatch):
    asked = sequences([200] * 12)
    expected = actor.capture(asked)
    executor = actor.llm.llm_engine.engine_core.engine_core.model_executor
    real, calls = executor.execute_model, []

    def fail(*arguments, **settings):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the card fell off the bus")
        return real(*arguments, **settings)

    monkeypatch.setattr(executor, "execute_model", fail)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        list(actor.stream([[tokens] for tokens in asked], torch.bfloat16))
    assert actor.handover.pending == 0
    monkeypatch.setattr(executor, "execute_model", real)
    for states_SLD, expected_SLD in zip(actor.capture(asked), expected, strict=True):
        assert torch.equal(states_SLD, expected_SLD)
    assert_nothing_is_left(actor)


@pytest.mark.slow
def test_a_reader_that_goes_away_leaves_nothing_behind(actor):
    stream = actor.stream([[tokens] for tokens in sequences([200] * 20)], torch.bfloat16)
    next(stream)
    stream.close()
    assert actor.handover.pending == 0
    actor.capture(sequences())
    assert_nothing_is_left(actor)


@pytest.mark.slow
def test_engines_with_several_workers_hand_over_by_files(actor, monkeypatch, tmp_path):
    """As the first rank of a tensor-parallel engine does; here the worker is in this process all the same."""
    asked = sequences()
    expected = actor.capture(asked)
    scheduler = actor.llm.llm_engine.engine_core.engine_core.scheduler
    for connector in (get_kv_transfer_group(), scheduler.connector):
        monkeypatch.setattr(connector, "in_memory", False)
        monkeypatch.setattr(connector, "_storage_path", str(tmp_path / "states"))
    monkeypatch.setattr(actor, "handover", hidden_states.Handover(actor.llm, tmp_path / "states"))
    for _ in range(2):
        for states_SLD, expected_SLD in zip(actor.capture(asked), expected, strict=True):
            assert torch.equal(states_SLD, expected_SLD)
        assert not (tmp_path / "states").exists()
    assert_nothing_is_left(actor)
    stream = actor.stream([[tokens] for tokens in sequences([200] * 20)], torch.bfloat16)
    next(stream)
    stream.close()
    assert not (tmp_path / "states").exists()
    actor.capture(asked)  # with what was left behind, its folder could not be removed
    assert_nothing_is_left(actor)
    monkeypatch.setattr(stock.ExampleHiddenStatesConnector, "_write_tensors", lambda *arguments: None)
    with pytest.raises(RuntimeError, match="vLLM wrote no hidden states for request states-"):
        actor.capture(asked)


@pytest.mark.slow
def test_greedy_answers_are_the_targets_own(actor, reference, embedded_target):
    from domino_core.target import load_tokenizer, read_target_config, render_chat

    tokenizer = load_tokenizer(str(embedded_target))
    asked = ["def add(a, b):", "import os", "class Stack:\n    def push(self, item):"]
    prompts = [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in asked]
    answers = actor.answer(prompts, asked, AnswerConfig(temperature=0.0, max_tokens=24))
    eos = read_target_config(str(embedded_target)).eos_token_ids
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            whole = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert answer.token_ids == whole[0, len(prompt) :].tolist()
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] in eos else "length")
    assert_nothing_is_left(actor)  # only capture asks for states


@pytest.mark.slow
def test_sampled_answers_depend_on_seed_and_id_not_on_the_batch(actor):
    prompts = sequences((12, 9, 30))
    config = AnswerConfig(temperature=1.0, max_tokens=16)
    together = actor.answer(prompts, ["a", "b", "c"], config)
    alone = [actor.answer([prompt], [key], config)[0] for prompt, key in zip(prompts, "abc", strict=True)]
    assert together == alone
    assert actor.answer(prompts[:1], ["z"], config) != together[:1]
    assert actor.answer(prompts[:1], ["a"], AnswerConfig(temperature=1.0, max_tokens=16, seed=1)) != together[:1]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_answers_have_the_targets_distribution(actor, reference, temperature):
    check_distribution(actor, reference, temperature)


def check_distribution(actor, reference, temperature: float) -> None:
    """Every position of an answer has the target's distribution; later ones are where drafts could spoil it."""
    (prompt,) = sequences((40,))
    rows, length = 400, 4
    config = AnswerConfig(temperature=temperature, max_tokens=length)
    answers = actor.answer([prompt] * rows, [str(row) for row in range(rows)], config)
    full = [answer.token_ids for answer in answers if len(answer.token_ids) == length]
    assert len(full) > rows / 2
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens for tokens in full])).logits[:, len(prompt) - 1 : -1]
    log_p = (logits / temperature).log_softmax(-1)
    # The surprise of a drawn token has mean H and this variance, whatever the distribution: a test for each position.
    drawn = log_p.gather(2, torch.tensor(full)[..., None])[..., 0]
    mean = (log_p.exp() * log_p).sum(-1)
    variance = (log_p.exp() * log_p.square()).sum(-1) - mean.square()
    z = (drawn - mean).sum(0) / variance.sum(0).sqrt()
    assert z.abs().max() < 4.5, z


@pytest.mark.slow
def test_an_answer_never_outgrows_a_training_sequence(actor):
    (prompt,) = sequences((250,))
    (answer,) = actor.answer([prompt], ["a"], AnswerConfig(temperature=1.0, max_tokens=100))
    assert len(answer.token_ids) <= 6


def test_seeds_are_stable_and_distinct():
    assert answer_seed(0, "a") == answer_seed(0, "a")
    assert len({answer_seed(seed, key) for seed in range(3) for key in "abc"}) == 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_length": 3}, "max_length=3"),
        ({"num_actors": 2, "max_actors": 1}, "num_actors=2, max_actors=1"),
        ({"tensor_parallel_size": 2}, "needs capture.gpus_per_actor"),
        ({"batch_size": 0}, "capture.batch_size must be positive, got 0"),
        ({"max_num_seqs": 0}, "capture.max_num_seqs must be positive"),
        ({"kv_cache_bytes": -1}, "capture.kv_cache_bytes must be positive"),
        ({"slice_bytes": 0}, "capture.slice_bytes must be positive"),
        ({"cpus_per_actor": -1}, "capture.cpus_per_actor must be positive"),
        ({"gpu_memory_utilization": 7}, "gpu_memory_utilization=7"),
        ({"gpus_per_actor": -1}, "gpus_per_actor=-1"),
    ],
)
def test_impossible_settings_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        CaptureConfig(**values)


def test_an_untested_vllm_is_refused(monkeypatch):
    import vllm

    hidden_states.check_version()
    monkeypatch.setattr(vllm, "__version__", "0.31.1")
    with pytest.raises(ValueError, match=r"vLLM 0\.31\.1 .* knows 0\.26\.0 and 0\.32\.0 only"):
        hidden_states.check_version()


@pytest.mark.parametrize("layer_ids", [(3, 1), (1, 1), ()])
def test_layer_ids_that_vllm_would_reorder_or_break_on_are_refused(layer_ids, tmp_path):
    with pytest.raises(ValueError, match="distinct and ascending"):
        hidden_states.engine_arguments(layer_ids, tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_card(tmp_path):
    """The CUDA path, with one engine start: values, layers, hand-over, answers. bfloat16 against float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 14, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=2048, tie_word_embeddings=True, **shape, **heads))
    model.bfloat16().save_pretrained(tmp_path)
    reference = model.float()
    config = CaptureConfig(max_length=512, gpus_per_actor=1, gpu_memory_utilization=0.3)
    actor = TargetActor(str(tmp_path), LAYERS, config)
    asked = sequences((1, 2, 15, 16, 17, 40, 128, 5, 255, 511))
    actor.capture(asked[-1:])
    for sequence, states_SLD in zip(asked, actor.capture(asked), strict=True):
        expected_SLD = taps(reference, sequence)
        assert states_SLD.shape == expected_SLD.shape
        assert states_SLD.dtype == torch.bfloat16
        assert distance(states_SLD.float(), expected_SLD) < 0.05  # 0.031 on an H100 with FlashAttention 3
        assert distance(expected_SLD.roll(1, dims=1), expected_SLD) > 0.1
    (packed,) = actor.stream([asked], torch.bfloat16)
    assert packed.wait() == [True] * len(asked)
    assert torch.equal(packed.values_TLD, torch.cat(actor.capture(asked)))
    check_distribution(actor, reference, 1.0)


def distance(found_SLD: torch.Tensor, expected_SLD: torch.Tensor) -> float:
    """Largest relative error over tokens and layers."""
    return float(((found_SLD - expected_SLD).norm(dim=-1) / expected_SLD.norm(dim=-1)).max())
