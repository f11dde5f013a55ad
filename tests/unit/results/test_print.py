"""Printed results: no line is wider than the terminal, and large arrays are summarised."""

import numpy as np
import pytest
import xarray as xr

from rnnlens.results.array import LabelledArray, aligned_text, record_attrs

ATTRIBUTES = {
    "long_name": "gradient of loss",
    "provenance": "engine: torch 2.13.0; dtype: float32; rnnlens: 0.1.0",
    **record_attrs([]),
}


def make_array(shape, **attributes):
    values = np.linspace(-1.0, 2.0, int(np.prod(shape))).reshape(shape)
    return LabelledArray(xr.DataArray(values, dims=("sample", "time"), attrs={**ATTRIBUTES, **attributes}))


def test_a_large_array_is_summarised():
    masked = make_array((40, 5)).assign_coords(mask=(("sample", "time"), np.arange(200).reshape(40, 5) % 4 > 0))
    assert str(masked).splitlines() == [
        "gradient of loss",
        "  dims         sample: 40, time: 5",
        "  values       -1 to 2, norm 14.2, float64",
        "  masked       25 % of sample, time",
        "  certificate  not certified in this call (rl.options(certify=...))",
        "  from         torch 2.13.0, float32, rnnlens 0.1.0",
    ]


def test_a_small_array_shows_its_numbers():
    lines = str(make_array((2, 2)).round(3)).splitlines()
    assert lines[0] == "gradient of loss"
    assert not any("definition" in line for line in lines)
    assert str(make_array((2, 2), definition="dL/dh_t")).splitlines()[1] == "  definition   dL/dh_t"
    assert lines[-2:] == ["[[-1.  0.]", " [ 1.  2.]]"]


@pytest.mark.parametrize(
    "change", [lambda array: array.chunk(), lambda array: array[:0], lambda array: array.drop_attrs()]
)
def test_what_is_lazy_empty_or_without_origin_is_shown_as_xarray_shows_it(change):
    assert repr(change(make_array((40, 5)))).startswith("<xarray.LabelledArray")


def test_a_variable_of_a_layer_folds_its_numbers_in_a_notebook(trace):
    hidden = trace["zulu/gru"].hidden
    assert type(hidden) is LabelledArray
    page = hidden._repr_html_()
    assert page.index("<strong>hidden state</strong>") < page.index("<details>") < page.index("xr-wrap")
    assert "certificate" not in page + repr(hidden)  # it belongs to the trace, not to one variable


@pytest.mark.parametrize("columns", [40, 100])
def test_no_line_is_wider_than_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = aligned_text("head", [("certificate", "word " * 60), ("from", "short")]).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[2].startswith(" " * 15 + "word")
    assert lines[-1] == "  from         short"
