"""Everything that identifies a target and brings it into memory: files, configuration, weights, hash, tokenizer, chat.

The model itself is target_model.py. This is the one file of domino_core that uses `transformers`, for tokenizers alone.

D hidden · V vocabulary
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from domino_core.config import DTYPES
from domino_core.foreign import INDEX, WEIGHTS, read_index
from domino_core.json_files import is_kind, read_object
from domino_core.published_config import only_full_attention
from domino_core.target_model import Llama3Rope, Target, TargetConfig

ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM")
HEADS, LENGTH = "num_attention_heads", "max_position_embeddings"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", HEADS, LENGTH)
LARGEST_NUMBER = 2.0**40  # no size of a model, and no theta of its rotary embedding, is near it


def resolve_model(model: str | Path, *, weights: bool = True) -> Path:
    """The local folder of a model given as a folder or a Hub id; fetches it if allowed to (`HF_HUB_OFFLINE`).

    weights=False is enough for configuration and tokenizer. ValueError if there is no such model.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json; give the folder that a model was saved to")
        return folder
    if folder.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") > 1:
        raise ValueError(f"model folder {model} does not exist")
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]

    patterns = ["*.json", "*.jinja", "*.txt", "*.model", *(["*.safetensors"] if weights else [])]
    try:  # the network, the Hub and its cache are the boundary
        # Folders such as original/ hold the same weights once more, in another layout.
        return Path(snapshot_download(str(model), allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model} is neither a local folder nor a model that the Hugging Face Hub gives us: "
            f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}. Without a network, download it "
            f"elsewhere (hf download {model}) and pass the folder"
        ) from error


