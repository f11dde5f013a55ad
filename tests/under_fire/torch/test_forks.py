"""A process forked after calls were made returns results, or raises an error at once."""

import os
import subprocess
import sys

CODE = """
import os, signal
import h5netcdf, matplotlib.figure, torch  # also what the children need, so that it is imported once
import rnnlens as rl
from torch import nn

torch.manual_seed(0)
model = nn.LSTM(8, 64, batch_first=True)
x = torch.randn(32, 50, 8)
loss = lambda output, target: output[0].square().mean()

def child_after_calls():
    trace = rl.trace(model, x, torch.zeros(1), loss=loss)
    jacobian = rl.jacobian(model, x[:2, :10], of=trace.layers[0] + ".hidden", measure="norm")
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(60)
    try:
        rl.trace(model, x, torch.zeros(1), loss=loss)
        answer = 0
    except rl.errors.UnsupportedError as error:
        answer = 7 if "was forked" in str(error) else 8
    rl.plot.lag_profile(jacobian)
    rl.plot.heatmap(trace[trace.layers[0]].hidden_grad)
    rl.measures
    trace.save("trace.nc")
    rl.open("trace.nc")
    os._exit(answer)

alone = child_after_calls()
torch.set_num_threads(2)
print(alone, child_after_calls())
"""


def test_the_child_draws_and_calls_or_refuses(tmp_path):
    """A forked child has lost torch's threads, so verbs raise an error; they work if the parent used one thread."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert run.stdout.strip() == "0 7", run.stdout + run.stderr[-2000:]
