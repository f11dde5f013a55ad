"""A failed save waits for files that Zarr is still writing to the folder, and starts no further file."""

import asyncio
import threading
import time

import pytest
from zarr.core.buffer import default_buffer_prototype

from rnnlens.results.disk.store import new_recording_store

VALUE = default_buffer_prototype().buffer.from_bytes(b"content")


def begin_a_slow_file(store):
    """Start a thread that writes ``a/0`` in 0.3 s, and return when it has begun."""
    write = store._store.set

    async def slow(key, value):
        await asyncio.sleep(0.3)
        await write(key, value)

    store._store.set = slow
    threading.Thread(target=lambda: asyncio.run(store.set("a/0", VALUE))).start()
    while not store.pending.count:
        time.sleep(0.001)


def fail_while_writing(folder, stores):
    with new_recording_store(folder) as store:
        stores.append(store)
        begin_a_slow_file(store)
        raise KeyError


def test_a_slow_file_is_awaited_and_none_begins_after_it(tmp_path):
    folder, stores = tmp_path / "folder", []
    folder.mkdir()
    with pytest.raises(KeyError):
        fail_while_writing(folder, stores)
    assert (folder / "a" / "0").is_file()  # written before the block ended, not after
    with pytest.raises(OSError, match=r"(?i)cancel"):
        asyncio.run(stores[0].set("a/1", VALUE))
    assert not (folder / "a" / "1").exists()
