"""Tensors at the boundaries of recorded calls, and the calls of the adapter protocol made of them.

A boundary is the same for a capture and for a pull-back: tensors inside the graph, and the linear function from them,
or from their gradients, to the layout of rnnlens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...recurrence.cells import Cell, registered
from ..protocol import NonRecurrentCall, Port, RecurrentCall
from .cells import arranged, described, replayable
from .record import CallRecord, CallRecorder, LayerRecord, Recurrence, call_numbers, last_steps, node_names
from .weights import NAMES, known_cell, named_copies

#: Function from a recorded tensor to its gradient; None where no path leads to it.
Gradients = Callable[[Tensor], Tensor | None]


@dataclass
class PortTensors:
    """Tensors behind a port, and the linear function from them (or their gradients) to the port's layout.

    ``start`` computes the port's value where that needs another function than ``gather``, which is used for gradients.
    """

    tensors: list[Tensor]
    gather: Callable[[Sequence[Tensor]], Tensor] = itemgetter(0)
    start: Callable[[], Tensor] | None = None

    @property
    def value(self) -> Tensor:
        """Value of the port as a tensor of the autograd graph."""
        return self.gather(self.tensors) if self.start is None else self.start()


def boundary_of(run: Recurrence, layer: int, port: Port) -> PortTensors:
    """Return the tensors behind a port (input, output, state) of one stacked layer of a recurrence."""
    if port.kind in ("input", "output"):
        return _sequence_boundary(run, layer, port)
    if port.kind == "state":
        is_fused = run.owner.stacked
        whole = _fused_state_boundary(run, layer, port.index) if is_fused else _state_boundary(run, port.index)
        valid = None if is_fused else run.valid()
        if port.key != "ending":
            return whole
        if valid is None:
            return PortTensors(whole.tensors, lambda parts: whole.gather(parts)[:, -1])
        last = last_steps(valid)
        return PortTensors(whole.tensors, lambda parts: whole.gather(parts)[torch.arange(len(last)), last])
    if port.kind == "state_read":
        return read_boundary(run, layer, port.index)
    if port.kind == "final_state" and not run.owner.stacked:
        return _final_boundary(run, port.index)
    if port.kind in ("initial_state", "final_state"):
        return _layer_state_boundary(run, layer, port)
    raise UnsupportedError(f"Layer {port.layer!r} has no port {port.kind!r}.")


def _sequence_boundary(run: Recurrence, layer: int, port: Port) -> PortTensors:
    """Return the tensors behind the input or output port of a layer, over all calls of the recurrence.

    A port with a direction has the units of that direction only.
    """
    owner, outputs = run.owner, port.kind == "output"
    tensors = [v.pieces[layer].output if outputs else v.pieces[layer].input for v in run.visits]

    def gather(parts: Sequence[Tensor]) -> Tensor:
        if not outputs and not owner.stacked:  # one step: (sample, feature), or (sample, channel, *space)
            parts = [part.flatten(1) for part in parts]
        pairs = zip(parts, run.visits, strict=True)
        whole = sequence(run, [p if p.dim() == 3 or v.packing is not None else p.unsqueeze(0) for p, v in pairs])
        if not outputs or port.direction is None:
            return whole
        return units_of_direction(whole, owner.directions, int(port.direction == "backward"))

    return PortTensors(tensors, gather)


def sequence(run: Recurrence, parts: list[Tensor]) -> Tensor:
    """Join time-first parts of all calls to one tensor (sample, time, ...), zero where a sample has left the batch."""
    packed = [v.packing.padded(p) if v.packing is not None else p for v, p in zip(run.visits, parts, strict=True)]
    for i, part in enumerate(packed):
        missing = packed[0].shape[1] - part.shape[1]
        packed[i] = torch.cat([part, part.new_zeros((part.shape[0], missing, *part.shape[2:]))], 1) if missing else part
    return (packed[0] if len(packed) == 1 else torch.cat(packed)).transpose(0, 1)


def units_of_direction(value: Tensor, directions: int, direction: int) -> Tensor:
    """Return the units of one direction of a tensor (..., direction * unit)."""
    size = value.shape[-1] // directions
    return value[..., direction * size : (direction + 1) * size]


def _layer_state_boundary(run: Recurrence, layer: int, port: Port) -> PortTensors:
    """Return the tensors behind an initial or final state of a fused module, of its first or last call."""
    visit = run.visits[0 if port.kind == "initial_state" else -1]
    state = (visit.link.fed if port.kind == "initial_state" else visit.state_taps)[port.index]
    assert state is not None
    order = visit.packing.order if visit.packing is not None else None
    row = layer * run.owner.directions + int(port.direction == "backward")

    def pick(parts: Sequence[Tensor]) -> Tensor:
        one = parts[0][row] if run.owner.stacked else parts[0].flatten(1)
        return one if order is None else one.index_select(0, order)

    return PortTensors([state], pick)


def _state_boundary(run: Recurrence, index: int) -> PortTensors:
    """Return a cell's state after each step, (sample, time, unit), and where to read its total gradient.

    At a masked step both repeat those of the step before.
    """
    visits, valid = run.visits, run.valid()
    hidden, slopes = list[Tensor](), list[Tensor]()
    if index == 1 and run.owner.step_cell is None:
        first = visits[0].link.raw
        if first[1].grad_fn is None or first[1].grad_fn is first[0].grad_fn:  # a fused kernel: no path from c_t to h_t
            hidden = [v.link.raw[0] for v in visits]
            slopes = [_within_step(v.pieces[0], v.link.raw, v.link.fed[0]) for v in visits]
    raw = [v.link.raw[index] for v in visits]
    fed = [v.link.fed[index] for v in visits[1:]] if valid is not None else []

    def gather(parts: Sequence[Tensor]) -> Tensor:
        count = len(visits)
        steps = [part.flatten(1) for part in parts[:count]]
        held = [*(part.flatten(1) for part in parts[count : count + len(fed)]), None]
        if slopes:  # add the path from c_t to h_t within the step
            by_hidden = parts[count + len(fed) :]
            steps = [c + h * slope for c, h, slope in zip(steps, by_hidden, slopes, strict=True)]
        if valid is not None:
            steps = [_chosen(valid[t], step, held[t]) for t, step in enumerate(steps)]
        return sequence(run, [step.unsqueeze(0) for step in steps])

    return PortTensors([*raw, *fed, *hidden], gather, lambda: torch.stack(carried_states(run, index), dim=1))


def _fused_state_boundary(run: Recurrence, layer: int, index: int) -> PortTensors:
    """Return a state (sample, time, unit) of a library layer that is called step by step, with its total gradient.

    The layer returns h_t twice, as output and as state.
    """
    pieces = [visit.pieces[layer] for visit in run.visits]
    outputs, hidden = [piece.output for piece in pieces], [visit.state_taps[0] for visit in run.visits]
    cells = [visit.state_taps[1] for visit in run.visits] if index else []
    slopes = [_within_step(piece, tuple(s[0] for s in piece.finals), piece.fed[0][0]) for piece in pieces if index]
    projection = pieces[0].weights[0].get("weight_hr") if index else None

    def gather(parts: Sequence[Tensor]) -> Tensor:
        count = len(pieces)
        steps = [y[0] + h[layer] for y, h in zip(parts[:count], parts[count : 2 * count], strict=True)]
        if projection is not None:
            steps = [h @ projection for h in steps]
        if index:  # add the path from c_t to h_t within the step
            steps = [c[layer] + h * slope for c, h, slope in zip(parts[2 * count :], steps, slopes, strict=True)]
        return torch.stack(steps, dim=1)

    def start() -> Tensor:
        steps = [c[layer] for c in cells if c is not None] if index else [y[0] for y in outputs]
        return torch.stack(steps, dim=1)

    return PortTensors([t for t in (*outputs, *hidden, *cells) if t is not None], gather, start)


def _within_step(piece: LayerRecord, states: Sequence[Tensor], before: Tensor) -> Tensor:
    """Compute dh_t/dc_t = o (1 - tanh(c)^2), (sample, unit), of an LSTM's step from h_{t-1} to (h_t, c_t)."""
    hidden, cell = states
    weights = {name: w[3 * cell.shape[1] :].to(hidden.dtype) for name, w in piece.weights[0].items()}
    with torch.no_grad():
        x, before = piece.input.reshape(len(hidden), -1).to(hidden.dtype), before.to(hidden.dtype)
        gate = x @ weights["weight_ih"].T + before @ weights["weight_hh"].T
        if "bias_ih" in weights:
            gate = gate + weights["bias_ih"] + weights["bias_hh"]
        return torch.sigmoid(gate) * (1 - torch.tanh(cell) ** 2)


