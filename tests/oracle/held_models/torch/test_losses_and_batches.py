"""The loss of a data set equals that of all samples as one batch, for each batch size, loss and weighting.

The oracle is the user's own expression on all samples, differentiated by torch on the untouched model in float64.
"""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import DataLoader, TensorDataset

import rnnlens as rl
from rnnlens.errors import InputError, UnsupportedError
from rnnlens.verbs import axes
from rnnlens.verbs.differentiation import pull

N, T, V = 7, 5, 4
PAD = 0


class Tagger(nn.Module):
    """An LSTM that returns logits (sample, time, class)."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)
        self.head = nn.Linear(6, V)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class ByClass(Tagger):
    """A tagger that returns logits (sample, class, time), as torch's losses expect them."""

    def forward(self, x):
        return super().forward(x).transpose(1, 2)


class Last(Tagger):
    def forward(self, x):
        return super().forward(x)[:, -1]


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 6, batch_first=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.gru(x)[1][-1])


def make_model(kind):
    torch.manual_seed(3)
    return kind().double().eval()


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, T, 3, generator=g, dtype=torch.float64)


def labels(*shape):
    g = torch.Generator().manual_seed(1)
    classes = torch.randint(1, V, shape, generator=g)
    if len(shape) == 2:
        for i in range(shape[0]):
            classes[i, T - i % 4 :] = PAD
    else:
        classes[-3:] = PAD
    return classes


REAL = torch.randn(N, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
WEIGHTS = torch.tensor([0.3, 2.0, 0.7, 1.1], dtype=torch.float64)


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def masked_entropy(output, target):
    keep = (target != PAD).double()
    return (F.cross_entropy(output, target, reduction="none") * keep).sum() / keep.sum()


LOSSES = {
    "name": (Regressor, REAL, "mse"),
    "function": (Regressor, REAL, F.mse_loss),
    "function by position": (Last, labels(N), F.cross_entropy),
    "mean": (Regressor, REAL, nn.MSELoss()),
    "sum": (Regressor, REAL, nn.MSELoss(reduction="sum")),
    "partial sum": (Regressor, REAL, functools.partial(F.mse_loss, reduction="sum")),
    "lambda sum": (Regressor, REAL, lambda o, y: ((o - y) ** 2).sum()),
    "lambda mean": (Regressor, REAL, lambda o, y: ((o - y) ** 2).mean()),
    "own function": (Regressor, REAL, mean_square),
    "root of a mean": (Regressor, REAL, lambda o, y: F.mse_loss(o, y).sqrt()),
    "of the output alone": (Regressor, None, lambda o: o.pow(3).sum()),
    "correlation": (Regressor, REAL, lambda o, y: -((o - o.mean()) * (y - y.mean())).mean() / (o.std() * y.std())),
    "ignore_index": (ByClass, labels(N, T), nn.CrossEntropyLoss(ignore_index=PAD)),
    "ignore_index of samples": (Last, labels(N), functools.partial(F.cross_entropy, ignore_index=PAD)),
    "default ignore_index": (Last, torch.where(labels(N) == PAD, -100, labels(N)), nn.CrossEntropyLoss()),
    "class weights": (Last, labels(N), nn.CrossEntropyLoss(weight=WEIGHTS)),
    "class weights, ignored, smoothed": (
        ByClass,
        labels(N, T),
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=PAD, label_smoothing=0.1),
    ),
    "nll": (Last, labels(N), lambda o, y: F.nll_loss(o.log_softmax(-1), y, weight=WEIGHTS)),
    "batchmean": (
        Last,
        F.one_hot(labels(N), V).double(),
        lambda o, y: F.kl_div(o.log_softmax(-1), y, reduction="batchmean"),
    ),
    "kl instance": (Last, F.one_hot(labels(N), V).double(), nn.KLDivLoss(reduction="batchmean")),
    "soft labels": (Last, F.one_hot(labels(N), V).double() * 0.9 + 0.025, nn.CrossEntropyLoss()),
    "own mask": (ByClass, labels(N, T), masked_entropy),
    "flattened": (
        Tagger,
        labels(N, T),
        lambda o, y: F.cross_entropy(o.reshape(-1, V), y.reshape(-1), ignore_index=PAD),
    ),
}


