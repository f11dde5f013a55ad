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
    ModelFacts,
    NonRecurrentCall,
    Outputs,
    Port,
    RecurrentCall,
    Taps,
)
from ..autodiff import tensors
from ..errors import RnnlensError
from ..layout import dims_of
from ..recurrence.nonfinite import NonfiniteValue, any_nonfinite, find_nonfinite_value, largest_finite
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
    plain_calls: list[NonRecurrentCall] = field(default_factory=list)


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
        taps = (Taps.everything if loss else Taps.states)(tuple(self.facts.submodules), all_must_run=False)
        return self.adapter.run(self.model, self.batch, taps).capture

    @cached_property
    def nodes(self) -> list[Node]:
        """Calls of layers in the order in which they finished."""
        nodes_by_name: dict[str, Node] = {name: Node(name) for name in self.capture.order or self.facts.submodules}
        for call in on_host(self.capture.calls):
            dtype = call.compute_dtype or call.output.dtype
            nodes_by_name.setdefault(call.layer, Node(call.layer)).directions.append(
                ObservedCall(call, largest_finite(dtype))
            )
        for plain_call in self.capture.other_calls:
            name = plain_call.layer if plain_call.layer in nodes_by_name else plain_call.layer.rpartition("[")[0]
            nodes_by_name.setdefault(name, Node(plain_call.layer)).plain_calls.append(plain_call)
        return [node for node in nodes_by_name.values() if node.directions or node.plain_calls]

    @property
    def inputs(self) -> list[Array]:
        """Leaves of x as NumPy arrays."""
        return [_as_numpy(leaf) for leaf in data.leaves_of(self.batch.x)]

    @cached_property
    def outputs(self) -> Outputs:
        """Outputs in the framework's own structure, from one more forward pass."""
        return self.adapter.run(self.model, self.batch, Taps()).outputs

    @cached_property
    def returned_outputs(self) -> list[Array]:
        """Output leaves of the captured pass as NumPy arrays."""
        return [_as_numpy(leaf) for leaf in data.leaves_of(self.capture.outputs)]

    def first_nonfinite(self, port: Port, quantity: str, array: Array, limit: float = np.inf) -> NonfiniteValue | None:
        """Find the first non-finite value of a tensor, ordered by step, then sample; None if there is none."""
        array = np.asarray(array)
        if array.dtype.kind not in "fc" or not any_nonfinite(array, limit):
            return None
        split_array, names = self._split_axes(port, array)
        order = sorted(range(len(names)), key=lambda i: {TIME: 0, SAMPLE: 1}.get(names[i], 2))
        nonfinite = find_nonfinite_value(quantity, np.transpose(split_array, order), [names[i] for i in order], limit)
        assert nonfinite is not None
        in_order = sorted(nonfinite.index, key=lambda name: {SAMPLE: 0, TIME: 1}.get(name, 2))
        return replace(nonfinite, index={name: nonfinite.index[name] for name in in_order})

    def names(self, port: Port, array: Array) -> tuple[str, ...]:
        """Return the axis names of a tensor; by position if axes are folded."""
        split_array, names = self._split_axes(port, array)
        return names if split_array.shape == array.shape else dims_of(array.shape)

    def element(self, port: Port, array: Array, index: tuple[int, ...]) -> Mapping[str, int]:
        """Return the index of one tensor element by axis name."""
        marker = np.zeros(np.shape(array), dtype=np.float64)
        marker[index] = np.nan
        nonfinite = self.first_nonfinite(port, "", marker)
        assert nonfinite is not None
        return nonfinite.index

    def steps_to_type(self, index: int) -> str:
        """Return the ``axes=`` to type where an input's steps were not told from its other axes; empty elsewhere."""
        return self._axes.steps_to_type(Port("input", index=index))

    def _split_axes(self, port: Port, array: Array) -> tuple[Array, tuple[str, ...]]:
        is_input = port.kind == "input" and port.layer is None
        if is_input and data.is_packed(data.leaves_of(self.batch.x)[port.index]):
            return array, dims_of(array.shape, last=FEATURE)
        may_be_mask = is_input and port not in self._axes.stated and array.ndim == 2
        if may_be_mask and any(
            other_input.ndim > 2 and other_input.shape[:2] == array.shape for other_input in self.inputs
        ):
            return array, (SAMPLE, TIME)
        try:
            self._axes.learn(self._finite_batch, [port])
            split_array, names = BatchAxes(self._axes, self._axes.samples(self._finite_batch)).split_folded(port, array)
        except RnnlensError:
            split_array, names = array, ()
        if SAMPLE in names or self.adapter.samples_first:
            return split_array, names
        # No experiment determined the axes: guess by the sizes of the recurrent layers.
        guessed_names = list(dims_of(array.shape))
        if self.capture.calls:
            sample, time = (int(n) for n in self.capture.calls[0].input.shape[:2])
            if array.shape[:2] == (time, sample) and time != sample and len(guessed_names) > 2:
                guessed_names[:2] = [TIME, SAMPLE]
        return array, tuple(guessed_names)

    @cached_property
    def _axes(self) -> ModelAxes:
        return ModelAxes(self.adapter, self.model, self.stated, Catalogue(self.adapter, self.model, self.batch.x))

    @cached_property
    def _finite_batch(self) -> Batch:
        """The batch with finite values in place of non-finite ones, for experiments that find axes."""
        return replace(self.batch, x=data.map_leaves(_replace_nonfinite, self.batch.x), y=None, loss=None)

    def runs_on_finite_data(self) -> bool:
        """Return whether model and loss run with finite values in place of non-finite inputs and targets."""
        targets = None if self.batch.y is None else data.map_leaves(_replace_nonfinite, self.batch.y)
        finite = replace(self.batch, x=self._finite_batch.x, y=targets)
        return self.attempt(lambda: replace(self, batch=finite).capture) is not None

    def tensors_below(self, node: Node) -> Iterator[tuple[str, Port, Array]]:
        """Yield tensors computed before a layer ran, the nearest first: (name, port, values)."""
        for earlier_node in reversed(self.nodes[: self.nodes.index(node)]):
            for plain_call in earlier_node.plain_calls:
                yield plain_call.layer, Port("output", plain_call.layer), to_host(plain_call.output)
            for replayed in earlier_node.directions:
                yield earlier_node.name, Port("output", earlier_node.name), to_host(replayed.call.output)
        for i, leaf in enumerate(self.inputs):
            yield "input", Port("input", index=i), leaf

    def value_at(self, port: Port) -> Array | None:
        """Return the value at a port from one more run; None if the adapter refuses."""

        def run_model() -> Array:
            with self.adapter.run(self.model, replace(self.batch, y=None, loss=None), Taps.ports([], [port])) as run:
                return to_host(run.values[port])

        value: Array | None = self.attempt(run_model)
        return value

    def attempt(self, function: Callable[[], Any]) -> Any:
        """Call ``function``; return its result, or None if it raises an error of rnnlens."""
        try:
            return function()
        except RnnlensError:
            return None


