"""Calls of rnnlens: one runs at a time, none in a forked process where it would hang; which ones have a certificate.

A call sets modes and hooks on the user's model, and restores flags, attributes and process-wide random generators
afterwards. Two calls at once would restore each other's changes, even for two models, as these may share layers and do
share the generators. So only one call runs at a time. A nested call (a loss that traces) runs within the outer one.
Forward passes of the model in other threads are not captured.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .. import data
from ..adapters.protocol import Batch
from ..adapters.registry import adapter_of
from ..autodiff.tensors import needs_no_threads, running_engines
from ..errors import UnsupportedError, message
from ..recurrence.parallel import one_thread_each
from ..settings import current

P = ParamSpec("P")
R = TypeVar("R")

_turn = threading.RLock()
#: Engines that ran in this process, and engines that ran in the parent process before a fork.
_ran: set[str] = set()
_lost: set[str] = set()


def in_turn(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of a model so that only one decorated call runs at a time."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        model = args[0] if args else kwargs.get("model")
        engine = engine_of(model)
        if engine in _lost and not needs_no_threads(engine):
            raise _forked(engine)
        with _turn, one_thread_each():
            if engine is not None:
                _ran.add(engine)
            return function(*args, **kwargs)

    return alone


def engine_of(model: Any) -> str | None:
    """Return the engine of a model, such as jax; None for an unknown model."""
    adapter = adapter_of(model)
    return None if adapter is None else adapter.engine


def _forked(engine: str) -> UnsupportedError:
    return UnsupportedError(
        message(
            f"This process was forked after {engine} had started its threads, which a fork does not copy.",
            got="a call that would not return",
            expected="a process started by spawn",
            hint='multiprocessing.get_context("spawn"); plots, measures and files work here',
        )
    )


def _start_anew() -> None:
    global _turn
    _turn = threading.RLock()
    _lost.update(_ran | running_engines())
    _ran.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


#: By model: the calls that had a certificate already, for ``certify="first"``.
_certified: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def needs_certificate(model: Any, verb: str, batch: Batch, *what: Any) -> bool:
    """Return whether ``rl.options(certify=...)`` requires a certificate of this call.

    With ``certify="first"``, only the first call for a model, function, mode, input shapes and ``what`` has one.
    """
    how = current().certify
    if how == "auto":
        how = "first" if verb == "jacobian" else "always"
    if how != "first":
        return how == "always"
    leaves = [leaf.data if data.is_packed(leaf) else leaf for leaf in data.leaves_of(batch.x)]
    shapes = tuple((tuple(np.shape(leaf)), str(getattr(leaf, "dtype", ""))) for leaf in leaves)
    known = _certified.setdefault(model, set())
    key = (verb, batch.training, shapes, *what)
    fresh = key not in known
    known.add(key)
    return fresh
