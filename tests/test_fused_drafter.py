"""The form of the drafter that decodes against the form that is trained."""

import pytest
import torch

from domino_core import fused_drafter
from domino_core.checkpoint import load_drafter
from domino_core.drafter import Drafter
from domino_core.fused_drafter import FusedDrafter, FusedHead
from domino_core.published_config import from_published, to_published
from domino_core.target import load_target

CASES = [f"draft_shift{shift}_p{prefix}" for shift in (0, 1) for prefix in (0, 1, 2)]


@pytest.fixture(scope="module")
def target(reference_dir):
    return load_target(reference_dir / "target")


@pytest.fixture(params=[*CASES, "headless"])
def drafter(request, target, reference_dir):
    if request.param != "headless":
        return load_drafter(reference_dir / request.param, target.embed_VD, target.lm_head_VD)
    drafter = load_drafter(reference_dir / CASES[0], target.embed_VD, target.lm_head_VD)
    fields = to_published(drafter.config)
    fields["dflash_config"] = {key: fields["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    torch.manual_seed(0)
    headless = Drafter(from_published(fields), target.embed_VD, target.lm_head_VD)
    assert headless.head is None
    return headless


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 3])
def test_blocks_from_a_context_equal_the_trained_form(drafter, num_rows):
    generator = torch.Generator().manual_seed(0)
    for name, parameter in drafter.named_parameters():  # random norms, so that a forgotten one shows
        if "norm" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
    fused = FusedDrafter(drafter)
    caches = [model.new_cache(4, 40).view(num_rows) for model in (drafter, fused)]
    assert caches[0].k.shape == caches[1].k.shape
    # Rows grow by different numbers of tokens; what was fed behind a row's length is stale.
    start = torch.tensor([0, 0, 0])[:num_rows]
    for width, kept in ((12, [12, 3, 7]), (9, [1, 9, 4])):
        features = torch.randn(num_rows, width, drafter.config.feature_width, generator=generator)
        positions = start[:, None] + torch.arange(width)
        for model, cache in zip((drafter, fused), caches, strict=True):
            model.extend_context(cache, features, positions)
        start = start + torch.tensor(kept)[:num_rows]
        anchor = torch.randint(0, 257, (num_rows,), generator=generator)
        slow = drafter.draft_hidden(caches[0], anchor, start)
        fast = fused.draft_hidden(caches[1], anchor, start, int(start.max()))
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fused.base_logits(fast), drafter.base_logits(slow), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(caches[1].k, caches[0].k, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(caches[1].v, caches[0].v, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("table_bytes", [0, 1 << 30])
def test_head_steps_equal_the_trained_form(drafter, monkeypatch, table_bytes):
    monkeypatch.setattr(fused_drafter, "TABLE_BYTES", table_bytes)
    fused = FusedDrafter(drafter)
    if drafter.head is None:
        assert fused.head is None
        return
    assert fused.head is not None
    assert (fused.head.table_VG is None) == (table_bytes == 0)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(3, 5, drafter.config.hidden_size, generator=generator)
    parts = (drafter.head.hidden_part(z), fused.head.hidden_part(z))
    torch.testing.assert_close(parts[1], parts[0], rtol=1e-5, atol=1e-5)
    state, fused_state = drafter.head.initial_state(3), fused.head.initial_state(3)
    for index in range(5):
        tokens = torch.randint(0, 257, (3,), generator=generator)
        state = drafter.head.advance(drafter.embed(tokens), state)
        fused_state = fused.head.advance(fused.embed(tokens), fused_state)
        slow = drafter.head.correction_from(parts[0][:, index], state)
        fast = fused.head.correction_from(parts[1][:, index], fused_state)
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("table_bytes", [0, 1 << 30])
def test_a_head_that_reads_anothers_weights_is_that_head_where_it_lies(target, reference_dir, monkeypatch, table_bytes):
    monkeypatch.setattr(fused_drafter, "TABLE_BYTES", table_bytes)
    first, other = (load_drafter(reference_dir / case, target.embed_VD, target.lm_head_VD) for case in CASES[:2])
    assert first.head is not None
    assert other.head is not None
    for parameter in other.head.parameters():
        parameter.mul_(1.5)
    head, expected = (FusedHead(each, target.embed_VD, torch.float32) for each in (first.head, other.head))
    named = {name: value for name, value in vars(head).items() if torch.is_tensor(value)}
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in named.items()}
    head.read(other.head)
    for name, (place, was) in before.items():
        now = getattr(head, name)
        assert now.data_ptr() == place
        torch.testing.assert_close(now, getattr(expected, name))
        assert name == "embed_VD" or not torch.equal(now, was)


@torch.inference_mode()
def test_bfloat16_drafter_on_a_float32_target_keeps_its_type(target, reference_dir):
    drafter = load_drafter(reference_dir / CASES[4], target.embed_VD, target.lm_head_VD, dtype=torch.bfloat16)
    fused = FusedDrafter(drafter)
    caches = [model.new_cache(1, 20) for model in (drafter, fused)]
    features, positions = torch.randn(1, 9, 128), torch.arange(9)[None]
    outputs = []
    for model, cache in zip((drafter, fused), caches, strict=True):
        model.extend_context(cache, features, positions)
        z = model.draft_hidden(cache, torch.tensor([3]), torch.tensor([9]))
        assert z.dtype == cache.k.dtype == torch.bfloat16
        outputs.append(model.base_logits(z))
    assert outputs[0].dtype == outputs[1].dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(*outputs, dim=-1).min() > 0.99
