"""Cost of a verb on a plain model: forward passes of the model, and files and functions of rnnlens entered."""

import sys
import threading

import pytest
import torch
import xarray as xr
from own_files import package_path
from torch import nn

import rnnlens as rl
from rnnlens.adapters.torch import TorchAdapter
from rnnlens.diagnosis.experiment import MOST_CAPTURED
from rnnlens.verbs import recurrent_layers

#: Code objects within a function, which are not counted as functions.
INNER_CODE = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")

forwards = 0


class Tagger(nn.Module):
    """LSTM and linear head; counts its forward passes in a global, since rnnlens restores attributes of the model."""

    def __init__(self, head_input="every step"):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)
        self.read = head_input

    def forward(self, x):
        global forwards
        forwards += 1
        output, (hidden, _) = self.lstm(x)
        return self.head(HEAD_INPUTS[self.read](output, hidden))


#: Tensors that the head can be applied to.
HEAD_INPUTS = {
    "every step": lambda output, hidden: output,
    "last step": lambda output, hidden: output[:, -1],
    "last step, all units": lambda output, hidden: output[:, -1, :],
    "final state": lambda output, hidden: hidden[-1],
}


VERBS = {
    "trace": lambda m, x, y: rl.trace(m, x, y, loss=nn.functional.mse_loss),
    "gradients by input": lambda m, x, y: rl.gradients(m, x, y, loss=nn.functional.mse_loss, wrt="input"),
    "gradients by weights": lambda m, x, y: rl.gradients(m, x, y, loss=nn.functional.mse_loss),
    "gradients by states": lambda m, x, y: rl.gradients(m, x, y, loss=nn.functional.mse_loss, wrt="lstm.hidden"),
    "weights": lambda m, x, y: rl.weights(m, x, y, loss=nn.functional.mse_loss),
    "jacobian": lambda m, x, y: rl.jacobian(m, x),
    "jacobian by states": lambda m, x, y: rl.jacobian(m, x, wrt="lstm.hidden"),
}
#: Largest number of files entered without a certificate; below, of functions.
MOST_FILES = {"jacobian": 45, "trace": 40}
MOST_FUNCTIONS = {"jacobian": 300, "trace": 250}


@pytest.fixture(params=HEAD_INPUTS)
def arguments(request):
    torch.manual_seed(0)
    target = torch.randn(4, 10, 2)
    return Tagger(request.param), torch.randn(4, 10, 3), target if request.param == "every step" else target[:, 0]


def count_forwards(run):
    global forwards
    forwards = 0
    run()
    return forwards


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("certify", "expected"), [("never", 1), ("always", 2)])
def test_one_forward_pass_and_one_more_for_the_certificate(verb, certify, expected, arguments):
    with rl.options(certify=certify):
        first = count_forwards(lambda: VERBS[verb](*arguments))
        later = count_forwards(lambda: VERBS[verb](*arguments))
    assert (first, later) == (expected, expected)


@pytest.fixture
def only_torch(monkeypatch):
    """Hide what earlier tests left in the process and a call looks at: other frameworks and threads."""
    for name in ("jax", "optree"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("verb", MOST_FILES)
def test_files_and_functions_entered(verb, arguments):
    files, functions = set(), set()

    def profile(frame, event, argument):
        code = frame.f_code
        if event == "call" and package_path(code.co_filename) is not None:
            files.add(code.co_filename)
            if code.co_name not in INNER_CODE:
                functions.add(code)

    with rl.options(certify="never"):
        VERBS[verb](*arguments)
        sys.setprofile(profile)
        try:
            VERBS[verb](*arguments)
        finally:
            sys.setprofile(None)
    assert len(files) <= MOST_FILES[verb], sorted(files)
    assert len(functions) <= MOST_FUNCTIONS[verb]


class Rewired(Tagger):
    """Tagger that returns steps first once ``flip`` is set: axes are swapped; shapes and weights remain."""

    flip = False

    def forward(self, x):
        y = super().forward(x)
        return y.transpose(0, 1) if self.flip else y * 1.0


def test_what_was_found_is_forgotten_when_the_model_changes():
    model, x = Rewired(), torch.randn(4, 4, 3)
    question = {"of": "output", "reduce": "sum", "wrt": "head.output", "at": {"sample": 0, "time": 3}}
    gradients = rl.gradients(model, x, **question).values
    assert gradients[0, 3].all()
    model.flip = True
    assert (rl.gradients(model, x, **question).values != 0).any(-1).argmax() == 3
    handle = model.lstm.register_forward_hook(lambda module, args, output: None)
    assert count_forwards(lambda: rl.gradients(model, x, **question)) > 1
    handle.remove()


def test_what_was_found_keeps_no_model_alive():
    import gc
    import weakref

    model, x = Tagger(), torch.randn(4, 4, 3)
    rl.gradients(model, x, of="output", reduce="sum", wrt="input")
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("verb", ["trace", "gradients by weights", "weights"])
def test_a_result_makes_datasets_when_they_are_asked_for(verb, monkeypatch):
    datasets = []
    init = xr.Dataset.__init__
    monkeypatch.setattr(
        xr.Dataset, "__init__", lambda self, *args, **kwargs: datasets.append(init(self, *args, **kwargs))
    )
    result = VERBS[verb](Tagger(), torch.randn(4, 10, 3), torch.randn(4, 10, 2))
    assert not datasets
    assert set(result.dataset("lstm").data_vars)
    assert datasets


def test_a_diagnosis_evaluates_the_loss_in_one_pass():
    torch.manual_seed(0)
    model, x = Tagger("last step"), torch.randn(64, 12, 3)
    evaluated = []

    def loss(output, target):
        evaluated.append(len(output))
        return nn.functional.mse_loss(output, target)

    rl.diagnose(model, x, torch.randn(64, 2), loss=loss)
    assert len(evaluated) == 1


def test_a_diagnosis_captures_the_states_once(monkeypatch):
    torch.manual_seed(0)
    model, x, captured = Tagger("last step"), torch.randn(64, 12, 3), []
    run = TorchAdapter.run

    def counted(model, batch, taps):
        captured.append(taps.record == "states" and len(batch.x) == MOST_CAPTURED)
        return run(model, batch, taps)

    monkeypatch.setattr(TorchAdapter, "run", staticmethod(counted))
    rl.diagnose(model, x, torch.randn(64, 2))
    assert sum(captured) == 1


def test_tensors_of_one_layer_share_a_sweep(monkeypatch):
    sweeps, adjoint = [], recurrent_layers.adjoint
    monkeypatch.setattr(recurrent_layers, "adjoint", lambda *a, **k: sweeps.append(a) or adjoint(*a, **k))
    wrt = ["lstm.hidden", "lstm.cell", "lstm.gates", "lstm.input"]
    rl.gradients(Tagger(), torch.randn(4, 10, 3), of="output", reduce="sum", wrt=wrt)
    assert len(sweeps) == 1
