"""The abstract class of an adapter: the methods that rnnlens calls on a deep-learning framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ...errors import UnsupportedError
from ...layout import Layout, dims_of, input_dims
from ...typing import Array
from ...vocabulary import FEATURE, UNIT
from .data import Batch, Port
from .facts import LayerInfo, LayerWeights, ModelFacts
from .run import Outputs, Run, Taps


class AxisConvention:
    """Axis convention of a framework: samples first, then time, unless an adapter overrides it."""

    #: Whether every tensor of every model has its samples on the first axis. If True, no axis is searched for.
    samples_first: bool = True

    def layout(self, port: Port, shape: Sequence[int], *, integer: bool = False) -> Layout:
        """Return the layout of a tensor by convention alone, from its port and shape.

        ``integer`` marks integer ids, which have no feature axis.
        """
        is_model_input = port.kind == "input" and port.layer is None
        last_axis = FEATURE if port.kind == "input" else UNIT
        return Layout.of_names(input_dims(shape, integer) if is_model_input else dims_of(shape, last=last_axis))


class Adapter(AxisConvention, ABC):
    """Interface between rnnlens and one framework; the registry returns the one object for each framework.

    Every verb needs the abstract methods. The other methods have a default that is correct for any framework, usually
    "not known". With a default, results contain less, take longer, or are refused with a clear error.
    """

    name: str

    @property
    def engine(self) -> str:
        """Name of the engine that computes and differentiates, in one word."""
        return self.name

    #: Whether a model has no layers before it is bound to data of some shapes (:meth:`bind`).
    needs_shapes: bool = False

    def bind(self, model: Any, x: Any, y: Any = None) -> Any:
        """Return the model for data shaped like ``x``, on which all other methods are then called.

        ``y`` is the target where there is no loss besides the model: it may take the target itself.

        A framework whose models have no layers without data, as functions of JAX, returns an object that knows the
        shapes; the same one for the same model and shapes. The default is the model itself.
        """
        return model

    # Facts that need no run of the model.

    @abstractmethod
    def owns(self, model: Any) -> bool:
        """Return whether a model belongs to this framework."""

    @abstractmethod
    def describe(self, model: Any) -> list[LayerInfo]:
        """Return the recurrent layers that a model's structure shows, in the order in which they are called.

        Earlier runs do not change the answer. May raise ``ModelError``.
        """

    def known_layers(self, model: Any) -> list[LayerInfo]:
        """Return the rows of ``describe``, completed by layers that earlier runs of the model showed."""
        return self.describe(model)

    @abstractmethod
    def weights(self, model: Any) -> Mapping[str, LayerWeights]:
        """Return copies of the weights of all layers; gates are in the order of the cell's class."""

    def facts(self, model: Any, batch: Batch | None = None) -> ModelFacts:
        """Return facts about a model, or about a model and a batch, without running it."""
        facts = ModelFacts(model, batch)
        facts.framework = self.name
        return facts

    def fingerprint(self, model: Any) -> Hashable | None:
        """Return a value that changes with the structure, hooks, flags and code of a model, not with its weights.

        What calls learned of a model is kept until the value changes: its layers, the roles of axes by shapes of the
        inputs, and which calls were certified. With None, the default, layers and roles are read at each call.
        """
        return None

    # Methods that run the model.

    @abstractmethod
    def run(self, model: Any, batch: Batch, taps: Taps) -> Run:
        """Run the model once on a batch, and record what ``taps`` say; see :class:`Run`.

        It is the only method that calls the user's model. The model is borrowed and restored within it: weights,
        buffers, flags, attributes and random generators are as found afterwards, also after an error.
        """

    @abstractmethod
    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: Any
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Evaluate a user's function of framework tensors; return its value and its pull-back to the arguments."""

    def loss_of(self, model: Any, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
        """Return the loss of known outputs and its gradient for each output leaf, None for an unused leaf.

        Losses that the model itself adds (``Outputs.own_losses``) are not included. ``batch`` has the targets and
        weights.
        """
        raise UnsupportedError(
            f"The adapter of {self.name} cannot evaluate a loss on the outputs of several batches.",
            expected='combine="mean" or "sum", if the loss is a mean or a sum over samples',
            hint="all samples as one batch",
        )

    def layouts(self, model: Any, batch: Batch, ports: Sequence[Port]) -> Mapping[Port, Layout]:
        """Return the roles of the axes of model inputs and outputs and of tensors of layers that are not recurrent.

        These tensors keep the framework's own layout. The result is empty if the framework's convention applies:
        samples first, then time. Roles are never derived from rank or equal sizes alone. An axis of unknown role is
        called ``axis_0``, ``axis_1``.
        """
        return {}

    # Changed copies and states of a model.

    def load_weights(self, model: Any, path: Path, *, unsafe: bool = False) -> None:
        """Load weights that the framework saved in a file into ``model``, in place; the command line calls it.

        ``unsafe`` also allows file formats that can run code.

        Raises
        ------
        FileError
            If the file is damaged, refused as unsafe, or belongs to another model.
        """
        raise UnsupportedError(
            f"The adapter of {self.name} does not read weight files.",
            got=str(path),
            hint="a factory that returns the model with its weights",
        )

    def perturbed_port(self, model: Any, port: Port, size: float) -> AbstractContextManager[bool]:
        """Perturb a weight or a layer's output by ``size`` times its own spread while the context is open.

        The pattern is random and fixed. The context yields False if the port cannot be perturbed.
        """
        return nullcontext(False)

    def reinitialised(self, model: Any, seed: int) -> Any:
        """Return a copy of the model with weights drawn anew.

        Raises
        ------
        UnsupportedError
            If the adapter cannot rebuild the model. The user then has to pass the model from before training.
        """
        raise UnsupportedError(
            'baseline="init" needs an adapter that can re-initialise a model.',
            got=self.name,
            hint="pass a copy of the model from before training: baseline=that_model",
        )
