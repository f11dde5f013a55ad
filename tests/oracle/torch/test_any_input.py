"""Inputs and outputs of any kind: constants among them, and containers that are registered with torch.

The truth is autograd of the untouched model in float64.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

import rnnlens as rl
from rnnlens.errors import InputError, LayerNotFoundError, UnsupportedError


class Scaled(nn.Module):
    """A GRU whose scores depend on constants beside its input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x, keep=1.0, mode="plain", lengths=None, helper=None):
        assert isinstance(mode, str)
        factor = keep + len(lengths or ()) + (helper.shift if helper is not None else 0.0)
        return self.head(self.rnn(x)[0]) * factor


#: Constants of each kind, after the sequence.
CONSTANTS = {
    "number": (0.5,),
    "numpy number": (np.float64(0.5),),
    "tensor without axes": (torch.tensor(0.5, dtype=torch.float64),),
    "string": (0.5, "tanh"),
    "None": (0.5, "plain", None),
    "list of lengths": (0.5, "plain", [4, 4, 2]),
    "object": (0.5, "plain", None, SimpleNamespace(shift=2.0)),
}


def case(kind):
    torch.manual_seed(1)
    samples = 60
    x, y = torch.randn(samples, 7, 3, dtype=torch.float64), torch.randn(samples, 7, 2, dtype=torch.float64)
    return Scaled().double(), (x, *CONSTANTS[kind]), y


