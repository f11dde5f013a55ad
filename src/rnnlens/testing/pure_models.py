"""A cell, layer or model of torch, Keras or JAX as a function of its weights and data, for :func:`rnnlens.verify`."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..adapters.registry import adapter_of
from ..errors import InputError, UnsupportedError, short_repr
from .frameworks import Runner, runner

#: Function of a model that is called ``(x, state, arguments)``.
Body = Callable[[Callable[[Any, Any, Mapping[str, Any]], Any]], Any]


@dataclass(frozen=True)
class PureModel:
    """A model as ``run(dtype, weights, body)``, which changes nothing of the user's.

    ``body`` is called once with a function ``(x, state, arguments)``, the model with these weights, and its result is
    returned. ``weights``: float arrays by name. ``wide``: a context in which the framework computes in float64,
    or None if the model has only its own dtype. ``state_first``: a step returns its state before its output, as in JAX.
    ``runs``: the model's runs so far, by the shape of the input and dtype.
    """

    name: str
    runner: Runner
    weights: dict[str, Any]
    run: Callable[[str, Mapping[str, Any], Body], Any]
    wide: Callable[[], AbstractContextManager[Any]] | None = nullcontext
    state_first: bool = False
    runs: dict[Any, Any] = field(default_factory=dict)


def open_pure(model: Any, *, step: bool) -> PureModel:
    """Return a model as a function of its weights and data.

    Raises
    ------
    InputError
        For an object that is no model.
    UnsupportedError
        For a model of Keras 2, and for one that cannot be copied.
    """
    adapter = adapter_of(model)
    family = "" if adapter is None else type(adapter).__module__.split(".")[2]
    if family == "keras":
        return _open_keras(model, step)
    if family == "torch":
        return _open_torch(model)
    if family == "jax":
        return _open_jax(model, step)
    raise InputError(
        "verify takes a scan function with the name of its recurrence, or a model with an example input.",
        got=short_repr(model),
        expected="a torch module, a Keras layer or model, a module of JAX, or rl.jax.model(function, params)",
    )


def _open_torch(model: Any) -> PureModel:
    import torch

    copies: dict[str, Any] = {}

    class Body(torch.nn.Module):  # type: ignore[misc]
        """The function of a module as a module, so that weights are substituted once for all its calls."""

        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, body: Any) -> Any:
            def call(x: Any, state: Any, arguments: Mapping[str, Any]) -> Any:
                return self.module(*((x,) if state is None else (x, state)), **arguments)

            return body(call)

    def run(dtype: str, weights: Mapping[str, Any], body: Any) -> Any:
        if dtype not in copies:
            copies[dtype] = Body(_copied(model).to(getattr(torch, dtype)).eval())
        buffers = {name: value.clone() for name, value in copies[dtype].named_buffers()}
        tensors = {f"module.{name}": value for name, value in weights.items()}
        return torch.func.functional_call(copies[dtype], {**buffers, **tensors}, (body,))

    device = next((value.device for value in model.parameters()), "cpu")
    torch_runner = runner("torch", device)
    kept = {name: value for name, value in model.named_parameters() if value.is_floating_point() or value.is_complex()}
    weights = {name: torch_runner.array(value) for name, value in kept.items()}
    return PureModel(type(model).__name__, torch_runner, weights, run)


def _copied(model: Any) -> Any:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise UnsupportedError(
            "verify runs a copy of the module, and this one cannot be copied.",
            got=f"{type(error).__name__}: {error}",
            hint="detach tensors that the module keeps as attributes, or verify the part without them",
        ) from error


def _open_keras(model: Any, step: bool) -> PureModel:
    import keras

    if not hasattr(model, "stateless_call"):
        hint = "build the layer with keras instead of tf_keras"
        raise UnsupportedError("verify reads layers of Keras 3.", got=short_repr(model), hint=hint)
    keras_runner = runner(keras.config.backend())
    if not model.built:
        raise InputError("The layer has no weights yet.", got=short_repr(model), hint="call it once: layer(x)")
    trained, fixed = model.trainable_variables, model.non_trainable_variables
    names = [getattr(variable, "path", variable.name) for variable in trained]

    def run(_: str, weights: Mapping[str, Any], body: Any) -> Any:
        def call(x: Any, state: Any, arguments: Mapping[str, Any]) -> Any:
            named = {**arguments, **({} if step or state is None else {"initial_state": state})}
            values = [weights[name] for name in names], [variable.value for variable in fixed]
            return model.stateless_call(*values, *((x, state) if step else (x,)), **named)[0]

        return body(call)

    weights = {name: keras_runner.array(variable.value) for name, variable in zip(names, trained, strict=True)}
    wide = nullcontext if model.compute_dtype == "float64" else None
    return PureModel(type(model).__name__, keras_runner, weights, run, wide)


def _open_jax(model: Any, step: bool) -> PureModel:
    import jax

    models = importlib.import_module("rnnlens.adapters.jax.models")  # the command line loads no JAX
    opened, jax_runner = models.open_model(model, training=False), runner("jax")
    kept = dict(zip(opened.weight_names, opened.values, strict=True))
    floating = {name: v for name, v in kept.items() if jax.numpy.issubdtype(v.dtype, jax.numpy.inexact)}
    weights = {name: jax_runner.array(value) for name, value in floating.items()}

    def run(_: str, given: Mapping[str, Any], body: Any) -> Any:
        def call(x: Any, state: Any, arguments: Mapping[str, Any]) -> Any:
            values = [given.get(name, value) for name, value in kept.items()]
            data = (x,) if state is None else (state, x) if step else (x, state)
            return opened.apply(values, *data, **arguments)

        return body(call)

    name = type(getattr(model, "source", model)).__name__
    return PureModel(name, jax_runner, weights, run, lambda: jax.enable_x64(True), state_first=True)


def as_array(value: Any) -> Any:
    """Return data of any framework as an array of float64, complex128 or integers."""
    if hasattr(value, "detach"):
        return runner("torch").array(value)
    value = np.asarray(value)
    if np.iscomplexobj(value):
        return value.astype(np.complex128)
    return value if np.issubdtype(value.dtype, np.integer) or value.dtype == bool else value.astype(np.float64)
