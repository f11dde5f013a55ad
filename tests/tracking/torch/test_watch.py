"""A torch watch leaves a plain training loop unchanged; its captured gradients equal those of ``torch.autograd``."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch_trainings import Reader, data, model_and_optimizer, same_weights, train

import rnnlens as rl
from rnnlens.errors import CallError, InputError, LayerNotFoundError, TrackingWarning, UnsupportedError
from rnnlens.tracking.records import summary

pytestmark = pytest.mark.check

PROBE = tuple(t[:8] for t in data(seed=5))


def count_hooks(model):
    counts = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return sum(counts) + sum(len(p._backward_hooks or ()) for p in model.parameters())


def count_global_hooks():
    from torch.optim import optimizer

    return len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)


@pytest.mark.slow
@pytest.mark.parametrize("probe", [False, True], ids=["batch", "probe"])
@pytest.mark.parametrize("every", [3, 1])
def test_training_is_not_disturbed(tmp_path, probe, every):
    unwatched = train(*model_and_optimizer(), clip=0.5, epochs=3)
    model, optimizer = model_and_optimizer()
    options = {"probe": PROBE, "loss": mse_loss} if probe else {}
    watch = rl.torch.watch(model, tmp_path / "a.zarr", every=every, **options)
    watched = train(model, optimizer, watch, clip=0.5, epochs=3)
    assert same_weights(unwatched, watched)
    assert count_hooks(model) == 0
    assert count_global_hooks() == (0, 0)
    assert len(rl.open(tmp_path / "a.zarr").steps) == (18 // every) + probe


def test_a_watch_prints_what_it_has_recorded(tmp_path):
    model, optimizer = model_and_optimizer()
    watch = rl.torch.watch(model, tmp_path / "a.zarr", every=4)
    assert repr(watch).startswith("<rnnlens TorchWatch> not begun: 0 batches, 0 records, 0 alerts; the run: ")
    train(model, optimizer, watch, epochs=3)
    assert repr(watch).startswith("<rnnlens TorchWatch> closed: 18 batches, 4 records, 0 alerts; the run: ")


@pytest.mark.full
@pytest.mark.parametrize("options", [{"probe": PROBE, "loss": mse_loss}, {"batches": 1}], ids=["probe", "batch"])
def test_two_hundred_steps(tmp_path, options):
    unwatched = train(*model_and_optimizer(), epochs=34)
    model, optimizer = model_and_optimizer()
    assert same_weights(
        unwatched, train(model, optimizer, rl.torch.watch(model, tmp_path / "a.zarr", every=7, **options), epochs=34)
    )


def torch_gradients(model, x, y, loss):
    """Return dL/d(output of the recurrent module) and dL/d(weights by name) by autograd, in training mode."""
    twin = copy.deepcopy(model)
    twin.train()
    outputs = []
    handle = twin.lstm.register_forward_hook(lambda m, a, out: outputs.append(out[0]))
    value = loss(twin(x), y)
    handle.remove()
    weights = dict(twin.named_parameters())
    grads = torch.autograd.grad(value, [outputs[0], *weights.values()])
    return grads[0], dict(zip(weights, grads[1:], strict=True))


KINDS = {
    "lstm": lambda: Reader(),
    "stacked with dropout": lambda: Reader(num_layers=2, dropout=0.4),
    "bidirectional gru": lambda: Reader(nn.GRU, bidirectional=True),
    "rnn relu": lambda: Reader(nn.RNN, nonlinearity="relu"),
    "projected": lambda: Projected(),
}


class Projected(Reader):
    def __init__(self):
        super().__init__(units=6)
        self.lstm = nn.LSTM(3, 9, batch_first=True, proj_size=6)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_gates_of_a_projected_layer_are_recorded():
    model, _ = model_and_optimizer(Projected)
    scalars, profiles = summary(rl.trace(model, *data(16), loss=mse_loss))
    assert {"lstm/forget/near_0", "lstm/forget/near_1"} <= scalars.keys()
    assert profiles["lstm"]["gates"].dims == ("gate", "time")


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_that_was_trained_on(kind):
    model, optimizer = model_and_optimizer(KINDS[kind], lr=0.05)
    x, y = data(16)
    with rl.torch.watch(model, every=1) as watch:
        for _ in range(3):
            before, state = copy.deepcopy(model), torch.get_rng_state()
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            output_grad, weight_grads = torch_gradients(before, x, y, mse_loss)
            torch.set_rng_state(after)
    top = [name for name in watch.latest if name.startswith("lstm")][-1]
    captured = watch.latest[top].output_grad
    expected = (
        output_grad.detach().numpy().reshape(*captured.shape)
        if "direction" not in captured.dims
        else np.stack(np.split(output_grad.detach().numpy(), 2, axis=-1), axis=2)
    )
    scale = np.abs(expected).max()
    assert scale > 0
    np.testing.assert_allclose(captured.values, expected, atol=1e-6 * scale)
    weights = watch.latest.weights
    for layer in range(model.lstm.num_layers):
        node = weights[f"lstm[{layer}]" if model.lstm.num_layers > 1 else "lstm"]
        reference = weight_grads[f"lstm.weight_hh_l{layer}"].numpy()
        kernel_grad = node.recurrent_kernel_grad
        kernel_grad = kernel_grad.sel(direction="forward") if "direction" in kernel_grad.dims else kernel_grad
        assert np.linalg.norm(kernel_grad.values) == pytest.approx(np.linalg.norm(reference), rel=1e-5)


def test_every_number_of_the_replay_is_that_of_the_step():
    """Without randomness, all replayed quantities equal ``rl.trace`` with the weights before the update."""
    model, optimizer = model_and_optimizer(lambda: Reader(num_layers=2), lr=0.05)
    model.dropout.p = 0.0
    x, y = data(16)
    with rl.torch.watch(model, every=1) as watch:
        for _ in range(2):
            before = copy.deepcopy(model)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    reference = rl.trace(before, x, y, loss=mse_loss, training=True)
    captured = watch.latest.trace
    assert list(captured) == list(reference)
    for layer in reference:
        for name in reference[layer]:
            a, b = captured[layer][name].values, reference[layer][name].values
            np.testing.assert_allclose(a, b, atol=1e-5 * max(np.abs(b).max(), 1e-30), err_msg=f"{layer}.{name}")
    grads = rl.gradients(before, x, y, loss=mse_loss, wrt="lstm[0]/kernel", training=True)
    captured = watch.latest.weights["lstm[0]"].kernel_grad.values
    np.testing.assert_allclose(captured.reshape(grads.shape), grads.values, atol=1e-5 * np.abs(grads.values).max())


def test_every_zero_leaves_no_hook(tmp_path):
    model, _ = model_and_optimizer()
    with rl.torch.watch(model, tmp_path / "a.zarr", every=0):
        assert count_hooks(model) == 0
        assert count_global_hooks() == (0, 0)
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_end_in_the_middle_leaves_what_was_written(tmp_path, error):
    model, optimizer = model_and_optimizer()

    def stop(watch, x, y):
        if watch.steps == 5:
            raise error("enough")

    with pytest.raises(error, match="enough"):
        train(model, optimizer, rl.torch.watch(model, tmp_path / "a.zarr", every=2), after_step=stop)
    assert count_hooks(model) == 0
    assert count_global_hooks() == (0, 0)
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == [2, 4]
    assert run.ended == ("interrupted" if error is KeyboardInterrupt else "RuntimeError")


@pytest.mark.slow
def test_a_second_training_goes_on_in_the_same_run(tmp_path):
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        train(model, optimizer, rl.torch.watch(model, tmp_path / "a.zarr", every=3), epochs=1)
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [3, 6, 9, 12]
    train(model, optimizer, rl.torch.watch(model, tmp_path / "a.zarr", every=3, step=6), epochs=1)
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [3, 6, 9, 12]
    train(model, optimizer, rl.torch.watch(model, tmp_path / "a.zarr", every=6, resume=False), epochs=1)
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [6]


def test_a_validation_is_no_training():
    """Validation passes between backward and step, also with gradients, are not captured."""
    model, optimizer = model_and_optimizer()
    (x, y), (xv, yv) = data(16), data(8, seed=9)
    with rl.torch.watch(model, every=1) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            model.eval()
            torch.autograd.grad(mse_loss(model(xv), yv), model.head.weight)
            torch.autograd.grad(mse_loss(model(xv.requires_grad_()), yv), xv)
            with torch.no_grad():
                model(xv)
            model.train()
            model(xv)  # a forward pass without backward
            optimizer.step()
    assert list(watch.latest) == ["lstm[1]"]
    assert watch.latest["lstm[1]"].output_grad.sizes["sample"] == 16
    assert watch.latest.passes == 1


SILENT = {
    "too few batches": (lambda m: None, {"every": 500}, "every=500 selected none of them"),
    "evaluation mode": (lambda m: m.eval(), {"every": 1}, "evaluation mode"),
    "frozen": (lambda m: m.lstm.requires_grad_(False), {"every": 1}, "does not require a gradient"),
}


@pytest.mark.parametrize("case", SILENT)
def test_silence_says_why_once(tmp_path, case):
    prepare, options, message = SILENT[case]
    model, optimizer = model_and_optimizer()
    prepare(model)
    with pytest.warns(TrackingWarning) as caught:
        train(model, optimizer, rl.torch.watch(model, tmp_path / "a.zarr", **options), epochs=1)
    assert len(caught) == 1
    assert message in str(caught[0].message)


def test_no_step_at_all_is_said():
    model, _ = model_and_optimizer()
    watch = rl.torch.watch(model, every=1).__enter__()
    with pytest.warns(TrackingWarning, match="no optimizer with weights of the model has stepped"):
        watch.close()


def test_layer_off_the_path_is_said():
    model, _ = model_and_optimizer()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = rl.torch.watch(model, every=1).__enter__()
    model(data(4)[0])
    model.head(torch.zeros(4, 6)).sum().backward()
    optimizer.step()
    with pytest.warns(TrackingWarning, match="lstm got no gradient"):
        watch.close()


@pytest.mark.slow
def test_a_loop_without_an_optimizer(tmp_path):
    model, _ = model_and_optimizer()
    x, y = data(8)
    with rl.torch.watch(model, tmp_path / "a.zarr", every=1) as watch:
        for _ in range(3):
            model.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
            watch.step(loss)
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == [1, 2, 3]
    assert float(run.loss[-1]) == pytest.approx(float(loss.detach()), rel=1e-6)


def test_a_step_is_not_counted_twice():
    model, optimizer = model_and_optimizer()
    with pytest.raises(InputError, match="has already counted"):
        train(model, optimizer, rl.torch.watch(model, every=1), after_step=lambda watch, x, y: watch.step())


@pytest.mark.slow
def test_clipping_is_recorded_as_what_it_is(tmp_path):
    model, optimizer = model_and_optimizer()
    norms = []

    def loss(output, target):
        return mse_loss(output, target) * 50

    def record_norm(watch, x, y):
        grads = [p.grad for p in model.lstm.parameters()]
        norms.append(float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))))

    watch = rl.torch.watch(model, tmp_path / "a.zarr", every=1)
    train(model, optimizer, watch, clip=0.25, after_step=record_norm, loss=loss, epochs=1)
    run = rl.open(tmp_path / "a.zarr")
    applied = [run.scalars[name].values for name in run.scalars if "/weight_grad_norm_clipped/" in name]
    unclipped = [run.scalars[name].values for name in run.scalars if "/weight_grad_norm/" in name]
    np.testing.assert_allclose(np.linalg.norm(applied, axis=0), norms, rtol=1e-5)
    assert (np.linalg.norm(unclipped, axis=0) > 2 * np.linalg.norm(applied, axis=0)).all()
    np.testing.assert_allclose(run.scalars["grad_norm_clipped"], 0.25, rtol=1e-4)


def test_accumulated_gradients_are_named(tmp_path):
    model, optimizer = model_and_optimizer(lambda: Reader())
    x, y = data(24)
    with rl.torch.watch(model, tmp_path / "a.zarr", every=1) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            for i in range(3):
                mse_loss(model(x[i * 8 :][:8]), y[i * 8 :][:8]).backward()
                if i == 1:
                    halfway = model.lstm.weight_hh_l0.grad.clone()
            total = model.lstm.weight_hh_l0.grad.clone()
            optimizer.step()
    assert watch.latest.passes == 3
    assert any("accumulated over 3 backward passes" in note for note in rl.open(tmp_path / "a.zarr").notes)
    weights = watch.latest.weights["lstm"]
    accumulated, last_grad = weights.recurrent_kernel_grad_accumulated, weights.recurrent_kernel_grad
    assert np.linalg.norm(accumulated) == pytest.approx(float(total.norm()), rel=1e-5)
    assert np.linalg.norm(last_grad) == pytest.approx(float((total - halfway).norm()), rel=1e-4)
    assert watch.latest["lstm"].output_grad.sizes["sample"] == 8


def test_a_scale_on_the_loss_is_divided_out():
    results = []
    for scaled in (False, True):
        model, optimizer = model_and_optimizer()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        x, y = data(8)
        with rl.torch.watch(model, every=1) as watch:
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(mse_loss(model(x), y)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
        assert watch.latest.scale == (1024.0 if scaled else 1.0)
        results.append((watch.latest["lstm[1]"].output_grad, watch.latest.norms(), watch.latest["lstm[0]"].hidden_grad))
    reference, unscaled = results
    for a, b in ((reference[0], unscaled[0]), (reference[2], unscaled[2])):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(abs(a).max()))
    assert reference[1] == pytest.approx(unscaled[1], rel=1e-4)


class Worded(nn.Module):
    """An embedding with sparse gradients below an LSTM."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(self.words(x))[0][:, -1]


