"""Losses against plain formulas; chunks with gradients made on the spot against autograd over the whole."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from domino_core.losses import Drafts, acceptance_weights, block_losses, whole_losses

X, Q, D, R, V = 7, 4, 6, 3, 11


def random_case(head=True, kind=torch.float32, device="cpu", sizes=(X, Q, D, R, V)) -> Drafts:
    """Drafts of which z, low and the head's matrix want gradients."""
    X, Q, D, R, V = sizes
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(device, kind)  # noqa: E731
    weights = torch.exp(-torch.arange(Q) / 3.0) * (torch.rand(X, Q, generator=generator) < 0.7)
    weights[2] = 0.0
    return Drafts(
        z_XQD=normal(X, Q, D).requires_grad_(),
        low_XQR=normal(X, Q, R).requires_grad_() if head else None,
        lm_head_VD=normal(V, D),
        last_VR=normal(V, R).requires_grad_() if head else None,
        labels_XQ=torch.randint(V, (X, Q), generator=generator).to(device),
        weights_XQ=weights.to(device),
    )


@pytest.fixture(params=[True, False], ids=["head", "no head"])
def case(request):
    return random_case(request.param)


def with_soft_labels(case: Drafts, J=4) -> Drafts:
    """J different tokens a draft, unevenly shared."""
    generator = torch.Generator().manual_seed(1)
    shape, vocabulary = case.labels_XQ.shape, len(case.lm_head_VD)
    likely = torch.rand(*shape, vocabulary, generator=generator).topk(J).indices
    shares = torch.rand(*shape, J, generator=generator).softmax(-1)
    device = case.z_XQD.device
    return replace(case, likely_XQJ=likely.to(device), shares_XQJ=shares.to(device))


def gradients_of(loss, case: Drafts) -> list[torch.Tensor]:
    wanted = [each for each in (case.z_XQD, case.low_XQR, case.last_VR) if each is not None]
    return list(torch.autograd.grad(loss, wanted))


def assert_same(got, expected, tolerance=None):
    for field, value in vars(expected).items():
        torch.testing.assert_close(getattr(got, field), value, **(tolerance or {}))
        assert getattr(got, field).ndim == 0


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 27, 28, 100])
@pytest.mark.parametrize("base_weight", [0.0, 0.3, 1.0])
def test_chunks_equal_the_whole_in_value_and_gradient(case, chunk_tokens, base_weight):
    whole = whole_losses(case, base_weight)
    expected = gradients_of(whole.objective(3.0), case)
    parts = block_losses(case, base_weight, chunk_tokens)
    got = gradients_of(parts.objective(3.0), case)
    assert_same(parts, whole)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("chunk_tokens", [1, 9, 28])
@pytest.mark.parametrize("reach", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("soft", [True, False], ids=["soft labels", "hard labels"])
def test_chunks_equal_the_whole_under_every_option(case, chunk_tokens, reach, soft):
    case = with_soft_labels(case) if soft else case
    whole = whole_losses(case, 0.3, reach)
    expected = gradients_of(whole.objective(3.0), case)
    parts = block_losses(case, 0.3, chunk_tokens, reach)
    assert_same(parts, whole)
    torch.testing.assert_close(gradients_of(parts.objective(3.0), case), expected)


def test_a_soft_label_with_all_of_the_share_is_a_hard_one(case):
    """And one with half of it each is the mean of the two."""
    other = (case.labels_XQ + 1) % V
    soft = replace(case, likely_XQJ=torch.stack((case.labels_XQ, other), -1), shares_XQJ=torch.zeros(X, Q, 2))
    shares = soft.shares_XQJ
    assert shares is not None
    shares[..., 0] = 1.0
    assert_same(whole_losses(soft, 0.3), whole_losses(case, 0.3))
    shares.fill_(0.5)
    hard = (whole_losses(case, 0.3).mixed_sum, whole_losses(replace(case, labels_XQ=other), 0.3).mixed_sum)
    torch.testing.assert_close(whole_losses(soft, 0.3).mixed_sum, (hard[0] + hard[1]) / 2)


def test_weights_that_follow_acceptance_by_hand():
    """Label probabilities 1/2, 1/4, 1/8: the drafts are reached with 1, 1/2, 1/8. Without a label there is no weight,
    but what comes behind is reached through it."""
    given = torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.0, 0.25]])
    losses = -torch.tensor([[0.5, 0.25, 0.125]] * 2).log()
    reached = torch.tensor([[1.0, 0.5, 0.125], [1.0, 0.0, 0.125]])
    torch.testing.assert_close(acceptance_weights(given, losses, 1.0), reached)
    torch.testing.assert_close(acceptance_weights(given, losses, 0.25), 0.75 * given + 0.25 * reached)
    assert acceptance_weights(given, losses, 0.0).equal(given)


def test_chunks_keep_no_logits():
    """What is kept for the backward pass is gradients of the inputs, not [drafts, V]."""
    case = random_case(sizes=(40, 8, 6, 3, 500))
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.shape), t)[1], lambda t: t):
        losses = block_losses(case, 0.5, 16)
    assert not [shape for shape in saved if shape.numel() >= 16 * 500]
    node: Any = losses.mixed_sum.grad_fn
    assert [tuple(t.shape) for t in node.gradients] == [(320, 6), (320, 3), (500, 3)]


def test_the_gradient_of_a_multiple_is_the_multiple_of_the_gradient(case):
    one = gradients_of(block_losses(case, 0.4, 5).mixed_sum, case)
    many = gradients_of(7.0 * block_losses(case, 0.4, 5).mixed_sum, case)
    torch.testing.assert_close(many, [7.0 * each for each in one])


