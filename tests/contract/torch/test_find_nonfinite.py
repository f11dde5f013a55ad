"""The search for the first non-finite number in torch models locates it where it was planted or NumPy overflows."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

pytestmark = pytest.mark.check

mse = nn.functional.mse_loss


class Net(nn.Module):
    def __init__(self, seed=0, end=None):
        super().__init__()
        torch.manual_seed(seed)
        self.inp, self.rnn, self.head = nn.Linear(3, 5), nn.LSTM(5, 4, num_layers=2, batch_first=True), nn.Linear(4, 1)
        self.end = end

    def forward(self, x):
        y = self.head(self.rnn(self.inp(x))[0][:, -1])
        return y if self.end is None else self.end(y)


def data(seed=0, samples=4, steps=20):
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.normal(size=(samples, steps, 3)), dtype=torch.float32), torch.zeros(samples, 1)


def test_none_in_a_healthy_net():
    x, y = data()
    finding = rl.find_nonfinite(Net(), x, y, loss=mse)
    assert not finding
    assert finding.sentence.startswith("none")
    assert finding.origin is None


def test_a_number_in_the_data():
    x, y = data()
    x[2, 7, 1] = torch.nan
    finding = rl.find_nonfinite(Net(), x, y, loss=mse)
    assert (finding.phase, finding.layer, finding.sample, finding.step) == ("data", "input", 2, 7)
    assert finding.origin.index["feature"] == 1
    assert finding.reaches == ("outputs", "loss", "gradients")


def test_a_weight_before_anything_runs():
    x, y = data()
    net = Net()
    with torch.no_grad():
        net.rnn.weight_hh_l1[5, 2] = torch.inf  # torch: rows are gate * unit, the second gate is forget
    finding = rl.find_nonfinite(net, x, y, loss=mse)
    assert (finding.phase, finding.layer, finding.gate, finding.quantity) == (
        "weights",
        "rnn[1]",
        "forget",
        "recurrent_kernel",
    )
    assert finding.origin.index == {"unit_in": 2, "unit": 1}


def test_the_step_at_which_a_state_overflows():
    x, y = data(1)
    torch.manual_seed(1)
    rnn = nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(1e4 * torch.eye(4))
    net = nn.Sequential(rnn)
    net.forward = lambda x: rnn(x)[0][:, -1, :1]
    finding = rl.find_nonfinite(net, x, y, loss=mse)
    h = np.zeros((4, 4))
    for step in range(20):  # in double precision, where nothing overflows
        w, u = rnn.weight_ih_l0.detach().double().numpy(), rnn.weight_hh_l0.detach().double().numpy()
        h = np.maximum(
            0, x[:, step].double().numpy() @ w.T + h @ u.T + (rnn.bias_ih_l0 + rnn.bias_hh_l0).detach().numpy()
        )
        if (h > np.finfo(np.float32).max).any():
            break
    assert (finding.step, finding.sample) == (step, int(np.argmax((h > np.finfo(np.float32).max).any(axis=1))))
    assert "recurrent_kernel 1e+04" in finding.fed_by


@pytest.mark.parametrize(
    ("end", "loss", "reason"),
    [
        (lambda y: torch.relu(y * 0), lambda p, y: -p.log().mean(), "log of 0"),
        (lambda y: torch.relu(y * 0), lambda p, y: (1 / p).mean(), "division by 0"),
        (lambda y: y * 0, lambda p, y: (p - 3).sqrt().mean(), "of a negative number"),
    ],
)
def test_what_the_loss_cannot_take(end, loss, reason):
    x, y = data()
    finding = rl.find_nonfinite(Net(end=end), x, y, loss=loss)
    assert (finding.phase, finding.layer, finding.sample) == ("loss", "loss", 0)
    assert reason in finding.fed_by


def train_with_nan(path, *, nan_step, **options):
    """Train 12 SGD steps with a NaN at ``nan_step``; return net, weights before that step, and the written incident."""
    torch.manual_seed(0)
    net, weights = Net(), {}
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with rl.torch.watch(net, path, every=0, on_nonfinite="report", loss=mse, **options) as watch:
        for i in range(12):
            x, y = data(i)
            if i == nan_step:
                x[1, 4, 2] = torch.nan
                weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
            optimizer.zero_grad()
            loss = mse(net(x), y)
            loss.backward()
            watch.loss, watch.target = loss, y
            optimizer.step()
    return net, weights, rl.open(path.with_suffix(".nonfinite.nc"))


def test_a_watch_writes_the_batch_and_the_weights_that_it_met(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "rnnlens"):
        net, weights, incident = train_with_nan(tmp_path / "a.zarr", nan_step=7)
    x, y = data(7)
    x[1, 4, 2] = torch.nan
    assert incident.step == 8
    np.testing.assert_array_equal(incident.x, x.numpy())
    np.testing.assert_array_equal(incident.y, y.numpy())
    assert list(incident.weights) == list(weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(incident.weights[name], value.numpy())
    assert "first at step 4 of sample 1: input, feature 2" in incident.found
    assert len(caplog.messages) == 1
    net.load_state_dict({name: torch.as_tensor(value) for name, value in incident.weights.items()})
    finding = rl.find_nonfinite(net, torch.as_tensor(incident.x), torch.as_tensor(incident.y), loss=mse)
    assert (finding.layer, finding.step, finding.sample) == ("input", 4, 1)


def test_a_healthy_training_writes_nothing_and_is_not_disturbed(tmp_path):
    def trained_weights(path):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        options = {"every": 0, "on_nonfinite": "report"} if path is not None else {"every": 0}
        with rl.torch.watch(net, path, **options):
            for i in range(5):
                x, y = data(i)
                optimizer.zero_grad()
                mse(net(x), y).backward()
                optimizer.step()
        return net.state_dict()

    unwatched, watched = trained_weights(None), trained_weights(tmp_path / "a.zarr")
    assert all(torch.equal(unwatched[name], watched[name]) for name in unwatched)
    assert not (tmp_path / "a.nonfinite.nc").exists()


class Policy(Net):
    """A policy whose distribution of actions validates its parameters, as those of torch do."""

    def forward(self, x):
        return torch.distributions.Bernoulli(logits=super().forward(x)).entropy()


def test_where_the_model_raises_because_of_the_data():
    x, y = data()
    x[2, 7, 1] = float("nan")
    finding = rl.find_nonfinite(Policy(), x, y, loss=mse)
    assert (finding.phase, finding.layer, finding.step, finding.sample) == ("data", "input", 7, 2)
    assert finding.reaches == ("exception",)
    assert finding.sentence.endswith("The model or the loss raises an exception.")
    assert "forward raised ValueError" in finding.notes[0]
    model = Policy()
    with torch.no_grad():
        model.rnn.weight_hh_l0[3, 2] = float("inf")
    finding = rl.find_nonfinite(model, *data())
    assert (finding.phase, finding.layer, finding.reaches) == ("weights", "rnn[0]", ("exception",))


def test_where_the_loss_raises_because_of_the_target():
    def strict(output, target):
        if not bool(target.isfinite().all()):
            raise ValueError("target")
        return mse(output, target)

    x, y = data()
    y[1] = float("nan")
    finding = rl.find_nonfinite(Net(), x, y, loss=strict)
    assert (finding.phase, finding.layer, finding.sample, finding.reaches) == ("data", "y", 1, ("exception",))
    assert "loss raised ValueError" in finding.notes[0]


def test_an_exception_with_another_cause_is_the_users():
    def broken(output, target):
        raise ValueError("a mistake in the loss")

    x, y = data()
    x[2, 7, 1] = float("nan")
    with pytest.raises(ValueError, match="a mistake in the loss"):
        rl.find_nonfinite(Net(), x, y, loss=broken)


class Feedback(nn.Module):
    """A loop that embeds what it returned at the step before; ``layer`` returns infinity at step 2."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Linear(3, 5), nn.Linear(4, 3)
        self.first, self.second = nn.GRUCell(5, 4), nn.GRUCell(4, 4)
        self.layer = layer

    def forward(self, x):
        value, lower, upper, outputs = x[:, 0], *torch.zeros(2, len(x), 4), []
        for t in range(x.shape[1]):
            scale = {name: 1e30 if (t, name) == (2, self.layer) else 1.0 for name in ("first", "second", "head")}
            lower = self.first(self.embedding(value), lower) * scale["first"] ** 2
            upper = self.second(lower, upper) * scale["second"] ** 2
            value = self.head(upper * scale["head"])
            value = value * scale["head"]
            outputs.append(value)
        return torch.stack(outputs, 1)


@pytest.mark.parametrize(
    ("layer", "found", "step"), [("first", "second", 2), ("second", "head", 2), ("head", "embedding", 3)]
)
def test_the_earliest_step_of_the_layers_of_one_loop(layer, found, step):
    finding = rl.find_nonfinite(Feedback(layer), data()[0])
    assert (finding.layer, finding.step) == (found, step)
