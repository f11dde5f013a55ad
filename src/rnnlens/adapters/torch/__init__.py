"""The adapter for PyTorch modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
from .capture import capture
from .cells import put_together
from .discover import describe, named_modules, node_name, unwrapped
from .inputs import home_of
from .losses import combination, loss_of, mixes_samples
from .model_facts import facts, fingerprint
from .pullback import TorchPullback, differentiate, outputs_of
from .reference_run import place, reference_run
from .variants import nudged, reinitialised
from .weights import layer_weights, load_weights

__all__ = ["adapter"]


class TorchAdapter(Adapter):
    """The adapter of ``torch.nn.Module``."""

    name = "torch"
    samples_first = False

    def owns(self, model: Any) -> bool:
        """Whether it is a module; the registry asks Keras first, whose models on torch are modules as well."""
        return isinstance(model, nn.Module)

    def fingerprint(self, model: Any) -> Hashable | None:
        """See :meth:`Adapter.fingerprint`."""
        return fingerprint(model)

    def facts(self, model: nn.Module) -> ModelFacts:
        """Its modules."""
        return facts(model)

    def describe(self, model: nn.Module) -> list[LayerInfo]:
        """Recurrent layers in the order of their definition."""
        return describe(model)

    def capture(self, model: nn.Module, batch: Batch, request: CaptureRequest) -> Capture:
        """One forward pass and, with a loss, one backward pass."""
        return capture(model, batch, request)

    def pullback(
        self, model: nn.Module, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> Pullback:
        """One forward pass, kept for differentiation."""
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
        """The user's own model, run and differentiated as it stands."""
        return reference_run(model, batch, cotangents, gradients=gradients, regularised=regularised)

    def place(self, model: nn.Module, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Which parameter a weight of ours is, by name."""
        return place(model, layer, direction, key)

    def layouts(self, model: nn.Module, batch: Batch, ports: Sequence[Port]) -> Mapping[Port, Layout]:
        """Which axis is what, followed from the recurrent calls."""
        return layouts(model, batch, ports)

    def outputs_of(self, model: nn.Module, batch: Batch) -> Outputs:
        """What the model returns for one batch."""
        return outputs_of(model, batch)

    def loss_of(self, model: nn.Module, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
        """The loss of outputs that are at hand, and its gradient at each of them."""
        return loss_of(model, batch, outputs)

    def combination(self, model: nn.Module, batch: Batch) -> str | None:
        """How losses of batches make up that of the data set, where that is known."""
        return combination(model, batch)

    def mixes_samples(self, model: nn.Module, training: bool) -> str | None:
        """The layer that uses statistics of the batch it is in, if there is one."""
        return mixes_samples(model, training)

    def weights(self, model: nn.Module) -> Mapping[str, LayerWeights]:
        """All modules with weights, recurrent ones per stacked layer, gates in our order."""
        return layer_weights(named_modules(unwrapped(model)), node_name)

    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: nn.Module
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Value of a user's function of tensors, and its pull-back."""
        return differentiate(function, arrays, model)

    def perturbed_port(self, model: nn.Module, port: Port, size: float) -> AbstractContextManager[bool]:
        """Move a weight or the output of a layer for the length of a block; False where that cannot be done."""
        return nudged(model, port, size)

    def load_weights(self, model: nn.Module, path: Path, *, unsafe: bool = False) -> None:
        """Read a state dict."""
        load_weights(model, path, unsafe=unsafe)

    def reinitialised(self, model: nn.Module, seed: int) -> nn.Module:
        """A copy with fresh weights."""
        return reinitialised(model, seed)

    def provenance(self, model: Any) -> Mapping[str, str]:
        """Versions, dtype and device as plain strings; within autocast the dtype that products are taken in."""
        device, dtype = home_of(model)
        if dtype == torch.float32 and torch.is_autocast_enabled(device.type):  # which leaves float64 alone
            dtype = torch.get_autocast_dtype(device.type)
        return {
            "framework": f"torch {torch.__version__}",
            "engine": f"torch {torch.__version__}",
            "adapter": self.name,
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
        }


adapter = TorchAdapter()
