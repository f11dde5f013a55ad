"""Runs one forward pass, and with a loss one backward pass, and records every boundary of the recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...errors import ModelError, raised_by
from ..protocol import Batch, Capture, CaptureRequest, ChainLink, SequenceCall
from ..shared import hook_in_this_thread
from .assemble import Assembler
from .cells import has_own_forward, replayable
from .chain import ChainRecorder, remember_chain
from .discover import (
    RequestedLayers,
    named_modules,
    refuse_own_loops,
    refuse_scripts,
    unwrapped,
)
from .fused import CallOwners, KernelInterceptor
from .inputs import as_tensors, call_model, detached, on_leaves, tensors_of, with_sources
from .loops import CellHook, StepListener
from .losses import evaluate, gradients_of, reaches
from .public import ANY_SCAN, LISTENER, SCANS
from .record import (
    CallRecorder,
    OutputRecord,
    PassRules,
    RunAgainError,
    broken_recurrences,
    call_numbers,
    differentiable,
    node_names,
    refuse_hooked,
    refuse_transformed,
)
from .recurrences import check_joints, entangled, join_changed_states, mark_endings, own_cells_only
from .restore import borrowed, differentiable_weights
from .scans import ScanRecorder, seams
from .weights import node_name

Recorded = TypeVar("Recorded")


def capture(model: nn.Module, batch: Batch, request: CaptureRequest) -> Capture:
    """Run and record a model on one batch: see :meth:`rnnlens.adapters.protocol.Adapter.capture`."""
    model = unwrapped(model)
    asked = RequestedLayers.of(model, request.layers)
    if not request.scans:
        asked = replace(asked, sequences=frozenset())
    x = as_tensors(batch.x, model, "x")
    found = run_until_recorded(lambda rules: _pass(model, batch, x, request, asked, rules))
    others = asked.cells or asked.sequences - {ANY_SCAN} or found.sequences
    if found.chain is not None and request.layers is None and not others:
        remember_chain(model, found.chain, [call.layer for call in found.calls])
    return found


def capture_outputs(model: nn.Module, batch: Batch) -> Capture:
    """Run a model without gradients and recordings, and return its outputs."""
    model = unwrapped(model)
    x = as_tensors(batch.x, model, "x")
    with borrowed(model, training=batch.training, seed=batch.seed), torch.no_grad():
        return Capture([], outputs=detached(call_model(model, x)))


def run_until_recorded(run: Callable[[PassRules], Recorded]) -> Recorded:
    """Repeat the forward pass ``run``, with the rules that each failed pass adds, until one pass records everything."""
    rules = PassRules()
    while True:
        try:
            return run(rules)
        except RunAgainError:
            continue


def recorded_pass(
    model: nn.Module,
    batch: Batch,
    x: Any,
    recorder: CallRecorder,
    chain: ChainRecorder,
    asked: RequestedLayers,
) -> tuple[Any, Tensor | None, bool]:
    """Run a model once and join the recorded calls to recurrences.

    Return outputs, loss, and whether the forward ran without gradients. The caller opens :func:`borrowed`, and makes
    the ``chain`` before it adds hooks of its own.
    """
    with chain.watch(), watched(model, recorder, asked, batch) as interceptor:
        outputs = call_model(model, x)
    join_changed_states(recorder)
    own_cells_only(recorder, training=batch.training)
    mark_endings(recorder)
    refuse_hooked(recorder)
    with raised_by("Your loss"):
        loss = evaluate(batch, outputs, model)
    check_joints(recorder, [*tensors_of(outputs), *([] if loss is None else [loss])])
    return outputs, loss, interceptor.cut_gradients and not recorder.rules.keep_gradients


def _pass(
    model: nn.Module, batch: Batch, x: Any, request: CaptureRequest, asked: RequestedLayers, rules: PassRules
) -> Capture:
    topmost = request.topmost and not rules.every_gradient
    boundaries = request.boundaries and request.gradients
    separate = boundaries and not topmost
    recorder = CallRecorder(rules, weight_grads=request.weight_grads and request.gradients, separate=separate)
    with borrowed(model, training=batch.training, seed=batch.seed), differentiable_weights(model, boundaries):
        x, sources = with_sources(x) if separate else (x, [])
        chain = ChainRecorder(model)
        outputs, loss, unseen = recorded_pass(model, batch, x, recorder, chain, asked)
        if loss is not None and not loss.requires_grad and unseen:
            rules.keep_gradients = True
            raise RunAgainError
        _refuse_no_calls(recorder, asked, request)
        links = None if unseen else chain.chain(outputs)
        if topmost and not _is_cut_above(recorder, links, loss):
            rules.every_gradient = True
            raise RunAgainError
        recorder.weight_grads = recorder.weight_grads and not topmost
        if rules.keep_gradients:
            recorder.notes.append(_WITH_GRADIENTS)
        weights = dict(model.named_parameters()) if separate else {}
        leaves, gradient = tensors_of(outputs) if boundaries else [], None
        if loss is not None and request.gradients:
            gradient = _gradients(recorder, loss, [*sources, *weights.values(), *leaves], topmost=topmost)
        capture = _read(recorder, asked, loss, gradient)
        capture.outputs, capture.topmost = detached(outputs), topmost
        capture.altered = _WITH_GRADIENTS if rules.keep_gradients else ""
        if gradient is not None:
            capture.input_grads = [None for _ in leaves] if topmost else [_maybe(gradient(t)) for t in sources]
            capture.output_grads = [_maybe(gradient(t)) for t in leaves]
            capture.beside = {name: _maybe(gradient(t)) for name, t in weights.items() if t.requires_grad}
            cells = [run for run in recorder.runs if run.owner.step_cell is not None]
            custom = {id(w) for run in cells for visit in run.visits for w in visit.weights()}
            capture.whole = frozenset(name for name, t in weights.items() if id(t) in custom)
            capture.inside = frozenset(name for name, t in weights.items() if id(t) in recorder.substitutes)
        capture.chain = links
        if not request.gradients:  # needed only where gradients are computed later
            capture.entangled = unseen or entangled(recorder.runs, tensors_of(outputs))
        return capture


def _maybe(grad: Tensor | None) -> Any:
    return None if grad is None else replayable(grad)


@contextmanager
def watched(
    model: nn.Module, recorder: CallRecorder, asked: RequestedLayers, batch: Batch
) -> Iterator[KernelInterceptor]:
    """Record the requested layers in ``recorder`` while the model runs in the block, then remove all hooks."""
    recorder.initial_state = dict(batch.initial_state or {})
    recorder.scans = ScanRecorder(asked.sequences, held=batch.frozen, model=model)
    owners = CallOwners(asked)
    with ExitStack() as stack:

        def hook(module: nn.Module, before: Any, after: Any = None) -> None:
            """Add hooks to a module, which run in this thread alone, until the stack closes."""
            handle = module.register_forward_pre_hook(hook_in_this_thread(before), with_kwargs=True)
            stack.callback(handle.remove)
            if after is not None:
                stack.callback(module.register_forward_hook(hook_in_this_thread(after), with_kwargs=True).remove)

        for path, module in named_modules(model):
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.Linear)):
                hook(module, owners.entering(path))
        for path, module in asked.cells:
            around = CellHook(recorder, path, module)
            hook(_hookable(stack, model, module), around.before, around.after)
        stack.enter_context(seams(asked.modules, recorder.scans))
        stack.callback(SCANS.reset, SCANS.set(recorder.scans.declared))
        for path, module in asked.plain:
            hooks = _OutputHook(recorder, path)
            hook(_hookable(stack, model, module), hooks.before, hooks.after)
        stack.callback(LISTENER.reset, LISTENER.set(StepListener(recorder, model, asked.names)))
        with KernelInterceptor(recorder, owners) as interceptor:
            yield interceptor
        recorder.refuse_unused_states([node_name(path, m, 0) for path, m in asked.recurrent])


class _OutputHook:
    """Pair of hooks that records the tensors of a layer that is not recurrent, separate from the user's."""

    def __init__(self, recorder: CallRecorder, path: str) -> None:
        self.recorder, self.path = recorder, path
        self.inputs: list[Tensor] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record the inputs of a call, as a forward pre-hook, if gradients at layer inputs are kept separate."""
        self.inputs = []
        is_recorded = self.recorder.separate and not self.recorder.paused
        return on_leaves((args, kwargs), partial(self._tap, self.inputs)) if is_recorded else None

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Record the outputs of a call, as a forward hook."""
        if self.recorder.paused:
            return None
        visit = OutputRecord(self.path, self.inputs, [])
        self.recorder.plain.append(visit)
        self.recorder.order.append(visit)
        return on_leaves(output, partial(self._tap, visit.outputs))

    def _tap(self, points: list[Tensor], value: Any) -> Any:
        """Append a graph node of a tensor to ``points``; return a copy that the user's code may change in place."""
        if not isinstance(value, Tensor):
            return value
        refuse_transformed(self.path, [value])
        is_float = value.is_floating_point()
        # The copy before keeps the gradients of other uses of a tensor apart: a layer may return its input.
        points.append(differentiable(value.clone() if value.requires_grad else value) if is_float else value)
        return points[-1].clone() if is_float else value


