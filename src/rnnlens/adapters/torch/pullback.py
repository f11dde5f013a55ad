"""Keeps one forward pass, so that cotangents at any port can be pulled back to any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
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
from ...recurrence.sequence import SequenceCell
from ...typing import Array
from .. import shared
from ..protocol import Batch, Port, Run
from ..shared import Pull
from .assemble import PortTensors, boundary_of
from .capture import recorded_call
from .cells import has_own_forward
from .chain import ChainRecorder
from .discover import RequestedLayers, named_modules, unwrap
from .forward_pass import forward_pass, run_until_recorded
from .inputs import device_and_dtype, leaves_of, replay_copy, returned_leaves, tensors_of
from .layer_calls import layer_calls
from .record import (
    CallRecorder,
    Packing,
    PassRules,
    Recurrence,
    RunAgainError,
    call_numbers,
    node_names,
    refuse_cells_without_state,
)
from .restore import borrowed_model
from .scans import ScanRecorder
from .weights import SLOTS, class_of, from_torch, library_parameter

#: Kinds of ports within a whole-sequence layer: the input of its scan, and the readout.
SCAN_PORTS = ("scan_input", "scan_output")
#: Largest memory, in bytes, of the gradients of one vectorised pull.
BUDGET = 256 * 2**20


class TorchPullback(Run):
    """Graph of one forward pass, in which cotangents are pulled from port to port.

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
        self._model = model = unwrap(model)
        self.of, self.wrt = tuple(of), tuple(wrt)
        self._watched_ports = (*self.of, *self.wrt, *watch)
        self._pull_many = PullMany()
        #: Numbers that the sweep of a whole-sequence layer holds for one cotangent; 0 without such layers.
        self._scan_sweep_size = 0
        #: Roles of axes that this pass showed, where the model is a plain chain of library modules.
        self.layouts: Mapping[Port, Layout] = {}
        port_table = run_until_recorded(partial(self._run, model, batch, cut))
        self.output_count = len(port_table.outputs)
        self._port_table = port_table
        self.store_ports(port_table)

    def store_ports(self, port_table: PortTable) -> None:
        """Store the tensors behind the requested ports, and their values."""
        self._port_tensors: dict[Port, PortTensors] = {port: port_table.find(port) for port in (*self.of, *self.wrt)}
        with torch.enable_grad():
            self._starts = {port: self._port_tensors[port].value for port in self.of}
        self.values: Mapping[Port, Any] = {
            port: replay_copy(tensors.value) for port, tensors in self._port_tensors.items()
        }

    def _run(self, model: nn.Module, batch: Batch, cut: Sequence[Port], rules: PassRules) -> PortTable:
        """Run one forward pass; raise ``RunAgainError`` if it ran without gradients."""
        modules = named_modules(model)
        scan_paths = frozenset(str(p.layer).partition("#")[0] for p in self._watched_ports if p.kind in SCAN_PORTS)
        requested = replace(RequestedLayers.of(model, None), sequences=scan_paths)
        requested_paths = {
            str(p.layer).partition("#")[0]
            for p in self._watched_ports
            if p.layer and p.kind not in ("weight", *SCAN_PORTS)
        }
        requested.cells = [(path, module) for path, module in requested.cells if path not in rules.no_cells]
        recurrent_ids = {id(module) for _, module in (*requested.recurrent, *requested.cells)}
        requested.other_layers = [
            (path, module)
            for path, module in modules
            # TorchScript takes no hooks, so it is reported as not called.
            if path in requested_paths
            and id(module) not in recurrent_ids
            and not isinstance(module, torch.jit.ScriptModule)
        ]
        # ``rnn`` of the port ``rnn[1]#0``
        cut_paths = {str(port.layer).partition("#")[0].partition("[")[0] for port in cut}
        recorder = CallRecorder(rules, separate=True, cut=cut_paths, applies_hooks=True)
        chain = ChainRecorder(model)
        if not any(port.kind == "loss" for port in (*self.of, *self.wrt)):
            batch = batch.without_loss()
        # Without a weight that is trained, a scan of embedded ids would have no graph.
        with forward_pass(model, batch, by_inputs=True, by_frozen=bool(scan_paths)) as borrowed:
            self._run_state = borrowed.state
            substitutes = weight_substitutes(modules, (*self.of, *self.wrt))
            outputs, loss, ran_without_gradients = recorded_call(borrowed, recorder, chain, requested)
        requested_cells = {path for path, _ in requested.cells if path in requested_paths}
        # What has only the arguments of a cell, as ``add_norm(x, skip)``, was cut although no state goes through it.
        if cells := requested_cells | recorder.cut_owners:
            refuse_cells_without_state(recorder, cells)
        self._scan_sweep_size = recorder.scans.sweep_size
        output_leaves = returned_leaves(outputs)
        self.layouts = chain.layouts(outputs)
        if ran_without_gradients and not any(
            t.requires_grad for t in (*tensors_of(outputs), *([] if loss is None else [loss]))
        ):
            rules.ignore_no_grad = True
            raise RunAgainError
        return PortTable(recorder, leaves_of(borrowed.x), output_leaves, loss, substitutes, modules)

    def pull(self, cotangents: Mapping[Port, Any]) -> dict[Port, Tensor | None]:
        """Pull cotangents (K, ...) back to every ``wrt`` port; None for a port that no path leads to."""
        if self._starts is None:
            raise ModelError("This pullback was closed.", expected="use inside its with block")
        start_pairs = [
            (self._starts[port], torch.as_tensor(cotangent).to(self._starts[port]))
            for port, cotangent in cotangents.items()
        ]
        start_pairs = [(start, cotangent) for start, cotangent in start_pairs if start.requires_grad]
        cotangent_count = len(torch.as_tensor(next(iter(cotangents.values()))))
        sources = {id(t): t for port in self.wrt for t in self._port_tensors[port].tensors if t.requires_grad}
        grads: dict[int, Tensor | None] = dict.fromkeys(sources)
        if start_pairs and sources:
            with (
                borrowed_model(self._model),  # hooks and backward passes of the user's run here
                self._run_state.written_values() if self._run_state.has_written else nullcontext(),
                raised_by("The backward pass of your model"),
            ):
                grads = dict(
                    zip(sources, self._pull(start_pairs, list(sources.values()), cotangent_count), strict=True)
                )
        return {port: self._port_gradient(self._port_tensors[port], grads, cotangent_count) for port in self.wrt}

    def _pull(
        self, start_cotangents: Sequence[tuple[Tensor, Tensor]], sources: list[Tensor], cotangent_count: int
    ) -> list[Tensor | None]:
        size = sum(t.numel() * t.element_size() for t in (*sources, *(start for start, _ in start_cotangents)))
        chunk_size = max(1, BUDGET // max(4 * size + 4 * self._scan_sweep_size, 1))
        chunk_grads: list[Sequence[Tensor | None]] = []
        for offset in range(0, cotangent_count, chunk_size):
            starts = [s for s, _ in start_cotangents]
            chunk = [c[offset : offset + chunk_size] for _, c in start_cotangents]
            chunk_grads.append(self._pull_many(starts, sources, chunk))
        return [None if chunks[0] is None else torch.cat(chunks) for chunks in zip(*chunk_grads, strict=True)]

    def _port_gradient(
        self, port_tensors: PortTensors, grads_by_id: Mapping[int, Tensor | None], cotangent_count: int
    ) -> Tensor | None:
        grads = [grads_by_id.get(id(tensor)) for tensor in port_tensors.tensors]
        if all(grad is None for grad in grads):
            return None
        pairs = zip(port_tensors.tensors, grads, strict=True)
        full_grads = [t.new_zeros((cotangent_count, *t.shape)) if grad is None else grad for t, grad in pairs]
        if cotangent_count == 1:
            return replay_copy(port_tensors.gather([grad[0] for grad in full_grads])).unsqueeze(0)
        return replay_copy(torch.vmap(lambda *parts: port_tensors.gather(parts))(*full_grads))

    def __enter__(self) -> TorchPullback:
        return self

    def __exit__(self, *exc: object) -> None:
        self._starts = self._port_tensors = self._port_table = None  # type: ignore[assignment]
        self.values = {}


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
        self.layer_calls = {call.name: call for call in layer_calls(recorder)}
        self.nodes: dict[str, tuple[Recurrence, int]] = {}
        for recurrence, names in zip(recorder.recurrences, node_names(recorder.recurrences), strict=True):
            self.nodes.update({name: (recurrence, layer) for layer, name in enumerate(names)})

    def find(self, port: Port) -> PortTensors:
        """Return the tensors behind a port; raise ``LayerNotFoundError`` if its name selects no one call of a layer."""
        if port.layer is None:
            return self._model_port(port)
        if port.kind == "weight":
            return self._weight_port(port)
        if port.kind in SCAN_PORTS:
            return scan_boundary(self.recorder.scans, port)
        recurrence_and_layer = self.nodes.get(port.layer)
        if recurrence_and_layer is not None:
            return boundary_of(*recurrence_and_layer, port)
        return self._non_recurrent_port(port)

    def _model_port(self, port: Port) -> PortTensors:
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

    def _non_recurrent_port(self, port: Port) -> PortTensors:
        path, _, number = str(port.layer).partition("#")
        call = self.layer_calls.get(str(port.layer))
        if call is None and number.isdecimal() and (joined := self.layer_calls.get(path)) is not None:
            call = joined.at_step(int(number))
        if call is None:
            raise self._call_error(port, path)
        if port.kind not in ("input", "output"):
            raise UnsupportedError(f"Layer {port.layer!r} is not recurrent and has no {port.kind}.")
        tensors_and_join = call.input(port.index) if port.kind == "input" else call.output(port.index)
        if tensors_and_join is None:
            raise InputError(f"Layer {port.layer!r} has no {port.kind} tensor number {port.index}.")
        return PortTensors(*tensors_and_join)

    def _call_error(self, port: Port, path: str) -> LayerNotFoundError:
        call_names = [name for name in (*self.nodes, *self.layer_calls) if name.partition("#")[0] == path]
        if call_names:
            message, listing = f"Layer {port.layer!r} was called more than once.", ", ".join(map(repr, call_names))
            return LayerNotFoundError(message, expected=f"one of {listing}")
        message = f"Layer {port.layer!r} was not called in this forward pass."
        return LayerNotFoundError(message, hint=did_you_mean(str(port.layer), [*self.nodes, *self.layer_calls]))

    def _weight_port(self, port: Port) -> PortTensors:
        slot = SLOTS.get(port.key.rpartition("/")[2])
        if slot is not None and (kernel_weight := self._kernel_weight_port(port, slot)) is not None:
            return kernel_weight
        weight = self.weights.get((str(port.layer), port.key))
        if weight is None:
            weight_name = f"{port.layer}.{port.key}"
            known_names = [
                f"{path}.{n}" for path, m in self.modules.items() for n, _ in m.named_parameters(recurse=False)
            ]
            raise LayerNotFoundError(
                "No weight of that name.", got=weight_name, hint=did_you_mean(weight_name, known_names)
            )
        cell_and_activation = class_of(self.modules[str(port.layer).partition("[")[0]])
        if cell_and_activation is not None and slot is not None:  # a forward that does not call torch's kernel
            return PortTensors([weight], partial(_summed_in_layout, cell_and_activation[0], slot))
        _, substitute = self.recorder.substitutes.get(id(weight), (weight, weight))
        # A parametrisation that returned the parameter itself, or a weight tied to a kernel's.
        if substitute is not weight:
            return PortTensors([weight, substitute], lambda parts: parts[0] + parts[1], lambda: weight)
        return PortTensors([weight])

    def _kernel_weight_port(self, port: Port, slot: str) -> PortTensors | None:
        """Return the weight tensor that a recurrent kernel ran with; None if the layer has no weight of this name."""
        direction = int("backward" in (port.key.rpartition("/")[0], port.direction))
        for node, (recurrence, layer) in self.nodes.items():
            if node.partition("#")[0] == str(port.layer).partition("#")[0] and recurrence.owner.step_cell is None:
                tensor = recurrence.calls[0].layer_records[layer].weights[direction][slot]
                parameter = library_parameter(self.modules.get(recurrence.owner.name), layer, port.key)
                to_layout = partial(_summed_in_layout, recurrence.owner.cell, slot)
                if (
                    parameter is not None
                    and (recurrence.owner.key, f"{slot}/{layer}/{direction}") in self.recorder.computed_weights
                ):
                    return PortTensors([parameter], to_layout)
                user_weights = (
                    weight
                    for weight, leaf in self.recorder.substitutes.values()
                    if leaf is tensor and weight is not leaf
                )
                parameter_leaf = next(
                    (weight for weight in user_weights if weight.is_leaf and weight.requires_grad), None
                )
                tensors = [tensor] if parameter_leaf is None else [tensor, parameter_leaf]
                return PortTensors(tensors, to_layout, partial(to_layout, [tensor]))
        return None


def _summed_in_layout(cell: type[Cell], slot: str, grads: Sequence[Tensor]) -> Tensor:
    """Sum a weight's gradients, through the layer and at the user's own parameter, in the layout of rnnlens."""
    return from_torch(cell, slot, grads[0] if len(grads) == 1 else grads[0] + grads[1])


def weight_substitutes(
    modules: Sequence[tuple[str, nn.Module]], ports: Sequence[Port]
) -> dict[tuple[str, str], Tensor]:
    """Return, by module and weight name, a differentiable tensor for each weight port of a non-recurrent layer.

    A trainable parameter is returned as it is. A frozen one is replaced by a trainable leaf in every module that
    has it, also in a dict or list among its attributes; the caller must restore the parameter.
    """
    modules_by_path = dict(modules)
    weights: dict[tuple[str, str], Tensor] = {}

    @cache
    def own_parameters(path: str) -> dict[str, nn.Parameter]:
        module = modules_by_path.get(path)
        return {} if module is None else dict(module.named_parameters(recurse=False))

    for port in ports:
        path, _, number = str(port.layer).partition("#")[0].partition("[")
        module, parameter = modules_by_path.get(path), own_parameters(path).get(port.key)
        if parameter is None and port.kind == "weight" and isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            library_weight = library_parameter(module, int(number.rstrip("]") or 0), port.key)  # the layer need not run
            parameter = (
                library_weight
                if library_weight is not None and (library_weight.requires_grad or has_own_forward(module))
                else None
            )
        if port.kind != "weight" or parameter is None:
            continue
        if parameter.requires_grad or not parameter.is_floating_point():
            weights[str(port.layer), port.key] = parameter
            continue
        leaf = nn.Parameter(parameter.detach())
        weights[str(port.layer), port.key] = leaf
        for user_module in (candidate for _, candidate in modules if not isinstance(candidate, torch.jit.ScriptModule)):
            kinds = dict if isinstance(user_module, nn.RNNBase) else (dict, list)  # torch's own list of weights stays
            for holder in [value for value in vars(user_module).values() if isinstance(value, kinds)]:
                for key, weight in holder.items() if isinstance(holder, dict) else enumerate(holder):
                    if weight is parameter:
                        holder[key] = leaf
    return weights


def differentiate(function: Callable[..., Any], arrays: Sequence[Array], model: torch.nn.Module) -> tuple[Array, Pull]:
    """Return the value of ``function(*tensors)`` on the model's device, and its vector-Jacobian product."""
    device, _ = device_and_dtype(model)
    with borrowed_model(model):
        tensors = [torch.tensor(np.asarray(a), device=device) for a in arrays]
        expected = "a torch.Tensor, such as output.mean()"
        return shared.differentiate(function, tensors, engine("torch"), expected)


def scan_boundary(recorder: ScanRecorder, port: Port) -> PortTensors:
    """Return the tensor behind a port of a scan: its readout, or the tensor of which its input is a view.

    Raises
    ------
    LayerNotFoundError
        If the name selects no one scan of this pass.
    UnsupportedError
        For the input of a scan whose coefficients are not computed from it.
    """
    names = call_numbers([record.layer for record in recorder.records])
    records = {record.layer + name: record for name, record in zip(names, recorder.records, strict=True)}
    record = records.get(str(port.layer))
    if record is None:
        message = f"Layer {port.layer!r} has no scan of its own in this forward pass."
        raise LayerNotFoundError(message, expected=f"one of {', '.join(map(repr, records))}")
    if port.kind == "scan_output":
        return PortTensors([record.output])
    values = record.values
    if values is None or not (recorder.is_frozen or _makes_coefficients(values, record.cell)):
        raise UnsupportedError(
            f"The coefficients of the scan in {port.layer!r} are not computed from the scan's input.",
            got=f"a recurrence over {', '.join(record.cell.axes)}",
            expected="a layer of Mamba-1, whose input makes decay, write and read",
            hint=f'rl.jacobian(model, x, of="{record.layer}.output", wrt="{record.layer}.input", frozen=True)',
        )
    source = _viewed(values)
    positions = torch.empty_strided(source.shape, source.stride(), dtype=torch.long)
    positions.copy_(torch.arange(source.numel()).view(source.shape))
    offset = values.storage_offset() - source.storage_offset()
    index = positions.as_strided(values.shape, values.stride(), offset).to(source.device)
    return PortTensors([source], lambda parts: parts[0].reshape(-1)[index])


def _viewed(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory a view shows: transposed ones reach a scan and its coefficients from there."""
    return tensor if tensor._base is None else tensor._base


def _makes_coefficients(values: Tensor, cell: SequenceCell) -> bool:
    """Return whether time step, write and read of a selective scan all depend on its input."""
    coefficients = (cell.decay[0], cell.write[1], cell.read)
    source = _viewed(values)
    return source.requires_grad and all(
        torch.autograd.grad(part.sum(), source, retain_graph=True, allow_unused=True)[0] is not None  # type: ignore[union-attr]
        for part in coefficients
    )
