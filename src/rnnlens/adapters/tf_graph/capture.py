"""Capture of a graph: one run that fetches the boundaries of its loops, the loss, and the gradients there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import UnsupportedError
from ...typing import Array
from ..protocol import Batch, Capture, CaptureRequest, NonRecurrentCall, Port, RecurrentCall
from .boundaries import PortTensors, Spot, at_boundary, chronological, direct_state, joined
from .inputs import clear_errors, fed, names_of_inputs
from .losses import key_of, loss_tensor
from .model_facts import chosen, within_reach
from .open_net import OpenNet, open_net
from .public import Net
from .pullback import gradients
from .recurrences import Loop, WeightPiece
from .step_graph import BodyCell
from .weights import block, known_cell, layers_of, name_of, weights_of

Fetched = dict[Any, Any]


@dataclass
class _Fetches:
    """Tensors to fetch for one kind of capture; built once and kept."""

    fetches: dict[Any, Any] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)
    plain: dict[str, Spot] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def capture(net: Net, batch: Batch, request: CaptureRequest) -> Capture:
    """Run the copy of the graph and record its loops; see :meth:`Adapter.capture`."""
    found = open_net(net, batch.seed)
    feed = fed(found, batch)
    loss = key_of(batch) if request.gradients or request.loss else None
    key = ("capture", request, loss, tuple(names_of_inputs(net, batch.x)))
    if key not in found.copy.built:
        found.copy.built[key] = _fetches(found, batch, request)
    asked: _Fetches = found.copy.built[key]
    variables = found.variables(list(asked.fetches.values()), feed)
    with clear_errors(net):
        values = found.copy.run(asked.fetches, feed, variables)
    return _CaptureBuilder(found, asked, values, variables, request).capture()


def _fetches(found: OpenNet, batch: Batch, request: CaptureRequest) -> _Fetches:
    """Select the loops and layers of a capture, and build the tensors to fetch."""
    layers, notes = within_reach(found, request)
    loops, names = chosen(found, layers)
    spots = PortTensors(found, batch)
    asked = _Fetches({}, loops, {name: spots(Port("output", name)) for name in names}, notes)
    of = asked.fetches
    with found.copy.graph.as_default(), tf.name_scope("rnnlens/capture"):
        for i, loop in enumerate(loops):
            of |= {(i, "input"): loop.input, (i, "output"): loop.output or loop.final[0]}
            of |= {(i, "initial", j): boundary for j, boundary in enumerate(loop.initial)}
            of |= {(i, "final", j): boundary for j, boundary in enumerate(loop.final)}
            of |= {key: chronological(loop, of[key]) for key in of if key[0] == i}
            of |= {(i, name): t for name in ("lengths", "mask") if (t := getattr(loop, name)) is not None}
            of |= {(i, "condition", j): condition.tensor for j, condition in enumerate(loop.cell.conditions)}
            if loop.cell.body is not None:
                of |= {(i, "outer", j): tensor for j, tensor in enumerate(loop.cell.body.outer.values())}
        of |= {("plain", name): spot.value for name, spot in asked.plain.items()}
        of |= {("model output", j): tensor for j, tensor in enumerate(found.outputs)}
        if request.gradients or request.loss:
            of["loss"] = loss_tensor(found, batch)
        if request.gradients:
            _fetch_gradients(found, asked, request, spots)
    return asked


def _fetch_gradients(found: OpenNet, asked: _Fetches, request: CaptureRequest, spots: PortTensors) -> None:
    """Add gradients at all boundaries and weights to the fetched tensors, in one backward pass.

    Each unrolled loop needs one more backward pass for its direct gradients.
    """
    graph, loss = found.copy.graph, asked.fetches["loss"]
    wanted: dict[Any, Any] = {}
    for i, loop in enumerate(asked.loops):
        ports = {("output_grad", 0): Port("output", loop.name)}
        ports |= {("final_grad", j): Port("final_state", index=j) for j in range(len(loop.final))}
        if loop.kind == "unrolled":
            ports = {}
            for j in range(len(loop.states)):
                spot = direct_state(loop, j)
                direct = joined(spot, gradients(graph, [loss], spot.sources, stop=spot.stop))
                asked.fetches |= {} if direct is None else {(i, "state_grad", j): direct}
        if request.boundaries:
            ports["input_grad", 0] = Port("input", loop.name)
            ports |= {("initial_grad", j): Port("initial_state", index=j) for j in range(len(loop.initial))}
        wanted |= {(i, *key): at_boundary(loop, port) for key, port in ports.items()}
    wanted |= {("plain_grad", name): spot for name, spot in asked.plain.items()}
    if request.boundaries:
        wanted |= {("model input_grad", j): spots(Port("input", index=j)) for j in range(len(found.inputs))}
        wanted |= {("model output_grad", j): spots(Port("output", index=j)) for j in range(len(found.outputs))}
    sources: dict[Any, Any] = {
        (key, j): source for key, spot in wanted.items() for j, source in enumerate(spot.sources)
    }
    for name in _variables(found, asked, request):
        sources["variable", name] = graph.get_operation_by_name(name).outputs[0]
    made = dict(zip(sources, gradients(graph, [loss], list(sources.values())), strict=True))
    _fetch_beside(asked, made, sources, graph, loss)
    for key, spot in wanted.items():
        together = joined(spot, [made.pop((key, j)) for j in range(len(spot.sources))])
        if together is not None:
            asked.fetches[key] = together
    asked.fetches |= {(key, "grad"): gradient for key, gradient in made.items() if gradient is not None}


def _fetch_beside(asked: _Fetches, made: dict[Any, Any], sources: Mapping[Any, Any], graph: Any, loss: Any) -> None:
    """Fetch gradients that reach the cells' variables outside of their loops: of penalties, and of other layers."""
    held = {name: None for loop in asked.loops for name in loop.variables}
    present = [name for name in held if made.get(("variable", name)) is not None]
    stop = [t for loop in asked.loops for boundary in (*loop.final, *loop.states) for t in boundary.tensors]
    stop += [t for loop in asked.loops if loop.output is not None for t in loop.output.tensors]
    found = gradients(graph, [loss], [sources["variable", name] for name in present], stop=stop)
    pairs = zip(present, found, strict=True)
    asked.fetches |= {("beside", name): gradient for name, gradient in pairs if gradient is not None}


