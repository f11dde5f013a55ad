"""Runs one forward pass, and with a loss one backward pass, and records every boundary of the recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...autodiff.torch import backward_pass
from ...errors import ModelError, raised_by
from ..protocol import Batch, Capture, CaptureRequest, RecurrentCall, SequenceCall
from ..shared import hook_in_this_thread
from .assemble import Assembler
from .cells import has_own_forward, replayable
from .chain import ChainRecorder, remember_chain
from .discover import (
    RequestedLayers,
    named_modules,
    node_name,
    refuse_own_loops,
    refuse_scripts,
    unwrapped,
)
from .fused import CallOwners, KernelInterceptor
from .inputs import as_tensors, call_model, on_leaves, tensors_of, with_sources
from .loops import CellHook, listening
from .losses import evaluate
from .public import ANY_SCAN, SCANS
from .record import (
    CallRecorder,
    JoinRules,
    OutputRecord,
    Recurrence,
    broken_recurrences,
    call_numbers,
    node_names,
    refuse_hooked,
    tapped,
)
from .recurrences import (
    JoinedWronglyError,
    check_joints,
    entangled,
    join_changed_states,
    mark_endings,
    own_cells_only,
)
from .restore import borrowed, differentiable_weights
from .scans import ScanRecord, ScanRecorder, seams

Recorded = TypeVar("Recorded")


def capture(model: nn.Module, batch: Batch, request: CaptureRequest) -> Capture:
    """Run and record a model on one batch: see :meth:`rnnlens.adapters.protocol.Adapter.capture`."""
    model = unwrapped(model)
    asked = RequestedLayers.of(model, request.layers)
    if not request.scans:
        asked = replace(asked, sequences=frozenset())
    x = as_tensors(batch.x, model, "x")
    found = run_until_recorded(lambda rules, keep: _pass(model, batch, x, request, asked, rules, keep))
    others = asked.cells or asked.sequences - {ANY_SCAN} or found.sequences
    if found.chain is not None and request.layers is None and not others:
        remember_chain(model, found.chain, [call.layer for call in found.calls])
    return found


def capture_outputs(model: nn.Module, batch: Batch) -> Capture:
    """Run a model without gradients and recordings, and return its outputs."""
    model = unwrapped(model)
    x = as_tensors(batch.x, model, "x")
    with borrowed(model, training=batch.training, seed=batch.seed), torch.no_grad():
        return Capture([], outputs=on_leaves(call_model(model, x), _detached))


class NoGradientsError(Exception):
    """Signal that the model's forward runs under ``torch.no_grad`` and must be run again with gradients."""


def run_until_recorded(run: Callable[[JoinRules, bool], Recorded]) -> Recorded:
    """Call ``run(rules, keep_gradients)``; again if calls were joined wrongly or the model ran without gradients."""
    rules, keep_gradients = JoinRules(), False
    while True:
        try:
            return run(rules, keep_gradients)
        except JoinedWronglyError:
            continue
        except NoGradientsError:
            keep_gradients = True


def recorded_pass(
    model: nn.Module,
    batch: Batch,
    x: Any,
    recorder: CallRecorder,
    chain: ChainRecorder,
    asked: RequestedLayers,
    *,
    keep_gradients: bool,
) -> tuple[Any, Tensor | None, bool]:
    """Run a model once and join the recorded calls to recurrences.

    Return outputs, loss, and whether the forward ran without gradients. The caller opens :func:`borrowed`, and makes
    the ``chain`` before it adds hooks of its own.
    """
    with chain.watch(), watched(model, recorder, asked, batch, keep_gradients) as interceptor:
        outputs = call_model(model, x)
    join_changed_states(recorder)
    own_cells_only(recorder, training=batch.training)
    mark_endings(recorder)
    refuse_hooked(recorder)
    with raised_by("Your loss"):
        loss = evaluate(batch, outputs, model)
    check_joints(recorder, [*tensors_of(outputs), *([] if loss is None else [loss])])
    return outputs, loss, interceptor.cut_gradients and not keep_gradients


