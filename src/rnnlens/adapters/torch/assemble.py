"""Tensors at the boundaries of recorded calls, and the calls of the adapter protocol made of them.

A boundary is the same for a capture and for a pull-back: tensors inside the graph, and the linear function from them,
or from their gradients, to the layout of rnnlens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from ...recurrence.cells import Cell, registered
from ..protocol import NonRecurrentCall, Port, RecurrentCall
from .cells import arrange_gradients, build_cell
from .inputs import replay_copy
from .layer_calls import LayerCall
from .record import CallRecord, CallRecorder, LayerRecord, Recurrence, last_steps, node_names
from .weights import NAMES, create_cell, named_copies

#: Function from a recorded tensor to its gradient; None where no path leads to it.
Gradients = Callable[[Tensor], Tensor | None]


@dataclass
class PortTensors:
    """Tensors behind a port, and the linear function from them (or their gradients) to the port's layout.

    ``compute_value`` computes the port's value where that needs another function than ``gather``, which is used for
    gradients.
    """

    tensors: list[Tensor]
    gather: Callable[[Sequence[Tensor]], Tensor] = itemgetter(0)
    compute_value: Callable[[], Tensor] | None = None

    @property
    def value(self) -> Tensor:
        """Value of the port as a tensor of the autograd graph."""
        return self.gather(self.tensors) if self.compute_value is None else self.compute_value()


def boundary_of(recurrence: Recurrence, layer: int, port: Port) -> PortTensors:
    """Return the tensors behind a port (input, output, state) of one stacked layer of a recurrence."""
    if port.kind in ("input", "output"):
        return _sequence_boundary(recurrence, layer, port)
    if port.kind == "state":
        is_fused = recurrence.owner.is_fused
        all_steps = (
            _fused_state_boundary(recurrence, layer, port.index)
            if is_fused
            else _state_boundary(recurrence, port.index)
        )
        real_steps = None if is_fused else recurrence.step_mask()
        if port.key != "ending":
            return all_steps
        if real_steps is None:
            return PortTensors(all_steps.tensors, lambda tensors: all_steps.gather(tensors)[:, -1])
        final_steps = last_steps(real_steps)
        return PortTensors(
            all_steps.tensors, lambda tensors: all_steps.gather(tensors)[torch.arange(len(final_steps)), final_steps]
        )
    if port.kind == "state_read":
        return read_boundary(recurrence, layer, port.index)
    if port.kind == "final_state" and not recurrence.owner.is_fused:
        return _final_boundary(recurrence, port.index)
    if port.kind in ("initial_state", "final_state"):
        return _layer_state_boundary(recurrence, layer, port)
    raise UnsupportedError(f"Layer {port.layer!r} has no port {port.kind!r}.")


def _sequence_boundary(recurrence: Recurrence, layer: int, port: Port) -> PortTensors:
    """Return the tensors behind the input or output port of a layer, over all calls of the recurrence.

    A port with a direction has the units of that direction only.
    """
    owner, is_output = recurrence.owner, port.kind == "output"
    tensors = [
        call.layer_records[layer].output if is_output else call.layer_records[layer].input for call in recurrence.calls
    ]

    def gather(parts: Sequence[Tensor]) -> Tensor:
        if not is_output and not owner.is_fused:  # one step: (sample, feature), or (sample, channel, *space)
            parts = [part.flatten(1) for part in parts]
        pairs = zip(parts, recurrence.calls, strict=True)
        joined = join_calls(
            recurrence, [part if part.dim() == 3 or v.packing is not None else part.unsqueeze(0) for part, v in pairs]
        )
        if not is_output or port.direction is None:
            return joined
        return units_of_direction(joined, owner.directions, int(port.direction == "backward"))

    return PortTensors(tensors, gather)


def join_calls(recurrence: Recurrence, parts: list[Tensor]) -> Tensor:
    """Join time-first parts of all calls to one tensor (sample, time, ...), zero where a sample has left the batch."""
    padded = [v.packing.padded(p) if v.packing is not None else p for v, p in zip(recurrence.calls, parts, strict=True)]
    for i, part in enumerate(padded):
        missing = padded[0].shape[1] - part.shape[1]
        padded[i] = torch.cat([part, part.new_zeros((part.shape[0], missing, *part.shape[2:]))], 1) if missing else part
    return (padded[0] if len(padded) == 1 else torch.cat(padded)).transpose(0, 1)


def units_of_direction(value: Tensor, directions: int, direction: int) -> Tensor:
    """Return the units of one direction of a tensor (..., direction * unit)."""
    size = value.shape[-1] // directions
    return value[..., direction * size : (direction + 1) * size]


def _layer_state_boundary(recurrence: Recurrence, layer: int, port: Port) -> PortTensors:
    """Return the tensors behind an initial or final state of a fused module, of its first or last call."""
    call = recurrence.calls[0 if port.kind == "initial_state" else -1]
    state = (call.link.initial if port.kind == "initial_state" else call.state_taps)[port.index]
    assert state is not None
    order = call.packing.order if call.packing is not None else None
    index = layer * recurrence.owner.directions + int(port.direction == "backward")

    def gather(tensors: Sequence[Tensor]) -> Tensor:
        value = tensors[0][index] if recurrence.owner.is_fused else tensors[0].flatten(1)
        return value if order is None else value.index_select(0, order)

    return PortTensors([state], gather)


def _state_boundary(recurrence: Recurrence, index: int) -> PortTensors:
    """Return a cell's state after each step, (sample, time, unit), and where to read its total gradient.

    At a masked step both repeat those of the step before.
    """
    calls, real_steps = recurrence.calls, recurrence.step_mask()
    hidden_states, slopes = list[Tensor](), list[Tensor]()
    if index == 1 and recurrence.owner.step_cell is None:
        first_states = calls[0].link.final
        # A fused kernel has no path from c_t to h_t.
        if first_states[1].grad_fn is None or first_states[1].grad_fn is first_states[0].grad_fn:
            hidden_states = [call.link.final[0] for call in calls]
            slopes = [
                _cell_to_hidden_slope(call.layer_records[0], call.link.final, call.link.initial[0]) for call in calls
            ]
    states = [call.link.final[index] for call in calls]
    earlier_states = [call.link.initial[index] for call in calls[1:]] if real_steps is not None else []

    def gather(tensors: Sequence[Tensor]) -> Tensor:
        count = len(calls)
        steps = [part.flatten(1) for part in tensors[:count]]
        earlier = [*(part.flatten(1) for part in tensors[count : count + len(earlier_states)]), None]
        if slopes:  # add the path from c_t to h_t within the step
            hidden_grads = tensors[count + len(earlier_states) :]
            steps = [c + h * slope for c, h, slope in zip(steps, hidden_grads, slopes, strict=True)]
        if real_steps is not None:
            steps = [_select_real(real_steps[t], step, earlier[t]) for t, step in enumerate(steps)]
        return join_calls(recurrence, [step.unsqueeze(0) for step in steps])

    return PortTensors(
        [*states, *earlier_states, *hidden_states],
        gather,
        lambda: torch.stack(carried_states(recurrence, index), dim=1),
    )


def _fused_state_boundary(recurrence: Recurrence, layer: int, index: int) -> PortTensors:
    """Return a state (sample, time, unit) of a library layer that is called step by step, with its total gradient.

    The layer returns h_t twice, as output and as state.
    """
    records = [call.layer_records[layer] for call in recurrence.calls]
    outputs, hidden_taps = [record.output for record in records], [call.state_taps[0] for call in recurrence.calls]
    cell_taps = [call.state_taps[1] for call in recurrence.calls] if index else []
    slopes = [
        _cell_to_hidden_slope(record, tuple(s[0] for s in record.finals), record.initial[0][0])
        for record in records
        if index
    ]
    projection = records[0].weights[0].get("weight_hr") if index else None

    def gather(tensors: Sequence[Tensor]) -> Tensor:
        count = len(records)
        steps = [y[0] + h[layer] for y, h in zip(tensors[:count], tensors[count : 2 * count], strict=True)]
        if projection is not None:
            steps = [h @ projection for h in steps]
        if index:  # add the path from c_t to h_t within the step
            steps = [c[layer] + h * slope for c, h, slope in zip(tensors[2 * count :], steps, slopes, strict=True)]
        return torch.stack(steps, dim=1)

    def cell_or_output_states() -> Tensor:
        steps = [c[layer] for c in cell_taps if c is not None] if index else [y[0] for y in outputs]
        return torch.stack(steps, dim=1)

    return PortTensors(
        [t for t in (*outputs, *hidden_taps, *cell_taps) if t is not None], gather, cell_or_output_states
    )


def _cell_to_hidden_slope(record: LayerRecord, states: Sequence[Tensor], previous_hidden: Tensor) -> Tensor:
    """Compute dh_t/dc_t = o (1 - tanh(c)^2), (sample, unit), of an LSTM's step from h_{t-1} to (h_t, c_t)."""
    hidden, cell = states
    weights = {name: w[3 * cell.shape[1] :].to(hidden.dtype) for name, w in record.weights[0].items()}
    with torch.no_grad():
        x, previous_hidden = record.input.reshape(len(hidden), -1).to(hidden.dtype), previous_hidden.to(hidden.dtype)
        output_gate = x @ weights["weight_ih"].T + previous_hidden @ weights["weight_hh"].T
        if "bias_ih" in weights:
            output_gate = output_gate + weights["bias_ih"] + weights["bias_hh"]
        return torch.sigmoid(output_gate) * (1 - torch.tanh(cell) ** 2)


