"""Loops of other cells than torch's plain ones: normalised weights, custom cells, fused modules called by step."""

from __future__ import annotations

import copy
import random
import warnings

import numpy as np
import pytest
import torch
import torch_loop_models as zoo
from torch import nn
from torch_loops import (
    WrittenOutCell,
    assert_close,
    gradients_or_zero,
    jacobian_rows,
    stack_steps,
    states_of,
    weighted_loss,
    write_out_cells,
)

import rnnlens as rl
from rnnlens.errors import UnsupportedError

F, H, V = zoo.F, zoo.H, zoo.V


@pytest.fixture(autouse=True)
def _warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("weight_name", ["weight_ih", "weight_hh"])
@pytest.mark.parametrize("implementation", ["parametrized", "hooked"])
def test_weight_norm_on_a_cell(implementation, weight_name):
    """With weight normalisation, kernels and their gradients are those of the normalised kernel that the cell uses."""
    model, reference, x = zoo.build(zoo.FedBack), zoo.build(zoo.FedBack), zoo.batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates nn.utils.weight_norm
        (nn.utils.parametrizations.weight_norm if implementation == "parametrized" else nn.utils.weight_norm)(
            model.cell, weight_name
        )
    twin, taps = write_out_cells(reference)
    source = x.clone().requires_grad_()
    output = twin(source)
    kernels = {"kernel": reference.cell.weight_ih, "recurrent_kernel": reference.cell.weight_hh}
    targets = (
        ("loss", weighted_loss(output), {"loss": weighted_loss}),
        ("cell.final_hidden", taps["cell"].values["hidden"][-1].sum(), {"reduce": "sum"}),
    )
    for target, value, options in targets:
        gradients = rl.gradients(model, x, of=target, wrt=["cell.hidden", "weights"], **options)
        assert_close(
            gradients["cell"]["hidden"],
            stack_steps(gradients_or_zero(value, taps["cell"].zeros["hidden"])),
            f"{target} by hidden",
        )
        for name, weight in kernels.items():
            expected = gradients_or_zero(value, [weight])[0].T.reshape(-1, 4, H)
            assert_close(gradients["cell"][name], expected.numpy(), f"{target} by {name}")
    weights = rl.weights(model, x, loss=weighted_loss)
    for name, weight in kernels.items():
        assert_close(weights["cell"][name], weight.detach().T.reshape(-1, 4, H).numpy(), name)
        expected = gradients_or_zero(weighted_loss(output), [weight])[0].T.reshape(-1, 4, H)
        assert_close(weights["cell"][f"{name}_grad"], expected.numpy(), f"{name} gradient")
    by_time = rl.weights(model, x, loss=weighted_loss, by_time=True)["cell"].recurrent_kernel_grad.sum("time")
    assert_close(
        by_time,
        gradients_or_zero(weighted_loss(output), [reference.cell.weight_hh])[0].T.reshape(-1, 4, H).numpy(),
        "by time",
    )
    assert_close(rl.jacobian(model, x), jacobian_rows(output, [source])[..., 0, :, :], "output by input")


def test_a_cell_of_ones_own_and_its_own_weights():
    """Gradients of a custom cell's final states by its weights equal autograd's; no weight counts as disconnected."""
    model, x = zoo.build(zoo.OwnLoop), zoo.batch()
    _, taps = run_twin(model, x)
    parameters = dict(model.cell.named_parameters())
    for target, name in (("cell.final_hidden", "hidden"), ("cell.final_state_1", "state_1")):
        value = taps["cell"].values[name][-1].sum()
        gradients = rl.gradients(model, x, of=target, reduce="sum", wrt="cell*/*")
        assert not gradients.disconnected
        for key, expected in zip(parameters, gradients_or_zero(value, list(parameters.values())), strict=True):
            layer, _, weight = f"cell.{key}".rpartition(".")
            assert_close(gradients[layer][weight], expected, f"{target} by {key}")


def test_gates_of_a_cell_whose_state_comes_back():
    """Gradients of output and final state (no loss) by the gate preactivations of a cell with output feedback."""
    model, x = zoo.build(zoo.FedBack), zoo.batch()
    output, taps = run_twin(model, x)
    for target, value in (("output", output.sum()), ("cell.final_hidden", taps["cell"].values["hidden"][-1].sum())):
        gate_grad = rl.gradients(model, x, of=target, reduce="sum", wrt="cell.gate_preactivation")
        expected = torch.stack(
            [torch.stack(gradients_or_zero(value, taps["cell"].zeros[f"z{k}"]), 1) for k in range(4)], 2
        )
        assert_close(gate_grad.transpose("sample", "time", "gate", "unit"), expected.numpy(), f"{target} by gates")


