"""Keeps one forward pass, so that cotangents at any port can be pulled back to any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...autodiff import engine
from ...autodiff.torch import PullMany
from ...errors import InputError, LayerNotFoundError, ModelError, UnsupportedError, did_you_mean, raised_by
from ...layout import Layout
from ...recurrence.cells import Cell
from ...typing import Array
from .. import shared
from ..protocol import Batch, Outputs, Port
from ..shared import Pull
from .assemble import PortTensors, boundary_of
from .capture import recorded_pass, run_until_recorded
from .cells import has_own_forward, replayable
from .chain import ChainRecorder
from .discover import RequestedLayers, named_modules, unwrapped
from .inputs import as_tensors, detached, home_of, leaves_of, on_leaves, tensors_of
from .losses import host_array
from .record import CallRecorder, OutputRecord, Packing, PassRules, Recurrence, RunAgainError, node_names
from .restore import borrowed
from .weights import SLOTS, class_of, from_torch, library_parameter

#: Largest memory, in bytes, of the gradients of one vectorised pull.
BUDGET = 256 * 2**20


class TorchPullback:
    """Graph of one forward pass; implements :class:`rnnlens.adapters.protocol.Pullback`.

    Inputs, states and weights of recurrent layers are separate from the tensors of the user's code, so a gradient at
    such a port comes through that layer alone.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        of: Sequence[Port],
        wrt: Sequence[Port],
        cut: Sequence[Port] = (),
        watch: Sequence[Port] = (),
    ) -> None:
        model = unwrapped(model)
        self.of, self.wrt = tuple(of), tuple(wrt)
        self._watched = (*self.of, *self.wrt, *watch)
        self._pull_many = PullMany()
        #: Numbers that the sweep of a whole-sequence layer holds for one cotangent; 0 without such layers.
        self._in_scans = 0
        self.returned: Any = None
        #: Roles of axes that this pass showed, where the model is a plain chain of library modules.
        self.layouts: Mapping[Port, Layout] = {}
        boundaries = run_until_recorded(partial(self._run, model, batch, cut))
        self.outputs = len(boundaries.outputs)
        self._found = boundaries
        self.keep(boundaries)

    def keep(self, boundaries: PortTable) -> None:
        """Store the tensors behind the requested ports, and their values."""
        self._boundaries: dict[Port, PortTensors] = {port: boundaries.find(port) for port in (*self.of, *self.wrt)}
        with torch.enable_grad():
            self._starts = {port: self._boundaries[port].value for port in self.of}
        self.values: Mapping[Port, Any] = {port: replayable(b.value) for port, b in self._boundaries.items()}

    def _run(self, model: nn.Module, batch: Batch, cut: Sequence[Port], rules: PassRules) -> PortTable:
        """Run one forward pass; raise ``RunAgainError`` if it ran without gradients."""
        modules = named_modules(model)
        asked = replace(RequestedLayers.of(model, None), sequences=frozenset())
        named = {str(p.layer).partition("#")[0] for p in self._watched if p.layer and p.kind != "weight"}
        recurrent = {id(module) for _, module in (*asked.recurrent, *asked.cells)}
        asked.plain = [
            (path, module)
            for path, module in modules
            # TorchScript takes no hooks, so it is reported as not called.
            if path in named and id(module) not in recurrent and not isinstance(module, torch.jit.ScriptModule)
        ]
        # ``rnn`` of the port ``rnn[1]#0``
        paths = {str(port.layer).partition("#")[0].partition("[")[0] for port in cut}
        recorder = CallRecorder(rules, separate=True, cut=paths)
        inputs, chain = on_leaves(as_tensors(batch.x, model, "x"), _source), ChainRecorder(model)
        if not any(port.kind == "loss" for port in (*self.of, *self.wrt)):
            batch = batch.without_loss()
        with borrowed(model, training=batch.training, seed=batch.seed):
            weights = stand_ins(modules, (*self.of, *self.wrt))
            outputs, loss, unseen = recorded_pass(model, batch, inputs, recorder, chain, asked)
        self._in_scans = recorder.scans.sweep_size
        self.returned = detached(outputs)
        leaves = leaves_of(outputs)
        self.layouts = chain.layouts(outputs)
        if unseen and not any(t.requires_grad for t in (*tensors_of(outputs), *([] if loss is None else [loss]))):
            rules.keep_gradients = True
            raise RunAgainError
        return PortTable(recorder, leaves_of(inputs), leaves, loss, weights, modules)

    def vjp(self, cotangents: Mapping[Port, Any]) -> dict[Port, Tensor | None]:
        """Pull cotangents (K, ...) back to every ``wrt`` port; None for a port that no path leads to."""
        if self._starts is None:
            raise ModelError("This pullback was closed.", expected="use inside its with block")
        pairs = [(self._starts[port], torch.as_tensor(c).to(self._starts[port])) for port, c in cotangents.items()]
        pairs = [(start, c) for start, c in pairs if start.requires_grad]
        count = len(torch.as_tensor(next(iter(cotangents.values()))))
        sources = {id(t): t for port in self.wrt for t in self._boundaries[port].tensors if t.requires_grad}
        found: dict[int, Tensor | None] = dict.fromkeys(sources)
        if pairs and sources:
            with raised_by("The backward pass of your model"):
                found = dict(zip(sources, self._pull(pairs, list(sources.values()), count), strict=True))
        return {port: self._gathered(self._boundaries[port], found, count) for port in self.wrt}

    def _pull(self, pairs: Sequence[tuple[Tensor, Tensor]], sources: list[Tensor], count: int) -> list[Tensor | None]:
        size = sum(t.numel() * t.element_size() for t in (*sources, *(start for start, _ in pairs)))
        step = max(1, BUDGET // max(4 * size + 4 * self._in_scans, 1))
        parts: list[Sequence[Tensor | None]] = []
        for first in range(0, count, step):
            starts, some = [s for s, _ in pairs], [c[first : first + step] for _, c in pairs]
            parts.append(self._pull_many(starts, sources, some))
        return [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]

    def _gathered(self, boundary: PortTensors, found: Mapping[int, Tensor | None], count: int) -> Tensor | None:
        grads = [found.get(id(tensor)) for tensor in boundary.tensors]
        if all(grad is None for grad in grads):
            return None
        pairs = zip(boundary.tensors, grads, strict=True)
        whole = [t.new_zeros((count, *t.shape)) if grad is None else grad for t, grad in pairs]
        if count == 1:
            return replayable(boundary.gather([grad[0] for grad in whole])).unsqueeze(0)
        return replayable(torch.vmap(lambda *parts: boundary.gather(parts))(*whole))

    def __enter__(self) -> TorchPullback:
        return self

    def __exit__(self, *exc: object) -> None:
        self._starts = self._boundaries = self._found = None  # type: ignore[assignment]
        self.values, self.returned = {}, None


class PortTable:
    """Table of the tensors behind ports after a forward pass that was recorded with ``separate=True``.

    ``inputs`` and ``outputs`` are leaves of the model's. ``weights``: substitutes for the weights of layers that are
    not recurrent, by path and name.
    """

    def __init__(
        self,
        recorder: CallRecorder,
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        loss: Tensor | None,
        weights: dict[tuple[str, str], Tensor],
        modules: Sequence[tuple[str, nn.Module]],
    ) -> None:
        self.recorder, self.inputs, self.outputs, self.loss = recorder, inputs, outputs, loss
        self.weights, self.modules = weights, dict(modules)
        self.plain: dict[str, list[OutputRecord]] = {}
        for visit in recorder.plain:
            self.plain.setdefault(visit.name, []).append(visit)
        self.nodes: dict[str, tuple[Recurrence, int]] = {}
        for run, names in zip(recorder.runs, node_names(recorder.runs), strict=True):
            self.nodes.update({name: (run, layer) for layer, name in enumerate(names)})

    def find(self, port: Port) -> PortTensors:
        """Return the tensors behind a port; raise ``LayerNotFoundError`` if its name selects no one call of a layer."""
        if port.layer is None:
            return self._of_model(port)
        if port.kind == "weight":
            return self._weight(port)
        found = self.nodes.get(port.layer)
        if found is not None:
            return boundary_of(*found, port)
        return self._of_plain(port)

    def _of_model(self, port: Port) -> PortTensors:
        if port.kind == "loss":
            if self.loss is None:
                raise InputError("There is no loss to differentiate.", hint="pass loss=callable(output, target)")
            return PortTensors([self.loss])
        values: Sequence[Any] = self.inputs if port.kind == "input" else self.outputs
        if port.index >= len(values):
            raise InputError(f"The model has no {port.kind} {port.index}.", expected=f"0 to {len(values) - 1}")
        value = values[port.index]
        if isinstance(value, PackedSequence):
            packing = Packing.of(value.batch_sizes, value.unsorted_indices, value.data.device)
            return PortTensors([value.data], lambda parts: packing.padded(parts[0]).transpose(0, 1))
        return PortTensors([value])

    def _of_plain(self, port: Port) -> PortTensors:
        base, _, number = str(port.layer).partition("#")
        calls = self.plain.get(base, [])
        if not calls or (number and int(number) >= len(calls)) or (len(calls) > 1 and not number):
            raise self._not_called(port, base, len(calls))
        if port.kind not in ("input", "output"):
            raise UnsupportedError(f"Layer {port.layer!r} is not recurrent and has no {port.kind}.")
        call = calls[int(number or 0)]
        side = call.inputs if port.kind == "input" else call.outputs
        if port.index >= len(side):
            raise InputError(f"Layer {port.layer!r} has no {port.kind} tensor number {port.index}.")
        return PortTensors([side[port.index]])

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
        _, taken = self.recorder.substitutes.get(id(found), (found, found))
        if taken is not found:  # a parametrisation that returned the parameter itself, or a weight tied to a kernel's
            return PortTensors([found, taken], lambda parts: parts[0] + parts[1], lambda: found)
        return PortTensors([found])

    def _weight_of_call(self, port: Port, slot: str) -> PortTensors | None:
        """Return the weight tensor that a recurrent kernel ran with; None if the layer has no weight of this name."""
        which = int("backward" in (port.key.rpartition("/")[0], port.direction))
        for node, (run, layer) in self.nodes.items():
            if node.partition("#")[0] == str(port.layer).partition("#")[0] and run.owner.step_cell is None:
                tensor = run.visits[0].pieces[layer].weights[which][slot]
                own = library_parameter(self.modules.get(run.owner.name), layer, port.key)
                in_order = partial(_from_torch_summed, run.owner.cell, slot)
                if own is not None and (run.owner.key, f"{slot}/{layer}/{which}") in self.recorder.computed:
                    return PortTensors([own], in_order)
                users = (w for w, leaf in self.recorder.substitutes.values() if leaf is tensor and w is not leaf)
                owned = next((weight for weight in users if weight.is_leaf and weight.requires_grad), None)
                parts = [tensor] if owned is None else [tensor, owned]
                return PortTensors(parts, in_order, partial(in_order, [tensor]))
        return None


def _from_torch_summed(cell: type[Cell], slot: str, parts: Sequence[Tensor]) -> Tensor:
    """Sum a weight's gradients, through the layer and at the user's own parameter, in the layout of rnnlens."""
    return from_torch(cell, slot, parts[0] if len(parts) == 1 else parts[0] + parts[1])


def stand_ins(modules: Sequence[tuple[str, nn.Module]], ports: Sequence[Port]) -> dict[tuple[str, str], Tensor]:
    """Return, by module and weight name, a differentiable tensor for each weight port of a non-recurrent layer.

    A trainable parameter is returned as it is. A frozen one is replaced by a trainable leaf in every module that
    has it; the caller must restore the parameter.
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


def _source(value: Any) -> Any:
    """Return a leaf that requires a gradient, with the value of a float or complex tensor.

    Any other value is returned unchanged.
    """
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.detach().requires_grad_()
    return value


def differentiate(function: Callable[..., Any], arrays: Sequence[Array], model: torch.nn.Module) -> tuple[Array, Pull]:
    """Return the value of ``function(*tensors)`` on the model's device, and its vector-Jacobian product."""
    device, _ = home_of(model)
    with torch.inference_mode(False):
        tensors = [torch.tensor(np.asarray(a), device=device) for a in arrays]
        expected = "a torch.Tensor, such as output.mean()"
        return shared.differentiate(function, tensors, engine("torch"), expected)


def outputs_of(model: nn.Module, batch: Batch) -> Outputs:
    """Return the output tensors of the model for one batch as arrays."""
    with TorchPullback(model, batch, [], []) as pullback:
        tree = pullback.returned
    leaves = leaves_of(tree)
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise UnsupportedError(
            "The model returns packed sequences, and packed sequences of several batches cannot be concatenated.",
            hint="pad_packed_sequence(..., total_length=x.shape[1]) in the model, or all samples as one batch",
        )
    return Outputs([host_array(leaf) for leaf in leaves], tree)