def _final_boundary(recurrence: Recurrence, index: int) -> PortTensors:
    """Return a cell's state after the last step, (sample, unit), and where to read its direct gradient.

    The first state is the output: its gradient is at the output port, and zero here.
    """
    tap, final_state = recurrence.calls[-1].state_taps[index], recurrence.calls[-1].link.final[index]
    return PortTensors(
        [] if tap is None else [tap],
        lambda tensors: tensors[0][0] if tensors else torch.zeros_like(final_state.flatten(1)),
        lambda: carried_states(recurrence, index)[-1],
    )


def read_boundary(recurrence: Recurrence, layer: int, index: int, *, with_last: bool = True) -> PortTensors:
    """Return the port of a layer's state where the user's code receives it, (sample, time, unit), zero elsewhere.

    ``with_last=False`` leaves out the state after the last call.
    """
    calls = recurrence.calls if with_last else recurrence.calls[:-1]
    taps = [call.state_taps[index] for call in calls] + [None] * (len(recurrence.calls) - len(calls))

    def gather(tensors: Sequence[Tensor]) -> Tensor:
        tap_values, steps = iter(tensors), []
        for call, tap in zip(recurrence.calls, taps, strict=True):
            zeros = torch.zeros_like(call.layer_records[layer].finals[index].detach()[:1])
            last_step = zeros if tap is None else next(tap_values)[layer : layer + 1]
            steps.append(torch.cat([*[zeros] * (call.steps - 1), last_step]))
        return join_calls(recurrence, steps)

    return PortTensors([tap for tap in taps if tap is not None], gather)


