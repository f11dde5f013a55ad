"""What lies inside recurrent layers: states, gates and their total gradients, by our own sweep over captured calls.

A framework has no tensor for the state at step t of a fused layer. So a gradient that starts or ends in there is put
together: our adjoint inside the layer, the framework's own differentiation outside of it, joined at the boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..adapters.protocol import Adapter, Batch, CaptureRequest, Port, RecurrentCall
from ..autodiff.tensors import like
from ..errors import LayerNotFoundError, ModelError, message
from ..recurrence.replay import Replay
from ..recurrence.rounding import perturbed
from ..recurrence.trajectory import Adjoint
from ..results.schema import to_host
from ..typing import Array
from .host import on_host
from .names import TensorName
from .sweep import sweep, weights_of


@dataclass
class Half:
    """One direction of one call of a recurrent layer, and its replay."""

    call: RecurrentCall
    run: Replay

    @property
    def last(self) -> int:
        """Time index of the step that ran last."""
        *_, last = self.run.steps()
        return last

    def port(self, kind: Any, index: int = 0) -> Port:
        """A boundary of this half."""
        direction = self.call.direction if self.call.bidirectional else None
        return Port(kind, self.call.layer, index, direction=direction)

    def above(self) -> list[Port]:
        """Where gradients enter: the output, and the final states where the layer returns them."""
        states = range(len(self.call.final_state or ()))
        return [self.port("output"), *(self.port("final_state", i) for i in states)]

    def readers(self) -> list[Port]:
        """Where gradients enter while nothing is cut: the user's code may get hold of states between the steps."""
        if not self.call.between:
            return self.above()
        states = range(len(self.run.states))
        return [self.port("output"), *(self.port("state_read", i) for i in states)]

    def below(self) -> list[Port]:
        """Where gradients leave: the input, which both halves of a layer share, and the initial states."""
        states = range(len(self.run.initial_state))
        return [Port("input", self.call.layer), *(self.port("initial_state", i) for i in states)]

    def arrived(self) -> dict[Port, Array | None]:
        """What the captured backward pass brought to the upper boundary, states between the steps apart."""
        final = self.call.final_state_grad or ()
        found = {self.port("final_state", i): grad for i, grad in enumerate(final)}
        return {self.port("output"): self.call.output_grad, **found}

    def sweep(self, states: Mapping[int, Array], arrived: Mapping[Port, Array | None]) -> Adjoint:
        """Total gradients from cotangents put on states at every step and from what arrived at the upper boundary."""
        states = _with_reads(states, {i: arrived.get(self.port("state_read", i)) for i in range(len(self.run.states))})
        output = arrived.get(self.port("output"))
        final = [arrived.get(self.port("final_state", i)) for i in range(len(self.run.states))]
        ending = None
        if any(f is not None for f in final):
            initial = self.run.initial_state
            ending = [s * 0 if f is None else like(f, s) for f, s in zip(final, initial, strict=True)]
        return sweep(
            self.call,
            self.run,
            None if output is None else like(output, self.run.states[0]),
            ending,
            {index: like(array, self.run.states[index]) for index, array in states.items()},
        )

    def weight_gradients(self, swept: Adjoint, *, per_sample: bool = False) -> dict[str, Array]:
        """dL/dW by the names of the cell's weights, summed over time, and over samples unless ``per_sample``."""
        if not per_sample:
            return {key: to_host(grad) for key, grad in weights_of(self.call, self.run, swept).items()}
        samples = [slice(n, n + 1) for n in range(int(self.run.input.shape[0]))]
        single = [weights_of(self.call, self.run.of_samples(one), swept.of_samples(one)) for one in samples]
        return {key: np.stack([to_host(grads[key]) for grads in single]) for key in single[0]}


