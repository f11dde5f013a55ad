"""``TrainingRun``: every record of a watched training by layer and step, also while it is being written."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import xarray as xr

from ..errors import FileError, InputError, QuantityNotFoundError, RnnlensError, TooLargeError, did_you_mean, message
from ..settings import current
from .base import Part, Result
from .diagnosis import Finding
from .disk import damaged_file_error, foreign_content_error
from .disk.run_folder import (
    MOST_ARRAYS,
    RunArray,
    check_total,
    chunk_files,
    committed_count,
    read_array,
    read_metadata,
    row_sums,
)
from .encoding import datasets_of, from_path
from .layers import LayerView
from .run_findings import run_findings
from .saving import KIND, check_schema

STEP, WRITTEN = "step", "written"
_KINDS = ("probe", "batch")
#: Arrays that every run must have.
_REQUIRED_ARRAYS = (STEP, "epoch", WRITTEN, "sums")
#: Attempts to read a run that looks damaged, and seconds between them: its writer may be replacing files.
_MAX_ATTEMPTS, _PAUSE_S = 3, 0.05


AlertFinding = Literal["exploding", "vanishing", "saturated"]
ALERT_FINDINGS: tuple[AlertFinding, ...] = ("exploding", "vanishing", "saturated")
_ALERT_SENTENCE = re.compile(
    rf"(?P<finding>{'|'.join(ALERT_FINDINGS)}) since step (?P<step>\d+): (?P<name>.+) is (?P<value>\S+), "
    r"and was (?P<usual>\S+) \(median of the records before\)"
)


#: Parts of the names of scalars that are of one weight each.
_OF_ONE_WEIGHT = re.compile(r"(.+/weight_norm|.+/weight_grad_norm|update_ratio|update_gradient)/.+")


def is_of_one_weight(name: str) -> bool:
    """Return whether a recorded scalar is of a single weight, such as ``lstm/weight_norm/kernel``."""
    return _OF_ONE_WEIGHT.fullmatch(name) is not None


@dataclass(frozen=True)
class Alert:
    """One finding on a training: its kind, the name of the scalar, and the step at which it began.

    ``value`` is the value in the record, ``usual`` the median of the records before.
    """

    finding: AlertFinding
    name: str
    step: int
    value: float
    usual: float

    @property
    def sentence(self) -> str:
        """The alert as one line of text.

        >>> Alert("exploding", "lstm/adjoint", 400, 5.0, 0.01).sentence
        'exploding since step 400: lstm/adjoint is 5, and was 0.01 (median of the records before)'
        """
        usual_text = f"{self.usual:.3g} (median of the records before)"
        return f"{self.finding} since step {self.step}: {self.name} is {self.value:.3g}, and was {usual_text}"

    @classmethod
    def from_sentence(cls, sentence: str) -> Alert | None:
        """Return the alert that a note of a run states, with its numbers to three digits; None for any other note.

        >>> alert = Alert("exploding", "lstm/adjoint", 400, 5.0, 0.01)
        >>> Alert.from_sentence(alert.sentence) == alert
        True
        """
        found = _ALERT_SENTENCE.fullmatch(sentence)
        if found is None:
            return None
        finding: Any = found["finding"]
        return cls(finding, found["name"], int(found["step"]), float(found["value"]), float(found["usual"]))


class Gap(NamedTuple):
    """Records that are missing from a run, and the reason.

    Attributes
    ----------
    where
        Place of the gap: ``"probe"`` or ``"batch"`` records, ``"the run"`` on disk, or a logger.
    first, last
        Steps of the first and the last missing record; None for the final write at the end of training.
    records
        Number of missing records.
    reason
        The error because of which they are missing.
    """

    where: str
    first: int | None
    last: int | None
    records: int
    reason: str


class LayerRun(LayerView):
    """One layer over training: profiles such as ``.adjoint_profile`` (step, time), scalars as ``.reach`` (step,)."""

    def _missing_message(self, name: str) -> str:
        return message(f"{name!r} was not recorded for layer {self.name!r}.", hint=did_you_mean(name, self))


class TrainingRun(Result, kind="run"):
    """Records of a watched training, as ``rl.open`` returns them: a mapping from layer names to :class:`LayerRun`.

    Attributes
    ----------
    scalars
        All numbers of all records: a Dataset with dimension ``step``, the recorded names
        (``"loss"``, ``"lstm/reach"``), and coordinates ``epoch`` and ``written`` (seconds since 1970).
    of
        Kind of the records: ``"probe"`` or ``"batch"``.
    ended
        Reason of the end: ``"finished"``, ``"interrupted"``, ``"stopped"``, or the name of an error; None while the run
        is being written, and if its process was killed.
    path
        Folder of the run; None for a run that was saved as one file.
    gaps
        Records that are missing, each a :class:`Gap`: a probe that failed, a full disk, a logger that raised.
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset] | xr.DataTree,
        scalars: xr.Dataset,
        *,
        of: str = "probe",
        ended: str | None = None,
        path: Path | None = None,
        gaps: Iterable[Sequence[Any]] = (),
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        self.scalars, self.of, self.ended, self.path = scalars, of, ended, path
        self.gaps = [Gap(*gap) for gap in gaps]
        #: memory= and skip_damaged= of the call that read it.
        self._read_options: tuple[int | None, bool] = (None, False)

    def __getitem__(self, name: str) -> LayerRun:
        return self._node(self._resolve(name))

    def _node(self, name: str) -> LayerRun:
        return LayerRun(name, self.dataset(name))

    @property
    def steps(self) -> xr.DataArray:
        """Number of batches trained on at each record: (step,)."""
        steps: xr.DataArray = self.scalars[STEP]
        return steps

    @property
    def loss(self) -> xr.DataArray:
        """Loss of each record: (step,).

        Raises
        ------
        QuantityNotFoundError
            If no loss was recorded.
        """
        return self.scalar("loss")

    def scalar(self, name: str) -> xr.DataArray:
        """Return one scalar over training, (step,), by its full name: ``run.scalar("lstm/reach")``.

        Raises
        ------
        QuantityNotFoundError
            If no scalar of that name was recorded.
        """
        if name not in self.scalars:
            hint = did_you_mean(name, map(str, self.scalars.data_vars))
            raise QuantityNotFoundError(f"No scalar named {name!r} in this run.", hint=hint)
        return self.scalars[name]

    @property
    def alerts(self) -> list[Alert]:
        """Alerts of the training so far, in the order in which they were raised, with numbers to three digits."""
        sentences = (re.sub(r"^step \d+: ", "", note) for note in self.notes)
        return [alert for sentence in sentences if (alert := Alert.from_sentence(sentence)) is not None]

    @property
    def findings(self) -> list[Finding]:
        """Findings on the training so far, faults first, each with its numbers, its rule and what to do.

        ``UPDATES_TOO_SMALL``, ``UPDATES_TOO_LARGE``: the change of the weights by one step of the optimizer.
        ``WEIGHTS_WITHOUT_GRADIENT``, ``FROZEN``: weights that are not trained. docs/findings has a page for each.
        """
        return run_findings(self.scalars, list(self), of=self.of)

    @property
    def batch(self) -> TrainingRun:
        """Records of the batches that were trained on.

        Raises
        ------
        FileError
            If there are no such records, or the run was not read from its folder.
        """
        return self._records_of_kind("batch")

    @property
    def probe(self) -> TrainingRun:
        """Records of the probe, a fixed held-out batch that is traced between two steps."""
        return self._records_of_kind("probe")

    def refresh(self) -> TrainingRun:
        """Read the run again, with new records, and with the ``memory=`` and ``skip_damaged=`` of the first read."""
        return self._records_of_kind(self.of)

    def _records_of_kind(self, kind: str) -> TrainingRun:
        if self.path is None:
            if kind == self.of:
                return self
            raise FileError(f"This run was saved without its {kind} records.", got=f"{self.of} records")
        memory, skip_damaged = self._read_options
        return read_run(self.path, of=kind, memory=memory, skip_damaged=skip_damaged)

    def _meta(self) -> dict[str, Any]:
        scalar_columns = {str(name): np.asarray(v, dtype=float).tolist() for name, v in self.scalars.data_vars.items()}
        index_columns = {name: self.scalars[name].values.tolist() for name in (STEP, "epoch", WRITTEN)}
        return {
            **super()._meta(),
            "of": self.of,
            "ended": self.ended,
            "gaps": self.gaps,
            "scalars": scalar_columns,
            "index": index_columns,
        }

    @classmethod
    def _restore(cls, tree: xr.DataTree, meta: Mapping[str, Any]) -> Self:
        meta = dict(meta)
        scalars = _scalar_dataset(meta.pop("index"), meta.pop("scalars"))
        return cls(datasets_of(tree, meta.pop("layers")), scalars, **meta)

    def _headline(self) -> str:
        count = self.steps.size
        step_range = f", steps {int(self.steps[0])} to {int(self.steps[-1])}" if count else ""
        loss = self.scalars.get("loss")
        loss_change = "" if loss is None or not count else f", loss {float(loss[0]):.4g} → {float(loss[-1]):.4g}"
        return (
            f"{count} {self.of} {'record' if count == 1 else 'records'}{step_range}, {super()._headline()}{loss_change}"
        )

    def _parts(self) -> list[Part]:
        loss = [("loss", "", self.scalars["loss"])] if "loss" in self.scalars else []
        return [*loss, *super()._parts()]

    def _remarks(self) -> list[tuple[str, str]]:
        ended = "" if self.ended == "finished" else self.ended or "not finished: it is being written, or was killed"
        missing = [
            (
                "missing",
                f"{gap.records} of {gap.where}, steps {gap.first} to {gap.last}: {gap.reason.partition(chr(10))[0]}",
            )
            for gap in self.gaps
        ]
        findings = [(finding.code, finding.advice) for finding in self.findings]
        return [*([("ended", ended)] if ended else []), *findings, *missing, *super()._remarks()]


