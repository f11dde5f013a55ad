"""Replayed calls of recurrent layers: their states, gates, and total gradients by sweeps.

A framework has no tensor for the state at step t of a fused layer. A gradient that starts or ends there combines the
adjoint inside the layer with the framework's own differentiation outside, joined at the layer's boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..adapters.protocol import Adapter, Batch, ChainLink, Port, RecurrentCall, Taps
from ..autodiff.tensors import converted_like, dtype_name, shared_memory_array
from ..errors import LayerNotFoundError, ModelError
from ..layout import dims_of, direction_axis
from ..recurrence.adjoint import (
    adjoint,
    adjoint_custom,
    unmasked_output_cotangent,
    weight_gradients,
)
from ..recurrence.cells import Cell
from ..recurrence.linear import System
from ..recurrence.replay import Replay
from ..recurrence.rounding import replay_sensitivity
from ..recurrence.sweep_rows import PointRows
from ..recurrence.trajectory import Adjoint, over_time
from ..results.checks import CEILING, CUDNN_ACTIVATIONS, REPLAY, Check, epsilon, rounding_bound, weight_sum_check
from ..results.schema import to_host
from ..typing import Array, map_leaves
from .names import TensorName


def on_host(calls: Iterable[RecurrentCall]) -> list[RecurrentCall]:
    """Convert CPU calls to NumPy; cells that the framework runs keep their tensors."""
    cells: dict[int, Cell] = {}
    host_calls = []
    for call in calls:
        if not call.cell.by_framework and shared_memory_array(call.input) is not None:
            cell = cells.setdefault(id(call.cell), call.cell.with_weights(_as_numpy))
            changed = {f.name: map_leaves(_as_numpy, getattr(call, f.name)) for f in fields(call) if f.name != "cell"}
            call = replace(call, cell=cell, **changed)
        host_calls.append(call)
    return host_calls


def _as_numpy(value: Any) -> Any:
    """Return a tensor in the CPU's memory as a NumPy array that shares it, any other value as it is."""
    array = shared_memory_array(value)
    return value if array is None else array


def sweep(
    call: RecurrentCall,
    run: Replay,
    output_grad: Array | None = None,
    final_state_grad: Sequence[Array] | None = None,
    state_grad: Mapping[int, Array] | None = None,
    *,
    spend: bool = False,
) -> Adjoint:
    """Compute total gradients of a call from direct ones, by a reverse sweep.

    The direct ones are those of the output, of the final states, (sample, size) each, and of states at every step,
    (sample, time, size) by their index. ``spend``: the pre-activations of ``run`` may be overwritten.
    """
    states, own_output = _split_output_gradient(call, run, output_grad)
    for index, cotangent in (state_grad or {}).items():
        present = states[index]
        states[index] = cotangent if present is None else present + cotangent
    if call.cell.by_framework:
        return adjoint_custom(run, states, own_output, final_state_grad)
    return adjoint(run, states, final_state_grad, spend=spend)


def replay_check(call: RecurrentCall, run: Replay) -> Check:
    """Check that the replay equals the framework's output within the rounding bound.

    With a gate z near 1, 1 - z has few significant digits, and so has the update of the state. If the bound is
    exceeded, it is therefore widened by the replay's sensitivity to one more rounding.
    """
    kind, steps = call.compute_dtype or call.output.dtype, int(call.input.shape[1])
    bound = rounding_bound(kind, steps)
    if getattr(call.output, "is_cuda", False) and dtype_name(call.output) == "float32":
        bound = max(bound, CUDNN_ACTIVATIONS)
    if run.residual > bound:
        bound = min(max(bound, bound * replay_sensitivity(run) / epsilon(kind)), CEILING)
    return Check(REPLAY, call.layer, run.residual, bound)


