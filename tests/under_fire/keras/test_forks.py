"""In a process forked after calls were made, verbs raise an error at once; figures and files work."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, signal
import keras, numpy as np
import rnnlens as rl

model = keras.Sequential([keras.Input((6, 3)), keras.layers.SimpleRNN(5, return_sequences=True, name="rnn")])
rl.options(certify="never")
x = np.random.default_rng(0).normal(size=(4, 6, 3)).astype("float32")
trace = rl.trace(model, x, np.zeros((4, 6, 5), "float32"), loss="mse")
jacobian = rl.jacobian(model, x, measure="norm")
child = os.fork()
if child == 0:
    signal.alarm(60)
    refused = 0
    for call in (
        lambda: rl.trace(model, x),
        lambda: rl.jacobian(model, x),
        lambda: rl.gradients(model, x, of="output"),
        lambda: rl.weights(model),
    ):
        try:
            call()
        except rl.errors.UnsupportedError as error:
            refused += "was forked" in str(error)
    rl.plot.lag_profile(jacobian)
    rl.plot.heatmap(trace["rnn"].hidden_grad)
    trace.save("trace.nc")
    rl.open("trace.nc")
    os._exit(10 + refused)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.one_engine("jax")  # tests/under_fire/torch forks a process that runs on torch
def test_the_child_refuses_and_draws(tmp_path):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert run.stdout.strip() == "14", run.stdout + run.stderr[-2000:]
