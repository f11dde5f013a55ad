"""Each cause of a missing gradient, provoked in torch, with the full text of its explanation."""

import pickle

import numpy as np
import pytest
import reasons
import torch
from reasons import reason_texts
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import rnnlens as rl

pytestmark = pytest.mark.check

X = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(1))


class Broken(nn.Module):
    """A model in which each branch into one GRU loses the gradient for a different reason."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.fixed, self.hidden, self.hard, self.dead = (nn.Linear(4, 4) for _ in range(4))
        self.relu = nn.ReLU()
        self.spare = nn.Linear(2, 2)
        self.spare_gru = nn.GRU(2, 2)
        self.gru = nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 2)
        self.fixed.weight.requires_grad_(False)
        with torch.no_grad():
            self.dead.bias.fill_(-100)

    def forward(self, ids):
        e = self.embedding(ids)
        best = nn.functional.one_hot(self.hard(e).argmax(-1), 4).to(e)
        sequence, _ = self.gru(self.fixed(e) + self.hidden(e).detach() + best + self.relu(self.dead(e)))
        return self.head(sequence[:, -1])


@pytest.fixture(scope="module")
def grads():
    torch.manual_seed(0)
    model = Broken()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = rl.gradients(model, X, of=reasons.TARGET, reduce="sum", wrt=["weights", "input", "spare_gru.hidden"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), "an experiment left a weight moved"
        assert parameter.requires_grad == (name != "fixed.weight")
    return gradients


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("input", reasons.integer_input("int64")),
        ("head/weight", reasons.not_on_path("head/weight")),
        ("head/bias", reasons.not_on_path("head/bias")),
        ("hidden/weight", reasons.stop_gradient("hidden/weight", "hidden")),
        ("hard/weight", reasons.non_differentiable("hard/weight")),
        ("spare/weight", reasons.unused_layer("spare")),
        ("spare_gru/kernel", reasons.unused_layer("spare_gru")),
        ("spare_gru.hidden", reasons.unused_layer("spare_gru")),
        ("dead/weight", reasons.relu_dead("relu", 72)),
    ],
)
def test_each_cause_in_full(grads, name, expected):
    assert reason_texts(grads.disconnected[name]) == expected
    code, sentence, remedy = expected
    assert "disconnected" in repr(grads)
    assert f"{name}: [{code}] {sentence} Try: {remedy}" in repr(grads)


def test_nothing_else_is_called_disconnected(grads):
    connected = {"embedding/weight", "fixed/weight", "fixed/bias", "gru/kernel", "gru/recurrent_kernel", "gru/bias"}
    assert connected | {"gru/recurrent_bias"} == set(grads.tensors) - {"dead/weight", "dead/bias"}
    assert not connected & set(grads.disconnected)


def test_frozen_weights_have_their_gradient_and_a_flag(grads):
    assert reason_texts(grads.flags["fixed/weight"]) == reasons.frozen("fixed/weight", "fixed")
    assert grads["fixed"]["weight"].values.any()
    assert set(grads.flags) == {"fixed/weight"}


def test_a_missing_gradient_raises_with_its_reason_where_it_was_asked_for(grads):
    with pytest.raises(rl.errors.QuantityNotFoundError) as error:
        grads["head"]["weight"]
    code, sentence, remedy = reasons.not_on_path("head/weight")
    text = f"There is no gradient with respect to 'head/weight' [{code}].\n  got:      {sentence}\n  try:      {remedy}"
    assert str(error.value) == text


def test_one_tensor_without_a_gradient_is_an_error_with_its_reason():
    torch.manual_seed(0)
    with pytest.raises(rl.errors.DisconnectedError) as error:
        rl.gradients(Broken(), X, of=reasons.TARGET, reduce="sum", wrt="input")
    code, sentence, remedy = reasons.integer_input("int64")
    assert str(error.value) == (
        f"There is no gradient of gru.final_hidden with respect to 'input' [{code}].\n"
        f"  got:      {sentence}\n  try:      {remedy}"
    )
    assert reason_texts(error.value.reason) == (code, sentence, remedy)


class DeadBeside(nn.Module):
    """A GRU whose input is the sum of x, a branch with a dead ReLU and a branch times 0."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)
        self.relu, self.gru = nn.ReLU(), nn.GRU(3, 2, batch_first=True)
        with torch.no_grad():
            self.left.bias.fill_(-100)

    def forward(self, x):
        return self.gru(self.relu(self.left(x)) + 0 * self.right(x) + x)[0]


