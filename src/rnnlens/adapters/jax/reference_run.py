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
from .program import Call, Program, without_arrays
from .program_run import ENGINE, gathered_gradient


class Reference:
    """The user's function for one call: traced and compiled once, run on copies of its arrays."""

    def __init__(self, model: Any, batch: Batch, gradients: bool) -> None:
        if batch.initial_state:
            raise CertificateError("the model by itself starts from its own initial states")
        self._call = Call.of(model, batch)
        # For what was compiled, and layouts of weights, which any number of samples shares.
        self._program = Program.of_any_samples(self._call, self._call.has_loss)
        # Copies, since the user's function may donate its arrays.
        self._arrays = [jax.device_put(a, may_alias=False) for a in self._call.arrays]
        floats = (i for i in range(self._call.counts[1]) if is_inexact(self._arrays[i]))
        self._moved = list(floats) if gradients else []

    def run(self, cotangents: Cotangents | None = None) -> ReferenceRun:
        """Run the function; differentiate its loss, or its outputs by their cotangents."""
        has_loss, call = self._call.has_loss and cotangents is None, without_arrays(self._call)
        memo = self._program.memo(("reference", has_loss, bool(self._moved), self._call.has_loss))
        forward = memo.once("forward", lambda: jax.jit(partial(_outputs_and_loss, call, self._moved, has_loss)))
        floats, grads = [self._arrays[i] for i in self._moved], []
        with raised_by("Your model"):
            if not self._moved or (not has_loss and cotangents is None):
                outputs, loss = forward(floats, self._arrays)
            else:
                if callable(cotangents):
                    outputs = forward(floats, self._arrays)[0]
                    cotangents = cotangents([ENGINE.to_array(a) for a in outputs])
                run = partial(_differentiated, call, self._moved, has_loss)
                differentiated = memo.once("differentiated", lambda: jax.jit(run))
                outputs, loss, grads = differentiated(floats, self._arrays, cotangents)
        return self._finished(outputs, loss, grads)

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
    call: Call, moved: Sequence[int], has_loss: bool, floats: Sequence[Any], arrays: Sequence[Any]
) -> tuple[list[Any], Any]:
    full = list(arrays)
    for i, value in zip(moved, floats, strict=True):
        full[i] = value
    outputs, loss = call.function(full, with_loss=has_loss)
    return leaves_of(outputs), loss


def _differentiated(
    call: Call,
    moved: Sequence[int],
    has_loss: bool,
    floats: Sequence[Any],
    arrays: Sequence[Any],
    cotangents: Sequence[Any] | None,
) -> tuple[list[Any], Any, list[Any]]:
    def run(floats: Sequence[Any]) -> tuple[list[Any], Any]:
        return _outputs_and_loss(call, moved, has_loss, floats, arrays)

    (outputs, loss), pull = jax.vjp(run, floats)
    given = [None] * len(outputs) if cotangents is None else cotangents
    full = [_cotangent(output, value) for output, value in zip(outputs, given, strict=True)]
    return outputs, loss, pull((full, None if loss is None else jnp.ones_like(loss)))[0]


def _cotangent(output: Any, value: Any) -> Any:
    """Return the cotangent of an output, zeros if there is none."""
    if not is_inexact(output):
        return np.zeros(output.shape, jax.dtypes.float0)
    return jnp.zeros_like(output) if value is None else jnp.asarray(value, output.dtype)
