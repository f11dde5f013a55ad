"""The table of docs/how-to/hugging-face.md: the verbs that work on each family of whole-sequence layers.

python tests/helpers/scan_verbs.py      # write the table into the page
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scan_models import MODELS, build, tokens
from torch.nn import functional

import rnnlens as rl

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "hugging-face.md"
TABLE = re.compile(r"(<!-- verbs: written by tests/helpers/scan_verbs.py -->\n\n).*?(?=\n\n)", re.DOTALL)


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the last step."""
    return functional.cross_entropy(outputs.logits[:, -1].float(), labels)


def _embedding(model: Any) -> str:
    table = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is table)


def _calls(model: Any, x: Any, y: Any) -> dict[str, Callable[[], Any]]:
    """Return one call of each verb on a model."""
    layer = rl.layers(model)[0].name
    keywords = {"of": f"{layer}.output", "wrt": f"{layer}.input", "measure": "norm"}
    return {
        "layers": lambda: rl.layers(model),
        "trace": lambda: rl.trace(model, x, y, loss=loss_of),
        "gradients": lambda: rl.gradients(model, x, y, loss=loss_of, wrt=["weights", f"{_embedding(model)}.output"]),
        "by state": lambda: rl.gradients(model, x, y, loss=loss_of, wrt=f"{rl.trace(model, x).layers[0]}.state"),
        "jacobian": lambda: rl.jacobian(model, x, **keywords),
        "frozen": lambda: rl.jacobian(model, x, frozen=True, **keywords),
        "weights": lambda: rl.weights(model, x, y, loss=loss_of),
        "find_nonfinite": lambda: rl.find_nonfinite(model, x, y, loss=loss_of),
        "diagnose": lambda: rl.diagnose(model, x, y, loss="cross_entropy"),
        "fixed_points": lambda: rl.fixed_points(model, x),
        "lyapunov": lambda: rl.lyapunov(model, x),
    }


def outcomes(name: str) -> list[str]:
    """Return the outcome of each verb on a tiny model of a family: "works", "not certified" or "refused"."""
    model, x = build(name), tokens(12, 5)
    labels = []
    for call in _calls(model, x, x[:, 0]).values():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = call()
        except rl.errors.RnnlensError:
            labels.append("refused")
            continue
        certificate = getattr(result, "certificate", None)
        labels.append("works" if certificate is None or certificate.state != "failed" else "not certified")
    return labels


def table_row(name: str) -> str:
    """Return one line of the table."""
    return f"| {name} | {' | '.join(outcomes(name))} |"


def table_head() -> str:
    """Return the heading of the table."""
    model = build("mamba")
    verbs = [f"`{verb}`" if " " not in verb else verb for verb in _calls(model, tokens(2, 3), None)]
    return f"| model | {' | '.join(verbs)} |\n|{'---|' * (len(verbs) + 1)}"


if __name__ == "__main__":
    table = "\n".join([table_head(), *map(table_row, MODELS)])
    PAGE.write_text(TABLE.sub(lambda match: match[1] + table, PAGE.read_text()))
    print(table)