def _pass(
    model: nn.Module,
    batch: Batch,
    x: Any,
    request: CaptureRequest,
    asked: RequestedLayers,
    rules: JoinRules,
    keep_gradients: bool,
) -> Capture:
    boundaries = request.boundaries and request.gradients
    recorder = CallRecorder(rules, weight_grads=request.weight_grads and request.gradients, separate=boundaries)
    with (
        borrowed(model, training=batch.training, seed=batch.seed),
        differentiable_weights(model, boundaries),
    ):
        x, sources = with_sources(x) if boundaries else (x, [])
        around = ModelTensors(sources, dict(model.named_parameters()) if boundaries else {})
        chain = ChainRecorder(model)
        outputs, loss, unseen = recorded_pass(model, batch, x, recorder, chain, asked, keep_gradients=keep_gradients)
        around.outputs = tensors_of(outputs) if boundaries else []
        if loss is not None and not loss.requires_grad and unseen:
            raise NoGradientsError
        found = _read(recorder, asked, request, loss, outputs, keep_gradients, around)
        found.chain = None if unseen else chain.chain(outputs)
        if not request.gradients:  # needed only where gradients are computed later
            found.entangled = unseen or entangled(recorder.runs, tensors_of(outputs))
        return found


@dataclass
class ModelTensors:
    """Tensors of the whole model whose gradients may bypass recurrent calls: float inputs, parameters, outputs."""

    inputs: list[Tensor]
    weights: dict[str, Tensor]
    outputs: list[Tensor] = field(default_factory=list)

    def wanted(self) -> list[Tensor]:
        """Return the inputs, weights and outputs that require a gradient."""
        return [t for t in (*self.inputs, *self.weights.values(), *self.outputs) if t.requires_grad]

    def store(self, capture: Capture, recorder: CallRecorder, gradient: Any) -> None:
        """Store the gradients at inputs, weights and outputs in a capture.

        ``gradient`` returns the gradient of a tensor, or None.
        """
        capture.input_grads = [_maybe(gradient(t)) for t in self.inputs]
        capture.output_grads = [_maybe(gradient(t)) for t in self.outputs]
        capture.beside = {name: _maybe(gradient(t)) for name, t in self.weights.items() if t.requires_grad}
        custom = {id(w) for run in recorder.runs if run.owner.step_cell is not None for w in _weights_of(run)}
        capture.whole = frozenset(name for name, t in self.weights.items() if id(t) in custom)
        capture.inside = frozenset(name for name, t in self.weights.items() if recorder.stands_in(t))


def _weights_of(run: Recurrence) -> list[Tensor]:
    return [w for visit in run.visits for piece in visit.pieces for weights in piece.weights for w in weights.values()]


def _maybe(grad: Tensor | None) -> Any:
    return None if grad is None else replayable(grad)


@contextmanager
def watched(
    model: nn.Module, recorder: CallRecorder, asked: RequestedLayers, batch: Batch, keep_gradients: bool = False
) -> Iterator[KernelInterceptor]:
    """Record the requested layers in ``recorder`` while the model runs in the block, then remove all hooks."""
    recorder.initial_state = dict(batch.initial_state or {})
    recorder.scans = ScanRecorder(asked.sequences, held=batch.frozen, model=model)
    owners = CallOwners(asked)
    handles: list[Any] = []
    with ExitStack() as stack:
        stack.callback(lambda: [handle.remove() for handle in handles])
        for path, module in named_modules(model):
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.Linear)):
                hook = owners.entering(path)
                handles.append(module.register_forward_pre_hook(hook_in_this_thread(hook), with_kwargs=True))
        for path, module in asked.cells:
            around = CellHook(recorder, path, module)
            module = stack.enter_context(hookable(model, module))
            handles.append(module.register_forward_pre_hook(hook_in_this_thread(around.before), with_kwargs=True))
            handles.append(module.register_forward_hook(hook_in_this_thread(around.after), with_kwargs=True))
        stack.enter_context(seams(asked.modules, recorder.scans))
        stack.callback(SCANS.reset, SCANS.set(recorder.scans.declared))
        for path, module in asked.plain:
            module = stack.enter_context(hookable(model, module))
            handles.append(module.register_forward_hook(hook_in_this_thread(_plain_hook(recorder, path))))
        stack.enter_context(listening(recorder, model, asked.names))
        with KernelInterceptor(recorder, owners.find, keep_gradients=keep_gradients) as interceptor:
            yield interceptor
        recorder.refuse_unused_states([node_name(path, m, 0) for path, m in asked.recurrent])


