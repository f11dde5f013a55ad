"""Which samples later traces of a torch model run, compare and leave out, beside `contract/every_adapter`."""

import pytest
import torch
from specimen import SAMPLES, STEPS
from specimens_torch import Chain, Stacked, data
from torch import nn
from torch.nn import functional

import rnnlens as rl

pytestmark = pytest.mark.check


class TimeFirst(nn.Module):
    """A model whose first axis is time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def stacked():
    """Return two bidirectional LSTM layers with the ids and floats that they read, and targets."""
    torch.manual_seed(0)
    return Stacked(nn.LSTM), *data(SAMPLES, STEPS, ids=True).values()


def run_trace(model, x, y, **options):
    return rl.trace(model, x, y, loss=functional.mse_loss, **options)


class WithStates(Chain):
    """A model that returns outputs, final states (layer, sample, unit) as torch does, and a scalar."""

    def forward(self, x):
        steps, states = self.lstm(x)
        return self.top(steps), states, steps.square().mean()


def test_outputs_without_samples_first_are_left_out_of_a_part():
    torch.manual_seed(0)
    model, x, y = WithStates(), torch.randn(SAMPLES, 7, 3), torch.randn(SAMPLES, 7, 2)
    certificates = [
        rl.trace(model, x, y, loss=lambda out, y: functional.mse_loss(out[0], y)).certificate for _ in range(3)
    ]
    assert [certificate.state for certificate in certificates] == ["passed"] * 3
    assert len({(certificate.certified, certificate.uncertified) for certificate in certificates}) == 1
    unlabelled = [rl.trace(model, x, loss=lambda out: out[0].sum() + out[2]).certificate for _ in range(3)]
    assert [(certificate.state, certificate.samples) for certificate in unlabelled] == [("passed", "")] * 3


def test_a_later_trace_runs_the_model_twice_the_second_time_on_few_samples():
    model, x, y = stacked()
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    run_trace(model, x, y)
    sizes.clear()
    run_trace(model, x, y)
    assert sizes == [SAMPLES, 2]


def test_all_samples_are_compared_again_after_the_model_has_changed():
    model, x, y = stacked()
    run_trace(model, x, y)
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    run_trace(model, x, y)
    assert sizes == [SAMPLES, SAMPLES]


def test_all_samples_are_compared_in_training_mode():
    model, x, y = stacked()
    certificates = [run_trace(model, x, y, training=True).certificate for _ in range(2)]
    assert [(certificate.state, certificate.samples) for certificate in certificates] == [("passed", "")] * 2


def test_a_model_whose_first_axis_is_time_is_certified_with_all_samples():
    torch.manual_seed(1)
    model, x, y = TimeFirst(), torch.randn(SAMPLES, 20, 3), torch.randn(SAMPLES, 20, 1)
    certificates = [run_trace(model, x, y).certificate for _ in range(3)]
    assert [(certificate.state, certificate.samples) for certificate in certificates] == [("passed", "")] * 3


def test_a_loss_that_reads_the_recurrent_weights_directly_passes():
    model, x, y = stacked()

    def penalised_loss(output, target):
        return functional.mse_loss(output, target) + model.rnn.weight_hh_l0.square().sum()

    certificates = [rl.trace(model, x, y, loss=penalised_loss).certificate for _ in range(2)]
    assert [certificate.state for certificate in certificates] == ["passed"] * 2
    assert certificates[1].certified == certificates[0].certified
