"""Failures in a torch watch do not stop training: one warning names the missing records; the model can be copied."""

import copy
import io
import pickle
import shutil
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import rnnlens as rl
from rnnlens.errors import TrackingWarning

STEPS = 6


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 7, 3, generator=generator), torch.randn(8, 1, generator=generator)


def train(make_watch=None, before_step=None, penalty=None):
    """Return the losses of a short training, with a watch if ``make_watch`` is given, and the watch or None."""
    torch.manual_seed(0)
    model, (x, y) = Reader(), data()
    optimizer = torch.optim.Adam(model.parameters())
    losses = []

    def loop(watch):
        for step in range(STEPS):
            if before_step is not None:
                before_step(step, model, watch)
            optimizer.zero_grad()
            inputs = x.clone().requires_grad_()
            output = model(inputs)
            loss = mse_loss(output, y)
            if penalty is not None and penalty(step):
                loss = loss + torch.autograd.grad(output.sum(), inputs, create_graph=True)[0].pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))

    if make_watch is None:
        loop(None)
        return losses, None
    with make_watch(model) as watch:
        loop(watch)
    return losses, watch


class Logger:
    """A logger that raises at the listed records and, optionally, when it is closed."""

    def __init__(self, failing, close=False):
        self.failing, self.fails_at_close, self.records = failing, close, 0

    def write(self, record):
        self.records += 1
        if self.records in self.failing:
            raise ConnectionError(f"no answer after {self.records} s")

    def close(self, reason):
        if self.fails_at_close:
            raise ConnectionError("gone")


def tracking_warnings(caught):
    return [warning for warning in caught if warning.category is TrackingWarning]


@pytest.mark.parametrize(
    ("failing", "close", "missing"),
    [((1,), False, 1), ((STEPS,), False, 1), ((2, 3, 5), False, 3), ((), True, 1)],
    ids=["first record", "last record", "three in between", "close"],
)
def test_a_logger_that_raises_costs_its_own_records_alone(tmp_path, failing, close, missing):
    logger = Logger(failing, close)
    with pytest.warns(TrackingWarning, match=r"the logger Logger; training goes on") as caught:
        losses, watch = train(lambda model: rl.torch.watch(model, tmp_path / "a.zarr", every=1, loggers=logger))
    assert losses == train()[0]
    assert len(tracking_warnings(caught)) == 1
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == list(range(1, STEPS + 1))
    assert run.ended == "finished"
    (gap,) = watch.gaps if close else run.gaps
    assert (gap.where, gap.records) == ("the logger Logger", missing)
    assert "ConnectionError" in gap.reason
    if not close:
        assert (gap.first, gap.last) == (min(failing), max(failing))
        assert f"{missing} of the logger Logger" in repr(run)


def test_a_probe_that_cannot_be_traced_is_a_gap(tmp_path):
    def loss(output, target):
        raise ZeroDivisionError("of the loss")

    def make_watch(model):
        return rl.torch.watch(model, tmp_path / "a.zarr", every=2, probe=data(), loss=loss)

    with pytest.warns(TrackingWarning, match=r"Step 0 was not recorded; training goes on") as caught:
        losses, watch = train(make_watch)
    assert losses == train()[0]
    assert len(tracking_warnings(caught)) == 1
    (gap,) = watch.gaps
    assert (gap.where, gap.first, gap.last, gap.records) == ("probe", 0, STEPS, 4)
    assert [tuple(stored_gap) for stored_gap in rl.open(tmp_path / "a.zarr").gaps] == [tuple(gap)]


@pytest.mark.parametrize("removal", ["deleted", "emptied", "replaced"])
def test_a_folder_that_is_gone_is_said_once(tmp_path, removal):
    path = tmp_path / "a.zarr"

    def remove_folder(step, model, watch):
        if step == 3:
            if removal == "emptied":
                for child in path.iterdir():
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
            else:
                path.rename(tmp_path / "elsewhere")
            if removal == "replaced":
                path.mkdir()

    with pytest.warns(TrackingWarning, match="was removed or replaced") as caught:
        losses, watch = train(lambda model: rl.torch.watch(model, path, every=1), remove_folder)
    assert losses == train()[0]
    assert len(tracking_warnings(caught)) == 1
    assert [(gap.where, gap.first) for gap in watch.gaps] == [("the run", 4)]
    assert not list(path.rglob("*")) if path.exists() else True


