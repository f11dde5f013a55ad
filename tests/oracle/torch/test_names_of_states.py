"""States of the user's own cells have the names of the fields that hold them, in every verb and in any order of calls.

The values are those of autograd with retained gradients on the plain model.
"""

import dataclasses
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

import rnnlens as rl
from rnnlens.errors import InputError, LayerNotFoundError

UNITS = 5
rng = np.random.default_rng(0)
X = torch.tensor(rng.normal(size=(4, 6, 3)))
Y = torch.tensor(rng.normal(size=(4, 6, 2)))


def mse(output, target):
    return nn.functional.mse_loss(output, target)


class Pair(NamedTuple):
    """A hidden state and a slower memory."""

    hidden: Tensor
    memory: Tensor


class Spiking(NamedTuple):
    """Spikes, voltage, current and an adaptive threshold."""

    z: Tensor
    v: Tensor
    i: Tensor
    b: Tensor


class WithTuple(NamedTuple):
    """A rate beside a tuple of two memories."""

    rate: Tensor
    memory: tuple[Tensor, Tensor]


class Compartments(NamedTuple):
    """Two parts of a neuron, each with a state of its own."""

    soma: Pair
    dendrite: Pair


class Taken(NamedTuple):
    """Fields of which two have names that results use for something else."""

    input: Tensor
    memory: Tensor
    v_grad: Tensor


@dataclasses.dataclass
class Record:
    """A dataclass that torch knows as a container."""

    level: Tensor
    slope: Tensor


class Unnamed:
    """A container that was registered without names for its parts."""

    def __init__(self, fast, slow):
        self.fast, self.slow = fast, slow


pytree.register_dataclass(Record)
pytree.register_pytree_node(Unnamed, lambda u: ([u.fast, u.slow], None), lambda parts, _: Unnamed(*parts))


class Cell(nn.Module):
    """A cell of four state tensors at most; ``pack`` makes the user's state of them, ``unpack`` takes it apart."""

    def __init__(self, count, pack, unpack):
        super().__init__()
        self.count, self.pack, self.unpack = count, pack, unpack
        self.enter, self.turn = nn.Linear(3, UNITS), nn.Linear(UNITS, UNITS, bias=False)

    def forward(self, x, state):
        first, *others = self.unpack(state)
        new = [torch.tanh(self.enter(x) + self.turn(first) + 0.3 * sum(others))]
        for k, other in enumerate(others):
            new.append((0.9 - 0.2 * k) * other + 0.1 * (k + 1) * torch.sin(new[-1] + first))
        return torch.sigmoid(new[-1]), self.pack(*new)


CELLS = {
    "two fields": (2, Pair, list, ("hidden", "memory")),
    "four fields": (4, Spiking, list, ("z", "v", "i", "b")),
    "a tuple in a field": (
        3,
        lambda a, b, c: WithTuple(a, (b, c)),
        lambda s: [s.rate, *s.memory],
        ("rate", "memory_0", "memory_1"),
    ),
    "fields in fields": (
        4,
        lambda a, b, c, d: Compartments(Pair(a, b), Pair(c, d)),
        lambda s: [*s.soma, *s.dendrite],
        ("soma_hidden", "soma_memory", "dendrite_hidden", "dendrite_memory"),
    ),
    "a list of fields": (
        4,
        lambda a, b, c, d: [Pair(a, b), Pair(c, d)],
        lambda s: [*s[0], *s[1]],
        ("hidden_0", "memory_0", "hidden_1", "memory_1"),
    ),
    "a dict": (2, lambda a, b: {"trace": a, "voltage": b}, lambda s: list(s.values()), ("trace", "voltage")),
    "a dataclass": (2, Record, lambda s: [s.level, s.slope], ("level", "slope")),
    "a class without keys": (2, Unnamed, lambda s: [s.fast, s.slow], ("fast", "slow")),
    "names that are taken": (3, Taken, list, ("hidden", "memory", "state_2")),
    "keys that are no names": (2, lambda a, b: {"a b": a, 3: b}, lambda s: list(s.values()), ("hidden", "state_1")),
}


