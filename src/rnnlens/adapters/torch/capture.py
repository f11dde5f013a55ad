"""Runs one forward pass, and with a loss one backward pass, and records every boundary of the recurrent layers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ModelError
from ..protocol import Batch, Capture, ChainLink, SequenceCall, Taps
from ..shared import hook_in_this_thread, substitute_in_this_thread
from .assemble import Assembler
from .cells import has_own_forward
from .chain import ChainRecorder, remember_chain
from .discover import (
    RequestedLayers,
    named_modules,
    positional_names,
    refuse_own_loops,
    refuse_scripts,
    repeatable_modules,
    step_methods,
    unwrap,
)
from .forward_pass import ForwardPass, forward_pass, run_until_recorded
from .fused import CallOwners, KernelInterceptor
from .inputs import call_model, detach_tensors, map_leaves, replay_copy, returned_tensors, tensors_of
from .layer_calls import layer_calls, loops_of_layers
from .loops import CellHook, KeptStateHook, MethodHook, RepeatedModuleHook, StepListener, settle_roles
from .losses import evaluate, gradients_of, loss_errors, reaches
from .public import ANY_SCAN, KEPT_STATES, LISTENER, SCANS, is_declared_cell
from .record import (
    CallRecorder,
    OutputRecord,
    PassRules,
    RunAgainError,
    broken_recurrences,
    call_numbers,
    differentiable,
    node_names,
    refuse_cells_without_state,
    refuse_hooked,
    refuse_inner_steps,
    refuse_transformed,
)
from .recurrences import check_joints, is_entangled, join_changed_states, mark_endings, remove_nested_cells
from .scan_families import unknown_scans, unread_scans
from .scans import ScanRecorder, replaced_scans
from .triton_kernels import needs_equations
from .weights import class_of, node_name


def capture(model: nn.Module, batch: Batch, request: Taps) -> Capture:
    """Run and record a model on one batch: see :class:`rnnlens.adapters.protocol.Taps`."""
    model = unwrap(model)
    requested = RequestedLayers.of(model, request.layers)
    if not request.sequences:
        requested = replace(requested, sequences=frozenset())
    recorded = run_until_recorded(lambda rules: _capture_pass(model, batch, request, requested, rules))
    needs_more_hooks = requested.cells or requested.sequences - {ANY_SCAN} or recorded.sequences
    if recorded.chain is not None and request.layers is None and not needs_more_hooks:
        remember_chain(model, recorded.chain, [call.layer for call in recorded.calls])
    return recorded


def output_tensors(model: nn.Module, batch: Batch) -> Any:
    """Run a model without gradients and recordings, and return its outputs."""
    with forward_pass(unwrap(model), batch) as borrowed, torch.no_grad():
        return detach_tensors(call_model(borrowed.model, borrowed.x, borrowed.batch))


def recorded_call(
    borrowed: ForwardPass, recorder: CallRecorder, chain: ChainRecorder, requested: RequestedLayers
) -> tuple[Any, Tensor | None, bool]:
    """Call a borrowed model and join the recorded calls to recurrences.

    Return outputs, loss, and whether the forward ran without gradients. The caller makes the ``chain`` before it adds
    hooks of its own.
    """
    with chain.watch(), recording_hooks(borrowed.model, recorder, requested, borrowed.batch) as interceptor:
        try:
            outputs = call_model(borrowed.model, borrowed.x, borrowed.batch)
        finally:
            if interceptor.needs_weights_in_graph:  # also the reason of an error in the forward
                recorder.rules.weights_in_graph = True
                if recorder.cut_layers:
                    refuse_inner_steps(recorder)
                raise RunAgainError
    settle_roles(recorder, requested)
    join_changed_states(recorder)
    remove_nested_cells(borrowed.model, recorder, training=borrowed.batch.training)
    mark_endings(recorder)
    refuse_hooked(recorder)
    with loss_errors(borrowed.batch, outputs):
        loss = evaluate(borrowed.batch, outputs, borrowed.model)
    check_joints(recorder, [*tensors_of(outputs), *([] if loss is None else [loss])])
    return outputs, loss, interceptor.cut_gradients and not recorder.rules.ignore_no_grad


def _capture_pass(
    model: nn.Module, batch: Batch, request: Taps, requested: RequestedLayers, rules: PassRules
) -> Capture:
    topmost = request.topmost and not rules.all_gradients
    boundaries = request.boundaries
    separate = boundaries and not topmost
    recorder = CallRecorder(rules, weight_grads=request.weight_grads and request.gradients, separate=separate)
    if rules.no_cells:
        no_cells = [(path, module) for path, module in requested.cells if path in rules.no_cells]
        cells = [(path, module) for path, module in requested.cells if path not in rules.no_cells]
        requested = replace(requested, cells=cells, other_layers=[*requested.other_layers, *no_cells])
    hooked = requested
    if rules.with_loops:
        every = RequestedLayers.of(model, None)
        cells = [(path, module) for path, module in every.cells if path not in rules.no_cells]
        hooked = replace(requested, recurrent=every.recurrent, cells=cells, names=None)
    with forward_pass(model, batch, by_inputs=separate, by_frozen=boundaries) as borrowed:
        chain = ChainRecorder(model)
        outputs, loss, ran_without_gradients = recorded_call(borrowed, recorder, chain, hooked)
        if loss is not None and not loss.requires_grad and ran_without_gradients:
            rules.ignore_no_grad = True
            raise RunAgainError
        if requested.names is not None:
            undeclared = [path for path, module in requested.cells if not is_declared_cell(module)]
            refuse_cells_without_state(recorder, undeclared)
            _refuse_unknown_loops(recorder)
        _refuse_no_calls(recorder, requested, request)
        links = None if ran_without_gradients else chain.chain(outputs)
        if topmost and not _is_cut_above(recorder, links, loss):
            rules.all_gradients = True
            raise RunAgainError
        recorder.weight_grads = recorder.weight_grads and not topmost
        if rules.ignore_no_grad:
            recorder.notes.append(_WITH_GRADIENTS)
        weights = dict(model.named_parameters()) if separate else {}
        output_leaves, gradient = returned_tensors(outputs) if boundaries else [], None
        if loss is not None and request.gradients:
            refuse_inner_steps(recorder)
            gradient = _gradients(
                recorder, loss, [*borrowed.sources, *weights.values(), *output_leaves], topmost=topmost
            )
        capture = _assemble_capture(recorder, requested, loss, gradient)
        capture.outputs, capture.topmost = detach_tensors(outputs), topmost
        capture.alteration = _WITH_GRADIENTS if rules.ignore_no_grad else ""
        if gradient is not None:
            capture.input_grads = (
                [None for _ in output_leaves]
                if topmost
                else [_copy_or_none(gradient(tensor)) for tensor in borrowed.sources]
            )
            capture.output_grads = [_copy_or_none(gradient(tensor)) for tensor in output_leaves]
            _store_weight_gradients(capture, recorder, weights, gradient)
        capture.chain = links
        if not request.gradients:  # needed only where gradients are computed later
            capture.entangled = ran_without_gradients or is_entangled(recorder.recurrences, tensors_of(outputs))
        return capture


def _store_weight_gradients(
    capture: Capture, recorder: CallRecorder, weights: Mapping[str, Tensor], gradient: Callable[[Tensor], Tensor | None]
) -> None:
    """Store the gradients of weights outside the captured calls, and which of these are the full gradients."""
    capture.outside_weight_grads = {
        name: _copy_or_none(gradient(tensor)) for name, tensor in weights.items() if tensor.requires_grad
    }
    loops = [recurrence for recurrence in recorder.recurrences if recurrence.owner.step_cell is not None]
    loop_weights = {id(weight) for recurrence in loops for call in recurrence.calls for weight in call.weights()}
    in_graph = {id(w) for w, leaf in recorder.substitutes.values() if leaf.requires_grad and not leaf.is_leaf}
    capture.full_gradient_names = frozenset(
        name for name, tensor in weights.items() if id(tensor) in loop_weights | in_graph
    )
    capture.recurrent_weight_names = frozenset(
        name for name, tensor in weights.items() if id(tensor) in recorder.substitutes
    )


def _copy_or_none(grad: Tensor | None) -> Any:
    return None if grad is None else replay_copy(grad)


@contextmanager
def recording_hooks(
    model: nn.Module, recorder: CallRecorder, requested: RequestedLayers, batch: Batch
) -> Iterator[KernelInterceptor]:
    """Record the requested layers in ``recorder`` while the model runs in the block, then remove all hooks."""
    recorder.initial_state = dict(batch.initial_state or {})
    recorder.scans = ScanRecorder(
        requested.sequences, is_frozen=batch.frozen, model=model, kept_states=batch.kept_states or {}
    )
    owners = CallOwners(requested)
    with ExitStack() as stack:

        def hook(module: nn.Module, pre_hook: Any, post_hook: Any = None) -> None:
            """Add hooks to a module, which run in this thread alone, until the stack closes."""
            handle = module.register_forward_pre_hook(hook_in_this_thread(pre_hook), with_kwargs=True)
            stack.callback(handle.remove)
            if post_hook is not None:
                stack.callback(module.register_forward_hook(hook_in_this_thread(post_hook), with_kwargs=True).remove)

        for path, module in named_modules(model):
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.Linear)):
                hook(module, owners.input_hook(path))

        def replace_method(module: nn.Module, name: str, run: Callable[..., Any]) -> None:
            """Have calls of a method in this thread go to ``run``, until the stack closes."""
            attributes, original = vars(module), getattr(module, name)
            before = {name: attributes[name]} if name in attributes else {}
            attributes[name] = substitute_in_this_thread(run, original)
            stack.callback(attributes.update, before)
            stack.callback(attributes.pop, name)

        names = None if requested.names is None else {name.partition("#")[0] for name in requested.names}
        cells = {}
        repeatable = repeatable_modules(model, names)
        repeated = [(path, module) for path, module in repeatable if id(module) in recorder.rules.roles]
        for path, module in repeatable:
            if (path, module) not in repeated:
                is_within = any(path.startswith(f"{outer}.") for outer, _ in repeated)
                watch = RepeatedModuleHook(recorder, path, module, takes_turns=not is_within)
                hook(_hookable_module(stack, model, module), watch.pre_forward, watch.post_forward)
        for path, module in [*requested.cells, *repeated]:
            if module in KEPT_STATES:
                name, attributes = KEPT_STATES[module]
                replace_method(module, name, KeptStateHook(recorder, path, module, name, attributes).call)
                continue
            cells[id(module)] = cell = CellHook(recorder, path, module)
            hook(_hookable_module(stack, model, module), cell.pre_forward, cell.post_forward)
            if not isinstance(module, torch.jit.ScriptModule) and class_of(module) is None:
                replace_method(module, "forward", partial(cell.run_forward, module.forward))
        hooks_of_module = {key: [cell] for key, cell in cells.items()}
        for path, module, name in step_methods(model, names):
            method = MethodHook(recorder, model, path, module, name, hooks_of_module.setdefault(id(module), []))
            replace_method(module, name, method.run)
        stack.enter_context(replaced_scans(requested.modules, recorder.scans))
        stack.callback(SCANS.reset, SCANS.set(recorder.scans.declared_scan))
        for path, module in (layer for layer in requested.other_layers if layer not in repeated):
            hooks = _OutputHook(recorder, path)
            hook(_hookable_module(stack, model, module), hooks.pre_forward, hooks.post_forward)
        stack.callback(LISTENER.reset, LISTENER.set(StepListener(recorder, model, requested.names)))
        with KernelInterceptor(recorder, owners) as interceptor:
            yield interceptor
        recorder.refuse_unused_states([node_name(path, module, 0) for path, module in requested.recurrent])


class _OutputHook:
    """Pair of hooks that records the tensors of a layer that is not recurrent, separate from the user's."""

    def __init__(self, recorder: CallRecorder, path: str) -> None:
        self.recorder, self.path = recorder, path
        self.inputs: list[Tensor] = []

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record the inputs of a call, as a forward pre-hook, if gradients at layer inputs are kept separate."""
        self.inputs = []
        is_recorded = self.recorder.separate and not self.recorder.paused
        return map_leaves((args, kwargs), partial(self._tap, self.inputs)) if is_recorded else None

    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Record the outputs of a call, as a forward hook."""
        if self.recorder.paused:
            return None
        record = OutputRecord(self.path, self.inputs, [], self.recorder.call_count)
        self.recorder.output_records.append(record)
        self.recorder.call_order.append(record)
        return map_leaves(output, partial(self._tap, record.outputs))

    def _tap(self, points: list[Tensor], value: Any) -> Any:
        """Append a graph node of a tensor to ``points``; return a copy that the user's code may change in place."""
        if not isinstance(value, Tensor):
            return value
        refuse_transformed(self.path, [value])
        is_float = value.is_floating_point()
        # The copy before keeps the gradients of other uses of a tensor apart: a layer may return its input.
        points.append(differentiable(value.clone() if value.requires_grad else value) if is_float else value)
        return points[-1].clone() if is_float else value


