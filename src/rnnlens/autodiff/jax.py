"""The JAX engine: each tap adds a zero to a tensor, and programs are differentiated with respect to these zeros."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ..errors import UnsupportedError
from ..typing import Array
from .interface import Engine, Keep, Memo, Program, Tap, TargetProgram

#: Float types in the text of a lowered program, the coarsest first, and their names.
_FLOATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


class JaxEngine(Engine):
    """Differentiation, compilation and arrays of JAX; see :class:`rnnlens.autodiff.Engine`."""

    name = "jax"

    def to_array(self, tensor: Any) -> Array:
        """Copy a tensor to NumPy; bfloat16 and float16 become float32."""
        tensor = jnp.asarray(tensor)
        if tensor.dtype in (jnp.bfloat16, jnp.float16):
            tensor = tensor.astype(jnp.float32)
        return np.asarray(tensor)

    def values(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Return the tensors to substitute for the values of a program's variables."""
        return list(tensors)

    def gradients(
        self, program: Program, cotangents: Mapping[str, Any] | None = None
    ) -> tuple[Any, Any, dict[str, Any]]:
        targets, pull, aux = jax.vjp(
            lambda z: program(_zero_adding_tap(z, self._keep)), _tap_zeros(program), has_aux=True
        )
        if cotangents is None:
            full_cotangents = jnp.ones_like(targets)
        else:
            full_cotangents = {
                name: cotangents.get(name, _no_cotangent(t.shape, t.dtype)) for name, t in targets.items()
            }
        return targets, aux, _pulled_back(pull, full_cotangents)

    def compile(self, function: Callable[..., Any], arguments: Sequence[Any], memo: Memo) -> Callable[..., Any]:
        """Trace and compile ``function``; an executable of the same trace is taken from ``memo``."""
        return _compiled_function(function, arguments, memo)

    def coarsest_dtype(self, function: Callable[..., Any], arguments: Sequence[Any] = ()) -> str:
        """Lower a function for these arguments, without running it; return its coarsest float dtype, or ""."""
        text = jax.jit(function).lower(*arguments).as_text()
        return next((name for short, name in _FLOATS.items() if re.search(rf"[<x]{short}>", text)), "")

    def settings(self) -> Hashable:
        """Return the JAX settings that compiled programs depend on, such as 64-bit mode."""
        config = jax.config
        return (
            config.jax_enable_x64,
            config.jax_default_matmul_precision,
            config.jax_numpy_dtype_promotion,
            config.jax_threefry_partitionable,
        )

    owner_of_stop_gradient = jax.lax

    @contextmanager
    def step_by_step(self) -> Iterator[None]:
        with jax.disable_jit():
            yield

    @property
    def on_accelerator(self) -> bool:
        return str(jax.default_backend()) != "cpu"

    def full_precision(self) -> AbstractContextManager[None]:
        return jax.default_matmul_precision("highest") if self.on_accelerator else nullcontext()

    def context(self) -> Hashable:
        """Return the trace that records operations now; it differs inside ``scan``."""
        state: Hashable = jax.extend.core.get_opaque_trace_state(convention="flax")
        return state

    def linearise(self, program: TargetProgram, arguments: Any, memo: Memo | None) -> Any:
        return _JaxProgram(program, arguments, memo or Memo(), self._keep)

    def per_step(self, function: Callable[..., Any]) -> _JaxSteps:
        return _JaxSteps(function)


def _pulled_back(pull: Callable[[Any], Any], cotangents: Any) -> Any:
    """Pull cotangents back; raise UnsupportedError for a while loop in their way, of which JAX keeps no steps."""
    try:
        return pull(cotangents)[0]
    except ValueError as error:
        if "while_loop" not in str(error):
            raise
        message = "The model has a while loop, which JAX does not differentiate backwards."
        hint = "write the loop as jax.lax.scan, or as jax.lax.fori_loop with fixed bounds"
        raise UnsupportedError(message, hint=hint) from error


def _tap_zeros(program: Callable[[Tap], Any]) -> dict[str, Any]:
    """Return zeros of the shape and dtype of each tapped tensor, by tap key. The program is traced, not run."""
    shapes: dict[str, Any] = {}

    def tap(key: str, tensor: Any) -> Any:
        shapes[key] = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
        return tensor

    jax.eval_shape(lambda: program(tap)[1])
    return {key: jnp.zeros(s.shape, s.dtype) for key, s in shapes.items()}


def _zero_adding_tap(zeros: dict[str, Any], keep: Keep) -> Tap:
    return lambda key, tensor: keep(tensor, tensor + zeros[key])


