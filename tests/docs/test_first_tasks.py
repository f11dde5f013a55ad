"""Tasks of a new user, each done as its page shows, but on another model than that of the page."""

import re
import subprocess
import sys
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

mse = nn.functional.mse_loss


class Reader(nn.Module):
    """Two-layer LSTM with a linear head on the last step."""

    def __init__(self, features=2, units=8, layers=2):
        super().__init__()
        self.lstm = nn.LSTM(features, units, num_layers=layers, batch_first=True)
        self.head = nn.Linear(units, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


@pytest.fixture(autouse=True)
def seeds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    keras.utils.set_random_seed(0)


def is_picture(path):
    return path.stat().st_size > 5000


def test_vanishing_in_two_layers_of_an_lstm(tmp_path):
    """docs/how-to/vanishing-gradients.md"""
    model, x, y = Reader(), torch.randn(16, 60, 2), torch.randn(16, 1)
    trace = rl.trace(model, x, y, loss=mse)
    assert list(trace) == ["lstm[0]", "lstm[1]"]
    for name in trace:
        size = np.sqrt((trace[name].hidden_grad ** 2).sum("unit")).mean("sample")
        assert float(size[0] / size[-1]) < 1e-3, "an untrained LSTM forgets within 60 steps"
    rl.plot.gradient_flow(trace).save("flow.png")
    assert is_picture(tmp_path / "flow.png")


def test_a_padded_keras_classifier():
    """docs/how-to/token-ids.md"""
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(1, 20, (32, 10)), rng.integers(0, 3, 32)
    ids[::2, 6:] = 0
    model = keras.Sequential(
        [
            keras.layers.Embedding(20, 4, mask_zero=True, name="words"),
            keras.layers.LSTM(6, name="lstm"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(ids, labels, verbose=0)
    gradient = rl.gradients(model, ids, labels, wrt="words.output")
    assert abs(gradient.values[ids == 0]).max() == 0
    assert abs(gradient.values[ids > 0]).min(axis=-1).max() > 0
    assert gradient.attrs["certificate"].startswith("certified")


def test_which_inputs_move_output_step_10():
    """docs/how-to/which-input-step-matters.md"""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.gru(x)[0])

    model, x = Tagger(), torch.randn(3, 20, 3)
    jacobian = rl.jacobian(model, x, at={"out_time": [10]})
    assert jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
    reference = torch.autograd.functional.jacobian(lambda sample: model(sample[None])[0, 10], x[0])
    np.testing.assert_allclose(jacobian[0, 0], reference, atol=1e-6)


def test_gates_over_a_sentence(tmp_path):
    """docs/gallery.md, two units over a text"""
    text = "a bracket (opens and) closes"
    model, x = Reader(1, 6, 1), torch.tensor([[float(ord(letter)) / 100] for letter in text])[None]
    lstm = rl.trace(model, x)["lstm"]
    rl.plot.unit_over_text(lstm.gates, text, gate="forget", units=[0, 3]).save("gates.png")
    assert lstm.gates.sel(gate="forget").shape == (1, len(text), 6)
    assert is_picture(tmp_path / "gates.png")


def test_a_fit_without_input_is_followed():
    """docs/following-training.md"""
    model = keras.Sequential([keras.layers.LSTM(5, name="lstm"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x, y = np.random.default_rng(0).normal(size=(24, 7, 2)).astype("float32"), np.zeros((24, 1), "float32")
    watch = rl.keras.Watch("run.zarr", probe=(x[:8], y[:8]), every=2)
    history = model.fit(x, y, batch_size=4, verbose=0, callbacks=[watch])
    run = rl.open("run.zarr")
    assert len(history.history["loss"]) == 1
    assert run.ended == "finished"
    assert run["lstm"].adjoint_profile.dims == ("step", "time")


def test_the_first_number_that_is_not_finite():
    """docs/how-to/first-nan.md"""
    model, x, y = Reader(), torch.randn(6, 9, 2), torch.randn(6, 1)
    assert not rl.find_nonfinite(model, x, y, loss=mse)
    x[4, 3, 1] = torch.nan
    fault = rl.find_nonfinite(model, x, y, loss=mse)
    assert (fault.phase, fault.sample, fault.step) == ("data", 4, 3)


def test_a_leaky_network_of_ones_own():
    """docs/how-to/rate-rnn.md"""

    class Leaky(nn.Module):
        def __init__(self, leak=0.3):
            super().__init__()
            self.leak, self.into, self.back = leak, nn.Linear(2, 5), nn.Linear(5, 5, bias=False)
            self.head = nn.Linear(5, 1)

        def step(self, x, h):
            return (1 - self.leak) * h + self.leak * torch.tanh(self.into(x) + self.back(h))

        def forward(self, x):
            h = x.new_zeros(len(x), 5)
            for t in range(x.shape[1]):
                h = rl.torch.step(self.step, x[:, t], h, name="leaky")
            return self.head(h)

    model, x, y = Leaky(), torch.randn(4, 12, 2), torch.randn(4, 1)
    trace = rl.trace(model, x, y, loss=mse)
    assert trace["leaky"].hidden_grad.shape == (4, 12, 5)
    assert trace.certificate.state == "passed"


def test_a_report_to_send(tmp_path):
    """docs/report.md"""
    model, x = Reader(layers=1), torch.randn(40, 12, 2)
    path = rl.report(model, x, x[:, 3, :1], path="report.html", loss=mse)
    assert path == Path("report.html")
    assert not re.search(r"(src|href)=[\"']?http", (tmp_path / path).read_text())


@pytest.mark.full  # two new processes; tests/unit/cli runs both commands in one
def test_the_command_line(tmp_path):
    """docs/command-line.md"""
    model = keras.Sequential([keras.Input((8, 2)), keras.layers.GRU(4, name="gru"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.save("model.keras")
    np.savez("data.npz", x=np.ones((4, 8, 2), "float32"), y=np.ones((4, 1), "float32"))
    for arguments, column in (
        (["layers", "model.keras"], "gru"),
        (["trace", "model.keras", "data.npz"], "hidden_grad"),
    ):
        command = [sys.executable, "-m", "rnnlens.cli", *arguments]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert completed.returncode == 0, completed.stderr
        assert column in completed.stdout or "GRU" in completed.stdout


def test_a_notebook():
    """In IPython a result has a folding HTML table, and a figure may be the last expression of a cell."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        shell.user_ns.update(rl=rl, model=Reader(layers=1), x=torch.randn(4, 10, 2), y=torch.randn(4, 1), loss=mse)
        assert shell.run_cell("trace = rl.trace(model, x, y, loss=loss)").success
        result = shell.run_cell("trace").result
        assert "<details" in result._repr_html_()
        figure = shell.run_cell("rl.plot.gradient_flow(trace)").result
        assert figure[0].figure.axes
        assert shell.run_cell("trace['lstm'].hidden_grad").success
    finally:
        InteractiveShell.clear_instance()
        plt.close("all")


# Lightning 2.6 uses a function of torch's pytrees that torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_lightning_with_tensorboard(tmp_path):
    """A Lightning training writes records both to the run and to the user's TensorBoard writer."""
    import lightning.pytorch as lightning
    from torch.utils.tensorboard import SummaryWriter

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Reader()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return mse(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    x, y = torch.randn(16, 12, 2), torch.randn(16, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    writer = SummaryWriter("runs/board")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    watch = rl.lightning.Watch("runs/a.zarr", every=2, loggers=[writer])
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[watch], enable_model_summary=False, log_every_n_steps=1, **quiet
    )
    trainer.fit(Module(), loader)
    writer.close()
    assert "net.lstm[1]" in rl.open("runs/a.zarr")
    assert list((tmp_path / "runs" / "board").iterdir())


CELLS = (
    "import numpy as np, torch, rnnlens as rl",
    "net = torch.nn.GRU(2, 4, batch_first=True)\n"
    "trace = rl.trace(net, torch.zeros(3, 8, 2), loss=lambda out: out[0].sum())\n"
    "trace",
    'trace["gru"].hidden_grad',
    "rl.plot.gradient_flow(trace)",
)


@pytest.mark.full
def test_a_notebook_in_a_kernel_of_its_own(tmp_path):
    """how-to/notebook.md: in a Jupyter kernel, results and figures are shown as the last expression of a cell."""
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbformat.write(notebook, "first.ipynb")
    program = (
        "import nbclient, nbformat; n = nbformat.read('first.ipynb', 4);"
        "nbclient.NotebookClient(n, timeout=300, kernel_name='python3').execute(); nbformat.write(n, 'done.ipynb')"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    cells = nbformat.read("done.ipynb", 4).cells
    displays = [cell.outputs[-1].data if cell.outputs else {} for cell in cells]
    assert "<iframe title='rnnlens: Trace'" in displays[1]["text/html"]
    assert len(displays[1]["image/png"]) > 10_000
    assert "total gradient" in displays[2]["text/html"]
    assert len(displays[3]["image/png"]) > 10_000
