"""One run of a model's program: values at ports, pull-backs between ports, and what its loops recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...autodiff import LinearisedProgram, Tap, engine
from ...errors import InputError, LayerNotFoundError, did_you_mean, raised_by
from ...typing import Array
from ..protocol import Batch, Port, refuse_misfits
from .arguments import missing_loss
from .emit import Emission, OpenedLoop, Point
from .jaxprs import is_inexact
from .layers import RecurrentLayer
from .program import Call, Program

ENGINE = engine("jax")
_LOSS = Port("loss")


@dataclass(frozen=True)
class PortTaps:
    """Ports of a run: ``of`` are differentiated by ``wrt``, differentiation stops at ``cut``; ``read``: only values."""

    of: tuple[Port, ...] = ()
    wrt: tuple[Port, ...] = ()
    cut: tuple[Port, ...] = ()
    read: tuple[Port, ...] = ()
    #: Names of layers whose points are all recorded.
    calls: tuple[str, ...] = ()


class ProgramRun:
    """One run of a model with taps at its ports.

    The program is traced once for a model and shapes, and compiled once for a set of taps; a run only calls it.
    ``cotangents``: if they are given, the run is forward and back in one compiled pass.
    """

    def __init__(self, call: Call, taps: PortTaps, cotangents: Mapping[Port, Array] | None = None) -> None:
        self.call, self.taps = call, taps
        ends = () if cotangents is not None else (*taps.wrt, *taps.cut)
        #: Ports whose values are kept.
        self._valued = tuple(dict.fromkeys((*taps.of, *taps.read, *ends)))
        ports = (*taps.of, *taps.wrt, *taps.cut, *taps.read)
        self.program = Program.of(self.call, self.call.has_loss and _LOSS in ports)
        self._refuse_absent(ports)
        self._given = self._initial_states(call.batch)
        memo = self.program.memo((taps, tuple(self._given)))
        arguments = [self.call.arrays, self._given]
        self._linearised: LinearisedProgram | None = None
        self.gradients: Mapping[Port, Array | None] = {}
        if cotangents is not None and taps.wrt:
            full = {_key(port): _cotangent(value, self._dtype(port)) for port, value in cotangents.items()}
            targets, aux, pulled = ENGINE.forward_and_back(self._program, arguments, memo, full)
            self.gradients = self._by_port(pulled)
        elif taps.wrt:
            self._linearised = ENGINE.linearise(self._program, arguments, memo)
            targets, aux = self._linearised.targets, self._linearised.aux
        else:

            def forward(arrays: Any, given: Any) -> Any:
                return self._program([arrays, given], lambda _key, tensor: tensor)

            compiled = memo.once("forward", lambda: ENGINE.compile(forward, arguments, memo))
            targets, aux = compiled(*arguments)
        self._targets, self._values, self._records = targets, aux["values"], aux["records"]

    # Values.

    @cached_property
    def values(self) -> Mapping[Port, Array]:
        """Values at all ports, in the layout of the protocol."""
        by_key = {**self._targets, **self._values}
        return {port: self._value(port, by_key) for port in self._valued}

    def _value(self, port: Port, by_key: Mapping[str, Any]) -> Array:
        if port.kind == "weight" and self._known_weight(port) is not None:
            layer = self._known_weight(port)
            assert layer is not None
            return self.program.weights_of(layer, self.call.opened.values)[port.key]
        return ENGINE.to_array(by_key[_key(port)])

    def record(self, point: Point) -> Any:
        """Return the values at a point of a loop at all steps, as the loop stacks them."""
        return self._records[_text(point)]

    # Gradients.

    def pull(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull K cotangents (K, ...) of ``of`` ports back to every ``wrt`` port; None where no path leads."""
        if self._linearised is None:
            raise InputError("This run is closed, or has no port to differentiate by.")
        refuse_misfits(cotangents, self.taps.of, self.values)
        full = {_key(port): _cotangent(value, self._dtype(port)) for port, value in cotangents.items()}
        with raised_by("The backward pass of your model"):
            return self._by_port(self._linearised.vjp(full))

    def first_gradient(self, port: Port) -> Array | None:
        """Return the gradient at a port of a run whose cotangents were given; None if no path leads there."""
        gradient = self.gradients.get(port)
        return None if gradient is None else gradient[0]

    def close(self) -> None:
        """Free what a pull-back needs."""
        self._linearised = None

    def _by_port(self, pulled: Mapping[str, Any]) -> dict[Port, Array | None]:
        """Return gradients by port from those by the key of a tap."""
        gradients: dict[Port, Array | None] = {}
        for port in self.taps.wrt:
            layer = self._known_weight(port)
            if port.kind == "weight" and layer is not None:
                gradients[port] = self._weight_gradient(layer, port.key, pulled)
            else:
                key = f"value/{self._parameters(port)[0]}" if port.kind == "weight" else _key(port)
                gradient = pulled.get(key)
                gradients[port] = None if gradient is None else ENGINE.to_array(gradient)
        return gradients

    def _weight_gradient(self, layer: RecurrentLayer, key: str, pulled: Mapping[str, Any]) -> Array | None:
        parts = [(pulled.get(f"value/{i}"), self.call.opened.values[i]) for i in layer.loop.weights]
        present = next((g for g, _ in parts if g is not None), None)
        if present is None:
            return None
        count = int(present.shape[0])
        grads = [np.zeros((count, *np.shape(v))) if g is None else ENGINE.to_array(g) for g, v in parts]
        return gathered_gradient(self.program, layer, key, grads)

    # The program with taps.

    def _program(self, arguments: Any, tap: Tap) -> tuple[dict[str, Any], Any]:
        arrays, given = arguments
        taps, program = self.taps, self.program
        arrays = self._tapped_arrays(list(arrays), tap)
        zeros: dict[Point, Any] = {_point(text): value for text, value in given.items()}
        for port in taps.wrt:
            if port.layer is None and port.kind == "output":
                output = program.outputs[port.index].aval
                zeros["", f"output{port.index}"] = tap(_key(port), jnp.zeros(output.shape, output.dtype))
            elif port.layer is not None and port.kind != "weight":
                layer = self._layer(port)
                shape, dtype = layer.shape_of(port)
                for point, zero in layer.zeros_at(port, tap(_key(port), jnp.zeros(shape, dtype))).items():
                    zeros[point] = zeros[point] + zero if point in zeros else zero
        emission = Emission(self._opened, self._recorded)
        results, records = emission.run(program.program, arrays, zeros, program.outputs)
        values = {}
        for port in self._valued:
            if self._known_weight(port) is None:
                values[_key(port)] = self._traced_value(port, arrays, results, records)
        targets = {_key(port): values.pop(_key(port)) for port in taps.of if _key(port) in values}
        for port in taps.of:
            if not is_inexact(targets[_key(port)]):
                raise InputError(f"{port.kind} {port.index} cannot be differentiated.", got=targets[_key(port)].dtype)
        kept = {_text(point): value for point, value in records.items() if self._is_kept(point)}
        return targets, {"values": values, "records": kept}

    def _is_kept(self, point: Point) -> bool:
        return any(layer.loop.path == point[0] for layer in self._recorded_layers)

    def _tapped_arrays(self, arrays: list[Any], tap: Tap) -> list[Any]:
        count = self.call.counts[0]
        for port in self.taps.wrt:
            if port.kind == "input" and port.layer is None and is_inexact(arrays[count + port.index]):
                arrays[count + port.index] = tap(_key(port), arrays[count + port.index])
        numbers: dict[int, None] = {}
        for port in self.taps.wrt:
            if port.kind == "weight":
                numbers.update(dict.fromkeys(self._parameters(port)))
        for i in numbers:
            if is_inexact(arrays[i]):
                arrays[i] = tap(f"value/{i}", arrays[i])
        return arrays

    def _traced_value(self, port: Port, arrays: Sequence[Any], results: Sequence[Any], records: Any) -> Any:
        if port.kind == "loss":
            return jnp.reshape(results[-1], ())
        if port.layer is not None and port.kind != "weight":
            return self._layer(port).value_at(port, records)
        if port.kind == "weight":
            return arrays[self._parameters(port)[0]]
        return results[port.index] if port.kind == "output" else arrays[self.call.counts[0] + port.index]

    @cached_property
    def _recorded_layers(self) -> list[RecurrentLayer]:
        return [layer for layer in self.program.layers if layer.name in self.taps.calls]

    @cached_property
    def _opened(self) -> Mapping[str, OpenedLoop]:
        """Loops that are opened, by path: those of the layers with a port or a call, and those around them."""
        taps = self.taps
        cut_names = {port.layer for port in taps.cut}
        names = {port.layer for port in (*taps.of, *taps.wrt, *taps.cut, *taps.read) if port.kind != "weight"}
        names |= {text.partition("|")[0] for text in self._given} | set(taps.calls)
        opened: dict[str, OpenedLoop] = {}
        by_path = {loop.path: loop for loop in self.program.loops}
        for layer in self.program.layers:
            if layer.name in names or layer.loop.path in names:
                for path in layer.loop.inside:
                    opened.setdefault(path, OpenedLoop(by_path[path]))
                opened[layer.loop.path] = layer.opened(is_cut=layer.name in cut_names)
        return opened

    @cached_property
    def _recorded(self) -> set[Point]:
        taps = self.taps
        ports = [p for p in (*taps.of, *taps.wrt, *taps.cut, *taps.read) if p.layer is not None and p.kind != "weight"]
        points = {point for port in ports for point, _ in self._layer(port).points_of(port)}
        for layer in self._recorded_layers:
            points |= layer.recorded_points()
        return points

    # Ports.

    def _layer(self, port: Port) -> RecurrentLayer:
        layer = self.program.layer(str(port.layer))
        if layer is None:
            raise no_layer(self.program, str(port.layer))
        return layer

    def _refuse_absent(self, ports: Sequence[Port]) -> None:
        """Raise LayerNotFoundError or InputError for a port that the program does not have."""
        for port in ports:
            if port.kind == "loss" and not self.program.with_loss:
                raise missing_loss()
            if port.kind == "weight":
                self._parameters(port)
            elif port.layer is not None:
                self._layer(port).shape_of(port)
            elif port.kind in ("input", "output"):
                count = len(self.call.x.leaves) if port.kind == "input" else len(self.program.outputs)
                if port.index >= count:
                    raise LayerNotFoundError(f"This model has no {port.kind} number {port.index}.", got=count)

    def _dtype(self, port: Port) -> Any:
        """Return the dtype of the value at a port that is differentiated."""
        if port.layer is not None:
            return self._layer(port).shape_of(port)[1]
        jaxpr, count = self.program.program.jaxpr, self.call.counts[0]
        atoms = {"loss": jaxpr.outvars[-1:], "output": self.program.outputs, "input": jaxpr.invars[count:]}
        return atoms[port.kind][0 if port.kind == "loss" else port.index].aval.dtype

    def _known_weight(self, port: Port) -> RecurrentLayer | None:
        """Return the layer of a known cell of which a port is a weight in the layout of rnnlens, or None."""
        if port.kind != "weight":
            return None
        layer = next((layer for layer in self.program.layers if layer.base == port.layer), None)
        is_known = layer is not None and layer.cell is not None and port.key in self.program.origins(layer)
        return layer if is_known else None

    def _parameters(self, port: Port) -> list[int]:
        """Return the numbers of the model's arrays that a weight consists of."""
        layer = self._known_weight(port)
        if layer is not None:
            return list(layer.loop.weights)
        if port.layer is None:  # an array of the model by its number
            return [int(port.key)]
        places = weight_places(self.program).get(port.layer, {})
        if port.key not in places:
            raise LayerNotFoundError(
                f"There is no weight {port.key!r} in layer {port.layer!r}.", hint=did_you_mean(port.key, places)
            )
        return [places[port.key]]

    def _initial_states(self, batch: Batch) -> dict[str, Any]:
        """Return the initial states that the user gave, by the text of their point."""
        given = {}
        for name, states in (batch.initial_state or {}).items():
            layer = self.program.layer(name)
            if layer is None:
                raise no_layer(self.program, name)
            if len(states) != len(layer.states):
                got = f"{len(states)} arrays for {name!r}"
                raise InputError("initial_state= has another number of states.", got=got, expected=len(layer.states))
            for number, (state, v) in enumerate(zip(states, layer.state_variables, strict=True)):
                shape = (layer.samples, layer.width(v))
                if np.shape(state) != shape:
                    message = f"initial_state[{name!r}][{number}] has another shape."
                    raise InputError(message, got=np.shape(state), expected=shape)
                given[_text((layer.loop.path, f"given{number}"))] = layer.from_step(v, jnp.asarray(state))
        return given


