"""Domino inside vLLM: its DFlash drafting with our block layout and the head's loop in place of one argmax per slot.

This is the one place where drafting touches vLLM's private API; plugin.TESTED says which versions it knows. Of vLLM are
the paged context (keys and values of the tapped layers, written behind every step of the target into the drafter's own
layers of the target's block tables), scheduling and verification. Ours are which slots a block has, which of them
predict, and how drafts are drawn.

vLLM makes the proposer, or speculator, before it loads our model and gives no way to name another one. It looks at the
loaded model right afterwards, through a method that is replaced while the model loads and put back by its first call;
there the object becomes one of the subclasses below. With other drafters nothing of vLLM is touched.

B rows · S slots of a block · Q drafts · D hidden · V vocabulary · L draft layers · T context tokens · J key heads ·
d head width
"""

# vLLM's private API is partly untyped: strict checking of this one module would be noise.
# pyright: basic

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import vllm
from torch import Tensor
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.v1.spec_decode import dflash

from domino_core.checkpoint import read_config, read_state
from domino_core.foreign import HEAD_TENSORS, LEGACY_HEAD_PREFIX, PUBLISHED, tensor_name
from domino_core.fused import on_card
from domino_core.fused_drafter import FusedHead
from domino_core.head import DominoHead
from domino_core.vllm.plugin import FIRST, SECOND, runner_problem
from domino_core.vllm.rollout import Draw, Proposals, most_likely, roll_out
from domino_core.vllm.settings import GREEDY_BELOW, changed_settings, is_ours, read_drafter, tensor_problems

COMPUTED = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")  # what vLLM makes of weights when they are loaded


