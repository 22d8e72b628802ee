"""The whole drafter against the published implementation's numbers, and the published ways of getting it wrong."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from domino_core import blocks
from domino_core.block_attention import FlexAttention, RowAttention
from domino_core.blocks import pack
from domino_core.checkpoint import load_drafter, read_config
from domino_core.drafter import Drafter
from tests.packing import packed

GAMMA = 4.0
CASES = [f"shift{shift}_p{prefix}" for shift in (0, 1) for prefix in (0, 1, 2)]


@pytest.fixture(scope="module")
def vocabulary(reference_dir):
    target = load_file(reference_dir / "target" / "model.safetensors")
    return target["model.embed_tokens.weight"], target["lm_head.weight"]


@pytest.fixture(scope="module")
def inputs(reference_dir):
    tensors = load_file(reference_dir / "inputs.safetensors")
    return {
        "input_ids_BS": tensors["input_ids"],
        "loss_mask_BS": tensors["loss_mask"],
        "features_BSC": tensors["features"],
        "anchors_BN": tensors["anchors"],
        "keep_BN": tensors["anchor_keep"].bool(),
    }


@pytest.fixture(params=CASES)
def drafter(request, reference_dir, vocabulary):
    return load_drafter(reference_dir / f"draft_{request.param}", *vocabulary)


def norm_of(parameters):
    return torch.stack([parameter.grad.norm() for parameter in parameters]).norm().item()


def gradients_of(drafter):
    return [parameter.grad.clone() for parameter in drafter.parameters()]


def losses_of(drafter, inputs, base_weight=0.5, **settings):
    return drafter(packed(**inputs), GAMMA, base_weight, **settings)


def hidden(drafter, inputs):
    rows = packed(**inputs)
    return drafter.block_hidden(rows, RowAttention(rows, drafter.config.block_size))


def final_logits(drafter, inputs):
    """Base and final, [blocks, Q, V]."""
    return drafter.logits(
        drafter.predicting(hidden(drafter, inputs)), blocks.gru_inputs(packed(**inputs), drafter.config)
    )


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_logits_equal_the_published_implementation(case, reference_dir, vocabulary, inputs):
    folder = reference_dir / f"draft_{case}"
    drafter, expected = load_drafter(folder, *vocabulary), load_file(folder / "expected.safetensors")
    keep, slot = inputs["keep_BN"], drafter.config.first_predicting_slot
    with torch.inference_mode():
        z = hidden(drafter, inputs)
        base, final = final_logits(drafter, inputs)
        close(z, expected["hidden"][keep])
        close(drafter.base_logits(z), expected["base_logits"][keep])
    close(base, expected["base_logits"][keep][:, slot:])
    close(final, expected["final_logits"][keep][:, slot:])


@pytest.mark.parametrize("base_weight", ["1.0", "0.5", "0.0"])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_the_published_implementation(case, base_weight, reference_dir, vocabulary, inputs):
    expected = json.loads((reference_dir / "expected.json").read_text())["cases"][case][base_weight]
    drafter = load_drafter(reference_dir / f"draft_{case}", *vocabulary).train()
    losses = losses_of(drafter, inputs, float(base_weight), chunk_blocks=4)
    loss = losses.objective(losses.weight_sum)
    loss.backward()
    got = {
        "loss": loss.item(),
        "final_loss": (losses.final_sum / losses.weight_sum).item(),
        "base_loss": (losses.base_sum / losses.weight_sum).item(),
        "accept_len": (losses.accepted_final_sum / losses.num_blocks).item(),
        "base_accept_len": (losses.accepted_base_sum / losses.num_blocks).item(),
        "accuracy": (losses.correct_final_sum / losses.num_labels).item(),
        "grad_norm": norm_of(drafter.parameters()),
        "grad_norm_fc": norm_of([drafter.backbone.fc.weight]),
        "grad_norm_gru_hh": norm_of([drafter.get_parameter("head.prefix_gru.weight_hh_l0")]),
        "grad_norm_embed_proj_0": norm_of([drafter.get_parameter("head.embed_proj.0.weight")]),
    }
    assert got == pytest.approx(expected, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("base_weight", [0.0, 0.5, 1.0])
def test_every_parameter_has_a_gradient_at_any_base_weight(drafter, inputs, base_weight):
    """DDP calls a parameter without one unused. At λ = 1 the head's is zero, otherwise it is not."""
    losses = losses_of(drafter, inputs, base_weight)
    losses.objective(losses.weight_sum).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert bool(parameter.grad.any()) == (base_weight < 1.0 or name.startswith("backbone.")), name


