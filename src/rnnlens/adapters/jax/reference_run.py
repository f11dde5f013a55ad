"""The reference run: the user's own function, differentiated by JAX alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import CertificateError, raised_by
from ...typing import Array, leaves_of
from ..protocol import Batch, Cotangents, ReferenceRun
from .jaxprs import is_inexact
from .program import Call, Program
from .run import ENGINE, gathered_gradient


def reference_run(
    model: Any,
    batch: Batch,
    cotangents: Cotangents | None = None,
    *,
    gradients: bool = True,
    regularised: bool = False,
) -> ReferenceRun:
    """Run the user's function once; differentiate its loss, or its outputs with ``cotangents``, by JAX alone."""
    return prepared_reference_run(model, batch, cotangents, gradients=gradients)()


def prepared_reference_run(
    model: Any, batch: Batch, cotangents: Cotangents | None = None, *, gradients: bool = True
) -> Callable[[], ReferenceRun]:
    """Trace the user's function; return a function that compiles and runs it."""
    if batch.initial_state:
        raise CertificateError("the model by itself starts from its own initial states")
    call = Call.of(model, batch)
    has_loss = call.has_loss and cotangents is None
    program = Program.of(call, call.has_loss)  # for what was compiled before, and the layouts of weights
    arrays = [jnp.array(a, copy=True) for a in call.arrays]  # the user's function may donate its arguments
    moved = [i for i in range(call.counts[1]) if is_inexact(arrays[i])] if gradients else []

    def outputs_and_loss(floats: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], Any]:
        full = list(arrays)
        for i, value in zip(moved, floats, strict=True):
            full[i] = value
        outputs, loss = program.call.function(full, with_loss=has_loss)
        return [*(leaves_of(outputs) if program.output_places is not None else jax.tree.leaves(outputs))], loss

    def differentiated(floats: Sequence[Any], arrays: Sequence[Any], pulled: Sequence[Any] | None) -> Any:
        (outputs, loss), pull = jax.vjp(lambda floats: outputs_and_loss(floats, arrays), floats)
        if pulled is None:
            pulled = [_no_cotangent(output) for output in outputs]
        return outputs, loss, pull((list(pulled), None if loss is None else jnp.ones_like(loss)))[0]

    def run() -> ReferenceRun:
        with raised_by("Your model"):
            return _finished(call, program, *_outcome(), moved)

    def _outcome() -> tuple[list[Any], Any, list[Any]]:
        memo = program.memo(("reference", has_loss, gradients, cotangents is None))
        floats = [arrays[i] for i in moved]
        if not gradients or (not has_loss and cotangents is None):
            compiled = memo.once("forward", lambda: jax.jit(outputs_and_loss))
            outputs, loss = compiled(floats, arrays)
            return outputs, loss, []
        pulled = None
        if cotangents is not None:
            pulled = _cotangents(cotangents, memo.once("forward", lambda: jax.jit(outputs_and_loss)), floats, arrays)
        compiled = memo.once("differentiated", lambda: jax.jit(differentiated))
        result: tuple[list[Any], Any, list[Any]] = compiled(floats, arrays, pulled)
        return result

    return run


def _cotangents(
    cotangents: Cotangents, forward: Callable[..., Any], floats: Sequence[Any], arrays: Sequence[Any]
) -> list[Any]:
    outputs, _ = forward(floats, arrays)
    values = cotangents([ENGINE.to_array(a) for a in outputs]) if callable(cotangents) else cotangents
    return [
        _no_cotangent(output) if value is None or not is_inexact(output) else jnp.asarray(value, output.dtype)
        for output, value in zip(outputs, values, strict=True)
    ]


def _no_cotangent(output: Any) -> Any:
    if is_inexact(output):
        return jnp.zeros(output.shape, output.dtype)
    return np.zeros(output.shape, jax.dtypes.float0)


def _finished(
    call: Call, program: Program, outputs: Sequence[Any], loss: Any, grads: Sequence[Any], moved: Sequence[int]
) -> ReferenceRun:
    """Return the results of a run, with the gradients of known cells' weights in the layout of rnnlens as well."""
    count, stop = call.counts
    by_number: dict[int, Array] = {i: ENGINE.to_array(g) for i, g in zip(moved, grads, strict=False)}
    result = ReferenceRun([ENGINE.to_array(a) for a in outputs], None if loss is None else float(loss))
    if not grads:
        return result
    result.input_grads = [by_number.get(i) for i in range(count, stop)]
    weight_grads: dict[str, Array | None] = {name: by_number.get(i) for i, name in enumerate(call.opened.weight_names)}
    for layer in program.layers:
        if layer.cell is not None:
            parts = [np.asarray(by_number[i])[None] for i in layer.loop.weights if i in by_number]
            for key in program.origins(layer) if len(parts) == len(layer.loop.weights) else ():
                gathered = gathered_gradient(program, layer, key, parts)
                weight_grads[f"{layer.base}/{key}"] = None if gathered is None else gathered[0]
    result.weight_grads = weight_grads
    return result
