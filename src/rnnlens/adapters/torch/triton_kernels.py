"""Layers that call Triton kernels, for tensors on a CPU: the kernels' equations in torch, for the time of one call.

Triton compiles for accelerators alone. Layers of flash-linear-attention call it for their scans, short convolutions,
norms and gates; modelling modules of transformers call the scans of that package where it can be imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ...errors import UnsupportedError
from ..shared import substitute_in_this_thread
from .scan_families import read_call, scans_of
from .scan_reading import Family, by_steps


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    prenorm: bool,
    residual_in_fp32: bool,
    is_rms: bool = False,
    groups: int = 1,
) -> Any:
    x = x if residual is None else x + residual
    grouped = x.unflatten(-1, (groups, -1))
    centred = grouped if is_rms else grouped - grouped.mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    y = y if weight is None else y * weight
    y = (y if bias is None else y + bias).to(x.dtype)
    return (y, x) if prenorm else y


def _norm_linear(
    x: Tensor, weight: Any, bias: Any, linear_weight: Tensor, linear_bias: Any, residual: Any, eps: float, *flags: Any
) -> Any:
    prenorm, residual_in_fp32, *further = flags
    y = _norm(x, weight, bias, residual, eps, False, residual_in_fp32, *further)
    y = functional.linear(y.to(linear_weight.dtype), linear_weight, linear_bias)
    return (y, x if residual is None else x + residual) if prenorm else y


def _gated_norm(
    x: Tensor, g: Tensor, weight: Any, bias: Any, activation: str, residual: Any, eps: float, *flags: Any
) -> Any:
    prenorm, residual_in_fp32, is_rms = flags
    y = _norm(x, weight, bias, residual, eps, False, residual_in_fp32, is_rms)
    y = y * (functional.silu(g) if activation in ("swish", "silu") else torch.sigmoid(g))
    return (y, x if residual is None else x + residual) if prenorm else y


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    residual: Any,
    initial_state: Any,
    output_final_state: Any,
    activation: Any,
    cu_seqlens: Any,
    *_: Any,
) -> tuple[Tensor, None]:
    _refuse(cu_seqlens, initial_state, output_final_state or None)
    width = weight.shape[-1]
    padded = functional.pad(x.transpose(1, 2), (width - 1, 0))
    y = functional.conv1d(padded, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
    y = functional.silu(y) if activation in ("silu", "swish") else y
    return (y if residual is None else y + residual), None


def _token_shift(x: Tensor, cu_seqlens: Any, cache: Any, output_cache: bool, *_: Any) -> tuple[Tensor, Any]:
    _refuse(cu_seqlens, cache)
    return functional.pad(x, (0, 0, 1, -1)) - x, x[:, -1] if output_cache else None


def _refuse(*options: Any) -> None:
    """Raise ``UnsupportedError`` for packed sequences and caches, which the equations here do not have."""
    if any(option is not None for option in options):
        raise UnsupportedError(
            "A layer of flash-linear-attention runs packed sequences or a cache on a CPU.",
            expected="sequences of one length without a mask, and use_cache=False",
        )


def _gate_output(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return (o + ((r * k * r_k).sum(-1, keepdim=True) * v).reshape(o.shape)) * g


_NORMS, _RWKV7 = "fla.modules.norm", "fla.ops.rwkv7"

#: Equations of the autograd functions that run Triton kernels, by module and class: of the arguments of ``apply``.
EQUATIONS: dict[tuple[str, str], Callable[..., Any]] = {
    (f"{_NORMS}.layernorm", "LayerNormFunction"): _norm,
    (f"{_NORMS}.layernorm", "LayerNormLinearFunction"): _norm_linear,
    (f"{_NORMS}.fused_norm_gate", "LayerNormGatedFunction"): _gated_norm,
    (f"{_NORMS}.l2norm", "L2NormFunction"): lambda x, eps, dtype: x * torch.rsqrt(x.square().sum(-1, True) + eps),
    ("fla.modules.activations.ops", "SwishFunction"): functional.silu,
    ("fla.modules.activations.ops", "SigmoidFunction"): torch.sigmoid,
    ("fla.modules.activations.ops", "LogSigmoidFunction"): lambda x, scale: functional.logsigmoid(x) / scale,
    ("fla.modules.activations.ops", "SwiGLUFunction"): lambda x, y: functional.silu(x) * y,
    ("fla.modules.activations.ops", "SwiGLULinearFunction"): lambda x, y, weight, bias: functional.linear(
        functional.silu(x) * y, weight, bias
    ),
    ("fla.modules.causal_conv1d.ops", "CausalConv1dFunction"): _convolution,
    ("fla.modules.token_shift", "TokenShift"): _token_shift,
    (f"{_RWKV7}.fused_addcmul", "Rwkv7FusedAddcmul"): lambda x, delta, *factors: tuple(
        None if factor is None else x + delta * factor for factor in factors
    ),
    (f"{_RWKV7}.fused_k_update", "KUpdateFunction"): lambda k, a, factor, *_: k + k * (a - 1) * factor,
    (f"{_RWKV7}.gate_output_correction", "GateOutputCorrection"): _gate_output,
}


def needs_equations(model: nn.Module) -> bool:
    """Return whether a model has layers of flash-linear-attention and lies on a CPU."""
    return (
        "fla" in sys.modules
        and any(type(module).__module__.startswith("fla.") for module in nn.Module.modules(model))
        and _is_on_cpu(model)
    )


def _is_on_cpu(model: nn.Module) -> bool:
    return all(tensor.device.type == "cpu" for tensor in [*nn.Module.parameters(model), *model.buffers()])


@contextmanager
def without_triton(model: nn.Module) -> Iterator[None]:
    """Replace Triton kernels by their equations within the block, if the model calls them and lies on a CPU.

    Scans of flash-linear-attention run step by step there, each differentiated by torch: the reference of certificates.
    """
    if "fla" not in sys.modules or not _is_on_cpu(model):
        yield
        return
    modules = list(nn.Module.modules(model))
    with ExitStack() as stack:
        replaced: dict[Any, Callable[..., Any]] = {}
        if needs_equations(model):
            for (module_name, name), equation in EQUATIONS.items():
                owner = sys.modules.get(module_name)
                original = getattr(owner, name, None)
                if original is not None:
                    replaced[original] = substitute_in_this_thread(equation, original.apply)
                    _set(stack, owner, name, SimpleNamespace(apply=replaced[original]))
            _replace_bound_functions(stack, modules, replaced)
        for owner, name, family in dict.fromkeys(scan for module in modules for scan in scans_of(type(module))):
            original = vars(owner)[name]
            if str(getattr(original, "__module__", "")).startswith("fla."):
                steps = substitute_in_this_thread(_steps_of(original, family), original)
            elif str(getattr(original, "__module__", "")).startswith("transformers."):
                steps = inspect.unwrap(original)
            else:
                continue
            _set(stack, owner, name, steps)
        yield


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _replace_bound_functions(
    stack: ExitStack, modules: Sequence[nn.Module], replaced: dict[Any, Callable[..., Any]]
) -> None:
    """Replace ``apply`` of kernels where a module of the model, or the file that defines it, has a name for it."""
    defining = {name: sys.modules[name] for module in modules if (name := type(module).__module__) in sys.modules}
    for owner in [*modules, *(module for name, module in defining.items() if name.startswith("fla."))]:
        for name, value in list(vars(owner).items()):
            function_class = getattr(value, "__self__", None)
            if isinstance(function_class, type) and function_class in replaced:
                _set(stack, owner, name, replaced[function_class])


def _steps_of(original: Callable[..., Any], family: Family) -> Callable[..., Any]:
    """Return a function like the scan ``original`` that runs it step by step in torch."""

    def run(*args: Any, **kwargs: Any) -> Any:
        reading = read_call(original, family, lambda tensor: tensor, args, kwargs)
        return reading.finish(*by_steps(reading.cell))

    return run
