"""Arrays of NumPy or torch: in-place arithmetic, steps of arrays, and distribution of samples over threads.

A sweep repeats the same few operations hundreds of times on the same shapes, so that allocating results would cost more
than computing them. The operations of :class:`Workspace` write to memory of the caller. Only this class uses functions
that a single library has.

BLAS threads for the small products of one time step busy-wait for each other. On a processor that is also used by other
programs, a sweep then takes ten to a hundred times as long. NumPy's matrix products are therefore always limited to one
thread each, and samples are distributed over rnnlens' own threads, which sleep while they wait. Tensors of torch on the
CPU are converted to NumPy before; other libraries and devices are not affected.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_numpy_namespace, is_torch_namespace
from threadpoolctl import ThreadpoolController

from ..typing import Array, Namespace

#: Numbers per thread below which threads do not pay off, in one step of a loop over time and in one large operation.
#: Between two short operations threads wait for each other, because only one of them may run Python.
_WORTHWHILE_STEP = 2**12
_WORTHWHILE = 2**17

#: Multiplications of a product from which on it is split: half of them take about twenty wake-ups of a thread.
_WORTHWHILE_PRODUCT = 2**25


@cache
def _blas() -> list[Any]:
    """Return the controllers of NumPy's BLAS libraries, cached because the search is slow."""
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


class _ThreadLimit:
    """Reference count of callers that limit BLAS to one thread: the first sets the limit, the last removes it.

    The limit is global to the process. Without counting, two concurrent callers that each set and restore it could
    leave it at one forever.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.original_counts: list[int] = []

    def set(self, counts: list[int]) -> None:
        """Set the number of threads of each BLAS library, from any thread."""
        for library, count in zip(_blas(), counts, strict=True):
            for _ in range(2):  # threadpoolctl obeys only its controlling thread: clear it before and after setting
                if hasattr(library, "clear_controlling_thread"):
                    library.clear_controlling_thread(force=True)
                if library.get_num_threads() != count:
                    library.set_num_threads(count)


_limit = _ThreadLimit()


@contextmanager
def one_thread_each() -> Iterator[int]:
    """Limit BLAS to one thread within the block; yield the number of threads that the user allows."""
    with _limit.lock:
        if _limit.users == 0:
            _limit.original_counts = [library.get_num_threads() or 1 for library in _blas()]
            _limit.set([1] * len(_limit.original_counts))
        _limit.users += 1
    try:
        yield max(_limit.original_counts, default=1)
    finally:
        with _limit.lock:
            _limit.users -= 1
            if _limit.users == 0:
                _limit.set(_limit.original_counts)


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Return the cached thread pool; new threads would each allocate memory of their own."""
    return ThreadPoolExecutor(workers, thread_name_prefix="rnnlens")


class _JobState(threading.local):
    """Thread-local state: an event that is set when the job's caller was interrupted; None outside jobs."""

    cancelled: threading.Event | None = None


_job_state = _JobState()


def _reset_after_fork() -> None:
    """Reset the pool and its lock in a forked process, which has none of the threads."""
    if _limit.users:
        _limit.set(_limit.original_counts)
    _limit.lock, _limit.users = threading.Lock(), 0
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class JobCancelledError(Exception):
    """Error in a job whose caller was interrupted."""


def raise_if_cancelled() -> None:
    """Raise JobCancelledError in a thread whose caller was interrupted; long loops call this at every step."""
    if _job_state.cancelled is not None and _job_state.cancelled.is_set():
        raise JobCancelledError


