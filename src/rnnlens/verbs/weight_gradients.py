"""Gradients of the weights of every layer: recurrent ones by sweeps, all others by the framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..adapters.protocol import Capture, LayerWeights, Port, RecurrentCall, Taps
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
class WeightGradients:
    """Weight gradients by layer."""

    #: By layer, direction and name, in the cell's layout.
    recurrent: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    #: By layer and name, for non-recurrent layers; a weight without a path to the loss has no entry.
    other_layers: dict[str, dict[str, Array]] = field(default_factory=dict)
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
) -> WeightGradients:
    """Differentiate the loss by all weights; ``by_time`` gives each step's part for recurrent layers."""
    gradients, adapter, model, batch = WeightGradients(), call.adapter, call.model, call.batch
    recurrent = {name for name, layer in weights.items() if layer.cells}
    if recurrent:
        # A layer whose variables are all another layer's has no entry, but a part in their gradients.
        layer_infos = {**call.catalogue.recurrent, **call.catalogue.sequences}
        tied = layer_infos.keys() - weights.keys()
        # The forward pass need not call every layer, but a layer that cannot be captured is refused.
        strict = any("refused" in info.options and name in recurrent | tied for name, info in layer_infos.items())
        taps = Taps.everything(sorted(recurrent | tied), all_must_run=strict)
        gradients.capture = adapter.run(model, batch, taps).capture
        gradients.loss = gradients.capture.loss
        for name in recurrent:
            calls = _calls_of_layer(on_host(gradients.capture.calls), name, by_time)
            if not calls:  # the forward pass does not call it: no gradient reaches its weights
                continue
            gradients.recurrent[name], sums = _recurrent_gradients(calls, by_time)
            gradients.checks += [entry.check() for entry in sums]
            gradients.scales[name] = max((entry.scale for entry in sums), default=0.0)
    other_weights = [(name, key) for name, layer in weights.items() for key in outside_cells(layer)]
    other_gradients = (
        _captured_other_gradients(call, gradients.capture, weights, other_weights) if other_weights else {}
    )
    if other_gradients is None:
        loss_port, ports = Port("loss"), [Port("weight", layer, key=key) for layer, key in other_weights]
        with adapter.run(model, batch, Taps.ports([loss_port], ports)) as run:
            gradients.loss, other_gradients = float(run.values[loss_port]), {}
            grads = run.pull({loss_port: (run.values[loss_port] * 0 + 1)[None]})
            for (layer, key), port in zip(other_weights, ports, strict=True):
                if (grad := grads.get(port)) is not None:
                    other_gradients.setdefault(layer, {})[key] = to_host(grad)[0]
    gradients.other_layers = other_gradients
    return gradients


def _captured_other_gradients(
    call: ModelRequest,
    capture: Capture | None,
    weights: Mapping[str, LayerWeights],
    other_weights: Sequence[tuple[str, str]],
) -> dict[str, dict[str, Array]] | None:
    """Return gradients of weights outside of known cells, as captured; None if the capture lacks one of them."""
    gradients: dict[str, dict[str, Array]] = {}
    for layer, key in other_weights:
        location = None if capture is None else call.facts.weight_location(layer, None, key)
        if capture is None or location is None or location.tied or capture.alteration:
            return None
        if location.name not in capture.outside_weight_grads:
            return None
        grad = capture.outside_weight_grads[location.name]
        if grad is not None:
            gradients.setdefault(layer, {})[key] = array = location.take(to_host(grad))
            if array.shape != tuple(weights[layer].values[key].shape):
                return None
    return gradients


def _calls_of_layer(calls: Iterable[RecurrentCall], name: str, by_time: bool | str) -> list[RecurrentCall]:
    """Return the calls of a layer and of layers tied to it, since dL/dW sums over all that share W.

    ``by_time`` excludes tied layers, and the comparison with the framework's dL/dW.
    """
    own_calls: list[RecurrentCall] = []
    other_calls: list[RecurrentCall] = []
    for call in calls:
        (own_calls if call.layer.partition("#")[0] == name else other_calls).append(call)
    keys = {call.weights_key for call in own_calls if call.weights_key}
    tied = [call for call in other_calls if call.weights_key in keys]
    if not tied or not by_time:
        return own_calls + tied
    return [replace(call, weight_grads=None) for call in own_calls]


