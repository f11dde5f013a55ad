"""The network between two ends: linearised recurrences and the segments around them, built from a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...adapters.protocol import CaptureRequest, Port, Pullback
from ...data import leaves_of
from ...errors import DisconnectedError, InputError, ModelError, UnsupportedError
from ...recurrence.arrays import on_cpu
from ...results.schema import to_host
from ...settings import must_fit
from ...typing import Array
from ...vocabulary import TIME
from ..axes import ModelAxes, coupled_samples_error, refuse_steps_first, refuse_unclear_steps, refuse_unknown
from ..names import TensorName, refuse_lone_output, text_of
from ..recurrent_layers import ReplayedCall, ReplayedLayers
from .request import JacobianEnd, JacobianRequest
from .segments import OuterTensor, SegmentGraph, known_chain


@dataclass(frozen=True)
class NetworkPath:
    """Tensors and recurrences on the paths from the upper end to the lower end."""

    #: Tensors outside of recurrences from which a path leads to the lower end.
    tops: frozenset[Port]
    #: Indices of the recurrences from which a path leads to the lower end.
    recurrences: frozenset[int]
    #: Indices of all recurrences below the upper end, each after all recurrences that read it.
    order: tuple[int, ...]
    #: Whether a recurrence reads itself through another one, so that no such order exists.
    is_cyclic: bool


@dataclass
class JacobianNetwork:
    """All recurrences and segments between the two ends of a time Jacobian."""

    #: All recurrent calls in the order in which they ran.
    recurrences: tuple[ReplayedCall, ...]
    of: JacobianEnd
    wrt: JacobianEnd
    #: Layouts of the tensors at the two ends.
    layouts: ModelAxes
    #: The segments between tensors outside of recurrences.
    around: SegmentGraph = field(default_factory=SegmentGraph)
    #: Whether differentiation by the framework stops at the recurrences, which are then swept. If not, the framework
    #: differentiates through them as well.
    is_cut: bool = True
    #: Replays of all recurrent calls.
    inside: ReplayedLayers = field(default_factory=lambda: ReplayedLayers({}))

    @property
    def samples(self) -> int:
        """Number of samples of the Jacobian."""
        return self.recurrences[0].system.batch if self.recurrences else self.inside.samples

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the result: that of the replayed recurrences, else of the upper end."""
        if self.recurrences:
            first = self.recurrences[0]
            found: np.dtype[Any] = on_cpu(first.run.input[:0]).dtype
            return found
        assert self.of.port is not None
        return to_host(self.around.values[self.of.port]).dtype  # type: ignore[no-any-return]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Index of each sample of the result among the recurrences' samples; empty if the order is the same."""
        outside = [self.around.tensors[end.port] for end in (self.of, self.wrt) if end.port is not None]
        orders = {tensor.layout.order for tensor in outside if tensor.layout is not None}
        if len(orders) > 1:
            raise UnsupportedError(
                f"The model returns its samples in another order than it takes them: {self.of.name.text!r} and "
                f"{self.wrt.name.text!r} have no common sample axis.",
                expected="outputs in the order of the inputs",
                hint="undo the sorting before the model returns, or sort the samples before they are handed on",
            )
        return orders.pop() if orders else ()

    @cached_property
    def returned_by(self) -> dict[Port, int]:
        """Index of the recurrence that returns a tensor, by port."""
        return {port: i for i, one in enumerate(self.recurrences) for port in one.above()}

    @cached_property
    def path(self) -> NetworkPath:
        """All tensors and recurrences between the two ends, found by a depth-first search from the upper end."""
        leads: dict[Port, bool] = {}
        gone: dict[int, bool] = {}
        entered: set[int] = set()
        cyclic = False

        def from_tensor(port: Port) -> bool:
            if port not in leads:
                below = self.around.below(port)
                inner = [from_recurrence(self.returned_by[p]) for p in below if p in self.returned_by]
                leads[port] = self.wrt.port in below or any(inner)
            return leads[port]

        def from_recurrence(number: int) -> bool:
            nonlocal cyclic
            if number in entered and number not in gone:
                cyclic = True
                return False
            if number not in gone:
                entered.add(number)
                one = self.recurrences[number]
                led = [True] if one in self.wrt.within else [from_tensor(port) for port in one.below()]
                gone[number] = any(led)
            return gone[number]

        if self.of.port is not None:
            from_tensor(self.of.port)
        for number, one in enumerate(self.recurrences):
            if one in self.of.within:
                from_recurrence(number)
        return NetworkPath(
            frozenset(port for port, found in leads.items() if found),
            frozenset(number for number, found in gone.items() if found),
            tuple(reversed(gone)),
            cyclic,
        )


