"""Readers of what users and programs wrote: any input gives a result, or a ValueError that names file or field."""

import json
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from domino_core import foreign
from domino_core.checkpoint import read_config, read_provenance, read_state, save_drafter
from domino_core.drafter import Drafter
from domino_core.features import FP8, FeatureMeta, check_fits, read_meta, table
from domino_core.published_config import from_published, to_published
from domino_core.self_check import Sample, SelfCheck
from domino_core.target import load_target, load_tokenizer, load_vocabulary, read_target_config, target_hash
from jobs.overrides import apply, field_types
from jobs.presets import tiny
from pipelines.feature_files import open_source
from pipelines.feature_store import check_cache, read_events, read_ledger, read_manifest, write_manifest, write_table
from pipelines.prompt_files import check_rows, read_prompts
from pipelines.prompts import prepare_row
from serve.config import ServeConfig
from serve.config import read_config as read_serve_config
from tests.fuzzing import JSON, damaged, damaged_bytes, fuzz, read_or_refused
from tests.serving import drafter_config

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]}
ROWS = [
    {"id": "a", "messages": [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Four minutes."}]},
    {"conversations": [{"from": "human", "value": "Tea?"}, {"from": "gpt", "value": "Yes.", "reasoning": "hm"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, CALL], "tools": [TOOL]},
    {"text": "<|im_start|>user\nTea?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"},
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "metadata": {"from": "b"}},
    {"prompt_id": 7, "messages": [{"role": "user", "content": "Tea?"}]},
]
META = FeatureMeta(target="t", target_hash="h", layer_ids=(0, 2), hidden_size=4, tokenizer_hash="k")


def write(path, content) -> None:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


@pytest.fixture(scope="module")
def tokenizer(embedded_target):
    return load_tokenizer(embedded_target)


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory, embedded_target):
    drafter = Drafter(drafter_config(embedded_target), *load_vocabulary(embedded_target))
    return save_drafter(drafter, tmp_path_factory.mktemp("drafter") / "drafter", {"target_hash": "h"})


# Prompts


def prepared(path, tokenizer) -> None:
    """What training does with a file of prompts: each row becomes tokens, or is told to be unusable."""
    job = tiny()
    for found in check_rows(path):
        assert found.problem is None or path.name in found.problem
    for row in read_prompts(path):
        prepare_row(row, tokenizer, job.answer, job.capture)


@fuzz(100)
@given(row=st.sampled_from(ROWS).flatmap(damaged), suffix=st.sampled_from([".jsonl", ".json"]))
def test_prompt_rows(row, suffix, tmp_path, tokenizer):
    path = tmp_path / f"prompts{suffix}"
    write(path, [row] if suffix == ".json" else row)
    read_or_refused(lambda: prepared(path, tokenizer), path.name)


@fuzz(60)
@given(data=damaged_bytes("".join(json.dumps(row) + "\n" for row in ROWS).encode()) | st.binary(max_size=40))
def test_prompt_files_of_any_bytes(data, tmp_path, tokenizer):
    for suffix in (".jsonl", ".json"):
        path = tmp_path / f"prompts{suffix}"
        write(path, data)
        read_or_refused(lambda path=path: prepared(path, tokenizer), path.name)


@fuzz(60)
@given(data=st.data())
def test_prompts_in_parquet(data, tmp_path, tokenizer):
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS[:1] + ROWS[3:]), path)
    write(path, data.draw(damaged_bytes(path.read_bytes(), first=1500)))
    read_or_refused(lambda: prepared(path, tokenizer), path.name)


@fuzz(80)
@given(row=st.sampled_from(ROWS).flatmap(damaged))
def test_prompts_in_a_parquet_of_other_types(row, tmp_path, tokenizer):
    path = tmp_path / "prompts.parquet"
    try:
        pq.write_table(pa.Table.from_pylist([row]), path)
    except (pa.ArrowException, OverflowError, AttributeError, UnicodeError, TypeError):
        return  # what no table holds
    read_or_refused(lambda: prepared(path, tokenizer), path.name)


