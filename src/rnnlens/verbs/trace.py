"""``rl.layers`` and ``rl.trace``: what each recurrent layer does at every step, and what the loss says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xarray as xr

from ..adapters.protocol import Batch, Capture, CaptureRequest, PlainCall, Port, RecurrentCall
from ..adapters.registry import adapter_for
from ..arguments import (
    anything,
    checked,
    class_weights,
    examples,
    names,
    one_batch,
    seed,
    states,
    switch,
)
from ..arguments import loss as a_loss
from ..errors import InputError, LayerNotFoundError, message
from ..errors import did_you_mean as suggestion
from ..recurrence.run import Run
from ..results.certificate import Certificate
from ..results.checks import REPLAY, Check, coarser, rounding_bound, warn_about, weight_sum_check
from ..results.layers import LayerTable
from ..results.schema import layer_dataset
from ..results.schema import plain as plain_array
from ..results.trace import Trace
from ..typing import Array
from ..vocabulary import FORWARD, QUANTITIES
from .assemble import Arrays, join_directions
from .axes import Axes, an_axes_table, in_order
from .certify import INITIAL, LAYER_INPUT, PROBES, Ours, certify
from .certify import wanted as asked_for
from .host import on_host
from .loss_words import with_reduction
from .names import catalogue
from .outside import Outside
from .relabelled import initial_state_gradients, input_gradient, weight_sums
from .sweep import names_of_states, sweep, weights_to_check
from .turns import in_turn

#: What can be had without replaying the recurrence.
_CAPTURED = frozenset({"input", "mask", "output", "output_grad", "final_state_grad"})


@checked(model=anything)
@in_turn
def layers(model: Any) -> LayerTable:
    """List the recurrent layers of a model, without running it.

    Parameters
    ----------
    model
        A Keras model or layer, or a ``torch.nn.Module``.

    Returns
    -------
    LayerTable
        A sequence of :class:`~rnnlens.adapters.protocol.LayerInfo` that prints as a table.

    Raises
    ------
    ModelError
        If the model is of no known framework, or was not built yet.
    """
    return LayerTable(adapter_for(model).describe(model))


@checked(
    model=anything,
    x=one_batch,
    y=examples,
    loss=a_loss,
    layers=names,
    quantities=names,
    sample_weight=examples,
    class_weight=class_weights,
    training=switch,
    initial_state=states,
    seed=seed,
    axes=an_axes_table,
)
@in_turn
def trace(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    loss: str | Callable[..., Any] | None = None,
    layers: str | Iterable[str] | None = None,
    quantities: str | Iterable[str] | None = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    training: bool = False,
    initial_state: Mapping[str, Sequence[Any]] | None = None,
    seed: int | None = None,
    axes: Mapping[str, Any] | None = None,
) -> Trace:
    """Trace a model on one batch: activations, gates, states, and the direct and total gradient of every timestep.

    Parameters
    ----------
    model
        A Keras model (any engine) or ``torch.nn.Module``; left exactly as found.
    x
        One batch, as the model takes it: an array, or a tuple, list or dict of arrays.
    y
        Target. Without it, and without a ``loss`` that needs none, there are no gradients.
    loss
        Keras: ``loss(y_true, y_pred)``, a Keras loss or its name; the compiled loss by default.
        torch: ``loss(output, target)``, required for gradients. It must return a scalar.
    layers
        Names of the layers to trace, recurrent or not; all recurrent layers by default.
    quantities
        Names of the variables to compute and keep; all by default. See ``rnnlens.vocabulary.QUANTITIES``.
    sample_weight, class_weight
        As in training.
    training
        Run in training mode: dropout acts. State, statistics and random state are restored.
    initial_state
        By layer name: the states to start from, one (sample, unit) array each.
    seed
        Makes dropout reproducible.
    axes
        What the axes of a tensor count, where that cannot be found out: ``{"conv.output": ("sample", "unit",
        "time")}``; ``(("time", "sample"), "unit")`` where two are folded into one.

    Returns
    -------
    Trace
        ``trace["lstm"].hidden_grad`` and so on: DataArrays with dimensions ``sample, time, (direction,) unit``.

    Raises
    ------
    InputError
        If data, target or an argument does not fit.
    ModelError
        If the model is not built, not compiled (and no loss given), or of no known framework.
    LayerNotFoundError
        If ``layers`` names a layer that the model does not have.
    UnsupportedError
        If the model contains what rnnlens refuses by name.

    Warns
    -----
    SelfCheckWarning
        If a self-check exceeds what rounding explains.

    References
    ----------
    Total gradients: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5.
    """
    has_loss = y is not None or loss is not None
    wanted = _wanted(quantities, has_loss)
    adapter = adapter_for(model)
    batch = Batch(x, y, sample_weight, class_weight, loss, training, initial_state, seed)
    certified = asked_for(model, "trace", batch)
    capture = adapter.capture(model, batch, _request(layers, wanted, has_loss, certified))
    provenance = (
        with_reduction(adapter.provenance(model), adapter, model, loss) if has_loss else adapter.provenance(model)
    )
    ours, described = Ours(capture), adapter.describe(model)
    datasets, checks = _datasets(described, capture, wanted, provenance, ours if certified else None)
    room = Axes(adapter, model, axes, catalogue(adapter, model, x))
    datasets |= _plain_datasets(capture.plain, room, batch, wanted, provenance)
    _refuse_silence(layers, wanted, datasets, [info.name for info in described])
    words = _words(datasets, has_loss)
    certificate = certify(adapter, model, batch, ours, words, adapter.engine) if certified else Certificate()
    warn_about([*checks, *certificate.checks])
    return Trace(
        datasets,
        loss=capture.loss,
        quantities=None if wanted is None else sorted(wanted),
        provenance=provenance,
        notes=capture.notes,
        checks=checks,
        certificate=certificate,
    )


def _words(datasets: Mapping[str, xr.Dataset], has_loss: bool) -> dict[str, Any]:
    """What is certified, and which of the quantities rest on it."""
    present = dict.fromkeys(str(name) for dataset in datasets.values() for name in dataset.data_vars)
    certified = ["outputs", *(["loss", "gradients at inputs and weights"] if has_loss else [])]
    resting = [name for name in present if name.endswith("_grad") and name not in ("input_grad", "initial_state_grad")]
    certified += [name for name in ("input_grad", "initial_state_grad") if name in present]
    return {"certified": tuple(certified), "resting": tuple(resting)}


def _wanted(quantities: str | Iterable[str] | None, has_loss: bool) -> frozenset[str] | None:
    """Names asked for; None for all."""
    if quantities is None:
        return None
    names = frozenset([quantities] if isinstance(quantities, str) else quantities)
    for name in sorted(names):
        stem = name.removesuffix("_grad")
        if name not in QUANTITIES and not (stem.startswith("state_") and stem[6:].isdigit()):
            raise InputError(message(f"There is no quantity {name!r}.", hint=suggestion(name, QUANTITIES)))
        if name.endswith("_grad") and not has_loss:
            raise InputError(
                message(
                    f"{name!r} is a gradient of the loss, and there is no loss.",
                    got="neither y nor loss",
                    hint="pass the target: rl.trace(model, x, y)",
                )
            )
    return names


def _refuse_silence(
    layers: str | Iterable[str] | None,
    wanted: frozenset[str] | None,
    datasets: Mapping[str, xr.Dataset],
    known: Sequence[str],
) -> None:
    """What was asked for and is nowhere is an error, not an empty result."""
    for name in (layers,) if isinstance(layers, str) else layers or ():
        if not any(node == name or node.startswith((f"{name}#", f"{name}[")) for node in datasets):
            what = f"No layer, and no call of one, is named {name!r} in this forward pass."
            raise LayerNotFoundError(message(what, hint=suggestion(name, list(dict.fromkeys([*datasets, *known])))))
    found = {str(name) for dataset in datasets.values() for name in dataset.data_vars}
    missing = [] if wanted is None else sorted(wanted - found)
    impossible = [name for name in missing if name.startswith("state_")]
    if impossible or (missing and not found):
        got, layer = (impossible or missing)[0], next(iter(datasets), "")
        what = f"No layer here has {got!r}."
        hint = suggestion(got, found) if found else f"rl.trace(model, x, ...)[{layer!r}] lists what there is"
        raise InputError(message(what, got=f"quantities={', '.join(missing)}", hint=hint))


def _request(
    layers: str | Iterable[str] | None, wanted: frozenset[str] | None, has_loss: bool, certified: bool
) -> CaptureRequest:
    names = None if layers is None else (layers,) if isinstance(layers, str) else tuple(layers)
    replayed = wanted is None or bool(wanted - _CAPTURED)
    gradients = has_loss and (wanted is None or any(name.endswith("_grad") for name in wanted))
    return CaptureRequest(
        layers=names,
        inputs=replayed or bool(wanted & {"input", "mask"} if wanted else False),
        gradients=gradients,
        weight_grads=gradients and _needs_sweep(wanted),
        borders=certified,
    )


def _needs_sweep(wanted: frozenset[str] | None) -> bool:
    return wanted is None or any(name.endswith("_grad") for name in wanted - _CAPTURED)


def _datasets(
    infos: Sequence[Any],
    capture: Capture,
    wanted: frozenset[str] | None,
    provenance: Mapping[str, str],
    ours: Ours | None,
) -> tuple[dict[str, xr.Dataset], list[Check]]:
    """One dataset per node, in the order of the calls, and the self-checks; ``ours`` collects what to certify."""
    described = {info.name: info for info in infos}
    nodes: dict[str, list[RecurrentCall]] = {}
    for call in on_host(capture.calls):
        halves = nodes.setdefault(call.layer, [])
        # Forward comes first, also where a bidirectional layer was built around one that goes backwards.
        halves.insert(0 if call.direction == FORWARD else len(halves), call)
    checks: list[Check] = []
    sums: dict[str, WeightSum] = {}
    datasets = {}
    for name, halves in nodes.items():
        traced = [_trace_call(call, wanted, sums) for call in halves]
        checks += [check for one in traced for check in one.checks]
        info = described.get(name) or described.get(name.rpartition("#")[0])
        dataset = layer_dataset(
            join_directions([_keep(one.arrays, wanted if ours is None else None) for one in traced]),
            info={**(vars(info) if info else {}), "name": name},
            provenance=provenance,
            bidirectional=len(halves) > 1,
        )
        if ours is not None:
            _note(ours, dataset, halves, traced)
            dataset = dataset.drop_vars([v for v in dataset.data_vars if wanted is not None and v not in wanted])
        datasets[name] = dataset
    checks += [total.check() for total in sums.values()]
    return datasets, checks


def _note(ours: Ours, dataset: xr.Dataset, halves: Sequence[RecurrentCall], traced: Sequence[_Traced]) -> None:
    """What of one layer is to be held against the plain run, from its labelled numbers where those suffice."""
    ours.steps = max(ours.steps, int(halves[0].input.shape[1]))
    ours.dtype = coarser(ours.dtype, halves[0].compute_dtype or str(halves[0].output.dtype))
    for call, one in zip(halves, traced, strict=True):
        if one.weights is None:
            continue
        ours.add_weights(call, weight_sums(dataset, call, PROBES) or one.weights)
        grads = initial_state_gradients(dataset, call, names_of_states(call))
        if call.framework_initial_state_grad is not None and grads is not None:
            pairs = zip(grads, call.framework_initial_state_grad, strict=True)
            ours.borders.append((INITIAL, call.layer, [(mine, theirs) for mine, theirs in pairs]))
    theirs, mine = (
        [c.framework_input_grad for c in halves if c.framework_input_grad is not None],
        input_gradient(dataset),
    )
    if theirs and mine is not None:
        ours.borders.append((LAYER_INPUT, halves[0].layer, [(mine, sum(map(plain_array, theirs)))]))


def _plain_datasets(
    calls: Sequence[PlainCall],
    axes: Axes,
    batch: Batch,
    wanted: frozenset[str] | None,
    provenance: Mapping[str, str],
) -> dict[str, xr.Dataset]:
    """Outputs of layers that are not recurrent, samples first, then time, where these are known."""
    axes.learn(batch, [Port("output", call.layer) for call in calls])
    outside = Outside(axes, axes.samples(batch)) if calls else None
    found = {}
    for call in calls:
        arrays: dict[str, Array] = {}
        dims: dict[str, tuple[str, ...]] = {}
        for name, array in (("output", call.output), ("output_grad", call.output_grad)):
            if array is not None and outside is not None and (wanted is None or name in wanted):
                opened = outside.opened(Port("output", call.layer), plain_array(array))
                arrays[name], dims[name] = in_order(*opened)
        info = {"name": call.layer}
        found[call.layer] = layer_dataset(arrays, info=info, provenance=provenance, bidirectional=False, dims=dims)
    return found


class WeightSum:
    """Per-step weight gradients summed over time and over all calls that share the weights, against the framework's."""

    def __init__(self, call: RecurrentCall, reference: Mapping[str, Array]) -> None:
        self.layer, self.reference, self.steps = call.layer.partition("#")[0], reference, 0
        self.dtype = call.compute_dtype or str(call.input.dtype)
        self.total: dict[str, Array] = {}

    def add(self, grads: Mapping[str, Array], steps: int) -> None:
        """Add what one call contributed."""
        self.steps += steps
        for name, grad in grads.items():
            self.total[name] = self.total[name] + grad if name in self.total else grad

    def check(self) -> Check:
        """Compare with the framework's dL/dW."""
        return weight_sum_check(self.layer, self.total, self.reference, steps=self.steps, dtype=self.dtype)


