"""Converts the user's data to tensors for the model, and raises errors for data that the model cannot take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ... import typing
from ...arguments import as_numpy
from ...errors import Explanation, InputError, raised_by
from ..protocol import Batch
from ..shared.call_errors import explain_forward
from .cells import has_own_forward


class WrongFeaturesError(InputError):
    """Error for a layer that cannot take the axes or features of the value it is called with."""


def device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and floating dtype of a model's first floating parameter or buffer."""
    for tensor in chain(nn.Module.parameters(model), model.buffers()):
        if tensor.is_floating_point():
            return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.get_default_dtype()


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every array in nested values, to the data of packed sequences; return the nested results."""
    return typing.map_leaves(
        lambda leaf: leaf._replace(data=change(leaf.data)) if isinstance(leaf, PackedSequence) else change(leaf), value
    )


def clone_tensors(value: Any) -> Any:
    """Return nested values with copies of all tensors; the copies stay connected in the autograd graph."""
    return map_leaves(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def detach_tensors(value: Any, *, copy: bool = False) -> Any:
    """Return nested values with detached tensors, as copies on request."""
    tensors = map_leaves(value, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    return clone_tensors(tensors) if copy else tensors


def replay_copy(value: Any) -> Any:
    """Return a detached copy for the replay; half precision is widened to float32 for accuracy."""
    value = value.detach()
    if value.dtype in (torch.bfloat16, torch.float16):
        return value.float().contiguous()
    return value.clone(memory_format=torch.contiguous_format)


def as_tensors(data: Any, model: nn.Module, argument_name: str, device: torch.device | None = None) -> Any:
    """Convert the user's arrays to tensors. NumPy floats take the model's dtype, tensors keep theirs.

    They are moved to the model's device, or to ``device``, as a data loader's batches lie on the CPU. A tensor of
    integers with one axis stays: these may be the lengths of packed sequences, which torch needs on the CPU.
    """
    model_device, dtype = device_and_dtype(model)
    device, keeps_lengths = device or model_device, device is None
    is_alone = isinstance(data, Tensor) or len(typing.leaves_of(data)) <= 1

    def to_tensor(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = value.clone() if value.is_inference() else value.detach()
            is_length = keeps_lengths and tensor.dim() == 1 and not tensor.is_floating_point()
            tensor = tensor.to(device) if tensor.device.type == "cpu" and not is_length else tensor
        else:
            array = as_numpy(value)
            kind = array.dtype.kind
            if kind not in "fiubc":
                expected = "numbers: a tensor or an array"
                raise InputError(f"{argument_name} is not numeric.", got=f"dtype {array.dtype}", expected=expected)
            values = np.ascontiguousarray(array).reshape(array.shape)
            tensor = torch.tensor(values, dtype=dtype if kind == "f" else None, device=device)
        if 0 in tensor.shape[: None if is_alone else 2]:  # one of several parts may have no features
            shape, expected = tuple(tensor.shape), "at least 1 sample and at least 1 time step"
            hint = f"leave out a batch without samples: if len({argument_name}): ..." if shape[:1] == (0,) else None
            raise InputError(f"{argument_name} is empty.", got=f"shape {shape}", expected=expected, hint=hint)
        return tensor

    if isinstance(data, (int, float, bool, str)):
        raise InputError(f"{argument_name} is not numeric data.", got=repr(data), expected="a tensor or an array")
    if isinstance(data, list) and data and all(isinstance(row, (int, float, list)) for row in data):
        data = np.asarray(data)
    return map_leaves(data, to_tensor)


def call_model(model: nn.Module, x: Any, batch: Batch | None = None) -> Any:
    """Call ``model(x)``, ``model(*x)`` for a tuple or list, or ``model(**x)`` for a dict.

    A dict, or named tuple, whose keys are no parameters of ``forward`` is its one argument. Tensors are copied, because
    the model may change them. Exceptions of the model are explained by the data of ``batch``, if that is passed.
    """
    x = clone_tensors(x)
    explain = None if batch is None else functools.partial(_explain, model, x, batch.y)
    with raised_by("Your model's forward", explain), _features_explained(explain), ExitStack() as stack:
        for module in nn.Module.modules(model):
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", None) is True:  # of Hugging Face; a cache is only for generation
                config.use_cache = False
                stack.callback(setattr, config, "use_cache", True)
        fields = list(x) if isinstance(x, dict) else getattr(x, "_fields", ())
        if fields and not isinstance(x, PackedSequence):
            parameters = inspect.signature(model.forward).parameters.values()
            spreads = any(p.kind is p.VAR_KEYWORD or p.name in fields for p in parameters)
            required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
            if not spreads and len(required) == 1:
                return model(x)
        if isinstance(x, dict):
            return model(**x)
        if isinstance(x, (tuple, list)) and not isinstance(x, PackedSequence):
            return model(*x)
        return model(x)


@contextmanager
def _features_explained(explain: Callable[[Exception], Explanation | None] | None) -> Iterator[None]:
    """Complete the error of :func:`check_features`, which is of one layer, by what the input of the model lacks."""
    try:
        yield
    except WrongFeaturesError as error:
        explanation = None if explain is None else explain(error)
        if explanation is None or not explanation.problem:
            raise
        layer_error = " ".join(str(error).split())
        raise InputError(
            f"Your model cannot take this input: {explanation.problem}.",
            got=f"{explanation.got}: {layer_error}",
            expected=explanation.expected,
            hint=explanation.hint,
        ) from error


def _explain(model: nn.Module, x: Any, y: Any, error: Exception) -> Explanation | None:
    """Explain an exception of a model's forward by its input and the model's first recurrent layer."""
    recurrent = next((m for m in nn.Module.modules(model) if isinstance(m, (nn.RNNBase, nn.RNNCellBase))), None)
    # An input that a layer below the recurrent one embeds or projects has other features.
    reads_x = recurrent is not None and next(nn.Module.parameters(model), None) is next(
        nn.Module.parameters(recurrent), None
    )
    _, dtype = device_and_dtype(model)
    parameters = inspect.signature(model.forward).parameters.values()
    return explain_forward(
        x,
        y,
        error,
        weights_dtype=str(dtype).rpartition(".")[2],
        weights_devices={str(p.device) for p in nn.Module.parameters(model)},
        features=recurrent.input_size if recurrent is not None and reads_x else None,
        arguments=None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(parameters),
    )


def with_gradient_leaves(x: Any) -> tuple[Any, list[Tensor]]:
    """Make float and complex tensors of an input differentiable; return it, and by leaf the tensor to differentiate by.

    That tensor is 0 for a leaf that is not differentiable.
    """
    sources: list[Tensor] = []

    def to_source(value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            sources.append(torch.zeros(()))
            return value
        sources.append((value.clone() if value.is_inference() else value.detach()).requires_grad_())
        return sources[-1]

    return map_leaves(x, to_source), sources


def check_features(name: str, module: nn.Module, value: Any) -> None:
    """Raise ``InputError`` with the layer's name if a recurrent or linear module cannot take a value."""
    if has_own_forward(module):
        return
    ranks: tuple[int, ...] = ()
    if isinstance(value, PackedSequence):
        value, ranks = value.data, (2,)
    elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        ranks = (2, 3) if isinstance(module, nn.RNNBase) else (1, 2)
    if not isinstance(value, torch.Tensor):
        return
    if ranks and value.dim() not in ranks:
        raise WrongFeaturesError(
            f"Layer {name!r} received data with a wrong number of axes.",
            got=f"shape {tuple(value.shape)}",
            expected=" or ".join(f"{rank} axes" for rank in ranks),
        )
    size = getattr(module, "input_size", getattr(module, "in_features", None))
    if value.dim() and isinstance(size, int) and value.shape[-1] != size:
        raise WrongFeaturesError(
            f"Layer {name!r} received data with a wrong number of features.",
            got=f"shape {tuple(value.shape)}, {value.shape[-1]} features",
            expected=f"{size} features on the last axis",
        )


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors within nested values, in order; of a packed sequence its data."""
    return [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in leaves_of(value)]


def returned_leaves(outputs: Any) -> list[Any]:
    """Return the leaves of what a model returned; of an array of another framework its values, as a tensor."""
    return [
        leaf if isinstance(leaf, (Tensor, PackedSequence)) else torch.tensor(as_numpy(leaf))
        for leaf in typing.leaves_of(outputs)
    ]


def returned_tensors(outputs: Any) -> list[Tensor]:
    """Return :func:`returned_leaves`, of a packed sequence its data."""
    return [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in returned_leaves(outputs)]


def leaves_of(value: Any) -> list[Any]:
    """Return tensors and packed sequences within nested tuples, lists, dicts and records, in order."""
    return [leaf for leaf in typing.leaves_of(value) if isinstance(leaf, (Tensor, PackedSequence))]
