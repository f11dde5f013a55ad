"""Cells that keep their state in attributes, declared by ``rl.torch.cell``, against retained gradients of autograd."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.errors import InputError, ModelError

UNITS = 4
X = torch.tensor(np.random.default_rng(0).normal(size=(5, 6, 3)))
Y = torch.zeros(5, 2).double()
mse = nn.functional.mse_loss


class Numbers(nn.Module):
    """A neuron whose potential begins as a number, and whose current begins as None."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.mem, self.v = nn.Linear(UNITS, UNITS), 0.0, None

    def forward(self, x):
        v = torch.zeros_like(x) if self.v is None else self.v
        self.v = 0.5 * v + torch.tanh(x)
        self.mem = 0.9 * torch.sigmoid(self.recurrent(self.mem + torch.zeros_like(x))) + self.v
        return torch.sigmoid(self.mem)

    advance = forward

    def reset(self):
        self.mem, self.v = 0.0, None


class Buffers(nn.Module):
    """A neuron whose states are buffers, empty before the first step; it returns its potential itself."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.Linear(UNITS, UNITS)
        self.register_buffer("mem", torch.zeros(0))
        self.register_buffer("v", torch.zeros(0))

    def forward(self, x):
        if self.mem.shape != x.shape:
            self.mem, self.v = torch.zeros_like(x), torch.zeros_like(x)
        self.v = 0.5 * self.v + x
        self.mem = torch.tanh(self.recurrent(self.mem)) + self.v
        return self.mem

    advance = forward

    def reset(self):
        self.mem, self.v = torch.zeros(0), torch.zeros(0)


class Network(nn.Module):
    """A loop over the neuron's forward or another method, which keeps the states of the last call."""

    def __init__(self, cell, method):
        super().__init__()
        self.enter, self.cell, self.out, self.method = nn.Linear(3, UNITS), cell, nn.Linear(UNITS, 2), method

    def forward(self, x):
        self.cell.reset()
        self.mems, self.vs = [], []
        for t in range(x.shape[1]):
            run = self.cell if self.method == "forward" else self.cell.advance
            y = run(self.enter(x[:, t]))
            for states, state in ((self.mems, self.cell.mem), (self.vs, self.cell.v)):
                if state.requires_grad:
                    state.retain_grad()
                states.append(state)
        return self.out(y)


def network(kind, method):
    torch.manual_seed(0)
    model = Network(kind(), method).double()
    mse(model(X), Y).backward()
    truth = {
        name: torch.stack([getattr(state, kind) for state in states], 1).numpy()
        for states, names in ((model.mems, ("mem", "mem_grad")), (model.vs, ("v", "v_grad")))
        for kind, name in zip(("data", "grad"), names, strict=True)
    }
    truth["weight"] = model.cell.recurrent.weight.grad.numpy().copy()
    model.mems = model.vs = None
    model.cell.reset()
    model.zero_grad()
    return model, truth


@pytest.mark.parametrize("method", ["forward", "advance"])
@pytest.mark.parametrize("kind", [Numbers, Buffers])
def test_attributes_are_the_states(kind, method):
    model, truth = network(kind, method)
    before = {**vars(model.cell), **model.cell._buffers}
    with rl.torch.cell(model.cell, method=method, state=("mem", "v")):
        trace = rl.trace(model, X, Y, loss=mse)
        gradients = rl.gradients(model, X, Y, loss=mse, wrt="weights")
    for name in ("mem", "mem_grad", "v", "v_grad"):
        np.testing.assert_allclose(trace["cell"][name].values, truth[name], atol=1e-13, err_msg=name)
    np.testing.assert_allclose(gradients["cell.recurrent.weight"], truth["weight"], atol=1e-13)
    assert trace.certificate.state == gradients.certificate.state == "passed"
    after = {**vars(model.cell), **model.cell._buffers}
    assert all(after[name] is value for name, value in before.items())
    assert after.keys() == before.keys()