@pytest.mark.parametrize("until", [4, None], ids=["for a while", "until the end"])
@pytest.mark.parametrize("code", ["ENOSPC", "ESTALE", "EIO"])
def test_a_disk_that_takes_nothing(tmp_path, monkeypatch, until, code):
    """Training continues while run files cannot be written (full disk, lost network drive, I/O error)."""
    import errno
    import os

    from zarr.storage import LocalStore

    original_set, broken = LocalStore.set, [False]

    async def failing(self, key, value):
        if broken[0]:
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
        await original_set(self, key, value)

    def set_broken(step, model, watch):
        broken[0] = step >= 2 and (until is None or step < until)

    monkeypatch.setattr(LocalStore, "set", failing)
    path = tmp_path / "a.zarr"
    with pytest.warns(TrackingWarning, match=r"was not written to the run; training goes on") as caught:
        losses, watch = train(lambda model: rl.torch.watch(model, path, every=1), set_broken)
    broken[0] = False
    assert losses == train()[0]
    assert {warning.message.args[0].splitlines()[0].partition(" ")[2][2:] for warning in tracking_warnings(caught)} <= {
        "was not written to the run; training goes on.",
        "end of training was not closed the run; training goes on.",
    }
    run = rl.open(path)
    if until is None:
        assert run.steps.values.tolist() == [1, 2]
        assert watch.gaps[0].records >= 4
    else:
        assert run.steps.values.tolist() == [1, 2, 5, 6]
        assert [(gap.where, gap.first, gap.last, gap.records) for gap in run.gaps] == [("the run", 3, 4, 2)]
        assert np.isfinite(run["lstm"].direct).all()


def test_an_error_of_a_hook_does_not_reach_the_forward_pass(tmp_path, monkeypatch):
    from rnnlens.adapters.torch import training_capture

    def failing_copy(value, *, copy):
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(training_capture, "detach_tensors", failing_copy)
    with pytest.warns(TrackingWarning, match="no room for a copy") as caught:
        losses, watch = train(lambda model: rl.torch.watch(model, tmp_path / "a.zarr", every=1))
    assert losses == train()[0]
    assert len(tracking_warnings(caught)) == 1
    assert [(gap.where, gap.records) for gap in watch.gaps] == [("batch", STEPS)]


def test_what_on_batch_raises_is_the_users(tmp_path):
    def on_batch(batch):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(lambda model: rl.torch.watch(model, tmp_path / "a.zarr", every=1, on_batch=on_batch))


def copies(model, x):
    """Yield copies of a model by deepcopy, pickle, torch.save, AveragedModel and torch.jit.trace."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    yield torch.load(buffer, weights_only=False)
    yield torch.optim.swa_utils.AveragedModel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch.jit
        yield torch.jit.trace(model, x, check_trace=False)  # a check would run the model once more


def test_copies_of_a_watched_model_carry_no_hooks(tmp_path):
    x, y = data()

    def check_copies(step, model, watch):
        before = watch._capture.forward_calls
        for copied in copies(model, x):
            out = copied(x)
            torch.testing.assert_close(out, model.head(nn.LSTM.forward(model.lstm, x)[0][:, -1]))
            if not isinstance(copied, torch.jit.ScriptModule):  # a traced module shares the model's weights
                mse_loss(out, y).backward()
        assert watch._capture.forward_calls == before

    def make_watch(model):
        return rl.torch.watch(model, tmp_path / "a.zarr", every=1, on_nonfinite="report")

    losses, watch = train(make_watch, check_copies)
    assert losses == train()[0]
    assert watch.latest.passes == 1
    assert watch.latest.trace.checks
    assert not watch.gaps


def test_nothing_holds_the_users_locals(tmp_path):
    class Batch:
        pass

    model, (x, y) = Reader(), data()
    optimizer = torch.optim.Adam(model.parameters())
    with rl.torch.watch(model, tmp_path / "a.zarr", every=1):
        user_batch = Batch()
        weak_ref = weakref.ref(user_batch)
        mse_loss(model(x), y).backward()
        optimizer.step()
    del user_batch
    assert weak_ref() is None


def test_a_gradient_penalty_is_refused_by_name(tmp_path):
    """Steps with a gradient penalty are not recorded: their double backward pass adds other gradients to the loss's."""
    path = tmp_path / "a.zarr"
    message = r"create_graph=True.*gradient at \w+ is not that of the loss alone; use a probe instead; .* \(3 times\)"
    with pytest.warns(TrackingWarning, match=message):
        losses, _ = train(lambda model: rl.torch.watch(model, path, every=1), penalty=lambda step: step % 2 == 1)
    assert losses == train(penalty=lambda step: step % 2 == 1)[0]
    adjoint = rl.open(path).scalar("lstm/adjoint")  # of the other steps only the change of the weights is known
    assert adjoint.step[np.isfinite(adjoint.values)].values.tolist() == [1, 3, 5]