def test_only_the_mixed_sum_carries_a_gradient(case):
    for losses in (whole_losses(case, 0.4), block_losses(case, 0.4, 5)):
        assert [name for name, value in vars(losses).items() if value.requires_grad] == ["mixed_sum"]


def says(tokens):
    """A [X, Q, D] and a [V, D] whose product is 20 at the tokens and 0 elsewhere."""
    return 20.0 * F.one_hot(torch.tensor(tokens), 10).float(), torch.eye(10)


@pytest.mark.parametrize("losses_of", [whole_losses, lambda case, weight: block_losses(case, weight, 2)])
def test_sums_counts_and_accepted_lengths_by_hand(losses_of):
    labels = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    weights = torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.5, 0.0], [0.0, 0.0, 0.0]])
    base, eye = says([[1, 2, 0], [0, 5, 6], [7, 8, 9]])
    final, _ = says([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    case = Drafts(z_XQD=base, low_XQR=final - base, lm_head_VD=eye, last_VR=eye, labels_XQ=labels, weights_XQ=weights)
    losses = losses_of(case, 0.25)
    wrong, right = math.log(math.exp(20) + 9), math.log(1 + 9 * math.exp(-20))
    assert losses.final_sum.item() == pytest.approx(3.25 * right, abs=1e-5)
    assert losses.base_sum.item() == pytest.approx(1.25 * wrong + 2 * right, rel=1e-5)
    assert losses.mixed_sum.item() == pytest.approx(0.25 * 1.25 * wrong, rel=1e-5)
    assert losses.weight_sum.item() == 3.25
    assert (losses.correct_final_sum.item(), losses.correct_base_sum.item(), losses.num_labels.item()) == (5, 3, 5)
    # Block 0: 3 and 2 right at the start, block 1: 2 and 0 (the unlabelled third is not counted), block 2 has no label.
    assert losses.accepted_final_sum.item() == (1 + 3) + (1 + 2)
    assert losses.accepted_base_sum.item() == (1 + 2) + (1 + 0)
    assert losses.num_blocks.item() == 2


def test_the_loss_is_divided_by_the_sum_of_weights(case):
    """Scaling all weights, as another gamma would on average, changes nothing: the learning rate keeps its meaning."""
    one, half = whole_losses(case, 0.3), whole_losses(replace(case, weights_XQ=0.5 * case.weights_XQ), 0.3)
    torch.testing.assert_close(one.objective(one.weight_sum), half.objective(half.weight_sum))
    base, final = one.base_sum / one.weight_sum, one.final_sum / one.weight_sum
    torch.testing.assert_close(one.objective(one.weight_sum).detach(), 0.3 * base + 0.7 * final)


def test_no_label_at_all_is_a_zero_loss_with_zero_gradients(case):
    losses = block_losses(replace(case, weights_XQ=torch.zeros_like(case.weights_XQ)), 0.5, 3)
    loss = losses.objective(losses.weight_sum)
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in gradients_of(loss, case))


def test_no_block_at_all_has_zero_gradients(case):
    names = ("z_XQD", "low_XQR", "labels_XQ", "weights_XQ")
    none = {name: None if getattr(case, name) is None else getattr(case, name)[:0] for name in names}
    losses = block_losses(replace(case, **none), 0.5, 3)
    assert losses.num_blocks.item() == 0
    assert not any(gradient.any() for gradient in gradients_of(losses.objective(0.0), case))


@pytest.mark.parametrize("losses_of", [whole_losses, lambda case, weight: block_losses(case, weight, 2)])
def test_cross_entropy_is_float32_for_bfloat16_logits(losses_of):
    torch.manual_seed(0)
    logits = torch.randn(1, 1, 5000).bfloat16()
    label = torch.tensor([[7]])
    case = Drafts(
        z_XQD=logits,
        low_XQR=None,
        lm_head_VD=torch.eye(5000).bfloat16(),
        last_VR=None,
        labels_XQ=label,
        weights_XQ=torch.ones(1, 1),
    )
    losses = losses_of(case, 0.0)
    assert losses.base_sum.dtype == torch.float32
    torch.testing.assert_close(losses.base_sum, F.cross_entropy(logits[0].float(), label[0]))


def in_float32(case):
    return replace(
        case, **{k: v.float() for k, v in vars(case).items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1000, 5003])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(("reach", "labels"), [(0.0, 0), (0.5, 0), (0.0, 8), (1.0, 3)])
def test_the_kernel_equals_the_twin(kind, vocabulary, head, reach, labels):
    """In float32 closely; in bfloat16, where each rounds in its own places, it is no farther from float32 than it."""
    case = random_case(head, kind, "cuda", (30, 8, 64, 32, vocabulary))
    case = with_soft_labels(case, labels) if labels else case
    for base_weight in (0.0, 0.3, 1.0):
        whole = whole_losses(case, base_weight, reach)
        parts = block_losses(case, base_weight, 64, reach)
        loose = {"rtol": 2e-2, "atol": 2.0} if kind == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        assert_same(parts, whole, loose)
        twin = gradients_of(whole.objective(whole.weight_sum), case)
        got = gradients_of(parts.objective(parts.weight_sum), case)
        wide = in_float32(case)
        exact = whole_losses(wide, base_weight, reach)
        reference = gradients_of(exact.objective(exact.weight_sum), wide)
        for one, other, right in zip(got, twin, reference, strict=True):
            error, allowed = ((each.float() - right).norm() for each in (one, other))
            assert error <= 1.25 * allowed + 1e-4 * right.norm()