def oracle(model, expression):
    """Return the loss and its gradient by every parameter, by plain autograd."""
    model.zero_grad()
    value = expression(model)
    value.backward()
    grads = {name: p.grad.clone().numpy() for name, p in model.named_parameters()}
    model.zero_grad()
    return value.item(), grads


def head_gradients(gradients):
    """Return the gradients of the head, whose weights have torch's layout, under torch's names."""
    return {"head.weight": gradients["head"]["weight"].values, "head.bias": gradients["head"]["bias"].values}


def assert_agrees(gradients, value, expected_grads):
    np.testing.assert_allclose(float(gradients.value), value, rtol=1e-10)
    for name, grad in head_gradients(gradients).items():
        np.testing.assert_allclose(grad, expected_grads[name], rtol=1e-9, atol=1e-12, err_msg=name)
    rnn_grads = gradients["lstm"] if "lstm" in gradients else gradients["gru"]
    rnn = "lstm" if "lstm" in gradients else "gru"
    total = np.square(rnn_grads["kernel"].values).sum()
    np.testing.assert_allclose(total, np.square(expected_grads[f"{rnn}.weight_ih_l0"]).sum(), rtol=1e-9)


def loss_function(loss):
    return F.mse_loss if loss == "mse" else loss


@pytest.mark.parametrize("batch_size", [None, 1, 3, 7])
@pytest.mark.parametrize("name", LOSSES)
def test_the_batch_size_never_changes_the_loss(name, batch_size):
    kind, y, loss = LOSSES[name]
    model, x = make_model(kind), data()
    value, grads = oracle(model, lambda m: loss_function(loss)(m(x)) if y is None else loss_function(loss)(m(x), y))
    assert_agrees(rl.gradients(model, x, y, loss=loss, batch_size=batch_size), value, grads)


