"""Adapter for PyTorch modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from array_api_compat import array_namespace
from torch import nn

from ...autodiff import engine
from ...errors import UnsupportedError
from ...recurrence.rounding import rounding_perturbation
from ..protocol import Adapter, Batch, Capture, CaptureRequest, LayerWeights, Port, Pullback, ReferenceRun
from ..shared import hook_in_this_thread
from ..shared.registered_cells import pullback_with_composed
from . import axes, discover, losses
from . import pullback as pullbacks
from . import reference_run as reference
from . import weights as torch_weights
from .capture import capture, capture_outputs
from .cells import composed_weight
from .chain import capture_chain
from .discover import named_modules, unwrap
from .inputs import device_and_dtype, map_leaves
from .pullback import TorchPullback
from .reference_run import reference_between
from .restore import restored_generators, seed_generators
from .weights import layer_weights

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
    with restored_generators(), torch.no_grad():
        seed_generators(seed)
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
    fingerprint = staticmethod(discover.fingerprint)
    facts = staticmethod(discover.facts)
    describe = staticmethod(discover.describe)
    reference_run = staticmethod(reference.reference_run)
    weight_location = staticmethod(reference.weight_location)
    reference_between = staticmethod(reference_between)
    layouts = staticmethod(axes.layouts)
    outputs_of = staticmethod(pullbacks.outputs_of)
    differentiate = staticmethod(pullbacks.differentiate)
    loss_of = staticmethod(losses.loss_of)
    combination = staticmethod(losses.combination)
    mixes_samples = staticmethod(losses.mixes_samples)
    perturbed_port = staticmethod(perturbed_port)
    reinitialised = staticmethod(reinitialised)
    load_weights = staticmethod(torch_weights.load_weights)

    def capture(self, model: nn.Module, batch: Batch, request: CaptureRequest) -> Capture:
        """Run one forward pass and, with a loss, one backward pass, and return the recorded calls."""
        if not (request.calls or batch.initial_state):
            return capture_outputs(model, batch)
        return capture_chain(model, batch, request) or capture(model, batch, request)

    def pullback(
        self, model: nn.Module, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> Pullback:
        """Run one forward pass and keep its graph, to pull cotangents back from ports ``of`` to ports ``wrt``."""
        modules = dict(named_modules(unwrap(model)))
        return pullback_with_composed(
            lambda of_ports, wrt_ports: TorchPullback(model, batch, of_ports, wrt_ports, cut),
            of,
            wrt,
            partial(composed_weight, modules),
        )

    def coarsest_dtype(self, model: nn.Module, batch: Batch) -> str:
        """Run the user's unmodified model; return the coarsest float dtype of its operations."""
        return engine("torch").coarsest_dtype(lambda: self.reference_run(model, batch, gradients=False))

    def rounded_run(self, model: nn.Module, batch: Batch, unit: float) -> ReferenceRun | None:
        """Make a reference run of a copy whose weights are changed by one rounding of size ``unit``."""
        copy = deepcopy(model)
        for weight in copy.parameters():
            numbers = torch.view_as_real(weight.data) if weight.is_complex() else weight.data
            if numbers.is_floating_point():
                numbers.copy_(rounding_perturbation(array_namespace(numbers), unit)(numbers))
        return self.reference_run(copy, batch)

    def weights(self, model: nn.Module) -> Mapping[str, LayerWeights]:
        """Return the weights of all modules that have any.

        Recurrent modules give one entry per stacked layer, with gates in the order of rnnlens.
        """
        return layer_weights(named_modules(unwrap(model)))

    def provenance(self, model: Any) -> Mapping[str, str]:
        """Return framework and engine version, adapter, dtype and device as strings.

        Under autocast the dtype is the autocast dtype.
        """
        device, dtype = device_and_dtype(model)
        if dtype == torch.float32 and torch.is_autocast_enabled(device.type):  # autocast does not change float64
            dtype = torch.get_autocast_dtype(device.type)
        return {
            "framework": f"torch {torch.__version__}",
            "engine": f"torch {torch.__version__}",
            "adapter": self.name,
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
        }


adapter = TorchAdapter()
