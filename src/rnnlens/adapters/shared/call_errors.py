"""Explains exceptions of a user's loss or forward pass by the shapes, dtypes and values of what it was called with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...arguments import as_numpy
from ...autodiff.tensors import engine_of
from ...errors import Explanation, shape_of

#: Parameter names by which a loss shows what it takes first.
_TARGET_NAMES = re.compile(r"(y|y_?true|targets?|labels?|truth)")
_OUTPUT_NAMES = re.compile(r"(y_?pred|y_?hat|outputs?|out|pred\w*|logits?)")

#: Exceptions of faults within the user's function, whatever it is called with.
_OWN_BUGS = (AttributeError, NameError, KeyError, ArithmeticError, ImportError, AssertionError)


def explain_loss(
    loss: Any, outputs: Any, y: Any, error: Exception, *, output_first: bool, x: Any = None
) -> Explanation:
    """Explain an exception of ``loss`` of the user's ``outputs`` and target ``y``, for the input ``x`` if it is known.

    ``output_first`` is the framework's order of the loss's arguments: (output, target), or (target, output).
    """
    got = f"output {_described(outputs)}, y {_described(y)}"
    for rule in (_wrong_signature, _nested_output, _other_device):
        if explanation := rule(error, loss, outputs, y, output_first):
            return explanation._replace(got=got)
    output_shape, target_shape = shape_of(outputs), shape_of(y)
    if output_shape and target_shape and not isinstance(error, _OWN_BUGS):
        if explanation := _time_first(x, output_shape[0], target_shape[0]):
            return explanation._replace(got=f"x {_described(x)}, {got}")
        explanation = _other_shape(error, outputs, y, output_shape, target_shape)
        if explanation is not None:
            return explanation._replace(got=got)
    call = "loss(model(x), y)" if output_first else "loss(y, model(x))"
    return Explanation("", got=got, hint=f"{call} by itself raises the same; the first traceback shows its line")


def _wrong_signature(error: Exception, loss: Any, outputs: Any, y: Any, output_first: bool) -> Explanation | None:
    """Explain a loss of one argument, and one with output and target in the order of another framework."""
    function = getattr(loss, "forward", loss) if not inspect.isfunction(loss) else loss
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    order = "loss(output, target)" if output_first else "loss(target, output)"
    if isinstance(error, TypeError) and len(names) == 1 and "positional argument" in str(error):
        hint = "leave out y, or write lambda " + ("output, y: ..." if output_first else "y, output: ...")
        return Explanation("y was given, and this loss takes the output alone", expected=order, hint=hint)
    if len(names) < 2:
        return None
    first, second = names[:2]
    required = [p.name for p in parameters if p.default is p.empty and p.name in names]
    if isinstance(error, TypeError) and len(required) > 2 and "missing" in str(error):
        problem = f"it takes ({', '.join(required)}), and is called with the output and the target"
        arguments = "output, target" if output_first else "target, output"
        hint = f"loss=lambda {arguments}: ((output - target) ** 2).mean(), with the formula of yours"
        return Explanation(problem, expected=order, hint=hint)
    named = (_TARGET_NAMES, _OUTPUT_NAMES) if output_first else (_OUTPUT_NAMES, _TARGET_NAMES)
    # Optax refuses whole numbers in the place of the output.
    refused_target = "subdtype" in str(error) and "floating" in str(error) and "int" in str(getattr(y, "dtype", ""))
    if refused_target or (named[0].fullmatch(first.lower()) and named[1].fullmatch(second.lower())):
        name = getattr(loss, "__name__", type(loss).__name__)
        own = "your_loss" if name == "<lambda>" else name
        arguments = "output, target" if output_first else "target, output"
        swapped = "target, output" if output_first else "output, target"
        hint = f"loss=lambda {arguments}: {own}({swapped}), where {own} is the one that you passed"
        problem = f"it is called in the framework's order, and its parameters are named ({first}, {second})"
        return Explanation(problem, expected=order, hint=hint)
    return None


def _nested_output(error: Exception, loss: Any, outputs: Any, y: Any, output_first: bool) -> Explanation | None:
    """Explain a loss of one tensor for a model that returns several."""
    if shape_of(outputs) is not None or not isinstance(outputs, tuple | list | Mapping):
        return None
    if hasattr(outputs, "logits"):
        part = "output.logits"
    elif isinstance(outputs, Mapping):
        part = f"output[{next(iter(outputs), '')!r}]"
    else:
        part = "output[0]"
    kind = type(outputs).__name__
    problem = f"the model returns a {kind}, and the loss gets all of it"
    call = f"lambda output, y: criterion({part}, y)" if output_first else f"lambda y, output: criterion(y, {part})"
    return Explanation(problem, expected="a loss that picks its part", hint=f"loss={call}, where criterion is yours")


def _other_device(error: Exception, loss: Any, outputs: Any, y: Any, output_first: bool) -> Explanation | None:
    """Explain tensors of the loss on another device than the output; y itself is moved to the output's device."""
    device = getattr(outputs, "device", None)
    if device is None or "device" not in str(error).lower():
        return None
    return Explanation(
        "a tensor of the loss is on another device than the model's output",
        expected=f"all tensors on {device}; x and y are moved there",
        hint=f"criterion.to({str(device)!r}), or weight.to(output.device) within the loss",
    )