def test_a_dead_relu_is_blamed_only_where_it_lies_on_the_path():
    torch.manual_seed(0)
    wrt = ["left.weights", "right.weights"]
    g = rl.gradients(DeadBeside(), torch.randn(2, 4, 3), of="output", reduce="sum", wrt=wrt)
    assert {name: reason.code for name, reason in g.disconnected.items()} == {
        "left/weight": "relu_dead",
        "left/bias": "relu_dead",
        "right/weight": "no_effect",
        "right/bias": "no_effect",
    }


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.gru = nn.GRU(2, 3, batch_first=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        lengths = torch.tensor([4, 2, 3])
        _, last = self.gru(pack_padded_sequence(self.inner(x), lengths, batch_first=True, enforce_sorted=False))
        return self.head(last[0])


def test_masked_steps_are_flagged():
    torch.manual_seed(0)
    g = rl.gradients(Packed(), torch.randn(3, 4, 2), of="output", reduce="sum", wrt=["gru.input", "inner.output"])
    assert reason_texts(g.flags["gru.input"]) == reasons.masked_in_part(3, 12)
    assert reason_texts(g.flags["inner.output"]) == reasons.masked_in_part(3, 12)
    assert not g.disconnected


def test_underflow_of_half_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(torch.float16)
    with torch.no_grad():
        model[1].weight.fill_(1.5e-5)
    x = torch.full((2, 2), 2e-4, dtype=torch.float16)
    g = rl.gradients(model, x, of="output", reduce="sum", wrt=["0/weight", "0/bias"])
    assert reason_texts(g.disconnected["0/weight"]) == reasons.underflow("6e-09")
    assert not g["0/weight"].values.any()
    assert np.allclose(g["0/bias"].values, 3e-5, rtol=0.1)


class Detached(nn.Module):
    """Many weights below a detach."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.ModuleList(nn.Linear(3, 3) for _ in range(20))
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x):
        for layer in self.below:
            x = layer(x)
        return self.rnn(x.detach())[0]


def test_a_reason_is_found_when_it_is_read():
    dtype = {"dtype": torch.float64}
    model, x, y = Detached().double(), torch.randn(4, 5, 3, **dtype), torch.randn(4, 5, 4, **dtype)
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(None))
    g = rl.gradients(model, x, y, loss=nn.functional.mse_loss, wrt="weights")
    assert len(passes) == 2  # of the gradient and of its certificate
    assert len(g.disconnected) == 40
    assert "below.3/weight" in g.disconnected
    assert len(passes) == 2
    reason = g.disconnected["below.3/weight"]
    assert reason.code == "stop_gradient"
    read = len(passes)
    assert read > 2
    assert g.disconnected["below.3/weight"] is reason
    assert len(passes) == read
    assert repr(g).count("[stop_gradient]") == 20
    assert "20 more: " in repr(g)
    assert pickle.loads(pickle.dumps(g.disconnected))["below.9/bias"].code == "stop_gradient"


class Masked(nn.Module):
    """A cell whose frozen mask is read from a dict of its own, as in ncps."""

    def __init__(self):
        super().__init__()
        self.update, self.mask = nn.Linear(7, 4), nn.Parameter(torch.rand(4), requires_grad=False)
        self.parts, self.listed = {"mask": self.mask}, [self.mask]

    def forward(self, x, h):
        return torch.tanh(self.update(torch.cat([x, h], 1))) * self.parts["mask"] * self.listed[0]


class MaskedLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Masked()

    def forward(self, x):
        h = x.new_zeros(len(x), 4)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
        return h


def test_a_frozen_weight_that_a_module_keeps_in_containers_has_its_gradient():
    torch.manual_seed(0)
    model, x, y = MaskedLoop().float(), torch.randn(3, 5, 3), torch.randn(3, 4)
    mask = model.cell.mask
    gradients = rl.gradients(model, x, y, loss=nn.functional.mse_loss, wrt="weights")
    assert gradients.certificate.state == "passed"
    assert model.cell.parts["mask"] is model.cell.listed[0] is model.cell.mask is mask
    assert not mask.requires_grad
    mask.requires_grad_(True)
    nn.functional.mse_loss(model(x), y).backward()
    np.testing.assert_allclose(gradients["cell"]["mask"], mask.grad, rtol=1e-5, atol=1e-7)
