"""The Hugging Face callback records trainings by ``transformers.Trainer``."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch_trainings import data, same_weights
from transformers import Trainer, TrainerCallback, TrainingArguments

import rnnlens as rl
from rnnlens.errors import TrackingWarning

pytestmark = [
    # The Trainer pins memory in its data loader; without a GPU torch warns of it.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


class Model(nn.Module):
    """A stacked LSTM with the Trainer's interface: takes labels, returns loss and logits."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(6, 1)

    def forward(self, x, labels=None):
        sequence, _ = self.lstm(x)
        predicted = self.head(self.dropout(sequence[:, -1]))
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


def rows(samples=64, broken=None):
    x, y = data(samples)
    if broken is not None:
        x[broken, 3, 0] = torch.nan
    return [{"x": x[i], "labels": y[i]} for i in range(samples)]


def absolute_error(evaluation):
    return {"error": float(np.abs(evaluation.predictions - evaluation.label_ids).mean())}


def train(folder, callbacks=(), resume=None, broken=None, metrics=None, **options):
    torch.manual_seed(0)
    model = Model()
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "num_train_epochs": 3,
            "per_device_train_batch_size": 16,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            **options,
        },
        report_to=[],
        logging_strategy="steps",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    eval_options = {} if metrics is None else {"eval_dataset": rows(16), "compute_metrics": metrics}
    trainer = Trainer(model, arguments, train_dataset=rows(broken=broken), callbacks=list(callbacks), **eval_options)
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer


@pytest.mark.parametrize("probe", [False, True], ids=["batch", "probe"])
def test_training_is_not_disturbed(tmp_path, probe):
    unwatched, _ = train(tmp_path / "t")
    x, y = data(8, seed=4)
    options = {"probe": {"x": x, "labels": y}} if probe else {}
    watched, _ = train(tmp_path / "t", [rl.transformers.Watch(tmp_path / "a.zarr", every=2, **options)])
    assert same_weights(unwatched, watched)
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == [*([0] if probe else []), 2, 4, 6, 8, 10, 12]
    assert run.scalars["epoch"].values.tolist()[-1] == 2
    assert run.ended == "finished"
    assert not any(m._forward_hooks for m in watched.modules())


@pytest.mark.full
@pytest.mark.parametrize("probe", [False, True], ids=["batch", "probe"])
def test_two_hundred_steps(tmp_path, probe):
    """200 steps are unchanged bit for bit, with a user metric and a callback that draws random numbers."""

    class BiasRecorder(TrainerCallback):
        def __init__(self):
            self.records = []

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.records.append((float(model.head.bias.detach()), float(torch.rand(1))))

    plain_recorder, watched_recorder = BiasRecorder(), BiasRecorder()
    training_options = {"num_train_epochs": 50, "metrics": absolute_error, "eval_strategy": "epoch"}
    unwatched, plain_trainer = train(tmp_path / "t", [plain_recorder], **training_options)
    x, y = data(8, seed=4)
    options = {"probe": {"x": x, "labels": y}} if probe else {}
    watch = rl.transformers.Watch(tmp_path / "a.zarr", every=9, **options)
    watched, trainer = train(tmp_path / "t", [watch, watched_recorder], **training_options)
    assert trainer.state.global_step == len(watched_recorder.records) == 200
    assert same_weights(unwatched, watched)
    assert plain_recorder.records == watched_recorder.records
    errors = [
        [row.get("eval_error") for row in each_trainer.state.log_history] for each_trainer in (plain_trainer, trainer)
    ]
    assert len([error for error in errors[0] if error is not None]) == 50
    assert errors[0] == errors[1]