_WITH_GRADIENTS = "The model's forward uses torch.no_grad(); rnnlens ran it with gradients enabled."


def _refuse_no_calls(recorder: CallRecorder, asked: RequestedLayers, request: CaptureRequest) -> None:
    """Raise ``UnsupportedError`` or ``ModelError`` if no requested layer ran where it could be recorded."""
    recorder.plain = [visit for visit in recorder.plain if visit.outputs]
    if recorder.runs or recorder.plain or recorder.scans.ran:
        return
    refuse_scripts(asked.modules)
    refuse_own_loops([(path, module) for path, module in asked.recurrent if path in asked.ran])
    if request.all_must_run:
        raise ModelError(
            "No recurrent layer ran in this forward pass.",
            expected="nn.RNN, nn.LSTM, nn.GRU, one of their cells, or a custom cell",
            hint="rl.torch.cell(module) names a custom cell; in a loop over your own "
            "equations write h = rl.torch.step(lambda x, h: torch.tanh(x @ W + h @ U), x[:, t], h)",
        )


def _read(recorder: CallRecorder, asked: RequestedLayers, loss: Tensor | None, gradient: Any) -> Capture:
    """Convert the records of a forward pass to a ``Capture``: calls of the requested layers, and notes."""
    assembler, notes = Assembler(recorder, gradient), recorder.notes
    calls, plain = assembler.calls(), assembler.plain()
    # The gradient of weights that an omitted call shares is the sum over both calls.
    left_out = {call.weights_key for call in calls if not asked.keeps(call.layer)}
    calls = [call for call in calls if asked.keeps(call.layer)]
    for call in calls:
        if call.weights_key in left_out:
            call.weight_grads = None
    value = None if loss is None else float(loss.detach())
    if value is not None and not math.isfinite(value):
        notes.append(f"The loss is {value}.")
    lengths: dict[str, list[int]] = {}
    for run in (run for run in recorder.runs if not run.owner.stacked):
        lengths.setdefault(run.owner.name, []).append(sum(visit.steps for visit in run.visits))
    notes.extend(broken_recurrences(lengths))
    seen = {run.owner.name for run in recorder.runs}
    notes.extend(
        f"{path}: {type(module).__name__}.forward does not call torch's kernel, so its steps were not recorded."
        for path, module in asked.recurrent
        if path in asked.ran and path not in seen and has_own_forward(module)
    )
    notes.extend(_notes_on_further_outputs(recorder))
    scans = recorder.scans.records
    numbers = call_numbers([record.layer for record in scans])
    sequences = [_sequence_call(one.layer + n, one, gradient) for one, n in zip(scans, numbers, strict=True)]
    # In the order of their calls, without candidates that are no cell.
    names = {id(run): nodes for run, nodes in zip(recorder.runs, node_names(recorder.runs), strict=True)}
    names |= {id(visit): [call.layer] for visit, call in zip(recorder.plain, plain, strict=True)}
    kept = {call.layer for call in calls} | {call.layer for call in plain}
    order = tuple(name for one in recorder.order for name in names.get(id(one), ()) if name in kept)
    scanned = {path: samples for path, (samples, _) in recorder.scans.ran.items()}
    return Capture(calls, plain, sequences, value, notes=notes, order=order, scanned=scanned)


