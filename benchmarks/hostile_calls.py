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
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "unit")]

#: Limit of this process's data memory in bytes.
LIMIT_DATA = 6 * 2**30
ENGINES = ("torch", "keras", "tf_keras", "tf1", "plain")
X = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("f4")
Y = np.zeros((2, 5, 2), "f4")


def torch_case(folder: Path) -> tuple[list[Any], dict[str, Any], Callable[[], Any]]:
    """Return the functions to call, torch values to try, and a function that returns the model's state."""
    import torch
    from hostile import Target, constant, diagnosis_targets, verb_targets
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import rnnlens as rl

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.top = nn.Linear(4, 2)

        def forward(self, x):
            return self.top(self.lstm(x)[0])

    values = {
        "requires grad": lambda: torch.ones(2, 5, 3, requires_grad=True),
        "bfloat16": lambda: torch.ones(2, 5, 3, dtype=torch.bfloat16),
        "meta": lambda: torch.ones(2, 5, 3, device="meta"),
        "sparse": lambda: torch.ones(2, 5, 3).to_sparse(),
        "long": lambda: torch.ones(2, 5, 3, dtype=torch.long),
        "complex tensor": lambda: torch.ones(2, 5, 3, dtype=torch.complex64),
        "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
        "negative bit": lambda: torch._neg_view(torch.ones(2, 5, 3)),
        "conjugate bit": lambda: torch.ones(2, 5, 3, dtype=torch.complex64).conj(),
        "negative view of complex": lambda: torch.ones(2, 5, 3, dtype=torch.complex64).conj().imag,
        "expanded": lambda: torch.ones(1, 1, 3).expand(2, 5, 3),
        "NaN tensor": lambda: torch.full((2, 5, 3), float("nan")),
        "0-d tensor": lambda: torch.tensor(1.0),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 5, 3), 0.1, 0, torch.qint8),
        "loader": lambda: DataLoader(TensorDataset(torch.ones(4, 5, 3), torch.ones(4, 5, 2)), batch_size=2),
        "loader of other lengths": lambda: iter([(X, Y), (X[:, :4], Y[:, :4])]),
        "data set": lambda: TensorDataset(torch.ones(4, 5, 3)),
        "packed": lambda: nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)]),
        "module": lambda: nn.Linear(3, 2),
        "empty model": nn.Sequential,
        "double": lambda: nn.LSTM(3, 4, batch_first=True).double(),
        "meta model": lambda: nn.LSTM(3, 4, device="meta"),
        "loss class": lambda: nn.MSELoss,
        "loss": nn.MSELoss,
        "unreduced loss": lambda: nn.MSELoss(reduction="none"),
        "optimizer": lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1),
    }
    torch.manual_seed(0)
    model = Net()

    def train_watched(**options):
        """Train a new model for two watched steps."""
        with torch.random.fork_rng():
            net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with rl.torch.watch(options.pop("model", net), **options):
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.mse_loss(net(torch.as_tensor(X)), torch.as_tensor(Y)).backward()
                optimizer.step()

    def state():
        modules = list(model.modules())
        return (
            *(p.detach().numpy().tobytes() for p in model.state_dict().values()),
            *(m.training for m in modules),
            *(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules),
            *(p.requires_grad and p.grad is None for p in model.parameters()),
            torch.get_rng_state().numpy().tobytes(),
            np.random.get_state()[1].tobytes(),  # noqa: NPY002  the global state must not change
            torch.is_grad_enabled(),
        )

    targets = [*verb_targets(model, X, Y, nn.functional.mse_loss, folder), *diagnosis_targets(model, X, Y)]
    targets += [report_target(model, folder), watch_target("torch.watch", train_watched, rl.torch.watch, folder)]
    for name in ("cell", "step"):
        function = getattr(rl.torch, name)
        good = {"function": constant(lambda *args: args), "x": constant(X), "forward": constant(lambda *args: args)}
        good = {argument: value for argument, value in good.items() if argument in parameters(function)}
        targets.append(Target(f"torch.{name}", function, good, parameters(function)))
    adapter = Target("check_adapter", rl.testing.check_adapter, {}, ("adapter", "model", "batch", "rtol"))
    adapter.good = {"adapter": constant(_adapter(model)), "model": constant(model), "batch": lambda: _batch(X, Y)}
    return [*targets, adapter], values, state


