"""Typical mistakes: the message says what is wrong, what was given and expected, and what it says to type works."""

import re

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import rnnlens as rl

X = torch.randn(6, 10, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
IDS = torch.arange(60).reshape(6, 10) % 5
ONE_HOT = nn.functional.one_hot(CLASSES, 3)
VALUES = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
cross_entropy, mse = nn.CrossEntropyLoss(), nn.MSELoss()


class Net(nn.Module):
    def __init__(self, *, every_step=False, with_state=False):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)
        self.every_step, self.with_state = every_step, with_state

    def forward(self, x):
        hidden, state = self.lstm(x)
        output = self.head(hidden if self.every_step else hidden[:, -1])
        return (output, state) if self.with_state else output


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(4, 8, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]

    @classmethod
    def trace(cls):
        return rl.trace(cls(), X, X[..., :1].expand(6, 10, 8), loss=mse)


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][-1])


class OneOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(5, 4), nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


net = Net()


def trace(x=X, y=CLASSES, loss=cross_entropy, model=None):
    return rl.trace(Net() if model is None else model, x, y, loss=loss, quantities="hidden")


#: Mistake -> the arguments of ``trace``, text of the message, and what it says to type instead.
LOSSES = {
    "one-hot for an index": ({"y": ONE_HOT}, "y.argmax(-1) in place of y", {"y": ONE_HOT.argmax(-1)}),
    "one-hot for an index, NumPy": (
        {"y": ONE_HOT.numpy()},
        "numpy.argmax(y, -1) in place of y",
        {"y": np.argmax(ONE_HOT.numpy(), -1)},
    ),
    "an index for one-hot": (
        {"loss": mse},
        "torch.nn.functional.one_hot(y.long(), 3).float() in place of y",
        {"loss": mse, "y": torch.nn.functional.one_hot(CLASSES.long(), 3).float()},
    ),
    "an index for one-hot, NumPy": (
        {"loss": mse, "y": CLASSES.numpy()},
        "numpy.eye(3, dtype='float32')[numpy.asarray(y, int)] in place of y",
        {"loss": mse, "y": np.eye(3, dtype="float32")[np.asarray(CLASSES.numpy(), int)]},
    ),
    "classes as floats": ({"y": CLASSES.float()}, "y.long() in place of y", {"y": CLASSES.float().long()}),
    "classes of 32 bits": (
        {"y": CLASSES.numpy().astype("int32")},
        "y.astype('int64') in place of y",
        {"y": CLASSES.numpy().astype("int32").astype("int64")},
    ),
    "a column of classes": (
        {"y": CLASSES[:, None]},
        "y.squeeze(-1) in place of y",
        {"y": CLASSES[:, None].squeeze(-1)},
    ),
    "classes from 1": ({"y": CLASSES + 1}, "y - 1, as classes count from 0", {"y": CLASSES + 1 - 1}),
    "a class too large": ({"y": CLASSES + 2}, "a last layer with 5 outputs", {}),
    "swapped arguments": (
        {"loss": lambda y, out: nn.functional.cross_entropy(out, y)},
        "loss=lambda output, target: your_loss(target, output)",
        {"loss": lambda output, target: (lambda y, out: nn.functional.cross_entropy(out, y))(target, output)},
    ),
    "a loss of the output alone": (
        {"loss": lambda out: out.sum()},
        "leave out y",
        {"loss": lambda o: o.sum(), "y": None},
    ),
    "a model that returns a tuple": (
        {"model": Net(with_state=True)},
        "loss=lambda output, y: criterion(output[0], y)",
        {"model": Net(with_state=True), "loss": lambda output, y: cross_entropy(output[0], y)},
    ),
    "classes at each step": (
        {"model": Net(every_step=True), "y": CLASSES[:, None].expand(6, 10)},
        "loss=lambda output, y: torch.nn.functional.cross_entropy(output.transpose(1, 2), y)",
        {
            "model": Net(every_step=True),
            "y": CLASSES[:, None].expand(6, 10),
            "loss": lambda output, y: torch.nn.functional.cross_entropy(output.transpose(1, 2), y),
        },
    ),
    "a shorter y": ({"y": CLASSES[:5]}, "x[:5]", {"x": X[:5], "y": CLASSES[:5]}),
    "time first": (
        {"model": TimeFirst()},
        "or x.transpose(0, 1)",
        {"model": TimeFirst(), "x": X.transpose(0, 1)},
    ),
    "y without the axis of the output": (
        {"model": OneOutput(), "y": VALUES[:, 0], "loss": nn.BCEWithLogitsLoss()},
        "y.unsqueeze(-1) in place of y",
        {"model": OneOutput(), "y": VALUES[:, 0].unsqueeze(-1), "loss": nn.BCEWithLogitsLoss()},
    ),
    "0 and 1 without the axis of the output": (
        {"model": OneOutput(), "y": (CLASSES % 2).float(), "loss": nn.BCEWithLogitsLoss()},
        "y.unsqueeze(-1) in place of y",
        {"model": OneOutput(), "y": (CLASSES % 2).float().unsqueeze(-1), "loss": nn.BCEWithLogitsLoss()},
    ),
    "a loss of three arguments": (
        {"loss": lambda model, x, y: mse(model(x), y), "y": VALUES},
        "loss=lambda output, target: ((output - target) ** 2).mean()",
        {"loss": lambda output, target: ((output - target) ** 2).mean(), "y": VALUES},
    ),
    "a longer y": ({"x": X[:5]}, "y[:5]", {"x": X[:5], "y": CLASSES[:5]}),
    "weights of the loss on another device": (
        {"loss": nn.CrossEntropyLoss(weight=torch.ones(3, device="meta"))},
        "criterion.to('cpu')",
        {"loss": nn.CrossEntropyLoss(weight=torch.ones(3))},
    ),
    "an undefined mistake": ({"loss": lambda out, y: out.nothing}, "loss(model(x), y) by itself raises the same", {}),
}
INPUTS = {
    "float64": ({"x": X.double()}, "x.to(torch.float32)", {"x": X.double().to(torch.float32)}),
    "a model in float64": (
        {"model": Net().double()},
        "x.to(torch.float64)",
        {"model": Net().double(), "x": X.double()},
    ),
    "one sequence": ({"x": X[0], "y": CLASSES[:1]}, "x[None]", {"x": X[0][None], "y": CLASSES[:1]}),
    "four axes": ({"x": X[None]}, "x.squeeze(0)", {"x": X[None].squeeze(0)}),
    "turned axes": ({"x": X.transpose(1, 2)}, "x.transpose(1, 2)", {"x": X.transpose(1, 2).transpose(1, 2)}),
    "other features": ({"x": X[..., :3]}, "x with the 4 features of the training", {}),
    "ids as floats": (
        {"model": Words(), "x": IDS.float()},
        "x.long() in place of x",
        {"model": Words(), "x": IDS.float().long()},
    ),
    "an id too large": ({"model": Words(), "x": IDS + 1}, "an embedding of 6 rows", {"model": Words(), "x": IDS}),
    "an id below 0": (
        {"model": Words(), "x": IDS - 1},
        "ids of the embedding's vocabulary",
        {"model": Words(), "x": IDS},
    ),
    "a list of samples": ({"x": [*X.numpy()]}, "numpy.stack(x) in place of x", {"x": np.stack([*X.numpy()])}),
    "a dict of one tensor": ({"x": {"words": X}}, "x['words'] in place of x", {}),
    "x and y swapped": ({"x": CLASSES, "y": X}, "swap x and y", {}),
    "weights without values": ({"model": Net().to("meta")}, "model.to_empty(device='cpu')", {}),
}


