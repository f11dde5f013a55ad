"""``rl.gradients`` on torch against autograd: per sample, over batches, and with the options of training."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rnnlens as rl
from rnnlens.errors import InputError, ModelError, UnsupportedError

pytestmark = pytest.mark.check

B, T, F = 7, 5, 3


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(11, F)
        self.drop = nn.Dropout(dropout)
        self.lstm = nn.LSTM(F, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.lstm(self.drop(self.embedding(ids)))[0][:, -1])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().double()


X = torch.randint(0, 11, (B, T), generator=torch.Generator().manual_seed(1))
Y = torch.randn((B, 2), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
mse = nn.functional.mse_loss


def autograd_gradients(model, value):
    """Return the gradients of a scalar by rnnlens name, LSTM weights in the layout of rl.gradients."""
    names = dict(model.named_parameters())
    grads = torch.autograd.grad(value, list(names.values()), allow_unused=True)
    rename = {
        "lstm.weight_ih_l0": "lstm/kernel",
        "lstm.weight_hh_l0": "lstm/recurrent_kernel",
        "lstm.bias_ih_l0": "lstm/bias",
        "lstm.bias_hh_l0": "lstm/recurrent_bias",
    }
    gradients = {}
    for name, g in zip(names, grads, strict=True):
        if g is not None:
            rnnlens_name = rename.get(name, name.replace(".", "/"))
            array = g.numpy()
            gradients[rnnlens_name] = (
                (array.T if array.ndim == 2 else array).reshape(*array.T.shape[:-1], 4, 4) if name in rename else array
            )
    return gradients


def assert_close(g, expected):
    assert set(g.tensors) == set(expected)
    for name, reference in expected.items():
        np.testing.assert_allclose(g[name].values, reference, rtol=1e-9, atol=1e-13, err_msg=name)


def test_weights_of_the_loss(model):
    assert_close(rl.gradients(model, X, Y, loss=mse), autograd_gradients(model, mse(model(X), Y)))


@pytest.mark.parametrize("memory", ["2 GiB", "4 KB"])
def test_shares_of_samples_in_the_loss(model, memory):
    g = rl.gradients(model, X, Y, loss=mse, per_sample=True, memory=memory)
    for n in range(B):
        share = ((model(X[n : n + 1]) - Y[n : n + 1]) ** 2).sum() / (B * 2)
        for name, reference in autograd_gradients(model, share).items():
            np.testing.assert_allclose(g[name].isel(sample=n).values, reference, rtol=1e-9, atol=1e-13)
    total = rl.gradients(model, X, Y, loss=mse)
    for name in g.tensors:
        np.testing.assert_allclose(g[name].sum("sample").values, total[name].values, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("memory", ["2 GiB", "4 KB"])
def test_weights_by_sample_of_a_state_inside(model, memory):
    options = {"of": "lstm.hidden", "at": {"time": 3}, "reduce": "mean", "wrt": "weights"}
    g = rl.gradients(model, X, per_sample=True, memory=memory, **options)
    for n in range(B):
        sample_grads = rl.gradients(model, X[n : n + 1], **options)
        for name in sample_grads.tensors:
            np.testing.assert_allclose(g[name].isel(sample=n).values, sample_grads[name].values, rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(g.value[n], sample_grads.value, rtol=1e-12)
    assert {r.code for r in g.disconnected.values()} == {"not_on_path"}


@pytest.mark.parametrize("of", ["loss", "mean", "sum"])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_batch_size_never_changes_the_numbers(model, of, batch_size):
    wrt = ["weights", "lstm.hidden", "embedding.output"]
    target = {"y": Y, "loss": mse} if of == "loss" else {"of": "output", "reduce": of}
    unbatched = rl.gradients(model, X, wrt=wrt, **target)
    batched = rl.gradients(model, X, wrt=wrt, batch_size=batch_size, **target)
    np.testing.assert_allclose(batched.value, unbatched.value, rtol=1e-10)
    for name in unbatched.tensors:
        assert batched[name].dims == unbatched[name].dims
        np.testing.assert_allclose(batched[name].values, unbatched[name].values, rtol=1e-9, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("source", ["loader", "generator", "arrays"])
def test_every_source_gives_the_same(model, source):
    pairs = TensorDataset(X, Y)
    feed = {
        "loader": lambda: (DataLoader(pairs, batch_size=3),),
        "generator": lambda: (((X[i : i + 3], Y[i : i + 3]) for i in range(0, B, 3)),),
        "arrays": lambda: (X.numpy(), Y.numpy()),
    }[source]()
    assert_close(rl.gradients(model, *feed, loss=mse), autograd_gradients(model, mse(model(X), Y)))


@pytest.mark.parametrize("batch_size", [2, 7])
@pytest.mark.parametrize("measure", [None, "norm"])
@pytest.mark.parametrize("across", [None, "mean", "sum"])
def test_measured_and_reduced_across_samples_on_the_way(model, measure, across, batch_size):
    options = {"of": "lstm.final_hidden", "reduce": "mean", "per_sample": True, "wrt": "embedding.output"}
    gradients = rl.gradients(model, X, **options)
    g = rl.gradients(model, X, measure=measure, across=across, batch_size=batch_size, **options)
    sizes = gradients if measure is None else np.sqrt((gradients**2).sum("unit"))
    expected = {None: sizes, "mean": sizes.mean("sample"), "sum": sizes.sum("sample")}[across]
    assert g.dims == expected.dims
    np.testing.assert_allclose(g.values, expected.values, rtol=1e-10)


def test_norm_of_weights_is_that_of_the_data_set(model):
    gradients = rl.gradients(model, X, Y, loss=mse)
    g = rl.gradients(model, X, Y, loss=mse, measure="norm", batch_size=2)
    for name in gradients.tensors:
        assert g[name].dims == ()
        np.testing.assert_allclose(g[name].values, np.linalg.norm(gradients[name].values), rtol=1e-10)


def test_what_batches_cannot_tell_is_refused(model):
    with pytest.raises(UnsupportedError) as error:
        rl.gradients(model, X, of="output", reduce="norm", batch_size=3)
    assert str(error.value) == (
        "The target over several batches cannot be computed from the targets of each batch.\n"
        "  got:      a norm or a callable over more than one batch\n"
        '  expected: combine="sum" or combine="mean", if it is a sum or a mean over samples; or per_sample=True'
    )
    total = rl.gradients(model, X, of=lambda out: out.sum(), batch_size=3, combine="sum")
    assert_close(total, autograd_gradients(model, model(X).sum()))


@pytest.mark.parametrize("reduce", ["sum", "mean", "norm", "weights", "callable"])
def test_reductions(model, reduce):
    weights = np.random.default_rng(0).normal(size=(2,))
    reduction = {"weights": weights, "callable": lambda t: t.exp().mean()}.get(reduce, reduce)
    out = model(X)
    reference = {
        "sum": out.sum,
        "mean": out.mean,
        "norm": out.norm,
        "weights": lambda: (out * torch.tensor(weights)).sum(),
        "callable": lambda: out.exp().mean(),
    }[reduce]()
    g = rl.gradients(model, X, of="output", reduce=reduction)
    np.testing.assert_allclose(g.value, reference.item(), rtol=1e-12)
    assert_close(g, autograd_gradients(model, reference))


def test_steps_and_units_are_selected_before_differentiation(model):
    states, _ = model.lstm(model.embedding(X))
    g = rl.gradients(
        model, X, of="lstm.hidden", at={"time": [1, -1], "unit": slice(0, 2)}, reduce="sum", wrt="lstm.weights"
    )
    expected = autograd_gradients(model, states[:, [1, -1], :2].sum())
    for name in g.tensors:
        np.testing.assert_allclose(g[name].values, expected[name], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("kind", ["global_clipnorm", "clipnorm", "clipvalue"])
def test_clipping_counts_weights_that_were_not_asked_for(model, kind):
    threshold = {"global_clipnorm": 0.05, "clipnorm": 0.02, "clipvalue": 0.01}[kind]
    reference = autograd_gradients(model, mse(model(X), Y))
    g = rl.gradients(model, X, Y, loss=mse, wrt=["head.weights", "lstm/kernel"], clip={kind: threshold})
    norm = np.sqrt(sum((a**2).sum() for a in reference.values()))
    for name in ("head/weight", "head/bias", "lstm/kernel"):
        clipped = {
            "global_clipnorm": reference[name] * min(1, threshold / norm),
            "clipnorm": reference[name] * min(1, threshold / np.linalg.norm(reference[name])),
            "clipvalue": np.clip(reference[name], -threshold, threshold),
        }[kind]
        np.testing.assert_allclose(g.clipped[name].values, clipped, rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(g[name].values, reference[name], rtol=1e-9, atol=1e-13)
    assert set(g.tensors) == {"head/weight", "head/bias", "lstm/kernel"}


def test_torch_optimizers_do_not_clip(model):
    with pytest.raises(ModelError, match="does not clip gradients"):
        rl.gradients(model, X, Y, loss=mse, clip="optimizer")


def test_embeddings_are_dense_and_count_their_rows(model):
    g = rl.gradients(model, X, Y, loss=mse, wrt=["embedding/weight", "head/bias"])
    assert g["embedding/weight"].attrs["touched_rows"] == len(X.unique())
    assert f"{len(X.unique())} rows touched" in repr(g)


def test_dropout_is_the_same_for_the_same_seed_and_the_generator_is_left_alone():
    torch.manual_seed(0)
    model = Net(dropout=0.5).double()
    state = torch.get_rng_state()
    wrt = ["lstm.hidden", "embedding/weight"]
    first, repeated, other_seed = (
        rl.gradients(model, X, Y, loss=mse, training=True, seed=seed, wrt=wrt) for seed in (3, 3, 4)
    )
    assert torch.equal(state, torch.get_rng_state())
    for name in first.tensors:
        np.testing.assert_array_equal(first[name].values, repeated[name].values)
        assert not np.allclose(first[name].values, other_seed[name].values)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model.train()
        np.testing.assert_allclose(
            first["embedding/weight"].values, autograd_gradients(model, mse(model(X), Y))["embedding/weight"]
        )
    without_dropout = rl.gradients(model, X, Y, loss=mse, wrt=wrt)
    assert not np.allclose(without_dropout["lstm.hidden"].values, first["lstm.hidden"].values)


def test_sample_weights(model):
    weight = torch.linspace(0, 2, B, dtype=torch.float64)
    sample_losses = ((model(X) - Y) ** 2).mean(1)
    assert_close(
        rl.gradients(model, X, Y, loss=mse, sample_weight=weight),
        autograd_gradients(model, (weight * sample_losses).mean()),
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"of": "output"},
            "output is not one number. A gradient needs one number, and rnnlens does not sum outputs unless told to.\n"
            "  got:      (sample: 7, unit: 2), 14 numbers\n"
            '  expected: reduce="sum", "mean", "norm", weights or a callable; or at= to select steps and units\n'
            '  try:      rl.jacobian(model, x, of="output") for the derivative of each number separately',
        ),
        (
            {"of": "lstm.hidden", "at": {"time": 2}, "per_sample": True},
            "lstm.hidden is not one number per sample. "
            "A gradient needs one number, and rnnlens does not sum outputs unless told to.\n"
            "  got:      (sample: 7, unit: 4), 4 numbers per sample\n"
            '  expected: reduce="sum", "mean", "norm", weights or a callable; or at= to select steps and units\n'
            '  try:      rl.jacobian(model, x, of="lstm.hidden") for the derivative of each number separately',
        ),
        (
            {"of": "lstm.hidden", "at": {"step": 2}, "reduce": "sum"},
            "The target has no dimension 'step'.\n  got:      at={'step': 2}\n"
            "  expected: (sample: 7, time: 5, unit: 4)\n"
            "  try:      did you mean 'time'? Known: 'sample', 'time', 'unit'",
        ),
        (
            {"of": "lstm.hidden", "at": {"time": 5}, "reduce": "sum"},
            "at= selects beyond the target along 'time'.\n  got:      time=5\n  expected: whole numbers from -5 to 4",
        ),
        (
            {"of": "output", "reduce": np.ones(3)},
            "The weights of reduce= do not match the shape of the target.\n  got:      shape (3,)\n"
            "  expected: what broadcasts to (sample: 7, unit: 2); or one of sum, mean, norm, or a callable",
        ),
        (
            {"of": "output", "reduce": "men"},
            "No reduction named 'men'.\n  try:      did you mean 'mean'? Known: 'sum', 'mean', 'norm'",
        ),
        (
            {"of": "lstm.gates", "reduce": "sum"},
            "'lstm.gates' cannot be differentiated; it can be differentiated with respect to.\n"
            '  expected: "loss", "output", "layer.output", "layer.hidden", "layer.cell" or "layer.final_hidden"',
        ),
    ],
)
def test_unclear_questions_are_answered_in_words(model, arguments, text):
    with pytest.raises((InputError, UnsupportedError)) as error:
        rl.gradients(model, X, **{"wrt": "embedding.output", **arguments})
    assert str(error.value) == text


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(F, 4, batch_first=True)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])

    def forward(self, x):
        sequence = self.gru(x)[0]
        return {"a": self.heads[0](sequence), "b": self.heads[1](sequence[:, -1])}


@pytest.fixture
def two_heads():
    torch.manual_seed(0)
    x = torch.randn((B, T, F), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return TwoHeads().double(), x


def mixed_loss(a, b):
    return (a[:, 2] ** 2).sum() + b.sin().sum()


def test_a_callable_sees_every_output_of_a_model_that_returns_several(two_heads):
    model, x = two_heads
    x = x.requires_grad_()
    (expected,) = torch.autograd.grad(mixed_loss(*model(x).values()), x)
    g = rl.gradients(model, x, of=lambda outputs: mixed_loss(*outputs), wrt="input", batch_size=3, combine="sum")
    assert np.abs(g.values - expected.numpy()).max() <= 1e-12
    g = rl.gradients(model, x, of="output[1]", reduce="sum", wrt="input")
    (expected,) = torch.autograd.grad(model(x)["b"].sum(), x)
    assert np.abs(g.values - expected.numpy()).max() <= 1e-12


def test_shares_of_samples_reach_every_output(two_heads):
    model, x = two_heads

    def loss(outputs, target):
        return mixed_loss(*outputs.values()) + 0 * target.sum()

    g = rl.gradients(model, x, torch.zeros(B), loss=loss, of="loss", wrt="heads.1/bias", per_sample=True)
    sample_grads = [
        torch.autograd.grad(mixed_loss(*model(x[i : i + 1]).values()), model.heads[1].bias)[0] for i in range(B)
    ]
    assert np.abs(g.values - torch.stack(sample_grads).numpy()).max() <= 1e-12


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: rl.gradients(model, x, of="output", reduce="sum", wrt="input"),
        lambda model, x: rl.gradients(model, x, of="output[1]", reduce="sum", wrt=["output"]),
        lambda model, x: rl.jacobian(model, x),
    ],
)
def test_one_of_several_outputs_is_never_taken_silently(two_heads, call):
    with pytest.raises(InputError) as error:
        call(*two_heads)
    text = 'The model returns several tensors.\n  got:      "output"\n  expected: "output[0]", "output[1]"'
    text += '\n  try:      name one of them, as in of="output[0]"'
    assert str(error.value) == text


def test_misspelt_names_are_met_with_the_closest_one(model):
    with pytest.raises(rl.errors.LayerNotFoundError, match=r"did you mean 'lstm.hidden'\?"):
        rl.gradients(model, X, Y, loss=mse, wrt="lstn.hidden")


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, left, right):
        return self.rnn(left * torch.sigmoid(right))[0]


def test_a_name_of_several_tensors_is_no_name_of_one():
    x = (torch.randn(2, 5, 3), torch.randn(2, 5, 3))
    with pytest.raises(InputError) as error:
        rl.gradients(TwoInputs(), x, of="output", reduce="sum", wrt="input")
    assert str(error.value) == (
        "'input' names several tensors.\n"
        "  got:      wrt='input'\n"
        '  expected: one of "input[0]", "input[1]"; or wrt=["input"] for all of them'
    )
    gradients = rl.gradients(TwoInputs(), x, of="output", reduce="sum", wrt=["input"])
    assert gradients.tensors == ("input[0]", "input[1]")


class OneDict(nn.Module):
    """A model whose only argument is a batch of a data loader, a dict."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, batch):
        packed = nn.utils.rnn.pack_padded_sequence(batch["x"], batch["lengths"], batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


class Packing(OneDict):
    def forward(self, x, lengths):
        return super().forward({"x": x, "lengths": lengths})


@pytest.mark.parametrize("model", [OneDict(), Packing()], ids=["a dict", "two arguments"])
def test_the_only_input_of_real_numbers_is_the_input(model):
    model = model.double()
    x, lengths = torch.randn(3, 5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([2, 5, 3])
    batch = {"x": x, "lengths": lengths} if type(model) is OneDict else (x, lengths)
    (expected,) = torch.autograd.grad((model(batch) if isinstance(batch, dict) else model(*batch)).sum(), x)
    data = {"x": x.detach(), "lengths": lengths} if isinstance(batch, dict) else (x.detach(), lengths)
    gradients = rl.gradients(model, data, of="output", reduce="sum", wrt="input")
    np.testing.assert_allclose(gradients, expected, rtol=0, atol=1e-12)
    jacobian = rl.jacobian(model, data)
    np.testing.assert_allclose(jacobian.sum("out_unit"), expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("normalise", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_weight_computed_from_others_counts_once_in_the_norm_of_all(normalise):
    model = nn.Sequential(nn.LSTM(3, 4, batch_first=True)).double()
    normalise(model[0], "weight_hh_l0")

    def loss(out):
        return (out[0] ** 2).sum()

    x = torch.randn(2, 5, 3, dtype=torch.float64)
    loss(model(x)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    gradients = rl.gradients(model, x, loss=loss, wrt="0/kernel", clip={"global_clipnorm": 0.05})
    np.testing.assert_allclose(gradients.clip["norm"], norm, rtol=1e-12)
    kernel = gradients.clipped["0"]["kernel"].transpose("gate", "unit", "feature").values.reshape(16, 3)
    np.testing.assert_allclose(kernel, model[0].weight_ih_l0.grad, rtol=1e-5)  # torch divides by the norm + 1e-6


class Scaled(nn.LSTM):
    """An nn.LSTM with an additional parameter that scales its input."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x, states=None):
        return super().forward(x * self.scale, states)


def test_a_parameter_that_a_subclass_adds_is_a_weight_of_the_layer():
    model, x = Scaled(3, 4, 2, bidirectional=True, batch_first=True).double(), torch.randn(2, 5, 3, dtype=torch.float64)

    def loss(out):
        return (out[0] ** 2).sum()

    loss(model(x)).backward()
    layer = next(iter(rl.layers(model))).name
    weights = rl.weights(model, x, loss=loss)
    np.testing.assert_array_equal(weights[layer]["scale"], [0.5, 1.0, 2.0])
    for actual in (weights[layer]["scale_grad"], rl.gradients(model, x, loss=loss, wrt="weights")[layer]["scale"]):
        np.testing.assert_allclose(actual, model.scale.grad, rtol=1e-12)
    assert weights.certificate.state == "passed"


class Packs(nn.Module):
    """A model that packs each sample up to its first id 0."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(11, F), nn.LSTM(F, 4, batch_first=True)

    def forward(self, ids):
        lengths = (ids > 0).long().cumprod(1).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=T)[0]


@pytest.mark.parametrize("shorter", [None, 3])
def test_streamed_states_are_those_of_each_batch_also_where_only_a_later_batch_is_padded(shorter):
    torch.manual_seed(0)
    model = Packs().double()
    ids = torch.randint(1, 11, (6, T), generator=torch.Generator().manual_seed(1))
    if shorter:
        ids[3, shorter:] = 0
    options = {"of": "lstm.hidden", "reduce": "mean", "per_sample": True, "wrt": "embedding.output"}
    g = rl.gradients(model, ids, batch_size=2, **options)
    batch_grads = [rl.gradients(model, ids[i : i + 2], **options).values for i in (0, 2, 4)]
    np.testing.assert_allclose(g.values, np.concatenate(batch_grads), rtol=1e-10, atol=1e-14)
    leaf = model.embedding(ids).detach().requires_grad_()
    value = model.lstm(leaf)[0].mean((1, 2)).sum()
    (reference,) = torch.autograd.grad(value, leaf)
    unpadded = [0, 1, 2, 4, 5]
    np.testing.assert_allclose(g.values[unpadded], reference.numpy()[unpadded], rtol=1e-9, atol=1e-13)