@pytest.mark.parametrize("name", ["sum", "lambda sum", "class weights", "ignore_index"])
def test_trace_and_weights_give_the_same_loss(name):
    kind, y, loss = LOSSES[name]
    model, x = make_model(kind), data()
    value, grads = oracle(model, lambda m: loss(m(x), y))
    assert rl.trace(model, x, y, loss=loss).loss == pytest.approx(value, rel=1e-12)
    weights = rl.weights(model, x, y, loss=loss)
    assert weights.loss == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(weights["head"]["weight_grad"], grads["head.weight"], rtol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_each_sample_and_input_are_rows_of_the_whole(name):
    kind, y, loss = LOSSES[name]
    model, x = make_model(kind), data().requires_grad_()
    value = loss_function(loss)(model(x)) if y is None else loss_function(loss)(model(x), y)
    (expected,) = torch.autograd.grad(value, x)
    x = x.detach()
    input_grad = rl.gradients(model, x, y, loss=loss, batch_size=3, wrt="input")
    np.testing.assert_allclose(input_grad, expected, rtol=1e-9, atol=1e-13)
    sample_grads = rl.gradients(model, x, y, loss=loss, batch_size=3, wrt="head.weights", per_sample=True)
    batch_grad = rl.gradients(model, x, y, loss=loss, wrt="head.weights")
    np.testing.assert_allclose(
        sample_grads["head"]["weight"].sum("sample"), batch_grad["head"]["weight"], rtol=1e-9, atol=1e-13
    )


PER_SAMPLE = torch.rand(N, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
PER_STEP = torch.rand(N, T, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def reduced(name):
    kind, y, loss = LOSSES[name]
    return kind, y, loss


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize(
    "name",
    [
        "name", "function", "mean", "sum", "partial sum", "ignore_index", "ignore_index of samples", "class weights",
        "class weights, ignored, smoothed", "default ignore_index", "kl instance", "soft labels",
    ],
)  # fmt: skip
def test_weights_of_one_change_nothing(name, batch_size):
    kind, y, loss = LOSSES[name]
    model, x = make_model(kind), data()
    value, grads = oracle(model, lambda m: loss_function(loss)(m(x), y))
    ones = np.ones((N, T)) if y.shape == (N, T) else np.ones(N)
    assert_agrees(rl.gradients(model, x, y, loss=loss, sample_weight=ones, batch_size=batch_size), value, grads)
    assert rl.trace(model, x, y, loss=loss, sample_weight=ones).loss == pytest.approx(value, rel=1e-12)


def weighted_oracle(name, model, x, y, w):
    """Return the sum of weighted values, divided by the divisor that torch uses for unweighted values."""
    out = model(x)
    if name == "sum":
        return (w[:, None] * (out - y) ** 2).sum()
    if name == "mean":
        return (w[:, None] * (out - y) ** 2).sum() / out.numel()
    if name == "class weights":
        values = F.cross_entropy(out, y, weight=WEIGHTS, reduction="none")
        return (w * values).sum() / WEIGHTS[y].sum()
    values = F.cross_entropy(out, y, ignore_index=PAD, reduction="none")
    return ((w if w.dim() == 2 else w[:, None]) * values).sum() / (y != PAD).sum()


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize(
    ("name", "w"),
    [("sum", PER_SAMPLE), ("mean", PER_SAMPLE), ("class weights", PER_SAMPLE), ("ignore_index", PER_STEP),
     ("ignore_index", PER_SAMPLE)],
)  # fmt: skip
def test_weights_multiply_the_values_of_the_loss(name, w, batch_size):
    kind, y, loss = LOSSES[name]
    model, x = make_model(kind), data()
    value, grads = oracle(model, lambda m: weighted_oracle(name, m, x, y, w))
    assert_agrees(rl.gradients(model, x, y, loss=loss, sample_weight=w, batch_size=batch_size), value, grads)


@pytest.mark.parametrize("samples", [1, N])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_class_weights_hold_for_the_label_of_each_step(samples, batch_size):
    model, x, y = make_model(ByClass), data()[:samples], labels(N, T)[:samples]
    class_weights = {1: 0.2, 2: 3.0}
    per_step = torch.ones(samples, T, dtype=torch.float64)
    for key, weight in class_weights.items():
        per_step[y == key] = weight
    value, grads = oracle(model, lambda m: (per_step * F.cross_entropy(m(x), y, reduction="none")).mean())
    gradients = rl.gradients(model, x, y, loss=nn.CrossEntropyLoss(), class_weight=class_weights, batch_size=batch_size)
    assert_agrees(gradients, value, grads)


def test_weights_that_fit_nothing_are_refused():
    model, x, y = make_model(ByClass), data(), labels(N, T)
    with pytest.raises(InputError, match="sample_weight does not match the shape of the loss values"):
        rl.trace(model, x, y, loss="cross_entropy", sample_weight=torch.ones(T))
    with pytest.raises(UnsupportedError, match="computed per sample"):
        rl.trace(model, x, y, loss=masked_entropy, sample_weight=torch.ones(N))


@pytest.mark.parametrize("batch_size", [1, 3, 5])
@pytest.mark.parametrize("selection", [0, 4, -1, [5, 1], slice(1, 6, 2)])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_selected_samples_are_those_of_the_whole_data_set(selection, reduce, batch_size):
    model, x = make_model(Last), data()
    leaf = x.clone().requires_grad_()
    target = getattr(model(leaf)[selection], reduce)()
    (expected,) = torch.autograd.grad(target, leaf)
    gradients = rl.gradients(
        model,
        x,
        of="output",
        at={"sample": selection},
        reduce=reduce,
        wrt=["input", "head.bias"],
        batch_size=batch_size,
    )
    np.testing.assert_allclose(gradients["model"]["input"], expected, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(float(gradients.value), target.item(), rtol=1e-10)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_weights_along_the_samples_are_cut_with_them(labelled, batch_size):
    import xarray as xr

    model, x = make_model(Last), data()
    weights = torch.randn(N, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((weights * model(leaf)).sum(), leaf)
    reduce = xr.DataArray(weights.numpy(), dims=("sample", "unit")) if labelled else weights.numpy()
    input_grad = rl.gradients(model, x, of="output", reduce=reduce, wrt="input", batch_size=batch_size)
    np.testing.assert_allclose(input_grad, expected, rtol=1e-9, atol=1e-14)
    if labelled:
        sample_weights = xr.DataArray(weights[:, 0].numpy(), dims=("sample",), coords={"sample": np.arange(N)})
        input_grad = rl.gradients(model, x, of="output", reduce=sample_weights, wrt="input", batch_size=batch_size)
        (expected,) = torch.autograd.grad((weights[:, :1] * model(leaf)).sum(), leaf)
        np.testing.assert_allclose(input_grad, expected, rtol=1e-9, atol=1e-14)


def test_sources_that_can_be_read_again_give_the_loss_of_all():
    kind, y, loss = LOSSES["own mask"]
    model, x = make_model(kind), data()
    value, grads = oracle(model, lambda m: loss(m(x), y))
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    assert_agrees(rl.gradients(model, loader, loss=loss), value, grads)


def test_what_can_be_read_only_once_or_comes_in_another_order_is_refused():
    kind, y, loss = LOSSES["own mask"]
    model, x = make_model(kind), data()
    with pytest.raises(UnsupportedError, match="a generator can be read only once"):
        rl.gradients(model, ((x[i : i + 3], y[i : i + 3]) for i in range(0, N, 3)), loss=loss)
    shuffled = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True)
    with pytest.raises(UnsupportedError, match="returned other samples when read a second time"):
        rl.gradients(model, shuffled, loss=loss)
    rl.gradients(model, shuffled, loss=loss, combine="mean")
    kind, y, loss = LOSSES["mean"]
    model = make_model(kind)
    value, grads = oracle(model, lambda m: loss(m(x), y))
    assert_agrees(rl.gradients(model, ((x[i : i + 3], y[i : i + 3]) for i in range(0, N, 3)), loss=loss), value, grads)
    assert_agrees(rl.gradients(model, iter([(x, y)]), loss=mean_square), value, grads)


class Normed(Last):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(V)

    def forward(self, x):
        return self.norm(super().forward(x))


class Centred(Last):
    def forward(self, x):
        return super().forward(x - x.mean(0, keepdim=True))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("kind", "training"), [(Normed, True), (Centred, False)])
def test_samples_that_depend_on_each_other_are_not_cut_apart(kind, training, batch_size):
    model, x = make_model(kind), data()
    for loss in ("cross_entropy", lambda o, y: F.cross_entropy(o, y, reduction="sum")):
        with pytest.raises(UnsupportedError, match="The samples depend on each other"):
            rl.gradients(model, x, labels(N), loss=loss, training=training, batch_size=batch_size)
    with pytest.raises(UnsupportedError, match="The samples depend on each other"):
        rl.gradients(model, x, of="output", reduce="sum", training=training, batch_size=batch_size)
    trace = rl.trace(model, x, labels(N), loss="cross_entropy", training=training)
    expected = F.cross_entropy(model.train(training)(x), labels(N))
    assert trace.loss == pytest.approx(expected.item(), rel=1e-10)


def test_a_penalty_on_the_weights_inside_the_loss_is_refused_over_batches():
    model, x = make_model(Regressor), data()

    def penalised(output, target):
        return F.mse_loss(output, target, reduction="sum") + sum(p.pow(2).sum() for p in model.parameters())

    with pytest.raises(UnsupportedError, match="depends directly on weights of the model"):
        rl.gradients(model, x, REAL, loss=penalised, batch_size=3)


class WithStates(Tagger):
    """A tagger that also returns h_n and c_n, whose second axis is the samples."""

    def forward(self, x):
        out, (h, c) = self.lstm(x)
        return {"logits": self.head(out), "states": (h, c)}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_outputs_in_a_structure_and_with_samples_on_another_axis(batch_size):
    model, x, y = make_model(WithStates), data(), labels(N, T)

    def loss(out, target):
        return F.cross_entropy(out["logits"].flatten(0, 1), target.flatten(), ignore_index=PAD) + (
            out["states"][1].pow(2).sum() / (out["states"][0].abs().sum())
        )

    value, grads = oracle(model, lambda m: loss(m(x), y))
    assert_agrees(rl.gradients(model, x, y, loss=loss, batch_size=batch_size), value, grads)


class Packing(nn.Module):
    """A model that packs its inputs by lengths and returns logits (sample, class) of the last hidden states."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)
        self.head = nn.Linear(6, V)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


LENGTHS = torch.tensor([2, 3, 1, 5, 4, 2, 3])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_of_a_packing_model_are_padded_to_one_length(batch_size):
    model, x, y = make_model(Packing), data(), labels(N)
    wrt = ["lstm.hidden", "input[0]", "head.weights", "lstm.weights"]
    loss = nn.CrossEntropyLoss(ignore_index=PAD)
    value, grads = oracle(model, lambda m: loss(m(x, LENGTHS), y))
    batched_grads = rl.gradients(model, (x, LENGTHS), y, loss=loss, wrt=wrt, batch_size=batch_size)
    assert_agrees(batched_grads, value, grads)
    full_grads = rl.gradients(model, (x, LENGTHS), y, loss=loss, wrt=wrt)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(model(leaf, LENGTHS), y), leaf)
    np.testing.assert_allclose(batched_grads["model"]["input[0]"], expected, rtol=1e-9, atol=1e-14)
    valid = np.arange(T)[None, :] < LENGTHS.numpy()[:, None]
    hidden, reference = batched_grads["lstm"]["hidden"].values, full_grads["lstm"]["hidden"].values
    assert hidden.shape == reference.shape == (N, T, 6)
    np.testing.assert_allclose(hidden[valid], reference[valid], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("loss", ["mse", nn.L1Loss(), lambda o, y: ((o - y) ** 2).mean()])
def test_a_target_that_broadcasts_against_the_output_is_refused(loss):
    model, x = make_model(Regressor), data()
    with pytest.raises(InputError, match=r"broadcast"):
        rl.trace(model, x, REAL[:, 0], loss=loss)
    aligned_loss = rl.trace(model, x, REAL[:, 0], loss=lambda o, y: F.mse_loss(o[:, 0], y)).loss
    assert aligned_loss == pytest.approx(F.mse_loss(model(x), REAL).item(), rel=1e-12)


def test_a_loss_that_does_not_depend_on_the_model_says_so():
    model, x = make_model(Regressor), data()
    trace = rl.trace(
        model, x, REAL, loss=lambda o, y: (o.detach() - y).pow(2).mean() + torch.ones((), requires_grad=True)
    )
    assert any("No path leads from the loss" in note for note in trace.notes)


class TimeFirst(nn.Module):
    """A tagger in torch's time-first layout; if ``folded``, it returns logits (time * sample, class)."""

    def __init__(self, folded=False):
        super().__init__()
        self.folded = folded
        self.lstm = nn.LSTM(3, 6)
        self.head = nn.Linear(6, V)

    def forward(self, x):
        logits = self.head(self.lstm(x)[0])
        return logits.reshape(-1, V) if self.folded else logits


@pytest.mark.parametrize("folded", [False, True])
def test_joined_outputs_lie_as_the_model_lays_them(folded):
    torch.manual_seed(3)
    model, x = TimeFirst(folded).double(), data().transpose(0, 1).contiguous()
    y = labels(N, T).T.contiguous()

    def loss(out, target):
        keep = (target.reshape(-1) != PAD).double()
        values = F.cross_entropy(out.reshape(-1, V), target.reshape(-1), reduction="none")
        return (values * keep).sum() / keep.sum()

    value, grads = oracle(model, lambda m: loss(m(x), y))
    assert_agrees(rl.gradients(model, x, y, loss=loss, batch_size=3), value, grads)


class RoundsBySize(Tagger):
    """A tagger whose rounding depends on the batch size, as with some kernels; its samples are independent."""

    def forward(self, x):
        return super().forward(x) + 1e-9 * len(x)


def test_rounding_that_goes_with_the_batch_size_is_no_dependence_between_samples():
    torch.manual_seed(0)
    model = RoundsBySize().double()
    x = torch.randn(N, T, 3, dtype=torch.float64)
    input_grad = rl.gradients(model, x, of="output", reduce="sum", wrt="input", batch_size=3)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(leaf).sum(), leaf)
    np.testing.assert_allclose(input_grad, expected, rtol=1e-10, atol=1e-14)


def test_samples_are_tried_for_independence_once_a_data_set(monkeypatch):
    """Independence is tested on one batch: two cotangents per binary digit of its sample count, a few at a time."""
    model, x, cotangent_counts = make_model(Last), data(), []
    original = pull._Pull._pull
    monkeypatch.setattr(axes, "TRIED_AT_ONCE", 1)

    def counting_pull(self, cotangents):
        cotangent_counts.append(len(next(iter(cotangents.values()))))
        return original(self, cotangents)

    monkeypatch.setattr(pull._Pull, "_pull", counting_pull)
    per_sample = {"of": "output", "wrt": "input", "reduce": "sum", "per_sample": True, "batch_size": 2}
    sample_grads = rl.gradients(model, x, **per_sample)
    assert cotangent_counts == [1] * (4 + 2)  # one pullback per batch, and two for the test
    np.testing.assert_allclose(
        sample_grads.values, rl.gradients(model, x, **{**per_sample, "batch_size": N}).values, rtol=1e-5
    )
    with pytest.raises(UnsupportedError, match="depend on each other"):
        rl.gradients(make_model(Centred), x, **per_sample)
