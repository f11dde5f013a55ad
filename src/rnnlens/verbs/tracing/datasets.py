"""Captured calls of layers to one labelled dataset each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import xarray as xr

from ...adapters.protocol import Batch, Capture, LayerInfo, NonRecurrentCall, Port, RecurrentCall
from ...recurrence.replay import Replay
from ...results.checks import Check, coarser
from ...results.schema import layer_dataset, to_host
from ...typing import Array
from ...vocabulary import FEATURE, FORWARD
from ..assemble import join_directions
from ..axes import Axes, InputCoordinates, in_order
from ..certify import INITIAL, LAYER_INPUT, PROBES, Boundary, Ours
from ..host import on_host
from ..outside import Outside
from ..relabelled import initial_state_gradients, input_gradient, weight_sums
from .calls import TracedCall, trace_call
from .wanted import Wanted
from .weight_sum import WeightSum


def recurrent_datasets(
    infos: Sequence[LayerInfo],
    capture: Capture,
    wanted: Wanted,
    provenance: Mapping[str, str],
    ours: Ours | None,
    replayed: Callable[[RecurrentCall], Replay] = Replay.from_call,
) -> tuple[dict[str, xr.Dataset], list[Check]]:
    """One dataset per node, in the order of the calls, and the self-checks; ``ours`` collects what to certify."""
    described = {info.name: info for info in infos}
    checks: list[Check] = []
    sums: dict[str, WeightSum] = {}
    datasets = {}
    for name, halves in _by_node(capture.calls).items():
        traced = [trace_call(call, wanted, sums, replayed) for call in halves]
        checks += [check for one in traced for check in one.checks]
        info = described.get(name) or described.get(name.rpartition("#")[0])
        dataset = layer_dataset(
            join_directions([one.present(wanted if ours is None else None) for one in traced]),
            info={**(vars(info) if info else {}), "name": name},
            provenance=provenance,
            bidirectional=len(halves) > 1,
        )
        if ours is not None:
            _collect(ours, dataset, halves, traced)
            dataset = dataset.drop_vars([v for v in dataset.data_vars if not wanted.has(str(v))])
        datasets[name] = dataset
    checks += [total.check() for total in sums.values()]
    return datasets, checks


def _by_node(calls: Iterable[RecurrentCall]) -> dict[str, list[RecurrentCall]]:
    """Calls by node; forward comes first, also where a bidirectional layer was built around one that goes backwards."""
    nodes: dict[str, list[RecurrentCall]] = {}
    for call in on_host(calls):
        halves = nodes.setdefault(call.layer, [])
        halves.insert(0 if call.direction == FORWARD else len(halves), call)
    return nodes


def _collect(ours: Ours, dataset: xr.Dataset, halves: Sequence[RecurrentCall], traced: Sequence[TracedCall]) -> None:
    """What of one layer is to be held against the plain run, from its labelled numbers where those suffice."""
    # A layer that returns its last output only, and whose input nobody asked for, is held to the bound of its units.
    timed = halves[0].output[0] if halves[0].input is None else halves[0].input[0]
    ours.steps = max(ours.steps, int(timed.shape[0]))
    ours.dtype = coarser(ours.dtype, halves[0].compute_dtype or str(halves[0].output.dtype))
    for call, one in zip(halves, traced, strict=True):
        if one.weights is None:
            continue
        ours.add_weights(call, weight_sums(dataset, call, PROBES) or one.weights, one.rounding.weights)
        grads = initial_state_gradients(dataset, call, call.cell.state_names)
        if call.framework_initial_state_grad is not None and grads is not None:
            pairs = zip(grads, call.framework_initial_state_grad, strict=True)
            ours.boundaries.append(Boundary(INITIAL, call.layer, list(pairs), one.rounding.initial))
    mine = input_gradient(dataset)
    theirs = [call.framework_input_grad for call in halves if call.framework_input_grad is not None]
    if theirs and mine is not None:
        scale = max(one.rounding.input for one in traced)
        ours.boundaries.append(Boundary(LAYER_INPUT, halves[0].layer, [(mine, sum(map(to_host, theirs)))], scale))


def plain_datasets(
    calls: Sequence[NonRecurrentCall],
    axes: Axes,
    batch: Batch,
    wanted: Wanted,
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
            if array is not None and outside is not None and wanted.has(name):
                opened = outside.opened(Port("output", call.layer), to_host(array))
                arrays[name], dims[name] = in_order(*opened)
        info = {"name": call.layer}
        found[call.layer] = layer_dataset(arrays, info=info, provenance=provenance, bidirectional=False, dims=dims)
    return found


def with_coordinates(datasets: Mapping[str, xr.Dataset], given: InputCoordinates) -> dict[str, xr.Dataset]:
    """Label samples and steps as the inputs are; features too, of a layer that takes an input of the model as it is."""
    if not given.leaves:
        return dict(datasets)
    found = {}
    for name, dataset in datasets.items():
        leaf = given.is_input(dataset["input"].values) if "input" in dataset else None
        found[name] = given.assign_to(dataset)
        if leaf is not None:
            found[name] = given.assign_to(found[name], (FEATURE,), leaf)
    return found
