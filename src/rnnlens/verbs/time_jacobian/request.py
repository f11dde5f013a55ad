"""The request of a time Jacobian: names and options, resolved and checked once before the model runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from ... import data
from ...adapters.protocol import Adapter, Batch, Port
from ...adapters.registry import adapter_for
from ...autodiff.tensors import dtype_name
from ...errors import InputError, UnsupportedError, message
from ...layout import Layout
from ..axes import InputCoordinates, TensorLayouts, named_layouts
from ..names import Catalogue, TensorName, names_behind_ids, read_one, with_named_outputs


@dataclass(frozen=True)
class JacobianOptions:
    """Options of a time Jacobian, as the arguments of ``rl.jacobian``; ``memory`` in bytes."""

    memory: int
    at: Mapping[str, Any] = field(default_factory=dict)
    reduce: Any = None
    measure: str | None = None
    across: str | None = None
    sketch: int | None = None
    rtol: float | None = None
    mode: str = "auto"
    out: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check that the other options fit a sketch."""
        if self.sketch is None:
            return
        if self.measure not in (None, "norm") or self.reduce is not None:
            got = f"measure={self.measure!r}" if self.reduce is None else "reduce="
            raise InputError(message("A sketch estimates the norm over all units.", got=got, expected='measure="norm"'))
        if self.mode == "forward":
            raise InputError(message("A sketch is pulled back.", got='mode="forward"', expected='"auto" or "reverse"'))
        if self.out is not None:
            what = "A sketch cannot be written in chunks."
            raise InputError(message(what, got="sketch= and out=", hint="save it"))


@dataclass(frozen=True)
class JacobianRequest:
    """A time Jacobian to compute: model, batch, the two ends by name, and options.

    Attributes
    ----------
    known
        Catalogue of the model's tensors.
    of, wrt
        Names of the upper and the lower end, valid for a time Jacobian.
    layouts
        Layouts stated by the user.
    provenance
        Framework, version, engine, dtype and device.
    coordinates
        Coordinates of the inputs that are DataArrays.
    """

    adapter: Adapter
    model: Any
    batch: Batch
    known: Catalogue
    of: TensorName
    wrt: TensorName
    options: JacobianOptions
    layouts: Mapping[Port, Layout]
    provenance: Mapping[str, str]
    coordinates: InputCoordinates


def read_request(
    model: Any, batch: Batch, ends: tuple[str, str], options: JacobianOptions, axes: Mapping[str, Any] | None
) -> JacobianRequest:
    """Resolve the names of the two ends on the model, and check all arguments that need no run.

    Raises
    ------
    LayerNotFoundError
        If a name matches nothing.
    UnsupportedError
        If the tensor cannot be an end of a time Jacobian.
    InputError
        If the input is integer, or ``axes=`` does not name tensors of the model.
    """
    adapter = adapter_for(model)
    known = with_named_outputs(adapter, model, batch, Catalogue(adapter, model, batch.x), ends)
    of, wrt = (read_one(text, known) for text in ends)
    layouts = named_layouts(axes, known)
    given = InputCoordinates(batch.x, TensorLayouts(layouts, adapter))
    _refuse_as_end(of, "of")
    _refuse_as_end(wrt, "wrt")
    if is_of_integers(wrt, batch):
        raise _integers(wrt, batch, names_behind_ids(adapter, model, batch, known))
    if batch.frozen and not known.sequences:
        what = "frozen=True holds the coefficients of whole-sequence layers, and this model has none."
        raise InputError(
            message(what, got=type(model).__name__, expected="a model with a layer of Mamba or a delta rule")
        )
    return JacobianRequest(adapter, model, batch, known, of, wrt, options, layouts, adapter.provenance(model), given)


_ENDS = {
    "of": ("output", "state", "final_state"),
    "wrt": ("input", "output", "state", "initial_state"),
}
_EXAMPLES = {
    "of": '"output", "lstm.output", "lstm.hidden", "lstm.cell" or "lstm.final_hidden"',
    "wrt": '"input", "embedding.output", "lstm.output", "lstm.hidden" or "lstm.initial_hidden"',
}


def _refuse_as_end(name: TensorName, role: str) -> None:
    """Raise for a tensor that cannot be this end of a time Jacobian."""
    if name.what not in _ENDS[role]:
        hint = "rl.gradients differentiates the loss, and by weights and gates"
        what = f"{role}={name.text!r} has no time Jacobian."
        raise UnsupportedError(message(what, expected=_EXAMPLES[role], hint=hint))


def is_of_integers(wrt: TensorName, batch: Batch) -> bool:
    """Return whether a tensor is an input of the model that holds integers; raise if there is no such input."""
    if wrt.what != "input" or wrt.layer is not None:
        return False
    leaves = data.leaves_of(batch.x)
    if wrt.index >= len(leaves):
        raise InputError(message(f"The model has no {wrt.text}.", got=f"{len(leaves)} inputs"))
    kind = _dtype(leaves[wrt.index])
    return not ("float" in kind or "complex" in kind)


def _integers(wrt: TensorName, batch: Batch, instead: Sequence[str]) -> InputError:
    got = f"{wrt.text} of dtype {_dtype(data.leaves_of(batch.x)[wrt.index])}"
    hint = " or ".join(f'wrt="{name}"' for name in instead) or 'x.astype("float32")'
    return InputError(message("Integers have no derivative.", got=got, expected="floats", hint=hint))


def _dtype(leaf: Any) -> str:
    return dtype_name(leaf.data if data.is_packed(leaf) else leaf)
