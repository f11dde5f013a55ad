"""Certificates that pass despite rounding, fail at small faults, cannot be given, or are switched off."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from planted_cells import plant_scaled_gradient
from torch import nn
from torch.nn import functional

import rnnlens as rl
from rnnlens.errors import SelfCheckWarning
from rnnlens.recurrence.cells import SimpleRNN

pytestmark = pytest.mark.check


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Restless(Plain):
    """A model that draws from a generator whose state cannot be restored."""

    def forward(self, x):
        import secrets

        return super().forward(x) * (1 + secrets.randbelow(1000) / 1000)


class WithoutGradients(Plain):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


def trace_certificate(model, **options):
    torch.manual_seed(0)
    x, y = torch.randn(3, 5, 3), torch.randn(3, 2)
    return rl.trace(model, x, y, loss=functional.mse_loss, **options).certificate


@pytest.mark.filterwarnings("ignore::rnnlens.errors.SelfCheckWarning")
def test_a_model_that_differs_from_itself_is_not_certified():
    certificate = trace_certificate(Restless())
    assert certificate.state == "could not"
    assert "two reference runs" in certificate.why


def test_a_jacobian_that_could_not_be_compared_warns():
    x = torch.randn(3, 5, 3)
    with pytest.warns(SelfCheckWarning, match="two reference runs of the model give different numbers"):
        jacobian = rl.jacobian(Restless(), x)
    assert jacobian.certificate.state == "could not"
    given = [torch.ones(3, 4), torch.ones(3, 4)]
    known = rl.jacobian(Plain(), x, initial_state={"rnn": given}).certificate  # no warning: the caller knows
    assert (known.state, known.why[:22]) == ("could not", "initial_state= was set")


def test_a_forward_without_gradients_is_not_certified():
    assert trace_certificate(WithoutGradients()).state == "could not"


def test_given_states_are_not_certified():
    certificate = trace_certificate(Plain(), initial_state={"rnn": [torch.ones(3, 4), torch.ones(3, 4)]})
    assert certificate.state == "could not"
    assert "initial_state= was set" in certificate.why


@pytest.mark.parametrize(
    ("verb", "cell"), [(rl.trace, nn.RNN), (rl.trace, nn.LSTM), (rl.weights, nn.RNN), (rl.weights, nn.GRU)]
)
def test_saturated_units_are_no_fault(verb, cell):
    """The certificate passes although 1 - h^2 at h = 1 - 1e-7, and all computed from it, has only nine digits."""
    torch.manual_seed(0)
    model = Plain().double()
    model.rnn = cell(3, 4, batch_first=True).double()
    with torch.no_grad():
        model.rnn.bias_ih_l0[:] = 8.0
    x, y = torch.randn(3, 5, 3).double(), torch.randn(3, 2).double()
    result = verb(model, x, y, loss=functional.mse_loss)
    assert all(check.ok for check in result.checks)
    assert result.certificate.state == "passed"


def test_a_fault_in_saturated_units_is_found(monkeypatch):
    """The certificate fails if the small gradient through saturated units is scaled by 1 + 1e-6."""
    torch.manual_seed(0)
    model = Plain().double()
    model.rnn = nn.RNN(3, 4, batch_first=True).double()
    with torch.no_grad():
        model.rnn.bias_ih_l0[:] = 4.0
    plant_scaled_gradient(monkeypatch, 1 + 1e-6)
    with pytest.warns(rl.errors.SelfCheckWarning):
        trace = rl.trace(model, torch.randn(3, 5, 3).double(), torch.randn(3, 2).double(), loss=functional.mse_loss)
    assert trace.certificate.state == "failed"


def saturated_model(cell, bias, rows=slice(None), dtype=torch.float64):
    """Return a model whose bias saturates its units, inputs (sample, time, feature) and targets (sample, unit)."""
    torch.manual_seed(0)
    model = Plain()
    model.rnn = cell(3, 4, batch_first=True)
    with torch.no_grad():
        model.rnn.bias_ih_l0[rows] += bias
    return model.to(dtype), torch.randn(3, 30, 3, dtype=dtype), torch.randn(3, 2, dtype=dtype)


def chaotic_model(gain):
    """Return an RNN, chaotic if gain > 1 (Sompolinsky, Crisanti, Sommers 1988, doi:10.1103/PhysRevLett.61.259)."""
    model = Plain()
    model.rnn, model.head = nn.RNN(3, 32, batch_first=True), nn.Linear(32, 2)
    with torch.no_grad():
        model.rnn.weight_hh_l0.normal_(0.0, gain / 32**0.5)
    return model


@pytest.mark.parametrize("measure", [None, "norm"])
@pytest.mark.parametrize(("cell", "bias", "rows"), [(nn.RNN, 8.0, slice(None)), (nn.GRU, 12.0, slice(4, 8))])
def test_a_jacobian_of_saturated_units_is_no_fault(cell, bias, rows, measure):
    """Certificates pass for a GRU whose update gate keeps all but 6e-6 of the state: what it adds loses five digits."""
    model, x, y = saturated_model(cell, bias, rows)
    jacobian, trace = rl.jacobian(model, x, measure=measure), rl.trace(model, x, y, loss=functional.mse_loss)
    assert [result.certificate.state for result in (jacobian, trace)] == ["passed", "passed"]
    assert all(check.ok for result in (jacobian, trace) for check in result.checks)


@pytest.mark.parametrize("measure", [None, "norm"])
def test_a_fault_in_a_jacobian_of_saturated_units_is_found(monkeypatch, measure):
    """The certificate fails if the Jacobian of a saturated RNN's step by its state is scaled by 1 + 1e-6."""
    original = SimpleRNN.linear_system

    def faulty(self, *arguments):
        system = original(self, *arguments)
        for term in system.terms["state"]:
            term.coefficients[...] *= 1 + 1e-6
        return system

    monkeypatch.setattr(SimpleRNN, "linear_system", faulty)
    model, x, _ = saturated_model(nn.RNN, 5.0)
    with pytest.warns(rl.errors.SelfCheckWarning):
        assert rl.jacobian(model, x, measure=measure).certificate.state == "failed"


