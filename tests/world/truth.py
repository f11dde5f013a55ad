"""What a program's own framework says: values and gradients of the untouched model, by PyTorch's autograd."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from programs import Program


@dataclass
class ModuleCalls:
    """Tensors that a module was given and returned, one list per call, with their gradients of the loss."""

    values: list[np.ndarray]
    gradients: list[np.ndarray]
    is_loop: bool


@dataclass
class Truth:
    """Loss, gradients and Jacobian of the untouched model; ``axes`` are those of the Jacobian without the samples."""

    loss: float
    input_gradient: np.ndarray
    weight_gradients: np.ndarray
    jacobian: np.ndarray
    jacobian_axes: tuple[str, ...]
    calls: dict[str, ModuleCalls]


def truth_of(program: Program) -> Truth:
    """Differentiate a fresh copy of a program, by its frozen weights too."""
    for module in program.modules:
        for weight in module.parameters():
            if weight.is_floating_point() or weight.is_complex():
                weight.requires_grad_()
    calls, hooks = _record_calls(program)
    x = program.x.detach().clone().requires_grad_(program.x.is_floating_point())
    weights = [w for module in program.modules for w in module.parameters() if w.requires_grad]
    loss = program.loss(program.call(x), program.y)
    for hook in hooks:
        hook.remove()
    recorded = [tensor for tensors in calls.values() for call in tensors for tensor in call if tensor.requires_grad]
    inputs = [x] if x.requires_grad else []
    gradients = torch.autograd.grad(loss, [*inputs, *weights, *recorded], allow_unused=True)
    by_tensor = {id(t): g for t, g in zip([*inputs, *weights, *recorded], gradients, strict=True)}
    jacobian, axes = _jacobian(program) if x.requires_grad else (np.zeros(0), ())
    return Truth(
        loss=float(loss.detach()),
        input_gradient=_numpy(by_tensor.get(id(x)), x),
        weight_gradients=sizes([_numpy(by_tensor[id(w)], w) for w in weights]),
        jacobian=jacobian,
        jacobian_axes=axes,
        calls={name: _module_calls(tensors, by_tensor) for name, tensors in calls.items() if tensors},
    )


def sizes(gradients: list[np.ndarray]) -> np.ndarray:
    """Return the sorted sizes of all entries that are not zero: the same in every layout of the weights."""
    entries = np.abs(np.concatenate([np.zeros(0), *(np.ravel(gradient) for gradient in gradients)]))
    return np.sort(entries[entries > 0])[::-1]


def snapshot(program: Program) -> dict[str, Any]:
    """Return everything of the user's modules and of the random generators that a verb must restore."""
    facts: dict[str, Any] = {
        "generator of torch": torch.get_rng_state().numpy().tobytes(),
        "generator of NumPy": repr(np.random.get_state()),  # noqa: NPY002  the generator that users share
        "generator of Python": hash(random.getstate()),
    }
    for root in program.modules:
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                facts[f"{path}.{name}"] = _frozen(value)
            for name, weight in module.named_parameters(recurse=False):
                facts[f"{path}.{name}: requires_grad, grad"] = weight.requires_grad, _frozen(weight.grad)
    return facts


def _frozen(value: Any, depth: int = 4) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().cpu().resolve_conj().numpy().tobytes()
    if isinstance(value, dict) and depth:
        return [(str(key), _frozen(entry, depth - 1)) for key, entry in value.items()]
    if isinstance(value, set):  # a copy of it may have another order
        return sorted(map(repr, value))
    if isinstance(value, list | tuple) and depth:
        return [_frozen(entry, depth - 1) for entry in value]
    return repr(value) if isinstance(value, int | float | str | bytes | None) else id(value)


