"""Tensors behind a port of a finished forward pass, and their layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...errors import InputError, LayerNotFoundError, UnsupportedError, did_you_mean
from ...recurrence.cells import Cell
from ..protocol import Port
from .assemble import at_last_step, sequence, units_of_direction
from .cells import has_own_forward
from .record import CallRecord, CallRecorder, Packing, Recurrence, last_steps, node_names
from .weights import SLOTS, class_of, from_torch, library_parameter


class PortTable:
    """Table of the tensors behind ports after a forward pass.

    Parameters
    ----------
    recorder
        Records of the finished pass, made with ``separate=True``.
    inputs, outputs
        Leaves of the model's input and of its output.
    plain
        Tensors of layers that are not recurrent: (input leaves, output leaves) per call, by path.
    weights
        Substitutes for the weights of layers that are not recurrent, by path and name.
    modules
        All modules of the model by path.
    """

    def __init__(
        self,
        recorder: CallRecorder,
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        loss: Tensor | None,
        plain: dict[str, list[tuple[list[Tensor], list[Tensor]]]],
        weights: dict[tuple[str, str], Tensor],
        modules: Sequence[tuple[str, nn.Module]],
    ) -> None:
        self.recorder, self.inputs, self.outputs, self.loss = recorder, inputs, outputs, loss
        self.plain, self.weights, self.modules = plain, weights, dict(modules)
        self.nodes: dict[str, tuple[Recurrence, int]] = {}
        for run, names in zip(recorder.runs, node_names(recorder.runs), strict=True):
            self.nodes.update({name: (run, layer) for layer, name in enumerate(names)})

    def find(self, port: Port) -> PortTensors:
        """Return the tensors behind a port.

        Raise LayerNotFoundError if the port's layer was not called, or was called more than once and its name selects
        no call.
        """
        if port.layer is None:
            return self._of_model(port)
        if port.kind == "weight":
            return self._weight(port)
        found = self.nodes.get(port.layer)
        if found is not None:
            return _of_run(*found, port)
        return self._of_plain(port)

    def _of_model(self, port: Port) -> PortTensors:
        if port.kind == "loss":
            if self.loss is None:
                raise InputError("There is no loss to differentiate.", hint="pass loss=callable(output, target)")
            return single(self.loss)
        values: Sequence[Any] = self.inputs if port.kind == "input" else self.outputs
        if port.index >= len(values):
            raise InputError(f"The model has no {port.kind} {port.index}.", expected=f"0 to {len(values) - 1}")
        value = values[port.index]
        if isinstance(value, PackedSequence):
            packing = Packing.of(value.batch_sizes, value.unsorted_indices, value.data.device)
            return PortTensors([value.data], lambda parts: packing.padded(parts[0]).transpose(0, 1))
        return single(value)

    def _of_plain(self, port: Port) -> PortTensors:
        base, _, number = str(port.layer).partition("#")
        calls = self.plain.get(base, [])
        if not calls or (number and int(number) >= len(calls)) or (len(calls) > 1 and not number):
            raise self._not_called(port, base, len(calls))
        takes, returns = calls[int(number or 0)]
        if port.kind not in ("input", "output"):
            raise UnsupportedError(f"Layer {port.layer!r} is not recurrent and has no {port.kind}.")
        side = takes if port.kind == "input" else returns
        if port.index >= len(side):
            raise InputError(f"Layer {port.layer!r} has no {port.kind} tensor number {port.index}.")
        return single(side[port.index])

    def _not_called(self, port: Port, base: str, calls: int) -> LayerNotFoundError:
        several = [name for name in self.nodes if name.partition("#")[0] == base]
        several = several or [f"{base}#{i}" for i in range(calls)]
        if several:
            what, listing = f"Layer {port.layer!r} was called more than once.", ", ".join(map(repr, several))
            return LayerNotFoundError(what, expected=f"one of {listing}")
        what = f"Layer {port.layer!r} was not called in this forward pass."
        return LayerNotFoundError(what, hint=did_you_mean(str(port.layer), [*self.nodes, *self.plain]))

    def _weight(self, port: Port) -> PortTensors:
        slot = SLOTS.get(port.key.rpartition("/")[2])
        if slot is not None and (called := self._weight_of_call(port, slot)) is not None:
            return called
        found = self.weights.get((str(port.layer), port.key))
        if found is None:
            wanted = f"{port.layer}.{port.key}"
            known = [f"{path}.{n}" for path, m in self.modules.items() for n, _ in m.named_parameters(recurse=False)]
            raise LayerNotFoundError("No weight of that name.", got=wanted, hint=did_you_mean(wanted, known))
        cell = class_of(self.modules[str(port.layer).partition("[")[0]])
        if cell is not None and slot is not None:  # a forward that does not call torch's kernel
            return PortTensors([found], partial(_from_torch_summed, cell[0], slot))
        taken = self.recorder.stand_in_for(found)
        if taken is not None:  # a parametrisation that returned the parameter itself, or a weight tied to a kernel's
            return PortTensors([found, taken], lambda parts: parts[0] + parts[1], lambda: found)
        return single(found)

    def _weight_of_call(self, port: Port, slot: str) -> PortTensors | None:
        """Return the weight of a kernel that ran; None if the layer has none such."""
        backward = "backward" in (port.key.rpartition("/")[0], port.direction)
        for node, (run, layer) in self.nodes.items():
            if node.partition("#")[0] == str(port.layer).partition("#")[0] and run.owner.step_cell is None:
                which = int(backward)
                tensor = run.visits[0].pieces[layer].weights[which][slot]
                own = library_parameter(self.modules.get(run.owner.name), layer, port.key)
                in_order = partial(_from_torch_summed, run.owner.cell, slot)
                if own is not None and (run.owner.key, f"{slot}/{layer}/{which}") in self.recorder.computed:
                    return PortTensors([own], in_order)
                owned = self.recorder.behind(tensor)
                parts = [tensor] if owned is None else [tensor, owned]
                return PortTensors(parts, in_order, partial(in_order, [tensor]))
        return None


def _from_torch_summed(cell: type[Cell], slot: str, parts: Sequence[Tensor]) -> Tensor:
    """Sum the gradients of a weight and reorder them to the layout of rnnlens.

    The parts are the gradient through the layer and the one at the user's own parameter, such as of a penalty in the
    loss.
    """
    return from_torch(cell, slot, parts[0] if len(parts) == 1 else parts[0] + parts[1])


def _of_run(run: Recurrence, layer: int, port: Port) -> PortTensors:
    direction = 1 if port.direction == "backward" else 0
    if port.kind in ("input", "output"):
        whole = port.direction is None
        return _of_sequence(run, layer, port.kind, None if whole else direction)
    if port.kind == "state" and port.key == "ending":
        return ending_boundary(run, port.index)
    if port.kind == "state":
        return state_boundary(run, port.index)
    if port.kind == "state_read":
        return read_boundary(run, layer, port.index)
    if port.kind == "final_state" and not run.owner.stacked:
        return final_boundary(run, port.index)
    if port.kind in ("initial_state", "final_state"):
        return _of_state(run, layer, port, direction)
    raise UnsupportedError(f"Layer {port.layer!r} has no port {port.kind!r}.")


def _of_sequence(run: Recurrence, layer: int, kind: str, direction: int | None) -> PortTensors:
    """Return the inputs or outputs of a layer over all calls.

    ``direction`` selects one direction of a bidirectional output; None keeps both.
    """
    owner, outputs = run.owner, kind == "output"
    tensors = [v.pieces[layer].output if outputs else v.pieces[layer].input for v in run.visits]

    def gather(parts: Sequence[Tensor]) -> Tensor:
        if not outputs and not owner.stacked:  # one step: (sample, feature), or (sample, channel, *space)
            parts = [part.flatten(1) for part in parts]
        timed = [
            p if p.dim() == 3 or v.packing is not None else p.unsqueeze(0)
            for p, v in zip(parts, run.visits, strict=True)
        ]
        whole = sequence(run, timed)
        return units_of_direction(whole, owner.directions, direction) if outputs and direction is not None else whole

    return PortTensors(tensors, gather)


def _of_state(run: Recurrence, layer: int, port: Port, direction: int) -> PortTensors:
    """Return an initial state of the first call, or a final state of the last call of a fused module."""
    visit = run.visits[0 if port.kind == "initial_state" else -1]
    states = visit.link.fed if port.kind == "initial_state" else visit.state_taps
    state = states[port.index]
    assert state is not None
    order = visit.packing.order if visit.packing is not None else None

    def pick(parts: Sequence[Tensor]) -> Tensor:
        one = parts[0][layer * run.owner.directions + direction] if run.owner.stacked else parts[0].flatten(1)
        return one if order is None else one.index_select(0, order)

    return PortTensors([state], pick)


def stand_ins(modules: Sequence[tuple[str, nn.Module]], ports: Sequence[Port]) -> dict[tuple[str, str], Tensor]:
    """Return a differentiable tensor for each weight port of a layer that is not recurrent.

    A trainable parameter is returned as it is. A frozen one is replaced by a trainable leaf in every module that has
    it; the caller must restore the parameter.
    """
    table = dict(modules)
    found: dict[tuple[str, str], Tensor] = {}
    for port in ports:
        path, _, number = str(port.layer).partition("#")[0].partition("[")
        module = table.get(path)
        parameter = None if module is None else dict(module.named_parameters(recurse=False)).get(port.key)
        if parameter is None and port.kind == "weight" and isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            own = library_parameter(module, int(number.rstrip("]") or 0), port.key)  # the layer need not run
            parameter = own if own is not None and (own.requires_grad or has_own_forward(module)) else None
        if port.kind != "weight" or parameter is None:
            continue
        if parameter.requires_grad or not parameter.is_floating_point():
            found[str(port.layer), port.key] = parameter
            continue
        leaf = nn.Parameter(parameter.detach())
        found[str(port.layer), port.key] = leaf
        for holder in (m for _, m in modules if not isinstance(m, torch.jit.ScriptModule)):
            for name, held in holder._parameters.items():
                if held is parameter:
                    holder._parameters[name] = leaf
    return found


@dataclass
class PortTensors:
    """Tensors behind a port, and the linear function from them (or their gradients) to the port's layout.

    ``start`` computes the port's value where that needs another function than ``gather``, which is used for gradients.
    """

    tensors: list[Tensor]
    gather: Callable[[Sequence[Tensor]], Tensor]
    start: Callable[[], Tensor] | None = None

    @property
    def value(self) -> Tensor:
        """Value of the port, inside the graph."""
        return self.gather(self.tensors) if self.start is None else self.start()


def single(tensor: Tensor) -> PortTensors:
    """Return the port of one unchanged tensor."""
    return PortTensors([tensor], lambda parts: parts[0])


def state_boundary(run: Recurrence, index: int) -> PortTensors:
    """Return the port of a cell's state after every step, (sample, time, unit), with its total gradient.

    At a masked step a sample has its earlier state, and the gradient that comes back to that state through the next
    step.
    """
    visits, valid = run.visits, run.valid()
    slopes = [_within_step(v) for v in visits] if _is_cut_off_cell_state(run, index) else []
    raw = [v.link.raw[index] for v in visits]
    fed = [v.link.fed[index] for v in visits[1:]] if valid is not None else []
    hidden = [v.link.raw[0] for v in visits] if slopes else []

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

    return PortTensors([*raw, *fed, *hidden], gather, lambda: torch.stack(_carried(run, index), dim=1))


def ending_boundary(run: Recurrence, index: int) -> PortTensors:
    """Return the port of each sample's state at its own last real step, (sample, unit), with its total gradient."""
    whole, valid = state_boundary(run, index), run.valid()
    if valid is None:
        return PortTensors(whole.tensors, lambda parts: whole.gather(parts)[:, -1])
    last = last_steps(valid)
    return PortTensors(whole.tensors, lambda parts: whole.gather(parts)[torch.arange(len(last)), last])


