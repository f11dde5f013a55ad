"""Captures of torch models beyond their values: forms of models and data, dropout, dtypes, names, notes, refusals."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rnnlens as rl
from rnnlens.adapters.protocol import Batch, Taps
from rnnlens.adapters.torch import adapter
from rnnlens.adapters.torch.fused import KernelInterceptor
from rnnlens.errors import InputError, LayerNotFoundError, ModelError, UnsupportedError

B, T, F, H = 3, 4, 2, 5
mse = nn.functional.mse_loss


class Tagger(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.rnn = kind(F, H, batch_first=True, **options)
        width = H * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def data(dtype=torch.float32):
    rng = np.random.default_rng(0)
    return torch.tensor(rng.normal(size=(B, T, F)), dtype=dtype), torch.tensor(rng.normal(size=(B, T, 2)), dtype=dtype)


def trace(model, x, y, **options):
    return rl.trace(model, x, y, loss=options.pop("loss", mse), **options)


# What a run costs -----------------------------------------------------------------------------------------------------


def test_the_function_mode_of_a_run_sees_no_operation_of_the_hooks_that_recognise_a_chain(monkeypatch):
    seen, see = [], KernelInterceptor.__torch_function__

    def listen(self, func, types, args=(), kwargs=None):
        seen.append(getattr(func, "__name__", str(func)))
        return see(self, func, types, args, kwargs)

    monkeypatch.setattr(KernelInterceptor, "__torch_function__", listen)
    x, y = data()
    rl.gradients(Tagger(), x, y, loss=mse, wrt="weights")
    assert "linear" in seen
    assert not {"numpy", "item", "sum"} & set(seen)  # of checksums and copied kernels


def test_calls_of_a_chain_do_not_import_symbolic_shapes():
    code = (
        "import sys, torch, rnnlens as rl\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(s): super().__init__(); s.rnn, s.head = nn.LSTM(3, 40, batch_first=True), nn.Linear(40, 2)\n"
        "    def forward(s, x): return s.head(s.rnn(x)[0])\n"
        "net, x, y, loss = Net(), torch.randn(64, 60, 3), torch.randn(64, 60, 2), nn.functional.mse_loss\n"
        "for _ in range(2):\n"
        "    rl.trace(net, x, y, loss=loss)\n"
        "    rl.gradients(net, x, y, loss=loss, wrt='input')\n"
        "print('sympy' in sys.modules)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert process.stdout == "False\n"


# Dropout and random numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_is_the_one_that_torch_draws(kind, bidirectional, packed):
    torch.manual_seed(0)
    rnn = kind(F, H, 3, dropout=0.5, bidirectional=bidirectional)
    x = torch.randn(T, B, F)
    if packed:
        x = pack_padded_sequence(x, torch.tensor([2, 4, 1]), enforce_sorted=False)
    rnn.train()
    torch.manual_seed(7)
    expected = rnn(x)
    capture = adapter.run(rnn, Batch(x, training=True, seed=7), Taps.direct(weight_grads=True)).capture

    def tensors(returned):
        output, state = returned
        return [output.data if packed else output, *(state if isinstance(state, tuple) else (state,))]

    for actual, reference in zip(tensors(capture.outputs), tensors(expected), strict=True):
        assert torch.equal(actual, reference)
    torch.manual_seed(7)
    assert torch.equal(
        tensors(adapter.run(rnn, Batch(x, training=True), Taps.direct(weight_grads=True)).capture.outputs)[0],
        tensors(expected)[0],
    )
    eval_outputs = adapter.run(rnn, Batch(x), Taps.direct(weight_grads=True)).capture.outputs
    assert torch.equal(tensors(eval_outputs)[0], tensors(rnn.eval()(x))[0])


def test_dropout_scales_direct_gradients_of_the_layer_below():
    torch.manual_seed(0)
    model, (x, y) = Tagger(num_layers=2, dropout=0.5), data()
    traced = trace(model, x, y, training=True, seed=1)
    assert all(check.ok for check in traced.checks)
    dropped = (traced["rnn[1]"].input == 0).values
    assert 0 < dropped.mean() < 1
    assert (traced["rnn[0]"].output_grad.values[dropped] == 0).all()


# Forms of models and data ---------------------------------------------------------------------------------------------


def test_a_tuple_a_dict_and_numpy():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(F, H, batch_first=True)

        def forward(self, a, scale):
            return {"out": self.rnn(a * scale)[0]}

    torch.manual_seed(0)
    model, (x, _) = Two(), data()
    scale = torch.tensor(2.0)

    def loss(out):
        return out["out"].sum()

    reference = rl.trace(model, (x, scale), loss=loss)["rnn"].hidden_grad.values
    for inputs in ([x, scale], {"a": x, "scale": scale}, (x.double().numpy(), np.float32(2)), {"scale": 2.0, "a": x}):
        np.testing.assert_allclose(rl.trace(model, inputs, loss=loss)["rnn"].hidden_grad.values, reference, rtol=1e-6)


def test_a_module_called_twice_is_two_nodes_with_one_weight_gradient():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.GRU(F, H, batch_first=True)

        def forward(self, a, b):
            return (self.tower(a)[1][0] * self.tower(b)[1][0]).sum(1)

    model, (x, _) = Towers(), data()
    traced = rl.trace(model, (x, x.flip(1)), loss=lambda out: out.sum())
    assert list(traced) == ["tower#0", "tower#1"]
    capture = adapter.run(
        model, Batch((x, x.flip(1)), loss=lambda out: out.sum()), Taps.direct(weight_grads=True)
    ).capture
    first, second = capture.calls
    assert first.weights_key == second.weights_key
    model(x, x.flip(1)).sum().backward()
    r, z, n = model.tower.weight_hh_l0.grad.chunk(3)
    torch.testing.assert_close(first.weight_grads["recurrent_kernel"], torch.cat([z, r, n]).T)
    second_call = rl.trace(model, (x, x.flip(1)), loss=lambda out: out.sum(), layers=["tower#1"])
    assert list(second_call) == ["tower#1"]


def test_modules_in_containers_functions_and_lists():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = nn.ModuleList([nn.LSTM(F, H, batch_first=True), nn.LSTM(H, H, batch_first=True)])
            self.inner = nn.Sequential(nn.Linear(H, F), nn.ReLU())
            self.hidden = [nn.GRU(F, H, batch_first=True)]

        def forward(self, x):
            for rnn in self.stack:
                x, _ = rnn(x)
            return self.hidden[0](self.inner(x))[0]

    traced = rl.trace(Deep(), data()[0], loss=lambda out: out.sum(), layers=None)
    assert list(traced) == ["stack.0", "stack.1", "unnamed_gru_0"]
    assert all(check.ok for check in traced.checks)
    sequential = rl.trace(nn.Sequential(nn.Linear(F, F), nn.GRU(F, H, batch_first=True)), data()[0])
    assert list(sequential) == ["1"]
    assert list(rl.trace(nn.LSTM(F, H, 2), data()[0])) == ["lstm[0]", "lstm[1]"]


def test_plain_layers_by_name():
    torch.manual_seed(0)
    model, (x, y) = Tagger(), data()
    traced = trace(model, x, y, layers=["head", "rnn"])
    out = model(x)
    np.testing.assert_allclose(traced["head"].output.values, out.detach().numpy())
    np.testing.assert_allclose(
        traced["head"].output_grad.values, (2 * (out - y) / out.numel()).detach().numpy(), atol=1e-7
    )
    assert list(traced) == ["rnn", "head"]


@pytest.mark.parametrize("kind", [nn.Identity(), nn.Dropout(0.3), nn.ReLU(), nn.Tanh()], ids=repr)
def test_a_layer_beside_a_residual_path_has_the_gradient_of_its_own_output(kind):
    """A layer that returns its input tensor (Identity, Dropout in eval) has its own gradient beside a skip path."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.kind, self.head = nn.GRU(3, 4, batch_first=True), kind, nn.Linear(4, 1)

        def forward(self, x):
            below = self.rnn(x)[0]
            return self.head(2 * below + self.kind(below) ** 2)

    model, x, y = Residual().double().eval(), torch.randn(2, 5, 3).double(), torch.randn(2, 5, 1).double()
    trace = rl.trace(model, x, y, loss=nn.functional.mse_loss, layers=["rnn", "kind"])
    below = model.rnn(x)[0].detach()
    output = kind(below).detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(nn.functional.mse_loss(model.head(2 * below + output**2), y), output)
    np.testing.assert_allclose(trace["kind"].output_grad, expected, rtol=1e-12, atol=1e-15)


