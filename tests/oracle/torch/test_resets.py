"""Loops that reset some samples inside a sequence are one recurrence with one time axis, equal to autograd."""

import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.adapters.protocol import Batch, Taps
from rnnlens.adapters.registry import adapter_for
from rnnlens.diagnosis.experiment import call_in_numpy
from rnnlens.measures.transfer import state_transfer, step_jacobians
from rnnlens.recurrence.replay import Replay

B, T, F, H = 4, 9, 3, 5


def times(h, done, new):
    return h * (1 - done.to(h.dtype))[:, None]


def where(h, done, new):
    return torch.where(done[:, None], new.expand_as(h), h)


def masked_fill(h, done, new):
    return h.masked_fill(done[:, None], 0.0)


def cloned(h, done, new):
    h = h.clone()
    h[done] = new
    return h


def where_any(h, done, new):
    return torch.where(done[:, None], torch.zeros_like(h), h) if done.any() else h


RESETS = {f.__name__: f for f in (times, where, masked_fill, cloned, where_any)}


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.joint = nn.Linear(F + H, H)

    def forward(self, x, h):
        return torch.tanh(self.joint(torch.cat([x, h], 1)))


CELLS = {
    "gru": lambda: nn.GRUCell(F, H),
    "lstm": lambda: nn.LSTMCell(F, H),
    "rnn": lambda: nn.RNNCell(F, H),
    "own": Own,
}


class Policy(nn.Module):
    def __init__(self, kind, reset):
        super().__init__()
        self.kind, self.reset = kind, RESETS[reset]
        self.cell, self.head = CELLS[kind](), nn.Linear(H, 2)
        self.start = nn.Parameter(torch.randn(H))

    def forward(self, x, done, record=None):
        state = tuple(x.new_zeros(len(x), H) for _ in range(1 + (self.kind == "lstm")))
        ys = []
        for t in range(x.shape[1]):
            state = tuple(self.reset(s, done[:, t], self.start) for s in state)
            before = [s.detach().clone() for s in state]
            new = self.cell(x[:, t], state if self.kind == "lstm" else state[0])
            new = new if self.kind == "lstm" else (new,)
            if record is not None:
                [s.retain_grad() for s in new]
                passed_on = tuple(s.clone() for s in new)  # c without its path through h of the same step
                record.append((before, new, passed_on))
                new = passed_on
            state = new
            ys.append(self.head(new[0]))
        return torch.stack(ys, 1)


def loss_of(outputs, y):
    return ((outputs - y) ** 2).mean()


def make_case(kind, reset, seed=0):
    torch.manual_seed(seed)
    model = Policy(kind, reset).double()
    done = torch.zeros(B, T, dtype=torch.bool)
    done[0, 4] = done[1, 6] = done[2, 6] = done[3, 7] = done[3, 2] = True
    return model, (torch.randn(B, T, F, dtype=torch.float64), done), torch.randn(B, T, 2, dtype=torch.float64)


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("kind", CELLS)
def test_one_recurrence_with_autograds_states_and_total_gradients(kind, reset):
    model, (x, done), y = make_case(kind, reset)
    trace = rl.trace(model, (x, done), y, loss=loss_of)
    assert list(trace) == ["cell"]
    assert trace.certificate.state == "passed"
    layer, record = trace["cell"], []
    assert np.array_equal(layer.reset, done)
    assert np.array_equal(layer.hidden.reset, done)
    loss_of(model(x, done, record), y).backward()
    names = [str(name) for name in layer if f"previous_{name}" in layer]
    assert len(names) == 1 + (kind == "lstm")
    for i, name in enumerate(names):
        for actual, expected in (
            (layer[f"previous_{name}"], [before[i] for before, *_ in record]),
            (layer[name], [after[i].detach() for _, after, _ in record]),
            (layer[f"{name}_grad"], [after[i].grad for _, after, _ in record]),
        ):
            expected = torch.stack(expected, 1).numpy()
            assert np.abs(actual.values - expected).max() <= 1e-12 * np.abs(expected).max(), name
    assert "resets the state of some samples" in " ".join(trace.notes)


@pytest.mark.parametrize("reset", ["times", "where", "cloned"])
@pytest.mark.parametrize("kind", ["gru", "lstm", "own"])
def test_weights_and_gradients_by_inputs_are_autograds(kind, reset):
    model, (x, done), y = make_case(kind, reset)
    inputs = x.clone().requires_grad_()
    loss_of(model(inputs, done), y).backward()
    expected = [p.grad.flatten() for p in model.cell.parameters()]
    model.zero_grad(set_to_none=True)
    weights = rl.weights(model, (x, done), y, loss=loss_of)
    layers = [weights[name] for name in weights if name.startswith("cell")]
    computed = [layer[f"{name}_grad"].values.ravel() for layer in layers for name in layer if f"{name}_grad" in layer]
    # the gates of a weight are in another order, so the numbers are compared sorted
    computed, expected = np.sort(np.concatenate(computed)), np.sort(torch.cat(expected).numpy())
    assert np.abs(computed - expected).max() <= 1e-12 * np.abs(expected).max()
    input_grad = rl.gradients(model, (x, done), y, loss=loss_of, wrt="input[0]")
    assert np.abs(input_grad.values - inputs.grad.numpy()).max() <= 1e-12 * float(inputs.grad.abs().max())


