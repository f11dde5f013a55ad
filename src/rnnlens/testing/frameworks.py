"""torch, JAX and TensorFlow as one thing: round arrays to a dtype, run and differentiate a function of tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import InputError

#: Function of tensors that returns a list of tensors.
TensorFunction = Callable[..., list[Any]]


class Runner:
    """A framework: rounds arrays to a dtype, and runs and differentiates a function of its tensors."""

    name = ""

    def tensor(self, value: Any, dtype: str) -> Any:
        """Return an array as a tensor; numbers with a point are rounded to ``dtype`` or its complex dtype."""
        raise NotImplementedError

    def array(self, tensor: Any) -> Any:
        """Return a tensor as an array of float64 or complex128, integers as they are."""
        raise NotImplementedError

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of tensors, compiled where the framework is slow without."""
        return function

    def differentiate(
        self, function: TensorFunction, tensors: Sequence[Any]
    ) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
        """Return the function's results, and a function from their cotangents to gradients or None."""
        raise NotImplementedError

    def gradient_function(self, function: Callable[..., list[Any]]) -> Callable[..., list[dict[str, Any]]]:
        """Return a function of tensors by name, further arguments, and lists of cotangents of the results.

        It returns for each list the gradients by name, or None; compiled where the framework is slow without.
        """

        def gradients(tensors: dict[str, Any], fixed: Any, cotangents: list[list[Any]]) -> list[dict[str, Any]]:
            def of_values(*values: Any) -> list[Any]:
                return function(dict(zip(tensors, values, strict=True)), fixed)

            _, pull = self.differentiate(of_values, list(tensors.values()))
            return [dict(zip(tensors, pull(grads), strict=True)) for grads in cotangents]

        return gradients

    def rounded(self, arrays: dict[str, Any], dtype: str) -> dict[str, Any]:
        """Return arrays of float64 with the values that they have in ``dtype``."""
        return {name: self.array(self.tensor(value, dtype)) for name, value in arrays.items()}


class _TorchRunner(Runner):
    """torch on one device."""

    name = "torch"

    def __init__(self, device: Any = "cpu") -> None:
        self.device = device

    def tensor(self, value: Any, dtype: str) -> Any:
        import torch

        tensor, real = torch.tensor(np.array(value), device=self.device), getattr(torch, dtype)
        if not (tensor.is_complex() or tensor.is_floating_point()):
            return tensor
        return tensor.to(real.to_complex() if tensor.is_complex() else real)

    def array(self, tensor: Any) -> Any:
        tensor = tensor.detach().cpu().resolve_conj()
        if not tensor.is_floating_point():
            return tensor.numpy().astype(np.complex128) if tensor.is_complex() else tensor.numpy()
        return tensor.double().numpy()

    def differentiate(self, function: TensorFunction, tensors: Sequence[Any]) -> tuple[list[Any], Any]:
        import torch

        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            results = function(*leaves)

        def pull(cotangents: list[Any]) -> list[Any]:
            pairs = [(result, grad) for result, grad in zip(results, cotangents, strict=True) if result.requires_grad]
            connected = [(result, torch.tensor(np.array(grad)).to(result)) for result, grad in pairs]
            if not connected:
                return [None] * len(leaves)
            outputs, grads = zip(*connected, strict=True)
            return list(torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True))

        return results, pull


class _JaxRunner(Runner):
    """JAX."""

    name = "jax"

    def tensor(self, value: Any, dtype: str) -> Any:
        import jax.numpy as jnp

        value = np.asarray(value)
        if not np.issubdtype(value.dtype, np.inexact):
            return jnp.asarray(value)
        complex_dtype = "complex128" if dtype == "float64" else "complex64"
        return jnp.asarray(value, dtype=complex_dtype if np.iscomplexobj(value) else dtype)

    def array(self, tensor: Any) -> Any:
        import jax.numpy as jnp

        if not jnp.issubdtype(tensor.dtype, jnp.inexact):
            return np.asarray(tensor)
        return np.asarray(tensor).astype(np.complex128 if np.iscomplexobj(tensor) else np.float64)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import jax

        return jax.jit(function)  # type: ignore[no-any-return]

    def gradient_function(self, function: Callable[..., list[Any]]) -> Callable[..., list[dict[str, Any]]]:
        # Operation by operation, JAX compiles each of them alone, also the many around a scan.
        return self.compiled(super().gradient_function(function))

    def differentiate(self, function: TensorFunction, tensors: Sequence[Any]) -> tuple[list[Any], Any]:
        import jax
        import jax.numpy as jnp

        results, pull_back = jax.vjp(lambda *arguments: tuple(function(*arguments)), *tensors)

        def pull(cotangents: list[Any]) -> list[Any]:
            # JAX's gradients of complex numbers are the conjugates of torch's, and so are its cotangents.
            pairs = zip(cotangents, results, strict=True)
            given = tuple(jnp.conj(grad).astype(result.dtype) for grad, result in pairs)
            return [grad.conj() for grad in pull_back(given)]

        return list(results), pull


class _TensorFlowRunner(Runner):
    """TensorFlow, one operation at a time."""

    name = "tensorflow"

    def tensor(self, value: Any, dtype: str) -> Any:
        import tensorflow as tf

        value = np.asarray(value)
        if not np.issubdtype(value.dtype, np.inexact):
            return tf.constant(value)
        complex_dtype = "complex128" if dtype == "float64" else "complex64"
        return tf.cast(tf.constant(value), complex_dtype if np.iscomplexobj(value) else dtype)

    def array(self, tensor: Any) -> Any:
        value = np.asarray(tensor)
        if np.issubdtype(value.dtype, np.integer) or value.dtype == bool:
            return value
        return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)

    def differentiate(self, function: TensorFunction, tensors: Sequence[Any]) -> tuple[list[Any], Any]:
        import tensorflow as tf

        with tf.GradientTape(persistent=True) as tape:
            tape.watch(tensors)
            results = function(*tensors)

        def pull(cotangents: list[Any]) -> list[Any]:
            grads = [tf.cast(grad, result.dtype) for grad, result in zip(cotangents, results, strict=True)]
            found = tape.gradient(results, tensors, output_gradients=grads)
            return [None if grad is None else tf.convert_to_tensor(grad) for grad in found]

        return results, pull


def runner(framework: str | None, device: Any = "cpu") -> Runner:
    """Return the runner of a framework by name, or of the one that is loaded, torch first; torch on a device."""
    runners = {"torch": lambda: _TorchRunner(device), "jax": _JaxRunner, "tensorflow": _TensorFlowRunner}
    name = framework or next((name for name in runners if name in sys.modules), "torch")
    if name not in runners:
        raise InputError(f"verify knows no framework {name!r}.", expected=", ".join(runners))
    return runners[name]()
