"""A model together with the shapes of its data: a function of JAX has recurrent layers only for data of some shapes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ...errors import InputError, RnnlensError, short_repr
from ...recurrence.cells import Cell
from ...typing import Array, leaves_of, map_leaves, signature
from ..protocol import Batch, LayerInfo, LayerWeights, ModelFacts, Submodule, WeightLocation
from .arguments import shape_of
from .models import JaxModel, library_of, open_model
from .program import Call, Program
from .program_run import weight_places

#: By identity of a user's model: a weak reference to it, and its bound models by the shapes of the data.
_bound: dict[int, tuple[weakref.ref[Any], dict[Hashable, BoundModel]]] = {}


class BoundModel:
    """A model of a user with an example of its data, of which only shapes and dtypes are kept.

    ``source``: a function that returns the user's model.
    """

    def __init__(self, source: Callable[[], Any], x: Any, y: Any = None) -> None:
        self._source, self.x, self.y = source, x, y

    @property
    def model(self) -> Any:
        """The user's model."""
        return self._source()

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "x": self.x, "y": self.y}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        model = state["model"]
        self._source, self.x, self.y = (lambda: model), state["x"], state["y"]

    def call(self) -> Call:
        """Return a call of the model with zeros of these shapes."""
        x, y = (map_leaves(lambda s: np.zeros(s.shape, s.dtype), shapes) for shapes in (self.x, self.y))
        return Call.of(self.model, Batch(x, y))

    @property
    def program(self) -> Program:
        """The program of the model at these shapes, without a loss."""
        return self.opened_program()[1]

    def opened_program(self) -> tuple[Call, Program]:
        """Return a call of the model and its program, without a loss."""
        call = self.call()
        return call, Program.of(call, False)


def bind(model: Any, x: Any, y: Any = None) -> BoundModel:
    """Return a model bound to the shapes of its data; the same object for the same model and shapes.

    ``y``: the target, if the model takes it.
    """
    model = model.model if isinstance(model, BoundModel) else model
    x = np.asarray(x) if isinstance(x, list) and not any(hasattr(leaf, "shape") for leaf in leaves_of(x)) else x
    shapes = map_leaves(shape_of, x), map_leaves(shape_of, y)
    key = signature(shapes)
    is_lazy = any(not isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves_of(x))
    try:
        reference = weakref.ref(model)
    except TypeError:
        is_lazy = True
    if is_lazy:  # the result may outlive the user's name for the model
        return BoundModel(lambda: model, *shapes)
    number = id(model)
    if number not in _bound or _bound[number][0]() is not model:
        weakref.finalize(model, _bound.pop, number, None)
        _bound[number] = (reference, {})
    by_shapes = _bound[number][1]
    if key not in by_shapes:
        by_shapes[key] = BoundModel(_dereferenced(reference), *shapes)
    return by_shapes[key]


def _dereferenced(reference: weakref.ref[Any]) -> Callable[[], Any]:
    def model() -> Any:
        found = reference()
        if found is None:
            raise RnnlensError("The model of this result does not exist any more.")
        return found

    return model


def with_shapes(model: Any) -> BoundModel:
    """Return a model that knows the shapes of its data; raise InputError for one that does not."""
    if isinstance(model, BoundModel):
        return model
    if isinstance(model, JaxModel) and model.example is not None:
        return bind(model, model.example)
    name = short_repr(model.source if isinstance(model, JaxModel) else model)
    raise InputError(
        "The recurrent layers of a function of JAX exist only for data of some shape.",
        got=name,
        expected="an example of the data",
        hint="rl.jax.model(model, example=x); rl.layers takes the data: rl.layers(model, x)",
    )


# Facts that need no run.


def describe(model: Any) -> list[LayerInfo]:
    """Return the recurrent layers of a model at the shapes that it is bound to."""
    program = with_shapes(model).program
    program.refuse_without_layers()
    infos: dict[str, LayerInfo] = {}
    for layer in program.layers:
        infos.setdefault(
            layer.base,
            LayerInfo(
                layer.base,
                layer.loop.equation.primitive.name,
                layer.kind,
                layer.sizes[0],
                "backward" if layer.is_backward else "forward",
                True,
                masked=layer.cell is not None and layer.cell.mask is not None,
                states=layer.state_names if layer.cell is None else (),
            ),
        )
    return list(infos.values())


def weights(model: Any) -> Mapping[str, LayerWeights]:
    """Return copies of a model's weights: of known cells in the layout of rnnlens, others by their paths."""
    call, program = with_shapes(model).opened_program()
    values, trainable = call.opened.values, call.opened.trainable
    layers: dict[str, LayerWeights] = {}
    known = {layer.base: layer for layer in program.layers if layer.cell is not None}
    for name, places in weight_places(program).items():
        if name in known:
            continue
        arrays = {key: np.array(values[i]) for key, i in places.items() if _is_number(values[i])}
        if arrays:
            changed = {key: trainable[places[key]] for key in arrays}
            fixed = frozenset(key for key, is_changed in changed.items() if not is_changed)
            layers[name] = LayerWeights(arrays, changed, statistics=fixed)
    for name, layer in known.items():
        cell: Cell = program.cell_of(layer, values)
        arrays = dict(cell.weights())
        layers[name] = LayerWeights(arrays, dict.fromkeys(arrays, True), {"forward": cell})
    return layers


def _is_number(value: Any) -> bool:
    return not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)


def _unchanged(gradient: Array) -> Array:
    return gradient


class JaxFacts(ModelFacts):
    """Facts about a model of JAX that need no run."""

    framework, compiles = "jax", True

    @cached_property
    def submodules(self) -> Mapping[str, Submodule]:  # type: ignore[override]
        """Recurrent layers: a program has no other layers."""
        return {info.name: Submodule() for info in describe(self.model)}

    @property
    def provenance(self) -> Mapping[str, str]:
        """Library and version, engine, dtype and device."""
        opened = open_model(source_of(self.model), training=False)
        floats = [v for v in opened.values if jax.numpy.issubdtype(v.dtype, jax.numpy.inexact)]
        package = {"nnx": "flax", "linen": "flax"}.get(opened.library, opened.library)
        version = f"jax {jax.__version__}"
        has_package = opened.library != "function"
        return {
            "framework": f"{package} {getattr(sys.modules.get(package), '__version__', '')}"
            if has_package
            else version,
            "engine": version,
            "adapter": "jax",
            "dtype": str(floats[0].dtype) if floats else "",
            "device": f"{jax.devices()[0].platform}:{jax.devices()[0].id}",
        }

    @cached_property
    def _program(self) -> Program:
        return with_shapes(self.model).program

    def weight_location(self, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Return the parameter behind a weight, or the name of a known cell's weight in a reference run."""
        program = self._program
        known = next((other for other in program.layers if other.base == layer and other.cell is not None), None)
        if known is not None:
            if program.gradient_places(known, key) is None:
                return None
            return WeightLocation(f"{layer}/{key}", _unchanged, tied=program.is_tied(known))
        place = weight_places(program).get(layer, {}).get(key)
        return None if place is None else WeightLocation(program.call.opened.weight_names[place], _unchanged)


def owns(model: Any) -> bool:
    """Return whether a model is a module of NNX or Equinox, or was made by ``rl.jax.model``."""
    return isinstance(model, (BoundModel, JaxModel)) or library_of(model) in ("nnx", "equinox")


def source_of(model: Any) -> Any:
    """Return the user's model, of one that knows the shapes of its data or by itself."""
    return model.model if isinstance(model, BoundModel) else model