def _time_first(x: Any, samples: int, targets: int) -> Explanation | None:
    """Explain an output with as many samples as x has steps: the model read x of shape (time, sample, feature)."""
    shape = shape_of(x) or ()
    if len(shape) != 3 or samples == targets or (targets, samples) != shape[:2]:
        return None
    return Explanation(
        f"the model took the {samples} steps of x for samples: its recurrent layer reads time first",
        expected="a layer with batch_first=True, or x of shape (time, sample, feature)",
        hint="batch_first=True where the layer is made, and [:, -1] for its last step; or x.transpose(0, 1)",
    )


def _other_shape(
    error: Exception, outputs: Any, y: Any, output_shape: tuple[int, ...], target_shape: tuple[int, ...]
) -> Explanation | None:
    """Explain a target with another number of samples, another coding of classes, or another dtype than needed."""
    samples, targets = output_shape[0], target_shape[0]
    if samples != targets:
        expected = f"y of {samples} samples"
        hint = f"y[:{samples}]" if targets > samples else f"x[:{targets}]"
        problem = f"y has {targets} samples, and the output {samples}"
        return Explanation(problem, expected=expected, hint=f"{hint}, if both start with the same sample")
    values = as_numpy(y)
    is_whole = values.dtype.kind in "iub" or (values.dtype.kind == "f" and bool((values == np.round(values)).all()))
    is_class_message = bool(re.search(r"out of bounds|out of range", str(error)))
    is_one_hot = is_whole and target_shape == output_shape and bool((values.sum(-1) == 1).all() and (values >= 0).all())
    is_tensor = engine_of(y) == "torch"
    classes = output_shape[-1]
    if output_shape == (*target_shape, 1) and not is_class_message:
        hint = "y.unsqueeze(-1) in place of y" if is_tensor else "numpy.expand_dims(y, -1) in place of y"
        return Explanation("y lacks the last axis of the output", expected=f"y of shape {output_shape}", hint=hint)
    if is_one_hot and len(output_shape) > 1:
        return Explanation(
            "y looks one-hot, and this loss takes the index of the class",
            expected=f"y of shape {output_shape[:-1]}, whole numbers",
            hint="y.argmax(-1) in place of y" if is_tensor else "numpy.argmax(y, -1) in place of y",
        )
    if is_whole and target_shape == (*output_shape[:-1], 1) and classes > 1:
        hint = "y.squeeze(-1) in place of y" if is_tensor else "numpy.squeeze(y, -1) in place of y"
        return Explanation("y has an axis of length 1", expected=f"y of shape {output_shape[:-1]}", hint=hint)
    if not is_whole or target_shape != output_shape[:-1]:
        return None
    if is_class_message or not 0 <= values.min() <= values.max() < classes:
        largest, smallest = int(values.max()), int(values.min())
        counts_from_one = smallest == 1 and largest == classes
        return Explanation(
            f"y has class {largest if largest >= classes else smallest}, and the output {classes} columns",
            expected=f"classes 0 to {classes - 1}",
            hint="y - 1, as classes count from 0" if counts_from_one else f"a last layer with {largest + 1} outputs",
        )
    if "dtype" in str(error) and "Long" in str(error):
        hint = "y.long()" if is_tensor else "y.astype('int64')"
        problem = f"y holds classes as {values.dtype}"
        return Explanation(problem, expected="whole numbers of 64 bits", hint=f"{hint} in place of y")
    if len(output_shape) == 3 and "target size" in str(error):
        return Explanation(
            "this loss takes classes on the second axis of the output",
            expected=f"output of shape {(samples, classes, output_shape[1])}",
            hint="loss=lambda output, y: torch.nn.functional.cross_entropy(output.transpose(1, 2), y)",
        )
    one_hot = (
        f"torch.nn.functional.one_hot(y.long(), {classes}).float()"
        if is_tensor
        else f"numpy.eye({classes}, dtype='float32')[numpy.asarray(y, int)]"
    )
    return Explanation(
        "y holds the index of a class, and this loss compares value by value",
        expected=f"y of shape {output_shape}",
        hint=f"{one_hot} in place of y, or a cross-entropy that takes indices",
    )


