"""Capture of a graph: one run that fetches the boundaries of its loops, the loss, and the gradients there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import UnsupportedError
from ...typing import Array
from ..protocol import Batch, Capture, CaptureRequest, NonRecurrentCall, Port, RecurrentCall
from .boundaries import PortTensors, Spot, at_boundary, chronological, direct_state, weight_spot
from .inputs import clear_errors, fed, names_of_inputs
from .losses import key_of, loss_in
from .model_facts import selected
from .open_net import OpenNet, open_net
from .public import Net
from .pullback import pulled_back
from .recurrences import Loop
from .step_graph import BodyCell
from .weights import all_weights, block, known_cell, name_of, weights_of

#: Gradients that are zero where no path leads to the loss.
_ALWAYS = ("output_grad", "final_grad", "initial_grad")


def capture(net: Net, batch: Batch, request: CaptureRequest) -> Capture:
    """Run the copy of the graph and record its loops; see :meth:`Adapter.capture`."""
    found = open_net(net, batch.seed)
    feed = fed(found, batch)
    loss = key_of(batch) if request.gradients or request.loss else None
    key = ("capture", request, loss, tuple(names_of_inputs(net, batch.x)))
    asked = found.copy.once(key, lambda: _Fetches(found, batch, request))
    variables = found.variables(list(asked.tensors.values()), feed)
    with clear_errors(net):
        values = found.copy.run(asked.tensors, feed, variables)
    for i, loop in enumerate(asked.loops):
        for j, condition in enumerate(loop.cell.conditions):
            if not np.all(np.asarray(values[i, "condition", j]) == condition.value):
                raise UnsupportedError(condition.otherwise)
    return _CaptureBuilder(found, asked, values, variables, request).capture()


class _Fetches:
    """Loops and other layers of one kind of capture, notes, and the tensors to fetch; built once and kept."""

    def __init__(self, found: OpenNet, batch: Batch, request: CaptureRequest) -> None:
        self.loops, names, self.notes = selected(found, request)
        spots = PortTensors(found, batch)
        self.plain = {name: spots(Port("output", name)) for name in names}
        self.tensors = of = dict[Any, Any]()
        with found.copy.graph.as_default(), tf.name_scope("rnnlens/capture"):
            for i, loop in enumerate(self.loops):
                of |= {(i, "input"): loop.input, (i, "output"): loop.output or loop.final[0]}
                of |= {(i, "initial", j): boundary for j, boundary in enumerate(loop.initial)}
                of |= {(i, "final", j): boundary for j, boundary in enumerate(loop.final)}
                of |= {key: chronological(loop, of[key]) for key in of if key[0] == i}
                of |= {(i, name): t for name in ("lengths", "mask") if (t := getattr(loop, name)) is not None}
                of |= {(i, "condition", j): condition.tensor for j, condition in enumerate(loop.cell.conditions)}
                if loop.cell.body is not None:
                    of |= {(i, "outer", j): tensor for j, tensor in enumerate(loop.cell.body.outer.values())}
            of |= {("plain", name): spot.value for name, spot in self.plain.items()}
            of |= {("model output", j): tensor for j, tensor in enumerate(found.outputs)}
            if request.gradients or request.loss:
                of["loss"] = loss_in(found.net, found.copy, batch).tensor
            if request.gradients:
                self._add_gradients(found, request, spots)

    def _add_gradients(self, found: OpenNet, request: CaptureRequest, spots: PortTensors) -> None:
        """Add gradients at all boundaries and weights, in one backward pass and another one for each unrolled loop."""
        graph, loss = found.copy.graph, self.tensors["loss"]
        wanted: dict[Any, Spot] = {("plain_grad", name): spot for name, spot in self.plain.items()}
        for i, loop in enumerate(self.loops):
            ports: dict[Any, Port] = {}
            if loop.kind == "unrolled":
                wanted |= {(i, "state_grad", j): direct_state(loop, j) for j in range(len(loop.states))}
            else:
                ports["output_grad", 0] = Port("output", loop.name)
                ports |= {("final_grad", j): Port("final_state", index=j) for j in range(len(loop.final))}
            if request.boundaries:
                ports["input_grad", 0] = Port("input", loop.name)
                ports |= {("initial_grad", j): Port("initial_state", index=j) for j in range(len(loop.initial))}
            wanted |= {(i, *key): at_boundary(loop, port) for key, port in ports.items()}
        if request.boundaries:
            wanted |= {("model input_grad", j): spots(Port("input", index=j)) for j in range(len(found.inputs))}
            wanted |= {("model output_grad", j): spots(Port("output", index=j)) for j in range(len(found.outputs))}
        known = {key for key in wanted if key[0] == "plain_grad" or key[1] in _ALWAYS}
        self.tensors |= {key: tf.zeros_like(wanted[key].value) for key in known}
        named = {name_of(p): p for loop in self.loops if request.weight_grads for p in weights_of(loop).values()}
        named |= all_weights(found) if request.boundaries else {}
        weights = {name: weight_spot(graph, pieces) for name, pieces in named.items()}
        self.tensors |= pulled_back(graph, [loss], wanted | {("weight", name): spot for name, spot in weights.items()})
        # Gradients that reach the cells' variables outside of their loops: of penalties, and of other layers.
        held = {name for loop in self.loops for name in loop.cell.variables}
        outside = {
            ("beside", name): spot
            for name, spot in weights.items()
            if ("weight", name) in self.tensors and held.intersection(piece.variable for piece in spot.pieces)
        }
        stop = [t for loop in self.loops for boundary in (*loop.final, *loop.states) for t in boundary.tensors]
        stop += [t for loop in self.loops if loop.output is not None for t in loop.output.tensors]
        self.tensors |= pulled_back(graph, [loss], outside, stop=stop)


def _moving(loop: Loop, mask: Array) -> Array | None:
    """Return where the output depends on the state, (sample, time) of bool; None for everywhere."""
    if loop.masked_output == "zero":
        return mask
    if loop.masked_output == "state" or loop.cell.body is not None:
        return None
    if loop.turned_by is not None:  # a reversed loop runs the padding last
        return np.broadcast_to(mask.any(axis=1, keepdims=True), mask.shape)
    turn = -1 if loop.direction == "backward" else 1  # masked steps repeat the output, zero up to the first real step
    return (mask[:, ::turn].cumsum(axis=1) > 0)[:, ::turn]


@dataclass
class _CaptureBuilder:
    """Conversion of fetched values to the ``Capture`` of the adapter protocol."""

    found: OpenNet
    asked: _Fetches
    values: dict[Any, Any]
    variables: Mapping[str, Array]
    request: CaptureRequest

    def capture(self) -> Capture:
        get, request = self.values.get, self.request
        recorded = Capture([self._call(i, loop) for i, loop in enumerate(self.asked.loops)])
        recorded.plain = [
            NonRecurrentCall(name, np.asarray(get(("plain", name))), get(("plain_grad", name)))
            for name in self.asked.plain
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
        get, direct, unrolled = self.values.get, self.request.gradients, loop.kind == "unrolled"
        output, output_grad = self.values[i, "output"], get((i, "output_grad", 0))
        mask, state_grad, final_grad = self._mask(i, loop), None, self._states(i, "final_grad")
        body, weights = loop.cell.body, weights_of(loop)
        if loop.output is None and direct:  # the output is this state
            final_grad = (np.zeros_like(final_grad[0]), *final_grad[1:])
        if direct and unrolled:
            output_grad = np.zeros_like(output)
            by_state = {j: get((i, "state_grad", j)) for j in range(len(loop.states))}
            state_grad = {j: gradient for j, gradient in by_state.items() if gradient is not None}
            if 0 in state_grad:  # the first state is the output, which may be the last step alone
                first = state_grad.pop(0)
                if output.ndim == first.ndim:
                    output_grad = first
                else:
                    last = 0 if loop.direction == "backward" else -1
                    output_grad, state_grad[0] = first[:, last], first.copy()
                    state_grad[0][:, last] = 0
        return RecurrentCall(
            layer=loop.name,
            direction=loop.direction,
            bidirectional=loop.bidirectional,
            cell=known_cell(loop, self.variables)
            if body is None
            else BodyCell(body, self._states(i, "outer"), list(weights)),
            input=self.values[i, "input"],
            mask=mask,
            initial_state=self._states(i, "initial"),
            output=output,
            output_from_state=None if mask is None else _moving(loop, mask),
            masked_output=loop.masked_output,
            final_state=None if unrolled else self._states(i, "final"),
            output_grad=output_grad,
            final_state_grad=final_grad if direct and not unrolled else None,
            state_grad=state_grad,
            between=unrolled,
            weights_key="|".join(map(name_of, weights.values())) or f"{loop.name}/{loop.direction}",
            weight_grads=self._weight_grads(loop) if direct and self.request.weight_grads else None,
            tied=self._tied(loop),
            framework_input_grad=get((i, "input_grad", 0)),
            framework_initial_state_grad=self._states(i, "initial_grad")
            if direct and self.request.boundaries
            else None,
        )

    def _states(self, i: int, kind: str) -> tuple[Array, ...]:
        """Return the fetched values or gradients of the states of a loop."""
        return tuple(self.values[i, kind, j] for j in range(len(self.values)) if (i, kind, j) in self.values)

    def _mask(self, i: int, loop: Loop) -> Array | None:
        """Return the mask (sample, time) of bool in chronological order; None if the loop has no mask."""
        if loop.lengths is not None:
            return np.arange(self.values[i, "input"].shape[1])[None] < self.values[i, "lengths"][:, None]
        if loop.mask is None:
            return None
        mask: Array = self.values[i, "mask"].T
        return mask[:, ::-1] if loop.direction == "backward" else mask

    def _weight_grads(self, loop: Loop) -> dict[str, Array]:
        """Return the gradients that reach the weights of a layer through its loop, by weight name."""
        found = {}
        for key, pieces in weights_of(loop).items():
            whole, beside = (self.values.get((kind, name_of(pieces))) for kind in ("weight", "beside"))
            whole = np.zeros_like(block(pieces, self.variables)) if whole is None else whole
            found[key] = whole if beside is None else whole - beside
        return found

    def _beside(self) -> tuple[dict[str, Array | None], frozenset[str]]:
        """Return weight gradients along paths outside of the recorded loops, and the names of those that are full."""
        names = all_weights(self.found)
        beside = {name: self.values["beside", name] for name in names if ("beside", name) in self.values}
        return {name: self.values.get(("weight", name)) for name in names} | beside, frozenset(names) - set(beside)

    def _tied(self, loop: Loop) -> frozenset[str]:
        """Return the weights of a loop that share only a part of their variables with another layer."""
        others = [other for other in self.found.loops if other is not loop]
        shared = {name for other in others for name in other.cell.variables}
        same = {other.name for other in others if weights_of(other) == weights_of(loop)}
        if same:  # all weights are shared: the gradients of the calls are summed
            return frozenset()
        return frozenset(k for k, p in weights_of(loop).items() if shared.intersection(piece.variable for piece in p))
