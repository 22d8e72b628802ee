"""Rounds of draft, verify and accept: output is the target's own, whatever is drafted."""

import json
from dataclasses import replace

import pytest
import torch

from domino_core.checkpoint import load_drafter
from domino_core.config import DrafterConfig
from domino_core.decode import Acceptance, RoundShape, draft_block, speculative_round
from domino_core.decode_state import DecodeState, pass_length, prefill
from domino_core.drafter import Drafter
from domino_core.sampling import RowSampling, draft_noise, gumbel_noise, processed_logits, target_noise
from domino_core.sampling_params import SamplingParams
from domino_core.target import load_target
from tests.scripted import ScriptedDrafter

CASES = [f"draft_shift{shift}_p{prefix}" for shift in (0, 1) for prefix in (0, 1, 2)]
GREEDY = SamplingParams()
PROMPTS = [[8, 42, 227, 149, 23, 50, 94], [3], [250, 7, 7, 1, 90, 12, 33, 61, 200, 5, 5, 5, 19], [100, 101]]
SETTINGS = [
    SamplingParams(temperature=1.0, seed=11),
    GREEDY,
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=-5),
    SamplingParams(temperature=1.3, top_p=0.8, seed=11),
]


@pytest.fixture(scope="module")
def target(reference_dir):
    return load_target(reference_dir / "target")


@pytest.fixture(scope="module")
def drafters(target, reference_dir):
    return {case: load_drafter(reference_dir / case, target.embed_VD, target.lm_head_VD) for case in CASES}


def run(target, drafter, prompts, settings, count, num_verify=None):
    """Decode all prompts as one batch until each has `count` tokens: (tokens, accepted drafts per round, state)."""
    rows = len(prompts)
    state = DecodeState.allocate(target, drafter, rows, max(map(len, prompts)) + 2 * count + 20)
    outputs = [
        [prefill(target, drafter, state, row, prompt, RowSampling.stack([params]))[0]]
        for row, (prompt, params) in enumerate(zip(prompts, settings, strict=True))
    ]
    sampling, accepted, index = RowSampling.stack(settings), [[] for _ in prompts], 0
    while min(map(len, outputs)) < count:
        verified = num_verify[index % len(num_verify)] if isinstance(num_verify, list) else num_verify
        index += 1
        result = speculative_round(target, drafter, state, sampling, rows, verified)
        for output, counts, tokens in zip(outputs, accepted, result.tokens, strict=True):
            output += tokens
            counts.append(len(tokens) - 1)
        assert state.length_B.tolist() == state.lengths
        assert state.lengths == [len(p) + len(o) - 1 for p, o in zip(prompts, outputs, strict=True)]
        assert state.drawn_B.tolist() == [len(output) for output in outputs]
        assert state.anchor_B.tolist() == [output[-1] for output in outputs]
    return outputs, accepted, state


def context(state):
    assert state.draft_cache is not None
    return state.draft_cache


@pytest.mark.parametrize("case", [None, *CASES])
def test_greedy_continuation_of_the_reference_with_every_drafter(target, drafters, reference_dir, case):
    expected = json.loads((reference_dir / "expected.json").read_text())
    prompt, text = expected["greedy_prompt"], expected["greedy_output"]
    count = len(text) - len(prompt)
    outputs, _, _ = run(target, drafters.get(case), [prompt], [GREEDY], count)
    assert prompt + outputs[0][:count] == text


@torch.inference_mode()
def test_the_token_at_output_position_i_is_drawn_with_the_noise_of_seed_and_i(target):
    """The rule that makes a seed's output a fact: every token from one pass over the finished text, no decoding."""
    outputs, _, _ = run(target, None, PROMPTS, SETTINGS, 25)
    for prompt, params, output in zip(PROMPTS, SETTINGS, outputs, strict=True):
        text = torch.tensor([[*prompt, *output[:-1]]])
        hidden, _ = target.forward(text, torch.zeros(1, dtype=torch.int64), target.new_cache(1, text.shape[1]))
        logits = target.logits(hidden[:, len(prompt) - 1 :])
        if not params.greedy:
            noise = gumbel_noise(torch.tensor([[params.seed]]), torch.arange(len(output))[None], 257)
            logits = processed_logits(logits, RowSampling.stack([params])) + noise
        assert logits.argmax(-1)[0].tolist() == output


