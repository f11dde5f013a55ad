"""What a message says of a program is true, and what it says to type works."""

import ast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import rnnlens as rl


class Recurrent(nn.Module):
    def __init__(self, *, bidirectional=False):
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(8 if bidirectional else 4, 2)

    def forward(self, x):
        return self.head(self.gru(x)[0])


class ByLength(Recurrent):
    """A model that takes sequences and their lengths as one argument, as a data loader yields them."""

    def forward(self, batch):
        x, lengths = batch
        return super().forward(x)[torch.arange(len(x)), lengths - 1]


class Transducer(nn.Module):
    """Encoder of sounds and predictor of labels; the joint network has an output for each pair of their steps."""

    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = nn.LSTM(4, 6, batch_first=True), nn.GRU(3, 6, batch_first=True)
        self.table, self.joint = nn.Embedding(5, 3), nn.Linear(6, 5)

    def forward(self, sounds, labels):
        encoded, predicted = self.encoder(sounds)[0], self.predictor(self.table(labels))[0]
        return self.joint(torch.tanh(encoded[:, :, None] + predicted[:, None])).log_softmax(-1)


def noise(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def made(model):
    torch.manual_seed(0)
    return model().double().eval()


def test_a_tuple_that_is_one_argument():
    model, x = made(ByLength), (noise(5, 7, 3), torch.tensor([4, 7, 2, 6, 5]))
    with pytest.raises(TypeError, match="each part of a tuple is an argument, and the forward takes one") as caught:
        rl.trace(model, x)
    assert str(caught.value).endswith("(x,) in place of x")
    assert rl.trace(model, (x,))["gru"].hidden.shape == (5, 7, 4)
    gradient = rl.gradients(model, (x,), of="output", at={"unit": 0}, reduce="sum", wrt="input")
    leaf = x[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(model((leaf, x[1]))[:, 0].sum(), leaf)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_pruned_weights_that_a_pass_without_gradients_left_behind(bidirectional, is_trained):
    model, x, y = made(lambda: Recurrent(bidirectional=bidirectional)), noise(5, 7, 3), noise(5, 7, 2)
    prune.l1_unstructured(model.gru, "weight_hh_l0", 0.4)
    model.gru.weight_hh_l0_orig.requires_grad_(is_trained)
    with torch.no_grad():
        model(x)
    gradients = rl.gradients(model, x, y, loss=functional.mse_loss)
    frozen = [name for name, reason in gradients.flags.items() if reason.code == "frozen"]
    assert frozen == ([] if is_trained else ["gru/recurrent_kernel", "gru/weight_hh_l0_orig"])


def test_the_axes_to_type_for_the_output_of_a_transducer():
    model, sounds, labels = made(Transducer), noise(4, 7, 4), torch.randint(0, 5, (4, 3))
    with pytest.raises(rl.errors.InputError, match="axis_1 and axis_2 of 'output' vary with the steps") as caught:
        rl.jacobian(model, (sounds, labels), wrt="input[0]")
    hint = str(caught.value).rpartition("try:      say ")[2]
    choices = [ast.literal_eval(choice.removeprefix("axes=")) for choice in hint.split(", or ")]
    assert len(choices) == 2
    full = torch.autograd.functional.jacobian(lambda x: model(x, labels), sounds)
    own = torch.stack([full[i, :, :, :, i] for i in range(4)])  # sample, sound, label, class, in_time, in_feature
    for choice, order in zip(choices, ((0, 1, 2, 3, 4, 5), (0, 2, 1, 3, 4, 5)), strict=True):
        jacobian = rl.jacobian(model, (sounds, labels), wrt="input[0]", axes=choice)
        assert jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
        np.testing.assert_allclose(jacobian, own.permute(order).reshape(jacobian.shape), rtol=0, atol=1e-12)


def test_a_target_of_two_columns_for_a_loss_of_ones_own():
    """Knowledge tracing: which skill was asked for, and whether the answer was right."""
    model, x = made(Recurrent), noise(128, 7, 3)
    y = torch.stack([torch.zeros(128, 7), torch.ones(128, 7), torch.ones(128, 7)], -1).long()

    def loss(output, y):
        return functional.mse_loss(output.gather(2, y[..., :1]), y[..., 1:2].double())

    for task, expected in ((None, "of 2 values"), ("classes", "one class, 0 to 1")):
        with pytest.raises(rl.errors.InputError, match="3 values of y for each prediction") as caught:
            rl.diagnose(model, x, y, loss=loss, task=task)
        assert expected in str(caught.value)
        assert task or "rl.diagnose(model, x), without y and loss" in str(caught.value)
    assert str(rl.diagnose(model, x)).startswith("The model depends on the last ")
