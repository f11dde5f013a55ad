"""Later traces are certified on some of the samples, and on all samples if those show a difference."""

import numpy as np
import pytest
from specimen import SAMPLES, STEPS
from tested_adapter import on_keras, specimens

import rnnlens as rl
from rnnlens.verbs import recurrent_layers, traced_layers

pytestmark = [pytest.mark.check, *on_keras(pytest.mark.one_engine("torch", "tf_keras"))]

FIRST, *_ = specimens.INDEPENDENT.values()


@pytest.fixture
def specimen():
    return FIRST()


@pytest.mark.parametrize("name", specimens.INDEPENDENT)
def test_later_traces_compare_other_samples_each_time_and_give_the_same_numbers(name):
    specimen = specimens.INDEPENDENT[name]()
    first, *later = (specimen.trace() for _ in range(6))
    assert (first.certificate.state, first.certificate.samples) == ("passed", "")
    assert [trace.certificate.state for trace in later] == ["passed"] * 5
    assert len({trace.certificate.samples for trace in later}) > 2
    assert all(trace.certificate.samples.endswith(f"of {SAMPLES}") for trace in later)
    for trace in later:
        assert "reference weight gradients" in {check.name for check in trace.certificate.checks}
        for layer in first:
            for key, values in first[layer].dataset.data_vars.items():
                np.testing.assert_array_equal(trace[layer].dataset[key].values, values.values)


def test_a_model_that_mixes_samples_is_certified_with_all_of_them():
    mixing = specimens.mixing()
    certificates = [mixing.trace().certificate for _ in range(3)]
    assert [(certificate.state, certificate.samples) for certificate in certificates] == [("passed", "")] * 3


def test_all_samples_are_compared_where_it_is_asked_for_and_in_small_batches(specimen):
    with rl.options(certify="always"):
        assert [specimen.trace().certificate.samples for _ in range(3)] == [""] * 3
    assert [specimen.trace(15).certificate.samples for _ in range(3)] == [""] * 3


def test_other_shapes_layers_and_losses_begin_with_all_samples(specimen):
    trace = specimen.trace()
    assert specimen.trace(layers=[list(trace)[-1]]).certificate.samples == ""
    assert specimen.trace(loss=specimen.other_loss).certificate.samples == ""
    assert specimen.trace(steps=STEPS - 2).certificate.samples == ""
    assert specimen.trace().certificate.samples != ""


@pytest.mark.filterwarnings("ignore::rnnlens.errors.SelfCheckWarning")
@pytest.mark.parametrize("quantity", ["input_grad", "gate_grad"])
def test_a_fault_in_a_later_trace_is_found(monkeypatch, quantity, specimen):
    specimen.trace()
    adjoint = recurrent_layers.adjoint

    def wrong_adjoint(*args, **options):
        result = adjoint(*args, **options)
        getattr(result, quantity)[...] *= 1.01
        return result

    monkeypatch.setattr(recurrent_layers, "adjoint", wrong_adjoint)
    certificate = specimen.trace().certificate
    assert (certificate.state, certificate.samples) == ("failed", "")


@pytest.mark.filterwarnings("ignore::rnnlens.errors.SelfCheckWarning")
def test_a_fault_in_the_labels_of_a_later_trace_is_found(monkeypatch, specimen):
    specimen.trace()
    labelled_layer = traced_layers.labelled_layer

    def wrongly_labelled_layer(arrays, **options):
        return labelled_layer({**arrays, "gate_grad": np.roll(arrays["gate_grad"], 1, axis=-2)}, **options)

    monkeypatch.setattr(traced_layers, "labelled_layer", wrongly_labelled_layer)
    assert specimen.trace().certificate.state == "failed"


def test_the_samples_compared_are_in_the_sentence_and_survive_a_file(tmp_path, specimen):
    specimen.trace()
    trace = specimen.trace()
    assert trace.certificate.samples
    assert f" on {trace.certificate.samples}, and on all at an earlier call: " in trace.certificate.sentence
    trace.save(tmp_path / "trace.nc")
    assert rl.open(tmp_path / "trace.nc").certificate == trace.certificate