def test_rows_do_not_meet(drafter, inputs):
    """Losses and gradients of rows laid end to end are the sums of each one's; a row without blocks adds none."""

    def gradients(case):
        drafter.zero_grad()
        losses = losses_of(drafter, case)
        losses.mixed_sum.backward()
        return losses, gradients_of(drafter)

    both, got = gradients(inputs)
    (first, expected), (second, more) = (
        gradients({name: tensor[row : row + 1] for name, tensor in inputs.items()}) for row in (0, 1)
    )
    for field, value in vars(first + second).items():
        close(getattr(both, field), value)
    close(got, [one + other for one, other in zip(expected, more, strict=True)])
    one_row = inputs["keep_BN"].clone()
    one_row[1] = False
    alone, got = gradients({**inputs, "keep_BN": one_row})
    close(alone.mixed_sum, first.mixed_sum)
    close(got, expected)
    _, got = gradients({**inputs, "keep_BN": torch.zeros_like(one_row)})
    assert not any(gradient.any() for gradient in got)


@pytest.mark.parametrize("changes", [{}, {"block_size": 5}, {"block_size": 3, "head": False}], ids=str)
def test_flex_attention_equals_its_twin(reference_dir, vocabulary, inputs, changes):
    """Tiles of 128 with many rows in one, rows over several, and blocks over the edge of a tile."""
    config = replace(read_config(reference_dir / "draft_shift1_p1"), **changes)
    torch.manual_seed(0)
    drafter = Drafter(config, *vocabulary)
    for parameter in drafter.parameters():
        parameter.data.normal_(0.0, 0.3)
    lengths, counts = [3, 150, 300, 40, 2], [1, 60, 70, 0, 2]
    rows = pack(
        torch.randint(200, (sum(lengths),)),
        torch.ones(sum(lengths), dtype=torch.bool),
        torch.randn(sum(lengths), config.feature_width),
        lengths,
        [torch.randperm(length)[:count].sort().values for length, count in zip(lengths, counts, strict=True)],
    )
    flex, by_row = FlexAttention(rows, config.block_size), RowAttention(rows, config.block_size)
    # conftest.py turns torch.compile off on a CPU, and flex attention is traced by it.
    with torch.inference_mode(), torch._dynamo.config.patch(disable=False):
        close(drafter.block_hidden(rows, flex), drafter.block_hidden(rows, by_row))


def test_no_logit_sees_its_own_label(drafter, inputs):
    """Draft i is token a+1+i: it may depend on tokens up to a+i (through the head) and on features up to a-1 only."""
    config, ids = drafter.config, inputs["input_ids_BS"][:1]
    anchor = 12
    block = {"anchors_BN": torch.tensor([[anchor]]), "keep_BN": torch.tensor([[True]])}
    case = {**{name: tensor[:1] for name, tensor in inputs.items()}, **block}
    with torch.inference_mode():
        base, final = final_logits(drafter, case)
        for position in range(anchor, anchor + config.num_drafts + 1):
            changed = ids.clone()
            changed[0, position] = (changed[0, position] + 1) % 200
            new_base, new_final = final_logits(drafter, {**case, "input_ids_BS": changed})
            base_moved = (new_base != base).any(-1)[0].tolist()
            assert base_moved == [position == anchor] * config.num_drafts  # masks hide all tokens but the anchor
            first_moved = max(position - anchor, config.pure_draft_prefix_len if position > anchor else 0)
            assert (new_final != final).any(-1)[0].tolist() == [i >= first_moved for i in range(config.num_drafts)]
        later = case["features_BSC"].clone()
        later[:, anchor:] += 1.0
        assert torch.equal(final_logits(drafter, {**case, "features_BSC": later})[1], final)


