"""A trace of one Gated DeltaNet layer of Qwen3-Next's size (16 value heads of 128 x 128), by the number of steps.

    PYTHONPATH=src python benchmarks/chunked_scans.py [steps ...]

Each length runs in its own process, on one thread. *own*: the layer's own forward and backward pass. *without*, *with*:
a trace of states and dL/dS_t at two steps, without and with a certificate, as multiples of *own*, in CPU seconds; bars
1.6 and 2.6. *sweep*: new peak memory of the sweep of a cell with two heads of that size, beyond its coefficients,
outputs and forward pass; bar: the same at all lengths.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import warnings

ROUNDS = 5


def peak() -> float:
    """Return the high-water mark of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure_layer(steps: int, heads: int) -> None:
    import torch
    from torch import nn
    from torch.nn import functional
    from transformers.models.qwen3_next import modeling_qwen3_next as modelling
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    import rnnlens as rl

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"linear_num_value_heads": heads, "linear_num_key_heads": heads // 2, "hidden_size": 64 * heads}
    sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = modelling.Qwen3NextGatedDeltaNet(Qwen3NextConfig(**sizes), 0)
            self.head = nn.Linear(64 * heads, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.mixer(x)[:, -1])

    model, x, y = Network().eval(), torch.randn(1, steps, 64 * heads), torch.zeros(1, 1)

    def own() -> None:
        functional.mse_loss(model(x.clone().requires_grad_()), y).backward()
        model.zero_grad()

    def trace(certify: str) -> None:
        with rl.options(certify=certify):
            at, quantities = {"time": [0, steps // 2]}, ["state", "state_grad"]
            rl.trace(model, x, y, loss=functional.mse_loss, at=at, quantities=quantities)

    calls = {"own": own, "without": lambda: trace("never"), "with": lambda: trace("always")}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS if steps < 4096 else 3):
        for name, call in calls.items():
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)
    median = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
    ratios = f"{median['without'] / median['own']:9.2f} {median['with'] / median['own']:9.2f}"
    print(f"{steps:6d} {median['own']:9.2f} {ratios}", end=" ", flush=True)


def measure_sweep(steps: int, heads: int = 2, size: int = 128) -> None:
    import torch

    from rnnlens.recurrence.sequence import SequenceCell, forward

    torch.set_num_threads(1)
    torch.manual_seed(0)
    key = torch.nn.functional.normalize(torch.randn(1, steps, heads, size, 1), dim=-2)
    rate, decay = torch.rand(1, steps, heads, 1, 1), -0.01 * torch.rand(1, steps, heads, 1, 1)
    write, read = (rate * key, torch.randn(1, steps, heads, 1, size)), torch.randn(1, steps, heads, size, 1)
    cell = SequenceCell(("head", "key", "value"), (decay,), write, read=read, right=key, contracted=-2)
    output_grad = torch.randn(1, steps, heads, size)
    outputs, run = forward(cell)
    before, start = peak(), time.process_time()
    norm = sum(float(chunk.part_grads()["read"].norm()) for chunk, _ in run.sweep(output_grad))
    print(f"{peak() - before:9.0f} {time.process_time() - start:9.2f}", flush=True)
    assert norm > 0
    assert outputs.shape == output_grad.shape


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        steps, heads = map(int, sys.argv[3:])
        measure_layer(steps, heads) if sys.argv[2] == "layer" else measure_sweep(steps, heads)
        return
    small = "--small" in sys.argv
    step_counts = [argument for argument in sys.argv[1:] if argument != "--small"] or (["64"] if small else [])
    print(f"{'steps':>6s} {'own s':>9s} {'without':>9s} {'with':>9s} {'sweep MiB':>9s} {'sweep s':>9s}", flush=True)
    for steps in step_counts or ("256", "1024", "4096"):
        for what, heads in (("layer", "2" if small else "16"), ("sweep", "2")):
            subprocess.run([sys.executable, __file__, "--one", what, steps, heads], check=True)


if __name__ == "__main__":
    main()
