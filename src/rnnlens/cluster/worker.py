"""The process of a Dask worker: threads of BLAS and engines, memory of the C library, errors and warnings of chunks."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from threadpoolctl import threadpool_limits

from ..errors import RnnlensError, UserCodeError

T = TypeVar("T")

#: Parameters of glibc's mallopt, <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM = 1 << 30
#: Largest threshold that older versions of glibc accept.
_LARGEST_MMAP = 1 << 25
#: Environment variables with the number of threads of OpenMP, OpenBLAS and MKL, read when they are loaded.
_OF_BLAS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_fitted = threading.local()
_kept: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def fit_process() -> None:
    """Prepare this worker process before an engine is imported.

    Libraries that are imported later use as many threads as the worker has; otherwise workers of one machine compete
    for its cores. Dask's nanny makes malloc return freed memory at once, which costs more time than a chunk of many
    arrays takes to compute; glibc's own threshold is set again.
    """
    threads = str(threads_of_worker())
    os.environ |= dict.fromkeys(_OF_BLAS, threads)
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(name, threads)
    flags = os.environ.get("XLA_FLAGS", "")
    if threads == "1" and "jax" not in sys.modules and "xla_cpu_multi_thread_eigen" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    if "MALLOC_TRIM_THRESHOLD_" in os.environ:
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_TRIM_THRESHOLD, _TRIM)
            libc.mallopt(_M_MMAP_THRESHOLD, _TRIM) or libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP)


def fit_thread() -> None:
    """Limit libraries that are imported already to the worker's threads; some of them keep a limit for each thread."""
    if not hasattr(_fitted, "limits"):
        _fitted.limits = threadpool_limits(threads_of_worker())
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads_of_worker())


def threads_of_worker() -> int:
    """Return the number of threads of the Dask worker that runs this task; 1 outside of a worker."""
    distributed: Any = sys.modules.get("distributed")
    if distributed is not None:
        with suppress(ValueError, AttributeError):
            return int(distributed.get_worker().state.nthreads)
    return 1


def kept(model: Any, token: str, make: Callable[[], T]) -> T:
    """Return what ``make`` returned at the first chunk of a call on this model in this process."""
    of_model = _kept.setdefault(model, {})
    if token not in of_model:
        if len(of_model) > 8:
            of_model.clear()
        of_model[token] = make()
    found: T = of_model[token]
    return found


@contextmanager
def naming_samples(rows: tuple[int, int]) -> Iterator[None]:
    """Add the samples of a chunk to the message of any exception raised for it."""
    try:
        yield
    except Exception as error:
        own = isinstance(error, RnnlensError) and type(error).__module__ == RnnlensError.__module__
        raise (type(error) if own else UserCodeError)(failed_samples(rows, error)) from None


def failed_samples(rows: tuple[int, int], error: Exception) -> str:
    """Return the text of an error with the samples ``rows[0]`` to ``rows[1] - 1`` for which it was raised."""
    reason = str(error).strip() or type(error).__name__
    kind = "" if isinstance(error, RnnlensError) else f"{type(error).__name__}: "
    return f"Samples {rows[0]} to {rows[1] - 1} failed: {kind}{reason}"


def warn(text: str, category: type[Warning]) -> None:
    """Issue a warning, at the client too if this is a Dask worker."""
    if "distributed" in sys.modules:
        importlib.import_module("distributed").warn(text, category)
    else:
        warnings.warn(text, category, stacklevel=2)


def client() -> Any:
    """Return the Dask client in use, or None; Dask is not imported."""
    distributed: Any = sys.modules.get("distributed")
    return None if distributed is None else distributed.client._get_global_client()


def results_of(connected: Any, futures: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each future as it ends, with its result or the exception; cancel those that are left at an interrupt.

    A lost scheduler ends all futures that are left with the error of the connection. The scheduler is told to forget
    the tasks before this returns: one of the same name, sent while it keeps a failed one, would fail like that.
    """
    distributed = importlib.import_module("distributed")
    left = dict.fromkeys(futures)
    try:
        for future in distributed.as_completed(futures, loop=connected.loop):
            try:
                found = future.result()
            except Exception as error:
                found = error.with_traceback(None)  # its frames would keep the futures, and Dask the failed tasks
            del left[future]
            yield future, found
    except (OSError, distributed.CancelledError) as error:
        yield from ((future, error) for future in list(left))
        left.clear()
    finally:
        if left:
            connected.cancel(list(left))
        for future in futures:
            future.release()
        connected.sync(asyncio.sleep, 0)  # releases wait in the client's event loop; what is sent later comes after
