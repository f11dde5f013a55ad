"""What a trace keeps, and labelled datasets of captured layer calls, replayed and swept: one per layer call."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xarray as xr

from ..adapters.protocol import Batch, Capture, LayerInfo, NonRecurrentCall, Port, RecurrentCall, Taps
from ..errors import InputError, LayerNotFoundError, did_you_mean
from ..recurrence.adjoint import PROBES, probe_combinations, weight_gradients
from ..recurrence.cells import Cell, kinds
from ..recurrence.replay import Replay
from ..recurrence.rounding import Rounding, rounding_of
from ..recurrence.trajectory import Adjoint
from ..results.checks import Check, coarser_dtype
from ..results.schema import LabelledLayer, labelled_layer, quantity_attrs, to_host
from ..typing import Array
from ..vocabulary import (
    CHANNEL,
    DIRECTION,
    FEATURE,
    FORWARD,
    LAG,
    PROBE,
    QUANTITIES,
    SAMPLE,
    SPACE,
    TIME,
    UNIT,
)
from .axes import BatchAxes, InputCoordinates, ModelAxes, in_canonical_order
from .certificates.compare import INITIAL, LAYER_INPUT
from .certificates.of_trace import (
    BoundaryGradients,
    ReplayedValues,
    SamplePart,
    initial_state_gradients,
    input_gradient,
    weight_sums,
)
from .chain import ChainGradients
from .recurrent_layers import WeightSum, on_host, replay_check, sweep

_STATE = re.compile(r"(?:previous_)?(?P<state>.+?)(_grad)?")
_BOUNDARY = re.compile(r"(initial|final)_(?P<state>.+)_grad")

#: Quantities that need no replay of the recurrence.
CAPTURED = frozenset({"input", "mask", "output", "output_grad", "final_state_grad"})


@dataclass(frozen=True)
class TraceSelection:
    """Requested layers and quantities (None for all), loss and checks, and the ``part`` that a certificate compares."""

    layers: tuple[str, ...] | None
    quantities: frozenset[str] | None
    has_loss: bool
    compares_weights: bool = True
    part: SamplePart | None = None

    @classmethod
    def of(
        cls,
        layers: str | Iterable[str] | None,
        quantities: str | Iterable[str] | None,
        has_loss: bool,
        states: Callable[[], Collection[str]] = tuple,
    ) -> TraceSelection:
        """Check the arguments ``layers`` and ``quantities``."""
        layer_names = None if layers is None else (layers,) if isinstance(layers, str) else tuple(layers)
        if quantities is None:
            return cls(layer_names, None, has_loss)
        names = frozenset([quantities] if isinstance(quantities, str) else quantities)
        for name in sorted(names):
            if not _is_quantity(name) and not _is_quantity(name, known_states := states()):
                known_names = [*QUANTITIES, *known_states, *(f"{state}_grad" for state in known_states)]
                raise InputError(f"There is no quantity {name!r}.", hint=did_you_mean(name, known_names))
            if name.endswith("_grad") and not has_loss:
                message = f"{name!r} is a gradient of the loss, and there is no loss."
                raise InputError(message, got="neither y nor loss", hint="pass the target: rl.trace(model, x, y)")
        return cls(layer_names, names, has_loss)

    def has(self, quantity: str, states: Sequence[str] = ("hidden",)) -> bool:
        """Return whether a quantity is requested; ``hidden`` requests the first of ``states`` if none has that name."""
        if self.quantities is None or quantity in self.quantities:
            return True
        hidden = {states[0]: "hidden", f"{states[0]}_grad": "hidden_grad"}.get(quantity)
        return "hidden" not in states and hidden in self.quantities

    @property
    def needs_replay(self) -> bool:
        """Whether the recurrence has to be replayed."""
        return self.quantities is None or bool(self.quantities - CAPTURED)

    @property
    def needs_sweep(self) -> bool:
        """Whether total gradients are requested."""
        return self.quantities is None or any(name.endswith("_grad") for name in self.quantities - CAPTURED)

    def taps(self, certified: bool, topmost: bool) -> Taps:
        """Return what the run of the model records."""
        quantities = self.quantities
        gradients = self.has_loss and (quantities is None or any(name.endswith("_grad") for name in quantities))
        return Taps(
            "states" if not gradients else "everything" if certified else "direct",
            layers=self.layers,
            inputs=self.needs_replay or bool((quantities or frozenset()) & {"input", "mask"}),
            gradients=gradients,
            weight_grads=gradients and self.needs_sweep and self.compares_weights,
            loss=self.has_loss,
            chain=True,
            topmost=topmost and gradients and self.needs_sweep and self.layers is None,
        )

    def refuse_absent(self, datasets: Mapping[str, LabelledLayer], known_layers: Sequence[str]) -> None:
        """Raise for requested layers and quantities that are not in the result."""
        for name in self.layers or ():
            if not any(node == name or node.startswith((f"{name}#", f"{name}[")) for node in datasets):
                message = f"No layer, and no call of one, is named {name!r} in this forward pass."
                raise LayerNotFoundError(
                    message, hint=did_you_mean(name, list(dict.fromkeys([*datasets, *known_layers])))
                )
        present = {name for layer in datasets.values() for name in layer.variables}
        missing = [] if self.quantities is None else sorted(self.quantities - present)
        impossible = [name for name in missing if name not in QUANTITIES]
        if impossible or (missing and not present):
            missing_name, layer = (impossible or missing)[0], next(iter(datasets), "")
            hint = (
                did_you_mean(missing_name, present)
                if present
                else f"rl.trace(model, x, ...)[{layer!r}] lists what there is"
            )
            got = f"quantities={', '.join(missing)}"
            raise InputError(f"No layer here has {missing_name!r}.", got=got, hint=hint)


def _is_quantity(name: str, further_states: Collection[str] = ()) -> bool:
    """Return whether a name is a quantity, a state of a cell or its gradient, or that of a first or last state."""
    if name in QUANTITIES:
        return True
    states = {*further_states, *(state for cell in kinds().values() for state in cell.states)}
    match = _BOUNDARY.fullmatch(name) or _STATE.fullmatch(name)
    return match is not None and (match["state"] in states or re.fullmatch(r"state_\d+", match["state"]) is not None)


def own_states(cell: Cell) -> tuple[str, ...]:
    """Return the names of the states of a custom cell; empty for a cell whose kind names them."""
    return cell.state_names if cell.by_framework else ()


@dataclass
class TracedCall:
    """Arrays and checks of a call; after a sweep also the certified samples' weight gradients and their scale."""

    arrays: Arrays
    checks: list[Check]
    weights: Mapping[str, Array] | None = None
    weights_scale: float = 0.0
    rounding: Rounding = field(default_factory=Rounding)
    lag_gradients: Mapping[str, Array] = field(default_factory=dict)


