"""Data sets whose first axis is not the samples, packed and unbatched sequences, folded and coupled samples.

Results equal autograd of the untouched model on the whole data set; an error asks for ambiguous axes.
"""

import warnings

import numpy as np
import pytest
import torch
from function_models import make_model, noise
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

import rnnlens as rl

F, H, V = 2, 6, 5


def mse(output, target):
    return ((output - target) ** 2).mean()


def entropy(logits, labels):
    return nn.functional.cross_entropy(logits.reshape(-1, V), labels.reshape(-1))


def gradient(loss, *tensors):
    return [g.numpy() for g in torch.autograd.grad(loss, tensors)]


def close(actual, expected):
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    assert np.abs(expected).max() > 1e-9
    assert np.abs(actual - expected).max() <= 1e-12


def tagger():
    modules = {"embed": nn.Embedding(9, F), "rnn": nn.LSTM(F, H), "head": nn.Linear(H, V)}
    return make_model(lambda m, x: m.head(m.rnn(m.embed(x))[0]), **modules)


def regressor(**options):
    return make_model(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.GRU(F, H, **options), head=nn.Linear(H, V))


@pytest.fixture(params=[(4, 3), (4, 4)], ids=["sizes differ", "sizes equal"])
def sizes(request):
    return request.param


@pytest.mark.parametrize("batch_size", [1, 3])
def test_ids_time_first_in_batches(sizes, batch_size):
    samples, steps = sizes
    model, generator = tagger(), torch.Generator().manual_seed(2)
    x = torch.randint(0, 9, (steps, samples), generator=generator)
    y = torch.randint(0, V, (steps, samples), generator=generator)
    (expected,) = gradient(entropy(model(x), y), model.head.bias)
    options = {"loss": entropy, "wrt": "head/bias", "batch_size": batch_size}
    close(rl.gradients(model, x, y, axes={"y": ("time", "sample")}, **options), expected)
    folded = y.reshape(-1)
    close(rl.gradients(model, x, folded, axes={"y": (("time", "sample"),)}, **options), expected)
    with pytest.raises(rl.errors.InputError, match="name the axes: axes="):
        rl.gradients(model, x, folded, **options)
    if samples != steps:
        close(rl.gradients(model, x, y, **options), expected)
    else:  # the two axes of these labels cannot be distinguished
        with pytest.raises(rl.errors.InputError, match="name the axes: axes="):
            rl.gradients(model, x, y, **options)


def test_targets_time_first_are_cut_as_the_loss_takes_them(sizes):
    samples, steps = sizes
    model, x, y = regressor(), noise(steps, samples, F), noise(steps, samples, V)
    leaf = x.clone().requires_grad_()
    expected, expected_bias = gradient(mse(model(leaf), y), leaf, model.head.bias)
    gradients = rl.gradients(model, x, y, loss=mse, wrt=["input", "head/bias"], batch_size=3)
    close(gradients["model"]["input"].transpose("time", "sample", "feature"), expected)
    close(gradients["head"]["bias"], expected_bias)

    def collate(pairs):
        return tuple(torch.stack(values, 1) for values in zip(*pairs, strict=True))

    rows = TensorDataset(x.transpose(0, 1), y.transpose(0, 1))
    loader = DataLoader(rows, batch_size=3, collate_fn=collate)
    options = {"loss": mse, "combine": "mean"}  # how targets of several batches are joined is unknown
    close(rl.gradients(model, loader, wrt="head/bias", **options), expected_bias)
    mean = rl.gradients(model, loader, wrt="input", across="mean", **options)
    close(mean, expected.mean(1))


