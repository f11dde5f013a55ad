"""Inputs: check the user's batch against the model before a run, and convert it to tensors as ``fit`` does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...arguments import as_numpy
from ...autodiff.tensors import dtype_name, to_numpy
from ...errors import InputError
from ...typing import Array
from ..protocol import Batch
from .dialect import Dialect, dialect_of


def prepare(model: Any, batch: Batch) -> dict[str, Any]:
    """Return x, y, sample_weight and initial_state as tensors, or raise InputError if they do not fit the model."""
    keras = dialect_of(model)
    x = _as_arrays(keras, batch.x, "x")
    _check_shapes(model, x)
    count = keras.tree.flatten(x)[0].shape[0]
    y, weight = targets(model, batch, count)
    states = {
        name: [_as_array(keras, state, f"initial_state[{name!r}]") for state in keras.tree.flatten(layer_states)]
        for name, layer_states in (batch.initial_state or {}).items()
    }
    for name, layer_states in states.items():
        _check_count(keras, f"initial_state[{name!r}]", layer_states, count)
    initial_state = _as_tensors(model, states) if states else None
    return {"x": _as_tensors(model, x), "y": y, "sample_weight": weight, "initial_state": initial_state}


def targets(model: Any, batch: Batch, count: int) -> tuple[Any, Any]:
    """Return the targets and sample weights of ``count`` samples as tensors, after checking them."""
    keras = dialect_of(model)
    y = None if batch.y is None else _as_arrays(keras, batch.y, "y")
    weight = _sample_weight(model, batch, y)
    for name, value in (("y", y), ("sample_weight", weight)):
        _check_count(keras, name, value, count)
    return _as_tensors(model, y), _as_tensors(model, weight)


def _as_tensors(model: Any, tree: Any) -> Any:
    """Convert a tree of arrays to tensors of the engine, floats in the dtype of the model."""
    keras = dialect_of(model)
    float_dtype = "float64" if getattr(model, "compute_dtype", "") == "float64" else keras.floatx()

    def as_tensor(leaf: Any) -> Any:
        if leaf is None:
            return None
        # Integers have the default dtype of the engine: JAX warns if int64 is requested while it is disabled.
        dtype = float_dtype if dtype_name(leaf) in ("float32", "float64") else None
        return keras.ops.convert_to_tensor(keras.engine.own_copy(leaf), dtype=dtype)

    return keras.tree.map_structure(as_tensor, tree)


def _as_arrays(keras: Dialect, value: Any, name: str) -> Any:
    """Convert lists of numbers to one array; keep lists, tuples and dicts of arrays."""
    if isinstance(value, dict):
        return {key: _as_arrays(keras, item, f"{name}[{key!r}]") for key, item in value.items()}
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and any(hasattr(item, "shape") for item in value):
        return type(value)(_as_arrays(keras, item, f"{name}[{i}]") for i, item in enumerate(value))
    return _as_array(keras, value, name)


def _as_array(keras: Dialect, value: Any, name: str) -> Any:
    if keras.ops.is_tensor(value):
        return value  # also of strings, for a layer that looks words up
    array = as_numpy(value)
    if array.dtype.kind not in "fiubc":
        raise InputError(
            f"{name} is not numeric.",
            got=f"dtype {array.dtype}",
            expected="numbers",
            hint="encode text as integer ids first, for example with keras.layers.TextVectorization",
        )
    return array


def _check_shapes(model: Any, x: Any) -> None:
    keras = dialect_of(model)
    leaves = keras.tree.flatten(_in_model_order(model, x))
    expected = _expected_shapes(model)
    for i, leaf in enumerate(leaves):
        name = "x" if len(leaves) == 1 else f"x[{i}]"
        if leaf is None:
            expected_text, hint = "an array for every input", _function_that_fills(x)
            raise InputError(f"{name} is None.", got="None among arrays", expected=expected_text, hint=hint)
        shape = tuple(leaf.shape)
        if not shape:
            raise InputError(f"{name} is a single number.", got="shape ()", expected="(sample, time, feature)")
        if 0 in shape:
            empty_axes = {
                0: ("Batch is empty.", "at least 1 sample"),
                1: ("Sequence is empty.", "at least 1 time step"),
            }
            other_axis = "An axis of the data is empty.", "no axis of length 0"
            problem, minimum = empty_axes.get(shape.index(0), other_axis)
            hint = f"leave out a batch without samples: if len({name}): ..." if shape[0] == 0 else None
            raise InputError(problem, got=f"{name} of shape {shape}", expected=minimum, hint=hint)
        if expected is not None and len(expected) == len(leaves):
            _check_shape(name, shape, expected[i])
    if expected is not None and getattr(model, "inputs", None) and len(expected) != len(leaves):
        raise InputError(
            "The number of inputs does not match the model.",
            got=f"{len(leaves)} array(s)",
            expected=f"{len(expected)}, of shapes {', '.join(map(_shape_in_words, expected))}",
            hint="pass the inputs as a list, a tuple or a dict of arrays",
        )


def _function_that_fills(x: Any) -> str | None:
    """Return what to type for a model of the arrays alone: a function that puts None in its places; None if nested."""
    values = list(x.values()) if isinstance(x, dict) else x if isinstance(x, list | tuple) else [None]
    if any(isinstance(value, dict | list | tuple) for value in values) or all(value is None for value in values):
        return None
    count = sum(value is not None for value in values)
    names = ["x"] if count == 1 else [f"x{i}" for i in range(count)]
    remaining = iter(names)
    texts = ["None" if value is None else next(remaining) for value in values]
    if isinstance(x, dict):
        inputs = "{" + ", ".join(f"{key!r}: {text}" for key, text in zip(x, texts, strict=True)) + "}"
    else:
        inputs = f"({', '.join(texts)})" if isinstance(x, tuple) else f"[{', '.join(texts)}]"
    parameters = ", ".join(names)
    data = names[0] if count == 1 else f"[{parameters}]"
    return f"filled = rl.keras.model(lambda {parameters}: model({inputs}), model), with {data} as its data"


def _in_model_order(model: Any, x: Any) -> Any:
    """Return inputs by name as a list in the order of the model; return any other ``x`` unchanged."""
    names = [getattr(tensor, "name", None) for tensor in getattr(model, "inputs", None) or ()]
    is_listed = not isinstance(dialect_of(model).graph_of(model)[0], dict)
    return [x[name] for name in names] if isinstance(x, dict) and is_listed and set(x) == set(names) else x


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int | None, ...]) -> None:
    """Raise InputError if ``shape`` differs from ``expected``, in which None is any length."""
    if len(shape) == len(expected) - 1 and expected[-1] == 1:
        return  # Keras adds the last axis itself
    if len(shape) == len(expected) + 1 and shape[-1] == 1:
        return
    differing = [
        axis for axis, (size, bound) in enumerate(zip(shape, expected, strict=False)) if bound not in (None, size)
    ]
    if len(shape) == len(expected) and not differing:
        return
    mismatch = (
        "rank" if len(shape) != len(expected) else "feature count" if differing[-1] == len(shape) - 1 else "shape"
    )
    hint = None
    if len(shape) == len(expected) and differing == [0]:
        hint = "a stateful layer keeps one state per sample of its batch"
    elif mismatch == "feature count" and len(shape) == 3:
        turned = shape[1] == expected[-1]
        hint = f"{name}.swapaxes(1, 2)" if turned else f"{name} with the {expected[-1]} features of the training"
    raise InputError(
        f"The {mismatch} of {name} does not match the model.",
        got=f"{name} of shape {shape}",
        expected=_shape_in_words(expected),
        hint=hint,
    )


def _shape_in_words(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"


def _expected_shapes(model: Any) -> list[tuple[int | None, ...]] | None:
    """Return the shape of each input, with None for each axis of free length; None if no shape is known.

    A model stores the batch shape on which it was built but accepts others. The batch size is fixed only if a layer is
    stateful; the number of steps only if the model's ``input_spec`` contains it.
    """
    keras = dialect_of(model)
    inputs = getattr(model, "inputs", None) if isinstance(model, keras.Model) else None
    if not inputs:
        shape = keras.build_shape(model)
        is_shape = isinstance(shape, (tuple, list)) and all(size is None or isinstance(size, int) for size in shape)
        return [_rank_and_features(tuple(shape))] if is_shape and len(shape) >= 2 else None
    shapes = [tuple(tensor.shape) for tensor in inputs]
    specs = keras.tree.flatten(getattr(model, "input_spec", None))
    if len(specs) == len(shapes) and all(spec is not None and spec.shape is not None for spec in specs):
        expected = [tuple(spec.shape) for spec in specs]
    else:
        expected = [_rank_and_features(shape) for shape in shapes]
    if any(getattr(layer, "stateful", False) for layer in model._flatten_layers()):
        expected = [(shape[0], *expected_shape[1:]) for shape, expected_shape in zip(shapes, expected, strict=True)]
    return expected


def _rank_and_features(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return a shape in which only the last axis is fixed. With two axes the last may be time, so none is fixed."""
    return (*([None] * (len(shape) - 1)), shape[-1] if len(shape) > 2 else None)