def _final_boundary(run: Recurrence, index: int) -> PortTensors:
    """Return a cell's state after the last step, (sample, unit), and where to read its direct gradient.

    The first state is the output: its gradient is at the output port, and zero here.
    """
    tap, last = run.visits[-1].state_taps[index], run.visits[-1].link.raw[index]
    return PortTensors(
        [] if tap is None else [tap],
        lambda parts: parts[0][0] if parts else torch.zeros_like(last.flatten(1)),
        lambda: carried_states(run, index)[-1],
    )


def read_boundary(run: Recurrence, layer: int, index: int, *, last: bool = True) -> PortTensors:
    """Return the port of a layer's state where the user's code receives it, (sample, time, unit), zero elsewhere.

    ``last=False`` leaves out the state after the last call.
    """
    visits = run.visits if last else run.visits[:-1]
    taps = [visit.state_taps[index] for visit in visits] + [None] * (len(run.visits) - len(visits))

    def gather(parts: Sequence[Tensor]) -> Tensor:
        arrived, steps = iter(parts), []
        for visit, tap in zip(run.visits, taps, strict=True):
            zero = torch.zeros_like(visit.pieces[layer].finals[index].detach()[:1])
            end = zero if tap is None else next(arrived)[layer : layer + 1]
            steps.append(torch.cat([*[zero] * (visit.steps - 1), end]))
        return sequence(run, steps)

    return PortTensors([tap for tap in taps if tap is not None], gather)


