"""Torch's own names of parameters, ``rnn.weight_hh_l0``, name a weight in a call and in its result."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.errors import LayerNotFoundError

X, Y = torch.tensor([[0, 3, 1], [2, 2, 4]]), torch.zeros(2, 2).double()
mse = nn.functional.mse_loss


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(5, 3), nn.RNN(3, 4, batch_first=True, **options)
        self.out = nn.Linear(4 * (2 if self.rnn.bidirectional else 1), 2)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0][:, -1])


def model_and_truth(**options):
    torch.manual_seed(0)
    model = Model(**options).double()
    parameters = dict(model.named_parameters())
    truth = torch.autograd.grad(mse(model(X), Y), list(parameters.values()))
    return model, dict(zip(parameters, truth, strict=True))


@pytest.mark.parametrize("name", ["emb.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_hh_l0", "out.bias"])
def test_the_gradient_of_a_parameter_by_torchs_name(name):
    model, truth = model_and_truth()
    gradient = rl.gradients(model, X, Y, loss=mse, wrt=name)
    expected = truth[name].T if name.startswith("rnn.weight") else truth[name]
    np.testing.assert_allclose(np.squeeze(gradient.values), expected, atol=1e-14)
    assert gradient.certificate.state == "passed"


def test_a_result_has_weights_by_a_dot_and_an_error_names_those_of_the_layer():
    model, truth = model_and_truth()
    gradients = rl.gradients(model, X, Y, loss=mse, wrt="weights")
    np.testing.assert_allclose(gradients["emb.weight"].values, truth["emb.weight"], atol=1e-14)
    np.testing.assert_array_equal(gradients["rnn.recurrent_kernel"], gradients["rnn/recurrent_kernel"])
    with pytest.raises(LayerNotFoundError, match=r"(?s)'rnn\.weight_hh_l0'.*result\['rnn'\].*'recurrent_kernel'"):
        gradients["rnn.weight_hh_l0"]
    with pytest.raises(LayerNotFoundError, match=r"(?s)result\['emb'\]\[\.\.\.\], did you mean 'weight'"):
        rl.weights(model)["emb.weight"]


def test_one_direction_of_a_weight_is_refused_with_the_name_of_the_weight():
    model, truth = model_and_truth(bidirectional=True)
    with pytest.raises(LayerNotFoundError, match="rnn/recurrent_kernel, which has the weights of both directions"):
        rl.gradients(model, X, Y, loss=mse, wrt="rnn.weight_hh_l0_reverse")
    both = rl.gradients(model, X, Y, loss=mse, wrt="rnn/recurrent_kernel")
    backward = both.sel(direction="backward").values
    np.testing.assert_allclose(np.squeeze(backward), truth["rnn.weight_hh_l0_reverse"].T, atol=1e-14)
