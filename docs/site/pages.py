"""Write the generated parts of the pages: the reference, and scripts with the output that they print.

    python docs/site/pages.py             write what follows from the code
    python docs/site/pages.py --outputs   also run the scripts of docs/start again, and keep what they print

A page that shows a file names it in a comment before the block, `<!-- file: docs/start/recall_keras.py -->`; the block
below the comment is replaced. The pages are plain Markdown, the same on GitHub and on the site, and a test compares
them with the code.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import griffe

import rnnlens

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WORKS_WITH = DOCS / "works-with.md"
#: Table of `make test-world`.
WORLD_TABLE = ROOT / "tests" / "world" / "table.json"
PAGES = (ROOT / "README.md", DOCS / "start.md", DOCS / "mend-a-network.md")
#: Types of the members of a class that are documented with it.
METHODS = (FunctionType, property, cached_property, classmethod, staticmethod)

#: Results of a row of that table.
RIGHT, RIGHT_BY_HINT = "right", "refused, the hint worked"

#: A comment that names a file, and the block of code below it.
FILE_BLOCK = re.compile(r"(<!-- file: (\S+) -->\n+```)(\w*)\n.*?\n```", re.DOTALL)

SECTIONS = (
    ("Looking into a model", ""),
    ("Figures: `rl.plot`", "plot"),
    ("Measures of memory: `rl.measures`", "measures"),
    ("Keras: `rl.keras`", "keras"),
    ("TensorFlow 1: `rl.tf1`", "tf1"),
    ("PyTorch: `rl.torch`", "torch"),
    ("JAX: `rl.jax`", "jax"),
    ("Lightning: `rl.lightning`", "lightning"),
    ("Hugging Face's Trainer: `rl.transformers`", "transformers"),
    ("Cells: `rl.cells`", "cells"),
    ("Errors: `rl.errors`", "errors"),
    ("Testing: `rl.testing`", "testing"),
)


#: Modules whose functions have a page each; those of any other module share one. "": ``rnnlens`` itself.
PAGE_EACH = ("", "plot")


def reference_pages() -> dict[Path, str]:
    """Return the pages of every public name, from signatures and docstrings, and the page that lists them."""
    lines = ["# Reference: every public function", "`import rnnlens as rl`. Nothing else is public."]
    pages: dict[Path, str] = {}
    for heading, module in SECTIONS:
        holder = getattr(rnnlens, module) if module else rnnlens
        entries = {f"rl.{module}.{name}" if module else f"rl.{name}": value for name, value in documented(holder)}
        introduction = plain_markdown((inspect.getdoc(holder) or "").split("\n\n")[0]) if module else ""
        lines += [f"## {heading}", *([introduction] if introduction else [])]
        if module in PAGE_EACH:
            files = {title: f"{title.removeprefix('rl.')}.md" for title in entries}
            pages |= {
                DOCS / "reference" / files[title]: page_of(title, {title: value}) for title, value in entries.items()
            }
        else:
            files = dict.fromkeys(entries, f"{module}.md")
            pages[DOCS / "reference" / f"{module}.md"] = page_of(heading.replace("`", ""), entries, introduction)
        links = (f"[`{title}`](reference/{files[title]}{anchor(title, module)})" for title in entries)
        lines.append(
            "\n".join(f"- {link}: {first_sentence(v)}" for link, v in zip(links, entries.values(), strict=True))
        )
    return {DOCS / "reference.md": "\n\n".join(lines) + "\n", **pages}


def page_of(title: str, entries: dict[str, Any], introduction: str = "") -> str:
    """Return one page of the reference: of one public name, or of all names of a module."""
    parts = [entry(name, value, "#" if name == title else "##") for name, value in entries.items()]
    if title not in entries:
        parts = [f"# {title}", *([introduction] if introduction else []), *parts]
    return "\n\n".join([*parts, "[All public functions](../reference.md)"]) + "\n"


def anchor(title: str, module: str) -> str:
    """Return the anchor of a name on the page of its module; nothing where it has a page of its own."""
    return "" if module in PAGE_EACH else "#" + re.sub(r"[^\w-]", "", title.lower())


def documented(holder: Any) -> list[tuple[str, Any]]:
    """Return the public classes and functions of ``rnnlens`` or of one of its modules."""
    names = getattr(holder, "__all__", None)
    if names is None:
        names = [name for name, value in vars(holder).items() if getattr(value, "__module__", None) == holder.__name__]
    members = [(name, getattr(holder, name)) for name in names if not name.startswith("_")]
    return [
        (name, value)
        for name, value in members
        if not isinstance(value, ModuleType) and (inspect.isclass(value) or inspect.isroutine(value))
    ]


def entry(title: str, value: Any, level: str) -> str:
    """Return the Markdown of one public name: heading, signature, docstring, and the methods of a class."""
    parts = [f"{level} {title}", f"```text\n{signature(title, value)}\n```", *docstring_parts(value)]
    if inspect.isclass(value) and not issubclass(value, BaseException):
        members = [(name, member) for name, member in vars(value).items() if not name.startswith("_")]
        methods = [(name, member) for name, member in members if isinstance(member, METHODS) and inspect.getdoc(member)]
        lines = [f"- `{name}`: {first_sentence(method)}" for name, method in methods]
        parts += ["**Methods and properties**", "\n".join(lines)] if lines else []
    return "\n\n".join(parts)


def signature(title: str, value: Any) -> str:
    """Return the call with each argument on a line of its own where it is long."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return title
    texts = [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters if p.name != "self"]
    first = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    if first is not None and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        texts.insert(first - len(parameters) + len(texts), "*")
    line = f"{title}({', '.join(texts)})"
    return line if len(line) <= 100 else f"{title}(\n    " + ",\n    ".join(texts) + ",\n)"


