"""Recurrent cells over the nodes of a graph: states (sample, node, unit) have other units than inputs have features."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import rnnlens as rl

SAMPLES, STEPS, NODES = 5, 6, 4


class GraphCell(nn.Module):
    """Gated cell that also reads the neighbours of each node, by one weight for each power of the graph."""

    def __init__(self, features, units, *, with_powers):
        super().__init__()
        self.units, self.with_powers = units, with_powers
        self.register_buffer("graph", torch.rand(NODES, NODES).softmax(1))
        shape = (2, features + units, 3 * units) if with_powers else (2 * (features + units), 3 * units)
        self.weight = nn.Parameter(0.5 * torch.randn(shape))

    def forward(self, x, h):
        own = torch.cat([x, h], -1)
        read = torch.stack([own, self.graph @ own])
        if self.with_powers:
            values = torch.einsum("pbnf,pfu->bnu", read, self.weight)
        else:
            values = torch.cat([*read], -1) @ self.weight
        update, reset, candidate = values.chunk(3, -1)
        return update.sigmoid() * h + (1 - update.sigmoid()) * torch.tanh(reset.sigmoid() * candidate)


class Traffic(nn.Module):
    """Cells above each other, each with the states of all nodes; a forecast of every node after the last step."""

    def __init__(self, sizes, *, with_powers):
        super().__init__()
        self.cells = nn.ModuleList(GraphCell(*pair, with_powers=with_powers) for pair in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], 2)

    def forward(self, x):
        states = [x.new_zeros(len(x), NODES, cell.units) for cell in self.cells]
        for values in x.unbind(1):
            for i, cell in enumerate(self.cells):
                values = states[i] = cell(values, states[i])
        return self.head(values)


@pytest.mark.parametrize("with_powers", [False, True])
@pytest.mark.parametrize("sizes", [(3, 5), (2, 3, 3), (3, 5, 4), (4, 2, 4)])
def test_every_layer_of_a_graph_is_traced_by_node_and_unit(sizes, with_powers):
    torch.manual_seed(0)
    model = Traffic(sizes, with_powers=with_powers).double()
    x = torch.randn(SAMPLES, STEPS, NODES, sizes[0], dtype=torch.float64)
    y = torch.randn(SAMPLES, NODES, 2, dtype=torch.float64)
    returned = {f"cells.{i}": [] for i in range(len(model.cells))}
    hooks = []
    for name in returned:
        hook = model.get_submodule(name).register_forward_hook(
            lambda _cell, _args, state, name=name: returned[name].append(state.view_as(state)) or returned[name][-1]
        )
        hooks.append(hook)
    leaf = x.clone().requires_grad_()
    loss = mse_loss(model(leaf), y)
    for hook in hooks:
        hook.remove()
    trace = rl.trace(model, x, y, loss=mse_loss)
    assert trace.certificate.state == "passed"
    assert list(trace) == list(returned)
    for (name, states), features in zip(returned.items(), sizes, strict=False):
        layer = trace[name]
        if features != model.get_submodule(name).units:
            assert layer.hidden.dims == layer.hidden_grad.dims == ("sample", "time", "position", "unit")
            assert layer.input.dims == ("sample", "time", "position", "feature")
        expected = torch.stack(torch.autograd.grad(loss, states, retain_graph=True), 1)
        np.testing.assert_allclose(layer.hidden_grad, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(layer.hidden, torch.stack(states, 1).detach(), rtol=0, atol=1e-12)
        by_state = rl.gradients(model, x, y, loss=mse_loss, wrt=f"{name}.hidden")
        np.testing.assert_allclose(by_state.values.reshape(expected.shape), expected, rtol=0, atol=1e-12)
    gradient = rl.gradients(model, x, y, loss=mse_loss, wrt="input")
    assert gradient.dims == ("sample", "time", "axis_2", "feature")
    np.testing.assert_allclose(gradient, torch.autograd.grad(loss, leaf)[0], rtol=0, atol=1e-12)
    full = torch.autograd.functional.jacobian(model, x)
    own = torch.stack([full[i, :, :, i] for i in range(SAMPLES)]).flatten(-2).flatten(1, 2)
    jacobian = rl.jacobian(model, x)
    assert jacobian.dims == ("sample", "out_unit", "in_time", "in_feature")
    assert "in_channel" not in jacobian.coords
    np.testing.assert_allclose(jacobian, own, rtol=0, atol=1e-12)