def _by_output(loop: Loop, output_grad: Array, states: dict[int, Array]) -> tuple[Array, dict[int, Array]]:
    """Move the direct gradient of the first state of an unrolled loop to its output, which is the same tensor.

    Returns the output's gradient (sample, time, unit), or (sample, unit) if only the last step is the output, and the
    remaining state gradients by state number.
    """
    if 0 not in states:
        return output_grad, states
    first = states[0].copy()
    if output_grad.ndim == first.ndim:
        return output_grad + first, {j: grad for j, grad in states.items() if j}
    last = 0 if loop.direction == "backward" else -1
    found, first[:, last] = output_grad + first[:, last], 0
    return found, {**states, 0: first}


def _variables(found: OpenNet, asked: _Fetches, request: CaptureRequest) -> list[str]:
    """Return the names of the variables whose gradients are fetched: those of all layers, of the cells, or none."""
    if request.boundaries:
        sets = [pieces for layer in layers_of(found).values() for pieces in layer.weights.values()]
    else:
        wanted = asked.loops if request.weight_grads else []
        sets = [pieces for loop in wanted for pieces in weights_of(loop).values()]
    return list(dict.fromkeys(piece.variable for pieces in sets for piece in pieces))


def _moving(loop: Loop, mask: Array) -> Array | None:
    """Return where the output depends on the state, (sample, time) of bool; None for everywhere.

    If masked steps repeat the previous output, the output is zero up to the first real step.
    """
    if loop.masked_output == "zero":
        return mask
    if loop.masked_output == "state" or loop.cell.body is not None:
        return None
    if loop.turned_by is not None:  # a reversed loop runs the padding last
        return np.broadcast_to(mask.any(axis=1, keepdims=True), mask.shape)
    turn = -1 if loop.direction == "backward" else 1
    return (mask[:, ::turn].cumsum(axis=1) > 0)[:, ::turn]