def carried_states(recurrence: Recurrence, index: int) -> list[Tensor]:
    """Return the state after each step, inside the graph. A masked sample keeps its previous state."""
    real_steps = recurrence.step_mask()
    if real_steps is None:
        return [call.link.final[index].flatten(1) for call in recurrence.calls]
    state = recurrence.calls[0].link.initial[index].flatten(1)
    states = []
    for call, is_real in zip(recurrence.calls, real_steps, strict=True):
        new_state = call.link.final[index].flatten(1)
        state = torch.cat([_select_real(is_real, new_state, state[: len(new_state)]), state[len(new_state) :]])
        states.append(state)
    return states


def _select_real(is_real: Tensor, new: Tensor, earlier: Tensor | None) -> Tensor:
    """Return samples of ``new`` where a step is real, else those of ``earlier``; zeros if ``earlier`` is None."""
    samples = len(new)
    old = torch.zeros_like(new)
    if earlier is not None:
        old = torch.cat([earlier, old[len(earlier) :]])[:samples]
    return torch.where(is_real[:samples, None], new, old)


class Assembler:
    """Builder of the protocol's calls from the recurrences of one pass.

    Parameters
    ----------
    recorder
        Records of the finished forward pass.
    gradient
        Function that returns the gradient of the loss at a recorded tensor; None without a loss.
    """

    def __init__(self, recorder: CallRecorder, gradient: Gradients | None) -> None:
        self.recorder, self.gradient = recorder, gradient
        self._cells: dict[tuple[int, ...], tuple[str, Cell]] = {}
        self._cells_by_weight: dict[int, set[tuple[int, ...]]] = {}
        for recurrence in recorder.recurrences:
            for weights in (by_slot for record in recurrence.calls[0].layer_records for by_slot in record.weights):
                for weight in weights.values():
                    self._cells_by_weight.setdefault(id(weight), set()).add(tuple(map(id, weights.values())))

    def calls(self) -> list[RecurrentCall]:
        """Return one ``RecurrentCall`` per recurrence, stacked layer and direction."""
        recurrences = self.recorder.recurrences
        return [
            self._call(recurrence, layer, name, direction)
            for recurrence, names in zip(recurrences, node_names(recurrences), strict=True)
            for layer, name in enumerate(names)
            for direction in range(recurrence.owner.directions)
        ]

    def non_recurrent_calls(self, layer_calls: Sequence[LayerCall]) -> list[NonRecurrentCall]:
        """Return one ``NonRecurrentCall`` per call of a requested layer that is not recurrent."""
        calls = []
        for call in layer_calls:
            tensors_and_join, grad = call.output(), None
            assert tensors_and_join is not None  # only calls that returned tensors are kept
            output = PortTensors(*tensors_and_join)
            if self.gradient is not None and output.tensors[0].is_floating_point():
                grad = self._port_gradient(output)
            calls.append(NonRecurrentCall(call.name, replay_copy(output.value), grad))
        return calls

    def _call(self, recurrence: Recurrence, layer: int, name: str, direction: int) -> RecurrentCall:
        owner, first_call = recurrence.owner, recurrence.calls[0]
        direction_name = ("forward", "backward")[direction]
        bidirectional = owner.directions > 1
        states = first_call.layer_records[layer].initial
        weights_key, cell = self._cell(
            recurrence, layer, f"{name}/{direction_name}" if bidirectional else name, direction
        )
        mask = first_call.packing.mask if first_call.packing is not None else recurrence.step_mask()
        mask = None if mask is None or bool(mask.all()) else mask.T.contiguous()
        slots = [slot.split("/") for owner_key, slot in self.recorder.computed_weights if owner_key == owner.key]
        call = RecurrentCall(
            layer=name,
            direction=direction_name,  # type: ignore[arg-type]
            bidirectional=bidirectional,
            cell=cell,
            input=_copied_sequence(recurrence, lambda call_record: call_record.layer_records[layer].input_copy),
            mask=mask,
            initial_state=tuple(_copied_state(first_call, state[direction]) for state in states),
            output=_copied_sequence(
                recurrence,
                lambda call_record: units_of_direction(
                    call_record.layer_records[layer].output, owner.directions, direction
                ),
            ),
            final_state=_final_state(recurrence, layer, direction),
            weights_key=weights_key,
            stepwise=not owner.is_fused or recurrence.calls[-1].state_changed,
            reads_states_between=not owner.is_fused or len(recurrence.calls) > 1,
            computed=frozenset(NAMES[slot] for slot, *indices in slots if indices == [str(layer), str(direction)]),
        )
        if recurrence.calls[-1].state_changed:  # by the user's code, between the steps
            call.start_states = tuple(
                _copied_sequence(recurrence, lambda call_record, i=i: call_record.layer_records[layer].initial[i])  # type: ignore[misc]
                for i in range(len(states))
            )
            call.reset = _reset_mask(recurrence)
            call.resets_only = not any(call_record.mixes_states for call_record in recurrence.calls)
        dtype = owner.autocast or first_call.layer_records[layer].output.dtype
        if dtype in (torch.bfloat16, torch.float16):
            call.compute_dtype = str(dtype).removeprefix("torch.")
        if first_call.packing is not None and mask is not None:
            call.output_from_state, call.masked_output = mask, "zero"
        elif mask is not None:
            call.output = _repeat_masked_outputs(call.output, mask, call.initial_state[0])
            call.masked_output = "output" if cell.by_framework else "state"
        if self.gradient is not None:
            self._add_gradients(call, recurrence, layer, direction)
        return call

    def _add_gradients(self, call: RecurrentCall, recurrence: Recurrence, layer: int, direction: int) -> None:
        """Add to a call the gradients at its boundaries and of its weights."""
        assert self.gradient is not None
        first_call, count = recurrence.calls[0], len(recurrence.calls[0].layer_records[layer].initial)

        def port_gradient(kind: str, index: int = 0, side: str | None = call.direction) -> Tensor:
            return self._port_gradient(boundary_of(recurrence, layer, Port(kind, index=index, direction=side)))  # type: ignore[arg-type]

        read_ports = [
            read_boundary(recurrence, layer, i, with_last=recurrence.step_mask() is not None)
            for i in range(len(first_call.state_taps))
        ]
        call.output_grad = port_gradient("output")
        # The first state of a layer is the last step of its output.
        if recurrence.owner.is_fused and read_ports[0].tensors:
            call.output_grad = call.output_grad + self._port_gradient(read_ports[0])
        # Where a mask ended samples earlier, the gradients at their states are in ``state_grad``.
        is_masked = recurrence.step_mask() is not None
        call.final_state_grad = tuple(
            torch.zeros_like(call.initial_state[i]) if is_masked else port_gradient("final_state", i)
            for i in range(count)
        )
        indices = range(1 if recurrence.owner.is_fused else 0, len(read_ports))
        state_grads = {i: self._port_gradient(read_ports[i]) for i in indices if read_ports[i].tensors}
        call.state_grad = {i: grad for i, grad in state_grads.items() if bool((grad != 0).any())} or None
        if self.recorder.weight_grads:
            call.weight_grads = self._weight_grads(recurrence, layer, direction)
        if self.recorder.separate:
            call.framework_input_grad = port_gradient("input", side=None) if direction == 0 else None
            creates_states = recurrence.owner.step_cell is not None and any(
                self.gradient(state) is None for state in first_call.link.initial
            )
            if not creates_states:  # otherwise the cell created its initial states itself
                call.framework_initial_state_grad = tuple(port_gradient("initial_state", i) for i in range(count))

    def _port_gradient(self, port_tensors: PortTensors) -> Tensor:
        """Return the gradient of the loss at a port in the layout of rnnlens, (sample, time, ...) or (sample, unit)."""
        assert self.gradient is not None
        return replay_copy(port_tensors.gather([_grad_or_zeros(self.gradient(t), t) for t in port_tensors.tensors]))

    def _cell(self, recurrence: Recurrence, layer: int, name: str, direction: int) -> tuple[str, Cell]:
        owner, weights = recurrence.owner, recurrence.calls[0].layer_records[layer].weights[direction]
        if owner.module is None and owner.step_cell is not None:
            return owner.name, owner.step_cell
        registration = registered(owner.module)
        key = (owner.key,) if registration is not None else tuple(map(id, weights.values()))
        if key not in self._cells and registration is not None:
            self._cells[key] = owner.name, build_cell(owner.module, registration)
        elif key not in self._cells:
            self._cells[key] = name, create_cell(owner.cell, weights, owner.activation)
        return self._cells[key]

    def _weight_grads(self, recurrence: Recurrence, layer: int, direction: int) -> dict[str, Tensor]:
        assert self.gradient is not None
        owner, weights = recurrence.owner, recurrence.calls[0].layer_records[layer].weights[direction]
        # A weight shared with another cell gets the sum of both gradients, so it is left out.
        unshared = {slot: weight for slot, weight in weights.items() if len(self._cells_by_weight[id(weight)]) == 1}
        grads = {slot: _grad_or_zeros(self.gradient(weight), weight) for slot, weight in unshared.items()}
        registration = registered(owner.module)
        if registration is not None:  # computed from several parameters: all gradients are needed
            return (
                arrange_gradients(registration, grads)
                if len(grads) == len(list(nn.Module.parameters(owner.module)))
                else {}
            )
        if owner.step_cell is not None:
            return {name: replay_copy(grad) for name, grad in grads.items()}
        return named_copies(owner.cell, grads)


