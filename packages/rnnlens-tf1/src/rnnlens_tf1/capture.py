"""Capture of a graph: one run that fetches the boundaries of its loops, the loss, and the gradients there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from rnnlens.adapters.protocol import Batch, Capture, NonRecurrentCall, Port, RecurrentCall, Taps
from rnnlens.errors import UnsupportedError
from rnnlens.typing import Array

from .boundaries import (
    PortTensors,
    ResolvedPort,
    boundary_port,
    chronological_tensor,
    direct_state_port,
    weight_port,
)
from .inputs import convert_run_errors, feed_of_batch, names_of_inputs
from .losses import loss_cache_key, loss_in
from .model_facts import select_layers
from .open_net import OpenNet, open_net
from .public import Net
from .pullback import add_pullback
from .recurrences import Loop
from .step_graph import BodyCell
from .weights import all_weights, assemble_weight, known_cell, weight_name, weights_of

#: Gradients that are zero where no path leads to the loss.
_ALWAYS = ("output_grad", "final_grad", "initial_grad")


def capture(net: Net, batch: Batch, request: Taps) -> Capture:
    """Run the copy of the graph and record its loops; see :class:`Taps`."""
    opened = open_net(net, batch.seed)
    feed = feed_of_batch(opened, batch)
    loss_key = loss_cache_key(batch) if request.needs_loss else None
    key = ("capture", request, loss_key, tuple(names_of_inputs(net, batch.x)))
    fetches = opened.copy.build_once(key, lambda: _Fetches(opened, batch, request))
    variables = opened.variable_values(list(fetches.tensors.values()), feed)
    with convert_run_errors(net):
        values = opened.copy.run(fetches.tensors, feed, variables)
    for i, loop in enumerate(fetches.loops):
        for j, condition in enumerate(loop.cell.conditions):
            if not np.all(np.asarray(values[i, "condition", j]) == condition.value):
                raise UnsupportedError(condition.error_text)
    return _CaptureBuilder(opened, fetches, values, variables, request).capture()


class _Fetches:
    """Loops and other layers of one kind of capture, notes, and the tensors to fetch; built once and kept."""

    def __init__(self, opened: OpenNet, batch: Batch, request: Taps) -> None:
        self.loops, names, self.notes = select_layers(opened, request)
        port_tensors = PortTensors(opened, batch)
        self.nonrecurrent = {name: port_tensors(Port("output", name)) for name in names}
        self.tensors = tensors = dict[Any, Any]()
        with opened.copy.graph.as_default(), tf.name_scope("rnnlens/capture"):
            for i, loop in enumerate(self.loops):
                tensors |= {(i, "input"): loop.input, (i, "output"): loop.output or loop.final[0]}
                tensors |= {(i, "initial", j): boundary for j, boundary in enumerate(loop.initial)}
                tensors |= {(i, "final", j): boundary for j, boundary in enumerate(loop.final)}
                tensors |= {key: chronological_tensor(loop, tensors[key]) for key in tensors if key[0] == i}
                tensors |= {(i, name): t for name in ("lengths", "mask") if (t := getattr(loop, name)) is not None}
                tensors |= {(i, "condition", j): condition.tensor for j, condition in enumerate(loop.cell.conditions)}
                if loop.cell.body is not None:
                    tensors |= {
                        (i, "outer", j): tensor for j, tensor in enumerate(loop.cell.body.outer_tensors.values())
                    }
            tensors |= {("nonrecurrent", name): resolved.value for name, resolved in self.nonrecurrent.items()}
            tensors |= {("model output", j): tensor for j, tensor in enumerate(opened.outputs)}
            if request.needs_loss:
                tensors["loss"] = loss_in(opened.net, opened.copy, batch).tensor
            if request.gradients:
                self._add_gradients(opened, request, port_tensors)

    def _add_gradients(self, opened: OpenNet, request: Taps, port_tensors: PortTensors) -> None:
        """Add gradients at all boundaries and weights, in one backward pass and another one for each unrolled loop."""
        graph, loss = opened.copy.graph, self.tensors["loss"]
        resolved_ports: dict[Any, ResolvedPort] = {
            ("nonrecurrent_grad", name): resolved for name, resolved in self.nonrecurrent.items()
        }
        for i, loop in enumerate(self.loops):
            ports: dict[Any, Port] = {}
            if loop.kind == "unrolled":
                resolved_ports |= {(i, "state_grad", j): direct_state_port(loop, j) for j in range(len(loop.states))}
            else:
                ports["output_grad", 0] = Port("output", loop.name)
                ports |= {("final_grad", j): Port("final_state", index=j) for j in range(len(loop.final))}
            if request.boundaries:
                ports["input_grad", 0] = Port("input", loop.name)
                ports |= {("initial_grad", j): Port("initial_state", index=j) for j in range(len(loop.initial))}
            resolved_ports |= {(i, *key): boundary_port(loop, port) for key, port in ports.items()}
        if request.boundaries:
            resolved_ports |= {
                ("model input_grad", j): port_tensors(Port("input", index=j)) for j in range(len(opened.inputs))
            }
            resolved_ports |= {
                ("model output_grad", j): port_tensors(Port("output", index=j)) for j in range(len(opened.outputs))
            }
        zero_keys = {key for key in resolved_ports if key[0] == "nonrecurrent_grad" or key[1] in _ALWAYS}
        self.tensors |= {key: tf.zeros_like(resolved_ports[key].value) for key in zero_keys}
        weight_blocks = {
            weight_name(p): p for loop in self.loops if request.weight_grads for p in weights_of(loop).values()
        }
        weight_blocks |= all_weights(opened) if request.boundaries else {}
        weight_ports = {name: weight_port(graph, blocks) for name, blocks in weight_blocks.items()}
        self.tensors |= add_pullback(
            graph, [loss], resolved_ports | {("weight", name): resolved for name, resolved in weight_ports.items()}
        )
        # Gradients that reach the cells' variables outside of their loops: of penalties, and of other layers.
        cell_variables = {name for loop in self.loops for name in loop.cell.variables}
        outside_ports = {
            ("outside", name): resolved
            for name, resolved in weight_ports.items()
            if ("weight", name) in self.tensors
            and cell_variables.intersection(block.variable for block in resolved.blocks)
        }
        stop_tensors = [t for loop in self.loops for boundary in (*loop.final, *loop.states) for t in boundary.tensors]
        stop_tensors += [t for loop in self.loops if loop.output is not None for t in loop.output.tensors]
        self.tensors |= add_pullback(graph, [loss], outside_ports, stop_tensors=stop_tensors)


def _state_dependent_steps(loop: Loop, mask: Array) -> Array | None:
    """Return where the output depends on the state, (sample, time) of bool; None for everywhere."""
    if loop.masked_output == "zero":
        return mask
    if loop.masked_output == "state" or loop.cell.body is not None:
        return None
    if loop.reversed_lengths is not None:  # a reversed loop runs the padding last
        return np.broadcast_to(mask.any(axis=1, keepdims=True), mask.shape)
    order = -1 if loop.direction == "backward" else 1  # masked steps repeat the output, zero up to the first real step
    return (mask[:, ::order].cumsum(axis=1) > 0)[:, ::order]


@dataclass
class _CaptureBuilder:
    """Conversion of fetched values to the ``Capture`` of the adapter protocol."""

    opened: OpenNet
    fetches: _Fetches
    values: dict[Any, Any]
    variables: Mapping[str, Array]
    request: Taps

    def capture(self) -> Capture:
        get_value, request = self.values.get, self.request
        recorded = Capture([self._recurrent_call(i, loop) for i, loop in enumerate(self.fetches.loops)])
        recorded.other_calls = [
            NonRecurrentCall(
                name, np.asarray(get_value(("nonrecurrent", name))), get_value(("nonrecurrent_grad", name))
            )
            for name in self.fetches.nonrecurrent
        ]
        recorded.entangled = not request.gradients and any(loop.carried_states for loop in self.fetches.loops)
        recorded.notes.extend(self.fetches.notes)
        text = "is run as a cell of unknown equations, without gates"
        recorded.notes.extend(
            f"{loop.name!r} {text}: {loop.cell.unknown_reason}."
            for loop in self.fetches.loops
            if loop.cell.unknown_reason
        )
        recorded.loss = None if "loss" not in self.values else float(self.values["loss"])
        outputs = {name: np.asarray(get_value(("model output", j))) for j, name in enumerate(self.opened.net.outputs)}
        recorded.outputs = outputs if len(outputs) > 1 else next(iter(outputs.values()), None)
        if recorded.loss is not None and not math.isfinite(recorded.loss):
            cause = "the first quantity that is not finite is the cause"
            recorded.notes.append(f"The loss is {recorded.loss}: gradients mean nothing, and {cause}.")
        if request.boundaries:
            recorded.input_grads = [get_value(("model input_grad", j)) for j in range(len(self.opened.inputs))]
            recorded.output_grads = [get_value(("model output_grad", j)) for j in range(len(self.opened.outputs))]
            recorded.outside_weight_grads, recorded.full_gradient_names = self._outside_weight_grads()
        return recorded

    def _recurrent_call(self, i: int, loop: Loop) -> RecurrentCall:
        get_value, has_gradients, unrolled = self.values.get, self.request.gradients, loop.kind == "unrolled"
        output, output_grad = self.values[i, "output"], get_value((i, "output_grad", 0))
        mask, state_grad, final_grad = self._mask(i, loop), None, self._state_values(i, "final_grad")
        body, weights = loop.cell.body, weights_of(loop)
        if loop.output is None and has_gradients:  # the output is this state
            final_grad = (np.zeros_like(final_grad[0]), *final_grad[1:])
        if has_gradients and unrolled:
            output_grad = np.zeros_like(output)
            fetched_grads = {j: get_value((i, "state_grad", j)) for j in range(len(loop.states))}
            state_grad = {j: gradient for j, gradient in fetched_grads.items() if gradient is not None}
            if 0 in state_grad:  # the first state is the output, which may be the last step alone
                hidden_grad = state_grad.pop(0)
                if output.ndim == hidden_grad.ndim:
                    output_grad = hidden_grad
                else:
                    last_step = 0 if loop.direction == "backward" else -1
                    output_grad, state_grad[0] = hidden_grad[:, last_step], hidden_grad.copy()
                    state_grad[0][:, last_step] = 0
        return RecurrentCall(
            layer=loop.name,
            direction=loop.direction,
            bidirectional=loop.bidirectional,
            cell=known_cell(loop, self.variables)
            if body is None
            else BodyCell(body, self._state_values(i, "outer"), list(weights)),
            input=self.values[i, "input"],
            mask=mask,
            initial_state=self._state_values(i, "initial"),
            output=output,
            output_from_state=None if mask is None else _state_dependent_steps(loop, mask),
            masked_output=loop.masked_output,
            final_state=None if unrolled else self._state_values(i, "final"),
            output_grad=output_grad,
            final_state_grad=final_grad if has_gradients and not unrolled else None,
            state_grad=state_grad,
            reads_states_between=unrolled,
            weights_key="|".join(map(weight_name, weights.values())) or f"{loop.name}/{loop.direction}",
            weight_grads=self._weight_grads(loop) if has_gradients and self.request.weight_grads else None,
            tied=self._partly_tied_weights(loop),
            framework_input_grad=get_value((i, "input_grad", 0)),
            framework_initial_state_grad=self._state_values(i, "initial_grad") if self.request.boundaries else None,
        )

    def _state_values(self, i: int, kind: str) -> tuple[Array, ...]:
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
        gradients = {}
        for key, blocks in weights_of(loop).items():
            full_gradient, outside_gradient = (
                self.values.get((kind, weight_name(blocks))) for kind in ("weight", "outside")
            )
            full_gradient = (
                np.zeros_like(assemble_weight(blocks, self.variables)) if full_gradient is None else full_gradient
            )
            gradients[key] = full_gradient if outside_gradient is None else full_gradient - outside_gradient
        return gradients

    def _outside_weight_grads(self) -> tuple[dict[str, Array | None], frozenset[str]]:
        """Return weight gradients along paths outside of the recorded loops, and the names of those that are full."""
        names = all_weights(self.opened)
        outside_gradients = {name: self.values["outside", name] for name in names if ("outside", name) in self.values}
        gradients = {name: self.values.get(("weight", name)) for name in names} | outside_gradients
        return gradients, frozenset(names) - set(outside_gradients)

    def _partly_tied_weights(self, loop: Loop) -> frozenset[str]:
        """Return the weights of a loop that share only a part of their variables with another layer."""
        other_loops = [other_loop for other_loop in self.opened.loops if other_loop is not loop]
        other_variables = {name for other_loop in other_loops for name in other_loop.cell.variables}
        identical_loops = {other_loop.name for other_loop in other_loops if weights_of(other_loop) == weights_of(loop)}
        if identical_loops:  # all weights are shared: the gradients of the calls are summed
            return frozenset()
        return frozenset(
            k
            for k, blocks in weights_of(loop).items()
            if other_variables.intersection(block.variable for block in blocks)
        )