@pytest.mark.parametrize("settings", [[GREEDY] * 4, SETTINGS], ids=["greedy", "mixed"])
@pytest.mark.parametrize("num_verify", [None, 0, 3, [5, 0, 2, 1]], ids=str)
def test_scripted_drafts_are_accepted_up_to_their_error_and_change_nothing(target, settings, num_verify):
    count, num_drafts = 40, 5
    plain, _, _ = run(target, None, PROMPTS, settings, 2 * count + 20)
    # Every row errs at every position 0..Q in turn (Q: not at all), each row at another one than the others.
    drafter = ScriptedDrafter(target, list(zip(PROMPTS, plain, strict=True)), lambda text, block: (text + block) % 6)
    outputs, accepted, _ = run(target, drafter, PROMPTS, settings, count, num_verify)
    for row, output in enumerate(outputs):
        assert output == plain[row][: len(output)]
    pattern = num_verify if isinstance(num_verify, list) else [num_drafts if num_verify is None else num_verify]
    limits = [pattern[index % len(pattern)] for index in range(len(accepted[0]))]
    for row, counts in enumerate(accepted):
        errors = iter(drafter.errors[row])
        assert counts == [min(next(errors), limit) if limit else 0 for limit in limits]
    if num_verify is None:
        assert {error for errors in drafter.errors for error in errors} == set(range(num_drafts + 1))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_verify", [None, 1])
def test_sampled_batches_with_real_drafters_equal_plain_rows_alone(target, drafters, case, num_verify):
    together, _, _ = run(target, drafters[case], PROMPTS, SETTINGS, 16, num_verify)
    for prompt, params, output in zip(PROMPTS, SETTINGS, together, strict=True):
        alone, _, _ = run(target, None, [prompt], [params], len(output))
        assert output == alone[0]


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("settings", [[GREEDY] * 4, SETTINGS], ids=["greedy", "mixed"])
def test_drafts_are_draws_from_the_teacher_forced_distribution(target, drafters, case, settings):
    """Drafts fed back through the training path: each must be the argmax of its logits with its position's noise."""
    drafter = drafters[case]
    _, _, state = run(target, drafter, PROMPTS, settings, 4)
    sampling, num_drafts = RowSampling.stack(settings), drafter.config.num_drafts
    positions = state.drawn_B[:, None] + torch.arange(num_drafts + 1)
    noise = target_noise(sampling, positions, 257)
    noise = None if noise is None else draft_noise(sampling, positions[:, :-1], noise[:, :-1])
    round_shape = lambda count: RoundShape(4, count, max(state.lengths) + count + 1)  # noqa: E731
    drafts, _ = draft_block(drafter, state, sampling, noise, round_shape(num_drafts))
    z = drafter.draft_hidden(context(state).view(4), state.anchor_B, state.length_B)
    inputs = torch.cat((state.anchor_B[:, None], drafts[:, :-1]), dim=1)
    base, final = drafter.logits(z, inputs)
    noise = torch.zeros(4, num_drafts, 257) if noise is None else noise
    assert torch.equal(drafts, (processed_logits(final, sampling) + noise).argmax(-1))
    assert not torch.equal(drafts, (processed_logits(base, sampling) + noise).argmax(-1))
    # Fewer drafts are the beginning of all of them.
    for count in (1, 2, 3):
        assert torch.equal(draft_block(drafter, state, sampling, noise, round_shape(count))[0], drafts[:, :count])


