"""``rl.diagnose`` on networks whose condition is known: which memory they use, what they miss, and why.

    python benchmarks/diagnosis_zoo.py [--small] [--jobs N] [--samples 512]

Networks are trained from a seed or built by formula; what was trained is kept in .benchmarks/zoo and found there again.
The thresholds of ``rnnlens.diagnose`` were set on odd seeds; the table counts the even ones, and the odd ones beside.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _zoo_nets import Linear, Net, gated, growing_relu, kill, latch, random_tanh, start, train
from _zoo_tasks import TASKS, Task, needed, white

KEPT = Path(__file__).resolve().parent.parent / ".benchmarks" / "zoo"
FAULTS = ("NO_SKILL", "MISSED_DEPENDENCY", "VANISHING", "EXPLODING", "CHAOTIC", "DEAD_UNITS", "NONFINITE")
HEALTHY = dict.fromkeys((*FAULTS, "PADDING_DOMINATES", "CONSTANT_INPUT", "STATIC_INPUT", "LAST_STEP_ONLY"), False)
SOLVED = 0.95
#: Samples that stand for all there are, when the coverage of intervals is counted.
POPULATION = 2048


@dataclass(frozen=True)
class Entry:
    """One network.

    Attributes
    ----------
    memory
        The n that is known, for a solved network; None where there is none.
    truth
        By code: whether the finding is right. Codes that are not named are not counted.
    missing
        The lag that is missed, where it is known.
    """

    name: str
    seed: int
    make: Callable[[Entry], tuple[Any, Task | None]]
    options: dict[str, Any] = field(default_factory=dict)
    memory: int | None = None
    truth: dict[str, bool] = field(default_factory=dict)
    missing: int | None = None
    noise: float = 0.0


def trained(entry: Entry) -> tuple[Any, Task]:
    """A trained network, from where it was kept or trained now."""
    o = dict(entry.options)
    task = TASKS[o["task"]](*o.get("arguments", ()), **o.get("keywords", {}))
    torch.manual_seed(entry.seed)
    relu = {"nonlinearity": "relu"} if o.get("relu") else {}
    net = Net(
        o["cell"], task.features, task.outputs, o.get("units", 32), sequence=task.sequence, **o.get("net", {}), **relu
    )
    start(net, o["cell"], o.get("start", ""))
    key = hashlib.sha256(json.dumps([entry.name, entry.seed, o], sort_keys=True).encode()).hexdigest()[:16]
    path = KEPT / f"{key}.pt"
    if path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
    else:
        train(net, task, entry.seed, o["iterations"], window=o.get("window"))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), path)
    if o.get("kill"):
        kill(net, o["kill"], entry.seed)
    return net.eval(), task


def entries() -> Iterator[Entry]:
    """All networks."""
    yield from _recall()
    yield from _other_tasks()
    yield from _real()
    yield from _inputs_and_units()
    yield from _built()


def _entry(name: str, seed: int, task: str, cell: str, iterations: int, **rest: Any) -> Entry:
    memory, truth, missing = rest.pop("memory", None), rest.pop("truth", {}), rest.pop("missing", None)
    options = {"task": task, "cell": cell, "iterations": iterations, **rest}
    return Entry(name, seed, trained, options, memory, truth, missing)


def _recall() -> Iterator[Entry]:
    for cell in ("lstm", "gru"):
        for lag, iterations, how in ((3, 200, ""), (10, 450, "keep 1"), (25, 700, "keep 3")):
            for seed in range(6):
                yield _entry(
                    "recall, solved",
                    seed,
                    "recall",
                    cell,
                    iterations,
                    arguments=[lag],
                    start=how,
                    memory=lag + 1,
                    truth=HEALTHY,
                )
        for lag in (10, 25):
            for seed in range(4):
                truth = {"MISSED_DEPENDENCY": True, "NO_SKILL": True, "EXPLODING": False, "CHAOTIC": False}
                yield _entry(
                    "recall, 40 iterations", seed, "recall", cell, 40, arguments=[lag], truth=truth, missing=lag
                )
        for seed in range(6):
            truth = {"MISSED_DEPENDENCY": True, "VANISHING": False, "NO_SKILL": True, "CHAOTIC": False}
            yield _entry(
                "recall, truncated",
                seed,
                "recall",
                cell,
                250,
                arguments=[25],
                start="keep 4",
                window=8,
                truth=truth,
                missing=25,
            )
    for seed in range(4):
        yield _entry(
            "recall, solved", seed, "recall", "rnn", 300, arguments=[3], start="orthogonal 1", memory=4, truth=HEALTHY
        )
    for cell, how in (("rnn", "orthogonal 0.4"), ("lstm", "keep -1")):
        for seed in range(6):
            truth = {
                "MISSED_DEPENDENCY": True,
                "VANISHING": True,
                "NO_SKILL": True,
                "EXPLODING": False,
                "CHAOTIC": False,
            }
            yield _entry(
                "recall, vanishing", seed, "recall", cell, 250, arguments=[25], start=how, truth=truth, missing=25
            )


def _other_tasks() -> Iterator[Entry]:
    adding = needed(TASKS["adding"]())
    for seed in range(4):
        for cell in ("lstm", "gru"):
            yield _entry("adding", seed, "adding", cell, 1200, start="keep 3", memory=adding, truth=HEALTHY)
        yield _entry("two lags", seed, "two lags", "gru", 800, start="keep 3", memory=41, truth=HEALTHY)
        cut = {"MISSED_DEPENDENCY": True, "VANISHING": False, "NO_SKILL": False, "CHAOTIC": False}
        yield _entry(
            "two lags, truncated", seed, "two lags", "gru", 400, start="keep 4", window=10, truth=cut, missing=40
        )
        gone = {"MISSED_DEPENDENCY": True, "VANISHING": True, "NO_SKILL": False, "CHAOTIC": False}
        yield _entry(
            "two lags, vanishing", seed, "two lags", "rnn", 400, start="orthogonal 0.4", truth=gone, missing=40
        )
        for alpha in (0.5, 0.8, 0.93):
            n = needed(TASKS["exponential"](alpha))
            for cell in ("gru", "rnn"):
                yield _entry(
                    "exponential mean", seed, "exponential", cell, 400, arguments=[alpha], memory=n, truth=HEALTHY
                )
        for cell in ("lstm", "gru"):
            for words in ({}, {"smooth": 0.9}, {"classes": True}):
                truth = {**HEALTHY, "LAST_STEP_ONLY": True}
                yield _entry("last step", seed, "last", cell, 200, keywords=words, memory=1, truth=truth)
        for lag in (4, 10):
            yield _entry("echo", seed, "echo", "gru", 600, arguments=[lag], memory=lag + 1, truth=HEALTHY)
        truth = {"MISSED_DEPENDENCY": True, "VANISHING": False, "CHAOTIC": False}
        yield _entry(
            "echo, truncated",
            seed,
            "echo",
            "gru",
            300,
            arguments=[10],
            start="keep 4",
            window=5,
            truth=truth,
            missing=10,
        )
    for share in (0.1, 0.3):
        n = needed(TASKS["rare"](share))
        for seed in range(2):
            yield _entry(
                "rare need", seed, "rare", "gru", 900, arguments=[share], start="keep 3", memory=n, truth=HEALTHY
            )


def _real() -> Iterator[Entry]:
    truth = {"NO_SKILL": False, "CHAOTIC": False, "STATIC_INPUT": False, "PADDING_DOMINATES": False, "NONFINITE": False}
    for seed in range(2):
        for cell in ("gru", "lstm"):
            yield _entry("digits", seed, "digits", cell, 900, start="keep 2", truth=truth)
        yield _entry("characters", seed, "characters", "gru", 900, start="keep 1", units=64, truth=truth)


def _inputs_and_units() -> Iterator[Entry]:
    for seed in range(4):
        for share, dominates in ((0.3, False), (0.7, True)):
            truth = {**HEALTHY, "PADDING_DOMINATES": dominates}
            yield _entry(
                "padded before",
                seed,
                "recall, padded before",
                "gru",
                500,
                arguments=[8, share],
                start="keep 2",
                memory=9,
                truth=truth,
            )
        for share, dominates in ((0.3, False), (0.6, True)):
            truth = {**HEALTHY, "PADDING_DOMINATES": dominates}
            extra = round(20 * share / (1 - share))
            yield _entry(
                "padded behind",
                seed,
                "recall, padded behind",
                "gru",
                600,
                arguments=[5, share],
                start="keep 3",
                memory=6 + extra,
                truth=truth,
            )
        truth = {**HEALTHY, "CONSTANT_INPUT": True}
        yield _entry(
            "constant feature",
            seed,
            "recall, constant feature",
            "gru",
            500,
            arguments=[8],
            start="keep 1",
            memory=9,
            truth=truth,
        )
        truth = {**HEALTHY, "STATIC_INPUT": True}
        del truth["LAST_STEP_ONLY"]
        yield _entry("static input", seed, "static", "gru", 200, truth=truth)
        for share in (0.0, 0.2, 0.5):
            truth = {"DEAD_UNITS": share > 0, "CHAOTIC": False}
            yield _entry(
                "relu, dead units",
                seed,
                "exponential",
                "rnn",
                300,
                arguments=[0.6],
                relu=True,
                kill=share,
                start="orthogonal 0.7",
                truth=truth,
            )
        yield _entry(
            "two layers",
            seed,
            "recall",
            "lstm",
            500,
            arguments=[10],
            start="keep 1",
            net={"layers": 2},
            memory=11,
            truth=HEALTHY,
        )
        yield _entry(
            "bidirectional",
            seed,
            "recall",
            "gru",
            400,
            arguments=[10],
            net={"bidirectional": True},
            memory=11,
            truth=HEALTHY,
        )
        yield _entry(
            "dropout",
            seed,
            "recall",
            "gru",
            500,
            arguments=[10],
            start="keep 1",
            net={"dropout": 0.3},
            memory=11,
            truth=HEALTHY,
        )


def _built() -> Iterator[Entry]:
    for seed in range(4):
        for radius in (0.5, 0.7, 0.9, 0.95):
            for condition in (1.0, 30.0):
                yield Entry(
                    "linear",
                    seed,
                    linear,
                    {"radius": radius, "condition": condition},
                    -1,
                    {"CHAOTIC": False, "NO_SKILL": False, "MISSED_DEPENDENCY": False},
                    noise=0.05,
                )
        for tau in (1, 4, 16, 48):
            for cell in ("lstm", "gru"):
                truth = {"NO_SKILL": False, "EXPLODING": False, "CHAOTIC": False, "MISSED_DEPENDENCY": False}
                yield Entry("gates set", seed, by_gate, {"tau": tau, "cell": cell}, -1, truth, noise=0.05)
        for weight in (1.5, 2.0, 3.0):
            truth = {"NO_SKILL": False, "VANISHING": False, "MISSED_DEPENDENCY": False, "CHAOTIC": False}
            yield Entry("latch", seed, latched, {"weight": weight}, 60, truth)
    for seed in range(6):
        for gain in (0.5, 0.9, 2.0, 3.0):
            yield Entry("random tanh", seed, tanh, {"gain": gain}, None, {"CHAOTIC": gain > 1}, noise=0.05)
        for radius in (1.15, 1.3):
            yield Entry("growing relu", seed, relu, {"radius": radius}, None, {"EXPLODING": True, "CHAOTIC": False})
        for cell in ("lstm", "gru", "rnn"):
            yield Entry(
                "untrained",
                seed,
                untrained,
                {"cell": cell},
                None,
                {"NO_SKILL": True, "CHAOTIC": False, "EXPLODING": False},
            )


def linear(entry: Entry) -> tuple[Any, None]:
    """A linear network; its memory in closed form."""
    o = entry.options
    return Linear(12, 1, o["radius"], entry.seed, condition=o["condition"]), None


def by_gate(entry: Entry) -> tuple[Any, None]:
    """Fixed gates."""
    return gated(entry.options["cell"], entry.options["tau"], seed=entry.seed), None


def latched(entry: Entry) -> tuple[Any, None]:
    """A hand-made latch."""
    return latch(entry.options["weight"], seed=entry.seed), None


def tanh(entry: Entry) -> tuple[Any, None]:
    """A random tanh network."""
    return random_tanh(entry.options["gain"], 64, entry.seed), None


def relu(entry: Entry) -> tuple[Any, None]:
    """A growing relu network."""
    return growing_relu(entry.options["radius"], 12, entry.seed), None


def untrained(entry: Entry) -> tuple[Any, Task]:
    """As the framework makes it."""
    task = TASKS["recall"](10)
    torch.manual_seed(100 + entry.seed)
    return Net(entry.options["cell"], task.features, task.outputs).eval(), task


def data_for(entry: Entry, net: Any, task: Task | None, samples: int) -> tuple[Any, Any]:
    """Held-out samples. A network built by formula is its own teacher, up to a little noise."""
    seed = 10**6 + entry.seed
    if task is not None:
        x = task.draw(samples, seed)
        return x, task.ideal(x)
    steps = {"linear": 100, "random tanh": 200, "growing relu": 60, "gates set": 150, "latch": 60}[entry.name]
    x = white(steps)(samples, seed)
    if entry.name == "latch":
        x *= 0.02
        x[:, 0, 0] = np.where(np.random.default_rng(seed).uniform(size=samples) < 0.5, -1, 1)
    with torch.no_grad():
        y = net(torch.as_tensor(x)).numpy()
    y = y + entry.noise * y.std() * np.random.default_rng(seed + 1).normal(size=y.shape)
    return x, y.astype(np.float32)


def known_memory(entry: Entry, net: Any, steps: int) -> int | None:
    """n in closed form where it is not given."""
    if entry.memory != -1:
        return entry.memory
    if entry.name == "linear":
        return net.memory(steps)
    energy = np.exp(-2 * np.arange(steps) / entry.options["tau"])
    return int(np.argmax(1 - np.cumsum(energy) / energy.sum() <= 0.05)) + 1


def examine(task: tuple[Entry, int]) -> dict[str, Any]:
    """Diagnose one network."""
    import rnnlens as rl

    entry, samples = task
    torch.set_num_threads(1)
    net, origin = entry.make(entry)
    x, y = data_for(entry, net, origin, samples)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        d = rl.diagnose(net, x, y, samples=samples)
    model = d["model"]
    skill = float(model.skill)
    finding = next((f for f in d.findings if f.code == "MISSED_DEPENDENCY"), None)
    low, high = (float(v) for v in model.memory_interval)
    layers = [d[name] for name in d if name != "model"]
    truth = dict(entry.truth)
    if "DEAD_UNITS" in truth and entry.options.get("relu"):
        truth["DEAD_UNITS"] = really_dead(net, origin, entry.seed)
    return {
        "name": entry.name,
        "seed": entry.seed,
        "options": entry.options,
        "truth": truth,
        "missing": entry.missing,
        "known": known_memory(entry, net, x.shape[1]),
        "n": float(model.memory),
        "population": population(entry, net, origin),
        "low": low,
        "high": high,
        "spoken": bool(model.attrs["known"]),
        "skill": skill,
        "codes": list(d.codes),
        "lag": None if finding is None else finding.evidence["lag"],
        "effect": float(model.missed_effect),
        "growth": max(float(np.max(layer.growth)) for layer in layers),
        "lambda": [float(np.max(layer.lambda_1)) for layer in layers],
        "stderr": [float(np.max(layer.lambda_1_stderr)) for layer in layers],
        "sentence": next(iter(d.sentences.values())),
        "seconds": time.perf_counter() - begin,
    }


def population(entry: Entry, net: Any, task: Task | None) -> float:
    """n of the same network on many more samples."""
    from rnnlens.diagnosis.experiment import Experiment, read_samples
    from rnnlens.diagnosis.memory import measure_memory

    x, y = data_for(entry, net, task, POPULATION)
    return measure_memory(Experiment(net, read_samples(x, y, POPULATION))).length.value


def really_dead(net: Net, task: Task, seed: int) -> bool:
    """Whether some unit is 0 at every step of many other samples."""
    with torch.no_grad():
        h = net.rnn(torch.as_tensor(task.draw(4096, 77 + seed)))[0]
    return bool((h == 0).all(dim=0).all(dim=0).any())


def applicable(row: dict[str, Any]) -> dict[str, bool]:
    """What is true of a network as it came out: one that was to solve its task and did not is none of the healthy."""
    truth = dict(row["truth"])
    if truth.get("MISSED_DEPENDENCY") is False and row["skill"] < SOLVED and row["name"] != "untrained":
        return {code: value for code, value in truth.items() if code in ("CHAOTIC", "STATIC_INPUT", "CONSTANT_INPUT")}
    if truth.get("MISSED_DEPENDENCY") is True and row["skill"] > 0.5 and row["name"].startswith(("recall", "echo")):
        return {}  # it learned the task all the same
    if truth.get("NO_SKILL") is True and row["skill"] > 0.02:
        truth.pop("NO_SKILL")
    return truth


def table(rows: list[dict[str, Any]], title: str) -> None:
    """Balanced accuracy by code, and how often n is right."""
    print(f"\n{title}: {len(rows)} networks")
    print(f"{'code':22}{'BA':>8}{'tp':>5}{'fn':>5}{'fp':>5}{'tn':>5}")
    codes = list(dict.fromkeys(code for row in rows for code in row["truth"]))
    for code in codes:
        pairs = [(truth[code], code in row["codes"]) for row in rows if code in (truth := applicable(row))]
        tp, fn = pairs.count((True, True)), pairs.count((True, False))
        fp, tn = pairs.count((False, True)), pairs.count((False, False))
        rates = [a / (a + b) for a, b in ((tp, fn), (tn, fp)) if a + b]
        print(f"{code:22}{sum(rates) / max(len(rates), 1):8.3f}{tp:5}{fn:5}{fp:5}{tn:5}")
    healthy = [r for r in rows if r["known"] is not None and r["skill"] >= SOLVED]
    right = [abs(r["n"] - r["known"]) <= max(1, 0.1 * r["known"]) for r in healthy]
    covered = [r["low"] <= r["known"] <= r["high"] for r in healthy]
    print(f"n within max(1, 10 %) of the known memory: {sum(right)} of {len(right)} ({np.mean(right):.1%})")
    print(f"95 % interval holds it: {sum(covered)} of {len(covered)} ({np.mean(covered):.1%})")
    named = [r for r in rows if r["missing"] is not None and r["lag"] is not None]
    print(f"missed step named exactly: {sum(r['lag'] == r['missing'] for r in named)} of {len(named)}")
    faults = {"MISSED_DEPENDENCY", "VANISHING", "EXPLODING", "CHAOTIC", "DEAD_UNITS", "NONFINITE", "NO_SKILL"}
    sound = [r for r in healthy if r["truth"].get("MISSED_DEPENDENCY") is False]
    alarms = [r for r in sound if faults & set(r["codes"])]
    share = len(alarms) / max(len(sound), 1)
    print(f"false alarms on healthy solved networks: {len(alarms)} of {len(sound)} ({share:.1%})")


def wrong(rows: list[dict[str, Any]]) -> None:
    """Every network that was judged or measured wrongly."""
    for row in rows:
        truth = applicable(row)
        bad = [c for c, value in truth.items() if value != (c in row["codes"])]
        off = (
            row["known"] is not None
            and row["skill"] >= SOLVED
            and abs(row["n"] - row["known"]) > max(1, 0.1 * row["known"])
        )
        if bad or off:
            print(
                f"  {row['name']} {row['options']} seed {row['seed']}: wrong {bad}, n {row['n']} for {row['known']}, "
                f"skill {row['skill']:.2f}, effect {row['effect']:.3f}, growth {row['growth']:.1f}, {row['codes']}"
            )


def main() -> int:
    """Examine all networks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="the networks built by formula, of two seeds")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--train-only", action="store_true")
    asked = parser.parse_args()
    chosen = [e for e in entries() if not asked.small or (e.make is not trained and e.seed < 2)]
    work = [(entry, asked.samples) for entry in chosen]
    if asked.train_only:
        torch.set_num_threads(1)
        for i, entry in enumerate(e for e in chosen if e.make is trained):
            trained(entry)
            print(i, entry.name, entry.seed, flush=True)
        return 0
    if asked.jobs > 1:
        with ProcessPoolExecutor(asked.jobs) as pool:
            rows = list(pool.map(examine, work, chunksize=4))
    else:
        rows = [examine(one) for one in work]
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / "rows.json").write_text(json.dumps(rows, indent=1))
    table([r for r in rows if r["seed"] % 2 == 0], "even seeds (held out)")
    table([r for r in rows if r["seed"] % 2 == 1], "odd seeds (thresholds were set here)")
    print("\njudged or measured wrongly:")
    wrong(rows)
    print(f"median seconds of a diagnosis: {np.median([r['seconds'] for r in rows]):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