class WeightSum:
    """Weight gradients summed over time and over calls that share the weights, to compare with the framework's."""

    def __init__(self, call: RecurrentCall, reference: Mapping[str, Array]) -> None:
        self.layer, self.reference, self.steps = call.layer.partition("#")[0], reference, 0
        self.dtype = call.compute_dtype or str(call.input.dtype)
        self.total: dict[str, Array] = {}
        self.scale = 0.0

    def add(self, grads: Mapping[str, Array], steps: int, scale: float) -> None:
        """Add the weight gradients of one call, and their rounding scale (:class:`rounding.Rounding`)."""
        self.steps += steps
        self.scale = math.hypot(self.scale, scale)
        for name, grad in grads.items():
            self.total[name] = self.total[name] + grad if name in self.total else grad

    def check(self) -> Check:
        """Compare the sums with the framework's dL/dW."""
        return weight_sum_check(
            self.layer, self.total, self.reference, steps=self.steps, dtype=self.dtype, scale=self.scale
        )


def _split_output_gradient(
    call: RecurrentCall, run: Replay, output_grad: Array | None
) -> tuple[list[Array | None], Array | None]:
    """Return the output's gradient as that of the state it equals, or as that of the output if it is no state."""
    states: list[Array | None] = [None] * len(run.states)
    if output_grad is None:
        return states, None
    step_cotangents = output_grad
    if not call.returns_sequences:  # (sample, unit) becomes (sample, time, unit), zero except at the last step that ran
        shape = (output_grad.shape[0], run.input.shape[1], *output_grad.shape[1:])
        step_cotangents = run.xp.zeros_like(run.xp.broadcast_to(output_grad[:, None, ...], shape))
        *_, last_step = run.steps()
        step_cotangents[:, last_step, ...] = output_grad
    index = call.cell.output_state
    if run.output_is_state:
        if call.output_from_state is not None:
            step_cotangents = run.xp.where(
                over_time(call.output_from_state, step_cotangents), step_cotangents, run.xp.zeros_like(step_cotangents)
            )
        states[index] = step_cotangents
        return states, None
    output_cotangent, state_cotangent = unmasked_output_cotangent(run, step_cotangents, call.masked_output)
    states[index] = state_cotangent
    return states, output_cotangent


