"""Causes of a gradient that is missing, zero, or to be read with care; the first one that applies is reported.

Where the model's structure does not show the cause, an experiment does: a tensor is perturbed and the target compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import numpy as np
import xarray as xr

from ... import data
from ...adapters.protocol import Batch, Capture, Port, Taps
from ...autodiff.tensors import converted_like, dtype_name
from ...errors import LayerNotFoundError, RnnlensError
from ...results.gradients import Reason, Reasons
from ...results.schema import to_host
from ...typing import Array
from ...vocabulary import SAMPLE, TIME
from ..axes import BatchAxes
from ..names import Catalogue, TensorName, names_behind_ids
from ..recurrent_layers import ReplayedLayers, outputs_of, runs_layer, stack_directions
from ..request import in_turn
from ..weight_layout import sources
from .pull import batch_gradients
from .request import BatchRequest, is_trainable
from .target import Target

#: Factor by which a target is scaled up to test whether its gradient underflows in its dtype.
LIFT = 2.0**12
#: Relative sizes of perturbations. The responses of a smooth target to the last two have about the same ratio.
MUCH, LITTLE, LESS = 1.0, 1e-2, 1e-3

Response = Literal["smoothly", "in jumps", "not", "unknown"]


def observed_value(request: BatchRequest) -> Array:
    """Return the value of the target, from one captured forward pass."""
    batch, with_loss = request.batch, request.with_loss
    catalogue, layer_names = request.catalogue, (str(leaf.layer) for leaf in request.leaves if leaf.layer is not None)
    layers: tuple[str, ...] | None = tuple(dict.fromkeys(layer_names))
    if not layers:  # any layer will do, for the output of the model; None stands for all recurrent ones
        layers = None if catalogue.recurrent else (*catalogue.weights, *catalogue.layers)[:1]
    taps = Taps.direct(layers) if with_loss else Taps.states(layers)
    capture = request.adapter.run(request.model, batch if with_loss else batch.without_loss(), taps).capture
    batch_axes, values = BatchAxes(request.axes, request.samples), []
    for leaf in request.leaves:
        value = _value(request, leaf, capture)
        names = catalogue.dims(leaf, value)
        if catalogue.is_free(leaf):
            value, names = batch_axes.split_folded(leaf.port(), value)
        values.append(xr.DataArray(value, dims=names))
    return np.asarray(request.evaluate(batch_axes, values)[0], dtype=np.float64)


def _value(request: BatchRequest, leaf: TensorName, capture: Capture) -> Array:
    if leaf.kind == "loss":
        return np.asarray(capture.loss)
    if request.catalogue.is_inside(leaf):
        return ReplayedLayers.of(capture.calls).value(leaf)
    if leaf.layer is None:
        return to_host(data.leaves_of(capture.outputs)[leaf.index])
    for call in capture.other_calls:
        if call.layer == leaf.layer:
            return to_host(call.output)
    outputs = [to_host(call.output) for call in capture.calls if call.layer == leaf.layer]
    if not outputs:
        raise LayerNotFoundError(f"Layer {leaf.layer!r} was not called in this forward pass.")
    return stack_directions(outputs, request.catalogue.space(leaf.layer))


class Experiments:
    """Perturbation experiments on a model, one batch and one target, with results cached for all tensors."""

    def __init__(self, request: BatchRequest) -> None:
        self.request, self.batch, self.target = request, request.batch, request.target
        #: Masks of all batches of a data set by layer; None before they are read.
        self.masks_of_all: dict[str, Array] | None = None
        self._values: dict[str, Array] = {}
        self._answers: dict[tuple[str, Port], Response] = {}
        #: Whether a layer is called in this forward pass, by name.
        self.runs = cache(partial(runs_layer, request.adapter, request.model, request.batch))

    def response(self, name: TensorName, request: BatchRequest | None = None) -> Response:
        """Return how a target, by default that of the call, changes if a tensor or its layer's output is perturbed."""
        request = request or self.request
        port = port_to_perturb(name, request.catalogue)
        key = (request.target.text, port)
        if key not in self._answers:
            self._answers[key] = self._experiment(port, request)
        return self._answers[key]

    @cached_property
    def masks(self) -> dict[str, Array]:
        """Masks by node, of the recurrent layers that have one."""
        try:
            run = self.request.adapter.run(self.request.model, self.batch.without_loss(), Taps.states())
            capture = run.capture
        except RnnlensError:
            return {}
        return {call.layer: to_host(call.mask) for call in capture.calls if call.mask is not None}

    @cached_property
    def dead_relus(self) -> Mapping[str, int]:
        """Relu layers whose outputs are all exactly 0, with the number of outputs."""
        relus = self.request.catalogue.facts.having("relu")
        outputs = outputs_of(self.request.adapter, self.request.model, self.batch, relus) if relus else {}
        return {name: int(output.size) for name, output in outputs.items() if output.size and not output.any()}

    def _experiment(self, port: Port, request: BatchRequest) -> Response:
        target = request.target
        reduce = "sum" if target.per_sample and target.reduce is None else target.reduce
        request = replace(request, target=replace(target, per_sample=False, reduce=reduce))
        if target.text not in self._values:
            self._values[target.text] = observed_value(request)
        responses = []
        for size in (MUCH, LITTLE, LESS):
            if port.kind == "input":
                perturbed_batch = replace(self.batch, x=_perturbed_input(self.batch.x, port.index, size))
                value = observed_value(replace(request, batch=perturbed_batch))
            else:
                with request.adapter.perturbed_port(request.model, port, size) as is_possible:
                    if not is_possible:
                        return "unknown"
                    value = observed_value(request)
            responses.append(float(np.abs(value - self._values[target.text]).max()))
        large_response, small_response, smaller_response = responses
        if not large_response and not small_response:
            return "not"
        return (
            "smoothly"
            if smaller_response and LITTLE / LESS / 3 < small_response / smaller_response < 3 * LITTLE / LESS
            else "in jumps"
        )


