"""What differs between Keras 3 and ``tf_keras``: said by one object for each, taken from the model that is looked at.

Both may be loaded in one process, so nothing here belongs to the process: :func:`dialect_of` asks whose layer, cell or
variable something is. No module of this adapter but the dialects' own imports either package. What the two have in
common bears the name it has in Keras 3, so that code reads as Keras code does: ``keras = dialect_of(model)``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import numpy as np

from ...autodiff import Engine, Tap
from ...errors import UnsupportedError, message
from ...recurrence.cells import Cell
from ...typing import Array, Namespace

#: Package that must be loaded already -> the module of its dialect.
_DIALECTS = {"keras": "keras3", "tf_keras": "keras2"}

#: Replaces a method of a layer during a run.
Override = Callable[[Any, str, Callable[..., Any]], None]


class Dialect(Protocol):
    """One Keras. Attributes without a comment are what Keras 3 has under that name."""

    #: Of the package: ``"keras"`` or ``"tf_keras"``.
    name: str
    layers: Any
    activations: Any
    losses: Any
    models: Any
    #: ``convert_to_tensor``, ``cast``, ``sum`` and the like, on tensors of the engine.
    ops: Any
    #: ``flatten``, ``map_structure``, ``pack_sequence_as``, ``is_nested``, ``flatten_with_path``.
    tree: Any
    Layer: Any
    Model: Any
    Sequential: Any
    Functional: Any
    Variable: Any
    version: str
    #: How its users write a mean and a sum.
    says_mean: str
    says_sum: str
    #: Whether one weight per sample would weigh the steps of a loss of every step.
    weighs_steps: bool

    def is_graph(self, thing: Any) -> bool:
        """Whether a layer is a part of a graph that only a session runs."""

    # -- the engine, dtypes, values
    @property
    def engine(self) -> Engine:
        """The autodiff engine; it carries Keras masks over to replaced tensors."""

    def floatx(self) -> str:
        """The dtype of floats unless a layer says otherwise."""

    def dtype_of(self, tensor: Any) -> str:
        """Its name, such as ``"float32"``."""

    def is_float(self, tensor: Any) -> bool:
        """Whether a tensor or variable holds floats."""

    def computed(self, dtype: str) -> str:
        """What operations on this dtype are computed in."""

    def value_of(self, tensor: Any) -> Array:
        """A NumPy copy of a variable's or tensor's value; halves become float32."""

    def mask_of(self, tensor: Any) -> Any:
        """The mask that Keras attached to a tensor; None where there is none."""

    def set_mask(self, tensor: Any, mask: Any) -> None:
        """Attach a mask to a tensor."""

    def namespace(self) -> Namespace:
        """The array functions that the step of a registered cell is given."""

    # -- variables
    def variable_name(self, variable: Any) -> str:
        """The last part of its path: ``"kernel"``."""

    def path(self, variable: Any) -> str:
        """``"lstm/lstm_cell/kernel"``."""

    def own_variables(self, layer: Any) -> list[Any]:
        """Return the variables of a layer without those of its sublayers."""

    def regularizers(self, layer: Any) -> Mapping[int, Any]:
        """Map the id of each regularised variable of the layer and its sublayers to its regulariser."""

    def variables(self, model: Any) -> list[Any]:
        """Return all variables that a run may read, states and metrics included."""

    # -- layers and cells
    @property
    def cells(self) -> Mapping[type, type[Cell] | Mapping[int, type[Cell]]]:
        """The cells whose equations are known, by their exact types."""

    @property
    def known_activations(self) -> Mapping[Any, str]:
        """Functions of Keras' own by identity, and the name under which ``recurrence.activations`` has them."""

    @property
    def single_precision(self) -> frozenset[str]:
        """Activations that this engine computes with constants of single precision."""

    def state_size(self, layer: Any) -> Any:
        """State sizes declared by the layer's cell."""

    def template(self, cell: Any) -> Any:
        """The nesting in which a recurrent layer hands states to a cell, with sizes for leaves."""

    def output_size(self, cell: Any) -> Any:
        """Output size declared by a cell; None if it declares none."""

    def draws(self, layer: Any) -> bool:
        """Whether a layer has a generator of random numbers that no rate of it speaks of."""

    def refusal(self, layer: Any) -> tuple[str, str] | None:
        """Return why a recurrent layer cannot be hooked, and a workaround; None if it can."""

    def time_major(self, layer: Any) -> bool:
        """Whether the first axis of a layer's input is time."""

    def inputs_of(self, node: Any) -> list[Any]:
        """Return the input tensors of one symbolic call of a layer."""

    def in_order(self, model: Any) -> list[Any] | None:
        """The layers of a model that is one plain chain; None for any other."""

    def graph_of(self, model: Any) -> tuple[Any, Any]:
        """Nested inputs and outputs of a model that was built from tensors; None for each where it was not."""

    def built_on(self, model: Any) -> Any:
        """The shape, or shapes by name, that a model without a graph was built on; None where not known."""

    def build(self, model: Any, x: Any) -> None:
        """Create the weights of a model for data like the tensors ``x``, of any batch size."""

    def is_own(self, thing: Any) -> bool:
        """Whether a class or function stands in this package."""

    # -- a run
    def asks_for_training(self, model: Any) -> bool:
        """Whether the model's call takes ``training``."""

    def listen(self, listener: Any, site: Any, half: int, override: Override) -> None:
        """Override the methods of a recurrent layer at which ``listener`` records its calls."""

    def values(self, variables: Sequence[Any]) -> list[Any] | None:
        """Return the tensors that replace the variables in a run; None if the run reads the variables."""

    def seeds(self, model: Any, seed: int | None) -> list[Any]:
        """Return the state of each random generator as a tensor: the present one, or one derived from ``seed``."""

    def running(
        self, model: Any, values: Sequence[Any] | None, seeds: Sequence[Any], weights: Mapping[str, Any], tap: Tap
    ) -> AbstractContextManager[None]:
        """Within the block variables hold ``values``, ``weights`` are tapped, random numbers follow ``seeds``."""

    def stepping(self, cell: Any, weights: Sequence[tuple[Any, Any]]) -> AbstractContextManager[None]:
        """Temporarily assign the paired tensors to the cell's variables."""

    def as_found(self, model: Any, seed: int | None) -> AbstractContextManager[None]:
        """Restore on exit the variables and random generators that a run changes."""

    def plain_values(self, variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(tensors to run with in place of the variables, variables to differentiate by themselves)."""

    def standing(self, model: Any, values: Sequence[Any], seeds: Sequence[Any]) -> AbstractContextManager[None]:
        """Run without taps, with ``values`` for all variables."""

    def initial_state(self, cell: Any, samples: int) -> Any:
        """The states that a cell with a ``get_initial_state`` of its own starts from."""

    def books(self, layer: Any) -> Iterator[Any]:
        """Iterate over the containers that a layer's calls append to."""

    def step(self, cell: Any, x: Any, states: Any) -> tuple[Any, Any]:
        """One call of a cell as its recurrent layer makes it: output and new states."""

    def inside(self, value: Any) -> Any:
        """Return the container inside a tracking wrapper of the package; None for other objects."""

    def tracks(self, value: Any) -> bool:
        """Whether ``value`` is a tracker object of the package."""

    def is_short(self, x: Any) -> bool:
        """Whether a run on such data, that would be traced for itself alone, is done sooner operation by operation."""

    def stamp(self, model: Any, loss: Any) -> Hashable | None:
        """Return a hashable that changes with everything a run reads; None if that is not known."""

    # -- the loss
    def is_overridden(self, model: Any) -> bool:
        """Whether a model computes its loss in a method of its own."""

    def is_compiled(self, model: Any) -> bool:
        """Whether ``compile`` was called."""

    def compiled_loss(self, model: Any) -> Any:
        """Return the compiled loss, a function of ``(y, y_pred, sample_weight)``; None if there is none."""

    def compiled_form(self, loss: Any, weights: Any = None, names: Any = None) -> Callable[[Any, Any, Any], Any]:
        """A loss as ``compile(loss=...)`` would take it."""

    def user_loss(self, model: Any) -> Any:
        """The loss as it was given to ``compile``."""

    def whole_loss(self, model: Any, x: Any, y: Any, y_pred: Any, weight: Any, training: bool) -> Any:
        """The loss that training minimises: the compiled one, its weights, regularisers and ``add_loss``."""

    def undisturbed(self, model: Any, regularised: bool) -> AbstractContextManager[None]:
        """Keep the compiled loss unchanged; penalties of weights have a gradient if ``regularised``."""

    def aligned(self, y: Any, y_pred: Any) -> tuple[Any, Any]:
        """Targets and outputs as a compiled function gets them."""

    def adds_losses(self, model: Any) -> bool:
        """After a call: whether a layer called ``add_loss``."""


def dialect_of(thing: Any) -> Dialect:
    """The Keras that a model, layer, cell or variable belongs to."""
    found = _of_type(type(thing))
    if found is not None and found.is_graph(thing):
        raise UnsupportedError(
            message(
                f"{type(thing).__name__} was made without eager execution.",
                expected="a model that runs eagerly or in a tf.function",
                hint="make it before tf.compat.v1.disable_eager_execution(), or in a process without it",
            )
        )
    if found is None:
        raise TypeError(f"{type(thing).__name__} belongs to no Keras")
    return found


def dialect(package: str) -> Dialect:
    """The dialect of a package that is loaded."""
    return _dialect(_DIALECTS[package])


def spoken() -> Iterator[Dialect]:
    """The dialects whose packages are loaded: of a cell that is no layer, any of them may have the type."""
    for package, module in _DIALECTS.items():
        if hasattr(sys.modules.get(package), "layers"):
            yield _dialect(module)


def _of_type(kind: type) -> Dialect | None:
    for keras in spoken():
        if issubclass(kind, (keras.Layer, keras.Variable)):
            return keras
    return None


@cache
def _dialect(module: str) -> Dialect:
    found: Dialect = importlib.import_module(f"{__package__}.{module}").dialect
    return found


def own_array(array: Any) -> Array:
    """A NumPy copy, wherever the array lies."""
    return np.array(array.cpu().numpy() if hasattr(array, "cpu") else array)
