"""Running ahead of a reader: everything comes once and in order, memory is bounded, and nobody is left waiting."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipelines.capture_stream import EngineClock, Slice, run_ahead


@pytest.fixture
def engine():
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor


class Source:
    """Counts what it has made, and whether it was closed, and where."""

    def __init__(self, count: int, seconds: float = 0.0, fails_at: int = -1) -> None:
        self.made, self.closed = 0, threading.Event()
        self.items = self._items(count, seconds, fails_at)

    def _items(self, count, seconds, fails_at):
        try:
            for number in range(count):
                time.sleep(seconds)
                if number == fails_at:
                    raise ValueError("broken")
                self.made += 1
                yield number
        finally:
            self.thread = threading.current_thread()
            self.closed.set()


def test_everything_comes_once_in_order_from_the_engines_thread(engine):
    source, clock = Source(20, seconds=0.01), EngineClock()
    assert list(run_ahead(engine, source.items, 2, clock)) == list(range(20))
    assert source.thread is not threading.current_thread()
    assert clock.working >= 0.2
    assert clock.blocked < 0.15
    assert list(run_ahead(engine, Source(0).items, 2, clock)) == []


def test_it_stays_so_far_ahead_and_counts_the_wait(engine):
    source, clock = Source(20), EngineClock()
    reader = run_ahead(engine, source.items, 3, clock)
    time.sleep(0.1)
    assert source.made == 0  # nothing runs before somebody reads
    assert next(reader) == 0
    time.sleep(0.3)
    assert source.made == 4
    assert list(reader) == list(range(1, 20))
    assert clock.blocked >= 0.25
    assert clock.working < 0.25


def test_an_error_arrives_behind_what_was_made_before_it(engine):
    reader = run_ahead(engine, Source(9, fails_at=2).items, 4, EngineClock())
    found = [next(reader), next(reader)]
    with pytest.raises(ValueError, match="broken"):
        next(reader)
    assert found == [0, 1]


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_reader_that_goes_away_closes_the_source_and_frees_the_engine(engine, seconds):
    source = Source(1000, seconds)
    reader = run_ahead(engine, source.items, 2, EngineClock())
    next(reader)
    reader.close()
    assert source.closed.is_set()
    assert source.made < 10
    assert engine.submit(lambda: 5).result(timeout=5) == 5


def test_two_readers_take_turns(engine):
    first, second = (run_ahead(engine, Source(4).items, 2, EngineClock()) for _ in range(2))
    assert next(first) == 0
    later = ThreadPoolExecutor(max_workers=1).submit(list, second)
    time.sleep(0.1)
    assert not later.done()
    assert list(first) == [1, 2, 3]
    assert later.result(timeout=5) == [0, 1, 2, 3]


def test_a_slice_refuses_states_of_other_tokens_or_another_shape():
    done = Slice([[1, 2, 3], [4]], (2, 8), torch.bfloat16, pinned=False)
    first, second = done.receivers()
    with pytest.raises(AssertionError, match="other tokens"):
        first([1, 2], torch.zeros(3, 2, 8))
    with pytest.raises(AssertionError, match="expected"):
        first([1, 2, 3], torch.zeros(3, 2, 9))
    second([4], torch.full((1, 2, 8), 4.0))
    assert not done.complete
    first([1, 2, 3], torch.full((3, 2, 8), 1.0))
    assert done.complete
    assert done.wait() == [True, True]
    assert done.values_TLD[:, 0, 0].tolist() == [1, 1, 1, 4]
