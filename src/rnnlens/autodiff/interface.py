"""Interface of an autodiff engine: programs with taps, their gradients and pull-backs, and the memo of a request."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np

from .. import settings
from ..typing import Array
from .cuts import CutRecorder, CutSite, UserCall

#: ``tap(key, tensor)`` returns the tensor with which the program continues; it is a source of differentiation.
Tap = Callable[[str, Any], Any]
#: ``program(tap)`` runs the model once, calls ``tap`` at each boundary, and returns (loss or None, aux).
Program = Callable[[Tap], tuple[Any, Any]]
#: ``program(arguments, tap)`` returns the tensors to differentiate by name, and aux.
TargetProgram = Callable[[Any, Tap], tuple[dict[str, Any], Any]]
#: ``keep(old, new)`` returns the new tensor with the data that a framework attached to the old one.
Keep = Callable[[Any, Any], Any]
T = TypeVar("T")


def as_it_is(old: Any, new: Any) -> Any:
    """Return ``new``: the default ``keep`` function, for frameworks that attach no data to tensors."""
    del old
    return new


class Memo:
    """Cache for repeated runs of one request on a model: intermediate results and compiled executables.

    If a request depends only on its arguments, all of its runs share one memo. Otherwise each run has a new memo, which
    shares only ``executables``, keyed by the hash of the trace that they were compiled from.
    """

    def __init__(self, executables: dict[bytes, Any] | None = None) -> None:
        self.executables: dict[bytes, Any] = {} if executables is None else executables
        self._results: dict[Any, Any] = {}

    def once(self, name: Any, make: Callable[[], T]) -> T:
        """Return the cached result under this name; the first call computes it with ``make``."""
        if name not in self._results:
            self._results[name] = make()
        result: T = self._results[name]
        return result

    def executable(self, trace: str, make: Callable[[], T]) -> T:
        """Return the executable compiled from exactly this trace.

        The least recently used one is dropped from a full cache.
        """
        key = hashlib.sha256(trace.encode()).digest()
        executable: T = self.executables.pop(key) if key in self.executables else make()
        while len(self.executables) >= settings.current().compiled:
            del self.executables[next(iter(self.executables))]
        self.executables[key] = executable
        return executable


class LinearisedProgram(Protocol):
    """A program that was run once and can be differentiated many times, with its ``targets`` and ``aux``."""

    aux: Any
    targets: Mapping[str, Any]

    def vjp(self, cotangents: Mapping[str, Any]) -> dict[str, Any | None]:
        """Pull K cotangents per target (K, ...) back to K gradients per tap key; None where no path leads."""


class Engine(ABC):
    """Autodiff engine; it calls ``keep(old, new)`` when the tensor ``new`` is substituted for ``old``."""

    name: str
    #: Whether :meth:`compile` compiles; False if it returns the function itself.
    compiles = True

    def __init__(self, keep: Keep = as_it_is, on_host: bool = False) -> None:
        self._keep, self._on_host = keep, on_host

    @abstractmethod
    def to_array(self, tensor: Any) -> Array:
        """Copy a tensor to NumPy; bfloat16 and float16 become float32.

        Without ``on_host`` a torch tensor on a device becomes a detached torch tensor there.
        """

    def own_copy(self, array: Any) -> Any:
        """Copy an array to memory of its own, if the engine could otherwise share the user's memory."""
        return np.array(array) if isinstance(array, np.ndarray) else array

    def values(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Return tensors to substitute for the values of variables; None if programs read the variables themselves."""
        return None

    @abstractmethod
    def gradients(
        self, program: Program, cotangents: Mapping[str, Any] | None = None
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Return loss, aux and the gradient of the loss for each tap key; zeros where no path leads to the loss.

        With ``cotangents`` the program returns targets by name in place of the loss, and these are pulled back.
        """

    def forward(self, program: Program) -> tuple[Any, Any]:
        """Run a program without gradients, and return (loss, aux)."""
        return program(lambda key, tensor: tensor)

    @abstractmethod
    def compile(self, function: Callable[..., Any], arguments: Sequence[Any], memo: Memo) -> Callable[..., Any]:
        """Trace ``function`` for arguments of these structures, shapes and dtypes, and return the compiled function.

        An executable is reused from ``memo.executables`` only if its trace is identical, constants included. Values
        that ``function`` reads from outside are therefore never out of date.
        """

    @abstractmethod
    def coarsest_dtype(self, function: Callable[..., Any], arguments: Sequence[Any] = ()) -> str:
        """Call or trace a function; return the coarsest float dtype in which its operations compute, or ""."""

    def settings(self) -> Hashable:
        """Return a hashable of the engine's settings that compiled programs depend on."""
        return ()

    def context(self) -> Hashable:
        """Return the trace or graph in which operations are recorded now; it differs inside a compiled loop."""
        return ()

    def record_cuts(self) -> AbstractContextManager[CutRecorder]:
        """Record the operations of programs that run within the block, to find those at which a gradient ends.

        An engine that cannot observe operations records none.
        """
        return nullcontext(CutRecorder())

    #: Module whose function ``stop_gradient`` programs call; None if the engine has none.
    owner_of_stop_gradient: Any = None

    def observe_detached(
        self, bypassed: Sequence[UserCall], every: int | None, ignored: Callable[[], bool]
    ) -> AbstractContextManager[Mapping[UserCall, CutSite]]:
        """Count the calls within the block by which tensors lose their gradient, and pass over some of them.

        Of the ``bypassed`` calls every ``every``-th execution still cuts; ``ignored()`` excepts the present one. The
        default counts none, for engines that cut by ``stop_gradient`` alone.
        """
        return nullcontext({})

    def step_by_step(self) -> AbstractContextManager[None]:
        """Run loops and compiled functions as Python code within the block."""
        return nullcontext()

    @property
    def on_accelerator(self) -> bool:
        """Whether new tensors lie on an accelerator, such as a GPU, unless a device is given."""
        return False

    def full_precision(self) -> AbstractContextManager[None]:
        """Multiply and convolve float32 with all its digits within the block, also where the user allows TF32.

        TF32 keeps 10 of the 23 binary digits after the first one: with it no comparison could tell an error from
        rounding. The setting is process-wide, and is restored at the end of the block.
        """
        return nullcontext()

    def without_fused_sums(self) -> AbstractContextManager[None] | None:
        """Return a block in which no fused kernel sums float32 in one long chain, or None if there is none.

        oneDNN's gradient of the biases of an LSTM on a CPU is off by 1e-3 after a million rows, other kernels' by 1e-7.
        The setting is process-wide, and is restored at the end of the block; beside other threads the result is None.
        """
        return None

    def inlined(self, function: Any) -> Callable[..., Any]:
        """Return the Python function that the engine compiled into ``function``; TensorFlow alone has such methods."""
        raise NotImplementedError(function)

    def random_state_restored(self, seed: int | None = None) -> AbstractContextManager[None]:
        """Restore process-wide random generators on exit, after seeding them if a seed is given.

        The default does nothing: on JAX and TensorFlow, Keras keeps random states in its own variables.
        """
        return nullcontext()

    @abstractmethod
    def linearise(self, program: TargetProgram, arguments: Any, memo: Memo | None) -> LinearisedProgram:
        """Run ``program(arguments, tap)`` once, and return it ready for vector-Jacobian products.

        Without a memo the engine need not compile: the program is short, and few products of it are computed.
        """

    def forward_and_back(
        self, program: TargetProgram, arguments: Any, memo: Memo, cotangents: Mapping[str, Any]
    ) -> tuple[Any, Any, Mapping[str, Any]]:
        """Run ``program(arguments, tap)`` forward and back; return targets, aux and the gradients by tap key.

        Each gradient has a leading axis of one. All is one compiled function.
        """

        def run(arguments: Any, cotangents: Mapping[str, Any]) -> Any:
            targets, aux, gradients = self.gradients(lambda tap: program(arguments, tap), cotangents)
            return targets, aux, {key: grad[None] for key, grad in gradients.items()}

        inputs = (arguments, dict(cotangents))
        compiled = memo.once("forward_and_back", lambda: self.compile(run, inputs, memo))
        results: tuple[Any, Any, Mapping[str, Any]] = compiled(*inputs)
        return results

    @abstractmethod
    def per_step(self, function: Callable[..., Any]) -> PerStep:
        """Return the vectorised derivatives of a cell's step ``(x, states, weights) -> (output, new states)``."""


class PerStep(Protocol):
    """A cell's step on a batch of rows (n, size), and its derivatives; rows do not depend on each other."""

    def step(self, x: Any, states: Any, weights: Any) -> Any:
        """Compute (output, new states) of one step for n independent rows."""

    def vjp(self, inputs: Any, cotangents: Any) -> Any:
        """Pull cotangents of (output, new states) back to (x, states, weights), zeros where no path leads."""

    def produced(self, inputs: Any, cotangents: Any) -> Any:
        """Return the total gradient of each new state, given cotangents of (output, new states).

        It includes paths through other results of the same step, as of c_t through h_t.
        """

    def jacobian(self, inputs: Any) -> Any:
        """Differentiate one step of n samples: return d[s_t, y_t]/ds_{t-1} and d[s_t, y_t]/dx_t.

        Both are (n, row, size): the rows are the units of the new states, then those of the output; ``size`` is that of
        all states before the step, concatenated, or of the input. ``inputs``: input, states, weights.
        """
