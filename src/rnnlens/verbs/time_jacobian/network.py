"""The network between two ends: linearised recurrences and the segments around them, built from a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...adapters.protocol import Port, Run, Taps
from ...data import leaves_of
from ...errors import DisconnectedError, InputError, ModelError, UnsupportedError
from ...layout import Layout, dims_of
from ...recurrence.arrays import on_cpu
from ...recurrence.replay import Replay
from ...results.schema import to_host
from ...settings import must_fit
from ...typing import Array
from ...vocabulary import CHANNEL, FEATURE, SAMPLE, SPACE, TIME, UNIT
from ..axes import (
    ModelAxes,
    axes_to_write,
    refusal_of_coupling,
    refuse_steps_first,
    refuse_unclear_steps,
    refuse_unknown,
)
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
    segment_graph: SegmentGraph = field(default_factory=SegmentGraph)
    #: Whether differentiation by the framework stops at the recurrences, which are then swept. If not, the framework
    #: differentiates through them as well.
    is_cut: bool = True
    #: Replays of all recurrent calls.
    replayed_layers: ReplayedLayers = field(default_factory=lambda: ReplayedLayers({}))

    @property
    def samples(self) -> int:
        """Number of samples of the Jacobian."""
        return self.recurrences[0].system.batch if self.recurrences else self.replayed_layers.samples

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the result: that of the replayed recurrences, else of the upper end."""
        if self.recurrences:
            first_call = self.recurrences[0]
            dtype: np.dtype[Any] = on_cpu(first_call.run.input[:0]).dtype
            return dtype
        assert self.of.port is not None
        return to_host(self.segment_graph.values[self.of.port]).dtype  # type: ignore[no-any-return]

    @cached_property
    def sample_order(self) -> tuple[int, ...]:
        """Index of each sample of the result among the recurrences' samples; empty if the order is the same."""
        end_tensors = [self.segment_graph.tensors[end.port] for end in (self.of, self.wrt) if end.port is not None]
        orders = {tensor.layout.order for tensor in end_tensors if tensor.layout is not None}
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
        return {port: i for i, replayed in enumerate(self.recurrences) for port in replayed.upper_ports()}

    @cached_property
    def path(self) -> NetworkPath:
        """All tensors and recurrences between the two ends, found by a depth-first search from the upper end."""
        tensor_leads: dict[Port, bool] = {}
        recurrence_leads: dict[int, bool] = {}
        entered: set[int] = set()
        is_cyclic = False

        def from_tensor(port: Port) -> bool:
            if port not in tensor_leads:
                below = self.segment_graph.lower_segments(port)
                recurrences_lead = [from_recurrence(self.returned_by[p]) for p in below if p in self.returned_by]
                tensor_leads[port] = self.wrt.port in below or any(recurrences_lead)
            return tensor_leads[port]

        def from_recurrence(number: int) -> bool:
            nonlocal is_cyclic
            if number in entered and number not in recurrence_leads:
                is_cyclic = True
                return False
            if number not in recurrence_leads:
                entered.add(number)
                replayed = self.recurrences[number]
                tensors_lead = (
                    [True] if replayed in self.wrt.within else [from_tensor(port) for port in replayed.lower_ports()]
                )
                recurrence_leads[number] = any(tensors_lead)
            return recurrence_leads[number]

        if self.of.port is not None:
            from_tensor(self.of.port)
        for number, replayed in enumerate(self.recurrences):
            if replayed in self.of.within:
                from_recurrence(number)
        return NetworkPath(
            frozenset(port for port, leads_down in tensor_leads.items() if leads_down),
            frozenset(number for number, leads_down in recurrence_leads.items() if leads_down),
            tuple(reversed(recurrence_leads)),
            is_cyclic,
        )


