"""One observed run of a model: captures with named axes, and the search of its weights and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import (
    Adapter,
    Batch,
    Capture,
    CaptureRequest,
    ModelFacts,
    NonRecurrentCall,
    Outputs,
    Port,
    RecurrentCall,
)
from ..autodiff import tensors
from ..errors import RnnlensError
from ..layout import dims_of
from ..recurrence.nonfinite import NonfiniteValue, any_broken, first, largest
from ..recurrence.replay import Replay
from ..results.nonfinite import Origin
from ..results.schema import to_host
from ..typing import Array, arrays_of
from ..vocabulary import DIRECTION, FEATURE, FORWARD, GATE, SAMPLE, TIME
from .axes import BatchAxes, ModelAxes
from .names import Catalogue
from .recurrent_layers import on_host
from .weight_layout import assemble, dims_of_weight, sources


@dataclass
class ObservedCall:
    """One direction of one call of a recurrent layer, and its replay; ``limit`` is its dtype's largest value."""

    call: RecurrentCall
    limit: float

    @cached_property
    def run(self) -> Replay:
        """Replay with pre-activations, gates and states of every step."""
        return Replay.as_computed(self.call)


@dataclass
class Node:
    """One call of one layer: replayed calls of a recurrent layer, or the outputs of any other."""

    name: str
    directions: list[ObservedCall] = field(default_factory=list)
    plain: list[NonRecurrentCall] = field(default_factory=list)


@dataclass
class ObservedRun:
    """A model, one batch and the results of its run: with the user's layouts, and a backward pass for a loss."""

    adapter: Adapter
    model: Any
    batch: Batch
    has_loss: bool = True
    stated: Mapping[str, Any] | None = None

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts about the model that need no run."""
        return self.adapter.facts(self.model)

    @cached_property
    def capture(self) -> Capture:
        """Capture of all layers in one forward pass and, with a loss, one backward pass."""
        loss = self.has_loss
        request = CaptureRequest(
            tuple(self.facts.submodules), gradients=loss, weight_grads=loss, boundaries=loss, all_must_run=False
        )
        return self.adapter.capture(self.model, self.batch, request)

    @cached_property
    def nodes(self) -> list[Node]:
        """Calls of layers in the order in which they finished."""
        found: dict[str, Node] = {name: Node(name) for name in self.capture.order or self.facts.submodules}
        for call in on_host(self.capture.calls):
            dtype = call.compute_dtype or call.output.dtype
            found.setdefault(call.layer, Node(call.layer)).directions.append(ObservedCall(call, largest(dtype)))
        for one in self.capture.plain:
            name = one.layer if one.layer in found else one.layer.rpartition("[")[0]
            found.setdefault(name, Node(one.layer)).plain.append(one)
        return [node for node in found.values() if node.directions or node.plain]

    @property
    def inputs(self) -> list[Array]:
        """Leaves of x as NumPy arrays."""
        return [_array(leaf) for leaf in data.leaves_of(self.batch.x)]

    @cached_property
    def outputs(self) -> Outputs:
        """Outputs in the framework's own structure, from one more forward pass."""
        return self.adapter.outputs_of(self.model, self.batch)

    @cached_property
    def returned(self) -> list[Array]:
        """Output leaves of the captured pass as NumPy arrays."""
        return [_array(leaf) for leaf in data.leaves_of(self.capture.outputs)]

    def first(self, port: Port, quantity: str, array: Array, limit: float = np.inf) -> NonfiniteValue | None:
        """Find the first non-finite value of a tensor, ordered by step, then sample; None if there is none."""
        array = np.asarray(array)
        if array.dtype.kind not in "fc" or not any_broken(array, limit):
            return None
        opened, names = self._opened(port, array)
        order = sorted(range(len(names)), key=lambda i: {TIME: 0, SAMPLE: 1}.get(names[i], 2))
        spot = first(quantity, np.transpose(opened, order), [names[i] for i in order], limit)
        assert spot is not None
        in_order = sorted(spot.index, key=lambda name: {SAMPLE: 0, TIME: 1}.get(name, 2))
        return replace(spot, index={name: spot.index[name] for name in in_order})

    def names(self, port: Port, array: Array) -> tuple[str, ...]:
        """Return the axis names of a tensor; by position if axes are folded."""
        opened, names = self._opened(port, array)
        return names if opened.shape == array.shape else dims_of(array.shape)

    def element(self, port: Port, array: Array, index: tuple[int, ...]) -> Mapping[str, int]:
        """Return the index of one tensor element by axis name."""
        where = np.zeros(np.shape(array), dtype=np.float64)
        where[index] = np.nan
        spot = self.first(port, "", where)
        assert spot is not None
        return spot.index

    def _opened(self, port: Port, array: Array) -> tuple[Array, tuple[str, ...]]:
        is_input = port.kind == "input" and port.layer is None
        if is_input and data.is_packed(data.leaves_of(self.batch.x)[port.index]):
            return array, dims_of(array.shape, last=FEATURE)
        may_be_mask = is_input and port not in self._axes.stated and array.ndim == 2
        if may_be_mask and any(other.ndim > 2 and other.shape[:2] == array.shape for other in self.inputs):
            return array, (SAMPLE, TIME)
        try:
            self._axes.learn(self._quiet, [port])
            opened, names = BatchAxes(self._axes, self._axes.samples(self._quiet)).opened(port, array)
        except RnnlensError:
            opened, names = array, ()
        if SAMPLE in names or self.adapter.samples_first:
            return opened, names
        # No experiment determined the axes: guess by the sizes of the recurrent layers.
        guess = list(dims_of(array.shape))
        if self.capture.calls:
            sample, time = (int(n) for n in self.capture.calls[0].input.shape[:2])
            if array.shape[:2] == (time, sample) and time != sample and len(guess) > 2:
                guess[:2] = [TIME, SAMPLE]
        return array, tuple(guess)

    @cached_property
    def _axes(self) -> ModelAxes:
        return ModelAxes(self.adapter, self.model, self.stated, Catalogue(self.adapter, self.model, self.batch.x))

    @cached_property
    def _quiet(self) -> Batch:
        """The batch with finite values in place of non-finite ones, for experiments that find axes."""
        return replace(self.batch, x=data.map_leaves(_finite, self.batch.x), y=None, loss=None)

    def below(self, node: Node) -> Iterator[tuple[str, Port, Array]]:
        """Yield tensors computed before a layer ran, the nearest first: (name, port, values)."""
        for other in reversed(self.nodes[: self.nodes.index(node)]):
            for one in other.plain:
                yield one.layer, Port("output", one.layer), to_host(one.output)
            for replayed in other.directions:
                yield other.name, Port("output", other.name), to_host(replayed.call.output)
        for i, leaf in enumerate(self.inputs):
            yield "input", Port("input", index=i), leaf

    def value_at(self, port: Port) -> Array | None:
        """Return the value at a port from one more run; None if the adapter refuses."""

        def ask() -> Array:
            with self.adapter.pullback(self.model, replace(self.batch, y=None, loss=None), [], [port]) as back:
                return to_host(back.values[port])

        found: Array | None = self.attempt(ask)
        return found

    def attempt(self, ask: Callable[[], Any]) -> Any:
        """Call ``ask``; return its result, or None if it raises an error of rnnlens."""
        try:
            return ask()
        except RnnlensError:
            return None