def one_step(model, x, loss, **options):
    """Take one watched step of plain SGD; return the watch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rl.torch.watch(model, every=1, **options) as watch:
        value = loss(model(x))
        value.backward()
        watch.loss = value
        optimizer.step()
    return watch


def test_double_precision_stays_what_it_is():
    torch.manual_seed(0)
    model, x = Reader().double(), data()[0][:8].double()
    model.dropout.p = 0.0
    expected = rl.trace(model, x, loss=lambda out: out.pow(2).sum(), training=True)["lstm"].hidden_grad.values
    captured = one_step(model, x, lambda out: out.pow(2).sum()).latest.trace["lstm"].hidden_grad.values
    assert captured.dtype == np.float64
    np.testing.assert_allclose(captured, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


def test_sparse_gradients_are_counted():
    torch.manual_seed(0)
    model, x = Worded(), torch.randint(0, 10, (4, 7))
    twin = copy.deepcopy(model)
    twin(x).pow(2).mean().backward()
    squares = [p.grad.to_dense().double().pow(2).sum() for p in twin.parameters()]
    watch = one_step(model, x, lambda out: out.pow(2).mean(), on_nonfinite="report")
    assert watch.latest.norms()["grad_norm"] == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-6)


def test_a_batch_that_is_not_finite_is_replayed():
    x = data()[0][:8].clone()
    x[1, 4, 0] = torch.nan
    model = nn.Sequential()
    model.add_module("lstm", nn.LSTM(3, 4, batch_first=True))
    broken = ~np.isfinite(one_step(model, x, lambda out: out[0].sum()).latest.trace["lstm"].hidden.values)
    assert broken[1, 4:].all()
    assert broken.sum() == broken[1, 4:].size


def test_gradients_that_no_square_can_hold(tmp_path):
    one_step(Reader(), data()[0][:8], lambda out: 1e-25 * out.sum(), path=tmp_path / "a.zarr", quantities="output_grad")
    profile = rl.open(tmp_path / "a.zarr")["lstm"].direct_profile.values[0]
    assert (profile[:-1] == 0).all()
    assert 0 < profile[-1] < 1e-24


def test_the_loss_is_one_number():
    with rl.torch.watch(Reader(), every=0) as watch, pytest.raises(InputError, match="is one number"):
        watch.loss = torch.zeros(3)


def test_what_cannot_be_reported_does_not_end_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nonfinite.nc").mkdir()  # a folder at the report's path, so that saving fails
    x = data()[0][:8].clone()
    x[0, 0, 0] = torch.nan
    with pytest.warns(TrackingWarning, match="Step 1 is not finite, and its incident could not be saved"):
        one_step(Reader(), x, lambda out: out.sum(), batches=0, on_nonfinite="report")


@pytest.mark.usefixtures("bfloat16_lstm")
def test_half_precision():
    model, optimizer = model_and_optimizer(lambda: Reader(num_layers=2, dropout=0.3))
    x, y = data(8)
    with rl.torch.watch(model, every=1) as watch:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    assert watch.latest["lstm[1]"].output_grad.dtype == np.float32
    assert float(abs(watch.latest["lstm[0]"].hidden_grad).max()) > 0


def test_two_optimizers_and_several_forwards(tmp_path):
    """With one layer called twice and two optimizers, a step is counted once and both calls are captured."""
    torch.manual_seed(0)
    model = Reader()
    first = torch.optim.SGD(model.head.parameters(), 0.1)
    second = torch.optim.Adam(model.lstm.parameters(), 0.01)
    x, _ = data(8)
    with rl.torch.watch(model, tmp_path / "a.zarr", every=1) as watch:
        for _ in range(3):
            model.zero_grad()
            (model(x) - model(x.flip(1))).square().mean().backward()
            first.step()
            second.step()
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [1, 2, 3]
    assert list(watch.latest) == ["lstm#0", "lstm#1"]
    assert watch.latest.passes == 1
    assert set(watch.latest.trace) == {"lstm#0", "lstm#1"}


def test_closures_are_captured():
    torch.manual_seed(0)
    model = Reader()
    model.dropout.p = 0.0
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = data(8)

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss

    with rl.torch.watch(model, every=1) as watch:
        optimizer.step(closure)
        optimizer.step(closure)
    assert watch.steps == 2
    assert watch.latest.passes == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend):
    model, optimizer = model_and_optimizer(lambda: Reader())
    x, y = data(8)
    compiled = torch.compile(model, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch.compile
        with rl.torch.watch(compiled, every=1) as watch:
            for _ in range(2):
                optimizer.zero_grad()
                mse_loss(compiled(x), y).backward()
                optimizer.step()
    assert watch.latest["lstm"].output_grad.shape == (8, 12, 6)


def test_the_latest_batch_is_there_to_be_acted_on():
    model, optimizer = model_and_optimizer(lambda: Reader())
    largest_grads = []
    watch = rl.torch.watch(model, every=1, quantities="output_grad")
    train(
        model,
        optimizer,
        watch,
        after_step=lambda w, x, y: largest_grads.append(float(abs(w.latest["lstm"].output_grad).max())),
    )
    assert len(largest_grads) == 12
    assert min(largest_grads) > 0


REFUSED = {
    "data parallel": (lambda: nn.DataParallel(Reader()), {}, UnsupportedError, "copies the model for every batch"),
    "no module": (lambda: 3, {}, InputError, "takes a torch module"),
    "probe without loss": (Reader, {"probe": PROBE}, InputError, "needs a loss"),
    "probe of one": (Reader, {"probe": PROBE[0], "loss": "mse"}, InputError, "is a batch"),
    "quantity": (Reader, {"quantities": "hiden"}, InputError, "no quantity"),
    "epochs of one": (Reader, {"probe": PROBE, "loss": "mse", "epochs": 5}, InputError, "epochs= are whole numbers"),
    "epochs of nothing": (Reader, {"epochs": (1,)}, InputError, "there is no probe"),
    "batches of a probe": (
        Reader,
        {"probe": PROBE, "loss": "mse", "on_batch": print},
        InputError,
        "on_batch= applies to training batches",
    ),
    "schedule": (Reader, {"every": -1}, InputError, "no schedule"),
    "keyword": (Reader, {"evry": 3}, CallError, "did you mean 'every'"),
    "layer": (Reader, {"layers": "nope"}, LayerNotFoundError, "No layer is called 'nope'"),
    "number for names": (Reader, {"layers": 3}, InputError, "layers= names nothing"),
    "number for a path": (Reader, {"path": 3}, InputError, "is the path of a file"),
    "points": (Reader, {"points": 0}, InputError, "points= is a whole number"),
    "step": (Reader, {"step": "3"}, InputError, "step= is a whole number"),
    "on_batch": (Reader, {"on_batch": 3}, InputError, "cannot be called"),
    "stop_on": (Reader, {"stop_on": 3}, InputError, "stop_on= names nothing"),
    "logger": (Reader, {"loggers": ["tensorbord"]}, InputError, "tensorboard"),
    "optimizer": (Reader, {"optimizer": 3}, InputError, "not an optimizer"),
    "no recurrent layer": (lambda: nn.Linear(3, 1), {}, UnsupportedError, "nn.LSTM"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    make, options, error, message = REFUSED[case]
    model = make()
    with pytest.raises(error, match=message), rl.torch.watch(model, **options):
        pass
    assert count_global_hooks() == (0, 0)
    if isinstance(model, nn.Module):
        assert count_hooks(model) == 0
