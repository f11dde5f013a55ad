"""The networks of the zoo: how each is made, and which findings are right for it.

Trained networks are cached in .benchmarks/zoo.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from _zoo_calibration import LAG, SampledTask, Tap, train_overfitted
from _zoo_nets import (
    Linear,
    Net,
    Stacked,
    Utterances,
    gated_net,
    growing_relu,
    kill,
    latch,
    random_gru,
    random_tanh,
    set_initial_weights,
    train,
)
from _zoo_registers import PROBLEMS, Register
from _zoo_tasks import TASKS, Task, needed_memory

KEPT = Path(__file__).resolve().parent.parent / ".benchmarks" / "zoo"
FAULTS = ("NO_SKILL", "MISSED_DEPENDENCY", "VANISHING", "EXPLODING", "CHAOTIC", "DEAD_UNITS", "NONFINITE")
CAUTIONS = (
    *("PADDING_DOMINATES", "CONSTANT_INPUT", "STATIC_INPUT", "UNDERFLOW", "UNEQUAL_LAYERS"),
    "MISCALIBRATED",
)
HEALTHY = dict.fromkeys((*FAULTS, *CAUTIONS, "LAST_STEP_ONLY"), False)
#: Findings that are wrong also for a network whose target does not matter.
SOUND = {
    code: False
    for code in HEALTHY
    if code not in ("NO_SKILL", "MISSED_DEPENDENCY", "VANISHING", "LAST_STEP_ONLY", "MISCALIBRATED")
}
#: Value of `Entry.memory`: the memory is computed from the network or the task.
FOLLOWS = -1


@dataclass(frozen=True)
class Entry:
    """A network of the zoo with its known properties.

    Attributes
    ----------
    memory
        The known memory n of a solved network; None if there is none, ``FOLLOWS`` if it is computed.
    truth
        By code: whether the finding is right. Codes that are not named are not counted.
    missing
        The lag that the network misses, where it is known.
    base, change
        The name of the entry whose trained weights are used, and the change made to them after training.
    samples
        Number of samples to diagnose it on, if it differs from the requested number.
    """

    name: str
    seed: int
    make: Callable[[Entry], tuple[Any, Task | None]]
    options: dict[str, Any] = field(default_factory=dict)
    memory: int | None = None
    truth: dict[str, bool] = field(default_factory=dict)
    missing: int | None = None
    noise: float = 0.0
    base: str = ""
    change: dict[str, Any] = field(default_factory=dict)
    samples: int | None = None

    @property
    def key(self) -> str:
        """Return a string that identifies the entry."""
        return json.dumps([self.name, self.seed, self.options, self.change, self.samples], sort_keys=True)

    @property
    def graded(self) -> bool:
        """Whether the network's memory is checked, rather than findings on inputs, units, dynamics or numbers."""
        ungraded = (
            "random tanh",
            "random gru",
            "growing relu",
            "no numbers",
            "silence",
            "coupled",
            "dressed",
            "cut off",
        )
        return self.name not in ungraded


def train_or_load(entry: Entry) -> tuple[Any, Task]:
    """Return the trained network, from the cache or trained now, and its task."""
    o = dict(entry.options)
    task = TASKS[o["task"]](*o.get("arguments", ()), **o.get("keywords", {}))
    torch.manual_seed(entry.seed)
    relu = {"nonlinearity": "relu"} if o.get("relu") else {}
    network_class = Utterances if o["task"] == "vowels" else Net
    net = network_class(
        o["cell"], task.features, task.outputs, o.get("units", 32), sequence=task.sequence, **o.get("net", {}), **relu
    )
    set_initial_weights(net, o["cell"], o.get("start", ""))
    key = hashlib.sha256(json.dumps([entry.base or entry.name, entry.seed, o], sort_keys=True).encode()).hexdigest()[
        :16
    ]
    path = KEPT / f"{key}.pt"
    if path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
    else:
        train(net, task, entry.seed, o["iterations"], window=o.get("window"))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), path)
    dead = entry.change.get("kill", o.get("kill"))
    if dead:
        kill(net, dead, entry.seed)
    return net.eval(), task


