"""Hidden states out of a vLLM engine: the KV connector, how to ask for it, and how to take over what it has.

vLLM's method `extract_hidden_states` puts the residual stream of chosen layers into a cache of its own; a KV connector
of ours hands it over when a request is finished. This is the one place that touches vLLM's private API, so it knows the
versions that it was written for and refuses any other: 0.32.0, whose CPU build the tests run, and 0.26.0, whose source
it was checked against.

An engine with one worker has it in the caller's process: states are handed over in memory, on a stream of their own, so
that copies run beside the next steps, and no file is written. With tensor parallelism the worker is another process:
its first rank writes a file for each request. The stock connector is CUDA-only, saves every request, and calls a
request finished before its file is complete, which is why readers have to wait on lock files. Ours also runs on the
CPU, saves only the requests that ask for it (answering pays nothing), and is finished when the file is complete.

Letters: S tokens of a request · L tapped layers in ascending depth · D hidden size.
"""

# vLLM's connector API is untyped and underscored: strict checking of this one module would be noise.
# pyright: basic

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import vllm
from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock

from domino_core.vllm.plugin import TESTED, base_version

_WANTED = "save_hidden_states"
_IN_MEMORY = "in_memory"

Receive = Callable[[list[int], Tensor], None]
"""Takes the token ids and states_SLD of a finished request; on a GPU these are there, and the current stream is the one
to copy them on. They are only lent: what is to stay is copied, and queued before it returns."""


def check_version() -> None:
    """ValueError if vLLM is not one of the versions that drafting knows too."""
    if base_version(vllm.__version__) not in TESTED:
        raise ValueError(
            f"vLLM {vllm.__version__} is installed; capture uses its private API and knows "
            f"{' and '.join(TESTED)} only: install one of these (pyproject.toml, extras cpu and gpu-torch211)"
        )


def engine_arguments(layer_ids: tuple[int, ...], folder: Path | None) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for capturing the outputs of blocks `layer_ids` (0-based, ascending).

    folder: where files go if the engine has several workers; None: one worker, hand-over in memory.

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
            "kv_connector_extra_config": {
                _IN_MEMORY: folder is None,
                "shared_storage_path": str(folder or ""),
                "use_synchronization_lock": False,
            },
        },
    }


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


def _engine_core(llm: vllm.LLM) -> Any:
    client: Any = llm.llm_engine.engine_core
    assert hasattr(client, "engine_core"), "capture needs VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported"
    return client.engine_core


