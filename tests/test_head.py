"""The head: whole blocks (training) equal one step after the other (drafting)."""

from dataclasses import replace

import pytest
import torch

from domino_core.checkpoint import read_config
from domino_core.head import DominoHead


@pytest.fixture(params=[(s, p) for s in (True, False) for p in (0, 1, 2)], ids=lambda x: f"shift{int(x[0])}_p{x[1]}")
def head(request, reference_dir):
    shift, prefix = request.param
    torch.manual_seed(0)
    return DominoHead(
        replace(read_config(reference_dir / "draft_shift1_p1"), shift_label=shift, pure_draft_prefix_len=prefix)
    )


def test_block_equals_repeated_steps(head):
    config = head.config
    z, embeds = torch.randn(2, 3, config.num_drafts, config.hidden_size)
    low = head.block(z, embeds)
    assert low.shape == (3, config.num_drafts, config.emb_dim)
    block = low @ head.last_weight.T
    state = head.initial_state(3)
    hidden_part = head.hidden_part(z)
    for draft in range(config.num_drafts):
        state = head.advance(embeds[:, draft], state)
        if draft < config.pure_draft_prefix_len:
            assert not block[:, draft].any()
            continue
        expected = block[:, draft]
        torch.testing.assert_close(head.correction(z[:, draft], state), expected)
        torch.testing.assert_close(head.correction_from(hidden_part[:, draft], state), expected)


def test_correction_is_the_published_formula(head):
    """Concatenation order: backbone state first; no bias, scale or gate. Gates: r, z, n."""
    config = head.config
    z, embed, state = torch.randn(3, config.hidden_size), torch.randn(3, config.hidden_size), torch.randn(3, 32)
    torch.testing.assert_close(head.correction(z, state), head.embed_proj(torch.cat((z, state), dim=-1)))
    r_x, u_x, n_x = (embed @ head.prefix_gru.weight_ih_l0.T).chunk(3, -1)
    r_h, u_h, n_h = (state @ head.prefix_gru.weight_hh_l0.T).chunk(3, -1)
    r, u = (r_x + r_h).sigmoid(), (u_x + u_h).sigmoid()
    expected = (1 - u) * (n_x + r * n_h).tanh() + u * state
    torch.testing.assert_close(head.advance(embed, state), expected)


def test_a_correction_depends_on_what_was_read_and_on_nothing_later(head):
    config = head.config
    first = config.pure_draft_prefix_len
    z, embeds = torch.randn(2, 1, config.num_drafts, config.hidden_size)
    before = head.block(z, embeds)
    for read in range(config.num_drafts):
        changed = embeds.clone()
        changed[:, read] += 1.0
        moved = (head.block(z, changed) != before).any(-1)[0]
        assert moved.tolist() == [draft >= max(read, first) for draft in range(config.num_drafts)]


def test_parameters_are_the_published_ones(head):
    shapes = {name: list(parameter.shape) for name, parameter in head.named_parameters()}
    assert shapes == {
        "prefix_gru.weight_ih_l0": [96, 64],
        "prefix_gru.weight_hh_l0": [96, 32],
        "embed_proj.0.weight": [16, 96],
        "embed_proj.2.weight": [257, 16],
    }
    assert not head.initial_state(2).any()
