"""Answers a question on one batch.

The way of a gradient: from the target to the border of the layer it lies in (our sweep, if it lies inside a
recurrence), from there to the borders asked about (the framework's own differentiation), and into recurrent layers
again (our sweep).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from ...adapters.protocol import Batch, CaptureRequest, Port, Pullback
from ...errors import LayerNotFoundError, ModelError
from ...recurrence.adjoint import Adjoint
from ...results.schema import plain
from ...typing import Array
from ...vocabulary import SAMPLE
from ..axes import in_order, refuse_unknown, text_of
from ..coupling import refuse_coupled
from ..inside import Half, Inside, runs
from ..names import TensorName, refuse_lone_output, uncalled
from ..outside import Outside
from ..weight_keys import assemble, sources
from .question import (
    Answer,
    Borders,
    Question,
    SeveralOutputs,
    dims_for,
    is_inside,
    is_outside,
    learn_axes,
)

#: Border -> gradient that arrived there, with one leading axis K; None where no path leads there.
Arrived = Mapping[Port, Array | None]


def answer(question: Question, batch: Batch) -> Answer:
    """Run the model once and pull the target back to everything asked for."""
    captured = answer_from_capture(question, batch)
    if captured is not None:
        return captured
    try:
        return _answer(question, batch)
    except (LayerNotFoundError, ModelError):
        absent = _absent(question, batch)
        if not absent or len(absent) == len(question.wrt):
            raise
        found = _answer(replace(question, wrt=tuple(name for name in question.wrt if name not in absent)), batch)
        found.gradients |= dict.fromkeys(absent)
        return found


def _answer(question: Question, batch: Batch) -> Answer:
    inside = Inside.look(question.adapter, question.model, batch, _layers_inside(question))
    borders = Borders(question, inside)
    with question.adapter.pullback(question.model, batch, borders.of, borders.wrt) as pullback:
        if pullback.outputs > 1 and not question.known.outputs:
            if question.every_output or borders.through_outputs:
                raise SeveralOutputs(pullback.outputs)
            refuse_lone_output((*question.leaves, *question.wrt), pullback.outputs)
        learn_axes(question, batch)
        return _Answering(question, inside, borders, pullback, question.axes.samples(batch)).run()


def _absent(question: Question, batch: Batch) -> list[TensorName]:
    """Tensors of layers that are not called in this forward pass."""
    layers = {str(name.layer).partition("#")[0] for name in question.wrt if name.layer is not None}
    missing = {layer for layer in layers if not runs(question.adapter, question.model, batch, layer)}
    return [name for name in question.wrt if str(name.layer).partition("#")[0] in missing]


def answer_from_capture(question: Question, batch: Batch) -> Answer | None:
    """Gradients of the loss with respect to what recurrent layers carry and return: one captured pass has them all.

    None where the question is another one, or where a gradient is zero throughout: then a pull-back tells why.
    """
    known, names = question.known, question.wrt
    recurrent = all(uncalled(name.layer, known.recurrent) in known.recurrent for name in names)
    if question.target.text != "loss" or question.target.per_sample or question.scale != 1.0 or not recurrent:
        return None
    if any(name.what not in ("output",) and not is_inside(name, known) for name in names):
        return None
    layers = tuple(dict.fromkeys(str(name.layer) for name in names))
    capture = question.adapter.capture(question.model, batch, CaptureRequest(layers, weight_grads=False))
    inside = Inside.of(capture.calls)
    if any(name.what == "final_state" and inside.is_stepwise(name) for name in names):
        return None
    grads: dict[TensorName, Array | None] = {}
    swept: dict[str, list[tuple[Half, Adjoint]]] = {}
    for name in names:
        halves = inside.layer(name.layer)
        if name.what == "output":
            grads[name] = _stack_halves([plain(half.call.output_grad)[None] for half in halves])
        else:
            sweeps = [half.sweep(half.call.state_grad or {}, half.arrived()) for half in halves]
            swept[str(name.layer)] = list(zip(halves, sweeps, strict=True))
            grads[name] = inside.gradient(name, sweeps)
    if any(grad is None or not np.any(grad) for grad in grads.values()):
        return None
    dims = {name: dims_for(name, grad, known, False) for name, grad in grads.items() if grad is not None}
    return Answer(np.asarray(capture.loss), question.axes.samples(batch), grads, dims, inside.masks(), swept)


class _Answering:
    """One forward pass and the few vector-Jacobian products that answer a question."""

    def __init__(self, question: Question, inside: Inside, borders: Borders, pullback: Pullback, samples: int) -> None:
        self.question, self.inside, self.borders, self.pullback = question, inside, borders, pullback
        self.samples, self.outside = samples, Outside(question.axes, samples)
        self.on_states: dict[str, list[dict[int, Array]]] = {}
        self.on_steps: dict[str, list[dict[int, Array]]] = {}
        self.seeds: dict[Port, Array] = {}
        self.own_weights: dict[tuple[str, str], list[Array]] = {}
        self.swept: dict[str, list[tuple[Half, Adjoint]]] = {}

    def run(self) -> Answer:
        """From the target to every gradient."""
        value = self._start()
        self._leave_recurrences()
        arrived = self._pull({port: seed[None] for port, seed in self.seeds.items()})
        if self.question.target.per_sample and self.question.leaves[0].what != "loss":
            refuse_coupled(self.outside, self.seeds, self._pull)
        per_sample = self._weights_by_sample(arrived) if self.question.target.per_sample else None
        grads: dict[TensorName, Array | None] = {}
        dims: dict[TensorName, tuple[str, ...]] = {}
        for name in self.question.wrt:
            if name.what == "weight":
                grad = self._weight(name, arrived) if per_sample is None else per_sample[name]
            else:
                grad = self._activation(name, arrived)
            grads[name] = None if grad is None else grad / grad.dtype.type(self.question.scale)
            dims[name] = () if grad is None else self._dims(name, grad)
            if grad is not None and is_outside(name, self.question.known):
                grads[name], dims[name] = in_order(*self.outside.opened(name.port(), grads[name]))
        return Answer(value, self.samples, grads, dims, self.inside.masks(), self.swept)

    def _start(self) -> Array:
        """Value of the target; the cotangents it starts from go to ``seeds`` and, within recurrences, ``on_states``."""
        question = self.question
        if question.seeds is not None:
            return self._start_from(question.seeds)
        values = [self._leaf_value(leaf) for leaf in question.leaves]
        if question.function is None:
            self._check_samples(values[0])
            value, cotangent = question.target.evaluate(values[0], self._differentiate)
            cotangents: Sequence[Array] = [cotangent]
        else:
            ports = [leaf.port() if is_outside(leaf, question.known) else None for leaf in question.leaves]
            arrays = [v.values if p is None else self.outside.closed(p, v) for p, v in zip(ports, values, strict=True)]
            result, pull = self._differentiate(question.function, arrays)
            whole = self.outside.named_result(result, pull, ports, arrays)
            self._check_samples(whole)
            value, cotangent = question.target.evaluate(whole, self._differentiate)
            cotangents = pull(cotangent.astype(result.dtype))
        for leaf, part in zip(question.leaves, cotangents, strict=True):
            self._seed(leaf, np.asarray(part) * np.asarray(question.scale, dtype=part.dtype))
        return value

    def _start_from(self, seeds: Sequence[Array]) -> Array:
        """The known cotangents; the value is that of the loss among the leaves."""
        value = np.zeros(())
        for leaf, cotangent in zip(self.question.leaves, seeds, strict=True):
            self._seed(leaf, cotangent * np.asarray(self.question.scale, dtype=cotangent.dtype))
            if leaf.what == "loss":
                value = cotangent * plain(self.pullback.values[leaf.port()])
        return value

    def _leaf_value(self, leaf: TensorName) -> xr.DataArray:
        if self.borders.is_inside(leaf):
            value = self.inside.value(leaf)
        else:
            parts = [plain(self.pullback.values[port]) for port in self.borders.of_tensor(leaf)]
            if is_outside(leaf, self.question.known):
                opened, names = self.outside.opened(leaf.port(), parts[0])
                return xr.DataArray(opened, dims=names)
            value = parts[0] if len(parts) == 1 else np.stack(parts, axis=min(2, parts[0].ndim - 1))
        return xr.DataArray(value, dims=self._dims(leaf, value))

    def _seed(self, leaf: TensorName, cotangent: Array) -> None:
        if self.borders.is_inside(leaf):
            self._put(self.on_states, leaf, cotangent)
            return
        if self.inside.is_stepwise(leaf):
            self._put(self.on_steps, leaf, cotangent)
        ports = self.borders.of_tensor(leaf)
        if is_outside(leaf, self.question.known):
            cotangent = cotangent.reshape(tuple(self.pullback.values[ports[0]].shape))
        parts = [cotangent] if len(ports) == 1 else np.moveaxis(cotangent, min(2, cotangent.ndim - 2), 0)
        for port, part in zip(ports, parts, strict=True):
            self.seeds[port] = self.seeds[port] + part if port in self.seeds else part

    def _put(self, on_states: dict[str, list[dict[int, Array]]], leaf: TensorName, cotangent: Array) -> None:
        """Note what a sweep through the layer of ``leaf`` starts from."""
        layer = on_states.setdefault(str(leaf.layer), [{} for _ in self.inside.layer(leaf.layer)])
        for states, new in zip(layer, self.inside.on_states(leaf, cotangent), strict=True):
            for index, array in new.items():
                states[index] = states[index] + array if index in states else array

    def _leave_recurrences(self) -> None:
        """Sweep from states to the lower border of their layer, and to the layer's own weights."""
        per_sample = self.question.target.per_sample
        wanted = {name.layer for name in self.question.wrt if name.what == "weight"}
        for layer, states in self.on_states.items():
            for half, on_states in zip(self.inside.layer(layer), states, strict=True):
                swept = half.sweep(on_states, {})
                below = [swept.input_grad, *swept.initial_state_grad]
                for port, grad in zip(half.below(), below, strict=True):
                    self.seeds[port] = self.seeds[port] + plain(grad) if port in self.seeds else plain(grad)
                if uncalled(layer, self.question.known.weights) in wanted:
                    self._keep_own(layer, half, half.weight_gradients(swept, per_sample=per_sample))

    def _keep_own(self, layer: str, half: Half, grads: Mapping[str, Array]) -> None:
        for key, grad in grads.items():
            name = uncalled(layer, self.question.known.weights)
            direction = half.call.direction if half.call.bidirectional else ""
            self.own_weights.setdefault((name, f"{direction}/{key}".lstrip("/")), []).append(grad)

    def _activation(self, name: TensorName, arrived: Arrived) -> Array | None:
        if not self.borders.is_inside(name):
            return _stack_halves([arrived.get(port) for port in self.borders.above(name)])
        halves, layer = self.inside.layer(name.layer), str(name.layer)
        put = self.on_states.get(layer) or self.on_steps.get(layer) or [{} for _ in halves]
        flat = {port: None if a is None else a[0] for port, a in arrived.items()}
        if all(flat.get(port) is None for half in halves for port in half.readers()) and not any(put):
            return None
        sweeps = self._sweeps(halves, put, flat)
        self.swept[layer] = list(zip(halves, sweeps, strict=True))
        return self.inside.gradient(name, sweeps)

    def _sweeps(self, halves: list[Half], put: list[dict[int, Array]], arrived: Arrived) -> list[Adjoint]:
        return [half.sweep(states, arrived) for half, states in zip(halves, put, strict=True)]

    def _weight(self, name: TensorName, arrived: Arrived, *, lead: int = 1) -> Array | None:
        """Gradient of one weight: what arrived through the framework and what a sweep left on the layer's own cell."""
        weights = self.question.known.weights[str(name.layer)]
        found = sources(weights)[name.key]
        parts = [arrived.get(port) for port in self.borders.weight_ports(name)]
        own = self._own(name, found)
        total = None
        if any(part is not None for part in parts):
            count = next(part.shape[0] for part in parts if part is not None)
            shapes = [tuple(weights.values[source.key].shape) for source in found]
            filled = [np.zeros((count, *s)) if p is None else plain(p) for p, s in zip(parts, shapes, strict=True)]
            total = assemble(filled, found, name.key, weights, lead)
        if own is not None:
            total = own if total is None else total + own
        if total is None:
            return None
        return total if self.question.target.per_sample else total[0]

    def _own(self, name: TensorName, found: Sequence[Any]) -> Array | None:
        """What sweeps left on a layer's own weights, laid out as shown, with a leading axis."""
        weights = self.question.known.weights[str(name.layer)]
        by_direction = []
        for source in found:
            both = len(found) > 1 or "/" in source.key
            keys = [f"{source.direction}/{name.key}", name.key] if both else [name.key]
            kept = next(
                (self.own_weights[str(name.layer), k] for k in keys if (str(name.layer), k) in self.own_weights), None
            )
            by_direction.append(None if kept is None else np.sum(kept, axis=0))
        if all(part is None for part in by_direction):
            return None
        filled = [
            np.zeros_like(next(p for p in by_direction if p is not None)) if p is None else p for p in by_direction
        ]
        lead = 1 if self.question.target.per_sample else 0
        plain_sources = [type(source)(source.key, source.direction) for source in found]
        own = assemble(filled, plain_sources, name.key, weights, lead)
        return own if lead else own[None]

    def _weights_by_sample(self, arrived: Arrived) -> dict[TensorName, Array | None]:
        """Gradients of weights for every sample: as many cotangents as samples, each zero but at its own sample."""
        names = [name for name in self.question.wrt if name.what == "weight"]
        if not names:
            return {}
        seeds = self.seeds
        if self.borders.through_outputs:
            outputs = {
                port: arrived.get(port) for port in self.borders.of if port.kind == "output" and port.layer is None
            }
            seeds = {port: plain(a)[0] for port, a in outputs.items() if a is not None}
        pieces: dict[TensorName, list[Array | None]] = {name: [] for name in names}
        for rows in self._chunks(seeds):
            one_hot = {port: self._one_hot(port, seed, rows) for port, seed in seeds.items()}
            got = self._pull(one_hot)
            for name in names:
                pieces[name].append(self._weight_rows(name, got, rows))
        return {
            name: None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
            for name, parts in pieces.items()
        }

    def _weight_rows(self, name: TensorName, arrived: Arrived, rows: range) -> Array | None:
        kept = self.own_weights
        self.own_weights = {key: [a[rows.start : rows.stop] for a in arrays] for key, arrays in kept.items()}
        try:
            return self._weight(name, arrived)
        finally:
            self.own_weights = kept

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

    def _check_samples(self, whole: xr.DataArray) -> None:
        target = self.question.target
        if target.per_sample and target.text != "loss" and whole.ndim:
            refuse_unknown("per_sample=True", target.text, [str(dim) for dim in whole.dims])

    def _chunks(self, seeds: Mapping[Port, Array]) -> Iterator[range]:
        """Samples whose gradients fit the memory granted at a time."""
        count = self.samples
        values = self.question.known.weights
        weights = sum(
            int(np.prod(values[str(port.layer)].values[port.key].shape, dtype=int))
            for port in self.borders.wrt
            if port.kind == "weight"
        )
        # A pull-back holds the cotangent of every activation on its way; those of the seeds stand for them, eightfold.
        per_sample = 8 * (2 * weights + 8 * sum(seed.size for seed in seeds.values()))
        size = int(min(count, max(1, self.question.memory // max(per_sample, 1))))
        for start in range(0, count, size):
            yield range(start, min(start + size, count))

    def _pull(self, cotangents: Mapping[Port, Array]) -> Arrived:
        return self.pullback.vjp(cotangents) if cotangents else {}

    def _dims(self, name: TensorName, array: Array) -> tuple[str, ...]:
        return dims_for(name, array, self.question.known, self.question.target.per_sample)

    def _differentiate(self, function: Callable[..., Any], arrays: Sequence[Array]) -> Any:
        return self.question.adapter.differentiate(function, arrays, self.question.model)


def _layers_inside(question: Question) -> list[str]:
    names = [*question.leaves, *question.wrt]
    return [str(name.layer) for name in names if is_inside(name, question.known)]


def _stack_halves(parts: Sequence[Array | None]) -> Array | None:
    """Gradients at the ports of one tensor, K = 1 taken off, directions side by side."""
    arrays = [None if part is None else plain(part)[0] for part in parts]
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if len(parts) == 1:
        return present[0]
    filled = [np.zeros_like(present[0]) if array is None else array for array in arrays]
    return np.stack(filled, axis=min(2, filled[0].ndim - 1))