def port_to_perturb(name: TensorName, catalogue: Catalogue) -> Port:
    """Return the port that is perturbed to test a tensor: the weight, the input, or its layer's output."""
    if name.kind == "weight":
        return Port("weight", str(name.layer), key=sources(catalogue.weights[str(name.layer)])[name.key][0].key)
    if name.layer is None:
        return Port("input", index=name.index)
    return Port("output", name.layer.partition("#")[0])


def _perturbed_input(x: Any, index: int, size: float) -> Any:
    """Perturb one input of the batch by a fixed random pattern of relative size ``size``; integers stay unchanged."""
    position = -1

    def perturb(leaf: Any) -> Any:
        nonlocal position
        position += 1
        if position != index or is_integer(leaf):
            return leaf
        array = to_host(leaf)
        magnitude = float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) or 1.0
        perturbed = array + (size * magnitude * np.random.default_rng(0).normal(size=array.shape)).astype(array.dtype)
        return converted_like(perturbed, leaf)

    return data.map_leaves(perturb, x)


def is_integer(leaf: Any) -> bool:
    """Return whether an array has an integer or bool dtype, so that it has no gradient."""
    return not any(word in dtype_name(leaf) for word in ("float", "complex"))


Cause = Callable[[Experiments, TensorName], Reason | None]


def find_reason(trials: Experiments, name: TensorName, *, exists: bool) -> Reason:
    """Return why a tensor has no gradient or, if ``exists``, why its gradient is zero."""
    causes: list[Cause] = (
        [_integer_input_reason, _unused_layer_reason]
        if exists
        else [_integer_input_reason, _obstacle_reason, _unused_layer_reason]
    )
    if exists:
        causes += [_masked_out_reason, _underflow_reason, _relu_dead_reason]
    for find_cause in causes:
        reason = find_cause(trials, name)
        if reason is not None:
            return reason
    return _reason_by_experiment(trials, name, exists=exists)


def _obstacle_reason(trials: Experiments, name: TensorName) -> Reason | None:
    """Return the obstacle that the adapter finds in the model's structure."""
    request = trials.request
    target_ports = [
        leaf.port() if leaf.layer is None else port_to_perturb(leaf, request.catalogue) for leaf in request.leaves
    ]
    lower_port = port_to_perturb(name, request.catalogue)
    obstacle = request.adapter.facts(request.model, trials.batch).find_obstacle(target_ports, lower_port)
    return None if obstacle is None else Reason(name.text, obstacle.code, obstacle.sentence, obstacle.remedy)