def _record_calls(program: Program) -> tuple[dict[str, list[list[torch.Tensor]]], list[Any]]:
    calls: dict[str, list[list[torch.Tensor]]] = {}
    hooks = []
    for root in program.modules:
        for path, module in root.named_modules():

            def record(_module: Any, given: Any, keywords: Any, returned: Any, path: str = path) -> None:
                tensors = list(_tensors((given, keywords, returned)))
                # Within torch.vmap a module computes with tensors of one entry, which have no values outside of it.
                if not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
                    calls.setdefault(path, []).append(tensors)

            hooks.append(module.register_forward_pre_hook(_with_own_tensors, with_kwargs=True))
            hooks.append(module.register_forward_hook(record, with_kwargs=True))
    return calls, hooks


def _with_own_tensors(_module: Any, given: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Give a module tensors of its own, of the same values: what it shares with others has a gradient for each use."""
    positional = [t.view_as(t) if isinstance(t, torch.Tensor) and t.requires_grad else t for t in given]
    return tuple(positional), keywords


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def _module_calls(calls: list[list[torch.Tensor]], by_tensor: dict[int, torch.Tensor | None]) -> ModuleCalls:
    """Stack the calls of a loop, those with the same number of tensors of the same shapes, by position."""
    last = calls[-1]
    alike = [call for call in calls if [t.shape for t in call] == [t.shape for t in last]]
    values, gradients = [], []
    for tensors in zip(*alike, strict=True):
        values.append(np.stack([_numpy(t, t) for t in tensors]))
        gradients.append(np.stack([_numpy(by_tensor.get(id(t)), t) for t in tensors]))
    if len(alike) == 1:
        values, gradients = [v[0] for v in values], [g[0] for g in gradients]
    return ModuleCalls(values, gradients, is_loop=len(alike) > 1)


def _numpy(gradient: torch.Tensor | None, tensor: torch.Tensor) -> np.ndarray:
    return (torch.zeros_like(tensor) if gradient is None else gradient).detach().cpu().resolve_conj().numpy().copy()


def _jacobian(program: Program) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the derivative of each sample's outputs by its inputs, samples first, and the names of the other axes."""
    full = torch.autograd.functional.jacobian(lambda x: program.output(program.call(x)), program.x)
    ends = [*(f"out_{axis}" for axis in program.output_axes), *(f"in_{axis}" for axis in program.input_axes)]
    out_sample, in_sample = ends.index("out_sample"), ends.index("in_sample")
    own = torch.diagonal(full, dim1=out_sample, dim2=in_sample).movedim(-1, 0)
    return own.detach().numpy(), tuple(end for end in ends if not end.endswith("_sample"))


def matching(values: list[np.ndarray], wanted: np.ndarray, bound: float) -> tuple[int, tuple[int, ...]] | None:
    """Return which of some arrays ``wanted`` is, and the order of its axes; None if it is none of them."""
    for position, value in enumerate(values):
        if value.ndim == wanted.ndim and value.dtype.kind == wanted.dtype.kind and value.size == wanted.size:
            for order in itertools.permutations(range(value.ndim)):
                moved = value.transpose(order)
                if moved.shape == wanted.shape and close(moved, wanted, bound):
                    return position, order
    return None


def close(actual: np.ndarray, expected: np.ndarray, bound: float) -> bool:
    """Return whether two arrays agree to ``bound`` relative to the largest number."""
    if actual.shape != expected.shape:
        return False
    largest = max(float(np.abs(expected).max(initial=0)), 1e-6)
    return bool(np.abs(actual - expected).max(initial=0) <= bound * largest)


def with_flat_ends(names: list[str], jacobian: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Flatten the axes of each end but time to one of units or features, in their order; return names and numbers."""
    groups = {
        "sample": ["sample"],
        "out_time": ["out_time"],
        "out_unit": [name for name in names if name.startswith("out_") and name != "out_time"],
        "in_time": ["in_time"],
        "in_feature": [name for name in names if name.startswith("in_") and name != "in_time"],
    }
    groups = {end: [name for name in group if name in names] for end, group in groups.items()}
    groups = {end: group for end, group in groups.items() if group}
    order = [names.index(name) for group in groups.values() for name in group]
    shape = [math.prod(jacobian.shape[names.index(name)] for name in group) for group in groups.values()]
    return list(groups), jacobian.transpose(order).reshape(shape)