def run_twin(model, x):
    twin, taps = write_out_cells(model)
    return twin(x), taps


class Decoder(nn.Module):
    """An encoder called once, and a decoder called at each step with attention by its state and its previous output."""

    def __init__(self, kind, layers, read_cells):
        super().__init__()
        self.encoder, self.decoder = kind(F, H, batch_first=True), kind(H + V, H, layers, batch_first=True)
        self.head, self.layers, self.read_cells = nn.Linear(H, V), layers, read_cells

    def forward(self, x):
        memory, state = self.encoder(x)
        pair = isinstance(state, tuple)
        state = tuple(torch.cat([s] * self.layers) for s in (state if pair else (state,)))
        y, outputs = x.new_zeros(len(x), V), []
        for _ in range(3):
            weights = torch.softmax((memory * state[0][-1][:, None]).sum(-1), 1)
            context = (weights[..., None] * memory).sum(1)
            top, state = self.decoder(torch.cat([context, y], 1)[:, None], state if pair else state[0])
            state = state if pair else (state,)
            y = self.head(top[:, 0] + (state[1][-1] if self.read_cells else 0))
            outputs.append(y)
        return torch.stack(outputs, 1)


class Stack(nn.Module):
    """A loop of written-out cells that computes a fused module and shares its parameters."""

    def __init__(self, rnn):
        super().__init__()
        self.pair, self.cells, self.units = isinstance(rnn, nn.LSTM), [], rnn.hidden_size
        for layer in range(rnn.num_layers):
            cell = (nn.LSTMCell if self.pair else nn.GRUCell)(rnn.hidden_size if layer else rnn.input_size, self.units)
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                setattr(cell, name, getattr(rnn, f"{name}_l{layer}"))
            self.cells.append(WrittenOutCell(cell))

    def forward(self, x, state=None):
        if state is None:
            zeros = x.new_zeros(len(self.cells), len(x), self.units)
            state = (zeros, zeros) if self.pair else zeros
        states = [tuple(s[i] for s in state) if self.pair else state[i] for i in range(len(self.cells))]
        outputs = []
        for value in x.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = cell(value, states[i])
                value = states[i][0] if self.pair else states[i]
            outputs.append(value)
        final = tuple(torch.stack(s) for s in zip(*states, strict=True)) if self.pair else torch.stack(states)
        return torch.stack(outputs, 1), final


def unroll_fused(model):
    twin, taps = copy.copy(model), {}
    twin._modules = dict(model._modules)
    for name in ("encoder", "decoder"):
        stack = twin._modules[name] = Stack(getattr(model, name))
        is_stacked = len(stack.cells) > 1
        taps |= {f"{name}[{i}]" if is_stacked else name: cell.taps for i, cell in enumerate(stack.cells)}
    return twin, taps


