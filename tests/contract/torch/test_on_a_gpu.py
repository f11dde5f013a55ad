"""GPU behaviour, tested without a GPU: precision settings during a call, and tensors that NumPy cannot read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rnnlens.adapters.torch.restore import _DifferentiableKernels
from rnnlens.autodiff import engine

ROOT = Path(__file__).resolve().parents[3]

#: Ways to allow TF32: by the names before torch 2.9, by the names since, and by both.
SETTINGS = {
    "as torch is": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "both": lambda: (
        torch.set_float32_matmul_precision("high"),
        setattr(torch.backends.cuda.matmul, "allow_tf32", False),
    ),
    "fp32_precision": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "fp32_precision of cuDNN": lambda: setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee"),
    "cuDNN without": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
}


def precisions():
    """Return the ``fp32_precision`` settings, which can always be read."""
    backends = torch.backends
    operations = (backends.cuda.matmul, backends.cudnn.rnn, backends.cudnn.conv)
    return [operation.fp32_precision for operation in operations]


@pytest.fixture
def tf32_defaults():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for operation in (torch.backends.cudnn.rnn, torch.backends.cudnn.conv):
        operation.fp32_precision = "tf32"


@pytest.mark.usefixtures("tf32_defaults")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_call_computes_without_tf32_and_restores_the_setting(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    SETTINGS[name]()
    before = precisions()
    with engine("torch").full_precision():
        assert "tf32" not in precisions()
    assert precisions() == before


class KernelFlags(TorchFunctionMode):
    """Mode that records (dropout rate, training flag) of each call of a fused RNN kernel."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu):
            position = 6 if isinstance(args[3], (list, tuple)) else 5
            self.seen.append(args[position : position + 2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_kernel_in_eval_mode_runs_differentiable_and_without_dropout(kind, packed):
    torch.manual_seed(0)
    module, x = kind(3, 4, 2, batch_first=True, dropout=0.5).eval(), torch.randn(2, 5, 3)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    expected, _ = module(x)
    with KernelFlags() as flags, _DifferentiableKernels():
        actual, _ = module(x)
        module.train()(x)
    assert flags.seen == [(0.0, True), (0.5, True)]
    assert torch.equal(getattr(actual, "data", actual), getattr(expected, "data", expected))


def test_results_where_numpy_cannot_read_a_tensor():
    """Tests of every verb pass on pretended GPU tensors, which NumPy and other devices cannot read without a copy."""
    oracle, one_length = "tests/oracle/torch", "exchanged_where_the_model_takes_one_length_only"
    tests = [
        "tests/contract/torch/test_zoo.py::test_traced",
        "tests/contract/torch/test_find_nonfinite.py",
        f"{oracle}/test_resets.py::test_state_transfer_ends_at_a_reset_and_is_autograds",
        f"{oracle}/test_chains_of_layers.py::test_a_step_of_a_chain[last step-1-True]",
        f"{oracle}/test_jacobian.py::test_chunks_of_a_sweep_in_blocks",
        f"{oracle}/test_diagnosis_truth.py::test_the_state_of_a_cell_of_ones_own_is_{one_length}",
    ]
    # Packed sequences need lengths on the CPU, and here every tensor of a test is on the pretended GPU.
    packed = "tests/contract/torch/test_zoo.py::test_traced[packed_sentiment_classifier]"
    options = ["-q", "-p", "pretended_gpu", "-p", "no:cacheprovider", "-m", "not full", "--deselect", packed]
    helpers = os.pathsep.join([str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": helpers},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:]
