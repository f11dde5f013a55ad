"""Labels of a time Jacobian, in memory or in a file that is written piece by piece; the mean over batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from ...errors import FileError, InputError, RnnlensError, UnsupportedError
from ...results.array import LabelledArray, record_attrs
from ...results.checks import Certificate, Check, worst_checks
from ...results.disk import replacing_folder
from ...results.disk.store import new_recording_store, recording_store
from ...results.opening import open as open_result
from ...results.saving import check_path
from ...results.schema import labelled_array, to_host
from ...vocabulary import BACKWARD, FEATURE, FORWARD, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE, TIME
from ..axes import InputCoordinates
from .plan import IN_DIRECTION, JacobianPlan, WorkCount
from .request import JacobianOptions


def refuse_without_mean(options: JacobianOptions) -> None:
    """Raise for a Jacobian of a data set that keeps samples, or has options that apply to one batch only."""
    if options.across is None:
        expected = 'across="mean"; or one batch, whose samples are kept'
        raise InputError("The time Jacobian of a data set keeps no samples.", expected=expected)
    refuse_for_chunks(options, "a data set")


def refuse_for_chunks(options: JacobianOptions, data_kind: str = "lazy data") -> None:
    """Raise UnsupportedError for Jacobian options that apply to one batch only: ``sketch``, ``rtol``, ``out``."""
    for name in ("sketch", "rtol", "out"):
        if getattr(options, name) is not None:
            message = f"{name}= applies to one batch, not to {data_kind}."
            hint = (
                'result.save("jacobian.zarr") writes chunk by chunk'
                if (name, data_kind) == ("out", "lazy data")
                else None
            )
            raise UnsupportedError(message, got=f"{name}= and {data_kind}", expected="one batch", hint=hint)


def mean_over(jacobians: Iterable[tuple[LabelledArray, int]]) -> LabelledArray:
    """Average Jacobians, weighted by their numbers of samples; keep the worst check and certificate of all batches."""
    first_jacobian: LabelledArray | None = None
    total, samples, checks, certificates = np.zeros(()), 0, list[Check](), list[Certificate]()
    for jacobian, count in jacobians:
        first_jacobian = jacobian if first_jacobian is None else first_jacobian
        if jacobian.shape != first_jacobian.shape:
            got, hint = f"{jacobian.sizes} after {first_jacobian.sizes}", "pad all batches to one length"
            raise InputError("Batches differ in length, so their mean is not defined.", got=got, hint=hint)
        total, samples = total + jacobian.values.astype(np.float64) * count, samples + count
        checks = worst_checks([*checks, *jacobian.checks])
        certificates.append(jacobian.certificate)
    assert first_jacobian is not None
    mean = first_jacobian.copy(data=(total / samples).astype(first_jacobian.dtype))
    compared = {(check.name, check.layer) for certificate in certificates for check in certificate.checks}
    self_checks = [check for check in checks if (check.name, check.layer) not in compared]
    worst = min(certificates, key=lambda certificate: ("failed", "could not", "passed", "off").index(certificate.state))
    mean.attrs |= record_attrs(self_checks, worst) | {"samples": samples}
    return LabelledArray(mean)


_LONG_NAMES = {
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
class JacobianLabels:
    """Name, dimensions, coordinates and attributes of a planned time Jacobian."""

    plan: JacobianPlan
    provenance: Mapping[str, str]
    inputs: InputCoordinates
    frozen: bool = False

    def coords(self) -> dict[str, Any]:
        """Return the coordinates of the Jacobian's dimensions: the requested steps, and labels of the inputs."""
        coords: dict[str, Any] = {SAMPLE: self.inputs.find(SAMPLE, self.plan.network.samples)}
        ends = self.plan.ends
        for dim, end, times in ((OUT_TIME, ends.of, ends.out_times), (IN_TIME, ends.wrt, ends.in_times)):
            if times is not None and end.times is not None:
                labels = self.inputs.find(TIME, end.times)
                coords[dim] = times if labels is None else labels[times]
        if ends.wrt.kind == "input" and ends.wrt.name.layer is None:
            coords[IN_FEATURE] = self.inputs.find(FEATURE, ends.wrt.size, ends.wrt.name.index)
        if len(self.plan.ends.wrt.within) > 1:
            coords[IN_DIRECTION] = [FORWARD, BACKWARD]
        return {dim: labels for dim, labels in coords.items() if labels is not None and dim in self.plan.dims}

    def attrs(self, tally: WorkCount, checks: Sequence[Check]) -> dict[str, Any]:
        """Return the attributes of the Jacobian's DataArray: definition, route, mode, cost and self-checks."""
        ends, plan = self.plan.ends, self.plan
        of, wrt = ends.of.name.text, ends.wrt.name.text
        mean = ", averaged over samples" if ends.average else ""
        units = "output units" if ends.projection is None else "the projected output units"
        attributes: dict[str, Any] = {
            "long_name": f"{_LONG_NAMES[ends.measure]}{mean}",
            "units": "1",
            "definition": _DEFINITIONS[ends.measure].format(of=of, wrt=wrt, units=units) + mean,
            "of": of,
            "wrt": wrt,
            "source": "Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eq. 5",
            "mode": plan.parts[0].mode,
            "route": plan.parts[0].route,
            "flops": float(tally.flops),
            "peak_bytes": int(plan.peak_bytes),
            "replay_residual": max((c.residual for c in checks), default=0.0),
            **record_attrs(checks),
        }
        if self.frozen:
            attributes["long_name"] = f"frozen {attributes['long_name']}"
            attributes["definition"] += (
                "; decay, write and read of whole-sequence layers held constant (arXiv:2403.01590)"
            )
        if ends.sketch is not None:
            attributes["sketch"] = int(ends.sketch)
            attributes["definition"] += f", estimated with {ends.sketch} random probes"
        if tally.pruned:
            attributes["pruning_error"] = float(np.sqrt(tally.pruned_error_square))
            attributes["pruned_rows"] = int(tally.pruned_rows)
        return attributes

    def array(self, values: Any, tally: WorkCount, checks: Sequence[Check]) -> LabelledArray:
        """Label computed values; the last axis (estimate, variance) of a sketch becomes value and standard error."""
        dims, attrs, coords = self.plan.dims, self.attrs(tally, checks), {}
        if self.plan.ends.sketch is not None:
            squared, variance = values[..., 0], values[..., 1]
            values = np.sqrt(squared)
            attributes = {"units": "1", "long_name": "unbiased estimate of the squared Frobenius norm"}
            coords["norm_squared"] = xr.Variable(dims, squared, attributes)
            attributes = {"units": "1", "long_name": "standard error of norm_squared"}
            coords["norm_squared_stderr"] = xr.Variable(dims, np.sqrt(variance), attributes)
        attributes = {"units": "1", "long_name": "step is not padding"}
        masks = {time: mask for time, mask in self.masks().items() if {SAMPLE, time} <= set(dims)}
        coords |= {f"{time}_mask": xr.Variable((SAMPLE, time), mask, attributes) for time, mask in masks.items()}
        own_coords, source = self.coords(), self.provenance
        if self.plan.ends.of.image or self.plan.ends.wrt.image:
            coords |= self.image_coords()
        array = labelled_array(values, dims, name="jacobian", attrs=attrs, coords=own_coords, provenance=source)
        return LabelledArray(array.assign_coords(coords))

    def image_coords(self) -> dict[str, xr.Variable]:
        """Return the channel and the place of every output unit and input feature of an image, as coordinates."""
        ends, coords = self.plan.ends, dict[str, xr.Variable]()
        for dim, end, prefix in ((OUT_UNIT, ends.of, "out"), (IN_FEATURE, ends.wrt, "in")):
            if dim not in self.plan.dims or not end.image or (dim == OUT_UNIT and ends.weights is not None):
                continue
            places = np.unravel_index(np.arange(end.size), tuple(end.image.values()))
            coords |= {f"{prefix}_{name}": xr.Variable(dim, at) for name, at in zip(end.image, places, strict=True)}
        return coords

    def masks(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return masks (sample, step) of the requested steps by time axis, False at padding; none without padding."""
        call_masks = (replayed.run.mask for replayed in self.plan.network.recurrences)
        present_masks = [np.asarray(to_host(mask)) for mask in call_masks if mask is not None]
        masks, ends = {}, self.plan.ends
        for time, end, steps in ((OUT_TIME, ends.of, ends.out_times), (IN_TIME, ends.wrt, ends.in_times)):
            mask = next((mask for mask in present_masks if mask.shape[1] == end.times), None)
            if mask is not None and steps is not None and not mask.all():
                masks[time] = mask[:, steps].astype(bool)
        return masks


#: Bytes per chunk of the array on disk.
_CHUNK = 4 * 2**20
#: Write chunks of fill values as well, so that a missing chunk always means missing data.
_EVERY_CHUNK = {"write_empty_chunks": True}


class ZarrTarget:
    """A Zarr file that is written piece by piece; values not yet written are NaN.

    The folder is created with all labels and no values, and can be read at any time from then on. The attribute
    ``finished`` of the array is 0 until all values are written; checksums are written last.
    """

    def __init__(
        self, path: str | PathLike[str], labels: JacobianLabels, tally: WorkCount, checks: Sequence[Check]
    ) -> None:
        if Path(path).suffix.lower() != ".zarr":
            raise FileError("out= is written in chunks.", got=str(path), expected="a path in .zarr")
        self.path, self.requested_path = check_path(path), Path(path)
        self.labels, self.tally, self.checks = labels, tally, checks
        self.shape, self.dtype = labels.plan.shape, labels.plan.dtype

    def __enter__(self) -> ZarrTarget:
        with self._file_errors(), replacing_folder(self.path) as folder, new_recording_store(folder) as self.store:
            sums = self._lay_out()
        self.store = recording_store(self.path, sums)
        self.array = self._group()["jacobian"].with_config(_EVERY_CHUNK)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            return
        with self._file_errors():
            self._write_attributes(self.array, finished=True)
            self.store.seal()

    def __setitem__(self, index: tuple[Any, ...], values: Any) -> None:
        with self._file_errors():
            self.array[index] = np.asarray(values, dtype=self.dtype)

    def _lay_out(self) -> dict[str, str]:
        """Write labels and an array without values; return the checksums of both."""
        template = self._template()
        coords = template.coords.to_dataset()
        encoding = dict.fromkeys(coords.variables, _EVERY_CHUNK)
        coords.to_zarr(self.store, mode="w-", zarr_format=2, consolidated=False, encoding=encoding)
        chunks = _chunks(self.shape, self.dtype.itemsize)
        array = self._group().create_array(
            "jacobian", shape=self.shape, chunks=chunks, dtype=self.dtype, fill_value=np.nan, config=_EVERY_CHUNK
        )
        self._write_attributes(array, finished=False)
        return self.store.sums

    def _template(self) -> xr.DataArray:
        """Return a labelled array of the time Jacobian that takes no memory: every value is NaN."""
        empty = np.broadcast_to(np.asarray(np.nan, self.dtype), self.shape)
        return self.labels.array(empty, self.tally, self.checks)

    def _group(self) -> Any:
        return zarr.open_group(self.store, mode="r+", zarr_format=2)

    def _write_attributes(self, array: Any, *, finished: bool) -> None:
        attrs = self._template().attrs
        plain_attrs = {key: value.item() if isinstance(value, np.generic) else value for key, value in attrs.items()}
        array.attrs.update({**plain_attrs, "_ARRAY_DIMENSIONS": list(self.labels.plan.dims), "finished": int(finished)})

    @contextmanager
    def _file_errors(self) -> Iterator[None]:
        try:
            yield
        except RnnlensError:
            raise
        except OSError as error:
            raise FileError("The file cannot be written.", got=f"{self.requested_path}: {error}") from error

    def result(self) -> LabelledArray:
        """Return the written Jacobian, loaded lazily."""
        written = open_result(self.requested_path, lazy=True)
        assert isinstance(written, LabelledArray)
        return written


def _chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return a chunk shape below the size limit, halving the leading axes first."""
    chunks = list(shape)
    for axis in range(len(chunks)):
        while int(np.prod(chunks)) * itemsize > _CHUNK and chunks[axis] > 1:
            chunks[axis] = -(-chunks[axis] // 2)
    return tuple(max(1, n) for n in chunks)
