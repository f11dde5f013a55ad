"""Records written to TensorBoard, Weights & Biases and MLflow are read back by their own readers, without a network."""

import json
import struct

import numpy as np
import pytest
import torch
import xarray as xr
from torch.utils.tensorboard import SummaryWriter
from torch_trainings import Reader, model_and_optimizer, train

import rnnlens as rl
from rnnlens.errors import InputError
from rnnlens.results.training_run import Alert
from rnnlens.tracking.loggers import sinks
from rnnlens.tracking.records import TrainingRecord

LAYERS = {
    "lstm[0]": {
        "adjoint_profile": xr.DataArray(np.geomspace(1e-3, 1.0, 8), dims="time"),
        "gates": xr.DataArray(np.full((2, 8), 0.25), dims=("gate", "time"), coords={"gate": ["input", "forget"]}),
    },
    "bi": {
        "adjoint_profile": xr.DataArray(
            np.stack([np.linspace(1, 0.1, 8), np.linspace(0.1, 1, 8)], 1),
            dims=("time", "direction"),
            coords={"direction": ["forward", "backward"]},
        )
    },
}


def records():
    for step in (0, 50, 100):
        broken = float("nan") if step == 100 else 0.5
        yield TrainingRecord(
            step, step // 50, "probe", {"loss": 2.0 - step / 100, "lstm[0]/reach": 7.0, "bi/decay": broken}, LAYERS
        )


def write_records(logger, directory):
    (sink,) = sinks(logger, directory)
    for record in records():
        sink.write(record)
    sink.close("finished")
    return sink


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0, "tensors": 0}
    )
    return accumulator.Reload()


@pytest.mark.parametrize("logger_kind", ["writer", "list", "name"])
def test_tensorboard(tmp_path, logger_kind):
    writer = None if logger_kind == "name" else SummaryWriter(str(tmp_path / "a"))
    write_records({"writer": writer, "list": [writer], "name": "tensorboard"}[logger_kind], tmp_path / "a")
    if writer is not None:
        writer.add_scalar("mine", 1.0, 7)  # a writer made by the user is still open
        writer.close()
    events = read_events(tmp_path / "a")
    loss = events.Scalars("rnnlens/probe/loss")
    assert [(e.step, e.value) for e in loss] == [(0, 2.0), (50, 1.5), (100, 1.0)]
    assert [e.value for e in events.Scalars("rnnlens/probe/lstm[0]/reach")] == [7.0] * 3
    assert np.isnan(events.Scalars("rnnlens/probe/bi/decay")[-1].value)
    histogram = events.Histograms("rnnlens/probe/lstm[0]/gates/forget")
    assert [e.step for e in histogram] == [0, 50, 100]
    assert histogram[0].histogram_value.num == 8
    assert histogram[0].histogram_value.sum == 2.0
    assert set(events.Tags()["images"]) == {
        "rnnlens/probe/lstm[0]/film",
        "rnnlens/probe/bi/forward/film",
        "rnnlens/probe/bi/backward/film",
    }
    film = events.Images("rnnlens/probe/lstm[0]/film")[-1]
    assert film.step == 100
    assert film.width % 8 == 0
    assert film.height % 3 == 0