def _notes_on_further_outputs(recorder: CallRecorder) -> list[str]:
    """Return a note for each requested layer that returns several tensors, of which the first is recorded."""
    several = {visit.name: visit.outputs for visit in recorder.plain if len(visit.outputs) > 1}
    return [
        f"{name} returns {1 + len(others)} tensors: output is the first, of shape {tuple(first.shape)}; "
        f"not traced are those of shape {', '.join(str(tuple(other.shape)) for other in others)}."
        for name, (first, *others) in several.items()
    ]


def _is_cut_above(recorder: CallRecorder, links: Sequence[ChainLink] | None, loss: Tensor | None) -> bool:
    """Return whether the pass was a chain whose loss depends on the recurrent layers only through the last one."""
    names = [name for names in node_names(recorder.runs) for name in names]
    if links is None or loss is None or not names or [link.name for link in links if link.kind == "recurrent"] != names:
        return False
    if any(len(run.visits) != 1 or run.owner.autocast for run in recorder.runs) or recorder.plain or recorder.computed:
        return False
    *below, top = [piece.output for run in recorder.runs for piece in run.visits[0].pieces]
    return not reaches(loss, below, without=[top, *_state_taps(recorder)])


def _state_taps(recorder: CallRecorder) -> list[Tensor]:
    return [tap for run in recorder.runs for visit in run.visits for tap in visit.state_taps if tap is not None]