def serve_run(path: str | PathLike[str] | None, port: int) -> Any:
    """Return a server of the live page of a run, which may not exist yet.

    Raises
    ------
    InputError
        If there is no path.
    FileError
        If the port cannot be used.
    """
    if path is None:
        raise InputError("A live page needs a run on disk.", got="path=None", hint='path="runs/a.zarr"')
    live = importlib.import_module("rnnlens.reporting.live")  # by name: pages are made of results
    return live.LiveServer({Path(path).name: Path(path)}, port)


def is_run(path: Path) -> bool:
    """Return whether a folder is a run, complete or not."""
    try:
        return bool(read_metadata(path, "", sealed=False)["attributes"][KIND] == "run")
    except (FileError, OSError, KeyError):
        return False


def read_run(
    path: Path,
    *,
    of: str | None = None,
    memory: int | None = None,
    skip_damaged: bool = False,
) -> TrainingRun:
    """Read the complete records of one kind from a run; by default the probe's, or those of batches without a probe.

    Parameters
    ----------
    memory
        Largest size of the arrays in bytes. Default: the limit of ``rl.options``; arrays above 128 MiB are then also
        limited to a thousand times the size of their files.
    skip_damaged
        Leave out records that do not match their checksums, rather than refuse the run.

    Raises
    ------
    FileError
        If there are no records of that kind, or the folder is damaged or of a newer rnnlens.
    TooLargeError
        If the arrays exceed ``memory``.
    """
    for attempt in range(_MAX_ATTEMPTS):
        try:
            run = _read_run(path, of, memory, skip_damaged=skip_damaged and attempt == _MAX_ATTEMPTS - 1)
            run._read_options = (memory, skip_damaged)
            return run
        except (TooLargeError, _NoRecordsError):
            raise
        except RnnlensError:
            if attempt == _MAX_ATTEMPTS - 1:
                raise
        except Exception as error:  # the libraries may raise anything for damaged files
            if attempt == _MAX_ATTEMPTS - 1:
                reason = str(error).partition("\n")[0]
                raise damaged_file_error(path, f"{type(error).__name__}: {reason}") from error
        time.sleep(_PAUSE_S)  # a writer may just have replaced what was read
    raise AssertionError("unreachable")


