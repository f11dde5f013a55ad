"""Time Jacobians of torch models against autograd in float64; memory limits, files and errors of the call."""

import functools
import itertools
import tracemalloc

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import rnnlens as rl
from rnnlens.adapters.torch.cells import TorchStepCell
from rnnlens.recurrence.cells import stepped
from rnnlens.recurrence.sweep_reverse import BlockedSweep
from rnnlens.settings import Progress
from rnnlens.verbs.time_jacobian import plan as planning

pytestmark = pytest.mark.check

B, T, F, H = 2, 5, 3, 4
CELLS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class Tagger(nn.Module):
    """A recurrent layer with a head at every step."""

    def __init__(self, cell=nn.LSTM, outputs=2, **options):
        super().__init__()
        self.rnn = cell(F, H, **{"batch_first": True, **options})
        width = (options.get("proj_size") or H) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Sequential(nn.Linear(width, outputs), nn.Tanh())

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Last(Tagger):
    """A recurrent layer with a head at the last step only."""

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def make_model(cls=Tagger, cell=nn.LSTM, **options):
    torch.manual_seed(0)
    return cls(cell, **options).double()


def data(samples=B, time_first=False):
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(samples, T, F)))
    return x.transpose(0, 1).contiguous() if time_first else x


def autograd_jacobian(function, x, time_first=False):
    """Return the Jacobian (sample, ..., in time, feature) of each sample by its own input, by autograd."""
    full = torch.autograd.functional.jacobian(function, x).detach().numpy()
    if time_first:
        full = np.moveaxis(full, [1, full.ndim - 2], [0, full.ndim - 3])
    samples = range(full.shape[0])
    return np.stack([full[b][..., b, :, :] for b in samples])


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert np.abs(expected).max() > 1e-4
    assert np.abs(actual.values - expected).max() <= 1e-10 * np.abs(expected).max()


PRODUCT = list(itertools.product(CELLS, (True, False), (True, False), (False, True), (1, 2)))


@pytest.mark.parametrize(("cell", "batch_first", "bias", "bidirectional", "layers"), PRODUCT)
def test_option_product(cell, batch_first, bias, bidirectional, layers):
    options = {"batch_first": batch_first, "bias": bias, "bidirectional": bidirectional, "num_layers": layers}
    model, x = make_model(cell=CELLS[cell], **options), data(time_first=not batch_first)
    assert_close(rl.jacobian(model, x), autograd_jacobian(model, x, not batch_first))


@pytest.mark.parametrize("samples", [T, 1])
@pytest.mark.parametrize("batch_first", [True, False])
def test_which_axis_counts_samples_is_found_out_where_the_shape_leaves_it_open(batch_first, samples):
    model, x = make_model(batch_first=batch_first), data(samples, not batch_first)
    assert_close(rl.jacobian(model, x), autograd_jacobian(model, x, not batch_first))


def test_projected_lstm():
    model, x = make_model(proj_size=2), data()
    assert_close(rl.jacobian(model, x), autograd_jacobian(model, x))


@pytest.mark.parametrize("cell", CELLS)
def test_last_step_only_has_no_out_time(cell):
    model, x = make_model(Last, CELLS[cell]), data()
    jacobian = rl.jacobian(model, x)
    assert jacobian.dims == ("sample", "out_unit", "in_time", "in_feature")
    assert_close(jacobian, autograd_jacobian(model, x))


def test_initial_state_and_state_to_state():
    model, x = make_model(), data()
    start = [torch.zeros(B, H, dtype=torch.float64) for _ in range(2)]

    def final_cell(h, c):
        return model.rnn(x, (h[None], c[None]))[1][1][0]

    by_h, by_c = torch.autograd.functional.jacobian(final_cell, tuple(start))
    per_sample = lambda full: np.stack([full[b, :, b].numpy() for b in range(B)])  # noqa: E731
    jacobian = rl.jacobian(model, x, of="rnn.final_cell", wrt="rnn.initial_hidden")
    assert jacobian.dims == ("sample", "out_unit", "in_feature")
    assert_close(jacobian, per_sample(by_h))
    assert_close(rl.jacobian(model, x, of="rnn.final_cell", wrt="rnn.initial_cell"), per_sample(by_c))
    forward = rl.jacobian(model, x, of="rnn.final_cell", wrt="rnn.initial_cell", mode="forward")
    assert_close(forward, per_sample(by_c))
    cell_jacobian = rl.jacobian(model, x, of="rnn.cell", wrt="rnn.cell")
    assert np.allclose(cell_jacobian.isel(out_time=2, in_time=2), np.eye(H))
    assert not cell_jacobian.isel(out_time=1, in_time=3).any()


