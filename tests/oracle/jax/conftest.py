import jax
import pytest


@pytest.fixture(autouse=True)
def double_precision(request):
    """Compute in float64, so that a difference above rounding is a mistake; else in the ``precision`` of the test."""
    is_single = "precision" in request.fixturenames and request.getfixturevalue("precision") == "float32"
    with jax.enable_x64(not is_single):
        yield
