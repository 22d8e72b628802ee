"""Supply and demand: totals of several engines, rates between two looks, and advice that names the slower side."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines.capture_stream import EngineClock
from pipelines.feature_store import Events, read_events, record
from pipelines.supply import Balance, SupplyFile, SupplyWindow, read_supply


def test_engines_add_up_and_a_window_counts_what_came_since(tmp_path):
    files = [SupplyFile(tmp_path) for _ in range(2)]
    assert read_supply(tmp_path) == EngineClock()
    files[0].write(EngineClock(rows=3, tokens=300, working=2.0, blocked=1.0))
    files[1].write(EngineClock(rows=1, tokens=100, working=1.0))
    assert read_supply(tmp_path) == EngineClock(rows=4, tokens=400, working=3.0, blocked=1.0)
    window = SupplyWindow(tmp_path)
    window.since -= 10
    files[0].write(EngineClock(rows=8, tokens=900, working=4.0, blocked=7.0))  # too soon: not told yet
    assert read_supply(tmp_path).rows == 4
    files[0].write(EngineClock(rows=8, tokens=900, working=4.0, blocked=7.0), at_once=True)
    found = window.reduce()
    assert found["offered_samples_per_s"] == pytest.approx(0.5, rel=0.05)
    assert found["offered_tokens_per_s"] == pytest.approx(60, rel=0.05)
    assert (found["engine_work_s"], found["engine_blocked_s"], found["engine_blocked_share"]) == (2.0, 6.0, 0.75)
    assert window.reduce()["engine_work_s"] == 0
    # The record of rows, in the same folder, is not disturbed.
    record(tmp_path, Events(captured={"a"}))
    assert read_events(tmp_path).captured == {"a"}


def entry(**changes: float) -> dict[str, float]:
    return {"window_s": 10.0, "data_wait_s": 0.0, "engine_work_s": 10.0, "engine_blocked_s": 0.0} | changes


def test_the_balance_of_a_run_leaves_out_the_start_and_what_was_read_from_a_cache():
    assert Balance.of([{"window_s": 10.0, "data_wait_s": 9.0}]) is None
    start = entry(data_wait_s=10.0, engine_work_s=0.0)
    cached = {"window_s": 10.0, "data_wait_s": 9.0}
    history = [start, entry(data_wait_s=6.0), entry(data_wait_s=2.0, engine_work_s=6.0, engine_blocked_s=4.0), cached]
    assert Balance.of(history) == Balance(trainer_waited=0.4, engines_blocked=0.2)
    assert Balance.of([start]) == Balance(trainer_waited=1.0, engines_blocked=0.0)


@pytest.mark.parametrize(
    ("balance", "said"),
    [
        (Balance(trainer_waited=0.62, engines_blocked=0.03), ["data 62%", "trainer 3%", "num_actors=2; about 6"]),
        (Balance(trainer_waited=0.05, engines_blocked=0.5), ["trainer 50%", "data 5%", "num_workers=4; about 8"]),
        (Balance(trainer_waited=0.04, engines_blocked=0.09), ["in balance", "4%", "9%"]),
        (Balance.between(300.0, 100.0), ["data 67%", "trainer 0%", "num_actors=2; about 6"]),
        (Balance.between(50.0, 100.0), ["trainer 50%", "num_workers=4; about 8"]),
    ],
)
def test_advice_names_the_side_to_scale(balance, said):
    advice = balance.advice(num_actors=2, num_workers=4)
    assert all(part in advice for part in said), advice


def test_two_calls_of_one_engine_may_tell_at_once(tmp_path):
    file, clock = SupplyFile(tmp_path), EngineClock(rows=3, tokens=5)
    with ThreadPoolExecutor(4) as pool:
        told = [pool.submit(file.write, clock, at_once=True) for _ in range(400)]
        for each in told:
            each.result()
    assert read_supply(tmp_path) == clock
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
