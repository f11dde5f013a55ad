"""Verbs on a CUDA device against torch's forward and backward pass there: medians and memory peaks, as ratios.

    python benchmarks/on_a_gpu.py [--small]

Two LSTM layers, 64 samples, 32 features, a loss at the last step; the Jacobian is that of 2 samples and 50 steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import rnnlens as rl


class Reader(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(32, units, 2, batch_first=True), nn.Linear(units, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0][:, -1])


def measure(call: Callable[[], object], rounds: int) -> tuple[float, int]:
    """Return the median seconds and the peak bytes of a call, after warm-up."""
    call()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), torch.cuda.max_memory_allocated()


def print_row(units: int, steps: int) -> None:
    model, loss = Reader(units).cuda(), nn.functional.cross_entropy
    x, y = torch.randn(64, steps, 32, device="cuda"), torch.randint(0, 3, (64,), device="cuda")

    def framework_pass() -> None:
        leaf = x.clone().requires_grad_()
        torch.autograd.grad(loss(model(leaf), y), [leaf, *model.parameters()])

    def uncertified() -> None:
        with rl.options(certify="never"):
            rl.trace(model, x, y, loss=loss)

    verbs = {
        "trace": lambda: rl.trace(model, x, y, loss=loss),
        "trace, uncertified": uncertified,
        "gradients, by input": lambda: rl.gradients(model, x, y, loss=loss, wrt="input"),
        "weights": lambda: rl.weights(model, x, y, loss=loss),
        "jacobian": lambda: rl.jacobian(model, x[:2, :50]),
    }
    one_pass, pass_peak = measure(framework_pass, 7)
    print(f"{units} units, {steps} steps: torch's own pass {1e3 * one_pass:.1f} ms")
    for name, call in verbs.items():
        seconds, memory = measure(call, 3)
        print(
            f"  {name:22}{1e3 * seconds:8.0f} ms  {seconds / one_pass:6.1f} passes  memory {memory / pass_peak:.1f}",
            flush=True,
        )


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    for units, steps in ((16, 20),) if "--small" in sys.argv else ((256, 100), (512, 400)):
        print_row(units, steps)


if __name__ == "__main__":
    main()