def input_gradient(model, x, y):
    leaf = x[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(functional.mse_loss(model(leaf, *x[1:]), y), leaf)
    return gradient.numpy()


@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_among_inputs(kind, tmp_path):
    model, x, y = case(kind)
    loss = functional.mse_loss
    name = "input[0]" if kind == "tensor without axes" else "input"
    np.testing.assert_allclose(
        rl.gradients(model, x, y, loss=loss, wrt=name).values, input_gradient(model, x, y), atol=1e-15
    )
    for batch_size in (7, 60):
        of_batches = rl.gradients(model, x, y, loss=loss, wrt="weights", batch_size=batch_size)
        expected = torch.autograd.grad(loss(model(*x), y), model.head.weight)[0]
        np.testing.assert_allclose(of_batches["head"]["weight"].values, expected.numpy(), atol=1e-15)
    trace = rl.trace(model, x, y, loss=loss)
    assert trace.certificate.state == "passed", trace.certificate
    assert rl.weights(model, x, y, loss=loss).certificate.state == "passed"
    jacobian = rl.jacobian(model, x, of="output", wrt=name, at={"out_time": [-1]})
    leaf = x[0].clone().requires_grad_()
    model(leaf, *x[1:])[:, -1, 0].sum().backward()
    np.testing.assert_allclose(jacobian.isel(out_time=-1, out_unit=0).values, leaf.grad.numpy(), atol=1e-14)
    assert not rl.find_nonfinite(model, x, y, loss=loss)
    assert rl.diagnose(model, x, y, loss="mse") is not None
    rl.report(model, x, y, loss=loss, path=tmp_path / "report.html")


class TwoInputs(NamedTuple):
    sequence: torch.Tensor
    scale: float


@dataclass
class Record:
    sequence: torch.Tensor
    scale: float


class Own:
    """An input class that a package registers with torch."""

    def __init__(self, sequence, scale):
        self.sequence, self.scale = sequence, scale


_pytree.register_pytree_node(
    Own, lambda own: ([own.sequence], own.scale), lambda parts, scale: Own(next(iter(parts)), scale)
)


class ByRows(dict):
    """A mapping that iterates over its samples, as a TensorDict does."""

    def __iter__(self):
        return iter(self["sequence"])


_pytree.register_pytree_node(
    ByRows,
    lambda rows: (list(rows.values()), list(rows.keys())),
    lambda parts, keys: ByRows(zip(keys, parts, strict=True)),
)


class Reader(nn.Module):
    """A GRU that takes one container."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, batch):
        sequence, scale = (
            (batch["sequence"], batch["scale"]) if isinstance(batch, dict) else (batch.sequence, batch.scale)
        )
        return self.head(self.rnn(sequence)[0]) * scale


@pytest.mark.parametrize("kind", [TwoInputs, Record, Own, ByRows, dict])
def test_containers_as_inputs(kind):
    torch.manual_seed(1)
    model, y = Reader().double(), torch.randn(4, 7, 2, dtype=torch.float64)
    sequence = torch.randn(4, 7, 3, dtype=torch.float64)
    x = kind(sequence=sequence, scale=0.5)
    leaf = sequence.clone().requires_grad_()
    functional.mse_loss(model(kind(sequence=leaf, scale=0.5)), y).backward()
    for batch_size in (None, 3):
        gradient = rl.gradients(model, x, y, loss=functional.mse_loss, wrt="input", batch_size=batch_size)
        np.testing.assert_allclose(gradient.values, leaf.grad.numpy(), atol=1e-15)
        assert gradient.attrs["certificate"].startswith("certified")
    assert rl.trace(model, x, y, loss=functional.mse_loss).certificate.state == "passed"
    assert not rl.find_nonfinite(model, x, y, loss=functional.mse_loss)
    assert rl.jacobian(model, x, measure="norm").dims == ("sample", "out_time", "in_time")


@pytest.mark.parametrize("kind", [Record, Own, ByRows])
def test_a_diagnosis_of_a_container_is_that_of_a_dictionary(kind):
    torch.manual_seed(1)
    model, y = Reader().double(), torch.randn(40, 7, 2, dtype=torch.float64)
    parts = {"sequence": torch.randn(40, 7, 3, dtype=torch.float64), "scale": 0.5}
    assert str(rl.diagnose(model, kind(**parts), y, loss="mse")) == str(rl.diagnose(model, parts, y, loss="mse"))


def test_one_of_several_parts_may_have_no_features(tmp_path):
    """Data loaders have a part for each kind of column, also where the data have no column of that kind."""

    class Joins(Reader):
        def forward(self, batch):
            return self.head(self.rnn(torch.cat([batch["numbers"], batch["categories"].double()], 2))[0])

    torch.manual_seed(1)
    model, y = Joins().double(), torch.randn(40, 7, 2, dtype=torch.float64)
    numbers = torch.randn(40, 7, 3, dtype=torch.float64)
    x = {"categories": torch.zeros(40, 7, 0, dtype=torch.int64), "numbers": numbers}
    leaf = numbers.clone().requires_grad_()
    functional.mse_loss(model({**x, "numbers": leaf}), y).backward()
    gradient = rl.gradients(model, x, y, loss=functional.mse_loss, wrt="input[numbers]")
    np.testing.assert_allclose(gradient.values, leaf.grad.numpy(), atol=1e-15)
    assert rl.trace(model, x, y, loss=functional.mse_loss).certificate.state == "passed"
    assert rl.jacobian(model, x, wrt="input[numbers]", measure="norm").dims == ("sample", "out_time", "in_time")
    assert not rl.find_nonfinite(model, x, y, loss=functional.mse_loss)
    assert rl.diagnose(model, x, y, loss="mse") is not None
    rl.report(model, x, y, loss=functional.mse_loss, path=tmp_path / "report.html")
    with pytest.raises(InputError, match="x is empty"):
        rl.trace(model, {**x, "numbers": numbers[:, :0]})


class ReadsNested(nn.Module):
    """A GRU over one part of nested inputs, scaled by another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, batch):
        return self.head(self.rnn(batch["forward"]["X"])[0]) * batch["backward"]["X"][..., :2]


@pytest.mark.parametrize("name", ["input[backward.X]", "input[backward][X]"])
def test_a_nested_input_is_named_as_in_python(name):
    torch.manual_seed(1)
    model, sequence = ReadsNested().double(), torch.randn(2, 4, 7, 3, dtype=torch.float64)
    x = {"forward": {"X": sequence[0]}, "backward": {"X": sequence[1]}}
    gradient = rl.gradients(model, x, of="output", reduce="sum", wrt=name)
    expected = functional.pad(model.head(model.rnn(sequence[0])[0]), (0, 1))
    np.testing.assert_allclose(gradient.values, expected.detach().numpy(), atol=1e-15)


