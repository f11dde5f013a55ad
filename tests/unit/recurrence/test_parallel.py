"""Samples dealt to threads: they do run side by side, and every sample is taken once."""

import subprocess
import sys
import threading
import time

import array_api_compat.numpy as anp
import array_api_compat.torch as atorch
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from rnnlens.recurrence.parallel import for_each, large_parts, sample_chunks, walk_parts


def blas_threads():
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_parts_meet_each_other_with_one_thread_for_each_product():
    meeting, seen = threading.Barrier(2), []

    def work(part):
        meeting.wait(timeout=20)
        seen.append((part, blas_threads()))

    with threadpool_limits(2, "blas"):
        for_each(work, [slice(0, 1), slice(1, 2)], xp=anp)
        assert blas_threads() == {2}
    assert sorted(part.start for part, _ in seen) == [0, 1]
    assert all(threads == {1} for _, threads in seen)


def test_an_error_in_a_part_is_raised():
    with pytest.raises(ZeroDivisionError):
        for_each(lambda part: 1 // part.start, [slice(0, 1), slice(1, 2)], xp=anp)


@pytest.mark.parametrize("parts", [walk_parts, large_parts])
@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_parts_cover_every_sample_once(parts, batch):
    with threadpool_limits(2, "blas"):
        few, many = parts(batch, 1, xp=anp), parts(batch, 2**20, xp=anp)
        assert len(few) == 1
        assert len(many) == min(batch, 2)
        assert len(parts(batch, 2**20, xp=atorch)) == 1
    for found in (few, many, list(sample_chunks(batch, 2**18))):
        assert [i for part in found for i in range(batch)[part]] == list(range(batch))


def test_two_callers_take_turns():
    """Else one would set back the number of BLAS threads that the other had set."""
    seen = []

    def call(name, pauses):
        def work(part):
            time.sleep(pauses[part.start])
            seen.append(name)

        for_each(work, [slice(0, 1), slice(1, 2)], xp=anp)

    with threadpool_limits(2, "blas"):
        first = threading.Thread(target=call, args=("first", (0, 0.4)))
        first.start()
        time.sleep(0.1)
        call("second", (0, 0))
        first.join()
    assert seen == ["first", "first", "second", "second"]


FORKED = """
import os, threading, time
import array_api_compat.numpy as anp
from threadpoolctl import threadpool_limits
from rnnlens.recurrence.parallel import for_each

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


def test_a_forked_process_makes_threads_of_its_own():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"
