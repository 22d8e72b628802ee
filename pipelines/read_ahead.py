"""Elements made ready in a thread, while the caller works on those before."""

import collections
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def read_ahead(source: Iterator[T], prepare: Callable[[T], U], most: int, depth: int = 2) -> Generator[U]:
    """prepare(element) of the first `most` elements, in their order, up to `depth` of them ahead.

    No further element is asked for: a stream may make its next one only at the price of a wait. Close it when done;
    that waits for the element in the making, if there is one.
    """
    end = object()

    def make() -> U | object:
        element = next(source, end)
        return end if element is end else prepare(element)  # pyright: ignore[reportArgumentType]

    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
    try:
        asked = min(depth, most)
        waiting = collections.deque[Future[U | object]](reader.submit(make) for _ in range(asked))
        while waiting and (made := waiting.popleft().result()) is not end:
            if asked < most:
                waiting.append(reader.submit(make))
                asked += 1
            yield made  # pyright: ignore[reportReturnType]
    finally:
        reader.shutdown(cancel_futures=True)