def docstring_parts(member: Any) -> Iterator[str]:
    """Yield the sections of a numpydoc docstring as Markdown."""
    text = inspect.getdoc(member) or ""
    for section in griffe.Docstring(text).parse("numpy", warn_unknown_params=False, warnings=False):
        kind, value = section.kind.value, section.value
        if kind == "text":
            yield plain_markdown(value)
        elif kind == "examples":
            yield "```text\n" + "\n\n".join(text_part for _, text_part in value) + "\n```"
        elif kind == "admonition":
            yield f"**{section.title}**\n\n{plain_markdown(value.contents)}"
        elif isinstance(value, list):
            yield f"**{kind.title()}**\n\n" + "\n".join(items(value))


def items(elements: list[Any]) -> Iterator[str]:
    """Yield parameters, return values or errors as lines of a list, those that share type and description as one."""
    for (type_text, description), together in itertools.groupby(elements, key=type_and_description):
        names = [getattr(element, "name", None) for element in together]
        name_text = ", ".join(f"`{name}`" for name in names if name)
        if not name_text:
            head = type_text if " " in type_text else f"`{type_text}`"
        else:
            head = (
                f"{name_text} {type_text}"
                if type_text.startswith("(")
                else ", ".join(filter(None, [name_text, type_text]))
            )
        yield f"- {head}: {description}" if description else f"- {head}"


def type_and_description(element: Any) -> tuple[str, str]:
    """Return the type (of an array its axes) and the description of a parameter, return value or error."""
    annotation = "" if element.annotation is None else " ".join(str(element.annotation).split())
    return plain_markdown(annotation), plain_markdown(" ".join(element.description.split()))


def plain_markdown(text: str) -> str:
    """Turn the roles and literals of reStructuredText into Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text).replace("rnnlens.", "rl.").strip()


def first_sentence(value: Any) -> str:
    """Return the first line of a docstring."""
    return plain_markdown((inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " "))


def works_with_page() -> str:
    """Return the page of public packages whose models every verb was run on, from the table of `make test-world`."""
    table = json.loads(WORLD_TABLE.read_text())
    models = {key: list(rows) for key, rows in itertools.groupby(table, lambda row: (row["package"], row["model"]))}
    verbs = len({row["verb"] for row in table} - {"all"})  # a program that crashed has one row
    lines = [
        "# Works with",
        f"Models of {len({package for package, _ in models})} public packages, built as their documentation builds "
        "them, at a small size. `make test-world` installs the packages, calls every verb on each model in two orders, "
        "and compares with PyTorch's autograd of the untouched model: gradients of the input and of the weights, the "
        "time Jacobian with the names of its axes, values and gradients of the traced layers, the place of a planted "
        "NaN. Reports and diagnoses are only made, and must be the same in both orders. Weights, buffers, attributes, "
        "flags and random generators must be as before.",
        "| package | model | right | right, once the hint of an error was followed | refused or broken |\n"
        "|---|---|---|---|---|\n" + "\n".join(_model_row(rows, verbs) for rows in models.values()),
        "## What an error said",
    ]
    for (package, model), rows in models.items():
        by_detail: dict[str, list[str]] = {}
        for row in rows:
            if row["detail"]:
                by_detail.setdefault(row["detail"], []).append(row["verb"])
        lines += [f"**{package}, {model}**\n\n" + "\n".join(_detail_line(*item) for item in by_detail.items())] * bool(
            by_detail
        )
    return "\n\n".join(lines) + "\n"


def _model_row(rows: list[dict[str, str]], verb_count: int) -> str:
    """Return the table's line of one model: its verbs by result."""
    right, hinted = ([row["verb"] for row in rows if row["result"] == name] for name in (RIGHT, RIGHT_BY_HINT))
    other = [f"{row['verb']} ({row['result']})" for row in rows if row["result"] not in (RIGHT, RIGHT_BY_HINT)]
    names = ["all verbs" if len(right) == verb_count else ", ".join(right), ", ".join(hinted), ", ".join(other)]
    return f"| {rows[0]['package']} {rows[0]['version']} | {rows[0]['model']} | {' | '.join(names)} |"


def _detail_line(detail: str, verbs: list[str]) -> str:
    """Return a list item with the verbs that printed one message, as code."""
    return f"- {', '.join(verbs)}: `{' '.join(detail.replace('`', chr(39)).split())}`"


def with_files(page: str) -> str:
    """Replace each block of a page that shows a file by the file."""
    return FILE_BLOCK.sub(lambda match: f"{match[1]}{match[3]}\n{(ROOT / match[2]).read_text().rstrip()}\n```", page)


def record_outputs() -> None:
    """Run each script of docs/start that has a recorded output, in a folder of its own; keep it and drawings as SVG."""
    for output_file in sorted((ROOT / "docs" / "start").glob("*.txt")):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(output_file.with_suffix(".py"))]
            completed = subprocess.run(
                command, cwd=folder, env={**os.environ, "COLUMNS": "120"}, text=True, capture_output=True, check=True
            )
            for drawing in Path(folder).glob("*.svg"):
                shutil.copy(drawing, output_file.parent)
        output_file.write_text(completed.stdout)


def main() -> None:
    """Write all generated pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outputs", action="store_true", help="run the scripts of docs/start and keep what they print")
    if parser.parse_args().outputs:
        record_outputs()
    pages = reference_pages()
    for outdated in set((DOCS / "reference").glob("*.md")) - set(pages):
        outdated.unlink()
    (DOCS / "reference").mkdir(exist_ok=True)
    for path, text in pages.items():
        path.write_text(text)
    WORKS_WITH.write_text(works_with_page())
    for page in PAGES:
        page.write_text(with_files(page.read_text()))


if __name__ == "__main__":
    main()
