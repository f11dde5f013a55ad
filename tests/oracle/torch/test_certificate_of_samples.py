"""Which samples later traces of a torch model run, compare and leave out, beside `contract/every_adapter`."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import rnnlens as rl

pytestmark = pytest.mark.check

SAMPLES = 32


class Stacked(nn.Module):
    """Embedded ids and a float input, two bidirectional layers, and a head at every step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 3)
        self.rnn = nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, ids, x):
        return self.head(self.rnn(torch.cat([self.table(ids), x], -1))[0])


class TimeFirst(nn.Module):
    """A model whose first axis is time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def stacked_data():
    torch.manual_seed(1)
    ids, x = torch.randint(0, 9, (SAMPLES, 7)), torch.randn(SAMPLES, 7, 3)
    return (ids, x), torch.randn(SAMPLES, 7, 2)


def run_trace(model, x, y, **options):
    return rl.trace(model, x, y, loss=functional.mse_loss, **options)


class WithStates(nn.Module):
    """A model that returns outputs, final states (layer, sample, unit) as torch does, and a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        steps, states = self.rnn(x)
        return self.head(steps), states, steps.square().mean()


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
    model, (x, y) = Stacked(), stacked_data()
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    run_trace(model, x, y)
    sizes.clear()
    run_trace(model, x, y)
    assert sizes == [SAMPLES, 2]


def test_all_samples_are_compared_again_after_the_model_has_changed():
    model, (x, y) = Stacked(), stacked_data()
    run_trace(model, x, y)
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    run_trace(model, x, y)
    assert sizes == [SAMPLES, SAMPLES]


def test_all_samples_are_compared_in_training_mode():
    model, (x, y) = Stacked(), stacked_data()
    certificates = [run_trace(model, x, y, training=True).certificate for _ in range(2)]
    assert [(certificate.state, certificate.samples) for certificate in certificates] == [("passed", "")] * 2


def test_a_model_whose_first_axis_is_time_is_certified_with_all_samples():
    torch.manual_seed(1)
    model, x, y = TimeFirst(), torch.randn(SAMPLES, 20, 3), torch.randn(SAMPLES, 20, 1)
    certificates = [run_trace(model, x, y).certificate for _ in range(3)]
    assert [(certificate.state, certificate.samples) for certificate in certificates] == [("passed", "")] * 3


def test_a_loss_that_reads_the_recurrent_weights_directly_passes():
    model, (x, y) = Stacked(), stacked_data()

    def penalised_loss(output, target):
        return functional.mse_loss(output, target) + model.rnn.weight_hh_l0.square().sum()

    certificates = [rl.trace(model, x, y, loss=penalised_loss).certificate for _ in range(2)]
    assert [certificate.state for certificate in certificates] == ["passed"] * 2
    assert certificates[1].certified == certificates[0].certified