@dataclass(eq=False)
class ReplayedCall:
    """One direction of one call of a recurrent layer, its replay, and the linear system around the replayed states."""

    call: RecurrentCall
    run: Replay

    @cached_property
    def system(self) -> System:
        """Linear system of the call around its replayed states."""
        return self.call.cell.linear_system(self.run, self.call.masked_output)

    def rerun(self, replay_of: Callable[[Replay], Replay]) -> ReplayedCall:
        """Return the call with another replay, which ``replay_of`` makes of the present one."""
        return ReplayedCall(self.call, replay_of(self.run))

    def flatten_space(self) -> ReplayedCall:
        """Return the call with spatial axes and channels flattened; the call itself if it has no spatial axes."""
        if len(self.run.input.shape) == 3:
            return self

        def flattened(array: Any) -> Any:
            return None if array is None else array.reshape((*array.shape[:2], -1))

        def flatten_states(arrays: Any) -> Any:
            return None if arrays is None else tuple(array.reshape((array.shape[0], -1)) for array in arrays)

        call, run, sequences = self.call, self.run, self.call.returns_sequences
        output = flattened(call.output) if sequences else call.output.reshape((call.output.shape[0], -1))
        call = replace(
            call,
            input=flattened(call.input),
            output=output,
            initial_state=flatten_states(call.initial_state),
            final_state=flatten_states(call.final_state),
        )
        initial, flat_states = flatten_states(run.initial_state), tuple(map(flattened, run.states))
        flat_call = ReplayedCall(
            call, replace(run, input=flattened(run.input), states=flat_states, initial_state=initial)
        )
        flat_call.system = self.system
        return flat_call

    def moving_output_mask(self) -> Array | None:
        """Return a mask (sample, time) of where the output depends on the state; None for everywhere."""
        if self.call.masked_output == "zero" and self.call.mask is not None and self.run.output_is_state:
            return self.call.mask
        return self.call.output_from_state

    def points(self, state: int, times: Sequence[int], block: Array, *, of_output: bool = False) -> PointRows:
        """Return cotangents (sample or 1, time or 1, row, size) that enter a state at single steps.

        ``of_output``: they are of the layer's output, and zero where that is a constant.
        """
        block = converted_like(block, self.run.input)
        moving_mask = self.moving_output_mask() if of_output else None
        if moving_mask is not None:
            block = self.system.work.xp.where(
                moving_mask[:, :, None, None], block, self.system.work.xp.zeros_like(block)
            )
        return PointRows(list(times), {state: block}, self.system.order)

    @property
    def last_step(self) -> int:
        """Time index of the step that ran last."""
        *_, last_step = self.run.steps()
        return last_step

    def port(self, kind: Any, index: int = 0) -> Port:
        """Return a port at the boundary of this direction of the layer."""
        direction = self.call.direction if self.call.bidirectional else None
        return Port(kind, self.call.layer, index, direction=direction)

    def upper_ports(self) -> list[Port]:
        """Return the tensors that later layers read from this layer, as ports: its output and returned final states."""
        states = range(len(self.call.final_state or ()))
        return [self.port("output"), *(self.port("final_state", i) for i in states)]

    def reader_ports(self) -> list[Port]:
        """Return the ports where gradients enter an uncut layer: its output, and states that the user's code reads."""
        if not self.call.reads_states_between:
            return self.upper_ports()
        states = range(len(self.run.states))
        return [self.port("output"), *(self.port("state_read", i) for i in states)]

    def lower_ports(self) -> list[Port]:
        """Return the ports where gradients leave towards earlier layers: the shared input, and the initial states."""
        states = range(len(self.run.initial_state))
        return [Port("input", self.call.layer), *(self.port("initial_state", i) for i in states)]

    def direct_gradients(self) -> dict[Port, Array | None]:
        """Return the captured direct gradients at the output and the final states, by port."""
        final_grads = self.call.final_state_grad or ()
        by_port = {self.port("final_state", i): grad for i, grad in enumerate(final_grads)}
        return {self.port("output"): self.call.output_grad, **by_port}

    def sweep(self, states: Mapping[int, Array], upper_grads: Mapping[Port, Array | None]) -> Adjoint:
        """Compute total gradients from cotangents of states and from gradients at the upper ports."""
        states = dict(states)
        for i in range(len(self.run.states)):
            read_grad = upper_grads.get(self.port("state_read", i))  # by the user's code, between the steps
            if read_grad is not None:
                states[i] = converted_like(read_grad, states[i]) + states[i] if i in states else read_grad
        output_grad = upper_grads.get(self.port("output"))
        final_grads = [upper_grads.get(self.port("final_state", i)) for i in range(len(self.run.states))]
        final_state_grad = None
        if any(f is not None for f in final_grads):
            initial = self.run.initial_state
            final_state_grad = [
                s * 0 if f is None else converted_like(f, s) for f, s in zip(final_grads, initial, strict=True)
            ]
        return sweep(
            self.call,
            self.run,
            None if output_grad is None else converted_like(output_grad, self.run.states[0]),
            final_state_grad,
            {index: converted_like(array, self.run.states[index]) for index, array in states.items()},
        )

    def weight_gradients(self, swept: Adjoint, *, per_sample: bool = False) -> dict[str, Array]:
        """Return dL/dW by the names of the cell's weights, summed over time, and over samples unless ``per_sample``."""
        if not per_sample:
            return {key: to_host(grad) for key, grad in weight_gradients(self.run, swept).items()}
        samples = [slice(n, n + 1) for n in range(int(self.run.input.shape[0]))]
        by_sample = [weight_gradients(self.run.of_samples(sample), swept.of_samples(sample)) for sample in samples]
        return {key: np.stack([to_host(grads[key]) for grads in by_sample]) for key in by_sample[0]}