class Inside:
    """The recurrent layers of a model, looked into: replays of their calls by layer name, forward half first.

    ``entangled``: differentiation must not be cut at them, see :class:`rnnlens.adapters.protocol.Capture`.
    """

    def __init__(self, halves: Mapping[str, list[Half]], entangled: bool = False) -> None:
        self.halves, self.entangled = dict(halves), entangled

    @classmethod
    def look(cls, adapter: Adapter, model: Any, batch: Batch, layers: Iterable[str]) -> Inside:
        """Capture and replay the layers asked for; an empty look costs nothing."""
        wanted = tuple(dict.fromkeys(layers))
        if not wanted:
            return cls({})
        capture = adapter.capture(model, batch, CaptureRequest(wanted, gradients=False, weight_grads=False))
        return cls.of(capture.calls, capture.entangled)

    @classmethod
    def of(cls, calls: Iterable[RecurrentCall], entangled: bool = False) -> Inside:
        """Replay captured calls."""
        halves: dict[str, list[Half]] = {}
        for call in on_host(calls):
            halves.setdefault(call.layer, []).append(Half(call, Replay.from_call(call)))
        for both in halves.values():
            both.sort(key=lambda half: half.call.bidirectional and half.call.direction == "backward")
        return cls(halves, entangled)

    def perturbed(self) -> Inside:
        """The same, with every number inside the layers off by one rounding."""
        halves = {name: [Half(one.call, perturbed(one.run)) for one in both] for name, both in self.halves.items()}
        return Inside(halves, self.entangled)

    def is_stepwise(self, name: TensorName) -> bool:
        """Whether the framework reaches a tensor of a recurrence: its layer is a cell that the user's loop calls."""
        if name.what not in ("state", "final_state", "initial_state", "input") or name.layer is None:
            return False
        return name.layer in self.halves and all(half.call.stepwise for half in self.halves[name.layer])

    def layer(self, name: str | None) -> list[Half]:
        """The halves of one call of a layer.

        Raises
        ------
        LayerNotFoundError
            If the layer was called several times and the name does not say which call is meant, or never.
        """
        if name in self.halves:
            return self.halves[name]
        calls = [node for node in self.halves if node.rpartition("#")[0] == name]
        if calls:
            expected = "one of: " + ", ".join(repr(call) for call in calls)
            raise LayerNotFoundError(message(f"Layer {name!r} was called more than once.", expected=expected))
        raise LayerNotFoundError(message(f"Layer {name!r} was not called in this forward pass."))

    def masks(self) -> dict[str, Array]:
        """Masks by layer, of those that have one."""
        found = {name: halves[0].run.mask for name, halves in self.halves.items()}
        return {name: to_host(mask) for name, mask in found.items() if mask is not None}

    def value(self, name: TensorName) -> Array:
        """States of a layer, with a direction axis for a bidirectional one."""
        return _join([_pick(half, half.run.states[name.index], name) for half in self.layer(name.layer)], name)

    def on_states(self, name: TensorName, cotangent: Array) -> list[dict[int, Array]]:
        """A cotangent of ``value(name)`` as one array of all steps by state, for each half."""
        halves = self.layer(name.layer)
        axis = 2 if name.what == "state" else 1
        parts = [cotangent] if len(halves) == 1 else [np.take(cotangent, d, axis=axis) for d in range(len(halves))]
        return [{name.index: _placed(half, part, name)} for half, part in zip(halves, parts, strict=True)]

    def gradient(self, name: TensorName, swept: Sequence[Adjoint]) -> Array:
        """Pick the gradient of a tensor inside a layer from the finished sweeps of its halves."""
        pairs = list(zip(self.layer(name.layer), swept, strict=True))
        if name.what == "input":
            return np.sum([to_host(result.input_grad) for result in swept], axis=0)
        return _join([_gradient(half, result, name) for half, result in pairs], name)


def _with_reads(states: Mapping[int, Array], reads: Mapping[int, Array | None]) -> dict[int, Array]:
    """Cotangents of states by index, and what arrived where the user's code got hold of them."""
    found = dict(states)
    for index, grad in reads.items():
        if grad is not None:
            found[index] = like(grad, found[index]) + found[index] if index in found else grad
    return found


def outputs_of(adapter: Adapter, model: Any, batch: Batch, layers: tuple[str, ...]) -> dict[str, Array]:
    """Outputs of layers by node, without any loss; a layer that does not run is left out."""
    request = CaptureRequest(layers, inputs=False, gradients=False, weight_grads=False)
    quiet = replace(batch, y=None, loss=None, sample_weight=None, class_weight=None)
    try:
        capture = adapter.capture(model, quiet, request)
    except (LayerNotFoundError, ModelError):
        return {}
    return {call.layer: to_host(call.output) for call in capture.plain} | {
        call.layer: to_host(call.output) for call in capture.calls
    }


def runs(adapter: Adapter, model: Any, batch: Batch, layer: str) -> bool:
    """Whether a layer is called in a forward pass."""
    return any(node.partition("#")[0] == layer for node in outputs_of(adapter, model, batch, (layer,)))


def _gradient(half: Half, result: Adjoint, name: TensorName) -> Array:
    if name.what == "initial_state":
        return to_host(result.initial_state_grad[name.index])
    if name.what == "gate_preactivation":
        return to_host(result.gate_grad)
    if name.what == "gates":
        return to_host(half.run.at_real_steps(half.run.cell.gate_gradient(half.run, result)))
    return _pick(half, result.state_grads[name.index], name)


def _pick(half: Half, states: Array, name: TensorName) -> Array:
    """All steps, or the last one that ran."""
    every = to_host(states)
    return every if name.what == "state" else every[:, half.last, :]


def _placed(half: Half, cotangent: Array, name: TensorName) -> Array:
    """A cotangent of the last state alone becomes one of all steps, zero but there."""
    if name.what == "state":
        return cotangent
    whole = np.zeros(tuple(half.run.states[name.index].shape), dtype=cotangent.dtype)
    whole[:, half.last, :] = cotangent
    return whole


def _join(parts: list[Array], name: TensorName) -> Array:
    if len(parts) == 1:
        return parts[0]
    return np.stack(parts, axis=1 if name.what in ("final_state", "initial_state") else 2)