@contextmanager
def open_network(
    request: JacobianRequest, inside: ReplayedLayers | None = None, *, perturbed: bool = False
) -> Iterator[JacobianNetwork]:
    """Run the model and keep, while the context is open, what differentiation between the two ends needs.

    ``inside``: replays of an earlier run, which are used again. ``perturbed``: values inside recurrent layers are
    perturbed by one rounding. Where recurrences read each other in a cycle, there are no cuts.
    """
    inside = _look_inside(request) if inside is None else inside
    inside = inside.map(ReplayedCall.perturbed) if perturbed else inside
    of, wrt = _inner(request.of, inside, "of"), _inner(request.wrt, inside, "wrt")
    alone = of is not None and not (inside.entangled and any(one.call.between for one in of.within))
    if of and wrt and alone and set(of.within) == set(wrt.within):
        yield JacobianNetwork(tuple(of.within), of, wrt, request.axes, inside=inside)  # of that layer's own samples
        return
    outer = [None if end is not None else _port(name) for end, name in ((of, request.of), (wrt, request.wrt))]
    chain = None if inside.entangled or request.axes.stated else known_chain(request, inside, outer[0], outer[1])
    if chain is not None:
        yield _network(request, inside, (of, wrt), chain, request.axes.with_samples_first())
        return
    with _pullback(request, inside, outer, wrt) as pullback:
        tensors = _tensors(request, inside, pullback.values, outer)
        around = SegmentGraph(dict(pullback.values), pullback, tensors)
        network = _network(request, inside, (of, wrt), around, request.axes)
        if inside.entangled or not network.path.is_cyclic:
            yield network
            return
    with open_network(request, ReplayedLayers(inside.by_layer, entangled=True)) as network:
        yield network


def _look_inside(request: JacobianRequest) -> ReplayedLayers:
    """Capture and replay all recurrent calls."""
    quiet = CaptureRequest(gradients=False, weight_grads=False, chain=True, scans=False)
    try:
        capture = request.adapter.capture(request.model, request.batch, quiet)
    except ModelError as error:
        if request.known.recurrent:
            raise
        raise _nothing_recurrent(request) from error
    if not capture.calls and not capture.scanned:
        raise _nothing_recurrent(request)
    refuse_steps_first(request.axes, request.batch, (call.input.shape[:2] for call in capture.calls))
    outputs = leaves_of(capture.outputs)
    if len(outputs) > 1 and not request.known.outputs:
        refuse_lone_output((request.of, request.wrt), len(outputs))
    first = outputs[0] if outputs else None
    inside = ReplayedLayers.of(capture.calls, capture.entangled or not capture.calls, capture.chain, first)
    if any(one.call.cell.space for one in inside.calls):
        inside = inside.map(lambda one: _flattened(one, request.options.memory))
    inside.samples = next(iter(capture.scanned.values()), 0)
    return inside


def _flattened(one: ReplayedCall, memory: int) -> ReplayedCall:
    """Return a call with flattened axes of space; raise if its step matrix between two images exceeds the memory."""
    flat = one.flat()
    if flat is not one:
        rows, columns = flat.system.rows, flat.system.rows + flat.system.features
        places = "x".join(str(n) for n in one.run.states[0].shape[2:])
        what = f"One step of {one.call.layer!r} is linearised as a matrix that exceeds the memory limit."
        hint = f'smaller images, or rl.gradients(..., wrt="{one.call.layer}.hidden"), the total gradient at every step'
        size = 2 * rows * columns * flat.system.work.itemsize
        must_fit(what, size, f"{hint} and place", got=f"states of {places} numbers: {{}}", limit=memory)
    return flat


def _inner(name: TensorName, inside: ReplayedLayers, role: str) -> JacobianEnd | None:
    """Return an end that is a state inside a recurrence, where the framework has no tensor; None for other ends."""
    if inside.entangled:
        calls = inside.by_layer.get(str(name.layer), []) if name.kind == "output" else []
        if inside.is_stepwise(name) or (calls and all(replayed.call.stepwise for replayed in calls)):
            return None  # the framework has it, of a cell called step by step
    if name.kind in ("state", "final_state", "initial_state"):
        within = inside.layer(name.layer)
        times, states = int(within[0].run.input.shape[1]), within[0].run.states
        if name.index >= len(states):
            got = f"{name.text}, state number {name.index} of {len(states)}"
            raise InputError(f"There is no {name.text}.", got=got)
        size, count = int(states[name.index].shape[-1]), times if name.kind == "state" else None
        return JacobianEnd(name, tuple(within), None, name.kind, name.index, size, count)
    if role == "wrt" or name.kind != "output" or name.layer is None:
        return None
    if not any(node == name.layer or node.rpartition("#")[0] == name.layer for node in inside.by_layer):
        return None
    within = inside.layer(name.layer)
    if len(within) > 1:
        return None
    one, call = within[0], within[0].call
    count = int(call.input.shape[1]) if call.returns_sequences else None
    # A state of the layer, or a custom cell's own output.
    return JacobianEnd(name, (one,), None, "output", one.run.output_state, int(call.output.shape[-1]), count)


def _port(name: TensorName) -> Port:
    return Port(name.kind, name.layer, name.index)  # type: ignore[arg-type]