@torch.inference_mode()
def test_draft_context_holds_every_token_before_the_anchor_and_nothing_else_counts(target, drafters):
    drafter = drafters["draft_shift1_p1"]
    outputs, _, state = run(target, drafter, PROMPTS, SETTINGS, 9, [7, 0, 2])
    assert state.lengths == state.length_B.tolist()
    for row, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        text = torch.tensor([[*prompt, *output]])[:, : state.lengths[row]]
        zero = torch.zeros(1, dtype=torch.int64)
        layers = drafter.config.target_layer_ids
        _, features = target.forward(text, zero, target.new_cache(1, text.shape[1]), layers)
        fresh = drafter.new_cache(1, text.shape[1])
        drafter.extend_context(fresh, features, torch.arange(text.shape[1])[None])
        kept = slice(0, state.lengths[row])
        torch.testing.assert_close(context(state).k[:, row, kept], fresh.k[:, 0, kept], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(context(state).v[:, row, kept], fresh.v[:, 0, kept], rtol=1e-3, atol=1e-4)
        # Garbage where nothing counts, the anchor's own position included, must not reach the next block.
        context(state).k[:, row, state.lengths[row] :] = 1e3
        z = drafter.draft_hidden(fresh, state.anchor_B[row : row + 1], state.length_B[row : row + 1])
        dirty = drafter.draft_hidden(
            context(state).row(row), state.anchor_B[row : row + 1], state.length_B[row : row + 1]
        )
        torch.testing.assert_close(z, dirty, rtol=1e-3, atol=1e-3)


def test_long_prompts_are_prefilled_in_chunks_like_short_ones(target, drafters, monkeypatch):
    drafter, prompt = drafters["draft_shift0_p1"], list(range(1, 60))
    whole, _, state = run(target, drafter, [prompt], [GREEDY], 8)
    monkeypatch.setattr("domino_core.decode_state.PREFILL_CHUNK", 7)
    chunked, _, other = run(target, drafter, [prompt], [GREEDY], 8)
    assert whole == chunked
    torch.testing.assert_close(context(state).k[:, :, :60], context(other).k[:, :, :60], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_a_prompt_that_is_filled_up_like_on_a_card_is_the_same_prompt(target, drafters, monkeypatch, length):
    drafter, prompt = drafters["draft_shift1_p1"], list(range(2, 2 + length))
    exact, accepted, state = run(target, drafter, [prompt], [GREEDY], 12)
    monkeypatch.setattr("domino_core.decode_state.on_card", lambda tensor: True)
    filled, as_many, other = run(target, drafter, [prompt], [GREEDY], 12)
    assert (filled, as_many) == (exact, accepted)
    torch.testing.assert_close(context(state).k[:, :, :length], context(other).k[:, :, :length], rtol=1e-3, atol=1e-4)


def test_what_fills_a_pass_up_is_of_its_kind_and_inside_the_text():
    assert [pass_length(n, 0, 600) for n in (1, 16, 17, 65, 127, 128, 129, 500, 512)] == [
        *(16, 16, 32, 127, 127, 128, 192, 512, 512)
    ]
    assert pass_length(100, 512, 600) == 100  # a text of 600 tokens has no room behind it
    assert pass_length(60, 512, 600) == 64


def test_a_generated_mask_token_survives(target):
    """The reference loop strips ids equal to the mask; the target may well say that token."""
    plain, _, _ = run(target, None, [PROMPTS[0]], [GREEDY], 20)
    config = DrafterConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_target_layers=8,
        target_layer_ids=(2,),
        mask_token_id=plain[0][5],
        block_size=4,
        emb_dim=4,
        gru_hidden_dim=4,
    )
    torch.manual_seed(0)
    outputs, _, _ = run(target, Drafter(config, target.embed_VD, target.lm_head_VD), [PROMPTS[0]], [GREEDY], 20)
    assert outputs[0][:20] == plain[0][:20]


ASKING = [
    SamplingParams(temperature=0.9, seed=3, presence_penalty=0.8, frequency_penalty=0.4),
    SamplingParams(repetition_penalty=1.7, logit_bias=((9, 4.0), (42, -100.0))),
    SamplingParams(temperature=1.1, min_p=0.05, seed=3, logit_bias=((0, -1.5),)),
    SamplingParams(temperature=0.8, top_k=30, seed=8, repetition_penalty=0.7, frequency_penalty=-0.5),
]


@torch.inference_mode()
def plain_by_hand(target, prompt, params, count):
    """A request's output, from one pass over the whole text per token, with bias and penalties in plain Python."""
    text, output = list(prompt), []
    for position in range(count):
        ids = torch.tensor([text])
        hidden, _ = target.forward(ids, torch.zeros(1, dtype=torch.int64), target.new_cache(1, len(text)))
        logits = target.logits(hidden[:, -1:])[0, 0].tolist()
        for token, value in params.logit_bias:
            logits[token] += value
        for token in set(text):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(output):
            logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        scores = processed_logits(torch.tensor([[logits]]), RowSampling.stack([params]))
        if not params.greedy:
            scores = scores + gumbel_noise(torch.tensor([[params.seed]]), torch.tensor([[position]]), 257)
        output.append(int(scores.argmax()))
        text.append(output[-1])
    return output


@pytest.mark.parametrize("rule", ["shared_noise", "greedy_draft"])
@pytest.mark.parametrize("case", [None, *CASES])
def test_bias_and_penalties_are_exact_at_every_slot(target, drafters, case, rule):
    settings = [replace(params, rule=rule) for params in ASKING]
    outputs, _, _ = run(target, drafters.get(case), PROMPTS, settings, 12)
    for prompt, params, output in zip(PROMPTS, settings, outputs, strict=True):
        assert output[:12] == plain_by_hand(target, prompt, params, 12)
        assert output[:12] != plain_by_hand(target, prompt, SamplingParams(temperature=params.temperature), 12)


@pytest.mark.parametrize("asking", [ASKING, [replace(params, rule="greedy_draft") for params in SETTINGS]])
def test_accepted_drafts_are_counted_by_penalties_and_any_rule_accepts_the_right_ones(target, asking):
    plain, _, _ = run(target, None, PROMPTS, asking, 80)
    drafter = ScriptedDrafter(target, list(zip(PROMPTS, plain, strict=True)), lambda text, block: (text + block) % 6)
    # A scripted logit leads by far more than any penalty takes.
    outputs, accepted, state = run(target, drafter, PROMPTS, asking, 40)
    for row, output in enumerate(outputs):
        assert output == plain[row][: len(output)]
        assert accepted[row] == drafter.errors[row][: len(accepted[row])]
        if asking[row].penalised:
            assert state.counts is not None
            assert state.counts.output_BV[row].tolist() == torch.tensor(output).bincount(minlength=257).tolist()


@pytest.mark.parametrize("case", CASES)
def test_rows_of_every_rule_share_a_batch(target, drafters, case):
    """The rejection row is in a batch what it is alone, and leaves its neighbours as they are."""
    settings = [SETTINGS[0], replace(ASKING[0], rule="rejection"), ASKING[2], replace(SETTINGS[3], rule="greedy_draft")]
    together, _, _ = run(target, drafters[case], PROMPTS, settings, 20)
    for row, (prompt, params) in enumerate(zip(PROMPTS, settings, strict=True)):
        drafter = drafters[case] if params.rule == "rejection" else None
        alone, _, _ = run(target, drafter, [prompt], [params], 20)
        count = min(len(together[row]), len(alone[0]))
        assert together[row][:count] == alone[0][:count]


def test_rejection_without_drafts_is_plain_decoding(target, drafters):
    settings = [replace(params, rule="rejection") for params in SETTINGS]
    plain, _, _ = run(target, None, PROMPTS, SETTINGS, 20)
    outputs, _, _ = run(target, drafters[CASES[0]], PROMPTS, settings, 20, num_verify=0)
    assert outputs == plain


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_rounding_does_not_choose_between_near_ties(target, drafters, monkeypatch, temperature):
    """A bias makes two tokens tie somewhere; passes wider than one token are given the rounding errors of a bad day."""
    cases = []
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=temperature, seed=index)
        plain = run(target, None, [prompt], [params], 4)[0][0]
        for place in range(1, 4):
            ids = torch.tensor([[*prompt, *plain[:place]]])
            hidden, _ = target.forward(ids, torch.zeros(1, dtype=torch.int64), target.new_cache(1, ids.shape[1]))
            scores = target.logits(hidden[:, -1])[0]
            if temperature:
                noise = gumbel_noise(torch.tensor(index), torch.tensor(place), 257)
                scores = scores + temperature * noise
            best, second = scores.topk(2).indices.tolist()
            gap = float(scores[best] - scores[second])
            cases += [(prompt, replace(params, logit_bias=((second, gap),)))]
    honest = target.logits

    def rounded(hidden):
        logits = honest(hidden)
        if hidden.shape[1] == 1:
            return logits
        return logits + 2e-5 * torch.sin(torch.arange(257) * 12.9898 + hidden.shape[1])

    def parted() -> int:
        different = 0
        for prompt, params in cases:
            plain = run(target, None, [prompt], [params], 6)[0][0]
            ours = run(target, drafters["draft_shift1_p1"], [prompt], [params], 6)[0][0]
            different += plain[:6] != ours[:6]
        return different

    monkeypatch.setattr(target, "logits", rounded)
    assert parted() == 0
    monkeypatch.setattr("domino_core.decode.TIE", 0.0)
    assert parted() > 0