@pytest.mark.parametrize(
    ("kind", "layers", "read_cells"), [(nn.GRU, 1, False), (nn.LSTM, 1, True), (nn.LSTM, 2, True), (nn.GRU, 2, False)]
)
def test_a_fused_module_called_step_by_step(kind, layers, read_cells):
    """Gradients and time Jacobians of a fused decoder with attention, output feedback and c_t read at every step."""
    model, x = zoo.build(Decoder, kind, layers, read_cells), zoo.batch()
    twin, taps = unroll_fused(model)
    source = x.clone().requires_grad_()
    output = twin(source)
    node_states = [(node, state) for node, tap in taps.items() for state in states_of(tap)]
    state_names = [f"{node}.{state}" for node, state in node_states]
    for target, value, options in (
        ("loss", weighted_loss(output), {"loss": weighted_loss}),
        ("output", output.sum(), {"reduce": "sum"}),
    ):
        gradients = rl.gradients(model, x, of=target, wrt=["input", *state_names], **options)
        assert_close(gradients["model"]["input"], gradients_or_zero(value, [source])[0], f"{target} by input")
        for node, state in node_states:
            assert_close(
                gradients[node][state],
                stack_steps(gradients_or_zero(value, taps[node].zeros[state])),
                f"{target} by {node}.{state}",
            )
    assert_close(rl.jacobian(model, x), jacobian_rows(output, [source])[..., 0, :, :], "output by input")
    for node, state in node_states:
        assert_close(
            rl.jacobian(model, x, wrt=f"{node}.{state}"),
            jacobian_rows(output, taps[node].zeros[state]),
            f"J by {node}.{state}",
        )
        values = torch.stack(taps[node].values[state], 1)
        assert_close(
            rl.jacobian(model, x, of=f"{node}.{state}"),
            jacobian_rows(values, [source])[..., 0, :, :],
            f"J of {node}.{state}",
        )
        by_hidden = jacobian_rows(values, taps[node].zeros["hidden"])
        assert_close(
            rl.jacobian(model, x, of=f"{node}.{state}", wrt=f"{node}.hidden"), by_hidden, f"J within {node}.{state}"
        )
    last_hidden = taps[list(taps)[-1]].values["hidden"][-1].sum()
    gradients = rl.gradients(model, x, of=f"{list(taps)[-1]}.final_hidden", reduce="sum", wrt=state_names)
    for node, state in node_states:
        expected = stack_steps(gradients_or_zero(last_hidden, taps[node].zeros[state]))
        if expected.any():
            assert_close(gradients[node][state], expected, f"last state by {node}.{state}")


def test_a_state_that_mixes_samples_has_no_jacobian_of_each():
    """If a state mixes samples, time Jacobians from or to the model's boundaries or states raise UnsupportedError."""

    class Centred(zoo.PlainLoop):
        def forward(self, x):
            h, c = zoo.zeros(x, H, H)
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
                h = h - h.mean(0)
            return self.head(h)

    model, x = zoo.build(Centred), zoo.batch()
    for options in ({}, {"of": "cell.hidden"}, {"of": "cell.cell", "wrt": "cell.hidden"}):
        with pytest.raises(UnsupportedError, match="sample"):
            rl.jacobian(model, x, **options)


@pytest.mark.parametrize("generator", ["random", "own", "numpy"])
def test_what_is_drawn_in_training_is_drawn_in_every_verb(generator):
    """With a seed, each verb has the teacher forcing and dropout of a run of the model with the same seed."""

    class Drawing(zoo.TeacherForced):
        def forward(self, x):
            h, c, y = zoo.zeros(x, H, H, F)
            outputs = []
            for t in range(x.shape[1]):
                chance = {"random": random, "own": self.own, "numpy": self.numpy}[generator].random()
                h, c = self.cell(x[:, t] if chance < 0.5 else y, (h, c))
                y = self.head(nn.functional.dropout(h, 0.4, self.training))
                outputs.append(y)
            return torch.stack(outputs, 1)

    def seed_all():
        random.seed(7)
        torch.manual_seed(7)

    model, x = zoo.build(Drawing, True), zoo.batch()
    model.numpy = np.random.default_rng(4)
    model.train()
    seed_all()
    source = x.clone().requires_grad_()
    output, taps = run_twin(model, source)
    seed_all()
    expected = stack_steps(gradients_or_zero(weighted_loss(output), taps["cell"].zeros["hidden"]))
    options = {"loss": weighted_loss, "training": True, "seed": 7}
    assert_close(rl.trace(model, x, **options)["cell"].hidden_grad, expected, "trace")
    assert_close(rl.gradients(model, x, wrt="cell.hidden", **options), expected, "gradients")
    assert_close(
        rl.gradients(model, x, wrt="input", **options),
        gradients_or_zero(weighted_loss(output), [source])[0],
        "gradients by input",
    )
    assert_close(
        rl.jacobian(model, x, training=True, seed=7), jacobian_rows(output, [source])[..., 0, :, :], "Jacobian"
    )


