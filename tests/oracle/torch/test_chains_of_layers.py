"""Time Jacobians of models that call library layers one after the other, also on single steps of what they return.

Such a chain is read off the captured pass. The numbers are those of torch's own differentiation of the user's model.
"""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

#: Reads the tensor of the head from the LSTM's output (sample, time, unit) and its final hidden states.
READ = {
    "last step": lambda output, hidden: output[:, -1],
    "a step by its number": lambda output, hidden: output[:, 4, :],
    "after a permutation": lambda output, hidden: output.permute(1, 0, 2)[-1],
    "final state": lambda output, hidden: hidden[-1],
    "contiguous copy": lambda output, hidden: output.transpose(0, 1).contiguous()[6],
    "an activation before": lambda output, hidden: torch.tanh(output)[:, -1],
}
#: Not of a chain: each would be wrong if the step alone were read.
OTHER = {
    "scaled": lambda output, hidden: 2 * output[:, -1],
    "changed in place": lambda output, hidden: output[:, -1].mul_(2),
    "first layer's state": lambda output, hidden: hidden[0],
    "two steps": lambda output, hidden: output[:, -1] + output[:, 3],
    "last step and final state": lambda output, hidden: output[:, -1] + hidden[-1],
    "another step for each sample": lambda output, hidden: output[torch.arange(len(output)), [1, 2, 3, 4]],
    "mean": lambda output, hidden: output.mean(1),
    "hooked": lambda output, hidden: hooked(output)[:, -1],
    "hooked afterwards": lambda output, hidden: hooked(output[:, -1]),
}


def hooked(tensor):
    tensor.register_hook(lambda grad: 3 * grad)
    return tensor


class Reader(nn.Module):
    forwards = 0

    def __init__(self, read, layers=2, batch_first=True):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, layers, batch_first=batch_first)
        self.inner, self.relu, self.head = nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)
        self.read = read

    def forward(self, x):
        Reader.forwards += 1
        if self.lstm.batch_first:
            output, (hidden, _) = self.lstm(x)
        else:
            output, (hidden, _) = self.lstm(x.transpose(0, 1))
            output = output.transpose(0, 1)
        return self.head(self.relu(self.inner(self.read(output, hidden))))


def by_torch(model, x):
    """d output of each sample / d input of the same sample, (sample, unit, time, feature)."""
    whole = torch.autograd.functional.jacobian(model, x)
    return torch.stack([whole[i, :, i] for i in range(len(x))]).numpy()


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 10, 3, dtype=torch.float64)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("read", READ)
def test_a_step_of_a_chain(read, layers, batch_first, x):
    model = Reader(READ[read], layers, batch_first).double()
    Reader.forwards = 0
    with rl.options(certify="always"):
        found = rl.jacobian(model, x)
    assert Reader.forwards == 2
    assert found.certificate.state == "passed"
    np.testing.assert_allclose(found.values, by_torch(model, x), atol=1e-14)
    if read != "final state":
        top = "lstm" if layers == 1 else "lstm[1]"
        below = rl.jacobian(model, x, wrt=f"{top}.output")
        through = rl.jacobian(model, x, of=f"{top}.output", wrt="input")
        both = np.einsum("sotu,stuif->soif", below.values, through.values)
        np.testing.assert_allclose(both, found.values, atol=1e-14)


@pytest.mark.parametrize("read", OTHER)
def test_anything_else_goes_the_long_way(read, x):
    model = Reader(OTHER[read]).double()
    Reader.forwards = 0
    with rl.options(certify="never"):
        found = rl.jacobian(model, x)
    assert Reader.forwards > 1
    np.testing.assert_allclose(found.values, by_torch(model, x), atol=1e-14)


def test_the_layer_below_is_not_reached_through_its_output_but_through_its_state(x):
    model = Reader(READ["final state"], layers=1).double()
    with pytest.raises(rl.errors.DisconnectedError):
        rl.jacobian(model, x, wrt="lstm.output")


@pytest.mark.parametrize("turned", [False, True])
def test_roles_of_axes_are_those_found_by_experiment(turned, x):
    from rnnlens.adapters.protocol import Batch, Port
    from rnnlens.adapters.torch import adapter

    class Turned(Reader):
        def forward(self, x):
            y = super().forward(x)
            return y.transpose(0, 1) if turned else y

    model, ports = Turned(lambda output, hidden: output).double(), [Port("output"), Port("output", "inner")]
    with adapter.pullback(model, Batch(x), [Port("output")], [Port("output", "inner")]) as pullback:
        shown = pullback.layouts
    found = adapter.layouts(model, Batch(x), ports)
    assert {port: shown[port] for port in found} == dict(found)
