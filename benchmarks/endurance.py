"""Many calls, watches and records, and long sequences: memory, file descriptors and threads before and after.

    python benchmarks/endurance.py leaks --calls 300       # of each verb, on torch; and 20 watches
    python benchmarks/endurance.py records --count 100000  # of one run: time and memory to append and to open
    python benchmarks/endurance.py memory                  # memory= beside the measured peak, T = 20,000 among them
    python benchmarks/endurance.py checksums               # appending records with checksums, by appending them without

Bars: after a warm-up of a tenth of the calls the memory grows by less than 16 MiB, descriptors and threads not at all,
and every model is collected; the last tenth of the records takes at most twice as long as the first; the measured peak,
above what the process used before, is at most 1.5 times the granted memory; checksums add at most 0.05 to the training
of ``benchmarks/overhead.py`` that is recorded every 50 steps.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def open_resources() -> tuple[int, int]:
    """Return the number of open file descriptors and of threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def network(torch: Any) -> Any:
    """Return an LSTM with a linear layer on every step."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(3, 4, batch_first=True)
            self.top = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.top(self.lstm(x)[0])

    return Net()


def leaks(calls: int) -> bool:
    """Call each verb ``calls`` times with new models, then watch 20 trainings; return whether the bars are met."""
    import torch

    import rnnlens as rl

    x, y = np.random.default_rng(0).normal(size=(8, 6, 3)).astype("f4"), np.zeros((8, 6, 2), "f4")
    mse = torch.nn.functional.mse_loss
    folder = Path(tempfile.mkdtemp())

    def watch_training(net: Any) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with rl.torch.watch(net, folder / "a.zarr", every=1, resume=False):
            for _ in range(3):
                optimizer.zero_grad()
                mse(net(torch.as_tensor(x)), torch.as_tensor(y)).backward()
                optimizer.step()

    verbs = {
        "layers": lambda net: rl.layers(net),
        "trace": lambda net: rl.trace(net, x, y, loss=mse),
        "gradients": lambda net: rl.gradients(net, x, y, loss=mse),
        "weights": lambda net: rl.weights(net, x, y, loss=mse),
        "weight_norms": lambda net: rl.weight_norms(net),
        "jacobian": lambda net: rl.jacobian(net, x),
        "find_nonfinite": lambda net: rl.find_nonfinite(net, x, y, loss=mse),
        "lyapunov": lambda net: rl.lyapunov(net, x),
        "step_eigenvalues": lambda net: rl.step_eigenvalues(net, x),
        "save and open": lambda net: (
            rl.trace(net, x, y, loss=mse).save(folder / "t.zarr"),
            rl.open(folder / "t.zarr"),
        ),
        "diagnose": lambda net: rl.diagnose(net, x, y),
        "fixed_points": lambda net: rl.fixed_points(net, x, most=16),
    }
    all_passed = True
    print(f"{'':18}{'calls':>6}{'MiB':>8}{'fds':>5}{'threads':>8}{'models left':>12}")
    for name, verb in {**verbs, "watch": watch_training}.items():
        count = 20 if name == "watch" else calls
        models: list[Any] = []
        for number in range(count):
            net = network(torch)
            models.append(weakref.ref(net))
            verb(net)
            del net
            if number == count // 10:
                gc.collect()
                memory, resources = resident(), open_resources()
        gc.collect()
        alive = sum(model() is not None for model in models)
        grown_mib, added = (
            resident() - memory,
            [after - before for after, before in zip(open_resources(), resources, strict=True)],
        )
        passed = grown_mib < 16 and max(added) <= 0 and not alive
        all_passed &= passed
        verdict = "" if passed else "  NOT MET"
        print(f"{name:18}{count:6}{grown_mib:8.1f}{added[0]:5}{added[1]:8}{alive:12}{verdict}", flush=True)
    return all_passed


def records(count: int) -> bool:
    """Append ``count`` records to a run and open it; return whether time per record and memory stay flat."""
    import xarray as xr

    import rnnlens as rl
    from rnnlens.tracking.records import TrainingRecord
    from rnnlens.tracking.store import Store

    path = Path(tempfile.mkdtemp()) / "a.zarr"
    store = Store(path)
    profile = xr.DataArray(np.linspace(0, 1, 32), dims="time")
    tenths, memory = [], []
    for tenth in range(10):
        start = time.process_time()
        for step in range(tenth * count // 10, (tenth + 1) * count // 10):
            store.write(
                TrainingRecord(step, 0, "probe", {"loss": 1.0 / (step + 1)}, {"lstm": {"adjoint_profile": profile}})
            )
        tenths.append(time.process_time() - start)
        memory.append(resident())
        print(
            f"{(tenth + 1) * count // 10:8} records  {1e6 * tenths[-1] * 10 / count:8.0f} us each"
            f"  {memory[-1]:.0f} MiB",
            flush=True,
        )
    store.close("finished")
    start, before = time.process_time(), resident()
    run = rl.open(path)
    print(
        f"opened {len(run.steps)} in {time.process_time() - start:.2f} s of processor time,"
        f" {resident() - before:.0f} MiB"
    )
    flat = tenths[-1] <= 2 * tenths[0] and memory[-1] - memory[1] < 64
    print("flat" if flat else "NOT MET: appending slows down or grows")
    return flat and len(run.steps) == count


def checksums(count: int) -> bool:
    """Compare the processor time of appending records with and without checksums; return whether the bar is met."""
    import statistics
    from functools import partial
    from unittest.mock import patch

    import overhead
    import xarray as xr

    from rnnlens.tracking import rows, store
    from rnnlens.tracking.records import TrainingRecord

    profile = xr.DataArray(np.linspace(0, 1, 64), dims="time")
    layers = {f"lstm_{i}": {"adjoint_profile": profile, "direct": profile} for i in range(2)}
    original_put = rows.Rows._put

    def put_all_but_sums(self: rows.Rows, path: str, values: Any) -> None:
        if path != "sums":
            original_put(self, path, values)

    unsealed = [
        patch.object(store, "SealedMetadata", lambda inner: inner),
        patch.object(store, "read_metadata", partial(store.read_metadata, sealed=False)),
        patch.object(rows, "row_sums", lambda values, path: np.zeros(len(values), np.uint32)),
        patch.object(rows.Rows, "_put", put_all_but_sums),
    ]

    def append_records(sealed: bool) -> float:
        with tempfile.TemporaryDirectory() as folder:
            run_store = store.Store(Path(folder) / "a.zarr")
            start = time.process_time()
            for step in range(count):
                run_store.write(TrainingRecord(step, 0, "probe", {"loss": 1.0 / (step + 1)}, layers))
            seconds = time.process_time() - start
            if sealed:
                run_store.close("finished")
        return seconds

    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5):
        times[True].append(append_records(True) / count)
        for patcher in unsealed:
            patcher.start()
        try:
            times[False].append(append_records(False) / count)
        finally:
            for patcher in unsealed:
                patcher.stop()
    with_sums, without = (statistics.median(times[sealed]) for sealed in (True, False))
    train = overhead.torch_loop(overhead.sizes(small=False, engine="torch-loop"), Path("unused"))["plain"]
    train(1)
    _, step = overhead.seconds_per_batch(train, 4)
    share = (with_sums - without) / (50 * step)
    print(f"{1e3 * with_sums:.2f} ms of processor time per record with checksums, {1e3 * without:.2f} ms without;")
    print(f"ratio {with_sums / without:.2f}; of 50 steps of training ({50 * step:.1f} s) checksums take {share:.5f}")
    return share <= 0.05


PEAK = """
import sys, resource, numpy as np, torch, rnnlens as rl, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, "benchmarks")
from endurance import network
batch, steps, units, memory = map(int, sys.argv[1:5])
torch.manual_seed(0)
net = network(torch)
x = np.random.default_rng(0).normal(size=(batch, steps, 3)).astype("f4")
rl.trace(net, x[:1, :5]); rl.jacobian(net, x[:1, :5])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with rl.options(memory=memory * 2**20, certify="never"):
    try:
        rl.{verb}
        word = "result"
    except rl.errors.RnnlensError as error:
        word = type(error).__name__
