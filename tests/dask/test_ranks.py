"""The documented recipe for a job of several ranks, run on two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

import rnnlens as rl

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "beyond-one-machine.md"


@pytest.mark.full
def test_two_ranks_write_the_gradient_of_all_samples(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    model = next(block for block in blocks if "class Reader" in block).partition("net = Reader()")[0]
    recipe = next(block for block in blocks if "init_process_group" in block)
    (tmp_path / "job.py").write_text(model + recipe)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, "job.py"], cwd=tmp_path, env={**environment, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]

    namespace = {}
    exec(model, namespace)
    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(400, 20, 3)).astype("float32")
    y = x[:, -1, :1]
    expected = rl.gradients(namespace["Reader"](), x, y, loss=torch.nn.functional.mse_loss, wrt="input").values
    gradients = zarr.open_array(tmp_path / "ranks.zarr")[:]
    np.testing.assert_allclose(gradients, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
