"""Adapter for models of JAX: Flax, Equinox, Haiku and plain functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from ...layout import Layout
from ...typing import Array
from .. import shared
from ..protocol import Adapter, Batch, Capture, Cotangents, Outputs, Port, ReferenceRun, Run, Taps
from ..shared import Pull
from . import bound
from .arguments import nest
from .axes import input_layout, output_layout
from .bound import BoundModel, JaxFacts
from .capture import record
from .models import JaxModel, open_model
from .program import Call, Program
from .program_run import ENGINE, PortTaps, ProgramRun
from .reference_run import Reference

__all__ = ["JaxModel", "adapter"]


class JaxRun(Run):
    """One run of a model; what it has follows from its taps.

    It stays in the user's thread: settings of JAX such as ``jax.enable_x64`` hold for one thread.
    """

    def __init__(self, model: Any, batch: Batch, taps: Taps) -> None:
        self._model, self._batch, self._taps = model, batch, taps
        self._ports: ProgramRun | None = None
        if taps.record == "ports":
            known = taps.cotangents or None
            self._ports = ProgramRun(Call.of(model, batch), PortTaps(taps.of, taps.wrt, taps.cut), known)
            self.values = self._ports.values
            self.output_count = len(self._ports.program.outputs)
            if known is not None:
                self.known_gradients = self._ports.gradients
        elif taps.record != "nothing":
            self._recorded = record(model, batch, taps)

    @property
    def outputs(self) -> Outputs:  # type: ignore[override]
        """Outputs of the model."""
        return self._recorded[1]

    @property
    def returned(self) -> Any:
        """Outputs as the model nests them."""
        return self._recorded[1].tree

    @property
    def capture(self) -> Capture:  # type: ignore[override]
        """Recorded calls and gradients."""
        return self._recorded[0]

    def pull(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull K cotangents (K, ...) of ``of`` ports back to every ``wrt`` port."""
        assert self._ports is not None
        return self._ports.pull(cotangents)

    @cached_property
    def _reference(self) -> Reference:
        return Reference(self._model, self._batch, self._taps.gradients)

    def reference(self, cotangents: Cotangents | None = None) -> ReferenceRun:
        """Run the user's function, differentiated by JAX alone."""
        return self._reference.run(cotangents)

    def __exit__(self, *exc: object) -> None:
        if self._ports is not None:
            self._ports.close()


class JaxAdapter(Adapter):
    """Adapter of functions of JAX, and of the modules of its libraries.

    A model is traced as a program; each ``lax.scan`` over time is a recurrent layer.
    """

    name = engine = "jax"
    samples_first = False

    #: Functions that are methods of the contract as they stand: see :class:`Adapter`.
    owns = staticmethod(bound.owns)
    needs_shapes = True
    bind = staticmethod(bound.bind)
    describe = staticmethod(bound.describe)
    weights = staticmethod(bound.weights)
    facts = JaxFacts

    def fingerprint(self, model: Any) -> Hashable | None:
        """Return the structure of the model: a program of another structure has other layers."""
        if not isinstance(model, BoundModel):
            return None
        opened = open_model(model.model, training=False)
        return (opened.key, tuple((v.shape, str(v.dtype)) for v in opened.values))

    def run(self, model: Any, batch: Batch, taps: Taps) -> Run:
        """Run the model's program once, and record what the taps say."""
        return JaxRun(bound.source_of(model), batch, taps)

    def differentiate(self, function: Callable[..., Any], arrays: Sequence[Array], model: Any) -> tuple[Array, Pull]:
        """Evaluate a function of arrays of JAX; return its value and its pull-back."""
        expected = "an array of JAX, such as jnp.mean(x)"
        return shared.differentiate(function, [jnp.asarray(a) for a in arrays], ENGINE, expected)

    def layouts(self, model: Any, batch: Batch, ports: Sequence[Port]) -> Mapping[Port, Layout]:
        """Return the roles of the axes of the model's inputs and outputs, from traces at other sizes."""
        if isinstance(model, BoundModel) and model.y is not None:  # its function takes the target
            call, program = model.opened_program()
        else:
            call = Call.of(bound.source_of(model), batch.without_loss())
            program = Program.of(call, False)
        inputs, layouts = program.program.jaxpr.invars[call.counts[0] :], {}
        for port in ports:
            if port.layer is None and port.kind == "input":
                layouts[port] = input_layout(program.roles, inputs[port.index])
            elif port.layer is None and port.kind == "output":
                layouts[port] = output_layout(program.roles, program.outputs[port.index])
        return layouts

    def loss_of(self, model: Any, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
        """Return the loss of known outputs and its gradient for each of them."""
        call = Call.of(bound.source_of(model), batch)

        def loss(*leaves: Any) -> Any:
            return call.loss_of(nest(leaves, outputs.tree), call.arrays)

        value, pull = self.differentiate(loss, outputs.leaves, model)
        return float(value), list(pull(jnp.ones(())))


adapter = JaxAdapter()
