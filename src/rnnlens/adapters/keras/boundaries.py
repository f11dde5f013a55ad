"""Resolve each :class:`Port` to the key of its tap in a run, and to whether its time axis is reversed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ...errors import InputError, LayerNotFoundError, UnsupportedError, did_you_mean
from ..protocol import Port
from ..shared.registered_cells import ComposedWeight
from .discover import Places, RecurrentSite, base_name, hooked_beside, places
from .weights import composed, named_variables, registration_of

#: Suffix of the name under which a whole bidirectional layer is hooked, besides its two directions.
_WHOLE = "~whole"


@dataclass
class TappedPorts:
    """All ports of one pullback: the tap key of each, and the layers and weights to hook for them.

    ``inputs``: for each input of the model, its index among the leaves of ``x`` in Keras' order. ``turned``: ports
    whose time axis is reversed; ``ending``: ports of which only the last step is meant; ``stepped``: layers that the
    user's code calls one step at a time.
    """

    found: Places
    inputs: Sequence[int] = ()
    keys: dict[Port, str] = field(default_factory=dict)
    turned: set[Port] = field(default_factory=set)
    ending: set[Port] = field(default_factory=set)
    sites: dict[int, RecurrentSite] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    stepped: frozenset[str] = frozenset()

    def add(self, port: Port, model: Any) -> None:
        """Find the tap key of ``port`` and note the layers or weights to hook for it.

        Raises
        ------
        LayerNotFoundError, InputError, UnsupportedError
            If there is no such tensor.
        """
        if port in self.keys:
            return
        if port.kind == "weight":
            self.keys[port] = self._weight(port, model)
        elif port.layer is None:
            self.keys[port] = self._of_model(port)
        else:
            self.keys[port] = self._of_layer(port)

    def hooked_sites(self, others: Collection[str] = ()) -> list[RecurrentSite]:
        """Return the recurrent sites to hook: those of the ports, and those of the layers named in ``others``.

        A bidirectional layer has both of its sites in the list, so that their numbers stay valid.
        """
        names = {site.name for site in self.sites.values()} | set(others)
        sites = [site for site in self.found.sites if site.name in names]
        return [*sites, *hooked_beside(self.found, sites, ())]

    def _of_model(self, port: Port) -> str:
        if port.kind == "input" and port.index < len(self.inputs):
            return f"model|input/{self.inputs[port.index]}"
        if port.kind in ("input", "output"):
            return f"model|{port.kind}/{port.index}"
        if port.kind == "loss":
            return "model|loss"
        raise InputError(f"A model has no {port.kind}.", hint="name a recurrent layer")

    def _of_layer(self, port: Port) -> str:
        assert port.layer is not None
        name = base_name(port.layer, self.found)
        index = port.layer[len(name) + 1 :] or "0"
        halves = [site for site in self.found.sites if site.name == name]
        if not halves:
            return self._of_plain(port, name, self.found.plain[name], index)
        if port.direction is None and halves[0].bidirectional:
            if port.kind not in ("input", "output"):
                raise InputError(
                    f"{port.kind} of the bidirectional layer {name!r} exists once per direction.",
                    hint='direction="forward" or direction="backward"',
                )
            return self._of_plain(port, name + _WHOLE, halves[0].owner, index)
        return self._of_site(port, halves, index)

    def _of_plain(self, port: Port, place: str, layer: Any, index: str) -> str:
        if port.kind not in ("input", "output"):
            raise InputError(f"Layer {port.layer!r} has no {port.kind}: it is not recurrent.")
        self.plain[place] = layer
        return f"{place}|0|{index}|{port.kind}/{port.index}"

    def _of_site(self, port: Port, halves: list[RecurrentSite], index: str) -> str:
        half = next((i for i, s in enumerate(halves) if port.direction in (None, s.direction)), None)
        if half is None:
            raise InputError(
                f"Layer {port.layer!r} does not run {port.direction}.", expected=f"{halves[0].direction!r} or None"
            )
        site = halves[half]
        if site.refusal is not None:
            raise UnsupportedError(site.refusal)
        self.sites[id(site)] = site
        if site.is_loop or site.name in self.stepped:
            return self._of_loop(port, site, index)
        name: str = port.kind
        count = len(site.keras.tree.flatten(site.keras.state_size(site.layer)))
        if port.kind == "output" and port.index == 0:
            if site.layer.go_backwards and site.layer.return_sequences:
                self.turned.add(port)
        elif port.kind == "output":
            name = f"final_state/{port.index - 1}"
        elif port.kind in ("initial_state", "final_state"):
            _check_index(port, count)
            name = f"{port.kind}/{port.index}"
        if name.startswith("final_state") and not site.layer.return_state:
            raise InputError(
                f"Layer {port.layer!r} does not return its final state.", hint="make it with return_state=True"
            )
        return f"{site.name}|{half}|{index}|{name}"

    def _of_loop(self, port: Port, site: RecurrentSite, index: str) -> str:
        """Return the tap key of a tensor of a loop over a cell, which has one tap per step."""
        name: str = port.kind
        if port.kind in ("initial_state", "final_state", "state", "state_read"):
            _check_index(port, len(site.keras.tree.flatten(site.keras.state_size(site.layer))))
            kind = {"state": "total", "state_read": "state"}.get(port.kind, port.kind)
            name = f"{kind}/{port.index}"
        if port.key == "ending":
            self.ending.add(port)
        return f"{site.name}|0|{index}|{name}"

    def _weight(self, port: Port, model: Any) -> str:
        layer = model
        if port.layer is not None:
            layer = self.found.holder(port.layer)
            halves = [s for s in self.found.sites if s.owner is layer]
            if port.direction is not None:
                layer = next((s.layer for s in halves if s.direction == port.direction), layer)
        variables = named_variables(layer)
        if port.key not in variables:
            where = "the model" if port.layer is None else f"layer {port.layer!r}"
            raise LayerNotFoundError(
                f"There is no weight {port.key!r} in {where}.", hint=did_you_mean(port.key, variables)
            )
        variable = variables[port.key]
        # Paths are not unique: each of two nested models may have an "lstm/lstm_cell/kernel".
        tap = next((key for key, v in self.weights.items() if v is variable), f"{port.layer}|{port.key}")
        self.weights[tap] = variable
        return f"weight|{tap}"


def put_together(model: Any) -> Callable[[Port], ComposedWeight | None]:
    """Return a function that maps a weight's port to the variables that its registered cell composes it from.

    It returns None for any other port. The layers of the model are searched once, at the first call.
    """

    @cache
    def by_layer() -> dict[str, dict[str, ComposedWeight]]:
        halves: dict[str, dict[str, RecurrentSite]] = {}
        for site in places(model).sites:
            if registration_of(getattr(site.layer, "cell", None)) is not None:
                halves.setdefault(site.name, {})[site.direction] = site
        return {
            name: composed(named_variables(next(iter(sites.values())).owner), {d: s.layer for d, s in sites.items()})
            for name, sites in halves.items()
        }

    def find(port: Port) -> ComposedWeight | None:
        return by_layer().get(str(port.layer).partition("#")[0], {}).get(port.key)

    return find


def _check_index(port: Port, count: int) -> None:
    if not 0 <= port.index < count:
        raise InputError(f"Layer {port.layer!r} has no state number {port.index}.", expected=f"0 to {count - 1}")
