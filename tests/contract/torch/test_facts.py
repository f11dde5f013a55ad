"""Facts that the adapter reports about a torch module without running it, and how verbs use them."""

import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens import data
from rnnlens.adapters.torch import adapter


class Tagger(nn.Module):
    """Model with two 2-D weights called ``weight``, one of which is an embedding table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.rnn = nn.RNN(3, 4, num_layers=2, nonlinearity="relu", batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.heads = nn.ModuleList([nn.Linear(4, 2, dtype=torch.float64), nn.ReLU6()])
        self.leaky = nn.LeakyReLU()
        self.loss, self.optimizer, self.input_names = "mse", "mine", ["mine"]

    def forward(self, x):
        hidden = self.drop(self.rnn(self.table(x))[0])
        return self.leaky(self.heads[1](self.heads[0](hidden.double())))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tagger().eval()


def test_roles_go_by_what_a_module_is(model):
    facts = adapter.facts(model)
    assert facts.having("embedding") == ("table",)
    assert facts.having("dropout") == ("drop",)
    assert facts.having("relu") == ("rnn[0]", "rnn[1]", "heads.1")
    assert set(facts.submodules) == {"table", "rnn[0]", "rnn[1]", "drop", "heads.0", "heads.1", "leaky"}
    assert facts.submodules["heads.0"].dtype == "float64"


def test_what_a_module_happens_to_carry_is_the_users_own(model):
    facts = adapter.facts(model)
    assert (facts.loss, facts.optimizer, facts.inputs, facts.clipping) == (None, "", (), None)
    assert adapter.facts(model).reduction(None) is None


def test_an_optimizer_steps_a_copy_of_the_weights(model):
    optimizer = torch.optim.SGD(model.heads.parameters(), lr=0.5)
    before = model.heads[0].weight.detach().numpy().copy()
    gradients = {"heads.0.weight": before + 1, "heads.0.bias": None}
    changes = adapter.facts(model).optimizer_step(optimizer, gradients)
    assert (changes["heads.0.weight"].after == before - 0.5 * (before + 1)).all()
    assert changes["table.weight"].after is None
    assert (model.heads[0].weight.detach().numpy() == before).all()
    assert adapter.facts(model).optimizer_step(None, gradients) is None


def test_only_the_table_is_offered_where_ids_cannot_be_differentiated(model):
    ids = torch.arange(10).reshape(2, 5) % 7
    with pytest.raises(rl.errors.InputError) as error:
        rl.jacobian(model, ids)
    assert 'wrt="table.output"' in str(error.value)
    assert "heads" not in str(error.value)
    g = rl.gradients(model, ids, of="output", reduce="sum", wrt=["table/weight", "heads.0/weight"])
    assert g["table"]["weight"].attrs["touched_rows"] == 7
    assert "touched_rows" not in g["heads.0"]["weight"].attrs


def test_a_module_without_weights_has_a_name(model):
    ids = torch.arange(10).reshape(2, 5) % 7
    g = rl.gradients(model, ids, of="output", reduce="sum", wrt="drop.output")
    slope = torch.where(model(ids) > 0, 1.0, 0.01).double()
    passing = (model.heads[0](model.rnn(model.table(ids))[0].double()) > 0) & (slope == 1)
    expected = passing.double() @ model.heads[0].weight
    torch.testing.assert_close(torch.tensor(g.values).double(), expected.detach(), rtol=1e-5, atol=1e-7)


def test_named_tuples_of_arrays_stay_named_tuples():
    pair = data.DataBatch(torch.zeros(3), {"b": torch.ones(3), "a": None})
    mapped = data.map_leaves(lambda leaf: leaf + 1, pair)
    assert type(mapped) is data.DataBatch
    assert (mapped.x[0], mapped.y["b"][0], mapped.y["a"]) == (1, 2, None)


class Private(nn.Module):
    """A user's module with a property ``nonlinearity`` that raises an error."""

    @property
    def nonlinearity(self):
        raise ValueError("not here")

    def forward(self, x):
        return x


def test_attributes_of_the_users_own_modules_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 4), Private())
    assert adapter.facts(model).having("relu") == ()


@pytest.mark.parametrize(
    "verb",
    [
        rl.layers,
        rl.weights,
        lambda model: rl.trace(model, torch.zeros(2, 5, 3)),
        lambda model: adapter.facts(model).submodules,
    ],
)
def test_a_module_that_waits_for_its_first_batch_is_refused_and_left_waiting(verb):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.LazyLinear(2)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model = Net()
    with pytest.raises(rl.errors.ModelError, match="'head' is not built"):
        verb(model)
    assert model.head.has_uninitialized_params()
    model(torch.zeros(2, 5, 3))
    verb(model)
