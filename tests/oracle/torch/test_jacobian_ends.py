"""Time Jacobians between ends that users choose: custom cells in custom loops, and models of a single step.

The reference is autograd on the same model, with zeros added at the chosen end.
"""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

pytestmark = pytest.mark.check

B, T, F, H = 3, 5, 3, 4


class OwnCell(nn.Module):
    """A custom cell whose output is its state."""

    def __init__(self, features, units):
        super().__init__()
        self.w, self.u = nn.Linear(features, units), nn.Linear(units, units, bias=False)

    def forward(self, x, h):
        h = torch.tanh(self.w(x) + self.u(h))
        return h, h


class OwnPair(OwnCell):
    """A custom cell with two states, whose output is neither of them."""

    def forward(self, x, state):
        h, c = state
        c = torch.sigmoid(self.u(h)) * c + torch.tanh(self.w(x))
        return torch.tanh(c) + x.sum(-1, keepdim=True), (torch.sin(c), c)


CELLS = {
    "own": (OwnCell, 1),
    "own pair": (OwnPair, 2),
    "gru": (nn.GRUCell, 1),
    "lstm": (nn.LSTMCell, 2),
}


class Loop(nn.Module):
    """One of the cells in a loop with a head at every step; with ``feedback``, the next step reads the head's output.

    ``zeros`` are added to the output of each step, ``carried`` to the first state that it passes on.
    """

    def __init__(self, cell, feedback):
        super().__init__()
        cell_class, self.count = CELLS[cell]
        self.feedback, self.head = feedback, nn.Linear(H, 2)
        self.rnn = cell_class(F + 2 if feedback else F, H)
        self.zeros = self.carried = None

    def step(self, x, state):
        if isinstance(self.rnn, OwnCell):
            return self.rnn(x, state)
        state = self.rnn(x, state)
        return (state[0] if self.count == 2 else state), state

    def run(self, x):
        h, head_output = x.new_zeros(len(x), H), x.new_zeros(len(x), 2)
        state, outputs, heads = (h, h) if self.count == 2 else h, [], []
        for t in range(x.shape[1]):
            y, state = self.step(torch.cat([x[:, t], head_output], 1) if self.feedback else x[:, t], state)
            if self.carried is not None:
                y, state = self._perturb(y, state, self.carried[:, t])
            outputs.append(y)
            head_output = self.head(y if self.zeros is None else y + self.zeros[:, t])
            heads.append(head_output)
        return torch.stack(outputs, 1), torch.stack(heads, 1)

    def _perturb(self, y, state, perturbation):
        """Add a perturbation to the first state, and to the output if that is the same tensor."""
        first = state[0] if self.count == 2 else state
        y = y + perturbation if y is first else y
        return y, ((first + perturbation, state[1]) if self.count == 2 else first + perturbation)

    def forward(self, x):
        return self.run(x)[1]


def make_case(cell, feedback):
    torch.manual_seed(0)
    return Loop(cell, feedback).double(), torch.randn(B, T, F, dtype=torch.float64)


def autograd_jacobian(model, x, output_index, tap_name):
    """Return the Jacobian (sample, out time, unit, in time, feature) of a run, by added zeros or by the input."""

    def values(v):
        if tap_name is not None:
            setattr(model, tap_name, v)
        output = model.run(x if tap_name is not None else v)[output_index]
        model.zeros = model.carried = None
        return output

    start = x if tap_name is None else torch.zeros(B, T, H, dtype=torch.float64)
    full = torch.autograd.functional.jacobian(values, start).numpy()
    return np.stack([full[b][:, :, b] for b in range(B)])


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert np.abs(expected).max() > 1e-3
    assert np.abs(actual.values - expected).max() <= 1e-12


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("cell", CELLS)
class TestLoops:
    def test_output_by_what_the_cell_put_out(self, cell, feedback):
        model, x = make_case(cell, feedback)
        assert_close(rl.jacobian(model, x, wrt="rnn.output"), autograd_jacobian(model, x, 1, "zeros"))

    def test_what_the_cell_put_out_by_its_state(self, cell, feedback):
        model, x = make_case(cell, feedback)
        assert_close(
            rl.jacobian(model, x, of="rnn.output", wrt="rnn.hidden"), autograd_jacobian(model, x, 0, "carried")
        )

    def test_what_the_cell_put_out_by_the_input(self, cell, feedback):
        model, x = make_case(cell, feedback)
        assert_close(rl.jacobian(model, x, of="rnn.output"), autograd_jacobian(model, x, 0, None))


