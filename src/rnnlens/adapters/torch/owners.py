"""Whose call of a kernel it is: the module that runs, or the one that holds the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...recurrence.cells import Cell
from .inputs import check_features
from .record import Owner

if TYPE_CHECKING:
    from .capture import Asked


class Owners:
    """Knows which module is running, so that a kernel call finds its name."""

    def __init__(self, asked: Asked) -> None:
        self.asked = {id(module): (path, module) for path, module in asked.recurrent}
        self.inside_cells = {id(inner) for _, cell in asked.cells for inner in cell.modules()}
        self.everything = asked.names is None
        self.holders = _holders(asked)
        self.entered: nn.Module | None = None
        self.order: Tensor | None = None
        self.known: dict[int, Owner] = {}
        self.ran = asked.ran

    def entering(self, path: str) -> Any:
        """A forward pre-hook that checks the input and notes which module runs."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs.get("input")
            check_features(path, module, value)
            if not isinstance(module, nn.Linear):
                self.entered = module
                self.ran.add(path)
                self.order = value.unsorted_indices if isinstance(value, PackedSequence) else None

        return hook

    def find(self, cell: type[Cell], activation: str, args: tuple[Any, ...]) -> tuple[Owner, Tensor | None] | None:
        """Whose call this is; None if it was not asked for."""
        module, order = self.entered, self.order
        self.entered = self.order = None
        stacked = isinstance(args[2], (list, tuple)) or isinstance(args[3], (list, tuple))
        module = self._holder(args, module)
        if module is None:
            return (self._bare(cell, activation, args, stacked), None) if self.everything else None
        found = self.asked.get(id(module))
        if found is None:
            return None
        owner = self.known.get(id(module))
        if owner is None:
            path, module = found
            layers = int(getattr(module, "num_layers", 1))
            directions = 2 if getattr(module, "bidirectional", False) else 1
            owner = Owner(id(module), path, cell, activation, layers, directions, stacked)
            self.known[id(module)] = owner
        return owner, order

    def _holder(self, args: tuple[Any, ...], entered: nn.Module | None) -> nn.Module | None:
        """The module whose weights these are: a forward that is called directly runs no hook that would name it."""
        holders = self.holders.get(id(_first_weight(args)), [])
        if not holders or any(module is entered for module in holders):
            return entered
        return holders[0] if len(holders) == 1 else None

    def _bare(self, cell: type[Cell], activation: str, args: tuple[Any, ...], stacked: bool) -> Owner:
        """A kernel called without a registered module: a module in a plain list, or the bare function."""
        first = _first_weight(args)
        owner = self.known.get(id(first))
        if owner is None:
            unnamed = sum(o.name.startswith("unnamed_") for o in self.known.values())
            rest = args[4:] if stacked and isinstance(args[3], (list, tuple)) else args[3:]
            layers, both = (int(rest[1]), bool(rest[4])) if stacked else (1, False)
            owner = Owner(id(first), f"unnamed_{cell.kind}_{unnamed}", cell, activation, layers, 1 + both, stacked)
            self.known[id(first)] = owner
        return owner


def _first_weight(args: tuple[Any, ...]) -> Tensor:
    weight = args[3] if isinstance(args[3], (list, tuple)) else args[2]
    return weight[0] if isinstance(weight, (list, tuple)) else weight


def _holders(asked: Asked) -> dict[int, list[nn.Module]]:
    """By the identity of its first weight, the recurrent modules that hold it."""
    found: dict[int, list[nn.Module]] = {}
    for _, module in asked.modules:
        first = getattr(module, "weight_ih_l0", getattr(module, "weight_ih", None))
        if isinstance(first, nn.Parameter):
            found.setdefault(id(first), []).append(module)
    return found
