"""Certificates of recurrent layers of mambapy, minGRU-pytorch, xlstm and flash-linear-attention on a CPU.

    pip install mambapy minGRU-pytorch xlstm flash-linear-attention einops
    PYTHONPATH=src python benchmarks/scan_packages.py [name ...]

Each layer has random weights in float64 (mambapy, which computes in float32: float32), 2 samples and 70 steps. Printed
are the layer as ``rl.layers`` lists it, the state of the certificate of ``rl.trace``, without a line of the user's, and
its largest residual; bar in float64: 1e-12.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

import rnnlens as rl

LOW_RANKS = {f"{name}_low_rank_dim": 8 for name in ("decay", "gate", "a", "v")}


def layer_of(module: str, name: str, **options: Any) -> Callable[[], Any]:
    """Return a function that imports and builds a layer."""
    return lambda: getattr(import_module(module), name)(**options)


def configured(module: str, name: str, config: str, **options: Any) -> Callable[[], Any]:
    """Return a function that imports a layer and its configuration, and builds the layer."""
    return lambda: getattr(import_module(module), name)(getattr(import_module(module), config)(**options))


LAYERS = {
    "mambapy": configured("mambapy.mamba", "Mamba", "MambaConfig", d_model=32, n_layers=1, d_state=4),
    "mambapy steps": configured(
        "mambapy.mamba", "Mamba", "MambaConfig", d_model=32, n_layers=1, d_state=4, pscan=False
    ),
    "minGRU": layer_of("minGRU_pytorch.minGRU", "minGRU", dim=32, expansion_factor=1.5),
    "minLSTM": layer_of("minGRU_pytorch.minLSTM", "minLSTM", dim=32),
    "xlstm mLSTM": configured(
        "xlstm.blocks.mlstm.layer", "mLSTMLayer", "mLSTMLayerConfig", embedding_dim=32, context_length=70, num_heads=2
    ),
    "xlstm sLSTM": configured(
        "xlstm.blocks.slstm.layer", "sLSTMLayer", "sLSTMLayerConfig", embedding_dim=32, num_heads=2, backend="vanilla"
    ),
    "GLA": layer_of("fla.layers.gla", "GatedLinearAttention", hidden_size=32, num_heads=2),
    "SimpleGLA": layer_of("fla.layers.simple_gla", "SimpleGatedLinearAttention", hidden_size=32, num_heads=2),
    "HGRN2": layer_of("fla.layers.hgrn2", "HGRN2Attention", hidden_size=32, expand_ratio=8),
    "DeltaNet": layer_of("fla.layers.delta_net", "DeltaNet", hidden_size=32, num_heads=2),
    "GatedDeltaNet": layer_of(
        "fla.layers.gated_deltanet", "GatedDeltaNet", hidden_size=32, head_dim=8, num_heads=2, num_v_heads=4
    ),
    "KDA": layer_of("fla.layers.kda", "KimiDeltaAttention", hidden_size=32, head_dim=8, num_heads=2),
    "RWKV7": layer_of(
        "fla.layers.rwkv7",
        "RWKV7Attention",
        mode="chunk",
        hidden_size=32,
        head_dim=8,
        num_heads=4,
        layer_idx=0,
        num_hidden_layers=2,
        **LOW_RANKS,
    ),
}


class Model(nn.Module):
    """A layer whose first result is the output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


def main() -> None:
    """Print a row for each layer."""
    warnings.simplefilter("ignore")
    print("| layer | cell | state | certificate | largest residual |\n|---|---|---|---|---|")
    for name in sys.argv[1:] or LAYERS:
        torch.manual_seed(0)
        dtype = torch.float32 if name.startswith("mambapy") else torch.float64
        model = Model(LAYERS[name]()).to(dtype)
        with torch.no_grad():
            for weight in model.parameters():
                # Layers start with zeros, behind which an error would not be seen.
                if name == "RWKV7" or not bool(weight.any()):
                    weight.normal_(0.0, 0.3)
        x = torch.randn(2, 70, 32, dtype=dtype)
        trace = rl.trace(model, x, loss=lambda y: (y**2).sum(), at={"time": [0, 33, -1]})
        row = next(row for row in rl.layers(model) if row.name in trace)
        largest = max(check.residual for check in trace.certificate.checks)
        print(
            f"| {name} | {row.cell} | {row.state_axes or row.units} | {trace.certificate.state} | {largest:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