#: Page for models whose loop over time is in the user's script.
OUTSIDE = "rl.torch.model(function, module): docs/how-to/loop-outside-the-module.md"
_WITH_GRADIENTS = "The model's forward uses torch.no_grad(); rnnlens ran it with gradients enabled."


def _refuse_unknown_loops(recorder: CallRecorder) -> None:
    """Raise ``RunAgainError`` if calls of a layer may be the steps of a loop that this pass did not record."""
    if not recorder.rules.with_loops and any(call.is_one_of_several for call in layer_calls(recorder)):
        recorder.rules.with_loops = True
        raise RunAgainError


def _refuse_no_calls(recorder: CallRecorder, requested: RequestedLayers, request: Taps) -> None:
    """Raise ``UnsupportedError`` or ``ModelError`` if no requested layer ran where it could be recorded."""
    loops = {recurrence.owner.name for recurrence in recorder.recurrences if not recurrence.owner.is_fused}
    recorder.output_records = [
        record for record in recorder.output_records if record.outputs and record.name not in loops
    ]
    if recorder.recurrences or recorder.output_records or recorder.scans.scan_sizes:
        return
    refuse_scripts(requested.modules)
    refuse_own_loops([(path, module) for path, module in requested.recurrent if path in requested.ran_paths])
    if request.all_must_run and request.record != "outputs":
        for function, family in unread_scans(requested.modules).items():
            raise ModelError(
                f"{family} is not read: no recurrent layer ran in this forward pass.",
                got=function,
                expected="a scan of a known family, or one declared by rl.torch.scan",
                hint="rl.gradients by inputs and weights works unchanged",
            )
        scans = unknown_scans(requested.modules)
        if scans:
            name = scans[0].rpartition(".")[2]
            raise ModelError(
                "No recurrent layer ran in this forward pass, but a scan that rnnlens does not know.",
                got=", ".join(scans),
                expected="a scan of a known family, or one declared by rl.torch.scan",
                hint="for a loop of its own h = rl.torch.step(lambda x, h: ..., x, h) around the equations of its "
                "step; if it computes s_t = a_t s_{t-1} + b_t from (a, b), with time as the second axis: "
                f"{name} = {scans[0]}; {scans[0]} = lambda a, b: rl.torch.scan(a, b, function={name})",
            )
        in_a_loop = [path for path, last in recorder.last_calls.items() if last.count > 1]
        outermost = [path for path in in_a_loop if not any(path.startswith(f"{other}.") for other in in_a_loop)]
        if outermost and not any(recorder.entered.get(path) for path, _ in requested.cells):
            raise ModelError(
                "No recurrent layer ran in this forward pass, but modules that a loop calls.",
                got=", ".join(f"{path}: {recorder.last_calls[path].count} calls" for path in outermost[:6]),
                expected="modules called on what they returned, alone or in turn, or the step of the loop",
                hint="in the loop write h = rl.torch.step(lambda x, h: ..., x, h) around what computes the next state "
                f"h from x and h; is the loop outside of this module? {OUTSIDE}",
            )
        reasons = list(_reasons_of_no_call(recorder, requested))
        keeping = [(path, module, kept) for path, module in requested.modules[1:] if (kept := _kept_tensors(module))]
        reasons += [f"{path} keeps {', '.join(kept)}, which it computed" for path, _, kept in keeping]
        declarations = "".join(
            f"for a state that {path} keeps over a whole sequence, {_declaration(path, module, kept)}; "
            for path, module, kept in keeping[:2]
        )
        raise ModelError(
            "No recurrent layer ran in this forward pass.",
            got="; ".join(reasons[:6]) + (f"; and {len(reasons) - 6} more" if len(reasons) > 6 else "") or None,
            expected="nn.RNN, nn.LSTM, nn.GRU, one of their cells, or a custom cell",
            hint=f"{declarations}rl.torch.cell(module) names a custom cell; in a loop over your own "
            "equations write h = rl.torch.step(lambda x, h: torch.tanh(x @ W + h @ U), x[:, t], h); "
            f"is the loop outside of this module? {OUTSIDE}",
        )