def _cotangent(value: Array, dtype: Any) -> Any:
    """Return a cotangent on JAX's device; ``jnp.asarray`` would compile a program for each shape."""
    return jax.device_put(np.asarray(value, dtype))


def gathered_gradient(program: Program, layer: RecurrentLayer, key: str, grads: Sequence[Array]) -> Array | None:
    """Return the gradient of a weight in the layout of rnnlens from those of the layer's parameters, (K, ...) each.

    It is None for a weight that is no rearrangement of parameters.
    """
    places = program.gradient_places(layer, key)
    if places is None:
        return None
    numbers, factors = places
    flat = np.concatenate([np.reshape(g, (len(g), -1)) for g in grads], axis=1)
    gathered: Array = (flat[:, numbers] * factors).astype(flat.dtype)
    return gathered


def weight_places(program: Program) -> dict[str, dict[str, int]]:
    """Return the numbers of a model's arrays by name and layer: a recurrent one, or the module that owns them."""
    places: dict[str, dict[str, int]] = {}
    names = program.call.opened.weight_names
    owned: dict[int, str] = {}
    for layer in program.layers:
        for i in layer.loop.weights:
            owned.setdefault(i, layer.base)
    for i, name in enumerate(names):
        module, _, key = name.rpartition(".")
        if i in owned:
            prefix = f"{owned[i]}."
            module, key = owned[i], _after(name, prefix)
        module = module.removeprefix("params.") or "params"
        places.setdefault(module, {})[key] = i
    return places


def _after(name: str, prefix: str) -> str:
    """Return the name of a weight within its layer: the part after the layer's name, where that is part of it."""
    return name.partition(prefix)[2] or name.removeprefix("params.")


def no_layer(program: Program, name: str) -> LayerNotFoundError:
    """Return the error for a name that is no recurrent layer."""
    loop = next((loop for loop in program.loops if loop.name == name and loop.obstacle), None)
    if loop is not None:
        return LayerNotFoundError(f"Layer {name!r} cannot be looked into: it is within {loop.obstacle}.")
    hint = did_you_mean(name, [layer.name for layer in program.layers])
    return LayerNotFoundError(f"No recurrent layer is called {name!r}.", hint=hint)


def _key(port: Port) -> str:
    return f"{port.layer or ''}|{port.kind}|{port.index}|{port.key}"


def _text(point: Point) -> str:
    return "|".join(point)


def _point(text: str) -> Point:
    path, _, name = text.partition("|")
    return path, name
