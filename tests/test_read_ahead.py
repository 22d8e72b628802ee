"""Elements come in order, as many as wanted, ahead of their use; faults reach the caller."""

import itertools
import threading

import pytest

from pipelines.read_ahead import read_ahead


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize(("length", "most"), [(0, 3), (1, 3), (4, 4), (7, 3), (3, 7), (5, 0)])
def test_the_first_elements_in_order_and_none_beyond(length, most, depth):
    source = iter(range(length))
    assert list(read_ahead(source, lambda n: 10 * n, most, depth)) == [10 * n for n in range(min(length, most))]
    assert list(source) == list(range(min(length, most), length))


def test_the_next_one_is_made_while_the_caller_works():
    made = [threading.Event() for _ in range(3)]

    def prepare(n):
        made[n].set()
        return threading.current_thread().name, n

    elements = read_ahead(iter(range(3)), prepare, 3, depth=1)
    name, first = next(elements)
    assert (first, name.startswith("read-ahead")) == (0, True)
    assert made[1].wait(10)
    assert not made[2].wait(0.05)
    assert [n for _, n in elements] == [1, 2]


def test_a_fault_of_source_or_prepare_reaches_the_caller_behind_what_was_good():
    def broken():
        yield 1
        raise OSError("the disk")

    elements = read_ahead(broken(), lambda n: n, 5)
    assert next(elements) == 1
    with pytest.raises(OSError, match="the disk"):
        next(elements)
    elements = read_ahead(iter([4, 0]), lambda n: 1 // n, 5)
    assert next(elements) == 0
    with pytest.raises(ZeroDivisionError):
        next(elements)


def test_closing_ends_the_thread_and_asks_for_nothing_more():
    source = itertools.count()
    elements = read_ahead(source, lambda n: n, 1_000_000, depth=3)
    assert [next(elements), next(elements)] == [0, 1]
    elements.close()
    assert next(source) <= 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]
