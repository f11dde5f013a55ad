"""A framework whose version is too old is refused by name, before its adapter is imported."""

import sys
from types import SimpleNamespace

import pytest

from rnnlens.adapters import registry
from rnnlens.errors import UnsupportedError


@pytest.mark.parametrize(("name", "version"), [("keras", "3.9.2"), ("torch", "2.3.1+cpu"), ("tf_keras", "2.15.0")])
def test_an_old_framework_is_refused(monkeypatch, name, version):
    engine = SimpleNamespace(backend=lambda: "torch")
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=version, backend=engine))
    with pytest.raises(UnsupportedError, match=f"This version of {name} is too old") as caught:
        registry.refuse_old(name)
    assert version in str(caught.value)
    assert "pip install" in str(caught.value)


def test_old_jax_under_keras_is_refused(monkeypatch):
    engine = SimpleNamespace(backend=lambda: "jax")
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__="3.15.1", backend=engine))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version__="0.6.2"))
    with pytest.raises(UnsupportedError, match=r"pip install \"jax>="):
        registry.refuse_old("keras")


@pytest.mark.parametrize("version", ["3.10.0", "3.15.1", "4.0.0", "", "nightly"])
def test_others_are_not(monkeypatch, version):
    engine = SimpleNamespace(backend=lambda: "torch")
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__=version, backend=engine))
    registry.refuse_old("keras")
