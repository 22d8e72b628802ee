"""serve.engine=vllm without an engine: what the settings become, what is refused, how metrics are labelled."""

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from domino_core.checkpoint import read_config
from domino_core.vllm.settings import changed_settings
from serve import vllm_flags
from serve.app import application
from serve.autoscaling import FirstTokenPolicy
from serve.config import ServeConfig
from serve.config import read_config as read_settings
from serve.vllm_engine import VllmServer, set_environment
from serve.vllm_flags import flags, parse_flags


@pytest.fixture
def config(embedded_target):
    return ServeConfig(target=str(embedded_target), engine="vllm", drafter="none", max_length=512)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "sglang"}, "engine"),
        ({"vllm_args": "--seed 1"}, "needs engine=vllm"),
        ({"engine": "vllm", "num_verify": "auto"}, "num_verify=auto is the torch engine's"),
        ({"engine": "vllm", "unseeded_rule": "rejection"}, "unseeded_rule=rejection"),
        ({"engine": "vllm", "gpus_per_replica": 1.5}, "gpus_per_replica=1.5"),
        ({"engine": "vllm", "canary_share": 0.3}, "canary_share=0.3 is the torch engine's"),
        ({"canary_share": 1.0}, r"canary_share=1.0: expected 0 \(no canary\) to less than 1"),
        ({"canary_share": -0.1}, "canary_share=-0.1"),
        ({"canary_share": "nan"}, "canary_share=nan"),
        ({"target_first_token_s": 0}, "target_first_token_s=0"),
        ({"target_first_token_s": "nan"}, "target_first_token_s=nan"),
        ({"engine": "vllm", "vllm_args": "--chat-template 'x"}, r"serve\.vllm_args: No closing quotation"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        read_settings(settings)


def test_no_share_of_the_requests_can_go_to_another_drafter_and_the_job_is_told(config):
    (report,) = asyncio.run(VllmServer(config).canary_reports())
    assert "promote without --canary" in report["unable"]


def test_settings_become_flags_and_vllm_args_win(config, embedded_target):
    changed = replace(config, max_rows=3, vllm_args="--max-num-seqs 5 --generation-config auto")
    args = parse_flags(changed, None)
    assert (args.model, args.served_model_name) == (str(embedded_target), ["tiny-qwen3"])
    assert (args.max_model_len, args.dtype, args.enforce_eager) == (512, "float32", True)
    assert args.default_chat_template_kwargs == {"enable_thinking": False}
    assert (args.max_num_seqs, args.generation_config) == (5, "auto")
    assert args.speculative_config is None


def test_gpus_of_a_replica_are_split_over_or_shared(config):
    assert "--tensor-parallel-size=4" in flags(replace(config, gpus_per_replica=4))
    assert "--gpu-memory-utilization=0.45" in flags(replace(config, gpus_per_replica=0.5))
    assert not any("eager" in flag or "cache" in flag for flag in flags(replace(config, gpus_per_replica=1)))


def test_drafts_are_the_block_or_as_many_as_are_asked_for(config, reference_dir):
    folder = reference_dir / "draft_shift1_p1"
    most = read_config(folder).num_drafts
    expected = {"method": "dflash", "model": str(folder), "num_speculative_tokens": most}
    assert parse_flags(config, folder).speculative_config == expected
    assert parse_flags(replace(config, num_verify=2), folder).speculative_config["num_speculative_tokens"] == 2
    assert parse_flags(replace(config, num_verify=99), folder).speculative_config["num_speculative_tokens"] == most
    given = """--speculative-config '{"draft_sample_method": "probabilistic", "method": "eagle"}'"""
    added = {"draft_sample_method": "probabilistic"}
    assert parse_flags(replace(config, vllm_args=given), folder).speculative_config == expected | added


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--no-such-flag 1", "no-such-flag"),
        ("--max-num-seqs many", "max-num-seqs"),
        ("--max_model_len=99", r"--max-model-len is not for it: serve\.max_length decides it"),
        ("--max-model-l 99", "max-model-l"),
        ("--served-model-name other", r"serve\.model_name decides it"),
        ("another/model", "another/model belongs to no flag"),
        ("--config file.yaml", "give the flags themselves"),
        ("--config=file.yaml", "give the flags themselves"),
        ("--help", "--help is not for it"),
        ("--help=all", "--help is not for it"),
        ("-h", "--help is not for it"),
        ("--spec-tokens 3", r"serve\.num_verify decides it"),
        ("--spec_method eagle", r"serve\.drafter decides it"),
        ("--spec-model x", r"serve\.drafter decides it"),
        ("--worker-extension-cls x", "loaded by ours"),
        ("--host 0.0.0.0", "--host is not for it: Ray Serve listens"),
        ("--api-key secret", "--api-key is not for it: DOMINO_API_KEY"),
        ("--api-key=secret", "--api-key is not for it: DOMINO_API_KEY"),
        ("--hf-token secret", "--hf-token is not for it: set HF_TOKEN"),
        ("--port=8001", "Ray Serve listens"),
        ("--uds x", "Ray Serve listens"),
        ("--headless", "Ray Serve listens"),
        ("--grpc", "Ray Serve listens"),
        ("-asc 2", "--api-server-count is not for it: Ray Serve listens"),
        ("--ssl-keyfile x", "Ray Serve listens"),
        ("--speculative-config 5", "speculative-config 5: expected a JSON object"),
        ("--speculative-config.method", r"serve\.vllm_args"),
        ("--enable-auto-tool-choice", "tool-call-parser"),
        ("--chat-template /no/such/template", "/no/such/template"),
    ],
)
def test_flags_that_are_refused(config, given, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_flags(replace(config, vllm_args=given), None)
    assert "secret" not in str(caught.value)


def test_a_key_of_vllms_own_is_refused(config, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ValueError, match=r"VLLM_API_KEY is set .* DOMINO_API_KEY") as caught:
        set_environment(config)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("version", "gpus", "expected"), [("0.26.0", 1, "1"), ("0.26.0", 0, "0"), ("0.32.0+cpu", 1, "0"), ("0.99", 1, "0")]
)
def test_the_second_model_runner_where_it_is_known_and_there_is_a_card(config, monkeypatch, version, gpus, expected):
    monkeypatch.setattr(vllm_flags, "version", lambda name: version)
    monkeypatch.setattr("os.environ", {})
    set_environment(replace(config, gpus_per_replica=gpus))
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == expected


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [
        ("0.26.0", "", 2048),
        ("0.32.0", "", None),
        ("0.26.0", "--max-cudagraph-capture-size 64", 64),
        ("0.26.0", "--cudagraph-capture-sizes 1 2 8", None),
        ("0.26.0", "--compilation-config.max_cudagraph_capture_size 64", None),
    ],
)
def test_steps_of_many_requests_with_drafts_have_graphs_too(
    config, reference_dir, monkeypatch, version, given, expected
):
    monkeypatch.setattr(vllm_flags, "version", lambda name: version)
    args = parse_flags(replace(config, vllm_args=given), reference_dir / "draft_shift1_p1")
    assert args.max_cudagraph_capture_size == expected
    assert parse_flags(config, None).max_cudagraph_capture_size is None