def entries() -> Iterator[Entry]:
    """Yield all networks."""
    yield from _recall()
    yield from _other_tasks()
    yield from _real()
    yield from _inputs_and_units()
    yield from _built()
    yield from _registers()
    yield from _dynamics()
    yield from _inputs()
    yield from _dead()
    yield from _numbers()
    yield from _calibration()


def _entry(name: str, seed: int, task: str, cell: str, iterations: int, **extra: Any) -> Entry:
    memory, truth, missing = extra.pop("memory", None), extra.pop("truth", {}), extra.pop("missing", None)
    options = {"task": task, "cell": cell, "iterations": iterations, **extra}
    return Entry(name, seed, train_or_load, options, memory, truth, missing)


def _recall() -> Iterator[Entry]:
    for cell in ("lstm", "gru"):
        for lag, iterations, initial in ((3, 200, ""), (10, 450, "keep 1"), (25, 700, "keep 3")):
            for seed in range(6):
                yield _entry(
                    "recall, solved",
                    seed,
                    "recall",
                    cell,
                    iterations,
                    arguments=[lag],
                    start=initial,
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
    for cell, initial in (("rnn", "orthogonal 0.4"), ("lstm", "keep -1")):
        for seed in range(6):
            truth = {
                "MISSED_DEPENDENCY": True,
                "VANISHING": True,
                "NO_SKILL": True,
                "EXPLODING": False,
                "CHAOTIC": False,
            }
            yield _entry(
                "recall, vanishing", seed, "recall", cell, 250, arguments=[25], start=initial, truth=truth, missing=25
            )


def _other_tasks() -> Iterator[Entry]:
    adding = needed_memory(TASKS["adding"]())
    for seed in range(4):
        for cell in ("lstm", "gru"):
            yield _entry("adding", seed, "adding", cell, 1200, start="keep 3", memory=adding, truth=HEALTHY)
        yield _entry("two lags", seed, "two lags", "gru", 800, start="keep 3", memory=41, truth=HEALTHY)
        truncated = {"MISSED_DEPENDENCY": True, "VANISHING": False, "NO_SKILL": False, "CHAOTIC": False}
        yield _entry(
            "two lags, truncated", seed, "two lags", "gru", 400, start="keep 4", window=10, truth=truncated, missing=40
        )
        vanishing = {"MISSED_DEPENDENCY": True, "VANISHING": True, "NO_SKILL": False, "CHAOTIC": False}
        yield _entry(
            "two lags, vanishing", seed, "two lags", "rnn", 400, start="orthogonal 0.4", truth=vanishing, missing=40
        )
        for alpha in (0.5, 0.8, 0.93):
            n = needed_memory(TASKS["exponential"](alpha))
            for cell in ("gru", "rnn"):
                yield _entry(
                    "exponential mean", seed, "exponential", cell, 400, arguments=[alpha], memory=n, truth=HEALTHY
                )
        for cell in ("lstm", "gru"):
            for keywords in ({}, {"smooth": 0.9}, {"classes": True}):
                truth = {**HEALTHY, "LAST_STEP_ONLY": True}
                yield _entry("last step", seed, "last", cell, 200, keywords=keywords, memory=1, truth=truth)
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
        n = needed_memory(TASKS["rare"](share))
        for seed in range(2):
            yield _entry(
                "rare need", seed, "rare", "gru", 900, arguments=[share], start="keep 3", memory=n, truth=HEALTHY
            )


def _real() -> Iterator[Entry]:
    truth = {"NO_SKILL": False, "CHAOTIC": False, "STATIC_INPUT": False, "PADDING_DOMINATES": False, "NONFINITE": False}
    for seed in range(4):
        for cell in ("gru", "lstm"):
            yield _entry("digits", seed, "digits", cell, 900, start="keep 2", truth=truth)
            yield _entry("vowels", seed, "vowels", cell, 250, start="keep 1", truth=truth)
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
    sound = {**SOUND, "NO_SKILL": False, "MISSED_DEPENDENCY": False}
    for seed in range(4):
        for radius, condition in product((0.5, 0.7, 0.9, 0.95), (1.0, 30.0)):
            o = {"radius": radius, "condition": condition, "steps": 100}
            truth = {code: sound[code] for code in ("CHAOTIC", "NO_SKILL", "MISSED_DEPENDENCY")}
            yield Entry("linear", seed, make_linear, o, FOLLOWS, truth, noise=0.05)
        for tau, cell in product((1, 4, 16, 48), ("lstm", "gru")):
            o = {"tau": tau, "cell": cell, "steps": 150}
            yield Entry("gates set", seed, make_gated, o, FOLLOWS, sound, noise=0.05)
        for weight in (1.5, 2.0, 3.0):
            truth = {"NO_SKILL": False, "VANISHING": False, "MISSED_DEPENDENCY": False, "CHAOTIC": False}
            yield Entry("latch", seed, make_latch, {"weight": weight, "steps": 60}, 60, truth)
    for seed, cell in product(range(6), ("lstm", "gru", "rnn")):
        truth = {"NO_SKILL": True, "CHAOTIC": False, "EXPLODING": False}
        yield Entry("untrained", seed, make_untrained, {"cell": cell}, None, truth)


def _dynamics() -> Iterator[Entry]:
    """Yield networks with growing or chaotic dynamics, and stable ones; `truth_of` tests chaos by two trajectories."""
    for seed, gain in [*product(range(8), (0.5, 0.9)), *product(range(18), (2.0, 2.5))]:
        o = {"gain": gain, "units": 64, "steps": 200}
        yield Entry("random tanh", seed, make_tanh, o, None, {"CHAOTIC": gain > 1, "EXPLODING": gain > 1}, noise=0.05)
    for seed in range(10):
        for radius in (1.02, 1.15, 1.2, 1.3):
            truth = {"EXPLODING": radius > 1.02, "CHAOTIC": False}
            yield Entry("growing relu", seed, make_relu, {"radius": radius, "steps": 60}, None, truth, noise=0.05)
    for seed, gain in product(range(4), (1.0, 8.0)):
        o = {"gain": gain, "units": 48, "steps": 200}
        yield Entry("random gru", seed, make_gru, o, None, {"CHAOTIC": gain > 4, "EXPLODING": gain > 4}, noise=0.05)


def _inputs() -> Iterator[Entry]:
    """Yield networks of fixed gates on inputs with one known flaw, and on inputs without."""
    flaws = {
        "padded before 0.7": "PADDING_DOMINATES",
        "padded behind 0.6": "PADDING_DOMINATES",
        "padded before 0.4": "",
        "constant": "CONSTANT_INPUT",
        "static": "STATIC_INPUT",
        "nearly static": "",
    }
    for seed, (dress, code), cell in product(range(20), flaws.items(), ("lstm", "gru")):
        if seed >= 10 and code not in ("CONSTANT_INPUT", "STATIC_INPUT"):
            continue
        truth = {flaw: flaw == code for flaw in ("PADDING_DOMINATES", "CONSTANT_INPUT", "STATIC_INPUT")}
        o = {"tau": (4, 16)[seed // 2 % 2], "cell": cell, "steps": 40, "dress": dress, "features": 2}
        yield Entry("dressed", seed, make_gated, o, None, {**truth, "CHAOTIC": False}, noise=0.05)


def _dead() -> Iterator[Entry]:
    """Yield trained networks with some units cut off."""
    dead = {"DEAD_UNITS": True}
    for seed, cell, share in product(range(6), ("lstm", "gru"), (0.1, 0.4)):
        o = {"task": "recall", "cell": cell, "iterations": 200, "arguments": [3], "start": ""}
        yield Entry("cut off", seed, train_or_load, o, None, dead, None, 0.0, "recall, solved", {"kill": share})
    for seed, alpha, share in product(range(4), (0.5, 0.8, 0.93), (0.1, 0.4)):
        o = {"task": "exponential", "cell": "rnn", "iterations": 400, "arguments": [alpha]}
        yield Entry("cut off", seed, train_or_load, o, None, dead, None, 0.0, "exponential mean", {"kill": share})


def _numbers() -> Iterator[Entry]:
    """Yield networks with non-finite or subnormal states, and two-layer ones with gradients of very unequal size."""
    for seed in range(10):
        for fault in ("radius 8", "weight", "input", "finite"):
            yield Entry(
                "no numbers", seed, make_nonfinite, {"how": fault, "steps": 60}, None, {"NONFINITE": fault != "finite"}
            )
        for tau, cell in product((0.3, 1, 16, 60), ("lstm", "gru")):
            o = {"tau": tau, "cell": cell, "steps": 240, "dress": "silence"}
            yield Entry("silence", seed, make_gated, o, None, {"UNDERFLOW": tau < 16})
        for cell, coupling in product(("lstm", "rnn"), (1.0, 0.01, 1e-6, 1e-7)):
            o = {"cell": cell, "coupling": coupling, "steps": 30}
            yield Entry("coupled", seed, make_coupled, o, None, {"UNEQUAL_LAYERS": coupling < 1e-4})


def _registers() -> Iterator[Entry]:
    """Yield shift-register networks that solve tasks exactly, diagnosed on many samples and on few."""
    problems: list[tuple[str, list[int], bool]] = [
        ("xor", [2, 14, 40], True),
        ("xor", [0, 6, 10], True),
        ("parity", [4, 30], True),
        ("counting", [30, 60], True),
        ("value", [3, 10], True),
        ("value", [200, 300], True),
        ("heavy tails", [12, 50], True),
        ("smooth input", [9, 50], True),
        ("lognormal", [7, 40], True),
        ("seldom", [8, 40], True),
        ("pair", [1, 20, 50], True),
        ("copied", [12, 40], True),
        ("half heard, held", [3, 25, 60], False),
        ("half heard, held", [1, 6, 10], False),
        ("half heard, gone", [3, 25, 60], False),
        ("half heard, gone", [20, 150, 300], False),
    ]
    for seed, (name, arguments, healthy) in product(range(4), problems):
        o = {"problem": name, "arguments": arguments}
        truth = dict(HEALTHY) if healthy else {**SOUND, "MISSED_DEPENDENCY": True, "VANISHING": "gone" in name}
        # A register passes the full cotangent to every input that it stores, and none to older ones.
        lag = None if healthy else arguments[1]
        yield Entry("register", seed, make_register, o, FOLLOWS if healthy else None, truth, lag)
        if name in ("value", "xor", "counting", "seldom", "lognormal") and arguments[-1] < 100:
            yield Entry(
                "register, few samples", seed, make_register, o, FOLLOWS, truth, None, samples=(64, 96)[seed // 2 % 2]
            )


def _calibration() -> Iterator[Entry]:
    """Yield networks with errors that are no missed dependency, one with both, and optimal forecasts of a series."""
    calibrated = dict.fromkeys(("MISSED_DEPENDENCY", "VANISHING", "PATH_OPEN", "CHAOTIC", "EXPLODING"), False)
    for seed in range(20):
        yield Entry("noise target", seed, make_overfitted, {"kind": "noise"}, None, {**calibrated, "NO_SKILL": True})
        yield Entry(
            "overfitted", seed, make_overfitted, {"kind": "recall"}, None, {**calibrated, "MISCALIBRATED": True}
        )
        miscalibrated = {**calibrated, "MISCALIBRATED": True, "NO_SKILL": False}
        o = {"kind": "recall", "scale": (1.3, 1.6)[seed // 2 % 2], "offset": 0.0}
        yield Entry("off in scale", seed, make_tap, o, None, miscalibrated)
        o = {"kind": "classes", "scale": 4.0, "offset": -6.0 + (3.0, 4.1)[seed // 2 % 2]}
        yield Entry("weighted classes", seed, make_tap, o, None, miscalibrated)
        truth = {"MISSED_DEPENDENCY": True, "VANISHING": False, "MISCALIBRATED": True}
        o = {"kind": "two lags", "scale": 1.6, "offset": 0.0}
        yield Entry("missed, off in scale", seed, make_tap, o, None, truth, 2 * LAG)
        for rho, horizon in product((0.9, 0.97), (1, 3, 5)):
            o = {"kind": "forecast", "rho": rho, "horizon": horizon, "scale": rho**horizon, "offset": 0.0}
            yield Entry("forecast", seed, make_tap, o, 1, {**HEALTHY, "LAST_STEP_ONLY": True, "NO_SKILL": False})


def make_overfitted(entry: Entry) -> tuple[Any, Any]:
    """Return a network that has memorised its training samples, and its task."""
    task = SampledTask(entry.options["kind"])
    return train_overfitted(task, entry.seed), task


def make_tap(entry: Entry) -> tuple[Any, Any]:
    """Return a network that reads the input at one lag, and its task; for a forecast it is the optimal predictor."""
    o = entry.options
    task = SampledTask(o["kind"], o.get("rho", 0.0), o.get("horizon", 0))
    return Tap(0 if o["kind"] == "forecast" else LAG, o["scale"], o["offset"]).eval(), task


def make_register(entry: Entry) -> tuple[Any, Task]:
    """Return a shift-register network that computes the task exactly, and the task."""
    problem = PROBLEMS[entry.options["problem"]](*entry.options["arguments"])
    net = Register(problem.task.features, problem.length, problem.readout, sequence=problem.task.sequence)
    return net.eval(), problem.task


def make_linear(entry: Entry) -> tuple[Any, None]:
    """Return a linear network, whose memory has a closed form."""
    o = entry.options
    return Linear(12, 1, o["radius"], entry.seed, condition=o["condition"]), None


def make_gated(entry: Entry) -> tuple[Any, None]:
    """Return an LSTM or GRU with fixed gates."""
    o = entry.options
    return gated_net(o["cell"], o["tau"], seed=entry.seed, features=o.get("features", 1)), None


def make_latch(entry: Entry) -> tuple[Any, None]:
    """Return a latch: a tanh network with two stable states."""
    return latch(entry.options["weight"], seed=entry.seed), None


def make_tanh(entry: Entry) -> tuple[Any, None]:
    """Return a tanh network with random weights."""
    return random_tanh(entry.options["gain"], entry.options["units"], entry.seed), None


def make_gru(entry: Entry) -> tuple[Any, None]:
    """Return a GRU with random weights."""
    return random_gru(entry.options["gain"], entry.options["units"], entry.seed), None


def make_relu(entry: Entry) -> tuple[Any, None]:
    """Return a relu network whose state grows."""
    return growing_relu(entry.options["radius"], 12, entry.seed), None


def make_nonfinite(entry: Entry) -> tuple[Any, None]:
    """Return a relu network that is non-finite by growth, a NaN weight, or a NaN that `data_for` puts in the input."""
    fault = entry.options["how"]
    net = growing_relu(8.0 if fault == "radius 8" else 0.8, 12, entry.seed)
    if fault == "weight":
        with torch.no_grad():
            net.rnn.weight_hh_l0[entry.seed, 3] = float("nan")
    return net, None


def make_coupled(entry: Entry) -> tuple[Any, None]:
    """Return a two-layer network whose second layer receives the first one's output scaled by ``coupling``."""
    return Stacked(entry.options["cell"], entry.options["coupling"], entry.seed).eval(), None


def make_untrained(entry: Entry) -> tuple[Any, Task]:
    """Return a network with the framework's initial weights, and the recall task."""
    task = TASKS["recall"](10)
    torch.manual_seed(100 + entry.seed)
    return Net(entry.options["cell"], task.features, task.outputs).eval(), task
