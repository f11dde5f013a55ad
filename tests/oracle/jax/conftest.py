import jax
import pytest


@pytest.fixture(autouse=True)
def double_precision():
    """Compute in float64, so that a difference above rounding is a mistake."""
    with jax.enable_x64(True):
        yield
