"""What a callback does with the first batch that is no longer finite: it is written to a file that can be traced."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from .. import data
from ..adapters.protocol import Batch
from ..errors import InputError, message, shown
from ..results.files import save
from ..results.nonfinite import Incident
from .batches import TrainedBatch

_log = logging.getLogger("rnnlens")
#: What ``on_nonfinite=`` of a callback may be.
REPORT = "report"


def checked_on_nonfinite(value: Any) -> str | None:
    """``None`` or ``"report"``.

    Raises
    ------
    InputError
        For anything else.
    """
    if value not in (None, REPORT):
        raise InputError(message("on_nonfinite= is not understood.", got=shown(value), expected=f"None or {REPORT!r}"))
    return REPORT if value is not None else None


def is_finite(loss: Any) -> bool:
    """Whether a loss, of whatever framework, is a finite number."""
    return loss is None or math.isfinite(float(loss))


class Incidents:
    """Writes the first batch that is not finite, once per run.

    Parameters
    ----------
    run
        The folder of the run: ``runs/a.zarr`` is reported on in ``runs/a.nonfinite.nc``; without one,
        ``nonfinite.nc``.
    provenance
        Framework, versions, device.
    """

    def __init__(self, run: str | PathLike[str] | None, provenance: Mapping[str, str] | None = None) -> None:
        self.path = Path("nonfinite.nc") if run is None else Path(run).with_suffix(".nonfinite.nc")
        self.written: Path | None = None
        self._provenance = dict(provenance or {})

    def report(self, batch: Batch, weights: Mapping[str, Any], when: Mapping[str, Any]) -> Path | None:
        """Write a batch and the weights that it met, unless one was written before.

        Parameters
        ----------
        batch
            Of it ``x``, ``y`` and ``sample_weight``, as far as they are known.
        weights
            Before the update: by the framework's own names, in its order and layout.
        when
            ``step``, ``epoch``, ``loss``, and ``found``: the sentence of ``rl.find_nonfinite``, where it was asked.

        Returns
        -------
        Path
            Of the file; None where one was there already.
        """
        if self.written is not None:
            return None
        parts = {name: _unpacked(getattr(batch, name)) for name in ("x", "y", "sample_weight")}
        incident = Incident.of(parts, weights, when, provenance=self._provenance)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save(incident, self.path)
        self.written = self.path
        _log.warning(
            "Step %d of training is not finite%s. Its batch and the weights that it met are in %s; rl.open reads them.",
            incident.step,
            f": {incident.found.rstrip('.')}" if incident.found else "",
            self.path,
        )
        return self.path

    def report_trained(self, trained: TrainedBatch, weights: Callable[[], Mapping[str, Any]], loss: Any) -> Path | None:
        """Write a batch that was trained on with the weights it met, and where its fault begins.

        Parameters
        ----------
        trained
            The batch.
        weights
            Reads the weights of the model as they are.
        loss
            Of the batch; None where it is not known.
        """
        batch = Batch(trained.x, trained.y, trained.sample_weight)
        when = {
            "step": trained.step,
            "epoch": trained.epoch,
            "loss": loss,
            "found": told(lambda: trained.nonfinite.sentence),
        }
        return self.report(batch, trained.with_variables_before(weights), when)


def told(ask: Callable[[], str]) -> str:
    """Where the fault begins, if that can be told; what cannot is no reason not to write the batch."""
    try:
        return ask()
    except Exception as error:
        said = str(error).partition("\n")[0]
        return f"where it begins could not be told ({type(error).__name__}{f': {said}' if said else ''})"


def _unpacked(value: Any) -> Any:
    """Packed sequences as padded ones, which a file can hold."""
    return data.map_leaves(lambda leaf: data.padded(leaf) if data.is_packed(leaf) else leaf, value)
