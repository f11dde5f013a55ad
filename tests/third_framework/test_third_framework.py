"""An adapter is all that every verb needs for a framework unknown to rnnlens.

``tiny/`` is an installable package: a framework, its adapter, and the entry point that names the adapter. Results are
compared with derivatives by complex steps through plain loops, computed without rnnlens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import rnnlens as rl
from rnnlens.adapters.protocol import Batch
from rnnlens.adapters.registry import adapter_for
from rnnlens.errors import LayerNotFoundError, ModelError
from rnnlens.layout import Layout
from rnnlens.testing import check_adapter

PACKAGE_FOLDER = Path(__file__).parent / "tiny"
SAMPLES, STEPS, FEATURES, UNITS, OUTPUTS = 3, 5, 2, 4, 2
TINY_STEP = 1e-30


@pytest.fixture(autouse=True)
def installed_package(monkeypatch):
    """Put the package on the Python path, as ``pip install tiny`` would; nothing is registered by hand."""
    monkeypatch.syspath_prepend(str(PACKAGE_FOLDER))


@pytest.fixture
def model():
    import tiny

    return tiny.Elman(FEATURES, UNITS, OUTPUTS)


@pytest.fixture
def data():
    draw = np.random.default_rng(1).normal
    return draw(size=(SAMPLES, STEPS, FEATURES)), draw(size=(SAMPLES, STEPS, OUTPUTS))


def test_without_place_gradients_of_weights_are_not_certified(model, data, monkeypatch):
    """If the adapter gives no location of weights, the certificate lists their gradients as not compared."""
    import tiny_rnnlens

    x, y = data
    monkeypatch.setattr(tiny_rnnlens.TinyFacts, "weight_location", lambda *_: None)
    trace = rl.trace(model, x, y)
    assert "gradients at inputs" in trace.certificate.certified
    assert "gradients at inputs and weights" not in trace.certificate.certified
    for result in (rl.weights(model, x, y), rl.gradients(model, x, y, wrt="weights")):
        assert "gradients of weights" not in result.certificate.certified
        for layer in ("rnn", "head"):
            assert any(f"weights of {layer}, which the adapter" in name for name in result.certificate.uncertified)
    certificate = rl.gradients(model, x, y, wrt="rnn.hidden").certificate
    assert "rnn.hidden" not in certificate.resting
    assert any("weights of rnn" in name for name in certificate.uncertified)


def forward(w, x, perturbation=0.0, perturbed_step=None):
    """Return outputs (sample, time, output) of the network with the hidden state perturbed at one step."""
    h, outputs = np.zeros((len(x), UNITS)), []
    for t in range(STEPS):
        h = np.tanh(x[:, t] @ w["W"] + h @ w["U"] + w["b"]) + (perturbation if t == perturbed_step else 0.0)
        outputs.append(h @ w["V"])
    return np.stack(outputs, 1)


def loss(w, x, y, **perturbation):
    return ((forward(w, x, **perturbation) - y) ** 2).mean()


def derivative(function, shape):
    """Return the derivative by each entry (*shape, *output) by the complex step (Squire, Trapp 1998)."""
    units = np.eye(int(np.prod(shape))).reshape(-1, *shape)
    slopes = np.array([np.imag(function(1j * TINY_STEP * unit)) / TINY_STEP for unit in units])
    return slopes.reshape(*shape, *slopes.shape[1:])


def test_its_folder_is_small():
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE_FOLDER.glob("*.py")) <= 150


def test_it_holds_the_contract(model, data):
    from tiny_rnnlens import adapter

    assert len(check_adapter(adapter, model, Batch(*data), rtol=1e-10)) == 7


def test_layers(model):
    (row,) = rl.layers(model)
    assert (row.name, row.cell, row.units) == ("rnn", "simple_rnn", UNITS)


def test_trace(model, data):
    x, y = data
    trace = rl.trace(model, x, y)
    expected = [
        derivative(lambda d, t=t: loss(model.weights, x, y, perturbation=d, perturbed_step=t), (SAMPLES, UNITS))
        for t in range(STEPS)
    ]
    np.testing.assert_allclose(trace["rnn"].hidden_grad, np.stack(expected, 1), rtol=1e-10)
    input_grad = derivative(lambda d: loss(model.weights, x + d, y), x.shape)
    np.testing.assert_allclose(trace["rnn"].input_grad, input_grad, rtol=1e-10)
    assert set(trace["rnn"].dataset) >= {"hidden", "gates", "gate_grad", "output_grad", "initial_state_grad"}
    assert trace.certificate.state == "passed"


def test_a_part_of_a_trace(model, data):
    trace = rl.trace(model, *data, quantities=["hidden"])
    assert list(trace["rnn"].dataset) == ["hidden"]
    assert trace.loss == pytest.approx(loss(model.weights, *data), rel=1e-12)


def test_trace_of_a_layer_that_is_not_recurrent(model, data):
    trace = rl.trace(model, *data, layers=["head"])
    output_grad = 2 * (forward(model.weights, data[0]) - data[1]) / data[1].size
    np.testing.assert_allclose(trace["head"].output_grad, output_grad, rtol=1e-10)


@pytest.mark.parametrize("batch_size", [None, 1])
def test_gradients(model, data, batch_size):
    x, y = data
    g = rl.gradients(model, x, y, wrt="weights", batch_size=batch_size)
    for layer, key, name in (("rnn", "kernel", "W"), ("rnn", "recurrent_kernel", "U"), ("head", "kernel", "V")):
        weight_grad = derivative(
            lambda d, n=name: loss({**model.weights, n: model.weights[n] + d}, x, y), model.weights[name].shape
        )
        np.testing.assert_allclose(np.asarray(g[layer][key]).reshape(weight_grad.shape), weight_grad, rtol=1e-10)
    assert g.certificate.state == "passed"


def test_gradients_of_a_state_and_of_a_function(model, data):
    x, _ = data
    g = rl.gradients(model, x, of="rnn.hidden", at={"time": 2}, reduce="sum", wrt="input")
    assert not np.any(g.sel(time=slice(3, None)))
    assert np.all(np.any(g.sel(time=slice(None, 2)) != 0, axis=2))
    g = rl.gradients(model, x, of=lambda output: (output**2).sum(), wrt="input")
    input_grad = derivative(lambda d: (forward(model.weights, x + d) ** 2).sum(), x.shape)
    np.testing.assert_allclose(g, input_grad, rtol=1e-10)


def test_jacobian(model, data):
    x, _ = data
    with rl.options(certify="always"):
        jacobian = rl.jacobian(model, x)
    full = derivative(lambda d: forward(model.weights, x + d), x.shape)  # (sample, time, feature, sample, time, output)
    np.testing.assert_allclose(jacobian, np.einsum("stfsTo->sTotf", full), rtol=1e-9, atol=1e-15)
    assert jacobian.attrs["certificate"].startswith("certified against tiny")


def test_weights(model, data):
    weights = rl.weights(model, *data, by_time=True)
    np.testing.assert_array_equal(np.squeeze(weights["rnn"].kernel), model.weights["W"])
    w, (x, y) = model.weights, data
    weight_grad = derivative(lambda d: loss({**w, "U": w["U"] + d}, x, y), w["U"].shape)
    np.testing.assert_allclose(np.squeeze(weights["rnn"].recurrent_kernel_grad.sum("time")), weight_grad, rtol=1e-10)
    assert weights.certificate.state == "passed"


def test_diagnose(model):
    draw = np.random.default_rng(2).normal
    diagnosis = rl.diagnose(model, draw(size=(160, 8, FEATURES)), draw(size=(160, 8, OUTPUTS)), baseline="init")
    assert "NO_SKILL" in diagnosis.codes  # the target is noise
    assert {"rnn", "model"} <= set(diagnosis)
    assert "Memory in use unknown: no better than a constant prediction" in str(diagnosis)


def test_a_gradient_that_does_not_exist_has_a_reason(model, data):
    g = rl.gradients(model, data[0], of="rnn.output", reduce="sum", wrt=["head/kernel", "rnn/kernel"])
    assert list(g.disconnected) == ["head/kernel"]
    assert g.disconnected["head/kernel"].code == "unknown"  # finding it needs an adapter that can perturb the model


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_files(model, data, tmp_path, suffix):
    trace = rl.trace(model, *data)
    trace.save(tmp_path / f"trace.{suffix}")
    opened = rl.open(tmp_path / f"trace.{suffix}")
    xr.testing.assert_identical(opened["rnn"].dataset, trace["rnn"].dataset)


def test_figures(model, data):
    trace = rl.trace(model, *data)
    for draw in (rl.plot.curves, rl.plot.heatmap, rl.plot.histogram):
        assert len(draw(trace["rnn"].hidden_grad).figure.axes)
    assert len(rl.plot.weights_heatmap(rl.weights(model)["rnn"]).figure.axes)


def test_the_certificate_sees_an_adapter_that_is_wrong(model, data, monkeypatch):
    import tiny_rnnlens

    class WrongRun(tiny_rnnlens.TinyRun):
        def pull(self, cotangents):
            return {port: None if g is None else g * 1.01 for port, g in super().pull(cotangents).items()}

    monkeypatch.setattr(tiny_rnnlens, "TinyRun", WrongRun)
    with pytest.warns(rl.errors.SelfCheckWarning):
        assert rl.trace(model, *data).certificate.state == "failed"


def test_what_it_has_not_is_refused_by_name(model, data):
    with pytest.raises(LayerNotFoundError, match="'lstm'"):
        rl.trace(model, *data, layers=["lstm"])
    with pytest.raises(LayerNotFoundError, match="no state named 'cell'"):
        rl.gradients(model, *data, wrt="rnn.cell")


def test_an_optimizer_that_nobody_reads_is_refused_by_name(model, data):
    facts = adapter_for(model).facts(model)
    assert facts.optimizer_step(None, {}) is None
    with pytest.raises(rl.errors.UnsupportedError, match=r"Optimizers .* are not read[\s\S]*tiny[\s\S]*optimizer= out"):
        facts.optimizer_step("adam", {})


def test_the_model_is_left_as_found(model, data):
    before = {name: value.copy() for name, value in model.weights.items()}
    rl.trace(model, *data)
    rl.gradients(model, *data, wrt="weights")
    assert all(np.array_equal(value, before[name]) for name, value in model.weights.items())


def test_a_model_of_nobody_is_refused():
    with pytest.raises(ModelError, match="not a model of a supported framework"):
        rl.layers(object())


def test_the_framework_says_how_its_tensors_lie(model, data, monkeypatch):
    """The layout that the adapter returns, here with steps first, sets the dimensions of a result."""
    import tiny_rnnlens

    def steps_first(port, shape, *, integer=False):
        return Layout.of_names(("time", "sample", "feature")[: len(shape)])

    monkeypatch.setattr(tiny_rnnlens.adapter, "layout", steps_first)
    assert rl.gradients(model, *data, wrt="input").dims == ("sample", "time", "feature")
    assert rl.gradients(model, *data, wrt="input").shape == (STEPS, SAMPLES, FEATURES)


def test_an_adapter_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    metadata_folder = tmp_path / "broken-1.0.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata_folder / "entry_points.txt").write_text("[rnnlens.adapters]\nbroken = no_such_module:adapter\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match="'broken' of another package cannot be loaded"):
        rl.layers(object())


def test_the_first_number_that_is_not_finite(model, data):
    x, y = data
    assert not rl.find_nonfinite(model, x, y)
    x = x.copy()
    x[1, 3, 0] = np.nan
    finding = rl.find_nonfinite(model, x, y)
    assert (finding.phase, finding.sample, finding.step) == ("data", 1, 3)
    model.weights["U"][2, 1] = np.inf
    finding = rl.find_nonfinite(model, data[0], y)
    assert (finding.phase, finding.layer) == ("weights", "rnn")
