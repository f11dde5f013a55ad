"""The user's data as arguments of a function of JAX, and the user's loss as a function of outputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...arguments import as_numpy
from ...errors import InputError, UnsupportedError, raised_by, short_repr
from ...typing import leaves_of, map_leaves
from ..protocol import Batch
from ..shared.call_errors import explain_loss
from .models import JaxModel


@dataclass(frozen=True)
class Data:
    """Nested data as a list of arrays, and the structure to nest them again."""

    leaves: list[Any]
    #: The nested data with shapes in the place of arrays.
    template: Any

    @classmethod
    def of(cls, value: Any, name: str) -> Data:
        """Convert nested data to arrays of JAX."""
        if isinstance(value, list) and value and all(isinstance(row, (int, float, list)) for row in value):
            value = np.asarray(value)
        arrays = map_leaves(lambda leaf: _as_array(leaf, name), value)
        return cls(leaves_of(arrays), map_leaves(shape_of, arrays))

    def nested(self, leaves: Sequence[Any]) -> Any:
        """Return other leaves nested as these."""
        return nest(leaves, self.template)


def nest(leaves: Sequence[Any], template: Any) -> Any:
    """Return leaves in the places of those of a template."""
    remaining = iter(leaves)
    return map_leaves(lambda _: next(remaining), template)


def shape_of(array: Any) -> Any:
    """Return shape and dtype of an array, as JAX traces with them."""
    return jax.ShapeDtypeStruct(tuple(array.shape), array.dtype)


def _as_array(leaf: Any, name: str) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    array = as_numpy(leaf)
    if array.dtype.kind not in "fiubc":
        raise InputError(f"{name} is not numeric.", got=f"dtype {array.dtype}", expected="numbers: an array")
    if 0 in array.shape:
        expected = "at least 1 sample and at least 1 time step"
        raise InputError(f"{name} is empty.", got=f"shape {array.shape}", expected=expected)
    return jax.device_put(array, may_alias=False)  # jnp.asarray compiles a program for each shape


def call(apply: Callable[..., Any], x: Any, parameters: Sequence[str] | None) -> Any:
    """Call a model with its data: a tuple as positional arguments, a dict by name if its keys are arguments."""
    if isinstance(x, Mapping) and parameters is not None and set(x) <= set(parameters) and x:
        return apply(**x)
    if isinstance(x, tuple | list) and not hasattr(x, "_fields") and (parameters is None or len(parameters) > 1):
        return apply(*x)
    return apply(x)


def data_parameters(model: Any) -> tuple[str, ...] | None:
    """Return the names of the data arguments of a model; None if they are not known or any number is taken."""
    source = model.source if isinstance(model, JaxModel) else model
    is_module = any(cls.__module__.startswith(("flax.", "equinox")) for cls in type(source).__mro__)
    function = type(source).__call__ if is_module else source
    if not is_module and hasattr(source, "apply"):  # a Haiku transform
        return None
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]  # without self, or the parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


def _loss_of_name(name: str) -> str:
    """Return the function that the name of a loss, as in Keras or torch, stands for; else the mean squared error."""
    name = name.lower().replace("_", "").replace(" ", "")
    arguments = "loss=lambda output, target: "
    if "binary" in name or name.startswith("bce"):
        return f"{arguments}optax.sigmoid_binary_cross_entropy(output, target).mean(), of logits"
    if name == "categoricalcrossentropy":
        return f"{arguments}optax.softmax_cross_entropy(output, target).mean(), of logits and one-hot targets"
    if "cross" in name or name == "nllloss":
        integers = "optax.softmax_cross_entropy_with_integer_labels(output, target).mean()"
        return f"{arguments}{integers}, of logits and classes"
    if name in ("mae", "l1", "l1loss", "meanabsoluteerror"):
        return f"{arguments}abs(output - target).mean()"
    return f"{arguments}((output - target) ** 2).mean()"


def refuse_options(model: Any, batch: Batch) -> None:
    """Raise UnsupportedError for options of a batch that a model of JAX cannot honour."""
    if batch.class_weight is not None:
        hint = "sample_weight=, and a loss with a third argument: loss(output, target, weight)"
        raise UnsupportedError("class_weight= is not known for models of JAX.", hint=hint)
    if isinstance(batch.loss, str):
        raise InputError(
            "A loss for a model of JAX is a function.",
            got=f"loss={batch.loss!r}",
            expected="loss(output, target), which returns a scalar",
            hint=_loss_of_name(batch.loss),
        )
    if batch.loss is not None and not callable(batch.loss):
        raise InputError("The loss is not callable.", got=short_repr(batch.loss), expected="loss(output, target)")


def missing_loss() -> InputError:
    """Return the error for a gradient of the loss in a call that has none."""
    return InputError(
        "There is no loss to differentiate.",
        expected="y and loss=, or y alone for a model that takes the target and returns the loss",
        hint="y, loss=lambda output, target: ((output - target) ** 2).mean()",
    )


def loss_value(loss: Callable[..., Any], outputs: Any, batch: Batch, target: Any, weight: Any) -> Any:
    """Evaluate the user's loss of outputs; with sample weights they are its third argument."""
    arguments = [outputs, *([] if batch.y is None else [target]), *([] if batch.sample_weight is None else [weight])]
    with raised_by("Your loss", functools.partial(explain_loss, loss, outputs, batch.y, output_first=True)):
        value = loss(*arguments)
    return scalar(value, getattr(loss, "__name__", type(loss).__name__))


def scalar(value: Any, name: str) -> Any:
    """Return a loss as an array without axes; raise InputError for any other value."""
    leaves = leaves_of(value)
    first = leaves[0] if leaves else None
    if len(leaves) != 1 or jnp.size(first) != 1 or not jnp.issubdtype(jnp.result_type(first), jnp.floating):
        raise InputError(
            "The loss is not a scalar.",
            got=f"{name} returned {short_repr(first if len(leaves) == 1 else value)}",
            expected="an array with one float",
            hint="reduce it: .mean() or .sum()",
        )
    return jnp.reshape(first, ())