@pytest.mark.parametrize("state_change", ["detach", "residual", "scale"])
def test_weight_gradients_by_time_of_a_loop_in_several_runs(state_change):
    """Weight gradients by time cover all steps of a loop in order, though the model changes the state between steps."""
    model, x = zoo.build(zoo.ChangesState, state_change), zoo.batch()
    output, taps = run_twin(model, x)
    weight = model.cell.weight_hh
    states = [torch.zeros(zoo.B, H, dtype=torch.float64), *taps["cell"].values["hidden"]]
    weight_grads = rl.weights(model, x, loss=weighted_loss, by_time=True)["cell"].recurrent_kernel_grad
    assert weight_grads.sizes["time"] == zoo.T
    assert_close(
        weight_grads.sum("time"),
        gradients_or_zero(weighted_loss(output), [weight])[0].T.reshape(-1, 4, H).numpy(),
        "sum",
    )
    gate_grads = torch.stack(
        [torch.stack(gradients_or_zero(weighted_loss(output), taps["cell"].zeros[f"z{k}"]), 1) for k in range(4)], 2
    )
    expected = torch.einsum("bi,bgu->igu", states[1].detach(), gate_grads[:, 1])
    assert_close(weight_grads.isel(time=1), expected.numpy(), "the second step")
    norms = rl.weights(model, x, loss=weighted_loss, by_time=True, measure="norm")["cell"].recurrent_kernel_grad_norm
    assert_close(norms, np.sqrt((weight_grads.values**2).sum((1, 3))), "norms")


class Tied(nn.Module):
    """Two cells that share kernels, and all or none of their biases."""

    def __init__(self, share_biases):
        super().__init__()
        self.one, self.two, self.head = nn.LSTMCell(F, H), nn.LSTMCell(F, H), nn.Linear(2 * H, V)
        for name in ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if share_biases else ())):
            setattr(self.two, name, getattr(self.one, name))

    def forward(self, x):
        first, second = (zoo.zeros(x, H, H) for _ in range(2))
        outputs = []
        for t in range(x.shape[1]):
            first, second = self.one(x[:, t], first), self.two(0.5 * x[:, t], second)
            outputs.append(self.head(torch.cat([first[0], second[0]], 1)))
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("share_biases", [True, False])
def test_cells_with_tied_weights(share_biases):
    """Cells with tied weights have their own states, gates and biases; summed gradients of tied weights do not warn."""
    model, x = zoo.build(Tied, share_biases), zoo.batch()
    output, taps = run_twin(model, x)
    trace = rl.trace(model, x, loss=weighted_loss)
    for node in ("one", "two"):
        for state in ("hidden", "cell"):
            expected = stack_steps(gradients_or_zero(weighted_loss(output), taps[node].zeros[state]))
            assert_close(trace[node][f"{state}_grad"], expected, f"{node}.{state}")
        gates = torch.stack([torch.stack(taps[node].values[f"z{k}"], 1) for k in range(4)], 2)
        assert_close(trace[node].gate_preactivation, gates.detach(), f"gates of {node}")
        assert_close(
            rl.gradients(model, x, of=f"{node}.final_hidden", reduce="sum", wrt=f"{node}.hidden"),
            stack_steps(gradients_or_zero(taps[node].values["hidden"][-1].sum(), taps[node].zeros["hidden"])),
            f"within {node}",
        )
        weights = rl.weights(model, x, loss=weighted_loss)[node]
        if share_biases:
            assert_close(
                weights.recurrent_kernel_grad,
                gradients_or_zero(weighted_loss(output), [model.one.weight_hh])[0].T.reshape(-1, 4, H),
                node,
            )
        bias = gradients_or_zero(weighted_loss(output), [getattr(model, node).bias_ih])[0].reshape(4, H)
        assert_close(weights.bias_grad, bias, f"bias of {node}")


class Chunks(nn.Module):
    """A fused module called on successive chunks, whose states are detached, or normalised and halved, in between."""

    def __init__(self, state_change):
        super().__init__()
        self.state_change, self.encoder, self.norm = state_change, nn.LSTM(F, H, batch_first=True), nn.LayerNorm(H)
        self.decoder, self.head = nn.GRU(H, H, batch_first=True), nn.Linear(H, V)

    def forward(self, x):
        state, outputs = None, []
        for chunk in x.split(2, 1):
            if state is not None and self.state_change == "detach":
                state = tuple(s.detach() for s in state)
            elif state is not None:
                state = (self.norm(state[0]), 0.5 * state[1])
            hidden, state = self.encoder(chunk, state)
            outputs.append(hidden + state[1][-1][:, None])
        return self.head(self.decoder(torch.cat(outputs, 1))[0])


