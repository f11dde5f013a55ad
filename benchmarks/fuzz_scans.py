"""Compare whole-sequence layers of random Hugging Face models with loops from the papers and with torch's autograd.

    python benchmarks/fuzz_scans.py --count 40 --seed 0

Models are drawn by their number; `fuzz_torch.py` explains how outcomes are counted. Drawn are a family, its sizes, tied
embeddings, padding, dtype, slow or usual decays. States and total gradients of every scan are compared with a loop over
the arguments that the model's own scan function received; gradients and Jacobians of the whole model with autograd of
the untouched model. That model computes its scans in float32, in chunks, also if it is float64. If it differs from
rnnlens by more than the bound, the one that is farther from rnnlens in float64 counts as wrong.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _fuzz
import numpy as np
import torch
from torch.nn import functional

import rnnlens as rl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from scan_loops import LOOPS, is_float, record_arguments
from scan_models import MODELS, VOCABULARY, build, tokens

#: Largest difference from the loop and from the untouched model, relative to the largest number, by dtype.
BOUNDS = {"float64": (1e-10, 1e-5), "float32": (1e-4, 1e-4), "bfloat16": (float("inf"), float("inf"))}


def compare_or_explain(label: str, compute: Callable[[Any], Any], model: Any, reference: Any, bound: float) -> Any:
    """Return the result of ``compute(model)``; raise if it differs from the reference and is farther from float64."""
    values, result = compute(model)
    try:
        _fuzz.assert_close(label, values, reference, bound)
    except _fuzz.WrongError as error:
        exact, _ = compute(copy.deepcopy(model).double())
        if np.abs(np.subtract(values, exact)).max() > np.abs(np.subtract(reference, exact)).max():
            raise
        print(f"      {error}; the model itself is farther from float64")
    return result


def draw_model(number: int, seed: int) -> tuple[torch.nn.Module, dict[str, Any], torch.Tensor, dict[str, Any]]:
    """Return a random model, its inputs, its labels, and the choices made for it."""
    draw, choices = random.Random(f"{seed} {number}"), {}

    def choose(name: str, options: list[Any]) -> Any:
        choices[name] = draw.choice(options)
        return choices[name]

    name = choose("family", list(MODELS))
    options = {} if name in ("zamba2", "rwkv") else {"tie_word_embeddings": choose("tied", [False, True])}
    if "layer_types" not in MODELS[name][2] and name in ("mamba", "falcon_mamba", "mamba2", "rwkv", "xlstm"):
        options["num_hidden_layers"] = choose("layers", [2, 3] if name == "rwkv" else [1, 2, 3])
    model = build(name, seed=number, scale=choose("scale", [0.15, 0.3]), **options)
    for key, weight in model.named_parameters():
        if key.endswith("A_log") and choose("slow", [False, True]):
            torch.nn.init.constant_(weight, -6.0)
    model.to(getattr(torch, choose("dtype", ["float32", "float64", "float64", "bfloat16"])))
    ids = tokens(choose("samples", [1, 3]), choose("steps", [2, 7, 33, 40]), seed=number)
    x: dict[str, Any] = {"input_ids": ids}
    if name not in ("rwkv", "xlstm", "recurrent_gemma") and choose("padded", [False, True]):
        padding = torch.arange(len(ids))[:, None] % 3
        x["attention_mask"] = (torch.arange(ids.shape[1])[None] >= padding.clamp(max=ids.shape[1] - 1)).long()
    return model, x, ids[:, 0], choices


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits[:, -1].float(), labels)


def embedding_of(model: Any) -> str:
    table = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is table)


def check_trace(model: Any, x: dict[str, Any], labels: torch.Tensor, bounds: tuple[float, float]) -> Any:
    with record_arguments(model) as calls:
        trace = rl.trace(model, x, labels, loss=loss_of)
    kinds = {row.name: row.cell for row in rl.layers(model)}
    for layer, arguments in zip(trace, calls[: len(trace)], strict=True):
        traced = trace[layer]
        doubles = {k: v.double() if is_float(v) else v for k, v in arguments.items()}
        leaves = {k: v.requires_grad_() for k, v in doubles.items() if is_float(v)}
        with torch.enable_grad():
            states, out = LOOPS[kinds[layer.partition("#")[0]]]({**doubles, **leaves})
            cotangent = torch.tensor(traced.output_grad.values, dtype=torch.float64)
            grads = torch.autograd.grad((out * cotangent).sum(), states)
        for name, reference in (("state", states), ("state_grad", grads)):
            expected = torch.stack([t.detach() for t in reference], 1).numpy()
            _fuzz.assert_close(f"{layer} {name}", traced[name], expected, bounds[0])
    return trace.certificate


def check_gradients(model: Any, x: dict[str, Any], labels: torch.Tensor, bounds: tuple[float, float]) -> Any:
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    grads = torch.autograd.grad(
        loss_of(model(**x, use_cache=False), labels), list(parameters.values()), allow_unused=True
    )
    expected = {
        name: float((grad.double() ** 2).sum())
        for name, grad in zip(parameters, grads, strict=True)
        if grad is not None
    }

    def norms(net: Any) -> tuple[list[float], Any]:
        result = rl.gradients(net, x, labels, loss=loss_of, wrt="weights")
        return _norms({name: _traced_squares(result, name) for name in expected}), result

    return compare_or_explain("norms of weight gradients", norms, model, _norms(expected), bounds[1]).certificate


def _traced_squares(result: Any, name: str) -> float:
    """Return the sum of squares of the gradient of one parameter."""
    layer, _, key = name.rpartition(".")
    return float((result[layer].dataset[key].astype("float64") ** 2).sum())


def _norms(squares: dict[str, float]) -> list[float]:
    return [value**0.5 for value in squares.values()]


def check_jacobian(model: Any, x: dict[str, Any], labels: torch.Tensor, bounds: tuple[float, float]) -> Any:
    del labels
    logit = np.eye(1, VOCABULARY, 5)[0]

    def row(net: Any) -> tuple[Any, Any]:
        target = {"of": "output", "wrt": f"{embedding_of(net)}.output"}
        jacobian = rl.jacobian(net, x, **target, reduce=logit, at={"out_time": [-1]})
        return np.asarray(jacobian.values, dtype=float)[:, 0, 0], jacobian

    values = model.get_input_embeddings()(x["input_ids"]).detach().requires_grad_()
    other_inputs = {key: value for key, value in x.items() if key != "input_ids"}
    outputs = model(inputs_embeds=values, use_cache=False, **other_inputs).logits
    (grad,) = torch.autograd.grad(outputs[:, -1, 5].sum(), values)
    return compare_or_explain("logit by embeddings", row, model, grad.double().numpy(), bounds[1]).certificate


CHECKS = {"trace": check_trace, "gradients": check_gradients, "jacobian": check_jacobian}


def main() -> int:
    """Draw the models; print a table and every model that is not right."""
    arguments = _fuzz.make_parser(__doc__ or "", 40).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table = _fuzz.Table(CHECKS, arguments.only is not None)
    for number in _fuzz.model_numbers(arguments):
        model, x, labels, choices = draw_model(number, arguments.seed)
        for name, check in CHECKS.items():
            run = functools.partial(check, model, x, labels, BOUNDS[choices["dtype"]])
            weights = lambda: {key: value.double() for key, value in model.state_dict().items()}  # noqa: B023, E731
            table.add(number, name, *_fuzz.run_check(run, weights), choices)
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
