"""The estimate agrees with published and measured figures, with what is really written, and needs no weights."""

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from domino_core import features
from domino_core.config import DrafterConfig, default_target_layer_ids
from domino_core.published_config import from_published, to_published
from domino_core.target_model import TargetConfig
from pipelines import estimate as est
from pipelines.bench_shapes import SHAPES
from pipelines.capture import CaptureConfig
from pipelines.feature_store import write_table
from pipelines.rates import CPU_RATES, GPU_RATES
from pipelines.regenerate import AnswerConfig
from pipelines.train_config import TrainConfig

QWEN3_8B = SHAPES["qwen3_8b"].target
TRAINING = TrainConfig(epochs=3, num_anchors=256, num_workers=7)


def drafter(target: TargetConfig = QWEN3_8B) -> DrafterConfig:
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=5,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=default_target_layer_ids(target.num_hidden_layers, 5),
        mask_token_id=151669,
    )


def data(**changes) -> est.DataSize:
    values = {"rows": 1000, "to_answer": 0, "unusable": 0, "tokens": 550_000.0, "answer_tokens": 0.0, "longest": 3000}
    values |= {"blocks": 256_000.0, "context": 256_000.0 * 300}
    return est.DataSize(**(values | {"sampled": 1000} | changes))


def estimated(found: est.DataSize, folder, **capture) -> est.Estimate:
    settings: dict[str, Any] = {"gpus_per_actor": 1, "batch_size": 128} | capture
    config = CaptureConfig(**settings)
    return est.estimate(QWEN3_8B, drafter(), found, config, rates=GPU_RATES, train=TRAINING, folder=folder)


def test_measured_figures_come_out(tmp_path):
    found = estimated(data(tokens=1_000_000.0), tmp_path)
    assert found.bytes_per_token == 40_960
    # 41,100 tokens/s in rows of 1,000, on the card that the rate was measured on.
    assert 1e6 / found.capture_seconds == pytest.approx(41_100, rel=0.02)
    assert found.capture_gb_per_s == pytest.approx(41_100 * 40_960 / 1e9, rel=0.02)
    assert found.extracted_rows_per_s == pytest.approx(41.1, rel=0.02)
    assert found.train_gb_per_s == pytest.approx(found.trained_rows_per_s * 1000 * 40_960 / 1e9)
    # Steps of 14 rows, the last one of an epoch smaller.
    assert found.train_seconds == pytest.approx(3 * 72 * found.step.total)


@pytest.mark.parametrize(
    ("capture", "training", "bound"),
    [
        ({}, {"num_workers": 1}, "training"),
        ({}, {"num_workers": 7}, "extraction"),
        ({}, {"num_workers": 1, "num_anchors": 32, "batch_size": 8}, "extraction"),
        ({"num_actors": 4}, {"num_workers": 4}, "training"),
    ],
)
def test_the_slower_side_is_named(tmp_path, capture, training, bound):
    """One engine on a card gives 41 rows of 1,000 tokens a second, one worker on a card takes 11."""
    settings = replace(TRAINING, epochs=1, **training)
    size = data(tokens=1_000_000.0, blocks=1000.0 * settings.num_anchors, context=300_000.0 * settings.num_anchors)
    config = CaptureConfig(gpus_per_actor=1, **capture)
    found = est.estimate(QWEN3_8B, drafter(), size, config, rates=GPU_RATES, train=settings, folder=tmp_path)
    engine = found.answer_seconds + found.capture_seconds
    trainer = 1000 / found.trained_rows_per_s
    assert found.bound == bound == ("extraction" if engine > trainer else "training")
    assert found.stream_seconds == max(engine, trainer)
    assert found.balance.trainer_waited == pytest.approx(max(0.0, 1 - trainer / engine))
    assert found.balance.engines_blocked == pytest.approx(max(0.0, 1 - engine / trainer))
    told = est.describe_estimate(found, size)
    assert f"{bound} is the slower side" in told
    assert found.advice in told