def _kept_tensors(module: nn.Module) -> list[str]:
    """Return where a module keeps tensors (sample, ...) that the pass computed: attributes, or entries of dicts."""
    places = {f"self.{name}": value for name, value in vars(module).items()}
    for name, value in vars(module).items():
        for key, entry in value.items() if isinstance(value, dict) else ():
            is_attribute = isinstance(key, str) and getattr(module, key, None) is entry
            places[f"self.{key}" if is_attribute else f"self.{name}[{key!r}]"] = entry
    return [
        place
        for place, value in places.items()
        if isinstance(value, Tensor) and value.grad_fn is not None and value.dim() > 1
    ]


def _declaration(path: str, module: nn.Module, kept: Sequence[str]) -> str:
    """Return how to record a module that keeps its state: by a method that computes a step, or in its own loop."""
    methods = [
        name
        for user_class in type(module).__mro__
        if not user_class.__module__.startswith("torch.")
        for name, value in vars(user_class).items()
        if inspect.isfunction(value) and not hasattr(nn.Module, name) and positional_names(module, name)
    ]
    if not methods or any("[" in place for place in kept):
        return "write h = rl.torch.step(lambda x, h: ..., x[:, t], h) in its loop, or rl.torch.scan"
    which = "" if len(methods) == 1 else f", where the method that computes one step is one of {', '.join(methods)}"
    states = repr(kept[0] if len(kept) == 1 else tuple(kept))
    return f"rl.torch.cell(model.{path}, method={methods[0]!r}, state={states}){which}"


