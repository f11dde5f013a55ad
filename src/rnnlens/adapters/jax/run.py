"""One run of a model for the contract: outputs, recorded calls, pull-backs between ports, or the reference run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ...typing import Array
from ..protocol import Batch, Capture, Cotangents, Outputs, Port, ReferenceRun, Run, Taps
from .capture import record
from .program import Call
from .program_run import PortTaps, ProgramRun
from .reference_run import Reference


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