def trace_call(
    call: RecurrentCall,
    selection: TraceSelection,
    sums: dict[str, WeightSum],
    replay: Callable[[RecurrentCall], Replay],
) -> TracedCall:
    """Replay a call and, with a loss, sweep back through it; add its weight gradients to ``sums``."""
    names = call.cell.state_names
    has_input = call.input is None or call.input.shape[-1] > 0  # a loop over depth may have none
    arrays: Arrays = {
        "input": call.input if has_input else None,
        "mask": call.mask,
        "output": call.output,
        "output_grad": call.output_grad,
    }
    if call.final_state_grad is not None:
        arrays |= _boundary_gradients("final", names, call.final_state_grad)
    if not selection.needs_replay:
        return TracedCall(arrays, [])
    run = replay(call)
    arrays |= dict(zip(names, run.states, strict=True))
    arrays |= {"gates": run.gates, "gate_preactivation": run.preactivation}
    if call.start_states is not None:  # the gradient at a step's output is the total one
        arrays |= {f"previous_{name}": state for name, state in zip(names, call.start_states, strict=True)}
        arrays["output_grad"] = None
    traced = TracedCall(arrays, [replay_check(call, run)])
    if call.output_grad is None or not selection.needs_sweep:
        return traced
    spend = not (selection.has("gate_preactivation") or selection.compares_weights or selection.part is not None)
    if selection.has("hidden_grad") or selection.has(f"{names[0]}_grad"):
        result, traced.lag_gradients = sweep_by_lag(call, run, spend=spend)
    else:
        result = sweep(call, run, call.output_grad, call.final_state_grad, call.state_grad, spend=spend)
    if spend:
        arrays["gate_preactivation"] = None
    arrays |= {f"{name}_grad": grad for name, grad in zip(names, result.state_grads, strict=True)}
    input_grad = result.input_grad if has_input else None
    arrays |= {"gate_grad": result.gate_grad if call.cell.gates else None, "input_grad": input_grad}
    arrays |= _boundary_gradients("initial", names, result.initial_state_grad)
    if selection.compares_weights:
        _add_weights(traced, call, run, result, sums)
    if selection.part is not None:
        samples = selection.part.slice
        run, result = run.of_samples(samples), result.of_samples(samples)
        traced.weights = weight_gradients(run, result, probes=PROBES)
        traced.weights_scale = rounding_of(run, result).weights
    return traced


