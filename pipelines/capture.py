"""A target in a vLLM engine: it answers prompts, and gives the hidden states of every token of prompt and answer.

One engine start serves both. The states come from a teacher-forced prefill of the finished conversation, not from the
decoding steps: it is the same computation for answers of ours and of others, and it covers the last token too.

Letters: S tokens of a sequence · L tapped layers in ascending depth · D hidden size.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from domino_core.features import StoredDtype
from pipelines.capture_stream import EngineClock, Slice, run_ahead
from pipelines.prompt_files import Chunk

if TYPE_CHECKING:
    from ray.data import Dataset

    from pipelines.regenerate import AnswerConfig

SLICES_AHEAD = 4  # of an engine's results may wait to be taken; several become complete in one step of it
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """The capture engines: how many, how large, and the longest sequence they take."""

    max_length: int = 2048  # tokens of a training sequence; longer ones are cut
    num_actors: int = 1
    max_actors: int | None = None  # more are started while prompts wait; None: num_actors, a fixed pool
    batch_size: int = 128  # prompts per call of an actor; a cache file holds at most as many
    max_num_seqs: int = 128  # sequences in flight inside an engine
    max_num_batched_tokens: int = 8192  # of one vLLM step; raised to max_length if smaller
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # of the engine; auto: the checkpoint's on a GPU, float32 on the CPU
    )
    weights: Literal["checkpoint", "random"] = "checkpoint"  # random: of the target's shapes, to measure without one
    features_dtype: StoredDtype = "bfloat16"  # of what is stored; float8_e4m3fn takes half of the bytes
    cpus_per_actor: float = 1
    gpus_per_actor: float = 0  # for one tensor-parallel rank; 0 runs on the CPU
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.85
    kv_cache_bytes: int = 512 << 20  # on the CPU, where vLLM would take nearly all memory
    enforce_eager: bool = True  # compiling and graphs cost a minute at the start and help decoding, not prefill
    slice_bytes: int = 256 << 20  # of features that leave the engine together, as one block of the stream or one file
    allow_uniform_mask: bool = False  # accept rows in which every token, or none, is supervised

    def __post_init__(self) -> None:
        positive = ("batch_size", "max_num_seqs", "max_num_batched_tokens", "cpus_per_actor", "tensor_parallel_size")
        for name in (*positive, "kv_cache_bytes", "slice_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"capture.{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.gpu_memory_utilization <= 1 or self.gpus_per_actor < 0:
            raise ValueError(
                f"capture.gpu_memory_utilization={self.gpu_memory_utilization}, gpus_per_actor={self.gpus_per_actor}: "
                "expected a share of the card between 0 and 1, and no negative number of cards"
            )
        if self.max_length < 4:
            raise ValueError(f"capture.max_length={self.max_length}: a block needs context, an anchor and a label")
        if self.num_actors < 1 or (self.max_actors or self.num_actors) < self.num_actors:
            raise ValueError(
                f"capture.num_actors={self.num_actors}, max_actors={self.max_actors}: need 1 <= num <= max"
            )
        if self.gpus_per_actor == 0 and self.tensor_parallel_size != 1:
            raise ValueError(f"capture.tensor_parallel_size={self.tensor_parallel_size} needs capture.gpus_per_actor=1")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Tokens that the target generated, with its end-of-turn token if it came to one (finish_reason "stop")."""

    token_ids: list[int]
    finish_reason: str


