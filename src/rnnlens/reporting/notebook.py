"""The interactive view of a result in a notebook cell: a small report in a frame, and a picture for other viewers."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xarray as xr

from .. import plot
from ..errors import RnnlensError
from ..plot._interactive import InteractiveDrawing
from ..results.diagnosis import Diagnosis
from ..results.trace import Trace
from ..results.training_run import TrainingRun
from ..vocabulary import IN_TIME, SAMPLE
from .contents import ReportContents, contents_of_results
from .page import ReportOrigin, render
from .training import default_scalars

#: Largest size of the page of a view in bytes, so that a notebook of many results can still be opened and sent.
MAX_VIEW_BYTES = 700_000
#: Largest number of samples of a view, from the first on.
MAX_SAMPLES = 64
#: Height of the frame in pixels; its lower edge can be dragged.
_HEIGHT = 620


def bundle_of(result: Any) -> dict[str, Any]:
    """Return the view of a trace, time Jacobian, diagnosis or run by MIME type; empty for any other result.

    ``text/html`` is the interactive view, ``image/png`` the picture for viewers that show no HTML, such as a PDF.
    """
    page_of_figure = drawn_page(result)
    if page_of_figure is not None:
        return {"text/plain": repr(result), **page_of_figure.bundle()}
    draw = _drawing_of(result)
    if draw is None:
        return {}
    contents = _contents_of(result)
    has_figures = contents.time_map is not None or contents.diagnosis is not None or contents.run is not None
    if not has_figures and not (contents.moments and contents.moments[0].tracks):
        return {}
    page = render(contents, ReportOrigin(type(result).__name__, ""), compact=True, max_bytes=MAX_VIEW_BYTES)
    picture = _png(draw)
    bundle = {"text/plain": repr(result), "text/html": frame(page, picture, type(result).__name__)}
    return bundle | ({"image/png": picture} if picture else {})


def drawn_page(result: Any) -> InteractiveDrawing | None:
    """Return the figure of a hidden attention that also is a page; None for any other result, or one too large."""
    if not isinstance(result, xr.DataArray) or "map" not in result.dims or result.chunks:
        return None
    try:
        drawing = plot.hidden_attention(result)
    except RnnlensError:  # a part of it, such as one map
        return None
    return drawing if isinstance(drawing, InteractiveDrawing) else None


class ReportFile(type(Path())):  # type: ignore[misc]  # the class of paths on this system
    """Path of a report, which a notebook displays as the report itself."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if self.suffix.lower() not in (".html", ".htm") or not self.is_file():
            return {}  # a parent folder, or a file that was moved
        return {"text/plain": repr(self), "text/html": frame(self.read_text("utf-8"), "", str(self))}


def frame(page: str, picture: str, title: str) -> str:
    """Return HTML that shows a page in a sandboxed frame, and a picture or the title where frames are removed.

    GitHub, and Jupyter for a notebook that is not trusted, remove frames and style sheets, but keep pictures. The page
    cannot reach the notebook around it.
    """
    escaped_page, escaped_title = page.replace("&", "&amp;").replace("'", "&#39;"), html.escape(title)
    image = f'<img alt="{escaped_title}" src="data:image/png;base64,{picture}">' if picture else escaped_title
    return (
        "<style>.rnnlens-view:has(iframe) .rnnlens-fallback{display:none}</style>"
        f'<div class="rnnlens-view"><div class="rnnlens-fallback">{image}</div>'
        f"<iframe title='rnnlens: {escaped_title}' sandbox='allow-scripts allow-downloads' "
        f"style='width:100%;height:{_HEIGHT}px;border:0;resize:vertical;overflow:auto' "
        f"srcdoc='{escaped_page}'></iframe></div>"
    )


def _contents_of(result: Any) -> ReportContents:
    """Return the contents of a report of one result; of a trace its first samples."""
    if not isinstance(result, Trace):
        return contents_of_results([result])
    datasets = {name: result.dataset(name) for name in result}
    sample_count = max((dataset.sizes.get(SAMPLE, 0) for dataset in datasets.values()), default=0)
    if sample_count <= MAX_SAMPLES:
        return contents_of_results([result])
    first_samples = {
        name: dataset.isel({SAMPLE: slice(MAX_SAMPLES)}) if SAMPLE in dataset.dims else dataset
        for name, dataset in datasets.items()
    }
    meta = {key: value for key, value in result._meta().items() if key != "layers"}
    contents = contents_of_results([Trace(first_samples, **meta)])
    contents.left_out.append(f"{MAX_SAMPLES} of {sample_count} samples, the first, are shown.")
    return contents


def _drawing_of(result: Any) -> Callable[[], Any] | None:
    """Return a function that draws the static picture of a result; None for a result without a view."""
    if isinstance(result, xr.DataArray):
        is_map = IN_TIME in result.dims and result.size > 0 and result.dtype.kind == "f"
        return (lambda: plot.time_jacobian(result)) if is_map else None
    if isinstance(result, Diagnosis):
        return lambda: plot.diagnosis(result)
    if isinstance(result, TrainingRun):
        return (lambda: plot.timeline(result, default_scalars(result))) if result.steps.size else None
    if isinstance(result, Trace):
        return lambda: plot.gradient_flow(result)
    return None


def _png(draw: Callable[[], Any]) -> str:
    """Return a figure as base64 of a PNG; "" where the result lacks what the figure shows, such as gradients."""
    try:
        figure = draw()[0].figure
    except RnnlensError:
        return ""
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=100)
        return base64.b64encode(file.getvalue()).decode()
