"""rl.trace of a TensorFlow-1 graph against one ``session.run`` of its loss and gradients: ratios within one run.

    python benchmarks/trace_graph.py [--rounds 9] [--control-flow v1 v2]

Conv1D, batch normalisation, GRU of 64 units with dropout over 75 steps, a head: all quantities, with the certificate,
which is one more plain run, and without. The first call copies the graph, finds its loops and adds their gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from _summary import Row, collect

BARS = {"trace": 2.5, "trace, not certified": 2.5, "first call, seconds": 10.0}


def measure(rounds: int) -> None:
    """Measure one control flow, in its own process."""
    import numpy as np
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior() if os.environ["RNNLENS_CONTROL_FLOW"] == "v1" else tf.disable_eager_execution()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "rnnlens-tf1" / "tests" / "helpers"))
    from tf1_conv_gru import Graph

    import rnnlens as rl

    g = Graph(units=64, dtype=tf.float32, features=24)
    gradients = tf.gradients(g.loss, tf.trainable_variables())
    sess = tf.Session()
    sess.run(tf.global_variables_initializer())
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(5, 75, n)).astype("float32") for n in (24, 2))
    constant = {g.phase: False, g.dropout: 0.0, g.initial_state: np.zeros((5, 64), "float32")}
    feed = constant | {g.inputs_train: x, g.inputs_devel: x, g.labels_train: y, g.labels_devel: y}
    net = rl.tf1.graph(
        sess,
        inputs={"inputs": [g.inputs_train, g.inputs_devel]},
        targets=[g.labels_train, g.labels_devel],
        outputs={"output": g.output},
        loss=g.loss,
        feed=constant,
    )

    def seconds(call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def trace_uncertified() -> None:
        with rl.options(certify="never"):
            rl.trace(net, x, y)

    first_call = seconds(lambda: rl.trace(net, x, y))
    calls = {"run": lambda: sess.run([g.loss, *gradients], feed), "trace": lambda: rl.trace(net, x, y)}
    calls["trace, not certified"] = trace_uncertified
    for call in calls.values():
        call()
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {name: medians[name] / medians["run"] for name in ("trace", "trace, not certified")}
    ratios["first call, seconds"] = first_call
    print(f"control flow {os.environ['RNNLENS_CONTROL_FLOW']}: session.run takes {1000 * medians['run']:.1f} ms")
    for name, value in ratios.items():
        unit, peer = ("s", "") if name.startswith("first") else ("x", "one session.run of loss and gradients")
        flow = os.environ["RNNLENS_CONTROL_FLOW"]
        collect(
            Row("Trace, TensorFlow-1 graph", f"{name.removesuffix(', seconds')}, {flow}", value, unit, peer, BARS[name])
        )
        print(f"  {name:24}{value:6.2f}   bar {BARS[name]:g}   {'ok' if value <= BARS[name] else 'OVER'}")


def main() -> None:
    """Measure each control flow in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--control-flow", nargs="+", choices=["v1", "v2"], default=["v1", "v2"])
    args = parser.parse_args()
    if "RNNLENS_MEASURING" in os.environ:
        measure(args.rounds)
        return
    for flow in args.control_flow:
        environment = {"RNNLENS_CONTROL_FLOW": flow, "RNNLENS_MEASURING": "1", "TF_USE_LEGACY_KERAS": "1"}
        command = [sys.executable, __file__, "--rounds", str(2 if args.small else args.rounds)]
        subprocess.run(command, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    main()