def _compiled_function(function: Callable[..., Any], arguments: Sequence[Any], memo: Memo) -> Callable[..., Any]:
    """Lower ``function`` to text and compile it; equal texts, constants included, share one executable."""
    trees: list[Any] = []

    def flat_function(leaves: list[Any]) -> list[Any]:
        results: list[Any]
        results, tree = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
        trees.append(tree)
        return results

    leaves, structure = jax.tree.flatten(tuple(arguments))
    # Without keep_unused, programs with different arguments could have the same text.
    lowered = jax.jit(flat_function, keep_unused=True).lower(leaves)
    text = lowered.as_text()
    # The text of a callback to Python does not identify the function that it calls.
    is_identified = "callback" not in text and not jax.config.jax_use_simplified_jaxpr_constants
    executable = memo.executable(text, lowered.compile) if is_identified else lowered.compile()
    tree = trees[-1]
    return lambda *inputs: jax.tree.unflatten(tree, executable(jax.tree.leaves(inputs)))


class _JaxProgram:
    """A compiled program with its ``jax.vjp``; cotangents are pulled back under ``vmap``."""

    def __init__(self, program: TargetProgram, arguments: Any, memo: Memo, keep: Keep) -> None:
        self._memo = memo
        zeros = memo.once("zeros", lambda: _tap_zeros(lambda tap: program(arguments, tap)))

        def run(zeros: dict[str, Any], arguments: Any) -> Any:
            return jax.vjp(lambda z: program(arguments, _zero_adding_tap(z, keep)), zeros, has_aux=True)

        compiled = memo.once("run", lambda: _compiled_function(run, (zeros, arguments), memo))
        self.targets, self._pull, self.aux = compiled(zeros, arguments)
        self._keys = list(zeros)

    def vjp(self, cotangents: Mapping[str, Any]) -> dict[str, Any | None]:
        count = len(next(iter(cotangents.values())))
        connected_keys = self._memo.once(frozenset(cotangents), lambda: self._connected_keys(set(cotangents)))
        full_cotangents = {}
        for name, target in self.targets.items():
            shape, dtype = (count, *target.shape), target.dtype
            full_cotangents[name] = (
                jnp.asarray(cotangents[name], dtype) if name in cotangents else _no_cotangent(shape, dtype)
            )
        pull = self._memo.once(count, lambda: _compiled_function(_pull_many, (self._pull, full_cotangents), self._memo))
        gradients = pull(self._pull, full_cotangents)
        return {key: gradients[key] if key in connected_keys else None for key in self._keys}

    def _connected_keys(self, names: set[str]) -> set[str]:
        """Return the keys of the taps from which a path leads to any of the targets ``names``.

        JAX omits operations without a path from a pull-back, so that a dependence in its jaxpr is a path.
        """
        template = {n: _no_cotangent(t.shape, t.dtype) for n, t in self.targets.items()}
        make_jaxpr = jax.make_jaxpr(lambda cotangents: _pulled_back(self._pull, cotangents), return_shape=True)
        closed_jaxpr, gradients = make_jaxpr(template)
        is_target = [name in names for name in sorted(template)]  # JAX flattens a dict in the order of its sorted keys
        reached = _reached_results(closed_jaxpr.jaxpr, is_target)
        return {key for key, is_reached in zip(sorted(gradients), reached, strict=True) if is_reached}


def _pull_many(pull: Callable[[Any], Any], cotangents: Any) -> Any:
    return jax.vmap(lambda c: pull(c)[0])(cotangents)


