"""Records in TensorBoard, Weights & Biases and MLflow, read back by their own readers; nothing leaves the machine."""

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


def fill(logger, directory):
    (sink,) = sinks(logger, directory)
    for record in records():
        sink.write(record)
    sink.close("finished")
    return sink


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0, "tensors": 0})
    return found.Reload()


@pytest.mark.parametrize("given", ["writer", "list", "name"])
def test_tensorboard(tmp_path, given):
    writer = None if given == "name" else SummaryWriter(str(tmp_path / "a"))
    fill({"writer": writer, "list": [writer], "name": "tensorboard"}[given], tmp_path / "a")
    if writer is not None:
        writer.add_scalar("mine", 1.0, 7)  # a writer of the user's is still open
        writer.close()
    found = events(tmp_path / "a")
    loss = found.Scalars("rnnlens/probe/loss")
    assert [(e.step, e.value) for e in loss] == [(0, 2.0), (50, 1.5), (100, 1.0)]
    assert [e.value for e in found.Scalars("rnnlens/probe/lstm[0]/reach")] == [7.0] * 3
    assert np.isnan(found.Scalars("rnnlens/probe/bi/decay")[-1].value)
    histogram = found.Histograms("rnnlens/probe/lstm[0]/gates/forget")
    assert [e.step for e in histogram] == [0, 50, 100]
    assert histogram[0].histogram_value.num == 8
    assert histogram[0].histogram_value.sum == 2.0
    assert set(found.Tags()["images"]) == {
        "rnnlens/probe/lstm[0]/film",
        "rnnlens/probe/bi/forward/film",
        "rnnlens/probe/bi/backward/film",
    }
    film = found.Images("rnnlens/probe/lstm[0]/film")[-1]
    assert film.step == 100
    assert film.width % 8 == 0
    assert film.height % 3 == 0


def test_the_film_says_when_and_where():
    """Brightest at the peak of each record, black where there is nothing; the first record on top."""
    from rnnlens.tracking.loggers import Film

    film = Film()
    for peak in (1, 6):
        profile = np.zeros(8)
        profile[peak] = 10.0**-peak
        layers = {"lstm": {"adjoint_profile": xr.DataArray(profile, dims="time")}}
        film.add(TrainingRecord(peak, 0, "probe", {}, layers))
    (picture,) = film.pictures().values()
    cells = picture[:: picture.shape[0] // 2, :: picture.shape[1] // 8].sum(axis=-1)[:, :8]
    assert cells.argmax(axis=1).tolist() == [1, 6]
    assert len(set(cells.ravel().tolist())) == 2


def test_tensorboard_of_tensorflow(tmp_path):
    tf = pytest.importorskip("tensorflow")
    fill(tf.summary.create_file_writer(str(tmp_path)), tmp_path)
    found = events(tmp_path)
    values = [tf.make_ndarray(e.tensor_proto).item() for e in found.Tensors("rnnlens/probe/loss")]
    assert values == [2.0, 1.5, 1.0]
    assert "rnnlens/probe/lstm[0]/film" in found.Tags()["tensors"]


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield wandb
    wandb.finish()
    wandb.teardown()  # the next one reads its settings anew


def chunks(data):
    """Records of LevelDB's log format, in which W&B keeps a run: blocks of 32 KiB, a header of 7 bytes per piece."""
    position, held = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        held += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield held
            held = b""


def rows(folder):
    """What W&B has written to its own file, row by row."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service has written everything once it has ended
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found = []
    for chunk in chunks(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(chunk)
        if record.WhichOneof("record_type") == "history":
            found.append({(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item})
    return found


def test_wandb_by_name(wandb, tmp_path):
    fill("wandb", tmp_path)
    assert wandb.run is None  # a run that was begun here is over
    found = [row for row in rows(tmp_path) if "rnnlens/probe/loss" in row]
    assert [row["rnnlens/step"] for row in found] == [0, 50, 100]
    assert [row["rnnlens/probe/loss"] for row in found] == [2.0, 1.5, 1.0]
    assert found[0]["rnnlens/probe/lstm[0]/gates/forget._type"] == "histogram"
    assert any(row.get("rnnlens/probe/lstm[0]/film._type") == "image-file" for row in rows(tmp_path))


@pytest.mark.parametrize("numbered", [False, True])
def test_wandb_leaves_the_rows_of_its_user_alone(wandb, tmp_path, numbered):
    """Somebody who logs by epoch, with steps of their own, loses nothing; and is told what W&B cannot show."""
    run = wandb.init()
    (sink,) = sinks(run, tmp_path)
    made = list(records())
    for epoch in range(2):
        for record in made:
            sink.write(record)
        run.log({"accuracy": 0.5 + epoch}, **({"step": epoch} if numbered else {}))
    with pytest.warns(UserWarning, match=f"{5 if numbered else 4} records came between"):
        sink.close("finished")
    run.finish()
    found = rows(tmp_path)
    assert [row["accuracy"] for row in found if "accuracy" in row] == [0.5, 1.5]
    # A row with a number of its own is open until the next one.
    assert [row["rnnlens/step"] for row in found if "rnnlens/probe/loss" in row] == [100] * (1 if numbered else 2)


@pytest.mark.parametrize("given", ["run", "name", "active"])
def test_mlflow(tmp_path, monkeypatch, given):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    run = None if given == "name" else mlflow.start_run()
    fill(run if given == "run" else "mlflow", tmp_path)
    assert (mlflow.active_run() is None) == (given == "name")
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
    run, found = rl.open(tmp_path / "a.zarr"), events(tmp_path / "events")
    logged = found.Scalars("rnnlens/batch/lstm/reach")
    assert [e.step for e in logged] == run.steps.values.tolist()
    np.testing.assert_allclose([e.value for e in logged], run["lstm"].reach, rtol=1e-6)


def test_lightnings_own_logger(tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    fill(logger, tmp_path)
    logger.experiment.close()
    assert "rnnlens/probe/loss" in events(tmp_path).Tags()["scalars"]


class Mine:
    def __init__(self):
        self.told = []

    def write(self, record):
        self.told.append(record.step)

    def close(self, reason):
        self.told.append(reason)


def test_any_object_that_takes_records():
    mine = Mine()
    fill(mine, "")
    assert mine.told == [0, 50, 100, "finished"]


@pytest.mark.parametrize("wrong", [3, [torch.nn.Linear(1, 1)], "tensorbord"])
def test_what_is_no_logger(tmp_path, wrong):
    with pytest.raises(InputError, match="logger"):
        sinks(wrong, tmp_path)