def _check_count(keras: Dialect, name: str, value: Any, count: int) -> None:
    for leaf in keras.tree.flatten(value):
        if leaf is not None and (not leaf.shape or leaf.shape[0] != count):
            raise InputError(
                f"{name} has another number of samples than x.",
                got=f"{name} of shape {tuple(leaf.shape)}",
                expected=f"{count} samples",
                hint="x and y of the same samples, such as x[:n], y[:n]",
            )


def _sample_weight(model: Any, batch: Batch, y: Any) -> Any:
    keras = dialect_of(model)
    if batch.class_weight is None:
        return None if batch.sample_weight is None else _as_arrays(keras, batch.sample_weight, "sample_weight")
    if batch.sample_weight is not None:
        raise InputError("Both class_weight and sample_weight were given.", hint="multiply them into one")
    if y is None or keras.tree.is_nested(y):
        raise InputError("class_weight needs one y.", got="no y" if y is None else "several")
    labels = _labels(np.asarray(to_numpy(y)), model)
    weight = np.ones(labels.shape, dtype=keras.floatx())
    for label, value in batch.class_weight.items():
        weight[labels == int(label)] = value
    return weight


def _labels(y: Array, model: Any) -> Array:
    """Return the class of each sample or step: ``y`` itself, or the argmax of its one-hot vectors."""
    outputs = getattr(model, "outputs", None) if isinstance(model, dialect_of(model).Model) else None
    rank = len(outputs[0].shape) if outputs and len(outputs) == 1 else None  # of the only output, if it is known
    by_step = y.ndim > 1 and y.ndim + 1 == rank
    if y.ndim > 1 and y.shape[-1] == 1 and not by_step:
        y = y[..., 0]
    elif y.ndim > 1 and not by_step:
        one_hot = np.isin(y, (0, 1)).all() and (y.sum(axis=-1) == 1).all()
        if not one_hot and rank is not None:
            raise InputError(
                "class_weight needs class labels.",
                got=f"y of shape {y.shape} that is not one-hot",
                expected="one whole number per sample or step, or one-hot vectors",
                hint="sample_weight=",
            )
        y = y.argmax(axis=-1) if one_hot else y
    if not np.array_equal(y, np.round(y)):
        raise InputError("class_weight needs class labels.", got="y with fractions", hint="sample_weight=")
    return y


