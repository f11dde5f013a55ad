"""A capture: the recurrent calls of one run, with their direct gradients, read from the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Var

from ...recurrence.cells import Cell
from ...typing import Array
from ...vocabulary import renamed_states
from ..protocol import NOT_LOOKED_INTO, Batch, Capture, Outputs, Port, RecurrentCall, Taps
from .arguments import missing_loss, nest
from .cells import ScanCell
from .jaxprs import is_inexact
from .layers import RecurrentLayer
from .program import Call, Program
from .program_run import ENGINE, PortTaps, ProgramRun, gathered_gradient, no_layer

_LOSS = Port("loss")
#: Products of weights in one pass from which the certificate of a part of the samples saves more than its compilation.
MOST_PRODUCTS = 1e9


def record(model: Any, batch: Batch, taps: Taps) -> tuple[Capture, Outputs]:
    """Run a model once, forward and, with a loss, back; return what the taps say."""
    call = Call.of(model, batch)
    if taps.gradients and not call.has_loss:
        raise missing_loss()
    has_loss, records_calls = call.has_loss and taps.needs_loss, taps.record != "outputs"
    program = Program.of(call, has_loss)
    notes = [f"{NOT_LOOKED_INTO}: {loop.name}, within {loop.obstacle}." for loop in program.loops if loop.obstacle]
    layers = _requested_layers(program, taps) if records_calls else []
    custom = [layer for layer in layers if layer.cell is None]
    renamed = {layer.base: renamed_states(layer.state_names, layer.state_fields) for layer in custom}
    notes += [f"{name}: {text}." for name, text in renamed.items() if text]
    inputs = [Port("input", index=i) for i in range(len(call.x.leaves))]
    outputs = [Port("output", index=i) for i in range(len(program.outputs))]
    floats = [i for i, value in enumerate(call.opened.values) if is_inexact(value)]
    weights = {i: Port("weight", key=str(i)) for i in floats} if taps.gradients else {}
    wrt = [port for layer in layers for port in _tapped_ports(layer)] + inputs + list(weights.values())
    if _is_long(layers, call):
        wrt += _read_by_the_loss(program, outputs)
    ports = PortTaps(
        of=(_LOSS,) if taps.gradients else (),
        wrt=tuple(wrt) if taps.gradients else (),
        read=(*outputs, *((_LOSS,) if has_loss else ())),
        calls=tuple(layer.name for layer in layers),
    )
    run = ProgramRun(call, ports, {_LOSS: np.ones(())} if taps.gradients else None)
    leaves = [run.values[port] for port in outputs]
    tree = nest(leaves, program.output_template)
    result = Capture([], loss=float(run.values[_LOSS]) if has_loss else None, outputs=tree, notes=notes)
    reader = _CallReader(run, taps)
    result.calls = [reader.call(layer) for layer in layers]
    result.order = tuple(layer.name for layer in layers)
    if taps.boundaries:
        names = call.opened.weight_names
        result.input_grads = [run.first_gradient(port) for port in inputs]
        result.output_grads = [run.first_gradient(port) for port in outputs]
        result.outside_weight_grads = {names[i]: run.first_gradient(port) for i, port in weights.items()}
        shared = {f"{call.layer}/{key}" for call in result.calls for key in call.tied}
        result.full_gradient_names = frozenset(result.outside_weight_grads) | shared
    if not taps.gradients:
        result.entangled = any(_is_entangled(layer) for layer in program.layers)
    return result, Outputs(leaves, tree)


def _is_long(layers: Sequence[RecurrentLayer], call: Call) -> bool:
    """Return whether a pass takes so long that a part of the samples should be compared with a run of its own."""
    sizes = [np.size(v) for v in call.opened.values]
    products = sum(layer.samples * layer.steps * sum(sizes[i] for i in layer.loop.weights) for layer in layers)
    return call.batch.loss is not None and products > MOST_PRODUCTS


def _read_by_the_loss(program: Program, outputs: Sequence[Port]) -> list[Port]:
    """Return the outputs of floats, each variable once."""
    first: dict[Var, Port] = {}
    for port, v in zip(outputs, program.outputs, strict=True):
        if isinstance(v, Var) and is_inexact(v.aval):
            first.setdefault(v, port)
    return list(first.values())


def _requested_layers(program: Program, taps: Taps) -> list[RecurrentLayer]:
    """Return the requested layers; raise LayerNotFoundError for a name that is none."""
    if taps.layers is None:
        program.refuse_without_layers()
        return program.layers
    chosen = []
    for name in dict.fromkeys(taps.layers):
        found = [layer for layer in program.layers if name in (layer.name, layer.base)]
        if not found and taps.all_must_run:
            raise no_layer(program, name)
        chosen += found
    return [layer for layer in program.layers if layer in chosen]


def _is_entangled(layer: RecurrentLayer) -> bool:
    """Return whether a layer's recurrence is more than a chain of steps between its input and its output."""
    return layer.starts_anew or layer.reads_other_states or bool(layer.index) or layer.cell is None