def final_boundary(run: Recurrence, index: int) -> PortTensors:
    """Return the port of a cell's state after the last step, (sample, unit), with its direct gradient.

    The first state is the output: its gradient is at the output port, and zero here.
    """
    tap = run.visits[-1].state_taps[index]
    last = run.visits[-1].link.raw[index].flatten(1)
    return PortTensors(
        [] if tap is None else [tap],
        lambda parts: parts[0][0] if parts else torch.zeros_like(last),
        lambda: _carried(run, index)[-1],
    )


def read_boundary(run: Recurrence, layer: int, index: int) -> PortTensors:
    """Return the port of a layer's state where the user's code receives it, (sample, time, unit), zero elsewhere."""
    taps = [visit.state_taps[index] for visit in run.visits]

    def gather(parts: Sequence[Tensor]) -> Tensor:
        arrived = iter(parts)
        found = [None if tap is None else next(arrived)[layer : layer + 1] for tap in taps]
        return sequence(
            run,
            [
                at_last_step(visit, visit.pieces[layer].finals[index], part)
                for visit, part in zip(run.visits, found, strict=True)
            ],
        )

    return PortTensors([tap for tap in taps if tap is not None], gather)


def _is_cut_off_cell_state(run: Recurrence, index: int) -> bool:
    """Return whether a state is the c_t of a fused kernel, whose graph has no path from c_t to h_t."""
    if run.owner.step_cell is not None or index != 1:
        return False
    hidden, cell = run.visits[0].link.raw
    return cell.grad_fn is None or cell.grad_fn is hidden.grad_fn


def _within_step(visit: CallRecord) -> Tensor:
    """Compute dh_t/dc_t within one step of an LSTM: o (1 - tanh(c)^2), (sample, unit)."""
    piece, (hidden, cell) = visit.pieces[0], visit.link.raw
    weights = {name: w[3 * hidden.shape[1] :].to(hidden.dtype) for name, w in piece.weights[0].items()}
    with torch.no_grad():
        x, before = piece.input.to(hidden.dtype), visit.link.fed[0].to(hidden.dtype)
        gate = x @ weights["weight_ih"].T + before @ weights["weight_hh"].T
        if "bias_ih" in weights:
            gate = gate + weights["bias_ih"] + weights["bias_hh"]
        return torch.sigmoid(gate) * (1 - torch.tanh(cell) ** 2)


def _carried(run: Recurrence, index: int) -> list[Tensor]:
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
    """Return rows of ``new`` where a step was real, else of ``held``, or zero if there is no such row."""
    count = len(new)
    old = torch.zeros_like(new)
    if held is not None:
        old = torch.cat([held, old[len(held) :]])[:count]
    return torch.where(real[:count, None], new, old)
