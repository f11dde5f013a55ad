"""``on_nonfinite="report"``: writes the first batch that is not finite to a file, which ``rl.open`` reads."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from .. import data
from ..adapters.protocol import Batch
from ..errors import InputError, shown
from ..results.nonfinite import Incident
from .batches import TrainedBatch

_log = logging.getLogger("rnnlens")
#: Value of ``on_nonfinite=`` that enables the report.
REPORT = "report"


def checked_on_nonfinite(value: Any) -> str | None:
    """Return ``on_nonfinite=`` if it is ``None`` or ``"report"``; raise InputError for any other value."""
    if not (value is None or (isinstance(value, str) and value == REPORT)):
        raise InputError("on_nonfinite= is not understood.", got=shown(value), expected=f"None or {REPORT!r}")
    return REPORT if value is not None else None


def is_finite(loss: Any) -> bool:
    """Return whether a loss is a finite number; True for None."""
    return loss is None or math.isfinite(float(loss))


class Incidents:
    """Writer of the first batch that is not finite; it writes at most one file per run.

    Parameters
    ----------
    run
        Folder of the run: for ``runs/a.zarr`` the file is ``runs/a.nonfinite.nc``; for None it is ``nonfinite.nc``.
    provenance
        Framework, versions, device.
    """

    def __init__(self, run: str | PathLike[str] | None, provenance: Mapping[str, str] | None = None) -> None:
        self.path = Path("nonfinite.nc") if run is None else Path(run).with_suffix(".nonfinite.nc")
        self.written: Path | None = None
        self._provenance = dict(provenance or {})

    def report(self, batch: Batch, weights: Mapping[str, Any], when: Mapping[str, Any]) -> Path | None:
        """Write a batch and the weights before its update, and return the path; None if a batch was written before.

        ``weights`` are by the framework's own names, in its order and layout. ``when`` has ``step``, ``epoch``,
        ``loss``, and ``found``: the sentence of ``rl.find_nonfinite``, if it was run.
        """
        if self.written is not None:
            return None
        # A file stores packed sequences as padded ones.
        parts = {
            name: data.map_leaves(lambda leaf: data.padded(leaf) if data.is_packed(leaf) else leaf, value)
            for name, value in (("x", batch.x), ("y", batch.y), ("sample_weight", batch.sample_weight))
        }
        incident = Incident.of(parts, weights, when, provenance=self._provenance)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        incident.save(self.path)
        self.written = self.path
        _log.warning(
            "Step %d of training is not finite%s. Its batch and the weights that it met are in %s; rl.open reads them.",
            incident.step,
            f": {incident.found.rstrip('.')}" if incident.found else "",
            self.path,
        )
        return self.path

    def report_trained(self, trained: TrainedBatch, weights: Callable[[], Mapping[str, Any]], loss: Any) -> Path | None:
        """Write a batch of training, the weights before its update, and the place of its first non-finite number.

        ``weights`` returns the current weights; it is called while the model has the old ones.
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
    """Return the result of ``ask()``; if it raises, a sentence that names the error."""
    try:
        return ask()
    except Exception as error:
        said = str(error).partition("\n")[0]
        return f"its origin could not be determined ({type(error).__name__}{f': {said}' if said else ''})"
