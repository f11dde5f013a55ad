"""``rl.verify`` of cells, layers and models of torch: mistakes are caught and located, right ones are not accused."""

from __future__ import annotations

import copy

import pytest
import torch
from model_mutants import Cell, Layer, Model
from torch import nn

import rnnlens as rl
from rnnlens.cli.app import run


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def example():
    return torch.randn(3, 6, 3)


def verified(kind, mistake, **options):
    """Verify a cell, layer or model with a mistake, which the forward pass does not have."""
    if kind == "cell":
        return rl.verify(Cell(mistake), example(), state=torch.randn(3, 4), step=True, chunk=4, **options)
    if kind == "layer":
        return rl.verify(Layer(mistake), example(), state=torch.randn(3, 4), chunk=4, **options)
    if kind == "complex layer":
        start = torch.randn(3, 4, dtype=torch.complex64)
        return rl.verify(Layer(mistake, rotation=True), example(), state=start, chunk=4, **options)
    return rl.verify(Model(mistake), example(), chunk=4, **options)


@pytest.mark.parametrize(
    ("kind", "mistake", "named", "cause"),
    [
        ("cell", "no state gradient", "input", "through the state is missing"),
        ("cell", "no transpose", "input", ""),
        ("cell", "first row only", "input", "right in 1 of 3 compared samples"),
        ("cell", "weights of the first row", "weight", ""),
        ("cell", "negative", "weight", "factor -1"),
        ("cell", "recurrent weights missing", "recurrent", "recurrent is missing"),
        ("cell", "derivative of the input", "input", ""),
        ("layer", "truncated", "input", "truncated at borders of 4 steps"),
        ("layer", "a_t for a_{t+1}", "input", "A_t in place of A_{t+1}"),
        ("layer", "S_t for S_{t-1}", "gate.weight", ""),
        ("layer", "initial missing", "initial state", "initial state is missing"),
        ("layer", "last chunk missing", "input", ""),
        ("complex layer", "conjugate", "input", "complex conjugate"),
        ("model", "truncated", "input", "truncated before step 4"),
        ("model", "a_t for a_{t+1}", "input", ""),
        ("model", "S_t for S_{t-1}", "layer.gate.weight", ""),
    ],
)
def test_a_mistake_is_caught_and_located(kind, mistake, named, cause):
    verification = verified(kind, mistake)
    wrong = {tensor.name: tensor for tensor in verification.wrong}
    assert f"gradient of {named}" in wrong, str(verification)
    assert cause in verification.cause
    assert not any("output" in name or name == "last state" for name in wrong)
    assert all(tensor.error > tensor.bound for tensor in wrong.values())


def test_a_truncated_gradient_is_located_by_step_sample_and_lag():
    verification = verified("model", "truncated", dtype="float64")
    tensor = next(tensor for tensor in verification.wrong if tensor.name == "gradient of input")
    assert (tensor.length, tensor.steps, tensor.rows) == (5, tuple(range(4)), (0, 1, 2))
    assert verification.lag == 1


class Windows(nn.Module):
    """A layer that runs the first four steps and the later ones apart, without a gradient between them."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x):
        first, state = self.rnn(x[:, :4])
        return torch.cat([first, self.rnn(x[:, 4:], state.detach())[0]], 1)


def test_lengths_that_a_model_does_not_take_are_left_out():
    verdict = rl.verify(Windows(), example(), chunk=4)
    assert verdict.lengths == (5, 6)
    assert verdict.cause == "the gradient of the last step is truncated before step 4"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["cell", "layer", "complex layer", "model"])
def test_a_right_one_is_not_accused(kind, dtype):
    if kind == "complex layer" and dtype == "bfloat16":
        dtype = "float32"
    verification = verified(kind, "", dtype=dtype)
    assert verification.ok, str(verification)
    assert verification.reach == 5 or dtype == "bfloat16"


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.LSTM(3, 4), {"state": (torch.randn(1, 3, 4), torch.randn(1, 3, 4))}),
        (nn.GRU(3, 4, bidirectional=True, num_layers=2), {}),
        (nn.RNN(3, 4, nonlinearity="relu", batch_first=True), {}),
    ],
    ids=["lstm", "gru", "relu"],
)
def test_layers_of_torch_are_right(layer, options):
    x = example() if layer.batch_first else example().transpose(0, 1)
    verification = rl.verify(layer, x, chunk=4, **options)
    assert verification.ok, str(verification)


def test_token_ids_have_no_gradient_and_the_weights_do():
    ids = torch.randint(0, 7, (3, 6))
    assert rl.verify(Model(tokens=True), ids, chunk=4).ok
    assert "gradient of enter.weight" in {
        tensor.name for tensor in rl.verify(Model("truncated", tokens=True), ids, chunk=4).wrong
    }


def test_the_model_stays_as_it_is():
    model = Model("truncated").train()
    x, before, generator = example(), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    rl.verify(model, x, chunk=4)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(rl.errors.InputError, match="at least two samples"):
        rl.verify(Model(), example()[:1])
    with pytest.raises(rl.errors.InputError, match="state to begin with"):
        rl.verify(Cell(), example(), step=True)
    with pytest.raises(rl.errors.InputError, match="name of its recurrence"):
        rl.verify(lambda a, b: a, example())


def make_wrong():
    return Model("truncated")


def test_the_command_exits_with_a_code(tmp_path, capsys):
    import numpy as np

    np.savez(tmp_path / "data.npz", x=example().numpy())
    assert run(["verify", "model_mutants:Model", str(tmp_path / "data.npz"), "--chunk", "4"]) == 0
    assert "right: Model" in capsys.readouterr().out
    assert run(["verify", f"{__name__}:make_wrong", str(tmp_path / "data.npz"), "--chunk", "4"]) == 3
    assert "truncated before step 4" in capsys.readouterr().out