def test_what_rounding_explains_altogether_is_not_said_to_be_certified():
    model, x, y = saturated_model(nn.RNN, 8.0, dtype=torch.float32)
    with pytest.warns(rl.errors.SelfCheckWarning, match="no larger than what rounding explains"):
        jacobian = rl.jacobian(model, x)
    assert jacobian.certificate.sentence == "could not certify: jacobian (no larger than what rounding explains)"
    certificate = rl.trace(model, x, y, loss=functional.mse_loss).certificate
    assert certificate.state == "passed"
    assert "rnn weight gradients (no larger than what rounding explains)" in certificate.uncertified


def test_chaos_is_no_fault():
    """Certificates pass though chaos amplifies any rounding difference: both runs execute exactly the same kernels."""
    torch.manual_seed(0)
    model, x, y = chaotic_model(gain=3.0), torch.randn(3, 100, 3), torch.randn(3, 2)
    trace = rl.trace(model, x, y, loss=functional.mse_loss)
    hidden_grad = rl.gradients(model, x, y, loss=functional.mse_loss, wrt="rnn.hidden")
    jacobian = rl.jacobian(model.double(), x.double(), measure="norm")
    assert [result.certificate.state for result in (trace, hidden_grad, jacobian)] == ["passed", "passed", "passed"]


def test_gradients_that_grow_beyond_all_bounds_are_no_fault():
    """A certificate passes if some gradients are infinite in float32 and rounding grew at each step in the others."""
    torch.manual_seed(0)
    model = chaotic_model(gain=6.0)
    trace = rl.trace(model, torch.randn(4, 300, 3), torch.randn(4, 2), loss=functional.mse_loss)
    assert not np.isfinite(trace["rnn"].hidden_grad).all()
    assert trace.certificate.state == "passed"


def test_dropout_is_drawn_alike():
    model = Plain()
    model.rnn = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
    assert trace_certificate(model, training=True, seed=3).state == "passed"


def test_when_it_is_asked_for():
    model = Plain()
    with rl.options(certify="never"):
        assert trace_certificate(model).state == "off"
    with rl.options(certify="first"):
        first, later = (trace_certificate(model) for _ in range(2))
        assert later == replace(first, earlier=True)
        assert later.sentence == first.sentence.replace("against torch", "against torch at an earlier call")
    with rl.options(certify="always"):
        assert [trace_certificate(model).earlier for _ in range(2)] == [False, False]


def test_a_target_inside_the_model_is_not_certified():
    input_grad = rl.gradients(Plain(), torch.randn(3, 5, 3), of="rnn.hidden", reduce="sum", wrt="input")
    assert input_grad.attrs["certificate"].startswith("could not certify: rnn.hidden lies inside")


def test_of_a_data_set_the_first_batch_is_certified():
    x, y = torch.randn(7, 5, 3), torch.randn(7, 2)
    gradients = rl.gradients(Plain(), x, y, loss=functional.mse_loss, batch_size=3)
    assert gradients.certificate.state == "passed"


def test_a_failed_jacobian_fails_at_every_call_until_it_passes(monkeypatch):
    from rnnlens.verbs import jacobian

    model, x, execute = Plain(), torch.randn(3, 5, 3), jacobian.execute

    def wrong(*arguments):
        result = execute(*arguments)
        result.values *= 2
        return result

    monkeypatch.setattr(jacobian, "execute", wrong)
    for _ in range(2):
        with pytest.warns(SelfCheckWarning):
            assert rl.jacobian(model, x).attrs["certificate"].startswith("NOT certified")
    monkeypatch.undo()
    first, later = (rl.jacobian(model, x).certificate for _ in range(2))
    assert (first.state, first.earlier) == ("passed", False)
    assert later == replace(first, earlier=True)


