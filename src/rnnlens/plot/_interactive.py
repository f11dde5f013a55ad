"""Figures that also are pages: three axes that turn, and text that is pointed at."""

from __future__ import annotations

import importlib
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments import path as path_of
from ..errors import FileError
from ._frame import Drawing, _png_bytes

#: Module that makes the page of a scene. It is imported by name, since pages are made of figures.
_PAGES = "rnnlens.reporting.scenes"


class InteractiveDrawing(Drawing):
    """Result of a figure that also is a page: where a notebook shows HTML the page is shown, elsewhere the picture.

    ``scene`` has what the page draws, as plain numbers and words. ``save`` also writes ``.html``.
    """

    scene: dict[str, Any] | None

    def __array_finalize__(self, other: Any) -> None:
        self.scene = getattr(other, "scene", None)

    def save(self, path: str | PathLike[str], **options: Any) -> None:
        """Write the figure to a file: ``.html`` is the page, ``.png``, ``.pdf`` and ``.svg`` the picture.

        Parameters
        ----------
        path
            File to write.
        **options
            As for ``savefig`` of matplotlib's Figure, such as ``dpi``.

        Raises
        ------
        InputError
            If matplotlib does not know the format or an option.
        FileError
            If the file cannot be written.
        """
        target_path = Path(path_of("path", path))
        if target_path.suffix.lower() not in (".html", ".htm"):
            return super().save(path, **options)
        try:
            target_path.write_text(importlib.import_module(_PAGES).page_of(self.scene), "utf-8")
        except OSError as error:
            raise FileError("The page cannot be written.", got=f"{target_path}: {error}") from error
        return None

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if not self.size or self.scene is None:
            return {}
        return {"text/plain": repr(self), **self.bundle()}

    def bundle(self) -> dict[str, Any]:
        """Return the page in a frame and the picture, by MIME type."""
        bundle: dict[str, Any] = importlib.import_module(_PAGES).bundle_of(self.scene, _png_bytes(self.figure))
        return bundle


def interactive(drawing: Drawing, scene: dict[str, Any]) -> InteractiveDrawing:
    """Return a drawing that also is the page of a scene."""
    result = drawing.view(InteractiveDrawing)
    result.scene = scene
    return result


def rounded(value: float) -> float | None:
    """Return a number of a scene with three digits, or None for one that is not finite."""
    return float(f"{value:.3g}") if np.isfinite(value) else None
