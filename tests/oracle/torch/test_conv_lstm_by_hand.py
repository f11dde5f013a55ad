"""States, gradients, weights and Jacobians of a hand-written convolutional LSTM as is common on GitHub."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.errors import TooLargeError

B, T, C, K, SIDE = 2, 4, 2, 3, (5, 6)


class ConvLSTMCell(nn.Module):
    def __init__(self, input_dim, hidden_dim, kernel_size, space):
        super().__init__()
        self.hidden_dim = hidden_dim
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[space]
        self.conv = conv(input_dim + hidden_dim, 4 * hidden_dim, kernel_size, padding=kernel_size // 2)

    def forward(self, input_tensor, cur_state):
        h_cur, c_cur = cur_state
        combined = self.conv(torch.cat([input_tensor, h_cur], dim=1))
        cc_i, cc_f, cc_o, cc_g = torch.split(combined, self.hidden_dim, dim=1)
        c_next = torch.sigmoid(cc_f) * c_cur + torch.sigmoid(cc_i) * torch.tanh(cc_g)
        h_next = torch.sigmoid(cc_o) * torch.tanh(c_next)
        return h_next, c_next


class ConvLSTM(nn.Module):
    """Stacked ConvLSTM cells; each runs over all steps before the next one."""

    def __init__(self, layers, space=2, decay=1.0):
        super().__init__()
        cells = [ConvLSTMCell(K if i else C, K, 3, space) for i in range(layers)]
        self.cell_list, self.decay = nn.ModuleList(cells), decay

    def forward(self, input_tensor, hidden_state=None):
        current, last = input_tensor, []
        for cell in self.cell_list:
            h, c = (current.new_zeros(len(current), K, *current.shape[3:]) for _ in range(2))
            outputs = []
            for t in range(current.shape[1]):
                h, c = cell(input_tensor=current[:, t], cur_state=[h * self.decay if t else h, c])
                outputs.append(h)
            current = torch.stack(outputs, dim=1)
            last.append([h, c])
        return current, last


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.rnn, self.head = ConvLSTM(**options), nn.Linear(K, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1].flatten(2).mean(2))


def make_case(**options):
    torch.manual_seed(0)
    space = {1: (7,), 2: (5, 6), 3: (3, 2, 4)}[options.get("space", 2)]
    x = torch.randn(B, T, C, *space, dtype=torch.float64)
    return Net(**options).double(), x, torch.randn(B, 2, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    "options",
    [{"layers": 1}, {"layers": 2}, {"layers": 1, "space": 3}, {"layers": 2, "decay": 0.8}, {"layers": 2, "space": 1}],
)
def test_states_and_total_gradients_at_every_place(options):
    model, x, y = make_case(**options)
    trace = rl.trace(model, x, y, loss=nn.functional.mse_loss)
    assert list(trace) == [f"rnn.cell_list.{i}" for i in range(options["layers"])]
    assert trace.certificate.state == "passed"
    returned = {}

    def record_states(cell, inputs, outputs):
        for state in outputs:
            state.retain_grad()
        returned.setdefault(id(cell), []).append(outputs)

    handles = [cell.register_forward_hook(record_states) for cell in model.rnn.cell_list]
    nn.functional.mse_loss(model(x), y).backward()
    for handle in handles:
        handle.remove()
    space = ("depth", "height", "width")[3 - options.get("space", 2) :]
    for cell, name in zip(model.rnn.cell_list, trace, strict=True):
        for index, state in enumerate(("hidden", "state_1")):
            steps = [outputs[index] for outputs in returned[id(cell)]]
            assert trace[name][state].dims == ("sample", "time", "channel", *space)
            np.testing.assert_allclose(trace[name][state], torch.stack(steps, 1).detach(), atol=1e-13)
            grads = torch.stack([torch.zeros_like(s) if s.grad is None else s.grad for s in steps], 1)
            np.testing.assert_allclose(trace[name][f"{state}_grad"], grads, atol=1e-13)
        assert trace[name]["input"].dims == ("sample", "time", "feature", *space)
    gradients = rl.gradients(model, x, y, loss=nn.functional.mse_loss, wrt="rnn.cell_list.0.hidden")
    expected = trace["rnn.cell_list.0"].hidden_grad.values
    np.testing.assert_allclose(gradients.values.reshape(expected.shape), expected, atol=1e-13)


def test_weights_inputs_and_jacobians():
    model, x, y = make_case(layers=2)
    source = x.clone().requires_grad_()
    nn.functional.mse_loss(model(source), y).backward()
    gradients = rl.gradients(model, x, y, loss=nn.functional.mse_loss, wrt=["input", "weights"])
    np.testing.assert_allclose(gradients["model"]["input"].values.reshape(x.shape), source.grad, atol=1e-13)
    for i, cell in enumerate(model.rnn.cell_list):
        layer = gradients[f"rnn.cell_list.{i}.conv"]
        np.testing.assert_allclose(layer["weight"], cell.conv.weight.grad, atol=1e-12)
    weights = rl.weights(model, x, y, loss=nn.functional.mse_loss)
    assert weights.certificate.state == gradients.certificate.state == "passed"
    jacobian = rl.jacobian(model, x)
    expected = [torch.autograd.functional.jacobian(lambda s: model(s[None])[0], sample).numpy() for sample in x]
    np.testing.assert_allclose(jacobian, np.stack(expected).reshape(jacobian.shape), atol=1e-13)
    norms = rl.jacobian(model, x, measure="norm")
    np.testing.assert_allclose(norms, np.sqrt((np.stack(expected) ** 2).sum(axis=(1, 3, 4, 5))), rtol=1e-10)


def test_norms_between_images_step_by_step():
    """State Jacobian norms over pixels and channels (out_time, in_time), by input and by state, equal autograd's."""
    model, x, _ = make_case(layers=1)
    calls = []
    handle = model.rnn.cell_list[0].register_forward_hook(lambda cell, inputs, outputs: calls.append(outputs[0]))
    model(source := x.clone().requires_grad_())
    handle.remove()
    expected = np.zeros((2, B, T, T))
    for out_time, state in enumerate(calls):
        for number in state.flatten(1).sum(0):
            grads = torch.autograd.grad(number, [source, *calls[: out_time + 1]], retain_graph=True)
            expected[0, :, out_time] += (grads[0].flatten(2) ** 2).sum(2).numpy()
            for in_time, grad in enumerate(grads[1:]):
                expected[1, :, out_time, in_time] += (grad.flatten(1) ** 2).sum(1).numpy()
    for squares, wrt in zip(expected, ("input", "rnn.cell_list.0.hidden"), strict=True):
        norms = rl.jacobian(model, x, of="rnn.cell_list.0.hidden", wrt=wrt, measure="norm")
        assert norms.dims == ("sample", "out_time", "in_time")
        np.testing.assert_allclose(norms, np.sqrt(squares), atol=1e-13)
        assert norms.certificate.state == "passed"