def _recurrent_gradients(
    calls: Sequence[RecurrentCall], by_time: bool | str
) -> tuple[dict[str, dict[str, Any]], list[WeightSum]]:
    """Return weight gradients of a layer per direction, summed over its calls, and the sums to check.

    ``by_time``: calls of one layer are added step by step; stepwise calls of the user's loop are concatenated in
    time.
    """
    _refuse_unaligned(calls, by_time)
    total: dict[str, dict[str, Any]] = {}
    sums: dict[str, WeightSum] = {}
    for call in calls:
        steps = int(call.input.shape[1])
        if by_time is True:
            values = sum(int(np.prod(tuple(w.shape))) for w in call.cell.weights().values())
            message = f"The weight gradients of {call.layer!r} at each of {steps} steps exceed the memory limit."
            size = steps * values * to_host(call.input[:1, :1]).itemsize
            must_fit(message, size, 'measure="norm" keeps one norm per step and gate')
        run = Replay.from_call(call)
        adjoints = sweep(call, run, call.output_grad, call.final_state_grad, call.state_grad)
        summed = weight_gradients(run, adjoints)
        if call.weight_grads is not None:  # to be compared with the framework's dL/dW
            untied = {name: grad for name, grad in call.weight_grads.items() if name not in call.tied}
            scale = rounding_of(run, adjoints).weights
            sums.setdefault(call.direction, WeightSum(call, untied)).add(summed, steps, scale)
        if by_time:
            summed = (
                _norms_by_time(run, adjoints) if by_time == "norm" else weight_gradients(run, adjoints, by_time=True)
            )
        by_name = total.setdefault(call.direction, {})
        for name, grad in summed.items():
            if name not in by_name:
                by_name[name] = to_host(grad)
            elif by_time and call.stepwise:
                by_name[name] = np.concatenate([by_name[name], to_host(grad)])
            else:
                by_name[name] = to_host(grad) + by_name[name]
        if not by_time and call.weight_grads is not None:  # dL/dW is over all that share W
            by_name |= {name: to_host(call.weight_grads[name]) for name in call.tied if name in summed}
    return total, list(sums.values())


def _norms_by_time(run: Replay, adjoints: Adjoint) -> dict[str, Array]:
    """Return Frobenius norms of each step's contribution to dL/dW, (time[, gate]), in blocks of eight steps."""
    cell, xp, time = run.cell, run.xp, run.input.shape[1]
    norm_blocks: dict[str, list[Array]] = {}
    for start in range(0, time, 8):
        grads = weight_gradients(run, adjoints, by_time=True, times=slice(start, start + 8))
        for name, grad in grads.items():
            gated = has_gates(cell.parameters[name])
            split = affine.split_gates(grad, len(cell.gates), xp) if gated else grad
            axes = tuple(i for i in range(1, len(split.shape)) if not gated or i != len(split.shape) - 2)
            norm_blocks.setdefault(name, []).append(xp.sqrt(xp.sum(split * split, axis=axes)))
    return {name: xp.concat(pieces, axis=0) for name, pieces in norm_blocks.items()}


def _refuse_unaligned(calls: Sequence[RecurrentCall], by_time: bool | str) -> None:
    """Raise for calls of different lengths, and for norms by step of a layer called several times."""
    sequence_calls = [call for call in calls if not call.stepwise]
    is_called_again = len(sequence_calls) > len({call.direction for call in sequence_calls})
    lengths = sorted({int(call.input.shape[1]) for call in sequence_calls})
    measure = ', measure="norm"' if by_time == "norm" else ""
    if is_called_again and (by_time == "norm" or (by_time and len(lengths) > 1)):
        raise UnsupportedError(
            f"Layer {sequence_calls[0].layer.partition('#')[0]!r} is called more than once, and the calls have no "
            "common time axis.",
            got=f"by_time=True{measure} over {len(sequence_calls)} calls of {' and '.join(map(str, lengths))} steps",
            expected="calls of one length, and by_time=True",
            hint="rl.weights(...) without by_time, or a model that calls the layer once",
        )
