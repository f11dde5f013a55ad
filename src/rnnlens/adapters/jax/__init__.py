"""Adapter for models of JAX: Flax, Equinox, Haiku and plain functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ...layout import Layout
from ...typing import Array, leaves_of, map_leaves
from .. import shared
from ..protocol import Adapter, Batch, Capture, CaptureRequest, Outputs, Port, ReferenceRun
from ..shared import Pull
from . import bound
from .axes import input_layout, output_layout
from .bound import BoundModel
from .capture import capture
from .models import JaxModel, open_model
from .program import Call, Program
from .reference_run import prepared_reference_run, reference_run
from .run import ENGINE, Run, Taps

__all__ = ["JaxModel", "adapter"]


class JaxPullback:
    """A run kept to pull cotangents back; see :class:`rnnlens.adapters.protocol.Pullback`."""

    def __init__(
        self, model: Any, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> None:
        self._run = Run(_source(model), batch, Taps(tuple(of), tuple(wrt), tuple(cut)))
        self.values = self._run.values
        self.outputs = len(self._run.program.outputs)

    def vjp(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull K cotangents (K, ...) of ``of`` ports back to every ``wrt`` port."""
        return self._run.pull(cotangents)

    def __enter__(self) -> JaxPullback:
        return self

    def __exit__(self, *exc: object) -> None:
        self._run.close()


class JaxAdapter(Adapter):
    """Adapter of functions of JAX, and of the modules of its libraries.

    A model is traced as a program; each ``lax.scan`` over time is a recurrent layer.
    """

    name = engine = "jax"
    samples_first = False

    #: Functions that are methods of the contract as they stand: see :class:`Adapter`.
    owns = staticmethod(bound.owns)
    bind = staticmethod(bound.bind)
    describe = staticmethod(bound.describe)
    weights = staticmethod(bound.weights)
    facts = staticmethod(bound.facts)
    provenance = staticmethod(bound.provenance)
    weight_location = staticmethod(bound.weight_location)
    pullback = JaxPullback

    def fingerprint(self, model: Any) -> Hashable | None:
        """Return the structure of the model: a program of another structure has other layers."""
        if not isinstance(model, BoundModel):
            return None
        opened = open_model(model.model, training=False)
        return (opened.key, tuple((v.shape, str(v.dtype)) for v in opened.values))

    def capture(self, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
        """Run a model once, forward and, with a loss, back."""
        return capture(_source(model), batch, request)

    def reference_run(
        self, model: Any, batch: Batch, cotangents: Any = None, *, gradients: bool = True, regularised: bool = False
    ) -> ReferenceRun:
        """Run the user's function, differentiated by JAX alone."""
        return reference_run(_source(model), batch, cotangents, gradients=gradients)

    def prepared_reference_run(
        self, model: Any, batch: Batch, *, gradients: bool = True
    ) -> Callable[[], ReferenceRun] | None:
        """Trace the user's function; return a function that compiles and runs it."""
        return prepared_reference_run(_source(model), batch, gradients=gradients)

    def differentiate(self, function: Callable[..., Any], arrays: Sequence[Array], model: Any) -> tuple[Array, Pull]:
        """Evaluate a function of arrays of JAX; return its value and its pull-back."""
        expected = "an array of JAX, such as jnp.mean(x)"
        return shared.differentiate(function, [jnp.asarray(a) for a in arrays], ENGINE, expected)

    def layouts(self, model: Any, batch: Batch, ports: Sequence[Port]) -> Mapping[Port, Layout]:
        """Return the roles of the axes of the model's inputs and outputs, from traces at other sizes."""
        call = Call.of(_source(model), batch.without_loss())
        program = Program.of(call, False)
        found, count = {}, call.counts[0]
        for port in ports:
            if port.layer is not None or port.kind not in ("input", "output"):
                continue
            if port.kind == "input":
                atom = program.program.jaxpr.invars[count + port.index]
                found[port] = input_layout(program.roles, atom)
            else:
                found[port] = output_layout(program.roles, program.outputs[port.index])
        return found

    def outputs_of(self, model: Any, batch: Batch) -> Outputs:
        """Return the outputs of the model for one batch, from one forward pass."""
        request = CaptureRequest(inputs=False, gradients=False, weight_grads=False, calls=False)
        outputs = self.capture(model, batch.without_loss(), request).outputs
        return Outputs(leaves_of(outputs), outputs)

    def loss_function(self, model: Any, batch: Batch) -> Callable[..., Any]:
        """Return the loss of a batch as a function of the model's output leaves."""
        call = Call.of(_source(model), batch)
        places = Program.of(call, call.has_loss).output_places
        return lambda *outputs: call.loss_of(outputs[0] if places is None else map_leaves(lambda i: outputs[i], places))


def _source(model: Any) -> Any:
    return model.model if isinstance(model, BoundModel) else model


adapter = JaxAdapter()
