"""Ports as torch sees them: which tensors of a finished forward pass a port stands for, and how they lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...errors import InputError, LayerNotFoundError, UnsupportedError, did_you_mean, message
from ...recurrence.cells import Cell
from ..protocol import Port
from .assemble import half, node_names, sequence
from .boundary import Boundary, single
from .record import Packing, Recorder, Run
from .state_boundaries import ending_boundary, final_boundary, read_boundary, state_boundary
from .weights import NAMES, class_of, has_own_forward, library_parameter, ours


class Boundaries:
    """Finds the tensors of ports after a forward pass.

    Parameters
    ----------
    recorder
        The finished pass, with inputs and states kept apart per layer.
    inputs, outputs
        Leaves of what the model was called with, and of what it returned.
    plain
        What layers that are not recurrent took and returned: (input leaves, output leaves) per call, by path.
    weights
        Stand-ins for the weights of other layers, by path and name.
    modules
        All modules of the model by path.
    """

    def __init__(
        self,
        recorder: Recorder,
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        loss: Tensor | None,
        plain: dict[str, list[tuple[list[Tensor], list[Tensor]]]],
        weights: dict[tuple[str, str], Tensor],
        modules: Sequence[tuple[str, nn.Module]],
    ) -> None:
        self.recorder, self.inputs, self.outputs, self.loss = recorder, inputs, outputs, loss
        self.plain, self.weights, self.modules = plain, weights, dict(modules)
        self.nodes: dict[str, tuple[Run, int]] = {}
        for run, names in zip(recorder.runs, node_names(recorder.runs), strict=True):
            self.nodes.update({name: (run, layer) for layer, name in enumerate(names)})

    def find(self, port: Port) -> Boundary:
        """The boundary of a port.

        Raises
        ------
        LayerNotFoundError
            If its layer was not called, or more than once and the name does not say which call.
        """
        if port.layer is None:
            return self._of_model(port)
        if port.kind == "weight":
            return self._weight(port)
        found = self.nodes.get(port.layer)
        if found is not None:
            return _of_run(*found, port)
        return self._of_plain(port)

    def _of_model(self, port: Port) -> Boundary:
        if port.kind == "loss":
            if self.loss is None:
                raise InputError(
                    message("There is no loss to differentiate.", hint="pass loss=callable(output, target)")
                )
            return single(self.loss)
        values: Sequence[Any] = self.inputs if port.kind == "input" else self.outputs
        if port.index >= len(values):
            raise InputError(message(f"The model has no {port.kind} {port.index}.", expected=f"0 to {len(values) - 1}"))
        value = values[port.index]
        if isinstance(value, PackedSequence):
            packing = Packing.of(value.batch_sizes, value.unsorted_indices, value.data.device)
            return Boundary([value.data], lambda parts: packing.padded(parts[0]).transpose(0, 1))
        return single(value)

    def _of_plain(self, port: Port) -> Boundary:
        base, _, number = str(port.layer).partition("#")
        calls = self.plain.get(base, [])
        if not calls or (number and int(number) >= len(calls)) or (len(calls) > 1 and not number):
            raise self._not_called(port, base, len(calls))
        takes, returns = calls[int(number or 0)]
        if port.kind not in ("input", "output"):
            raise UnsupportedError(message(f"Layer {port.layer!r} is not recurrent and has no {port.kind}."))
        side = takes if port.kind == "input" else returns
        if port.index >= len(side):
            raise InputError(message(f"Layer {port.layer!r} has no {port.kind} tensor number {port.index}."))
        return single(side[port.index])

    def _not_called(self, port: Port, base: str, calls: int) -> LayerNotFoundError:
        several = [name for name in self.nodes if name.partition("#")[0] == base]
        several = several or [f"{base}#{i}" for i in range(calls)]
        if several:
            what, listing = f"Layer {port.layer!r} was called more than once.", ", ".join(map(repr, several))
            return LayerNotFoundError(message(what, expected=f"one of {listing}"))
        what = f"Layer {port.layer!r} was not called in this forward pass."
        return LayerNotFoundError(message(what, hint=did_you_mean(str(port.layer), [*self.nodes, *self.plain])))

    def _weight(self, port: Port) -> Boundary:
        direction, _, name = port.key.rpartition("/")
        for node, (run, layer) in self.nodes.items():
            if node.partition("#")[0] == str(port.layer).partition("#")[0] and run.owner.step_cell is None:
                which = 1 if "backward" in (direction, port.direction) else 0
                slot = {theirs: mine for mine, theirs in NAMES.items()}[name]
                tensor = run.visits[0].pieces[layer].weights[which][slot]
                own = library_parameter(self.modules.get(run.owner.name), layer, port.key)
                if own is not None and (run.owner.key, f"{slot}/{layer}/{which}") in self.recorder.computed:
                    return Boundary([own], partial(_in_our_order, run.owner.cell, slot))
                owned = self.recorder.behind(tensor)
                parts = [tensor] if owned is None else [tensor, owned]
                in_order = partial(_in_our_order, run.owner.cell, slot)
                return Boundary(parts, in_order, partial(in_order, [tensor]))
        found = self.weights.get((str(port.layer), port.key))
        if found is None:
            wanted = f"{port.layer}.{port.key}"
            known = [f"{path}.{n}" for path, m in self.modules.items() for n, _ in m.named_parameters(recurse=False)]
            raise LayerNotFoundError(message("No weight of that name.", got=wanted, hint=did_you_mean(wanted, known)))
        cell = class_of(self.modules[str(port.layer).partition("[")[0]])
        if cell is not None:  # its own forward does not call torch's kernel
            slot = {theirs: mine for mine, theirs in NAMES.items()}[name]
            return Boundary([found], partial(_in_our_order, cell[0], slot))
        return single(found)


def _in_our_order(cell: type[Cell], slot: str, parts: Sequence[Tensor]) -> Tensor:
    """What arrived through the layer, and at the user's own parameter on other ways, such as a penalty in the loss."""
    return ours(cell, slot, parts[0] if len(parts) == 1 else parts[0] + parts[1])


