"""Later traces of a chain of layers run no backward pass of torch through the recurrences.

The gradients must equal autograd's on the unmodified model in float64.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import rnnlens as rl
from rnnlens.verbs import chain, traced_layers

SAMPLES = 16


class Chain(nn.Module):
    """Two recurrent modules with layers below, between and above."""

    def __init__(self, below=None, between=None, layers=1, first=nn.LSTM, batch_first=True, read="every step"):
        super().__init__()
        torch.manual_seed(0)
        self.below, self.between, self.read = below or nn.Identity(), between or nn.Identity(), read
        self.lower = first(4, 5, layers, batch_first=batch_first)
        self.upper, self.head = nn.GRU(5, 5, batch_first=batch_first), nn.Linear(5, 2)

    def forward(self, x):
        self.steps = self.lower(self.below(x))[0]
        output, hidden = self.upper(self.between(self.steps))
        return self.head({"every step": output, "last step": output[:, -1], "final state": hidden[-1]}[self.read])


#: Chains, some captured only by module hooks (one layer per module), others at torch's kernels.
CHAINS = {
    "plain": {},
    "stacked": {"layers": 2},
    "simple": {"first": nn.RNN, "layers": 2},
    "dense between": {"between": nn.Linear(5, 5)},
    "activations between": {"between": nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.ReLU())},
    "idle dropout": {"between": nn.Dropout(0.5), "layers": 2},
    "dense below": {"below": nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))},
    "last step": {"read": "last step", "layers": 2},
    "final state": {"read": "final state"},
}
#: Models that are no chain: the gradients at all layers are captured.
NON_CHAINS = {
    "norm between": {"between": nn.LayerNorm(5)},
    "norm below": {"below": nn.LayerNorm(4)},
}


def data(dtype=torch.float64, read="every step"):
    torch.manual_seed(1)
    y = torch.randn(SAMPLES, 7, 2, dtype=dtype)
    return torch.randn(SAMPLES, 7, 4, dtype=dtype), y if read == "every step" else y[:, 0]


def run_trace(model, x, y, loss=functional.mse_loss, certify="auto", **options):
    with rl.options(certify=certify):
        return rl.trace(model, x, y, loss=loss, **options)


def torch_gradients(model, x, y, loss=functional.mse_loss):
    """Return dL/dy of the lower module and dL/dx by autograd."""
    x = x.clone().requires_grad_()
    value = loss(model.eval()(x), y)
    return [grad.numpy() for grad in torch.autograd.grad(value, [model.steps, x])]


@pytest.mark.parametrize("certify", ["auto", "never"])
@pytest.mark.parametrize("name", CHAINS)
def test_later_traces_have_the_gradients_of_torch(name, certify, topmost_flags):
    options = CHAINS[name]
    model, (x, y) = Chain(**options).double(), data(read=options.get("read", "every step"))
    first, *later = (run_trace(model, x, y, certify=certify) for _ in range(3))
    assert topmost_flags == [False, True, True]
    output_grad, input_grad = torch_gradients(model, x, y)
    lowest, last_of_lower = next(iter(later[0])), [node for node in later[0] if node.startswith("lower")][-1]
    for trace in later:
        assert trace.certificate.state == ("passed" if certify == "auto" else "off")
        np.testing.assert_allclose(trace[last_of_lower].output_grad.values, output_grad, rtol=1e-9, atol=1e-14)
        if "below" not in options:
            np.testing.assert_allclose(trace[lowest].input_grad.values, input_grad, rtol=1e-9, atol=1e-14)
        for node in first:
            for key, values in first[node].dataset.data_vars.items():
                np.testing.assert_array_equal(trace[node].dataset[key].values, values.values)


@pytest.mark.parametrize("name", NON_CHAINS)
def test_other_models_are_captured_at_all_layers(name, topmost_flags):
    model, (x, y) = Chain(**NON_CHAINS[name]).double(), data()
    traces = [run_trace(model, x, y) for _ in range(2)]
    assert topmost_flags == [False, False]
    np.testing.assert_allclose(
        traces[1]["lower"].output_grad.values, torch_gradients(model, x, y)[0], rtol=1e-9, atol=1e-14
    )


def test_frozen_weights_change_no_digit(topmost_flags):
    model, (x, y) = Chain(layers=2), data(torch.float32)
    for parameter in model.lower.parameters():
        parameter.requires_grad_(False)
    first, *later = (run_trace(model, x, y) for _ in range(3))
    assert topmost_flags == [False, True, True]
    assert [trace.certificate.state for trace in later] == ["passed"] * 2
    for trace in later:
        for node in first:
            for key, values in first[node].dataset.data_vars.items():
                np.testing.assert_array_equal(trace[node].dataset[key].values, values.values)


def test_shared_weights_of_two_modules(topmost_flags):
    model = Chain(between=nn.Linear(5, 4))
    model.upper = nn.LSTM(4, 5, batch_first=True)
    model.upper.weight_hh_l0 = model.lower.weight_hh_l0
    model, (x, y) = model.double(), data()
    traces = [run_trace(model, x, y) for _ in range(3)]
    assert [trace.certificate.state for trace in traces] == ["passed"] * 3
    for trace in traces:
        np.testing.assert_allclose(
            trace["lower"].output_grad.values, torch_gradients(model, x, y)[0], rtol=1e-9, atol=1e-14
        )


def test_dropout_that_is_active_ends_the_chain(topmost_flags):
    model, (x, y) = Chain(between=nn.Dropout(0.5)).double(), data()
    traces = [run_trace(model, x, y, training=True, seed=3, certify="never") for _ in range(2)]
    assert topmost_flags == [False, False]
    assert all(check.ok for trace in traces for check in trace.checks)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_loss_that_reads_a_layer_below_later_on(layers, topmost_flags):
    model, (x, y) = Chain(layers=layers).double(), data()
    weight = 0.0

    def loss(output, target):
        value = functional.mse_loss(output, target)
        return value + weight * model.steps.square().mean() if weight else value

    for _ in range(2):
        run_trace(model, x, y, loss, certify="never")
    weight = 10.0
    trace = run_trace(model, x, y, loss, certify="never")
    assert topmost_flags == [False, True, False]
    output_grad = trace[[node for node in trace if node.startswith("lower")][-1]].output_grad.values
    np.testing.assert_allclose(output_grad, torch_gradients(model, x, y, loss)[0], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_that_is_no_chain_any_more(layers, topmost_flags):
    model, (x, y) = Chain(layers=layers).double(), data()
    for _ in range(2):
        run_trace(model, x, y)
    model.between = nn.LayerNorm(5).double()
    trace = run_trace(model, x, y)
    assert topmost_flags[-1] is False
    lower = [node for node in trace if node.startswith("lower")][-1]
    np.testing.assert_allclose(trace[lower].output_grad.values, torch_gradients(model, x, y)[0], rtol=1e-9, atol=1e-14)


def test_new_weights_and_data_are_read(topmost_flags):
    model, (x, y) = Chain(between=nn.Linear(5, 5)).double(), data()
    for _ in range(2):
        run_trace(model, x, y)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    trace = run_trace(model, 2 * x, y)
    assert topmost_flags[-1]
    assert trace.certificate.state == "passed"
    np.testing.assert_allclose(
        trace["lower"].output_grad.values, torch_gradients(model, 2 * x, y)[0], rtol=1e-9, atol=1e-14
    )


@pytest.mark.parametrize("layers", [1, 2])
def test_a_later_trace_differentiates_no_recurrence(layers):
    model, (x, y) = Chain(layers=layers), data(torch.float32)
    names = []

    def record_name(name, *grads):
        names.append(name)

    def loss(output, target):
        """Return the loss, and hook each node of the graph to record its name when its backward pass runs."""
        pending, visited = [output.grad_fn], set()
        while pending:
            node = pending.pop()
            if node is not None and node not in visited:
                visited.add(node)
                node.register_hook(partial(record_name, node.name()))
                pending.extend(next_node for next_node, _ in node.next_functions)
        return functional.mse_loss(output, target)

    for full_backward in (True, False):
        names.clear()
        run_trace(model, x, y, loss, certify="never")
        assert any("Rnn" in name or "Sigmoid" in name or "Stack" in name for name in names) is full_backward, names
        assert any("Addmm" in name or "View" in name for name in names), names


FAULTS = {
    "input gradient of a sweep": (
        traced_layers,
        "sweep",
        lambda swept: setattr(swept, "input_grad", 1.01 * swept.input_grad),
    ),
    "gates of a sweep": (traced_layers, "sweep", lambda swept: setattr(swept, "gate_grad", 1.01 * swept.gate_grad)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_in_a_later_trace_fails_its_certificate(name, monkeypatch, topmost_flags):
    module, function, spoil = FAULTS[name]
    model, (x, y) = Chain(layers=2).double(), data()
    run_trace(model, x, y)
    original = getattr(module, function)

    def spoiled(*args, **kwargs):
        swept = original(*args, **kwargs)
        spoil(swept)
        return swept

    monkeypatch.setattr(module, function, spoiled)
    with pytest.warns(rl.errors.SelfCheckWarning):
        assert run_trace(model, x, y).certificate.state == "failed"
    assert topmost_flags == [False, True, False]


def test_a_planted_fault_between_the_layers_is_not_trusted(monkeypatch, topmost_flags):
    model, (x, y) = Chain(between=nn.Linear(5, 5)).double(), data()
    pull_back = chain.pull_back
    monkeypatch.setattr(chain, "pull_back", lambda *args: 1.01 * pull_back(*args))
    traces = [run_trace(model, x, y) for _ in range(2)]
    assert topmost_flags == [False, False]  # the first trace differed from torch
    np.testing.assert_allclose(
        traces[1]["lower"].output_grad.values, torch_gradients(model, x, y)[0], rtol=1e-9, atol=1e-14
    )


def test_a_fault_between_the_layers_that_comes_later_fails_a_part_and_all_samples_are_compared(
    monkeypatch, topmost_flags
):
    model, (x, y) = Chain(between=nn.Linear(5, 5)).double(), data()
    run_trace(model, x, y)
    pull_back = chain.pull_back
    monkeypatch.setattr(chain, "pull_back", lambda *args: 1.01 * pull_back(*args))
    trace = run_trace(model, x, y)
    assert topmost_flags == [False, True, False]
    assert (trace.certificate.state, trace.certificate.samples) == ("passed", "")
    np.testing.assert_allclose(
        trace["lower"].output_grad.values, torch_gradients(model, x, y)[0], rtol=1e-9, atol=1e-14
    )


def test_a_later_trace_names_what_the_first_one_compared():
    model, (x, y) = Chain(), data(torch.float32)
    first, later = (run_trace(model, x, y).certificate for _ in range(2))
    assert {"input_grad", "initial_state_grad"} <= set(first.certified)
    assert (later.certified, later.resting) == (first.certified, first.resting)
