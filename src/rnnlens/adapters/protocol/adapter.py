"""What rnnlens asks of a framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UnsupportedError, message
from ...layout import Layout, dims_of, input_dims
from ...trees import leaves_of
from ...typing import Array
from ...vocabulary import FEATURE, UNIT
from .by_boundaries import capture_by_boundaries
from .captured import Batch, Capture, CaptureRequest, Outputs, ReferenceRun
from .facts import ChainLink, LayerInfo, LayerWeights, ModelFacts, Obstacle, WeightLocation
from .ports import Port, Pullback

#: Given the values of a model's outputs, one cotangent per leaf; None for those that count for nothing.
Cotangents = Callable[[Sequence[Array]], Sequence[Array | None]]


class AxisConvention:
    """How tensors lie by the rule of a framework: samples first, then time."""

    #: Whether every tensor of every model has its samples on the first axis: then there is nothing to be found out.
    samples_first: bool = True

    def layout(self, port: Port, shape: Sequence[int], *, integer: bool = False) -> Layout:
        """The axes of a tensor of which nothing else is known; ``integer``: of ids, which have no axis of features."""
        of_input = port.kind == "input" and port.layer is None
        last = FEATURE if port.kind == "input" else UNIT
        return Layout.plain(input_dims(shape, integer) if of_input else dims_of(shape, last=last))


class Adapter(AxisConvention, ABC):
    """What rnnlens asks of a framework: one object per framework, found through the registry.

    The abstract methods are what every verb rests on. The others have an answer that is right for any framework, "not
    known", with which a result says less, takes longer, or is refused by name.
    """

    name: str

    @property
    def engine(self) -> str:
        """What computes and differentiates, in one word."""
        return self.name

    # What is known of a model without running it.

    @abstractmethod
    def owns(self, model: Any) -> bool:
        """Whether a model is of this framework."""

    @abstractmethod
    def describe(self, model: Any) -> list[LayerInfo]:
        """Recurrent layers in the order in which they are called. May raise ModelError."""

    @abstractmethod
    def weights(self, model: Any) -> Mapping[str, LayerWeights]:
        """All layers with weights, copies of the values, gates in our order."""

    def provenance(self, model: Any) -> Mapping[str, str]:
        """Framework, its version, engine, dtype, device: plain strings."""
        return {"framework": self.name, "engine": self.engine, "adapter": self.name}

    def facts(self, model: Any) -> ModelFacts:
        """Parts, names and training of a model: whatever a verb would have to look into the model for."""
        return ModelFacts()

    def fingerprint(self, model: Any) -> Hashable | None:
        """Return a value that changes with the structure, hooks, flags and code of a model, not with its weights.

        The results of experiments, such as the roles of axes, are kept per model and shapes until it changes. None, the
        default: nothing is kept.
        """
        return None

    def reduction(self, model: Any, loss: Any) -> str | None:
        """How a loss (the model's own, where it is None) makes one number of those of all samples, in its own words.

        None where it does not say.
        """
        says = getattr(loss, "reduction", None)
        return None if says is None else str(says)

    def place(self, model: Any, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Which of the framework's weights ``key`` of a layer is, found by name alone; None where it is none."""
        return None

    def chain(self, model: Any, *, training: bool) -> list[ChainLink] | None:
        """The layers from input to output where they are one plain chain of well-known ones; None otherwise."""
        return None

    def subnetwork(
        self, model: Any, of: Port, wrt: Port
    ) -> Callable[[Array], tuple[Array, Callable[[Array], list[Array]]]] | None:
        """The user's own layers from one tensor to another, run by themselves: from an array as ``differentiate`` does.

        Not in training, and with nothing of ours in the way. None where the model cannot be taken apart like that.
        """
        return None

    def combination(self, model: Any, batch: Batch) -> str | None:
        """How losses of batches of one size make up that of the data set: ``"mean"``, ``"sum"``; None: not known."""
        return None

    def mixes_samples(self, model: Any, training: bool) -> str | None:
        """The name of a layer that uses statistics of the batch it is in; None: there is none; ``"?"``: not known."""
        return "?"

    # What a run tells.

    @abstractmethod
    def pullback(
        self, model: Any, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> Pullback:
        """Run the model once, and keep what is needed to differentiate any ``of`` with respect to any ``wrt``.

        Differentiation stops at every ``cut`` port (outputs and final states of recurrent layers): its value counts as
        given from outside, so that nothing flows through the layer behind it. A cut port may be a ``wrt`` port as well:
        it receives what arrives there. The time Jacobian cuts at every recurrent layer and sweeps through those itself.
        """

    @abstractmethod
    def reference_run(
        self,
        model: Any,
        batch: Batch,
        cotangents: Cotangents | None = None,
        *,
        gradients: bool = True,
        regularised: bool = False,
    ) -> ReferenceRun:
        """Run the user's own model once as it stands and, with ``gradients``, differentiate it once by itself.

        What is differentiated is the loss, or with ``cotangents`` the outputs: given their values, it returns one
        cotangent per leaf. Weight regularisers count in the loss, and in its gradient if ``regularised``. Raises
        ``CertificateError`` where the model by itself would do something else.
        """

    @abstractmethod
    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: Any
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Value of a user's function of the framework's tensors, and what pulls cotangents back to its arguments."""

    def capture(self, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
        """One forward pass and, with a loss, one backward pass. Called once per ``rl.trace``.

        As it stands, made out of ``pullback``; see ``by_boundaries`` for the models that it serves.
        """
        return capture_by_boundaries(self, model, batch, request)

    def has_own_loss(self, model: Any) -> bool:
        """Whether a model has a loss that needs no target."""
        return False

    def prepared_reference_run(
        self, model: Any, batch: Batch, *, gradients: bool = True
    ) -> Callable[[], ReferenceRun] | None:
        """``plain``, with all that touches the user's model done: what is left may run in another thread.

        As it stands None: it does not come in two parts.
        """
        return None

    def layouts(self, model: Any, batch: Batch, ports: Sequence[Port]) -> Mapping[Port, Layout]:
        """Which axis is what, of inputs and outputs of the model and of layers that are not recurrent.

        Their tensors lie as the framework has them. Empty where the rule of the framework holds: samples first, then
        time. Never from rank or equal sizes alone; an axis of which nothing is known is called ``axis_0``, ``axis_1``.
        """
        return {}

    def outputs_of(self, model: Any, batch: Batch) -> Outputs:
        """What the model returns for one batch: one forward pass, without a loss."""
        outputs = self.capture(model, batch, CaptureRequest(inputs=False, gradients=False, weight_grads=False)).outputs
        return Outputs(leaves_of(outputs), outputs)

    def loss_of(self, model: Any, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
        """The loss of outputs that are at hand, and its gradient at each of them; None where it does not depend on one.

        Without the losses that the model makes itself (``Outputs.own_losses``). ``batch`` has the targets and weights.
        """
        value, pull = self.differentiate(self.loss_function(model, batch), outputs.leaves, model)
        return float(value), list(pull(np.ones(())))

    def loss_function(self, model: Any, batch: Batch) -> Callable[..., Any]:
        """The loss of a batch as a function of what the model returns, leaf by leaf, for ``differentiate``."""
        raise UnsupportedError(
            message(
                f"The adapter of {self.name} cannot evaluate a loss on the outputs of several batches.",
                expected='combine="mean" or "sum" if the loss is one of these over samples',
                hint="all samples as one batch",
            )
        )

    def find_obstacle(self, model: Any, batch: Batch, of: Sequence[Port], wrt: Port) -> Obstacle | None:
        """What stands in the way of a gradient that does not exist, where the model itself shows it.

        Asked before any experiment. None where it has to be found out.
        """
        return None

    # What can be made of a model.

    def load_weights(self, model: Any, path: Path, *, unsafe: bool = False) -> None:
        """Read the model's weights from a file, for the command line; with ``unsafe`` also what could run code.

        Raises
        ------
        FileError
            If the file is damaged, refused as unsafe, or of another model.
        """
        raise UnsupportedError(
            message(
                f"The adapter of {self.name} reads no files of weights.",
                got=str(path),
                hint="a factory that returns the model with its weights",
            )
        )

    def perturbed_port(self, model: Any, port: Port, size: float) -> AbstractContextManager[bool]:
        """Within the block, add ``size`` times its own spread to a weight or to the output of a layer.

        The pattern is random and fixed. Yields False where the port cannot be moved.
        """
        return nullcontext(False)

    def reinitialised(self, model: Any, seed: int) -> Any:
        """A copy with fresh weights.

        Raises
        ------
        UnsupportedError
            If the model cannot be built anew: then the model before training has to be passed.
        """
        raise UnsupportedError(
            message(
                'baseline="init" needs an adapter that can build a model anew.',
                got=self.name,
                hint="pass a copy of the model from before training: baseline=that_model",
            )
        )