def _pullback(
    request: JacobianRequest, inside: ReplayedLayers, ports: Sequence[Port | None], wrt: JacobianEnd | None
) -> Pullback:
    """Run the model once more; return its pull-back, cut at every recurrence, or uncut if these are entangled."""
    of_port, wrt_port = ports
    starts = [*filter(None, (of_port,)), *(port for one in inside.calls for port in one.below())]
    if inside.entangled:
        cut: list[Port] = []
        arrivals = [port for one in (() if wrt is None else wrt.within) for port in one.readers()]
    else:
        cut = arrivals = [port for one in inside.calls for port in one.above()]
    stops = dict.fromkeys([*arrivals, *filter(None, (wrt_port,))])
    return request.adapter.pullback(request.model, request.batch, list(dict.fromkeys(starts)), list(stops), cut)


def _tensors(
    request: JacobianRequest,
    inside: ReplayedLayers,
    values: Mapping[Port, Array],
    ports: Sequence[Port | None],
) -> dict[Port, OuterTensor]:
    """Return all framework tensors by port; ends outside of recurrences get their layouts."""
    samples = _samples_of(inside)
    ends = list(dict.fromkeys(port for port in ports if port is not None and port.layer not in inside.by_layer))
    request.axes.learn(request.batch, ends)
    # With a single step, experiments cannot determine the time axis.
    single = bool(inside.calls) and all(int(one.run.input.shape[1]) == 1 for one in inside.calls)
    tensors = {port: OuterTensor(port, tuple(int(n) for n in array.shape)) for port, array in values.items()}
    for port in () if request.axes.samples_first else ends:
        layout = request.axes.layout(port, tensors[port].shape)
        if layout.coupled:
            raise coupled_samples_error("The time Jacobian", port)
        if samples > 1:
            refuse_unknown("The time Jacobian", text_of(port), layout.names)
        refuse_unclear_steps("The time Jacobian", text_of(port), layout)
        if single and len(layout.names) == 3 and any(name.startswith("axis_") for name in layout.names):
            refuse_unknown("The time Jacobian", text_of(port), layout.names, TIME)
        tensors[port] = OuterTensor(port, tensors[port].shape, layout, samples)
    return tensors


def _samples_of(inside: ReplayedLayers) -> int:
    """Return the number of samples of all recurrent calls; raise if they differ."""
    counts = {name: int(directions[0].run.input.shape[0]) for name, directions in inside.by_layer.items()}
    if len(set(counts.values())) > 1:
        listing = ", ".join(f"{layer}: {count}" for layer, count in counts.items())
        raise UnsupportedError(
            "Recurrent layers run on different numbers of samples: some merge the sample axis with another axis.",
            got=listing,
            expected="one number of samples, for a time Jacobian of (sample, out_time, in_time)",
            hint="a Jacobian of the inner layer alone: of= and wrt= in a model of that part",
        )
    return next(iter(counts.values()), inside.samples)


def _network(
    request: JacobianRequest,
    inside: ReplayedLayers,
    inner: tuple[JacobianEnd | None, JacobianEnd | None],
    around: SegmentGraph,
    layouts: ModelAxes,
) -> JacobianNetwork:
    """Return the network, with outer ends as framework tensors; raise if no path connects the ends."""
    ends = list(inner)
    for i, name in enumerate((request.of, request.wrt)):
        if ends[i] is None:
            tensor = around.tensors[_port(name)]
            ends[i] = JacobianEnd(name, (), tensor.port, name.kind, 0, tensor.features, tensor.times)
    of, wrt = ends
    assert of is not None
    assert wrt is not None
    network = JacobianNetwork(inside.calls, of, wrt, layouts, around, not inside.entangled, inside)
    path = network.path
    if network.is_cut and not path.is_cyclic and not path.recurrences and of.port not in path.tops:
        raise disconnected(of, wrt)
    return network


def disconnected(of: JacobianEnd, wrt: JacobianEnd) -> DisconnectedError:
    """Create the error for a Jacobian between two tensors that no differentiable path connects."""
    if of.name == wrt.name:
        what = f"{of.name.text} is the output of the layer: no step of it is computed from another."
        hint = f'of="{of.name.layer}.hidden", wrt="{of.name.layer}.hidden": from state to state'
        return DisconnectedError(what, got=f"of={of.name.text!r} and wrt={wrt.name.text!r}", hint=hint)
    return DisconnectedError(
        f"{of.name.text} does not depend on {wrt.name.text}.",
        got="a gradient that is zero for every sample, step and unit",
        expected="wrt= below of=",
        hint="rl.gradients(...) says why; rl.layers(model) lists the recurrent layers in the order of their calls",
    )


def _nothing_recurrent(request: JacobianRequest) -> ModelError:
    return ModelError(
        "A time Jacobian goes through recurrent layers, and none ran in this forward pass.",
        got=type(request.model).__name__,
        expected="a model with at least one recurrent layer, as rl.layers(model) lists them",
        hint='for one output unit, rl.gradients(model, x, of="output", at={"unit": 0}, reduce="sum", wrt="input")',
    )
