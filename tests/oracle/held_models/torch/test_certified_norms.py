"""Certificates of a time Jacobian computed as norms: they check the values before the norms are taken."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.recurrence.reductions import REDUCTIONS
from rnnlens.verbs.recurrent_layers import ReplayedCall
from rnnlens.verbs.time_jacobian.segments import Segment


class Net(nn.Module):
    """Recurrent layers with a head at every step, or only at the last."""

    def __init__(self, cell=nn.LSTM, outputs=3, last=False, **options):
        super().__init__()
        self.rnn, self.last = cell(3, 4, batch_first=True, **options), last
        self.head = nn.Linear(8 if self.rnn.bidirectional else 4, outputs)

    def forward(self, x):
        h = self.rnn(x)[0]
        return self.head(h[:, -1] if self.last else h).tanh()


class Loop(nn.Module):
    """A cell whose input includes its previous output, computed by a head."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 4), nn.Linear(4, 2)

    def forward(self, x):
        h, y, outputs = x.new_zeros(len(x), 4), x.new_zeros(len(x), 2), []
        for t in range(x.shape[1]):
            h = self.cell(torch.cat([x[:, t], y], 1), h)
            y = self.head(h)
            outputs.append(y)
        return torch.stack(outputs, 1)


MODELS = {
    "one layer": Net,
    "last step": lambda: Net(nn.GRU, last=True),
    "two layers": lambda: Net(num_layers=2),
    "both directions": lambda: Net(nn.RNN, bidirectional=True),
    "feedback": Loop,
}
MEASURES = {
    "norm": {"measure": "norm"},
    "spectral": {"measure": "spectral", "at": {"in_time": [1, 4]}},
    "mean of magnitudes over samples": {"measure": "abs_mean", "across": "mean"},
    "norm of combinations": {"measure": "norm", "reduce": [[1.0, -2.0], [0.5, 3.0]]},
    "sketch": {"sketch": 4},
}


def certified_jacobian(model, **options):
    torch.manual_seed(0)
    network = model().double()
    x = torch.randn(3, 6, 3, dtype=torch.float64)
    rows = options.pop("reduce", None)
    if rows is not None:
        width = network(x).shape[-1]
        options["reduce"] = np.array([[*row, 1.0][:width] for row in rows])
    with rl.options(certify="always"):
        return rl.jacobian(network, x, **options)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", MEASURES)
def test_it_passes(model, options):
    jacobian = certified_jacobian(MODELS[model], **MEASURES[options])
    assert jacobian.attrs["certificate"].startswith("certified against torch")
    assert "before they were measured" in jacobian.attrs["certificate"]
    reference_checks = [check for check in jacobian.checks if check.name == "reference jacobian"]
    assert [check.ok and check.residual < 1e-12 for check in reference_checks] == [True]


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_signs_go_the_way_that_the_rows_went(mode):
    jacobian = certified_jacobian(MODELS["one layer"], measure="norm", mode=mode)
    assert jacobian.mode == mode
    assert jacobian.attrs["certificate"].startswith("certified against torch")


def scale_result(original):
    return lambda *args: original(*args) * 1.01


def exchange_units(original):
    return lambda self, state, times, block, **options: original(self, state, times, block[..., ::-1].copy(), **options)


FAULTS = {
    "segments 1 % larger": (Segment, "at_every_step", scale_result, "one layer", "reverse"),
    "segments 1 % larger, forward": (Segment, "at_every_step", scale_result, "one layer", "forward"),
    "segments below 1 % larger": (Segment, "apply", scale_result, "two layers", "reverse"),
    "units exchanged": (ReplayedCall, "points", exchange_units, "one layer", "reverse"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", [{"measure": "norm"}, {"measure": "abs_mean", "across": "mean"}])
def test_a_planted_fault_is_named(fault, options, monkeypatch):
    owner, name, plant, model, mode = FAULTS[fault]
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    with pytest.warns(rl.errors.SelfCheckWarning, match="differ from the reference run of the model"):
        jacobian = certified_jacobian(MODELS[model], mode=mode, **options)
    assert jacobian.attrs["certificate"].startswith("NOT certified")


@pytest.mark.parametrize("kind", ["norm", "spectral", "abs_mean"])
@pytest.mark.parametrize(("outputs", "factor"), [(1, 0.99), (1, 1.01), (3, 0.2)])
def test_a_wrong_measure_is_named(kind, outputs, factor, monkeypatch):
    faulty_reductions = {**REDUCTIONS, kind: lambda block: REDUCTIONS[kind](block) * factor}
    monkeypatch.setattr("rnnlens.verbs.time_jacobian.request.REDUCTIONS", faulty_reductions)
    with pytest.warns(rl.errors.SelfCheckWarning, match="contradict the measured sizes"):
        jacobian = certified_jacobian(lambda: Net(outputs=outputs), measure=kind)
    assert jacobian.attrs["certificate"].startswith("NOT certified")


def test_what_would_not_fit_is_not_certified():
    torch.manual_seed(0)

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(300, 2, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0]

    jacobian = rl.jacobian(Wide(), torch.randn(2, 3, 300), measure="norm", memory="1 KiB")
    assert jacobian.attrs["certificate"] == "could not certify: the compared rows are larger than the memory limit"


def test_a_probe_starts_at_some_of_many_steps(monkeypatch):
    monkeypatch.setattr("rnnlens.verbs.certificates.of_jacobian.PROBED_STEPS", 2)
    jacobian = certified_jacobian(MODELS["two layers"], measure="norm")
    assert jacobian.attrs["certificate"].startswith("certified against torch")