class TargetActor:
    """One vLLM engine in this process. Holds one core, or the GPUs that it was given, until the process ends.

    The engine lives in a thread of its own, so that it computes while callers carry its results away. Callers may be
    several threads: they take turns. Without `layer_ids` it only answers.
    """

    def __init__(
        self,
        target: str,
        layer_ids: tuple[int, ...],
        config: CaptureConfig,
        *,
        seed: int = 0,
    ) -> None:
        # Before the import: in one process the engine's scheduler is within reach, and starts in seconds, not a minute.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from domino_core.target import read_target_config
        from domino_core.vllm import hidden_states

        hidden_states.check_version()
        self.config = config
        self.num_layers = len(layer_ids)
        self.eos_token_ids = list(read_target_config(target).eos_token_ids)
        self.folder = hidden_states.storage_folder() if config.tensor_parallel_size > 1 else None
        self.clock = EngineClock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._thread.submit(self._start, target, layer_ids, seed).result()

    def _start(self, target: str, layer_ids: tuple[int, ...], seed: int) -> None:
        import vllm

        from domino_core.target import resolve_model
        from domino_core.vllm import hidden_states

        config = self.config
        taps: dict[str, Any] = hidden_states.engine_arguments(layer_ids, self.folder) if layer_ids else {}
        self.llm = vllm.LLM(
            model=str(resolve_model(target)),
            skip_tokenizer_init=True,
            seed=seed,
            load_format="dummy" if config.weights == "random" else "auto",
            disable_log_stats=True,
            max_num_seqs=config.max_num_seqs,
            # One position more than a sequence: a capture request must generate one token.
            max_model_len=config.max_length + 1,
            max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_length + 1),
            # A sequence prefilled in pieces has been seen to give other states with other versions of vLLM.
            enable_chunked_prefill=False,
            enforce_eager=config.enforce_eager,
            enable_prefix_caching=False,  # cached tokens never run, so they have no hidden states
            **placement(config),
            **taps,
        )
        if layer_ids:
            hidden_states.decode_plainly(self.llm)
            self.handover = hidden_states.Handover(self.llm, self.folder)
        engine = self.llm.llm_engine.vllm_config
        assert not engine.cache_config.enable_prefix_caching
        assert not engine.scheduler_config.enable_chunked_prefill
        self.hidden_size, self.dtype = engine.model_config.get_hidden_size(), engine.model_config.dtype

    def answer(self, prompts: Sequence[list[int]], keys: Sequence[str], config: AnswerConfig) -> list[Answer]:
        """The target's answers to tokenised prompts, at most up to `max_length` tokens in all, in the order given.

        `keys` (sample ids) seed the sampling of each answer, so that it does not depend on its batch.
        """
        import vllm

        parameters = [
            vllm.SamplingParams(
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                max_tokens=min(config.max_tokens, self.config.max_length - len(prompt)),
                seed=answer_seed(config.seed, key),
                stop_token_ids=self.eos_token_ids,
                detokenize=False,
            )
            for prompt, key in zip(prompts, keys, strict=True)
        ]
        requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._run(lambda: self.llm.generate(requests, parameters, use_tqdm=False))
        completions = [output.outputs[0] for output in outputs]
        return [Answer(token_ids=list(c.token_ids), finish_reason=str(c.finish_reason)) for c in completions]

    def capture(self, sequences: Sequence[list[int]]) -> list[Tensor]:
        """States_SLD of every token of every sequence, on the CPU in the engine's dtype, in the order given."""
        (captured,) = self.stream([sequences], self.dtype) if sequences else [None]
        if captured is None:
            return []
        captured.wait()
        return list(captured.values_TLD.split([len(sequence) for sequence in sequences]))

    def stream(self, parts: Iterable[Sequence[list[int]]], dtype: torch.dtype) -> Generator[Slice, None, None]:
        """The states of each part, in `dtype`, in the order given and as they are captured.

        The engine goes on while the caller is busy with a slice, until SLICES_AHEAD of them wait.
        """
        return run_ahead(self._thread, self._slices(parts, dtype), SLICES_AHEAD, self.clock)

    def _slices(self, parts: Iterable[Sequence[list[int]]], dtype: torch.dtype) -> Generator[Slice, None, None]:
        """In the engine's thread: it always has the sequences of its next steps."""
        filling: deque[Slice] = deque()
        enough = 3 * max(self.config.max_num_batched_tokens, self.config.max_length)
        source = iter(parts)
        try:  # whatever ends this, the engine must not go on with sequences that nobody waits for
            while True:
                while sum(part.num_tokens for part in filling) < enough and (part := next(source, None)) is not None:
                    filling.append(self._submit(part, dtype))
                if not filling:
                    break
                self.handover.step()
                while filling and filling[0].complete:
                    self.clock.rows += len(filling[0].sequences)
                    self.clock.tokens += filling[0].num_tokens
                    yield filling.popleft()
        finally:
            if filling:
                self.handover.abandon()

    def _submit(self, sequences: Sequence[list[int]], dtype: torch.dtype) -> Slice:
        longest = max(map(len, sequences))
        assert longest <= self.config.max_length, f"{longest} tokens, the engine takes {self.config.max_length}"
        part = Slice(sequences, (self.num_layers, self.hidden_size), dtype, pinned=self.config.gpus_per_actor > 0)
        for sequence, receive in zip(sequences, part.receivers(), strict=True):
            self.handover.submit(sequence, receive)
        return part

    def _run(self, work: Callable[[], T]) -> T:
        """`work` in the engine's thread, after what it is doing."""

        def timed() -> T:
            since = time.perf_counter()
            result = work()
            self.clock.working += time.perf_counter() - since
            return result

        return self._thread.submit(timed).result()