def _reasons_of_no_call(recorder: CallRecorder, requested: RequestedLayers) -> Iterator[str]:
    """Yield for each module that may be recurrent why no recurrence of it was recorded."""
    for path, _ in requested.recurrent:
        yield f"{path} was not called"
    for path, _ in requested.cells:
        count = recorder.entered.get(path, 0)
        if not count:
            yield f"{path} was not called"
        elif path in recorder.reasons:
            yield f"{path}: {recorder.reasons[path]}"
        elif count == 1:
            yield f"{path} was called once"
        else:
            yield f"{path}: none of its {count} calls receives what the one before returned"


def _assemble_capture(
    recorder: CallRecorder, requested: RequestedLayers, loss: Tensor | None, gradient: Any
) -> Capture:
    """Convert the records of a forward pass to a ``Capture``: calls of the requested layers, and notes."""
    assembler, notes = Assembler(recorder, gradient), recorder.notes
    plain_calls = layer_calls(recorder)
    calls, other_calls = assembler.calls(), assembler.non_recurrent_calls(plain_calls)
    # The gradient of weights that an omitted call shares is the sum over both calls.
    omitted_weights = {call.weights_key for call in calls if not requested.keeps(call.layer)}
    calls = [call for call in calls if requested.keeps(call.layer)]
    for call in calls:
        if call.weights_key in omitted_weights:
            call.weight_grads = None
    value = None if loss is None else float(loss.detach())
    if value is not None and not math.isfinite(value):
        notes.append(f"The loss is {value}.")
    lengths: dict[str, list[int]] = {}
    names_asked = None if requested.names is None else {name.partition("#")[0] for name in requested.names}
    for recurrence in (recurrence for recurrence in recorder.recurrences if not recurrence.owner.is_fused):
        if names_asked is not None and recurrence.owner.name not in names_asked:
            continue
        lengths.setdefault(recurrence.owner.name, []).append(sum(record.steps for record in recurrence.calls))
    notes.extend(broken_recurrences(lengths))
    if recorder.recurrences and all(
        sum(record.steps for record in recurrence.calls) == 1 for recurrence in recorder.recurrences
    ):
        notes.append(f"Every recurrent layer ran a single step. Is the loop over time outside of the model? {OUTSIDE}")
    recorded_names = {recurrence.owner.name for recurrence in recorder.recurrences}
    notes.extend(
        f"{path}: {type(module).__name__}.forward does not call torch's kernel, so its steps were not recorded."
        for path, module in requested.recurrent
        if path in requested.ran_paths and path not in recorded_names and has_own_forward(module)
    )
    notes.extend(_notes_on_further_outputs(recorder))
    if any(needs_equations(module) for _, module in requested.modules[:1]):
        notes.append(
            "Triton kernels of flash-linear-attention do not run on a CPU: their equations in torch ran in their "
            "place; in the reference run of the certificate, scans ran step by step."
        )
    scans = recorder.scans.records
    numbers = call_numbers([record.layer for record in scans])
    sequences = [
        _sequence_call(item.layer + number, item, gradient) for item, number in zip(scans, numbers, strict=True)
    ]
    # In the order of their calls, without candidates that are no cell.
    names = {
        id(recurrence): node_list
        for recurrence, node_list in zip(recorder.recurrences, node_names(recorder.recurrences), strict=True)
    }
    names |= {id(call.records[0]): [call.name] for call in plain_calls}
    kept_names = {call.layer for call in calls} | {call.layer for call in other_calls}
    order = tuple(name for item in recorder.call_order for name in names.get(id(item), ()) if name in kept_names)
    scanned = {path: samples for path, (samples, _) in recorder.scans.scan_sizes.items()}
    loops = loops_of_layers(recorder, plain_calls)
    return Capture(calls, other_calls, sequences, value, notes=notes, order=order, scanned=scanned, loops=loops)