def _no_cotangent(shape: tuple[int, ...], dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(shape, dtype)
    return np.zeros(shape, jax.dtypes.float0)


class _JaxSteps:
    """A cell's step function and its derivatives, each compiled once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.step = jax.jit(function)
        self.vjp = jax.jit(lambda inputs, cotangents: jax.vjp(function, *inputs)[1](cotangents))
        self._function = function
        self.produced = jax.jit(self._produced_by)
        self.jacobian = jax.jit(self._jacobian)

    def _produced_by(self, inputs: Any, cotangents: Any) -> Any:
        """Return the total gradient of each new state, given cotangents of (output, new states).

        The sources are zeros added to the new states within the program, so that paths within the step are
        included.
        """
        leaves, tree = jax.tree.flatten(inputs)
        closed_jaxpr = jax.make_jaxpr(lambda *arrays: self._function(*jax.tree.unflatten(tree, arrays)))(*leaves)

        def step_with_offsets(zeros: list[Any]) -> Any:
            output, *new_states = evaluate_with_offsets(closed_jaxpr, leaves, dict(enumerate(zeros, start=1)))
            return output, new_states

        _, pull = jax.vjp(step_with_offsets, [jnp.zeros_like(c) for c in cotangents[1]])
        return pull(cotangents)[0]

    def _jacobian(self, inputs: Any) -> Any:
        x, states, weights = inputs
        split_points = np.cumsum([s.shape[-1] for s in states])[:-1]

        def stacked_step(joined_states: Any, x: Any) -> Any:
            output, new_states = self._function(x, jnp.split(joined_states, split_points, axis=-1), weights)
            return jnp.concatenate([*new_states, output], axis=-1)

        stacked_results, pull = jax.vjp(stacked_step, jnp.concatenate(states, axis=-1), x)
        n, size = stacked_results.shape
        rows = jnp.broadcast_to(jnp.eye(size, dtype=stacked_results.dtype)[:, None, :], (size, n, size))
        # Samples do not mix within a step, so all samples share one unit cotangent per output.
        by_state, by_input = jax.vmap(pull)(rows)
        return jnp.moveaxis(by_state, 0, 1), jnp.moveaxis(by_input, 0, 1)


# Analysis of jaxprs: which results depend on which arguments; running a jaxpr with values added to its results.


def evaluate_with_offsets(closed_jaxpr: Any, arguments: Sequence[Any], offsets: Mapping[int, Any]) -> list[Any]:
    """Evaluate the closed jaxpr ``closed_jaxpr``, adding ``offsets[i]`` to its result i where that is computed.

    Values computed from a changed result change with it. A result that is an argument of the program is changed
    only when it is returned.
    """
    jaxpr = closed_jaxpr.jaxpr
    values: dict[Any, Any] = {}
    by_variable: dict[Any, list[Any]] = {}
    for index, offset in offsets.items():
        if not isinstance(jaxpr.outvars[index], core.Literal):
            by_variable.setdefault(jaxpr.outvars[index], []).append(offset)

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, core.Literal) else values[variable]

    values.update(zip(jaxpr.constvars, closed_jaxpr.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        result_offsets = {i: sum(by_variable.pop(v)) for i, v in enumerate(equation.outvars) if v in by_variable}
        if result_offsets and equation.primitive.name in ("jit", "pjit"):
            results = evaluate_with_offsets(equation.params["jaxpr"], inputs, result_offsets)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            functions, options = params if isinstance(params, tuple) else ((), params)  # a tuple before JAX 0.10
            output = equation.primitive.bind(*functions, *inputs, **options)
            results = list(output) if equation.primitive.multiple_results else [output]
            results = [r + result_offsets[i] if i in result_offsets else r for i, r in enumerate(results)]
        values.update(zip(equation.outvars, results, strict=True))
    return [
        read(v) + offsets[i] if i in offsets and (isinstance(v, core.Literal) or v in by_variable) else read(v)
        for i, v in enumerate(jaxpr.outvars)
    ]


def _reached_results(jaxpr: Any, is_marked: list[bool]) -> list[bool]:
    is_reached = dict(zip(jaxpr.invars, is_marked, strict=True))
    for equation in jaxpr.eqns:
        marked_inputs = [not isinstance(v, core.Literal) and is_reached.get(v, False) for v in equation.invars]
        is_reached.update(zip(equation.outvars, _dependent_results(equation, marked_inputs), strict=True))
    return [not isinstance(v, core.Literal) and is_reached.get(v, False) for v in jaxpr.outvars]


def _dependent_results(equation: Any, marked_inputs: list[bool]) -> list[bool]:
    """Return which results of a jaxpr equation depend on marked arguments; exact only for calls and loops."""
    inner_jaxpr = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    inner_jaxpr = getattr(inner_jaxpr, "jaxpr", inner_jaxpr)
    count = len(equation.outvars)
    if inner_jaxpr is None or len(inner_jaxpr.invars) != len(marked_inputs) or len(inner_jaxpr.outvars) != count:
        return [any(marked_inputs)] * count
    if equation.primitive.name != "scan":
        return _reached_results(inner_jaxpr, marked_inputs)
    constant_count, carry_count = _scan_sizes(equation.params)
    while True:
        marked_outputs = _reached_results(inner_jaxpr, marked_inputs)
        marked_carry = [
            a or b
            for a, b in zip(
                marked_inputs[constant_count : constant_count + carry_count], marked_outputs[:carry_count], strict=True
            )
        ]
        if marked_carry == marked_inputs[constant_count : constant_count + carry_count]:
            return marked_outputs
        marked_inputs = [*marked_inputs[:constant_count], *marked_carry, *marked_inputs[constant_count + carry_count :]]


def _scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a ``scan`` equation."""
    if "ft_in" not in params:  # before JAX 0.11
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)
