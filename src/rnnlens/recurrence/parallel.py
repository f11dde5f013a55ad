"""Work on several samples side by side, since samples do not see each other.

torch spreads its own operations over the processor's cores. NumPy does so for matrix products only, and those of one
time step are too small for it: its threads then cost more than they bring. So NumPy's samples are dealt out to threads
here, each with a one-threaded matrix product.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

from array_api_compat import is_numpy_namespace
from threadpoolctl import ThreadpoolController

from ..typing import Namespace

#: Numbers per thread, of one time step of a walk and of one large operation, below which threads cost more than they
#: bring: between two short operations threads wait for each other, since only one of them may run Python.
_WORTHWHILE_STEP = 2**12
_WORTHWHILE = 2**17


@cache
def _blas() -> Any:
    """NumPy's matrix library; looking for it takes longer than a small job."""
    return ThreadpoolController().select(user_api="blas")


def _workers() -> int:
    """As many threads as the user lets matrix products have."""
    return max((library["num_threads"] for library in _blas().info()), default=1)


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that stay: each new one would take memory of its own from the allocator, and keep it."""
    return ThreadPoolExecutor(workers, thread_name_prefix="rnnlens")


#: One caller at a time: two that set the number of BLAS threads and set it back may leave it at one for good.
_turn = threading.Lock()


def _start_anew() -> None:
    """A forked process has the pool and the lock, but none of the threads."""
    global _turn
    _turn = threading.Lock()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def sample_chunks(batch: int, elements: int, *, size: int = 2**19) -> Iterator[slice]:
    """Slices over samples of about ``size`` numbers each, where one sample has ``elements``."""
    count = max(1, size // max(elements, 1))
    return (slice(start, min(start + count, batch)) for start in range(0, batch, count))


def for_each(work: Callable[[slice], None], parts: Iterable[slice], *, xp: Namespace) -> None:
    """Call ``work`` for each part of the samples; for NumPy on as many threads as its matrix products may use.

    ``work`` must not call this function: it would wait for threads that wait for it.
    """
    parts = list(parts)
    if len(parts) > 1 and is_numpy_namespace(xp):
        with _turn:
            workers = _workers()  # asked before the limit is set
            with _blas().limit(limits=1):
                list(_pool(workers).map(work, parts))
    else:
        for part in parts:
            work(part)


def walk_parts(batch: int, elements: int, *, xp: Namespace) -> list[slice]:
    """Parts of the samples for a walk over time, where one sample has so many elements per step of a state."""
    return _shares(batch, elements, _WORTHWHILE_STEP, xp)


def large_parts(batch: int, elements: int, *, xp: Namespace) -> list[slice]:
    """Parts of the samples for a few large operations, where one sample has so many elements."""
    return _shares(batch, elements, _WORTHWHILE, xp)


def _shares(batch: int, elements: int, worthwhile: int, xp: Namespace) -> list[slice]:
    """One per thread for NumPy where each is large enough, else all samples at once."""
    workers = min(batch, _workers()) if is_numpy_namespace(xp) else 1
    if workers < 2 or batch * elements < workers * worthwhile:
        return [slice(0, batch)]
    bounds = [batch * i // workers for i in range(workers + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]
