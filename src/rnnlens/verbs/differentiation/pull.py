"""Gradients of one batch: sweeps inside recurrent layers, joined with the framework's pull-back outside of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from ...adapters.protocol import LayerWeights, Port, Run, Taps
from ...errors import LayerNotFoundError, ModelError, UnsupportedError
from ...recurrence.trajectory import Adjoint
from ...results.schema import to_host
from ...typing import Array
from ...vocabulary import DIRECTION
from ..axes import BatchAxes, in_canonical_order, refuse_coupled, refuse_steps_first, refuse_unknown
from ..names import Catalogue, TensorName, refuse_lone_output, text_of, uncalled_layer
from ..recurrent_layers import ReplayedCall, ReplayedLayers, runs_layer, stack_directions
from ..weight_layout import WeightSource, assemble, sources
from .plan import GradientPlan, TensorAccess, layers_inside, plan
from .request import BatchGradients, BatchRequest, KnownStart

#: Gradient at each port, with one leading axis K; None where no path leads there.
PortGradients = Mapping[Port, Array | None]


class SweptWeightGradients:
    """Sums of weight gradients from sweeps and from the framework; ``ports`` are the framework's weights by tensor."""

    def __init__(self, catalogue: Catalogue, ports: Mapping[TensorName, Sequence[Port]], *, per_sample: bool) -> None:
        self.catalogue, self.ports, self.per_sample = catalogue, ports, per_sample
        self._layers = {str(name.layer) for name in ports}
        self._swept: dict[tuple[str, str], list[Array]] = {}

    @property
    def size(self) -> int:
        """Number of entries of all requested weights."""
        distinct = dict.fromkeys(port for ports in self.ports.values() for port in ports)
        shapes = [self.catalogue.weights[str(port.layer)].values[port.key].shape for port in distinct]
        return sum(int(np.prod(shape, dtype=int)) for shape in shapes)

    def add_swept(self, layer: str, replayed: ReplayedCall, swept: Adjoint) -> None:
        """Add the weight gradients of a sweep through one call of a layer."""
        name = uncalled_layer(layer, self.catalogue.weights)
        if name not in self._layers:
            return
        direction = replayed.call.direction if replayed.call.bidirectional else ""
        for key, grad in replayed.weight_gradients(swept, per_sample=self.per_sample).items():
            self._swept.setdefault((name, f"{direction}/{key}".lstrip("/")), []).append(grad)

    def of(self, name: TensorName, port_gradients: PortGradients, rows: slice = slice(None)) -> Array | None:
        """Return the gradient of one weight, by sample for ``rows`` if ``per_sample``; None if there is none."""
        weights = self.catalogue.weights[str(name.layer)]
        weight_sources = sources(weights)[name.key]
        framework = self._framework_part(name, port_gradients, weight_sources, weights)
        swept = self._swept_part(name, weight_sources, weights, rows)
        parts = [part for part in (framework, swept) if part is not None]
        if not parts:
            return None
        total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return total if self.per_sample else total[0]

    def _framework_part(
        self,
        name: TensorName,
        port_gradients: PortGradients,
        weight_sources: Sequence[WeightSource],
        weights: LayerWeights,
    ) -> Array | None:
        """Return the framework's part of a weight gradient, with a leading cotangent axis; None if there is none."""
        parts = [port_gradients.get(port) for port in self.ports[name]]
        count = next((part.shape[0] for part in parts if part is not None), None)
        if count is None:
            return None
        shapes = [tuple(weights.values[source.key].shape) for source in weight_sources]
        filled = [np.zeros((count, *s)) if p is None else to_host(p) for p, s in zip(parts, shapes, strict=True)]
        return assemble(filled, weight_sources, name.key, weights, 1)

    def _swept_part(
        self, name: TensorName, weight_sources: Sequence[WeightSource], weights: LayerWeights, rows: slice
    ) -> Array | None:
        """Return the part of a weight gradient that sweeps computed, in the layout of results with a leading axis."""
        by_direction: list[Array | None] = []
        for source in weight_sources:
            keys = [f"{source.direction}/{name.key}"] if len(weight_sources) > 1 or "/" in source.key else []
            swept = (self._swept.get((str(name.layer), key)) for key in (*keys, name.key))
            parts = next(filter(None, swept), None)
            by_direction.append(None if parts is None else np.sum(parts, axis=0))
        present = next((part for part in by_direction if part is not None), None)
        if present is None:
            return None
        filled = [np.zeros_like(present) if part is None else part for part in by_direction]
        whole_sources = [WeightSource(source.key, source.direction) for source in weight_sources]
        assembled = assemble(filled, whole_sources, name.key, weights, 1 if self.per_sample else 0)
        return assembled[rows] if self.per_sample else assembled[None]


