"""``rl.find_nonfinite`` on networks with one planted fault each, and on healthy ones.

    python benchmarks/nonfinite_faults.py --small
    KERAS_BACKEND=jax python benchmarks/nonfinite_faults.py --framework keras

The expected origin is where the fault was planted, or where a loop in float64 exceeds the range of float32. A fault
counts as named if phase, layer, sample, step (and gate, unit, feature, where the fault has one) are right, and if
``fed_by`` has the words of the cause. The bar: 95 % of the faults, and "none" on every healthy network.
"""

from __future__ import annotations

import argparse
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

import rnnlens as rl


def wrong(fault: Any) -> str:
    """Return how a result differs from the planted fault; ``""`` if it is right."""
    fault_found = rl.find_nonfinite(fault.model, fault.x, fault.y, **fault.options)
    if not fault.expected:
        return str(fault_found.sentence) if fault_found else ""
    if not fault_found:
        return "none"
    reported = {**fault_found.origin.index, "step": fault_found.step, "sample": fault_found.sample}
    for name, value in fault.expected.items():
        if (reported[name] if name in reported else getattr(fault_found, name, None)) != value:
            return f"{name}: {value} is right, and it says {fault_found.sentence}"
    missing = [cause for cause in fault.words if cause not in (fault_found.fed_by or "")]
    return f"without {missing}: {fault_found.sentence}" if missing else ""


def kinds_of_fault(framework: str) -> Any:
    """Return the functions that each plant a fault of one kind in a network of a framework."""
    return importlib.import_module(f"_faults_{framework}").FAULTS


def faults(framework: str, count: int, seed: int = 0) -> Iterator[Any]:
    """Yield ``count`` faults of a framework, cycling through the kinds, each with its own seed."""
    kinds = kinds_of_fault(framework)
    for i in range(count):
        yield kinds[i % len(kinds)](np.random.default_rng([seed, i]))


def healthy(framework: str, count: int, seed: int = 0) -> Iterator[Any]:
    """Yield ``count`` healthy networks."""
    module = importlib.import_module(f"_faults_{framework}")
    for i in range(count):
        yield module.healthy(np.random.default_rng([seed, 10_000 + i]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--framework", choices=["torch", "keras"], default="torch")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    planted, well = (12, 6) if args.small else (args.faults, args.healthy)
    tally: dict[str, list[str]] = {}
    for fault in faults(args.framework, planted, args.seed):
        tally.setdefault(fault.kind, []).append(wrong(fault))
    engine = os.environ.get("KERAS_BACKEND", "tensorflow") if args.framework == "keras" else "torch"
    print(f"{args.framework} on {engine}")
    for kind, errors in tally.items():
        print(f"  {kind:<28} {sum(not error for error in errors):>4} of {len(errors)}")
        for error in filter(None, errors):
            print(f"      {error}")
    named_count = sum(not error for errors in tally.values() for error in errors)
    print(f"  {'all':<28} {named_count:>4} of {planted}: {named_count / planted:.1%}, bar 95 %")
    alarms = [error for fault in healthy(args.framework, well, args.seed) if (error := wrong(fault))]
    print(f"  {'healthy, none said':<28} {well - len(alarms):>4} of {well}, bar all")
    for error in alarms:
        print(f"      {error}")


if __name__ == "__main__":
    main()
