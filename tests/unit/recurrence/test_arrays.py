"""Samples are distributed over threads: parts run in parallel, and each sample is processed once."""

import subprocess
import sys
import threading
import time

import array_api_compat.numpy as anp
import array_api_compat.torch as atorch
import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from rnnlens.recurrence.arrays import (
    Workspace,
    for_each,
    large_parts,
    one_thread_each,
    raise_if_cancelled,
    row_parts,
    sample_chunks,
    walk_parts,
)


def blas_threads():
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_parts_meet_each_other_with_one_thread_for_each_product():
    meeting, calls = threading.Barrier(2), []

    def work(part):
        meeting.wait(timeout=20)
        calls.append((part, blas_threads()))

    with threadpool_limits(2, "blas"):
        for_each(work, [slice(0, 1), slice(1, 2)], xp=anp)
        assert blas_threads() == {2}
    assert sorted(part.start for part, _ in calls) == [0, 1]
    assert all(threads == {1} for _, threads in calls)


def test_an_error_in_a_part_is_raised():
    with pytest.raises(ZeroDivisionError):
        for_each(lambda part: 1 // part.start, [slice(0, 1), slice(1, 2)], xp=anp)


@pytest.mark.parametrize("split", [walk_parts, large_parts])
@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_parts_cover_every_sample_once(split, batch):
    with threadpool_limits(2, "blas"):
        few, many = split(batch, 1, xp=anp), split(batch, 2**20, xp=anp)
        assert len(few) == 1
        assert len(many) == min(batch, 2)
        assert len(split(batch, 2**20, xp=atorch)) == 1
    for slices in (few, many, list(sample_chunks(batch, 2**18))):
        assert [i for part in slices for i in range(batch)[part]] == list(range(batch))


@pytest.mark.parametrize("part_count", [1, 2])
def test_products_take_one_thread_however_many_parts(part_count):
    thread_counts = []
    with threadpool_limits(2, "blas"):
        for_each(
            lambda part: thread_counts.append(blas_threads()), [slice(i, i + 1) for i in range(part_count)], xp=anp
        )
        assert blas_threads() == {2}
    assert thread_counts == [{1}] * part_count


def test_callers_that_overlap_leave_the_number_of_threads_as_it_was():
    """Two overlapping callers limit BLAS to one thread; only when the last one ends is the former number restored."""
    inside, leave, thread_counts = threading.Event(), threading.Event(), []

    def hold_one_thread():
        with one_thread_each():
            inside.set()
            leave.wait(20)
            thread_counts.append(blas_threads())

    with threadpool_limits(2, "blas"):
        second_thread = threading.Thread(target=hold_one_thread)
        with one_thread_each():
            second_thread.start()
            assert inside.wait(20)
        thread_counts.append(blas_threads())
        leave.set()
        second_thread.join()
        assert blas_threads() == {2}
    assert thread_counts == [{1}, {1}]


def test_a_part_may_deal_again():
    """A nested for_each runs in its caller's thread: waiting for other threads could deadlock."""
    parts_done = []

    def work(part):
        for_each(parts_done.append, [part, part], xp=anp)

    with threadpool_limits(2, "blas"):
        for_each(work, [slice(0, 1), slice(1, 2)], xp=anp)
    assert len(parts_done) == 4


def test_other_parts_stop_when_one_fails():
    """An exception in one part, KeyboardInterrupt included, cancels the other parts."""
    steps = []

    def work(part):
        if part.start == 0:
            raise KeyboardInterrupt
        for step in range(10_000):
            raise_if_cancelled()
            steps.append(step)
            time.sleep(0.001)

    with threadpool_limits(2, "blas"), pytest.raises(KeyboardInterrupt):
        for_each(work, [slice(0, 1), slice(1, 2)], xp=anp)
    assert len(steps) < 5_000
    assert blas_threads() != set()


@pytest.mark.parametrize("shape", [(1, 700, 256, 256), (3, 257, 256, 256), (2, 3, 4, 5)])
def test_rows_of_a_large_product_are_dealt(shape):
    batch, rows, inner, columns = shape
    random = np.random.default_rng(0)
    a, b = random.normal(size=(batch, rows, inner)), random.normal(size=(batch, inner, columns))
    out = np.full((batch, rows, columns), np.nan)
    with threadpool_limits(2, "blas"):
        assert len(row_parts(a.shape, columns)) == (1 if rows == 3 else 2)
        Workspace(anp, a).matmul(a, b, out)
    np.testing.assert_allclose(out, np.einsum("bri,bic->brc", a, b), rtol=1e-9, atol=1e-9)


FORKED = """
import os, threading, time
import array_api_compat.numpy as anp
from threadpoolctl import threadpool_limits
from rnnlens.recurrence.arrays import for_each

meeting = threading.Barrier(2)
with threadpool_limits(2, "blas"):
    for_each(lambda part: meeting.wait(20), [slice(0, 1), slice(1, 2)], xp=anp)
    time.sleep(0.5)  # both threads are idle
    child = os.fork()
    if child == 0:
        threading.Timer(20, lambda: os._exit(3)).start()
        for_each(lambda part: meeting.wait(20), [slice(0, 1), slice(1, 2)], xp=anp)
        os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.linux
def test_a_forked_process_makes_threads_of_its_own():
    completed = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    assert completed.stdout == "0\n"
