"""``Trace``, the result of ``rl.trace``: values and gradients of each recurrent layer at every step."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import xarray as xr

from ..errors import did_you_mean, message
from ..recurrence.cells import cell_of_kind
from ..vocabulary import QUANTITIES, SAMPLE, TIME
from .base import Result
from .layers import LayerView
from .schema import LabelledLayer, quantity, with_mask


class TracedLayer(LayerView):
    """Variables of one layer: ``trace["lstm"].hidden_grad``; coordinates are found by name as well."""

    def __init__(
        self,
        name: str,
        dataset: xr.Dataset,
        *,
        loss: float | None = None,
        requested_quantities: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(name, dataset)
        self._loss = loss
        self._requested_quantities = requested_quantities

    @property
    def info(self) -> dict[str, Any]:
        """Description of the layer: name, kind, cell, direction, units, options."""
        attrs = self.dataset.attrs
        basics = {key: attrs[key] for key in ("kind", "cell", "direction") if key in attrs}
        return {"name": self.name, **basics, **json.loads(attrs.get("details", "{}"))}

    def _has_variable(self, name: str) -> bool:
        return name in self.dataset.variables

    def _variable(self, name: str) -> xr.DataArray:
        return with_mask(self.dataset, name)

    def _missing_message(self, name: str) -> str:
        problem = f"{name!r} was not computed for layer {self.name!r}"
        attrs = self.dataset.attrs
        cell = str(attrs.get("cell") or attrs.get("kind") or "layer")
        states = cell_of_kind(cell).states
        is_state = name.removesuffix("_grad") in states or name.startswith(("state_", "initial_", "final_"))
        if name not in QUANTITIES and not is_state:
            gate_names = self.dataset["gate"].values.tolist() if "gate" in self.dataset.coords else []
            hint = f'gates.sel(gate="{name}")' if name in gate_names else did_you_mean(name, self)
            return message(f"No quantity named {name!r} for layer {self.name!r}.", hint=hint)
        if name in ("cell", "cell_grad") and "cell" not in states:
            return message(f"{problem}: {cell} has no cell state.", expected=f"one of: {', '.join(self)}")
        if quantity(name).needs_loss and self._loss is None:
            return message(f"{problem}: no loss was given.", hint="rl.trace(model, x, y, loss=...) or a compiled model")
        if self._requested_quantities is not None and name not in self._requested_quantities:
            return message(
                f"{problem}: it is not among quantities=.",
                got=", ".join(self._requested_quantities),
                hint=f"add {name!r}",
            )
        return message(f"{problem}: it does not exist for {cell}.", expected=f"one of: {', '.join(self)}")

    def _title(self) -> str:
        return describe_layer(self.dataset)


class Trace(Result, kind="trace"):
    """Result of ``rl.trace``: a mapping from layer names to :class:`TracedLayer`.

    Parameters
    ----------
    datasets
        One per layer, as :func:`~rnnlens.results.schema.labelled_layer` builds them, in the order of the calls.
    loss
        Loss of the batch, or None without one. NaN and infinity are kept, and reported in the repr.
    quantities
        Requested quantities; None for all.
    provenance, notes, checks, certificate
        As in :class:`~rnnlens.results.base.Result`.
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset | LabelledLayer] | xr.DataTree,
        *,
        loss: float | None = None,
        quantities: Iterable[str] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        self.loss = None if loss is None else float(loss)
        self.quantities = None if quantities is None else tuple(quantities)

    def __getitem__(self, name: str) -> TracedLayer:
        return self._node(self._resolve(name))

    def _set_chunk_record(self, record: Mapping[str, Any]) -> None:
        super()._set_chunk_record(record)
        self.loss = None if record["value"] is None else float(record["value"])

    def _node(self, name: str) -> TracedLayer:
        return TracedLayer(name, self.dataset(name), loss=self.loss, requested_quantities=self.quantities)

    def _meta(self) -> dict[str, Any]:
        requested_quantities = None if self.quantities is None else list(self.quantities)
        return {**super()._meta(), "loss": self.loss, "quantities": requested_quantities}

    def _headline(self) -> str:
        size_by_dim = {dim: n for name in reversed(self.layers) for dim, n in self.dataset(name).sizes.items()}
        parts = [super()._headline()]
        parts += [
            f"{size_by_dim[dim]} {dim if size_by_dim[dim] == 1 else plural}"
            for dim, plural in _COUNTED_DIMS
            if dim in size_by_dim
        ]
        return ", ".join(parts) + ("" if self.loss is None else f", loss {self.loss:.4g}")

    def _rows(self) -> list[tuple[str, str]]:
        rows = [(name, describe_layer(self.dataset(name))) for name in self]
        return rows + [(label, names) for label, names in self._variables() if names]

    def _variables(self) -> list[tuple[str, str]]:
        """List the names of all values and gradients for the repr, with a count where only some layers have them."""
        counts = Counter(str(name) for layer in self for name in self.dataset(layer).data_vars)
        ordered_names = sorted(
            counts, key=lambda name: _QUANTITY_ORDER.index(name) if name in _QUANTITY_ORDER else len(_QUANTITY_ORDER)
        )
        text_by_name = {
            name: name if counts[name] == len(self) else f"{name} ({counts[name]} of {len(self)})"
            for name in ordered_names
        }
        values = ", ".join(text for name, text in text_by_name.items() if not name.endswith("_grad"))
        gradients = ", ".join(text for name, text in text_by_name.items() if name.endswith("_grad"))
        return [("values", values), ("gradients", gradients)]

    def _remarks(self) -> list[tuple[str, str]]:
        loss_remarks = []
        if self.loss is None:
            loss_remarks = [] if any("_grad" in str(v) for name in self for v in self.dataset(name)) else [_NO_LOSS]
        elif not math.isfinite(self.loss):
            loss_remarks = [("loss", f"WARNING: the loss is {self.loss}; gradients may be NaN or infinite")]
        return loss_remarks + super()._remarks()


_NO_LOSS = ("loss", "none given: no gradients")
_QUANTITY_ORDER = list(QUANTITIES)
_COUNTED_DIMS = ((SAMPLE, "samples"), (TIME, "time steps"))


def describe_layer(dataset: xr.Dataset) -> str:
    """Return kind, units and direction of a layer in a few words, from its attributes and sizes."""
    attrs = dataset.attrs
    parts = [str(attrs.get("kind") or attrs.get("cell") or "layer")]
    if "unit" in dataset.sizes:
        unit_count = dataset.sizes["unit"]
        parts.append(f"{unit_count} unit{'s' * (unit_count != 1)}")
    if attrs.get("direction", "forward") != "forward":
        parts.append(str(attrs["direction"]))
    return ", ".join(parts)