def test_several_inputs_whose_samples_lie_on_different_axes(sizes):
    samples, steps = sizes
    model = make_model(lambda m, x, h: m.head(m.rnn(x, h)[0][-1]), rnn=nn.GRU(F, H), head=nn.Linear(H, V))
    x, h, y = noise(steps, samples, F), noise(1, samples, H), noise(samples, V)
    leaves = [x.clone().requires_grad_(), h.clone().requires_grad_()]
    expected_x, expected_h = gradient(mse(model(*leaves), y), *leaves)
    close(
        rl.gradients(model, (x, h), y, loss=mse, wrt="input[0]", batch_size=3).transpose("time", "sample", "feature"),
        expected_x,
    )
    close(
        rl.gradients(model, (x, h), y, loss=mse, wrt="input[0]").transpose("time", "sample", "feature"),
        expected_x,
    )
    h_grad = rl.gradients(model, (x, h), y, loss=mse, wrt="input[1]", batch_size=3)
    close(h_grad.transpose("axis_0", "sample", "feature"), expected_h)
    full = torch.autograd.functional.jacobian(lambda v: model(v, h), x)
    expected = torch.stack([full[b][:, :, b] for b in range(samples)]).numpy()
    close(rl.jacobian(model, (x, h), wrt="input[0]"), expected)


def lengths_of(samples, steps):
    return torch.tensor([max(1, steps - i) for i in range(samples)])[[1, 0, *range(2, samples)]]


def test_a_packed_sequence_as_the_input(sizes):
    samples, steps = sizes
    model = make_model(lambda m, x: m.head(pad_packed_sequence(m.rnn(x)[0])[0]), rnn=nn.GRU(F, H), head=nn.Linear(H, V))
    x, lengths = noise(samples, steps, F), lengths_of(samples, steps)

    def run(padded):
        return model(pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False))

    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    leaf = x.clone().requires_grad_()
    (expected,) = gradient((run(leaf) ** 2).sum(), leaf)
    input_grad = rl.gradients(model, packed, loss=lambda out: (out**2).sum(), wrt="input")
    assert input_grad.dims == ("sample", "time", "feature")
    close(input_grad, expected)
    full = torch.autograd.functional.jacobian(run, x)
    by_sample = torch.stack([full[:, b, :, b] for b in range(samples)]).numpy()
    close(rl.jacobian(model, packed), by_sample)
    norms = run(leaf).transpose(0, 1).flatten(1).norm(dim=1)
    (norm_grads,) = gradient(norms.sum(), leaf)
    close(rl.gradients(model, packed, of="output", reduce="norm", per_sample=True, wrt="input"), norm_grads)
    kernel_grad = rl.gradients(model, packed, of="rnn.final_hidden", reduce="sum", wrt="rnn/kernel", batch_size=2)
    packed_leaf = pack_padded_sequence(leaf, lengths, batch_first=True, enforce_sorted=False)
    (expected_kernel,) = gradient(model.rnn(packed_leaf)[1].sum(), model.rnn.weight_ih_l0)
    # Sorted, since rnnlens has the gates in another order and the units on another axis.
    assert np.abs(np.sort(kernel_grad.values.ravel()) - np.sort(expected_kernel.ravel())).max() <= 1e-12


def test_a_sequence_without_samples():
    model, x = regressor(), noise(5, F)
    leaf = x.clone().requires_grad_()
    (expected,) = gradient((model(leaf) ** 3).sum(), leaf)
    input_grad = rl.gradients(model, x, loss=lambda out: (out**3).sum(), wrt="input")
    assert input_grad.dims == ("time", "feature")
    close(input_grad, expected)
    full = torch.autograd.functional.jacobian(model, x).numpy()
    close(rl.jacobian(model, x), full[None])
    assert rl.trace(model, x, layers=["rnn", "head"])["head"].output.dims == ("time", "unit")
    with pytest.raises(rl.errors.InputError):
        rl.gradients(model, x, of="output", reduce="sum", per_sample=True, wrt="input")


def hierarchy():
    def run(m, x):
        samples, sentences, words, features = x.shape
        inner = m.words(x.reshape(samples * sentences, words, features))[1][0]
        return m.head(m.sentences(inner.reshape(samples, sentences, -1))[0])

    recurrent = {"batch_first": True}
    return make_model(run, words=nn.GRU(F, H, **recurrent), sentences=nn.GRU(H, H, **recurrent), head=nn.Linear(H, V))