@pytest.mark.parametrize("state_change", ["detach", "norm"])
def test_a_fused_module_over_pieces_of_a_sequence(state_change):
    model, x = zoo.build(Chunks, state_change), zoo.batch()
    twin, taps = unroll_fused(model)
    source = x.clone().requires_grad_()
    output = twin(source)
    assert_close(rl.jacobian(model, x), jacobian_rows(output, [source])[..., 0, :, :], "output by input")
    chunk_steps = {f"encoder#{i}": steps for i, steps in enumerate((slice(0, 2), slice(2, 4), slice(4, 5)))}
    for name, steps in (chunk_steps if state_change == "detach" else {"encoder": slice(None)}).items():
        for state in ("hidden", "cell"):
            zeros = taps["encoder"].zeros[state][steps]
            assert_close(
                rl.jacobian(model, x, wrt=f"{name}.{state}"), jacobian_rows(output, zeros), f"J by {name}.{state}"
            )
            state_grad = rl.gradients(model, x, of="output", reduce="sum", wrt=f"{name}.{state}")
            assert_close(state_grad, stack_steps(gradients_or_zero(output.sum(), zeros)), f"output by {name}.{state}")


class Changed(nn.Module):
    """A library layer called on successive chunks, whose states are normalised or reset in between."""

    def __init__(self, kind, layers, size, state_change):
        super().__init__()
        self.size, self.state_change = size, state_change
        self.encoder, self.decoder = kind(F, H, layers, batch_first=True), nn.GRU(H, H, batch_first=True)
        self.norm = nn.LayerNorm(H)
        self.register_buffer("keep", torch.tensor([[1.0, 1, 0, 1, 1], [1, 1, 1, 1, 0]]))

    def forward(self, x):
        state, outputs, step = None, [], 0
        for chunk in x.split(self.size, 1):
            if state is not None:
                keep = self.keep[:, step, None].to(x)
                change = self.norm if self.state_change == "norm" else lambda s, keep=keep: s * keep
                state = tuple(map(change, state)) if isinstance(state, tuple) else change(state)
            hidden, state = self.encoder(chunk, state)
            outputs.append(hidden)
            step += chunk.shape[1]
        return self.decoder(torch.cat(outputs, 1))[0]


@pytest.mark.pairs
@pytest.mark.parametrize("state_change", ["norm", "reset"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("kind", "layers"), [(nn.GRU, 1), (nn.LSTM, 1), (nn.LSTM, 2)])
def test_ends_inside_a_fused_module_whose_states_the_model_changes(kind, layers, size, state_change):
    """Time Jacobians and gradients from and to every state include the model's changes of the state between chunks."""
    model, x = zoo.build(Changed, kind, layers, size, state_change), zoo.batch()
    twin, taps = unroll_fused(model)
    source = x.clone().requires_grad_()
    output = twin(source)
    nodes = ("encoder",) if layers == 1 else ("encoder[0]", "encoder[1]")
    taps_by_name = {f"{node}.{state}": taps[node] for node in nodes for state in states_of(taps[node])}
    for name, tap in taps_by_name.items():
        state = name.rpartition(".")[2]
        zeros, values = tap.zeros[state], torch.stack(tap.values[state], 1)
        assert_close(rl.jacobian(model, x, wrt=name), jacobian_rows(output, zeros), f"J output by {name}")
        assert_close(
            rl.jacobian(model, x, of=name), jacobian_rows(values, [source])[..., 0, :, :], f"J {name} by input"
        )
        assert_close(rl.jacobian(model, x, of=name, wrt=name), jacobian_rows(values, zeros), f"J {name} by itself")
        gradients = rl.gradients(model, x, of="output", reduce="sum", wrt=name)
        assert_close(gradients, stack_steps(gradients_or_zero(output.sum(), zeros)), f"output by {name}")
        for target, value in ((name, values.sum()), (name.replace(".", ".final_"), values[:, -1].sum())):
            gradients = rl.gradients(model, x, of=target, reduce="sum", wrt=["input", *taps_by_name])
            assert_close(gradients["model"]["input"], gradients_or_zero(value, [source])[0], f"{target} by input")
            for wrt, wrt_tap in taps_by_name.items():
                node, _, wrt_state = wrt.rpartition(".")
                assert_close(
                    gradients[node][wrt_state],
                    stack_steps(gradients_or_zero(value, wrt_tap.zeros[wrt_state])),
                    f"{target} by {wrt}",
                )
