"""Converts recorded recurrences and their gradients to calls of the adapter protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...recurrence.cells import Cell, registered
from ..protocol import NonRecurrentCall, RecurrentCall
from .cells import arranged, described, replayable
from .record import CallOwner, CallRecord, CallRecorder, OutputRecord, Recurrence, call_numbers, last_steps, node_names
from .weights import NAMES, from_torch, known_cell

#: Function from a recorded tensor to its gradient; None where no path leads to it.
Gradients = Callable[[Tensor], Tensor | None]


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
            for weights in (half for piece in run.visits[0].pieces for half in piece.weights):
                for weight in weights.values():
                    self._holders.setdefault(id(weight), set()).add(_together(weights))

    def calls(self) -> list[RecurrentCall]:
        """Return one call per recurrence, stacked layer and direction."""
        runs = self.recorder.runs
        found: list[RecurrentCall] = []
        for run, names in zip(runs, node_names(runs), strict=True):
            for layer, name in enumerate(names):
                found.extend(self._call(run, layer, name, direction) for direction in range(run.owner.directions))
        return found

    def plain(self) -> list[NonRecurrentCall]:
        """Return one entry per recorded call of a requested layer that is not recurrent."""
        numbers = call_numbers([visit.name for visit in self.recorder.plain])
        return [self._plain(visit, number) for visit, number in zip(self.recorder.plain, numbers, strict=True)]

    def _plain(self, visit: OutputRecord, number: str) -> NonRecurrentCall:
        grad = None
        if self.gradient is not None and visit.output.is_floating_point():
            grad = _or_zeros(self.gradient(visit.output), visit.output)
        return NonRecurrentCall(
            visit.name + number, replayable(visit.output), None if grad is None else replayable(grad)
        )

    def _call(self, run: Recurrence, layer: int, name: str, direction: int) -> RecurrentCall:
        owner, first = run.owner, run.visits[0]
        side = ("forward", "backward")[direction]
        key, cell = self._cell(run, layer, f"{name}/{side}" if owner.directions > 1 else name, direction)
        mask = _mask(run)
        call = RecurrentCall(
            layer=name,
            direction=side,  # type: ignore[arg-type]
            bidirectional=owner.directions > 1,
            cell=cell,
            input=_sequence(run, lambda v: v.pieces[layer].seen),
            mask=mask,
            initial_state=tuple(_state(first, state[direction]) for state in first.pieces[layer].fed),
            output=_sequence(run, lambda v: units_of_direction(v.pieces[layer].output, owner.directions, direction)),
            final_state=self._final_state(run, layer, direction),
            weights_key=key,
            stepwise=not owner.stacked,
            between=not owner.stacked or len(run.visits) > 1,
            computed=self._computed(owner, layer, direction),
        )
        if run.visits[-1].changed:  # by the user's code, between the steps
            count = len(call.initial_state)
            call.received = tuple(
                _sequence(run, lambda v, i=i: v.pieces[layer].fed[i])  # type: ignore[misc]
                for i in range(count)
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
            call.output_grad = self._output_grad(run, layer, direction)
            call.final_state_grad = self._final_state_grad(run, layer, direction)
            call.state_grad = self._state_grad(run, layer)
            if self.recorder.weight_grads:
                call.weight_grads = self._weight_grads(run, layer, direction)
            if self.recorder.separate:
                call.framework_input_grad = self._framework_input_grad(run, layer) if direction == 0 else None
                call.framework_initial_state_grad = self._framework_initial_grad(run, layer, direction)
        return call

    def _computed(self, owner: CallOwner, layer: int, direction: int) -> frozenset[str]:
        """Return the names of the weights that the model computed from its parameters."""
        slots = (slot.split("/") for key, slot in self.recorder.computed if key == owner.key)
        return frozenset(NAMES[name] for name, *at in slots if at == [str(layer), str(direction)])

    def _framework_input_grad(self, run: Recurrence, layer: int) -> Tensor:
        """Return torch's own gradient at the inputs of a layer, (sample, time, feature)."""
        assert self.gradient is not None
        grads = {id(v): _or_zeros(self.gradient(v.pieces[layer].input), v.pieces[layer].input) for v in run.visits}
        if not run.owner.stacked:  # one step: (sample, feature), or (sample, channel, *space)
            grads = {key: grad.flatten(1) for key, grad in grads.items()}
        timed = {
            key: grad.unsqueeze(0) if grad.dim() == 2 and run.visits[0].packing is None else grad
            for key, grad in grads.items()
        }
        return _sequence(run, lambda v: timed[id(v)])

    def _framework_initial_grad(self, run: Recurrence, layer: int, direction: int) -> tuple[Tensor, ...] | None:
        """Return torch's own gradients at the initial states; None if a cell created these states itself."""
        assert self.gradient is not None
        first, owner = run.visits[0], run.owner
        index, found = layer * owner.directions + direction, []
        if owner.step_cell is not None and any(self.gradient(state) is None for state in first.link.fed):
            return None
        for state in first.link.fed:
            grad = _or_zeros(self.gradient(state), state)
            found.append(_state(first, grad[index] if owner.stacked else grad.flatten(1)))
        return tuple(found)

    def _cell(self, run: Recurrence, layer: int, name: str, direction: int) -> tuple[str, Cell]:
        owner, piece = run.owner, run.visits[0].pieces[layer]
        if owner.module is not None:
            return owner.name, self._registered(owner)
        if owner.step_cell is not None:
            return owner.name, owner.step_cell
        weights = piece.weights[direction]
        known = self._cells.get(_together(weights))
        if known is None:
            known = (name, known_cell(owner.cell, weights, owner.activation))
            self._cells[_together(weights)] = known
        return known

    def _registered(self, owner: CallOwner) -> Cell:
        known = registered(owner.module)
        assert known is not None
        assert owner.module is not None
        if (owner.key,) not in self._cells:
            self._cells[(owner.key,)] = owner.name, described(owner.module, known)
        return self._cells[(owner.key,)][1]

    def _output_grad(self, run: Recurrence, layer: int, direction: int) -> Tensor:
        owner = run.owner
        assert self.gradient is not None
        grads: dict[int, Tensor] = {}
        for visit in run.visits:
            output = visit.pieces[layer].output
            grad = _or_zeros(self.gradient(output), output)
            tap = visit.state_taps[0]
            passed_on = visit is not run.visits[-1] and owner.stacked and tap is not None
            arrived = self.gradient(tap) if passed_on and tap is not None else None
            if arrived is not None:
                grad = torch.cat([grad[:-1], grad[-1:] + arrived[layer : layer + 1]])
            grads[id(visit)] = grad
        return _sequence(run, lambda v: units_of_direction(grads[id(v)], owner.directions, direction))

    def _final_state(self, run: Recurrence, layer: int, direction: int) -> tuple[Tensor, ...]:
        valid = run.valid()
        if valid is None:
            visit = run.visits[-1]
            return tuple(_state(visit, state[direction]) for state in visit.pieces[layer].finals)
        last = last_steps(valid)
        count = len(run.visits[0].pieces[layer].finals)
        start = run.visits[0].pieces[layer].fed
        finals = []
        for i in range(count):
            values = start[i][direction].detach().clone()
            for step, visit in enumerate(run.visits):
                rows = (valid[step] & (last == step)).nonzero().squeeze(1)
                values[rows] = visit.pieces[layer].finals[i].detach()[direction, rows]
            finals.append(replayable(values))
        return tuple(finals)

    def _final_state_grad(self, run: Recurrence, layer: int, direction: int) -> tuple[Tensor, ...]:
        """Return the direct gradients at the states after the last call, (sample, unit).

        They are zero where samples of a masked loop ended earlier: those gradients are in ``_state_grad``.
        """
        owner, visit = run.owner, run.visits[-1]
        result = []
        for i, state in enumerate(run.visits[0].pieces[layer].fed):
            tap = visit.state_taps[i] if run.valid() is None else None
            pulled = None if tap is None else self._pulled(tap)
            if pulled is None:
                result.append(replayable(torch.zeros_like(state[direction])))
            else:
                result.append(_state(visit, pulled[layer * owner.directions + direction]))
        return tuple(result)

    def _state_grad(self, run: Recurrence, layer: int) -> dict[int, Tensor] | None:
        """Return direct gradients at states between the calls, by state index.

        Each is (sample, time, unit). The result is None if all are zero.

        The first state of a stacked layer is its output; its gradient is in ``output_grad``.
        """
        found: dict[int, Tensor] = {}
        last = run.visits[-1] if run.valid() is None else None
        for i in range(1 if run.owner.stacked else 0, len(run.visits[0].state_taps)):
            at: dict[int, Tensor] = {}
            for visit in run.visits:
                tap = visit.state_taps[i]
                pulled = None if tap is None or visit is last else self._pulled(tap)
                if pulled is not None and bool((pulled != 0).any()):
                    at[id(visit)] = pulled[layer : layer + 1]
            if at:
                parts = [at_last_step(v, v.pieces[layer].finals[i], at.get(id(v))) for v in run.visits]
                found[i] = replayable(sequence(run, parts))
        return found or None

    def _pulled(self, tap: Tensor) -> Tensor | None:
        return None if self.gradient is None else self.gradient(tap)

    def _weight_grads(self, run: Recurrence, layer: int, direction: int) -> dict[str, Tensor]:
        assert self.gradient is not None
        owner, weights = run.owner, run.visits[0].pieces[layer].weights[direction]
        # A weight shared with another cell gets the sum of both gradients, so it is left out.
        own = {slot: weight for slot, weight in weights.items() if len(self._holders[id(weight)]) == 1}
        grads = {slot: _or_zeros(self.gradient(weight), weight) for slot, weight in own.items()}
        known = registered(owner.module)
        if known is not None:  # computed from several parameters: all gradients are needed
            whole = owner.module is not None and len(grads) == len(list(owner.module.parameters()))
            return arranged(known, grads) if whole else {}
        if owner.step_cell is not None:
            return {name: replayable(grad) for name, grad in grads.items()}
        return {NAMES[slot]: replayable(from_torch(owner.cell, slot, grad)) for slot, grad in grads.items()}


