"""Time Jacobians of chains of library layers, also chains that read a single step of a layer's output.

The chain is derived from the captured pass; the Jacobians must equal autograd's on the unmodified model.
"""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

#: Functions that return the head's input, given the LSTM's output (sample, time, unit) and final hidden states.
READOUTS = {
    "last step": lambda output, hidden: output[:, -1],
    "a step by its number": lambda output, hidden: output[:, 4, :],
    "after a permutation": lambda output, hidden: output.permute(1, 0, 2)[-1],
    "final state": lambda output, hidden: hidden[-1],
    "contiguous copy": lambda output, hidden: output.transpose(0, 1).contiguous()[6],
    "an activation before": lambda output, hidden: torch.tanh(output)[:, -1],
}
#: Readouts that are no chain: the Jacobian would be wrong if only the step were read.
NON_CHAIN_READOUTS = {
    "scaled": lambda output, hidden: 2 * output[:, -1],
    "changed in place": lambda output, hidden: output[:, -1].mul_(2),
    "first layer's state": lambda output, hidden: hidden[0],
    "two steps": lambda output, hidden: output[:, -1] + output[:, 3],
    "last step and final state": lambda output, hidden: output[:, -1] + hidden[-1],
    "another step for each sample": lambda output, hidden: output[torch.arange(len(output)), [1, 2, 3, 4]],
    "mean": lambda output, hidden: output.mean(1),
    "hooked": lambda output, hidden: add_hook(output)[:, -1],
    "hooked afterwards": lambda output, hidden: add_hook(output[:, -1]),
}


def add_hook(tensor):
    tensor.register_hook(lambda grad: 3 * grad)
    return tensor


def halve_data(tensor):
    """Halve a tensor in place through ``.data``, which leaves its version counter unchanged."""
    tensor.data.mul_(0.5)
    return tensor


class Reader(nn.Module):
    forwards = 0

    def __init__(self, readout, layers=2, batch_first=True):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, layers, batch_first=batch_first)
        self.inner, self.relu, self.head = nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)
        self.read = readout

    def forward(self, x):
        Reader.forwards += 1
        if self.lstm.batch_first:
            output, (hidden, _) = self.lstm(x)
        else:
            output, (hidden, _) = self.lstm(x.transpose(0, 1))
            output = output.transpose(0, 1)
        return self.head(self.relu(self.inner(self.read(output, hidden))))


def torch_jacobian(model, x):
    """Return the Jacobian (sample, unit, time, feature) of each sample's output by its own input, by autograd."""
    full_jacobian = torch.autograd.functional.jacobian(model, x)
    return torch.stack([full_jacobian[i, :, i] for i in range(len(x))]).numpy()


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 10, 3, dtype=torch.float64)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("readout", READOUTS)
def test_a_step_of_a_chain(readout, layers, batch_first, x):
    model = Reader(READOUTS[readout], layers, batch_first).double()
    Reader.forwards = 0
    with rl.options(certify="always"):
        jacobian = rl.jacobian(model, x)
    assert Reader.forwards == 2
    assert jacobian.certificate.state == "passed"
    np.testing.assert_allclose(jacobian.values, torch_jacobian(model, x), atol=1e-14)
    if readout != "final state":
        top = "lstm" if layers == 1 else "lstm[1]"
        head_jacobian = rl.jacobian(model, x, wrt=f"{top}.output")
        layer_jacobian = rl.jacobian(model, x, of=f"{top}.output", wrt="input")
        product = np.einsum("sotu,stuif->soif", head_jacobian.values, layer_jacobian.values)
        np.testing.assert_allclose(product, jacobian.values, atol=1e-14)


@pytest.mark.parametrize("readout", NON_CHAIN_READOUTS)
def test_anything_else_goes_the_long_way(readout, x):
    model = Reader(NON_CHAIN_READOUTS[readout]).double()
    Reader.forwards = 0
    with rl.options(certify="never"):
        jacobian = rl.jacobian(model, x)
    assert Reader.forwards > 1
    np.testing.assert_allclose(jacobian.values, torch_jacobian(model, x), atol=1e-14)


def test_the_layer_below_is_not_reached_through_its_output_but_through_its_state(x):
    model = Reader(READOUTS["final state"], layers=1).double()
    with pytest.raises(rl.errors.DisconnectedError):
        rl.jacobian(model, x, wrt="lstm.output")


@pytest.mark.parametrize("transposed", [False, True])
def test_roles_of_axes_are_those_found_by_experiment(transposed, x):
    from rnnlens.adapters.protocol import Batch, Port, Taps
    from rnnlens.adapters.torch import adapter

    class Turned(Reader):
        def forward(self, x):
            y = super().forward(x)
            return y.transpose(0, 1) if transposed else y

    model, ports = Turned(lambda output, hidden: output).double(), [Port("output"), Port("output", "inner")]
    with adapter.run(model, Batch(x), Taps.ports([Port("output")], [Port("output", "inner")])) as pullback:
        captured_layouts = pullback.layouts
    layouts = adapter.layouts(model, Batch(x), ports)
    assert {port: captured_layouts[port] for port in layouts} == dict(layouts)


