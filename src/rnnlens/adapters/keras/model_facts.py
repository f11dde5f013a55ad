"""Facts of a model that need no run: layers and roles, loss, optimizer, names of inputs and outputs, versions."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import UnsupportedError
from ...layout import Layout
from ...typing import Array
from ..protocol import ChainLink, ModelFacts, Port, Role, Submodule, WeightChange, WeightLocation
from ..shared import Pull
from . import losses, steps, variants
from .dialect import Dialect, dialect_of
from .discover import locate_layers
from .function_model import argument_names
from .inputs import output_names
from .reference_run import WeightLocations, names_of

_RELUS = ("relu", "relu6")
_DROPOUTS = ("Dropout", "AlphaDropout", "GaussianDropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D")


class KerasFacts(ModelFacts):
    """Facts of a Keras model; see :class:`rnnlens.adapters.protocol.ModelFacts`."""

    @cached_property
    def _keras(self) -> Dialect:
        return dialect_of(self.model)

    @cached_property
    def submodules(self) -> Mapping[str, Submodule]:  # type: ignore[override]
        """Layers with their roles and dtypes, by name."""
        layers = locate_layers(self.model).layers()
        return {n: Submodule(_roles(la), str(getattr(la, "compute_dtype", ""))) for n, la in layers.items()}

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the model's inputs."""
        return _names(self.model, "input_names", "inputs")

    @cached_property
    def arguments(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the parameters of the function of ``rl.keras.model``."""
        return argument_names(self.model)

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the model's outputs."""
        return output_names(self.model) or _names(self.model, "output_names", "outputs")

    @property
    def loss(self) -> Any:
        """Compiled loss of the model."""
        return getattr(self.model, "loss", None)

    @property
    def optimizer(self) -> str:  # type: ignore[override]
        """Name of the compiled optimizer."""
        optimizer = optimizers(self.model)[1]
        return "" if optimizer is None else type(optimizer).__name__

    @property
    def clipping(self) -> tuple[str, float] | None:  # type: ignore[override]
        """Kind of gradient clipping and its threshold."""
        return _clipping(optimizers(self.model)[1])

    @property
    def clips_lookups_apart(self) -> bool:  # type: ignore[override]
        """Whether looked-up rows are clipped separately: on TensorFlow."""
        return self._keras.engine.name == "tensorflow"

    @property
    def loss_scale(self) -> float:  # type: ignore[override]
        """Factor by which mixed precision multiplies the loss."""
        training_optimizer, optimizer = optimizers(self.model)
        return 1.0 if optimizer is training_optimizer else _loss_scale(training_optimizer)

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Whether the engine compiles: TensorFlow and JAX do."""
        return bool(self._keras.engine.compiles)

    def layouts(self, x: Any) -> Mapping[Port, Layout]:
        """Return layouts of tensors whose steps the graph of layers shows to be on another axis, or of films."""
        return steps.layouts(self.model, x)

    @property
    def provenance(self) -> Mapping[str, str]:
        """Framework, engine, dtypes of computation and weights, and device, as plain strings."""
        keras, model = self._keras, self.model
        engine = keras.engine.name
        version = getattr(importlib.import_module(engine), "__version__", "unknown")
        values = [
            keras.ops.convert_to_tensor(variable) for variable in (keras.weights(model)[:1] if model.built else ())
        ]
        device = str(getattr(values[0], "device", "cpu")) if values else "cpu"
        return {
            "framework": f"{keras.name} {keras.version}",
            "engine": f"{engine} {version}",
            "dtype": _coarsest_dtype(keras, model),
            "weights_dtype": str(getattr(model, "variable_dtype", keras.floatx())),
            "device": device or "cpu",
            "adapter": "keras",
        }

    def reduction(self, loss: Any) -> str | None:
        """Return how a loss reduces the values of samples.

        Returns None if it is unknown or if the parts of a loss differ. A compiled loss and a loss given by name are
        averaged unless their ``reduction`` is another.
        """
        is_compiled = loss is None
        user_loss = self.loss if is_compiled else loss
        losses_of_outputs = (
            list(user_loss.values())
            if isinstance(user_loss, dict)
            else user_loss
            if isinstance(user_loss, list | tuple)
            else [user_loss]
        )
        reductions = set()
        for part_loss in losses_of_outputs:
            default = "sum_over_batch_size" if is_compiled or isinstance(part_loss, str) else None
            declared = getattr(part_loss, "reduction", None) or default
            if part_loss is not None:
                reductions.add("sum_over_batch_size" if declared == "auto" else declared)
        return reductions.pop() if len(reductions) == 1 else None

    def weight_location(self, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Find the variable behind a weight."""
        return self._locations.find(layer, direction, key)

    @cached_property
    def _locations(self) -> WeightLocations:
        return WeightLocations(self.model)

    def chain(self, *, training: bool) -> list[ChainLink] | None:
        """Return the layers of a plain chain of well-known layers."""
        return variants.chain(self.model, training=training)

    def subnetwork(self, of: Port, wrt: Port) -> Callable[[Array], tuple[Array, Pull]] | None:
        """Return a function that runs and differentiates a chain of layers between two ports; None for other models."""
        return variants.subnetwork(self.model, of, wrt)

    def combination(self) -> str | None:
        """Return how losses of batches combine to that of the data set."""
        return None if self.batch is None else losses.combination(self.model, self.batch)

    def ignores_weight_zero(self) -> bool:
        """Return whether a sample of weight zero adds nothing to the loss."""
        return self.batch is not None and losses.ignores_weight_zero(self.model, self.batch)

    def mixes_samples(self, *, training: bool) -> str | None:
        """Return the name of a layer that uses batch statistics."""
        return losses.mixes_samples(self.model, training)

    def optimizer_step(
        self, optimizer: Any, gradients: Mapping[str, Array | None]
    ) -> Mapping[str, WeightChange] | None:
        """Step a copy of the optimizer, by default the compiled one, on copies of the weights."""
        return optimizer_step(self.model, optimizer, gradients)


def _roles(layer: Any) -> frozenset[Role]:
    keras = dialect_of(layer)
    roles: dict[Role, bool] = {
        "embedding": isinstance(layer, keras.layers.Embedding),
        "dropout": isinstance(layer, tuple(getattr(keras.layers, name) for name in _DROPOUTS)),
        "relu": _is_relu(keras, layer),
    }
    return frozenset(role for role, has_role in roles.items() if has_role)


def _is_relu(keras: Dialect, layer: Any) -> bool:
    """Return whether a layer's activation is ReLU or ReLU6; a leaky ReLU is not counted."""
    if isinstance(layer, keras.layers.ReLU):
        return not layer.negative_slope
    # Read the instance's attribute, not a property of a user's class, which may run any code.
    activation = vars(layer.cell if isinstance(layer, keras.layers.RNN) else layer).get("activation")
    return getattr(activation, "__name__", "") in _RELUS


def _names(model: Any, names: str, tensors: str) -> tuple[str, ...]:
    """Return the names of a model's inputs or outputs; () if it has none."""
    entries = getattr(model, names, None)
    if entries is None:
        entries = [getattr(t, "name", str(i)) for i, t in enumerate(getattr(model, tensors, None) or ())]
    return tuple(map(str, entries)) if isinstance(entries, list | tuple) else ()


def optimizers(model: Any) -> tuple[Any, Any]:
    """Return a model's optimizer, and the one inside it if it is a LossScaleOptimizer of mixed precision."""
    optimizer = getattr(model, "optimizer", None)
    return optimizer, getattr(optimizer, "inner_optimizer", optimizer)


def _clipping(optimizer: Any) -> tuple[str, float] | None:
    thresholds = {kind: getattr(optimizer, kind, None) for kind in ("clipvalue", "clipnorm", "global_clipnorm")}
    return next(((kind, float(threshold)) for kind, threshold in thresholds.items() if threshold), None)


def _loss_scale(optimizer: Any) -> float:
    """Return the present loss scale of a ``LossScaleOptimizer``; the initial one before its first step."""
    scale = getattr(optimizer, "dynamic_scale", None) if getattr(optimizer, "built", False) else None
    return float(np.asarray(scale)) if scale is not None else float(getattr(optimizer, "initial_scale", 1.0))


def _coarsest_dtype(keras: Dialect, model: Any) -> str:
    """Return the least precise dtype in which the model or one of its layers computes."""
    model_dtype = str(getattr(model, "compute_dtype", keras.floatx()))
    declared = {model_dtype, *(str(getattr(layer, "compute_dtype", model_dtype)) for layer in model._flatten_layers())}
    computed = {keras.computation_dtype(dtype) if dtype.startswith("float") else dtype for dtype in declared}
    return next((dtype for dtype in ("bfloat16", "float16", "float32") if dtype in computed), model_dtype)


def optimizer_step(
    model: Any, optimizer: Any, gradients: Mapping[str, Array | None]
) -> Mapping[str, WeightChange] | None:
    """Step a copy of the optimizer, by default the compiled one: see :meth:`.protocol.ModelFacts.optimizer_step`."""
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if optimizer is None:
        return None
    keras, names = dialect_of(model), names_of(model)
    trained = {names[id(variable)]: variable for variable in model.trainable_variables}
    before = {name: np.array(keras.value_of(variable)) for name, variable in trained.items()}
    try:
        copies = {name: keras.Variable(value) for name, value in before.items()}
        with warnings.catch_warnings():  # Keras' own conversion of the learning rate raises one in NumPy
            warnings.simplefilter("ignore", DeprecationWarning)
            config = optimizer.get_config()
        copied_optimizer = type(optimizer).from_config(config)
        copied_optimizer.build(list(copies.values()))
        for variable, copied_variable in zip(optimizer.variables, copied_optimizer.variables, strict=False):
            if tuple(variable.shape) == tuple(copied_variable.shape):  # the moments are there after the first step only
                copied_variable.assign(keras.value_of(variable))
        arrays = {name: before[name] * 0 if gradients.get(name) is None else gradients[name] for name in copies}
        steps = [(keras.ops.convert_to_tensor(arrays[name]), variable) for name, variable in copies.items()]
        copied_optimizer.apply_gradients(steps)
    except Exception as error:  # of an optimizer of the user's own
        got = f"{type(optimizer).__name__}: {error}"
        raise UnsupportedError("This optimizer cannot be copied and stepped.", got=got, hint="leave it out") from error
    return {name: WeightChange(before[name], np.array(keras.value_of(copy))) for name, copy in copies.items()}
