"""Runs of a Keras model that are not compiled: quicker for a single run on little data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rnnlens.adapters.keras import run


@contextmanager
def eagerly() -> Iterator[None]:
    """Within this block every capture is the only one of its kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "memo_for", lambda *_: None)
        yield