class Typed(nn.Module):
    """Two recurrent layers on ids or floats, and a head on one step; ``branch`` changes the forward pass."""

    branch = None

    def __init__(self, kind, readout, ids):
        super().__init__()
        self.table = nn.Embedding(7, 3) if ids else nn.Identity()
        self.lower, self.upper = kind(3, 5, batch_first=True), kind(5, 4, batch_first=True)
        self.head, self.read = nn.Linear(4, 2), readout

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
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
BRANCHES = {
    "changed in place": lambda model, output: output.mul_(2.0),
    "detached": lambda model, output: output.detach() + 0 * output,
    "called twice": lambda model, output: (
        model.upper(model.lower(torch.ones(4, 6, 3, dtype=output.dtype))[0])[0] + output
    ),
    "hooked": lambda model, output: add_hook(output),
}


def make_typed(kind, readout, ids):
    torch.manual_seed(1)
    x = torch.randint(0, 7, (4, 6)) if ids else torch.randn(4, 6, 3, dtype=torch.float64)
    return Typed(KINDS[kind], READOUTS[readout], ids).double(), x, torch.randn(4, 2, dtype=torch.float64)


def capture_arrays(capture):
    """Return all arrays of a capture by name, None included."""
    arrays = {
        "loss": capture.loss,
        "outputs": capture.outputs,
        "order": capture.order,
        "inside": capture.recurrent_weight_names,
    }
    arrays |= {f"x{i}": grad for i, grad in enumerate(capture.input_grads)} | dict(capture.outside_weight_grads)
    for call in capture.calls:
        for name, value in vars(call).items():
            values = value if isinstance(value, tuple) else [value]
            if name == "weight_grads" and value is not None:
                values = [value[key] for key in sorted(value)]
            if name == "cell":
                values = [value.kind, *value.weights().values()]
            arrays |= {f"{call.layer}.{name}{i}": item for i, item in enumerate(values)}
    return arrays


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("readout", ["a step by its number", "final state"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_modules_capture_what_kernels_do(kind, readout, ids, boundaries):
    from rnnlens.adapters.protocol import Batch, Taps
    from rnnlens.adapters.torch.capture import capture
    from rnnlens.adapters.torch.chain import capture_chain

    model, x, y = make_typed(kind, readout, ids)
    batch = Batch(x, y, loss=nn.functional.mse_loss, seed=0)
    request = Taps.everything() if boundaries else Taps.direct(weight_grads=True)
    assert capture_chain(model, batch, request) is None
    kernel_arrays, hook_arrays = (
        capture_arrays(capture(model, batch, request)),
        capture_arrays(capture_chain(model, batch, request)),
    )
    assert kernel_arrays.keys() == hook_arrays.keys()
    for name, value in kernel_arrays.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(hook_arrays[name], value, rtol=0, atol=1e-15, msg=name)
        else:
            assert hook_arrays[name] == value, name


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    for layer in actual:
        assert list(actual[layer].dataset.data_vars) == list(expected[layer].dataset.data_vars)
        for name, array in actual[layer].dataset.data_vars.items():
            np.testing.assert_array_equal(array.values, expected[layer].dataset[name].values, err_msg=name)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_pass_that_is_a_chain_no_more_goes_the_long_way(branch):
    model, x, y = make_typed("LSTM", "last step", ids=False)
    rl.trace(model, x, y, loss=nn.functional.mse_loss)
    Typed.branch = staticmethod(BRANCHES[branch])
    try:
        changed_trace = rl.trace(model, x, y, loss=nn.functional.mse_loss)
        fresh_model = make_typed("LSTM", "last step", ids=False)[0]
        first_trace = rl.trace(fresh_model, x, y, loss=nn.functional.mse_loss)
    finally:
        Typed.branch = None
    assert changed_trace.certificate.state == first_trace.certificate.state
    assert_same(changed_trace, first_trace)


@pytest.mark.parametrize("change", ["frozen", "tied", "hook", "initial state", "autocast", "dropout"])
def test_what_hooks_of_modules_cannot_capture_goes_the_long_way(change):
    model, x, y = make_typed("RNN", "last step", ids=False)
    options = {"loss": nn.functional.mse_loss}
    rl.trace(model, x, y, **options)
    if change == "frozen":
        model.lower.requires_grad_(False)
    if change == "tied":
        model.upper = model.lower = nn.RNN(3, 3, batch_first=True).double()
        model.head = nn.Linear(3, 2).double()
    if change == "hook":
        model.upper.register_forward_hook(lambda module, args, output: (2 * output[0], output[1]))
    if change == "initial state":
        options["initial_state"] = {"upper": [np.ones((4, 4))]}
    if change == "dropout":
        model.table = nn.Dropout(0.5)
        options["training"] = True
    with torch.autocast("cpu", enabled=change == "autocast"):
        first, second = (rl.trace(model, x, y, **options) for _ in range(2))
    assert first.certificate.state == second.certificate.state != "failed"
    assert_same(second, first)


class Writer(Reader):
    """A model that writes to the LSTM's output through ``.data``, which changes no version counter."""

    def __init__(self, when):
        super().__init__(None, layers=1)
        self.when = when

    def forward(self, x):
        output, _ = self.lstm(x)
        inner = self.inner(halve_data(output) if self.when == "before it is read" else output)
        if self.when == "after it was read":
            halve_data(output)
        return self.head(self.relu(inner))


@pytest.mark.parametrize("when", ["before it is read", "after it was read"])
def test_a_write_that_changes_no_version_is_seen(when, x):
    model = Writer(when).double()
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(leaf).square().mean(), leaf)[0].numpy()
    for _ in range(2):  # if the first pass were taken for a chain, the second would use module hooks
        trace = rl.trace(model, x, loss=lambda output: output.square().mean())
        np.testing.assert_allclose(trace["lstm"].input_grad.values, expected, rtol=0, atol=1e-15)
        assert trace.certificate.state == "passed"