def test_the_two_modes_agree_and_the_cheaper_one_is_chosen():
    model, x = make_model(outputs=1), data()
    reverse, forward = (rl.jacobian(model, x, mode=mode) for mode in ("reverse", "forward"))
    assert_close(forward, reverse.values)
    auto = rl.jacobian(model, x)
    assert auto.mode == ("forward" if forward.flops < reverse.flops else "reverse")
    assert rl.jacobian(model, x, of="rnn.hidden").mode == "forward"
    assert rl.jacobian(model, x, reduce="mean", at={"out_time": [4]}).mode == "reverse"


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("measure", ["norm", "spectral", "sum", "mean", "abs_mean"])
def test_measures_means_and_chosen_steps(measure, mode):
    model, x = make_model(outputs=3), data(3)
    full = np.moveaxis(autograd_jacobian(model, x), 2, 3)
    expected = {
        "norm": lambda g: np.sqrt((g**2).sum((-2, -1))),
        "spectral": lambda g: np.linalg.svd(g, compute_uv=False)[..., 0],
        "sum": lambda g: g.sum((-2, -1)),
        "mean": lambda g: g.mean((-2, -1)),
        "abs_mean": lambda g: np.abs(g).mean((-2, -1)),
    }[measure](full)
    assert_close(rl.jacobian(model, x, measure=measure, mode=mode), expected)
    assert_close(rl.jacobian(model, x, measure=measure, mode=mode, across="mean"), expected.mean(0))
    selected = rl.jacobian(model, x, measure=measure, mode=mode, at={"out_time": [4, 1], "in_time": [-2, 0, 1]})
    assert_close(selected, expected[:, [4, 1]][:, :, [3, 0, 1]])
    assert list(selected.out_time) == [4, 1]
    assert list(selected.in_time) == [3, 0, 1]


@pytest.mark.parametrize("contraction", ["mean", "sum", "vector", "matrix"])
def test_contraction_comes_before_differentiation(contraction):
    model, x = make_model(outputs=3), data()
    weights = {"mean": np.full((1, 3), 1 / 3), "sum": np.ones((1, 3)), "vector": np.array([[1.0, -2.0, 0.5]])}
    matrix = weights.get(contraction, np.random.default_rng(1).normal(size=(2, 3)))
    argument = {"vector": matrix[0], "matrix": matrix}.get(contraction, contraction)
    jacobian = rl.jacobian(model, x, reduce=argument, mode="reverse")
    assert_close(jacobian, np.einsum("ku,btusf->btksf", matrix, autograd_jacobian(model, x)))
    assert jacobian.flops == pytest.approx(rl.jacobian(model, x, mode="reverse").flops * len(matrix) / 3)


@pytest.mark.parametrize(("mode", "measure"), list(itertools.product(["reverse", "forward"], [None, "norm"])))
def test_chunks_do_not_change_the_result(mode, measure, monkeypatch):
    model, x = make_model(), data(3)
    unchunked = rl.jacobian(model, x, mode=mode, measure=measure)
    monkeypatch.setattr("rnnlens.verbs.time_jacobian.plan.LEAST_ROOM", 3000)
    monkeypatch.setattr("rnnlens.verbs.time_jacobian.plan.BLOCK_BUDGET", 1000)
    ticks = []
    monkeypatch.setattr(Progress, "advance", lambda self, amount=1.0: ticks.append(amount))
    chunked = rl.jacobian(model, x, mode=mode, measure=measure, memory=unchunked.nbytes)
    assert len(ticks) > 2 * T
    assert_close(chunked, unchunked.values)
    assert_close(
        rl.jacobian(model, x, mode=mode, measure=measure, across="mean", memory=unchunked.nbytes),
        unchunked.values.mean(0),
    )


