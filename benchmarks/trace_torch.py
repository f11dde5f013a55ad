"""rl.trace against torch's own forward and backward pass: time and memory, as ratios in one run.

    python benchmarks/trace_torch.py [--small] [--rounds 5] [--device cpu cuda]

Two LSTM layers of 256 units, batch 64, 500 steps, 32 features, a loss at every step. What is compared:

full trace
    ``rl.trace(model, x, y, loss=...)``, all quantities of both layers, checks and certificate included, against
    ``loss.backward()``; and without the certificate, which is one more plain forward and backward pass.
upper output_grad
    ``rl.trace(..., layers=["rnn[1]"], quantities=["output_grad"])`` against the same.

Times are medians of interleaved rounds after one warm-up. Memory is the peak of a process above its memory before the
first call. Without a CUDA device, a line says that CUDA was not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time

from _summary import Row, collect

BAR, PLAIN_BAR, UPPER_BAR = 2.5, 1.8, 1.2
PARTS = ("torch", "full", "uncertified", "upper")


def build(small: bool, device: str):
    """Return the model and the batch (x, y), equal in every process."""
    import torch
    from torch import nn

    units, batch, steps, features = (32, 8, 50, 4) if small else (256, 64, 500, 32)
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(features, units, num_layers=2, batch_first=True)
            self.head = nn.Linear(units, 1)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model = Model().to(device)
    return model, torch.randn(batch, steps, features, device=device), torch.randn(batch, steps, 1, device=device)


def jobs(small: bool, device: str):
    """Return the timed calls by name; each waits for its result and leaves no garbage."""
    import torch

    import rnnlens as rl

    model, x, y = build(small, device)
    loss = torch.nn.functional.mse_loss

    def synchronised(job):
        def run():
            result = job()
            if device == "cuda":
                torch.cuda.synchronize()
            return result

        return run

    def torch_pass():
        model.train()
        model.zero_grad()
        loss(model(x), y).backward()

    def uncertified():
        with rl.options(certify="never"):
            return rl.trace(model, x, y, loss=loss)

    return {
        "torch": synchronised(torch_pass),
        "full": synchronised(lambda: rl.trace(model, x, y, loss=loss)),
        "uncertified": synchronised(uncertified),
        "upper": synchronised(lambda: rl.trace(model, x, y, loss=loss, layers=["rnn[1]"], quantities=["output_grad"])),
    }


def median_seconds(small: bool, device: str, rounds: int):
    """Return the median seconds of each part."""
    calls = jobs(small, device)
    seconds = {name: [] for name in PARTS}
    for index in range(rounds + 1):
        for name, job in calls.items():
            start = time.perf_counter()
            job()
            if index:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak(small: bool, job_name: str) -> tuple[int, int]:
    """Return the peak bytes of one call above its start, and the bytes that it returned."""
    import psutil

    job = jobs(small, "cpu")[job_name]
    process = psutil.Process()
    start, highest, done = process.memory_info().rss, 0, threading.Event()

    def watch():
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = job()
    done.set()
    watcher.join()
    returned = 0 if result is None else sum(result[name].dataset.nbytes for name in result)
    return highest - start, returned


def report(device: str, rows: dict[str, float]) -> bool:
    """Print the ratios; return whether the bar is met."""
    full, upper = rows["full"] / rows["torch"], rows["upper"] / rows["torch"]
    print(f"{device:5}  torch forward + backward  {rows['torch']:8.3f} s")
    print(f"{device:5}  full trace                {rows['full']:8.3f} s   {full:5.2f} x   (bar {BAR} x)")
    uncertified = rows["uncertified"]
    uncertified_ratio, peer = uncertified / rows["torch"], "forward and backward pass of torch"
    print(
        f"{device:5}  without the certificate   {uncertified:8.3f} s   {uncertified_ratio:5.2f} x   (bar {PLAIN_BAR} x)"
    )
    print(f"{device:5}  upper output_grad         {rows['upper']:8.3f} s   {upper:5.2f} x   (bar {UPPER_BAR} x)")
    collect(
        Row("Trace, LSTM 2 x 256", f"full trace, torch on {device}", full, "x", peer, BAR),
        Row(
            "Trace, LSTM 2 x 256",
            f"full trace, not certified, torch on {device}",
            uncertified_ratio,
            "x",
            peer,
            PLAIN_BAR,
        ),
        Row("Trace, LSTM 2 x 256", f"upper output_grad, torch on {device}", upper, "x", peer, UPPER_BAR),
    )
    return full <= BAR


def report_memory(small: bool) -> None:
    """Print the high-water marks of one torch pass and of one full trace."""
    marks = {}
    for name in ("torch", "full"):
        command = [sys.executable, __file__, "--peak", name, *(["--small"] if small else [])]
        marks[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    base, _ = marks["torch"]
    full, returned = marks["full"]
    allowed = base + 1.5 * returned
    print(
        f"memory  torch {base / 2**20:.0f} MiB; full trace {full / 2**20:.0f} MiB, returning {returned / 2**20:.0f} MiB"
    )
    print(f"memory  {full / max(allowed, 1):.2f} of torch's own + 1.5 x what is returned")


def main() -> int:
    """Measure and print; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a toy size: to see that it runs, not how fast")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", nargs="+", default=["cpu", "cuda"], choices=["cpu", "cuda"])
    parser.add_argument("--peak", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak(options.small, options.peak)))
        return 0

    import torch

    bars_met = True
    for device in options.device:
        if device == "cuda" and not torch.cuda.is_available():
            print("cuda   not measured: no CUDA device here")
            continue
        bar_met = report(device, median_seconds(options.small, device, options.rounds))
        bars_met = bars_met and (bar_met or options.small)
    if "cpu" in options.device:
        report_memory(options.small)
    return 0 if bars_met else 1


if __name__ == "__main__":
    sys.exit(main())