def read_target_config(model: str | Path) -> TargetConfig:
    """Read and check config.json; what would make the model compute something that Target does not is an error."""
    folder = resolve_model(model, weights=False)
    raw = read_object(folder / "config.json")
    architectures: Any = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{model}: architecture {architecture} is not supported; use one of {', '.join(ARCHITECTURES)}"
        )
    unsupported: dict[str, Any] = {
        "attention_bias": raw.get("attention_bias"),
        "mlp_bias": raw.get("mlp_bias"),
        "use_sliding_window": raw.get("use_sliding_window"),
        "layer_types": not only_full_attention(raw.get("layer_types")) and raw["layer_types"],
        "hidden_act": raw.get("hidden_act", "silu") != "silu" and raw["hidden_act"],
        "quantization_config": raw.get("quantization_config"),
    }
    for key, value in unsupported.items():
        if value:
            raise ValueError(f"{model}: {key}={value} is not supported; use a target without it")
    if lacking := sorted(set(SIZES) - raw.keys()):
        raise ValueError(f"{model}: config.json lacks {', '.join(lacking)}: download it again, or name another target")
    sizes = {name: _number(raw, name, int, model) for name in SIZES}
    heads = sizes[HEADS]
    theta, llama3 = _read_rope(raw, str(model))
    dtype, tied = raw.get("dtype") or raw.get("torch_dtype") or "float32", raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool) or dtype not in DTYPES:
        raise ValueError(
            f"{model}: tie_word_embeddings={tied!r} must be true or false, dtype={dtype!r} one of {', '.join(DTYPES)}"
        )
    return TargetConfig(
        architecture=architecture,
        **sizes,
        num_key_value_heads=_number({"num_key_value_heads": heads} | _given(raw), "num_key_value_heads", int, model),
        head_dim=_number({"head_dim": sizes["hidden_size"] // heads} | _given(raw), "head_dim", int, model),
        rms_norm_eps=_number({"rms_norm_eps": 1e-6} | raw, "rms_norm_eps", float, model),
        rope_theta=theta,
        rope_llama3=llama3,
        tie_word_embeddings=tied,
        eos_token_ids=_read_eos(raw, folder),
        dtype=dtype,
    )


def _given(raw: dict[str, Any]) -> dict[str, Any]:
    """Without keys that are null or 0, which say that the usual value is meant."""
    return {key: value for key, value in raw.items() if value}


def _number(raw: dict[str, Any], key: str, kind: type, where: str | Path) -> Any:
    """A number above 0. ValueError if it is missing or anything else."""
    value: Any = raw.get(key)
    if not is_kind(kind, value) or not 0 < value <= LARGEST_NUMBER:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{where}: {key}={value!r:.80} must be {wanted} above 0 (and at most {LARGEST_NUMBER:g})")
    return value  # as it stands there: target_hash is made of it


def _read_rope(raw: dict[str, Any], model: str) -> tuple[float, Llama3Rope | None]:
    """theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope: dict[str, Any] = {"rope_theta": raw.get("rope_theta", 10000.0)}
    for key in ("rope_scaling", "rope_parameters"):
        found = raw.get(key) or {}
        if not isinstance(found, dict):
            raise ValueError(f"{model}: {key}={found!r:.80} must be an object")
        rope.update(found)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{model}: rope scaling {kind!r} is not supported (default and llama3 are); "
            "to use the model at its original length, remove the scaling from its config.json"
        )
    theta = float(_number(rope, "rope_theta", float, model))
    if kind == "default":
        return theta, None
    factors = {name: _number(rope, name, float, model) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    length: int = _number(rope, "original_max_position_embeddings", int, model)
    return theta, Llama3Rope(**factors, original_max_position_embeddings=length)


def _read_eos(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Every id that ends a text or a turn: those of generation_config.json first, then config.json's."""
    generation = folder / "generation_config.json"
    found: list[int] = []
    for source in (read_object(generation) if generation.is_file() else {}, raw):
        ids: Any = source.get("eos_token_id")
        for token in [] if ids is None else ids if isinstance(ids, list) else [ids]:
            if not is_kind(int, token) or not 0 <= token < 2**31:
                raise ValueError(f"{folder}: eos_token_id={ids!r:.80} must be a token id, or a list of them")
            found.append(token)
    return tuple(dict.fromkeys(found))


class TensorFiles:
    """The tensors of a checkpoint folder by name, single file or sharded, read one at a time."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        names = set(read_index(index).values()) if index.is_file() else {WEIGHTS}
        for name in names:
            if not (folder / name).is_file():
                raise ValueError(f"{folder} has no {name}; the weights must be safetensors, complete")
        self.folder = folder
        self.files = [folder / name for name in sorted(names)]
        handles: list[Any] = [_open(file) for file in self.files]
        self.by_name: dict[str, Any] = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118
        self.unread = set(self.by_name)

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self.by_name:
            raise ValueError(f"{self.folder} lacks the tensor {name}")
        tensor: Tensor = self.by_name[name].get_tensor(name)
        if tensor.shape != shape:
            raise ValueError(f"{self.folder}: {name} has shape {tuple(tensor.shape)}, config.json implies {shape}")
        self.unread.discard(name)
        return tensor


def _open(path: Path) -> Any:
    """A safetensors file, which stays open; ValueError, which names it, if it is damaged."""
    try:  # a truncated download is the user's to repair
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def load_target(model: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Target:
    """Load a model by Hub id or folder. dtype None: the checkpoint's on an accelerator, float32 on a CPU."""
    folder = resolve_model(model)
    config = read_target_config(folder)
    files = TensorFiles(folder)
    target = Target(config, files, device=device, dtype=_dtype(config, device, dtype))
    # lm_head of a tied model is the embedding once more; old Llama files carry their rotary buffers.
    ignored = {name for name in files.unread if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")}
    if files.unread - ignored:
        raise ValueError(
            f"{folder} has tensors that {config.architecture} does not use: {sorted(files.unread - ignored)[:5]}"
        )
    return target


def load_vocabulary(
    model: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(embed [V, D], lm_head [V, D]) alone, for training a drafter; one tensor twice if the model ties them."""
    folder = resolve_model(model)
    config = read_target_config(folder)
    files, shape = TensorFiles(folder), (config.vocab_size, config.hidden_size)
    wanted = _dtype(config, device, dtype)
    embed_VD = files("model.embed_tokens.weight", *shape).to(device, wanted)
    return embed_VD, embed_VD if config.tie_word_embeddings else files("lm_head.weight", *shape).to(device, wanted)


def _dtype(config: TargetConfig, device: torch.device | str, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return torch.float32 if torch.device(device).type == "cpu" else getattr(torch, config.dtype)


def target_hash(model: str | Path) -> str:
    """What a drafter and its features are tied to: 16 hex digits over the target's configuration and weights.

    Hashed are the fields of TargetConfig that decide the computation and, for every tensor in the order of names, its
    name, type, shape and three 256-byte samples (start, middle, end). That reads no whole files, does not depend on
    sharding, file names or the library that saved them, and any training step changes it. No proof against malice.
    """
    folder = resolve_model(model)
    # Where a text ends and in which type it is served are no part of what the layers compute.
    described = asdict(replace(read_target_config(folder), eos_token_ids=(), dtype=""))
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    tensors = sorted(sample for handle in TensorFiles(folder).files for sample in _tensor_samples(handle))
    for name, kind, shape, sample in tensors:
        digest.update(f"{name} {kind} {shape}".encode() + sample)
    return digest.hexdigest()[:16]


def _tensor_samples(path: Path) -> Iterator[tuple[str, str, list[int], bytes]]:
    """(name, type, shape, sampled bytes) of each tensor of a safetensors file: 8 bytes of length, JSON header, data."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            sample = b""
            for offset in (start, (start + end) // 2, end - 256):
                file.seek(8 + header_bytes + max(offset, start))
                sample += file.read(min(256, end - max(offset, start)))
            yield name, entry["dtype"], entry["shape"], sample


def load_tokenizer(model: str | Path) -> Any:
    """The model's tokenizer (transformers' fast tokenizer)."""
    from transformers import AutoTokenizer

    folder = resolve_model(model, weights=False)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(
            f"{folder} has no tokenizer; copy tokenizer.json and tokenizer_config.json beside its config.json"
        )
    try:  # a damaged file is the user's to repair
        return AutoTokenizer.from_pretrained(folder)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    except (ValueError, OSError) as error:
        told = str(error).partition("\n")[0]
        raise ValueError(f"{folder}: its tokenizer cannot be read ({told}); copy tokenizer.json there again") from error


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    enable_thinking: bool = False,
) -> list[int]:
    """The prompt ids of a conversation, up to where the assistant's answer begins. ValueError as in the text's.

    Training and serving both render here: a drafter that has seen another template accepts far less. Thinking is off by
    default, as the published drafters were trained.
    """
    text = apply_chat_template(
        tokenizer, messages, tools=tools, enable_thinking=enable_thinking, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    enable_thinking: bool,
    add_generation_prompt: bool,
) -> str:
    """A conversation as the target's own chat template writes it. ValueError if it has none, or refuses."""
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; send the text as a plain prompt"
        )
    try:  # templates are the model's own programs, and some raise what they do not like
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template of {tokenizer.name_or_path} refuses the conversation: {error}") from error
    return text


def tokenizer_hash(tokenizer: Any) -> str:
    """16 hex digits over the vocabulary (token → id) and the chat template."""
    described = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
    return hashlib.sha256(described.encode()).hexdigest()[:16]
