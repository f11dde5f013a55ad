"""Library layers called on one segment of the sequence after another are one recurrence, equal to autograd."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

B, T, F, H = 3, 7, 3, 4
CUTS = (0, 2, 3, 7)


def reset(h, t, done):
    return h * (1 - done[:, t])[:, None]


def normed(h, t, done):
    return nn.functional.layer_norm(h, (H,))


def where(h, t, done):
    return torch.where(done[:, t, None] > 0, torch.zeros_like(h), h)


CHANGES = {function.__name__: function for function in (reset, normed, where)}
KINDS = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}


class Segments(nn.Module):
    """A layer called segment by segment; the state is changed between segments, as in recurrent policies."""

    def __init__(self, kind, change, layers=1, batch_first=False, dropout=0.0):
        super().__init__()
        self.change = CHANGES[change]
        self.rnn = KINDS[kind](F, H, layers, batch_first=batch_first, dropout=dropout)
        self.head = nn.Linear(H, 2)

    def forward(self, x, done, split=False):
        time = int(self.rnn.batch_first)
        states = [x.new_zeros(self.rnn.num_layers, len(x), H) for _ in range(1 + isinstance(self.rnn, nn.LSTM))]
        x, outputs, self.step_states = (x if time else x.transpose(0, 1)), [], []
        for start, end in pairwise(CUTS):
            states = [self.change(s, start, done) for s in states] if start else states
            for first, last in [(t, t + 1) for t in range(start, end)] if split else [(start, end)]:
                segment = x.narrow(time, first, last - first)
                output, states = self.rnn(segment, tuple(states) if len(states) == 2 else states[0])
                states = list(states) if isinstance(states, tuple) else [states]
                if split:
                    self.step_states.append(states)
                    states = [s.clone() for s in states]
                outputs.append(output if not split else self.step_states[-1][0][-1:].movedim(0, time))
        outputs = torch.cat(outputs, time)
        return self.head(outputs if time else outputs.transpose(0, 1))


def make_case(*arguments, **options):
    torch.manual_seed(0)
    model = Segments(*arguments, **options).double().eval()
    done = torch.zeros(B, T, dtype=torch.float64)
    done[0, 2] = done[1, 3] = done[2, 3] = 1
    x = torch.randn(B, T, F, dtype=torch.float64)
    return model, (x, done), torch.randn(B, T, 2, dtype=torch.float64)


def loss_of(outputs, y):
    return ((outputs - y) ** 2).mean()


@pytest.mark.pairs
@pytest.mark.parametrize("options", [{}, {"layers": 2}, {"batch_first": True}])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_one_recurrence(kind, change, options):
    model, (x, done), y = make_case(kind, change, **options)
    trace = rl.trace(model, (x, done), y, loss=loss_of)
    layers = options.get("layers", 1)
    assert list(trace) == (["rnn"] if layers == 1 else ["rnn[0]", "rnn[1]"])
    assert trace.certificate.state == "passed"
    loss = loss_of(model(x, done, split=True), y)
    states = [step[0] for step in model.step_states]
    grads = torch.autograd.grad(loss, states)
    checks = [("hidden", states, i) for i in range(layers)]
    checks.append(("hidden_grad", grads, layers - 1))  # a lower layer's states stay inside the kernel
    for quantity, tensors, layer in checks:
        expected = torch.stack([tensor[layer].detach() for tensor in tensors], 1).numpy()
        actual = trace[list(trace)[layer]][quantity].values
        assert np.abs(actual - expected).max() <= 1e-13 + 1e-12 * np.abs(expected).max()
    name = list(trace)[-1]
    is_reset = np.asarray(done, dtype=bool) if change != "normed" else None
    assert is_reset is None or np.array_equal(trace[name].reset, is_reset)
    for wrt in ("input[0]", f"{name}.hidden"):
        assert rl.jacobian(model, (x, done), wrt=wrt).certificate.state in ("passed", "could not")
    input_grad = rl.gradients(model, (x, done), y, loss=loss_of, wrt="input[0]")
    inputs = x.clone().requires_grad_()
    loss_of(model(inputs, done), y).backward()
    assert np.abs(input_grad.values - inputs.grad.numpy()).max() <= 1e-13
    assert rl.weights(model, (x, done), y, loss=loss_of).certificate.state == "passed"


def test_the_jacobian_across_segments_is_autograds():
    model, (x, done), _ = make_case("gru", "normed")
    jacobian = rl.jacobian(model, (x, done), wrt="input[0]")
    expected = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda s, d=d: model(s[None], d[None])[0], row)
            for row, d in zip(x, done, strict=True)
        ]
    )
    np.testing.assert_allclose(jacobian, expected, atol=1e-13)


def test_layers_that_read_their_own_output_stay_calls_of_their_own():
    class Repeated(nn.Module):
        """A layer that is called three times on its own output, each time from half of its last state."""

        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(F, F, batch_first=True)

        def forward(self, x):
            h = None
            for _ in range(3):
                x, h = self.rnn(x, None if h is None else h / 2)
            return x

    torch.manual_seed(0)
    model, x = Repeated().double(), torch.randn(B, T, F, dtype=torch.float64)
    assert list(rl.trace(model, x, loss=torch.sum)) == ["rnn#0", "rnn#1", "rnn#2"]


def test_dropout_between_stacked_layers_keeps_segments_apart_in_training():
    """Segments with active dropout are not joined: a replay step by step would draw other random numbers."""
    model, (x, done), y = make_case("gru", "reset", layers=2, dropout=0.5)
    trace = rl.trace(model, (x, done), y, loss=loss_of, training=True)
    assert list(trace) == [f"rnn[{i}]#{k}" for k in range(3) for i in range(2)]
    assert trace.certificate.state == "passed"


@pytest.mark.parametrize("change", ["reset", "detached"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_initial_state_is_that_of_the_first_segment(kind, change, monkeypatch):
    """A given initial state replaces that of the first segment, not the states passed between segments."""
    monkeypatch.setitem(CHANGES, "detached", lambda h, t, done: h.detach())
    model, (x, done), y = make_case(kind, change)
    starts = [torch.randn(B, H, dtype=torch.float64) for _ in range(1 + (kind == "lstm"))]
    trace = rl.trace(model, (x, done), y, loss=loss_of, initial_state={"rnn": starts})
    zeros, start_iter = torch.Tensor.new_zeros, iter(starts)
    monkeypatch.setattr(torch.Tensor, "new_zeros", lambda self, *shape: next(start_iter)[None])
    expected = float(loss_of(model(x, done), y).detach())
    monkeypatch.setattr(torch.Tensor, "new_zeros", zeros)
    assert trace.loss == pytest.approx(expected, rel=1e-12)