@pytest.mark.parametrize("reset", ["times", "where", "masked_fill"])
@pytest.mark.parametrize("kind", CELLS)
def test_the_jacobian_across_a_reset_is_zero_and_autograds_elsewhere(kind, reset):
    model, (x, done), _ = make_case(kind, reset)
    jacobian = rl.jacobian(model, (x, done), wrt="input[0]")
    assert jacobian.certificate.state == "passed"
    inputs = x.clone().requires_grad_()
    outputs = model(inputs, done)
    for t in range(T):
        for unit in range(2):
            (grad,) = torch.autograd.grad(outputs[:, t, unit].sum(), inputs, retain_graph=True)
            computed = jacobian.values[:, t, unit]
            assert np.abs(computed - grad.numpy()).max() <= 1e-12
    assert not jacobian.values[0, 4:, :, :4].any()
    assert not jacobian.values[3, 7:, :, :7].any()
    assert jacobian.values[3, 6, :, 2].any()


def test_a_reset_of_all_samples_and_packed_documents():
    model, (x, done), y = make_case("gru", "where")
    done = torch.zeros_like(done)
    done[:, 5] = True
    trace = rl.trace(model, (x, done), y, loss=loss_of)
    assert list(trace) == ["cell"]
    assert np.array_equal(trace["cell"].reset, done)
    one_sample = rl.trace(model, (x[:1], done[:1]), y[:1], loss=loss_of)
    assert one_sample["cell"].hidden.sizes["time"] == T


def test_detached_states_stay_apart_and_masked_samples_are_no_resets():
    _, (x, done), y = make_case("gru", "where")

    class Truncated(Policy):
        def forward(self, x, done):
            h, ys = x.new_zeros(len(x), H), []
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h.detach() if t == 5 else h)
                ys.append(self.head(h))
            return torch.stack(ys, 1)

    torch.manual_seed(0)
    assert list(rl.trace(Truncated("gru", "where").double(), (x, done), y, loss=loss_of)) == ["cell#0", "cell#1"]

    class Masked(Policy):
        def forward(self, x, done):
            h = x.new_zeros(len(x), H)
            for t in range(x.shape[1]):
                h = torch.where(done[:, t, None], h, self.cell(x[:, t], h))
            return self.head(h)

    torch.manual_seed(0)
    trace = rl.trace(Masked("gru", "where").double(), (x, done), y[:, 0], loss=loss_of)
    assert list(trace) == ["cell"]
    assert "reset" not in trace["cell"].hidden.coords
    assert np.array_equal(trace["cell"]["mask"], ~done)


def test_no_reset_leaves_the_recurrence_as_it_is():
    model, (x, done), y = make_case("gru", "times")
    trace = rl.trace(model, (x, torch.zeros_like(done)), y, loss=loss_of)
    assert "previous_hidden" not in trace["cell"]
    assert "output_grad" in trace["cell"]
    assert not trace.notes


def test_results_with_resets_are_saved_and_opened(tmp_path):
    model, (x, done), y = make_case("lstm", "times")
    trace = rl.trace(model, (x, done), y, loss=loss_of)
    trace.save(tmp_path / "trace.nc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reopened = rl.open(tmp_path / "trace.nc")
    assert np.array_equal(reopened["cell"].hidden.reset, done)


@pytest.mark.parametrize("kind", CELLS)
def test_state_transfer_ends_at_a_reset_and_is_autograds(kind):
    """Step Jacobians of a loop with resets, as used by rl.diagnose, equal autograd's and are zero at resets."""
    model, (x, done), y = make_case(kind, "where")
    capture = adapter_for(model).run(model, Batch((x, done), y, loss=loss_of), Taps.direct()).capture
    (replay,) = [Replay.from_call(call_in_numpy(call)) for call in capture.calls]
    jacobians, record = list(step_jacobians(replay)), []
    model(x, done, record)
    for t in range(1, T):
        sources, targets = record[t - 1][2], record[t][1]
        rows = [
            torch.cat(torch.autograd.grad(target[:, unit].sum(), sources, retain_graph=True), 1)
            for target in targets
            for unit in range(H)
        ]
        expected = torch.stack(rows, 1).numpy()
        assert np.abs(jacobians[t] - expected).max() <= 1e-12
        assert not jacobians[t][done[:, t]].any()
    log_ratio = state_transfer(replay).log_ratio
    assert np.isneginf(log_ratio[T - 4 :, 0]).all()
    assert np.isfinite(log_ratio[: T - 4, 0]).all()


def test_diagnosis_of_a_loop_with_resets():
    torch.manual_seed(0)
    model, x = Policy("gru", "times"), torch.randn(160, T, F)
    done = torch.rand(160, T, generator=torch.Generator().manual_seed(1)) < 0.1
    diagnosis = rl.diagnose(model, (x, done), torch.randn(160, T, 2), loss=nn.functional.mse_loss)
    assert "cell" in str(diagnosis.layers)


def test_figures_mark_resets():
    model, (x, done), y = make_case("gru", "times")
    trace = rl.trace(model, (x, done), y, loss=loss_of)
    layer = trace["cell"]
    reset_times = [1.5, 3.5, 5.5, 6.5]
    for axes, expected in (
        (rl.plot.heatmap(layer.hidden), reset_times),
        (rl.plot.heatmap(layer.hidden, samples="panels"), [3.5]),
        (rl.plot.curves(layer.hidden), reset_times),
        (rl.plot.gradient_flow(trace), reset_times),
    ):
        first = np.atleast_1d(axes)[0]
        assert sorted(line.get_xdata()[0] for line in first.get_lines() if line.get_gid() == "reset") == expected
        assert "begins anew" in " ".join(" ".join(text.get_text() for text in first.figure.artists).split())
        plt.close("all")
