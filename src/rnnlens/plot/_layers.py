"""Whole layers for the figures that draw several variables at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xarray as xr

from ..errors import InputError, did_you_mean, message


def dataset_of(layer: Any) -> xr.Dataset | None:
    """The variables of one layer (a layer result or a Dataset); None for anything else."""
    if isinstance(layer, xr.Dataset):
        return layer
    found = getattr(layer, "dataset", None)
    return found if isinstance(found, xr.Dataset) else None


def layers_of(result: Any, figure: str) -> dict[str, xr.Dataset]:
    """Layers by name, from a trace, a DataTree, a mapping of layers, or one layer.

    Raises
    ------
    InputError
        If there is no layer in it.
    """
    one = dataset_of(result)
    if isinstance(result, xr.DataTree):
        found = {
            path.strip("/") or str(node.name or "layer"): node.to_dataset()
            for path, node in result.subtree_with_keys
            if node.data_vars
        }
    elif one is not None:
        found = {str(one.attrs.get("layer", getattr(result, "name", "layer"))): one}
    elif hasattr(result, "keys") and hasattr(result, "__getitem__"):
        pairs = ((str(name), dataset_of(result[name])) for name in result.keys())  # noqa: SIM118  # any mapping-like
        found = {name: dataset for name, dataset in pairs if dataset is not None}
    elif hasattr(result, "layers") and hasattr(result, "__getitem__"):
        pairs = ((str(name), dataset_of(result[name])) for name in result.layers)
        found = {name: dataset for name, dataset in pairs if dataset is not None}
    else:
        found = {}
    if not found:
        raise InputError(
            message(
                f"plot.{figure} draws the layers of a trace.",
                got=type(result).__name__,
                expected="a trace, one layer of it, or a Dataset",
                hint="pass what rl.trace(model, x, y) returned",
            )
        )
    return found


def variable(result: Any, name: str, figure: str) -> Any:
    """One variable of a layer; anything that is no layer is returned as it is.

    Raises
    ------
    InputError
        If the layer has no such variable, or a trace has more than one layer.
    """
    dataset = dataset_of(result)
    if (
        dataset is None
        and not isinstance(result, xr.DataArray)
        and (isinstance(result, Mapping) or hasattr(result, "layers"))
    ):
        layers = layers_of(result, figure)
        if len(layers) > 1:
            raise InputError(
                message(
                    f"plot.{figure} draws one layer.",
                    got=f"layers {', '.join(layers)}",
                    hint=f"pass one, such as result[{next(iter(layers))!r}]",
                )
            )
        dataset = next(iter(layers.values()))
    if dataset is None:
        return result
    if name not in dataset:
        known = [str(key) for key in dataset.data_vars]
        raise InputError(
            message(f"plot.{figure} needs {name!r}, which this layer does not have.", hint=did_you_mean(name, known))
        )
    return dataset[name]
