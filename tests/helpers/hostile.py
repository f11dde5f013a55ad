"""Seeded calls with invalid values, for every argument of every verb, figure and file function.

A call is a valid one in which a few arguments are replaced. It must end in a result or in one error of rnnlens, soon,
and must not take more memory than it was granted.
"""

from __future__ import annotations

import inspect
import itertools
import signal
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from own_files import package_path

import rnnlens as rl

#: Wall-clock seconds after which a call hangs: if it uses the processor, and if it waits on a busy machine.
LIMIT_S, LIMIT_WAITING_S = 60, 600
#: Processor seconds allowed for one call, and for a short watched training that is compiled anew each time.
LIMIT_CPU_S, LIMIT_TRAINING_S = 5.0, 30.0
#: Bytes that calls may use, and an allowance for programs that frameworks compile.
MEMORY, ALLOWANCE = 64 * 2**20, 512 * 2**20


#: Outcomes that are no faults; "own" is an error of the user's ``on_batch``, which is not caught.
FINE = ("result", "refused", "own")


class HangError(BaseException):
    """Raised when a call exceeds its time limit; no `except Exception` can hide it."""


class RaisingRepr:
    """An object whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class UnreadableArray:
    """An object with the shape and dtype of an array whose values cannot be read."""

    shape, dtype, ndim, size = (2, 5, 3), np.dtype("f4"), 3, 30

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("no values")


class RaisingArray:
    """An object whose conversion to an array raises."""

    def __array__(self, dtype=None, copy=None):
        raise ValueError("no array")


class WrongArray:
    """An object whose conversion to an array returns a string."""

    def __array__(self, dtype=None, copy=None):
        return "no array"


class RaisesOnAnyUse:
    """An object that raises at each attribute, item, iteration and comparison."""

    def __getattr__(self, name):
        raise OSError(name)

    def __len__(self):
        raise OSError("no length")

    def __iter__(self):
        raise OSError("no items")

    def __eq__(self, other):
        raise OSError("no comparison")

    def __bool__(self):
        raise OSError("no truth")

    __hash__ = None


def one_value(value: float) -> np.ndarray[Any, Any]:
    """Return data (2, 5, 3) of ones in which one value of the second sample is replaced."""
    data = np.ones((2, 5, 3))
    data[1, 2, 0] = value
    return data


def nested_list(depth: int) -> list[Any]:
    """Return lists nested ``depth`` times."""
    items: list[Any] = [1.0]
    for _ in range(depth):
        items = [items]
    return items


def cyclic_list() -> list[Any]:
    """Return a list that contains itself."""
    items: list[Any] = []
    items.append(items)
    return items


def _masked_array() -> Any:
    return np.ma.masked_array(np.ones((2, 5, 3)), mask=np.zeros((2, 5, 3), bool))


#: Values that are valid for almost no argument, created anew for each call.
ANYWHERE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "np.True_": lambda: np.True_,
    "0": lambda: 0,
    "-1": lambda: -1,
    "3": lambda: 3,
    "10**9": lambda: 10**9,
    "2**70": lambda: 2**70,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "-inf": lambda: float("-inf"),
    "1j": lambda: 1j,
    "empty string": lambda: "",
    "nonsense": lambda: "nonsense",
    "spaces": lambda: "  ",
    "a NUL": lambda: "a\0b",
    "10 000 letters": lambda: "x" * 10_000,
    "surrogate": lambda: "\udcff",
    "bytes": lambda: b"lstm",
    "empty list": list,
    "empty tuple": tuple,
    "empty dict": dict,
    "[[]]": lambda: [[]],
    "[None]": lambda: [None],
    "[1, 'a']": lambda: [1, "a"],
    "ragged": lambda: [[1.0, 2.0], [3.0]],
    "dict of 1": lambda: {"a": 1},
    "dict by number": lambda: {1: np.ones((2, 5, 3))},
    "set": lambda: {1, 2},
    "range": lambda: range(3),
    "huge range": lambda: range(10**12),
    "object": object,
    "unprintable": RaisingRepr,
    "function": lambda: lambda *args: args[0],
    "raising function": lambda: lambda *args: 1 / 0,
    "a class": lambda: dict,
    "slice(5, 5)": lambda: slice(5, 5),
    "slice(None)": lambda: slice(None),
    "slice('a')": lambda: slice("a"),
    "slice step 0": lambda: slice(0, 2, 0),
    "generator": lambda: (word for word in ["lstm"]),
    "empty generator": lambda: iter(()),
    "endless iterator": lambda: itertools.repeat("lstm"),
    "deep": lambda: nested_list(500),
    "itself": cyclic_list,
    "0-d": lambda: np.array(3.0),
    "empty array": lambda: np.zeros((0, 5, 3)),
    "no steps": lambda: np.zeros((2, 0, 3)),
    "1-d": lambda: np.ones(3),
    "2-d": lambda: np.ones((2, 5)),
    "3-d": lambda: np.ones((2, 5, 3)),
    "5-d": lambda: np.ones((1, 2, 1, 2, 1)),
    "more features": lambda: np.ones((2, 5, 4)),
    "integers": lambda: np.ones((2, 5, 3), dtype=np.int64),
    "unsigned": lambda: np.ones((2, 5, 3), dtype=np.uint16),
    "half": lambda: np.ones((2, 5, 3), dtype=np.float16),
    "long double": lambda: np.ones((2, 5, 3), dtype=np.longdouble),
    "booleans": lambda: np.ones((2, 5, 3), dtype=bool),
    "big-endian": lambda: np.ones((2, 5, 3), dtype=">f4"),
    "complex": lambda: np.ones((2, 5, 3), dtype=complex),
    "NaN": lambda: np.full((2, 5, 3), np.nan),
    "infinite": lambda: np.full((2, 5, 3), np.inf),
    "masked": _masked_array,
    "objects": lambda: np.array([object(), None], dtype=object),
    "strings": lambda: np.array([["a", "b"]]),
    "dates": lambda: np.zeros((2, 5, 3), dtype="datetime64[s]"),
    "records": lambda: np.zeros(3, dtype=[("a", float)]),
    "turned round": lambda: np.ones((2, 5, 3))[::-1, ::-1],
    "huge": lambda: np.broadcast_to(np.float32(0), (10**7, 50, 3)),
    "DataArray": lambda: xr.DataArray(np.ones((2, 5, 3)), dims=("sample", "time", "unit")),
    "Dataset": lambda: xr.Dataset({"kernel": (("feature", "unit"), np.ones((3, 4)))}),
    "Path": lambda: Path("/nowhere/at/all.nc"),
    "10**20": lambda: 10**20,
    "-10**20": lambda: -(10**20),
    "1e308": lambda: 1e308,
    "5e-324": lambda: 5e-324,
    "Decimal": lambda: Decimal("0.1"),
    "Fraction": lambda: Fraction(1, 3),
    "np.str_": lambda: np.str_("lstm"),
    "np.float32": lambda: np.float32(0.5),
    "np.int8": lambda: np.int8(1),
    "NaT": lambda: np.datetime64("NaT"),
    "date": lambda: date(2020, 1, 1),
    "memoryview": lambda: memoryview(b"abc"),
    "deque": lambda: deque([1, 2]),
    "frozenset": lambda: frozenset({"lstm"}),
    "names twice": lambda: ["lstm", "lstm"],
    "names in a set": lambda: {"lstm", "top"},
    "generator of arrays": lambda: (np.ones((2, 5, 3)) for _ in range(2)),
    "generator of other lengths": lambda: (np.ones((2, steps, 3)) for steps in (5, 4)),
    "generator that raises": lambda: (1 / zero for zero in [0]),
    "endless batches": lambda: itertools.repeat(np.ones((2, 5, 3), "f4")),
    "dict of names": lambda: {"lstm": "lstm"},
    "dict of itself": lambda: _cyclic_dict(),
    "one NaN": lambda: one_value(np.nan),
    "one infinity": lambda: one_value(np.inf),
    "unreadable array": UnreadableArray,
    "only __array__, raising": RaisingArray,
    "wrong __array__": WrongArray,
    "raises at everything": RaisesOnAnyUse,
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "a module": lambda: np,
    "exception": lambda: ValueError("mine"),
    "subnormal": lambda: np.full((2, 5, 3), 1e-320),
    "largest": lambda: np.full((2, 5, 3), 3e38, "f4"),
    "not writable": lambda: _read_only(np.ones((2, 5, 3), "f4")),
    "matrix": lambda: np.ones((2, 5, 3)).view(np.recarray),
}


def _cyclic_dict() -> dict[str, Any]:
    items: dict[str, Any] = {}
    items["a"] = items
    return items


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


@dataclass
class Target:
    """One function, a valid call of it, and further values to try by argument."""

    name: str
    function: Callable[..., Any]
    good: dict[str, Callable[[], Any]]
    arguments: tuple[str, ...]
    near: dict[str, dict[str, Callable[[], Any]]] = field(default_factory=dict)


@dataclass
class Outcome:
    """The outcome of one call."""

    call: str
    kind: str
    where: str = ""


def calls(targets: list[Target], foreign: dict[str, Callable[[], Any]], count: int, seed: int) -> Iterator[Any]:
    """Yield ``count`` calls (description, function, arguments), varying every argument of every function in turn."""
    rng = np.random.default_rng(seed)
    everywhere = {**ANYWHERE, **foreign}
    slots = [(target, argument) for target in targets for argument in target.arguments]
    for number in range(count):
        target, first = slots[number % len(slots)]
        other_arguments = [name for name in target.arguments if name != first]
        more = list(rng.permutation(other_arguments)[: int(rng.choice([0, 0, 0, 1, 2]))]) if other_arguments else []
        replaced: dict[str, Any] = {}
        descriptions = []
        for argument in [first, *map(str, more)]:
            near = target.near.get(argument, {})
            pool = near if near and rng.random() < 0.5 else everywhere
            label = str(rng.choice(list(pool)))
            replaced[argument] = pool[label]
            descriptions.append(f"{argument}={label}")
        arguments = {name: make() for name, make in {**target.good, **replaced}.items()}
        yield f"{target.name}({', '.join(descriptions)})", target.function, arguments


def each_call(targets: list[Target], foreign: dict[str, Callable[[], Any]]) -> Iterator[Any]:
    """Yield calls as :func:`calls` does: every argument of every function replaced by every value, one at a time."""
    for target in targets:
        for argument in target.arguments:
            for label, make_value in {**ANYWHERE, **foreign, **target.near.get(argument, {})}.items():
                arguments = {name: make() for name, make in {**target.good, argument: make_value}.items()}
                yield f"{target.name}({argument}={label})", target.function, arguments


def attempt(description: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    """Make one call within its limits of time and memory, and return its outcome."""

    def raise_if_hanging(*_: object) -> None:
        if time.process_time() - cpu_start > LIMIT_TRAINING_S or time.monotonic() - wall_start >= LIMIT_WAITING_S:
            raise HangError
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)

    peak_before, cpu_start, wall_start = _peak(), time.process_time(), time.monotonic()
    previous = signal.signal(signal.SIGALRM, raise_if_hanging)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**arguments)
        outcome = Outcome(description, "result")
    except rl.errors.RnnlensError as error:
        outcome = Outcome(description, "refused" if _is_readable(error) else "unreadable", str(error)[:200])
    except HangError:
        outcome = Outcome(description, "hang")
    except Exception as error:
        outcome = Outcome(description, "own" if _is_from_on_batch(error) else "foreign", _location(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if outcome.kind != "hang" and time.process_time() - cpu_start > (
        LIMIT_TRAINING_S if "watch(" in description.lower() else LIMIT_CPU_S
    ):
        return Outcome(description, "slow", f"{outcome.kind}, {outcome.where}"[:160])
    growth = _peak() - peak_before
    if growth > MEMORY + ALLOWANCE:
        return Outcome(description, "memory", f"{growth / 2**20:.0f} MiB")
    return outcome


def run_calls(targets: list[Target], foreign: dict[str, Callable[[], Any]], count: int, seed: int) -> list[Outcome]:
    """Make all calls one after another, and return their outcomes."""
    with rl.options(memory=MEMORY, progress=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [attempt(*call) for call in calls(targets, foreign, count, seed)]


def faults(outcomes: list[Outcome]) -> str:
    """Return the faults by place, each with its first call; empty if there are none."""
    bad = [outcome for outcome in outcomes if outcome.kind not in FINE]
    counts = Counter((outcome.kind, outcome.where) for outcome in bad)
    first_calls = {(outcome.kind, outcome.where): outcome.call for outcome in reversed(bad)}
    return "\n".join(
        f"{count} x {kind}: {first_calls[kind, location]}\n    {location}" for (kind, location), count in counts.items()
    )


def _peak() -> int:
    import resource  # Unix only; tests are collected on Windows too

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _is_readable(error: Exception) -> bool:
    """Return whether an error message is neither empty nor too long to read."""
    message = str(error)
    return 10 < len(message) < 8000 and bool(message.splitlines()[0].strip())


def _own_frames(error: Exception) -> list[traceback.FrameSummary]:
    """Return the frames of an error that are in rnnlens, the innermost last."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if package_path(frame.filename) is not None]


