"""``rl.weight_norms``: norms of all weights, as one row of a history."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xarray as xr

from ..arguments import anything, called, checked, either, names, whole
from ..errors import InputError, did_you_mean, message, raised_by, shown
from ..results.weights import Weights
from .weights import weights


def _a_history(name: str, value: Any) -> xr.Dataset:
    """What an earlier call returned."""
    if not isinstance(value, xr.Dataset) or not value.sizes.get("step") or value["step"].dtype.kind not in "iu":
        expected = "what rl.weight_norms returned, with a dimension step"
        raise InputError(message(f"{name}= is no history of norms.", got=shown(value), expected=expected))
    return value


@checked(
    model=anything,
    layers=names,
    over=names,
    ord=either(whole(least=1, most=2), called, expected="1, 2 or a callable", what="is no norm that is known"),
    history=_a_history,
    step=whole(),
)
def weight_norms(
    model: Any,
    *,
    layers: str | Iterable[str] | None = None,
    over: str | Iterable[str] | None = None,
    ord: float | Callable[[np.ndarray[Any, Any]], Any] = 2,
    history: xr.Dataset | None = None,
    step: int | None = None,
) -> xr.Dataset:
    """Norms of all weights as one row of a history.

    Parameters
    ----------
    model, layers
        As in :func:`weights`.
    over
        Dimensions to take the norm over, such as ``("feature", "unit_in", "unit")`` to keep one norm per gate; all by
        default: one number per weight.
    ord
        1: sum of absolute values; 2: Euclidean (Frobenius) norm; or a callable from a 1-D array to a number.
    history
        What an earlier call returned: the new row is appended.
    step
        Position of the row; by default one more than the last.

    Returns
    -------
    Dataset
        One variable per weight, named ``"lstm/kernel"``, with a leading dimension ``step``. ``history`` is not changed.
        NaN values make their norm NaN.
    """
    row = {}
    found = weights(model, layers=layers)
    _refuse_unknown_dims(found, over)
    for layer, node in found.items():
        for name in node:
            if not name.endswith("_count") and name != "bias_total":
                norm = _norm(node[name], over, ord)
                row[f"{layer}/{name}"] = norm.assign_attrs(_norm_words(node[name], ord))
    last = -1 if history is None else int(history["step"].values[-1])
    new = xr.Dataset(row).expand_dims(step=[last + 1 if step is None else step])
    return new if history is None else xr.concat([history, new], dim="step", combine_attrs="override")


def _refuse_unknown_dims(found: Weights, over: str | Iterable[str] | None) -> None:
    """A dimension that no weight at all has is a misspelt one."""
    known = {str(dim): None for layer in found for dim in found.dataset(layer).dims}
    for dim in [over] if isinstance(over, str) else over or ():
        if dim not in known:
            raise InputError(
                message(f"No weight has a dimension {dim!r}.", got=f"over={over!r}", hint=did_you_mean(dim, known))
            )


def _norm(values: xr.DataArray, over: str | Iterable[str] | None, ord: Any) -> xr.DataArray:
    wanted = {over} if isinstance(over, str) else set(over) if over is not None else set(map(str, values.dims))
    dims = [str(dim) for dim in values.dims if dim in wanted]
    # Dense kernels name their axes otherwise: a weight without any of these dimensions is reduced whole.
    dims = dims or [str(dim) for dim in values.dims]
    if callable(ord):
        flat = values.stack(_all=dims) if dims else values
        with raised_by("Your norm, ord=,"):
            reduced: xr.DataArray = xr.apply_ufunc(ord, flat, input_core_dims=[["_all"]], vectorize=True)
        return reduced
    if ord == 1:
        return abs(values).sum(dims, skipna=False)
    squares: xr.DataArray = (values.astype("float64") ** 2).sum(dims, skipna=False)
    return squares**0.5


def _norm_words(values: xr.DataArray, ord: Any) -> dict[str, str]:
    name = f"L{ord} norm" if not callable(ord) else getattr(ord, "__name__", "norm")
    return {"long_name": f"{name} of the {values.attrs.get('long_name', values.name)}", "units": "1"}
