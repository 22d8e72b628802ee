"""Processes that the experiment's work is spread over, in turn on every card of the machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.queues import Queue

import torch


@contextmanager
def processes(parallel: int) -> Generator[ProcessPoolExecutor | None]:
    """A pool of that many processes, each with one card for its own eyes; None for one: the caller works itself.

    Cards are dealt out in turn, so `parallel` is best a multiple of their number. No process stays behind: an error or
    an interruption ends them amid their work, and they end by themselves if this process is killed.
    """
    if parallel == 1:
        yield None
        return
    context = get_context("spawn")
    cards: Queue[int] = context.Queue()
    for index in range(parallel):
        cards.put(index % max(1, torch.cuda.device_count()))
    threads = max(1, torch.get_num_threads() // parallel)
    before = active_children()
    with ProcessPoolExecutor(parallel, mp_context=context, initializer=_settle, initargs=(cards, threads)) as pool:
        try:
            yield pool
        except BaseException:  # the pool would wait for them, and they work for hours
            for process in set(active_children()).difference(before):
                process.kill()
            raise


def _settle(cards: Queue[int], threads: int) -> None:
    """Before anything in this process has looked for a card: whatever says "cuda", in any thread, means this one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    visible = [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
    index = cards.get()
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
