"""Time of every figure, from data to PNG, at 64 samples, 1000 steps and 512 units.

    OMP_NUM_THREADS=2 python benchmarks/figures.py [--samples 64 --steps 1000 --units 512]

Each figure is made three times; the table shows median and largest wall-clock time, and the largest processor time,
which other work on the machine does not increase. The bar is 5 s.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr

import rnnlens as rl
from rnnlens.results.training_run import TrainingRun

GATES = ["input", "forget", "candidate", "output"]
BAR = 5.0


def gradient(samples: int, steps: int, units: int, seed: int) -> xr.DataArray:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((samples, steps, units), dtype=np.float32)
    values *= np.exp(-0.01 * np.arange(steps, dtype=np.float32)[::-1])[:, None]
    attrs = {"long_name": "total gradient of the hidden state", "units": "loss / 1", "layer": "lstm"}
    return xr.DataArray(values, dims=("sample", "time", "unit"), name="hidden_grad", attrs=attrs)


def layer(total: xr.DataArray) -> xr.Dataset:
    samples, steps, units = total.shape
    direct = xr.zeros_like(total)
    direct[:, -1] = total[:, -1]
    gates = np.random.default_rng(2).random((samples, steps, 4, units), dtype=np.float32)
    data = {"hidden_grad": total, "cell_grad": total, "output_grad": direct}
    dataset = xr.Dataset(data, attrs={"layer": "lstm"}).assign_coords(gate=GATES)
    return dataset.assign(gates=(("sample", "time", "gate", "unit"), gates))


def weights(units: int) -> xr.Dataset:
    rng = np.random.default_rng(3)
    return xr.Dataset(
        {
            "kernel": (("feature", "gate", "unit"), rng.normal(size=(units, 4, units))),
            "recurrent_kernel": (("unit_in", "gate", "unit"), rng.normal(size=(units, 4, units))),
            "bias": (("gate", "unit"), rng.normal(size=(4, units))),
        },
        coords={"gate": GATES},
    )


def jacobian(samples: int, steps: int) -> xr.DataArray:
    lag = np.arange(steps)[:, None] - np.arange(steps)
    norms = np.where(lag >= 0, np.exp(-0.01 * np.maximum(lag, 0)), 0).astype(np.float32)
    noise = np.random.default_rng(4).random((samples, steps, steps), dtype=np.float32)
    return xr.DataArray(norms * (0.5 + noise), dims=("sample", "out_time", "in_time"), name="jacobian")


def training(records: int, steps: int) -> TrainingRun:
    """Return a run of two layers in which the gradient reaches further back with every record."""
    record_steps = np.arange(records) * 50
    lag = np.arange(steps)[None, ::-1]
    profile = np.exp(-lag / (1 + 0.02 * np.arange(records)[:, None]))
    coords = {"step": record_steps, "time": np.arange(steps)}
    layers = {f"lstm_{i}": xr.Dataset({"adjoint_profile": (("step", "time"), profile)}, coords) for i in range(2)}
    names = ["loss", *(f"lstm_{i}/{measure}" for i in range(2) for measure in ("reach", "adjoint", "forget/near_1"))]
    scalars = {name: ("step", np.exp(-np.arange(records) / 300)) for name in names}
    return TrainingRun(layers, xr.Dataset(scalars, {"step": record_steps, "epoch": ("step", record_steps // 1000)}))


def cases(samples: int, steps: int, units: int) -> dict[str, Callable[[], Any]]:
    p: Any = rl.plot
    total, second_total = gradient(samples, steps, units, 0), gradient(samples, steps, units, 1)
    traced = layer(total)
    layer_weights, jac = weights(units), jacobian(samples, steps)
    attention = jac.expand_dims({"map": ["frozen", "total"], "channel": np.arange(4)})
    run = training(1000, 64)
    modes = 0.9 * np.exp(1j * np.linspace(0, 6, samples * units)).reshape(samples, units)
    history = {f"layer{i}/kernel": np.exp(-np.arange(1000) / 300) + i for i in range(12)}
    return {
        "curves": lambda: p.curves(total),
        "curves, log": lambda: p.curves(total, log=True),
        "heatmap": lambda: p.heatmap(total),
        "heatmap, 64 panels": lambda: p.heatmap(total, max_panels=64),
        "heatmap of gates": lambda: p.heatmap(traced.gates, max_panels=4),
        "maps": lambda: p.maps(total.values.reshape(samples, steps, 16, -1, 8)),
        "points": lambda: p.points(total.isel(time=-1)),
        "histogram": lambda: p.histogram(total, log=True),
        "histogram, panel per unit": lambda: p.histogram(total, panel="unit"),
        "histogram of gates, overlaid": lambda: p.histogram(traced.gates, overlay="gate"),
        "weights_heatmap": lambda: p.weights_heatmap(layer_weights),
        "weights_histogram": lambda: p.weights_histogram(layer_weights),
        "gates": lambda: p.gates(traced),
        "gradient_flow": lambda: p.gradient_flow(traced),
        "weight_norms": lambda: p.weight_norms(history),
        "time_jacobian": lambda: p.time_jacobian(jac),
        "lag_profile": lambda: p.lag_profile(jac),
        "before_after": lambda: p.before_after(total, second_total),
        "before_after, RMS": lambda: p.before_after(total, second_total, samples="rms"),
        "jacobian_margins": lambda: p.jacobian_margins(jac),
        "gates_over_time": lambda: p.gates_over_time(traced),
        "saturation_arrows": lambda: p.saturation_arrows(traced, traced),
        "input_map": lambda: p.input_map(total, second_total),
        "gradient_carriers": lambda: p.gradient_carriers(total, np.arange(1.0, samples + 1)),
        "eigenvalues": lambda: p.eigenvalues(modes),
        "film": lambda: p.film(run),
        "timeline": lambda: p.timeline(run),
        "norm_history": lambda: p.norm_history({0: total, 1: second_total}),
        "total_and_frozen": lambda: p.total_and_frozen(jac, jac),
        "hidden_attention": lambda: p.hidden_attention(attention),
        "decay_by_lag": lambda: p.decay_by_lag(abs(total)),
    }


def seconds(draw: Callable[[], Any]) -> tuple[float, float]:
    """Return wall-clock seconds and processor seconds of one figure; drawing uses one thread."""
    start, used = time.perf_counter(), time.process_time()
    axes = draw()
    axes[0].get_figure(root=True).savefig(io.BytesIO(), format="png")
    return time.perf_counter() - start, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("samples", 64), ("steps", 1000), ("units", 512), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(f"{args.samples} samples, {args.steps} steps, {args.units} units; data to PNG, {args.repeats} times")
    print(f"{'figure':<30} {'median s':>9} {'largest s':>10} {'processor s':>12}")
    slow = []
    for name, draw in cases(args.samples, args.steps, args.units).items():
        timings = [seconds(draw) for _ in range(args.repeats)]
        clock, processor = (sorted(column) for column in zip(*timings, strict=True))
        slow += [name] if processor[-1] > BAR else []
        print(f"{name:<30} {statistics.median(clock):>9.2f} {clock[-1]:>10.2f} {processor[-1]:>12.2f}", flush=True)
    print(f"more than {BAR:g} s of processor time: {', '.join(slow) or 'none'}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
