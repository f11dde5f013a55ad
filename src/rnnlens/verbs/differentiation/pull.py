"""Answers a question on one batch.

The way of a gradient: from the target to the boundary of the layer it lies in (our sweep, if it lies inside a
recurrence), from there to the boundaries asked about (the framework's own differentiation), and into recurrent layers
again (our sweep).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from ...adapters.protocol import Port, Pullback
from ...errors import LayerNotFoundError, ModelError
from ...layout import dims_of, direction_axis
from ...recurrence.trajectory import Adjoint
from ...results.schema import to_host
from ...typing import Array
from ...vocabulary import DIRECTION, SAMPLE
from ..axes import in_order, refuse_unknown, text_of
from ..coupling import refuse_coupled
from ..inside import Half, Inside, runs
from ..names import TensorName, refuse_lone_output
from ..outside import Outside
from .captured import captured, side_by_side
from .plan import Place, Plan, layers_inside, plan
from .question import Answer, Part, Question
from .weights import Arrived, WeightGradients


def answer(question: Question, part: Part) -> Answer:
    """Run the model once and pull the target back to everything asked for."""
    found = captured(question, part)
    if found is not None:
        return found
    try:
        return _pulled(question, part)
    except (LayerNotFoundError, ModelError):
        absent = _absent(question, part)
        if not absent or len(absent) == len(question.wrt):
            raise
        present = tuple(name for name in question.wrt if name not in absent)
        found = _pulled(replace(question, wrt=present), part)
        found.gradients |= dict.fromkeys(absent)
        return found


def _pulled(question: Question, part: Part) -> Answer:
    inside = Inside.look(question.adapter, question.model, part.batch, layers_inside(question))
    way = plan(question, part, inside)
    of_all = bool(way.outputs) or question.named is None
    with question.adapter.pullback(question.model, part.batch, way.starts, way.ends) as pullback:
        count = pullback.outputs
        several = count > 1 and not question.known.outputs
        if several and not of_all:
            refuse_lone_output((*question.leaves, *question.wrt), count)
        if not (several and of_all):
            question.axes.learn(part.batch, way.free)
            return _Pull(question, part, way, inside, pullback).run()
    # The model, which does not say so beforehand, returned several tensors, and the question is about all of them.
    question.known.outputs = tuple(map(str, range(count)))
    return _pulled(question, part)


def _absent(question: Question, part: Part) -> list[TensorName]:
    """Tensors of layers that are not called in this forward pass."""
    layers = {str(name.layer).partition("#")[0] for name in question.wrt if name.layer is not None}
    missing = {layer for layer in layers if not runs(question.adapter, question.model, part.batch, layer)}
    return [name for name in question.wrt if str(name.layer).partition("#")[0] in missing]


class _Pull:
    """One forward pass and the few vector-Jacobian products that answer a question."""

    def __init__(self, question: Question, part: Part, way: Plan, inside: Inside, pullback: Pullback) -> None:
        self.question, self.target, self.plan = question, part.target, way
        self.inside, self.pullback = inside, pullback
        self.samples = question.axes.samples(part.batch)
        self.outside = Outside(question.axes, self.samples)
        self.weights = WeightGradients(question.known, way.weights, per_sample=self.target.per_sample)
        #: Cotangents by port; of states within recurrences, by layer and half; of states that the framework has.
        self.seeds: dict[Port, Array] = {}
        self.on_states: dict[str, list[dict[int, Array]]] = {}
        self.on_steps: dict[str, list[dict[int, Array]]] = {}
        self.swept: dict[str, list[tuple[Half, Adjoint]]] = {}

    def run(self) -> Answer:
        """From the target to every gradient."""
        question, value = self.question, self._start()
        self._leave_recurrences()
        arrived = self._pull({port: seed[None] for port, seed in self.seeds.items()})
        if self.target.per_sample and question.leaves[0].what != "loss":
            refuse_coupled(self.outside, self.seeds, self._pull)
        found = {place.name: self._activation(place, arrived) for place in self.plan.activations}
        if self.target.per_sample:
            found |= self._weights_by_sample(arrived)
        else:
            found |= {name: self.weights.of(name, arrived) for name in self.plan.weights}
        return self._answer(value, found)

    def _answer(self, value: Array, found: Mapping[TensorName, Array | None]) -> Answer:
        """The gradients in the order asked, without the loss scale, their axes by name."""
        answer = Answer(value, self.samples, {}, {}, self.swept)
        for place in self.plan.wrt:
            name, grad = place.name, found[place.name]
            answer.gradients[name], answer.dims[name] = None, ()
            if grad is not None:
                grad = grad / grad.dtype.type(self.question.scale)
                if place.free:
                    answer.gradients[name], answer.dims[name] = in_order(*self.outside.opened(name.port(), grad))
                else:
                    dims = self.question.known.dims(name, grad, per_sample=self.target.per_sample)
                    answer.gradients[name], answer.dims[name] = grad, dims
        return answer

    def _start(self) -> Array:
        """Value of the target; the cotangents it starts from go to ``seeds`` and, within recurrences, ``on_states``."""
        question, target = self.question, self.target
        if question.cotangents is not None:
            return self._start_from(question.cotangents)
        values = [self._value(place) for place in self.plan.leaves]
        value, cotangents = question.evaluate(target, self.outside, values)
        for place, cotangent in zip(self.plan.leaves, cotangents, strict=True):
            self._seed(place, np.asarray(cotangent))
        return value

    def _start_from(self, cotangents: Sequence[Array]) -> Array:
        """The known cotangents; the value is that of the loss among the leaves."""
        value = np.zeros(())
        for place, cotangent in zip(self.plan.leaves, cotangents, strict=True):
            self._seed(place, cotangent)
            if place.name.what == "loss":
                value = cotangent * to_host(self.pullback.values[place.name.port()])
        return value

    def _value(self, place: Place) -> xr.DataArray:
        """The value of a tensor that the target is made of, its axes by name."""
        if place.swept:
            value = self.inside.value(place.name)
        else:
            parts = [to_host(self.pullback.values[port]) for port in place.at]
            if place.free:
                opened, names = self.outside.opened(place.name.port(), parts[0])
                return xr.DataArray(opened, dims=names)
            value = parts[0] if len(parts) == 1 else np.stack(parts, axis=direction_axis(dims_of(parts[0].shape)))
        return xr.DataArray(value, dims=self.question.known.dims(place.name, value))

    def _seed(self, place: Place, cotangent: Array) -> None:
        """Put a cotangent where differentiation starts from it."""
        cotangent = cotangent * np.asarray(self.question.scale, dtype=cotangent.dtype)
        if place.swept:
            self._put(self.on_states, place.name, cotangent)
            return
        if place.stepwise:
            self._put(self.on_steps, place.name, cotangent)
        if place.free:
            cotangent = cotangent.reshape(tuple(self.pullback.values[place.at[0]].shape))
        parts: Sequence[Array] = [cotangent]
        if len(place.at) > 1:
            dims = self.question.known.dims(place.name, cotangent)
            parts = list(np.moveaxis(cotangent, dims.index(DIRECTION), 0))
        for port, part in zip(place.at, parts, strict=True):
            self.seeds[port] = self.seeds[port] + part if port in self.seeds else part

    def _put(self, on_states: dict[str, list[dict[int, Array]]], leaf: TensorName, cotangent: Array) -> None:
        """Note what a sweep through the layer of ``leaf`` starts from."""
        layer = on_states.setdefault(str(leaf.layer), [{} for _ in self.inside.layer(leaf.layer)])
        for states, new in zip(layer, self.inside.on_states(leaf, cotangent), strict=True):
            for index, array in new.items():
                states[index] = states[index] + array if index in states else array

    def _leave_recurrences(self) -> None:
        """Sweep from states to the lower boundary of their layer, and to the layer's own weights."""
        for layer, states in self.on_states.items():
            for half, on_states in zip(self.inside.layer(layer), states, strict=True):
                swept = half.sweep(on_states, {})
                below = [swept.input_grad, *swept.initial_state_grad]
                for port, grad in zip(half.below(), below, strict=True):
                    self.seeds[port] = self.seeds[port] + to_host(grad) if port in self.seeds else to_host(grad)
                self.weights.add_swept(layer, half, swept)

    def _activation(self, place: Place, arrived: Arrived) -> Array | None:
        """The gradient of anything but a weight."""
        if not place.swept:
            return side_by_side([arrived.get(port) for port in place.above])
        halves, layer = self.inside.layer(place.name.layer), str(place.name.layer)
        on_states = self.on_states.get(layer) or self.on_steps.get(layer) or [{} for _ in halves]
        flat = {port: None if a is None else a[0] for port, a in arrived.items()}
        if all(flat.get(port) is None for port in place.above) and not any(on_states):
            return None
        sweeps = [half.sweep(states, flat) for half, states in zip(halves, on_states, strict=True)]
        self.swept[layer] = list(zip(halves, sweeps, strict=True))
        return self.inside.gradient(place.name, sweeps)

    def _weights_by_sample(self, arrived: Arrived) -> dict[TensorName, Array | None]:
        """Gradients of weights for every sample: as many cotangents as samples, each zero but at its own sample."""
        names = list(self.plan.weights)
        if not names:
            return {}
        seeds = self.seeds
        if self.plan.outputs:
            seeds = {port: to_host(a)[0] for port in self.plan.outputs if (a := arrived.get(port)) is not None}
        pieces: dict[TensorName, list[Array | None]] = {name: [] for name in names}
        for rows in self._rows_at_a_time(seeds):
            got = self._pull({port: self._one_hot(port, seed, rows) for port, seed in seeds.items()})
            for name in names:
                pieces[name].append(self.weights.of(name, got, slice(rows.start, rows.stop)))
        return {
            name: None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
            for name, parts in pieces.items()
        }

    def _one_hot(self, port: Port, seed: Array, rows: range) -> Array:
        """Cotangents (K, ...): the k-th is the seed at sample ``rows[k]`` and zero elsewhere."""
        opened, names = self.outside.opened(port, seed) if self.outside.is_here(port) else (seed, (SAMPLE,))
        refuse_unknown("per_sample=True", text_of(port), names)
        at = names.index(SAMPLE)
        stacked = np.zeros((len(rows), *opened.shape), dtype=seed.dtype)
        for k, n in enumerate(rows):
            index = (slice(None),) * at + (n,)
            stacked[(k, *index)] = opened[index]
        return stacked.reshape(len(rows), *seed.shape)

    def _rows_at_a_time(self, seeds: Mapping[Port, Array]) -> Iterator[range]:
        """Samples whose gradients fit the memory granted at a time."""
        # A pull-back holds the cotangent of every activation on its way; those of the seeds stand for them, eightfold.
        per_sample = 8 * (2 * self.weights.size + 8 * sum(seed.size for seed in seeds.values()))
        size = int(min(self.samples, max(1, self.question.memory // max(per_sample, 1))))
        for start in range(0, self.samples, size):
            yield range(start, min(start + size, self.samples))

    def _pull(self, cotangents: Mapping[Port, Array]) -> Arrived:
        return self.pullback.vjp(cotangents) if cotangents else {}
