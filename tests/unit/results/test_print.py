"""What ``print`` shows of results: no line is wider than the terminal, and large arrays are summarised."""

import numpy as np
import pytest
import xarray as xr

from rnnlens.results.array import ResultArray, aligned

ATTRIBUTES = {"long_name": "gradient of loss", "provenance": "engine: torch 2.13.0; dtype: float32; rnnlens: 0.1.0"}


def array(shape, **attributes):
    values = np.linspace(-1.0, 2.0, int(np.prod(shape))).reshape(shape)
    return ResultArray(xr.DataArray(values, dims=("sample", "time"), attrs={**ATTRIBUTES, **attributes}))


def test_a_large_array_is_summarised():
    masked = array((40, 5)).assign_coords(mask=(("sample", "time"), np.arange(200).reshape(40, 5) % 4 > 0))
    assert str(masked).splitlines() == [
        "gradient of loss",
        "  dims         sample: 40, time: 5",
        "  values       -1 to 2, norm 14.2, float64",
        "  masked       25 % of sample, time",
        "  certificate  not certified in this call (rl.options(certify=...))",
        "  from         torch 2.13.0, float32, rnnlens 0.1.0",
    ]


def test_a_small_array_shows_its_numbers():
    assert "0.5" in str(array((3, 3)).round(3))
    assert str(array((3, 3))) == repr(array((3, 3)))


@pytest.mark.parametrize("columns", [40, 100])
def test_no_line_is_wider_than_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = aligned("head", [("certificate", "word " * 60), ("from", "short")]).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[2].startswith(" " * 15 + "word")
    assert lines[-1] == "  from         short"