def explain_forward(
    x: Any,
    y: Any,
    error: Exception,
    *,
    weights_dtype: str,
    weights_devices: set[str],
    features: int | None,
    arguments: int | None,
) -> Explanation:
    """Explain an exception of a model's forward pass of the input ``x``.

    ``weights_dtype`` and ``weights_devices`` are those of the model's weights, ``features`` the number of features that
    its first recurrent layer takes, if that is known, ``arguments`` how many arguments its forward takes, if not any.
    """
    got, shape = f"x {_described(x)}", shape_of(x)
    hint = "model(x) by itself raises the same; the first traceback shows its line"
    unexplained = Explanation("", got=got, hint=hint)
    if "indices" in str(error) and "embedding" in str(error) and str(getattr(x, "dtype", "")).startswith("torch.float"):
        problem = "x holds floats, and the model looks up integer ids"
        return Explanation(problem, got=got, expected="whole numbers", hint="x.long() in place of x")
    if explanation := _large_id(x, error):
        return explanation._replace(got=got)
    if "meta" in weights_devices:
        hint = "model.to_empty(device='cpu'), then model.load_state_dict(...)"
        problem = "its weights are on the device meta, without values"
        return Explanation(problem, got=got, expected="weights with values", hint=hint)
    if len(weights_devices) > 1 and "device" in str(error).lower():
        devices = " and ".join(sorted(weights_devices))
        problem, expected = f"its weights are on {devices}", "all weights on one device, or moves in forward"
        return Explanation(problem, got=got, expected=expected, hint=f"model.to({min(weights_devices)!r})")
    if shape is None and isinstance(x, Mapping) and len(x) == 1 and isinstance(error, AttributeError | TypeError):
        key = next(iter(x))
        problem, expected = "x is a dict, and the forward takes its tensor", f"x of shape {shape_of(x[key])}"
        return Explanation(problem, got=got, expected=expected, hint=f"x[{key!r}] in place of x")
    shapes = set(map(shape_of, x)) if isinstance(x, list) else set()
    if len(shapes) == 1 and len(x) > 1 and isinstance(error, TypeError):
        problem = "x is a list, and each of its parts is an argument of forward"
        expected = f"one array of shape {(len(x), *(shapes.pop() or ()))}, if they are samples"
        return Explanation(problem, got=got, expected=expected, hint="numpy.stack(x) in place of x")
    if isinstance(x, tuple | list) and isinstance(error, TypeError) and arguments == 1 < len(x):
        problem = f"each part of a {type(x).__name__} is an argument, and the forward takes one"
        expected = f"one argument, here the {type(x).__name__} itself"
        return Explanation(problem, got=got, expected=expected, hint="(x,) in place of x")
    if shape is None:
        return unexplained
    x_dtype = str(x.dtype).rpartition(".")[2]
    if x_dtype.startswith("float") and x_dtype != weights_dtype and weights_dtype.startswith("float"):
        hint = f"x.to(torch.{weights_dtype}), or model.to(torch.{x_dtype})"
        problem = f"x is {x_dtype}, and the weights are {weights_dtype}"
        return Explanation(problem, got=got, expected=f"x of dtype {weights_dtype}", hint=hint)
    if features is None:
        return unexplained
    expected = f"x of shape (sample, time, {features})"
    y_shape = shape_of(y)
    if len(shape) < 3 and y_shape and y_shape[-1] == features and len(y_shape) > len(shape):
        problem = "y has the shape of an input, and x that of a target"
        return Explanation(problem, got=f"{got}, y {_described(y)}", expected=expected, hint="swap x and y")
    if len(shape) == 2 and shape[-1] == features:
        return Explanation(
            "x has two axes, and the model reads (sample, time, feature)",
            got=got,
            expected=expected,
            hint="x[None], if x is one sequence; x[:, None], if each row is a sample of one step",
        )
    if len(shape) == 4:
        axis = next((i for i, size in enumerate(shape) if size == 1), None)
        hint = f"x.squeeze({axis})" if axis is not None else "x.flatten(2), if the last axes are one feature vector"
        return Explanation("x has four axes", got=got, expected=expected, hint=hint)
    if len(shape) == 3 and shape[-1] != features:
        is_turned = shape[1] == features
        hint = "x.transpose(1, 2)" if is_turned else f"x with the {features} features of the training"
        problem = f"x has {shape[-1]} features, and the first recurrent layer takes {features}"
        return Explanation(problem, got=got, expected=expected, hint=hint)
    return unexplained


