"""Any result as a mapping for JSON: printed by ``--json``, and shown as a table by the command line."""

from __future__ import annotations

import json
from typing import Any

import xarray as xr

from .array import LabelledArray
from .base import Part, Result
from .diagnosis import Diagnosis
from .encoding import plain
from .profiles import of
from .schema import to_host

#: Version of the layout; increased when a field is renamed or removed.
SCHEMA = 1


def parts_of(result: Any) -> list[Part]:
    """Return name, description and data of each part of a result; an array is its own only part."""
    if isinstance(result, Result):
        return result._parts()
    return [(str(getattr(result, "name", None) or "values"), "", result)]


def summary_of(result: Any) -> dict[str, Any]:
    """Return ``schema``, ``kind``, ``headline``, ``layers`` with curves, ``checks``, ``certificate``, ``provenance``.

    A diagnosis gives the fields of its ``to_json`` and its kind; a single array has ``dims`` and ``attributes``.
    """
    if isinstance(result, Diagnosis):
        return {"kind": "diagnosis", **json.loads(result.to_json())}
    parts = parts_of(result)
    curves = {name: {way or "all": curve.to_json() for way, curve in of(data).items()} for name, _, data in parts}
    if isinstance(result, Result):
        layers = [
            {"name": name, "words": words, "variables": _variables(data), "profiles": curves[name]}
            for name, words, data in parts
        ]
        loss = getattr(result, "loss", None)
        head = {"schema": SCHEMA, "kind": result.kind, "headline": result._headline()}
        loss_words = {"loss": plain(loss)} if isinstance(loss, float) else {}
        return {**head, **loss_words, "layers": layers, **_trust(result), "notes": result.notes}
    sizes = {"dims": _sizes(result)}
    kind = "array" if isinstance(result, xr.DataArray) else "dataset"
    trust = _trust(result) if isinstance(result, LabelledArray) else {}
    named = {"name": str(result.name)} if kind == "array" else {}
    attributes = {key: value for key, value in _attributes(result).items() if key != "record"}
    return {"schema": SCHEMA, "kind": kind, **named, **sizes, "attributes": attributes, "profiles": curves, **trust}


def values_of(array: xr.DataArray) -> dict[str, Any]:
    """Return one variable with all its values; None for values that are not finite."""
    return {
        "schema": SCHEMA,
        "kind": "array",
        "name": str(array.name),
        "dims": _sizes(array),
        "attributes": _attributes(array),
        "coords": {str(dim): to_host(array[dim].values).tolist() for dim in array.dims if dim in array.coords},
        "values": plain(to_host(array.values).tolist()),
    }


def _attributes(array: Any) -> dict[str, Any]:
    return {str(key): plain(value) for key, value in array.attrs.items() if isinstance(value, str | int | float)}


def _trust(result: Any) -> dict[str, Any]:
    certificate = result.certificate
    stored = (
        None if certificate is None else {**certificate.to_dict(), "checks": [_check(c) for c in certificate.checks]}
    )
    own = [check for check in result.checks if certificate is None or check not in certificate.checks]
    return {"checks": [_check(c) for c in own], "certificate": stored, "provenance": dict(result.provenance)}


def _variables(data: xr.Dataset | xr.DataArray | None) -> dict[str, dict[str, int]]:
    if data is None:
        return {}
    if isinstance(data, xr.DataArray):
        return {str(data.name): _sizes(data)}
    return {str(name): _sizes(array) for name, array in data.data_vars.items()}


def _check(check: Any) -> dict[str, Any]:
    return {**plain(check.to_dict()), "ok": check.ok}


def _sizes(array: Any) -> dict[str, int]:
    return {str(dim): int(size) for dim, size in array.sizes.items()}