def test_a_failure_ends_what_an_earlier_call_passed(monkeypatch):
    from rnnlens.verbs import jacobian

    model, x, execute = Plain(), torch.randn(3, 5, 3), jacobian.execute
    rl.jacobian(model, x)
    with monkeypatch.context() as patched, rl.options(certify="always"):
        patched.setattr(jacobian, "execute", lambda *args: execute(*args) * 2)
        with pytest.warns(SelfCheckWarning):
            assert rl.jacobian(model, x).certificate.state == "failed"
    assert not rl.jacobian(model, x).certificate.earlier
    assert rl.jacobian(model, x).certificate.earlier


def test_the_mean_over_batches_has_the_certificate_of_a_later_batch_that_failed(monkeypatch):
    from rnnlens.verbs import jacobian

    def wrong_of_one_sample(labels, out, execute=jacobian.execute):
        return execute(labels, out) * (2 if labels.plan.network.samples == 1 else 1)

    monkeypatch.setattr(jacobian, "execute", wrong_of_one_sample)
    with pytest.warns(SelfCheckWarning):
        mean = rl.jacobian(Plain(), torch.randn(3, 5, 3), across="mean", batch_size=2)
    assert mean.certificate.state == "failed"


@pytest.mark.parametrize("options", [{"rtol": 1e-9}, {"initial_state": {"rnn": [np.zeros((3, 4))] * 2}}])
def test_a_call_that_could_not_be_certified_does_not_repeat_another_ones_certificate(options):
    model, x = Plain(), torch.randn(3, 5, 3)
    rl.jacobian(model, x)
    assert rl.jacobian(model, x, **options).certificate.state == "could not"


def test_the_first_of_each_kind_of_input_is_certified():
    class Repeated(Plain):
        def forward(self, x, times=1):
            return super().forward(x) * times

    model, x = Repeated(), torch.randn(3, 5, 3)
    certificates = [rl.jacobian(model, (x, times), wrt="input").attrs["certificate"] for times in (1, 2, 2)]
    assert ["at an earlier call" in text for text in certificates] == [False, False, True]


@pytest.mark.parametrize("placed", [True, False])
def test_only_what_was_compared_is_listed(monkeypatch, placed):
    from rnnlens.adapters.registry import adapter_for
    from rnnlens.verbs import traced_layers

    def add_without_boundaries(claim, layer, directions, traced, add=traced_layers._add_to_claim):
        absent = {"framework_input_grad": None, "framework_initial_state_grad": None}
        add(claim, layer, [replace(call, **absent) for call in directions], traced)

    model = Plain()
    monkeypatch.setattr(traced_layers, "_add_to_claim", add_without_boundaries)
    if not placed:
        monkeypatch.setattr(type(adapter_for(model).facts(model)), "weight_location", lambda *arguments: None)
    certificate = trace_certificate(model)
    assert certificate.state == "passed"
    swept = {"hidden_grad", "cell_grad", "gate_grad", "input_grad", "initial_state_grad", "final_state_grad"}
    assert not swept & set(certificate.certified)
    assert swept <= set(certificate.resting if placed else certificate.uncertified)
    assert not swept & set(certificate.uncertified if placed else certificate.resting)


def test_gradients_at_an_input_of_ids_are_not_listed():
    class Ids(Plain):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, ids):
            return super().forward(self.table(ids))

    ids, y = torch.randint(0, 5, (3, 5)), torch.randn(3, 2)
    certificate = rl.trace(Ids(), ids, y, loss=functional.mse_loss).certificate
    assert "gradients of weights" in certificate.certified
    assert not any("inputs" in name for name in certificate.certified)


def test_a_first_state_in_float32_does_not_fail_a_model_in_float64():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(3 + 4, 4)

        def forward(self, x, h):
            return torch.tanh(self.mix(torch.cat([x, h], 1)))

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = Cell(), nn.Linear(4, 2)

        def forward(self, x):
            h = torch.zeros(len(x), 4)  # float32 for data of every dtype
            for step in x.unbind(1):
                h = self.cell(step, h)
            return self.head(h)

    x, y = torch.randn(3, 5, 3, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    certificate = rl.trace(Loop().double(), x, y, loss=functional.mse_loss).certificate
    assert certificate.state == "passed"
    bounds = {check.name: check.bound for check in certificate.checks}
    assert bounds["reference initial state gradient"] > 1e-7 > 1e-12 > bounds["reference outputs"]
