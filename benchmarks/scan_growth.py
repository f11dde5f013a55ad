"""Time and peak memory of one Mamba layer of mamba-130m's width (768, 24,576 states) by the number of steps.

    PYTHONPATH=src python benchmarks/scan_growth.py [steps ...]

Each length runs in its own process, without a certificate. *states*: states and dL/dS_t of one layer at three
steps; bar at 1024 steps: 10 s and 1 GiB. *lags*: norms of the layer's time Jacobian from four output steps, which give
a lag profile without T x T numbers, by 8 random probes; bar at 1024 steps: 2 GiB. The peak is that of the whole process
above what it had before the call.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import warnings


def measure(quantity: str, steps: int) -> None:
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    import rnnlens as rl

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=256, hidden_size=768, state_size=16, num_hidden_layers=1)
    model, ids = MambaForCausalLM(config).eval(), torch.randint(1, 256, (1, steps))

    def loss_of(outputs: object, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits[:, -1], labels)  # type: ignore[attr-defined]

    def trace(x: torch.Tensor) -> None:
        quantities = ["state", "state_grad"]
        with rl.options(certify="never"):
            rl.trace(model, x, x[:, 0], loss=loss_of, at={"time": [0, -2, -1]}, quantities=quantities)

    def lags(x: torch.Tensor) -> None:
        layer = rl.layers(model)[0].name
        options = {"of": f"{layer}.output", "wrt": f"{layer}.input", "measure": "norm", "sketch": 8}
        out_steps = [x.shape[1] * quarter // 4 - 1 for quarter in (1, 2, 3, 4)]
        with rl.options(certify="never"):
            rl.jacobian(model, x, **options, at={"out_time": out_steps})

    run = {"states": trace, "lags": lags}[quantity]
    run(ids[:, :8])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    run(ids)
    seconds = time.perf_counter() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    print(f"{quantity:7s} {steps:6d} {seconds:9.2f} {peak:10.0f}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        measure(sys.argv[2], int(sys.argv[3]))
        return
    step_counts = [argument for argument in sys.argv[1:] if argument != "--small"] or (
        ["64"] if "--small" in sys.argv else []
    )
    print(f"{'what':7s} {'steps':>6s} {'seconds':>9s} {'peak MiB':>10s}", flush=True)
    for quantity in ("states", "lags"):
        for steps in step_counts or ("256", "512", "1024", "2048"):
            subprocess.run([sys.executable, __file__, "--one", quantity, steps], check=True)


if __name__ == "__main__":
    main()
