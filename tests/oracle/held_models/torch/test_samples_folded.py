"""Models that fold, cut or repeat samples inside: a layer runs on another number of samples than the model.

Every time Jacobian is compared with autograd of the untouched model. The ``axes=`` of a hint works when typed.
"""

import ast
import re

import numpy as np
import pytest
import torch
from function_models import make_model, noise
from torch import nn

import rnnlens as rl

F, H = 3, 3


def blocks(m, x):
    return m.rnn(x.reshape(-1, 5, F))[0].reshape(x.shape)


def nodes(m, x):
    """Fold the nodes (sample, time, node, feature) of a graph into the samples."""
    samples, steps, count, _ = x.shape
    folded = x.transpose(1, 2).reshape(samples * count, steps, F)
    return m.rnn(folded)[0].reshape(samples, count, steps, H).transpose(1, 2)


def cut_sequences(m, x):
    """Cut the second sample at step 4 into two sequences, and pad all of them."""
    parts = [x[0], x[1, :4], x[1, 4:], *x[2:]]
    y = m.rnn(nn.utils.rnn.pad_sequence(parts, batch_first=True))[0]
    return torch.stack([y[0], torch.cat([y[1, :4], y[2, : len(x[1]) - 4]]), *y[3:]])


def rnn(features=F):
    return {"rnn": nn.LSTM(features, H, batch_first=True)}


def true_jacobian(model, x):
    """Return the Jacobian (sample, out_time, out_unit, in_time, in_feature)."""
    full = torch.autograd.functional.jacobian(model, x)
    rank = x.ndim
    rows = torch.stack([full[b].select(rank - 1, b) for b in range(len(x))])
    return rows.flatten(2, rank - 1).flatten(4).numpy() if rank > 3 else rows.numpy()


def following_hints(model, x, **options):
    """Call ``rl.jacobian``; after a refusal type the first ``axes=`` of its hint, at most twice."""
    axes = None
    for _ in range(3):
        try:
            return rl.jacobian(model, x, axes=axes, **options), axes
        except rl.errors.InputError as error:
            axes = ast.literal_eval(re.findall(r"axes=(\{.*?\})", str(error))[0])
    raise AssertionError("the hint leads in a circle")


STATED = {"input": ("sample", "time", "feature"), "output": ("sample", "time", "unit")}


@pytest.mark.parametrize("samples", [1, 2])
def test_blocks_of_steps_are_samples_of_the_layer(samples):
    model, x = make_model(blocks, **rnn()), noise(samples, 20, F)
    expected = true_jacobian(model, x)
    jacobian = rl.jacobian(model, x, axes=STATED)
    assert jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
    assert np.abs(jacobian.values - expected).max() <= 1e-12
    assert jacobian.certificate.state == "passed"
    assert not rl.jacobian(model, x, axes=STATED, at={"out_time": [12], "in_time": [2]}).values.any()
    by_hint, axes = following_hints(model, x)
    assert axes["input"] == STATED["input"]
    assert by_hint.sizes["in_time"] == 20
    assert np.abs(by_hint.values.reshape(expected.shape) - expected).max() <= 1e-12


@pytest.mark.parametrize("measure", [None, "norm"])
def test_nodes_of_a_graph_are_samples_of_the_layer(measure):
    model, x = make_model(nodes, **rnn()), noise(4, 6, 2, F)
    axes = {"input": ("sample", "time", "node", "feature"), "output": ("sample", "time", "node", "unit")}
    expected = true_jacobian(model, x)
    jacobian = rl.jacobian(model, x, axes=axes, measure=measure)
    expected = expected if measure is None else (expected**2).sum((2, 4)) ** 0.5
    assert np.abs(jacobian.values - expected).max() <= 1e-12
    assert jacobian.certificate.state == "passed"