def input_order(keras: Dialect, x: Any) -> list[int]:
    """Return, for each input in the user's order, its index in Keras' order, which sorts dicts by key."""
    counter = iter(range(len(keras.tree.flatten(x))))
    user_numbers: list[int] = keras.tree.flatten(_numbered(x, counter))
    return [user_numbers.index(i) for i in range(len(user_numbers))]


def by_key(tree: Any) -> Any:
    """Return the same nested structure with the entries of each dict sorted by key, as Keras flattens them."""
    if isinstance(tree, dict):
        return {key: by_key(tree[key]) for key in sorted(tree)}
    if isinstance(tree, list) or type(tree) is tuple:
        return type(tree)(by_key(item) for item in tree)
    return tree


def output_names(model: Any) -> tuple[str, ...]:
    """Return the keys of a functional model's dict of outputs, in the order of ports; () for any other model."""
    keras = dialect_of(model)
    if not isinstance(model, keras.Functional) or type(model).call is not keras.Functional.call:
        return ()
    _, outputs = keras.graph_of(model)
    if not isinstance(outputs, dict):
        return ()
    return tuple(".".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(by_key(outputs)))


def _numbered(tree: Any, counter: Iterator[int]) -> Any:
    if isinstance(tree, dict):
        return {key: _numbered(item, counter) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [_numbered(item, counter) for item in tree]
    return next(counter)
