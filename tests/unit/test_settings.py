import asyncio
import io
import threading

import pytest

from rnnlens import settings
from rnnlens.errors import InputError
from rnnlens.settings import Progress, Settings, current, format_memory, options, parse_memory


@pytest.fixture(autouse=True)
def default_settings():
    token = settings._CURRENT.set(Settings())
    yield
    settings._CURRENT.reset(token)


@pytest.mark.parametrize(
    ("amount", "size"),
    [
        ("2 GiB", 2 * 1024**3),
        ("2GB", 2 * 10**9),
        ("500 mb", 500 * 10**6),
        ("1.5 KiB", 1536),
        ("1 TiB", 1024**4),
        ("4 G", 4 * 1024**3),
        ("4k", 4096),
        ("12 B", 12),
        ("12", 12),
        ("2e9", 2 * 10**9),
        (4096, 4096),
        (1e6, 10**6),
    ],
)
def test_memory_in_words(amount, size):
    assert parse_memory(amount) == size


@pytest.mark.parametrize(
    "amount", ["", "much", "GiB", "-1 GB", "0", 0, -5, "1.2.3 MB", "2 XB", True, None, "inf", 1e400]
)
def test_what_is_no_amount_of_memory(amount):
    with pytest.raises(InputError) as caught:
        parse_memory(amount)
    assert str(caught.value) == (
        f"This is not an amount of memory.\n  got:      {amount!r}\n"
        '  expected: such as "2 GiB", "500 MB" or a number of bytes'
    )


@pytest.mark.parametrize("size", [1, 1023, 1024, 1536, 2 * 1024**3, 5 * 1024**4])
def test_memory_back_to_words(size):
    assert parse_memory(format_memory(size)) == size


def test_options_hold_for_a_block_and_nest():
    with options(memory="1 GiB") as outer:
        assert outer.memory == 1024**3
        with options(progress=False):
            assert current() == Settings(1024**3, False)
        assert current().progress == "auto"
    assert current() == Settings()


def test_options_are_restored_after_an_error():
    with pytest.raises(RuntimeError), options(memory=1):
        raise RuntimeError
    assert current() == Settings()


def test_options_hold_from_here_on_when_called():
    options(memory="1 MiB")
    assert current().memory == 1024**2


def test_a_refused_option_changes_nothing():
    with pytest.raises(InputError) as caught:
        options(memory="1 MiB", progress="sometimes")
    assert str(caught.value) == "progress= is a switch.\n  got:      'sometimes'\n  expected: True, False or 'auto'"
    assert current() == Settings()
    with pytest.raises(TypeError, match="memry"):
        options(memry="1 MiB")


def test_threads_and_tasks_do_not_disturb_each_other():
    memory_limits = []

    async def task():
        with options(memory=7):
            await asyncio.sleep(0)
            memory_limits.append(current().memory)

    async def run_both():
        await asyncio.gather(task(), asyncio.sleep(0))
        memory_limits.append(current().memory)

    asyncio.run(run_both())
    thread = threading.Thread(target=lambda: options(memory=9))
    thread.start()
    thread.join()
    assert memory_limits == [7, Settings().memory]
    assert current() == Settings()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def progress_output(monkeypatch, stream, *, patience, progress="auto"):
    monkeypatch.setattr("sys.stderr", stream)
    with options(progress=progress), Progress("time Jacobian", total=2, patience=patience) as bar:
        bar.advance()
        bar.advance()
    return stream.getvalue()


def test_a_bar_appears_only_where_someone_waits_and_watches(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert "time Jacobian" in progress_output(monkeypatch, Terminal(), patience=0.0)
    assert progress_output(monkeypatch, Terminal(), patience=60.0) == ""
    assert progress_output(monkeypatch, io.StringIO(), patience=0.0) == ""
    assert progress_output(monkeypatch, Terminal(), patience=0.0, progress=False) == ""
