"""Runs of a TensorFlow-1 graph: what is recorded in a copy of it, by the taps of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Self

import numpy as np

from rnnlens.adapters.protocol import Batch, Capture, Cotangents, Outputs, ReferenceRun, Run, Taps
from rnnlens.typing import leaves_of

from .capture import capture
from .public import Net
from .pullback import GraphPullback
from .reference_run import prepare_reference_run


def run(net: Net, batch: Batch, taps: Taps) -> Run:
    """Run a copy of the graph: see :meth:`rnnlens.adapters.protocol.Adapter.run`."""
    if taps.record == "ports":
        return GraphPullback(net, batch, taps.of, taps.wrt, taps.cut)
    return _UntouchedRun(net, batch, taps) if taps.record == "nothing" else _RecordedRun(net, batch, taps)


class _RecordedRun(Run):
    """Run whose loops, loss and gradients are recorded."""

    def __init__(self, net: Net, batch: Batch, taps: Taps) -> None:
        self.capture: Capture = capture(net, batch, taps)
        self.returned = self.capture.outputs

    @cached_property
    def outputs(self) -> Outputs:  # type: ignore[override]
        """Outputs of the net."""
        leaves = [np.asarray(leaf) for leaf in leaves_of(self.capture.outputs)]
        return Outputs(leaves, self.capture.outputs)


class _UntouchedRun(Run):
    """An unmodified copy of the graph, for a certificate; penalties of its loss are always included."""

    def __init__(self, net: Net, batch: Batch, taps: Taps) -> None:
        self._net, self._batch, self._gradients = net, batch, taps.gradients
        self._prepared_run: Callable[[], ReferenceRun] | None = None

    def prepared(self) -> Self:
        """Build the copy of the graph for a run of the loss."""
        self._prepared_run = prepare_reference_run(self._net, self._batch, gradients=self._gradients)
        self.is_prepared = True
        return self

    def reference(self, cotangents: Cotangents | None = None) -> ReferenceRun:
        """Run the copy and differentiate its loss, or its outputs by their cotangents."""
        if cotangents is None and self._prepared_run is not None:
            return self._prepared_run()
        return prepare_reference_run(self._net, self._batch, cotangents, gradients=self._gradients)()
