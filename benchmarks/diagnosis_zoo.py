"""``rl.diagnose`` on networks of known condition: the memory that they use, what they miss, and why.

    python benchmarks/diagnosis_zoo.py [--small] [--jobs N] [--samples 512] [--coverage] [--only NAME]

Networks are trained from a seed or built by formula; trained ones are cached in .benchmarks/zoo. The thresholds of
``rnnlens.diagnose`` were set on odd seeds; the first table counts even seeds, the second odd ones. The spoken vowels
are in the package aeon: ``pip install --no-deps aeon``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from _zoo_entries import KEPT, Entry, entries, train_or_load
from _zoo_tasks import Task
from _zoo_truth import data_for, known_memory, truth_of

import rnnlens as rl
from rnnlens.adapters.registry import adapter_for
from rnnlens.diagnosis.experiment import Experiment
from rnnlens.diagnosis.memory import Memory, measure_memory
from rnnlens.diagnosis.samples import Orientation, read_samples

SOLVED = 0.95
#: Samples taken as the population, and number of intervals drawn, when coverage is counted.
POPULATION, REPEATS = 2048, 4
#: Findings that count as false alarms for a healthy solved network.
ALARMS = {
    *("MISSED_DEPENDENCY", "VANISHING", "PATH_OPEN", "EXPLODING", "CHAOTIC", "DEAD_UNITS", "NONFINITE", "NO_SKILL"),
    *("UNDERFLOW", "UNEQUAL_LAYERS", "MISCALIBRATED", "NO_PATH"),
}
#: Networks that are as good as their noisy task allows, or known not to be, whatever their skill.
NOISY = ("noise target", "overfitted", "off in scale", "weighted classes", "missed, off in scale", "forecast")


def examine(job: tuple[Entry, int, bool]) -> dict[str, Any]:
    """Diagnose one network; with ``covering``, also count how often the interval of n contains the population's n."""
    entry, samples, covering = job
    samples = entry.samples or samples
    torch.set_num_threads(1)
    net, task = entry.make(entry)
    truth = truth_of(entry, net, task)
    x, y = data_for(entry, net, task, samples)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = torch.nn.BCEWithLogitsLoss() if entry.options.get("kind") == "classes" else None
        d = rl.diagnose(net, x, y, samples=samples, loss=loss)
    seconds = time.perf_counter() - begin
    model = d["model"]
    evidence = {f.code: f.evidence for f in d.findings}
    layers = [d[name] for name in d if name != "model"]
    is_known = bool(model.attrs["known"])
    return {
        "key": entry.key,
        "name": entry.name,
        "seed": entry.seed,
        "options": {**entry.options, **entry.change},
        "samples": samples,
        "truth": truth,
        "missing": entry.missing,
        "known": known_memory(entry, net, task, x.shape[1]),
        "n": float(model.memory),
        "interval": [float(v) for v in model.memory_interval],
        "spoken": is_known,
        "covered": coverage(entry, net, task, samples) if is_known and covering else None,
        "skill": float(model.skill) if "skill" in model else float("nan"),
        "codes": list(d.codes),
        "lag": evidence.get("MISSED_DEPENDENCY", {}).get("lag"),
        "effect": float(model.missed_effect) if "missed_effect" in model else float("nan"),
        "growth": max(float(np.max(layer.growth)) for layer in layers),
        "lambda": [float(np.max(layer.lambda_1)) for layer in layers],
        "subnormal": max(float(np.max(layer.subnormal)) for layer in layers),
        "adjoint": [float(np.max(layer.adjoint_size)) for layer in layers if "adjoint_size" in layer],
        "sentence": next(iter(d.sentences.values())),
        "seconds": seconds,
    }


def coverage(entry: Entry, net: Any, task: Task | None, samples: int) -> dict[str, Any]:
    """Return the n of many samples, and for each interval from other samples whether it contains that n."""

    def memory_of(count: int, stream: int) -> Memory:
        x, y = data_for(entry, net, task, count, stream)
        return measure_memory(
            Experiment(
                net,
                read_samples(x, y, count, lambda batch: Orientation(adapter_for(net), net, batch, None)),
                seed=stream,
            )
        )

    n = memory_of(POPULATION, 1).length.value
    lengths = [memory_of(samples, 2 + repeat).length for repeat in range(REPEATS)]
    return {
        "n": n,
        "held": [bool(length.low <= n <= length.high) for length in lengths],
        "intervals": [[length.value, length.low, length.high] for length in lengths],
    }


def applicable(row: dict[str, Any]) -> dict[str, bool]:
    """Return the right findings for a network as trained; one that did not solve its task does not count as healthy."""
    truth = dict(row["truth"])
    if row["name"] in NOISY:
        return truth
    if truth.get("MISSED_DEPENDENCY") is False and row["skill"] < SOLVED and row["name"] != "untrained":
        return {code: value for code, value in truth.items() if code in ("CHAOTIC", "STATIC_INPUT", "CONSTANT_INPUT")}
    if truth.get("MISSED_DEPENDENCY") is True and row["skill"] > 0.5 and row["name"].startswith(("recall", "echo")):
        return {}  # it learned the task in spite of the handicap
    if truth.get("NO_SKILL") is True and row["skill"] > 0.02:
        truth.pop("NO_SKILL")
    return truth