class Handover:
    """Requests of one in-process engine whose states are wanted, from being asked for to being received.

    All calls come from one thread. folder: that of `engine_arguments`.
    """

    def __init__(self, llm: vllm.LLM, folder: Path | None) -> None:
        self._llm, self._scheduler, self._folder = llm, _engine_core(llm).scheduler, folder
        self._numbers = itertools.count()
        self._receivers: dict[str, Receive] = {}  # of requests whose states have not been received
        self._files: dict[Path, tuple[str, list[int]]] = {}  # of requests that are finished, with their tokens
        if folder is None:
            worker: Any = get_kv_transfer_group()
            worker.receivers = self._receivers

    @property
    def pending(self) -> int:
        """Requests whose states have not been received."""
        return len(self._receivers)

    def submit(self, token_ids: list[int], receive: Receive) -> None:
        """Queue a prefill. `receive` is called once, inside a later `step`, unless the request is abandoned."""
        if self._folder is not None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        key = f"states-{next(self._numbers)}"
        # The one token that vLLM insists on has no state.
        extra = {"kv_transfer_params": {_WANTED: key}}
        parameters = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)
        prompt: Any = {"type": "token", "prompt_token_ids": token_ids}
        self._llm.llm_engine.add_request(key, prompt, parameters)
        self._receivers[key] = receive

    def step(self) -> None:
        """One step of the engine. The states of a request are handed over in the step after its last one."""
        outputs: list[Any] = self._llm.llm_engine.step()
        if self._folder is not None:
            self._read_files(outputs)

    def abandon(self) -> None:
        """Forget what has not been received, after an error or because nobody wants it any more."""
        keys = list(self._receivers)
        self._receivers.clear()
        self._files.clear()
        self._llm.llm_engine.abort_request(keys)
        saves = self._scheduler.connector._pending_saves
        unsaved = set(saves)
        saves.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            # A step that failed has lost the saves that it was to make: nobody would ever report those as done.
            worker: Any = get_kv_transfer_group()
            finished = {key for key, request in self._scheduler.requests.items() if request.is_finished()}
            unsaved |= finished - worker._req_copy_events.keys()
        for key in unsaved:
            self._scheduler._free_blocks(self._scheduler.requests[key])

    def _read_files(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.finished and output.request_id in self._receivers:
                path = Path((output.kv_transfer_params or {})["hidden_states_path"])
                self._files[path] = (output.request_id, output.prompt_token_ids)
        # The scheduler forgets a request when its file is complete, and files are named by its ids.
        for path in [path for path in self._files if path.stem not in self._scheduler.requests]:
            key, token_ids = self._files.pop(path)
            if not path.exists():
                raise RuntimeError(f"vLLM wrote no hidden states for request {key} ({path}); see its log above")
            self._receivers.pop(key)(token_ids, load_file(path)["hidden_states"])
            path.unlink()
            if not self._receivers:
                path.parent.rmdir()


def storage_folder() -> Path:
    """A name for the folder between writing and reading: in memory where there is room for a few batches.

    It exists during a capture only, so that an actor that is killed between two leaves nothing behind.
    """
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 << 30
    return (shared if roomy else Path(tempfile.gettempdir())) / f"hidden-states-{os.getpid()}-{uuid.uuid4().hex}"


class _Written:
    """Stands where the stock connector keeps the event of a device copy; true once a file, if any, is complete too."""

    def __init__(self, copied: Any = None, written: Future[None] | None = None) -> None:
        self.copied, self.written = copied, written

    def query(self) -> bool:
        return (self.copied is None or self.copied.query()) and (self.written is None or self.written.done())

    def synchronize(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class HiddenStatesConnector(stock.ExampleHiddenStatesConnector):
    """The stock connector, also on the CPU, for requests that ask, and in memory where the caller shares the process.

    vLLM makes two of it, for its scheduler and for its worker.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version()
        super().__init__(*args, **kwargs)
        self.in_memory: bool = self._kv_transfer_config.get_from_extra_config(_IN_MEMORY, False)
        self.receivers: dict[str, Receive] = {}  # worker side, in memory: of `Handover`

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Scheduler side. False: nothing to save, the request's blocks are free at once."""
        key = (request.kv_transfer_params or {}).get(_WANTED)
        if key is None:
            self._request_filenames.pop(request.request_id, None)
            return False, None
        found = super().request_finished(request, block_ids)
        if self.in_memory and request.request_id in self._pending_saves:
            self._pending_saves[request.request_id].filename = key  # the one field that travels to the worker
        return found

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Worker side. Only requests with a save may be reported: the scheduler has forgotten the others."""
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        saves = {pending.req_id for pending in getattr(metadata, "pending_saves", ())}
        return super().get_finished(finished_req_ids & saves)

    def _submit_async_write(self, pending: stock.PendingSave) -> None:
        """Worker side: hand over, or begin to write, the states of a request. Its blocks are kept until the event."""
        events: dict[str, Any] = self._req_copy_events
        if self.in_memory:
            events[pending.req_id] = self._hand_over(pending)
        elif self._is_tp_rank_zero and self._kv_cache is not None and self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            # The future is gone if the write was quicker than we are.
            events[pending.req_id] = _Written(events[pending.req_id], self._req_futures.get(pending.req_id))
        elif self._is_tp_rank_zero:
            done: Any = _Written()
            self._write_tensors({"hidden_states": self._states(pending)}, done, pending.filename, None)
            events[pending.req_id] = done

    def _hand_over(self, pending: stock.PendingSave) -> Any:
        receive = self.receivers.pop(pending.filename, None)
        if receive is None:  # abandoned after it was finished
            return _Written()
        token_ids = pending.token_ids.tolist()
        if self._kv_cache is None or not self._kv_cache.is_cuda:
            receive(token_ids, self._states(pending))
            return _Written()
        # A side stream: the copies wait for what the engine has queued so far, and nothing that it queues waits for
        # them. The event keeps the blocks until they are read.
        stream = self._get_copy_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            receive(token_ids, self._states(pending))
        return stream.record_event()

    def _states(self, pending: stock.PendingSave) -> Tensor:
        """States_SLD of a request, gathered from the cache on its device without waiting for it."""
        assert self._kv_cache is not None
        device = self._kv_cache.device
        blocks = torch.tensor(pending.block_ids, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size, device=device)).flatten()
        count = pending.token_ids.shape[0]
        # The stock function knows the cache layout, which differs between versions.
        return stock.extract_from_kv_cache(self._kv_cache, slots[:count], count).contiguous()
