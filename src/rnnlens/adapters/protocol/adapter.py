"""The abstract class of an adapter: the methods that rnnlens calls on a deep-learning framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CertificateError, LayerNotFoundError, ModelError, UnsupportedError, did_you_mean
from ...layout import Layout, dims_of, input_dims
from ...typing import Array, leaves_of
from ...vocabulary import FEATURE, UNIT
from .captured import (
    Batch,
    Capture,
    CaptureRequest,
    EndPort,
    NonRecurrentCall,
    Outputs,
    Port,
    Pullback,
    RecurrentCall,
    ReferenceRun,
)
from .facts import ChainLink, LayerInfo, LayerWeights, ModelFacts, Obstacle, WeightLocation

#: One cotangent per leaf of a model's outputs, None for a leaf that gets none; or a function of the outputs' values.
Cotangents = Sequence[Array | None] | Callable[[Sequence[Array]], Sequence[Array | None]]


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

    # Facts that need no run of the model.

    @abstractmethod
    def owns(self, model: Any) -> bool:
        """Return whether a model belongs to this framework."""

    @abstractmethod
    def describe(self, model: Any) -> list[LayerInfo]:
        """Return the recurrent layers of a model in the order in which they are called; may raise ``ModelError``."""

    @abstractmethod
    def weights(self, model: Any) -> Mapping[str, LayerWeights]:
        """Return copies of the weights of all layers; gates are in the order of the cell's class."""

    def provenance(self, model: Any) -> Mapping[str, str]:
        """Return framework, version, engine, dtype and device as plain strings."""
        return {"framework": self.name, "engine": self.engine, "adapter": self.name}

    def facts(self, model: Any) -> ModelFacts:
        """Return submodules, input and output names, loss and optimizer of a model, without running it."""
        return ModelFacts()

    def fingerprint(self, model: Any) -> Hashable | None:
        """Return a value that changes with the structure, hooks, flags and code of a model, not with its weights.

        Results of experiments, such as the roles of axes, are cached per model and input shapes until the value
        changes. None, the default, disables the cache.
        """
        return None

    def reduction(self, model: Any, loss: Any) -> str | None:
        """Return how a loss reduces over samples, by the loss's own name such as ``"mean"``.

        Returns None if it has no such name. ``loss`` None selects the model's own loss; this default then
        returns None.
        """
        reduction = getattr(loss, "reduction", None)
        return None if reduction is None else str(reduction)

    def weight_location(self, model: Any, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Find by name alone the framework weight behind ``key`` of a layer; None if there is none."""
        return None

    def chain(self, model: Any, *, training: bool) -> list[ChainLink] | None:
        """Return the layers from input to output if they form one plain chain of well-known layers; None otherwise."""
        return None

    def subnetwork(
        self, model: Any, of: Port, wrt: Port
    ) -> Callable[[Array], tuple[Array, Callable[[Array], list[Array]]]] | None:
        """Return a function that runs the user's own layers from tensor ``wrt`` to tensor ``of`` alone.

        Like ``differentiate``, it maps an array to a value and a pull-back of cotangents. It runs in inference mode and
        without code of rnnlens in between. None if the model cannot be split like that.
        """
        return None

    def reference_between(
        self, model: Any, batch: Batch, of: EndPort, wrt: EndPort, cotangent: Callable[[Array], Array]
    ) -> ReferenceRun:
        """Run the user's model once, and pull ``cotangent`` of the value at ``of`` back to ``wrt`` by its framework.

        The ends are found without what captures and pull-backs use. The one gradient is that at ``wrt``. Ends of a
        recurrent layer are (sample, time, unit), others in the framework's layout. Raises ``CertificateError`` if an
        end is no tensor of the user's model, as the states within a fused layer.
        """
        raise CertificateError("the framework has no tensor of its own there")

    def combination(self, model: Any, batch: Batch) -> str | None:
        """Return how losses of equally large batches combine to that of the data set: ``"mean"``, ``"sum"`` or None.

        None means that it is not known.
        """
        return None

    def ignores_weight_zero(self, model: Any, batch: Batch) -> bool:
        """Return whether a sample of weight zero adds nothing to the loss, and a mean still divides by all samples."""
        return False

    def mixes_samples(self, model: Any, training: bool) -> str | None:
        """Return the name of a layer that uses statistics of its batch; None if there is none; ``"?"`` if not known."""
        return "?"

    # Methods that run the model.

    @abstractmethod
    def pullback(
        self, model: Any, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> Pullback:
        """Run the model once, and keep what is needed to differentiate any ``of`` with respect to any ``wrt``.

        Differentiation stops at every ``cut`` port (outputs and final states of recurrent layers). The value of a cut
        port is treated as a constant, so that no gradient flows through the layer behind it. A cut port may be a
        ``wrt`` port as well; it then receives the gradient at that port. The time Jacobian cuts at every recurrent
        layer and sweeps these layers itself.
        """

    def has_compiled_pullback(self, model: Any) -> bool:
        """Return whether :meth:`pullback_of_known` computes the values and the gradients in one compiled pass.

        Later batches of a data set take it then. Otherwise all batches are swept, and give the numbers of single calls.
        """
        return False

    def pullback_of_known(
        self,
        model: Any,
        batch: Batch,
        of: Sequence[Port],
        wrt: Sequence[Port],
        cotangents: Mapping[Port, Array],
    ) -> Pullback:
        """Run the model once, and pull ``cotangents`` of ``of`` back to ``wrt``.

        Without cotangents the result can pull back any, as that of :meth:`pullback`. An adapter that compiles
        computes the gradients in the same pass as the values: see :class:`Pullback`.
        """
        return self.pullback(model, batch, of, wrt)

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
        """Run the user's model once without hooks and, with ``gradients``, differentiate it by its framework alone.

        By default the loss is differentiated; with ``cotangents`` the outputs are. Weight regularisers count in the
        loss, and in its gradient if ``regularised``. Raises ``CertificateError`` if the model would behave differently
        without rnnlens.
        """

    @abstractmethod
    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: Any
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Evaluate a user's function of framework tensors; return its value and its pull-back to the arguments."""

    def capture(self, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
        """Run one forward pass and, with a loss, one backward pass; called once per ``rl.trace``.

        The default is built from one ``pullback``. It supports known cells that run forwards, once in each pass,
        without a mask.
        """
        return _capture_by_boundaries(self, model, batch, request)

    def has_own_loss(self, model: Any) -> bool:
        """Return whether a model has a loss that needs no target."""
        return False

    def prepared_reference_run(
        self, model: Any, batch: Batch, *, gradients: bool = True
    ) -> Callable[[], ReferenceRun] | None:
        """Prepare a reference run: do all that touches the user's model, and return a function for the rest.

        The returned function may run in another thread. The default returns None: the run cannot be split into two
        parts.
        """
        return None

    def coarsest_dtype(self, model: Any, batch: Batch) -> str:
        """Run the user's unmodified model; return the coarsest float dtype of its operations, or "" if not known.

        It is called where a certificate has failed. A part of a float64 model may compute in float32.
        """
        return ""

    def rounded_run(self, model: Any, batch: Batch, unit: float) -> ReferenceRun | None:
        """Make a reference run of a copy of the model whose weights are changed by one rounding of size ``unit``.

        It is called where the certificate of a model with whole-sequence layers has failed. None if it cannot be made.
        """
        return None

    def layouts(self, model: Any, batch: Batch, ports: Sequence[Port]) -> Mapping[Port, Layout]:
        """Return the roles of the axes of model inputs and outputs and of tensors of layers that are not recurrent.

        These tensors keep the framework's own layout. The result is empty if the framework's convention applies:
        samples first, then time. Roles are never derived from rank or equal sizes alone. An axis of unknown role is
        called ``axis_0``, ``axis_1``.
        """
        return {}

    def outputs_of(self, model: Any, batch: Batch) -> Outputs:
        """Return the outputs of the model for one batch, from one forward pass without a loss."""
        outputs = self.capture(model, batch, CaptureRequest(inputs=False, gradients=False, weight_grads=False)).outputs
        return Outputs(leaves_of(outputs), outputs)

    def loss_of(self, model: Any, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
        """Return the loss of known outputs and its gradient for each output leaf, None for an unused leaf.

        Losses that the model itself adds (``Outputs.own_losses``) are not included. ``batch`` has the targets and
        weights.
        """
        value, pull = self.differentiate(self.loss_function(model, batch), outputs.leaves, model)
        return float(value), list(pull(np.ones(())))

    def loss_function(self, model: Any, batch: Batch) -> Callable[..., Any]:
        """Return the loss of a batch as a function of the model's output leaves, for ``differentiate``."""
        raise UnsupportedError(
            f"The adapter of {self.name} cannot evaluate a loss on the outputs of several batches.",
            expected='combine="mean" or "sum", if the loss is a mean or a sum over samples',
            hint="all samples as one batch",
        )

    def find_obstacle(self, model: Any, batch: Batch, of: Sequence[Port], wrt: Port) -> Obstacle | None:
        """Return why no gradient path leads from ``of`` to ``wrt``, if the structure of the model shows the reason.

        Called before any experiment. None if an experiment has to find the reason.
        """
        return None

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


_LOSS = Port("loss")


def _capture_by_boundaries(adapter: Adapter, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
    """Capture a model by one pull-back from the ports of its layers; default of :meth:`Adapter.capture`."""
    recurrent_layers, other_layers = _requested_layers(adapter, model, request)
    weights = adapter.weights(model)
    weight_owners = weights if request.boundaries else recurrent_layers
    weight_ports = [Port("weight", name, key=key) for name in weight_owners for key in weights[name].values]
    input_ports = [Port("input", index=i) for i in range(len(leaves_of(batch.x)))]
    output_ports = [Port("output", index=i) for i in range(max(1, len(adapter.facts(model).outputs)))]
    other_ports = {name: Port("output", name) for name in other_layers}
    boundary_ports = [port for name in recurrent_layers for port in _boundary_ports(name, weights[name])]
    ports = [*boundary_ports, *other_ports.values(), *input_ports, *output_ports, *weight_ports]
    loss_ports = [_LOSS] if request.gradients or request.loss else []
    with adapter.pullback(model, batch, loss_ports, ports) as pullback:
        values, grads = dict(pullback.values), dict[Port, Array]()
        loss_gradients = pullback.vjp({_LOSS: np.ones(1)}) if request.gradients else {}
        for port, grad in loss_gradients.items():  # zeros without a path
            grads[port] = np.zeros(tuple(values[port].shape)) if grad is None else grad[0]
    capture = Capture([_recurrent_call(name, weights[name], values, grads, request) for name in recurrent_layers])
    capture.loss = float(values[_LOSS]) if loss_ports else None
    capture.other_calls = [NonRecurrentCall(name, values[port], grads.get(port)) for name, port in other_ports.items()]
    capture.outputs = [values[port] for port in output_ports] if len(output_ports) > 1 else values[output_ports[0]]
    if request.gradients and request.boundaries:
        capture.input_grads = [grads[port] for port in input_ports]
        locations = {port: adapter.weight_location(model, str(port.layer), None, port.key) for port in weight_ports}
        capture.outside_weight_grads = {
            location.name: grads[port] for port, location in locations.items() if location is not None
        }
        capture.full_gradient_names = frozenset(capture.outside_weight_grads)
    return capture


def _requested_layers(adapter: Adapter, model: Any, request: CaptureRequest) -> tuple[list[str], list[str]]:
    """Return the names of the requested recurrent layers, and of the requested other layers."""
    infos = {info.name: info for info in adapter.describe(model)}
    layer_names = list(dict.fromkeys([*infos, *adapter.facts(model).submodules]))
    if request.layers is None and not infos:
        raise ModelError("There is no recurrent layer in this model.", hint=f"name a layer: {', '.join(layer_names)}")
    requested = list(infos if request.layers is None else dict.fromkeys(n.partition("#")[0] for n in request.layers))
    for name in requested:
        if name not in layer_names:
            raise LayerNotFoundError(f"No layer is called {name!r}.", hint=did_you_mean(name, layer_names))
        if name in infos and (infos[name].direction != "forward" or infos[name].masked):
            raise UnsupportedError(
                f"Layer {name!r} cannot be traced inside: the adapter of {adapter.name} gives its input and "
                "output only.",
                got="a mask, or a recurrence that runs backwards",
                expected="one that runs forwards over every step",
            )
    return [name for name in requested if name in infos], [name for name in requested if name not in infos]


def _boundary_ports(name: str, weights: LayerWeights) -> list[Port]:
    """Return the ports of a recurrent layer: input, output and initial states."""
    states = range(len(weights.cells["forward"].states))
    return [Port("input", name), Port("output", name), *(Port("initial_state", name, i) for i in states)]


def _recurrent_call(
    name: str, weights: LayerWeights, values: Mapping[Port, Array], grads: Mapping[Port, Array], request: CaptureRequest
) -> RecurrentCall:
    input_port, output_port, *initial_ports = _boundary_ports(name, weights)
    needs_boundaries = request.gradients and request.boundaries
    weight_grads = {key: grads[Port("weight", name, key=key)] for key in weights.values} if request.gradients else None
    return RecurrentCall(
        layer=name,
        direction="forward",
        cell=weights.cells["forward"],
        input=values[input_port],
        initial_state=tuple(values[port] for port in initial_ports),
        output=values[output_port],
        output_grad=grads.get(output_port),
        weights_key=name,
        weight_grads=weight_grads if request.weight_grads else None,
        framework_input_grad=grads[input_port] if needs_boundaries else None,
        framework_initial_state_grad=tuple(grads[port] for port in initial_ports) if needs_boundaries else None,
    )