def table(rows: list[dict[str, Any]], title: str) -> None:
    """Print balanced accuracy by code, and how often n is right."""
    print(f"\n{title}: {len(rows)} networks")
    print(f"{'code':22}{'BA':>8}{'tp':>5}{'fn':>5}{'fp':>5}{'tn':>5}")
    codes = list(dict.fromkeys(code for row in rows for code in row["truth"]))
    for code in codes:
        pairs = [(truth[code], code in row["codes"]) for row in rows if code in (truth := applicable(row))]
        tp, fn = pairs.count((True, True)), pairs.count((True, False))
        fp, tn = pairs.count((False, True)), pairs.count((False, False))
        rates = [a / (a + b) for a, b in ((tp, fn), (tn, fp)) if a + b]
        print(f"{code:22}{sum(rates) / max(len(rates), 1):8.3f}{tp:5}{fn:5}{fp:5}{tn:5}")
    healthy = [r for r in rows if r["known"] is not None and (r["skill"] >= SOLVED or r["name"] == "forecast")]
    memory_matches = [abs(r["n"] - r["known"]) <= max(1, 0.1 * r["known"]) for r in healthy]
    print(f"n within max(1, 10 %) of the known memory: {_share(memory_matches)}")
    covered = [holds for r in rows if r["covered"] for holds in r["covered"]["held"]]
    if covered:
        print(f"95 % interval holds the n of {POPULATION} other samples: {_share(covered)}")
    lag_matches = [r["lag"] == r["missing"] for r in rows if r["missing"] is not None and r["lag"] is not None]
    print(f"missed step named exactly: {_share(lag_matches)}")
    sound = [r for r in healthy if r["truth"].get("MISSED_DEPENDENCY") is False]
    print(f"false alarms on healthy solved networks: {_share([bool(ALARMS & set(r['codes'])) for r in sound])}")


def _share(flags: list[bool]) -> str:
    return f"{sum(flags)} of {len(flags)} ({sum(flags) / max(len(flags), 1):.1%})"


def print_errors(rows: list[dict[str, Any]]) -> None:
    """Print every network with a wrong finding or a wrong n."""
    for row in rows:
        truth = applicable(row)
        wrong = [c for c, value in truth.items() if value != (c in row["codes"])]
        memory_off = (
            row["known"] is not None
            and (row["skill"] >= SOLVED or row["name"] == "forecast")
            and abs(row["n"] - row["known"]) > max(1, 0.1 * row["known"])
        )
        interval_missed = row["covered"] and sum(row["covered"]["held"]) < REPEATS - 1
        if interval_missed:
            print(f"  {row['name']} {row['options']} seed {row['seed']}: interval {row['covered']}")
        if wrong or memory_off:
            print(
                f"  {row['name']} {row['options']} seed {row['seed']}: wrong {wrong}, n {row['n']} for {row['known']}, "
                f"skill {row['skill']:.2f}, effect {row['effect']:.3f}, growth {row['growth']:.1f}, {row['codes']}"
            )


def main() -> int:
    """Examine all networks and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="the networks built by formula, of two seeds")
    parser.add_argument("--seeds", type=int, default=100, help="seeds below this one")
    parser.add_argument("--most-iterations", type=int, default=10**6, help="leave out networks trained for longer")
    parser.add_argument("--without", default="-", help="networks of which the name begins so are left out")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--only", default="", help="networks of which the name begins so")
    parser.add_argument(
        "--coverage", action="store_true", help="of those known for their memory: how often intervals hold"
    )
    parser.add_argument("--resume", action="store_true", help="go on where a run was broken off")
    parser.add_argument("--train-only", action="store_true")
    args = parser.parse_args()
    selected = [e for e in entries() if not args.small or (e.make is not train_or_load and e.seed < 2)]
    selected = [e for e in selected if e.seed < args.seeds and not e.name.startswith(args.without)]
    selected = [e for e in selected if e.options.get("iterations", 0) <= args.most_iterations]
    selected = [e for e in selected if e.name.startswith(args.only) and (e.graded or not args.coverage)]
    if args.train_only:
        torch.set_num_threads(1)
        for i, entry in enumerate(e for e in selected if e.make is train_or_load):
            train_or_load(entry)
            print(i, entry.name, entry.seed, flush=True)
        return 0
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"rows-{args.samples}{'-coverage' * args.coverage}{args.only}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if args.resume and path.exists() else []
    finished_keys = {row["key"] for row in rows}
    # Held-out seeds first, so that an interrupted run has them.
    remaining = sorted((e for e in selected if e.key not in finished_keys), key=lambda e: e.seed % 2)
    work = [(e, args.samples, args.coverage) for e in remaining]
    with path.open("a" if args.resume else "w") as file:
        for row in _examine_all(work, args.jobs):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
    table([r for r in rows if r["seed"] % 2 == 0], f"{args.samples} samples, even seeds (held out)")
    table([r for r in rows if r["seed"] % 2 == 1], f"{args.samples} samples, odd seeds (thresholds were set here)")
    print("\njudged or measured wrongly:")
    print_errors(rows)
    print(f"median seconds of a diagnosis: {np.median([r['seconds'] for r in rows]):.2f}")
    return 0


def _examine_all(work: list[tuple[Entry, int, bool]], jobs: int) -> Iterator[dict[str, Any]]:
    if jobs == 1:
        yield from map(examine, work)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(examine, work, chunksize=4)


if __name__ == "__main__":
    sys.exit(main())