def _large_id(x: Any, error: Exception) -> Explanation | None:
    """Explain an id that is larger than an embedding has rows, or below 0."""
    if "out of range" not in str(error) and "out of bounds" not in str(error):
        return None
    if shape_of(x) is None or "int" not in str(x.dtype):
        return None
    ids = as_numpy(x)
    smallest, largest = int(ids.min()), int(ids.max())
    expected = "ids from 0 up to the number of rows of the embedding, less 1"
    if smallest < 0:
        return Explanation(f"x has the id {smallest}", expected=expected, hint="ids of the embedding's vocabulary")
    problem = f"x has ids up to {largest}, and the model looks them up in a table of fewer rows"
    hint = f"an embedding of {largest + 1} rows, or x.clip(max=n - 1) for one of n rows"
    return Explanation(problem, expected=expected, hint=hint)


def explain_layers(x: Any, error: Exception) -> Explanation | None:
    """Explain an exception of a Keras model; None if its cause is not known."""
    explanation = _large_id(x, error)
    return None if explanation is None else explanation._replace(got=f"x {_described(x)}")


#: Text of a dot product or a parameter of JAX that does not fit, with the features of the data and of the weights.
_FEATURES_OF_JAX = re.compile(
    r"got \((?P<x>\d+),\) and \((?P<weights>\d+),\)|"
    r"generate shape \((?P<x2>\d+), \d+\), but the existing parameter it received has shape \((?P<weights2>\d+), "
)


def _other_features(x: Any, error: Exception) -> Explanation | None:
    """Explain data of JAX with another number of features than the weights take."""
    shape, match = shape_of(x) or (), _FEATURES_OF_JAX.search(str(error))
    if len(shape) != 3 or match is None:
        return None
    features, expected = (int(match[name] or match[f"{name}2"]) for name in ("x", "weights"))
    if features != shape[-1]:
        return None
    return Explanation(
        f"x has {features} features, and the weights take {expected}",
        expected=f"x of shape (sample, time, {expected})",
        hint="x.swapaxes(1, 2)" if shape[1] == expected else f"x with the {expected} features of the training",
    )


def explain_program(x: Any, y: Any, error: Exception, *, takes_target: bool) -> Explanation:
    """Explain an exception of a model of JAX; ``takes_target`` if it is called with ``y``, as no loss was given."""
    got = f"x {_described(x)}"
    if explanation := _other_features(x, error) or _large_id(x, error):
        return explanation._replace(got=got)
    if type(error).__name__ == "ScopeCollectionNotFound" and 'collection "params"' in str(error):
        expected = "the variables as init returns them"
        hint = 'rl.jax.model(module, {"params": params})'
        return Explanation("the parameters are not under the key 'params'", got=got, expected=expected, hint=hint)
    if takes_target:
        return Explanation(
            "y was given without a loss, so the model is called with x and y",
            got=f"{got}, y {_described(y)}",
            expected="loss=, or a model that takes the target and returns the loss",
            hint="loss=lambda output, target: ((output - target) ** 2).mean()",
        )
    missing = re.search(r"missing \d+ required positional arguments?: '(\w+)'", str(error))
    if isinstance(error, TypeError) and missing:
        return Explanation(
            f"the function takes {missing[1]!r} besides the data",
            got=got,
            expected="a function of the parameters and the data: apply(params, x)",
            hint=f"(x, {missing[1]}) in place of x, or rl.jax.model(lambda params, x: apply(params, x, "
            f"{missing[1]}), params)",
        )
    hint = "the model called on x by itself raises the same; the first traceback shows its line"
    if len(shape_of(x) or ()) == 2 and "float" in str(x.dtype):
        hint = f"x[None], if x is one sequence; else {hint}"
    return Explanation("", got=got, hint=hint)


def _described(value: Any) -> str:
    """Return shape and dtype of an array, or the kind of a container with those of its parts."""
    shape = shape_of(value)
    if shape is not None:
        return f"{shape} {str(getattr(value, 'dtype', '')).rpartition('.')[2]}".rstrip()
    if isinstance(value, tuple | list) and len(value) <= 8:
        return f"{type(value).__name__} of {', '.join(map(_described, value))}"
    if isinstance(value, Mapping) and len(value) <= 8:
        return f"{type(value).__name__} of {', '.join(f'{key}: {_described(part)}' for key, part in value.items())}"
    return type(value).__name__