def test_change_in_place_above_a_layer_does_not_reach_back():
    class InPlace(Tagger):
        def forward(self, x):
            y = self.rnn(x)[0]
            y[:, 0] = 0
            y.mul_(2)
            return self.head(y)

    model, (x, y) = InPlace(), data()
    traced = trace(model, x, y, layers=["rnn", "head"])
    expected = nn.LSTM.forward(model.rnn, x)[0].detach().numpy()
    np.testing.assert_allclose(traced["rnn"].output.values, expected, atol=1e-7)
    assert (traced["rnn"].output_grad.values[:, 0] == 0).all()
    assert all(check.ok for check in traced.checks)


def test_frozen_and_partly_frozen_models():
    model, (x, y) = Tagger(num_layers=2), data()
    unfrozen = trace(model, x, y)
    for parameters in (model.rnn.parameters(), model.parameters()):
        for p in parameters:
            p.requires_grad_(False)
        frozen = trace(model, x, y)
        for node in unfrozen:
            np.testing.assert_array_equal(frozen[node].hidden_grad.values, unfrozen[node].hidden_grad.values)
        assert len(frozen.checks) == len(unfrozen.checks)


def test_a_forward_under_no_grad_is_run_with_gradients():
    class Decorated(Tagger):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    model, (x, y) = Decorated(), data()
    traced = trace(model, x, y)
    assert any("no_grad" in note for note in traced.notes)
    undecorated = Tagger()
    undecorated.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(traced["rnn"].hidden_grad.values, trace(undecorated, x, y)["rnn"].hidden_grad.values)


