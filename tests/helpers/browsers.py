"""Where a browser is that tests may drive: Debian's Chromium, or any that is called like one."""

from __future__ import annotations

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Its path; None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)
