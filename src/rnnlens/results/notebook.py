"""Display of results in a notebook cell: an interactive view where there is one, else the static page."""

from __future__ import annotations

import importlib
from typing import Any

#: Module that makes interactive views. It is imported by name on first display, since its pages are made of results.
_VIEWS = "rnnlens.reporting.notebook"


def interactive_bundle(result: Any) -> dict[str, Any]:
    """Return the interactive view of a result by MIME type; empty for a result without one, such as a lazy result.

    IPython completes an empty bundle with ``_repr_html_``, the static page.
    """
    bundle: dict[str, Any] = importlib.import_module(_VIEWS).bundle_of(result)
    return bundle


def drawn_page(result: Any) -> Any:
    """Return the figure of a result that also is a page, of a hidden attention; None for any other result."""
    return importlib.import_module(_VIEWS).drawn_page(result)
