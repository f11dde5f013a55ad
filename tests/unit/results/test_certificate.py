import rnnlens as rl
from rnnlens.results.checks import Certificate, Check
from rnnlens.results.trace import Trace

PASSED, FAILED = Check("reference loss", "", 1e-8, 1e-5), Check("reference weight gradients", "lstm", 0.01, 1e-5)


def test_passes_only_where_something_was_compared_and_all_of_it_agrees():
    assert Certificate.of("jax", [PASSED]).state == "passed"
    assert Certificate.of("jax", [PASSED, FAILED]).state == "failed"
    assert Certificate.of("jax", [Check("reference loss", "", float("nan"), 1e-5)]).state == "failed"
    assert Certificate.of("jax", []).state == "could not"


def test_says_what_rests_on_what_and_what_is_open():
    sentence = Certificate.of(
        "jax", [PASSED], certified=("loss",), resting=("hidden_grad",), uncertified=("masks",)
    ).sentence
    assert sentence.startswith("certified against jax: worst 1e-08 (loss)")
    assert "hidden_grad rest on them" in sentence
    assert "not certified: masks" in sentence
    assert "NOT certified against jax: 1 of 2" in Certificate.of("jax", [PASSED, FAILED]).sentence


def test_travels_with_a_result(trace, tmp_path):
    certificate = Certificate.of("torch", [PASSED, FAILED], certified=("loss",))
    result = Trace(trace.tree, checks=trace.checks, certificate=certificate)
    result.save(tmp_path / "run.nc")
    loaded = rl.open(tmp_path / "run.nc")
    assert loaded.certificate == certificate
    assert loaded.checks[-2:] == [PASSED, FAILED]
    for text in (repr(loaded), loaded._repr_html_()):
        assert certificate.sentence in text
        assert "lstm: weight gradients differ" in text