def test_what_the_trainer_did_is_what_is_recorded(tmp_path):
    clipped = []

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            clipped.append(float(model.lstm.weight_hh_l0.grad.norm()))

    watch = rl.transformers.Watch(tmp_path / "a.zarr", every=1)
    _, trainer = train(
        tmp_path / "t", [watch, Recorder()], max_grad_norm=0.05, gradient_accumulation_steps=2, num_train_epochs=1
    )
    logs = [row for row in trainer.state.log_history if "grad_norm" in row]
    run = rl.open(tmp_path / "a.zarr")
    np.testing.assert_allclose(run["lstm[0]"].weight_grad_norm_clipped_recurrent_kernel, clipped, rtol=1e-5)
    np.testing.assert_allclose(run.scalars["grad_norm"], [row["grad_norm"] for row in logs], rtol=1e-4)
    np.testing.assert_allclose(run.scalars["grad_norm_clipped"], 0.05, rtol=1e-3)
    assert run.scalars["backward_passes"].values.tolist() == [2, 2]
    assert np.isfinite(run.loss).all()


def test_a_restored_training_goes_on(tmp_path):
    """Resuming from the checkpoint of step 6 discards the record of step 8 and records steps 8, 10 and 12 again."""
    options = {"save_strategy": "steps", "save_steps": 6}
    train(tmp_path / "t", [rl.transformers.Watch(tmp_path / "a.zarr", every=2)], num_train_epochs=2, **options)
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [2, 4, 6, 8]
    watch = rl.transformers.Watch(tmp_path / "a.zarr", every=2)
    train(tmp_path / "t", [watch], resume=str(tmp_path / "t" / "checkpoint-6"), **options)
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [2, 4, 6, 8, 10, 12]


def test_an_end_before_its_time(tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 5

    train(tmp_path / "t", [rl.transformers.Watch(tmp_path / "a.zarr", every=2), Stops()])
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == [2, 4]
    assert run.ended == "stopped"


def test_an_error_leaves_what_was_written(tmp_path):
    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), rl.transformers.Watch(tmp_path / "a.zarr", every=2) as watch:
        train(tmp_path / "t", [watch, Breaks()])
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == [2, 4]
    assert run.ended == "interrupted"
    assert not any(m._forward_hooks for m in watch.watch.model.modules())


def test_silence_says_why(tmp_path):
    with pytest.warns(TrackingWarning, match="12 batches were trained, and every=50 selected none of them"):
        train(tmp_path / "t", [rl.transformers.Watch(tmp_path / "a.zarr")])


@pytest.mark.parametrize("probe", [False, True], ids=["report alone", "when there is a probe"])
def test_the_first_batch_that_is_not_finite_is_written(tmp_path, probe):
    """The first batch with a NaN is saved with the weights before it, the model's own loss and where the NaN begins."""
    x, y = data(8, seed=4)
    probe_options = {"probe": {"x": x, "labels": y}} if probe else {}
    watch = rl.transformers.Watch(tmp_path / "a.zarr", every=2 * probe, on_nonfinite="report", **probe_options)
    options = {"broken": 40, "num_train_epochs": 1, "lr_scheduler_type": "constant"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)  # the probe is traced with weights that are NaN
        train(tmp_path / "t", [watch], **options)
    incident = rl.open(tmp_path / "a.nonfinite.nc")
    assert np.isnan(incident.loss)
    assert np.isnan(incident.x["x"]).sum() == 1
    (sample,) = np.flatnonzero(np.isnan(incident.x["x"]).any((1, 2)))
    assert f"first at step 3 of sample {sample}: input[x], feature 0" in incident.found
    assert all(np.isfinite(weight).all() for weight in incident.weights.values())
    model = Model()
    model.load_state_dict({name: torch.as_tensor(value) for name, value in incident.weights.items()})
    nonfinite = rl.find_nonfinite(model, incident.x, loss=lambda output: output["loss"])
    assert (nonfinite.phase, nonfinite.sample, nonfinite.step) == ("data", sample, 3)
    retrained, _ = train(tmp_path / "t", **options, max_steps=incident.step - 1)
    assert same_weights(retrained, model)
