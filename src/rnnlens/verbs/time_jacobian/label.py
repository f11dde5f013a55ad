"""From the numbers of a time Jacobian to a labelled array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ...results.array import ResultArray, record
from ...results.checks import Check
from ...results.schema import labelled, to_host
from ...vocabulary import BACKWARD, FEATURE, FORWARD, IN_FEATURE, IN_TIME, OUT_TIME, SAMPLE, TIME
from ..axes import InputCoordinates
from .ends import Ends
from .plan import IN_DIRECTION, Plan
from .tally import Tally

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


@dataclass(frozen=True)
class Labels:
    """What a planned time Jacobian is called, and what its axes are."""

    plan: Plan
    provenance: Mapping[str, str]
    inputs: InputCoordinates

    @property
    def ends(self) -> Ends:
        """What is wanted of the two ends."""
        return self.plan.ends

    def coords(self) -> dict[str, Any]:
        """Return the steps as they were asked for, and the labels that the inputs have."""
        found: dict[str, Any] = {SAMPLE: self.inputs.find(SAMPLE, self.plan.network.samples)}
        ends = self.ends
        for dim, end, times in ((OUT_TIME, ends.of, ends.out_times), (IN_TIME, ends.wrt, ends.in_times)):
            if times is not None and end.times is not None:
                labels = self.inputs.find(TIME, end.times)
                found[dim] = times if labels is None else labels[times]
        if ends.wrt.what == "input" and ends.wrt.name.layer is None:
            found[IN_FEATURE] = self.inputs.find(FEATURE, ends.wrt.size, ends.wrt.name.index)
        if self.ends.wrt.bidirectional:
            found[IN_DIRECTION] = [FORWARD, BACKWARD]
        return {dim: labels for dim, labels in found.items() if labels is not None and dim in self.plan.dims}

    def attrs(self, tally: Tally, checks: Sequence[Check]) -> dict[str, Any]:
        """What it is, and how it was computed."""
        ends, plan = self.ends, self.plan
        of, wrt = ends.of.name.text, ends.wrt.name.text
        mean = ", averaged over samples" if ends.average else ""
        units = "output units" if ends.projection is None else "the projected output units"
        found: dict[str, Any] = {
            "long_name": f"{_WORDS[ends.measure]}{mean}",
            "units": "1",
            "definition": _DEFINITIONS[ends.measure].format(of=of, wrt=wrt, units=units) + mean,
            "of": of,
            "wrt": wrt,
            "source": "Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eq. 5",
            "mode": plan.mode,
            "route": plan.route,
            "flops": float(tally.flops),
            "peak_bytes": int(plan.peak_bytes),
            "replay_residual": max((c.residual for c in checks), default=0.0),
            **record(checks),
        }
        if ends.sketch is not None:
            found["sketch"] = int(ends.sketch)
            found["definition"] += f", estimated with {ends.sketch} random probes"
        if tally.pruned:
            found["pruning_error"] = float(np.sqrt(tally.pruned_error_square))
            found["pruned_rows"] = int(tally.pruned_rows)
        return found

    def array(self, values: Any, tally: Tally, checks: Sequence[Check]) -> ResultArray:
        """Label finished numbers; ``(..., 2)`` of a sketch become an estimate with its error."""
        attrs = self.attrs(tally, checks)
        if self.ends.sketch is None:
            return self._labelled(values, attrs)
        squared, variance = values[..., 0], values[..., 1]
        result = self._labelled(np.sqrt(squared), attrs)
        extra = {
            "norm_squared": (squared, "unbiased estimate of the squared Frobenius norm"),
            "norm_squared_stderr": (np.sqrt(variance), "standard error of norm_squared"),
        }
        coords = {
            name: xr.Variable(self.plan.dims, array, {"long_name": words, "units": "1"})
            for name, (array, words) in extra.items()
        }
        return ResultArray(result.assign_coords(coords))

    def _labelled(self, values: Any, attrs: Mapping[str, Any]) -> ResultArray:
        array = labelled(
            values, self.plan.dims, name="jacobian", attrs=attrs, coords=self.coords(), provenance=self.provenance
        )
        words = {"units": "1", "long_name": "step is not padding"}
        masks = {time: mask for time, mask in self.masks().items() if {SAMPLE, time} <= set(self.plan.dims)}
        coords = {f"{time}_mask": xr.Variable((SAMPLE, time), mask, words) for time, mask in masks.items()}
        return ResultArray(array.assign_coords(coords))

    def masks(self) -> dict[str, np.ndarray[Any, Any]]:
        """Masks (sample, step) of the steps asked for at either end, where some of them are padding."""
        every = (one.half.run.mask for one in self.plan.network.recurrences)
        known = [np.asarray(to_host(mask)) for mask in every if mask is not None]
        found, ends = {}, self.ends
        for time, end, steps in ((OUT_TIME, ends.of, ends.out_times), (IN_TIME, ends.wrt, ends.in_times)):
            mask = next((mask for mask in known if mask.shape[1] == end.times), None)
            if mask is not None and steps is not None and not mask.all():
                found[time] = mask[:, steps].astype(bool)
        return found
