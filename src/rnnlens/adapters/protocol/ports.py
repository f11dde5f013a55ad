"""The boundaries at which the framework's own differentiation starts and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ...errors import InputError, message
from ...typing import Array


@dataclass(frozen=True)
class Port:
    """A tensor at the boundary of a layer or model: where the framework's own differentiation starts or ends.

    ``kind`` is one of ``"input"`` (index: which), ``"output"`` (index: which of several), ``"initial_state"`` and
    ``"final_state"`` (index: which state), ``"weight"`` (``key``: its name within the layer), ``"loss"``; of a layer
    that is called step by step also ``"state"``: a state after every step (``key="ending"``: as the last one left it),
    with its *total* gradient; and of a run that
    several calls make up ``"state_read"``: the *direct* gradient of a state wherever the user's code gets hold of it.
    ``layer`` is None for the model itself. ``direction`` picks one half of a bidirectional layer: its ports are
    those of the half, before merging.
    """

    kind: Literal["input", "output", "initial_state", "final_state", "state", "state_read", "weight", "loss"]
    layer: str | None = None
    index: int = 0
    key: str = ""
    direction: Literal["forward", "backward"] | None = None


class Pullback(Protocol):
    """One forward pass, kept alive for differentiation; a context manager that frees everything on exit."""

    values: Mapping[Port, Array]
    #: How many tensors the model returned.
    outputs: int

    def vjp(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull cotangents at ``of`` ports back to every ``wrt`` port.

        Each cotangent has the shape of its port with one leading axis K (K pulled at once, vectorised); so has each
        result. None where no path leads from any of the given ``of`` ports to that ``wrt`` port. For a
        recurrent layer's ``output`` port as ``wrt`` the result is the *direct* gradient.
        """

    def __enter__(self) -> Pullback: ...
    def __exit__(self, *exc: object) -> None: ...


def refuse_misfits(cotangents: Mapping[Port, Array], of: Sequence[Port], values: Mapping[Port, Array]) -> None:
    """Refuse cotangents that a pull-back cannot take; each has the shape of its port behind one leading axis.

    Raises
    ------
    InputError
        For a port that is not among ``of``, or another shape.
    """
    for port, cotangent in cotangents.items():
        if port not in of:
            raise InputError(message("A cotangent was given for a port that is not among of=.", got=port))
        shape = tuple(values[port].shape)
        if tuple(cotangent.shape)[1:] != shape:
            raise InputError(
                message("A cotangent does not fit its port.", got=tuple(cotangent.shape), expected=("K", *shape))
            )