def _plain_hook(recorder: CallRecorder, path: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        noted = False

        def tap(value: Any) -> Any:
            nonlocal noted
            if noted or recorder.paused or not isinstance(value, Tensor):
                return value
            noted = True
            point, copy = tapped(path, value)
            recorder.add_plain(OutputRecord(path, point))
            return copy

        return on_leaves(output, tap)

    return hook


def _read(
    recorder: CallRecorder,
    asked: RequestedLayers,
    request: CaptureRequest,
    loss: Tensor | None,
    outputs: Any,
    kept: bool,
    around: ModelTensors,
) -> Capture:
    if not recorder.runs and not recorder.plain and not recorder.scans.ran:
        refuse_scripts(asked.modules)
        refuse_own_loops([(path, module) for path, module in asked.recurrent if path in asked.ran])
    if request.all_must_run and not (recorder.runs or recorder.plain or recorder.scans.ran):
        raise ModelError(
            "No recurrent layer ran in this forward pass.",
            expected="nn.RNN, nn.LSTM, nn.GRU, one of their cells, or a custom cell",
            hint="rl.torch.cell(module) names a custom cell; in a loop over your own "
            "equations write h = rl.torch.step(lambda x, h: torch.tanh(x @ W + h @ U), x[:, t], h)",
        )
    notes = list(recorder.notes)
    if kept:
        notes.append(_WITH_GRADIENTS)
    gradient = None
    if loss is not None and request.gradients:
        gradient = _gradients(recorder, loss, notes, around)
    assembler = Assembler(recorder, gradient)
    calls = _only_asked(assembler.calls(), asked)
    value = None if loss is None else float(loss.detach())
    if value is not None and not math.isfinite(value):
        notes.append(f"The loss is {value}.")
    lengths: dict[str, list[int]] = {}
    for run in (run for run in recorder.runs if not run.owner.stacked):
        lengths.setdefault(run.owner.name, []).append(run.length)
    notes.extend(broken_recurrences(lengths))
    seen = {run.owner.name for run in recorder.runs}
    notes.extend(
        f"{path}: {type(module).__name__}.forward does not call torch's kernel, so its steps were not recorded."
        for path, module in asked.recurrent
        if path in asked.ran and path not in seen and has_own_forward(module)
    )
    plain = assembler.plain()
    scans = recorder.scans.records
    numbers = call_numbers([record.layer for record in scans])
    sequences = [_sequence_call(one.layer + n, one, gradient) for one, n in zip(scans, numbers, strict=True)]
    capture = Capture(calls, plain, sequences, value, on_leaves(outputs, _detached), notes)
    capture.order = _order(recorder, [call.layer for call in plain], {call.layer for call in calls})
    capture.scanned = {path: samples for path, (samples, _) in recorder.scans.ran.items()}
    if gradient is not None:
        around.store(capture, recorder, gradient)
    capture.altered = _WITH_GRADIENTS if kept else ""
    return capture


_WITH_GRADIENTS = "The model's forward uses torch.no_grad(); rnnlens ran it with gradients enabled."


def _only_asked(calls: list[RecurrentCall], asked: RequestedLayers) -> list[RecurrentCall]:
    """Return the requested calls.

    Weight gradients are dropped where an omitted call shares the weights, because the gradient is the sum over both.
    """
    left_out = {call.weights_key for call in calls if not asked.keeps(call.layer)}
    kept = [call for call in calls if asked.keeps(call.layer)]
    for call in kept:
        if call.weights_key in left_out:
            call.weight_grads = None
    return kept


def _gradients(recorder: CallRecorder, loss: Tensor, notes: list[str], around: ModelTensors) -> Any:
    taps: dict[int, Tensor] = {}
    for run in recorder.runs:
        for visit in run.visits:
            wanted = [*(piece.output for piece in visit.pieces), *(tap for tap in visit.state_taps if tap is not None)]
            if recorder.weight_grads:
                wanted.extend(w for piece in visit.pieces for weights in piece.weights for w in weights.values())
            taps.update((id(tap), tap) for tap in wanted if tap.requires_grad)
    others = [*(v.output for v in recorder.plain), *(v.output for v in recorder.scans.records)]
    taps.update((id(output), output) for output in others if output.requires_grad)
    inside = len(taps)
    if recorder.separate:
        fed = [t for run in recorder.runs for v in run.visits for t in (*(p.input for p in v.pieces), *v.link.fed)]
        taps.update((id(t), t) for t in (*fed, *around.wanted()) if t.requires_grad)
    pulled: Sequence[Tensor | None] = [None] * len(taps)
    if loss.requires_grad and taps:
        with raised_by("The backward pass of your model or loss"):
            # The step function of a loop may read tensors of this graph when it is called again.
            loops = any(run.owner.named for run in recorder.runs)
            pulled = backward_pass([loss], list(taps.values()), retain_graph=loops)
    if inside and all(grad is None for grad in pulled[:inside]):
        notes.append("No path leads from the loss to any layer asked for: every gradient is zero.")
    found = {key: None if g is None else g.detach() for key, g in zip(taps, pulled, strict=True)}
    return lambda tap: found.get(id(tap))


def _sequence_call(name: str, record: ScanRecord, gradient: Any) -> SequenceCall:
    """Return a recorded scan as plain arrays; the gradient is zero where no path leads from the loss."""
    grad = None if gradient is None else gradient(record.output)
    if gradient is not None and grad is None:
        grad = torch.zeros_like(record.output)
    return SequenceCall(
        name,
        record.cell.with_parts(torch.Tensor.detach),
        record.output.detach(),
        None if grad is None else grad.detach(),
        None if record.gate is None else record.gate.detach(),
        record.mismatch,
        record.dtype,
    )


def _order(recorder: CallRecorder, plain: Sequence[str], calls: Collection[str]) -> tuple[str, ...]:
    """Return the names of all recorded layers in the order of their calls, without candidates that are no cell."""
    names = {id(run): nodes for run, nodes in zip(recorder.runs, node_names(recorder.runs), strict=True)}
    names |= {id(visit): [name] for visit, name in zip(recorder.plain, plain, strict=True)}
    return tuple(name for one in recorder.order for name in names.get(id(one), ()) if name in calls or name in plain)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class _ScriptWrapper(nn.Module):  # type: ignore[misc]
    """Python module that forwards its calls and attributes to a TorchScript module, so that hooks can be added."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__("inner")
        return inner if name == "inner" else getattr(inner, name)


@contextmanager
def hookable(model: nn.Module, module: nn.Module) -> Iterator[nn.Module]:
    """Provide a module that takes hooks and is called in place of ``module`` within the block.

    A TorchScript module is wrapped, any other is returned as it is.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        yield module
        return
    holders = [
        (parent, name)
        for parent in model.modules()
        if not isinstance(parent, torch.jit.ScriptModule)
        for name, child in parent._modules.items()
        if child is module
    ]
    shell = _ScriptWrapper(module)
    try:
        for parent, name in holders:
            parent._modules[name] = shell
        yield shell
    finally:
        for parent, name in holders:
            parent._modules[name] = module
