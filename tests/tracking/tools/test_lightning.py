"""The Lightning callback records training under both package names, ``lightning.pytorch`` and ``pytorch_lightning``."""

import importlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torch_trainings import Reader, data, same_weights

import rnnlens as rl
from rnnlens.errors import TrackingWarning

pytestmark = [
    # Lightning recommends more data-loader workers and the use of a GPU.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used:UserWarning"),
    # Lightning 2.6 uses a call of torch's pytree module that torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "log_every_n_steps": 1,
}


def module_class(package, options):
    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Reader(**options)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            x, y = batch
            loss = mse_loss(self(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, index):
            x, y = batch
            self.log("val_loss", mse_loss(self(x), y))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    return Module


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def package(request):
    return importlib.import_module(request.param)


def fit(package, callbacks=(), *, options=None, checkpoint=None, **trainer_options):
    torch.manual_seed(0)
    model = module_class(package, {"num_layers": 2, "dropout": 0.3} if options is None else options)()
    x, y = data(64)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    validation = DataLoader(TensorDataset(x[:16], y[:16]), batch_size=16)
    torch.manual_seed(1)
    trainer = package.Trainer(callbacks=list(callbacks), **{"max_epochs": 3, **QUIET, **trainer_options})
    trainer.fit(model, loader, validation, ckpt_path=checkpoint)
    return model, trainer


@pytest.mark.parametrize("probe", [False, True], ids=["batch", "probe"])
def test_training_is_not_disturbed(package, tmp_path, probe):
    unwatched, _ = fit(package, gradient_clip_val=0.2)
    x, y = data(8, seed=4)
    options = {"probe": (x, y), "loss": "mse"} if probe else {}
    watch = rl.lightning.Watch(tmp_path / "a.zarr", every=2, **options)
    watched, _ = fit(package, [watch], gradient_clip_val=0.2)
    assert same_weights(unwatched, watched)
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == [*([0] if probe else []), 2, 4, 6, 8, 10, 12]
    assert run.scalars["epoch"].values.tolist()[-1] == 2
    assert run.ended == "finished"
    assert not any(m._forward_hooks for m in watched.modules())


@pytest.mark.full
@pytest.mark.parametrize("options", [{"probe": data(8, seed=4), "loss": "mse"}, {}], ids=["probe", "batch"])
def test_two_hundred_steps(tmp_path, options):
    """200 steps are unchanged bit for bit, with user metrics and a callback that draws random numbers."""
    import lightning.pytorch as package

    class LossRecorder(package.Callback):
        def __init__(self):
            self.records = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.records.append((float(outputs["loss"]), float(torch.rand(1))))

    plain_recorder, watched_recorder = LossRecorder(), LossRecorder()
    unwatched, plain_trainer = fit(package, [plain_recorder], max_epochs=50)
    watch = rl.lightning.Watch(tmp_path / "a.zarr", every=9, **options)
    watched, trainer = fit(package, [watch, watched_recorder], max_epochs=50)
    assert trainer.global_step == len(watched_recorder.records) == 200
    assert same_weights(unwatched, watched)
    assert plain_recorder.records == watched_recorder.records
    assert {"loss", "val_loss"} <= set(trainer.callback_metrics)
    assert {k: float(v) for k, v in plain_trainer.callback_metrics.items()} == {
        k: float(v) for k, v in trainer.callback_metrics.items()
    }


def test_what_the_trainer_did_is_what_is_recorded(tmp_path):
    """The recorded loss and the accumulated, clipped gradients equal those that Lightning's callbacks see."""
    import lightning.pytorch as package

    grad_norms = []

    class Recorder(package.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            grad_norms.append(float(pl_module.net.lstm.weight_hh_l0.grad.norm()))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(float(outputs["loss"]))

    losses = []
    watch = rl.lightning.Watch(tmp_path / "a.zarr", every=1)
    fit(package, [watch, Recorder()], options={}, gradient_clip_val=0.01, accumulate_grad_batches=2, max_epochs=1)
    run = rl.open(tmp_path / "a.zarr")
    recorded_norms = run["lstm" if "lstm" in run else "net.lstm"].weight_grad_norm_recurrent_kernel
    np.testing.assert_allclose(recorded_norms, grad_norms, rtol=1e-5)
    np.testing.assert_allclose(run.scalars["grad_norm_clipped"], 0.01, rtol=1e-3)
    np.testing.assert_allclose(run.loss, [2 * loss for loss in losses[1::2]], rtol=1e-5)
    assert run.scalars["backward_passes"].values.tolist() == [2, 2]


def test_of_two_optimizers_the_one_that_moves_the_recurrent_layer_counts(tmp_path):
    """Steps and gradient norm are those of the optimizer with the recurrent weights, also if it is listed second."""
    import lightning.pytorch as package

    norms = []

    class TwoOptimizers(module_class(package, {})):
        automatic_optimization = False

        def training_step(self, batch, index):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(mse_loss(self(batch[0]), batch[1]))
            norms.append(float(torch.stack([p.grad.norm() for p in self.net.lstm.parameters()]).norm()))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            other_parameters = [*self.net.norm.parameters(), *self.net.head.parameters()]
            return [torch.optim.SGD(other_parameters, 0.1), torch.optim.Adam(self.net.lstm.parameters(), 1e-2)]

    torch.manual_seed(0)
    x, y = data(64)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    callback = rl.lightning.Watch(tmp_path / "a.zarr", every=1)
    package.Trainer(callbacks=[callback], max_epochs=1, **QUIET).fit(TwoOptimizers(), loader, loader)
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(run.scalars["grad_norm"], norms, rtol=1e-5)


def test_a_restored_training_goes_on(tmp_path):
    import lightning.pytorch as package

    _, trainer = fit(package, [rl.lightning.Watch(tmp_path / "a.zarr", every=3)], max_epochs=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    fit(package, [rl.lightning.Watch(tmp_path / "a.zarr", every=3)], max_epochs=3, checkpoint=tmp_path / "a.ckpt")
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [3, 6, 9, 12]


@pytest.mark.parametrize("ending", ["early", "error"])
def test_an_end_before_its_time(tmp_path, ending):
    import lightning.pytorch as package

    class Stops(package.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                if ending == "error":
                    raise RuntimeError("enough")
                trainer.should_stop = True

    watch = rl.lightning.Watch(tmp_path / "a.zarr", every=2)
    if ending == "error":
        with pytest.raises(RuntimeError, match="enough"):
            fit(package, [watch, Stops()])
    else:
        fit(package, [watch, Stops()])
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == [2, 4]
    assert run.ended == ("RuntimeError" if ending == "error" else "stopped")
    assert not any(m._forward_hooks for m in watch.watch.model.modules())


def test_silence_says_why(tmp_path):
    import lightning.pytorch as package

    with pytest.warns(TrackingWarning, match="12 batches were trained, and every=50 selected none of them"):
        fit(package, [rl.lightning.Watch(tmp_path / "a.zarr")])


@pytest.mark.usefixtures("bfloat16_lstm")
def test_half_precision_is_the_trainers(tmp_path):
    import lightning.pytorch as package

    watch = rl.lightning.Watch(tmp_path / "a.zarr", every=4)
    fit(package, [watch], precision="bf16-mixed", max_epochs=1)
    assert np.isfinite(rl.open(tmp_path / "a.zarr").loss).all()
    assert isinstance(watch.latest["net.lstm[0]"].hidden_grad.values, np.ndarray)
    assert isinstance(watch.watch.model.net.lstm, nn.LSTM)


def test_the_loggers_of_the_trainer(tmp_path):
    import lightning.pytorch as package
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    fit(package, [rl.lightning.Watch(every=4, loggers=True)], logger=logger, max_epochs=1)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("rnnlens/batch/net.lstm[0]/reach")] == [4]


@pytest.mark.parametrize("called_module", ["the module itself", "a part of it"])
def test_the_first_batch_that_is_not_finite_is_written(tmp_path, called_module):
    package = importlib.import_module("lightning.pytorch")
    torch.manual_seed(0)
    model_class = module_class(package, {})
    if called_module == "a part of it":
        model_class.training_step = lambda self, batch, index: mse_loss(self.net(batch[0]), batch[1])
    model = model_class()
    x, y = data(64)
    x[40, 3, 0] = torch.nan
    watch = rl.lightning.Watch(tmp_path / "a.zarr", every=0, on_nonfinite="report", loss=mse_loss)
    trainer = package.Trainer(callbacks=[watch], max_epochs=1, **QUIET)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    trainer.fit(model, loader, DataLoader(TensorDataset(x[:16], y[:16]), batch_size=16))
    incident = rl.open(tmp_path / "a.nonfinite.nc")
    assert incident.step == 3
    np.testing.assert_array_equal(incident.x, x[32:48].numpy())
    np.testing.assert_array_equal(incident.y, y[32:48].numpy())
    trained = dict(model.named_parameters())  # buffers excluded: the forward pass updated the batch statistics with NaN
    assert all(np.isfinite(incident.weights[name]).all() for name in trained)
    assert np.isnan(incident.loss)
    if called_module == "the module itself":
        assert "first at step 3 of sample 8: input" in incident.found
