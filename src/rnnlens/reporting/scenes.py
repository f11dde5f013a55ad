"""A figure as a page of its own and as the output of a notebook cell: three axes that turn, text that is pointed at."""

from __future__ import annotations

import base64
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from ..results.encoding import to_strict_json
from .notebook import frame
from .page import asset, security_policy


def page_of(scene: dict[str, Any]) -> str:
    """Return the page of a scene as the text of one HTML file, which loads nothing."""
    scripts = (asset(f"{name}.js") for name in ("theme", scene["kind"]))
    script = "\n".join(["'use strict';", "(function () {", *scripts, "})();"])
    environment = Environment(loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined)
    return environment.get_template(f"{scene['kind']}.html").render(
        scene=scene,
        data=to_strict_json(scene),
        style=Markup(asset("report.css")),
        script=Markup(script),
        policy=security_policy(script),
    )


def bundle_of(scene: dict[str, Any], picture: bytes) -> dict[str, Any]:
    """Return a scene by MIME type: the page in a frame, and the picture of one view."""
    encoded = base64.b64encode(picture).decode()
    return {"text/html": frame(page_of(scene), encoded, scene["title"]), "image/png": encoded}