def _integer_input_reason(trials: Experiments, name: TensorName) -> Reason | None:
    leaves = data.leaves_of(trials.batch.x)
    if name.kind != "input" or name.layer is not None or name.index >= len(leaves):
        return None
    if not is_integer(leaves[name.index]):
        return None
    dtype = dtype_name(leaves[name.index])
    sentence = f"{name.text} holds integers ({dtype}): integers have no derivative."
    request = trials.request
    alternatives = names_behind_ids(request.adapter, request.model, trials.batch, request.catalogue)
    remedy = " or ".join(_suggested_call(trials.target, wrt=f'"{tensor}"') for tensor in alternatives)
    return Reason(name.text, "integer_input", sentence, remedy or 'pass floats: x.astype("float32")')


def _unused_layer_reason(trials: Experiments, name: TensorName) -> Reason | None:
    layer = str(name.layer).partition("#")[0]
    if name.layer is None or trials.runs(layer):
        return None
    sentence = f"Layer {layer!r} was not called in this forward pass, so the loss does not depend on it."
    return Reason(name.text, "unused_layer", sentence, f"call {layer!r} in the model, or leave it out of wrt=")


def _masked_out_reason(trials: Experiments, name: TensorName) -> Reason | None:
    """Return a reason if all steps of the target are masked, or all steps of all layers."""
    masks = trials.masks
    for leaf in trials.request.leaves:
        mask = masks.get(str(leaf.layer))
        if mask is None or leaf.kind != "state":
            continue
        steps = np.atleast_1d(np.arange(mask.shape[1])[trials.target.at.get(TIME, slice(None))])
        unmasked_steps = np.flatnonzero(mask.any(axis=0))
        if not mask[:, steps].any() and len(unmasked_steps):
            listing = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
            sentence = f"Every sample is masked at time {listing}: the state there is the previous one, carried over."
            remedy = _suggested_call(trials.target, at=f'{{"time": {int(unmasked_steps[0])}}}', wrt=f'"{name.text}"')
            return Reason(name.text, "masked_out", sentence, remedy)
    if masks and not any(mask.any() for mask in masks.values()):
        sentence = "Every step of every sample is masked, so no input reaches a state."
        return Reason(name.text, "masked_out", sentence, "rl.trace(model, x), variable mask, to see what masks it")
    return None


def _underflow_reason(trials: Experiments, name: TensorName) -> Reason | None:
    """Return the reason "underflow" if a half-precision gradient is 0, but not after the target is scaled up."""
    request = trials.request
    dtypes = [submodule.dtype for submodule in request.catalogue.facts.submodules.values()]
    dtypes.append(str(request.provenance().get("dtype", "")))
    dtype = next((dtype for dtype in dtypes if dtype in ("float16", "bfloat16")), None)
    if dtype is None:
        return None
    lifted_request = replace(request, wrt=(name,), scale=request.scale * LIFT)
    lifted_gradient = batch_gradients(lifted_request).gradients[name]
    if lifted_gradient is None or not np.any(lifted_gradient):
        return None
    size = float(np.abs(lifted_gradient).max())
    sentence = f"The gradient underflows in {dtype}: its largest entry, {size:.1g}, became 0 in the backward pass."
    remedy = "the same call on the model in float32; to train, a loss scale (LossScaleOptimizer, GradScaler)"
    return Reason(name.text, "underflow", sentence, remedy)


def _relu_dead_reason(trials: Experiments, name: TensorName) -> Reason | None:
    """Return a reason if a relu between tensor and target has only zero outputs on this batch."""
    dead_relu = next(((n, c) for n, c in trials.dead_relus.items() if _lies_between(trials, n, name)), None)
    if dead_relu is None:
        return None
    layer, count = dead_relu
    sentence = f"All {count} outputs of the relu {layer!r} are 0 on this batch: its gradient is 0."
    remedy = f'rl.trace(model, x, layers=["{layer}"]) shows it; a lower learning rate or a leaky relu revives it'
    return Reason(name.text, "relu_dead", sentence, remedy)


