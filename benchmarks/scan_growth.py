"""Cost of one Mamba layer of mamba-130m's width (768, 24,576 states) by the number of steps: time and peak memory.

    PYTHONPATH=src python benchmarks/scan_growth.py [steps ...]

Each length runs in a process of its own: states and dL/dS_t of one layer at three steps, without a certificate. The
peak is that of the whole process above what it had before the call.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import warnings


def measure(steps: int) -> None:
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
        wanted = ["state", "state_grad"]
        with rl.options(certify="never"):
            rl.trace(model, x, x[:, 0], loss=loss_of, at={"time": [0, -2, -1]}, quantities=wanted)

    trace(ids[:, :8])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    trace(ids)
    seconds = time.perf_counter() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    print(f"{steps:6d} {seconds:9.2f} {peak:10.0f}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        measure(int(sys.argv[2]))
        return
    print(f"{'steps':>6s} {'seconds':>9s} {'peak MiB':>10s}", flush=True)
    for steps in sys.argv[1:] or ("256", "512", "1024", "2048"):
        subprocess.run([sys.executable, __file__, "--one", steps], check=True)


if __name__ == "__main__":
    main()
