"""Distribute work over threads by samples, which do not depend on each other.

A library that spreads the small products of one time step over threads of its own lets these threads spin while they
wait for each other; on a processor that is busy with something else, a sweep then takes ten to a hundred times as long.
So NumPy's matrix products get one thread each, always, and samples are dealt to threads of ours, which sleep while they
wait. torch on the CPU arrives here as NumPy; other libraries and devices are left alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from array_api_compat import is_numpy_namespace
from threadpoolctl import ThreadpoolController

from ..typing import Namespace

#: Numbers per thread, of one time step of a walk and of one large operation, below which threads cost more than they
#: bring: between two short operations threads wait for each other, since only one of them may run Python.
_WORTHWHILE_STEP = 2**12
_WORTHWHILE = 2**17

#: Multiplications of one product, of which half take about as long as it takes to wake another thread twenty times.
_WORTHWHILE_PRODUCT = 2**25


@cache
def _blas() -> list[Any]:
    """Return NumPy's matrix libraries; finding them takes longer than a small job, so once."""
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


def _set_threads(library: Any, count: int) -> None:
    """Set the number of threads from whichever thread this is: threadpoolctl listens to the first that ever set it."""
    for _ in range(2):  # take the control, and give it back
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)
        if library.get_num_threads() != count:
            library.set_num_threads(count)


class _OneThreadEach:
    """A counter of callers that need matrix products of one thread: the first sets the limit, the last lifts it.

    The number of threads is one for the whole process: two callers that each set it and set it back could leave it at
    one for good.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.before: list[int] = []

    @property
    def granted(self) -> int:
        """Number of threads that the user allows a product."""
        return max(self.before, default=1)

    def enter(self) -> None:
        """Set the limit, unless it is set."""
        with self.lock:
            if self.users == 0:
                self.before = [library.get_num_threads() or 1 for library in _blas()]
                self.set([1] * len(self.before))
            self.users += 1

    def leave(self) -> None:
        """Lift the limit, unless another caller still needs it."""
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.set(self.before)

    def set(self, counts: list[int]) -> None:
        """One number of threads for each library."""
        for library, count in zip(_blas(), counts, strict=True):
            _set_threads(library, count)


_products = _OneThreadEach()


@contextmanager
def one_thread_each() -> Iterator[int]:
    """Limit NumPy's matrix products to one thread within the block; yields how many threads the user allows."""
    _products.enter()
    try:
        yield _products.granted
    finally:
        _products.leave()


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Return a pool of threads that stay: each new thread would take and keep memory of its own."""
    return ThreadPoolExecutor(workers, thread_name_prefix="rnnlens")


class _Dealt(threading.local):
    """The job of the current thread: an event that is set when its caller was interrupted; None outside of jobs."""

    given_up: threading.Event | None = None


_dealt = _Dealt()


def _start_anew() -> None:
    """Reset the pool and its lock in a forked process, which has none of the threads."""
    if _products.users:
        _products.set(_products.before)
    _products.lock, _products.users = threading.Lock(), 0
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


class GivenUpError(Exception):
    """The caller of this job was interrupted."""


def still_wanted() -> None:
    """Raise in a job whose caller was interrupted; long walks call this at every step."""
    if _dealt.given_up is not None and _dealt.given_up.is_set():
        raise GivenUpError


def sample_chunks(batch: int, elements: int, *, size: int = 2**19) -> Iterator[slice]:
    """Return slices over samples of about ``size`` numbers each, where one sample has ``elements``."""
    count = max(1, size // max(elements, 1))
    return (slice(start, min(start + count, batch)) for start in range(0, batch, count))


def for_each(work: Callable[[slice], None], parts: Iterable[slice], *, xp: Namespace) -> None:
    """Call ``work`` for each part of the samples; for NumPy on as many threads as its matrix products may use.

    Within a part everything runs in turn: ``work`` may call this function, but gets no further threads. What overflows
    is infinite, as in the framework, and NumPy does not warn of it.
    """
    parts = list(parts)
    if not is_numpy_namespace(xp):
        for part in parts:
            work(part)
        return
    work = np.errstate(over="ignore", invalid="ignore")(work)
    with one_thread_each() as workers:
        if len(parts) == 1 or workers == 1 or _dealt.given_up is not None:
            for part in parts:
                work(part)
        else:
            _deal(work, parts, workers)


def _deal(work: Callable[[slice], None], parts: list[slice], workers: int) -> None:
    """Run all parts on the pool's threads; an interrupted caller stops the jobs that are still running."""
    given_up = threading.Event()

    def job(part: slice) -> None:
        _dealt.given_up = given_up
        try:
            still_wanted()
            work(part)
        finally:
            _dealt.given_up = None

    futures: list[Future[None]] = []
    try:
        futures.extend(_pool(workers).submit(job, part) for part in parts)
        for future in futures:
            future.result()
    finally:
        given_up.set()
        wait(futures)


def walk_parts(batch: int, elements: int, *, xp: Namespace) -> list[slice]:
    """Return parts of the samples for a walk over time, where one sample has ``elements`` per step of a state."""
    return _shares(batch, elements, _WORTHWHILE_STEP, xp)


def large_parts(batch: int, elements: int, *, xp: Namespace) -> list[slice]:
    """Return parts of the samples for a few large operations, where one sample has ``elements``."""
    return _shares(batch, elements, _WORTHWHILE, xp)


def row_parts(shape: Sequence[int], columns: int) -> list[slice]:
    """Return parts of the rows of a product (sample, row, n) @ (sample, n, columns), where samples are not split."""
    batch, rows, inner = shape
    if batch * rows * inner * columns < _WORTHWHILE_PRODUCT:
        return [slice(None)]
    return _shares(rows, 1, 0, np)


def _shares(batch: int, elements: int, worthwhile: int, xp: Namespace) -> list[slice]:
    """One per thread for NumPy where each is large enough, else all samples at once."""
    workers = 1
    if is_numpy_namespace(xp) and _dealt.given_up is None:
        with one_thread_each() as granted:
            workers = min(batch, granted)
    if workers < 2 or batch * elements < workers * worthwhile:
        return [slice(0, batch)]
    bounds = [batch * i // workers for i in range(workers + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]