def _lies_between(trials: Experiments, layer: str, name: TensorName) -> bool:
    """Return whether the target depends on a layer's output whose gradient by the tensor is zero."""
    output = TensorName(f"{layer}.output", "output", layer)
    if trials.response(output) == "not":
        return False
    target = Target(output.text, {}, "sum", per_sample=False)
    between_request = replace(trials.request, named=(output,), function=None, wrt=(name,), scale=1.0, target=target)
    try:
        grad = batch_gradients(between_request).gradients[name]
    except RnnlensError:
        return False
    return grad is not None and not np.any(grad)


def _reason_by_experiment(trials: Experiments, name: TensorName, *, exists: bool) -> Reason:
    """Perturb a tensor; return the reason for its missing or zero gradient that the target's change shows."""
    target_text = _target_as_text(trials.target)
    response = trials.response(name)
    if response == "smoothly" and not exists:
        sentence = (
            f"{target_text} depends on {name.text}, but a stop_gradient or detach in between blocks the gradient."
        )
        suggestion = _suggested_call(trials.target, wrt="<a tensor behind it>")
        return Reason(
            name.text, "stop_gradient", sentence, f"{suggestion}; remove it to train {name.layer or name.text!r}"
        )
    if response in ("smoothly", "in jumps"):
        sentence = (
            f"{target_text} depends on {name.text} only in jumps: an argmax, a rounding, "
            "a comparison or a conversion to integers lies in between."
        )
        suggested_call = _suggested_call(
            trials.target, of='"<the layer before that>.output"', at=None, wrt=f'"{name.text}"'
        )
        return Reason(name.text, "non_differentiable", sentence, suggested_call)
    if response == "unknown":
        sentence = f"{name.text} gets no gradient from {target_text}; perturbing it did not show why."
        remedy = _suggested_call(trials.target, of='"output"', at=None, wrt=f'"{name.text}"')
        return Reason(name.text, "unknown", sentence, remedy)
    if exists:
        sentence = f"{target_text} is connected to {name.text}, but does not change with it on this batch."
        return Reason(name.text, "no_effect", sentence, "another batch, or reduce= with weights: a sum may cancel")
    return _not_on_path_reason(trials, name)


def _not_on_path_reason(trials: Experiments, name: TensorName) -> Reason:
    """Return the reason for a tensor that the target does not depend on; it states whether the output depends on it."""
    target_text, target = _target_as_text(trials.target), trials.target
    if name.layer is None:
        remedy = _suggested_call(trials.target, of='"output"', at=None, wrt=f'"{name.text}"')
        return Reason(name.text, "not_on_path", f"{target_text} does not depend on {name.text}.", remedy)
    output_target = replace(target, text="output", at={}, reduce="norm", per_sample=False)
    output_request = replace(
        trials.request, named=(TensorName("output", "output"),), function=None, scale=1.0, target=output_target
    )
    if target.text not in ("output", "loss") and trials.response(name, output_request) != "not":
        remedy = _suggested_call(trials.target, of='"output"', at=None, wrt=f'"{name.text}"')
        sentence = f"{name.text} affects the output, but not {target_text}: the branch between them was cut off."
        return Reason(name.text, "not_on_path", sentence, remedy)
    sentence = f"{target_text} does not depend on {name.text}; nor does the output of the model on this batch."
    return Reason(name.text, "not_on_path", sentence, f"leave it out of wrt=, or see how {name.layer!r} is used")


def _target_as_text(target: Target) -> str:
    """Return the target as text: a name in quotes, or the name of a callable."""
    return target.text if target.text.startswith("<") else f'"{target.text}"'


def _suggested_call(target: Target, **changed: str | None) -> str:
    """Return a suggested call: the user's call with some arguments changed, or left out if None."""
    reduce = None if target.reduce is None else f'"{target.reduce}"' if isinstance(target.reduce, str) else "..."
    arguments: dict[str, str | None] = {
        "of": "..." if target.text.startswith("<") else _target_as_text(target),
        "at": str(dict(target.at)).replace("'", '"') if target.at else None,
        "reduce": reduce,
        "per_sample": "True" if target.per_sample else None,
        **changed,
    }
    batch = "x, y" if arguments["of"] == '"loss"' else "x"
    return f"rl.gradients(model, {batch}, {', '.join(f'{k}={v}' for k, v in arguments.items() if v is not None)})"