def batch_gradients(request: BatchRequest) -> BatchGradients:
    """Run the model once and pull the target back to all requested tensors."""
    gradients = captured_gradients(request)
    if gradients is not None:
        return gradients
    if request.start is not None:
        try:
            return _pulled_gradients(request)
        except _PaddingError:
            return batch_gradients(replace(request, start=None))
    try:
        return _pulled_gradients(request)
    except (LayerNotFoundError, ModelError):
        # Tensors of layers that are not called in this forward pass have no gradient.
        layers = {str(name.layer).partition("#")[0] for name in request.wrt if name.layer is not None}
        missing = {layer for layer in layers if not runs_layer(request.adapter, request.model, request.batch, layer)}
        absent = [name for name in request.wrt if str(name.layer).partition("#")[0] in missing]
        if not absent or len(absent) == len(request.wrt):
            raise
        present = tuple(name for name in request.wrt if name not in absent)
        gradients = _pulled_gradients(replace(request, wrt=present))
        gradients.gradients |= dict.fromkeys(absent)
        return gradients


def _pulled_gradients(request: BatchRequest) -> BatchGradients:
    replayed_layers = request.replayed or ReplayedLayers.capture_layers(
        request.adapter, request.model, request.batch, layers_inside(request)
    )
    gradient_plan = plan(request, replayed_layers)
    if gradient_plan.outputs and gradient_plan.weights:
        _refuse_layer_losses(request)
    of_all = bool(gradient_plan.outputs) or request.named is None
    known_cotangents = (
        {} if request.start is None else {port: request.start.cotangents[port] for port in gradient_plan.starts}
    )
    taps = Taps.ports(gradient_plan.starts, gradient_plan.ends, cotangents=known_cotangents)
    with request.adapter.run(request.model, request.batch, taps) as run:
        count = run.output_count
        has_several = count > 1 and not request.catalogue.outputs
        if has_several and not of_all:
            refuse_lone_output((*request.leaves, *request.wrt), count)
        if not (has_several and of_all):
            if gradient_plan.free_ports or request.target.per_sample or request.partial:
                refuse_steps_first(request.axes, request.batch, run.recurrent_sizes)
            request.axes.learn(request.batch, gradient_plan.free_ports, run.layouts)
            return _Pull(request, gradient_plan, replayed_layers, run).gradients()
    # Only the run showed that the model returns several tensors, and the request is about all of them.
    request.catalogue.outputs = tuple(map(str, range(count)))
    return _pulled_gradients(request)


def _refuse_layer_losses(request: BatchRequest) -> None:
    """Refuse shares of the loss by sample where layers add to it: a share is pulled from the outputs only."""
    if request.adapter.run(request.model, request.batch.without_loss(), Taps()).outputs.layer_losses:
        raise UnsupportedError(
            "Layers add losses of what they compute, which cannot be divided among samples.",
            got="per_sample=True, and a layer with add_loss() or an activity regularizer",
            expected="a loss that is computed from the outputs of the model",
            hint="per_sample=False; or of= a function of the output, which leaves the added losses out",
        )


class _PaddingError(Exception):
    """Error for a batch with padding, where the output of a layer is not its state."""