def _notes_on_further_outputs(recorder: CallRecorder) -> list[str]:
    """Return a note for each requested layer that returns several tensors, of which the first is recorded."""
    outputs_by_name = {record.name: record.outputs for record in recorder.output_records if len(record.outputs) > 1}
    return [
        f"{name} returns {1 + len(further)} tensors: output is the first, of shape {tuple(recorded.shape)}; "
        f"not traced are those of shape {', '.join(str(tuple(other.shape)) for other in further)}."
        for name, (recorded, *further) in outputs_by_name.items()
    ]


def _is_cut_above(recorder: CallRecorder, links: Sequence[ChainLink] | None, loss: Tensor | None) -> bool:
    """Return whether the pass was a chain whose loss depends on the recurrent layers only through the last one."""
    names = [name for names in node_names(recorder.recurrences) for name in names]
    if links is None or loss is None or not names or [link.name for link in links if link.kind == "recurrent"] != names:
        return False
    if (
        any(len(recurrence.calls) != 1 or recurrence.owner.autocast for recurrence in recorder.recurrences)
        or recorder.output_records
        or recorder.computed_weights
    ):
        return False
    *lower_outputs, top_output = [
        record.output for recurrence in recorder.recurrences for record in recurrence.calls[0].layer_records
    ]
    return not reaches(loss, lower_outputs, without=[top_output, *_state_taps(recorder)])


