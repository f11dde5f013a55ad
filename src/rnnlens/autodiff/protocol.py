"""The interface of an engine: differentiation, compilation, arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from .. import settings
from ..typing import Array

#: ``tap(key, tensor)`` returns the tensor to go on with; the loss is differentiated with respect to it.
Tap = Callable[[str, Any], Any]
#: A program runs the model once, tapping as it goes, and returns (loss or None, everything else of interest).
Program = Callable[[Tap], tuple[Any, Any]]
#: ``keep(old, new)`` returns the new tensor, with what a framework attached to the old one.
Keep = Callable[[Any, Any], Any]
T = TypeVar("T")


def as_it_is(old: Any, new: Any) -> Any:
    """Return the new tensor unchanged, where nothing is attached to tensors."""
    del old
    return new


class Memo:
    """Results and executables that are kept for one question about a model.

    One memo serves every run of a question that depends on nothing outside; a question that may have changed gets a
    new one each time, which shares no more than ``executables``: what was compiled, by the trace it was compiled from.
    """

    def __init__(self, executables: dict[bytes, Any] | None = None) -> None:
        self.executables: dict[bytes, Any] = {} if executables is None else executables
        self._made: dict[Any, Any] = {}

    def once(self, name: Any, make: Callable[[], T]) -> T:
        """Return the result that ``make`` returned at the first call under this name."""
        if name not in self._made:
            self._made[name] = make()
        found: T = self._made[name]
        return found

    def executable(self, trace: str, make: Callable[[], T]) -> T:
        """Return the executable compiled from exactly this trace, or compile it; the least recently used is dropped."""
        key = hashlib.sha256(trace.encode()).digest()
        found: T = self.executables.pop(key) if key in self.executables else make()
        while len(self.executables) >= settings.current().compiled:
            del self.executables[next(iter(self.executables))]
        self.executables[key] = found
        return found


class LinearisedProgram(Protocol):
    """A program that was run once and can be differentiated many times."""

    aux: Any
    targets: Mapping[str, Any]

    def vjp(self, cotangents: Mapping[str, Any]) -> dict[str, Any | None]:
        """Pull K cotangents per target, stacked along a first axis, to K gradients per tapped key; None: no path."""


class Engine(Protocol):
    """The operations of an engine that adapters use: differentiation, compilation, arrays."""

    name: str
    #: Whether :meth:`compile` does anything.
    compiles: bool

    def to_array(self, tensor: Any) -> Array:
        """Copy a tensor to NumPy (torch off the CPU: to a torch tensor); halves become float32."""

    def like(self, array: Array, other: Array) -> Array:
        """Convert a NumPy array to the kind of array of ``other``, a result of :meth:`to_array`."""

    def join(self, arrays: Sequence[Array]) -> Array:
        """Concatenate results of :meth:`to_array` along their first axis."""

    def own(self, array: Any) -> Any:
        """Copy an array where the engine would otherwise share memory with the user's."""

    def values(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Return tensors to substitute for the values of variables; None where the program may read them itself."""

    def gradients(self, program: Program) -> tuple[Any, Any, dict[str, Any]]:
        """Return loss, aux and the gradient of the loss with respect to every tap (zeros where there is no path)."""

    def forward(self, program: Program) -> tuple[Any, Any]:
        """Return loss and aux, without gradients."""

    def compile(self, function: Callable[..., Any], arguments: Sequence[Any], memo: Memo) -> Callable[..., Any]:
        """Trace ``function`` now, for trees of tensors of the structure, shapes and dtypes of ``arguments``.

        What was compiled before is taken from ``memo.executables`` only where the trace is the same to the last
        constant, so that nothing which ``function`` reads from outside can be out of date.
        """

    def settings(self) -> Hashable:
        """Return the engine's own settings that compiled programs depend on."""

    def preserved(self, seed: int | None = None) -> AbstractContextManager[None]:
        """Restore process-wide random generators on exit, after seeding them where a seed is given."""

    def linearise(
        self,
        program: Callable[[Any, Tap], tuple[dict[str, Any], Any]],
        arguments: Any,
        memo: Memo,
    ) -> LinearisedProgram:
        """Run ``program(arguments, tap) -> (targets, aux)``, and keep what is needed to differentiate it."""

    def per_step(self, function: Callable[..., Any]) -> PerStep:
        """The steps of a cell, a pure function ``(x, states, weights) -> (output, new states)``, differentiated."""


class PerStep(Protocol):
    """A step of many rows at once, and its derivatives; rows do not depend on each other."""

    def step(self, x: Any, states: Any, weights: Any) -> Any:
        """Compute output and new states."""

    def vjp(self, inputs: Any, cotangents: Any) -> Any:
        """Pull cotangents of (output, new states) back to (x, states, weights), zeros where no path leads."""

    def produced(self, inputs: Any, cotangents: Any) -> Any:
        """Pull cotangents of (output, new states) back to each new state where the step computes it."""

    def jacobian(self, inputs: Any) -> Any:
        """Return rows of [new states, output], (n, rows, size), by the states side by side and by the input."""