#: Largest number of samples of which the gradient of one output step each is pulled back; of fewer samples than the
#: least number of rows, several output steps.
_LAG_SAMPLES, _LEAST_LAG_ROWS = 16, 6
#: Where that step lies between the middle of a sample's steps and the last one, in turn.
_LAG_STEPS = (1.0, 0.0, 0.5)
#: Largest number of values of a state with which one sweep of samples and probes takes less time than two, and its copy
#: of the recorded gates little memory.
_JOINT_VALUES = 2**18


@dataclass(frozen=True)
class LagProbes:
    """Direct gradients of single output steps, each pulled back through the recurrence by itself: one step per row.

    A loss at many steps sends a gradient to every step, whatever the recurrence carries. By lag from the step where it
    enters, only what the recurrence carries is left. Masked steps, which carry the state unchanged, do not count. Some
    steps of the second half and some samples suffice.

    Attributes
    ----------
    samples : (row,)
        Sample of each row.
    steps : one array of time indices per row
        The step where the gradient enters and those before it, in the order of the sweep, without masked steps.
    output_grad : (row, time, ...)
        Gradients of the output: zero at all steps but the one of the row.
    """

    samples: Array
    steps: Sequence[Array]
    output_grad: Array

    @classmethod
    def of(cls, call: RecurrentCall, run: Replay) -> LagProbes | None:
        """Choose output steps of a call; None if no sample has a gradient that enters at several steps."""
        assert call.output_grad is not None
        output_grad = call.output_grad[:_LAG_SAMPLES]
        count, n_steps = output_grad.shape[:2]
        is_real = np.ones((count, n_steps), bool) if call.mask is None else to_host(call.mask)[:count].astype(bool)
        is_read: Array = to_host(output_grad).reshape(count, n_steps, -1).any(axis=2) & is_real
        if is_read.sum(axis=1).max(initial=0) < 2:
            return None
        samples = np.tile(np.arange(count), 1 if call.cell.by_framework else -(-_LEAST_LAG_ROWS // count))
        order = np.array(list(run.steps(reverse=True)))
        entering, steps = run.xp.zeros_like(output_grad[samples]), []
        for row, sample in enumerate(samples):
            read_positions = np.flatnonzero(is_read[sample, order])
            late = read_positions[
                : (len(read_positions) + 1) // 2
            ]  # the order is that of the sweep, from the last step
            share = 1 - _LAG_STEPS[row % len(_LAG_STEPS)]
            earlier = order[late[round(share * (len(late) - 1))] :] if len(late) else order[:0]
            for first_step in map(int, earlier[:1]):
                entering[row, first_step, ...] = output_grad[int(sample), first_step, ...]
            steps.append(earlier[is_real[sample, earlier]])
        return cls(samples, steps, entering)

    def norms(self, swept: Adjoint, names: Sequence[str]) -> dict[str, Array]:
        """Return the norms (row, lag) of swept rows by state, NaN before the first step."""
        by_state = {}
        for name, grad in zip(names, swept.state_grads, strict=True):
            values = to_host(grad).astype(np.float64)
            norms = np.sqrt((values**2).reshape(*values.shape[:2], -1).sum(axis=-1))
            by_state[name] = np.full(norms.shape, np.nan)
            for row, steps in enumerate(self.steps):
                by_state[name][row, : len(steps)] = norms[row, steps]
        return by_state


def sweep_by_lag(call: RecurrentCall, run: Replay, *, spend: bool) -> tuple[Adjoint, dict[str, Array]]:
    """Sweep a call; return its total gradients, and by state the norms (row, lag) of gradients of single output steps.

    The norms are empty if no sample has a gradient that enters at several steps, and NaN if user code changes states in
    between: what enters at a step is not known then. In a small call the probes are further rows of the same sweep.
    """
    names, count = call.cell.state_names, int(run.input.shape[0])
    is_changed = call.returns_sequences and call.start_states is not None
    probes = LagProbes.of(call, run) if call.returns_sequences and not is_changed else None
    if probes is not None and not call.cell.by_framework and math.prod(run.states[0].shape) <= _JOINT_VALUES:
        rows = np.concatenate([np.arange(count), probes.samples])

        def extended(gradient: Array, probe_rows: Array | None = None) -> Array:
            zeros = run.xp.zeros_like(gradient[probes.samples])
            return run.xp.concat([gradient, zeros if probe_rows is None else probe_rows])

        final, of_states = call.final_state_grad, call.state_grad
        swept = _sweep_rows(
            call,
            run,
            rows,
            extended(call.output_grad, probes.output_grad),
            None if final is None else tuple(map(extended, final)),
            None if of_states is None else {index: extended(gradient) for index, gradient in of_states.items()},
        )
        return swept.of_samples(slice(0, count)), probes.norms(swept.of_samples(slice(count, None)), names)
    by_lag = {name: np.full((1, 1), np.nan) for name in names} if is_changed else {}
    if probes is not None:
        by_lag = probes.norms(_sweep_rows(call, run, probes.samples, probes.output_grad), names)
    return sweep(call, run, call.output_grad, call.final_state_grad, call.state_grad, spend=spend), by_lag


def _sweep_rows(call: RecurrentCall, run: Replay, samples: Array, *gradients: Any) -> Adjoint:
    """Sweep gradients of rows, each of which belongs to one of the samples of a call."""
    from_state = None if call.output_from_state is None else call.output_from_state[samples]
    return sweep(replace(call, output_from_state=from_state), run.of_samples(samples), *gradients)


def _add_weights(
    traced: TracedCall, call: RecurrentCall, run: Replay, swept: Adjoint, sums: dict[str, WeightSum]
) -> None:
    """Add the weight gradients of a swept call to its trace, and to ``sums`` if there are the framework's."""
    traced.weights = weight_gradients(run, swept, probes=PROBES)
    traced.rounding = rounding_of(run, swept)
    traced.weights_scale = traced.rounding.weights
    if call.weight_grads is not None:
        key = call.weights_key or f"{call.layer}/{call.direction}"
        reference = {name: grad for name, grad in call.weight_grads.items() if name not in call.tied}
        reference = reference if call.cell.by_framework else probe_combinations(reference)
        sums.setdefault(key, WeightSum(call, reference)).add(
            traced.weights, int(call.input.shape[1]), traced.weights_scale
        )


def _boundary_gradients(end: str, names: Sequence[str], grads: Sequence[Array]) -> Arrays:
    """Name gradients of the first or last state: one stacked variable for states of one size, else one each."""
    if len({grad.shape[-1] for grad in grads}) == 1:
        return {f"{end}_state_grad": tuple(grads)}
    return {f"{end}_{name}_grad": grad for name, grad in zip(names, grads, strict=True)}


#: Variables of one call by name; a tuple contains states that will be stacked.
Arrays = dict[str, Any]

#: Variables that both directions of a bidirectional layer share, and those that are summed over the directions.
_SHARED, _SUMMED = frozenset({"input", "mask"}), frozenset({"input_grad"})
_WITHOUT_TIME = ("initial_", "final_")


def join_directions(
    directions: Sequence[Arrays], space: Sequence[str] = (), state: str = "hidden"
) -> dict[str, np.ndarray[Any, Any]]:
    """Stack the arrays of two directions on an axis after time, or after sample without a time axis.

    ``space``: names of the spatial axes of the states; ``state``: name of the first state.
    """

    def stacked(array: Any) -> np.ndarray[Any, Any]:
        """Stack states (sample, unit) to (sample, state, unit)."""
        return np.stack(list(map(to_host, array)), axis=1) if isinstance(array, tuple) else to_host(array)

    host_arrays = [{name: stacked(array) for name, array in replayed.items()} for replayed in directions]
    if len(host_arrays) == 1:
        return host_arrays[0]
    first, second = host_arrays
    timed_rank = next((first[quantity].ndim for quantity in (state, "input") if quantity in first), 3 + len(space))
    joined: dict[str, np.ndarray[Any, Any]] = {}
    for name, array in first.items():
        if name in _SHARED:
            joined[name] = array
        elif name in _SUMMED:
            joined[name] = array + second[name]
        else:
            axis = 1 if name.startswith(_WITHOUT_TIME) or array.ndim < timed_rank else 2
            joined[name] = np.stack([array, second[name]], axis=axis)
    return joined


def recurrent_datasets(
    layer_infos: Mapping[str, LayerInfo],
    capture: Capture,
    selection: TraceSelection,
    provenance: Mapping[str, str],
    claim: ReplayedValues | None,
    replay: Callable[[RecurrentCall], Replay] = Replay.from_call,
    chain: ChainGradients | None = None,
) -> tuple[dict[str, LabelledLayer], list[Check]]:
    """Return labelled arrays of each node in the order of the calls, and self-checks."""
    checks: list[Check] = []
    sums: dict[str, WeightSum] = {}
    datasets: dict[str, LabelledLayer] = {}
    nodes: dict[str, list[RecurrentCall]] = {}
    for call in on_host(capture.calls):  # the forward direction first
        directions = nodes.setdefault(call.layer, [])
        directions.insert(0 if call.direction == FORWARD else len(directions), call)
    for name in nodes if chain is None else reversed(nodes):
        directions = nodes[name] if chain is None else list(map(chain.with_output_grad, nodes[name]))
        traced = [trace_call(call, selection, sums, replay) for call in directions]
        if chain is not None and traced[0].arrays.get("input_grad") is not None:
            chain.pull(directions[0], traced[0].arrays["input_grad"])
        checks += [check for traced_call in traced for check in traced_call.checks]
        info = layer_infos.get(name) or layer_infos.get(name.rpartition("#")[0])
        states = directions[0].cell.state_names
        # A certificate compares all arrays, also those that were not requested.
        arrays_by_call = [[(n, a) for n, a in traced_call.arrays.items() if a is not None] for traced_call in traced]
        requested_arrays = [
            {n: a for n, a in named_arrays if claim is not None or selection.has(n, states)}
            for named_arrays in arrays_by_call
        ]
        layer = labelled_layer(
            join_directions(requested_arrays, directions[0].cell.space, states[0]),
            info={**(vars(info) if info else {}), "name": name, "states": own_states(directions[0].cell)},
            provenance=provenance,
            bidirectional=len(directions) > 1,
        )
        if claim is not None:
            _add_to_claim(claim, layer, directions, traced)
            layer.variables = {v: array for v, array in layer.variables.items() if selection.has(v, states)}
        layer.coords |= _lag_coordinates([traced_call.lag_gradients for traced_call in traced])
        if directions[0].reset is not None:
            layer.coords["reset"] = xr.Variable((SAMPLE, TIME), to_host(directions[0].reset), quantity_attrs("reset"))
        _open_space(layer, directions[0].cell)
        datasets[name] = layer
    checks += [total.check() for total in sums.values()]
    return {name: datasets[name] for name in nodes}, checks


def _lag_coordinates(directions: Sequence[Mapping[str, Array]]) -> dict[Hashable, xr.Variable]:
    """Return the gradients by lag of both directions, or of the only one, as coordinates of a layer."""
    coordinates: dict[Hashable, xr.Variable] = {}
    for state in directions[0] if all(directions) else ():
        norms = [direction[state] for direction in directions]
        count = max(map(len, norms))  # the directions may have different numbers of probes
        filled = [np.concatenate([v, np.full((count - len(v), v.shape[1]), np.nan)]) for v in norms]
        values, dims = (filled[0], (PROBE, LAG)) if len(filled) == 1 else (np.stack(filled, 1), (PROBE, DIRECTION, LAG))
        coordinates[f"{state}_lag_gradient"] = xr.Variable(dims, values, quantity_attrs("lag_gradient"))
    return coordinates


def _open_space(layer: LabelledLayer, cell: Cell) -> None:
    """Open the flat axis of input and states of several axes, by variable.

    The states' axes are channels and axes of space, as of a convolutional cell, unless the cell names them.
    """
    shapes: Mapping[str, tuple[int, ...]] = getattr(cell, "shapes", {})
    if not shapes:
        return
    first = shapes[cell.state_names[0]]
    names = tuple(getattr(cell, "state_axes", ())) or (CHANNEL, *SPACE[len(first) - 1])
    input_names = [FEATURE if name in (CHANNEL, UNIT) else name for name in names]
    for name, array in list(layer.variables.items()):
        stem = _STEM.sub("", name)
        shape = shapes.get(stem, first if stem in ("output", "state") else None)
        if shape is not None and math.prod(shape) == array.shape[-1]:
            axes = zip(input_names if stem == "input" else names, shape, first, strict=True)
            opened_axes = (n if n == FEATURE or size == own else f"{stem}_{n}" for n, size, own in axes)
            dims = (*array.dims[:-1], *opened_axes)
            del layer.variables[name]  # opened ones come last
            layer.variables[name] = xr.Variable(dims, array.values.reshape(*array.shape[:-1], *shape), array.attrs)
    layer.coords = {dim: labels for dim, labels in layer.coords.items() if dim not in (UNIT, FEATURE)}


#: Parts of a variable's name beside that of the state.
_STEM = re.compile(r"^(previous|initial|final)_|_grad$")


def _add_to_claim(
    claim: ReplayedValues, layer: LabelledLayer, directions: Sequence[RecurrentCall], traced: Sequence[TracedCall]
) -> None:
    """Add a layer's weight gradients, and its gradients at input and initial state, to what a certificate compares.

    They are computed from the labelled arrays of the result where these suffice, so that wrong labels show as well.
    """
    # Without a captured input the number of steps is unknown if only the last output is returned; units replace it.
    timed_array = directions[0].output[0] if directions[0].input is None else directions[0].input[0]
    claim.steps = max(claim.steps, int(timed_array.shape[0]))
    claim.dtype = coarser_dtype(claim.dtype, directions[0].compute_dtype or str(directions[0].output.dtype))
    part = claim.part
    for call, traced_call in zip(directions, traced, strict=True):
        if traced_call.weights is None:
            continue
        compared_call = (
            call if part is None else replace(call, initial_state=tuple(map(part.select, call.initial_state)))
        )
        claim.add_weights(
            call,
            weight_sums(layer, compared_call, slice(None) if part is None else part.slice) or traced_call.weights,
            traced_call.weights_scale,
        )
        grads = initial_state_gradients(layer, call, call.cell.state_names)
        if call.framework_initial_state_grad is not None and grads is not None:
            pairs = zip(grads, call.framework_initial_state_grad, strict=True)
            claim.boundaries.append(BoundaryGradients(INITIAL, call.layer, list(pairs), traced_call.rounding.initial))
    claimed_gradient = input_gradient(layer)
    reference = [call.framework_input_grad for call in directions if call.framework_input_grad is not None]
    if reference and claimed_gradient is not None:
        scale = max(traced_call.rounding.input for traced_call in traced)
        claim.boundaries.append(
            BoundaryGradients(
                LAYER_INPUT, directions[0].layer, [(claimed_gradient, sum(map(to_host, reference)))], scale
            )
        )


def plain_datasets(
    calls: Sequence[NonRecurrentCall],
    axes: ModelAxes,
    batch: Batch,
    selection: TraceSelection,
    provenance: Mapping[str, str],
) -> dict[str, LabelledLayer]:
    """Return the outputs of non-recurrent layers, with samples and time as the first axes where known."""
    axes.learn(batch, [Port("output", call.layer) for call in calls])
    batch_axes = BatchAxes(axes, axes.samples(batch)) if calls else None
    datasets = {}
    for call in calls:
        arrays: dict[str, Array] = {}
        dims: dict[str, tuple[str, ...]] = {}
        for name, array in (("output", call.output), ("output_grad", call.output_grad)):
            if array is not None and batch_axes is not None and selection.has(name):
                opened = batch_axes.split_folded(Port("output", call.layer), to_host(array))
                arrays[name], dims[name] = in_canonical_order(*opened)
        info = {"name": call.layer}
        datasets[call.layer] = labelled_layer(arrays, info=info, provenance=provenance, bidirectional=False, dims=dims)
    return datasets


def assign_coordinates(layers: Iterable[LabelledLayer], coordinates: InputCoordinates) -> None:
    """Add the coordinates of the user's x, an ``xarray.DataArray``, to the datasets of traced layers, in place.

    Samples and steps of every layer get them; features only those of a layer that reads an input itself.
    """
    for layer in layers if coordinates.leaves else ():
        coordinates.assign_to(layer)
        leaf = coordinates.input_index(layer.variables["input"].values) if "input" in layer.variables else None
        if leaf is not None:
            coordinates.assign_to(layer, (FEATURE,), leaf)
