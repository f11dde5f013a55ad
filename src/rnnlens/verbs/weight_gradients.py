"""Gradients of the weights of every layer: recurrent ones by sweeps, all others by the framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..adapters.protocol import Capture, CaptureRequest, LayerWeights, Port, RecurrentCall
from ..errors import UnsupportedError
from ..recurrence.adjoint import weight_gradients
from ..recurrence.cells import affine
from ..recurrence.cells.cell import has_gates
from ..recurrence.replay import Replay
from ..recurrence.rounding import rounding_of
from ..recurrence.trajectory import Adjoint
from ..results.checks import Check
from ..results.schema import to_host
from ..settings import must_fit
from ..typing import Array
from .recurrent_layers import WeightSum, on_host, sweep
from .request import ModelRequest
from .weight_layout import outside_cells


@dataclass
class FoundGradients:
    """Weight gradients by layer."""

    #: By layer, direction and name, in the cell's layout.
    recurrent: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    #: By layer and name, for non-recurrent layers; a weight without a path to the loss has no entry.
    others: dict[str, dict[str, Array]] = field(default_factory=dict)
    #: The loss of the batch, the self-checks of the sweeps, and the captured pass.
    loss: float | None = None
    checks: list[Check] = field(default_factory=list)
    capture: Capture | None = None
    #: Scale of rounding in the gradients, by recurrent layer.
    scales: dict[str, float] = field(default_factory=dict)


def find_gradients(
    call: ModelRequest,
    weights: Mapping[str, LayerWeights],
    *,
    by_time: bool | str,
) -> FoundGradients:
    """Differentiate the loss by all weights; ``by_time`` gives each step's part for recurrent layers."""
    found, adapter, model, batch = FoundGradients(), call.adapter, call.model, call.batch
    recurrent = {name for name, layer in weights.items() if layer.cells}
    if recurrent:
        # A layer whose variables are all another layer's has no entry, but a part in their gradients.
        described = {**call.known.recurrent, **call.known.sequences}
        tied = described.keys() - weights.keys()
        # The forward pass need not call every layer, but a layer that cannot be captured is refused.
        strict = any("refused" in info.options and name in recurrent | tied for name, info in described.items())
        request = CaptureRequest(layers=tuple(sorted(recurrent | tied)), boundaries=True, all_must_run=strict)
        found.capture = adapter.capture(model, batch, request)
        found.loss = found.capture.loss
        for name in recurrent:
            calls = _of_layer(on_host(found.capture.calls), name, by_time)
            if not calls:  # the forward pass does not call it: no gradient reaches its weights
                continue
            found.recurrent[name], sums = _recurrent_gradients(calls, by_time)
            found.checks += [entry.check() for entry in sums]
            found.scales[name] = max((entry.scale for entry in sums), default=0.0)
    others = [(name, key) for name, layer in weights.items() for key in outside_cells(layer)]
    beside = _captured_beside(call, found.capture, weights, others) if others else {}
    if beside is None:
        start, ports = Port("loss"), [Port("weight", layer, key=key) for layer, key in others]
        with adapter.pullback(model, batch, [start], ports) as pullback:
            found.loss, beside = float(pullback.values[start]), {}
            grads = pullback.vjp({start: (pullback.values[start] * 0 + 1)[None]})
            for (layer, key), port in zip(others, ports, strict=True):
                if (grad := grads.get(port)) is not None:
                    beside.setdefault(layer, {})[key] = to_host(grad)[0]
    found.others = beside
    return found


def _captured_beside(
    call: ModelRequest,
    capture: Capture | None,
    weights: Mapping[str, LayerWeights],
    others: Sequence[tuple[str, str]],
) -> dict[str, dict[str, Array]] | None:
    """Return gradients of weights outside of known cells, as captured; None if the capture lacks one of them."""
    taken: dict[str, dict[str, Array]] = {}
    for layer, key in others:
        location = None if capture is None else call.adapter.place(call.model, layer, None, key)
        if capture is None or location is None or location.tied or capture.altered:
            return None
        if location.name not in capture.beside:
            return None
        grad = capture.beside[location.name]
        if grad is not None:
            taken.setdefault(layer, {})[key] = array = location.take(to_host(grad))
            if array.shape != tuple(weights[layer].values[key].shape):
                return None
    return taken


