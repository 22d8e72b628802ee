"""Acceptance figures and counters against counting rounds one by one, under the names that vLLM's dashboards read."""

import random

import pytest

from domino_core.decode import Acceptance
from serve.metrics import Metrics, acceptance_report

DRAFTS = 5


def rounds(seed: int) -> list[int]:
    """Accepted drafts of each of twenty rounds."""
    return [random.Random(f"{seed} {number}").randint(0, DRAFTS) for number in range(20)]


def counted(accepted: list[int]) -> Acceptance:
    acceptance = Acceptance()
    for count in accepted:
        acceptance.count(DRAFTS, count)
    return acceptance


@pytest.mark.parametrize("accepted", [[], [0], [DRAFTS], [0, 0, 2, 1], rounds(1), rounds(2)])
def test_report_has_vllms_fields_and_counts_each_round(accepted):
    report = acceptance_report(counted(accepted), DRAFTS)
    total, number = sum(accepted), len(accepted)
    assert report == {
        "mean_acceptance_length": 1 + total / number if number else 1.0,
        "draft_acceptance_rate": total / (DRAFTS * number) if number else 0.0,
        "acceptance_histogram": [accepted.count(j) for j in range(DRAFTS + 1)],
        "num_spec_steps": number,
        "num_accepted_draft_tokens": total,
        "num_draft_tokens": DRAFTS * number,
        "num_spec_tokens": DRAFTS,
    }


def samples(metrics: Metrics) -> dict[str, float]:
    """Each line of the page that is a sample: its name with labels, and its value."""
    lines = [line for line in metrics.page().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_counters_add_up_over_requests_and_are_kept_apart_by_version():
    metrics = Metrics("name", "hash", with_ray=False)
    accepted = {"1": rounds(1), "2": rounds(2)}
    for version, counts in accepted.items():
        metrics.admitted(version, prompt_tokens=7)
        before = Acceptance()
        metrics.progressed(version, 1, before, before)  # the token of the prefill belongs to no round
        for done in range(1, len(counts) + 1):
            after = counted(counts[:done])
            metrics.progressed(version, counts[done - 1] + 1, before, after)
            before = after
        metrics.first_token(version, 0.02)
        metrics.finished(version, "length", 1.5)
    page = samples(metrics)
    for version, counts in accepted.items():
        labels = f'drafter_version="{version}",model_name="name",target="hash"'
        head = f'drafter_version="{version}"'
        assert page[f"vllm:spec_decode_num_drafts_total{{{labels}}}"] == len(counts)
        assert page[f"vllm:spec_decode_num_draft_tokens_total{{{labels}}}"] == DRAFTS * len(counts)
        assert page[f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}}"] == sum(counts)
        assert page[f"vllm:generation_tokens_total{{{labels}}}"] == 1 + sum(counts) + len(counts)
        assert page[f"vllm:prompt_tokens_total{{{labels}}}"] == 7
        for position in range(DRAFTS):
            name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{head},model_name="name",position="{position}"'
            assert page[f'{name},target="hash"}}'] == sum(count > position for count in counts)
        assert page[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 1
        assert page[f"vllm:e2e_request_latency_seconds_sum{{{labels}}}"] == 1.5
        assert (
            page[f'vllm:request_success_total{{{head},finished_reason="length",model_name="name",target="hash"}}'] == 1
        )


def test_plain_decoding_drafts_nothing():
    metrics = Metrics("name", "hash", with_ray=False)
    plain = Acceptance()
    plain.count(0, 0)
    metrics.progressed("none", 1, Acceptance(), plain)
    page = samples(metrics)
    assert not [name for name in page if "spec_decode" in name]
    assert page['vllm:generation_tokens_total{drafter_version="none",model_name="name",target="hash"}'] == 1


def test_gauges_are_read_when_the_page_is():
    metrics = Metrics("name", "hash", with_ray=False)
    running = [3]
    metrics.watch("num_requests_running", "Requests that have a row.", lambda: running[0])
    key = 'vllm:num_requests_running{model_name="name",target="hash"}'
    assert samples(metrics)[key] == 3
    running[0] = 1
    assert samples(metrics)[key] == 1