def test_the_film_says_when_and_where():
    """The film image has a row per record, the first on top: darkest at its peak in time, white where it is zero."""
    from rnnlens.tracking.loggers import Film

    film = Film()
    for peak in (1, 6):
        profile = np.zeros(8)
        profile[peak] = 10.0**-peak
        layers = {"lstm": {"adjoint_profile": xr.DataArray(profile, dims="time")}}
        film.add(TrainingRecord(peak, 0, "probe", {}, layers))
    (picture,) = film.pictures().values()
    cells = picture[:: picture.shape[0] // 2, :: picture.shape[1] // 8].sum(axis=-1)[:, :8]
    assert cells.argmin(axis=1).tolist() == [1, 6]
    assert len(set(cells.ravel().tolist())) == 2
    assert cells.max() == 3 * 255


def test_tensorboard_of_tensorflow(tmp_path):
    tf = pytest.importorskip("tensorflow")
    write_records(tf.summary.create_file_writer(str(tmp_path)), tmp_path)
    events = read_events(tmp_path)
    values = [tf.make_ndarray(e.tensor_proto).item() for e in events.Tensors("rnnlens/probe/loss")]
    assert values == [2.0, 1.5, 1.0]
    assert "rnnlens/probe/lstm[0]/film" in events.Tags()["tensors"]


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield wandb
    wandb.finish()
    wandb.teardown()  # the next initialisation reads its settings anew


def log_chunks(data):
    """Yield records of LevelDB's log format, used in W&B run files: blocks of 32 KiB, a 7-byte header per piece."""
    position, chunk = 7, b""
    while position + 7 <= len(data):
        remaining = 32768 - position % 32768
        if remaining < 7:
            position += remaining
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        chunk += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            yield chunk
            chunk = b""


def read_records(folder):
    """Return the records of W&B's own run file."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # W&B's service has written everything once it has ended
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    records = []
    for chunk in log_chunks(path.read_bytes()):
        records.append(wandb_internal_pb2.Record())
        records[-1].ParseFromString(chunk)
    return records


def read_rows(folder):
    """Return the history rows of W&B's own run file."""
    return [
        {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
        for record in read_records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def test_wandb_is_sent_an_alert(wandb, tmp_path):
    alert, run = Alert("exploding", "lstm/adjoint", 30, 5.0, 0.01), wandb.init()
    (sink,) = sinks(run, tmp_path)
    sink.alert(alert)
    run.finish()
    sent = [record.alert for record in read_records(tmp_path) if record.WhichOneof("record_type") == "alert"]
    assert [(record.title, record.text) for record in sent] == [("exploding at step 30", alert.sentence)]


def test_wandb_by_name(wandb, tmp_path):
    write_records("wandb", tmp_path)
    assert wandb.run is None  # a run that the logger started has ended
    loss_rows = [row for row in read_rows(tmp_path) if "rnnlens/probe/loss" in row]
    assert [row["rnnlens/step"] for row in loss_rows] == [0, 50, 100]
    assert [row["rnnlens/probe/loss"] for row in loss_rows] == [2.0, 1.5, 1.0]
    assert loss_rows[0]["rnnlens/probe/lstm[0]/gates/forget._type"] == "histogram"
    assert any(row.get("rnnlens/probe/lstm[0]/film._type") == "image-file" for row in read_rows(tmp_path))


@pytest.mark.parametrize("numbered", [False, True])
def test_wandb_leaves_the_rows_of_its_user_alone(wandb, tmp_path, numbered):
    """Rows that the user logs to the same W&B run are kept; a table there has all records, and a warning says so."""
    run = wandb.init()
    (sink,) = sinks(run, tmp_path)
    training_records = list(records())
    for epoch in range(2):
        for record in training_records:
            sink.write(record)
        run.log({"accuracy": 0.5 + epoch}, **({"step": epoch} if numbered else {}))
    with pytest.warns(UserWarning, match=f"{5 if numbered else 4} records came between"):
        sink.close("finished")
    run.finish()
    rows = read_rows(tmp_path)
    assert [row["accuracy"] for row in rows if "accuracy" in row] == [0.5, 1.5]
    # A row with an explicit step stays open until the next step is logged.
    assert [row["rnnlens/step"] for row in rows if "rnnlens/probe/loss" in row] == [100] * (1 if numbered else 2)
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/rnnlens/records*.table.json")
    table = json.loads(path.read_text())
    step, loss = (table["columns"].index(f"rnnlens/{name}") for name in ("step", "probe/loss"))
    logged = [(row[step], row[loss]) for row in table["data"] if row[loss] is not None]
    assert logged == [(0, 2.0), (50, 1.5), (100, 1.0)] * 2


@pytest.mark.parametrize("logger_kind", ["run", "name", "active"])
def test_mlflow(tmp_path, monkeypatch, logger_kind):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    run = None if logger_kind == "name" else mlflow.start_run()
    write_records(run if logger_kind == "run" else "mlflow", tmp_path)
    assert (mlflow.active_run() is None) == (logger_kind == "name")
    mlflow.end_run()
    client = mlflow.MlflowClient()
    (stored,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    history = client.get_metric_history(stored.info.run_id, "rnnlens/probe/loss")
    assert [(m.step, m.value) for m in history] == [(0, 2.0), (50, 1.5), (100, 1.0)]
    assert stored.data.metrics["rnnlens/probe/lstm.0/reach"] == 7.0
    assert stored.data.metrics["rnnlens/probe/bi/decay.not_finite"] == 1.0
    assert stored.data.tags["rnnlens.ended"] == "finished"
    names = [f.path for f in client.list_artifacts(stored.info.run_id, "rnnlens/probe/lstm.0")]
    assert names == ["rnnlens/probe/lstm.0/film.png"]


def test_a_whole_training(tmp_path):
    model, optimizer = model_and_optimizer(lambda: Reader())
    writer = SummaryWriter(str(tmp_path / "events"))
    train(model, optimizer, rl.torch.watch(model, tmp_path / "a.zarr", every=2, loggers=[writer]))
    writer.close()
    run, events = rl.open(tmp_path / "a.zarr"), read_events(tmp_path / "events")
    logged = events.Scalars("rnnlens/batch/lstm/reach")
    assert [e.step for e in logged] == run.steps.values.tolist()
    np.testing.assert_allclose([e.value for e in logged], run["lstm"].reach, rtol=1e-6)


def test_lightnings_own_logger(tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    write_records(logger, tmp_path)
    logger.experiment.close()
    assert "rnnlens/probe/loss" in read_events(tmp_path).Tags()["scalars"]


class RecordingLogger:
    def __init__(self):
        self.calls = []

    def write(self, record):
        self.calls.append(record.step)

    def close(self, reason):
        self.calls.append(reason)


def test_any_object_that_takes_records():
    logger = RecordingLogger()
    write_records(logger, "")
    assert logger.calls == [0, 50, 100, "finished"]


@pytest.mark.parametrize("logger", [3, [torch.nn.Linear(1, 1)], "tensorbord"])
def test_what_is_no_logger(tmp_path, logger):
    with pytest.raises(InputError, match="logger"):
        sinks(logger, tmp_path)
