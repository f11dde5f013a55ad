"""Capture: convert the tensors of one run of a model to the arrays of the adapter contract."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ...autodiff import tensors
from ...errors import InputError, LayerNotFoundError, ModelError, did_you_mean
from ...typing import Array
from ..protocol import NOT_LOOKED_INTO, Batch, Capture, ChainLink, NonRecurrentCall, RecurrentCall, Taps
from . import losses
from .cells import KerasStepCell, initial_state_weights
from .dialect import Dialect, dialect_of
from .discover import (
    ModelLayers,
    RecurrentSite,
    choose_layers,
    given_state_layers,
    implied_sites,
    locate_layers,
    step_sites,
)
from .hooks import LayerCall, RunRequest
from .inputs import by_key, input_order
from .reference_run import names_of, tied_variables
from .run import RunResult, run
from .variants import chain
from .weights import cell_variables, cell_with_equations, class_of, computation_dtype, known_arrays, registration_of

_OUTPUT_KINDS = frozenset({"output", "final_state", "state"})
_BOUNDARY_KINDS = _OUTPUT_KINDS | {"input", "initial_state", "model|input", "model|output"}
_REPLAY_KINDS = frozenset({"input", "initial_state", "mask", "dropout", "output", "final_state", "outputs", "state"})


def capture(model: Any, batch: Batch, request: Taps) -> Capture:
    """Run one forward pass and, with gradients, one backward pass; see :class:`Taps`."""
    keras = dialect_of(model)
    model_layers = locate_layers(model)
    names, left_out_notes = _hookable_layers(model_layers, request)
    sites, other_layers = choose_layers(model_layers, names)
    given_layers = given_state_layers(model_layers, batch.initial_state)
    loss = losses.scalar_loss(model, batch) if request.needs_loss else None
    boundaries = request.boundaries
    links = chain(model, training=batch.training) if request.chain or request.topmost else None
    last_layer = (
        _last_recurrent_layer(model, links, sites) if request.topmost and loss is not None and not other_layers else ""
    )
    if last_layer:
        request = replace(request, weight_grads=False)
    weights: dict[str, Any] = {}
    if request.gradients and request.weight_grads:  # a cell shared between layers has one entry per weight
        cells = {id(site.layer.cell): site.layer.cell for site in sites}
        weights = {f"{key}|{name}": v for key, cell in cells.items() for name, v in cell_variables(cell).items()}
    if boundaries and not last_layer:
        cell_variable_ids = {id(variable) for variable in weights.values()}
        other_variables = [v for v in keras.weights(model) if id(v) not in cell_variable_ids and keras.is_float(v)]
        weights |= {f"beside|{i}": v for i, v in enumerate(other_variables)}
    needs_inputs = request.inputs and request.record != "outputs"
    hooked_sites = [*sites, *implied_sites(model_layers, sites, given_layers)]
    job = RunRequest(
        model,
        batch,
        hooked_sites,
        other_layers,
        loss,
        gradients=request.gradients,
        tap_names=_tap_names(request, last_layer),
        record_names=_REPLAY_KINDS if needs_inputs else frozenset({"output", "final_state", "outputs"}),
        weights=weights,
        joined_layers=frozenset(other_layers) & frozenset(names or ()),
        step_sites=step_sites(model_layers, hooked_sites),
    )
    result = run(job)
    captured = _Assembly(keras, result, sites, _tied_variable_ids(model, model_layers.sites)).capture(request)
    captured.notes.extend(left_out_notes)
    captured.chain, captured.topmost = links, bool(last_layer)
    if boundaries:
        _add_outer_gradients(captured, job, result)
    return captured


def _last_recurrent_layer(model: Any, links: Sequence[ChainLink] | None, sites: Sequence[RecurrentSite]) -> str:
    """Return the last recurrent layer of a chain; the loss depends on the other layers only through it.

    Returns "" without a chain. A penalty on the output of a layer is another path from the loss to it. Engines that
    do not compile choose other kernels where no gradient is needed, and the last digits would differ from those of
    a whole capture.
    """
    if not dialect_of(model).engine.compiles:
        return ""
    names = [link.name for link in links or () if link.kind == "recurrent"]
    has_penalty = any(getattr(layer, "activity_regularizer", None) is not None for layer in model.layers)
    return names[-1] if names and names == [site.name for site in sites] and not has_penalty else ""


def _tap_names(request: Taps, last_layer: str) -> frozenset[str]:
    """Return the tap keys, or kinds of tensors, at which gradients are captured.

    If ``last_layer``, the last recurrent layer of a chain, is given, the output of that layer is sufficient.
    """
    if not request.gradients:
        return frozenset()
    if last_layer:
        return frozenset({f"{last_layer}|0|0|output", *(["model|output"] if request.boundaries else [])})
    return _BOUNDARY_KINDS if request.boundaries else _OUTPUT_KINDS


def _hookable_layers(model_layers: ModelLayers, request: Taps) -> tuple[tuple[str, ...] | None, list[str]]:
    """Return the layer names to capture, and a note for each layer left out because it cannot be hooked.

    Layers are left out only if ``request.layers`` names some and not all of them must run.
    """
    if request.all_must_run or request.layers is None:
        return request.layers, []
    refusals = {site.name: site.refusal for site in model_layers.sites if site.refusal is not None}
    hookable_names = tuple(name for name in request.layers if name not in refusals)
    return hookable_names, [f"{NOT_LOOKED_INTO}: {refusal.splitlines()[0]}" for refusal in refusals.values()]


def _add_outer_gradients(captured: Capture, job: RunRequest, result: RunResult) -> None:
    """Add the gradients at the inputs and outputs of the model, and of all tapped weights, to a capture."""
    keras, gradients = job.keras, result.gradients
    captured.input_grads = [gradients.get(f"model|input/{i}") for i in input_order(keras, job.data["x"])]
    count = len(keras.tree.flatten(result.outputs))
    captured.output_grads = [gradients.get(f"model|output/{i}") for i in range(count)]
    names = names_of(job.model)
    captured.outside_weight_grads = {
        names[id(v)]: gradients[f"weight|{key}"] for key, v in job.weights.items() if id(v) in names
    }
    captured.full_gradient_names = frozenset(captured.outside_weight_grads)


def _tied_variable_ids(model: Any, sites: Iterable[RecurrentSite]) -> set[int]:
    """Return the ids of the variables that are shared by several layers or by several recurrent cells."""
    cells = {id(site.layer.cell): site.layer.cell for site in sites}.values()
    cell_counts = Counter(key for cell in cells for key in {id(v) for v in cell_variables(cell).values()})
    return tied_variables(model) | {key for key, count in cell_counts.items() if count > 1}


class _Assembly:
    """Converter from the tensors of one run to the calls of the adapter contract."""

    def __init__(self, keras: Dialect, result: RunResult, sites: list[RecurrentSite], tied: set[int]) -> None:
        self._keras, self._engine, self._result, self._tied = keras, keras.engine, result, tied
        self._sites: dict[tuple[str, int], RecurrentSite] = {}
        for site in sites:
            direction_index = sum(name == site.name for name, _ in self._sites)
            self._sites[site.name, direction_index] = site
        self._call_counts = {call.layer_name: call.index + 1 for call in result.calls}
        self._cells: dict[int, Any] = {}

    def capture(self, request: Taps) -> Capture:
        """Return a capture of all requested calls, in the order in which they ran."""
        calls: list[RecurrentCall] = []
        other_calls: list[NonRecurrentCall] = []
        for call in self._result.calls:
            if request.layers is not None and not {call.layer_name, self._node_name(call)} & set(request.layers):
                continue
            if (call.layer_name, call.direction_index) in self._sites:
                calls.append(self._recurrent_call(call, request))
            else:
                other_calls.extend(self._other_calls(call))
        self._check_that_all_ran(request, calls, other_calls)
        loss, outputs = self._result.loss, self._result.outputs
        loss = None if loss is None else self._engine.to_array(loss)
        if loss is not None and np.iscomplexobj(loss):
            raise InputError("The loss is not a real number.", got=f"dtype {loss.dtype}", expected="a real tensor")
        loss_value = None if loss is None else float(loss)
        return Capture(
            calls=calls,
            other_calls=other_calls,
            loss=loss_value,
            outputs=None if outputs is None else by_key(self._keras.tree.map_structure(self._engine.to_array, outputs)),
            notes=[*self._notes(loss_value), *(_no_path_notes(calls, other_calls) if request.gradients else [])],
            order=self._node_order(),
            entangled=any(call.stepwise for call in calls),
        )

    def _node_order(self) -> tuple[str, ...]:
        """Return the node names in the order in which their calls ended; a nested model comes after its layers."""
        ended_nodes: list[str] = []
        open_calls: list[LayerCall] = []
        for call in self._result.calls:
            while open_calls and not call.layer_name.startswith(f"{open_calls[-1].layer_name}/"):
                ended_nodes.append(self._node_name(open_calls.pop()))
            open_calls.append(call)
        return tuple(dict.fromkeys([*ended_nodes, *(self._node_name(call) for call in reversed(open_calls))]))

    def _node_name(self, call: LayerCall) -> str:
        return call.layer_name if self._call_counts[call.layer_name] == 1 else f"{call.layer_name}#{call.index}"

    def _recurrent_call(self, call: LayerCall, request: Taps) -> RecurrentCall:
        """Convert the recorded call of a recurrent layer, or a recorded loop over a cell, to a ``RecurrentCall``."""
        site = self._sites[call.layer_name, call.direction_index]
        cell = site.layer.cell
        specific_fields = self._loop_fields(call, request) if call.is_loop else self._layer_fields(site, call)
        return RecurrentCall(
            **specific_fields,
            layer=self._node_name(call),
            cell=self._equations_of(cell),
            input=call.arrays.get("input"),
            initial_state=call.tensors_of_kind("initial_state"),
            input_scale=call.arrays.get("input_scale"),
            state_scale=call.arrays.get("state_scale"),
            compute_dtype=computation_dtype(site.layer),
            weights_key=next(
                f"{name}|{direction_index}"
                for (name, direction_index), s in self._sites.items()
                if s.layer.cell is cell
            ),
            weight_grads=self._weight_grads(cell) if request.gradients and request.weight_grads else None,
            tied=self._tied_weights(cell),
            framework_input_grad=self._gradient(call, "input"),
            framework_initial_state_grad=self._gradients(call, "initial_state") or None,
        )

    def _gradient(self, call: LayerCall, name: str) -> Array | None:
        return self._result.gradients.get(f"{call.key}|{name}")

    def _gradients(self, call: LayerCall, kind: str) -> tuple[Array, ...]:
        gradients = (self._gradient(call, name) for name in call.arrays if name.startswith(f"{kind}/"))
        return tuple(gradient for gradient in gradients if gradient is not None)

    def _layer_fields(self, site: RecurrentSite, call: LayerCall) -> dict[str, Any]:
        """Return the ``RecurrentCall`` fields that are computed differently for a layer than for a loop over a cell.

        These are direction, mask, output and final states.
        """
        layer, mask = site.layer, call.arrays.get("mask")
        mask = None if mask is None else mask.reshape(tuple(mask.shape)[:2]) != 0
        from_state = output_from_state(layer, None if mask is None else tensors.to_numpy(mask))
        output, output_grad = call.arrays.get("output"), self._gradient(call, "output")
        if layer.go_backwards and layer.return_sequences:
            output, output_grad = (None if a is None else tensors.flip(a, 1) for a in (output, output_grad))
        return {
            "direction": site.direction,
            "bidirectional": site.bidirectional,
            "mask": mask,
            "output": output,
            "output_from_state": None if from_state is None else tensors.converted_like(from_state, mask),
            "masked_output": masked_output(layer, class_of(layer.cell) is not None),
            "final_state": call.tensors_of_kind("final_state") or None if layer.return_state else None,
            "output_grad": output_grad,
            "final_state_grad": self._gradients(call, "final_state") or None if layer.return_state else None,
        }

    def _loop_fields(self, call: LayerCall, request: Taps) -> dict[str, Any]:
        """Return the ``RecurrentCall`` fields that are computed differently for a loop over a cell than for a layer.

        Among them are the gradients of states between the steps.
        """
        final_states = call.tensors_of_kind("final_state")
        state_gradients: dict[int, Array] = {}
        final_gradients: list[Array] = []
        for i, state in enumerate(final_states):
            # The gradient of a state that is the output is at the output.
            grad: Any = self._gradient(call, f"state/{i}")
            final_gradients.append(state * 0 if grad is None else grad[:, -1])
            if grad is not None:
                state_gradients[i] = grad.clone() if hasattr(grad, "clone") else np.array(grad)
                state_gradients[i][:, -1] = 0
        return {
            "direction": "forward",
            "output": call.arrays.get("output"),
            "masked_output": "output",
            "final_state": final_states,
            "output_grad": self._gradient(call, "output"),
            "final_state_grad": tuple(final_gradients) if request.gradients else None,
            "state_grad": state_gradients or None,
            "stepwise": True,
            "reads_states_between": True,
            "start_states": call.tensors_of_kind("received") or None,
        }

    def _equations_of(self, cell: Any) -> Any:
        if id(cell) not in self._cells:
            known_cell = cell_with_equations(cell, self._engine)
            self._cells[id(cell)] = KerasStepCell(cell, self._keras) if known_cell is None else known_cell
        return self._cells[id(cell)]

    def _weight_grads(self, cell: Any) -> dict[str, Array]:
        by_variable = {name: self._result.gradients[f"weight|{id(cell)}|{name}"] for name in cell_variables(cell)}
        return known_arrays(cell, by_variable)

    def _tied_weights(self, cell: Any) -> frozenset[str]:
        """Return the names of a cell's weights whose gradient is shared with other layers or the initial state."""
        names = {name for name, variable in cell_variables(cell).items() if id(variable) in self._tied}
        names |= initial_state_weights(self._keras, cell)
        registration = registration_of(cell)
        if registration is not None:  # if one variable is tied, each weight composed of them is
            return frozenset(registration.cell.parameters if names else ())
        return frozenset(names | ({"recurrent_bias"} if "bias" in names else set()))

    def _other_calls(self, call: LayerCall) -> list[NonRecurrentCall]:
        node, outputs = self._node_name(call), call.tensors_of_kind("output")
        return [
            NonRecurrentCall(node if len(outputs) == 1 else f"{node}[{i}]", output, self._gradient(call, f"output/{i}"))
            for i, output in enumerate(outputs)
        ]

    def _check_that_all_ran(
        self, request: Taps, calls: list[RecurrentCall], other_calls: list[NonRecurrentCall]
    ) -> None:
        """Raise an error if a layer requested by name, or every layer, did not run."""
        captured_layers = {c.layer for c in calls} | {p.layer.split("[")[0] for p in other_calls}
        required_names = request.layers if request.all_must_run else None
        missing_names = [
            n
            for n in required_names or ()
            if not any(layer == n or layer.startswith(f"{n}#") for layer in captured_layers)
        ]
        nodes = [self._node_name(call) for call in self._result.calls]
        for name in missing_names:
            layer_name = name.rpartition("#")[0]
            if layer_name and layer_name in self._call_counts:
                raise LayerNotFoundError(f"There is no call {name!r}.", hint=did_you_mean(name, nodes))
            raise ModelError(f"Layer {name!r} did not run in this forward pass.", hint=did_you_mean(name, nodes))
        if not calls and not other_calls and (request.all_must_run or self._sites):
            listed_layers = ", ".join(dict.fromkeys(site.name for site in self._sites.values()))
            raise ModelError(
                "No recurrent layer ran in this forward pass.",
                got=f"{listed_layers}: not called by call(), or inside a tf.function that was traced before",
                hint="call() without tf.function, or keras.layers.RNN(cell) in place of its loop",
            )

    def _notes(self, loss: float | None) -> list[str]:
        notes = []
        if loss is not None and not math.isfinite(loss):
            notes.append(
                f"The loss is {loss}: gradients of it are not meaningful; rl.find_nonfinite(model, x, y) finds where "
                "it first appears."
            )
        half_dtypes = {site.layer.compute_dtype for site in self._sites.values()} & {"float16", "bfloat16"}
        if half_dtypes:
            notes.append(f"Computed in {', '.join(sorted(half_dtypes))}, shown as float32, without the loss scale.")
        return notes


