"""``ResultArray``: a single labelled array with checks, certificate, provenance and ``save``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import xarray as xr

from ..arguments import checked
from ..arguments import path as path_of
from .certificate import Certificate
from .checks import Check
from .page import Row, page
from .schema import provenance_of

#: Attributes of an array that store checks and certificate; other results have these as Python attributes.
RECORD, CERTIFICATE = "record", "certificate"


class ResultArray(xr.DataArray):  # type: ignore[no-untyped-call]  # xarray's own __init_subclass__
    """A DataArray with checks, certificate, provenance and :meth:`save`, like other results.

    Arrays computed from it by xarray with attributes kept have them too.
    """

    __slots__ = ()

    @property
    def checks(self) -> list[Check]:
        """Self-checks of the replayed layers, followed by the comparisons of the certificate."""
        own = [Check(**found) for found in _record(self).get("checks", [])]
        return [*own, *self.certificate.checks]

    @property
    def certificate(self) -> Certificate:
        """Comparison with a reference run of the model; its state is ``"off"`` where none was stored."""
        stored = _record(self).get("certificate")
        return Certificate() if stored is None else Certificate.from_dict(stored)

    @property
    def provenance(self) -> dict[str, str]:
        """Framework, versions, engine, dtype, device: plain strings."""
        return provenance_of(str(self.attrs.get("provenance", "")))

    def _repr_html_(self) -> str:
        sizes = ", ".join(f"{dim}: {size}" for dim, size in self.sizes.items())
        words = str(self.attrs.get("long_name", ""))
        row = Row.of(str(self.name or "values"), f"{words} ({sizes})", xr.DataArray(self))
        remarks = [("certificate", self.certificate.sentence), ("from", ", ".join(self.provenance.values()))]
        return page("Result", [row], remarks)

    @checked(path=path_of)
    def save(self, path: str | PathLike[str]) -> None:
        """Write the array to one file: netCDF for ``.nc``, Zarr for ``.zarr``; ``rl.open`` reads it back.

        Raises
        ------
        FileError
            If the path cannot be written, or has another suffix.
        """
        from .files import save

        save(self, path)


def record(checks: Iterable[Check], certificate: Certificate | None = None) -> dict[str, str]:
    """Return attributes that store self-checks and a certificate.

    One attribute has all of it as JSON, another the certificate's sentence as text.
    """
    found: dict[str, Any] = {"checks": [check.to_dict() for check in checks]}
    if certificate is None:
        return {RECORD: json.dumps(found)}
    return {RECORD: json.dumps({**found, "certificate": certificate.to_dict()}), CERTIFICATE: certificate.sentence}


def as_result(array: Any) -> Any:
    """Convert a DataArray that has stored checks to a :class:`ResultArray`; return anything else unchanged."""
    return ResultArray(array) if isinstance(array, xr.DataArray) and RECORD in array.attrs else array


def _record(array: xr.DataArray) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(array.attrs.get(RECORD, "{}"))
    return found
