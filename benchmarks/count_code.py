"""Count the size of the source, and the files and functions that each verb enters.

    python benchmarks/count_code.py                 # the working tree
    python benchmarks/count_code.py --at ac84298    # the source of another revision, its text only
    python benchmarks/count_code.py --verbs         # also files, functions and forward passes per verb

A function is as long as the lines from ``def`` to its last statement, blank lines and nested functions included;
its decorators are left out. Code lines are lines with a token that is neither comment nor docstring. A function
used once is defined at the top of a module and named once elsewhere in the source. A module of one neighbour is
imported by exactly one other module.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(revision: str | None) -> dict[str, str]:
    """Return the text of every module by dotted name; a package's own module ends in ``.__init__``."""
    if revision is None:
        texts = {str(p.relative_to(ROOT / "src")): p.read_text() for p in (ROOT / "src" / "rnnlens").rglob("*.py")}
    else:
        archive = subprocess.run(["git", "archive", revision, "src/rnnlens"], cwd=ROOT, check=True, capture_output=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            files = [m for m in tar.getmembers() if m.name.endswith(".py")]
            texts = {m.name.removeprefix("src/"): tar.extractfile(m).read().decode() for m in files}  # type: ignore[union-attr]
    return {name.removesuffix(".py").replace("/", "."): text for name, text in sorted(texts.items())}


def code_lines(text: str, tree: ast.Module) -> int:
    """Return the number of lines with code on them."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings |= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _QUIET:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def lines_of(node: ast.stmt) -> int:
    """Return the number of lines of a statement; of a function from ``def`` on, without decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def imported_modules(node: ast.Import | ast.ImportFrom, module: str, module_names: set[str]) -> set[str]:
    """Return the rnnlens modules that an import statement names: a submodule rather than its package."""

    def resolve(name: str) -> str | None:
        return name if name in module_names else f"{name}.__init__" if f"{name}.__init__" in module_names else None

    if isinstance(node, ast.Import):
        return {resolved for alias in node.names if (resolved := resolve(alias.name))}
    base = node.module or ""
    if node.level:
        parents = module.split(".")[: -node.level]
        base = ".".join([*parents, *([node.module] if node.module else [])])
    submodules = {resolved for alias in node.names if (resolved := resolve(f"{base}.{alias.name}"))}
    package = resolve(base)
    return submodules | ({package} if package and len(submodules) < len(node.names) else set())


def find_cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Kosaraju's algorithm)."""
    order: list[str] = []
    visited: set[str] = set()

    def finish(start: str, graph: dict[str, set[str]], finished: list[str]) -> None:
        stack = [(start, iter(graph.get(start, ())))]
        visited.add(start)
        while stack:
            neighbours = stack[-1][1]
            following = next((n for n in neighbours if n not in visited), None)
            if following is None:
                finished.append(stack.pop()[0])
            else:
                visited.add(following)
                stack.append((following, iter(graph.get(following, ()))))

    for name in edges:
        if name not in visited:
            finish(name, edges, order)
    backwards: dict[str, set[str]] = defaultdict(set)
    for name, targets in edges.items():
        for target in targets:
            backwards[target].add(name)
    visited.clear()
    components = []
    for name in reversed(order):
        if name not in visited:
            component: list[str] = []
            finish(name, backwards, component)
            components.append(sorted(component))
    return [component for component in components if len(component) > 1]


def count(texts: dict[str, str]) -> dict[str, object]:
    """Return all counts of the source by their title in the table."""
    trees = {name: ast.parse(text) for name, text in texts.items()}
    module_names = set(texts)
    lengths: list[int] = []
    body_lengths: list[int] = []
    top_level: list[str] = []
    classes: dict[str, set[str]] = defaultdict(set)
    names: Counter[str] = Counter()
    edges: dict[str, set[str]] = {}
    inner_imports = 0
    for name, tree in trees.items():
        edges[name] = set()
        top_level += [node.name for node in tree.body if isinstance(node, _FUNCTIONS)]
        for node in ast.walk(tree):
            if isinstance(node, _FUNCTIONS):
                lengths.append(lines_of(node))
                has_docstring = ast.get_docstring(node, clean=False) is not None
                body_lengths.append(lines_of(node) - (lines_of(node.body[0]) if has_docstring else 0))
                inner_imports += sum(bool(isinstance(n, ast.Import | ast.ImportFrom)) for n in ast.walk(node))
            elif isinstance(node, ast.ClassDef):
                classes[node.name].add(name)
            elif isinstance(node, ast.Name):
                names[node.id] += 1
            elif isinstance(node, ast.Attribute):
                names[node.attr] += 1
            elif isinstance(node, ast.Import | ast.ImportFrom):
                edges[name] |= imported_modules(node, name, module_names) - {name}
    importers = Counter(target for targets in edges.values() for target in targets)
    lengths.sort()
    body_lengths.sort()
    cycles = find_cycles(edges)
    return {
        "modules": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "code lines": sum(code_lines(text, trees[name]) for name, text in texts.items()),
        "functions": len(lengths),
        "function length, median": lengths[len(lengths) // 2],
        "function length, 95th percentile": lengths[int(0.95 * len(lengths))],
        "function length, 99th percentile": lengths[int(0.99 * len(lengths))],
        "function length without docstring, 99th percentile": body_lengths[int(0.99 * len(body_lengths))],
        "functions used once": sum(names[name] == 1 for name in top_level),
        "modules of one neighbour": sum(n == 1 for name, n in importers.items() if not name.endswith("__init__")),
        "files under 40 lines": sum(
            len(text.splitlines()) < 40 for name, text in texts.items() if not name.endswith("__init__")
        ),
        "longest file": max(len(text.splitlines()) for text in texts.values()),
        "imports inside functions": inner_imports,
        "import cycles": len(cycles),
        "modules in the largest cycle": max(map(len, cycles), default=0),
        "class names with several meanings": sum(len(owners) > 1 for owners in classes.values()),
    }


def entered_code(verbs: list[str]) -> dict[str, str]:
    """Return per verb the rnnlens files and functions entered on nn.LSTM + Linear, and the model's forward passes."""
    import torch

    import rnnlens as rl

    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from own_files import package_path

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(3, 5, batch_first=True), torch.nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
            return result

    torch.manual_seed(0)
    x, y, loss = torch.randn(40, 7, 3), torch.randn(40, 2), torch.nn.functional.mse_loss
    calls = {
        "trace": lambda net: rl.trace(net, x, y, loss=loss),
        "gradients": lambda net: rl.gradients(net, x, y, loss=loss, wrt="input"),
        "weights": lambda net: rl.weights(net, x, y, loss=loss),
        "jacobian": lambda net: rl.jacobian(net, x),
    }
    rows = {}
    for verb in verbs:
        for certify in ("never", "always"):
            with rl.options(certify=certify):
                calls[verb](Net())  # modules that are imported on first use do not count
                net, entries, functions = Net(), Counter(), set()

                def note(frame: object, event: str, argument: object, entries=entries, functions=functions) -> None:
                    code = frame.f_code  # type: ignore[attr-defined]
                    entries[code] += event == "call" and code is Net.forward.__code__
                    if event == "call" and package_path(code.co_filename) is not None and code.co_name != "<module>":
                        functions.add((code.co_filename, code.co_qualname))

                sys.setprofile(note)
                try:
                    calls[verb](net)
                finally:
                    sys.setprofile(None)
            named_functions = {
                (file, name) for file, name in functions if not name.endswith(("<genexpr>", "<listcomp>"))
            }
            files = len({file for file, _ in functions})
            state = "certified" if certify == "always" else "uncertified"
            rows[f"{verb}, {state}"] = (
                f"{files} files, {len(named_functions)} functions, {entries[Net.forward.__code__]} forward"
            )
    return rows


def main() -> None:
    """Print the counts as one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", help="a git revision; the working tree by default")
    parser.add_argument("--verbs", action="store_true", help="also what each verb enters (needs torch; working tree)")
    parser.add_argument("--under", default="rnnlens", help="only modules of this package, such as rnnlens.recurrence")
    args = parser.parse_args()
    texts = {name: text for name, text in sources(args.at).items() if name.startswith(args.under)}
    rows = count(texts)
    if args.verbs:
        sys.path.insert(0, str(ROOT / "src"))
        rows |= entered_code(["trace", "gradients", "weights", "jacobian"])
    print(f"| {args.under} at {args.at or 'the working tree'} | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
