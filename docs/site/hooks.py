"""Hooks of the site: formulas as MathML, and links that leave docs/.

Called by MkDocs while it builds (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

#: What pymdownx.arithmatex leaves of a formula, inline or by itself.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(\w[^)]*)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Write links that lead out of docs/ as text, since the site does not hold their targets."""
    depth = page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda link: link[0] if link[0].count("../") <= depth else as_text(link), markdown)


def as_text(link: re.Match[str]) -> str:
    """What a link out of the documents becomes on the site, which does not hold what it leads to."""
    return f"{link[1]} (`{link[2]}`)"


def on_page_content(content: str, **_: Any) -> str:
    """Write formulas as MathML, which browsers draw without a script, and name the column in each cell of a table."""
    content = FORMULA.sub(lambda match: as_mathml(html.unescape(match[2]), block=match[1] == "div"), content)
    return TABLE.sub(lambda match: label_cells(match[0]), content)


def on_post_page(output: str, **_: Any) -> str:
    """Name the dialog of the search for screen readers."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def on_post_template(output_content: str, **_: Any) -> str:
    """Name it on the page that stands for a missing one, too."""
    return on_post_page(output_content)


def label_cells(table: str) -> str:
    """Give each cell of a table the heading of its column, which the style sheet shows on narrow screens."""
    heads = [html.escape(re.sub("<[^>]+>", "", head)) for head in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]

    def row(match: re.Match[str]) -> str:
        left = iter(heads)
        return re.sub(r"<td", lambda _: f'<td data-label="{next(left, "")}"', match[0])

    return re.sub(r"<tr>.*?</tr>", row, table, flags=re.DOTALL)


def as_mathml(formula: str, *, block: bool) -> str:
    """One formula; one by itself may be wider than the page, and is reached by the keyboard to be scrolled."""
    mathml = convert(formula, display="block" if block else "inline")
    return mathml.replace("<math ", '<math tabindex="0" ', 1) if block else mathml
