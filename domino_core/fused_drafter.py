"""A drafter to decode with: the drafting part of drafter.Drafter on fused blocks. Same numbers from fewer kernels.

backbone.py and head.py are the readable form, the one that is trained; the tests hold the two equal.

B rows · T tokens of this pass · X = B·T · M keys · D hidden · J key/value heads · d head width · L layers ·
C feature width · K slots of a block · Q drafts · G GRU width · R low rank · V vocabulary
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_core.backbone import DraftLayer
from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.fused import (
    LONG_PASS,
    Block,
    Norm,
    Stack,
    matrix,
    on_card,
    output_matrix,
    product,
    rotary_frequency,
    rotary_table,
    rotate,
    run_blocks,
)
from domino_core.head import DominoHead
from domino_core.layers import KVCache
from domino_core.sampling import RowSampling

if TYPE_CHECKING:
    from domino_core.kernels.head import HeadWeights

# The GRU's input products come from a table with a row per token if memory allows: this much, or on a card this share
# of what is free. Else they are computed.
TABLE_BYTES = 256 << 20
TABLE_SHARE = 1 / 16
CUT_POOL = 256  # candidates per slot for rows with top-k, top-p or min-p


class FusedDrafter:
    """A copy of a drafter's weights arranged for decoding; the drafting methods are those of drafter.Drafter."""

    def __init__(self, drafter: Drafter) -> None:
        if drafter.config.block_size + 1 >= LONG_PASS:
            raise ValueError(
                f"block_size={drafter.config.block_size}: blocks of up to {LONG_PASS - 2} can be decoded with"
            )
        self.config: DrafterConfig = drafter.config
        self.dtype, self.device = drafter.dtype, drafter.embed_VD.device
        self.embed_VD = drafter.embed_VD
        self.output_DV = output_matrix(drafter.lm_head_VD)
        backbone, eps = drafter.backbone, drafter.config.rms_norm_eps
        layers: list[DraftLayer] = list(backbone.layers)  # pyright: ignore[reportAssignmentType]
        with torch.no_grad():
            self.fc_CD = matrix(backbone.fc.weight)
            self.hidden_norm = Norm(backbone.hidden_norm.weight, eps)
            self.stack = Stack(blocks=[self._block(layer) for layer in layers], norm=Norm(backbone.norm.weight, eps))
            # Keys of all layers, then values of all layers, of a context token, in one product.
            attentions = [layer.self_attn for layer in layers]
            self.context_kv = matrix(*[a.k_proj.weight for a in attentions], *[a.v_proj.weight for a in attentions])
            self.context_k_norm = Norm(torch.stack([a.k_norm.weight for a in attentions])[:, None], eps)
            # The same, a row per key head of every layer.
            self.context_k_weight_Nd = self.context_k_norm.weight.expand(
                -1, drafter.config.num_key_value_heads, -1
            ).flatten(0, 1)
            self.head = FusedHead(drafter.head, self.embed_VD, self.dtype) if drafter.head is not None else None
        self.rotary = self._rotary(0)  # of the longest cache so far

    def _block(self, layer: DraftLayer) -> Block:
        config, attention, mlp = self.config, layer.self_attn, layer.mlp
        q_norm = attention.q_norm.weight.expand(config.num_attention_heads, -1)
        k_norm = attention.k_norm.weight.expand(config.num_key_value_heads, -1)
        return Block(
            input_norm=Norm(layer.input_layernorm.weight, config.rms_norm_eps),
            qkv=matrix(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            qk_norm=Norm(torch.cat((q_norm, k_norm)), config.rms_norm_eps),
            out=matrix(attention.o_proj.weight),
            mlp_norm=Norm(layer.post_attention_layernorm.weight, config.rms_norm_eps),
            gate_up=matrix(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=matrix(mlp.down_proj.weight),
        )

    def _rotary(self, length: int) -> Tensor:
        frequency = rotary_frequency(self.config.head_dim, self.config.rope_theta)
        return rotary_table(frequency, length, self.dtype, self.device)

    def new_cache(self, rows: int, length: int) -> KVCache:
        """As Drafter.new_cache."""
        config, room = self.config, length + self.config.block_size + 1
        if room > self.rotary.shape[1]:
            self.rotary = self._rotary(room)
        shape = (config.num_hidden_layers, rows, room, config.num_key_value_heads, config.head_dim)
        return replace(KVCache.allocate(*shape, dtype=self.dtype, device=self.device), rotary=self.rotary)

    def extend_context(self, cache: KVCache, features_BTC: Tensor, positions_BT: Tensor) -> None:
        """As Drafter.extend_context."""
        config = self.config
        assert cache.rotary is not None
        prompt = features_BTC.shape[1] >= LONG_PASS
        features_XC = features_BTC.flatten(0, 1).to(self.dtype)
        context_XD = self.hidden_norm(product(features_XC, self.fc_CD, any_order=prompt))
        kv_XN = product(context_XD, self.context_kv, any_order=prompt)
        if on_card(kv_XN):
            from domino_core.kernels.attention import norm_rotate_store

            turns_2Xd = cache.rotary[:, positions_BT.flatten(), 0]
            norm_rotate_store(
                kv_XN, self.context_k_weight_Nd, config.rms_norm_eps, turns_2Xd, positions_BT, cache.k, cache.v
            )
            return
        kv_XNd = kv_XN.view(*positions_BT.shape, 2, config.num_hidden_layers, -1, config.head_dim)
        k_BTLJd, v_BTLJd = kv_XNd.unbind(2)
        cos_BT1d, sin_BT1d = cache.rotary[:, positions_BT].unbind(0)
        k_BTLJd = rotate(self.context_k_norm(k_BTLJd), cos_BT1d[:, :, None], sin_BT1d[:, :, None])
        where = (slice(None), cache.row_index_B1, positions_BT)
        cache.k[where] = k_BTLJd.permute(2, 0, 1, 3, 4)
        cache.v[where] = v_BTLJd.permute(2, 0, 1, 3, 4)

    def draft_hidden(self, cache: KVCache, anchor_B: Tensor, start_B: Tensor, num_context: int | None = None) -> Tensor:
        """As Drafter.draft_hidden."""
        num_slots, num_rows = self.config.block_size, len(anchor_B)
        num_keys = num_slots + (int(start_B.max()) if num_context is None else num_context)
        ids_BK = anchor_B.new_full((num_rows, num_slots), self.config.mask_token_id)
        ids_BK[:, 0] = anchor_B
        x_XD = F.embedding(ids_BK.flatten(), self.embed_VD).to(self.dtype)
        z_XD, _ = run_blocks(self.stack, x_XD, cache, start_B, num_keys, causal=False)
        z_BKD = z_XD.view(num_rows, num_slots, -1)
        return z_BKD[:, self.config.first_predicting_slot :]

    def base_logits(self, z: Tensor) -> Tensor:
        return product(z.to(self.output_DV.dtype), self.output_DV)

    def embed(self, ids_B: Tensor) -> Tensor:
        """What the head reads of tokens."""
        assert self.head is not None
        return self.head.inputs(ids_B)


class FusedHead:
    """DominoHead's drafting part with fewer, larger products.

    The GRU state is multiplied once: its share of the next step's gates and of this step's correction come together.
    """

    def __init__(self, head: DominoHead, embed_VD: Tensor, dtype: torch.dtype) -> None:
        self.width = head.config.gru_hidden_dim
        self.prefix = head.config.pure_draft_prefix_len
        self.pool = 0  # candidates per slot to draft from, on a card; 0: the whole vocabulary
        self.embed_VD = embed_VD
        self.input_DG, self.state_GX, self.hidden_DR, self.last_RV = _matrices(head)
        size = embed_VD.shape[0] * 3 * self.width * dtype.itemsize
        self.table_VG = embed_VD.to(dtype).mm(self.input_DG) if size <= _table_bytes(embed_VD.device) else None

    def read(self, head: DominoHead) -> None:
        """The weights of another head of the same configuration, to where the present ones lie: graphs read them."""
        matrices = (self.input_DG, self.state_GX, self.hidden_DR, self.last_RV)
        for present, new in zip(matrices, _matrices(head), strict=True):
            present.copy_(new)
        if self.table_VG is not None:
            torch.mm(self.embed_VD.to(self.table_VG.dtype), self.input_DG, out=self.table_VG)

    def inputs(self, ids_B: Tensor) -> Tensor:
        """The tokens' products with the GRU's input weights, [B, 3G]."""
        if self.table_VG is not None:
            return F.embedding(ids_B, self.table_VG)
        return product(F.embedding(ids_B, self.embed_VD).to(self.input_DG.dtype), self.input_DG)

    def initial_state(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """(state [B, G], its products [B, 3G + R])."""
        return self.state_GX.new_zeros(num_rows, self.width), self.state_GX.new_zeros(num_rows, self.state_GX.shape[1])

    def advance(self, input_BG: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """DominoHead.advance: gates r and u, candidate c, state (1 - u)·c + u·s (order of PyTorch's GRU)."""
        state_BG, products_BX = state
        G = self.width
        gates_BG = (input_BG[:, : 2 * G] + products_BX[:, : 2 * G]).sigmoid_()
        candidate_BG = torch.addcmul(input_BG[:, 2 * G :], gates_BG[:, :G], products_BX[:, 2 * G : 3 * G]).tanh_()
        state_BG = torch.lerp(candidate_BG, state_BG, gates_BG[:, G:])
        return state_BG, product(state_BG, self.state_GX)

    def hidden_part(self, z_BQD: Tensor) -> Tensor:
        return product(z_BQD, self.hidden_DR)

    def correction_from(self, hidden_part_BR: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return product(F.silu(hidden_part_BR + state[1][:, 3 * self.width :]), self.last_RV)

    def rolls_out(self, sampling: RowSampling) -> bool:
        """Whether `rollout` can draft for these rows. It needs the table, on a card."""
        simple = sampling.adjustment is None and not sampling.rejection
        return simple and self.table_VG is not None and on_card(self.table_VG)

    def rollout(
        self,
        anchor_B: Tensor,
        base_BQV: Tensor,
        hidden_part_BQR: Tensor,
        sampling: RowSampling,
        noise_BQV: Tensor | None,
    ) -> Tensor:
        """The drafts [B, Q] of decode.draft_block, by kernels/head.py.

        Base and correction are added in float32 here, so where two tokens nearly tie another may be drafted. Rows that
        cut the tail of the distribution draft from a pool: the cut needs an order, and ordering the whole vocabulary
        for every draft would cost more than the drafts are worth.
        """
        from domino_core.kernels import head

        weights = self._weights()
        pool = self.pool or (CUT_POOL if sampling.truncated or sampling.min_p else 0)
        if pool:
            width = 1 << (min(pool, base_BQV.shape[2]).bit_length() - 1)
            return head.rollout_in_pool(weights, anchor_B, base_BQV, hidden_part_BQR, sampling, noise_BQV, width)
        return head.rollout(weights, anchor_B, base_BQV, hidden_part_BQR, sampling.temperature_B, noise_BQV)

    def most_likely(self, anchor_B: Tensor, base_BQV: Tensor, hidden_part_BQR: Tensor) -> Tensor:
        """`rollout`, where all rows are greedy. It needs the table, on a card."""
        from domino_core.kernels import head

        no_temperature = base_BQV  # not read without noise
        return head.rollout(self._weights(), anchor_B, base_BQV, hidden_part_BQR, no_temperature, None)

    def _weights(self) -> HeadWeights:
        from domino_core.kernels.head import HeadWeights

        assert self.table_VG is not None
        return HeadWeights(
            inputs_VG=self.table_VG, state_XG=self.state_GX.t(), last_VR=self.last_RV.t(), prefix=self.prefix
        )


def _matrices(head: DominoHead) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A head's weights as [D, 3G], [G, 3G + R], [D, R] and [R, V]."""
    D = head.config.hidden_size
    first_RX, last_VR = (head.embed_proj.get_parameter(f"{index}.weight").detach() for index in (0, 2))
    return (
        matrix(head.prefix_gru.weight_ih_l0.detach()),
        matrix(head.prefix_gru.weight_hh_l0.detach(), first_RX[:, D:]),
        matrix(first_RX[:, :D].contiguous()),
        matrix(last_VR),
    )


def _table_bytes(device: torch.device) -> float:
    return TABLE_BYTES if device.type == "cpu" else TABLE_SHARE * torch.cuda.mem_get_info(device)[0]