def _no_path_notes(calls: list[RecurrentCall], other_calls: list[NonRecurrentCall]) -> list[str]:
    """Return a note if the loss has a zero gradient at every requested layer; an empty list otherwise."""
    gradients = [grad for c in calls for grad in (c.output_grad, *(c.final_state_grad or ()))]
    gradients += [c.output_grad for c in other_calls]
    present_gradients = [tensors.to_numpy(grad) for grad in gradients if grad is not None]
    if not present_gradients or any(map(np.any, present_gradients)):
        return []
    return ["No path leads from the loss to any layer asked for: every gradient is zero."]


def masked_output(layer: Any, is_known: bool) -> Literal["state", "output", "zero"]:
    """Return what a layer outputs at a masked step: the carried state, its previous output, or zero.

    ``is_known``: whether the equations of its cell are known.
    """
    keras = dialect_of(layer)
    engine = keras.engine.name
    if layer.zero_output_for_mask and not (engine == "jax" and layer.unroll):
        return "zero"
    nested = keras.tree.is_nested(keras.state_template(layer.cell)[0])
    is_single_state = isinstance(layer.cell, keras.layers.StackedRNNCells) or not nested
    return "state" if is_known or (engine == "jax" and not layer.unroll and is_single_state) else "output"


def output_from_state(layer: Any, mask: Array | None) -> Array | None:
    """Return where the output depends on the state after that step: bool (sample, time), None for everywhere.

    ``mask`` (sample, time) is in chronological order. For a layer that returns only its last output, use the entry of
    the step that the layer runs last.
    """
    if mask is None:
        return None
    engine = dialect_of(layer).engine.name
    backwards = layer.go_backwards
    mask_in_run_order = mask[:, ::-1] if backwards else mask
    if engine == "jax" and not layer.unroll:
        depends_on_state = mask_in_run_order | (not layer.zero_output_for_mask)
    else:
        depends_on_state = mask_in_run_order.cumsum(axis=1) > 0
        if layer.zero_output_for_mask and engine != "jax":
            is_mirrored = layer.unroll and backwards and layer.return_sequences
            depends_on_state = depends_on_state & (mask if is_mirrored else mask_in_run_order)
    return (depends_on_state[:, ::-1] if backwards else depends_on_state).copy()
