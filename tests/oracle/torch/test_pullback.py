"""Vector-Jacobian products between any two layer boundaries, against autograd on the model rebuilt from its parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from rnnlens.adapters.protocol import Batch, Port, Taps
from rnnlens.adapters.torch import adapter, pullback
from rnnlens.autodiff.torch import backward_pass, pull_gradients
from rnnlens.errors import InputError, LayerNotFoundError, ModelError

B, T, F, H, K = 2, 4, 3, 5, 6
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
mse = nn.functional.mse_loss


class Net(nn.Module):
    """Embedding, linear layer, two stacked recurrent layers, head; and a branch that bypasses the stack."""

    def __init__(self, kind, bidirectional=False, packed=False):
        super().__init__()
        self.packed = packed
        self.emb, self.lin = nn.Embedding(7, F), nn.Linear(F, F)
        self.rnn = KINDS[kind](F, H, 2, bidirectional=bidirectional, batch_first=True)
        self.head, self.side = nn.Linear(H * (1 + bidirectional), 2), nn.Linear(F, 2)
        self.lin.weight.requires_grad_(False)

    def forward(self, ids, extra):
        x = self.lin(self.emb(ids)) + extra
        if self.packed:
            x = pack_padded_sequence(x, torch.tensor([3, 4]), batch_first=True, enforce_sorted=False)
        y, state = self.rnn(x)
        if self.packed:
            y, x = pad_packed_sequence(y, batch_first=True)[0], extra
        return self.head(y), {"side": self.side(x), "state": state}


def build(kind, bidirectional=False, packed=False):
    torch.manual_seed(0)
    model = Net(kind, bidirectional, packed).double().eval()
    return model, (torch.randint(0, 7, (B, T)), torch.randn(B, T, F, dtype=torch.float64))


def boundaries_by_hand(model, x):
    """Run the forward pass one layer per module, and return the tensor at each layer boundary by name."""
    ids, extra = x
    extra = extra.clone().requires_grad_()
    emb = model.emb(ids)
    lin_weight = model.lin.weight.detach().clone().requires_grad_()
    stack_input = emb @ lin_weight.T + model.lin.bias + extra
    boundaries = {"extra": extra, "emb": emb, "lin_weight": lin_weight, "in0": stack_input.clone()}
    value, states = boundaries["in0"], []
    for layer in range(2):
        module = type(model.rnn)(value.shape[2], H, 1, bidirectional=model.rnn.bidirectional, batch_first=True).double()
        weights = [model.rnn.__getattr__(name) for name in model.rnn._flat_weights_names if f"_l{layer}" in name]
        for (name, _), weight in zip(list(module.named_parameters()), weights, strict=True):
            module._parameters[name] = weight
        module._flat_weights = weights
        shape = (1 + model.rnn.bidirectional, B, H)
        h0 = tuple(torch.zeros(shape, dtype=torch.float64, requires_grad=True) for _ in range(state_count(model)))
        if model.packed:
            packed = pack_padded_sequence(value, torch.tensor([3, 4]), batch_first=True, enforce_sorted=False)
            value, state = module(packed, h0 if len(h0) > 1 else h0[0])
            value = pad_packed_sequence(value, batch_first=True)[0]
        else:
            value, state = module(value, h0 if len(h0) > 1 else h0[0])
        state = state if isinstance(state, tuple) else (state,)
        states.append(state)
        boundaries |= {f"out{layer}": value, f"first{layer}": h0, f"last{layer}": state}
    boundaries["output"] = model.head(value)
    boundaries["side"] = model.side(extra if model.packed else stack_input)
    return boundaries


def state_count(model):
    return 2 if isinstance(model.rnn, nn.LSTM) else 1


def layer_ports(model):
    """Return rows (port, boundary name, index in that boundary, index of the direction) of the recurrent layers."""
    rows = []
    by_direction = [("forward", 0), ("backward", 1)] if model.rnn.bidirectional else [(None, 0)]
    for layer in range(2):
        for direction, d in by_direction:
            name = f"rnn[{layer}]"
            cut = slice(d * H, (d + 1) * H)
            rows.append((Port("output", name, direction=direction), f"out{layer}", None, (..., cut)))
            for i in range(state_count(model)):
                rows.append((Port("final_state", name, i, direction=direction), f"last{layer}", i, d))
                rows.append((Port("initial_state", name, i, direction=direction), f"first{layer}", i, d))
    return rows


def pull_by_hand(start, cotangents, tensor):
    grads = [torch.autograd.grad(start, tensor, c, retain_graph=True, allow_unused=True)[0] for c in cotangents]
    return None if grads[0] is None else torch.stack(grads)


@pytest.mark.pairs
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_boundary_from_every_boundary_above(kind, bidirectional, packed):
    model, x = build(kind, bidirectional, packed)
    boundaries, rows = boundaries_by_hand(model, x), layer_ports(model)
    port_tensors = [
        (Port("input", index=1), boundaries["extra"]),
        (Port("output", "emb"), boundaries["emb"]),
        (Port("weight", "emb", key="weight"), model.emb.weight),
        (Port("weight", "lin", key="weight"), boundaries["lin_weight"]),
        (Port("weight", "head", key="bias"), model.head.bias),
        *([] if packed else [(Port("input", "rnn[0]"), boundaries["in0"])]),
    ]
    of = [Port("output"), Port("output", index=1), *(row[0] for row in rows if row[0].kind != "initial_state")]
    wrt = [port for port, _ in port_tensors] + [row[0] for row in rows] + [Port("input")]
    torch.manual_seed(1)
    with adapter.run(model, Batch(x), Taps.ports(of, wrt)) as open_pullback:
        for port in of:
            value = open_pullback.values[port]
            cotangents = torch.randn(3, *value.shape, dtype=torch.float64)
            start = boundaries["side" if port.index else "output"]
            if port.layer is not None:
                _, name, index, cut = next(row for row in rows if row[0] == port)
                start = (boundaries[name] if index is None else boundaries[name][index])[cut]
            torch.testing.assert_close(value, start.detach(), atol=1e-12, rtol=0)
            grads = open_pullback.pull({port: cotangents})
            for target, tensor in port_tensors:
                if port.layer is None or target.layer != "rnn[0]":
                    assert_grad_close(grads[target], pull_by_hand(start, cotangents, tensor), (port, target))
            for target, name, index, cut in rows:
                tensor = boundaries[name] if index is None else boundaries[name][index]
                grad = pull_by_hand(start, cotangents, tensor)
                if port.layer is not None and port.layer == target.layer and port.kind == target.kind:
                    continue  # the port itself
                if packed and target.kind == "output" and grad is not None:
                    grad = grad * (torch.arange(T) < torch.tensor([[3], [4]]))[:, :, None]  # padding is a constant
                grad = None if grad is None else grad[(slice(None), *(cut if isinstance(cut, tuple) else (cut,)))]
                assert_grad_close(grads[target], grad, (port, target))
            assert grads[Port("input")] is None


def assert_grad_close(actual, expected, label):
    if expected is None or actual is None:
        missing = torch.zeros(()) if expected is None else expected
        assert actual is None or not actual.any(), label
        assert not missing.any(), label
        return
    scale = max(float(expected.abs().max()), 1e-3)
    torch.testing.assert_close(actual, expected, atol=1e-10 * scale, rtol=0, msg=str(label))


def test_loss_and_every_weight():
    """dL/dW of every layer, frozen ones too, from one vjp equals ``backward()``; the model stays unchanged."""
    model, x = build("gru", bidirectional=True)
    y = torch.randn(B, T, 2, dtype=torch.float64)

    def loss(output, target):
        return mse(output[0], target) + output[1]["side"].sum()

    weights = adapter.weights(model)
    ports = [Port("weight", layer, key=key) for layer, entry in weights.items() for key in entry.values]
    with adapter.run(model, Batch(x, y, loss=loss), Taps.ports([Port("loss")], ports)) as open_pullback:
        grads = open_pullback.pull({Port("loss"): torch.ones(1, dtype=torch.float64)})
        assert open_pullback.values[Port("loss")].shape == ()
        for port in ports:
            torch.testing.assert_close(open_pullback.values[port], weights[port.layer].values[port.key])
    assert not model.lin.weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    model.lin.weight.requires_grad_(True)
    loss(model(*x), y).backward()
    for port in ports:
        computed = grads[port][0]
        if not port.layer.startswith("rnn"):
            torch.testing.assert_close(computed, model.get_submodule(port.layer)._parameters[port.key].grad)
            continue
        direction, name = port.key.split("/")
        slot = {"kernel": "weight_ih", "recurrent_kernel": "weight_hh", "bias": "bias_ih", "recurrent_bias": "bias_hh"}
        suffix = f"_l{port.layer[4]}" + ("_reverse" if direction == "backward" else "")
        r, z, n = getattr(model.rnn, slot[name] + suffix).grad.chunk(3)
        expected = torch.cat([z, r, n])
        torch.testing.assert_close(computed, expected if expected.dim() == 1 else expected.T)


def test_unused_and_cut_off_layers_have_no_path():
    model, x = build("lstm")
    of = [Port("final_state", "rnn[1]")]
    wrt = [Port("weight", "head", key="weight"), Port("weight", "rnn[0]", key="kernel"), Port("input")]
    with adapter.run(model, Batch(x), Taps.ports(of, wrt)) as open_pullback:
        grads = open_pullback.pull({of[0]: torch.ones(1, B, H, dtype=torch.float64)})
    assert grads[wrt[0]] is None
    assert grads[wrt[1]].any()
    assert grads[wrt[2]] is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_stops_differentiation(kind):
    """With every recurrent layer cut, the output has a gradient at the last layer's output and none below it."""
    model, x = build(kind)
    boundaries = boundaries_by_hand(model, x)
    cut = [Port("output", "rnn[0]"), Port("output", "rnn[1]")]
    wrt = [*cut, Port("output", "emb"), Port("input", index=1), Port("final_state", "rnn[0]")]
    cotangents = torch.randn(3, B, T, 2, dtype=torch.float64)
    with adapter.run(model, Batch(x), Taps.ports([Port("output"), Port("input", "rnn[1]")], wrt, cut)) as open_pullback:
        grads = open_pullback.pull({Port("output"): cotangents})
        assert_grad_close(grads[cut[1]], pull_by_hand(boundaries["output"], cotangents, boundaries["out1"]), "top")
        assert all(grads[port] is None for port in wrt if port != cut[1])
        grads = open_pullback.pull({Port("input", "rnn[1]"): torch.ones(2, B, T, H, dtype=torch.float64)})
        torch.testing.assert_close(grads[cut[0]], torch.ones(2, B, T, H, dtype=torch.float64))
        assert grads[Port("output", "emb")] is None
    uncut = [Port("output", "rnn[1]")]
    with adapter.run(model, Batch(x), Taps.ports([Port("output")], wrt, uncut)) as open_pullback:
        assert open_pullback.pull({Port("output"): cotangents})[Port("output", "rnn[0]")] is None


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_loops_give_what_one_batch_gives(kind, monkeypatch):
    model, x = build(kind, bidirectional=True)
    of, wrt = [Port("output")], [Port("input", index=1), Port("output", "rnn[0]", direction="backward")]
    cotangents = torch.randn(K, B, T, 2, dtype=torch.float64)

    def run():
        with adapter.run(model, Batch(x), Taps.ports(of, wrt)) as open_pullback:
            return open_pullback.pull({of[0]: cotangents})

    reference = run()
    monkeypatch.setattr(pullback, "BUDGET", 1)
    for port, chunked in run().items():
        torch.testing.assert_close(chunked, reference[port])
    monkeypatch.undo()
    original_grad, calls = torch.autograd.grad, []

    def reject_batched(*args, is_grads_batched=False, **options):
        calls.append(is_grads_batched)
        if is_grads_batched:
            raise RuntimeError("no batching rule")
        return original_grad(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", reject_batched)
    for port, looped in run().items():
        torch.testing.assert_close(looped, reference[port])
    assert calls[0] is True
    assert calls.count(False) == K


def test_cells_in_a_loop_have_boundaries_too():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.apart = nn.LSTMCell(F, H), False

        def forward(self, x):
            h = c = x.new_zeros(B, H)
            outputs, self.fed = [], []
            for step in x.unbind(1):
                self.fed.append(step + 0)
                h, c = self.cell(self.fed[-1] if self.apart else step, (h, c))
                outputs.append(h + step.sum(1, keepdim=True))
            return torch.stack(outputs, 1)

    torch.manual_seed(0)
    model, x = Loop().double(), torch.randn(B, T, F, dtype=torch.float64)
    wrt = [Port("output", "cell"), Port("input", "cell"), Port("initial_state", "cell", 1), Port("input")]
    cotangents = torch.randn(3, B, T, H, dtype=torch.float64)
    with adapter.run(model, Batch(x), Taps.ports([Port("output")], wrt)) as open_pullback:
        grads = open_pullback.pull({Port("output"): cotangents})
        assert open_pullback.values[wrt[0]].shape == (B, T, H)
    torch.testing.assert_close(grads[wrt[0]], cotangents)  # direct: not through the loop
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(grads[wrt[3]], pull_by_hand(model(leaf), cotangents, leaf))
    model.apart = True
    output = model(leaf)
    cell_input_grads = torch.stack([pull_by_hand(output, cotangents, step) for step in model.fed], dim=2)
    torch.testing.assert_close(grads[wrt[1]], cell_input_grads)  # without the path that bypasses the cell
    assert grads[wrt[2]].shape == (3, B, H)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_cotangents_within_a_target_give_the_very_gradients_of_torch(dtype):
    torch.manual_seed(0)
    x, w = torch.randn(3, 4, dtype=dtype, requires_grad=True), torch.randn(4, 2, dtype=dtype, requires_grad=True)
    y = torch.tanh(x @ w)
    targets, sources = [y, y * y, x], [x, w, y, torch.randn(2, requires_grad=True)]
    cotangents = [torch.randn_like(target) for target in targets]
    expected = torch.autograd.grad(targets, sources, cotangents, retain_graph=True, allow_unused=True)
    with torch.no_grad():
        pulled = pull_gradients(targets, sources, cotangents, retain_graph=True)
    through_a_network = backward_pass(targets, sources, cotangents)
    for grads in (pulled, through_a_network):
        assert grads[3] is None
        assert all(torch.equal(grad, other) for grad, other in zip(grads[:3], expected[:3], strict=True))


def test_numpy_cotangents_and_a_closed_pullback():
    model, x = build("gru")
    port = Port("output")
    with adapter.run(model, Batch(x), Taps.ports([port], [Port("input", index=1)])) as open_pullback:
        assert open_pullback.pull({port: np.ones((1, B, T, 2))})[Port("input", index=1)].shape == (1, B, T, F)
    with pytest.raises(ModelError, match="closed"):
        open_pullback.pull({port: np.ones((1, B, T, 2))})


def test_errors_name_what_is_there():
    model, x = build("gru")

    def error_text(error_class, *ports):
        with pytest.raises(error_class) as error:
            adapter.run(model, Batch(x), Taps.ports([Port("output")], list(ports)))
        return str(error.value)

    assert "did you mean 'rnn[1]'" in error_text(LayerNotFoundError, Port("output", "rnn[2]"))
    assert "did you mean" in error_text(LayerNotFoundError, Port("weight", "head", key="kernel"))
    assert "The model has no output 5." in error_text(InputError, Port("output", index=5))
    assert "There is no loss" in error_text(InputError, Port("loss"))
