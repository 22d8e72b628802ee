"""Processes that the experiment's work is spread over, in turn on every card of the machine."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.queues import Queue

import torch


@contextmanager
def processes(parallel: int) -> Generator[ProcessPoolExecutor | None]:
    """A pool of that many processes, each with one card for its own eyes; None for one: the caller works itself.

    Cards are dealt out in turn, so `parallel` is best a multiple of their number.
    """
    if parallel == 1:
        yield None
        return
    context = get_context("spawn")
    cards: Queue[int] = context.Queue()
    for index in range(parallel):
        cards.put(index % max(1, torch.cuda.device_count()))
    threads = max(1, torch.get_num_threads() // parallel)
    with ProcessPoolExecutor(parallel, mp_context=context, initializer=_settle, initargs=(cards, threads)) as pool:
        yield pool


def _settle(cards: Queue[int], threads: int) -> None:
    """Before anything in this process has looked for a card: whatever says "cuda", in any thread, means this one."""
    torch.set_num_threads(threads)
    visible = [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
    index = cards.get()
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)