print(word, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10)
"""


def memory_peaks() -> bool:
    """Compare the measured memory peak of calls, each in its own process, with the granted memory."""
    all_passed = True
    cases = {
        "jacobian(net, x, measure='norm')": [(4, 200, 4, 64), (16, 400, 4, 64), (64, 400, 4, 64)],
        "jacobian(net, x)": [(4, 100, 4, 16), (16, 200, 4, 64)],
        "trace(net, x)": [(4, 20_000, 4, 64), (64, 2_000, 4, 64)],
        "gradients(net, x, of='output', wrt='input', reduce='sum')": [(4, 20_000, 4, 64)],
    }
    for verb, sizes in cases.items():
        for batch, steps, units, granted in sizes:
            command = [sys.executable, "-c", PEAK.replace("{verb}", verb), *map(str, (batch, steps, units, granted))]
            completed = subprocess.run(command, capture_output=True, text=True, check=False)
            ended, _, peak = (completed.stdout.strip() or "nothing -1").rpartition(" ")
            passed = completed.returncode == 0 and float(peak) <= 1.5 * granted
            all_passed &= passed
            verdict = "" if passed else f"  NOT MET {completed.stderr[-200:]}"
            print(
                f"{verb:60} B={batch:3} T={steps:6} {granted:4} MiB granted, {float(peak):7.1f} used, {ended}{verdict}",
                flush=True,
            )
    return all_passed


def main() -> int:
    """Run one of the four measurements, and return 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("leaks", "records", "memory", "checksums"), default="leaks")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    calls, count = (20, 1000) if args.small else (args.calls, args.count)
    measures = {
        "leaks": lambda: leaks(calls),
        "records": lambda: records(count),
        "memory": memory_peaks,
        "checksums": lambda: checksums(10 if args.small else 100),
    }
    return 0 if measures[args.what]() else 1


if __name__ == "__main__":
    sys.exit(main())
