"""From the numbers of a time Jacobian to a labelled array."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from ..results.checks import Check
from ..results.jacobian import CHECKS, TimeJacobian
from ..results.schema import labelled, plain
from ..vocabulary import BACKWARD, DIRECTION, FORWARD, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE
from .jacobian_target import Swept
from .jacobian_wanted import Ends, Tally
from .names import Catalogue, TensorName

IN_DIRECTION = "in_direction"

_WORDS = {
    None: "time Jacobian",
    "norm": "norm of the time Jacobian",
    "spectral": "largest singular value of the time Jacobian",
    "sum": "sum of the time Jacobian",
    "mean": "mean of the time Jacobian",
    "abs_mean": "mean magnitude of the time Jacobian",
}

_DEFINITIONS = {
    None: "G[t, k] = d {of}[t] / d {wrt}[k]",
    "norm": "Frobenius norm of d {of}[t] / d {wrt}[k] over {units} and input features",
    "spectral": "largest singular value of the matrix d {of}[t] / d {wrt}[k], {units} by input features",
    "sum": "sum of d {of}[t] / d {wrt}[k] over {units} and input features",
    "mean": "mean of d {of}[t] / d {wrt}[k] over {units} and input features",
    "abs_mean": "mean of |d {of}[t] / d {wrt}[k]| over {units} and input features",
}


@dataclass
class Labels:
    """Everything that the words of a result depend on."""

    names: tuple[TensorName, TensorName]
    ends: Ends
    reduce: str | None
    sketch: int | None
    known: Catalogue
    provenance: Mapping[str, str]
    training: bool
    project: Any = None
    #: By time axis, (sample, step): False at padding; only where there is some.
    masks: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    @property
    def kind(self) -> str | None:
        """The reduction."""
        return "norm" if self.sketch is not None else self.reduce

    @property
    def dims(self) -> tuple[str, ...]:
        """Dimensions of the result."""
        ends = self.ends
        found = [] if ends.average else [SAMPLE]
        found += [OUT_TIME] if ends.out_times is not None else []
        found += [DIRECTION] if ends.of.bidirectional else []
        found += [OUT_UNIT] if self.kind is None else []
        found += [IN_TIME] if ends.in_times is not None else []
        found += [IN_DIRECTION] if ends.wrt.bidirectional else []
        return tuple(found + ([IN_FEATURE] if self.kind is None else []))

    def shape(self, samples: int) -> tuple[int, ...]:
        """Sizes along ``dims``."""
        ends = self.ends
        sizes = {
            SAMPLE: samples,
            OUT_TIME: ends.groups,
            DIRECTION: 2,
            OUT_UNIT: ends.rows,
            IN_TIME: 1 if ends.in_times is None else len(ends.in_times),
            IN_DIRECTION: 2,
            IN_FEATURE: ends.wrt.size,
        }
        return tuple(sizes[dim] for dim in self.dims)

    def coords(self) -> dict[str, Any]:
        """Steps as they were asked for."""
        found: dict[str, Any] = {}
        if self.ends.out_times is not None:
            found[OUT_TIME] = self.ends.out_times
        if self.ends.in_times is not None:
            found[IN_TIME] = self.ends.in_times
        if self.ends.wrt.bidirectional:
            found[IN_DIRECTION] = [FORWARD, BACKWARD]
        return {dim: labels for dim, labels in found.items() if dim in self.dims}

    def attrs(self, tally: Tally, checks: Sequence[Check]) -> dict[str, Any]:
        """What it is, and how it was computed."""
        of, wrt = (name.text for name in self.names)
        mean = ", averaged over samples" if self.ends.average else ""
        units = "output units" if self.project is None else "the projected output units"
        found: dict[str, Any] = {
            "long_name": f"{_WORDS[self.kind]}{mean}",
            "units": "1",
            "definition": _DEFINITIONS[self.kind].format(of=of, wrt=wrt, units=units) + mean,
            "of": of,
            "wrt": wrt,
            "source": "Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eq. 5",
            "mode": tally.mode,
            "route": tally.route,
            "flops": float(tally.flops),
            "peak_bytes": int(tally.peak_bytes),
            "replay_residual": max((c.residual for c in checks), default=0.0),
            CHECKS: json.dumps([check.to_dict() for check in checks]),
        }
        if self.sketch is not None:
            found["sketch"] = int(self.sketch)
            found["definition"] += f", estimated with {self.sketch} random probes"
        if tally.pruned:
            found["pruning_error"] = float(np.sqrt(tally.pruned_error_square))
            found["pruned_rows"] = int(tally.pruned_rows)
        return found

    def array(self, values: Any, tally: Tally, checks: Sequence[Check]) -> xr.DataArray:
        """Label finished numbers; ``(..., 2)`` of a sketch become an estimate with its error."""
        attrs = self.attrs(tally, checks)
        if self.sketch is None:
            return self._labelled(values, attrs)
        squared, variance = values[..., 0], values[..., 1]
        result = self._labelled(np.sqrt(squared), attrs)
        extra = {
            "norm_squared": (squared, "unbiased estimate of the squared Frobenius norm"),
            "norm_squared_stderr": (np.sqrt(variance), "standard error of norm_squared"),
        }
        coords = {
            name: xr.Variable(self.dims, array, {"long_name": words, "units": "1"})
            for name, (array, words) in extra.items()
        }
        return result.assign_coords(coords)

    def _labelled(self, values: Any, attrs: Mapping[str, Any]) -> xr.DataArray:
        array = labelled(
            values, self.dims, name="jacobian", attrs=attrs, coords=self.coords(), provenance=self.provenance
        )
        words = {"units": "1", "long_name": "step is not padding"}
        return TimeJacobian(
            array.assign_coords(
                {
                    f"{time}_mask": xr.Variable((SAMPLE, time), mask, words)
                    for time, mask in self.masks.items()
                    if {SAMPLE, time} <= set(self.dims)
                }
            )
        )


def masks_of(ends: Ends, swept: Sequence[Swept]) -> dict[str, np.ndarray[Any, Any]]:
    """Masks (sample, step) of the steps asked for at either end, where some of them are padding."""
    known = [np.asarray(plain(one.half.run.mask)) for one in swept if one.half.run.mask is not None]
    found = {}
    for time, end, steps in ((OUT_TIME, ends.of, ends.out_times), (IN_TIME, ends.wrt, ends.in_times)):
        mask = next((mask for mask in known if mask.shape[1] == end.times), None)
        if mask is not None and steps is not None and not mask.all():
            found[time] = mask[:, steps].astype(bool)
    return found