# Drafters and targets


@fuzz(150)
@given(data=st.data(), speculators=st.booleans())
def test_a_drafters_configuration(data, speculators, embedded_target, drafter_folder, tmp_path):
    own = drafter_config(embedded_target)
    raw = data.draw(damaged(foreign.to_speculators(own, "t", ["Qwen3"]) if speculators else to_published(own)))
    write(tmp_path / "config.json", raw)
    config = read_or_refused(lambda: read_config(tmp_path), "config.json", "drafter configuration")
    if config is not None:
        assert from_published(json.loads(json.dumps(to_published(config)))) == config
        write(tmp_path / "model.safetensors", (drafter_folder / "model.safetensors").read_bytes())
        read_or_refused(lambda: read_state(tmp_path), "model.safetensors", "config")


@fuzz(80)
@given(data=st.data())
def test_a_drafters_weights(data, drafter_folder, tmp_path):
    write(tmp_path / "config.json", (drafter_folder / "config.json").read_bytes())
    valid = (drafter_folder / "model.safetensors").read_bytes()
    write(tmp_path / "model.safetensors", data.draw(damaged_bytes(valid, first=1200) | damaged_header(valid)))
    read_or_refused(lambda: read_state(tmp_path), "model.safetensors")


@st.composite
def damaged_header(draw, valid: bytes) -> bytes:
    """A safetensors file whose header is JSON and says something else."""
    length = struct.unpack("<Q", valid[:8])[0]
    header = json.dumps(draw(damaged(json.loads(valid[8 : 8 + length])))).encode()
    return struct.pack("<Q", len(header)) + header + valid[8 + length :]


@fuzz(80)
@given(data=st.data())
def test_an_index_of_shards_and_provenance(data, drafter_folder, tmp_path):
    write(tmp_path / "config.json", (drafter_folder / "config.json").read_bytes())
    write(tmp_path / "a.safetensors", (drafter_folder / "model.safetensors").read_bytes())
    write(tmp_path / foreign.INDEX, data.draw(damaged({"weight_map": {"fc.weight": "a.safetensors"}})))
    write(tmp_path / "provenance.json", data.draw(damaged_bytes(b'{"target_hash": "h"}')))
    read_or_refused(lambda: read_state(tmp_path), foreign.INDEX, "safetensors")
    read_or_refused(lambda: read_provenance(tmp_path), "provenance.json")