def test_words_within_sentences_within_samples(sizes):
    samples, sentences = sizes
    model, x = hierarchy(), noise(samples, sentences, 3, F)
    leaf = x.clone().requires_grad_()
    (expected,) = gradient((model(leaf) ** 2).sum(), leaf)
    for batch_size in (None, 2):
        input_grad = rl.gradients(
            model, x, of="output", reduce=lambda y: (y**2).sum(), combine="sum", wrt="input", batch_size=batch_size
        )
        close(input_grad.transpose("sample", "axis_1", "time", "feature"), expected)
    assert rl.trace(model, x)["words"].hidden.shape == (samples * sentences, 3, H)
    full = torch.autograd.functional.jacobian(model, x)
    by_sample = torch.stack([full[b][..., b, :, :, :] for b in range(samples)]).transpose(3, 4)
    jacobian = rl.jacobian(model, x)
    assert jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
    close(jacobian, by_sample.flatten(4).numpy())
    with pytest.raises(rl.errors.UnsupportedError, match="words: ") as error:
        rl.jacobian(model, x, of="words.hidden")
    assert 'of= and wrt= outside of these layers, as "output" and "input"' in str(error.value)


def centred(m, x):
    y = m.rnn(x)[0]
    return m.head(torch.tanh(y - y.mean(1, keepdim=True)))


def centred_in_the_loop(m, x):
    h, outputs = x.new_zeros(x.shape[1], H), []
    for t in range(len(x)):
        h = m.rnn(x[t], h)
        h = h - h.mean(0)
        outputs.append(m.head(h))
    return torch.stack(outputs)


def normalised(m, x):
    return m.head(m.norm(m.rnn(x)[0][-1]))


def attend(y):
    return torch.softmax(y @ y.transpose(1, 2), -1) @ y


def attend_above(m, x):
    return m.head(attend(m.rnn(x)[0]))


def attend_above_time_first(m, x):
    return attend_above(m, x.transpose(0, 1)).transpose(0, 1)


def attend_below(m, x):
    return m.head(m.rnn(attend(x))[0])


def attend_with_queries(m, x):
    """Attend to all steps with as many queries as there are steps; the axis of the queries is not time."""
    y = m.rnn(x)[0]
    return m.head(torch.softmax(m.queries.weight @ y.transpose(1, 2), -1) @ y)


@pytest.mark.parametrize(
    "run", [attend_above, attend_above_time_first, attend_below, attend_with_queries], ids=lambda f: f.__name__
)
def test_attention_mixes_all_steps(run, sizes):
    samples, steps = sizes
    modules = {
        "rnn": nn.GRU(F, H, batch_first=True),
        "head": nn.Linear(H, V),
        "queries": nn.Linear(H, steps, bias=False),
    }
    model, x = make_model(run, **modules), noise(samples, steps, F)
    data = x.transpose(0, 1).contiguous() if run is attend_above_time_first else x

    def run_batch_first(v):
        return run(model, v.transpose(0, 1)).transpose(0, 1) if run is attend_above_time_first else run(model, v)

    full = torch.autograd.functional.jacobian(run_batch_first, x)
    expected = torch.stack([full[b][:, :, b] for b in range(samples)]).numpy()
    jacobian = rl.jacobian(model, data)
    if run is attend_with_queries:
        assert "out_time" not in jacobian.dims
        close(jacobian, expected.reshape(samples, steps * V, steps, F))
    else:
        close(jacobian, expected)
    head_output = rl.trace(model, data, layers=["head"])["head"].output
    assert head_output.dims == ("sample", "axis_1" if run is attend_with_queries else "time", "unit")


