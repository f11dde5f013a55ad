"""Traces after the first are certified on some of the samples, and on all samples if those show a difference."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import rnnlens as rl
from rnnlens.verbs import recurrent_layers, traced_layers

pytestmark = pytest.mark.check

SAMPLES = 32


class Stacked(nn.Module):
    """Embedded ids and a float input, two bidirectional layers, and a head at every step."""

    def __init__(self, layer=nn.LSTM):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 3)
        self.rnn = layer(6, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.forwards = 0

    def forward(self, ids, x):
        self.forwards += 1
        return self.head(self.rnn(torch.cat([self.table(ids), x], -1))[0])


class Chain(nn.Module):
    """A chain of library layers: an LSTM and a linear head."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Centred(nn.Module):
    """A model whose samples depend on each other: the mean over the batch is subtracted."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x - x.mean(0))[0])


class TimeFirst(nn.Module):
    """A model whose first axis is time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def stacked_data(samples=SAMPLES):
    torch.manual_seed(1)
    ids, x = torch.randint(0, 9, (samples, 7)), torch.randn(samples, 7, 3)
    return (ids, x), torch.randn(samples, 7, 2)


def run_trace(model, x, y, **options):
    return rl.trace(model, x, y, loss=functional.mse_loss, **options)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_later_traces_compare_other_samples_each_time_and_give_the_same_numbers(layer):
    model, (x, y) = Stacked(layer), stacked_data()
    first, *later = (run_trace(model, x, y) for _ in range(6))
    assert (first.certificate.state, first.certificate.samples) == ("passed", "")
    assert [trace.certificate.state for trace in later] == ["passed"] * 5
    assert len({trace.certificate.samples for trace in later}) > 2
    assert all(trace.certificate.samples.endswith("of 32") for trace in later)
    for trace in later:
        assert {check.name for check in trace.certificate.checks} >= {
            "reference outputs",
            "reference input gradient",
            "reference weight gradients",
        }
        for name in first:
            for key, values in first[name].dataset.data_vars.items():
                np.testing.assert_array_equal(trace[name].dataset[key].values, values.values)


def test_a_chain_of_library_layers_is_certified_with_a_part_too():
    torch.manual_seed(0)
    model = Chain()
    x, y = torch.randn(SAMPLES, 7, 3), torch.randn(SAMPLES, 7, 2)
    certificates = [run_trace(model, x, y).certificate for _ in range(4)]
    assert [certificate.state for certificate in certificates] == ["passed"] * 4
    assert certificates[0].samples == ""
    assert all(certificate.samples for certificate in certificates[1:])


class WithStates(Chain):
    """A model that returns outputs, final states (layer, sample, unit) as torch does, and a scalar."""

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


def test_all_samples_are_compared_where_it_is_asked_for_and_in_small_batches():
    model, (x, y) = Stacked(), stacked_data()
    with rl.options(certify="always"):
        assert [run_trace(model, x, y).certificate.samples for _ in range(3)] == [""] * 3
    model, (x, y) = Stacked(), stacked_data(15)
    assert [run_trace(model, x, y).certificate.samples for _ in range(3)] == [""] * 3


def test_all_samples_are_compared_in_training_mode():
    model, (x, y) = Stacked(), stacked_data()
    certificates = [run_trace(model, x, y, training=True).certificate for _ in range(2)]
    assert [(certificate.state, certificate.samples) for certificate in certificates] == [("passed", "")] * 2


def test_other_shapes_layers_and_losses_begin_with_all_samples():
    model, (x, y) = Stacked(), stacked_data()
    run_trace(model, x, y)
    assert run_trace(model, x, y, layers=["rnn[1]"]).certificate.samples == ""
    assert rl.trace(model, x, y, loss=functional.l1_loss).certificate.samples == ""
    shorter = tuple(leaf[:, :5] for leaf in x)
    assert run_trace(model, shorter, y[:, :5]).certificate.samples == ""
    assert run_trace(model, x, y).certificate.samples != ""


@pytest.mark.parametrize("model_class", [Centred, TimeFirst])
def test_a_model_whose_first_axis_cannot_be_cut_is_certified_with_all_samples(model_class):
    torch.manual_seed(1)
    model, x, y = model_class(), torch.randn(SAMPLES, 20, 3), torch.randn(SAMPLES, 20, 1)
    certificates = [run_trace(model, x, y).certificate for _ in range(3)]
    assert [(certificate.state, certificate.samples) for certificate in certificates] == [("passed", "")] * 3


def test_a_loss_that_reads_the_recurrent_weights_directly_passes():
    model, (x, y) = Stacked(), stacked_data()

    def penalised_loss(output, target):
        return functional.mse_loss(output, target) + model.rnn.weight_hh_l0.square().sum()

    certificates = [rl.trace(model, x, y, loss=penalised_loss).certificate for _ in range(2)]
    assert [certificate.state for certificate in certificates] == ["passed"] * 2
    assert certificates[1].certified == certificates[0].certified


@pytest.mark.filterwarnings("ignore::rnnlens.errors.SelfCheckWarning")
@pytest.mark.parametrize("quantity", ["input_grad", "gate_grad"])
def test_a_fault_in_a_later_trace_is_found(monkeypatch, quantity):
    model, (x, y) = Stacked(), stacked_data()
    run_trace(model, x, y)
    adjoint = recurrent_layers.adjoint

    def wrong_adjoint(*args, **options):
        result = adjoint(*args, **options)
        getattr(result, quantity)[...] *= 1.01
        return result

    monkeypatch.setattr(recurrent_layers, "adjoint", wrong_adjoint)
    certificate = run_trace(model, x, y).certificate
    assert (certificate.state, certificate.samples) == ("failed", "")


@pytest.mark.filterwarnings("ignore::rnnlens.errors.SelfCheckWarning")
def test_a_fault_in_the_labels_of_a_later_trace_is_found(monkeypatch):
    model, (x, y) = Stacked(), stacked_data()
    run_trace(model, x, y)
    labelled_layer = traced_layers.labelled_layer

    def wrongly_labelled_layer(arrays, **options):
        return labelled_layer({**arrays, "gate_grad": np.roll(arrays["gate_grad"], 1, axis=-2)}, **options)

    monkeypatch.setattr(traced_layers, "labelled_layer", wrongly_labelled_layer)
    assert run_trace(model, x, y).certificate.state == "failed"


def test_the_samples_compared_are_in_the_sentence_and_survive_a_file(tmp_path):
    model, (x, y) = Stacked(), stacked_data()
    run_trace(model, x, y)
    trace = run_trace(model, x, y)
    sentence = f"certified against torch on {trace.certificate.samples}, and on all at an earlier call: "
    assert sentence in trace.certificate.sentence
    trace.save(tmp_path / "trace.nc")
    assert rl.open(tmp_path / "trace.nc").certificate == trace.certificate
