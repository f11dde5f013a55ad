"""Draw the pictures of docs/gallery.md and other pages: run their code, save ``axes`` at each picture.

The page is the only place where the code stands, so that the pictures are those of the code beside them. Lines are SVG;
maps, whose cells a vector file would list one by one, are PNG with all their colours.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

DOCS = Path(__file__).resolve().parents[1]
PART = re.compile(r"^```python\n(?P<code>.*?)^```|^!\[[^\]]*\]\((?P<picture>[^)]+)\)", re.MULTILINE | re.DOTALL)
LARGEST = 400_000
#: Equal runs give equal files: no date, and names of clip paths that are no random numbers.
STEADY = {"svg.hashsalt": "rnnlens"}


def save(axes: Any, path: Path) -> int:
    """Write the figure as its ending says; its size in bytes."""
    import matplotlib as mpl

    with mpl.rc_context(STEADY):
        axes.save(path, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 150}))
    return path.stat().st_size


def draw_page(page: Path) -> int:
    """Run a page; return the number of pictures that are too large."""
    namespace: dict[str, Any] = {}
    too_large = 0
    for block in PART.finditer(page.read_text(encoding="utf-8")):
        if block["code"] is not None:
            exec(compile(block["code"], str(page), "exec"), namespace)
            continue
        size = save(namespace["axes"], page.parent / block["picture"])
        too_large += size > LARGEST
        sys.stdout.write(f"{block['picture']}  {size / 1000:.0f} kB\n")
    return too_large


if __name__ == "__main__":
    names = sys.argv[1:] or ["gallery", "sick-networks", "how-to/loops-over-depth"]
    sys.exit(sum(draw_page(DOCS / f"{name}.md") for name in names))
