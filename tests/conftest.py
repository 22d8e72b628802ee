"""Shared fixtures: tiny real models, the reference tensors, one local Ray for the tests that need it."""

import os
from pathlib import Path

# Before anything that reads them is imported. PYTHONPATH: for the processes that tests start, Ray's workers among them.
os.environ.update(
    PYTHONPATH=f"{Path(__file__).resolve().parent.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(
        os.pathsep
    ),
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH="serve.proxy:middlewares",  # as where jobs start Ray
    RAY_worker_niceness="0",  # Ray gives way to others by default: to the tests of the other worker, on two cores
    MLFLOW_DISABLE_TELEMETRY="true",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

import pytest
import torch

if not torch.cuda.is_available():
    # vLLM compiles small functions when they are first called, on a CPU for a minute; torch reads this only then.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"

ROOT = Path(__file__).resolve().parent.parent


# What takes longest comes first, so that two workers end together.
FIRST = ["fit", "jobs", "verify", "serve_cluster", "serve_vllm", "build_features", "vllm_drafting", "serve_sampling"]
FIRST += ["self_prompts"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where torch sees no card."""
    rank = {f"test_{name}.py": number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """Tensors computed by the published implementation on a tiny model (tests/data/reference/README.md)."""
    return ROOT / "tests" / "data" / "reference"


@pytest.fixture(scope="session")
def embedded_target() -> Path:
    """The small Qwen3 model that ships with the repository, with its tokenizer and chat template."""
    return ROOT / "assets" / "tiny-qwen3"


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 causal LM (4 layers, hidden 48, vocabulary 97, float32), Hugging Face layout, no tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("tiny-target")
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def local_ray():
    """One local Ray with four logical CPUs (two are not enough for Train workers beside a Data stream)."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=512 << 20,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()