def test_settings_for_another_engine_are_not_repeated():
    with pytest.raises(ValueError, match="needs engine=vllm") as caught:
        read_settings({"vllm_args": "--api-key secret"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/invocations", "/scale_elastic_ep"])
def test_paths_beside_the_api_key_are_not_there(config, path, method):
    assert TestClient(VllmServer(config).http_app()).request(method, path, json={}).status_code == 404


def test_weights_of_another_shape_are_told_apart(reference_dir):
    config = read_config(reference_dir / "draft_shift1_p1")
    assert changed_settings(config, replace(config, dtype="bfloat16", initializer_range=0.1)) == []
    other = replace(config, block_size=config.block_size + 1, rope_theta=1.0)
    assert changed_settings(config, other) == ["block_size", "rope_theta"]


def test_counts_of_a_version_stay_its_own():
    from prometheus_client import REGISTRY, Counter

    from serve.vllm_metrics import Labelled

    version = ["1"]
    counter = Labelled(Counter, lambda: {"drafter_version": version[0]}, "test:drafts", "", ["model_name", "engine"])
    bound = counter.labels("m", engine=0)
    bound.inc(2)
    version[0] = "2"
    bound.inc(3)
    for label, expected in (("1", 2), ("2", 3)):
        labels = {"model_name": "m", "engine": "0", "drafter_version": label}
        assert REGISTRY.get_sample_value("test:drafts_total", labels) == expected


def test_counts_start_at_0_and_gauges_know_no_version():
    from prometheus_client import REGISTRY

    from serve.metrics import FirstTokens
    from serve.vllm_metrics import stat_logger

    version = ["1"]
    logger = stat_logger(lambda: {"target": "t", "drafter_version": version[0]}, FirstTokens())
    logger._counter_cls("test:rounds", "", ["engine"]).labels("0")
    logger._histogram_cls("test:waited", "", ["engine"], buckets=[1.0]).labels("0")
    of_version = {"engine": "0", "target": "t", "drafter_version": "1"}
    assert REGISTRY.get_sample_value("test:rounds_total", of_version) == 0
    assert REGISTRY.get_sample_value("test:waited_count", of_version) == 0

    gauge = logger._gauge_cls("test:running", "", ["engine"])
    bound = gauge.labels("0")
    bound.set(4)
    version[0] = "2"
    bound.set(1)
    (family,) = [family for family in REGISTRY.collect() if family.name == "test:running"]
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"engine": "0", "target": "t"}, 1)]


def test_policy_is_asked_for_only_with_an_aim(config):
    def scaling(config: ServeConfig) -> Any:
        return application(config)._bound_deployment._deployment_config.autoscaling_config

    policy = scaling(replace(config, target_first_token_s=0.5)).policy
    assert policy.policy_kwargs == {"target_s": 0.5}
    assert FirstTokenPolicy.__name__ in policy.policy_function
    assert scaling(config).policy.is_default_policy_function()