def test_composed_chunks_do_not_change_the_result(monkeypatch):
    model, x = make_model(num_layers=2, bidirectional=True), data()
    unchunked = rl.jacobian(model, x)
    assert unchunked.route == "composed"
    monkeypatch.setattr("rnnlens.verbs.time_jacobian.plan.LEAST_ROOM", 3000)
    monkeypatch.setattr("rnnlens.verbs.time_jacobian.plan.BLOCK_BUDGET", 1000)
    assert_close(rl.jacobian(model, x, memory=unchunked.nbytes), unchunked.values)


def test_what_cannot_fit_is_refused_before_computing_with_cheaper_calls(monkeypatch):
    model, x = make_model(), data()
    monkeypatch.setattr("rnnlens.verbs.time_jacobian.execute.numbers", lambda *a: pytest.fail("computed"))
    with pytest.raises(rl.errors.TooLargeError) as error:
        rl.jacobian(model, x, memory="1 KiB")
    assert str(error.value) == (
        "The time Jacobian is larger than the memory limit.\n"
        "  got:      a result of 2.34 KiB\n"
        "  expected: at most 1 KiB (memory=)\n"
        '  try:      measure="norm" (400 B); or reduce="mean" (1.17 KiB); or at={"out_time": [4]} (480 B); '
        'or across="mean"; or out="jacobian.zarr", which is written in chunks'
    )


def test_written_to_zarr_piece_by_piece(tmp_path):
    model, x = make_model(), data()
    path = tmp_path / "j.zarr"
    jacobian = rl.jacobian(model, x, out=path, memory="1 KiB")
    assert_close(jacobian, autograd_jacobian(model, x))
    reopened = rl.open(path)
    assert reopened.dims == jacobian.dims
    assert reopened.finished
    assert reopened.long_name == "time Jacobian"
    xr.testing.assert_equal(reopened, jacobian.load())


def test_an_interrupt_leaves_the_finished_part_readable(tmp_path, monkeypatch):
    model, x = make_model(), data(4)
    expected = autograd_jacobian(model, x)
    calls = itertools.count()

    def interrupt(self, amount=1.0):
        if next(calls) == 6 * T:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rl.jacobian(model, x, out=tmp_path / "j.zarr", memory="1 KiB", mode="reverse")
    partial_result = rl.open(tmp_path / "j.zarr")
    finite = np.isfinite(partial_result.values)
    assert 0 < finite.mean() < 1
    assert np.abs(partial_result.values - expected)[finite].max() < 1e-12
    assert not partial_result.finished


def test_a_sketch_is_unbiased_and_knows_its_error():
    model, x = make_model(outputs=6), data(40)
    exact = rl.jacobian(model, x, measure="norm") ** 2
    sketch = rl.jacobian(model, x, sketch=8)
    assert sketch.dims == ("sample", "out_time", "in_time")
    causal = np.tril(np.ones((T, T), bool))
    error = (sketch.norm_squared - exact).values[:, causal]
    stderr = sketch.norm_squared_stderr.values[:, causal]
    # All inputs of one (sample, out_time) share their signs: 200 independent means, unbiased if within 4 sigma.
    by_target = (sketch.norm_squared - exact).sum("in_time").values.ravel()
    assert abs(by_target.mean()) < 4 * by_target.std() / np.sqrt(by_target.size)
    assert (np.abs(error) <= 3 * stderr + 1e-12).mean() > 0.9
    assert 0.7 < np.sqrt((error**2).mean() / (stderr**2).mean()) < 1.4
    assert np.allclose(sketch, np.sqrt(sketch.norm_squared))


def test_a_sketch_costs_as_many_rows_as_it_has_probes():
    model, x = make_model(outputs=6), data()
    exact = rl.jacobian(model, x, measure="norm", mode="reverse")
    assert rl.jacobian(model, x, sketch=2).flops == pytest.approx(exact.flops / 3)