@contextmanager
def open_network(
    request: JacobianRequest,
    replayed_layers: ReplayedLayers | None = None,
    *,
    replay_of: Callable[[Replay], Replay] | None = None,
) -> Iterator[JacobianNetwork]:
    """Run the model and keep, while the context is open, what differentiation between the two ends needs.

    ``replayed_layers``: those of an earlier run, used again. ``replay_of`` makes other replays of these, such as
    perturbed ones. Where recurrences read each other in a cycle, there are no cuts.
    """
    replayed_layers = _replay_all(request) if replayed_layers is None else replayed_layers
    if replay_of is not None:
        replayed_layers = replayed_layers.map(lambda replayed: replayed.rerun(replay_of))
    of, wrt = _inner_end(request.of, replayed_layers, "of"), _inner_end(request.wrt, replayed_layers, "wrt")
    is_one_layer = of is not None and not (
        replayed_layers.entangled and any(replayed.call.reads_states_between for replayed in of.within)
    )
    if of and wrt and is_one_layer and set(of.within) == set(wrt.within):
        # Both ends are in one layer: the network is that layer only, with its own samples.
        yield JacobianNetwork(tuple(of.within), of, wrt, request.axes, replayed_layers=replayed_layers)
        return
    outer_ports = [
        Port(name.kind, name.layer, name.index) if end is None else None  # type: ignore[arg-type]
        for end, name in ((of, request.of), (wrt, request.wrt))
    ]
    chain = (
        None
        if replayed_layers.entangled
        or request.axes.stated
        or any(map(request.axes.shown_layout, filter(None, outer_ports)))
        else known_chain(request, replayed_layers, outer_ports[0], outer_ports[1])
    )
    if chain is not None:
        yield _assemble_network(request, replayed_layers, (of, wrt), chain, request.axes.with_samples_first())
        return
    with _pullback(request, replayed_layers, outer_ports, wrt) as run:
        layouts = _end_layouts(request, replayed_layers, run.values, outer_ports)
        samples, is_folded = _samples_of(replayed_layers, run.values, layouts, is_inner=bool(of or wrt))
        if not is_folded:
            tensors = _outer_tensors(run.values, layouts, samples)
            segment_graph = SegmentGraph(dict(run.values), run, tensors)
            network = _assemble_network(request, replayed_layers, (of, wrt), segment_graph, request.axes)
            if replayed_layers.entangled or not network.path.is_cyclic:
                yield network
                return
    # The framework differentiates through the layers as well: through all of them where these have other samples.
    uncut_layers = ReplayedLayers({} if is_folded else replayed_layers.by_layer, entangled=True)
    uncut_layers.samples = samples
    with open_network(request, uncut_layers) as network:
        yield network


def _replay_all(request: JacobianRequest) -> ReplayedLayers:
    """Capture and replay all recurrent calls."""
    taps = Taps("states", chain=True, sequences=False)
    try:
        capture = request.adapter.run(request.model, request.batch, taps).capture
    except ModelError as error:
        if request.catalogue.recurrent:
            raise
        raise _nothing_recurrent_error(request) from error
    if not capture.calls and not capture.scanned:
        raise _nothing_recurrent_error(request)
    refuse_steps_first(request.axes, request.batch, (call.input.shape[:2] for call in capture.calls))
    outputs = leaves_of(capture.outputs)
    if len(outputs) > 1 and not request.catalogue.outputs:
        refuse_lone_output((request.of, request.wrt), len(outputs))
    first_output = outputs[0] if outputs else None
    replayed_layers = ReplayedLayers.of(
        capture.calls, capture.entangled or not capture.calls, capture.chain, first_output
    )
    if any(replayed.call.cell.space for replayed in replayed_layers.calls):
        replayed_layers = replayed_layers.map(lambda replayed: _flatten_checked(replayed, request.options.memory))
    replayed_layers.samples = next(iter(capture.scanned.values()), 0)
    return replayed_layers


def _flatten_checked(replayed: ReplayedCall, memory: int) -> ReplayedCall:
    """Return a call with flattened axes of space; raise if its step matrix between two images exceeds the memory."""
    flat_call = replayed.flatten_space()
    if flat_call is not replayed:
        rows, columns = flat_call.system.rows, flat_call.system.rows + flat_call.system.features
        image_size = "x".join(str(n) for n in replayed.run.states[0].shape[2:])
        message = f"One step of {replayed.call.layer!r} is linearised as a matrix that exceeds the memory limit."
        hint = (
            f'smaller images, or rl.gradients(..., wrt="{replayed.call.layer}.hidden"), '
            "the total gradient at every step"
        )
        size = 2 * rows * columns * flat_call.system.work.itemsize
        must_fit(message, size, f"{hint} and place", got=f"states of {image_size} numbers: {{}}", limit=memory)
    return flat_call


def _inner_end(name: TensorName, replayed_layers: ReplayedLayers, role: str) -> JacobianEnd | None:
    """Return an end that is a state inside a recurrence, where the framework has no tensor; None for other ends."""
    if replayed_layers.entangled:
        calls = replayed_layers.by_layer.get(str(name.layer), []) if name.kind == "output" else []
        if replayed_layers.is_stepwise(name) or (calls and all(replayed.call.stepwise for replayed in calls)):
            return None  # the framework has it, of a cell called step by step
    if name.kind in ("state", "final_state", "initial_state"):
        directions = replayed_layers.layer(name.layer)
        times, states = int(directions[0].run.input.shape[1]), directions[0].run.states
        if name.index >= len(states):
            got = f"{name.text}, state number {name.index} of {len(states)}"
            raise InputError(f"There is no {name.text}.", got=got)
        size, count = int(states[name.index].shape[-1]), times if name.kind == "state" else None
        return JacobianEnd(name, tuple(directions), None, name.kind, name.index, size, count)
    if role == "wrt" or name.kind != "output" or name.layer is None:
        return None
    if not any(node == name.layer or node.rpartition("#")[0] == name.layer for node in replayed_layers.by_layer):
        return None
    directions = replayed_layers.layer(name.layer)
    if len(directions) > 1:
        return None
    only_call, call = directions[0], directions[0].call
    count = int(call.input.shape[1]) if call.returns_sequences else None
    # A state of the layer, or a custom cell's own output.
    return JacobianEnd(
        name, (only_call,), None, "output", only_call.run.output_state, int(call.output.shape[-1]), count
    )


