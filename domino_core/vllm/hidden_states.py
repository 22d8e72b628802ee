"""Hidden states out of a vLLM engine: the KV connector, how to ask for it, and how to take over what it wrote.

vLLM's method `extract_hidden_states` puts the residual stream of chosen layers into a cache of its own; a KV connector
of ours copies it to a file when a request is finished. This is the one place that touches vLLM's private API, so it
knows the versions that it was written for and refuses any other: 0.32.0, whose CPU build the tests run, and 0.26.0,
whose source it was checked against.

The stock connector is CUDA-only, saves every request, and calls a request finished before its file is written, which
is why readers have to wait on lock files. Ours also runs on the CPU, saves only the requests that ask for it
(answering pays nothing), and is finished when the file is complete. In one process, hand-over is then: generate,
drain, read. No locks.

Letters: S tokens of a request · L tapped layers in ascending depth · D hidden size.
"""

# vLLM's connector API is untyped and underscored: strict checking of this one module would be noise.
# pyright: basic

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import vllm
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock

KNOWN_VERSIONS = ("0.26.0", "0.32.0")
_WANTED = "save_hidden_states"


def check_version() -> None:
    """ValueError if vLLM is not one of the known versions."""
    found = Version(vllm.__version__).base_version
    if found not in KNOWN_VERSIONS:
        raise ValueError(
            f"vLLM {vllm.__version__} is installed; capture uses its private API and knows "
            f"{' and '.join(KNOWN_VERSIONS)} only: install one of these (pyproject.toml, extras cpu and gpu-torch211)"
        )


def engine_arguments(layer_ids: tuple[int, ...], folder: Path) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for capturing the outputs of blocks `layer_ids` (0-based, ascending) into `folder`.

    vLLM counts what enters a layer, 0 being the embeddings, so the output of block i is its id i + 1. It returns
    layers by depth whatever their order here, and breaks on repeated ones: hence the check. Prefix caching is off
    because cached tokens never run and have no states.
    """
    if not layer_ids or list(layer_ids) != sorted(set(layer_ids)):
        raise ValueError(f"layer ids must be distinct and ascending, got {list(layer_ids)}")
    taps = {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in layer_ids]}
    return {
        "async_scheduling": False,  # it would hand drafts over inside the worker, past `decode_plainly`
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": taps},
        },
        "kv_transfer_config": {
            "kv_connector": HiddenStatesConnector.__name__,
            "kv_connector_module_path": __name__,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder), "use_synchronization_lock": False},
        },
    }


def capture_parameters() -> Any:
    """SamplingParams of a prefill whose states are wanted. The one token that vLLM insists on has no state."""
    extra = {"kv_transfer_params": {_WANTED: True}}
    return vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)


def decode_plainly(llm: vllm.LLM) -> None:
    """Keep the method's drafts from being verified, so that answers are drawn one token at a time.

    `extract_hidden_states` drafts the last token once more, which is rarely right and doubles the work of decoding. On
    the CPU it also makes samples wrong: 0.32.0 verifies with temperatures from uninitialised memory
    (`_expand_kernel_impl` writes a converted copy), and repeats a token in four of five cases where one in 25 is due.
    """
    core = _engine_core(llm)
    assert core.check_for_draft_tokens, "vLLM is not set up to extract hidden states"
    assert not core.async_scheduling
    core.check_for_draft_tokens = False


def drain(llm: vllm.LLM) -> None:
    """Step an in-process engine until the files of all its finished requests are complete.

    `generate` returns with the last saves still queued: they happen in the next step, which nobody else would take.
    """
    core = _engine_core(llm)
    while core.scheduler.has_requests():
        llm.llm_engine.engine_core.get_output()


def _engine_core(llm: vllm.LLM) -> Any:
    client: Any = llm.llm_engine.engine_core
    assert hasattr(client, "engine_core"), "capture needs VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported"
    return client.engine_core


def take_hidden_states(output: Any) -> tuple[list[int], Tensor]:
    """Token ids and states_SLD of one finished, drained request; removes its file. RuntimeError if there is none."""
    path = (output.kv_transfer_params or {}).get("hidden_states_path")
    if path is None or not os.path.exists(path):
        raise RuntimeError(f"vLLM wrote no hidden states for request {output.request_id} ({path}); see its log above")
    tensors = load_file(path)
    os.remove(path)
    return tensors["token_ids"].tolist(), tensors["hidden_states"]


def storage_folder() -> Path:
    """A name for the folder between writing and reading: in memory where there is room for a few batches.

    It exists during a capture only, so that an actor that is killed between two leaves nothing behind.
    """
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 << 30
    return (shared if roomy else Path(tempfile.gettempdir())) / f"hidden-states-{os.getpid()}-{uuid.uuid4().hex}"


class _Written:
    """Stands where the stock connector keeps the event of a device copy; true once the file is complete."""

    def __init__(self, copied: Any = None, written: Future[None] | None = None) -> None:
        self.copied, self.written = copied, written

    def query(self) -> bool:
        return (self.copied is None or self.copied.query()) and (self.written is None or self.written.done())

    def synchronize(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class HiddenStatesConnector(stock.ExampleHiddenStatesConnector):
    """The stock connector, also on the CPU, for requests that ask, and finished when the file is complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version()
        super().__init__(*args, **kwargs)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Scheduler side. False: nothing to save, the request's blocks are free at once."""
        if not (request.kv_transfer_params or {}).get(_WANTED):
            self._request_filenames.pop(request.request_id, None)
            return False, None
        return super().request_finished(request, block_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Worker side. Only requests with a save may be reported: the scheduler has forgotten the others."""
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        saves = {pending.req_id for pending in getattr(metadata, "pending_saves", ())}
        return super().get_finished(finished_req_ids & saves)

    def _submit_async_write(self, pending: stock.PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None
        events: dict[str, Any] = self._req_copy_events
        if self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            # The future is gone if the write was quicker than we are.
            written = self._req_futures.get(pending.req_id)
            events[pending.req_id] = _Written(events[pending.req_id], written)
            return
        blocks = torch.as_tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        # The stock function knows the cache layout, which differs between versions.
        states_SLD = stock.extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous()
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        tensors = {"hidden_states": states_SLD, "token_ids": pending.token_ids.clone()}
        done: Any = _Written()
        self._write_tensors(tensors, done, pending.filename, None)
        events[pending.req_id] = done