@dataclass
class _Traced:
    """All arrays of one direction of one call, its checks, and its weight gradients where there was a sweep."""

    arrays: Arrays
    checks: list[Check]
    weights: Mapping[str, Array] | None = None


def _trace_call(call: RecurrentCall, wanted: frozenset[str] | None, sums: dict[str, WeightSum]) -> _Traced:
    """All arrays of one direction of one call, as far as they are needed for those asked for."""
    arrays: Arrays = {
        "input": call.input,
        "mask": call.mask,
        "output": call.output,
        "output_grad": call.output_grad,
    }
    names = names_of_states(call)
    if call.final_state_grad is not None:
        arrays |= _border("final", names, call.final_state_grad)
    if wanted is not None and wanted <= _CAPTURED:
        return _Traced(arrays, [])
    run = Run.from_call(call)
    arrays |= dict(zip(names, run.states, strict=True))
    arrays |= {"gates": run.gates, "gate_preactivation": run.preactivation}
    steps = int(call.input.shape[1])
    bound = rounding_bound(call.compute_dtype or call.output.dtype, steps)
    traced = _Traced(arrays, [Check(REPLAY, call.layer, run.residual, bound)])
    if call.output_grad is not None and _needs_sweep(wanted):
        result = sweep(call, run, call.output_grad, call.final_state_grad, call.state_grad)
        arrays |= {f"{name}_grad": grad for name, grad in zip(names, result.state_grads, strict=True)}
        arrays |= {"gate_grad": result.gate_grad, "input_grad": result.input_grad}
        arrays |= _border("initial", names, result.initial_state_grad)
        traced.weights, reference = weights_to_check(call, run, result)
        if call.weight_grads is not None:
            key = call.weights_key or f"{call.layer}/{call.direction}"
            sums.setdefault(key, WeightSum(call, reference)).add(traced.weights, steps)
    return traced


def _border(when: str, names: Sequence[str], grads: Sequence[Array]) -> Arrays:
    """Gradients of the first or last state: stacked where all states have one size, else one variable each."""
    if len({grad.shape[-1] for grad in grads}) == 1:
        return {f"{when}_state_grad": tuple(grads)}
    return {f"{when}_{name}_grad": grad for name, grad in zip(names, grads, strict=True)}


def _keep(arrays: Arrays, wanted: frozenset[str] | None) -> Arrays:
    present = {name: array for name, array in arrays.items() if array is not None}
    return present if wanted is None else {name: array for name, array in present.items() if name in wanted}