def _is_from_on_batch(error: Exception) -> bool:
    """Return whether an error was raised while rnnlens called the user's ``on_batch``."""
    frames = _own_frames(error)
    return bool(frames) and "on_batch(" in (frames[-1].line or "")


def _location(error: Exception) -> str:
    """Return the innermost rnnlens frame of an error, and the error."""
    frames = _own_frames(error)
    location = f"{package_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else "outside"
    return f"{location} {type(error).__name__}: {str(error)[:160]!r}"


def constant(value: Any) -> Callable[[], Any]:
    """Return a function that always returns the given value."""
    return lambda: value


def _constants(*strings: str) -> dict[str, Callable[[], Any]]:
    return {string: constant(string) for string in strings}


#: Names that are valid or almost valid in a model of an LSTM "lstm" and a Dense or Linear layer "top".
NAMES = _constants(
    *("lstm", "lstm#0", "lstm#1", "top", "lstm.hidden", "lstm.cell", "lstm.gates", "lstm.output", "lstm.state_5"),
    *("lstm.final_hidden", "lstm.initial_cell", "lstm/kernel", "top.output", "*", "input[0]", "output[1]"),
    *("loss", "output", "input", "weights"),
) | {
    "two names": lambda: ["lstm.hidden", "weights"],
    "a name twice": lambda: ["lstm", "lstm"],
    "a set of names": lambda: {"lstm", "top"},
}

