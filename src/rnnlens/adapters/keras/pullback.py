"""Pullback: one run of a model, kept so that any port can be differentiated with respect to any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...autodiff import Engine, Memo, Tap
from ...autodiff.tensors import flipped, join
from ...errors import InputError, LayerNotFoundError, raised_by
from ...typing import Array
from .. import shared
from ..protocol import Batch, Port, Pullback, refuse_misfits
from ..shared import Pull
from . import losses
from .boundaries import TappedPorts
from .dialect import Dialect, dialect_of
from .discover import given_states, places
from .hooks import LayerCall
from .inputs import input_order
from .restore import as_found
from .run import Loss, RunRequest, forget, memo_for, program, with_loops

#: Largest size in bytes of one chunk of cotangents, intermediate tensors included.
_CHUNK = 512 * 2**20
_AROUND = 16
#: Suffix of the name under which a recurrent layer is hooked for the numbers of its samples and steps alone.
_SIZES = "~sizes"


class KerasPullback:
    """Pullback of one Keras run; see :class:`rnnlens.adapters.protocol.Pullback`."""

    def __init__(
        self,
        model: Any,
        batch: Batch,
        of: Sequence[Port],
        wrt: Sequence[Port],
        cut: Sequence[Port] = (),
        cotangents: Mapping[Port, Array] | None = None,
    ) -> None:
        self._keras = dialect_of(model)
        self._engine: Engine = self._keras.engine
        self._of, self._wrt, self._cut = tuple(of), tuple(wrt), tuple(cut)
        self._spots = self._taps(model, batch, frozenset())
        self._linear: Any = None
        self._cotangents = cotangents
        #: Gradients of ``cotangents`` by port, with a leading axis; None if they are pulled back by :meth:`vjp`.
        self.known_gradients: Mapping[Port, Array | None] | None = None
        self.values: Mapping[Port, Array] = {}
        self.outputs = 0
        self.recurrent_sizes: tuple[tuple[int, int], ...] = ()
        self._run(model, batch)

    def _run(self, model: Any, batch: Batch) -> None:
        with_loss = any(port.kind == "loss" for port in (*self._of, *self._wrt))
        loss = losses.plan(model, batch) if with_loss else None

        def attempt(job: RunRequest) -> None:
            if job.stepped != self._spots.stepped:
                self._spots = self._taps(model, batch, job.stepped)
            if job.stepped:  # the tensors of such layers have taps of their own
                own = self._job(model, batch, loss)
                job = replace(own, stepped=job.stepped, apart=job.apart, starts=job.starts)
            self._open(job, model, batch)

        with_loops(self._job(model, batch, loss), attempt)

    def _taps(self, model: Any, batch: Batch, stepped: frozenset[str]) -> TappedPorts:
        """Return the taps of all ports; ``stepped`` are the layers that are called one step at a time."""
        spots = TappedPorts(places(model), input_order(self._keras, batch.x), stepped=stepped)
        for port in (*self._of, *self._wrt, *self._cut):
            spots.add(port, model)
        return spots

    def _open(self, job: RunRequest, model: Any, batch: Batch) -> None:
        with as_found(model, self._keras, batch.seed):
            arguments = job.arguments()
            memo = self._memo(job, arguments)
            try:
                with self._keras.undisturbed(model, regularised=True), raised_by("The forward pass of your model"):
                    recorded = self._differentiated(job, arguments, memo)
            except BaseException:
                if memo is not None:
                    forget(job.model, memo)
                raise
        if self._linear is not None:
            self._linear.tracing = partial(_undone, model, self._keras, batch.seed)
        self.outputs = int(recorded.pop("outputs"))
        samples, steps = int(recorded.pop("samples")), int(recorded.pop("steps"))
        self.recurrent_sizes = ((samples, steps),) if samples else ()
        values = {}
        for port, key in self._spots.keys.items():
            if key not in recorded and self.known_gradients is not None:
                continue
            if key not in recorded:
                where = "model" if port.layer is None else f"layer {port.layer!r}"
                what = f"The {port.kind} number {port.index} of the {where} does not appear in this forward pass."
                raise LayerNotFoundError(what)
            values[port] = self._turned(port, self._engine.to_array(recorded[key]), axis=1)
            if port in self._spots.ending:
                values[port] = values[port][:, -1]
        self.values = values

    def _differentiated(self, job: RunRequest, arguments: Any, memo: Memo | None) -> dict[str, Any]:
        """Run the program, forward for any cotangents or forward and back for known ones; return all tensors."""
        if self._cotangents is None or memo is None:
            self._cotangents = None
            self._linear = self._engine.linearise(self._program(job), arguments, memo)
            return {**self._linear.aux, **self._linear.targets}
        given = {self._spots.keys[p]: self._turned(p, c, axis=1) for p, c in self._cotangents.items()}
        targets, aux, found = self._engine.forward_and_back(self._program(job), arguments, memo, given)
        self.known_gradients = {port: self._joined(port, [self._gradient(port, found)]) for port in self._wrt}
        return {**aux, **targets}

    def _memo(self, job: RunRequest, arguments: Any) -> Memo | None:
        """Return the compiled functions of an earlier pullback of the same model and ports, or an empty memo.

        Return None for a loss of a short run: its single product takes less time eagerly than a graph to trace.
        """
        boundaries = (frozenset(self._spots.keys[port] for port in ports) for ports in (self._of, self._cut))
        found = memo_for(job, arguments, *boundaries)
        return found if found is not None or all(port.kind == "loss" for port in self._of) else Memo()

    def _job(self, model: Any, batch: Batch, loss: Loss | None) -> RunRequest:
        wanted = frozenset(self._spots.keys[port] for port in (*self._wrt, *self._cut))
        sites = [site for site in self._spots.found.sites if not site.is_loop and site.refusal is None]
        sized = {site.name + _SIZES: site.owner for site in sites}
        return RunRequest(
            model,
            batch,
            self._spots.hooked_sites(given_states(self._spots.found, batch.initial_state)),
            self._spots.plain | sized,
            loss,
            wanted=wanted,
            keep=frozenset(self._spots.keys.values()) | {"outputs"},
            weights=self._spots.weights,
        )

    def _program(self, job: RunRequest) -> Any:
        of = {self._spots.keys[port] for port in self._of}
        keys, cut = set(self._spots.keys.values()), {self._spots.keys[port] for port in self._cut}

        keras = self._keras

        def run(arguments: Any, tap: Tap) -> tuple[dict[str, Any], Any]:
            recorded: dict[str, Any] = {f"model|input/{i}": t for i, t in enumerate(keras.tree.flatten(arguments["x"]))}

            def noting(key: str, tensor: Any) -> Any:
                every = key.partition("@")[0]
                if not keras.is_float(tensor):  # counters, quantised weights: they have no gradient
                    recorded[key] = tensor
                    return tensor
                recorded[key] = tap(key, keras.ops.stop_gradient(tensor) if every in cut else tensor)
                return recorded[key]

            value, (arrays, outputs) = program(job, arguments, noting)
            for call, tensors in zip(job.calls, arrays, strict=True):
                recorded.update({f"{call.key}|{name}": tensor for name, tensor in tensors.items()})
            recorded.update({f"model|output/{i}": t for i, t in enumerate(keras.tree.flatten(outputs))})
            if value is not None:
                recorded["model|loss"] = value
            for key in of:
                place, *_, name = key.split("|")
                if key not in recorded:
                    raise LayerNotFoundError(f"{place}.{name} does not appear in this forward pass.")
                if not keras.is_float(recorded[key]):
                    kind = keras.dtype_of(recorded[key])
                    raise InputError(f"{place}.{name} cannot be differentiated.", got=f"dtype {kind}")
            # Only gradients are read at the other ports of a pass with known cotangents.
            others = {key: recorded[key] for key in keys - of if key in recorded and self._cotangents is None}
            samples, steps = _sizes(job.calls)
            counts = {"outputs": len(keras.tree.flatten(outputs)), "samples": samples, "steps": steps}
            return {key: recorded[key] for key in of}, {**others, **counts}

        return run

    def vjp(self, cotangents: Mapping[Port, Array]) -> dict[Port, Array | None]:
        """Multiply K cotangents per ``of`` port, first axis K, by the transposed Jacobians.

        Returns K gradients per ``wrt`` port, or None for a port without a path.
        """
        if self._linear is None:
            raise InputError("This pullback is closed.", hint="use it inside its with block")
        refuse_misfits(cotangents, self._of, self.values)
        given = {self._spots.keys[p]: self._turned(p, c, axis=2) for p, c in cotangents.items()}
        count = len(next(iter(given.values())))
        size = self._chunk(count)
        with raised_by("The backward pass of your model"):
            parts = [self._linear.vjp({k: c[i : i + size] for k, c in given.items()}) for i in range(0, count, size)]
        return {port: self._joined(port, [self._gradient(port, part) for part in parts]) for port in self._wrt}

    def _gradient(self, port: Port, part: Mapping[str, Any]) -> Any:
        """Return the gradient of a port; for a loop over a cell, its gradients at all steps or at the last."""
        key = self._spots.keys[port]
        if key in part or port.kind in ("weight", "loss"):
            return part.get(key)
        name = key.replace("|final_state/", "|state/")
        steps: list[Any] = []
        while f"{name}@{len(steps)}" in part:
            steps.append(part[f"{name}@{len(steps)}"])
        if port in self._spots.ending or port.kind == "final_state":
            return steps[-1] if steps else None
        some = next((step for step in steps if step is not None), None)
        if some is None:
            return None
        zero = self._keras.ops.zeros_like(some)
        return self._keras.ops.stack([zero if step is None else step for step in steps], axis=2)

    def _joined(self, port: Port, rows: list[Any]) -> Array | None:
        if rows[0] is None:
            return None
        arrays = [self._engine.to_array(row) for row in rows]
        return self._turned(port, arrays[0] if len(arrays) == 1 else join(arrays, axis=0), axis=2)

    def _chunk(self, count: int) -> int:
        per_row: int = sum(8 * math.prod(array.shape) for array in self.values.values()) * _AROUND
        return min(count, max(1, _CHUNK // max(per_row, 1)))

    def _turned(self, port: Port, array: Array, axis: int) -> Array:
        return flipped(array, axis) if port in self._spots.turned else array

    def __enter__(self) -> Pullback:
        return self

    def __exit__(self, *exc: object) -> None:
        self._linear = None


def _sizes(calls: Sequence[LayerCall]) -> tuple[int, int]:
    """Return the samples and steps of all calls of recurrent layers; (0, 0) if they differ or are unknown."""
    found = {call.shape[:2] for call in calls if call.place.endswith(_SIZES)}
    one = found.pop() if len(found) == 1 else ()
    return (one[0] or 0, one[1] or 0) if len(one) == 2 else (0, 0)


@contextmanager
def _undone(model: Any, keras: Dialect, seed: int | None) -> Iterator[None]:
    """Restore on exit the state of a model that a pullback runs again.

    Within the block, the loss and the random numbers are as in the first run.
    """
    with as_found(model, keras, seed), keras.undisturbed(model, regularised=True):
        yield


def differentiate(function: Callable[..., Any], arrays: Sequence[Array], keras: Dialect) -> tuple[Array, Pull]:
    """Return the value of ``function(*tensors)``, and a function that pulls its cotangents back."""
    tensors = [keras.ops.convert_to_tensor(np.asarray(a)) for a in arrays]
    expected = f"a tensor of {keras.engine.name}, such as {keras.says_mean}"
    return shared.differentiate(function, tensors, keras.engine, expected)
