"""The request of a verb: model, data, names and axes, resolved once. One call runs at a time.

A call sets modes and hooks on the user's model, and restores flags, attributes and process-wide random generators
afterwards. Two calls at once would restore each other's changes, even for two models, as these may share layers and do
share the generators. So only one call runs at a time. A nested call (a loss that traces) runs within the outer one.
Forward passes of the model in other threads are not captured.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

from ..adapters.protocol import Adapter, Batch, ModelFacts
from ..adapters.registry import adapter_for, adapter_of
from ..arguments.data import is_source
from ..autodiff import full_precision
from ..autodiff.tensors import global_random_states_restored, needs_no_threads, running_engines
from ..data import first_batch
from ..errors import UnsupportedError, has_attribute
from ..layout import Layout
from ..recurrence.arrays import one_thread_each
from ..results.checks import Certificate
from ..settings import current
from ..typing import signature
from .axes import InputCoordinates, ModelAxes
from .names import Catalogue, complete_catalogue, known_model

P = ParamSpec("P")
R = TypeVar("R")

_turn = threading.RLock()
#: Whether this context runs within a call that has its turn; it holds in the threads of that call, too.
_has_turn: ContextVar[bool] = ContextVar("has_turn", default=False)
#: Engines that ran in this process, and engines that ran in the parent process before a fork.
_ran_engines: set[str] = set()
_lost_engines: set[str] = set()


def in_turn(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of a model so that only one decorated call runs at a time."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def run_alone(*args: P.args, **kwargs: P.kwargs) -> R:
        adapter = adapter_of(args[0] if args else kwargs.get("model"))
        engine = None if adapter is None else adapter.engine
        if engine in _lost_engines and not needs_no_threads(engine):
            raise UnsupportedError(
                f"This process was forked after {engine} had started its threads, which a fork does not copy.",
                got="a call that would not return",
                expected="a process started by spawn",
                hint='multiprocessing.get_context("spawn"); plots, measures and files work here',
            )
        reads_source = is_source(args[1] if len(args) > 1 else kwargs.get("x"))
        with (
            nullcontext() if _has_turn.get() else _turn,
            one_thread_each(),
            nullcontext() if _has_turn.get() else full_precision(engine),
            nullcontext() if _has_turn.get() and not reads_source else global_random_states_restored(),
        ):
            if engine is not None:
                _ran_engines.add(engine)
            token = _has_turn.set(True)
            try:
                if adapter is not None and adapter.needs_shapes:
                    args, kwargs = _bound(adapter, names, args, kwargs)
                return function(*args, **kwargs)
            finally:
                _has_turn.reset(token)

    return run_alone


def _bound(adapter: Adapter, names: tuple[str, ...], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a verb with its model bound to the shapes of its data, see :meth:`Adapter.bind`.

    Of a source of batches these are the shapes of the first batch, which is put back.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, y = given.get("x"), given.get("y")
    if is_source(x):
        first, given["x"] = first_batch(x)
        x, y = first.x, first.y if "loss" in names and given.get("of", "loss") == "loss" else None
    if x is None:
        return args, kwargs
    given["model"] = adapter.bind(given["model"], x, y if given.get("loss") is None else None)
    positional = tuple(given.get(name, value) for name, value in zip(names, args, strict=False))
    return (*positional, *args[len(names) :]), {name: given[name] for name in kwargs}


def _start_anew() -> None:
    global _turn
    _turn = threading.RLock()
    _lost_engines.update(_ran_engines | running_engines())
    _ran_engines.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


@dataclass(frozen=True)
class ModelRequest:
    """A call of a verb, resolved on its model once; the requests of the verbs extend it."""

    adapter: Adapter
    model: Any
    #: The data and options of the run: one batch, or a data set.
    batch: Batch
    #: Catalogue of the model's tensors, and their layouts; both are completed while the model runs.
    catalogue: Catalogue
    axes: ModelAxes
    #: Coordinates of the inputs that are DataArrays.
    coordinates: InputCoordinates

    @classmethod
    def resolve(
        cls, model: Any, batch: Batch, axes: Mapping[str, Layout] | None = None, texts: Iterable[Any] = ()
    ) -> ModelRequest:
        """Resolve a call on its model, stated layouts included; ``texts`` are names that may need output keys."""
        adapter, is_data_set = adapter_for(model), is_source(batch.x)
        catalogue = Catalogue(adapter, model, batch.x)
        if texts and not (is_data_set and has_attribute(batch.x, "__next__")):  # an iterator is read once
            names = [text for text in texts if isinstance(text, str)]
            catalogue = complete_catalogue(catalogue, batch, names)
        model_axes = ModelAxes(adapter, model, axes, catalogue)
        return ModelRequest(
            adapter, model, batch, catalogue, model_axes, InputCoordinates(() if is_data_set else batch.x, model_axes)
        )

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts of the model and the batch that need no run."""
        return self.adapter.facts(self.model, self.batch)

    def provenance(self, *, with_loss: bool = False) -> Mapping[str, str]:
        """Return framework, version, engine, dtype and device; ``with_loss`` also the reduction of the loss."""
        facts = self.catalogue.facts
        provenance, reduction = facts.provenance, facts.reduction(self.batch.loss) if with_loss else None
        return provenance if reduction is None else {**provenance, "loss_reduction": reduction}

    def key(self, verb: str, *details: Hashable) -> Hashable | None:
        """Return a value that is equal for calls of which the first may answer for the others; None if none may.

        It holds until the fingerprint of the model changes, see :func:`known_model`. Where the adapter knows none,
        a change would not be seen.
        """
        batch, data, loss = self.batch, signature(self.batch.x), self.batch.loss
        if data is None or self.catalogue.known.fingerprint is None:
            return None
        loss = getattr(loss, "__code__", None) or (loss if isinstance(loss, str) else type(loss))
        stated_axes = (*self.axes.stated.items(), *self.axes.data.items())
        given = (batch.sample_weight is not None, bool(batch.class_weight), bool(batch.initial_state), batch.frozen)
        return verb, batch.training, data, loss, given, stated_axes, *details

    def earlier_certificate(self, verb: str, *details: Hashable) -> Certificate | None:
        """Return the certificate of a call that ``certify=`` does not compare; None if it is to be compared.

        It is off, or with "first" that of an earlier call with ``details``, which passed.
        """
        mode = current().certify
        if mode == "auto":
            mode = "first" if verb == "jacobian" else "always"
        if mode != "first":
            return None if mode == "always" else Certificate()
        earlier = self.catalogue.known.certified.passed.get(self.key(verb, *details))
        return None if earlier is None else replace(earlier, earlier=True)

    def remember(self, certificate: Certificate, verb: str, *details: Hashable) -> None:
        """Store the certificate of a call that passed, for later ones like it; forget it if this one did not pass."""
        key = self.key(verb, *details)
        passed = self.catalogue.known.certified.passed
        if certificate.state != "passed":
            passed.pop(key, None)
        elif key is not None and key not in passed:
            known_model(self.adapter, self.model).certified.passed[key] = certificate
