"""Call every public function with invalid or almost valid values, and count how the calls end.

    python benchmarks/hostile_calls.py torch --count 3000 --seed 1
    KERAS_BACKEND=torch python benchmarks/hostile_calls.py keras --count 1500      # or jax, tensorflow
    python benchmarks/hostile_calls.py tf_keras --count 600
    python benchmarks/hostile_calls.py tf1 --count 600
    python benchmarks/hostile_calls.py plain --count 5000                          # figures, files, options, results

A call is a valid one in which one to three arguments are replaced, drawn by the seed; with ``--each`` every argument is
replaced by every value, one at a time. Each call ends as one of

    result       a result
    refused      one error of rnnlens, with a text of at most 8000 characters
    own          an error of the user's on_batch, which rnnlens does not catch
    foreign      an error of another package
    unreadable   an error of rnnlens without a text, or with a longer one
    hang         more than 60 s by the clock and 30 s of processor time, or more than 600 s by the clock
    slow         more than 5 s of processor time; 30 s for a watched training, which is compiled anew
    memory       more than 576 MiB beyond what was used before
    altered      after the call, weights, flags, hooks, gradients or random states of the model differ

All but the first three are faults. The exit status is 1 if there is one; each place is printed with its first call.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TESTS = (ROOT / "tests", ROOT / "packages" / "rnnlens-tf1" / "tests")
sys.path[:0] = [*(str(tests / "helpers") for tests in TESTS), str(TESTS[0] / "unit")]

#: Limit of this process's data memory in bytes.
LIMIT_DATA = 6 * 2**30
ENGINES = ("torch", "keras", "tf_keras", "tf1", "plain")
X = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("f4")
Y = np.zeros((2, 5, 2), "f4")


def torch_case(folder: Path) -> tuple[list[Any], dict[str, Any], Callable[[], Any]]:
    """Return the functions to call, torch values to try, and a function that returns the model's state."""
    import specimens_torch
    import torch
    from hostile import Target, constant, diagnosis_targets, verb_targets

    import rnnlens as rl

    model, loss = specimens_torch.tagger()
    values = {**specimens_torch.FOREIGN, "loader of other lengths": loader_of_other_lengths}

    def train_watched(**options):
        """Train a new model for two watched steps."""
        with torch.random.fork_rng():
            net, _ = specimens_torch.tagger()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with rl.torch.watch(options.pop("model", net), **options):
            for _ in range(2):
                optimizer.zero_grad()
                loss(net(torch.as_tensor(X)), torch.as_tensor(Y)).backward()
                optimizer.step()

    targets = [*verb_targets(model, X, Y, loss, folder), *diagnosis_targets(model, X, Y)]
    targets += [report_target(model, folder), watch_target("torch.watch", train_watched, rl.torch.watch, folder)]
    for name in ("cell", "step"):
        function = getattr(rl.torch, name)
        good = {"function": constant(lambda *args: args), "x": constant(X), "forward": constant(lambda *args: args)}
        good = {argument: value for argument, value in good.items() if argument in parameters(function)}
        targets.append(Target(f"torch.{name}", function, good, parameters(function)))
    adapter = Target("check_adapter", rl.testing.check_adapter, {}, ("adapter", "model", "batch", "rtol"))
    adapter.good = {"adapter": constant(_adapter(model)), "model": constant(model), "batch": lambda: _batch(X, Y)}
    return [*targets, adapter], values, lambda: specimens_torch.state_of(model)


def keras_case(folder: Path, legacy: bool) -> tuple[list[Any], dict[str, Any], Callable[[], Any]]:
    """Return the functions to call, Keras values to try, and a function that returns the model's state."""
    os.environ["RNNLENS_TESTED_KERAS"] = "tf_keras" if legacy else "keras"
    import specimens_keras
    from hostile import diagnosis_targets, verb_targets

    import rnnlens as rl

    values = {**specimens_keras.FOREIGN, "loader of other lengths": loader_of_other_lengths}
    model, loss = specimens_keras.tagger()

    def fit_watched(**options):
        """Run two watched steps of ``fit`` on a new model."""
        new_model, _ = specimens_keras.tagger()
        new_model.fit(X, Y, batch_size=1, epochs=1, verbose=0, callbacks=[rl.keras.Watch(**options)])

    targets = [*verb_targets(model, X, Y, loss, folder), *diagnosis_targets(model, X, Y), report_target(model, folder)]
    targets.append(watch_target("keras.Watch", fit_watched, rl.keras.Watch, folder))
    return targets, values, lambda: specimens_keras.state_of(model)


def tf1_case(folder: Path) -> tuple[list[Any], dict[str, Any], Callable[[], Any]]:
    """Return the functions to call, TensorFlow values to try, and a function that returns the session's state (v1)."""
    import specimens_tf1
    import tensorflow.compat.v1 as tf
    from hostile import Target, constant, diagnosis_targets, verb_targets

    import rnnlens as rl

    tf.InteractiveSession()
    net, _ = specimens_tf1.tagger()
    values = {**specimens_tf1.FOREIGN, "loader of other lengths": loader_of_other_lengths}
    names = {"inputs": "x:0", "outputs": "top/BiasAdd:0", "loss": "squared:0", "targets": "y:0"}
    tensors = {name: tf.get_default_graph().get_tensor_by_name(tensor) for name, tensor in names.items()}
    x = tensors["inputs"]
    arguments = {"session": tf.get_default_session, **{name: constant(tensor) for name, tensor in tensors.items()}}
    near_tensors = {"x:0": constant("x:0"), "no tensor": constant("nowhere:0"), "op": constant("x")}
    near_tensors |= {"list": lambda: [x, x], "dict": lambda: {1: x}}
    near: dict[str, Any] = dict.fromkeys(("inputs", "outputs", "loss", "targets"), near_tensors)
    near["feed"] = {"phase": lambda: {"phase": True}, "x": lambda: {x: X}, "words": lambda: {x: "words"}}
    targets = [*verb_targets(net, X, Y, None, folder), *diagnosis_targets(net, X, Y), report_target(net, folder)]
    for target in targets:
        target.good.pop("loss", None)
    targets.append(Target("tf1.graph", rl.tf1.graph, arguments, parameters(rl.tf1.graph), near))
    return targets, values, lambda: specimens_tf1.state_of(net)