class Loop(nn.Module):
    """A loop over a cell, which keeps the states of its last call where ``is_kept``."""

    def __init__(self, count, pack, unpack, names):
        super().__init__()
        self.cell, self.read, self.names, self.is_kept = Cell(count, pack, unpack), nn.Linear(UNITS, 2), names, False

    def forward(self, x):
        cell, outputs, kept = self.cell, [], []
        state = cell.pack(*(x.new_zeros(len(x), UNITS) + 0.1 * k for k in range(cell.count)))
        for t in range(x.shape[1]):
            y, state = cell(x[:, t], state)
            outputs.append(self.read(y))
            kept.append(cell.unpack(state))
        if self.is_kept:
            self.states = kept
        return torch.stack(outputs, 1)


def model_of(kind):
    torch.manual_seed(0)
    return Loop(*CELLS[kind]).double()


def truth_of(model):
    model.is_kept = True
    loss = mse(model(X), Y)
    for states in model.states:
        for state in states:
            state.retain_grad()
    loss.backward()
    by_state = dict(zip(model.names, zip(*model.states, strict=True), strict=True))
    grads = {
        name: [torch.zeros_like(state) if state.grad is None else state.grad for state in states]
        for name, states in by_state.items()
    }
    return (
        {name: torch.stack(states, 1).detach().numpy() for name, states in by_state.items()},
        {name: torch.stack(of_state, 1).numpy() for name, of_state in grads.items()},
    )


@pytest.mark.parametrize("kind", CELLS)
def test_fields_are_the_names_of_states(kind):
    names = CELLS[kind][-1]
    values, grads = truth_of(model_of(kind))
    assert rl.layers(model_of(kind), X)["cell"].states == names
    trace = rl.trace(model_of(kind), X, Y, loss=mse)
    gradients = rl.gradients(model_of(kind), X, Y, loss=mse, wrt=[f"cell.{name}" for name in names])
    for name in names:
        np.testing.assert_allclose(trace["cell"][name].values, values[name], atol=1e-13)
        np.testing.assert_allclose(trace["cell"][f"{name}_grad"].values, grads[name], atol=1e-13)
        np.testing.assert_allclose(gradients[f"cell.{name}"].values, grads[name], atol=1e-13)
    assert trace.certificate.state == gradients.certificate.state == "passed"
    assert list(trace["cell"].initial_state_grad.state.values) == list(names)
    assert not {"hidden", "state_1"} - {*names} & {*trace["cell"]}


def test_a_field_whose_name_is_taken_is_told():
    notes = rl.trace(model_of("names that are taken"), X, Y, loss=mse).notes
    assert notes == [
        "cell: hidden is the state's 'input', state_2 is the state's 'v_grad': results use that name for something "
        "else, or it is no identifier."
    ]
    assert rl.trace(model_of("two fields"), X, Y, loss=mse).notes == []


def test_the_jacobian_between_fields_is_that_of_autograd():
    model = model_of("four fields")
    model.is_kept = True
    model(X)
    last, first = model.states[4][1], model.states[2][3]
    rows = [torch.autograd.grad(last[:, i].sum(), first, retain_graph=True)[0] for i in range(UNITS)]
    jacobian = rl.jacobian(model_of("four fields"), X, of="cell.v", wrt="cell.b")
    np.testing.assert_allclose(jacobian.isel(out_time=4, in_time=2).values, torch.stack(rows, 1).numpy(), atol=1e-13)


def _error(call):
    with pytest.raises((LayerNotFoundError, InputError)) as caught:
        call()
    return str(caught.value)


CALLS = {
    "trace": lambda m: sorted(rl.trace(m, X, Y, loss=mse)["cell"]),
    "one quantity": lambda m: sorted(rl.trace(m, X, Y, loss=mse, quantities="v_grad")["cell"]),
    "layers": lambda m: repr(rl.layers(m)),
    "layers of data": lambda m: repr(rl.layers(m, X)),
    "gradients": lambda m: rl.gradients(m, X, Y, loss=mse, wrt="cell.v").values.tolist(),
    "of batches": lambda m: rl.gradients(
        m, DataLoader(TensorDataset(X, Y), 2), loss=mse, combine="sum", wrt="cell.v"
    ).values.tolist(),
    "jacobian": lambda m: rl.jacobian(m, X, of="cell.v", wrt="cell.initial_b").attrs["definition"],
    "default name": lambda m: _error(lambda: rl.gradients(m, X, Y, loss=mse, wrt="cell.hidden")),
    "mistyped": lambda m: _error(lambda: rl.gradients(m, X, Y, loss=mse, wrt="cell.vv")),
    "mistyped quantity": lambda m: _error(lambda: rl.trace(m, X, Y, loss=mse, quantities="vv_grad")),
}