def carried_states(run: Recurrence, index: int) -> list[Tensor]:
    """Return the state after each step, inside the graph. A masked sample keeps its previous state."""
    valid = run.valid()
    if valid is None:
        return [visit.link.raw[index].flatten(1) for visit in run.visits]
    state = run.visits[0].link.fed[index].flatten(1)
    found = []
    for visit, real in zip(run.visits, valid, strict=True):
        new = visit.link.raw[index].flatten(1)
        state = torch.cat([_chosen(real, new, state[: len(new)]), state[len(new) :]])
        found.append(state)
    return found


def _chosen(real: Tensor, new: Tensor, held: Tensor | None) -> Tensor:
    """Return samples of ``new`` where a step is real, else those of ``held``; zeros if ``held`` is None."""
    count = len(new)
    old = torch.zeros_like(new)
    if held is not None:
        old = torch.cat([held, old[len(held) :]])[:count]
    return torch.where(real[:count, None], new, old)


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
        self._holders: dict[int, set[tuple[int, ...]]] = {}
        for run in recorder.runs:
            for weights in (each for piece in run.visits[0].pieces for each in piece.weights):
                for weight in weights.values():
                    self._holders.setdefault(id(weight), set()).add(tuple(map(id, weights.values())))

    def calls(self) -> list[RecurrentCall]:
        """Return one ``RecurrentCall`` per recurrence, stacked layer and direction."""
        runs = self.recorder.runs
        return [
            self._call(run, layer, name, direction)
            for run, names in zip(runs, node_names(runs), strict=True)
            for layer, name in enumerate(names)
            for direction in range(run.owner.directions)
        ]

    def plain(self) -> list[NonRecurrentCall]:
        """Return one ``NonRecurrentCall`` per recorded call of a requested layer that is not recurrent."""
        visits = self.recorder.plain
        found = []
        for visit, number in zip(visits, call_numbers([visit.name for visit in visits]), strict=True):
            output, grad = visit.outputs[0], None
            if self.gradient is not None and output.is_floating_point():
                grad = self._gathered(PortTensors([output]))
            found.append(NonRecurrentCall(visit.name + number, replayable(output), grad))
        return found

    def _call(self, run: Recurrence, layer: int, name: str, direction: int) -> RecurrentCall:
        owner, first = run.owner, run.visits[0]
        side, both, states = ("forward", "backward")[direction], owner.directions > 1, first.pieces[layer].fed
        key, cell = self._cell(run, layer, f"{name}/{side}" if both else name, direction)
        mask = first.packing.mask if first.packing is not None else run.valid()
        mask = None if mask is None or bool(mask.all()) else mask.T.contiguous()
        slots = [slot.split("/") for owner_key, slot in self.recorder.computed if owner_key == owner.key]
        call = RecurrentCall(
            layer=name,
            direction=side,  # type: ignore[arg-type]
            bidirectional=both,
            cell=cell,
            input=_sequence(run, lambda v: v.pieces[layer].seen),
            mask=mask,
            initial_state=tuple(_state(first, state[direction]) for state in states),
            output=_sequence(run, lambda v: units_of_direction(v.pieces[layer].output, owner.directions, direction)),
            final_state=_final_state(run, layer, direction),
            weights_key=key,
            stepwise=not owner.stacked or run.visits[-1].changed,
            between=not owner.stacked or len(run.visits) > 1,
            computed=frozenset(NAMES[slot] for slot, *at in slots if at == [str(layer), str(direction)]),
        )
        if run.visits[-1].changed:  # by the user's code, between the steps
            call.received = tuple(
                _sequence(run, lambda v, i=i: v.pieces[layer].fed[i])  # type: ignore[misc]
                for i in range(len(states))
            )
            call.reset, call.resets_only = _resets(run), not any(visit.mixed for visit in run.visits)
        computed = owner.autocast or first.pieces[layer].output.dtype
        if computed in (torch.bfloat16, torch.float16):
            call.compute_dtype = str(computed).removeprefix("torch.")
        if first.packing is not None and mask is not None:
            call.output_from_state, call.masked_output = mask, "zero"
        elif mask is not None:
            call.output = _carried(call.output, mask, call.initial_state[0])
            call.masked_output = "output" if cell.by_framework else "state"
        if self.gradient is not None:
            self._add_gradients(call, run, layer, direction)
        return call

    def _add_gradients(self, call: RecurrentCall, run: Recurrence, layer: int, direction: int) -> None:
        """Add to a call the gradients at its boundaries and of its weights."""
        assert self.gradient is not None
        first, count = run.visits[0], len(run.visits[0].pieces[layer].fed)

        def at(kind: str, index: int = 0, of: str | None = call.direction) -> Tensor:
            return self._gathered(boundary_of(run, layer, Port(kind, index=index, direction=of)))  # type: ignore[arg-type]

        between = [read_boundary(run, layer, i, last=run.valid() is not None) for i in range(len(first.state_taps))]
        call.output_grad = at("output")
        if run.owner.stacked and between[0].tensors:  # the first state of a layer is the last step of its output
            call.output_grad = call.output_grad + self._gathered(between[0])
        # Where a mask ended samples earlier, the gradients at their states are in ``state_grad``.
        is_masked = run.valid() is not None
        call.final_state_grad = tuple(
            torch.zeros_like(call.initial_state[i]) if is_masked else at("final_state", i) for i in range(count)
        )
        inner = range(1 if run.owner.stacked else 0, len(between))
        state_grads = {i: self._gathered(between[i]) for i in inner if between[i].tensors}
        call.state_grad = {i: grad for i, grad in state_grads.items() if bool((grad != 0).any())} or None
        if self.recorder.weight_grads:
            call.weight_grads = self._weight_grads(run, layer, direction)
        if self.recorder.separate:
            call.framework_input_grad = at("input", of=None) if direction == 0 else None
            is_own = run.owner.step_cell is not None and any(self.gradient(state) is None for state in first.link.fed)
            if not is_own:  # otherwise the cell created its initial states itself
                call.framework_initial_state_grad = tuple(at("initial_state", i) for i in range(count))

    def _gathered(self, boundary: PortTensors) -> Tensor:
        """Return the gradient of the loss at a port in the layout of rnnlens, (sample, time, ...) or (sample, unit)."""
        assert self.gradient is not None
        return replayable(boundary.gather([_or_zeros(self.gradient(t), t) for t in boundary.tensors]))

    def _cell(self, run: Recurrence, layer: int, name: str, direction: int) -> tuple[str, Cell]:
        owner, weights = run.owner, run.visits[0].pieces[layer].weights[direction]
        if owner.module is None and owner.step_cell is not None:
            return owner.name, owner.step_cell
        known = registered(owner.module)
        key = (owner.key,) if known is not None else tuple(map(id, weights.values()))
        if key not in self._cells and known is not None:
            self._cells[key] = owner.name, described(owner.module, known)
        elif key not in self._cells:
            self._cells[key] = name, known_cell(owner.cell, weights, owner.activation)
        return self._cells[key]

    def _weight_grads(self, run: Recurrence, layer: int, direction: int) -> dict[str, Tensor]:
        assert self.gradient is not None
        owner, weights = run.owner, run.visits[0].pieces[layer].weights[direction]
        # A weight shared with another cell gets the sum of both gradients, so it is left out.
        own = {slot: weight for slot, weight in weights.items() if len(self._holders[id(weight)]) == 1}
        grads = {slot: _or_zeros(self.gradient(weight), weight) for slot, weight in own.items()}
        known = registered(owner.module)
        if known is not None:  # computed from several parameters: all gradients are needed
            return arranged(known, grads) if len(grads) == len(list(owner.module.parameters())) else {}
        if owner.step_cell is not None:
            return {name: replayable(grad) for name, grad in grads.items()}
        return named_copies(owner.cell, grads)


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _sequence(run: Recurrence, part: Callable[[CallRecord], Tensor]) -> Tensor:
    return replayable(sequence(run, [part(visit).detach() for visit in run.visits]))


