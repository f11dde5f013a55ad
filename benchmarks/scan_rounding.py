"""Rounding errors of whole-sequence layers in float32: rnnlens and the untouched Hugging Face model, against float64.

    PYTHONPATH=src:tests/helpers python benchmarks/scan_rounding.py

The quantity is the gradient of a loss with respect to the embeddings, through all layers. Errors are the largest
difference relative to the largest value. The reference is rnnlens in float64, whose scans equal loops from the papers
within 1e-12 (tests/oracle/torch/test_scans.py).
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import torch
from scan_models import MODELS, build, tokens
from torch.nn import functional

import rnnlens as rl


def loss_of(outputs: object, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits[:, -1], labels)  # type: ignore[attr-defined]


def by_rnnlens(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
    table = model.get_input_embeddings()  # type: ignore[operator]
    name = next(name for name, module in model.named_modules() if module is table)
    with rl.options(certify="never"):
        trace = rl.trace(model, ids, ids[:, 0], loss=loss_of, layers=[name, *(row.name for row in rl.layers(model))])
    return np.asarray(trace[name].output_grad.values, dtype=np.float64)


def by_torch(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
    values = model.get_input_embeddings()(ids).detach().requires_grad_()  # type: ignore[operator]
    (grad,) = torch.autograd.grad(loss_of(model(inputs_embeds=values, use_cache=False), ids[:, 0]), values)
    return grad.double().numpy()


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{'model':18s} {'rnnlens to float64':>19s} {'model to float64':>17s} {'rnnlens to model':>17s}")
    for name in sys.argv[1:] or MODELS:
        ids = tokens(2, 40)
        traced, reference = (run(build(name, scale=0.15), ids) for run in (by_rnnlens, by_torch))
        exact = by_rnnlens(build(name, scale=0.15).double(), ids)
        print(
            f"{name:18s} {error(traced, exact):19.1e} {error(reference, exact):17.1e} {error(traced, reference):17.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
