"""The reach of a gradient is the memory of the recurrence, also where the loss reads every step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rnnlens as rl
from rnnlens.measures.profiles import gradient_decay, gradient_reach
from rnnlens.results.gradient_lags import norms_by_lag
from rnnlens.tracking.records import summary
from rnnlens.verbs import recurrent_layers, traced_layers

MSE = nn.functional.mse_loss


class EveryStep(nn.Module):
    def __init__(self, layer=nn.RNN, units=8, **options):
        super().__init__()
        self.rnn = layer(3, units, batch_first=True, **options)
        self.head = nn.Linear(units * (1 + options.get("bidirectional", False)), 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def traced(model, steps=40, samples=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, steps, 3, generator=generator)
    return rl.trace(model, x, torch.randn(samples, steps, 1, generator=generator), loss=MSE)


def scaled(rate):
    """Return a nearly linear RNN whose state Jacobian is ``rate`` times an orthogonal matrix."""
    torch.manual_seed(0)
    model = EveryStep()
    with torch.no_grad():
        model.rnn.weight_ih_l0.mul_(1e-4)
        model.rnn.bias_ih_l0.zero_(), model.rnn.bias_hh_l0.zero_()
        model.rnn.weight_hh_l0.copy_(rate * torch.linalg.qr(torch.randn(8, 8))[0])
    return model


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_with_a_loss_at_every_step_the_reach_is_that_of_the_recurrence(rate):
    trace = traced(scaled(rate))
    expected = gradient_reach(rate ** np.arange(20.0)[None, :])
    assert gradient_reach(norms_by_lag(trace["rnn"].dataset, None)["hidden_grad"]) == expected
    assert summary(trace)[0]["rnn/decay"] == pytest.approx(rate, rel=1e-3)
    (ax,) = rl.plot.gradient_flow(trace)
    assert ax.get_title().startswith(f"rnn: {expected} steps back")


def test_by_lag_the_gradient_is_that_of_one_output_step_by_autograd():
    torch.manual_seed(0)
    model, steps = EveryStep().double(), 12
    x, y = torch.randn(4, steps, 3).double(), torch.randn(4, steps, 1).double()
    trace = rl.trace(model, x, y, loss=MSE)
    profile = trace["rnn"].dataset["hidden_lag_gradient"].values
    state, states = torch.zeros(4, 8).double(), []
    for t in range(steps):
        pre = x[:, t] @ model.rnn.weight_ih_l0.T + state @ model.rnn.weight_hh_l0.T
        state = torch.tanh(pre + model.rnn.bias_ih_l0 + model.rnn.bias_hh_l0)
        states.append(state)
    steps_of_rows = np.isfinite(profile).sum(axis=1) - 1
    assert steps_of_rows.max() == steps - 1
    assert len(set(steps_of_rows)) == 3
    for row, t in enumerate(steps_of_rows):
        loss_of_step = ((model.head(states[t]) - y[:, t]) ** 2).sum() / y.numel()
        grads = torch.autograd.grad(loss_of_step, states[: t + 1], retain_graph=True)
        by_lag = [grad[row % 4].norm().item() for grad in grads[::-1]]
        np.testing.assert_allclose(profile[row, : t + 1], by_lag, rtol=1e-10)


class BothWays(nn.Module):
    """A bidirectional LSTM over sequences of several lengths, whose head reads all outputs and the final states."""

    def __init__(self, steps):
        super().__init__()
        self.rnn = nn.LSTM(3, 5, batch_first=True, bidirectional=True)
        self.head, self.steps, self.outputs = nn.Linear(10, 1), steps, None

    def forward(self, x):
        lengths = 2 + torch.arange(len(x)) % (self.steps - 1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed_outputs, (hidden, _) = self.rnn(packed)
        self.outputs = pad_packed_sequence(packed_outputs, batch_first=True, total_length=self.steps)[0]
        return self.head(self.outputs) + hidden.sum((0, 2))[:, None, None]


def by_lag_of_one_step(model, x, grad, step, length, backward):
    """Return norms of dL/dh and dL/dc by lag, of a gradient that enters at one output step, by a loop and autograd."""
    suffix = "_reverse" if backward else ""
    w = {name: getattr(model.rnn, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    h, c = torch.zeros(5).double(), torch.zeros(5).double()
    states = []
    for t in range(length - 1, step - 1, -1) if backward else range(step + 1):
        z = w["weight_ih"] @ x[t] + w["bias_ih"] + w["weight_hh"] @ h + w["bias_hh"]
        i, f, g, o = z.chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append((h, c))
    flat = torch.autograd.grad((h * grad).sum(), [state for pair in states[::-1] for state in pair])
    return [flat[k::2] for k in range(2)]


@pytest.mark.parametrize("in_one_sweep", [True, False])
@pytest.mark.parametrize("samples", [1, 2, 5, 6, 16, 20])
def test_by_lag_with_masks_in_both_directions_in_batches_of_any_size(samples, in_one_sweep, monkeypatch):
    if not in_one_sweep:
        monkeypatch.setattr(traced_layers, "_JOINT_VALUES", 0)
    torch.manual_seed(samples)
    steps, x = 7, torch.randn(samples, 7, 3).double()
    model, y = BothWays(steps).double(), torch.randn(samples, 7, 1).double()
    trace = rl.trace(model, x, y, loss=MSE)
    assert trace.certificate.state == "passed"
    (direct,) = torch.autograd.grad(MSE(model(x), y), model.outputs)
    dataset, compared = trace["rnn"].dataset, 0
    for number, direction in enumerate(("forward", "backward")):
        profiles = [dataset[f"{state}_lag_gradient"].sel(direction=direction).values for state in ("hidden", "cell")]
        for row, known in enumerate(np.isfinite(profiles[0]).sum(axis=1)):
            sample = row % min(samples, 16)
            length = 2 + sample % (steps - 1)
            step = length - known if number else known - 1
            grad = direct[sample, step, 5 * number : 5 * number + 5]
            by_state = by_lag_of_one_step(model, x[sample], grad, step, length, bool(number))
            for profile, grads in zip(profiles, by_state, strict=True):
                expected = [float(grad.norm()) for grad in grads]
                np.testing.assert_allclose(profile[row, :known], expected, rtol=1e-9, atol=1e-18)
                compared += len(expected)
    assert compared > 4 * samples


def test_a_small_call_is_swept_once(monkeypatch):
    sweeps, adjoint = [], recurrent_layers.adjoint
    monkeypatch.setattr(recurrent_layers, "adjoint", lambda *args, **kw: sweeps.append(1) or adjoint(*args, **kw))
    torch.manual_seed(0)
    assert "hidden_lag_gradient" in traced(EveryStep(nn.GRU))["rnn"].dataset.coords
    assert len(sweeps) == 1
    sweeps.clear()
    monkeypatch.setattr(traced_layers, "_JOINT_VALUES", 0)
    traced(EveryStep(nn.GRU))
    assert len(sweeps) == 2


def test_a_network_without_memory_reaches_nowhere_and_the_figure_says_so():
    torch.manual_seed(0)
    model = EveryStep(nn.GRU, 16)
    with torch.no_grad():
        model.rnn.weight_hh_l0.zero_()
        model.rnn.bias_ih_l0[16:32] = -12
        model.rnn.weight_ih_l0[16:32] = 0
    trace = traced(model, 60)
    assert summary(trace)[0]["rnn/reach"] == 0
    (ax,) = rl.plot.gradient_flow(trace)
    assert ax.get_title() == "rnn: the gradient\nstays at its own step"


def test_a_backward_half_has_a_reach_of_its_own():
    torch.manual_seed(0)
    model = EveryStep(nn.RNN, bidirectional=True)
    with torch.no_grad():
        model.rnn.weight_hh_l0_reverse.mul_(1e-3)
    scalars, _ = summary(traced(model))
    assert scalars["rnn/forward/reach"] >= 2
    assert scalars["rnn/backward/reach"] == 0


class LastStep(nn.Module):
    """A recurrent layer, and a head that reads one step of its output."""

    def __init__(self, layer, step=-1, **options):
        super().__init__()
        self.rnn = layer(3, 8, batch_first=True, **options)
        self.head, self.step = nn.Linear(8 * (1 + options.get("bidirectional", False)), 1), step

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, self.step])


def traced_last(model, steps=40):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, steps, 3, generator=generator), torch.randn(8, 1, generator=generator)
    return rl.trace(model, x, y, loss=MSE)


@pytest.mark.parametrize("every_step", [False, True])
def test_the_cell_state_counts_beside_a_large_direct_gradient_of_the_hidden_state(every_step):
    """A linear cell state with forget gates f: dc_t/dc_(t-1) = f, whatever the scale of the hidden state."""
    torch.manual_seed(0)
    model = EveryStep(nn.LSTM) if every_step else LastStep(nn.LSTM)
    with torch.no_grad():
        model.rnn.weight_ih_l0.mul_(1e-3), model.rnn.weight_hh_l0.mul_(1e-3)
        model.rnn.bias_ih_l0.zero_(), model.rnn.bias_hh_l0.zero_()
        model.rnn.bias_ih_l0[8:16] = 2.0
        model.rnn.bias_ih_l0[24:32] = -4.0  # output gates nearly shut: dL/dh is 50 times dL/dc
    trace = traced(model) if every_step else traced_last(model)
    forget = float(torch.sigmoid(torch.tensor(2.0)))
    expected = gradient_reach(forget ** np.arange(20.0)[None, :])
    by_lag = norms_by_lag(trace["rnn"].dataset, None)
    assert gradient_decay(by_lag["cell_grad"]) == pytest.approx(forget, rel=1e-2)
    assert gradient_reach(by_lag["hidden_grad"]) == 0
    assert summary(trace)[0]["rnn/reach"] == expected > 10
    (ax,) = rl.plot.gradient_flow(trace)
    assert ax.get_title().startswith(f"rnn: {expected} steps back")
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [label.partition(": ")[2] for label in labels[:2]] == ["0 steps", f"{expected} steps"]


def test_a_watch_counts_the_cell_state(tmp_path):
    torch.manual_seed(0)
    model = LastStep(nn.LSTM)
    with torch.no_grad():
        model.rnn.bias_ih_l0[8:16] = 6.0
    x, y = torch.randn(8, 40, 3), torch.randn(8, 1)
    with rl.torch.watch(model, tmp_path / "run.zarr", probe=(x, y), loss=MSE, every=1, resume=False):
        MSE(model(x), y).backward()
        torch.optim.SGD(model.parameters(), 0.0).step()
    assert rl.open(tmp_path / "run.zarr").scalar("rnn/reach").values[0] > 25


def test_in_a_comparison_at_initialisation_an_lstm_counts_by_its_cell_state():
    torch.manual_seed(0)
    networks = {"rnn": LastStep(nn.RNN), "lstm": LastStep(nn.LSTM)}
    with torch.no_grad():
        networks["lstm"].rnn.bias_ih_l0[8:16] = 1.0  # unit forget bias
    traces = {name: traced_last(model) for name, model in networks.items()}
    (ax,) = rl.plot.gradient_flow(traces)
    labels = dict(text.get_text().split(": ") for text in ax.get_legend().get_texts())
    reach = {name: int(summary(trace)[0]["rnn/reach"]) for name, trace in traces.items()}
    assert labels == {name: f"{steps} steps" for name, steps in reach.items()}
    hidden = norms_by_lag(traces["lstm"]["rnn"].dataset, None)["hidden_grad"]
    assert reach["lstm"] >= reach["rnn"]
    assert reach["lstm"] > gradient_reach(hidden)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_gradient_that_enters_at_the_first_step_of_the_recurrence_travels_nowhere(direction):
    torch.manual_seed(0)
    backward = direction == "backward"
    model = LastStep(nn.GRU, -1, bidirectional=True) if backward else LastStep(nn.GRU, 0)
    trace = traced_last(model)
    assert summary(trace)[0]["rnn/backward/reach" if backward else "rnn/reach"] == 0
    axes = rl.plot.gradient_flow(trace)
    assert axes[-1].get_title().endswith("the gradient\nstays at its own step")


def test_each_sample_counts_from_its_own_last_step():
    torch.manual_seed(0)
    full = scaled(0.8)

    class AtLengths(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = full.rnn, full.head

        def forward(self, x):
            last = torch.tensor([39, 20, 30, 35, 39, 25, 28, 33])[: len(x)]
            return self.head(self.rnn(x)[0][torch.arange(len(x)), last])

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 40, 3, generator=generator), torch.randn(8, 1, generator=generator)
    scalars, _ = summary(rl.trace(AtLengths(), x, y, loss=MSE))
    assert scalars["rnn/reach"] == gradient_reach(0.8 ** np.arange(20.0)[None, :])
    assert scalars["rnn/decay"] == pytest.approx(0.8, rel=1e-3)


def test_no_reach_is_claimed_where_user_code_changes_the_state_between_steps():
    class Decayed(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.RNNCell(3, 8), nn.Linear(8, 1)

        def forward(self, x):
            state, outputs = x.new_zeros(len(x), 8), []
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
                outputs.append(self.head(state))
                state = state * 0.9
            return torch.stack(outputs, 1)

    torch.manual_seed(0)
    trace = traced(Decayed(), steps=12)
    assert "previous_hidden" in trace["cell"].dataset
    assert "cell/reach" not in summary(trace)[0]
    assert "cell/adjoint" in summary(trace)[0]
    (ax,) = rl.plot.gradient_flow(trace)
    assert ax.get_title() == "cell"


def test_an_alert_is_raised_where_memory_is_destroyed_and_only_there(tmp_path):
    torch.manual_seed(0)
    model, x = EveryStep(units=12), torch.randn(256, 20, 3)
    y = torch.roll(x[..., :1], 3, 1)
    y[:, :3] = 0
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    run = tmp_path / "run.zarr"
    with rl.torch.watch(model, run, probe=(x[:32], y[:32]), loss=MSE, every=10, resume=False):
        for step in range(300):
            if step == 220:
                with torch.no_grad():
                    model.rnn.weight_hh_l0.mul_(1e-3)
                optimizer.param_groups[0]["lr"] = 0.0
            rows = torch.randint(0, 256, (32,))
            optimizer.zero_grad()
            MSE(model(x[rows]), y[rows]).backward()
            optimizer.step()
    notes = [note for note in rl.open(run).notes if "vanishing" in note]
    assert len(notes) == 1
    assert "since step 230" in notes[0]
