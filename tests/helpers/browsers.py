"""Find the browser that the tests drive: Chromium or Chrome."""

from __future__ import annotations

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Return the path of the browser, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)