def _pullback(
    request: JacobianRequest, replayed_layers: ReplayedLayers, ports: Sequence[Port | None], wrt: JacobianEnd | None
) -> Run:
    """Run the model once more; return its pull-back, cut at every recurrence, or uncut if these are entangled."""
    of_port, wrt_port = ports
    starts = [
        *filter(None, (of_port,)),
        *(port for replayed in replayed_layers.calls for port in replayed.lower_ports()),
    ]
    if replayed_layers.entangled:
        cut_ports: list[Port] = []
        arrivals = [port for replayed in (() if wrt is None else wrt.within) for port in replayed.reader_ports()]
    else:
        cut_ports = arrivals = [port for replayed in replayed_layers.calls for port in replayed.upper_ports()]
    stops = dict.fromkeys([*arrivals, *filter(None, (wrt_port,))])
    taps = Taps.ports(list(dict.fromkeys(starts)), list(stops), cut_ports)
    return request.adapter.run(request.model, request.batch, taps)


def _end_layouts(
    request: JacobianRequest,
    replayed_layers: ReplayedLayers,
    values: Mapping[Port, Array],
    ports: Sequence[Port | None],
) -> dict[Port, Layout | None]:
    """Return the layout of each end that is a tensor of the framework; None if samples come first."""
    ends = list(dict.fromkeys(filter(None, ports)))
    outer_ends = [port for port in ends if port.layer not in replayed_layers.by_layer]
    request.axes.learn(request.batch, outer_ends)
    if request.axes.samples_first and not request.axes.stated:  # steps come second, unless the model shows otherwise
        ranks = {port: values[port].ndim for port in outer_ends}
        shown_ends = [port for port, rank in ranks.items() if rank > 3 or request.axes.shown_layout(port, rank)]
        return dict.fromkeys(ends) | {port: request.axes.layout(port, values[port].shape) for port in shown_ends}
    layouts = {port: request.axes.layout(port, values[port].shape) for port in outer_ends}
    sizes = [tuple(map(int, replayed.run.input.shape[:2])) for replayed in replayed_layers.calls]
    # With a single step, experiments cannot determine the time axis.
    has_single_step = bool(sizes) and all(steps == 1 for _, steps in sizes)
    has_samples = any(samples > 1 for samples, _ in sizes) or replayed_layers.samples > 1
    for port, layout in layouts.items():
        if layout.is_coupled:
            raise refusal_of_coupling("The time Jacobian", port)
        name = request.axes.text_of(port)
        if has_samples and layout.sample is None:
            refuse_unknown("The time Jacobian", name, layout.names, hint=_axes_to_type(request, values, layouts))
        refuse_unclear_steps("The time Jacobian", name, layout, request.axes.to_write())
        if has_single_step and len(layout.names) == 3 and layout.is_uncertain:
            refuse_unknown("The time Jacobian", name, layout.names, TIME)
    return dict.fromkeys(ends) | layouts


def _axes_to_type(request: JacobianRequest, values: Mapping[Port, Array], layouts: Mapping[Port, Layout]) -> str:
    """Return the ``axes=`` to type for both ends, for the case that samples come first, then steps."""
    axes = {}
    for port in layouts:
        last_role = FEATURE if port.kind == "input" else UNIT
        names = tuple((name,) for name in dims_of(values[port].shape, last=last_role))
        axes[request.axes.text_of(port)] = axes_to_write(request.axes.stated.get(port, Layout(names)).axes)
    return f"name the axes: axes={axes} where samples come first"


