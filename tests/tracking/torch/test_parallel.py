"""In two DistributedDataParallel processes rank 0 records, and notes name averaged gradients as averaged."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import rnnlens as rl

SCRIPT = """
import os
import sys
from datetime import timedelta
import torch
import torch._dynamo, xarray, zarr  # what optimizers and records would import, once for both ranks
from torch import distributed, nn
from torch.nn.functional import mse_loss
from torch_trainings import Reader, data
import rnnlens as rl

folder, watching = sys.argv[1], rl.torch.watch
other = os.fork()  # nothing has been computed yet
rank = 0 if other else 1
store = distributed.FileStore(f"{folder}/meeting", 2)
distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = Reader(num_layers=2)
model.dropout.p = 0.0
model.norm = nn.Identity()
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x, y = data(32)
own = slice(rank, None, 2)
kept = []
with watching(model, f"{folder}/a.zarr", every=2, probe=(x[:4], y[:4]), loss="mse", batches=2) as watch:
    for _ in range(4):
        optimizer.zero_grad()
        mse_loss(model(x[own]), y[own]).backward()
        kept.append(model.module.lstm.weight_hh_l0.grad.clone())
        optimizer.step()
torch.save({
    "weights": model.module.state_dict(), "averaged": kept[-1],
    "own": torch.tensor(watch.latest.weights["lstm[0]"].recurrent_kernel_grad.values),
    "accumulated": torch.tensor(watch.latest.weights["lstm[0]"].recurrent_kernel_grad_accumulated.values),
    "samples": watch.latest["lstm[1]"].output_grad.sizes["sample"],
}, f"{folder}/rank{rank}.pt")
distributed.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    path = ":".join(entry for entry in sys.path if entry)
    completed = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return folder


def test_the_first_writes_and_says_so(folder):
    run = rl.open(folder / "a.zarr")
    assert run.probe.steps.values.tolist() == [0, 2, 4]
    assert run.batch.steps.values.tolist() == [2, 4]
    assert any(note.endswith("that the processes averaged.") and "rank 0 of 2" in note for note in run.batch.notes)
    assert len(rl.open(folder / "a.zarr").batch.notes) == 1


def test_own_and_averaged_gradients(folder):
    first, second = (torch.load(folder / f"rank{rank}.pt") for rank in range(2))
    assert first["samples"] == second["samples"] == 16
    norm = torch.linalg.vector_norm
    for rank_results in (first, second):
        np.testing.assert_allclose(norm(rank_results["accumulated"]), norm(rank_results["averaged"]), rtol=1e-5)
    mean = (first["own"] + second["own"]) / 2
    np.testing.assert_allclose(mean, first["accumulated"], atol=1e-6 * float(mean.abs().max()) * 10)
    assert not torch.allclose(first["own"], second["own"])


def test_training_together_is_not_disturbed(folder):
    """Watched DistributedDataParallel training leaves equal weights in both processes."""
    first, second = (torch.load(folder / f"rank{rank}.pt")["weights"] for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