def keras_case(folder: Path, legacy: bool) -> tuple[list[Any], dict[str, Any], Callable[[], Any]]:
    """Return the functions to call, Keras values to try, and a function that returns the model's state."""
    if legacy:
        import tf_keras as keras
    else:
        import keras
    from hostile import diagnosis_targets, verb_targets

    import rnnlens as rl

    numpy_of = np.asarray if legacy else keras.ops.convert_to_numpy

    def build():
        inputs = keras.Input((None, 3))
        hidden = keras.layers.LSTM(4, return_sequences=True, name="lstm")(inputs)
        net = keras.Model(inputs, keras.layers.Dense(2, name="top")(hidden))
        net.compile(optimizer="sgd", loss="mse", run_eagerly=True)
        return net

    values = {
        "symbolic": lambda: keras.Input((5, 3)),
        "layer": lambda: keras.layers.LSTM(2),
        "empty model": keras.Sequential,
        "model class": lambda: keras.Model,
        "loss class": lambda: keras.losses.MeanSquaredError,
        "loss": keras.losses.MeanSquaredError,
        "optimizer": keras.optimizers.SGD,
        "metric": keras.metrics.MeanSquaredError,
        "loader of other lengths": lambda: iter([(X, Y), (X[:, :4], Y[:, :4])]),
        **tensors(keras, legacy),
    }
    model = build()

    def fit_watched(**options):
        """Run two watched steps of ``fit`` on a new model."""
        build().fit(X, Y, batch_size=1, epochs=1, verbose=0, callbacks=[rl.keras.Watch(**options)])

    def state():
        return (
            *(np.array(numpy_of(variable)).tobytes() for variable in model.variables),
            *(layer.trainable for layer in model.layers),
            *(len(vars(layer)) for layer in model.layers),
            np.random.get_state()[1].tobytes(),  # noqa: NPY002  the global state must not change
            model.compiled if not legacy else model._is_compiled,
        )

    targets = [*verb_targets(model, X, Y, "mse", folder), *diagnosis_targets(model, X, Y), report_target(model, folder)]
    return [*targets, watch_target("keras.Watch", fit_watched, rl.keras.Watch, folder)], values, state


def tensors(keras: Any, legacy: bool) -> dict[str, Callable[[], Any]]:
    """Return tensors of the engine that are invalid for most arguments."""
    if legacy or keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return {
            "a tensor": lambda: tf.ones((2, 5, 3)),
            "half tensor": lambda: tf.ones((2, 5, 3), tf.bfloat16),
            "complex tensor": lambda: tf.ones((2, 5, 3), tf.complex64),
            "ragged tensor": lambda: tf.ragged.constant([[1.0], [1.0, 2.0]]),
            "sparse tensor": lambda: tf.sparse.from_dense(tf.ones((2, 5))),
            "variable": lambda: tf.Variable(tf.ones((2, 5, 3))),
            "string tensor": lambda: tf.constant(["a"]),
            "data set": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(2),
            "single samples": lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
        }
    return {
        "a tensor": lambda: keras.ops.ones((2, 5, 3)),
        "half tensor": lambda: keras.ops.ones((2, 5, 3), dtype="bfloat16"),
        "complex tensor": lambda: keras.ops.ones((2, 5, 3), dtype="complex64"),
        "variable": lambda: keras.Variable(np.ones((2, 5, 3))),
    }


def tf1_case(folder: Path) -> tuple[list[Any], dict[str, Any], Callable[[], Any]]:
    """Return the functions to call, TensorFlow values to try, and a function that returns the session's state (v1)."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow.compat.v1 as tf
    from hostile import Target, constant, diagnosis_targets, verb_targets

    import rnnlens as rl

    tf.disable_v2_behavior()
    tf.get_logger().setLevel("ERROR")
    tf.set_random_seed(1)
    x, y = tf.placeholder(tf.float32, [None, None, 3], name="x"), tf.placeholder(tf.float32, [None, None, 2], name="y")
    hidden, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.LSTMCell(4), x, dtype=tf.float32, scope="lstm")
    out = tf.layers.dense(hidden, 2, name="top")
    loss = tf.reduce_mean(tf.square(out - y))
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    net = rl.tf1.graph(session, inputs=x, outputs=out, loss=loss, targets=y)
    values = {
        "placeholder": constant(x),
        "output": constant(out),
        "loss tensor": constant(loss),
        "session": constant(session),
        "graph": tf.Graph,
        "variable": constant(tf.global_variables()[0]),
        "operation": constant(out.op),
        "closed session": _closed_session,
        "loader of other lengths": lambda: iter([(X, Y), (X[:, :4], Y[:, :4])]),
    }

    def state():
        return (
            *(value.tobytes() for value in session.run(tf.global_variables())),
            session.graph.version,
            np.random.get_state()[1].tobytes(),  # noqa: NPY002  the global state must not change
        )

    arguments = {
        "session": constant(session),
        "inputs": constant(x),
        "outputs": constant(out),
        "loss": constant(loss),
        "targets": constant(y),
    }
    near_tensors = {"x:0": constant("x:0"), "no tensor": constant("nowhere:0"), "op": constant("x")}
    near_tensors |= {"list": lambda: [x, x], "dict": lambda: {1: x}}
    near: dict[str, Any] = dict.fromkeys(("inputs", "outputs", "loss", "targets"), near_tensors)
    near["feed"] = {"phase": lambda: {"phase": True}, "x": lambda: {x: X}, "words": lambda: {x: "words"}}
    targets = [*verb_targets(net, X, Y, None, folder), *diagnosis_targets(net, X, Y), report_target(net, folder)]
    for target in targets:
        target.good.pop("loss", None)
    return [*targets, Target("tf1.graph", rl.tf1.graph, arguments, parameters(rl.tf1.graph), near)], values, state


def _closed_session() -> Any:
    import tensorflow.compat.v1 as tf

    session = tf.Session()
    session.close()
    return session


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