@dataclass
class Explanation:
    """Reasons by tensor: for missing or zero gradients, found when read, and for gradients to be read with care."""

    disconnected: Reasons = field(default_factory=Reasons)
    flags: dict[str, Reason] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def explain(
    request: BatchRequest,
    gradients: Mapping[TensorName, Array],
    dims: Mapping[TensorName, tuple[str, ...]],
    batches: Iterable[Batch],
) -> Explanation:
    """Return reasons for each gradient that is missing, zero, zero in part, or of a frozen weight."""
    result, missing = Explanation(), dict[str, Callable[[], Reason]]()

    @cache
    def trials() -> Experiments:
        return Experiments(request)

    for name in request.wrt:
        grad = gradients.get(name)
        if grad is None or not np.any(grad):
            missing[name.text] = partial(_find_reason_in_turn, request.model, trials, name, exists=grad is not None)
            continue
        flag = _frozen_reason(request, name) or _unclear_steps_reason(request, name)
        if flag is None and name.kind != "weight" and dims[name][:2] == (SAMPLE, TIME):
            is_zero = ~np.any(grad.reshape(*grad.shape[:2], -1), axis=2)
            flag = _partly_masked_reason(is_zero, name, trials(), batches) if is_zero.any() else None
        if flag is not None:
            result.flags[name.text] = flag
    result.disconnected = Reasons(missing)
    return result


@in_turn
def _find_reason_in_turn(model: Any, trials: Callable[[], Experiments], name: TensorName, *, exists: bool) -> Reason:
    """Find the reason of one tensor, after the call that returned the result."""
    del model  # of the decorator
    return find_reason(trials(), name, exists=exists)


def _frozen_reason(request: BatchRequest, name: TensorName) -> Reason | None:
    """Return a reason for a weight that is not trained, although it has a gradient; else None."""
    if name.kind != "weight" or is_trainable(name, request.catalogue):
        return None
    if name.key in request.catalogue.weights[str(name.layer)].statistics:
        sentence = f"{name.text} is a running statistic of the layer, not a trained weight."
        return Reason(
            name.text, "frozen", sentence, "rl.gradients(..., training=True), which uses the statistics of the batch"
        )
    sentence = f"{name.text} is frozen: this is its gradient, but training does not change it."
    return Reason(name.text, "frozen", sentence, f"make {name.layer} trainable to train it")


def _unclear_steps_reason(request: BatchRequest, name: TensorName) -> Reason | None:
    """Return a reason, with the ``axes=`` to type, for a tensor whose steps were not told from its other axes."""
    choices = request.axes.steps_to_type(name.port()) if request.catalogue.is_free(name) else ""
    if not choices:
        return None
    sentence = f"Several axes of {name.text} follow the steps of recurrent layers: they have numbers, not names."
    return Reason(name.text, "unclear_steps", sentence, f"say {choices}")


def _partly_masked_reason(
    is_zero: Array, name: TensorName, trials: Experiments, batches: Iterable[Batch]
) -> Reason | None:
    """Return a reason if the gradient is exactly 0 at masked samples and steps; else None."""
    is_one_batch = len(is_zero) == trials.request.samples
    for mask in (trials.masks if is_one_batch else _masks_of_batches(trials, batches)).values():
        if mask.shape == is_zero.shape and not mask.all() and np.all(is_zero[~mask]):
            sentence = f"{int((~mask).sum())} of {mask.size} steps are masked: the gradient is exactly 0 there."
            return Reason(name.text, "masked_out", sentence, "g.where(mask) before taking means over time")
    return None


def _masks_of_batches(trials: Experiments, batches: Iterable[Batch]) -> dict[str, Array]:
    """Return the masks of all batches, joined by layer, for layers that have one."""
    if trials.masks_of_all is None:
        parts: dict[str, list[Array]] = {layer: [] for layer in trials.masks}
        for batch in batches if parts else ():
            for layer, mask in Experiments(replace(trials.request, batch=batch)).masks.items():
                parts.setdefault(layer, []).append(mask)
        joinable = {layer: masks for layer, masks in parts.items() if len({mask.shape[1:] for mask in masks}) == 1}
        trials.masks_of_all = {layer: np.concatenate(masks) for layer, masks in joinable.items()}
    return trials.masks_of_all