def sample_chunks(batch: int, elements: int, *, size: int = 2**19) -> Iterator[slice]:
    """Iterate over slices of samples, each of about ``size`` numbers in all, with ``elements`` numbers per sample."""
    count = max(1, size // max(elements, 1))
    return (slice(start, min(start + count, batch)) for start in range(0, batch, count))


def for_each(task: Callable[[slice], None], slices: Iterable[slice], *, xp: Namespace) -> None:
    """Call ``task`` on each part of the samples, for NumPy in as many threads as the user allows BLAS.

    ``task`` may call this function, but nested calls use no further threads. Overflow gives infinity without NumPy's
    warning, as in the frameworks.
    """
    slices = list(slices)
    if not is_numpy_namespace(xp):
        for samples in slices:
            task(samples)
        return
    task = np.errstate(over="ignore", invalid="ignore")(task)
    with one_thread_each() as workers:
        if len(slices) == 1 or workers == 1 or _job_state.cancelled is not None:
            for samples in slices:
                task(samples)
        else:
            _run_in_pool(task, slices, workers)


def _run_in_pool(task: Callable[[slice], None], slices: list[slice], workers: int) -> None:
    """Call ``task`` on all parts in the thread pool; if the caller is interrupted, stop running jobs."""
    cancelled = threading.Event()

    def job(samples: slice) -> None:
        _job_state.cancelled = cancelled
        try:
            raise_if_cancelled()
            task(samples)
        finally:
            _job_state.cancelled = None

    futures: list[Future[None]] = []
    try:
        futures.extend(_pool(workers).submit(job, samples) for samples in slices)
        for future in futures:
            future.result()
    finally:
        cancelled.set()
        wait(futures)


def walk_parts(batch: int, elements: int, *, xp: Namespace) -> list[slice]:
    """Split the samples of a loop over time among NumPy's threads; a step computes ``elements`` numbers per sample."""
    return _thread_slices(batch, elements, _WORTHWHILE_STEP, xp)


def large_parts(batch: int, elements: int, *, xp: Namespace) -> list[slice]:
    """Split the samples of one large operation, on ``elements`` numbers per sample, among NumPy's threads."""
    return _thread_slices(batch, elements, _WORTHWHILE, xp)


def row_parts(shape: Sequence[int], columns: int) -> list[slice]:
    """Split the rows of a product (sample, row, n) @ (sample, n, columns) among NumPy's threads."""
    batch, rows, inner = shape
    if batch * rows * inner * columns < _WORTHWHILE_PRODUCT:
        return [slice(None)]
    return _thread_slices(rows, 1, 0, np)


def _thread_slices(batch: int, elements: int, worthwhile: int, xp: Namespace) -> list[slice]:
    """Split the samples into one part per NumPy thread if these are large enough; else return a single part."""
    workers = 1
    if is_numpy_namespace(xp) and _job_state.cancelled is None:
        with one_thread_each() as allowed_threads:
            workers = min(batch, allowed_threads)
    if workers < 2 or batch * elements < workers * worthwhile:
        return [slice(0, batch)]
    bounds = [batch * i // workers for i in range(workers + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]


def at_step(values: Array, samples: slice, t: int) -> Array:
    """Return values (sample or 1, time or 1, ...) of some samples at step t, without the time axis, as a view."""
    step_values = values[:, 0 if values.shape[1] == 1 else t]
    return step_values if step_values.shape[0] == 1 else step_values[samples]


def namespace(*arrays: Array) -> Namespace:
    """Return the array-API namespace of the arrays' library."""
    return array_namespace(*arrays)


def on_cpu(array: Any) -> np.ndarray[Any, Any]:
    """Convert an array of any library and device to NumPy; bfloat16, which NumPy does not have, becomes float32."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = array.float() if "bfloat16" in str(array.dtype) else array
    return np.asarray(array)


def without_subnormal(values: Array, xp: Namespace) -> Array:
    """Return an array of NumPy with subnormal numbers set to 0, as arithmetic with them is slow; any other unchanged.

    Subnormal numbers of less than 32 bits are kept, because they are not small.
    """
    if not is_numpy_namespace(xp) or values.dtype.itemsize < 4:
        return values
    is_subnormal = np.abs(values) < np.finfo(values.dtype).smallest_normal
    return values * ~is_subnormal if is_subnormal.any() else values


@dataclass(frozen=True)
class Workspace:
    """Allocation and in-place arithmetic for arrays with the library, dtype and device of ``like``."""

    xp: Namespace
    like: Array

    #: Whether arrays are of NumPy, or of torch; bytes per number.
    is_numpy: bool = field(init=False, repr=False, compare=False)
    is_torch: bool = field(init=False, repr=False, compare=False)
    itemsize: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        dtype = self.like.dtype
        size = getattr(dtype, "itemsize", None) or np.dtype(str(dtype).rpartition(".")[2]).itemsize
        for name, value in (("is_numpy", is_numpy_namespace), ("is_torch", is_torch_namespace)):
            object.__setattr__(self, name, bool(value(self.xp)))
        object.__setattr__(self, "itemsize", int(size))

    def empty(self, *shape: int) -> Array:
        """Return an uninitialised array."""
        return self.xp.empty(shape, dtype=self.like.dtype, device=getattr(self.like, "device", None))

    def zeros(self, *shape: int) -> Array:
        """Return an array of zeros; the operating system allocates its memory on the first write."""
        return self.xp.zeros(shape, dtype=self.like.dtype, device=getattr(self.like, "device", None))

    def eye(self, n: int) -> Array:
        """Return the identity matrix."""
        return self.xp.eye(n, dtype=self.like.dtype, device=getattr(self.like, "device", None))

    def asarray(self, values: Any) -> Array:
        """Convert numbers of any library to an array of this dtype on this device."""
        if not self.is_torch and hasattr(values, "detach"):
            values = on_cpu(values)
        return self.xp.asarray(values, dtype=self.like.dtype, device=getattr(self.like, "device", None))

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """Compute ``out = a @ b``, batched over the first axis. ``out`` must not overlap ``a`` or ``b``."""
        if self.is_numpy:
            for_each(
                lambda rows: np.matmul(a[:, rows], b, out=out[:, rows]), row_parts(a.shape, b.shape[-1]), xp=self.xp
            )
        else:
            self.xp.bmm(a, b, out=out)

    def multiply(self, a: Any, b: Any, out: Any) -> None:
        """Compute ``out = a * b``, broadcast."""
        if self.is_numpy:
            np.multiply(a, b, out=out)
        else:
            self.xp.mul(a, b, out=out)

    def add_product(self, target: Any, a: Any, b: Any) -> None:
        """Compute ``target += a * b``, broadcast."""
        if self.is_torch:
            target.addcmul_(a, b)
        else:  # NumPy reuses the memory that it freed last for the product; it is still in the processor's cache.
            np.add(target, a * b, out=target)

    def diagonal_add(self, matrices: Any, values: Any) -> None:
        """Add values (..., n) to the diagonals of matrices (..., n, n), in place."""
        diagonal = np.einsum("...ii->...i", matrices) if self.is_numpy else self.xp.diagonal(matrices, dim1=-2, dim2=-1)
        diagonal += values

    @cached_property
    def negligible(self) -> float:
        """Magnitude below which a sweep sets numbers to 0, as subnormal arithmetic is slow; 1e-30 in float32."""
        return float(self.xp.finfo(self.like.dtype).smallest_normal) * 1e8

    def flush(self, values: Any) -> None:
        """Set negligible numbers to zero, in place."""
        if self.is_torch:
            values.copy_(self.xp.nn.functional.hardshrink(values, self.negligible))
        else:
            values[self.xp.abs(values) < self.negligible] = 0

    def no_autograd(self) -> contextlib.AbstractContextManager[Any]:
        """Disable torch's autograd within the block."""
        return self.xp.no_grad() if self.is_torch else contextlib.nullcontext()