class _NoRecordsError(FileError):
    """The run has no records of the requested kind."""


def _read_run(path: Path, of: str | None, memory: int | None, *, skip_damaged: bool) -> TrainingRun:
    root = Path(os.path.realpath(path))
    attrs = read_metadata(root, "")["attributes"]
    check_schema(attrs, path)
    present_kinds = [kind for kind in _KINDS if (root / kind).is_dir()]
    kind = of or (present_kinds[0] if present_kinds else "probe")
    if of is not None and of not in present_kinds:
        present_listing = " and ".join(present_kinds) or "nothing"
        raise _NoRecordsError(f"This run has no {of} records.", got=f"{path}: {present_listing}")
    sessions = attrs.get("sessions") or [{}]
    run_fields = {
        "provenance": sessions[-1].get("provenance"),
        "ended": (attrs.get("ended") or {}).get("reason"),
        "gaps": attrs.get("gaps", []),
        "of": kind,
        "path": path,
    }
    record_count = _complete_count(root, kind, run_fields["ended"]) if kind in present_kinds else 0
    group_attrs = read_metadata(root, kind)["attributes"] if kind in present_kinds else {}
    files_by_array = chunk_files(root, kind)
    array_names = group_attrs.get("arrays", [])
    if not record_count and STEP not in array_names:  # a writer that was killed may not have listed them
        return TrainingRun({}, _scalar_dataset({STEP: [], "epoch": [], WRITTEN: []}, {}), **run_fields)
    if len(array_names) > MOST_ARRAYS:
        raise foreign_content_error(path, f"{len(array_names)} arrays")
    arrays, unreadable_arrays = _read_array_headers(root, kind, array_names, skip_damaged=skip_damaged)
    check_total(
        root, arrays, record_count, current().memory if memory is None else memory, memory_given=memory is not None
    )
    rows_by_array, is_damaged, damaged_arrays = _read_verified_rows(
        root, arrays, array_names, record_count, files_by_array
    )
    if damaged_arrays and not skip_damaged:
        damage_summary = f"{int(is_damaged.sum())} of {record_count} {kind} records do not match their checksums"
        hint = "rl.open(path, skip_damaged=True) leaves them out"
        raise FileError(
            "This run is damaged.", got=f"{path}: {damage_summary}: {_name_listing(damaged_arrays)}", hint=hint
        )
    is_intact = ~is_damaged
    damage_reasons = (
        [f"damaged on disk: {_name_listing(list(dict.fromkeys([*unreadable_arrays, *damaged_arrays])))}"]
        if unreadable_arrays or damaged_arrays
        else []
    )
    damaged_steps = rows_by_array[STEP][is_damaged]
    for reason in damage_reasons:
        step_limits = (int(damaged_steps[0]), int(damaged_steps[-1])) if len(damaged_steps) else (None, None)
        run_fields["gaps"] = [*run_fields["gaps"], ("the run", *step_limits, int(is_damaged.sum()), reason)]
    intact_rows = {name: rows[is_intact] for name, rows in rows_by_array.items()}
    return _run_of(group_attrs, {name: (arrays[name], rows) for name, rows in intact_rows.items()}, run_fields)


