"""Adapter for PyTorch modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...autodiff import engine
from ...layout import Layout
from ...typing import Array
from ..protocol import (
    Adapter,
    Batch,
    Capture,
    CaptureRequest,
    Cotangents,
    LayerInfo,
    LayerWeights,
    ModelFacts,
    Outputs,
    Port,
    Pullback,
    ReferenceRun,
    WeightLocation,
)
from ..shared.registered_cells import with_composed
from .axes import layouts
from .capture import capture, capture_outputs
from .cells import put_together
from .chain import capture_chain
from .discover import describe, named_modules, node_name, unwrapped
from .inputs import home_of
from .losses import combination, loss_of, mixes_samples
from .model_facts import facts, fingerprint
from .pullback import TorchPullback, differentiate, outputs_of
from .reference_run import place, reference_run
from .variants import perturbed_port, reinitialised
from .weights import layer_weights, load_weights

__all__ = ["adapter"]


class TorchAdapter(Adapter):
    """Adapter of ``torch.nn.Module`` models."""

    name = "torch"
    samples_first = False

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self.name

    def owns(self, model: Any) -> bool:
        """Return whether a model is a ``torch.nn.Module``.

        The registry tries Keras first, because Keras models on torch are torch modules as well.
        """
        return isinstance(model, nn.Module)

    def fingerprint(self, model: Any) -> Hashable | None:
        """Return a hashable summary of a model's structure: see :meth:`Adapter.fingerprint`."""
        return fingerprint(model)

    def facts(self, model: nn.Module) -> ModelFacts:
        """Return the roles and dtypes of the modules of a model."""
        return facts(model)

    def describe(self, model: nn.Module) -> list[LayerInfo]:
        """List the recurrent layers of a model in the order of their definition, without running it."""
        return describe(model)

    def capture(self, model: nn.Module, batch: Batch, request: CaptureRequest) -> Capture:
        """Run one forward pass and, with a loss, one backward pass, and return the recorded calls."""
        if not (request.calls or batch.initial_state):
            return capture_outputs(model, batch)
        return capture_chain(model, batch, request) or capture(model, batch, request)

    def pullback(
        self, model: nn.Module, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> Pullback:
        """Run one forward pass and keep its graph, to pull cotangents back from ports ``of`` to ports ``wrt``."""
        modules = dict(named_modules(unwrapped(model)))
        return with_composed(
            lambda ends, starts: TorchPullback(model, batch, ends, starts, cut), of, wrt, partial(put_together, modules)
        )

    def reference_run(
        self,
        model: nn.Module,
        batch: Batch,
        cotangents: Cotangents | None = None,
        *,
        gradients: bool = True,
        regularised: bool = False,
    ) -> ReferenceRun:
        """Run and differentiate the user's unmodified model, for comparison with a result."""
        return reference_run(model, batch, cotangents, gradients=gradients, regularised=regularised)

    def coarsest_dtype(self, model: nn.Module, batch: Batch) -> str:
        """Run the user's unmodified model; return the coarsest float dtype of its operations."""
        return engine("torch").coarsest_dtype(lambda: reference_run(model, batch, gradients=False))

    def place(self, model: nn.Module, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Find the torch parameter behind a weight of a layer; None if there is none."""
        return place(model, layer, direction, key)

    def layouts(self, model: nn.Module, batch: Batch, ports: Sequence[Port]) -> Mapping[Port, Layout]:
        """Find the sample, time and feature axes of the tensors at ports, starting from the recurrent calls."""
        return layouts(model, batch, ports)

    def outputs_of(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return the output tensors of the model for one batch."""
        return outputs_of(model, batch)

    def loss_of(self, model: nn.Module, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
        """Return the loss of outputs that were computed before, and its gradient at each output."""
        return loss_of(model, batch, outputs)

    def combination(self, model: nn.Module, batch: Batch) -> str | None:
        """Return how batch losses combine to the loss of the data set: ``"mean"``, ``"sum"``, or None if unknown."""
        return combination(model, batch)

    def mixes_samples(self, model: nn.Module, training: bool) -> str | None:
        """Return the name of a layer that uses batch statistics, or ``"?"`` if none is known to."""
        return mixes_samples(model, training)

    def weights(self, model: nn.Module) -> Mapping[str, LayerWeights]:
        """Return the weights of all modules that have any.

        Recurrent modules give one entry per stacked layer, with gates in the order of rnnlens.
        """
        return layer_weights(named_modules(unwrapped(model)), node_name)

    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: nn.Module
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Return the value of a user's function of tensors, and the function that pulls cotangents back through it."""
        return differentiate(function, arrays, model)

    def perturbed_port(self, model: nn.Module, port: Port, size: float) -> AbstractContextManager[bool]:
        """Perturb a weight or the output of a layer within a block. The block gets False if that is not possible."""
        return perturbed_port(model, port, size)

    def load_weights(self, model: nn.Module, path: Path, *, unsafe: bool = False) -> None:
        """Load the weights of a model from a file with a state dict."""
        load_weights(model, path, unsafe=unsafe)

    def reinitialised(self, model: nn.Module, seed: int) -> nn.Module:
        """Return a copy of the model with re-initialised weights."""
        return reinitialised(model, seed)

    def provenance(self, model: Any) -> Mapping[str, str]:
        """Return framework and engine version, adapter, dtype and device as strings.

        Under autocast the dtype is the autocast dtype.
        """
        device, dtype = home_of(model)
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
