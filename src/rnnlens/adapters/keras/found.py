"""Leave a model as it was found, also after an exception or an interrupt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .dialect import Dialect
from .restore import unchanged


@contextmanager
def as_found(model: Any, keras: Dialect, seed: int | None = None) -> Iterator[None]:
    """All that layers keep in Python, variables, random generators and process-wide state come back on exit.

    ``model`` may be a cell that is no layer, which has nothing of Keras to put back.
    """
    with keras.as_found(model, seed), unchanged(model, keras):
        yield
