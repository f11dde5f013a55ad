"""Ctrl-C ends the command with exit code 130 and prints only "interrupted"."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from .conftest import HEAR_CTRL_C, PROGRAM, TORCH, environment

SLOW = """
import time
def make():
    print("here", flush=True)
{body}
"""


def slow_module(body):
    """Return the code of a module whose factory prints "here" and then runs ``body``, which takes long."""
    return SLOW.format(body=textwrap.indent(textwrap.dedent(body), "    "))


SWALLOWED = """
    try:
        time.sleep(60)
    except BaseException:
        return None
"""

TURNED = """
    try:
        time.sleep(60)
    except BaseException as error:
        raise RuntimeError("callback failed") from error
"""

IN_A_DESTRUCTOR = """
    class Last:
        def __del__(self):
            print("now", flush=True)
            time.sleep(60)
    Last()
    time.sleep(60)
"""

IN_A_CALLBACK = """
    import jax, numpy as np
    def slow(x):
        for _ in range(600):
            time.sleep(0.1)
        return x
    jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct((), np.float32), x))(1.0))
"""

#: Catches every exception in a loop, as worker loops do.
STUBBORN = """
    for _ in range(600):
        try:
            time.sleep(0.1)
        except BaseException:
            pass
"""


def interrupt(process):
    """Send Ctrl-C, check the exit code and stderr, and return stdout."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")
    return out


@pytest.mark.parametrize("body", [SWALLOWED, TURNED, IN_A_DESTRUCTOR, IN_A_CALLBACK, STUBBORN])
def test_wherever_it_strikes(start, folder, body):
    (folder / "slow.py").write_text(slow_module(body))
    process = start("layers", "slow:make")
    assert process.stdout.readline() == "here\n"
    time.sleep(2.5 if body is IN_A_CALLBACK else 0.2)
    interrupt(process)


def test_ctrl_c_twice_says_it_once(start, folder):
    (folder / "slow.py").write_text(slow_module("time.sleep(60)"))
    process = start("layers", "slow:make")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    interrupt(process)


@pytest.mark.full  # on a busy machine torch aborts if it is interrupted while loading
def test_from_the_first_line_on(folder):
    """Ctrl-C works from the first line of rnnlens on; before it, Python and its import system are still starting."""
    (folder / "own.py").write_text(TORCH)
    program = PROGRAM.replace("sys.exit(main())", "print('on', flush=True); sys.exit(main())")
    program = f"{HEAR_CTRL_C}; {program}"
    outcomes = []
    for delay in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, "layers", "own:make"],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        outcomes.append((process.returncode, err))
    assert outcomes == [(130, "interrupted\n")] * 7


def test_a_background_job_goes_on(folder):
    """Ctrl-C does not end a job that a shell started in the background, with Ctrl-C ignored."""
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {PROGRAM}"
    (folder / "slow.py").write_text(slow_module("time.sleep(1)"))
    arguments = [sys.executable, "-P", "-c", code, "layers", "slow:make"]
    process = subprocess.Popen(
        arguments, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "interrupted" not in err


def test_while_frameworks_take_their_time_to_end(start, folder):
    exit_hook = "import atexit, time\natexit.register(lambda: (print('end', flush=True), time.sleep(60)))\n"
    (folder / "own.py").write_text(exit_hook + TORCH)
    process = start("layers", "own:make")
    while process.stdout.readline() != "end\n":
        assert process.poll() is None
    interrupt(process)


def test_little_is_loaded_before_ctrl_c_is_heard():
    """Before Ctrl-C is handled, rnnlens loads three modules; what Python loads itself cannot be changed."""
    code = "import sys; before = set(sys.modules)\nimport rnnlens.cli; print(set(sys.modules) - before)"
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert eval(completed.stdout) == {"rnnlens", "rnnlens.cli", "rnnlens.cli.interrupts", "__future__"}