_REDUCTIONS = _constants("sum", "mean", "norm", "spectral", "abs_mean") | {
    "weights": lambda: np.ones(2),
    "labelled weights": lambda: xr.DataArray(np.ones(2), dims="unit"),
    "a sum": lambda: lambda tensor: tensor.sum(),
    "no reduction": lambda: lambda tensor: tensor,
}


def near_values(x: Any, y: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return valid and almost valid values by argument, for data (2, 5, 3) and targets (2, 5, 2)."""
    names = dict.fromkeys(("of", "wrt", "layers"), NAMES)
    return {
        **names,
        "x": {
            "float64": lambda: x.astype("f8"),
            "one sample": lambda: x[:1],
            "more steps": lambda: np.ones((2, 9, 3)),
            "list": x.tolist,
            "turned": lambda: x[:, ::-1],
            "big-endian": lambda: x.astype(">f4"),
            "in a tuple": lambda: (x,),
            "in a dict": lambda: {"x": x},
            "labelled": lambda: xr.DataArray(x),
            "unbatched": lambda: x[0],
            "batches": lambda: iter([(x, y), (x, y)]),
            "with more": lambda: (x, None, 3),
        },
        "y": {
            "one sample": lambda: y[:1],
            "last step": lambda: y[:, 0],
            "integers": lambda: y.astype(int),
            "1-d": lambda: y[:, 0, 0],
            "list": y.tolist,
            "two": lambda: (y, y),
            "another rank": lambda: np.ones((2, 5, 2, 2)),
        },
        "loss": {
            "raising": lambda: lambda *args: 1 / 0,
            "a number": lambda: lambda *args: 0.5,
            "None": lambda: lambda *args: None,
            "a string": lambda: lambda *args: "0.5",
            "complex": lambda: lambda *args: 1j,
            "complex array": lambda: lambda *args: np.ones(2, complex),
            "complex of the output": lambda: lambda *args: args[1] * 1j,
            "a list": lambda: lambda *args: [0.5],
            "unreadable": lambda: lambda *args: UnreadableArray(),
            "NaN": lambda: lambda *args: args[1] * float("nan"),
            "too many": lambda: lambda a, b, c, d: a,
            "keywords only": lambda: lambda *, keyword: keyword,
            "l1_loss": constant("l1_loss"),
            "mae": constant("mae"),
            "cross_entropy": constant("cross_entropy"),
        },
        "sample_weight": {
            "ones": lambda: np.ones(2),
            "by step": lambda: np.ones((2, 5)),
            "negative": lambda: -np.ones(2),
            "list": lambda: [1, 2],
            "too many": lambda: np.ones(3),
            "NaN": lambda: np.array([1.0, np.nan]),
            "infinite": lambda: np.array([1.0, np.inf]),
            "zero": lambda: np.zeros(2),
        },
        "class_weight": {"by class": lambda: {0: 1.0, 1: 2.0}, "by word": lambda: {"a": 1.0}},
        "quantities": _constants("state_99", "hidden") | {"two": lambda: ["cell", "mask"]},
        "initial_state": {
            "one of two": lambda: {"lstm": [np.zeros((2, 4))]},
            "two": lambda: {"lstm": [np.zeros((2, 4))] * 2},
            "unknown": lambda: {"nowhere": [np.zeros((2, 4))] * 2},
            "one row": lambda: {"lstm": [np.zeros((1, 4))] * 2},
            "too wide": lambda: {"lstm": [np.zeros((2, 9))] * 2},
            "NaN": lambda: {"lstm": [np.full((2, 4), np.nan)] * 2},
            "infinite": lambda: {"lstm": [np.full((2, 4), np.inf)] * 2},
            "unreadable": lambda: {"lstm": [UnreadableArray()] * 2},
        },
        "reduce": _REDUCTIONS,
        "at": {
            "time": lambda: {"time": 1},
            "nothing": lambda: {"time": slice(5, 5)},
            "units": lambda: {"unit": [0, 1]},
            "beyond": lambda: {"unit": 99},
            "mask": lambda: {"time": [True, False, True, True, True]},
            "gate": lambda: {"gate": "forget"},
            "out list": lambda: {"out_time": [0, 2]},
            "out last": lambda: {"out_time": -1},
            "out slice": lambda: {"out_time": slice(1, None)},
            "out twice": lambda: {"out_time": [1, 1]},
            "in array": lambda: {"in_time": np.array([1])},
            "in beyond": lambda: {"in_time": -9, "out_time": 0},
            "in range": lambda: {"in_time": range(2)},
            "set": lambda: {"time": {0, 1}},
            "generator": lambda: {"time": (step for step in [0, 1])},
            "twice": lambda: {"time": [1, 1]},
            "huge": lambda: {"time": 10**20},
            "out set": lambda: {"out_time": {0, 1}},
            "out generator": lambda: {"out_time": iter([0])},
            "out huge": lambda: {"out_time": 10**20},
            "out NaN": lambda: {"out_time": float("nan")},
            "unreadable": lambda: {"time": UnreadableArray()},
        },
        "clip": {
            "optimizer": constant("optimizer"),
            "negative": lambda: {"clipnorm": -1},
            "norm": lambda: {"global_clipnorm": 1.0},
            "word": lambda: {"clipvalue": "a"},
        },
        "sketch": {"5": constant(5)},
        "seed": {"1": constant(1)},
        "batch_size": {"1": constant(1), "5": constant(5)},
        "memory": _constants("1 KiB", "1e30 GiB", "1.2.3 MB"),
        "by_time": {"yes": constant(True), "norm": constant("norm")},
        "measure": {"norm": constant("norm")},
        "over": {"gate": constant("gate"), "two": lambda: ["unit", "gate"]},
        "ord": {"largest": lambda: np.max},
        "history": {"empty": xr.Dataset, "words": lambda: xr.Dataset(coords={"step": ["a"]})},
    }


def verb_targets(model: Any, x: Any, y: Any, loss: Any, folder: Path) -> list[Target]:
    """Return every verb on one model, with all of its arguments."""
    base = {"model": constant(model), "x": constant(x)}
    with_loss = {**base, "y": constant(y), "loss": constant(loss)}
    output_gradient = {**base, "of": constant("output"), "reduce": constant("sum"), "wrt": constant("input")}
    near = near_values(x, y)
    near["out"] = {
        "zarr": lambda: folder / "j.zarr",
        "netCDF": lambda: folder / "j.nc",
        "nowhere": constant("/no/j.zarr"),
    }
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("layers", rl.layers, {"model": constant(model)}),
        ("trace", rl.trace, with_loss),
        ("gradients", rl.gradients, with_loss),
        ("gradients of the output", rl.gradients, output_gradient),
        ("jacobian", rl.jacobian, base),
        ("jacobian by probes", rl.jacobian, {**base, "sketch": constant(4)}),
        ("weights", rl.weights, with_loss),
        ("weight_norms", rl.weight_norms, {"model": constant(model)}),
        ("find_nonfinite", rl.find_nonfinite, with_loss),
    ]
    return [Target(name, verb, good, tuple(inspect.signature(verb).parameters), near) for name, verb, good in cases]


def diagnosis_targets(model: Any, x: Any, y: Any, loss: Any = None) -> list[Target]:
    """Return ``rl.diagnose`` and the functions of its results on one model, with all of their arguments."""
    diagnosis = rl.diagnose(model, x, y, loss=loss)
    numbers = {str(n): constant(n) for n in (-9, -5, -1, 0, 1, 4, 5, 64, 10**6, 10**20)}
    near = {
        **near_values(x, y),
        **dict.fromkeys(("step", "steps", "output", "samples", "count", "period", "most", "seed"), numbers),
        "task": _constants("classes", "binary", "values"),
        "baseline": {"init": constant("init"), "itself": constant(model), "a diagnosis": constant(diagnosis)},
        "layer": NAMES,
        "axes": {
            "right": lambda: {"input": ("sample", "time", "feature"), "output": ("sample", "time", "unit")},
            "turned": lambda: {"input": ("time", "sample", "feature"), "output": ("time", "sample", "unit")},
            "of y": lambda: {"y": ("time", "sample", "unit")},
            "too few": lambda: {"input": ("sample", "time"), "y": ("sample",)},
            "folded": lambda: {"output": (("time", "sample"), "unit")},
        },
        "input": {
            **_constants("mean", "zero", "median"),
            "right": lambda: np.ones(3),
            "wide": lambda: np.ones(4),
            "NaN": lambda: np.full(3, np.nan),
        },
        "starts": {
            "right": lambda: np.ones((6, 8)),
            "narrow": lambda: np.ones((6, 4)),
            "one": lambda: np.ones(8),
            "none": lambda: np.ones((0, 8)),
            "infinite": lambda: np.full((6, 8), np.inf),
            "a trace": lambda: rl.trace(model, x),
            "by another name": lambda: {"gru": 1},
        },
        "noise": {"some": constant(0.1), "negative": constant(-1.0)},
        "tolerance": {"none": constant(0.0), "all": constant(1e9)},
        "models": {
            "two": lambda: {"a": diagnosis, "b": diagnosis},
            "one": lambda: {"a": diagnosis},
            "by number": lambda: {1: diagnosis},
            "a list": lambda: [diagnosis],
            "a model": lambda: {"a": model},
            "the same name": lambda: {"a": diagnosis, "a ": diagnosis, "": diagnosis},
        },
    }
    data = {"model": constant(model), "x": constant(x)}
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("diagnose", rl.diagnose, {**data, "y": constant(y), **({} if loss is None else {"loss": constant(loss)})}),
        ("compare", rl.compare, {"models": lambda: {"a": diagnosis}}),
        ("lyapunov", rl.lyapunov, data),
        ("fixed_points", rl.fixed_points, {**data, "most": constant(8)}),
        ("step_eigenvalues", rl.step_eigenvalues, data),
        ("plot.diagnosis", rl.plot.diagnosis, {"d": constant(diagnosis)}),
    ]
    near["d"] = {"itself": constant(diagnosis), "another": lambda: rl.trace(model, x)}
    return [Target(name, verb, good, _parameter_names(verb), near) for name, verb, good in cases]


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