class EitherWay(nn.Module):
    """A neuron that takes its potential or keeps it in a buffer of the same name, and a constant beside it."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.Linear(UNITS, UNITS)
        self.register_buffer("mem", torch.zeros(0))

    def forward(self, x, mem=None):
        if mem is not None:
            raise TypeError("the potential is kept in this neuron")
        if self.mem.shape != x.shape:
            self.mem = torch.zeros_like(x)
        self.fired = (self.mem.detach() > 0).to(x)
        self.mem = torch.tanh(self.recurrent(self.mem)) + 0.5 * x - 0.1 * self.fired
        return torch.sigmoid(self.mem)

    def reset(self):
        self.mem, self.v = torch.zeros(0), torch.zeros(0)


def test_the_line_in_an_error_declares_an_attribute_that_an_argument_has_the_name_of():
    torch.manual_seed(0)
    model = Network(EitherWay(), "forward").double()
    mse(model(X), Y).backward()
    hidden, grad = (torch.stack([getattr(state, kind) for state in model.mems], 1) for kind in ("data", "grad"))
    model.mems = model.vs = None
    model.cell.reset()
    with pytest.raises(ModelError, match=r"rl\.layers\(model, x\) says why"):
        rl.jacobian(model, X)
    with pytest.raises(ModelError) as caught:
        rl.layers(model, X)
    line = re.search(r"cell: it keeps a state in itself: (rl\.torch\.cell\(.*?\))", str(caught.value))[1]
    assert line == "rl.torch.cell(model.cell, state='self.mem')"
    with rl.torch.cell(model.cell, state="self.mem"):
        trace = rl.trace(model, X, Y, loss=mse)
    np.testing.assert_allclose(trace["cell"].mem.values, hidden.numpy(), atol=1e-13)
    np.testing.assert_allclose(trace["cell"].mem_grad.values, grad.numpy(), atol=1e-13)
    assert trace.certificate.state == "passed"


def test_the_jacobian_between_states_is_that_of_autograd():
    model, _ = network(Buffers, "forward")
    model(X)
    last, first = model.mems[4], model.mems[2]
    rows = [torch.autograd.grad(last[:, i].sum(), first, retain_graph=True)[0] for i in range(UNITS)]
    model.cell.reset()
    with rl.torch.cell(model.cell, state=("mem", "v")):
        jacobian = rl.jacobian(model, X, of="cell.mem", wrt="cell.mem")
    block = jacobian.isel(out_time=4, in_time=2)
    np.testing.assert_allclose(block.values, torch.stack(rows, 1).numpy(), atol=1e-13)
    assert jacobian.certificate.state != "failed"


def test_a_declaration_that_leaves_out_a_state_is_not_certified():
    model, _ = network(Numbers, "forward")
    with rl.torch.cell(model.cell, state="mem"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = rl.trace(model, X, Y, loss=mse)
    assert any("cell: the replayed output differs" in str(warning.message) for warning in caught)
    assert not all(check.ok for check in trace.checks)


def test_wrong_declarations_are_refused():
    cell = Numbers()
    with pytest.raises(InputError, match="among the arguments x; or only attributes that the cell has"):
        rl.torch.cell(cell, state="membrane")
    with pytest.raises(InputError, match="has no such method"):
        rl.torch.cell(cell, method="integrate", state="mem")
    with pytest.raises(InputError, match="state= with the names of attributes"):
        rl.torch.cell(cell, method="advance")


class WholeSequence(nn.Module):
    """A spiking layer (time, sample, unit) that keeps its voltage and takes all steps in one call."""

    def __init__(self, scale=0.5):
        super().__init__()
        self.voltage, self.scale, self.seen = 0.0, scale, []

    def one_step(self, x):
        self.voltage = self.voltage + self.scale * (x - self.voltage)
        spike = torch.sigmoid(4 * (self.voltage - 0.2))
        self.voltage = (1 - spike) * self.voltage
        self.seen.append(self.voltage)
        return spike

    def forward(self, sequence):
        self.voltage, self.seen = 0.0, []
        return torch.stack([self.one_step(x) for x in sequence])


class LeakyAverage(nn.Module):
    """A leaky average (sample, time, unit) with its loop in its forward, which keeps the last value in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.keep = nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        value, values = self.average, []
        for t in range(x.shape[1]):
            value = self.keep * value + (1 - self.keep) * x[:, t]
            values.append(value)
        self.average = value
        return torch.stack(values, 1)


class InOneCall(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.enter, self.layer = nn.Linear(3, 4), layer

    def forward(self, x):
        x = self.enter(x)
        if isinstance(self.layer, WholeSequence):
            return self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.layer(x)


def test_a_module_that_takes_a_whole_sequence_is_named_with_a_declaration_that_works():
    torch.manual_seed(0)
    model, x = InOneCall(WholeSequence()).double(), torch.randn(4, 6, 3, dtype=torch.float64)

    def loss(output):
        return (output**2).sum()

    with pytest.raises(ModelError, match=r"layer keeps self\.voltage, which it computed") as caught:
        rl.trace(model, x, loss=loss)
    line = "rl.torch.cell(model.layer, method='one_step', state='self.voltage')"
    assert line in str(caught.value)
    eval(line)
    trace = rl.trace(model, x, loss=loss)
    value = loss(model(x))
    grads = torch.autograd.grad(value, model.layer.seen, materialize_grads=True)
    voltages = torch.stack(model.layer.seen, 1).detach().numpy()
    np.testing.assert_allclose(trace["layer"].voltage.values, voltages, atol=1e-13)
    np.testing.assert_allclose(trace["layer"].voltage_grad.values, torch.stack(grads, 1).numpy(), atol=1e-13)
    assert trace.certificate.state == "passed"


def test_a_loop_in_the_forward_of_a_module_that_keeps_its_end_is_named():
    model = InOneCall(LeakyAverage())
    with pytest.raises(ModelError, match=r"layer keeps self\.average, which it computed") as caught:
        rl.trace(model, torch.randn(4, 6, 3), loss=lambda output: (output**2).sum())
    assert "write h = rl.torch.step(lambda x, h: ..., x[:, t], h) in its loop" in str(caught.value)
    assert model.layer.average.shape == ()
