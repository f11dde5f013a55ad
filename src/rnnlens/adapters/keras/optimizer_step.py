"""One step of a copy of the user's optimizer on copies of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import UnsupportedError
from ...typing import Array
from ..protocol import WeightChange
from .dialect import dialect_of
from .reference_run import names_of


def optimizer_step(
    model: Any, optimizer: Any, gradients: Mapping[str, Array | None]
) -> Mapping[str, WeightChange] | None:
    """Step a copy of the optimizer, by default the compiled one: see :meth:`.protocol.ModelFacts.optimizer_step`."""
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if optimizer is None:
        return None
    keras, names = dialect_of(model), names_of(model)
    trained = {names[id(variable)]: variable for variable in model.trainable_variables}
    before = {name: np.array(keras.value_of(variable)) for name, variable in trained.items()}
    try:
        copies = {name: keras.Variable(value) for name, value in before.items()}
        with warnings.catch_warnings():  # Keras' own conversion of the learning rate raises one in NumPy
            warnings.simplefilter("ignore", DeprecationWarning)
            config = optimizer.get_config()
        copied_optimizer = type(optimizer).from_config(config)
        copied_optimizer.build(list(copies.values()))
        for variable, copied_variable in zip(optimizer.variables, copied_optimizer.variables, strict=False):
            if tuple(variable.shape) == tuple(copied_variable.shape):  # the moments are there after the first step only
                copied_variable.assign(keras.value_of(variable))
        arrays = {name: before[name] * 0 if gradients.get(name) is None else gradients[name] for name in copies}
        steps = [(keras.ops.convert_to_tensor(arrays[name]), variable) for name, variable in copies.items()]
        copied_optimizer.apply_gradients(steps)
    except Exception as error:  # of an optimizer of the user's own
        got = f"{type(optimizer).__name__}: {error}"
        raise UnsupportedError("This optimizer cannot be copied and stepped.", got=got, hint="leave it out") from error
    return {name: WeightChange(before[name], np.array(keras.value_of(copy))) for name, copy in copies.items()}
