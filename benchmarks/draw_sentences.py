"""Draw sentences of user text at random, to be read one by one without their neighbours.

User text is the README and the pages of docs/ (without code, tables of contents, the generated reference and the
changelog), the messages of errors and warnings, the help of the command line, and the docstrings of public functions.
Each sentence is printed with its place. A good sentence is understood when read once, without its neighbours.

    python benchmarks/draw_sentences.py --seed 25 --count 100
"""

from __future__ import annotations

import argparse
import ast
import inspect
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import rnnlens as rl

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"reference.md", "changes.md"}
CODE = re.compile(r"```.*?```|<!--.*?-->|\$\$.*?\$\$", re.DOTALL)
END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\"])")
MESSAGES = re.compile(r"\w+(Error|Warning)$")


def sentences(text: str) -> Iterator[str]:
    """Split prose into sentences of at least four words."""
    for block in re.split(r"\n\s*\n|\n(?=[-|#>] ?)", text):
        line = re.sub(r"\s+", " ", block).strip(" |-#>")
        yield from (sentence for sentence in END.split(line) if len(sentence.split()) >= 4)


def page_sentences() -> Iterator[tuple[str, str]]:
    """Yield place and sentence of the README and the pages."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.name not in GENERATED:
            for sentence in sentences(CODE.sub("\n\n", path.read_text("utf-8"))):
                yield path.relative_to(ROOT).as_posix(), sentence


def message_texts() -> Iterator[tuple[str, str]]:
    """Yield place and text of errors, warnings and options of the command line."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        source = path.read_text("utf-8")
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            if MESSAGES.match(name) or name in ("message", "Option", "Argument", "warn"):
                for argument in [*call.args[:1], *(keyword.value for keyword in call.keywords)]:
                    if isinstance(argument, ast.Constant | ast.JoinedStr) and len(ast.unparse(argument).split()) >= 4:
                        yield path.relative_to(ROOT).as_posix(), ast.unparse(argument)


def docstring_sentences() -> Iterator[tuple[str, str]]:
    """Yield name and sentence of the docstrings of public functions and classes."""
    public_names = {f"rl.{name}": getattr(rl, name) for name in rl.__all__}
    modules = {name: value for name, value in public_names.items() if isinstance(value, ModuleType)}
    public_names |= {
        f"{module}.{name}": getattr(value, name) for module, value in modules.items() for name in dir(value)
    }
    for name, value in public_names.items():
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("rnnlens"):
            for sentence in sentences(inspect.getdoc(value) or ""):
                yield name, sentence


def main() -> None:
    """Print the drawn sentences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    everything = sorted({*page_sentences(), *message_texts(), *docstring_sentences()})
    print(f"{args.count} of {len(everything)} sentences, seed {args.seed}")
    for source, sentence in random.Random(args.seed).sample(everything, args.count):
        print(f"{source}: {sentence}")


if __name__ == "__main__":
    main()