def test_a_step_too_large_for_memory_is_refused_before_it_is_computed():
    """A dense step Jacobian of (channels x pixels)^2 entries above the memory limit raises TooLargeError."""
    model = Net(layers=1)
    with pytest.raises(TooLargeError) as error:
        rl.jacobian(model, torch.randn(1, 2, C, 25, 25), measure="norm", memory="70 MB")
    message = " ".join(str(error.value).split())
    assert message.startswith("The Jacobian of one step of 'rnn.cell_list.0' is larger than the memory limit.")
    assert "3750 by 3750 states: 71.5 MiB" in message


class Terse(ConvLSTMCell):
    """A cell whose second argument is a state, but is not named as one."""

    def forward(self, x, st):
        return super().forward(x, st)


class Signals(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Terse(C, K, 3, 1)

    def forward(self, x):
        h = c = x.new_zeros(len(x), K, x.shape[3])
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return h.mean(2)


def test_a_cell_that_ran_is_listed_whatever_its_arguments_are_called():
    torch.manual_seed(0)
    model, x = Signals().double(), torch.randn(B, T, C, 7, dtype=torch.float64)
    assert not list(rl.layers(model))
    assert list(rl.trace(model, x, loss=torch.sum)) == ["cell"]
    assert rl.layers(model, x).names == ("cell",)
    norms = rl.jacobian(model, x, of="cell.hidden", wrt="cell.hidden", measure="norm")
    assert norms.dims == ("sample", "out_time", "in_time")


@pytest.mark.parametrize("verb", [rl.jacobian, lambda m, x, **names: rl.gradients(m, x, reduce="sum", **names)])
def test_its_states_have_names_at_the_first_call(verb):
    torch.manual_seed(0)
    model, x = Signals().double(), torch.randn(B, T, C, 7, dtype=torch.float64)
    first = verb(model, x, of="cell.hidden", wrt="cell.state_1")
    assert np.array_equal(first.values, verb(model, x, of="cell.hidden", wrt="cell.state_1").values)
    assert first.values.any()
    with pytest.raises(rl.errors.LayerNotFoundError, match="Nothing in this model is named"):
        verb(Signals().double(), x, of="sell.hidden")


class Frames(nn.Module):
    """A frame for each frame: the cell between two convolutions, the first of which may shrink the frames."""

    def __init__(self, stride=1):
        super().__init__()
        self.encoder, self.cell = nn.Conv2d(C, C, 1, stride=stride), ConvLSTMCell(C, K, 3, 2)
        self.decoder = nn.Conv2d(K, 4, 1)

    def forward(self, x):
        frames = [self.encoder(frame) for frame in x.unbind(1)]
        h = c = frames[0].new_zeros(len(x), K, *frames[0].shape[2:])
        outputs = []
        for frame in frames:
            h, c = self.cell(frame, (h, c))
            outputs.append(self.decoder(h))
        return torch.stack(outputs, 1)


def autograd_jacobian(model, x):
    """Return the derivative of each sample's output by its own input, (sample, *output, *input)."""
    return np.stack([torch.autograd.functional.jacobian(lambda s: model(s[None])[0], sample).numpy() for sample in x])


@pytest.mark.parametrize(("stride", "side"), [(1, (3, 4)), (2, (4, 6))])
def test_frames_in_and_out_have_channels_and_space(stride, side):
    """Channels and space of frames that are the cell's own, or scaled, have their names; numbers are autograd's."""
    torch.manual_seed(0)
    model, x = Frames(stride).double(), torch.randn(B, 3, C, *side, dtype=torch.float64)
    at = {"time": 1, "channel": 2, "height": 0, "width": 1}
    gradient = rl.gradients(model, x, of="output", wrt="input", at=at, reduce="sum")
    assert gradient.dims == ("sample", "time", "feature", "height", "width")
    jacobian = rl.jacobian(model, x)
    assert jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
    ends = {
        "out_unit": ["out_channel", "out_height", "out_width"],
        "in_feature": ["in_channel", "in_height", "in_width"],
    }
    opened = jacobian.set_index(ends).unstack().transpose("sample", "out_time", *ends["out_unit"], "in_time", ...)
    expected = autograd_jacobian(model, x)
    np.testing.assert_allclose(opened.transpose(..., *ends["in_feature"]), expected, atol=1e-13)
    np.testing.assert_allclose(gradient, expected[:, 1, 2, 0, 1], atol=1e-13)


class ChannelsLast(Frames):
    def forward(self, x):
        return super().forward(x.movedim(-1, 2)).movedim(2, -1)


@pytest.mark.parametrize(("model", "shape"), [(ChannelsLast, (3, 4, C)), (Frames, (C, C, C))])
def test_axes_of_frames_that_may_be_channels_have_no_names(model, shape):
    torch.manual_seed(0)
    gradient = rl.gradients(
        model().double(), torch.randn(B, 3, *shape, dtype=torch.float64), of="output", reduce="sum", wrt="input"
    )
    assert gradient.dims == ("sample", "time", "axis_2", "axis_3", "axis_4")