def _of_layer(calls: Iterable[RecurrentCall], name: str, by_time: bool | str) -> list[RecurrentCall]:
    """Return the calls of a layer and of layers tied to it, since dL/dW sums over all that share W.

    ``by_time`` excludes tied layers, and the comparison with the framework's dL/dW.
    """
    own: list[RecurrentCall] = []
    others: list[RecurrentCall] = []
    for call in calls:
        (own if call.layer.partition("#")[0] == name else others).append(call)
    keys = {call.weights_key for call in own if call.weights_key}
    tied = [call for call in others if call.weights_key in keys]
    if not tied or not by_time:
        return own + tied
    return [replace(call, weight_grads=None) for call in own]


def _recurrent_gradients(
    calls: Sequence[RecurrentCall], by_time: bool | str
) -> tuple[dict[str, dict[str, Any]], list[WeightSum]]:
    """Return weight gradients of a layer per direction, summed over its calls, and the sums to check.

    ``by_time``: calls of one layer are added step by step; stepwise calls of the user's loop are concatenated in
    time.
    """
    _must_align(calls, by_time)
    total: dict[str, dict[str, Any]] = {}
    sums: dict[str, WeightSum] = {}
    for call in calls:
        steps = int(call.input.shape[1])
        if by_time is True:
            values = sum(int(np.prod(tuple(w.shape))) for w in call.cell.weights().values())
            what = f"The weight gradients of {call.layer!r} at each of {steps} steps exceed the memory limit."
            size = steps * values * to_host(call.input[:1, :1]).itemsize
            must_fit(what, size, 'measure="norm" keeps one norm per step and gate')
        run = Replay.from_call(call)
        result = sweep(call, run, call.output_grad, call.final_state_grad, call.state_grad)
        whole = weight_gradients(run, result)
        if call.weight_grads is not None:  # to be compared with the framework's dL/dW
            alone = {name: grad for name, grad in call.weight_grads.items() if name not in call.tied}
            scale = rounding_of(run, result).weights
            sums.setdefault(call.direction, WeightSum(call, alone)).add(whole, steps, scale)
        if by_time:
            whole = _norms_by_time(run, result) if by_time == "norm" else weight_gradients(run, result, by_time=True)
        by_name = total.setdefault(call.direction, {})
        for name, grad in whole.items():
            if name not in by_name:
                by_name[name] = to_host(grad)
            elif by_time and call.stepwise:
                by_name[name] = np.concatenate([by_name[name], to_host(grad)])
            else:
                by_name[name] = to_host(grad) + by_name[name]
        if not by_time and call.weight_grads is not None:  # dL/dW is over all that share W
            by_name |= {name: to_host(call.weight_grads[name]) for name in call.tied if name in whole}
    return total, list(sums.values())


def _norms_by_time(run: Replay, result: Adjoint) -> dict[str, Array]:
    """Return Frobenius norms of each step's contribution to dL/dW, (time[, gate]), in blocks of eight steps."""
    cell, xp, time = run.cell, run.xp, run.input.shape[1]
    parts: dict[str, list[Array]] = {}
    for start in range(0, time, 8):
        grads = weight_gradients(run, result, by_time=True, times=slice(start, start + 8))
        for name, grad in grads.items():
            gated = has_gates(cell.parameters[name])
            split = affine.split_gates(grad, len(cell.gates), xp) if gated else grad
            axes = tuple(i for i in range(1, len(split.shape)) if not gated or i != len(split.shape) - 2)
            parts.setdefault(name, []).append(xp.sqrt(xp.sum(split * split, axis=axes)))
    return {name: xp.concat(pieces, axis=0) for name, pieces in parts.items()}


def _must_align(calls: Sequence[RecurrentCall], by_time: bool | str) -> None:
    """Raise for calls of different lengths, and for norms by step of a layer called several times."""
    whole = [call for call in calls if not call.stepwise]
    several = len(whole) > len({call.direction for call in whole})
    lengths = sorted({int(call.input.shape[1]) for call in whole})
    asked = ', measure="norm"' if by_time == "norm" else ""
    if several and (by_time == "norm" or (by_time and len(lengths) > 1)):
        raise UnsupportedError(
            f"Layer {whole[0].layer.partition('#')[0]!r} is called more than once, and the calls have no common "
            "time axis.",
            got=f"by_time=True{asked} over {len(whole)} calls of {' and '.join(map(str, lengths))} steps",
            expected="calls of one length, and by_time=True",
            hint="rl.weights(...) without by_time, or a model that calls the layer once",
        )