@fuzz(150)
@given(data=st.data())
def test_a_targets_configuration(data, embedded_target, tmp_path):
    raw = json.loads((embedded_target / "config.json").read_text())
    llama = {"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}
    llama["rope_parameters"] |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama["rope_parameters"] |= {"original_max_position_embeddings": 64}
    raw = data.draw(st.sampled_from([raw, raw | llama]).flatmap(damaged))
    write(tmp_path / "config.json", raw)
    write(
        tmp_path / "generation_config.json", data.draw(st.just({"eos_token_id": [1]}) | damaged({"eos_token_id": [1]}))
    )
    config = read_or_refused(lambda: read_target_config(tmp_path), str(tmp_path))
    if config is not None:
        json.dumps({"eos": config.eos_token_ids, "length": config.max_position_embeddings + config.vocab_size})


@fuzz(60)
@given(data=st.data())
def test_a_targets_weights(data, tiny_target_dir, tmp_path):
    write(tmp_path / "config.json", (tiny_target_dir / "config.json").read_bytes())
    valid = (tiny_target_dir / "model.safetensors").read_bytes()
    write(tmp_path / "model.safetensors", data.draw(damaged_bytes(valid, first=2000) | damaged_header(valid)))
    read_or_refused(lambda: target_hash(tmp_path), str(tmp_path))
    read_or_refused(lambda: load_target(tmp_path), str(tmp_path))


@fuzz(60)
@given(index=damaged({"weight_map": {"model.norm.weight": "model.safetensors"}}) | JSON)
def test_a_targets_index(index, tiny_target_dir, tmp_path):
    for name in ("config.json", "model.safetensors"):
        write(tmp_path / name, (tiny_target_dir / name).read_bytes())
    write(tmp_path / "model.safetensors.index.json", index)
    read_or_refused(lambda: load_target(tmp_path), str(tmp_path))


# Features


@fuzz(80)
@given(values=damaged(META.to_dict()) | JSON)
def test_what_features_say_of_themselves(values, tmp_path):
    write(tmp_path / "manifest.json", values)
    schema = pa.schema([], metadata={b"domino_features": json.dumps(values).encode()})
    for read, name in (
        (lambda: read_meta(schema, "rows.parquet"), "rows.parquet"),
        (lambda: read_manifest(tmp_path), "manifest.json"),
    ):
        meta = read_or_refused(read, name)
        if meta is not None:
            assert FeatureMeta.from_dict(meta.to_dict()) == meta
            assert meta.feature_width > 0
            read_or_refused(lambda meta=meta: check_fits(meta, drafter_like(), "h"), "features do not fit")
    read_or_refused(lambda: check_cache(tmp_path, META), "manifest.json", str(tmp_path))


def drafter_like():
    class Reads:
        target_layer_ids, hidden_size = META.layer_ids, META.hidden_size

    return Reads()


@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
@fuzz(60)
@given(data=st.data())
def test_feature_files(data, dtype, tmp_path):
    meta = FeatureMeta(**(vars(META) | {"dtype": dtype}))
    row = {"sample_id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "features": torch.ones(3, 2, 4)}
    for old in tmp_path.iterdir():
        old.unlink()
    write_manifest(tmp_path, meta)
    path = write_table(tmp_path, table(meta, [row, row | {"sample_id": "b"}]))
    write(path, data.draw(damaged_bytes(path.read_bytes(), first=3000)))
    read_or_refused(lambda: list(open_source("domino", tmp_path, meta, 97)), str(tmp_path), "sample id")


@fuzz(60)
@given(data=st.data())
def test_events_and_ledgers(data, tmp_path):
    events = {"answered": ["a"], "captured": ["b"], "failed": {"c": "why"}, "skipped": {}}
    write(tmp_path / "events.json", data.draw(damaged(events) | JSON))
    write(tmp_path / "ledger", data.draw(damaged(["a", "b"]) | JSON))
    read_or_refused(lambda: read_events(tmp_path).summary(), "events.json")
    read_or_refused(lambda: read_ledger(tmp_path / "ledger"), "ledger")


@fuzz(100)
@given(data=st.data())
def test_a_stored_self_check(data):
    own = SelfCheck(max_tokens=4, samples=(Sample(prompt_ids=(1, 2), rounds=2, accepted_at=(1, 0)),))
    text = json.dumps(data.draw(damaged(json.loads(own.to_json())) | JSON))
    found = read_or_refused(lambda: SelfCheck.from_json(text), "self-check")
    if found is not None:
        found.expected(read_or_refused(lambda: found.requests(64), "self-check") or [], None)


# Settings

TEXTS = st.text(max_size=8) | st.sampled_from(
    ["nan", "inf", "-1", "0", "1e400", "9" * 5000, "none", "true", "1,2", "()"]
)


@fuzz(100)
@given(data=st.data())
def test_overrides(data):
    keys = st.sampled_from(sorted(field_types(tiny()))) | st.text(max_size=10)
    given_ = [f"{key}={text}" for key, text in data.draw(st.lists(st.tuples(keys, TEXTS), min_size=1, max_size=2))]
    named = [each.partition("=")[0] for each in given_]
    words = {*named, *map(repr, named), *(key.split(".")[-1] for key in named)}
    read_or_refused(lambda: apply(tiny(), given_), *words)


@fuzz(80)
@given(values=damaged({"target": "t", "drafter": "none", "max_rows": 4, "port": 8000, "num_verify": "auto"}))
def test_serving_settings(values):
    names = [*ServeConfig.__dataclass_fields__, *(values if isinstance(values, dict) else [])]
    read_or_refused(lambda: read_serve_config(values), *names, "settings")
