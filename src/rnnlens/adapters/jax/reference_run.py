"""The reference run: the user's own function, differentiated by JAX alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import CertificateError, raised_by
from ...typing import leaves_of
from ..protocol import Batch, Cotangents, ReferenceRun
from .jaxprs import is_inexact
from .program import Call, Program
from .program_run import ENGINE, gathered_gradient


class Reference:
    """The user's function for one call: traced and compiled once, run on copies of its arrays."""

    def __init__(self, model: Any, batch: Batch, gradients: bool) -> None:
        if batch.initial_state:
            raise CertificateError("the model by itself starts from its own initial states")
        self._call = Call.of(model, batch)
        self._program = Program.of(self._call, self._call.has_loss)  # for what was compiled, and layouts of weights
        self._arrays = [jnp.array(a, copy=True) for a in self._call.arrays]  # the user's function may donate them
        floats = (i for i in range(self._call.counts[1]) if is_inexact(self._arrays[i]))
        self._moved = list(floats) if gradients else []

    def run(self, cotangents: Cotangents | None = None) -> ReferenceRun:
        """Run the function; differentiate its loss, or its outputs by their cotangents."""
        has_loss = self._call.has_loss and cotangents is None
        memo = self._program.memo(("reference", has_loss, bool(self._moved)))
        forward = memo.once(
            "forward", lambda: jax.jit(partial(_outputs_and_loss, self._program, self._moved, has_loss))
        )
        floats, grads = [self._arrays[i] for i in self._moved], []
        with raised_by("Your model"):
            if not self._moved or (not has_loss and cotangents is None):
                outputs, loss = forward(floats, self._arrays)
            else:
                pulled = None if cotangents is None else self._pulled(cotangents, forward(floats, self._arrays)[0])
                run = partial(_differentiated, self._program, self._moved, has_loss)
                outputs, loss, grads = memo.once("differentiated", lambda: jax.jit(run))(floats, self._arrays, pulled)
        return self._finished(outputs, loss, grads)

    @staticmethod
    def _pulled(cotangents: Cotangents, outputs: Sequence[Any]) -> list[Any]:
        values = cotangents([ENGINE.to_array(a) for a in outputs]) if callable(cotangents) else cotangents
        return [
            _no_cotangent(output) if value is None or not is_inexact(output) else jnp.asarray(value, output.dtype)
            for output, value in zip(outputs, values, strict=True)
        ]

    def _finished(self, outputs: Sequence[Any], loss: Any, grads: Sequence[Any]) -> ReferenceRun:
        """Return the results, with the gradients of known cells' weights in the layout of rnnlens as well."""
        program, (count, stop) = self._program, self._call.counts
        result = ReferenceRun([ENGINE.to_array(a) for a in outputs], None if loss is None else float(loss))
        if not grads:
            return result
        by_number = {i: ENGINE.to_array(g) for i, g in zip(self._moved, grads, strict=True)}
        result.input_grads = [by_number.get(i) for i in range(count, stop)]
        weight_grads = {name: by_number.get(i) for i, name in enumerate(self._call.opened.weight_names)}
        for layer in program.layers:
            if layer.cell is None or not by_number.keys() >= set(layer.loop.weights):
                continue
            parts = [by_number[i][None] for i in layer.loop.weights]
            for key in program.origins(layer):
                gathered = gathered_gradient(program, layer, key, parts)
                weight_grads[f"{layer.base}/{key}"] = None if gathered is None else gathered[0]
        result.weight_grads = weight_grads
        return result


def _outputs_and_loss(
    program: Program, moved: Sequence[int], has_loss: bool, floats: Sequence[Any], arrays: Sequence[Any]
) -> tuple[list[Any], Any]:
    full = list(arrays)
    for i, value in zip(moved, floats, strict=True):
        full[i] = value
    outputs, loss = program.call.function(full, with_loss=has_loss)
    return leaves_of(outputs), loss


def _differentiated(
    program: Program,
    moved: Sequence[int],
    has_loss: bool,
    floats: Sequence[Any],
    arrays: Sequence[Any],
    pulled: Sequence[Any] | None,
) -> tuple[list[Any], Any, list[Any]]:
    def run(floats: Sequence[Any]) -> tuple[list[Any], Any]:
        return _outputs_and_loss(program, moved, has_loss, floats, arrays)

    (outputs, loss), pull = jax.vjp(run, floats)
    cotangents = list(map(_no_cotangent, outputs)) if pulled is None else list(pulled)
    return outputs, loss, pull((cotangents, None if loss is None else jnp.ones_like(loss)))[0]


def _no_cotangent(output: Any) -> Any:
    if is_inexact(output):
        return jnp.zeros(output.shape, output.dtype)
    return np.zeros(output.shape, jax.dtypes.float0)