def test_drafting_from_the_cache_equals_teacher_forcing(drafter, inputs):
    """Blocks at different positions in one batch of rows, the head running step by step on the data's tokens."""
    config, ids, features = drafter.config, inputs["input_ids_BS"], inputs["features_BSC"]
    starts = torch.tensor([17, 6])
    with torch.inference_mode():
        case = {**inputs, "anchors_BN": starts[:, None], "keep_BN": torch.ones(2, 1, dtype=torch.bool)}
        expected_base, expected_final = final_logits(drafter, case)
        cache = drafter.new_cache(4, 20).view(2)
        drafter.extend_context(cache, features[:, :17], torch.arange(17).expand(2, -1))
        anchors = ids.gather(1, starts[:, None])[:, 0]
        z = drafter.draft_hidden(cache, anchors, starts)
        close(z, drafter.predicting(hidden(drafter, case)))
        base = drafter.base_logits(z)
        close(base, expected_base)
        state = drafter.head.initial_state(2)
        for draft in range(config.num_drafts):
            tokens = ids.gather(1, starts[:, None] + draft)[:, 0]
            state = drafter.head.advance(drafter.embed(tokens), state)
            logits = base[:, draft]
            if draft >= config.pure_draft_prefix_len:
                logits = logits + drafter.head.correction(z[:, draft], state)
            close(logits, expected_final[:, draft])


@pytest.mark.parametrize("shift_label", [True, False])
def test_plain_dflash_drafter(reference_dir, vocabulary, inputs, shift_label):
    config = replace(read_config(reference_dir / "draft_shift1_p1"), head=False, shift_label=shift_label)
    torch.manual_seed(0)
    drafter = Drafter(config, *vocabulary)
    assert drafter.head is None
    losses = losses_of(drafter, inputs, 1.0)
    assert torch.equal(losses.final_sum, losses.base_sum)
    losses.objective(losses.weight_sum).backward()
    expected = gradients_of(drafter)
    drafter.zero_grad()
    losses = losses_of(drafter, inputs, 0.25)
    losses.objective(losses.weight_sum).backward()
    close(gradients_of(drafter), expected)
    cache = drafter.new_cache(2, 10)
    with torch.inference_mode():
        drafter.extend_context(cache, inputs["features_BSC"][:, :10], torch.arange(10).expand(2, -1))
        z = drafter.draft_hidden(cache, torch.tensor([1, 2]), torch.tensor([10, 9]))
    assert z.shape == (2, config.num_drafts, config.hidden_size)


def test_vocabulary_is_shared_frozen_and_not_saved(reference_dir, vocabulary):
    config = read_config(reference_dir / "draft_shift1_p1")
    embed, lm_head = nn.Parameter(vocabulary[0].clone()), vocabulary[1]
    drafter = Drafter(config, embed, lm_head)
    assert drafter.embed_VD.data_ptr() == embed.data_ptr()
    assert drafter.lm_head_VD.data_ptr() == lm_head.data_ptr()
    assert not drafter.embed_VD.requires_grad
    assert all(name.startswith(("backbone.", "head.")) for name, _ in drafter.named_parameters())
    assert set(drafter.state_dict()) == {name for name, _ in drafter.named_parameters()}


def test_vocabulary_of_another_target_is_refused(reference_dir, vocabulary):
    config = read_config(reference_dir / "draft_shift1_p1")
    with pytest.raises(ValueError, match=r"embedding table is \[200, 64\]"):
        Drafter(config, vocabulary[0][:200], vocabulary[1])
    with pytest.raises(ValueError, match=r"output matrix is \[257, 32\]"):
        Drafter(config, vocabulary[0], vocabulary[1][:, :32])