def _samples_of(
    replayed_layers: ReplayedLayers,
    values: Mapping[Port, Array],
    layouts: Mapping[Port, Layout | None],
    *,
    is_inner: bool,
) -> tuple[int, bool]:
    """Return the number of samples of the ends, and whether the recurrent layers run on another number.

    They do where the model folds another axis into the samples or cuts sequences. Raise if the ends themselves have
    different numbers of samples, or one of them (``is_inner``) lies within such a layer.
    """
    layer_counts = {name: int(calls[0].run.input.shape[0]) for name, calls in replayed_layers.by_layer.items()}
    counts = {} if layer_counts else {"": replayed_layers.samples}
    for port, layout in layouts.items():
        sample_axis = 0 if layout is None else None if layout.is_folded else layout.sample
        if sample_axis is not None and values[port].ndim:
            counts[text_of(port)] = int(values[port].shape[sample_axis])
    different = set(counts.values()) or set(layer_counts.values())
    is_folded = different | set(layer_counts.values()) != different
    if len(different) > 1 or (is_folded and is_inner):
        raise UnsupportedError(
            "Recurrent layers run on different numbers of samples: some merge the sample axis with another axis.",
            got=", ".join(f"{name}: {count}" for name, count in (counts | layer_counts).items() if name),
            expected="one number of samples, for a time Jacobian of (sample, out_time, in_time)",
            hint='of= and wrt= outside of these layers, as "output" and "input"',
        )
    return different.pop(), is_folded


def _outer_tensors(
    values: Mapping[Port, Array], layouts: Mapping[Port, Layout | None], samples: int
) -> dict[Port, OuterTensor]:
    """Return all framework tensors by port; ends outside of recurrences have layouts."""
    shapes = {port: tuple(int(n) for n in array.shape) for port, array in values.items()}
    return {
        port: OuterTensor(port, shape)
        if layouts.get(port) is None
        else OuterTensor(port, shape, layouts[port], samples)
        for port, shape in shapes.items()
    }


def _assemble_network(
    request: JacobianRequest,
    replayed_layers: ReplayedLayers,
    inner_ends: tuple[JacobianEnd | None, JacobianEnd | None],
    segment_graph: SegmentGraph,
    layouts: ModelAxes,
) -> JacobianNetwork:
    """Return the network, with outer ends as framework tensors; raise if no path connects the ends."""
    ends = list(inner_ends)
    for i, name in enumerate((request.of, request.wrt)):
        if ends[i] is None:
            tensor = segment_graph.tensors[Port(name.kind, name.layer, name.index)]  # type: ignore[arg-type]
            may_be_image = tensor.layout is not None or len(tensor.shape) > 3
            image = _image_of_tensor(tensor, request.axes) if may_be_image else {}
            ends[i] = JacobianEnd(name, (), tensor.port, name.kind, 0, tensor.features, tensor.times, image)
    of, wrt = ends
    assert of is not None
    assert wrt is not None
    network = JacobianNetwork(
        replayed_layers.calls, of, wrt, layouts, segment_graph, not replayed_layers.entangled, replayed_layers
    )
    path = network.path
    if network.is_cut and not path.is_cyclic and not path.recurrences and of.port not in path.tops:
        raise disconnected_error(of, wrt)
    return network


def _image_of_tensor(tensor: OuterTensor, axes: ModelAxes) -> dict[str, int]:
    """Return the names and lengths of a tensor's channels and axes of space; empty if it has no axes of space."""
    layout = tensor.layout or axes.layout(tensor.port, tensor.shape)
    sizes = dict(zip(layout.names, layout.sizes(tensor.shape, tensor.samples), strict=True))
    if not set(sizes) & set(SPACE[3]):
        return {}
    return {CHANNEL if name == FEATURE else name: size for name, size in sizes.items() if name not in (SAMPLE, TIME)}


def disconnected_error(of: JacobianEnd, wrt: JacobianEnd) -> DisconnectedError:
    """Create the error for a Jacobian between two tensors that no differentiable path connects."""
    if of.name == wrt.name:
        message = f"{of.name.text} is the output of the layer: no step of it is computed from another."
        hint = f'of="{of.name.layer}.hidden", wrt="{of.name.layer}.hidden": from state to state'
        return DisconnectedError(message, got=f"of={of.name.text!r} and wrt={wrt.name.text!r}", hint=hint)
    return DisconnectedError(
        f"{of.name.text} does not depend on {wrt.name.text}.",
        got="a gradient that is zero for every sample, step and unit",
        expected="wrt= below of=",
        hint="rl.gradients(...) says why; rl.layers(model) lists the recurrent layers in the order of their calls",
    )


def _nothing_recurrent_error(request: JacobianRequest) -> ModelError:
    return ModelError(
        "A time Jacobian goes through recurrent layers, and none ran in this forward pass.",
        got=type(request.model).__name__,
        expected="a model with at least one recurrent layer, as rl.layers(model) lists them",
        hint="rl.layers(model, x) says why, and what to declare; for one output unit "
        'rl.gradients(model, x, of="output", at={"unit": 0}, reduce="sum", wrt="input")',
    )