class _Pull:
    """One forward pass and the vector-Jacobian products for one request."""

    def __init__(
        self,
        request: BatchRequest,
        gradient_plan: GradientPlan,
        replayed_layers: ReplayedLayers,
        run: Run,
    ) -> None:
        self.request, self.target, self.plan = request, request.target, gradient_plan
        self.replayed_layers, self.run = replayed_layers, run
        self.samples = request.samples
        self.batch_axes = BatchAxes(request.axes, self.samples)
        self.weights = SweptWeightGradients(request.catalogue, gradient_plan.weights, per_sample=self.target.per_sample)
        #: Cotangents by port; those of states inside recurrences and of stepwise states by layer and direction.
        self.seeds: dict[Port, Array] = {}
        self.state_cotangents: dict[str, list[dict[int, Array]]] = {}
        self.step_cotangents: dict[str, list[dict[int, Array]]] = {}
        self.swept: dict[str, list[tuple[ReplayedCall, Adjoint]]] = {}

    def gradients(self) -> BatchGradients:
        """Compute the derivative of the target by every requested tensor, by vector-Jacobian products."""
        request, value = self.request, self._start()
        start = self._start_of_later_batches()
        self._leave_recurrences()
        port_gradients: PortGradients | None = self.run.known_gradients
        if port_gradients is None:
            port_gradients = self._pull({port: seed[None] for port, seed in self.seeds.items()})
        if self.target.per_sample and request.leaves[0].kind != "loss" and request.start is None:
            refuse_coupled(self.batch_axes, self.seeds, self._pull)
        gradients = {access.name: self._activation(access, port_gradients) for access in self.plan.activations}
        if self.target.per_sample:
            gradients |= self._weights_by_sample(port_gradients)
        else:
            gradients |= {name: self.weights.of(name, port_gradients) for name in self.plan.weights}
        return self._labelled_gradients(
            value, gradients, start if all(grad is not None for grad in gradients.values()) else None
        )

    def _start_of_later_batches(self) -> KnownStart | None:
        """Return where differentiation starts in further batches of the same shapes; None if that is not known.

        A state that is the output of its layer is then differentiated by the framework, in the same pass as all else.
        """
        request, (leaf, *_) = self.request, self.plan.leaves
        if request.start is not None or not (request.partial and request.is_linear) or self.plan.weights:
            return request.start
        if not request.facts.compiles:
            return None
        if not leaf.is_swept:
            return None if leaf.stepwise else KnownStart(frozenset(), {p: np.array(s) for p, s in self.seeds.items()})
        layer = str(leaf.name.layer)
        if not self.replayed_layers.is_output(leaf.name) or any(access.is_swept for access in self.plan.wrt):
            return None
        (states,) = self.state_cotangents[layer]
        return KnownStart(frozenset([leaf.name]), {Port("output", layer): np.array(states[leaf.name.index])})

    def _labelled_gradients(
        self, value: Array, gradients: Mapping[TensorName, Array | None], start: KnownStart | None
    ) -> BatchGradients:
        """Return the gradients in the requested order, divided by the loss scale, with named axes."""
        batch_gradients = BatchGradients(value, self.samples, {}, {}, self.swept, start)
        for access in self.plan.wrt:
            name, grad = access.name, gradients[access.name]
            batch_gradients.gradients[name], batch_gradients.dims[name] = None, ()
            if grad is not None:
                grad = grad if self.request.scale == 1.0 else grad / grad.dtype.type(self.request.scale)
                if access.is_free:
                    batch_gradients.gradients[name], batch_gradients.dims[name] = in_canonical_order(
                        *self.batch_axes.split_folded(name.port(), grad)
                    )
                else:
                    dims = self.request.catalogue.dims(name, grad, per_sample=self.target.per_sample)
                    batch_gradients.gradients[name], batch_gradients.dims[name] = grad, dims
        return batch_gradients

    def _start(self) -> Array:
        """Evaluate the target and store its cotangents in ``seeds`` or, inside recurrences, in ``state_cotangents``."""
        request = self.request
        if request.cotangents is not None:  # the value is the loss weighted by its cotangent, or 0 without a loss
            value = np.zeros(())
            for access, cotangent in zip(self.plan.leaves, request.cotangents, strict=True):
                self._seed(access, cotangent)
                if access.name.kind == "loss":
                    value = cotangent * to_host(self.run.values[access.name.port()])
            return value
        values = [self._value(access) for access in self.plan.leaves]
        if request.framework_states:
            states = values[0].values
            suspects = states[states[..., 0] == 0]
            if suspects.size and not suspects.any(axis=-1).all():  # outputs that the framework set to 0 for padding
                raise _PaddingError
        value, cotangents = request.evaluate(self.batch_axes, values)
        if request.start is not None:
            self.seeds |= request.start.cotangents
            return value
        for access, cotangent in zip(self.plan.leaves, cotangents, strict=True):
            self._seed(access, np.asarray(cotangent))
        return value

    def _value(self, access: TensorAccess) -> xr.DataArray:
        """Return the value of a tensor of the target, with named axes."""
        if access.is_swept:
            value = self.replayed_layers.value(access.name)
        else:
            parts = [to_host(self.run.values[port]) for port in access.ports]
            if access.is_free:
                opened, names = self.batch_axes.split_folded(access.name.port(), parts[0])
                return xr.DataArray(opened, dims=names)
            value = stack_directions(parts, self.request.catalogue.space(access.name.layer))
        return xr.DataArray(value, dims=self.request.catalogue.dims(access.name, value))

    def _seed(self, access: TensorAccess, cotangent: Array) -> None:
        """Add a cotangent at the ports or states where differentiation of a tensor starts."""
        if self.request.scale != 1.0 or not cotangent.flags.writeable:
            cotangent = cotangent * np.asarray(self.request.scale, dtype=cotangent.dtype)
        if access.is_swept:
            self._add_cotangent(self.state_cotangents, access.name, cotangent)
            return
        if access.stepwise:
            self._add_cotangent(self.step_cotangents, access.name, cotangent)
        if access.is_free:
            cotangent = cotangent.reshape(tuple(self.run.values[access.ports[0]].shape))
        parts: Sequence[Array] = [cotangent]
        if len(access.ports) > 1:
            dims = self.request.catalogue.dims(access.name, cotangent)
            parts = list(np.moveaxis(cotangent, dims.index(DIRECTION), 0))
        for port, part in zip(access.ports, parts, strict=True):
            self.seeds[port] = self.seeds[port] + part if port in self.seeds else part

    def _add_cotangent(self, by_layer: dict[str, list[dict[int, Array]]], leaf: TensorName, cotangent: Array) -> None:
        """Add a cotangent to those of the states from which a layer's sweep starts, for each direction."""
        layer = by_layer.setdefault(str(leaf.layer), [{} for _ in self.replayed_layers.layer(leaf.layer)])
        for states, added in zip(layer, self.replayed_layers.state_cotangents(leaf, cotangent), strict=True):
            for index, array in added.items():
                states[index] = states[index] + array if index in states else array

    def _leave_recurrences(self) -> None:
        """Sweep cotangents of states to the input and initial states of their layer, and to its weights."""
        for layer, states in self.state_cotangents.items():
            for replayed, cotangents in zip(self.replayed_layers.layer(layer), states, strict=True):
                swept = replayed.sweep(cotangents, {})
                lower_grads = [swept.input_grad, *swept.initial_state_grad]
                for port, grad in zip(replayed.lower_ports(), lower_grads, strict=True):
                    self.seeds[port] = self.seeds[port] + to_host(grad) if port in self.seeds else to_host(grad)
                self.weights.add_swept(layer, replayed, swept)

    def _activation(self, access: TensorAccess, port_gradients: PortGradients) -> Array | None:
        """Return the gradient by an activation, a tensor that is no weight; None if no path leads there."""
        if not access.is_swept:
            return stack_first_cotangents(
                [port_gradients.get(port) for port in access.upper_ports],
                self.request.catalogue.space(access.name.layer),
            )
        directions, layer = self.replayed_layers.layer(access.name.layer), str(access.name.layer)
        cotangents = self.state_cotangents.get(layer) or self.step_cotangents.get(layer) or [{} for _ in directions]
        first_grads = {port: None if a is None else a[0] for port, a in port_gradients.items()}
        if all(first_grads.get(port) is None for port in access.upper_ports) and not any(cotangents):
            return None
        if layer not in self.swept:  # by another tensor of the same layer
            self.swept[layer] = [
                (replayed, replayed.sweep(states, first_grads))
                for replayed, states in zip(directions, cotangents, strict=True)
            ]
        return self.replayed_layers.gradient(access.name, [adjoints for _, adjoints in self.swept[layer]])

    def _weights_by_sample(self, port_gradients: PortGradients) -> dict[TensorName, Array | None]:
        """Return weight gradients of every sample: one cotangent per sample, zero at all other samples."""
        names = list(self.plan.weights)
        if not names:
            return {}
        seeds = self.seeds
        if self.plan.outputs:
            seeds = {port: to_host(a)[0] for port in self.plan.outputs if (a := port_gradients.get(port)) is not None}
        pieces: dict[TensorName, list[Array | None]] = {name: [] for name in names}
        # A pull-back keeps the cotangent of every activation on its path; eight times the seeds is the estimate.
        per_sample = 8 * (2 * self.weights.size + 8 * sum(seed.size for seed in seeds.values()))
        size = int(min(self.samples, max(1, self.request.memory // max(per_sample, 1))))
        for start in range(0, self.samples, size):
            rows = range(start, min(start + size, self.samples))
            pulled = self._pull({port: self._repeat_by_sample(port, seed, rows) for port, seed in seeds.items()})
            for name in names:
                pieces[name].append(self.weights.of(name, pulled, slice(rows.start, rows.stop)))
        return {
            name: None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
            for name, parts in pieces.items()
        }

    def _repeat_by_sample(self, port: Port, seed: Array, rows: range) -> Array:
        """Repeat a cotangent (sample, ...) once per sample of ``rows``, zero at all other samples."""
        if self.batch_axes.has_framework_layout(port):
            refuse_unknown("per_sample=True", text_of(port), self.batch_axes.layout(port, seed).names)
        masks = np.arange(self.samples) == np.asarray(rows)[:, None]
        return self.batch_axes.mask_samples(port, seed, masks)

    def _pull(self, cotangents: Mapping[Port, Array]) -> PortGradients:
        return self.run.pull(cotangents) if cotangents else {}


def captured_gradients(request: BatchRequest) -> BatchGradients | None:
    """Return gradients of the loss by recurrent outputs and states from one captured pass; None if more is needed."""
    if not fits_one_capture(request):
        return None
    layers = tuple(dict.fromkeys(str(name.layer) for name in request.wrt))
    capture = request.adapter.run(request.model, request.batch, Taps.direct(layers)).capture
    replayed_layers = ReplayedLayers.of(capture.calls)
    if any(name.kind == "final_state" and replayed_layers.is_stepwise(name) for name in request.wrt):
        return None
    grads: dict[TensorName, Array | None] = {}
    swept: dict[str, list[tuple[ReplayedCall, Adjoint]]] = {}
    for name in request.wrt:
        directions = replayed_layers.layer(name.layer)
        if name.kind == "output":
            parts = [to_host(replayed.call.output_grad)[None] for replayed in directions]
            grads[name] = stack_first_cotangents(parts, request.catalogue.space(name.layer))
        else:
            sweeps = [
                replayed.sweep(replayed.call.state_grad or {}, replayed.direct_gradients()) for replayed in directions
            ]
            swept[str(name.layer)] = list(zip(directions, sweeps, strict=True))
            grads[name] = replayed_layers.gradient(name, sweeps)
    if any(grad is None or not np.any(grad) for grad in grads.values()):
        return None
    dims = {name: request.catalogue.dims(name, grad) for name, grad in grads.items() if grad is not None}
    return BatchGradients(np.asarray(capture.loss), request.samples, grads, dims, swept)


def fits_one_capture(request: BatchRequest) -> bool:
    """Return whether a gradient request is the loss by outputs and states of recurrent layers only."""
    if request.target.text != "loss" or request.target.per_sample or request.scale != 1.0:
        return False
    catalogue = request.catalogue
    are_recurrent = all(uncalled_layer(name.layer, catalogue.recurrent) in catalogue.recurrent for name in request.wrt)
    return are_recurrent and all(name.kind == "output" or catalogue.is_inside(name) for name in request.wrt)


def stack_first_cotangents(parts: Sequence[Array | None], space: tuple[str, ...]) -> Array | None:
    """Stack the first cotangent of each direction; zeros for a missing one, None if all are missing."""
    arrays = [None if part is None else to_host(part)[0] for part in parts]
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    return stack_directions([np.zeros_like(present[0]) if array is None else array for array in arrays], space)