@functools.cache
def long_sequence(cell):
    model = make_model(cell=CELLS[cell], outputs=5)
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(B, 40, F)))
    return model, x, autograd_jacobian(model, x)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    "options", [{}, {"at": {"out_time": slice(20, 40)}}, {"at": {"in_time": [0, 17, 39]}}, {"mode": "forward"}]
)
@pytest.mark.parametrize("measure", [None, "norm"])
def test_more_rows_than_the_state_has_numbers(cell, options, measure):
    """On a sequence long enough for a sweep in blocks, the Jacobian equals autograd's and costs fewer FLOPs."""
    model, x, expected = long_sequence(cell)
    steps = options.get("at", {})
    expected = expected[:, steps.get("out_time", slice(None))][:, :, :, steps.get("in_time", slice(None))]
    jacobian = rl.jacobian(model, x, measure=measure, **{"mode": "reverse", **options})
    assert_close(jacobian, expected if measure is None else np.sqrt((expected**2).sum((2, 4))))
    if not options:
        assert jacobian.flops < 0.8 * {"rnn": H, "gru": H, "lstm": 2 * H}[cell] * (H + F) * 5 * B * 40 * 41


@pytest.mark.slow
@pytest.mark.parametrize("least_room", [10_000, 30_000, 60_000])
@pytest.mark.parametrize("measure", [None, "norm"])
def test_chunks_of_a_sweep_in_blocks(measure, least_room, monkeypatch):
    """Chunks too small for blocks and chunks with blocks leave the Jacobian and its mean over samples unchanged."""
    model, x, _ = long_sequence("lstm")
    unchunked = rl.jacobian(model, x, measure=measure, mode="reverse")
    monkeypatch.setattr("rnnlens.verbs.time_jacobian.plan.LEAST_ROOM", least_room)
    monkeypatch.setattr("rnnlens.verbs.time_jacobian.plan.BLOCK_BUDGET", 1000)
    blocked, chunks = [], []
    run, plan = BlockedSweep.run, planning.direct_pieces
    monkeypatch.setattr(BlockedSweep, "run", lambda self, progress: blocked.append(1) or run(self, progress))
    monkeypatch.setattr(planning, "direct_pieces", lambda *args: chunks.append(plan(*args)[0]) or plan(*args))
    chunked = rl.jacobian(model, x, measure=measure, mode="reverse", memory=unchunked.nbytes)
    assert len(chunks[0]) > 1
    assert bool(blocked) == (least_room > 10_000)
    assert_close(chunked, unchunked.values)
    assert_close(
        rl.jacobian(model, x, measure=measure, mode="reverse", across="mean", memory=unchunked.nbytes),
        unchunked.values.mean(0),
    )