COUPLED = {
    "centred": lambda: make_model(centred, rnn=nn.LSTM(F, H), head=nn.Linear(H, V)),
    "centred in the loop": lambda: make_model(centred_in_the_loop, rnn=nn.GRUCell(F, H), head=nn.Linear(H, V)),
    "batch norm": lambda: make_model(normalised, rnn=nn.LSTM(F, H), norm=nn.BatchNorm1d(H), head=nn.Linear(H, V)),
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_samples_have_a_gradient_together_and_none_of_their_own(name, sizes):
    samples, steps = sizes
    model, x, training = COUPLED[name](), noise(steps, samples, F), name == "batch norm"
    model.train(training)
    leaf = x.clone().requires_grad_()
    (expected,) = gradient((model(leaf) ** 3).sum(), leaf)
    model.eval()
    input_grad = rl.gradients(model, x, loss=lambda out: (out**3).sum(), wrt="input", training=training)
    close(input_grad.transpose("time", "sample", "feature"), expected)
    with pytest.raises(rl.errors.UnsupportedError, match="depend on each other"):
        rl.jacobian(model, x, training=training)
    output_axes = {"output": ("time", "sample", "unit")} if not training else {"output": ("sample", "unit")}
    with pytest.raises(rl.errors.UnsupportedError, match="depend on each other"):
        rl.gradients(
            model, x, of="output", reduce="norm", per_sample=True, wrt="input", training=training, axes=output_axes
        )


def test_what_the_user_says_of_the_axes_holds():
    """``axes=`` is used where axes cannot be inferred: the batch size is fixed, so no smaller batch can be tried."""
    model = make_model(
        lambda m, x: m.head(m.rnn(m.embed(x).reshape(3, 3, F))[0]),
        embed=nn.Embedding(9, F),
        rnn=nn.LSTM(F, H),
        head=nn.Linear(H, V),
    )
    x = torch.arange(9).reshape(3, 3)
    with pytest.raises(rl.errors.InputError, match="name the axes: axes="):
        rl.gradients(model, x, of="output", reduce="sum", wrt="head/bias", batch_size=1)
    head_output = rl.trace(model, x, layers=["head"], axes={"head.output": ("time", "sample", "class")})["head"].output
    assert head_output.dims == ("sample", "time", "class")
    with torch.no_grad():
        close(head_output, model(x).transpose(0, 1).numpy())


@pytest.mark.parametrize(
    "axes",
    [
        "time",
        {"input": 3},
        {"input": ("time", "time", "feature")},
        {"input": ()},
        {"input": ("time", 1)},
        {"output": (("time", "unit"), "sample")},
        {"nothing": ("time", "sample")},
        {"rnn/kernel": ("unit", "feature")},
        {"input": ("time", "sample")},
    ],
    ids=str,
)
def test_axes_that_cannot_be_are_met_with_words(axes):
    with pytest.raises((rl.errors.InputError, rl.errors.LayerNotFoundError)):
        rl.gradients(regressor(), noise(4, 3, F), of="output", reduce="sum", wrt="input", axes=axes)


def last_cell_state(m, x):
    h = c = x.new_zeros(x.shape[1], H)
    for step in x:
        h, c = m.rnn(step, (h, c))
    return m.head(c)


ONLY_STATES = {
    "both halves": (lambda m, x: m.head(torch.cat(tuple(m.rnn(x)[1]), 1)), nn.GRU(F, H // 2, bidirectional=True)),
    "upper of two layers": (lambda m, x: m.head(m.rnn(x)[1][0][-1]), nn.LSTM(F, H, 2)),
    "the cell state of a loop": (last_cell_state, nn.LSTMCell(F, H)),
    "the fixed length of a sequence": (
        lambda m, x: m.head(m.rnn(x)[0].permute(1, 2, 0).flatten(1)[:, -H:]),
        nn.RNN(F, H),
    ),
}


@pytest.mark.parametrize("name", ONLY_STATES)
def test_a_head_that_reads_the_last_state_only(name, sizes):
    samples, steps = sizes
    run, rnn = ONLY_STATES[name]
    model, x = make_model(run, rnn=rnn, head=nn.Linear(H, V)), noise(steps, samples, F)
    full = torch.autograd.functional.jacobian(model, x)
    close(rl.jacobian(model, x), torch.stack([full[b][:, :, b] for b in range(samples)]).numpy())
    leaf, y = x.clone().requires_grad_(), noise(samples, V)
    (expected,) = gradient(mse(model(leaf), y), leaf)
    input_grad = rl.gradients(model, x, y, loss=mse, wrt="input", batch_size=3)
    close(input_grad.transpose("time", "sample", "feature"), expected)


def test_trying_where_the_samples_of_a_target_are_warns_of_nothing():
    model = make_model(lambda m, x: m.head(m.rnn(x.mT)[0]).mT, rnn=nn.GRU(4, 4, batch_first=True), head=nn.Linear(4, 4))
    x, y = torch.zeros(4, 4, 4, dtype=torch.float64), torch.ones(4, 4, 4, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rl.gradients(model, x, y, loss=nn.functional.mse_loss, wrt="input", batch_size=2)
    assert [str(warning.message) for warning in caught] == []