def test_names_do_not_depend_on_earlier_calls():
    alone = {name: call(model_of("four fields")) for name, call in CALLS.items()}
    for first, second in product(CALLS, ("layers", "gradients", "default name", "mistyped quantity")):
        model = model_of("four fields")
        CALLS[first](model)
        assert CALLS[second](model) == alone[second], (first, second)
    assert "cell.z, cell.v, cell.i, cell.b" in alone["default name"]
    assert "cell.z, cell.v, cell.i, cell.b, cell.input" in alone["mistyped"]
    assert "did you mean 'v_grad'?" in alone["mistyped quantity"]


KINDS_OF_STATE = {
    "fields": (Pair, ("hidden", "memory")),
    "keys": (lambda a, b: {"trace": a, "voltage": b}, ("trace", "voltage")),
    "a tuple": (lambda a, b: (a, b), ("hidden", "state_1")),
}


def test_a_model_called_with_another_kind_of_state_has_its_names():
    def model_with(kind):
        pack, _ = KINDS_OF_STATE[kind]
        torch.manual_seed(0)
        return Loop(2, pack, lambda state: [*state.values()] if isinstance(state, dict) else [*state], ()).double()

    def answers(model):
        grads = {}
        for name in ("hidden", "memory", "trace", "voltage", "state_1"):
            try:
                grads[name] = rl.gradients(model, X, Y, loss=mse, wrt=f"cell.{name}").values.tolist()
            except LayerNotFoundError as error:
                grads[name] = str(error)
        return grads

    for earlier, later in product(KINDS_OF_STATE, repeat=2):
        model = model_with(earlier)
        rl.gradients(model, X, Y, loss=mse, wrt=[f"cell.{name}" for name in KINDS_OF_STATE[earlier][1]])
        model.cell.pack = model_with(later).cell.pack
        alone = answers(model_with(later))
        assert answers(model) == alone, (earlier, later)
        known = [name for name, answer in alone.items() if not isinstance(answer, str)]
        assert known == [name for name in alone if name in KINDS_OF_STATE[later][1]]


def test_a_watched_training_has_the_names(tmp_path):
    seen: list[Any] = []
    for options in (
        {"batches": 1, "on_batch": seen.append},
        {"probe": (X, Y), "every": 1, "keep": ["v", "v_grad", "vv"]},
    ):
        model = model_of("four fields")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with rl.torch.watch(model, tmp_path / f"{len(options)}.zarr", loss=mse, **options):
            for _ in range(2):
                optimizer.zero_grad()
                mse(model(X), Y).backward()
                optimizer.step()
                grads = truth_of(model_of("four fields"))[1]
                if len(seen) == 1 and "probe" not in options:
                    for name in CELLS["four fields"][-1]:
                        ours = seen[0].traced()["cell"][f"{name}_grad"].values
                        np.testing.assert_allclose(ours, grads[name], atol=1e-13)
    run = rl.open(tmp_path / "3.zarr")
    np.testing.assert_allclose(run["cell"].dataset["v_grad"].isel(step=0).values, grads["v"], atol=1e-6)
    assert any("no layer has 'vv'; there are b, b_grad, " in note for note in run.notes)
    batches = rl.open(tmp_path / "2.zarr")["cell"].dataset
    assert {"adjoint", "reach", "dead_units"} <= set(batches.data_vars)


def test_files_and_figures_have_the_names(tmp_path):
    trace = rl.trace(model_of("four fields"), X, Y, loss=mse)
    trace.save(tmp_path / "trace.nc")
    assert sorted(rl.open(tmp_path / "trace.nc")["cell"]) == sorted(trace["cell"])
    assert "|dL/dz_t|" in trace["cell"]._repr_html_()
    rl.report(model_of("four fields"), X, Y, loss=mse, path=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert all(f'"{name}"' in page or f">{name.capitalize()}" in page for name in ("z", "v", "i", "b"))