def _gradients(recorder: CallRecorder, loss: Tensor, around: Sequence[Tensor], *, topmost: bool) -> Any:
    """Differentiate the loss; return a function from a recorded tensor to its gradient, or None without a path.

    ``around``: tensors of the whole model whose gradients may bypass recurrent calls. ``topmost``: of the outputs of
    recurrent layers only the last one is needed.
    """
    visits = [visit for run in recorder.runs for visit in run.visits]
    taps = [piece.output for visit in visits for piece in visit.pieces][-1 if topmost else 0 :]
    taps += _state_taps(recorder)
    if recorder.weight_grads:
        taps += [weight for visit in visits for weight in visit.weights()]
    taps += [*(visit.outputs[0] for visit in recorder.plain), *(record.output for record in recorder.scans.records)]
    others = list(around)
    if recorder.separate:
        others += [t for visit in visits for t in (*(p.input for p in visit.pieces), *visit.link.fed)]
    # The step function of a loop may read tensors of this graph when it is called again.
    loops = any(run.owner.named for run in recorder.runs)
    found = gradients_of(loss, [*taps, *others], retain_graph=loops)
    if any(tap.requires_grad for tap in taps) and not any(id(tap) in found for tap in taps):
        recorder.notes.append("No path leads from the loss to any layer asked for: every gradient is zero.")
    return lambda tap: found.get(id(tap))


def _sequence_call(name: str, record: SequenceCall, gradient: Any) -> SequenceCall:
    """Return a recorded scan without graph; the gradient is zero where no path leads from the loss."""
    output, gate, grad = record.output, record.gate, None
    if gradient is not None:
        grad = gradient(output)
        grad = torch.zeros_like(output) if grad is None else grad.detach()
    gate = None if gate is None else gate.detach()
    cell = record.cell.with_parts(Tensor.detach)
    return replace(record, layer=name, cell=cell, output=output.detach(), output_grad=grad, gate=gate)


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


def _hookable(stack: ExitStack, model: nn.Module, module: nn.Module) -> nn.Module:
    """Return a module to which hooks can be added: a TorchScript module is wrapped until the stack closes."""
    if not isinstance(module, torch.jit.ScriptModule):
        return module
    shell = _ScriptWrapper(module)
    # A list, since the wrapper itself would be among the modules that are still to come.
    for parent in [parent for parent in model.modules() if not isinstance(parent, torch.jit.ScriptModule)]:
        for name in [name for name, child in parent._modules.items() if child is module]:
            stack.callback(parent._modules.__setitem__, name, module)
            parent._modules[name] = shell
    return shell