class Forgetful(nn.Module):
    """An RNN whose gradients vanish quickly."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(F, H, batch_first=True)
        with torch.no_grad():
            self.rnn.weight_hh_l0.mul_(0.5)

    def forward(self, x):
        return self.rnn(x)[0]


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("rtol", [1e-2, 1e-4])
def test_pruning_costs_little_error_knows_it_and_saves_work(rtol, mode):
    torch.manual_seed(0)
    model = Forgetful().double()
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 80, F)))
    exact, pruned = rl.jacobian(model, x, mode=mode), rl.jacobian(model, x, mode=mode, rtol=rtol)
    error = float(np.sqrt(((pruned - exact) ** 2).sum()))
    assert error > 0
    assert error <= rtol * float(np.sqrt((exact**2).sum()))
    assert 0.5 * error < pruned.pruning_error < 2 * error
    unpruned = rl.jacobian(model, x, mode=mode, rtol=0.0)
    assert np.abs(unpruned - exact).max() <= 1e-13 * np.abs(exact).max()
    assert pruned.flops < 0.5 * unpruned.flops


def test_the_model_and_the_data_are_left_as_found():
    model, x = make_model(num_layers=2, dropout=0.5), data().requires_grad_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x_before, rng_state = x.detach().clone(), torch.get_rng_state()
    rl.jacobian(model, x, training=True)
    assert model.training
    assert x.requires_grad
    assert x.grad is None
    assert torch.equal(x, x_before)
    assert torch.equal(rng_state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


WRONG = {
    "of a layer that is not there": (
        {"of": "lstm.hidden"},
        rl.errors.LayerNotFoundError,
        "Nothing in this model is named",
    ),
    "by weights": ({"wrt": "head.0.weights"}, rl.errors.RnnlensError, "head.0"),
    "of the loss": ({"of": "loss"}, rl.errors.UnsupportedError, "of='loss' has no time Jacobian."),
    "a step too far": (
        {"at": {"out_time": [T]}},
        rl.errors.InputError,
        "at['out_time'] names a step that does not exist.",
    ),
    "a step twice": ({"at": {"in_time": [0, -T]}}, rl.errors.InputError, "at['in_time'] names a step twice."),
    "a measure": ({"measure": "nrom"}, rl.errors.InputError, "did you mean 'norm'?"),
    "a contraction": (
        {"reduce": np.ones(3)},
        rl.errors.InputError,
        "reduce= does not match the number of output units.",
    ),
    "a sketch of a sum": ({"sketch": 4, "measure": "sum"}, rl.errors.InputError, "A sketch estimates the norm"),
    "a negative tolerance": ({"rtol": -1.0}, rl.errors.InputError, "rtol= is a share."),
    "a file": ({"out": "j.nc"}, rl.errors.FileError, "out= is written in chunks."),
    "memory": ({"memory": "much"}, rl.errors.InputError, "This is not an amount of memory."),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_gives_one_clear_error(case):
    arguments, kind, text = WRONG[case]
    with pytest.raises(kind) as error:
        rl.jacobian(make_model(), data(), **arguments)
    assert text in str(error.value)


def test_a_forward_sweep_that_cannot_be_is_refused():
    with pytest.raises(rl.errors.UnsupportedError, match="A forward sweep goes through one recurrent layer"):
        rl.jacobian(make_model(num_layers=2), data(), mode="forward")


def test_nothing_leads_upwards():
    with pytest.raises(rl.errors.DisconnectedError) as error:
        rl.jacobian(make_model(num_layers=2), data(), of="rnn[0].hidden", wrt="rnn[1].hidden")
    assert str(error.value).splitlines()[0] == "rnn[0].hidden does not depend on rnn[1].hidden."


class WideAttention(torch.nn.Module):
    """Two GRUs with 80 features between them: too many to pull all unit cotangents back at once."""

    def __init__(self, mixes):
        super().__init__()
        self.below, self.wide = torch.nn.GRU(2, 80, batch_first=True), torch.nn.Linear(80, 80)
        self.above, self.mixes = torch.nn.GRU(80, 3, batch_first=True), mixes

    def forward(self, x):
        h, _ = self.below(x)
        if self.mixes:
            scores = h @ h.transpose(1, 2) / 80**0.5
            later = torch.ones_like(scores[0]).triu(1).bool()
            h = torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ h
        return self.above(torch.tanh(self.wide(h)))[0]


@pytest.mark.parametrize("mixes", [False, True])
def test_wide_segments_between_recurrences_are_autograds(mixes):
    torch.manual_seed(0)
    model, x = WideAttention(mixes).double(), torch.randn(2, 5, 2, dtype=torch.float64)
    jacobian = rl.jacobian(model, x)
    assert jacobian.certificate.state == "passed"
    for sample in range(2):
        expected = torch.autograd.functional.jacobian(lambda x_sample: model(x_sample[None])[0], x[sample])
        assert np.allclose(jacobian.values[sample], expected, rtol=1e-9, atol=1e-12)


class Vocabulary(nn.Module):
    """A language model whose scores fold steps and samples, (time * sample, token)."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 4), nn.Linear(4, 600)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).view(-1, 600)