def _state_taps(recorder: CallRecorder) -> list[Tensor]:
    return [
        tap
        for recurrence in recorder.recurrences
        for call in recurrence.calls
        for tap in call.state_taps
        if tap is not None
    ]


def _gradients(recorder: CallRecorder, loss: Tensor, model_tensors: Sequence[Tensor], *, topmost: bool) -> Any:
    """Differentiate the loss; return a function from a recorded tensor to its gradient, or None without a path.

    ``model_tensors``: tensors of the whole model whose gradients may bypass recurrent calls. ``topmost``: of the
    outputs of recurrent layers only the last one is needed.
    """
    calls = [call for recurrence in recorder.recurrences for call in recurrence.calls]
    taps = [layer_record.output for call in calls for layer_record in call.layer_records][-1 if topmost else 0 :]
    taps += _state_taps(recorder)
    if recorder.weight_grads:
        taps += [weight for call in calls for weight in call.weights()]
    taps += [
        *(record.outputs[0] for record in recorder.output_records),
        *(tap for record in recorder.scans.records for tap in (record.output, record.last_state)),
    ]
    other_tensors = list(model_tensors)
    if recorder.separate:
        other_tensors += [
            t
            for call in calls
            for t in (*(layer_record.input for layer_record in call.layer_records), *call.link.initial)
        ]
    # The step function of a loop may read tensors of this graph when it is called again.
    has_loops = any(recurrence.owner.is_declared for recurrence in recorder.recurrences)
    gradients = gradients_of(loss, [*taps, *other_tensors], retain_graph=has_loops)
    if any(tap.requires_grad for tap in taps) and not any(id(tap) in gradients for tap in taps):
        recorder.notes.append("No path leads from the loss to any layer asked for: every gradient is zero.")
    return lambda tap: gradients.get(id(tap))