def _grad_or_zeros(grad: Tensor | None, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if grad is None else grad


def _copied_sequence(recurrence: Recurrence, call_tensor: Callable[[CallRecord], Tensor]) -> Tensor:
    return replay_copy(join_calls(recurrence, [call_tensor(call).detach() for call in recurrence.calls]))


def _copied_state(call: CallRecord, state: Tensor) -> Tensor:
    """Return a state (sample, unit) as a copy in the caller's order of samples."""
    if call.packing is not None and call.packing.order is not None:
        state = state.index_select(0, call.packing.order)
    return replay_copy(state)


def _final_state(recurrence: Recurrence, layer: int, direction: int) -> tuple[Tensor, ...]:
    """Return the states (sample, unit) after the last step; of a masked loop those after each sample's last one."""
    finals = recurrence.calls[-1].layer_records[layer].finals
    if recurrence.step_mask() is not None:
        return tuple(replay_copy(carried_states(recurrence, i)[-1]) for i in range(len(finals)))
    return tuple(_copied_state(recurrence.calls[-1], state[direction]) for state in finals)


def _reset_mask(recurrence: Recurrence) -> Tensor | None:
    """Return where a step's state has no autograd path to the step before, (sample, time) of bool; None if nowhere."""
    reset_rows = [call.reset_rows for call in recurrence.calls]
    no_reset = next(torch.zeros_like(rows) for rows in reset_rows if rows is not None)
    reset = torch.stack([no_reset if rows is None else rows for rows in reset_rows], 1)
    return reset if bool(reset.any()) else None


def _repeat_masked_outputs(output: Tensor, mask: Tensor, initial_state: Tensor) -> Tensor:
    """Return outputs (sample, time, unit) in which masked steps repeat the last valid step.

    Steps before the first valid one get the initial state, or zeros if its size differs.
    """
    steps = torch.arange(mask.shape[1], device=mask.device)
    last_real = torch.where(mask, steps, -1).cummax(dim=1).values
    index = last_real.clamp(min=0)[:, :, None].expand(-1, -1, output.shape[2])
    start_output = (
        initial_state[:, None, :] if initial_state.shape[1:] == output.shape[2:] else torch.zeros_like(output)
    )
    return torch.where((last_real >= 0)[:, :, None], output.gather(1, index), start_output)