def test_the_name_of_an_input_alone_is_answered_with_the_name_to_type():
    model, x = Reader().double(), {"sequence": torch.randn(4, 7, 3, dtype=torch.float64), "scale": 0.5}
    with pytest.raises(LayerNotFoundError, match=r"input\[sequence\]"):
        rl.gradients(model, x, of="output", reduce="sum", wrt="sequence")
    assert rl.gradients(model, x, of="output", reduce="sum", wrt="input[sequence]").shape == (4, 7, 3)


class Returns(nn.Module):
    """A GRU that returns more than its scores."""

    def __init__(self, extra):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head, self.extra = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 2), extra

    def forward(self, x):
        steps = self.rnn(x)[0]
        scores = self.head(steps)
        return self.extra(scores, steps), scores


def score_loss(output, target):
    return functional.mse_loss(output[1], target)


#: What is returned beside the scores, and the name under which a certificate says that it was not compared.
EXTRAS = {
    "array": (lambda scores, steps: steps.detach().numpy(), ""),
    "arrays": (lambda scores, steps: [step.detach().numpy() for step in steps[:2]], ""),
    "nothing": (lambda scores, steps: None, ""),
    "number": (lambda scores, steps: 3, "output[0], which is no array but an int"),
    "numpy number": (lambda scores, steps: np.float32(3), "output[0], which is no array but a float32"),
    "text": (lambda scores, steps: "a", "output[0], which is no array but a str"),
    "list": (lambda scores, steps: {"length": [4]}, "output[0.length.0], which is no array but an int"),
    "distribution": (
        lambda scores, steps: torch.distributions.Categorical(logits=scores),
        "output[0], which is no array but a Categorical",
    ),
    "object": (
        lambda scores, steps: SimpleNamespace(state=steps),
        "output[0], which is no array but a SimpleNamespace",
    ),
}


@pytest.mark.parametrize("kind", EXTRAS)
def test_outputs_that_are_no_tensors(kind):
    extra, not_compared = EXTRAS[kind]
    torch.manual_seed(1)
    x, y = torch.randn(4, 7, 3, dtype=torch.float64), torch.randn(4, 7, 2, dtype=torch.float64)
    model = Returns(extra).double()
    trace = rl.trace(model, x, y, loss=score_loss)
    assert trace.certificate.state == "passed", trace.certificate
    assert trace.certificate.uncertified == ((not_compared,) if not_compared else ())
    leaf = x.clone().requires_grad_()
    score_loss(model(leaf), y).backward()
    gradient = rl.gradients(model, x, y, loss=score_loss, wrt="input")
    np.testing.assert_allclose(gradient.values, leaf.grad.numpy(), atol=1e-15)
    arrays = {"array": 1, "arrays": 2}.get(kind, 0)
    jacobian = rl.jacobian(model, x, of=f"output[{arrays}]" if arrays else "output")
    leaf = x.clone().requires_grad_()
    model(leaf)[1][:, -1, 0].sum().backward()
    np.testing.assert_allclose(jacobian.isel(out_time=-1, out_unit=0).values, leaf.grad.numpy(), atol=1e-14)


def test_an_array_in_the_outputs_is_compared_by_value():
    calls = []

    def extra(scores, steps):
        calls.append(None)
        return np.full((2,), float(len(calls)))

    torch.manual_seed(1)
    x, y = torch.randn(4, 7, 3), torch.randn(4, 7, 2)
    certificate = rl.trace(Returns(extra), x, y, loss=score_loss).certificate
    assert certificate.state == "could not"
    assert "two reference runs of the model give different numbers" in certificate.why


def test_a_loss_of_joined_batches_is_refused_beside_outputs_that_cannot_be_joined():
    x, y = torch.randn(9, 7, 3), torch.randn(9, 7, 2)
    model = Returns(EXTRAS["distribution"][0])

    def loss(output, target):
        return (output[1] - target).std()

    with pytest.raises(UnsupportedError, match=r"output\[0\], Categorical"):
        rl.gradients(model, x, y, loss=loss, wrt="weights", batch_size=4)