def _as_numpy(leaf: Any) -> Array:
    """Convert an array of the data to NumPy; a packed sequence is padded, samples first in the user's order."""
    if data.is_packed(leaf):
        return to_host(data.pad_packed(leaf))
    return to_host(leaf)


def _replace_nonfinite(leaf: Any) -> Any:
    """Replace non-finite values and clip large ones; integers and packed sequences stay unchanged."""
    if data.is_packed(leaf) or np.dtype(getattr(to_host(leaf), "dtype", float)).kind != "f":
        return leaf
    values = np.clip(np.nan_to_num(to_host(leaf), nan=0.0, posinf=1.0, neginf=-1.0), -1e3, 1e3)
    return tensors.converted_like(values, leaf)


def find_weight_origins(observed: ObservedRun) -> Iterator[Origin]:
    """Yield the origins of non-finite values in weights by layer, including values too large for the layer's dtype."""
    for layer, layer_weights in observed.adapter.weights(observed.model).items():
        dtype = getattr(observed.facts.submodules.get(layer), "dtype", "")
        limit = largest_finite(dtype) if dtype in ("float16", "bfloat16") else np.inf
        for key, parts in sources(layer_weights).items():
            arrays = [to_host(layer_weights.values[part.key]) for part in parts]
            if any(array.dtype.kind != "f" for array in arrays):
                continue
            array = assemble(arrays, parts, key, layer_weights, 0)
            dims = [dim.rpartition(".")[2] for dim in dims_of_weight(key, layer_weights, array.ndim)]
            nonfinite = find_nonfinite_value(key, array, dims, limit)
            if nonfinite is not None:
                index = dict(nonfinite.index)
                gate, direction = index.pop(GATE, None), index.pop(DIRECTION, None)
                cell = layer_weights.cells.get(FORWARD) or next(iter(layer_weights.cells.values()), None)
                yield Origin(
                    "weights",
                    layer,
                    nonfinite.quantity,
                    nonfinite.value,
                    index,
                    gate="" if gate is None or cell is None else cell.gates[gate],
                    direction="" if direction is None else ("forward", "backward")[direction],
                    precision=dtype if np.isfinite(nonfinite.value) else "",
                )


def find_data_origins(observed: ObservedRun) -> Iterator[Origin]:
    """Yield the origins of non-finite values in inputs, then targets, then sample weights."""
    for i, array in enumerate(observed.inputs):
        nonfinite = observed.first_nonfinite(Port("input", index=i), "value", array)
        if nonfinite is not None:
            yield Origin("data", name_of_input(observed, i), "value", nonfinite.value, nonfinite.index)
    for name in ("y", "sample_weight"):
        for array in map(to_host, arrays_of(getattr(observed.batch, name))):
            nonfinite = observed.first_nonfinite(Port("output"), "value", array) if array.ndim else None
            if nonfinite is not None:
                yield Origin("data", name, "value", nonfinite.value, nonfinite.index)


def name_of_input(observed: ObservedRun, index: int) -> str:
    """Return the name of an input: ``"input"``, or with its key or index if there are several."""
    if len(observed.inputs) == 1:
        return "input"
    names = Catalogue(observed.adapter, observed.model, observed.batch.x).inputs
    return f"input[{names[index] if index < len(names) else index}]"