def _tapped_ports(layer: RecurrentLayer) -> list[Port]:
    """Return the ports whose gradients a capture of a layer needs."""
    name, states = layer.name, range(len(layer.states))
    ports = [Port("input", name), *(Port("initial_state", name, i) for i in states)]
    if layer.starts_anew:
        return [*ports, *(Port("state", name, i, "returned") for i in states)]
    ports.append(Port("output", name))
    if layer.returns_final_states:
        ports += [Port("final_state", name, i) for i in layer.other_states]
    if layer.reads_other_states:
        ports += [Port("state_read", name, i) for i in layer.other_states]
    return ports


@dataclass
class _CallReader:
    """Reads recurrent calls from a finished run."""

    run: ProgramRun
    taps: Taps

    def call(self, layer: RecurrentLayer) -> RecurrentCall:
        """Return one recurrent call."""
        program = self.run.program
        states = [self._steps(layer, v, f"state{i}") for i, v in enumerate(layer.state_variables)]
        initial = tuple(self._at_step(layer, v, f"initial{i}") for i, v in enumerate(layer.state_variables))
        cell: Cell
        if layer.cell is None:
            cell, cell_input = ScanCell.of(layer, self.run, self._input(layer))
        else:
            cell, cell_input = program.cell_of(layer, self.run.call.opened.values), self._input(layer)
        call = RecurrentCall(
            layer=layer.name,
            direction="backward" if layer.is_backward else "forward",
            cell=cell,
            input=cell_input,
            initial_state=initial,
            output=self._output(layer) if layer.own_outputs else states[0],
            stepwise=_is_entangled(layer),
            weights_key=layer.base,
            compute_dtype=_compute_dtype(layer),
        )
        if layer.cell is not None:
            self._add_conditions(layer, call)
        if layer.returns_final_states:
            call.final_state = tuple(s[:, layer.last] for s in states)
        if _is_entangled(layer):
            call.reads_states_between = layer.reads_other_states or layer.starts_anew
        if self.run.gradients:
            self._add_gradients(layer, call)
        return call

    def _add_conditions(self, layer: RecurrentLayer, call: RecurrentCall) -> None:
        """Add the mask of a call, and the states from which its steps start where these may be new."""
        cell = layer.cell
        assert cell is not None
        position = 0
        if cell.reset is not None:
            starts = [self._steps(layer, v, f"watch{position + i}") for i, v in enumerate(cell.starts)]
            position += len(cell.starts)
            call.start_states = tuple(starts)
            call.reset = self._flag(layer, position, cell.reset.variable) == cell.reset.value
            call.resets_only = True
            position += 1
        if cell.mask is not None:
            call.mask = self._flag(layer, position, cell.mask.variable) == cell.mask.value

    def _flag(self, layer: RecurrentLayer, number: int, variable: Any) -> Array:
        return self._steps(layer, variable, f"watch{number}")[..., 0]

    def _steps(self, layer: RecurrentLayer, variable: Any, point: str) -> Array:
        value = ENGINE.to_array(self.run.record((layer.loop.path, point)))
        return np.ascontiguousarray(layer.to_port(variable, value))

    def _at_step(self, layer: RecurrentLayer, variable: Any, point: str) -> Array:
        value = ENGINE.to_array(self.run.record((layer.loop.path, point)))
        return np.ascontiguousarray(layer.at_step(variable, value[layer.index] if layer.index else value))

    def _output(self, layer: RecurrentLayer) -> Array:
        parts = [self._steps(layer, v, f"output{i}") for i, v in enumerate(layer.own_outputs)]
        return np.concatenate(parts, axis=-1)

    def _input(self, layer: RecurrentLayer) -> Array:
        parts = [self._steps(layer, v, f"input{i}") for i, v in enumerate(layer.inputs)]
        if not parts:
            dtype = ENGINE.to_array(self.run.record((layer.loop.path, "state0"))).dtype
            return np.zeros((layer.samples, layer.steps, 0), dtype)
        return np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    def _add_gradients(self, layer: RecurrentLayer, call: RecurrentCall) -> None:
        """Add the gradients at the boundaries of a call, and those of its weights."""
        run, name, states = self.run, layer.name, range(len(layer.states))

        def gradient(port: Port) -> Array:
            value = run.first_gradient(port)
            return np.zeros(layer.shape_of(port)[0], call.output.dtype) if value is None else value

        if layer.starts_anew:
            returned = [gradient(Port("state", name, i, "returned")) for i in states]
            call.output_grad, call.state_grad = returned[0], dict(enumerate(returned))
            call.state_grad.pop(0)
        else:
            call.output_grad = gradient(Port("output", name))
            if layer.reads_other_states:
                call.state_grad = {i: gradient(Port("state_read", name, i)) for i in layer.other_states}
        if layer.returns_final_states:
            ends = {i: gradient(Port("final_state", name, i)) for i in layer.other_states}
            call.final_state_grad = tuple(ends.get(i, np.zeros_like(call.initial_state[i])) for i in states)
        if self.taps.boundaries:
            grad = gradient(Port("input", name))
            call.framework_input_grad = self._at_columns(call, grad)
            if not layer.starts_anew:
                call.framework_initial_state_grad = tuple(gradient(Port("initial_state", name, i)) for i in states)
        if self.taps.weight_grads and layer.cell is not None:
            self._add_weight_gradients(layer, call)

    @staticmethod
    def _at_columns(call: RecurrentCall, grad: Array) -> Array:
        """Return the gradient at all columns of the input: zeros at those that are no floats."""
        missing = int(call.input.shape[-1]) - grad.shape[-1]
        return np.concatenate([grad, np.zeros((*grad.shape[:-1], missing), grad.dtype)], -1) if missing else grad

    def _add_weight_gradients(self, layer: RecurrentLayer, call: RecurrentCall) -> None:
        program, run = self.run.program, self.run
        grads = []
        for i in layer.loop.weights:
            value, grad = run.call.opened.values[i], run.first_gradient(Port("weight", key=str(i)))
            grads.append((np.zeros(np.shape(value), np.float32) if grad is None else grad)[None])
        weight_grads, keys = {}, list(program.origins(layer))
        for key in keys:
            gathered = gathered_gradient(program, layer, key, grads)
            if gathered is not None:
                weight_grads[key] = gathered[0]
        call.computed = frozenset(key for key in keys if key not in weight_grads)
        if program.is_tied(layer) or sum(other.base == layer.base for other in program.layers) > 1:
            call.tied = frozenset(weight_grads)
        call.weight_grads = weight_grads


def _compute_dtype(layer: RecurrentLayer) -> str:
    """Return the dtype in which a layer computes where that is coarser than the arrays of its call."""
    dtype = str(layer.state_variables[0].aval.dtype)
    return dtype if dtype in ("bfloat16", "float16") else ""