@pytest.mark.parametrize("settings", [SETTINGS, ASKING], ids=["plain", "penalised"])
def test_moved_rows_go_on_as_if_they_had_stayed(target, drafters, settings):
    drafter = drafters["draft_shift1_p2"]
    plain, _, _ = run(target, None, PROMPTS, settings, 30)
    outputs, _, state = run(target, drafter, PROMPTS, settings, 6)
    state.move_row(3, 0)
    settings = [settings[3], *settings[1:3]]
    for _ in range(4):
        result = speculative_round(target, drafter, state, RowSampling.stack(settings), 3)
        for source, tokens in zip((3, 1, 2), result.tokens, strict=True):
            outputs[source] += tokens
    for source in (3, 1, 2):
        assert outputs[source] == plain[source][: len(outputs[source])]


def test_acceptance_counts_rounds_and_positions():
    counts = Acceptance()
    assert counts.tau == 1.0
    for accepted in (0, 3, 1):
        counts.count(drafted=3, accepted=accepted)
    assert counts.to_dict() == {"tau": 1 + 4 / 3, "rounds": 3, "drafted": 9, "accepted": 4, "accepted_at": [2, 1, 1]}
    other = Acceptance()
    other.count(drafted=5, accepted=5)
    snapshot = counts.copy()
    counts.merge(other)
    assert counts.accepted_at == [3, 2, 2, 1, 1]
    assert (counts.rounds, counts.drafted, counts.accepted) == (4, 14, 9)
    assert snapshot.accepted_at == [2, 1, 1]
    assert snapshot.rounds == 3