def test_initialisation(reference_dir, vocabulary):
    config = replace(read_config(reference_dir / "draft_shift1_p1"), initializer_range=0.02)
    torch.manual_seed(0)
    drafter = Drafter(config, *vocabulary)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
        elif "prefix_gru" in name:  # uniform(±1/sqrt(G))
            assert parameter.std().item() == pytest.approx(32**-0.5 / 3**0.5, rel=0.1), name
        else:  # the head's last layer as well: zero would be another method
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name


@pytest.mark.parametrize(
    ("own", "vocabulary_s", "autocast"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, False),
    ],
)
def test_bfloat16_stays_close(reference_dir, vocabulary, inputs, own, vocabulary_s, autocast):
    """Mixed types as they occur: float32 masters under autocast, and drafters in another type than their target."""
    folder = reference_dir / "draft_shift1_p1"
    expected = losses_of(load_drafter(folder, *vocabulary), inputs)
    drafter = load_drafter(folder, *(tensor.to(vocabulary_s) for tensor in vocabulary), dtype=own)
    features = inputs["features_BSC"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = losses_of(drafter, {**inputs, "features_BSC": features}, chunk_blocks=4)
    assert losses.final_sum.dtype == torch.float32
    losses.objective(losses.weight_sum).backward()
    assert all(gradient.isfinite().all() for gradient in gradients_of(drafter))
    assert losses.final_sum.item() == pytest.approx(expected.final_sum.item(), rel=0.01)
    with torch.inference_mode():
        cache = drafter.new_cache(2, 10)
        drafter.extend_context(cache, features[:, :10], torch.arange(10).expand(2, -1))
        z = drafter.draft_hidden(cache, torch.tensor([1, 2]), torch.tensor([10, 9]))
        assert drafter.head is not None
        state = drafter.head.advance(drafter.embed(torch.tensor([3, 4])), drafter.head.initial_state(2))
        logits = drafter.base_logits(z[:, 1]) + drafter.head.correction(z[:, 1], state)
    assert z.dtype == own
    assert logits.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_on_a_card_as_on_the_cpu(drafter, vocabulary, inputs, autocast, compiled):
    """Fused GRU, attention, norm and loss kernels: losses, gradients, and drafting from the cache."""
    on_cpu = drafter.train()
    losses = losses_of(on_cpu, inputs)
    losses.objective(losses.weight_sum).backward()
    card = Drafter(on_cpu.config, *(tensor.cuda() for tensor in vocabulary)).cuda()
    card.load_state_dict(on_cpu.state_dict())
    case = {name: tensor.cuda() for name, tensor in inputs.items()}
    attention = None
    if compiled:
        card.backbone.compile_layers()
        attention = FlexAttention(packed(**case), card.config.block_size)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        on_card = losses_of(card, case, chunk_blocks=4, attention=attention)
    on_card.objective(on_card.weight_sum).backward()
    assert on_card.final_sum.item() == pytest.approx(losses.final_sum.item(), rel=0.02 if autocast else 1e-4)
    assert norm_of(card.parameters()) == pytest.approx(norm_of(on_cpu.parameters()), rel=0.05 if autocast else 1e-3)
    if autocast:
        return
    starts = torch.tensor([17, 6])
    with torch.inference_mode():
        expected = card.predicting(
            hidden(card, {**case, "anchors_BN": starts[:, None].cuda(), "keep_BN": case["keep_BN"][:, :1]})
        )
        cache = card.new_cache(2, 20)
        positions = torch.arange(17, device="cuda").expand(2, -1)
        card.extend_context(cache, case["features_BSC"][:, :17], positions)
        anchors = case["input_ids_BS"].gather(1, starts[:, None].cuda())[:, 0]
        z = card.draft_hidden(cache, anchors, starts.cuda())
    torch.testing.assert_close(z, expected, atol=1e-3, rtol=1e-3)
