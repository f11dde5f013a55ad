"""``rnnlens tail`` of a run that is being written: output in a pipe and in a terminal."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from rnnlens.results.training_run import Alert
from rnnlens.tracking.records import TrainingRecord
from rnnlens.tracking.store import Store

pytestmark = pytest.mark.slow

TAIL = [sys.executable, "-m", "rnnlens.cli", "tail", "--every", "0.1"]


def write_run(path, records, *, pause=0.0, end=True):
    store = Store(path)
    for i in range(records):
        store.write(TrainingRecord(10 * i, 0, "probe", {"loss": 1.0 / (1 + i), "lstm/reach": float(i)}))
        time.sleep(pause)
    if end:
        store.close("finished")
    return store


def run_piped(*arguments):
    return subprocess.run([*TAIL, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


def test_a_line_per_record_and_how_it_ended(tmp_path):
    write_run(tmp_path / "a.zarr", 3)
    completed = run_piped(tmp_path / "a.zarr")
    assert completed.returncode == 0
    assert completed.stdout.splitlines() == [
        "step=0 epoch=0 loss=1 lstm/reach=0",
        "step=10 epoch=0 loss=0.5 lstm/reach=1",
        "step=20 epoch=0 loss=0.333333 lstm/reach=2",
        "ended=finished records=3",
    ]


def test_only_some_of_the_numbers(rnnlens):
    write_run("a.zarr", 1)
    assert rnnlens("tail", "a.zarr", "--only", "loss").out.splitlines()[0] == "step=0 epoch=0 loss=1"


def test_no_run_is_one_clear_error(rnnlens):
    result = rnnlens("tail", "none.zarr")
    assert result.code == 2
    assert "There is no run here." in result.err
    assert "--wait" in result.err


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path):
    writer = threading.Timer(1.0, write_run, (tmp_path / "late.zarr", 4), {"pause": 0.2})
    writer.start()
    completed = run_piped(tmp_path / "late.zarr", "--wait")
    writer.join()
    assert completed.stdout.splitlines()[-1] == "ended=finished records=4"


#: Restores Ctrl-C as in a terminal: background jobs of a shell script inherit an ignored SIGINT. The new process does
#: so, since code between fork and exec (preexec_fn) is unsafe beside threads of a framework in this process.
HEEDS_CTRL_C = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('rnnlens.cli', run_name='__main__', alter_sys=True)"
)


def run_in_terminal(arguments, pattern, action):
    """Run ``rnnlens tail`` on a pseudo-terminal, call ``action`` after ``pattern``; return output and exit code."""
    import pty  # Unix only; tests are collected on Windows too

    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", HEEDS_CTRL_C, "tail", "--every", "0.1", *map(str, arguments)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    output, action_done, deadline = b"", False, time.time() + 60
    while time.time() < deadline:
        if select.select([controller], [], [], 0.2)[0]:
            try:
                chunk = os.read(controller, 65536)
            except OSError:
                break
            if not chunk:
                break
            output += chunk
        if not action_done and re.search(pattern, output):
            action(process)
            action_done = True
    code = process.wait(10)
    os.close(controller)
    return output.decode(), code


@pytest.mark.linux
def test_a_terminal_shows_a_table_that_is_drawn_anew_and_ends_with_the_run(tmp_path):
    writer = threading.Thread(target=write_run, args=(tmp_path / "a.zarr", 5), kwargs={"pause": 0.3})
    writer.start()
    output, code = run_in_terminal(["--wait", tmp_path / "a.zarr"], rb"never", lambda process: None)
    writer.join()
    assert code == 0
    assert "5 records, step 40" in output
    assert "finished" in output
    assert re.search("█[▁-▇]+", output)
    assert output.count("lstm/reach") > 1
    assert "\x1b[?25h" in output.rpartition("\x1b[?25l")[2]  # the cursor is shown again


@pytest.mark.linux
def test_ctrl_c_leaves_the_training_alone(tmp_path):
    store = write_run(tmp_path / "a.zarr", 2, end=False)
    output, code = run_in_terminal(
        [tmp_path / "a.zarr"], rb"lstm/reach", lambda process: process.send_signal(signal.SIGINT)
    )
    assert code == 130
    assert "Traceback" not in output
    assert "\x1b[?25h" in output.rpartition("\x1b[?25l")[2]
    store.write(TrainingRecord(20, 0, "probe", {"loss": 0.1}))
    store.close("finished")


@pytest.mark.parametrize("arguments", [["--every", "0"], ["--every", "soon"]])
def test_arguments_that_are_none(rnnlens, arguments):
    write_run("a.zarr", 1)
    assert rnnlens("tail", "a.zarr", *arguments).code == 2


def test_the_loss_is_first_and_norms_of_weights_are_shown_on_request(rnnlens, tmp_path):
    store = Store(tmp_path / "a.zarr")
    scalars = {"lstm/weight_norm/kernel": 2.0, "lstm/decay": 0.9, "lstm/reach": 3.0, "loss": 1.0}
    store.write(TrainingRecord(0, 0, "probe", scalars))
    store.close("finished")
    line = rnnlens("tail", "a.zarr").out.splitlines()[0]
    assert line == "step=0 epoch=0 loss=1 lstm/reach=3 lstm/decay=0.9"
    line = rnnlens("tail", "a.zarr", "--all").out.splitlines()[0]
    assert line == "step=0 epoch=0 loss=1 lstm/reach=3 lstm/weight_norm/kernel=2 lstm/decay=0.9"
    line = rnnlens("tail", "a.zarr", "--only", "weight_norm").out.splitlines()[0]
    assert line == "step=0 epoch=0 lstm/weight_norm/kernel=2"


def state_of(address, word):
    """Return the state of a live page, as text, once a word is in it."""
    for _ in range(100):
        with urllib.request.urlopen(f"{address}state", timeout=10) as response:
            state = response.read().decode()
        if word in state:
            return state
        time.sleep(0.1)
    raise AssertionError(f"{word!r} never came: {state}")


ALERT = Alert("exploding", "lstm/adjoint", 10, 5.0, 0.01)


@pytest.mark.parametrize(("kind", "code"), [("exploding", 3), ("any", 3), ("vanishing", 0), ("explode", 2)])
def test_until_an_alert(rnnlens, kind, code):
    store = Store("a.zarr")
    for step in (0, 10):
        notes = (ALERT.sentence,) if step else ()
        store.write(TrainingRecord(step, 0, "probe", {"lstm/adjoint": 5.0}, notes=notes))
    store.close("finished")
    result = rnnlens("tail", "a.zarr", "--until", kind)
    assert result.code == code
    assert (ALERT.sentence in result.err) == (code == 3)
    assert ("did you mean 'exploding'" in result.err) == (code == 2)


@pytest.mark.linux
def test_a_page_of_figures_that_grows_with_the_run(tmp_path):
    store = write_run(tmp_path / "<a>.zarr", 3, end=False)
    process = subprocess.Popen(
        [sys.executable, "-c", HEEDS_CTRL_C, "tail", "--every", "0.1", tmp_path / "<a>.zarr", "--serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline()).group()
        with urllib.request.urlopen(address, timeout=10) as response:
            page = response.read().decode()
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert "&lt;a&gt;.zarr" in page
        assert re.match(r".*ssh -N -L (\d+):127\.0\.0\.1:\1 ", process.stderr.readline())
        assert "3 records, step 20, loss 0.3333. Being recorded." in state_of(address, "records")
        store.write(TrainingRecord(30, 1, "probe", {"loss": 0.25, "lstm/reach": 3.0}))
        store.close("finished")
        assert "4 records, step 30, loss 0.25. Ended: finished." in state_of(address, "Ended")
        for path, host, code in (("../etc/passwd", None, 404), ("", "evil.example:80", 403)):
            request = urllib.request.Request(address + path, headers={"Host": host} if host else {})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=10)
            with refused.value:
                assert refused.value.code == code
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130


def test_a_port_in_use_is_one_clear_error(rnnlens):
    write_run("a.zarr", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = rnnlens("tail", "a.zarr", "--serve", "--port", server.getsockname()[1])
    assert result.code == 2
    assert "The port cannot be used." in result.err