@pytest.mark.parametrize("features", [3, 5])
@pytest.mark.parametrize("axes", [None, STATED])
def test_sequences_cut_within_samples(features, axes):
    """The layer runs on five sequences, four samples: with five features, sizes would name the wrong axis."""
    model, x = make_model(cut_sequences, **rnn(features)), noise(4, 10, features)
    jacobian = rl.jacobian(model, x, axes=axes)
    assert jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
    assert np.abs(jacobian.values - true_jacobian(model, x)).max() <= 1e-12
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(leaf).pow(2).sum(), leaf)
    gradient = rl.gradients(model, x, loss=lambda y: y.pow(2).sum(), wrt="input", axes=axes)
    assert gradient.dims == ("sample", "time", "feature")
    assert np.abs(gradient.values - expected.numpy()).max() <= 1e-12


def test_a_state_of_such_a_layer_has_other_samples():
    model, x = make_model(blocks, **rnn()), noise(2, 20, F)
    with pytest.raises(rl.errors.UnsupportedError, match="input: 2, rnn: 8") as error:
        rl.jacobian(model, x, of="rnn.hidden", axes=STATED)
    assert 'of= and wrt= outside of these layers, as "output" and "input"' in str(error.value)
    assert rl.jacobian(model, x, of="rnn.hidden", wrt="rnn.hidden").sizes["sample"] == 8


def test_two_passes_over_the_same_steps_are_features():
    """Units of two calls of one layer are no steps, though they follow each other in the output."""

    def run(m, x):
        return torch.cat([m.head(m.rnn(x)[0][:, -1]), m.head(m.rnn(-x)[0][:, -1])], 1)

    model, x = make_model(run, rnn=nn.GRU(F, H, batch_first=True), head=nn.Linear(H, 1)), noise(4, 6, F)
    assert rl.gradients(model, x, loss=lambda y: y.pow(2).sum(), wrt="output").dims == ("sample", "unit")
    jacobian = rl.jacobian(model, x)
    assert jacobian.dims == ("sample", "out_unit", "in_time", "in_feature")
    full = torch.autograd.functional.jacobian(model, x)
    assert np.abs(jacobian.values - torch.stack([full[b, :, b] for b in range(4)]).numpy()).max() <= 1e-12


@pytest.mark.parametrize("sizes", [(6, 5), (4, 4)])
def test_images_read_by_rows(sizes):
    """Images (sample, 1, row, column): the rows are the steps."""
    rows, columns = sizes
    model = make_model(
        lambda m, x: m.head(m.rnn(x.squeeze(1))[0][:, -1]),
        rnn=nn.LSTM(columns, H, batch_first=True),
        head=nn.Linear(H, 2),
    )
    x = noise(4, 1, rows, columns)
    jacobian = rl.jacobian(model, x)
    assert jacobian.dims == ("sample", "out_unit", "in_time", "in_feature")
    full = torch.autograd.functional.jacobian(model, x)
    expected = torch.stack([full[b, :, b, 0] for b in range(4)])
    assert np.abs(jacobian.values - expected.numpy()).max() <= 1e-12


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sizes", [(4, 6), (4, 4)])
def test_integer_ids(batch_first, sizes):
    samples = sizes[0]
    model = make_model(
        lambda m, x: m.head(m.rnn(m.table(x))[0]),
        table=nn.Embedding(9, F),
        rnn=nn.GRU(F, H, batch_first=batch_first),
        head=nn.Linear(H, 2),
    )
    ids = torch.randint(0, 9, sizes if batch_first else sizes[::-1], generator=torch.Generator().manual_seed(0))
    vectors = model.table(ids).detach()
    full = torch.autograd.functional.jacobian(lambda v: model.head(model.rnn(v)[0]), vectors)
    if not batch_first:
        full = full.permute(1, 0, 2, 4, 3, 5)
    expected = torch.stack([full[b, :, :, b] for b in range(samples)]).numpy()
    jacobian = rl.jacobian(model, ids, wrt="table.output")
    assert jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
    assert np.abs(jacobian.values - expected).max() <= 1e-12