def _together(weights: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return a key of the weights of one cell, made of the identities of their tensors."""
    return tuple(id(weight) for weight in weights.values())


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def at_last_step(visit: CallRecord, final: Tensor, grad: Tensor | None) -> Tensor:
    """Return a gradient (time, sample, unit) at a state of one call: zero at all steps but the last."""
    last = torch.zeros_like(final.detach()[:1]) if grad is None else grad
    return torch.cat([torch.zeros_like(last)] * (visit.steps - 1) + [last])


def units_of_direction(value: Tensor, directions: int, direction: int) -> Tensor:
    """Return the units of one direction of a tensor (..., direction * unit)."""
    size = value.shape[-1] // directions
    return value[..., direction * size : (direction + 1) * size]


def _sequence(run: Recurrence, part: Callable[[CallRecord], Tensor]) -> Tensor:
    return replayable(sequence(run, [part(visit).detach() for visit in run.visits]))


def sequence(run: Recurrence, parts: list[Tensor]) -> Tensor:
    """Join time-first parts of all calls to one tensor (sample, time, ...).

    Samples that have left the batch get zeros.
    """
    packed = [v.packing.padded(p) if v.packing is not None else p for v, p in zip(run.visits, parts, strict=True)]
    samples = packed[0].shape[1]
    filled = [p if p.shape[1] == samples else _filled(p, samples) for p in packed]
    return (filled[0] if len(filled) == 1 else torch.cat(filled)).transpose(0, 1)


def _filled(part: Tensor, samples: int) -> Tensor:
    rest = part.new_zeros((part.shape[0], samples - part.shape[1], *part.shape[2:]))
    return torch.cat([part, rest], dim=1)


def _state(visit: CallRecord, state: Tensor) -> Tensor:
    """Return a state (sample, unit) as a copy in the caller's order of samples."""
    if visit.packing is not None and visit.packing.order is not None:
        state = state.index_select(0, visit.packing.order)
    return replayable(state)


def _mask(run: Recurrence) -> Tensor | None:
    packing = run.visits[0].packing
    mask = packing.mask if packing is not None else run.valid()
    return None if mask is None or bool(mask.all()) else mask.T.contiguous()


def _resets(run: Recurrence) -> Tensor | None:
    """Return where a step started from a state without a path to the step before, (sample, time); None if nowhere."""
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
    held = output.gather(1, index)
    if start.shape[1:] != output.shape[2:]:
        return torch.where((last >= 0)[:, :, None], held, torch.zeros_like(held))
    return torch.where((last >= 0)[:, :, None], held, start[:, None, :])