def _complete_count(root: Path, kind: str, ended: str | None) -> int:
    """Return the number of complete records; 0 if the writer was killed before it wrote that number."""
    if not (root / kind / "committed").is_dir() and ended is None:
        return 0
    array = read_array(root, f"{kind}/committed")
    if array.shape != (2,):
        raise damaged_file_error(root, f"{kind}/committed has the shape {array.shape}")
    return committed_count(array.rows(2, ["0"])[0], root)


def _read_array_headers(
    root: Path, kind: str, names: Iterable[str], *, skip_damaged: bool
) -> tuple[dict[str, RunArray], list[str]]:
    """Read the metadata of all arrays; return the arrays by name, and the names of those with damaged metadata."""
    arrays: dict[str, RunArray] = {}
    unreadable_arrays: list[str] = []
    for name in [*names, "sums"]:
        if not (root / kind / name).is_dir():
            continue  # a missing array is found later: its rows do not match their checksums
        try:
            arrays[name] = read_array(root, f"{kind}/{name}")
        except FileError:
            if not skip_damaged or name in _REQUIRED_ARRAYS:
                raise
            unreadable_arrays.append(name)
    return arrays, unreadable_arrays


def _read_verified_rows(
    root: Path, arrays: dict[str, RunArray], names: list[str], count: int, files_by_array: Mapping[str, list[str]]
) -> tuple[dict[str, Any], Any, list[str]]:
    """Read and verify all rows; return rows by array, a mask of damaged rows, and names of damaged arrays."""
    rows_by_array: dict[str, Any] = {}
    is_damaged = np.zeros(count, dtype=bool)
    damaged_arrays: list[str] = []
    if count and "sums" not in arrays:
        raise damaged_file_error(root, "its checksums are missing")
    if "sums" in arrays:
        # checksums of lost rows are 0 and match no row
        sums, _ = arrays.pop("sums").rows(count, files_by_array.get("sums", []))
    for index, name in enumerate(names):
        expected_sums = sums[:, index] if count and index < sums.shape[1] else np.zeros(count, dtype=np.uint32)
        if name not in arrays:
            if expected_sums.any():
                damaged_arrays.append(name)
            continue
        rows_by_array[name], unreadable_slices = arrays[name].rows(count, files_by_array.get(name, []))
        is_wrong = row_sums(rows_by_array[name], name) != expected_sums
        for unreadable_slice in unreadable_slices:
            is_wrong[unreadable_slice] = True
        if is_wrong.any():
            damaged_arrays.append(name)
            is_damaged |= is_wrong
    return rows_by_array, is_damaged, damaged_arrays