def test_answering_follows_the_measured_steps(tmp_path):
    open_rows = data(to_answer=1000, answer_tokens=256_000.0)
    rate = {n: 256_000 / estimated(open_rows, tmp_path, max_num_seqs=n).answer_seconds for n in (1, 32)}
    assert rate[1] == pytest.approx(147, rel=0.03)
    assert rate[32] == pytest.approx(4088, rel=0.03)
    # More engines share the work.
    one, two = (estimated(open_rows, tmp_path, num_actors=n) for n in (1, 2))
    assert one.answer_seconds == pytest.approx(2 * two.answer_seconds)
    assert one.capture_seconds == pytest.approx(2 * two.capture_seconds)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_bytes_are_those_of_a_written_cache(tmp_path, dtype):
    meta = features.FeatureMeta(
        target="t", target_hash="h", layer_ids=(0, 1), hidden_size=64, tokenizer_hash="k", dtype=dtype
    )
    rows = [
        {
            "sample_id": f"row-{index}",
            "input_ids": [1] * (100 + index),
            "loss_mask": [1] * (100 + index),
            "features": torch.randn(100 + index, 2, 64),
        }
        for index in range(40)
    ]
    written = write_table(tmp_path, features.table(meta, rows)).stat().st_size
    tokens = float(sum(len(row["input_ids"]) for row in rows))
    small = replace(QWEN3_8B, hidden_size=64)
    config = from_published(to_published(drafter(small)))
    config = type(config)(**{**vars(config), "target_layer_ids": (0, 1)})
    found = est.estimate(
        small,
        config,
        data(rows=40, tokens=tokens),
        CaptureConfig(features_dtype=dtype),
        rates=CPU_RATES,
        train=TRAINING,
        folder=tmp_path / "not" / "there",
    )
    assert found.feature_bytes == pytest.approx(written, rel=0.01)
    assert found.free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_rows_are_counted_as_the_stream_will_treat_them(embedded_target):
    from domino_core.target import load_tokenizer

    asked = {"role": "user", "content": "import os"}
    rows = [
        {"messages": [asked]},
        {"messages": [asked, {"role": "assistant", "content": "import sys\nimport re"}]},
        {"messages": [{"role": "user", "content": "import os\n" * 300}]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 0, 0]},
    ]
    rows = [row | {"sample_id": str(index), "source": f"f:{index}"} for index, row in enumerate(rows)]
    tokenizer = load_tokenizer(str(embedded_target))
    found = est.measure_data(
        rows, 10, tokenizer, AnswerConfig(max_tokens=50), CaptureConfig(max_length=100), mean_answer=20, num_anchors=8
    )
    # Five rows were looked at, ten are there: everything doubles.
    assert (found.rows, found.to_answer, found.unusable, found.sampled) == (10, 2, 6, 5)
    assert found.answer_tokens == 40
    # Of the usable rows, in tokens: answers to come have 19 places, the third has none of two neighbours.
    assert 2 * 8 < found.blocks <= 2 * 2 * 8
    assert found.context > 0
    everything = est.measure_data(
        rows[:2],
        2,
        tokenizer,
        AnswerConfig(max_tokens=50, when="always"),
        CaptureConfig(max_length=100),
        mean_answer=70,
        num_anchors=8,
    )
    assert (everything.to_answer, everything.answer_tokens) == (2, 100)


def test_the_job_needs_no_weights(embedded_target, tmp_path, capsys):
    from jobs.estimate import main

    bare = tmp_path / "bare"
    shutil.copytree(embedded_target, bare, ignore=shutil.ignore_patterns("*.safetensors", "prompts"))
    asked = embedded_target / "prompts" / "train.jsonl"
    figures = tmp_path / "figures.json"
    arguments = [f"target={bare}", f"data={asked}", f"root={tmp_path}", "num_rows=30", "--answer-tokens", "80"]
    main([*arguments, "--json", str(figures)])
    found = json.loads(figures.read_text())
    assert found["estimate"]["bytes_per_token"] == 2 * 3 * 192
    assert (found["data"]["rows"], found["data"]["to_answer"]) == (30, 30)
    assert "bytes a token" in capsys.readouterr().out
    main([*arguments, "--plan"])
    assert "would tokenise" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf"])
@pytest.mark.parametrize("flag", ["--answer-tokens", "--prefill-tflops", "--train-tflops", "--bus-gb"])
def test_figures_that_cannot_be_meant_are_refused(flag, value):
    from jobs.estimate import main

    with pytest.raises(ValueError, match=f"{flag} {value}: must be a number above 0"):
        main([flag, value])


def test_there_is_no_estimate_of_no_rows(embedded_target, tmp_path):
    from jobs.estimate import main

    with pytest.raises(ValueError, match="--sample 0"):
        main(["--sample", "0"])
    short = [f"target={embedded_target}", f"root={tmp_path}", "num_rows=5", "capture.max_length=20"]
    with pytest.raises(ValueError, match="none of 5 rows can be trained on"):
        main(short)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1_234_567, "1.2 MB"), (32e12, "32.0 TB"), (3e15, "3.0 PB")]
)
def test_bytes_for_people(count, text):
    assert est.human_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (600, "10 min"), (86_400, "24.0 h")])
def test_times_for_people(seconds, text):
    assert est.human_time(seconds) == text