def loader_of_other_lengths() -> Any:
    """Return batches whose sequences differ in length."""
    return iter([(X, Y), (X[:, :4], Y[:, :4])])


def plain_case(folder: Path) -> tuple[list[Any], dict[str, Any], Callable[[], Any]]:
    """Return the functions that need no framework: figures, files, options, results."""
    os.chdir(folder)
    import test_hostile_calls as unit_tests

    return [*unit_tests.figures(), *unit_tests.others(folder)], {}, lambda: ()


def parameters(function: Any) -> tuple[str, ...]:
    """Return the names of the parameters that can be given by name."""
    import inspect

    signature_params = inspect.signature(function).parameters.values()
    return tuple(p.name for p in signature_params if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL, p.POSITIONAL_ONLY))


def report_target(model: Any, folder: Path) -> Any:
    """Return ``rl.report`` as a function to call, without its slowest parts."""
    from hostile import Target, constant, near_values

    import rnnlens as rl

    good = {"model": constant(model), "x": constant(X), "y": constant(Y), "path": constant(str(folder / "r.html"))}
    good |= {"diagnosis": constant(False), "jacobian": constant(False)}
    return Target("report", rl.report, good, parameters(rl.report), near_values(X, Y))


def watch_target(name: str, training: Any, public_watch: Any, folder: Path) -> Any:
    """Return a short watched training as a function to call, with all arguments of the watch."""
    from hostile import Target, constant

    names = tuple(argument for argument in parameters(public_watch) if argument not in ("self", "model"))
    path = folder / f"{name}.zarr"
    near = {
        "path": {
            "none": constant(None),
            "zarr": constant(path),
            "netCDF": constant(folder / "a.nc"),
            "nowhere": constant("/proc/a.zarr"),
        },
        "probe": {
            "right": constant((X, Y)),
            "of x": constant((X,)),
            "turned": constant((Y, X)),
            "NaN": constant((X * np.nan, Y)),
        },
        "every": {"powers": constant("powers of two"), "raises": lambda: lambda step, epoch: 1 / 0, "1": constant(1)},
        "keep": {"hidden": constant("hidden"), "two": constant(["hidden_grad", "cell"])},
        "stop_on": {"right": constant("exploding"), "two": constant(["exploding", "saturated"])},
        "on_nonfinite": {"report": constant("report")},
        "points": {"none": constant(None), "1": constant(1)},
    }
    good = {"path": constant(path), "resume": constant(False), "every": constant(1)}
    return Target(name, training, good, names, near)


def _adapter(model: Any) -> Any:
    from rnnlens.adapters.registry import adapter_for

    return adapter_for(model)


def _batch(x: Any, y: Any) -> Any:
    from rnnlens.adapters.protocol import Batch

    return Batch(x, y)


def main() -> int:
    """Make the calls; print the faults and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="every argument replaced by every value, one at a time")
    parser.add_argument("--only", default="", help="targets whose names contain this")
    parser.add_argument("--small", action="store_true", help="60 calls")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = {
        "torch": torch_case,
        "keras": functools.partial(keras_case, legacy=False),
        "tf_keras": functools.partial(keras_case, legacy=True),
        "tf1": tf1_case,
        "plain": plain_case,
    }
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_DATA, LIMIT_DATA))  # protects other processes
    with tempfile.TemporaryDirectory() as folder:
        targets, values, state = cases[args.engine](Path(folder))
        targets = [target for target in targets if args.only in target.name]
        from hostile import calls, each_call

        drawn_calls = calls(targets, values, 60 if args.small else args.count, args.seed)
        outcomes = make_calls(each_call(targets, values) if args.each else drawn_calls, state)
    return print_summary(outcomes)


def make_calls(calls: Iterable[Any], state: Callable[[], Any]) -> list[Any]:
    """Make the calls, and report any that changes the model's state; return the outcomes."""
    from hostile import FINE, MEMORY, Outcome, attempt

    import rnnlens as rl

    outcomes = []
    start = time.time()
    with rl.options(memory=MEMORY, progress=False):
        for number, call in enumerate(calls, 1):
            before = state()  # read now, because creating values may draw random numbers
            outcomes.append(attempt(*call))
            if (after := state()) != before:
                different = [index for index, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]]
                outcomes.append(Outcome(call[0], "altered", f"places {different} of the state"))
            if outcomes[-1].kind not in FINE:
                last = outcomes[-1]
                print(f"{last.kind}: {last.call}\n    {last.where}", flush=True)
            if number % 200 == 0:
                print(f"# {number} calls, {time.time() - start:.0f} s", flush=True)
    return outcomes


def print_summary(outcomes: list[Any]) -> int:
    """Print how often calls ended in each way, by function, and return the exit status."""
    from hostile import faults

    kinds = Counter(outcome.kind for outcome in outcomes)
    by_function: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        by_function.setdefault(outcome.call.partition("(")[0], Counter())[outcome.kind] += 1
    for function, counts in by_function.items():
        print(f"{function:28}" + "  ".join(f"{kind} {number}" for kind, number in counts.most_common()))
    print(", ".join(f"{kind} {number}" for kind, number in kinds.most_common()))
    if bad := faults(outcomes):
        print(bad)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
