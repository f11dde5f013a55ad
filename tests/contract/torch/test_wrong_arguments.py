"""Wrong arguments in calls on a torch model: each gives an error before anything runs, and none is ignored."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rnnlens as rl
from rnnlens.arguments import weights_of_samples
from rnnlens.errors import (
    CallError,
    InputError,
    LayerNotFoundError,
    ModelError,
    RnnlensError,
    TooLargeError,
    UnsupportedError,
    UserCodeError,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 5, 3)).astype("f4")
Y = RNG.normal(size=(4, 5, 2)).astype("f4")
mse = nn.functional.mse_loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.top = nn.Linear(4, 2)

    def forward(self, x):
        return self.top(self.lstm(x)[0])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


WRONG_CALLS = {
    "a data set": (lambda m: rl.trace(m, DataLoader(TensorDataset(torch.tensor(X)))), InputError, "is a data set"),
    "a generator": (lambda m: rl.trace(m, iter([X])), InputError, "x, y = next(iter(data_set))"),
    "all of a generator": (lambda m: rl.jacobian(m, iter([X])), InputError, 'across="mean"'),
    "single samples": (lambda m: rl.gradients(m, TensorDataset(torch.tensor(X))), InputError, "DataLoader(dataset"),
    "a class of loss": (lambda m: rl.trace(m, X, Y, loss=nn.MSELoss), InputError, "try:      loss=MSELoss()"),
    "meta": (lambda m: rl.trace(m, torch.zeros(4, 5, 3, device="meta")), InputError, "a shape but no values"),
    "sparse": (lambda m: rl.trace(m, torch.tensor(X).to_sparse()), InputError, "to_dense()"),
    "masked": (lambda m: rl.trace(m, np.ma.masked_array(X, X > 0)), InputError, "x.filled(0)"),
    "complex": (lambda m: rl.trace(m, X * 1j), UnsupportedError, "its imaginary part would be dropped"),
    "objects": (lambda m: rl.trace(m, np.array([object()])), InputError, "dtype object"),
    "dates": (lambda m: rl.trace(m, X.astype("datetime64[s]")), InputError, "is not numeric"),
    "ragged": (lambda m: rl.trace(m, [[1.0, 2.0], [3.0]]), InputError, "rows of one length"),
    "None": (lambda m: rl.trace(m, None), InputError, "x holds no data"),
    "nothing": (lambda m: rl.trace(m, []), InputError, "x holds no data"),
    "endless": (lambda m: rl.trace(m, _endless_list()), InputError, "nested too deeply"),
    "huge x": (lambda m: rl.trace(m, np.broadcast_to(X[0, 0], (10**9, 9, 3))), TooLargeError, "at most 2 GiB"),
    "huge y": (lambda m: rl.trace(m, X, np.broadcast_to(Y[0], (10**9, 5, 2)), loss=mse), TooLargeError, "y alone"),
    "huge reduce": (
        lambda m: rl.jacobian(m, X, reduce=np.broadcast_to(0.0, (10**9, 9, 3))),
        InputError,
        "output units",
    ),
    "huge batch": (lambda m: rl.gradients(m, np.broadcast_to(X[0], (10**9, 5, 3))), TooLargeError, "batch_size="),
    "training": (lambda m: rl.trace(m, X, training="yes"), InputError, "training= is a switch."),
    "seed": (lambda m: rl.trace(m, X, seed=-1), InputError, "seed >= 0"),
    "a large seed": (lambda m: rl.trace(m, X, seed=2**70), InputError, "seed <= 4294967295"),
    "no layers": (lambda m: rl.trace(m, X, layers=[]), InputError, "layers= names nothing."),
    "a call": (lambda m: rl.trace(m, X, layers="lstm#0"), LayerNotFoundError, "'lstm#0'"),
    "a state": (lambda m: rl.trace(m, X, quantities="state_99"), InputError, "No layer here has 'state_99'."),
    "states of": (lambda m: rl.trace(m, X, initial_state={"no": [X]}), LayerNotFoundError, "names 'no'"),
    "one of two states": (lambda m: rl.trace(m, X, initial_state=_zero_states(1, 4)), InputError, "(4, 4), (4, 4)]"),
    "wide states": (lambda m: rl.trace(m, X, initial_state=_zero_states(2, 9)), InputError, "another shape"),
    "no wrt": (lambda m: rl.gradients(m, X, Y, loss=mse, wrt=iter(())), InputError, "wrt= names nothing."),
    "at nothing": (lambda m: rl.gradients(m, X, of="output", at={"time": slice(9, 9)}), InputError, "selects nothing"),
    "clip": (lambda m: rl.gradients(m, X, Y, loss=mse, clip={"clipnorm": -1}), InputError, "0 < clip['clipnorm']"),
    "batch size": (lambda m: rl.gradients(m, X, Y, loss=mse, batch_size=0), InputError, "batch_size >= 1"),
    "complex weights": (lambda m: rl.jacobian(m, X, reduce=np.ones(2) * 1j), UnsupportedError, "reduce is complex"),
    "probes": (lambda m: rl.jacobian(m, X, sketch=10**9), TooLargeError, "random probes of sketch="),
    "no steps": (
        lambda m: rl.jacobian(m, X, at={"out_time": slice(5, 5)}),
        InputError,
        "at['out_time'] names no steps.",
    ),
    "many steps": (
        lambda m: rl.jacobian(m, X, at={"in_time": range(10**12)}),
        InputError,
        "at['in_time']= names no steps.",
    ),
    "no step": (lambda m: rl.jacobian(m, X, at={"unit": 0}), InputError, "at= of a time Jacobian has no 'unit'."),
    "a share": (lambda m: rl.jacobian(m, X, rtol="little"), InputError, "rtol= is a share."),
    "not recurrent": (lambda m: rl.jacobian(nn.Linear(3, 3), X), ModelError, 'wrt="input")'),
    "a misspelling": (lambda m: rl.trace(m, X, Y, los=mse), CallError, "did you mean 'loss'?"),
    "a position": (lambda m: rl.trace(m, X, Y, mse), CallError, "trace(model, x, y, layers=..., "),
    "over": (lambda m: rl.weight_norms(m, over="gates"), InputError, "did you mean 'gate'?"),
    "a norm": (lambda m: rl.weight_norms(m, ord=3), InputError, "1, 2 or a callable"),
    "half a character": (lambda m: rl.report(m, X, Y, loss=mse, title="\udcff"), InputError, "holds half a character"),
    "a name of 10 000 letters": (lambda m: rl.weights(m, layers="x" * 10_000), LayerNotFoundError, "one of: "),
}


def _endless_list():
    items = []
    items.append(items)
    return items


def _zero_states(count, width):
    return {"lstm": [np.zeros((4, width), "f4")] * count}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_wrong_argument_is_one_error_that_says_what_to_do(model, case):
    call, kind, phrase = WRONG_CALLS[case]
    with pytest.raises(kind) as caught:
        call(model)
    assert isinstance(caught.value, RnnlensError)
    assert phrase in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_weights_that_are_one_number_repeated_are_checked_without_a_copy():
    weights = np.broadcast_to(np.float32(0), (10**6, 50, 3))
    tracemalloc.start()
    try:
        weights_of_samples("sample_weight", weights)
        assert tracemalloc.get_traced_memory()[1] < weights.size / 10
    finally:
        tracemalloc.stop()


SAME_NUMBERS = {
    "big-endian": lambda: X.astype(">f8"),
    "turned round twice": lambda: X[:, ::-1][:, ::-1],
    "requires grad": lambda: torch.tensor(X, requires_grad=True),
    "lists": X.tolist,
    "labelled": lambda: xr.DataArray(X),
    "columns first": lambda: np.asfortranarray(X),
    "long double": lambda: X.astype(np.longdouble),
}


@pytest.mark.parametrize("form", SAME_NUMBERS)
def test_the_same_numbers_in_another_form_give_the_same_result(model, form):
    expected = rl.trace(model, X, Y, loss=mse)["lstm"].hidden_grad
    actual = rl.trace(model, SAME_NUMBERS[form](), Y, loss=mse, training=np.False_)["lstm"].hidden_grad
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-8)


def test_an_iterator_of_names_is_read_once_and_used_throughout(model):
    gradients = rl.gradients(model, X, Y, loss=mse, wrt=(name for name in ["lstm.hidden", "top.weights"]))
    assert set(gradients.tensors) == {"lstm.hidden", "top/weight", "top/bias"}


def test_given_states_are_started_from(model):
    states = [RNG.normal(size=(4, 4)).astype("f4") for _ in range(2)]
    with torch.no_grad():
        expected = model.lstm(torch.tensor(X), tuple(torch.tensor(s)[None] for s in states))[0]
    for form in (states, np.stack(states), tuple(map(torch.tensor, states))):
        hidden = rl.trace(model, X, initial_state={"lstm": form})["lstm"].hidden
        np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-6)


class OwnError(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)
        self.code = code


STAGES = {
    "Your loss": lambda m: rl.trace(m, X, Y, loss=lambda out, target: _fail()),
    "Your model's forward": lambda m: rl.trace(Failing(), X),
    "Your function": lambda m: rl.gradients(m, X, of=lambda out: _fail(), wrt="input"),
    "Your norm": lambda m: rl.weight_norms(m, ord=lambda values: _fail()),
}


class Failing(Net):
    def forward(self, x):
        super().forward(x)
        _fail()


def _fail():
    raise OwnError(7, "gone")


@pytest.mark.parametrize("code_name", STAGES)
def test_what_the_users_code_raises_says_whose_it_was_and_is_still_its_own(model, code_name):
    with pytest.raises(OwnError) as caught:
        STAGES[code_name](model)
    error = caught.value
    assert isinstance(error, UserCodeError)
    assert str(error).startswith(f"{code_name}")
    assert "raised OwnError." in str(error)
    assert "gone" in str(error)
    assert error.code == 7
    assert type(error.__cause__) is OwnError


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_untouched(model, kind):
    def stop(out, target):
        raise kind

    model.train()
    with pytest.raises(kind) as caught:
        rl.trace(model, X, Y, loss=stop)
    assert type(caught.value) is kind
    assert model.training


class Heads(Net):
    def forward(self, x):
        hidden = self.lstm(x)[0]
        return {"classes": self.top(hidden[:, -1]), "sequence": hidden}


def test_an_output_in_a_dict_is_asked_for_by_its_name():
    torch.manual_seed(0)
    model = Heads()
    x = torch.tensor(X, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x)["classes"].sum(), x)
    gradients = rl.gradients(model, X, of="output[classes]", reduce="sum", wrt="input")
    np.testing.assert_allclose(gradients, expected, rtol=1e-4, atol=1e-7)
    jacobian = rl.jacobian(model, X, of="output[classes]").sum("out_unit")
    np.testing.assert_allclose(jacobian, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(LayerNotFoundError, match=r"did you mean 'output\[classes\]'"):
        rl.jacobian(model, X, of="output[class]")


def test_the_call_that_the_error_of_jacobian_names_works():
    model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ModelError) as caught:
        rl.jacobian(model, X)
    call = str(caught.value).rpartition("rl.")[2]
    jacobian = eval(f"rl.{call}", {"rl": rl, "model": model, "x": X})
    expected = np.broadcast_to(model[0].weight[0].detach(), X.shape)
    np.testing.assert_allclose(jacobian, expected, rtol=1e-6)


def test_a_time_jacobian_is_saved_with_its_checks(model, tmp_path):
    jacobian = rl.jacobian(model, X, measure="norm")
    assert isinstance(jacobian, xr.DataArray)
    assert "replay" in [check.name for check in jacobian.checks]
    assert all(check.ok for check in jacobian.checks)
    jacobian.save(tmp_path / "j.nc")
    opened = rl.open(tmp_path / "j.nc")
    xr.testing.assert_identical(opened, jacobian)
    assert opened.mean("sample", keep_attrs=True).checks == jacobian.checks
    with pytest.raises(rl.errors.FileError, match=r"nc or \.zarr"):
        jacobian.save(tmp_path / "j.txt")


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_clipped_gradients_come_back_from_a_file(model, tmp_path, suffix):
    gradients = rl.gradients(model, X, Y, loss=mse, clip={"global_clipnorm": 0.01})
    gradients.save(tmp_path / f"g{suffix}")
    opened = rl.open(tmp_path / f"g{suffix}")
    assert opened.layers == gradients.layers
    for name in gradients.tensors:
        xr.testing.assert_identical(opened[name], gradients[name])
        xr.testing.assert_identical(opened.clipped[name], gradients.clipped[name])
        assert not np.array_equal(opened.clipped[name], gradients[name])


class OwnCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3 + 7, 7)

    def forward(self, x, h):
        return torch.tanh(self.mix(torch.cat([x, h], -1)))


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = OwnCell()

    def forward(self, x):
        h = x.new_zeros(len(x), 7)
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
        return h


def test_units_that_are_not_known_yet_are_no_number():
    table = rl.layers(Loop())
    assert " ?  " in repr(table)
    assert " 0 " not in repr(table)


def test_every_argument_of_every_verb_has_a_check():
    import inspect

    for verb in (rl.layers, rl.trace, rl.gradients, rl.jacobian, rl.weights, rl.weight_norms, rl.open):
        assert set(verb.table) == set(inspect.signature(verb).parameters), verb.__name__