class Single(nn.Module):
    """A model of a single step, whose input may or may not have a time axis."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.head = kind, nn.Linear(H, 2)
        self.rnn = {"lstm cell": nn.LSTMCell, "gru cell": nn.GRUCell}.get(kind, nn.LSTM)(F, H)

    def forward(self, x):
        x = x[:, 0] if x.ndim == 3 else x
        if self.kind == "lstm":
            return self.head(self.rnn(x[None])[0][0])
        returned = self.rnn(x)
        return self.head(returned[0] if self.kind == "lstm cell" else returned)


@pytest.mark.parametrize("kind", ["lstm cell", "gru cell", "lstm"])
class TestSingleStep:
    def test_an_input_without_steps_has_no_in_time(self, kind):
        model, x = Single(kind).double(), torch.randn(B, F, dtype=torch.float64)
        full = torch.autograd.functional.jacobian(model, x).numpy()
        jacobian = rl.jacobian(model, x)
        assert jacobian.dims == ("sample", "out_unit", "in_feature")
        assert_close(jacobian, np.stack([full[b][:, b] for b in range(B)]))
        assert jacobian.attrs["certificate"].startswith("certified")

    def test_steps_that_are_not_run_are_not_taken_for_features(self, kind):
        model, x = Single(kind).double(), torch.randn(B, T, F, dtype=torch.float64)
        with pytest.raises(rl.errors.InputError) as error:
            rl.jacobian(model, x)
        assert str(error.value) == (
            "The time Jacobian needs the axis of 'input' that counts steps, and rnnlens could not determine it.\n"
            "  got:      axes (sample, axis_1, feature)\n"
            "  try:      name the axes: axes={'input': (..., 'time', ...)}, one name for each axis"
        )
        full = torch.autograd.functional.jacobian(model, x).numpy()
        expected = np.stack([full[b][:, b] for b in range(B)])
        jacobian = rl.jacobian(model, x, axes={"input": ("sample", "time", "feature")})
        assert jacobian.dims == ("sample", "out_unit", "in_time", "in_feature")
        assert_close(jacobian, expected)
        without_time = rl.jacobian(model, x, axes={"input": ("sample", "region", "feature")})
        assert without_time.dims == ("sample", "out_unit", "in_feature")
        assert_close(without_time, expected.reshape(B, 2, T * F))
        assert jacobian.attrs["certificate"].startswith("certified")


def test_one_direction_does_not_reach_the_other():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(F, H, bidirectional=True, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0]

    jacobian = rl.jacobian(Both(), torch.randn(B, T, F), of="rnn.hidden", wrt="rnn.hidden")
    for direction, opposite in ((0, 1), (1, 0)):
        assert not jacobian.isel(direction=direction, in_direction=opposite).any()
        assert np.allclose(jacobian.isel(direction=direction, in_direction=direction, out_time=2, in_time=2), np.eye(H))


def test_an_output_by_itself_is_answered_with_the_states():
    model, x = make_case("gru", feedback=False)
    with pytest.raises(rl.errors.DisconnectedError) as error:
        rl.jacobian(model, x, of="rnn.output", wrt="rnn.output")
    assert str(error.value) == (
        "rnn.output is the output of the layer: no step of it is computed from another.\n"
        "  got:      of='rnn.output' and wrt='rnn.output'\n"
        '  try:      of="rnn.hidden", wrt="rnn.hidden": from state to state'
    )


class Folded(nn.Module):
    """A hierarchical model: the lower layer reads the words of all sentences as one batch, the upper one sentences."""

    def __init__(self):
        super().__init__()
        self.words, self.sentences = nn.GRU(F, H, batch_first=True), nn.LSTM(H, H, batch_first=True)

    def forward(self, x, added=None):
        _, last = self.words(x.reshape(2 * B, 2, F))
        return self.sentences(last[-1].reshape(B, 2, H))[0]


def test_states_of_one_layer_beside_a_layer_with_other_samples():
    torch.manual_seed(0)
    model, x = Folded().double(), torch.randn(B, 4, F, dtype=torch.float64)
    jacobian = rl.jacobian(model, x, of="sentences.hidden", wrt="sentences.hidden")
    expected = rl.jacobian(model.sentences, model.words(x.reshape(2 * B, 2, F))[1][-1].reshape(B, 2, H).detach(),
                           of="lstm.hidden", wrt="lstm.hidden")  # fmt: skip
    assert jacobian.shape == (B, 2, H, 2, H)
    np.testing.assert_allclose(jacobian, expected, atol=1e-14)
    lower = rl.jacobian(model, x, of="words.hidden", wrt="words.hidden")
    assert lower.shape == (2 * B, 2, H, 2, H)


class Attending(nn.Module):
    """A bidirectional encoder, and a decoder loop that attends to it and reads its own output."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(F, H, batch_first=True, bidirectional=True), nn.Linear(H, 2)
        self.cell = nn.GRUCell(2 * H + 2, H)

    def forward(self, x):
        memory, _ = self.rnn(x)
        state, y, outputs = x.new_zeros(len(x), H), x.new_zeros(len(x), 2), []
        for _ in range(3):
            weights = torch.softmax((memory[..., :H] * state[:, None]).sum(-1), 1)
            state = self.cell(torch.cat([(weights[..., None] * memory).sum(1), y], 1), state)
            y = self.head(state)
            outputs.append(y)
        return torch.stack(outputs, 1)


def test_states_of_a_bidirectional_encoder_before_a_loop():
    torch.manual_seed(0)
    model, x = Attending().double(), torch.randn(B, T, F, dtype=torch.float64)
    jacobian = rl.jacobian(model, x, of="rnn.hidden", wrt="rnn.hidden")
    expected = rl.jacobian(nn.Sequential(model.rnn), x, of="0.hidden", wrt="0.hidden")
    assert jacobian.dims == ("sample", "out_time", "direction", "out_unit", "in_time", "in_direction", "in_feature")
    np.testing.assert_allclose(jacobian, expected, atol=1e-14)
    assert abs(jacobian).max() == 1