class ReplayedLayers:
    """Replays of the recurrent calls of one forward pass by layer name; forward direction first.

    ``entangled``: differentiation must not be cut at these layers, see :class:`rnnlens.adapters.protocol.Capture`.
    ``chain`` and ``output``: the links of a model that is a plain chain, and its first output.
    """

    def __init__(
        self,
        by_layer: Mapping[str, list[ReplayedCall]],
        entangled: bool = False,
        chain: list[ChainLink] | None = None,
        output: Any = None,
    ) -> None:
        self.by_layer, self.entangled = dict(by_layer), entangled
        self.chain, self.output = chain, output
        #: Samples of whole-sequence layers, where no recurrent call is replayed.
        self.samples = 0

    @property
    def calls(self) -> tuple[ReplayedCall, ...]:
        """All calls, in the order in which the layers ran."""
        return tuple(replayed for directions in self.by_layer.values() for replayed in directions)

    @classmethod
    def capture_layers(cls, adapter: Adapter, model: Any, batch: Batch, layers: Iterable[str]) -> ReplayedLayers:
        """Run the model to capture and replay the given layers; without layers the model is not run."""
        layer_names = tuple(dict.fromkeys(layers))
        if not layer_names:
            return cls({})
        capture = adapter.run(model, batch, Taps.states(layer_names)).capture
        return cls.of(capture.calls, capture.entangled)

    @classmethod
    def of(
        cls,
        calls: Iterable[RecurrentCall],
        entangled: bool = False,
        chain: list[ChainLink] | None = None,
        output: Any = None,
        runs: Iterable[Replay] | None = None,
    ) -> ReplayedLayers:
        """Replay captured calls; ``runs`` are their replays if the caller has them."""
        host_calls, by_layer = on_host(calls), dict[str, list[ReplayedCall]]()
        for call, run in zip(host_calls, map(Replay.from_call, host_calls) if runs is None else runs, strict=True):
            by_layer.setdefault(call.layer, []).append(ReplayedCall(call, run))
        for directions in by_layer.values():
            directions.sort(key=lambda replayed: replayed.call.bidirectional and replayed.call.direction == "backward")
        return cls(by_layer, entangled, chain, output)

    def map(self, change: Callable[[ReplayedCall], ReplayedCall]) -> ReplayedLayers:
        """Return the same layers with every replayed call changed."""
        by_layer = {name: [change(replayed) for replayed in directions] for name, directions in self.by_layer.items()}
        changed = ReplayedLayers(by_layer, self.entangled, self.chain, self.output)
        changed.samples = self.samples
        return changed

    def is_stepwise(self, name: TensorName) -> bool:
        """Return whether a tensor belongs to a cell called step by step, so that the framework has it."""
        directions = self.by_layer.get(str(name.layer), [])
        kinds = ("state", "final_state", "initial_state", "input")
        return name.kind in kinds and bool(directions) and all(replayed.call.stepwise for replayed in directions)

    def is_output(self, name: TensorName) -> bool:
        """Return whether a state is the output of its layer at every step, computed in the framework's own dtype."""
        directions = self.by_layer.get(str(name.layer), [])
        if name.kind != "state" or len(directions) != 1 or "#" in str(name.layer):
            return False
        call, run = directions[0].call, directions[0].run
        is_plain = call.mask is None and call.output_from_state is None
        is_plain = is_plain and call.compute_dtype in ("", str(run.states[0].dtype).removeprefix("torch."))
        in_order = call.direction == "forward" and not (
            call.bidirectional or call.stepwise or call.reads_states_between
        )
        is_state = run.output_is_state and call.returns_sequences and name.index == call.cell.output_state
        return is_plain and in_order and is_state and call.start_states is None

    def layer(self, name: str | None) -> list[ReplayedCall]:
        """Return the replayed calls of a layer: one, or one per direction with the forward direction first."""
        if name in self.by_layer:
            return self.by_layer[name]
        calls = [node for node in self.by_layer if node.rpartition("#")[0] == name]
        if calls:
            expected = "one of: " + ", ".join(repr(call) for call in calls)
            raise LayerNotFoundError(f"Layer {name!r} was called more than once.", expected=expected)
        raise LayerNotFoundError(f"Layer {name!r} was not called in this forward pass.")

    def value(self, name: TensorName) -> Array:
        """Return a state of a layer, with a direction axis for a bidirectional layer."""
        return _join_directions(
            [_steps_of_name(replayed, replayed.run.states[name.index], name) for replayed in self.layer(name.layer)],
            name,
        )

    def state_cotangents(self, name: TensorName, cotangent: Array) -> list[dict[int, Array]]:
        """Return, for each direction, the cotangent of ``value(name)`` over all steps, by state index."""
        directions, axis = self.layer(name.layer), 2 if name.kind == "state" else 1
        parts = [cotangent] if len(directions) == 1 else list(np.moveaxis(cotangent, axis, 0))
        if name.kind != "state":  # zero at all steps but the last
            last_cotangents, parts = parts, []
            for replayed, last_cotangent in zip(directions, last_cotangents, strict=True):
                all_steps = np.zeros(tuple(replayed.run.states[name.index].shape), dtype=last_cotangent.dtype)
                all_steps[:, replayed.last_step, :] = last_cotangent
                parts.append(all_steps)
        return [{name.index: part} for part in parts]

    def gradient(self, name: TensorName, swept: Sequence[Adjoint]) -> Array:
        """Return the gradient of a tensor inside a layer from its finished sweeps."""
        if name.kind == "input":
            return np.sum([to_host(adjoints.input_grad) for adjoints in swept], axis=0)
        parts = []
        for replayed, adjoints in zip(self.layer(name.layer), swept, strict=True):
            if name.kind == "initial_state":
                parts.append(to_host(adjoints.initial_state_grad[name.index]))
            elif name.kind == "gate_preactivation":
                parts.append(to_host(adjoints.gate_grad))
            elif name.kind == "gates":
                parts.append(
                    to_host(replayed.run.at_real_steps(replayed.run.cell.gate_gradient(replayed.run, adjoints)))
                )
            else:
                parts.append(_steps_of_name(replayed, adjoints.state_grads[name.index], name))
        return _join_directions(parts, name)