@pytest.mark.parametrize(("arguments", "hint", "mended"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_raises_is_explained(arguments, hint, mended):
    with pytest.raises(rl.errors.UserCodeError) as caught:
        trace(**arguments)
    text = str(caught.value)
    assert text.startswith("Your loss raised ")
    assert re.search(r"\n  got:      (x \(.*\) float32, )?output ", text)
    assert hint in text.rpartition("\n  try:      ")[2]
    assert trace(**mended)["lstm"].hidden.shape[-1] == 8


@pytest.mark.parametrize(("arguments", "hint", "mended"), INPUTS.values(), ids=INPUTS)
def test_a_forward_that_raises_is_explained(arguments, hint, mended):
    with pytest.raises((rl.errors.UserCodeError, rl.errors.InputError)) as caught:
        trace(**arguments)
    text = str(caught.value)
    assert text.startswith(("Your model's forward raised ", "Your model cannot take this input: "))
    assert "\n  got:      x " in text
    assert "\n  expected: " in text
    assert hint in text.rpartition("\n  try:      ")[2]
    assert trace(**mended)["lstm"].hidden.shape[-1] == 8


def test_an_exception_keeps_its_class_and_its_traceback():
    with pytest.raises(ZeroDivisionError) as caught:
        trace(loss=lambda out, y: 1 / 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_table_is_windowed():
    table = pandas.DataFrame(np.random.default_rng(0).normal(size=(50, 4)), columns=list("abcd"))
    with pytest.raises(rl.errors.InputError, match="x is a table, and a recurrent network reads sequences") as caught:
        trace(x=table)
    code = str(caught.value).partition("windows of 20: x = ")[2].partition("; if each row")[0]
    windows = eval(code, {"numpy": np, "df": table})
    assert windows.shape == (31, 20, 4)
    assert np.array_equal(windows[3], table.to_numpy("float32")[3:23])
    assert trace(x=windows, y=np.zeros(31, int))["lstm"].hidden.sizes["time"] == 20


MODELS = {
    "a class": (Net, "an instance of it: model = Net(...)"),
    "weights": (Net().state_dict(), "model.load_state_dict(weights)"),
    "a path": ("model.pt", "torch.load(path, weights_only=False)"),
}


@pytest.mark.parametrize(("model", "hint"), MODELS.values(), ids=MODELS)
def test_what_is_no_model(model, hint):
    with pytest.raises(rl.errors.ModelError, match="not a model of a supported framework") as caught:
        rl.trace(model, X, CLASSES, loss=cross_entropy)
    assert hint in str(caught.value)


ARGUMENTS = {
    "a class for a loss": (lambda: trace(loss=nn.CrossEntropyLoss), "loss=CrossEntropyLoss()"),
    "a value for a loss": (lambda: trace(loss=torch.zeros(())), "loss=criterion, not loss=criterion(model(x), y)"),
    "a loss of None": (lambda: trace(loss=lambda out, y: None), "return the loss from the function"),
    "a loss of a number": (lambda: trace(loss=lambda out, y: 1.0), "leave out .item() or float()"),
    "no loss for classes": (lambda: trace(loss=None), "loss=torch.nn.functional.cross_entropy"),
    "no loss for values": (lambda: trace(y=VALUES, loss=None), "loss=torch.nn.functional.mse_loss"),
    "model and x swapped": (lambda: rl.trace(X, Net(), CLASSES), "the model first: rl.trace(model, x, y)"),
    "See RNN's layer": (lambda: rl.gradients(Net(), X, layer_name="lstm"), 'wrt="lstm.weights"'),
    "See RNN's rows": (lambda: rl.plot.heatmap(X, n_rows=2), "ax=matplotlib.figure.Figure().subplots(n_rows"),
    "a misspelt keyword": (lambda: rl.plot.heatmap(X, colourbar=False), "did you mean 'colorbar'?"),
    "a loss for verify": (lambda: rl.verify(Net(), loss=mse), "one of: 'function', 'recurrence'"),
    "a keyword of a measure": (lambda: rl.measures.half_life(np.ones(4), axes=0), "did you mean 'axis'?"),
    "a keyword of cell": (lambda: rl.torch.cell(Net().lstm, states="h"), "did you mean 'state'?"),
    "a keyword of style": (lambda: rl.plot.style("paper", widht="column"), "did you mean 'width'?"),
    "another spelling": (lambda: rl.plot.heatmap(X, colour="red"), "color=, of lines and points; cmap=, of images"),
    "batches of a trace": (lambda: rl.trace(Net(), X, batch_size=4), "rl.gradients(model, data, batch_size=...)"),
    "a whole trace for a figure": (lambda: rl.plot.heatmap(Named.trace()), 'such as trace["rnn"].hidden_grad'),
    "a whole layer for a figure": (lambda: rl.plot.heatmap(Named.trace()["rnn"]), 'such as trace["rnn"].hidden_grad'),
    "a layer by number": (lambda: rl.trace(Net(), X, layers=0), "a name that rl.layers(model) lists"),
    "See RNN's mode": (lambda: rl.gradients(Net(), X, mode="weights"), 'rl.gradients(..., wrt="weights")'),
    "See RNN's gradients of weights": (
        lambda: rl.plot.weights_heatmap(rl.weights(Net())["lstm"], mode="grads"),
        "grad=True, of rl.weights(model, x, y)[layer]",
    ),
    "a misspelt option": (lambda: rl.options(memry="1 GiB"), "did you mean 'memory'?"),
    "one model to compare": (lambda: rl.compare(Net(), X, CLASSES), "of one model: rl.diagnose(model, x, y)"),
    "an array with names for a measure": (
        lambda: rl.measures.half_life(Named.trace()["rnn"].hidden),
        'array.transpose(..., "lag").values',
    ),
    "a picture as a page": (
        lambda: rl.plot.heatmap(Named.trace()["rnn"].hidden).save("picture.html"),
        ".save('picture.svg')",
    ),
    "See RNN's norm": (lambda: rl.plot.heatmap(X, norm=(-1, 1)), "limit=v for a scale from -v to v"),
    "fixed points of several inputs": (
        lambda: rl.plot.trajectories(X, fixed_points=[rl.fixed_points(Named(), X, seed=0)]),
        "fixed_points=points[0]",
    ),
    "a time Jacobian at a time": (lambda: rl.jacobian(Named(), X, at={"time": [-1]}), 'at={"out_time": [-1]}'),
    "one of two inputs": (
        lambda: rl.jacobian(rl.torch.model(lambda a, b: net(a + b), net), (X, X), measure="norm"),
        "wrt='input[a]'",
    ),
    "an unknown keyword": (lambda: rl.plot.heatmap(X, qqq=1), "leave it out; plot.heatmap has dims, "),
}


@pytest.mark.parametrize(("call", "hint"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_wrong_arguments(call, hint):
    with pytest.raises(rl.errors.InputError) as caught:
        call()
    assert hint in str(caught.value).rpartition("\n  try:      ")[2]
    assert len(str(caught.value)) < 800


def test_labels_that_do_not_exist():
    lstm = rl.trace(Net(), X)["lstm"]
    gru = rl.trace(nn.GRU(4, 8, batch_first=True), X)["gru"]
    hints = {
        "gru.gates.sel(gate='forget')": "gate='update', the share of the state that is kept",
        "lstm.gates.sel(gate='update')": "gate='forget', the share of the state that is kept",
        "lstm.gates.sel({'gate': 'forgot'})": "did you mean 'forget'?",
        "lstm.hidden.sel(timestep=3, drop=True)": "did you mean 'time'?",
    }
    for code, hint in hints.items():
        with pytest.raises(KeyError) as caught:
            eval(code, {"lstm": lstm, "gru": gru})
        assert str(caught.value).rpartition("\n  try:      ")[2].startswith(hint), code
    with pytest.raises(KeyError):
        lstm.hidden.sel(time=99)
    nearest = lstm.hidden.sel(time=3.2, method="nearest")
    assert (nearest == lstm.hidden.isel(time=3)).all()
    assert (gru.gates.sel(gate="update") == gru.gates.isel(gate=0)).all()


def test_a_dimension_that_is_not_there_and_an_empty_batch_say_what_to_type():
    hidden = rl.trace(Net(), X, CLASSES, loss=cross_entropy)["lstm"].hidden
    for select in (hidden.isel, hidden.sel):
        with pytest.raises(rl.errors.QuantityNotFoundError, match="did you mean 'time'"):
            select(timestep=0)
    assert hidden.isel(time=0).dims == ("sample", "unit")
    with pytest.raises(IndexError):
        hidden.isel(time=999)
    assert hidden.isel({"nothing": 0}, missing_dims="ignore").identical(hidden)
    with pytest.raises(rl.errors.InputError, match=r"if len\(x\)"):
        rl.trace(Net(), X[:0], CLASSES[:0], loss=cross_entropy)


def test_a_comparison_is_indexed_by_model(tmp_path):
    table = rl.compare({"first": Net(), "second": Net(), "third": lambda: 1 / 0}, X, CLASSES, loss=cross_entropy)
    assert table["second"] is table.diagnoses["second"]
    assert "second" in table
    assert "fourth" not in table
    assert table["comparison"].memory.sizes == {"name": 3}
    with pytest.raises(rl.errors.LayerNotFoundError, match="did you mean 'second'") as caught:
        table["secnd"]
    with pytest.raises(rl.errors.LayerNotFoundError, match=r"could not be diagnosed: .*division") as caught:
        table["third"]
    assert "division" in str(eval(caught.value.hint, {"comparison": table}).item())
    table.save(tmp_path / "table.nc")
    read = rl.open(tmp_path / "table.nc")
    with pytest.raises(rl.errors.LayerNotFoundError, match="read from a file") as caught:
        read["second"]
    assert eval(caught.value.hint, {"comparison": read})["name"] == "second"


def test_names_that_do_not_exist(monkeypatch):
    monkeypatch.delattr(rl, "diagnosis", raising=False)  # the package of that name, once something was diagnosed
    result = trace()
    hints = {
        "rl.gradient": "rl.gradients",
        "rl.diagnosis": "rl.diagnose(model, x, y)",
        "rl.get_gradients": "rl.trace(model, x, y), then trace[layer].hidden_grad",
        "rl.attention": "rl.hidden_attention(model, x)",
        "rl.plot.attention": "rl.plot.hidden_attention(rl.hidden_attention(model, x))",
        "rl.plot.heatmaps": "rl.plot.heatmap",
        "rl.heatmap": "rl.plot.heatmap",
        "rl.torch.Watch": "rl.torch.watch",
        "rl.measures.half_live": "rl.measures.half_life",
        "rl.errors.InputEror": "rl.errors.InputError",
        "rl.plot.curves(trace['lstm'].hidden).savefig": "drawing.save(path)",
        "rl.plot.curves(trace['lstm'].hidden).set_title": "drawing[0].set_title",
        "rl.plot.curves(trace['lstm'].hidden).suptitle": "drawing.figure.suptitle",
        "rl.plot.curves(trace['lstm'].hidden).mrak": "drawing.mark",
        "rl.torch.callback": "one of: cell, cuts, model, scan, step, watch",
        "trace.hidden": "trace['lstm'].hidden: variables belong to a layer",
        "trace.lstm": "trace['lstm']",
        "trace.los": "trace.loss",
        "trace['lstm'].forget": 'gates.sel(gate="forget")',
    }
    full = rl.trace(Net(), X, CLASSES, loss=cross_entropy)
    for code, hint in hints.items():
        owner = full if "forget" in code else result
        with pytest.raises(AttributeError) as caught:
            eval(code, {"rl": rl, "trace": owner})
        assert str(caught.value).rpartition("\n  try:      ")[2].startswith(hint), code
    assert not hasattr(result, "_asked_for_by_tools")
