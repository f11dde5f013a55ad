"""HTML of results in a notebook: visible and folded parts, and no resource from another address."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import xarray as xr

from rnnlens.cli.steps import summary_of
from rnnlens.results.checks import Check
from rnnlens.results.diagnosis import Diagnosis, Finding
from rnnlens.results.page import array_curves, blocks, dataset_curves, svg
from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace

INFO = {"name": "lstm", "kind": "LSTM", "cell": "lstm", "units": 4, "direction": "forward"}


def trace_of(gradient, **options):
    return Trace({"lstm": layer_dataset({"hidden_grad": gradient}, info=INFO)}, loss=0.5, **options)


class VisibleText(HTMLParser):
    """Parser that collects the tags of a page and its text without style sheets."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.tags, self._style = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_endtag(self, tag):
        self._style = False

    def handle_data(self, data):
        if not self._style:
            self.texts.append(data)

    def __str__(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def gradient():
    """Return a gradient (sample, time, unit), a tenth for each step back; the samples have sizes 1, 1e6 and 1e-3."""
    sizes = np.array([1.0, 1e6, 1e-3])[:, None, None] * 10.0 ** -np.arange(5.0)[::-1][None, :, None]
    return np.broadcast_to(sizes, (3, 5, 4)) / 2  # the norm over 4 equal units is the size


def test_the_curve_is_the_median_each_sample_by_its_own_peak(gradient):
    profile = dataset_curves(trace_of(gradient).dataset("lstm"))[""]
    np.testing.assert_allclose(profile.values, 10.0 ** -np.arange(5.0)[::-1])
    assert profile.peak == pytest.approx(1e6)
    assert (profile.label, profile.axis_label) == ("|dL/dh_t|", "time step")


def test_a_step_with_nan_is_nan_in_the_curve(gradient):
    with_nan = np.array(gradient)
    with_nan[1, 2, 0] = np.nan
    values = dataset_curves(trace_of(with_nan).dataset("lstm"))[""].values
    assert np.isnan(values).tolist() == [False, False, True, False, False]


def test_a_time_jacobian_is_summed_up_by_its_last_row():
    table = np.tril(np.arange(1.0, 17).reshape(4, 4))
    array = xr.DataArray(table, dims=("out_time", "in_time"), name="jacobian")
    np.testing.assert_allclose(array_curves(array)[""].values, [13 / 16, 14 / 16, 15 / 16, 1])


def test_a_training_is_summed_up_by_its_last_record_and_its_reach():
    records = xr.Dataset(
        {"adjoint_profile": (("step", "time"), [[1.0, 1.0, 1.0], [1.0, 10.0, 100.0]]), "reach": ("step", [3.0, 1.0])},
        coords={"step": [0, 50]},
    )
    curves = dataset_curves(records)
    np.testing.assert_allclose(curves["last record"].values, [0.01, 0.1, 1])
    assert curves["training"].blocks() == "█▃"


@pytest.mark.parametrize(
    ("values", "decades", "text"),
    [
        ([0.0, 0.5, 1.0], None, "▁▅█"),
        ([-1.0, 0.0, 1.0], None, "▁▅█"),
        ([1e-7, 1e-6, 1e-3, 1.0], 6, "·▁▅█"),
        ([0.0, 0.0], 6, "··"),
        ([np.nan, np.inf, 1.0], 6, "✗✗█"),
        ([], None, ""),
    ],
)
def test_blocks(values, decades, text):
    assert blocks(values, decades=decades) == text


def test_many_steps_share_a_block_and_show_their_largest():
    values = np.zeros(1000)
    values[777] = 1.0
    assert blocks(values, width=10) == "▁▁▁▁▁▁▁█▁▁"


def test_a_line_falls_where_the_curve_falls():
    line = re.search(r'<path d="([^"]+)"', svg([1.0, 0.5, 0.0], "x"))[1]
    heights = [float(point.split()[1]) for point in re.split("[ML]", line)[1:]]
    assert heights == [1, 14, 27]
    assert 'stroke="currentColor"' in svg([1.0], "x")


def test_at_a_glance_and_opened(gradient):
    page_text = VisibleText(trace_of(gradient)._repr_html_())
    assert str(page_text).startswith("Trace: 1 layer, 3 samples, 5 time steps, loss 0.5 lstm LSTM, 4 units")
    assert "|dL/dh_t|, peak 1e+06" in str(page_text)
    assert [tag for tag, _ in page_text.tags].count("details") >= 2
    assert "details open" not in trace_of(gradient)._repr_html_().partition("xr-")[0]


def test_nothing_is_loaded_and_nothing_runs(gradient):
    page = trace_of(gradient)._repr_html_()
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in VisibleText(page).tags}
    assert "http" not in re.sub(r"xmlns(:\w+)?=\"[^\"]*\"", "", page)


def test_a_failed_check_is_in_sight(gradient):
    failed = Check("weight gradient sum", "lstm", 0.5, 1e-5)
    page = trace_of(gradient, checks=[failed])._repr_html_()
    position = page.index(html.escape(failed.sentence))
    assert page.index('class="rl-bad"') < position < page.index("checks, notes, versions")
    assert 'class="rl-bad"' not in trace_of(gradient)._repr_html_()


def test_findings_come_first():
    finding = Finding("VANISHING", "fault", "lstm", "No signal <gets> there.", {"kappa": 1e-9})
    diagnosis = Diagnosis(
        {"lstm": xr.Dataset({"kappa": ("lag", [1.0, 0.1])})},
        sentences={"lstm": "lstm uses 3 steps."},
        findings=[finding],
    )
    page = diagnosis._repr_html_()
    assert "rl-fault" in page
    assert "No signal &lt;gets&gt; there." in page
    assert page.index("lstm uses 3 steps.") < page.index("<strong>VANISHING") < page.index("state transfer")


def test_a_summary_is_json_whatever_the_numbers(gradient):
    with_nan = np.array(gradient)
    with_nan[0, 0] = np.nan
    trace = Trace({"lstm": layer_dataset({"hidden_grad": with_nan}, info=INFO)}, loss=float("nan"))
    summary = json.loads(json.dumps(summary_of(trace), allow_nan=False))
    assert summary["loss"] is None
    assert summary["layers"][0]["profiles"]["all"]["values"][0] is None
