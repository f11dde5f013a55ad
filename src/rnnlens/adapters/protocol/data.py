"""The data of a run and its options, and the ports of a model: where differentiation starts and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import InputError
from ...typing import Array


@dataclass
class Batch:
    """Data of one forward pass, as the user passed it, and the options of the run.

    ``loss`` is None (the compiled loss where the framework has one), a callable, or a name that the framework knows.
    ``initial_state`` maps a layer name to the state to start from. ``frozen``: the coefficients of whole-sequence
    layers are held constant where they are differentiated. ``kept_states``: which entries of the state of a
    whole-sequence layer are written, by its name, as ones and zeros that broadcast against (sample, time, *axes).
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Mapping[int, float] | None = None
    loss: Any = None
    training: bool = False
    initial_state: Mapping[str, Sequence[Any]] | None = None
    seed: int | None = None
    frozen: bool = False
    kept_states: Mapping[str, Array] | None = None

    def without_loss(self) -> Batch:
        """Return the batch without target, sample and class weights and loss."""
        return replace(self, y=None, loss=None, sample_weight=None, class_weight=None)


@dataclass(frozen=True)
class Port:
    """A tensor at the boundary of a layer or model, where the framework's own differentiation starts or ends.

    ``kind`` is one of ``"input"`` and ``"output"`` (``index``: number of the tensor), ``"initial_state"`` and
    ``"final_state"`` (``index``: number of the state), ``"weight"`` (``key``: its name within the layer), ``"loss"``.

    A whole-sequence layer also has ``"scan_input"`` and ``"scan_output"``: the input of its recurrence, which its
    coefficients are computed from, and the readout before a skip connection and a gate, both (sample, time, channel).

    A layer that the user's code calls step by step also has ``"state"``: a state after every step with its *total*
    gradient (``key="ending"``: only as the last step left it). A run that consists of several calls also has
    ``"state_read"``: the *direct* gradient of a state wherever the user's code reads it.

    ``layer`` is None for the model itself. ``direction`` selects one direction of a bidirectional layer; its ports are
    those before the directions are merged.
    """

    kind: Literal[
        "input",
        "output",
        "initial_state",
        "final_state",
        "state",
        "state_read",
        "weight",
        "loss",
        "scan_input",
        "scan_output",
    ]
    layer: str | None = None
    index: int = 0
    key: str = ""
    direction: Literal["forward", "backward"] | None = None


@dataclass(frozen=True)
class EndPort:
    """One end of a time Jacobian, as a certificate looks for it in the user's model.

    ``port`` may be of kind ``"state"``, whose ``index`` is the number of the state. ``steps``: number of steps, None
    without a time axis. ``states``: number of states of the recurrent layer that it belongs to, 0 for any other tensor.
    ``is_lower``: the derivative is taken by this end.
    """

    port: Port
    steps: int | None = None
    states: int = 0
    is_lower: bool = False


def refuse_misfits(cotangents: Mapping[Port, Array], of: Sequence[Port], values: Mapping[Port, Array]) -> None:
    """Raise an error for cotangents of other ports than those of a pull-back, or of another shape than (K, *port).

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