def _of_run(run: Run, layer: int, port: Port) -> Boundary:
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
    raise UnsupportedError(message(f"Layer {port.layer!r} has no port {port.kind!r}."))


def _of_sequence(run: Run, layer: int, kind: str, direction: int | None) -> Boundary:
    """What a layer was fed or returned; ``direction``: one half of what a bidirectional one returned."""
    owner, outputs = run.owner, kind == "output"
    tensors = [v.pieces[layer].output if outputs else v.pieces[layer].input for v in run.visits]

    def gather(parts: Sequence[Tensor]) -> Tensor:
        timed = [
            p if p.dim() == 3 or v.packing is not None else p.unsqueeze(0)
            for p, v in zip(parts, run.visits, strict=True)
        ]
        whole = sequence(run, timed)
        return half(whole, owner.directions, direction) if outputs and direction is not None else whole

    return Boundary(tensors, gather)


def _of_state(run: Run, layer: int, port: Port, direction: int) -> Boundary:
    """A state that the first call started from, or one that the last call of a fused module returned."""
    visit = run.visits[0 if port.kind == "initial_state" else -1]
    states = visit.link.fed if port.kind == "initial_state" else visit.state_taps
    state = states[port.index]
    assert state is not None
    order = visit.packing.order if visit.packing is not None else None

    def pick(parts: Sequence[Tensor]) -> Tensor:
        one = parts[0][layer * run.owner.directions + direction] if run.owner.stacked else parts[0].flatten(1)
        return one if order is None else one.index_select(0, order)

    return Boundary([state], pick)


def leaves_of(value: Any) -> list[Any]:
    """Tensors and packed sequences within nested tuples, lists and dicts, in order."""
    if isinstance(value, (Tensor, PackedSequence)):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves_of(item)]
    return []


def stand_ins(modules: Sequence[tuple[str, nn.Module]], ports: Sequence[Port]) -> dict[tuple[str, str], Tensor]:
    """A tensor to differentiate with respect to, for each weight port of a layer that is not recurrent.

    A trainable parameter stands for itself. In place of a frozen one a leaf is put into every module that holds it; the
    caller puts the parameter back.
    """
    table = dict(modules)
    found: dict[tuple[str, str], Tensor] = {}
    for port in ports:
        path, _, number = str(port.layer).partition("#")[0].partition("[")
        module = table.get(path)
        parameter = None if module is None else dict(module.named_parameters(recurse=False)).get(port.key)
        if module is not None and has_own_forward(module):
            parameter = (
                parameter
                if parameter is not None
                else library_parameter(module, int(number.rstrip("]") or 0), port.key)
            )
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


def zeros_for(tensors: Sequence[Tensor], grads: Sequence[Tensor | None], count: int) -> list[Tensor]:
    """Gradients with a leading axis ``count``, zero where there is none."""
    return [
        torch.zeros((count, *t.shape), dtype=t.dtype, device=t.device) if g is None else g
        for t, g in zip(tensors, grads, strict=True)
    ]