def test_scores_too_wide_for_a_cotangent_each_are_pulled_as_asked_for():
    """A cotangent for each of 600 scores at every step takes 69 MB: with 8 MiB only the sketch's rows are pulled."""
    torch.manual_seed(0)
    net, x = Vocabulary().double(), torch.randn(6, 4, 3, dtype=torch.float64)
    truth = torch.autograd.functional.jacobian(lambda x: net(x).view(6, 4, 600)[-1], x)
    norms = torch.stack([truth[i, :, :, i] for i in range(4)]).square().sum((1, 3)).sqrt()
    last = {"at": {"out_time": [-1]}, "measure": "norm"}
    with rl.options(memory="8 MiB"):
        tracemalloc.start()
        sketch = rl.jacobian(net, x, sketch=16, **last)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        exact = rl.jacobian(net, x, **last)
    assert peak < 8 * 600**2 * 6 * 4
    np.testing.assert_allclose(exact.values[:, 0], norms, rtol=1e-10)
    deviation = np.abs(sketch.norm_squared.values[:, 0] - norms.numpy() ** 2)
    assert (deviation < 6 * sketch.norm_squared_stderr.values[:, 0]).all()


def test_a_sketch_of_many_outputs_and_its_certificate_take_no_matrix_of_outputs_by_outputs():
    torch.manual_seed(0)
    model, x = make_model(outputs=4000), data()
    tracemalloc.start()
    sketch = rl.jacobian(model, x, at={"out_time": [-1]}, measure="norm", sketch=4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sketch.attrs["certificate"].startswith("certified")
    assert peak < 4000**2 * 8 / 2


class TwoStates(nn.Module):
    """A cell of two states, whose output is neither of them."""

    def __init__(self, units):
        super().__init__()
        self.read, self.repeat, self.write = nn.Linear(F, units), nn.Linear(units, units), nn.Linear(units, 3)

    def forward(self, x, state):
        hidden, memory = state
        memory = torch.tanh(self.read(x) + self.repeat(hidden)) + 0.5 * memory
        hidden = torch.sigmoid(memory) * hidden + 0.1 * memory
        return self.write(hidden), (hidden, memory)


class OneState(nn.Module):
    """A cell whose state is its output."""

    def __init__(self, units):
        super().__init__()
        self.read, self.repeat = nn.Linear(F, units), nn.Linear(units, units)

    def forward(self, x, hidden):
        return torch.tanh(self.read(x) + self.repeat(hidden))


class LoopOverSteps(nn.Module):
    """A loop over the steps of a cell, with a head at every step."""

    def __init__(self, cell, units):
        super().__init__()
        self.units, self.rnn = units, cell(units)
        self.head = nn.Linear(3 if cell is TwoStates else units, 2)

    def forward(self, x):
        hidden = x.new_zeros(len(x), self.units)
        state, outputs = (hidden, hidden) if isinstance(self.rnn, TwoStates) else hidden, []
        for t in range(x.shape[1]):
            returned = self.rnn(x[:, t], state)
            output, state = returned if isinstance(returned, tuple) else (returned, returned)
            outputs.append(self.head(output))
        return torch.stack(outputs, 1)


@pytest.mark.parametrize(("cell", "units"), [(TwoStates, 128), (OneState, 256)])
def test_one_output_step_of_a_large_own_cell_takes_no_matrices_of_its_steps(cell, units, monkeypatch):
    torch.manual_seed(0)
    model, x = LoopOverSteps(cell, units).double(), data()
    pulled = {wrt: rl.jacobian(model, x, wrt=wrt, at={"out_time": [-1]}) for wrt in ("input", "rnn.hidden")}
    expected = autograd_jacobian(lambda x: model(x)[:, -1:], x)
    np.testing.assert_allclose(pulled["input"].values, expected.reshape(pulled["input"].shape), rtol=0, atol=1e-15)
    with monkeypatch.context() as changed:
        changed.setattr(stepped, "WORTH_PULLING", np.inf)
        by_matrices = rl.jacobian(model, x, wrt="rnn.hidden", at={"out_time": [-1]})
    np.testing.assert_allclose(pulled["rnn.hidden"].values, by_matrices.values, rtol=0, atol=1e-14)

    def refuse(*args):
        raise AssertionError("matrices of steps")

    monkeypatch.setattr(TorchStepCell, "jacobian", refuse)
    for wrt in pulled:
        assert rl.jacobian(model, x, wrt=wrt, at={"out_time": [-1]}).equals(pulled[wrt])
    with pytest.raises(AssertionError, match="matrices of steps"):
        rl.jacobian(model, x, of="rnn.hidden")
