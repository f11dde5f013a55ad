"""Scans of whole-sequence layers: replaced for one pass by a linear recurrence that keeps states and is swept back.

For one forward pass :func:`replaced_scans` replaces the scan functions of the families (``scan_families``) in the
modelling modules of a model; the replacement runs in time and memory linear in the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from ...recurrence.sequence import SequenceCell, SequenceRun, forward, real_like
from ..protocol import SequenceCall
from ..shared import hook_in_this_thread, substitute_in_this_thread
from .public import ANY_SCAN, SCANS_RUN, scan_by_steps
from .scan_families import TESTED, package_of, read_call, scans_of, sequence_modules
from .scan_reading import Family, widen_tensors


class _Scan(torch.autograd.Function):  # type: ignore[misc]
    """Autograd function of a sequence cell: outputs of all steps and the last state; ``runs`` receives its run."""

    @staticmethod
    def forward(
        ctx: Any, cell: SequenceCell, runs: list[SequenceRun], names: tuple[str, ...], *coefficients: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, run = forward(_with_parts(cell, coefficients))
        # Without graph: a later sweep would keep that of its own products, and the model's, in memory.
        runs.append(replace(run, cell=cell, states=[state.detach() for state in run.states]))
        ctx.run, ctx.names, ctx.zeros = run, names, partial(outputs.new_zeros, outputs.shape)
        ctx.set_materialize_grads(False)
        return outputs, run.last_state.clone()

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor | None, last_grad: Tensor | None) -> tuple[Any, ...]:
        run, cell, part_grads = ctx.run, ctx.run.cell, {}
        output_grad = ctx.zeros() if output_grad is None else output_grad
        chunk_grads: dict[str, list[Any]] = {name: [] for name in ctx.names}
        for chunk, initial_grad in run.sweep(output_grad, last_grad):
            for name, grad in chunk.part_grads().items():
                chunk_grads[name].append(grad)
            part_grads["initial"] = initial_grad
        for name, coefficient in cell.parts.items():
            if name != "initial":
                grads = chunk_grads[name]
                part_grads[name] = sum(grads[1:], grads[0]) if coefficient.shape[1] == 1 else torch.cat(grads[::-1], 1)
            else:
                part_grads[name] = real_like(part_grads[name], coefficient)
        return (None, None, None, *(part_grads[name] for name in ctx.names))


def _with_parts(cell: SequenceCell, coefficients: Sequence[Tensor]) -> SequenceCell:
    """Return the cell with its coefficient arrays replaced, in the order of ``SequenceCell.parts``."""
    remaining = iter(coefficients)
    return cell.with_parts(lambda _: next(remaining))


def scan(cell: SequenceCell) -> tuple[Tensor, Tensor, SequenceRun]:
    """Return outputs and last state of a sequence cell of tensors, with gradients in linear time, and its run."""
    coefficients, detached_cell = cell.parts, cell.with_parts(torch.Tensor.detach)
    runs: list[SequenceRun] = []
    y, last_state = _Scan.apply(detached_cell, runs, tuple(coefficients), *coefficients.values())
    return y, last_state, runs[0]


@dataclass
class ScanRecorder:
    """Scans of one forward pass; tensors of ``records`` are inside the graph.

    ``requested``: paths of the layers whose calls are recorded. ``is_frozen``: coefficients are held constant (frozen
    map). ``model``: the model in which declared scans are stored. ``scan_sizes``: samples and steps of every layer
    whose scan ran. ``running_layers``: paths of the layers that run now, innermost last; ``called_layers``: of all
    layers that were called. ``sweep_size``: numbers that the largest sweep of all scans holds for one cotangent.
    ``kept_states``: entries of the state that are written, by layer (:attr:`Batch.kept_states`).
    """

    requested: Collection[str]
    is_frozen: bool = False
    model: nn.Module | None = None
    records: list[SequenceCall] = field(default_factory=list)
    scan_sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    running_layers: list[str] = field(default_factory=list)
    called_layers: set[str] = field(default_factory=set)
    sweep_size: int = 0
    kept_states: Mapping[str, Any] = field(default_factory=dict)

    def enter(self, path: str, *_: Any) -> None:
        """Put a layer on the stack of running layers (forward pre-hook)."""
        self.running_layers.append(path)
        self.called_layers.add(path)

    def leave(self, *_: Any) -> None:
        """Remove the innermost layer from the stack of running layers (forward hook)."""
        del self.running_layers[-1:]

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a coefficient of a scan, detached if coefficients are held constant (frozen map)."""
        return tensor.detach() if self.is_frozen else tensor

    def _run(
        self, path: str, cell: SequenceCell, tensors: Sequence[Any], gate: Tensor | None = None, *, is_wanted: bool
    ) -> tuple[Tensor, Tensor, SequenceCall | None]:
        """Run the scan of a layer; return its outputs, its last state and, if ``is_wanted``, its record."""
        if path in self.kept_states:
            like = cell.write[0]
            cell = cell.keeping(torch.as_tensor(self.kept_states[path], dtype=like.dtype, device=like.device))
        y, last_state, run = scan(cell)
        self.scan_sizes[path] = (cell.shape[0], cell.steps)
        self.sweep_size = max(self.sweep_size, cell.sweep_size)
        if not is_wanted:
            return y, last_state, None
        y = y if y.requires_grad else y.requires_grad_()
        # The coarsest dtype of the call's tensors, at most float32, in which the models' own scans compute.
        dtypes = {t.dtype for t in tensors if isinstance(t, Tensor) and t.is_floating_point()}
        half_dtypes = sorted(str(dtype) for dtype in dtypes if dtype.itemsize < 4)
        dtype = (half_dtypes[0] if half_dtypes else "torch.float32").removeprefix("torch.")
        last_state = last_state if last_state.requires_grad else last_state.requires_grad_()
        record = SequenceCall(path, cell, y, gate=gate, last_state=last_state, run=run, compute_dtype=dtype)
        self.records.append(record)
        return y, last_state.clone(), record

    def declared_scan(self, a: Tensor, b: Tensor, initial: Any, function: Any, name: str | None) -> Tensor:
        """Run and record one scan declared by ``rl.torch.scan``; return its states."""
        scan_count = sum(path.startswith("scan") for path in self.scan_sizes)
        path = name or (f"scan_{scan_count}" if scan_count else "scan")
        axes = ("unit",) if a.dim() == 3 else ("head", "channel")
        arguments = (a, b) if initial is None else (a, b, initial)
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in arguments))
        x, decay = widen_tensors(b, a)
        cell = SequenceCell(axes, (self.hold(decay),), (x,), logarithmic=False, initial=initial)
        is_wanted = path in self.requested or ANY_SCAN in self.requested
        states, _, record = self._run(path, cell, (a, b), is_wanted=is_wanted)
        if self.model is not None:
            SCANS_RUN.setdefault(self.model, {})[path] = tuple(zip(axes, map(int, cell.shape[2:]), strict=True))
        if record is not None:
            with torch.no_grad():
                record.mismatch = _mismatch(states, (function or scan_by_steps)(*arguments))
            states = states.clone()
        return states.to(dtype)

    def replacement(self, original: Callable[..., Any], family: Family) -> Callable[..., Any]:
        """Return a replacement of a model's scan function that records the scan and returns the same outputs."""

        def run_original(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            with torch.no_grad():
                return original(*map(_without_hooks, args), **kwargs)

        def recorded_scan(*args: Any, **kwargs: Any) -> Any:
            if family.may_decline and run_original(args, kwargs) is None:
                return None
            path = self.running_layers[-1] if self.running_layers else ""
            tensors, is_wanted = (*args, *kwargs.values()), path in self.requested
            # Before the coefficients are read: its intermediate tensors are free again when these are made.
            expected = _first_output(run_original(args, kwargs)) if is_wanted else None
            reading = read_call(original, family, self.hold, args, kwargs)
            y, last_state, record = self._run(path, reading.cell, tensors, reading.gate, is_wanted=is_wanted)
            if record is None:
                return reading.finish(y, last_state)
            record.values = reading.values
            result = reading.finish(y.clone(), last_state)
            record.mismatch = _mismatch(_first_output(result), expected)
            return result

        return substitute_in_this_thread(recorded_scan, original)


def _without_hooks(value: Any) -> Any:
    """Return a substitute for a module, with its attributes, that calls submodules without their hooks."""
    if not isinstance(value, nn.Module):
        return value
    names = {*vars(value), *value._buffers, *value._parameters, *dir(type(value))} - set(dir(nn.Module))
    substitute = SimpleNamespace(**{name: getattr(value, name) for name in names})
    for name, child in value.named_children():
        setattr(substitute, name, child.forward)
    return substitute


def _first_output(returned: Any) -> Any:
    return returned[0] if isinstance(returned, tuple) else returned


def _mismatch(result: Tensor, reference: Tensor) -> float:
    """Return the largest difference of a replaced scan's outputs from the original's, relative to the largest."""
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    return float((result.detach() - reference).abs().max()) / largest if largest else 0.0


@contextmanager
def replaced_scans(modules: Sequence[tuple[str, nn.Module]], recorder: ScanRecorder) -> Iterator[ScanRecorder]:
    """Replace the scan functions of a model's whole-sequence layers within the block.

    Raises
    ------
    UnsupportedError
        After the block, for a layer that ran without a call of its scan function.
    """
    layers = sequence_modules(modules)
    _refuse_rescaling(modules)
    with ExitStack() as stack:
        for path, module, _ in layers:
            enter = hook_in_this_thread(partial(recorder.enter, path))
            stack.callback(module.register_forward_pre_hook(enter).remove)
            leave = hook_in_this_thread(recorder.leave)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        for owner, name, family in dict.fromkeys(scan for _, module, _ in layers for scan in scans_of(type(module))):
            original = vars(owner)[name]
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, recorder.replacement(original, family))
        yield recorder
    for path, module, family in layers:
        if path in recorder.called_layers and path not in recorder.scan_sizes:
            raise UnsupportedError(
                f"Layer {path!r} ({type(module).__name__}, {family.name}) ran without a call of its scan function.",
                got=f"{package_of(type(module))}, {'training' if module.training else 'evaluation'} mode",
                expected=f"the PyTorch scan of {TESTED}, over more than one step",
                hint="training=False, at least 2 steps, use_cache=False, and a model without fused kernels",
            )


def _refuse_rescaling(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise ``UnsupportedError`` for an RWKV that would rescale its weights in place in the coming pass."""
    for path, module in modules:
        is_rescaled = getattr(module, "layers_are_rescaled", None)
        if is_rescaled is not None and is_rescaled == module.training and module.config.rescale_every > 0:
            mode = "train()" if module.training else "eval()"
            raise UnsupportedError(
                f"{type(module).__name__} ({path!r}) changes its weights in its first pass in this mode.",
                got="weights that are not rescaled yet",
                hint=f"model.{mode}; model(x) once, then rnnlens",
            )
