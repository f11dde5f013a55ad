"""Layers and quantities requested from ``rl.trace``, and the computations that they need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xarray as xr

from ...adapters.protocol import CaptureRequest
from ...errors import InputError, LayerNotFoundError, did_you_mean, message
from ...recurrence.cells import kinds
from ...vocabulary import QUANTITIES

_STATE = re.compile(r"(?:previous_)?(?P<state>.+?)(_grad)?")
_BOUNDARY = re.compile(r"(initial|final)_(?P<state>.+)_grad")

#: Quantities that need no replay of the recurrence.
CAPTURED = frozenset({"input", "mask", "output", "output_grad", "final_state_grad"})


@dataclass(frozen=True)
class TraceRequest:
    """Requested layers and quantities (None for all), whether there is a loss, and whether weights are checked."""

    layers: tuple[str, ...] | None
    quantities: frozenset[str] | None
    has_loss: bool
    weighed: bool = True

    @classmethod
    def of(
        cls, layers: str | Iterable[str] | None, quantities: str | Iterable[str] | None, has_loss: bool
    ) -> TraceRequest:
        """Check the arguments ``layers`` and ``quantities``.

        Raises
        ------
        InputError
            If a quantity does not exist, or is a gradient and there is no loss.
        """
        named = None if layers is None else (layers,) if isinstance(layers, str) else tuple(layers)
        if quantities is None:
            return cls(named, None, has_loss)
        names = frozenset([quantities] if isinstance(quantities, str) else quantities)
        for name in sorted(names):
            _check(name, has_loss)
        return cls(named, names, has_loss)

    def has(self, quantity: str) -> bool:
        """Return whether a quantity is requested."""
        return self.quantities is None or quantity in self.quantities

    @property
    def replayed(self) -> bool:
        """Whether the recurrence has to be replayed."""
        return self.quantities is None or bool(self.quantities - CAPTURED)

    @property
    def swept(self) -> bool:
        """Whether total gradients are requested."""
        return self.quantities is None or any(name.endswith("_grad") for name in self.quantities - CAPTURED)

    def request(self, certified: bool) -> CaptureRequest:
        """Return the capture request for the adapter."""
        quantities = self.quantities
        gradients = self.has_loss and (quantities is None or any(name.endswith("_grad") for name in quantities))
        return CaptureRequest(
            layers=self.layers,
            inputs=self.replayed or bool((quantities or frozenset()) & {"input", "mask"}),
            gradients=gradients,
            weight_grads=gradients and self.swept and self.weighed,
            boundaries=certified,
            loss=self.has_loss,
        )

    def refuse_absent(self, datasets: Mapping[str, xr.Dataset], known: Sequence[str]) -> None:
        """Raise for requested layers and quantities that are not in the result."""
        for name in self.layers or ():
            if not any(node == name or node.startswith((f"{name}#", f"{name}[")) for node in datasets):
                what = f"No layer, and no call of one, is named {name!r} in this forward pass."
                raise LayerNotFoundError(
                    message(what, hint=did_you_mean(name, list(dict.fromkeys([*datasets, *known]))))
                )
        found = {str(name) for dataset in datasets.values() for name in dataset.data_vars}
        missing = [] if self.quantities is None else sorted(self.quantities - found)
        impossible = [name for name in missing if name not in QUANTITIES]
        if impossible or (missing and not found):
            absent, layer = (impossible or missing)[0], next(iter(datasets), "")
            hint = did_you_mean(absent, found) if found else f"rl.trace(model, x, ...)[{layer!r}] lists what there is"
            got = f"quantities={', '.join(missing)}"
            raise InputError(message(f"No layer here has {absent!r}.", got=got, hint=hint))


def _check(name: str, has_loss: bool) -> None:
    """Raise for an unknown quantity, and for a gradient without a loss."""
    if not _is_quantity(name):
        raise InputError(message(f"There is no quantity {name!r}.", hint=did_you_mean(name, QUANTITIES)))
    if name.endswith("_grad") and not has_loss:
        raise InputError(
            message(
                f"{name!r} is a gradient of the loss, and there is no loss.",
                got="neither y nor loss",
                hint="pass the target: rl.trace(model, x, y)",
            )
        )


def _is_quantity(name: str) -> bool:
    """Return whether a name is a quantity, a state of a cell or its gradient, or that of a first or last state."""
    if name in QUANTITIES:
        return True
    states = {state for cell in kinds().values() for state in cell.states}
    found = _BOUNDARY.fullmatch(name) or _STATE.fullmatch(name)
    return found is not None and (found["state"] in states or re.fullmatch(r"state_\d+", found["state"]) is not None)