def _state(visit: CallRecord, state: Tensor) -> Tensor:
    """Return a state (sample, unit) as a copy in the caller's order of samples."""
    if visit.packing is not None and visit.packing.order is not None:
        state = state.index_select(0, visit.packing.order)
    return replayable(state)


def _final_state(run: Recurrence, layer: int, direction: int) -> tuple[Tensor, ...]:
    """Return the states (sample, unit) after the last step; of a masked loop those after each sample's last one."""
    finals = run.visits[-1].pieces[layer].finals
    if run.valid() is not None:
        return tuple(replayable(carried_states(run, i)[-1]) for i in range(len(finals)))
    return tuple(_state(run.visits[-1], state[direction]) for state in finals)


def _resets(run: Recurrence) -> Tensor | None:
    """Return where a step's state has no autograd path to the step before, (sample, time) of bool; None if nowhere."""
    rows = [visit.reset for visit in run.visits]
    none = next(torch.zeros_like(one) for one in rows if one is not None)
    found = torch.stack([none if one is None else one for one in rows], 1)
    return found if bool(found.any()) else None


def _carried(output: Tensor, mask: Tensor, start: Tensor) -> Tensor:
    """Return outputs (sample, time, unit) in which masked steps repeat the last valid step.

    Steps before the first valid one get the initial state, or zeros if its size differs.
    """
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, steps, -1).cummax(dim=1).values
    index = last.clamp(min=0)[:, :, None].expand(-1, -1, output.shape[2])
    before = start[:, None, :] if start.shape[1:] == output.shape[2:] else torch.zeros_like(output)
    return torch.where((last >= 0)[:, :, None], output.gather(1, index), before)
