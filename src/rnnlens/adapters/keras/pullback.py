"""Pullback: one run of a model with a tap at each port, kept so that any port can be differentiated by any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ...autodiff import Engine, Memo, Tap
from ...autodiff.tensors import dtype_name, flip, join
from ...errors import InputError, LayerNotFoundError, UnsupportedError, did_you_mean, raised_by
from ...typing import Array
from .. import shared
from ..protocol import Batch, Port, Run, refuse_misfits
from ..shared import Pull
from ..shared.registered_cells import ComposedWeight
from . import losses
from .dialect import Dialect, dialect_of
from .discover import (
    ModelLayers,
    RecurrentSite,
    base_name,
    given_state_layers,
    implied_sites,
    locate_layers,
    step_sites,
)
from .hooks import ChangedStateError, LayerCall, Loss, RunRequest, SeparateCallsError, SteppedLayerError
from .inputs import input_order
from .restore import borrowed
from .run import discard_memo, memo_for, program, run_with_loops, stamp_of_request
from .weights import composed_weights, named_variables, registration_of

#: Largest size in bytes of one chunk of cotangents, intermediate tensors included.
_CHUNK_BYTES = 512 * 2**20
_MEMORY_FACTOR = 16
#: Suffix of the name under which a recurrent layer is hooked for the numbers of its samples and steps alone.
_SIZES_SUFFIX = "~sizes"
#: Suffix of the name under which a whole bidirectional layer is hooked, besides its two directions.
_BIDIRECTIONAL_SUFFIX = "~whole"
#: Suffix of the name under which a layer is hooked of which one call is meant, as in ``"embedding#2"``.
_CALLS_SUFFIX = "~calls"


@dataclass
class TappedPorts:
    """All ports of one pullback: the tap key of each, and the layers and weights to hook for them.

    ``inputs``: for each input of the model, its index among the leaves of ``x`` in Keras' order. ``reversed_ports``:
    ports whose time axis is reversed; ``last_step_ports``: ports of which only the last step is meant;
    ``stepped_layers``: layers that the user's code calls one step at a time.
    """

    model_layers: ModelLayers
    inputs: Sequence[int] = ()
    keys: dict[Port, str] = field(default_factory=dict)
    reversed_ports: set[Port] = field(default_factory=set)
    last_step_ports: set[Port] = field(default_factory=set)
    sites: dict[int, RecurrentSite] = field(default_factory=dict)
    other_layers: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    stepped_layers: frozenset[str] = frozenset()

    def add(self, port: Port, model: Any) -> None:
        """Find the tap key of a port, and note what to hook for it; raise an error if there is no such tensor."""
        if port in self.keys:
            return
        if port.kind == "weight":
            self.keys[port] = self._weight_key(port, model)
        elif port.layer is None:
            self.keys[port] = self._model_key(port)
        else:
            self.keys[port] = self._layer_key(port)

    def hooked_sites(self, other_names: Collection[str] = ()) -> list[RecurrentSite]:
        """Return the recurrent layers to record: those with a requested tensor, and those named in ``other_names``.

        A bidirectional layer has both of its sites in the list, so that their numbers stay valid.
        """
        names = {site.name for site in self.sites.values()} | set(other_names)
        sites = [site for site in self.model_layers.sites if site.name in names]
        return [*sites, *implied_sites(self.model_layers, sites, ())]

    def _model_key(self, port: Port) -> str:
        if port.kind == "input" and port.index < len(self.inputs):
            return f"model|input/{self.inputs[port.index]}"
        if port.kind in ("input", "output"):
            return f"model|{port.kind}/{port.index}"
        if port.kind == "loss":
            return "model|loss"
        raise InputError(f"A model has no {port.kind}.", hint="name a recurrent layer")

    def _layer_key(self, port: Port) -> str:
        assert port.layer is not None
        name = base_name(port.layer, self.model_layers)
        index = port.layer[len(name) + 1 :]
        direction_sites = [site for site in self.model_layers.sites if site.name == name]
        if not direction_sites:
            return self._other_layer_key(port, name, self.model_layers.other_layers[name], index)
        if port.direction is None and direction_sites[0].bidirectional:
            if port.kind not in ("input", "output"):
                raise InputError(
                    f"{port.kind} of the bidirectional layer {name!r} exists once per direction.",
                    hint='direction="forward" or direction="backward"',
                )
            return self._other_layer_key(port, name + _BIDIRECTIONAL_SUFFIX, direction_sites[0].owner, index)
        return self._site_key(port, direction_sites, index or "0")

    def _other_layer_key(self, port: Port, hook_name: str, layer: Any, index: str) -> str:
        if port.kind not in ("input", "output"):
            raise InputError(f"Layer {port.layer!r} has no {port.kind}: it is not recurrent.")
        if index:
            hook_name += _CALLS_SUFFIX
        self.other_layers[hook_name] = layer
        return f"{hook_name}|0|{index or 0}|{port.kind}/{port.index}"

    def _site_key(self, port: Port, direction_sites: list[RecurrentSite], index: str) -> str:
        direction_index = next(
            (i for i, s in enumerate(direction_sites) if port.direction in (None, s.direction)), None
        )
        if direction_index is None:
            raise InputError(
                f"Layer {port.layer!r} does not run {port.direction}.",
                expected=f"{direction_sites[0].direction!r} or None",
            )
        site = direction_sites[direction_index]
        if site.refusal is not None:
            raise UnsupportedError(site.refusal)
        self.sites[id(site)] = site
        if site.is_loop or site.name in self.stepped_layers:
            return self._loop_key(port, site, index)
        name: str = port.kind
        count = len(site.keras.tree.flatten(site.keras.state_size(site.layer)))
        if port.kind == "output" and port.index == 0:
            if site.layer.go_backwards and site.layer.return_sequences:
                self.reversed_ports.add(port)
        elif port.kind == "output":
            name = f"final_state/{port.index - 1}"
        elif port.kind in ("initial_state", "final_state"):
            _check_index(port, count)
            name = f"{port.kind}/{port.index}"
        if name.startswith("final_state") and not site.layer.return_state:
            raise InputError(
                f"Layer {port.layer!r} does not return its final state.", hint="make it with return_state=True"
            )
        return f"{site.name}|{direction_index}|{index}|{name}"

    def _loop_key(self, port: Port, site: RecurrentSite, index: str) -> str:
        """Return the tap key of a tensor of a loop over a cell, which has one tap per step."""
        name: str = port.kind
        if port.kind in ("initial_state", "final_state", "state", "state_read"):
            _check_index(port, len(site.keras.tree.flatten(site.keras.state_size(site.layer))))
            kind = {"state": "total", "state_read": "state"}.get(port.kind, port.kind)
            name = f"{kind}/{port.index}"
        if port.key == "ending":
            self.last_step_ports.add(port)
        return f"{site.name}|0|{index}|{name}"

    def _weight_key(self, port: Port, model: Any) -> str:
        layer = model
        if port.layer is not None:
            layer = self.model_layers.holder(port.layer)
            direction_sites = [s for s in self.model_layers.sites if s.owner is layer]
            if port.direction is not None:
                layer = next((s.layer for s in direction_sites if s.direction == port.direction), layer)
        variables = named_variables(layer)
        if port.key not in variables:
            owner_text = "the model" if port.layer is None else f"layer {port.layer!r}"
            raise LayerNotFoundError(
                f"There is no weight {port.key!r} in {owner_text}.", hint=did_you_mean(port.key, variables)
            )
        variable = variables[port.key]
        # Paths are not unique: each of two nested models may have an "lstm/lstm_cell/kernel".
        tap_name = next((key for key, v in self.weights.items() if v is variable), f"{port.layer}|{port.key}")
        self.weights[tap_name] = variable
        return f"weight|{tap_name}"


def _check_index(port: Port, count: int) -> None:
    if not 0 <= port.index < count:
        raise InputError(f"Layer {port.layer!r} has no state number {port.index}.", expected=f"0 to {count - 1}")


class KerasPullback(Run):
    """One run with a tap at each port; see :class:`rnnlens.adapters.protocol.Run`."""

    def __init__(
        self,
        model: Any,
        batch: Batch,
        of: Sequence[Port],
        wrt: Sequence[Port],
        cut: Sequence[Port] = (),
        cotangents: Mapping[Port, Array] | None = None,
    ) -> None:
        self._keras = dialect_of(model)
        self._engine: Engine = self._keras.engine
        self._of, self._wrt, self._cut = tuple(of), tuple(wrt), tuple(cut)
        self._tapped = self._tapped_ports(model, batch, frozenset())
        self._linearised: Any = None
        self._cotangents = cotangents
        #: Gradients of ``cotangents`` by port, with a leading axis; None if they are pulled back by :meth:`pull`.
        self.known_gradients: Mapping[Port, Array | None] | None = None
        self.values: Mapping[Port, Array] = {}
        self.output_count = 0
        self.recurrent_sizes: tuple[tuple[int, int], ...] = ()
        with_loss = any(port.kind == "loss" for port in (*self._of, *self._wrt))
        loss = losses.scalar_loss(model, batch) if with_loss else None

        def attempt(job: RunRequest) -> None:
            if job.stepped_layers != self._tapped.stepped_layers:
                self._tapped = self._tapped_ports(model, batch, job.stepped_layers)
            if job.stepped_layers:  # the tensors of such layers have taps of their own
                own_job = self._run_request(model, batch, loss)
                job = replace(
                    own_job, stepped_layers=job.stepped_layers, separate_layers=job.separate_layers, starts=job.starts
                )
            try:
                self._run_forward(job)
            except SeparateCallsError as error:
                raise self._several_calls_error(error) from None

        run_with_loops(self._run_request(model, batch, loss), attempt)

    def _several_calls_error(self, error: SeparateCallsError) -> LayerNotFoundError:
        port = next(port for port, key in self._tapped.keys.items() if key.partition("|")[0] == error.layer)
        return LayerNotFoundError(
            f"Layer {port.layer!r} was called {error.count} times, and not once at each step of one recurrence.",
            expected=f"one call, {port.layer}#0 to {port.layer}#{error.count - 1}",
            hint=f'"{port.layer}#0.{port.kind}"',
        )

    def _tapped_ports(self, model: Any, batch: Batch, stepped: frozenset[str]) -> TappedPorts:
        """Return where the run of the model records each tensor that is differentiated, or by which one differentiates.

        ``stepped``: names of the layers that the model calls one step at a time.
        """
        tapped = TappedPorts(locate_layers(model), input_order(self._keras, batch.x), stepped_layers=stepped)
        for port in (*self._of, *self._wrt, *self._cut):
            tapped.add(port, model)
        return tapped

    def _run_forward(self, job: RunRequest) -> None:
        stamp = stamp_of_request(job)
        with _repeatable_run(job):
            arguments = job.arguments()
            memo = self._memo(job, arguments, stamp)
            try:
                with raised_by("The forward pass of your model"):
                    recorded = self._compiled_or_eager(job, arguments, memo)
            except BaseException:
                if memo is not None:
                    discard_memo(job.model, memo)
                raise
        if self._linearised is not None:
            self._linearised.tracing = partial(_repeatable_run, job)
        self.output_count = int(recorded.pop("outputs"))
        samples, steps = map(int, recorded.pop("sizes"))
        self.recurrent_sizes = ((samples, steps),) if samples else ()
        values = {}
        for port, key in self._tapped.keys.items():
            if key not in recorded and self.known_gradients is not None:
                continue
            if key not in recorded:
                owner_text = "model" if port.layer is None else f"layer {port.layer!r}"
                problem = (
                    f"The {port.kind} number {port.index} of the {owner_text} does not appear in this forward pass."
                )
                raise LayerNotFoundError(problem)
            values[port] = self._in_time_order(port, self._engine.to_array(recorded[key]), axis=1)
            if port in self._tapped.last_step_ports:
                values[port] = values[port][:, -1]
        self.values = values

    def _compiled_or_eager(self, job: RunRequest, arguments: Any, memo: Memo | None) -> dict[str, Any]:
        """Run the model in a graph, or op by op where TensorFlow cannot trace it: a loop over tensors of a tf.function.

        What is recorded inside of such a loop belongs to the graph of the loop. An error of the user's code is raised
        again by the second run.
        """
        try:
            return self._linearise_or_differentiate(job, arguments, memo)
        except (ChangedStateError, SeparateCallsError, SteppedLayerError):
            raise
        except Exception:
            if memo is None or self._engine.name != "tensorflow":
                raise
            discard_memo(job.model, memo)
            job.calls.clear()
            return self._linearise_or_differentiate(job, arguments, None)

    def _linearise_or_differentiate(self, job: RunRequest, arguments: Any, memo: Memo | None) -> dict[str, Any]:
        """Run the model forward or, if its cotangents are known, forward and back; return all tapped tensors by key."""
        if self._cotangents is None or memo is None:
            self._cotangents = None
            self._linearised = self._engine.linearise(self._program(job), arguments, memo)
            return {**self._linearised.aux, **self._linearised.targets}
        convert = self._keras.ops.convert_to_tensor
        target_cotangents = {
            self._tapped.keys[p]: convert(self._in_time_order(p, c, axis=1)) for p, c in self._cotangents.items()
        }
        targets, aux, gradients = self._engine.forward_and_back(self._program(job), arguments, memo, target_cotangents)
        self.known_gradients = {
            port: self._port_gradient(port, [self._gradient(port, gradients)]) for port in self._wrt
        }
        return {**aux, **targets}

    def _memo(self, job: RunRequest, arguments: Any, stamp: Hashable | None) -> Memo | None:
        """Return the compiled functions of an earlier pullback of the same model and ports, or an empty memo.

        Return None for a loss of a short run: its single product takes less time eagerly than a graph to trace.
        """
        boundaries = (frozenset(self._tapped.keys[port] for port in ports) for ports in (self._of, self._cut))
        memo = memo_for(job, arguments, stamp, *boundaries)
        return memo if memo is not None or all(port.kind == "loss" for port in self._of) else Memo()

    def _run_request(self, model: Any, batch: Batch, loss: Loss | None) -> RunRequest:
        tap_names = frozenset(self._tapped.keys[port] for port in (*self._wrt, *self._cut))
        sites = [site for site in self._tapped.model_layers.sites if not site.is_loop and site.refusal is None]
        sized_layers = {site.name + _SIZES_SUFFIX: site.owner for site in sites}
        hooked_sites = self._tapped.hooked_sites(given_state_layers(self._tapped.model_layers, batch.initial_state))
        return RunRequest(
            model,
            batch,
            hooked_sites,
            self._tapped.other_layers | sized_layers,
            loss,
            tap_names=tap_names,
            record_names=frozenset(self._tapped.keys.values()) | {"outputs"},
            weights=self._tapped.weights,
            joined_layers=frozenset(name for name in self._tapped.other_layers if not name.endswith(_CALLS_SUFFIX)),
            step_sites=step_sites(self._tapped.model_layers, hooked_sites),
        )

    def _program(self, job: RunRequest) -> Any:
        keras, keys = self._keras, self._tapped.keys
        target_keys, cut_keys = ({keys[port] for port in ports} for ports in (self._of, self._cut))

        def run(arguments: Any, tap: Tap) -> tuple[dict[str, Any], Any]:
            recorded: dict[str, Any] = {f"model|input/{i}": t for i, t in enumerate(keras.tree.flatten(arguments["x"]))}

            def recording_tap(key: str, tensor: Any) -> Any:
                stepless_key = key.partition("@")[0]
                if not keras.is_float(tensor):  # counters, quantised weights: they have no gradient
                    recorded[key] = tensor
                    return tensor
                recorded[key] = tap(key, keras.ops.stop_gradient(tensor) if stepless_key in cut_keys else tensor)
                return recorded[key]

            value, (arrays, outputs) = program(job, arguments, recording_tap)
            for call, tensors in zip(job.calls, arrays, strict=True):
                recorded.update({f"{call.key}|{name}": tensor for name, tensor in tensors.items()})
            recorded.update({f"model|output/{i}": t for i, t in enumerate(keras.tree.flatten(outputs))})
            if value is not None:
                recorded["model|loss"] = value
            for key in target_keys:
                layer_name, *_, name = key.split("|")
                if key not in recorded:
                    raise LayerNotFoundError(f"{layer_name}.{name} does not appear in this forward pass.")
                if not keras.is_float(recorded[key]):
                    dtype = dtype_name(recorded[key])
                    raise InputError(f"{layer_name}.{name} cannot be differentiated.", got=f"dtype {dtype}")
            # Only gradients are read at the other ports of a pass with known cotangents.
            other_tensors = {
                key: recorded[key]
                for key in set(keys.values()) - target_keys
                if key in recorded and self._cotangents is None
            }
            counts = {"outputs": len(keras.tree.flatten(outputs)), "sizes": _sizes(job.calls)}
            return {key: recorded[key] for key in target_keys}, {**other_tensors, **counts}

        return run

    def pull(self, cotangents: Mapping[Port, Array]) -> dict[Port, Array | None]:
        """Multiply K cotangents (K, ...) per ``of`` port by the transposed Jacobians; None where no path leads."""
        if self._linearised is None:
            raise InputError("This pullback is closed.", hint="use it inside its with block")
        refuse_misfits(cotangents, self._of, self.values)
        target_cotangents = {self._tapped.keys[p]: self._in_time_order(p, c, axis=2) for p, c in cotangents.items()}
        count = len(next(iter(target_cotangents.values())))
        per_row = sum(8 * math.prod(array.shape) for array in self.values.values()) * _MEMORY_FACTOR
        size = min(count, max(1, _CHUNK_BYTES // max(per_row, 1)))
        with raised_by("The backward pass of your model"):
            chunk_gradients = [
                self._linearised.vjp({k: c[i : i + size] for k, c in target_cotangents.items()})
                for i in range(0, count, size)
            ]
        return {
            port: self._port_gradient(port, [self._gradient(port, gradients) for gradients in chunk_gradients])
            for port in self._wrt
        }

    def _gradient(self, port: Port, gradients: Mapping[str, Any]) -> Any:
        """Return the gradient at a port from gradients by tap key.

        For a loop over a cell, at all steps or the last one.
        """
        key = self._tapped.keys[port]
        if key in gradients or port.kind in ("weight", "loss"):
            return gradients.get(key)
        name = key.replace("|final_state/", "|state/")
        step_gradients: list[Any] = []
        while f"{name}@{len(step_gradients)}" in gradients:
            step_gradients.append(gradients[f"{name}@{len(step_gradients)}"])
        if port in self._tapped.last_step_ports or port.kind == "final_state":
            return step_gradients[-1] if step_gradients else None
        present_gradient = next((step for step in step_gradients if step is not None), None)
        if present_gradient is None:
            return None
        zero = self._keras.ops.zeros_like(present_gradient)
        return self._keras.ops.stack([zero if step is None else step for step in step_gradients], axis=2)

    def _port_gradient(self, port: Port, rows: list[Any]) -> Array | None:
        if rows[0] is None:
            return None
        arrays = [self._engine.to_array(row) for row in rows]
        return self._in_time_order(port, arrays[0] if len(arrays) == 1 else join(arrays, axis=0), axis=2)

    def _in_time_order(self, port: Port, array: Array, axis: int) -> Array:
        return flip(array, axis) if port in self._tapped.reversed_ports else array

    def __exit__(self, *exc: object) -> None:
        self._linearised = None


def _sizes(calls: Sequence[LayerCall]) -> tuple[int, int]:
    """Return the samples and steps of all calls of recurrent layers; (0, 0) if they differ or are unknown."""
    sizes = {call.shape[:2] for call in calls if call.layer_name.endswith(_SIZES_SUFFIX)}
    size = sizes.pop() if len(sizes) == 1 else ()
    return (size[0] or 0, size[1] or 0) if len(size) == 2 else (0, 0)


@contextmanager
def _repeatable_run(job: RunRequest) -> Iterator[None]:
    """Run the model within the block with the same random numbers each time, and restore its state on exit."""
    with borrowed(job.model, job.keras, job.batch.seed, regularised=True):
        yield


def differentiate(function: Callable[..., Any], arrays: Sequence[Array], keras: Dialect) -> tuple[Array, Pull]:
    """Return the value of ``function(*tensors)``, and a function that pulls its cotangents back."""
    tensors = [keras.ops.convert_to_tensor(np.asarray(a)) for a in arrays]
    expected = f"a tensor of {keras.engine.name}, such as {keras.mean_code}"
    return shared.differentiate(function, tensors, keras.engine, expected)


def registered_weight_finder(model: Any) -> Callable[[Port], ComposedWeight | None]:
    """Return a function that maps a weight port of a registered cell to its ``ComposedWeight``, other ports to None."""

    @cache
    def by_layer() -> dict[str, dict[str, ComposedWeight]]:
        sites_by_layer: dict[str, dict[str, RecurrentSite]] = {}
        for site in locate_layers(model).sites:
            if registration_of(getattr(site.layer, "cell", None)) is not None:
                sites_by_layer.setdefault(site.name, {})[site.direction] = site
        return {
            name: composed_weights(
                named_variables(next(iter(sites.values())).owner), {d: s.layer for d, s in sites.items()}
            )
            for name, sites in sites_by_layer.items()
        }

    def find_composed(port: Port) -> ComposedWeight | None:
        return by_layer().get(str(port.layer).partition("#")[0], {}).get(port.key)

    return find_composed