def _array(leaf: Any) -> Array:
    """Convert an array of the data to NumPy; a packed sequence is padded, samples first in the user's order."""
    if data.is_packed(leaf):
        return to_host(data.padded(leaf))
    return to_host(leaf)


def _finite(leaf: Any) -> Any:
    """Replace non-finite values and clip large ones; integers and packed sequences stay unchanged."""
    if data.is_packed(leaf) or np.dtype(getattr(to_host(leaf), "dtype", float)).kind != "f":
        return leaf
    values = np.clip(np.nan_to_num(to_host(leaf), nan=0.0, posinf=1.0, neginf=-1.0), -1e3, 1e3)
    return tensors.like(values, leaf)


def in_the_weights(observed: ObservedRun) -> Iterator[Origin]:
    """Yield the origins of non-finite values in weights by layer, including values too large for the layer's dtype."""
    for layer, own in observed.adapter.weights(observed.model).items():
        dtype = getattr(observed.facts.submodules.get(layer), "dtype", "")
        limit = largest(dtype) if dtype in ("float16", "bfloat16") else np.inf
        for key, parts in sources(own).items():
            held = [to_host(own.values[part.key]) for part in parts]
            if any(array.dtype.kind != "f" for array in held):
                continue
            array = assemble(held, parts, key, own, 0)
            dims = [dim.rpartition(".")[2] for dim in dims_of_weight(key, own, array.ndim)]
            spot = first(key, array, dims, limit)
            if spot is not None:
                index = dict(spot.index)
                gate, direction = index.pop(GATE, None), index.pop(DIRECTION, None)
                cell = own.cells.get(FORWARD) or next(iter(own.cells.values()), None)
                yield Origin(
                    "weights",
                    layer,
                    spot.quantity,
                    spot.value,
                    index,
                    gate="" if gate is None or cell is None else cell.gates[gate],
                    direction="" if direction is None else ("forward", "backward")[direction],
                    precision=dtype if np.isfinite(spot.value) else "",
                )


def in_the_data(observed: ObservedRun) -> Iterator[Origin]:
    """Yield the origins of non-finite values in inputs, then targets, then sample weights."""
    for i, array in enumerate(observed.inputs):
        spot = observed.first(Port("input", index=i), "value", array)
        if spot is not None:
            yield Origin("data", name_of_input(observed, i), "value", spot.value, spot.index)
    for name in ("y", "sample_weight"):
        for array in map(to_host, arrays_of(getattr(observed.batch, name))):
            spot = observed.first(Port("output"), "value", array) if array.ndim else None
            if spot is not None:
                yield Origin("data", name, "value", spot.value, spot.index)


def name_of_input(observed: ObservedRun, index: int) -> str:
    """Return the name of an input: ``"input"``, or with its key or index if there are several."""
    if len(observed.inputs) == 1:
        return "input"
    names = list(observed.batch.x) if isinstance(observed.batch.x, dict) else observed.facts.inputs
    return f"input[{names[index] if index < len(names) else index}]"
