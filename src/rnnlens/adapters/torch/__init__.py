"""Adapter for PyTorch modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from array_api_compat import array_namespace
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ...autodiff import engine
from ...errors import InputError, UnsupportedError, short_repr
from ...recurrence.rounding import rounding_perturbation
from ...typing import Array
from ..protocol import (
    Adapter,
    Batch,
    Capture,
    Cotangents,
    EndPort,
    LayerWeights,
    ModelFacts,
    Outputs,
    Port,
    ReferenceRun,
    Run,
    Submodule,
    Taps,
    WeightChange,
    WeightLocation,
)
from ..shared import hook_in_this_thread
from ..shared.registered_cells import run_with_composed
from . import axes, discover, losses
from . import reference_run as reference
from . import weights as torch_weights
from .capture import capture, output_tensors
from .cells import composed_weight
from .chain import capture_chain
from .discover import HOLDERS, named_modules, unwrap
from .function_model import FunctionModel
from .inputs import device_and_dtype, map_leaves, returned_leaves
from .losses import host_array
from .pullback import TorchPullback, differentiate
from .restore import borrowed_model
from .weights import TABLES, class_of, node_name

__all__ = ["adapter"]


@contextmanager
def perturbed_port(model: nn.Module, port: Port, size: float) -> Iterator[bool]:
    """Perturb a weight or output within the block by ``size`` times its root mean square, in a fixed random pattern.

    Yield False if that is not possible. A weight is replaced by a perturbed copy, and the same object is restored
    afterwards. An output is perturbed by a hook.
    """
    path, modules = str(port.layer).partition("#")[0], dict(unwrap(model).named_modules())
    path, _, layer_index = (path, "", "") if path in modules else path.partition("[")
    module = modules.get(path)
    if module is None or port.kind not in ("weight", "output"):
        yield False
        return
    if port.kind == "output":
        hook = hook_in_this_thread(lambda _module, _args, output: map_leaves(output, lambda v: _perturbed(v, size)))
        handle = module.register_forward_hook(hook)
        try:
            yield True
        finally:
            handle.remove()
        return
    name = torch_weights.torch_name(module, int(layer_index.rstrip("]") or 0), port.key)
    parameter = module._parameters.get(name)
    try:
        if parameter is not None:
            # setattr, not ``_parameters``: a recurrent module updates a second list of its weights then.
            setattr(module, name, nn.Parameter(_perturbed(parameter.detach(), size), requires_grad=False))
        yield True
    finally:
        if parameter is not None:
            setattr(module, name, parameter)


def _perturbed(value: Any, size: float) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    pattern = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    root_mean_square = float(value.detach().float().pow(2).mean().sqrt()) or 1.0
    return value + (size * root_mean_square * pattern).to(value)


def reinitialised(model: nn.Module, seed: int) -> nn.Module:
    """Return a deep copy in which every module with own parameters was reset by its ``reset_parameters``."""
    twin = deepcopy(model)
    with borrowed_model(nn.Module(), seed=seed), torch.no_grad():  # the copy stays changed
        for name, module in twin.named_modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise UnsupportedError(
                    f"Module {name or type(module).__name__!r} cannot be re-initialised.",
                    got=f"{type(module).__name__} without reset_parameters()",
                    hint="pass a copy of the model from before training: baseline=that_model",
                )
            reset()
    return twin


class TorchFacts(ModelFacts):
    """Facts of a ``torch.nn.Module``."""

    @cached_property
    def submodules(self) -> Mapping[str, Submodule]:  # type: ignore[override]
        """Modules with their roles and dtypes, by path; stacked layers of a recurrent module one by one."""
        modules = named_modules(unwrap(self.model))
        submodules: dict[str, Submodule] = {}
        for path, module in modules[1:] or modules:
            if isinstance(module, HOLDERS):
                continue
            roles: dict[Any, bool] = {
                "embedding": isinstance(module, TABLES),
                "dropout": isinstance(module, nn.modules.dropout._DropoutNd),
                "relu": isinstance(module, nn.ReLU | nn.ReLU6) or (class_of(module) or ("", ""))[1] == "relu",
            }
            dtypes = (str(p.dtype) for p in module._parameters.values() if p is not None and p.is_floating_point())
            submodule = Submodule(frozenset(role for role, is_role in roles.items() if is_role), next(dtypes, "")[6:])
            for layer in range(module.num_layers if isinstance(module, nn.RNNBase) else 1):
                submodules[node_name(path, module, layer)] = submodule
        return submodules

    @cached_property
    def arguments(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the parameters of the function of ``rl.torch.model``."""
        model = unwrap(self.model)
        return tuple(discover.positional_names(model)) if isinstance(model, FunctionModel) else ()

    @property
    def provenance(self) -> Mapping[str, str]:
        """Version of torch, dtype and device as strings; under autocast the dtype is the autocast dtype."""
        device, dtype = device_and_dtype(self.model)
        if dtype == torch.float32 and torch.is_autocast_enabled(device.type):  # autocast does not change float64
            dtype = torch.get_autocast_dtype(device.type)
        return {
            "framework": f"torch {torch.__version__}",
            "engine": f"torch {torch.__version__}",
            "adapter": "torch",
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
        }

    def weight_location(self, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Find the parameter behind a weight."""
        return self._locations.find(layer, direction, key)

    @cached_property
    def _locations(self) -> reference.WeightLocations:
        return reference.WeightLocations(self.model)

    def combination(self) -> str | None:
        """Return how losses of batches combine to that of the data set: ``"mean"``, ``"sum"``, or None if unknown."""
        return None if self.batch is None else losses.combination(self.model, self.batch)

    def mixes_samples(self, *, training: bool) -> str | None:
        """Return the name of a layer that uses batch statistics; ``"?"`` if the user's own forward may mix samples."""
        return losses.mixes_samples(self.model, training)

    def optimizer_step(
        self, optimizer: Any, gradients: Mapping[str, Array | None]
    ) -> Mapping[str, WeightChange] | None:
        """Step a copy of the optimizer on copies of its weights."""
        return optimizer_step(self.model, optimizer, gradients)


def optimizer_step(
    model: nn.Module, optimizer: Any, gradients: Mapping[str, Array | None]
) -> Mapping[str, WeightChange] | None:
    """Step a copy of the optimizer on copies of its weights: see :meth:`.protocol.ModelFacts.optimizer_step`."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        expected = "a torch.optim.Optimizer of the model's parameters"
        raise InputError("optimizer= is no optimizer of torch.", got=short_repr(optimizer), expected=expected)
    copied_optimizer = deepcopy(optimizer)  # a copy of its weights and of their moments
    pairs = zip(_weights_in(optimizer), _weights_in(copied_optimizer), strict=True)
    copy_by_id = {id(weight): copied_weight for weight, copied_weight in pairs}
    for copied_weight in copy_by_id.values():
        copied_weight.grad = None
    trained = {name: p for name, p in unwrap(model).named_parameters() if p.requires_grad}
    for name, weight in trained.items():
        gradient = gradients.get(name)
        if id(weight) in copy_by_id and gradient is not None:
            copy_by_id[id(weight)].grad = torch.as_tensor(gradient).to(weight)
    before = {name: host_array(weight).copy() for name, weight in trained.items()}
    try:
        copied_optimizer.step()
    except Exception as error:  # an optimizer that evaluates the loss itself
        hint = "leave optimizer= out"
        got = f"{type(optimizer).__name__}: {error}"
        raise UnsupportedError("This optimizer takes no step from given gradients.", got=got, hint=hint) from error
    return {
        name: WeightChange(before[name], host_array(copy_by_id[id(weight)]) if id(weight) in copy_by_id else None)
        for name, weight in trained.items()
    }


def _weights_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def run(model: nn.Module, batch: Batch, taps: Taps) -> Run:
    """Run a model once: see :meth:`rnnlens.adapters.protocol.Adapter.run`."""
    if taps.record == "ports":
        modules = dict(named_modules(unwrap(model)))

        def pull_back(of: Sequence[Port], wrt: Sequence[Port]) -> Run:
            return TorchPullback(model, batch, of, wrt, taps.cut)

        return run_with_composed(pull_back, taps.of, taps.wrt, partial(composed_weight, modules))
    if taps.record == "nothing":
        return _UntouchedRun(model, batch, taps)
    if taps.record == "outputs" and not (taps.needs_loss or batch.initial_state):
        return _RecordedRun(output_tensors(model, batch))
    recorded = capture_chain(model, batch, taps) or capture(model, batch, taps)
    return _RecordedRun(recorded.outputs, recorded)


@dataclass
class _RecordedRun(Run):
    """Run whose outputs, and calls if the taps say so, are recorded."""

    returned: Any
    capture: Capture = field(default_factory=lambda: Capture([]))

    @cached_property
    def outputs(self) -> Outputs:  # type: ignore[override]
        """Outputs of the model, as arrays and as the model returned them."""
        leaves = returned_leaves(self.returned)
        if any(isinstance(leaf, PackedSequence) for leaf in leaves):
            raise UnsupportedError(
                "The model returns packed sequences, and packed sequences of several batches cannot be concatenated.",
                hint="pad_packed_sequence(..., total_length=x.shape[1]) in the model, or all samples as one batch",
            )
        return Outputs([losses.host_array(leaf) for leaf in leaves], self.returned)


class _UntouchedRun(Run):
    """The user's model as it stands, differentiated by torch alone, for a certificate."""

    def __init__(self, model: nn.Module, batch: Batch, taps: Taps) -> None:
        self._model, self._batch, self._taps = model, batch, taps

    def reference(self, cotangents: Cotangents | None = None) -> ReferenceRun:
        """Run the model and differentiate its loss, or its outputs by their cotangents."""
        return reference.reference_run(self._model, self._batch, cotangents, gradients=self._taps.gradients)

    def between(self, of: EndPort, wrt: EndPort, cotangent: Callable[[Array], Array]) -> ReferenceRun:
        """Run the model, and pull a cotangent back between two tensors that its modules return."""
        return reference.reference_between(self._model, self._batch, of, wrt, cotangent)

    def rounded(self, unit: float) -> ReferenceRun | None:
        """Run a copy of the model whose weights are changed by one rounding of size ``unit``."""
        copy = deepcopy(self._model)
        for weight in nn.Module.parameters(copy):
            numbers = torch.view_as_real(weight.data) if weight.is_complex() else weight.data
            if numbers.is_floating_point():
                numbers.copy_(rounding_perturbation(array_namespace(numbers), unit)(numbers))
        return reference.reference_run(copy, self._batch)

    def in_double(self) -> Self:
        """Return the run of a copy of the model in float64, with data in float64."""
        x, y = (map_leaves(part, _doubled) for part in (self._batch.x, self._batch.y))
        return type(self)(deepcopy(self._model).double(), replace(self._batch, x=x, y=y), self._taps)

    def coarsest_dtype(self) -> str:
        """Run the model; return the coarsest float dtype of its operations."""
        run_forward: Callable[[], Any] = partial(reference.reference_run, self._model, self._batch, gradients=False)
        return engine("torch").coarsest_dtype(run_forward)


def _doubled(leaf: Any) -> Any:
    """Convert a tensor of a coarser float dtype to float64."""
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


class TorchAdapter(Adapter):
    """Adapter of ``torch.nn.Module`` models."""

    name = engine = "torch"
    samples_first = False

    def owns(self, model: Any) -> bool:
        """Return whether a model is a ``torch.nn.Module``.

        The registry tries Keras first, because Keras models on torch are torch modules as well.
        """
        return isinstance(model, nn.Module)

    #: Functions that are methods of the contract as they stand: see :class:`Adapter`.
    run = staticmethod(run)
    facts = TorchFacts
    fingerprint = staticmethod(discover.fingerprint)
    describe = staticmethod(discover.describe)
    known_layers = staticmethod(discover.known_layers)
    layouts = staticmethod(axes.layouts)
    differentiate = staticmethod(differentiate)
    loss_of = staticmethod(losses.loss_of)
    perturbed_port = staticmethod(perturbed_port)
    reinitialised = staticmethod(reinitialised)
    load_weights = staticmethod(torch_weights.load_weights)

    def weights(self, model: nn.Module) -> Mapping[str, LayerWeights]:
        """Return the weights of all modules that have any.

        Recurrent modules give one entry per stacked layer, with gates in the order of rnnlens.
        """
        return torch_weights.layer_weights(named_modules(unwrap(model)))


adapter = TorchAdapter()