def chunk_dataset(chunks: Sequence[Chunk], *, preserve_order: bool = False) -> Dataset:
    """A Ray dataset of the chunks of a prompt file, one block each: what is shared out, retried and written at once."""
    import ray

    dataset = ray.data.from_items([asdict(chunk) for chunk in chunks], override_num_blocks=len(chunks))
    dataset.context.execution_options.preserve_order = preserve_order
    # Jobs show one bar of their own; Ray Data's would say the same in forty lines.
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # "Progress bars disabled"
    return dataset


def on_engines(
    dataset: Dataset, actor: type, config: CaptureConfig, *, rows_per_call: int = 1, calls: int = 1, **settings: Any
) -> Dataset:
    """Send a dataset, `rows_per_call` rows as an Arrow table, through a pool of `actor(**settings)`, each an engine.

    One row is for datasets of chunks. Ray puts blocks together until there are so many rows: more than one would be
    chunks by the hundred for the first engine, none for the others, and nothing written for hours.
    calls: at a time in each actor. With two, the engine begins with a block while the last results of the one before it
    are carried away; it must be the actor that lets them take turns.
    """
    import ray

    size = {"min_size": config.num_actors, "max_size": config.max_actors or config.num_actors}
    threads = {"max_concurrent_calls_per_actor": calls, "enable_true_multi_threading": True} if calls > 1 else {}
    return dataset.map_batches(
        actor,
        fn_constructor_kwargs=settings,
        batch_size=rows_per_call,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(**size, **threads),
        num_cpus=config.cpus_per_actor,
        num_gpus=config.gpus_per_actor * config.tensor_parallel_size or None,
    )


def answer_seed(seed: int, key: str) -> int:
    """A sampling seed of its own for every sample, the same in every run."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:4], "big")


def placement(config: CaptureConfig) -> dict[str, Any]:
    """Device, memory and number format of the engine."""
    if config.gpus_per_actor:
        # Ray has set CUDA_VISIBLE_DEVICES; a second Ray inside the actor is what vLLM would choose for several GPUs.
        backend = {"distributed_executor_backend": "mp"} if config.tensor_parallel_size > 1 else {}
        return {
            "dtype": config.dtype,
            "tensor_parallel_size": config.tensor_parallel_size,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            **backend,
        }
    # float32 on every CPU: bfloat16 is slower without hardware for it, and results would differ between machines.
    dtype = "float32" if config.dtype == "auto" else config.dtype
    return {"dtype": dtype, "kv_cache_memory_bytes": config.kv_cache_bytes}