def stack_directions(parts: Sequence[Array], space: tuple[str, ...]) -> Array:
    """Stack both directions of a layer behind time, or else behind sample; return a lone array as it is."""
    return parts[0] if len(parts) == 1 else np.stack(parts, axis=direction_axis(dims_of(parts[0].shape, space=space)))


def outputs_of(adapter: Adapter, model: Any, batch: Batch, layers: tuple[str, ...]) -> dict[str, Array]:
    """Return the outputs of layers by node, without a loss; layers that do not run are left out."""
    try:
        capture = adapter.run(model, batch.without_loss(), Taps.states(layers, inputs=False)).capture
    except (LayerNotFoundError, ModelError):
        return {}
    return {call.layer: to_host(call.output) for call in capture.other_calls} | {
        call.layer: to_host(call.output) for call in capture.calls
    }


def runs_layer(adapter: Adapter, model: Any, batch: Batch, layer: str) -> bool:
    """Return whether a layer is called in a forward pass."""
    return any(node.partition("#")[0] == layer for node in outputs_of(adapter, model, batch, (layer,)))


def _steps_of_name(replayed: ReplayedCall, states: Array, name: TensorName) -> Array:
    """Select a state at all steps, or at the last step that ran, as the tensor's name requires."""
    all_steps = to_host(states)
    return all_steps if name.kind == "state" else all_steps[:, replayed.last_step, :]


def _join_directions(parts: list[Array], name: TensorName) -> Array:
    if len(parts) == 1:
        return parts[0]
    return np.stack(parts, axis=1 if name.kind in ("final_state", "initial_state") else 2)
