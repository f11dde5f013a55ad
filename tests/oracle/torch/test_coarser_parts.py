"""Float64 models with a part in float32 or coarser pass their certificates; pure float64 models are held strictly."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.adapters.protocol import Batch, Taps
from rnnlens.adapters.registry import adapter_for
from rnnlens.autodiff import engine
from rnnlens.results.checks import Certificate, Check
from rnnlens.verbs.certificates.compare import recheck_failure
from rnnlens.verbs.request import ModelRequest


class Mixed(nn.Module):
    """A float64 GRU whose head has one layer in another dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.gru, self.out = nn.GRU(3, 5, batch_first=True).double(), nn.Linear(5, 2).double()
        self.middle = nn.Linear(5, 5).to(dtype)

    def forward(self, x):
        last = self.gru(x)[0][:, -1]
        return self.out(torch.tanh(self.middle(last.to(self.middle.weight.dtype)).double()))


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float64, "float64")]
)
def test_the_coarsest_dtype_of_an_operation_is_found(dtype, name):
    model, x = Mixed(dtype), torch.randn(4, 6, 3, dtype=torch.float64)
    assert adapter_for(model).run(model, Batch(x), Taps.nothing()).coarsest_dtype() == name


def test_random_numbers_and_masks_are_no_computation():
    def function():
        x = torch.randn(3, 4, dtype=torch.float64)
        return x * (torch.rand(3, 4) < 0.5)

    assert engine("torch").coarsest_dtype(function) == "float64"


@pytest.mark.parametrize(("dtype", "state"), [(torch.float32, "passed"), (torch.float64, "failed")])
def test_a_difference_of_one_float32_rounding_is_a_fault_of_a_model_in_float64_alone(dtype, state):
    model, x = Mixed(dtype), torch.randn(4, 6, 3, dtype=torch.float64)
    batch = Batch(x)
    failed = Certificate.of("torch", [Check("plain outputs", "", 1e-7, 1e-14)], certified=("outputs",))
    reference = adapter_for(model).run(model, batch, Taps.nothing(gradients=False)).reference()
    request = ModelRequest.resolve(model, batch)
    assert recheck_failure(failed, request, reference, steps=64).state == state


@pytest.mark.parametrize("seed", range(3))
def test_batches_of_a_model_with_a_part_in_float32(seed):
    """Gradients over batches pass the certificate, although float32 rounding depends on the batch size."""
    torch.manual_seed(seed)
    model, x, y = Mixed(torch.float32), torch.randn(37, 6, 3, dtype=torch.float64), torch.randn(37, 2).double()
    gradients = rl.gradients(model, x, y, loss=nn.functional.mse_loss, wrt="weights", batch_size=5)
    assert gradients.certificate.state == "passed"
    nn.functional.mse_loss(model(x), y).backward()
    np.testing.assert_allclose(gradients["out"]["bias"], model.out.bias.grad, rtol=1e-5)


def test_the_loss_beside_weights_of_an_own_cell_is_held_to_the_dtype_of_the_model():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(3 + 4, 4)

        def forward(self, x, h):
            h = torch.tanh(self.mix(torch.cat([x, h], 1)))
            return h, h

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell()

        def forward(self, x):
            h = x.new_zeros(len(x), 4)
            for step in x.unbind(1):
                _, h = self.cell(step, h)
            return h

    x, y = torch.randn(3, 5, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    certificate = rl.weights(Loop().double(), x, y, loss=nn.functional.mse_loss).certificate
    assert certificate.state == "passed"
    assert "loss" in certificate.certified
    assert max(check.bound for check in certificate.checks) < 1e-12
