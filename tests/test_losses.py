"""Losses against plain formulas; chunks against the whole."""

import math

import pytest
import torch
from torch.nn import functional as F

from domino_core.losses import block_losses, chunk_losses, mix

X, Q, D, V = 7, 4, 6, 11


@pytest.fixture
def case():
    torch.manual_seed(0)
    base, delta, embed = torch.randn(V, D), torch.randn(V, D, requires_grad=True), torch.randn(V, D)

    def logits_of(z, ids):
        out = z @ base.T
        return out, out + (z * embed[ids]) @ delta.T

    z = torch.randn(X, Q, D, requires_grad=True)
    weights = torch.exp(-torch.arange(Q) / 3.0) * (torch.rand(X, Q) < 0.7)
    weights[2] = 0.0
    return logits_of, z, torch.randint(V, (X, Q)), torch.randint(V, (X, Q)), weights, delta


@pytest.mark.parametrize("chunk_blocks", [1, 3, 6, 7, 100])
@pytest.mark.parametrize("base_weight", [0.0, 0.5, 1.0])
def test_chunks_equal_the_whole_in_value_and_gradient(case, chunk_blocks, base_weight):
    logits_of, z, ids, labels, weights, delta = case
    whole = chunk_losses(logits_of, z, ids, labels, weights)
    expected = torch.autograd.grad(mix(whole, base_weight, 3.0), (z, delta))
    parts = block_losses(logits_of, z, ids, labels, weights, chunk_blocks)
    got = torch.autograd.grad(mix(parts, base_weight, 3.0), (z, delta))
    for field, value in vars(whole).items():
        torch.testing.assert_close(getattr(parts, field), value)
        assert getattr(parts, field).ndim == 0
    torch.testing.assert_close(got, expected)


def test_chunks_do_not_keep_their_logits(case):
    """What a chunk saves for the backward pass is its inputs, not [blocks, Q, V]."""
    logits_of, z, ids, labels, weights, _ = case
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.shape), t)[1], lambda t: t):
        block_losses(logits_of, z, ids, labels, weights, 3)
    assert not [shape for shape in saved if shape[-1:] == (V,) and shape.numel() >= Q * V]


def test_sums_counts_and_accepted_lengths_by_hand():
    labels = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    weights = torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.5, 0.0], [0.0, 0.0, 0.0]])

    def says(tokens):
        return 20.0 * F.one_hot(torch.tensor(tokens), 10).float()

    base, final = says([[1, 2, 0], [0, 5, 6], [7, 8, 9]]), says([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    losses = chunk_losses(lambda z, ids: (base, final), torch.zeros(3, 3, 1), labels, labels, weights)
    wrong, right = math.log(math.exp(20) + 9), math.log(1 + 9 * math.exp(-20))
    assert losses.final_sum.item() == pytest.approx(3.25 * right, abs=1e-5)
    assert losses.base_sum.item() == pytest.approx(1.25 * wrong + 2 * right, rel=1e-5)
    assert losses.weight_sum.item() == 3.25
    assert (losses.correct_final_sum.item(), losses.correct_base_sum.item(), losses.num_labels.item()) == (5, 3, 5)
    # Block 0: 3 and 2 right at the start, block 1: 2 and 0 (the unlabelled third is not counted), block 2 has no label.
    assert losses.accepted_final_sum.item() == (1 + 3) + (1 + 2)
    assert losses.accepted_base_sum.item() == (1 + 2) + (1 + 0)
    assert losses.num_blocks.item() == 2


def test_the_loss_is_divided_by_the_sum_of_weights(case):
    """Scaling all weights, as another gamma would on average, changes nothing: the learning rate keeps its meaning."""
    logits_of, z, ids, labels, weights, _ = case
    one = chunk_losses(logits_of, z, ids, labels, weights)
    half = chunk_losses(logits_of, z, ids, labels, 0.5 * weights)
    torch.testing.assert_close(mix(one, 0.3, one.weight_sum), mix(half, 0.3, half.weight_sum))
    base, final = one.base_sum / one.weight_sum, one.final_sum / one.weight_sum
    torch.testing.assert_close(mix(one, 0.3, one.weight_sum), 0.3 * base + 0.7 * final)


def test_no_label_at_all_is_a_zero_loss_with_zero_gradients(case):
    logits_of, z, ids, labels, weights, delta = case
    losses = block_losses(logits_of, z, ids, labels, torch.zeros_like(weights), 3)
    loss = mix(losses, 0.5, losses.weight_sum)
    gradients = torch.autograd.grad(loss, (z, delta))
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in gradients)


def test_cross_entropy_is_float32_for_bfloat16_logits():
    torch.manual_seed(0)
    logits = torch.randn(1, 1, 5000).bfloat16()
    label = torch.tensor([[7]])
    losses = chunk_losses(lambda z, ids: (logits, logits), torch.zeros(1, 1, 1), label, label, torch.ones(1, 1))
    assert losses.base_sum.dtype == torch.float32
    torch.testing.assert_close(losses.base_sum, F.cross_entropy(logits[0].float(), label[0]))