class _CaptureBuilder:
    """Conversion of fetched values to the ``Capture`` of the adapter protocol."""

    def __init__(
        self,
        found: OpenNet,
        asked: _Fetches,
        values: Fetched,
        variables: Mapping[str, Array],
        request: CaptureRequest,
    ) -> None:
        self.found, self.asked, self.values, self.request = found, asked, values, request
        self.variables = variables
        for loop in asked.loops:
            for j, condition in enumerate(loop.cell.conditions):
                value = values[asked.loops.index(loop), "condition", j]
                if not np.all(np.asarray(value) == condition.value):
                    raise UnsupportedError(condition.otherwise)

    def capture(self) -> Capture:
        get, request = self.values.get, self.request
        recorded = Capture([self._call(i, loop) for i, loop in enumerate(self.asked.loops)])
        plain = {name: self._gradient(("plain_grad", name), ("plain", name)) for name in self.asked.plain}
        recorded.plain = [
            NonRecurrentCall(name, np.asarray(get(("plain", name))), grad) for name, grad in plain.items()
        ]
        recorded.entangled = not request.gradients and any(loop.carried for loop in self.asked.loops)
        recorded.notes.extend(self.asked.notes)
        words = "is run as a cell of unknown equations, without gates"
        recorded.notes.extend(f"{x.name!r} {words}: {x.cell.unknown}." for x in self.asked.loops if x.cell.unknown)
        recorded.loss = None if "loss" not in self.values else float(self.values["loss"])
        outputs = {name: np.asarray(get(("model output", j))) for j, name in enumerate(self.found.net.outputs)}
        recorded.outputs = outputs if len(outputs) > 1 else next(iter(outputs.values()), None)
        if recorded.loss is not None and not math.isfinite(recorded.loss):
            cause = "the first quantity that is not finite is the cause"
            recorded.notes.append(f"The loss is {recorded.loss}: gradients mean nothing, and {cause}.")
        if request.gradients and request.boundaries:
            recorded.input_grads = [get(("model input_grad", j)) for j in range(len(self.found.inputs))]
            recorded.output_grads = [get(("model output_grad", j)) for j in range(len(self.found.outputs))]
            recorded.beside, recorded.whole = self._beside()
        return recorded

    def _call(self, i: int, loop: Loop) -> RecurrentCall:
        get, direct = self.values.get, self.request.gradients
        output = np.asarray(self.values[i, "output"])
        mask = self._mask(i, loop)
        initial = tuple(np.asarray(get((i, "initial", j))) for j in range(len(loop.initial)))
        final = tuple(np.asarray(get((i, "final", j))) for j in range(len(loop.final)))
        unrolled = loop.kind == "unrolled"
        final_grad, initial_grad = self._state_grads(i, "final", final), self._state_grads(i, "initial", initial)
        if loop.output is None and final_grad:  # the output is this state
            final_grad = (np.zeros_like(final_grad[0]), *final_grad[1:])
        output_grad, state_grad = self._gradient((i, "output_grad", 0), (i, "output")), None
        if direct and unrolled:
            present = {j: get((i, "state_grad", j)) for j in range(len(loop.states))}
            state_grad = {j: np.asarray(gradient) for j, gradient in present.items() if gradient is not None}
        if output_grad is not None and state_grad is not None:
            output_grad, state_grad = _by_output(loop, output_grad, state_grad)
        return RecurrentCall(
            layer=loop.name,
            direction=loop.direction,
            bidirectional=loop.bidirectional,
            cell=self._cell(i, loop),
            input=np.asarray(self.values[i, "input"]),
            mask=mask,
            initial_state=initial,
            output=output,
            output_from_state=None if mask is None else _moving(loop, mask),
            masked_output=loop.masked_output,
            final_state=None if unrolled else final,
            output_grad=output_grad,
            final_state_grad=final_grad if direct and not unrolled else None,
            state_grad=state_grad,
            between=unrolled,
            weights_key="|".join(name_of(p, k) for k, p in weights_of(loop).items()) or f"{loop.name}/{loop.direction}",
            weight_grads=self._weight_grads(loop) if direct and self.request.weight_grads else None,
            tied=self._tied(loop),
            framework_input_grad=get((i, "input_grad", 0)),
            framework_initial_state_grad=initial_grad if direct and self.request.boundaries else None,
        )

    def _mask(self, i: int, loop: Loop) -> Array | None:
        """Return the mask (sample, time) of bool in chronological order; None if the loop has no mask."""
        steps = np.asarray(self.values[i, "input"]).shape[1]
        if loop.lengths is not None:
            return np.arange(steps)[None] < np.asarray(self.values[i, "lengths"])[:, None]
        if loop.mask is None:
            return None
        mask = np.asarray(self.values[i, "mask"], dtype=bool).T
        return mask[:, ::-1] if loop.direction == "backward" else mask

    def _cell(self, i: int, loop: Loop) -> Any:
        if loop.cell.body is None:
            return known_cell(loop, self.found.values_of(weights_of(loop).values(), self.variables))
        outer = [np.asarray(self.values[i, "outer", j]) for j in range(len(loop.cell.body.outer))]
        return BodyCell(loop.cell.body, outer, list(weights_of(loop)))

    def _gradient(self, key: Any, value: Any) -> Array | None:
        """Return a gradient of the loss, zeros where there is no path; None if no gradients were requested."""
        if not self.request.gradients:
            return None
        found = self.values.get(key)
        return np.zeros_like(np.asarray(self.values[value])) if found is None else np.asarray(found)

    def _state_grads(self, i: int, kind: str, states: tuple[Array, ...]) -> tuple[Array, ...]:
        found = [self._gradient((i, f"{kind}_grad", j), (i, kind, j)) for j in range(len(states))]
        return tuple(gradient for gradient in found if gradient is not None)

    def _weight_grads(self, loop: Loop) -> dict[str, Array]:
        """Return the gradients that reach the weights of a layer through its loop, by weight name."""
        found = {}
        for key, pieces in weights_of(loop).items():
            whole, beside = self._variable_grads(pieces), self._variable_grads(pieces, beside=True)
            found[key] = block(pieces, {name: gradient - beside[name] for name, gradient in whole.items()})
        return found

    def _variable_grads(self, pieces: Sequence[WeightPiece], *, beside: bool = False) -> dict[str, Array]:
        """Return the gradients by whole variables, or their parts beside the loops; zeros where there is no path."""
        names = dict.fromkeys(piece.variable for piece in pieces)
        keys = {name: ("beside", name) if beside else (("variable", name), "grad") for name in names}
        gradients = {name: self.values.get(key) for name, key in keys.items()}
        held = self.found.values_of([pieces], self.variables)
        return {n: np.zeros_like(held[n]) if g is None else np.asarray(g) for n, g in gradients.items()}

    def _beside(self) -> tuple[dict[str, Array | None], frozenset[str]]:
        """Return gradients of all weights outside of the loops, and the names for which that is the whole gradient."""
        found: dict[str, Array | None] = {}
        partly = set()
        for layer in layers_of(self.found).values():
            for key, pieces in layer.weights.items():
                name = name_of(pieces, key)
                if any(("beside", piece.variable) in self.values for piece in pieces):
                    found[name] = block(pieces, self._variable_grads(pieces, beside=True))
                    partly.add(name)
                    continue
                some = any((("variable", piece.variable), "grad") in self.values for piece in pieces)
                found[name] = block(pieces, self._variable_grads(pieces)) if some else None
        return found, frozenset(found) - partly

    def _tied(self, loop: Loop) -> frozenset[str]:
        """Return the weights that another layer shares in part; none where it shares all, since those are summed."""
        others = [other for other in self.found.loops if other is not loop]
        shared = {name for other in others for name in other.variables}
        same = {other.name for other in others if weights_of(other) == weights_of(loop)}
        if same:  # all weights are shared: the gradients of the calls are summed
            return frozenset()
        return frozenset(k for k, p in weights_of(loop).items() if shared.intersection(piece.variable for piece in p))
