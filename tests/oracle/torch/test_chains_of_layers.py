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


def written(tensor):
    """Change a tensor's values without a change of its version."""
    tensor.data.mul_(0.5)
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


class Typed(nn.Module):
    """Layers of one kind after an embedding or numbers, and a head that reads a step; ``branch`` changes the pass."""

    branch = None

    def __init__(self, kind, read, ids):
        super().__init__()
        self.table = nn.Embedding(7, 3) if ids else nn.Identity()
        self.lower, self.upper = kind(3, 5, batch_first=True), kind(5, 4, batch_first=True)
        self.head, self.read = nn.Linear(4, 2), read

    def forward(self, x):
        inner = self.lower(self.table(x))[0]
        output, state = self.upper(inner)
        hidden = state[0] if isinstance(state, tuple) else state
        if self.branch is not None:
            output = self.branch(self, output)
        return self.head(self.read(output, hidden))


KINDS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "relu": lambda *sizes, **how: nn.RNN(*sizes, nonlinearity="relu", **how),
}
BRANCHES = {
    "changed in place": lambda model, output: output.mul_(2.0),
    "detached": lambda model, output: output.detach() + 0 * output,
    "called twice": lambda model, output: (
        model.upper(model.lower(torch.ones(4, 6, 3, dtype=output.dtype))[0])[0] + output
    ),
    "hooked": lambda model, output: hooked(output),
}


def typed(kind, read, ids):
    torch.manual_seed(1)
    x = torch.randint(0, 7, (4, 6)) if ids else torch.randn(4, 6, 3, dtype=torch.float64)
    return Typed(KINDS[kind], READ[read], ids).double(), x, torch.randn(4, 2, dtype=torch.float64)


def arrays(capture):
    """All arrays of a capture by their place, also None."""
    found = {
        "loss": capture.loss,
        "outputs": capture.outputs,
        "order": capture.order,
        "inside": capture.recurrent_weight_names,
    }
    found |= {f"x{i}": grad for i, grad in enumerate(capture.input_grads)} | dict(capture.outside_weight_grads)
    for call in capture.calls:
        for name, value in vars(call).items():
            parts = value if isinstance(value, tuple) else [value]
            if name == "weight_grads" and value is not None:
                parts = [value[key] for key in sorted(value)]
            if name == "cell":
                parts = [value.kind, *value.weights().values()]
            found |= {f"{call.layer}.{name}{i}": part for i, part in enumerate(parts)}
    return found


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("read", ["a step by its number", "final state"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_modules_capture_what_kernels_do(kind, read, ids, boundaries):
    from rnnlens.adapters.protocol import Batch, CaptureRequest
    from rnnlens.adapters.torch.capture import capture
    from rnnlens.adapters.torch.chain import capture_chain

    model, x, y = typed(kind, read, ids)
    batch = Batch(x, y, loss=nn.functional.mse_loss, seed=0)
    request = CaptureRequest(boundaries=boundaries, loss=True)
    assert capture_chain(model, batch, request) is None
    whole, short = arrays(capture(model, batch, request)), arrays(capture_chain(model, batch, request))
    assert whole.keys() == short.keys()
    for place, value in whole.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(short[place], value, rtol=0, atol=1e-15, msg=place)
        else:
            assert short[place] == value, place


def assert_same(one, other):
    assert list(one) == list(other)
    for layer in one:
        assert list(one[layer].dataset.data_vars) == list(other[layer].dataset.data_vars)
        for name, array in one[layer].dataset.data_vars.items():
            np.testing.assert_array_equal(array.values, other[layer].dataset[name].values, err_msg=name)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_pass_that_is_a_chain_no_more_goes_the_long_way(branch):
    model, x, y = typed("LSTM", "last step", ids=False)
    rl.trace(model, x, y, loss=nn.functional.mse_loss)
    Typed.branch = staticmethod(BRANCHES[branch])
    try:
        again = rl.trace(model, x, y, loss=nn.functional.mse_loss)
        fresh = typed("LSTM", "last step", ids=False)[0]
        first = rl.trace(fresh, x, y, loss=nn.functional.mse_loss)
    finally:
        Typed.branch = None
    assert again.certificate.state == first.certificate.state
    assert_same(again, first)


@pytest.mark.parametrize("change", ["frozen", "tied", "hook", "initial state", "autocast", "dropout"])
def test_what_hooks_of_modules_cannot_capture_goes_the_long_way(change):
    model, x, y = typed("RNN", "last step", ids=False)
    ask = {"loss": nn.functional.mse_loss}
    rl.trace(model, x, y, **ask)
    if change == "frozen":
        model.lower.requires_grad_(False)
    if change == "tied":
        model.upper = model.lower = nn.RNN(3, 3, batch_first=True).double()
        model.head = nn.Linear(3, 2).double()
    if change == "hook":
        model.upper.register_forward_hook(lambda module, args, output: (2 * output[0], output[1]))
    if change == "initial state":
        ask["initial_state"] = {"upper": [np.ones((4, 4))]}
    if change == "dropout":
        model.table = nn.Dropout(0.5)
        ask["training"] = True
    with torch.autocast("cpu", enabled=change == "autocast"):
        one, other = (rl.trace(model, x, y, **ask) for _ in range(2))
    assert one.certificate.state == other.certificate.state != "failed"
    assert_same(other, one)


class Writer(Reader):
    """Writes to the LSTM's output through ``.data``, which no version counter shows."""

    def __init__(self, when):
        super().__init__(None, layers=1)
        self.when = when

    def forward(self, x):
        output, _ = self.lstm(x)
        read = self.inner(written(output) if self.when == "before it is read" else output)
        if self.when == "after it was read":
            written(output)
        return self.head(self.relu(read))


@pytest.mark.parametrize("when", ["before it is read", "after it was read"])
def test_a_write_that_changes_no_version_is_seen(when, x):
    model = Writer(when).double()
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(leaf).square().mean(), leaf)[0].numpy()
    for _ in range(2):  # a chain of the first pass would be captured by hooks of its modules in the second
        trace = rl.trace(model, x, loss=lambda output: output.square().mean())
        np.testing.assert_allclose(trace["lstm"].input_grad.values, expected, rtol=0, atol=1e-15)
        assert trace.certificate.state == "passed"