def _sequence_call(name: str, record: SequenceCall, gradient: Any) -> SequenceCall:
    """Return a recorded scan without graph; the gradient is zero where no path leads from the loss."""
    output, gate, grad, last_state_grad = record.output, record.gate, None, None
    if gradient is not None:
        grad, last_state_grad = gradient(output), _copy_or_none(gradient(record.last_state))
        grad = torch.zeros_like(output) if grad is None else grad.detach()
    return replace(
        record,
        layer=name,
        cell=record.cell.with_parts(Tensor.detach),
        output=output.detach(),
        output_grad=grad,
        gate=None if gate is None else gate.detach(),
        values=None,
        last_state=None,
        last_state_grad=last_state_grad,
    )


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


def _hookable_module(stack: ExitStack, model: nn.Module, module: nn.Module) -> nn.Module:
    """Return a module to which hooks can be added: a TorchScript module is wrapped until the stack closes."""
    if not isinstance(module, torch.jit.ScriptModule):
        return module
    shell = _ScriptWrapper(module)
    # A list, since the wrapper itself would be among the modules that are still to come.
    for parent in [parent for parent in nn.Module.modules(model) if not isinstance(parent, torch.jit.ScriptModule)]:
        for name in [name for name, child in parent._modules.items() if child is module]:
            stack.callback(parent._modules.__setitem__, name, module)
            parent._modules[name] = shell
    return shell
