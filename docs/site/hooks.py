"""What the site needs beyond the pages: the reference of every public name, formulas, and links that leave docs/.

Called by MkDocs while it builds (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import html
import inspect
import re
from types import ModuleType
from typing import Any

from latex2mathml.converter import convert

import rnnlens

#: `<!-- reference: rnnlens.plot -->` on a page becomes the documentation of each public name of that module.
MARK = re.compile(r"^<!-- reference: ([\w.]+) -->$", re.MULTILINE)
#: What pymdownx.arithmatex leaves of a formula, inline or by itself.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(\w[^)]*)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with its references written out; called for each page."""
    written = MARK.sub(lambda found: reference(found[1]), markdown)
    depth = page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda found: found[0] if found[0].count("../") <= depth else as_text(found), written)


def as_text(link: re.Match[str]) -> str:
    """What a link out of the documents becomes on the site, which does not hold what it leads to."""
    return f"{link[1]} (`{link[2]}`)"


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves: no script, and nothing from elsewhere."""
    return FORMULA.sub(lambda found: drawn(html.unescape(found[2]), block=found[1] == "div"), content)


def drawn(formula: str, *, block: bool) -> str:
    """One formula."""
    return convert(formula, display="block" if block else "inline")


def reference(module: str) -> str:
    """A mkdocstrings block for each public name of a module that is a class or a function."""
    return "\n\n".join(f"::: {path}" for path in paths_of(module))


def paths_of(module: str) -> list[str]:
    """Where each public name of ``rnnlens`` or ``rnnlens.room`` is defined."""
    _, _, room = module.partition(".")
    holder: Any = getattr(rnnlens, room) if room else rnnlens
    found = [getattr(holder, name) for name in public_names(holder)]
    return [f"{thing.__module__}.{thing.__qualname__}" for thing in found if is_documented(thing)]


def public_names(holder: Any) -> list[str]:
    """The names in `__all__`, or what a module defines itself."""
    listed = getattr(holder, "__all__", None)
    if listed is not None:
        return list(listed)
    own = [name for name, thing in vars(holder).items() if getattr(thing, "__module__", None) == holder.__name__]
    return [name for name in own if not name.startswith("_")]


def is_documented(thing: Any) -> bool:
    """Whether it is a class or function of ours; modules have a section of their own, constants a line."""
    return not isinstance(thing, ModuleType) and (inspect.isclass(thing) or inspect.isroutine(thing))
