"""Ports: the tensors at which the framework's own differentiation starts and ends, and the pull-back between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ...errors import InputError
from ...typing import Array


@dataclass(frozen=True)
class Port:
    """A tensor at the boundary of a layer or model, where the framework's own differentiation starts or ends.

    ``kind`` is one of ``"input"`` and ``"output"`` (``index``: number of the tensor), ``"initial_state"`` and
    ``"final_state"`` (``index``: number of the state), ``"weight"`` (``key``: its name within the layer), ``"loss"``.

    A layer that the user's code calls step by step also has ``"state"``: a state after every step with its *total*
    gradient (``key="ending"``: only as the last step left it). A run that consists of several calls also has
    ``"state_read"``: the *direct* gradient of a state wherever the user's code reads it.

    ``layer`` is None for the model itself. ``direction`` selects one direction of a bidirectional layer; its ports are
    those before the directions are merged.
    """

    kind: Literal["input", "output", "initial_state", "final_state", "state", "state_read", "weight", "loss"]
    layer: str | None = None
    index: int = 0
    key: str = ""
    direction: Literal["forward", "backward"] | None = None


class Pullback(Protocol):
    """One forward pass, kept for differentiation; a context manager that frees all memory on exit.

    It may have an attribute ``layouts``, the roles of axes by port, of tensors whose axes this very pass showed; and
    ``recurrent_sizes``, the numbers (samples, steps) of the calls of recurrent layers, where samples come first.
    """

    values: Mapping[Port, Array]
    #: Number of tensors that the model returned.
    outputs: int

    def vjp(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull cotangents at ``of`` ports back to every ``wrt`` port.

        Each cotangent has the shape of its port with one leading axis K: K cotangents are pulled at once, vectorised.
        Each result has the same leading axis. A result is None if no path leads from any given ``of`` port to that
        ``wrt`` port. For a recurrent layer's ``output`` port as ``wrt`` the result is the *direct* gradient.
        """

    def __enter__(self) -> Pullback: ...
    def __exit__(self, *exc: object) -> None: ...


def refuse_misfits(cotangents: Mapping[Port, Array], of: Sequence[Port], values: Mapping[Port, Array]) -> None:
    """Refuse cotangents for a wrong port or of a wrong shape: each needs its port's shape behind one leading axis.

    Raises
    ------
    InputError
        If a port is not among ``of``, or a shape does not fit.
    """
    for port, cotangent in cotangents.items():
        if port not in of:
            raise InputError("A cotangent was given for a tensor that is not among of=.", got=port)
        shape = tuple(values[port].shape)
        if tuple(cotangent.shape)[1:] != shape:
            raise InputError(
                "The shape of a cotangent differs from its tensor's.",
                got=tuple(cotangent.shape),
                expected=("K", *shape),
            )