def _name_listing(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _run_of(
    attrs: Mapping[str, Any], arrays: Mapping[str, tuple[RunArray, Any]], run_fields: Mapping[str, Any]
) -> TrainingRun:
    """Build the result from the rows of its arrays."""
    index_columns = {name: arrays[name][1] if name in arrays else [] for name in (STEP, "epoch", WRITTEN)}
    record_count = len(index_columns[STEP])
    table = arrays["scalars"][1] if "scalars" in arrays else np.zeros((record_count, 0))
    columns = dict(zip(attrs.get("scalars", []), np.asarray(table).T, strict=False))
    scalars = _scalar_dataset(index_columns, columns)
    layers: dict[str, dict[str, xr.DataArray]] = {layer: {} for layer in attrs.get("layers", [])}
    for name, (array, rows) in arrays.items():
        if name.startswith("layers/"):
            path, _, quantity = name.removeprefix("layers").rpartition("/")
            layers.setdefault(from_path(path), {})[quantity] = _labelled_rows(array, rows, quantity, scalars)
    for name in map(str, scalars.data_vars):
        layer = max((layer for layer in layers if name.startswith(f"{layer}/")), key=len, default=None)
        if layer is not None:
            layers[layer].setdefault(name.removeprefix(f"{layer}/").replace("/", "_"), scalars[name])
    notes = [
        f"step {step}: {note}"
        for step, note in attrs.get("notes", [])
        if not record_count or step <= index_columns[STEP][-1]
    ]
    return TrainingRun(
        {layer: xr.Dataset(quantities) for layer, quantities in layers.items()}, scalars, notes=notes, **run_fields
    )


def _labelled_rows(array: RunArray, rows: Any, name: str, scalars: xr.Dataset) -> xr.DataArray:
    attrs = {key: value for key, value in array.attrs.items() if key != "labels"}
    labels = array.attrs.get("labels", {})
    sizes = dict(zip(array.dims, rows.shape, strict=True))
    coords = {dim: labels[dim] for dim in array.dims if dim in labels and len(labels[dim]) == sizes[dim]}
    for dim, size in zip(array.dims[1:], rows.shape[1:], strict=True):
        coords.setdefault(dim, np.arange(size))
    coords |= {STEP: scalars[STEP].values, "epoch": (STEP, scalars["epoch"].values)}
    return xr.DataArray(rows, dims=array.dims, coords=coords, name=name, attrs=attrs)


def _scalar_dataset(index_columns: Mapping[str, Any], columns: Mapping[str, Any]) -> xr.Dataset:
    coords: dict[str, Any] = {STEP: np.asarray(index_columns[STEP], dtype=np.int64)}
    coords[STEP] = xr.Variable(
        (STEP,), coords[STEP], {"long_name": "training step", "definition": "batches trained on"}
    )
    coords["epoch"] = xr.Variable((STEP,), np.asarray(index_columns["epoch"], dtype=np.int64), {"long_name": "epoch"})
    written_attrs = {"long_name": "time of writing", "units": "seconds since 1970"}
    coords[WRITTEN] = xr.Variable((STEP,), np.asarray(index_columns[WRITTEN], dtype=np.float64), written_attrs)
    return xr.Dataset({name: ((STEP,), np.asarray(v), {"long_name": name}) for name, v in columns.items()}, coords)