def test_a_part_under_no_grad_gets_no_gradient_and_says_so():
    class Feature(Tagger):
        def forward(self, x):
            with torch.no_grad():
                y = self.rnn(x)[0]
            return self.head(y)

    model, (x, y) = Feature(), data()
    traced = trace(model, x, y)
    assert (traced["rnn"].hidden_grad == 0).all()
    assert traced.notes == ["No path leads from the loss to any layer asked for: every gradient is zero."]


# Dtypes ---------------------------------------------------------------------------------------------------------------


def test_half_precision_model():
    torch.manual_seed(0)
    model, (x, y) = Tagger(), data()
    reference = trace(model, x, y)
    traced = trace(model.bfloat16(), x.bfloat16(), y.bfloat16())
    assert traced["rnn"].hidden.dtype == "float32"
    assert all(check.ok for check in traced.checks)
    scale = np.abs(reference["rnn"].hidden_grad).max()
    np.testing.assert_allclose(
        traced["rnn"].hidden_grad.values, reference["rnn"].hidden_grad.values, atol=0.05 * float(scale)
    )


@pytest.mark.usefixtures("bfloat16_lstm")
def test_autocast():
    torch.manual_seed(0)
    model, (x, y) = Tagger(), data()
    reference = trace(model, x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        traced = trace(model, x, y)
    assert all(check.ok for check in traced.checks)
    scale = float(np.abs(reference["rnn"].hidden_grad).max())
    np.testing.assert_allclose(traced["rnn"].hidden_grad.values, reference["rnn"].hidden_grad.values, atol=0.05 * scale)


def test_eval_stays_eval_and_training_stays_training():
    modes = []

    class Watching(Tagger):
        def forward(self, x):
            modes.append((self.training, self.rnn.training))
            return super().forward(x)

    model, (x, y) = Watching(), data()
    with rl.options(certify="never"):
        trace(model, x, y)
        trace(model.eval(), x, y, training=True)
    assert modes == [(False, False), (True, True)]
    assert not model.training


# Initial states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_initial_state_by_layer_name(kind, bidirectional):
    torch.manual_seed(0)
    model, (x, y) = Tagger(kind, num_layers=2, bidirectional=bidirectional), data()
    state_count, direction_count = (2 if kind is nn.LSTM else 1), 1 + bidirectional
    states = [torch.randn(B, H) for _ in range(state_count * direction_count)]
    traced = trace(model, x, y, initial_state={"rnn[1]": states})
    all_states = [torch.zeros(2 * direction_count, B, H) for _ in range(state_count)]
    for i, state in enumerate(states):
        all_states[i % state_count][direction_count + i // state_count] = state

    class Fed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = model.rnn, model.head

        def forward(self, x):
            return self.head(self.rnn(x, tuple(all_states) if state_count > 1 else all_states[0])[0])

    expected = trace(Fed(), x, y)
    for node in expected:
        np.testing.assert_array_equal(traced[node].hidden.values, expected[node].hidden.values)


# Losses ---------------------------------------------------------------------------------------------------------------


def test_forms_of_a_loss():
    torch.manual_seed(0)
    model, (x, y) = Tagger(), data()
    reference = trace(model, x, y)
    for loss in (nn.MSELoss(), "mse", "mse_loss", lambda output, target: ((output - target) ** 2).mean()):
        traced = trace(model, x, y, loss=loss)
        np.testing.assert_allclose(traced["rnn"].hidden_grad.values, reference["rnn"].hidden_grad.values, atol=1e-8)
    labels = torch.randint(0, 2, (B,))

    class Last(Tagger):
        def forward(self, x):
            return super().forward(x)[:, -1]

    assert trace(Last(), x, labels.numpy(), loss=nn.CrossEntropyLoss()).loss > 0


def test_sample_and_class_weights():
    torch.manual_seed(0)
    model, (x, y) = Tagger(), data()
    weights = np.array([0.0, 1.0, 3.0])
    traced = trace(model, x, y, sample_weight=weights)
    expected = (((model(x) - y) ** 2).mean((1, 2)) * torch.tensor(weights)).mean().item()
    assert traced.loss == pytest.approx(expected)
    assert (traced["rnn"].hidden_grad.values[0] == 0).all()

    class Last(Tagger):
        def forward(self, x):
            return super().forward(x)[:, -1]

    model, labels = Last(), torch.tensor([0, 1, 1])
    traced = rl.trace(model, x, labels, loss=nn.CrossEntropyLoss(), class_weight={0: 2.0, 1: 0.5})
    sample_losses = nn.functional.cross_entropy(model(x), labels, reduction="none")
    assert traced.loss == pytest.approx((sample_losses * torch.tensor([2.0, 0.5, 0.5])).mean().item())
    with pytest.raises(UnsupportedError, match="per sample"):
        trace(model, x, labels, loss=lambda out, target: out.sum(), sample_weight=weights)


def test_a_loss_that_is_not_a_number_is_said():
    model, (x, y) = Tagger(), data()
    traced = trace(model, x, y, loss=lambda output, target: (output - target).sum() * float("nan"))
    assert np.isnan(traced.loss)
    assert "The loss is nan." in traced.notes


# Refusals and errors --------------------------------------------------------------------------------------------------


def error_text(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_errors_about_the_loss():
    model, (x, y) = Tagger(), data()
    assert error_text(InputError, lambda: rl.trace(model, x, y)) == (
        "A target was given, but no loss: torch models have no compiled loss.\n"
        "  expected: loss=callable(output, target)\n"
        "  try:      loss=torch.nn.functional.mse_loss"
    )
    assert error_text(InputError, lambda: rl.trace(model, x, loss=mse)) == (
        "The loss takes a target and none was given.\n"
        "  got:      loss=mse_loss, y=None\n"
        "  expected: y, or a loss of the output alone\n"
        "  try:      rl.trace(model, x, y, loss=...) or loss=lambda output: output.sum()"
    )

    def per_sample(output, target):
        return ((output - target) ** 2).mean((1, 2))

    assert error_text(InputError, lambda: rl.trace(model, x, y, loss=per_sample)) == (
        "The loss is not a scalar.\n"
        "  got:      per_sample returned shape (3,)\n"
        "  expected: a tensor with one value\n"
        "  try:      reduce it: .mean() or .sum(), or reduction='mean'"
    )
    assert "did you mean 'mse_loss'" in error_text(InputError, lambda: rl.trace(model, x, y, loss="mseloss"))


@pytest.mark.parametrize(
    ("x", "phrases"),
    [
        (torch.zeros(0, T, F), ["x is empty.", "shape (0, 4, 2)", "at least 1 sample"]),
        (torch.zeros(B, 0, F), ["x is empty.", "shape (3, 0, 2)", "at least 1 time step"]),
        (torch.zeros(B, T, F + 1), ["'rnn'", "wrong number of features", "(3, 4, 3), 3 features", "2 features"]),
        (torch.zeros(B, T, F, 1), ["'rnn'", "wrong number of axes", "(3, 4, 2, 1)", "2 axes or 3 axes"]),
        (np.array([["a", "b"]]), ["x is not numeric.", "dtype <U1"]),
        ("data.npz", ["x is not numeric data.", "'data.npz'"]),
    ],
)
def test_errors_about_the_data(x, phrases):
    model = Tagger()
    text = error_text(InputError, lambda: rl.trace(model, x, loss=lambda out: out.sum()))
    assert all(phrase in text for phrase in phrases), text


def test_unknown_layer_and_no_layer():
    model, (x, y) = Tagger(num_layers=2), data()
    text = error_text(LayerNotFoundError, lambda: trace(model, x, y, layers=["rn[0]"]))
    assert "did you mean 'rnn[0]'" in text
    text = error_text(ModelError, lambda: rl.trace(nn.Linear(F, 2), x))
    assert text.startswith("No recurrent layer ran")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_script_is_refused_by_name_and_compile_is_looked_through():
    torch.manual_seed(0)
    model, (x, y) = Tagger(), data()
    reference = trace(model, x, y)["rnn"].hidden_grad.values
    for scripted in (torch.jit.trace(model, x), torch.jit.freeze(torch.jit.trace(model.eval(), x))):
        text = error_text(UnsupportedError, lambda m=scripted: trace(m, x, y))
        assert "TorchScript" in text
    compiled = torch.compile(model)
    np.testing.assert_array_equal(trace(compiled, x, y)["rnn"].hidden_grad.values, reference)
    assert [row.name for row in rl.layers(compiled)] == ["rnn"]

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = torch.compile(model)

        def forward(self, x):
            return self.child(x)

    np.testing.assert_array_equal(trace(Parent(), x, y)["child.rnn"].hidden_grad.values, reference)


def test_a_named_cell_that_is_none_is_refused_with_the_reason():
    class Odd(nn.Module):
        def forward(self, x, h, mask):
            return h * mask

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.rnn = Odd(), nn.GRU(F, H, batch_first=True)

        def forward(self, x):
            h = self.rnn(x)[1][0]
            return self.odd(x[:, 0], h, torch.ones_like(h))

    model, (x, _) = Model(), data()
    assert list(rl.trace(model, x)) == ["rnn"]
    with rl.torch.cell(model.odd):
        text = error_text(UnsupportedError, lambda: rl.trace(model, x))
    assert "Module 'odd' was declared a cell" in text
    assert "takes 2 state tensors and returns 1 tensors" in text
    assert "a torch.nn.Module" in error_text(InputError, lambda: rl.torch.cell("odd"))


def test_dropout_inside_a_cell_is_refused_in_training():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.drop = nn.Linear(F + H, H), nn.Dropout(0.5)

        def forward(self, x, h):
            return torch.tanh(self.mix(self.drop(torch.cat([x, h], 1))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Noisy()

        def forward(self, x):
            h = x.new_zeros(len(x), H)
            for t in range(T):
                h = self.cell(x[:, t], h)
            return h

    model, (x, _) = Model(), data()
    assert list(rl.trace(model, x, loss=lambda out: out.sum())) == ["cell"]
    text = error_text(UnsupportedError, lambda: rl.trace(model, x, loss=lambda out: out.sum(), training=True))
    assert "'cell' contains a Dropout ('drop')" in text


# Layers ---------------------------------------------------------------------------------------------------------------


def test_layers_lists_all_kinds_without_running():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(F, H, 2, bidirectional=True, proj_size=2)
            self.step = nn.GRUCell(4, H)
            self.own = nn.Sequential()
            self.cell = Own()

    class Own(nn.Module):
        hidden_size = H

        def forward(self, x, state):
            return state

    rows = [(row.name, row.kind, row.cell, row.units, row.direction) for row in rl.layers(Model())]
    assert rows == [
        ("rnn[0]", "LSTM", "lstm", H, "bidirectional"),
        ("rnn[1]", "LSTM", "lstm", H, "bidirectional"),
        ("step", "GRUCell", "gru", H, "forward"),
        ("cell", "Own", "custom", H, "forward"),
    ]


def test_a_packed_classifier_keeps_the_callers_order():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(F, H, batch_first=True, bidirectional=True)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=T)[0]

    torch.manual_seed(0)
    model, (x, _) = Packed(), data()
    lengths = torch.tensor([2, 4, 3])
    traced = rl.trace(model, (x, lengths), loss=lambda out: out.sum())["rnn"]
    assert traced.mask.values.sum(1).tolist() == [2, 4, 3]
    np.testing.assert_array_equal(np.where(traced.mask.values[:, :, None], traced.input.values - x.numpy(), 0), 0)
    for sample, length in enumerate(lengths):
        sample_trace = rl.trace(
            model, (x[sample : sample + 1], lengths[sample : sample + 1]), loss=lambda out: out.sum()
        )
        for name in ("hidden", "hidden_grad", "input_grad"):
            computed, expected = traced[name].values[sample, :length], sample_trace["rnn"][name].values[0, :length]
            np.testing.assert_allclose(computed, expected, atol=1e-6, err_msg=name)
        assert (traced.input_grad.values[sample, length:] == 0).all()


def test_outputs_alone_are_those_of_a_whole_capture():
    """Outputs captured without calls equal those of a full capture.

    In float64: in float32, torch's kernels without gradients round differently on some processors.
    """
    torch.manual_seed(0)
    net, (x, _) = Tagger().double(), data(torch.float64)
    full_capture = adapter.run(net, Batch(x), Taps.states()).capture
    outputs_only = adapter.run(net, Batch(x), Taps())
    assert full_capture.calls
    assert torch.equal(outputs_only.returned, full_capture.outputs)
    assert not outputs_only.returned.requires_grad