class DominoDraft(DFlashQwen3ForCausalLM):
    """vLLM's DFlash backbone with our head beside it; embeddings and output matrix become the target's own."""

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        """One of ours, or vLLM's own: both may call themselves DFlashDraftModel."""
        if is_ours(vllm_config):
            return super().__new__(cls)
        stock: Any = DFlashQwen3ForCausalLM
        return stock(vllm_config=vllm_config, prefix=prefix)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        runner = SECOND if vllm_config.use_v2_model_runner else FIRST
        if problem := runner_problem(vllm.__version__, runner):
            raise ValueError(problem)
        config = read_drafter(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.drafter_config = config
        self.domino_head = DominoHead(config) if config.head else None
        self.fused_head: FusedHead | None = None
        self._is_split = vllm_config.parallel_config.tensor_parallel_size > 1
        if vllm_config.device_config.device_type == "cpu":
            inner: Any = self.model
            inner._normalize_context_k = self._normalize_context_keys
            for layer in self.model.modules():  # or its weights are packed away, where take_over cannot reach them
                layer._cpu_skip_gemm_dispatch = True  # pyright: ignore[reportArgumentType]
        if runner == FIRST:
            _adopt_after_loading("_maybe_share_embeddings", DominoProposer)
        else:
            _adopt_after_loading("_validate_local_argmax_reduction", speculator_class())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The backbone by vLLM's own loader, the head by ours. ValueError for tensors that do not fit."""
        found = {name.removeprefix(LEGACY_HEAD_PREFIX): tensor for name, tensor in weights}
        if problems := tensor_problems(self.drafter_config, found):
            raise ValueError("The drafter's weights are not what its config.json describes: " + "; ".join(problems))
        head = {name: found.pop(name) for name in list(found) if name.startswith(HEAD_TENSORS)}
        if self.domino_head is not None:
            self.domino_head.load_state_dict(head)
        super().load_weights(found.items())

    def arrange(self) -> None:
        """The head for greedy drafts on a card, from the weights that were loaded and the target's embeddings.

        Its kernels were written for Hopper and have run there alone; elsewhere the plain form drafts.
        """
        embed_VD: Tensor | None = getattr(self.model.embed_tokens, "weight", None)  # quantised, it has other parts
        if self.domino_head is None or embed_VD is None or self._is_split or not on_card(embed_VD):
            return
        if torch.cuda.get_device_capability(embed_VD.device)[0] != 9:
            return
        fused = FusedHead(self.domino_head, embed_VD.detach(), embed_VD.dtype)
        self.fused_head = fused if fused.table_VG is not None else None  # a small card may have no room for the table

    def take_over(self, folder: str) -> None:
        """Another version's weights, of the same configuration, in the memory of the present ones: graphs read it.

        What vLLM computes from weights when they are loaded goes to where it was, too. ValueError for a folder that is
        not such a drafter, before anything is changed.
        """
        if changed := changed_settings(self.drafter_config, read_config(folder)):
            raise ValueError(f"{folder} has another {', '.join(changed)} than the drafter that is loaded")
        weights = {tensor_name(name, PUBLISHED): tensor for name, tensor in read_state(folder).items()}
        computed = {name: getattr(self.model, name) for name in COMPUTED}
        self.load_weights(weights.items())
        for name, tensor in computed.items():
            if tensor is not None:
                setattr(self.model, name, tensor.copy_(getattr(self.model, name)))
        if self.fused_head is not None and self.domino_head is not None:
            self.fused_head.read(self.domino_head)

    def _normalize_context_keys(self, keys_LTJd: Tensor) -> Tensor:
        """The key norm of every draft layer: on the CPU, vLLM's grouped kernel takes the first layer's for all."""
        normed_LTJd = F.rms_norm(keys_LTJd, keys_LTJd.shape[-1:], eps=self.drafter_config.rms_norm_eps)
        weights_Ld: Any = self.model._k_norm_weights
        return normed_LTJd * weights_Ld[:, None, None]

    def draft(self, anchor_B: Tensor, z_XD: Tensor, draw: Draw) -> Tensor:
        """Drafts [B, Q] from the states of the predicting slots, X = B·Q."""
        z_BQD = z_XD.unflatten(0, (len(anchor_B), -1))
        base_XV = self.compute_logits(z_XD)
        assert base_XV is not None
        base_BQV = base_XV.unflatten(0, z_BQD.shape[:2])
        if self.fused_head is not None and draw is most_likely:
            return self.fused_head.most_likely(anchor_B, base_BQV, self.fused_head.hidden_part(z_BQD))
        return roll_out(self.domino_head, self.embed_input_ids, anchor_B, z_BQD, base_BQV, draw)


class DominoProposer(dflash.DFlashProposer):
    """Drafting in the first model runner."""

    def adopted(self) -> None:
        """Called once, in place of a constructor."""
        loaded: Any = self.model  # what vLLM may wrap later on
        self._domino: DominoDraft = loaded
        self._domino.arrange()
        self._first_slot = self._domino.drafter_config.first_predicting_slot
        # As many slots as it takes for the most drafts that are ever wanted: the block that the scheduler has room for.
        self._num_slots = self.speculative_config.num_speculative_tokens + self._first_slot

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> tuple[int, Tensor, Any]:
        """As vLLM's, with a slot less if every slot predicts.

        vLLM lays out an anchor and a mask slot for each draft that this step wants. Fewer may be wanted at some steps
        than at most; the block stays the same then.
        """
        wanted, num_slots = self.num_speculative_tokens, self._num_slots
        self.num_speculative_tokens = num_slots - 1
        num_tokens, _, metadata = super().set_inputs_first_pass(*args, **kwargs)
        self.num_speculative_tokens = wanted
        block_B1 = self.arange[: metadata.num_reqs, None] * num_slots
        slot_Q = self._first_slot + self.arange[:wanted]
        return num_tokens, (block_B1 + slot_Q).flatten(), metadata

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        """Drafts [B·Q] and, where rejection sampling is to have them, the distributions [B·Q, V] they came from."""
        num_rows = len(hidden_states) // self.num_speculative_tokens
        anchor_B = self.input_ids[: num_rows * self._num_slots : self._num_slots]
        if not sampling_metadata.all_greedy and self.device.type == "cpu":
            # Its temperatures come from uninitialised memory (cpu_triton_utils._expand_kernel_impl writes to a copy).
            raise ValueError(
                "vLLM's CPU build verifies sampled requests wrongly: ask for temperature 0, or leave out the drafter"
            )
        if not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
            return self._domino.draft(anchor_B, hidden_states, most_likely).flatten(), None
        proposals = Proposals(sampling_metadata.temperature, GREEDY_BELOW)
        drafts_BQ = self._domino.draft(anchor_B, hidden_states, proposals)
        return drafts_BQ.flatten(), proposals.distributions().flatten(0, 1)


@functools.cache
def speculator_class() -> type:
    """Drafting in the second model runner, of 0.26.0. Made when it is needed: its module needs Triton."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    class DominoSpeculator(DFlashSpeculator):
        """All of a round's drafting is one CUDA graph: the backbone's pass and the head's loop behind it."""

        def adopted(self) -> None:
            """Called once, in place of a constructor, before graphs and buffers of the attention are made."""
            loaded: Any = self.model
            self._domino: DominoDraft = loaded
            self._domino.arrange()
            self.sample_from_anchor = self._domino.drafter_config.shift_label
            self.num_query_per_req = self.num_speculative_steps + self._domino.drafter_config.first_predicting_slot

        def _generate_draft(self, num_reqs: int, num_tokens_padded: int, *args: Any, **kwargs: Any) -> None:
            hidden_XD = self._run_model(num_tokens_padded, *args, **kwargs)
            z_XD = hidden_XD[self.sample_indices[: num_reqs * self.num_speculative_steps]]
            anchor_B = self.input_buffers.input_ids[: num_reqs * self.num_query_per_req : self.num_query_per_req]
            draw = most_likely if self.draft_logits is None else self._propose
            self.draft_tokens[:num_reqs] = self._domino.draft(anchor_B, z_XD, draw)

        def _propose(self, logits_BTV: Tensor, first: int) -> Tensor:
            """A Draw with the noise of each request's seed; the scaled logits stay in draft_logits for verification."""
            num_rows, num_tokens = logits_BTV.shape[:2]

            def of_these(values_X: Tensor) -> Tensor:
                values_BQ = values_X.view(-1, self.num_speculative_steps)
                return values_BQ[:num_rows, first : first + num_tokens].flatten()

            sample: Any = gumbel_sample  # 0.32.0 names its arguments otherwise
            return sample(
                logits_BTV.flatten(0, 1),
                of_these(self.sample_idx_mapping),
                self.temperature,
                self.seeds,
                of_these(self.sample_pos) - 1,  # verification keys its noise by the position before the token's own
                apply_temperature=True,
                output_processed_logits=self.draft_logits,
                output_processed_logits_col=of_these(self.sample_col),
                use_fp64=self.use_fp64_gumbel,
            ).view(num_rows, num_tokens)

    return DominoSpeculator


def _adopt_after_loading(method: str, adopter: type) -> None:
    """The next call of a method of adopter's base class on an object that has our model makes that an `adopter`."""
    owner = adopter.__mro__[1]
    inherited = method not in vars(owner)
    original: Callable[..., Any] = getattr(owner, method)

    def adopt(self: Any, *args: Any, **kwargs: Any) -> Any:
        if inherited:
            delattr(owner, method)
        else:
            setattr(owner, method, original)
        found = original(self, *args, **kwargs)
        if type(self) is owner and isinstance(self.model, DominoDraft):  # embeddings are shared by now
            self.__class__ = adopter
            self.adopted()
        return found

    if not hasattr(original, "puts_back"):
        adopt.puts_back = original
        setattr(owner, method, adopt)
