"""Runs and differentiates the user's unmodified model: no hook, no kernel of rnnlens, torch's own autograd.

A certificate compares a result with this run. It shares with the capture only the code that prepares the user's data,
evaluates the user's loss and restores the model. Names and layouts of weights are read here independently.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...autodiff.torch import backward_pass
from ...errors import CertificateError
from ...recurrence.cells import GRU, LSTM, Cell, SimpleRNN, registered
from ...typing import Array
from ..protocol import Batch, Cotangents, ReferenceRun, WeightLocation
from .cells import has_own_step
from .discover import named_modules, unwrapped
from .inputs import as_tensors, call_model, tensors_of, with_sources
from .losses import evaluate
from .restore import borrowed, differentiable_weights
from .scan_families import sequence_modules, state_sizes

#: Torch's order of gates, from the documentation of its modules.
_GATES: dict[Any, tuple[type[Cell], tuple[str, ...]]] = {
    nn.LSTM: (LSTM, ("input", "forget", "candidate", "output")),
    nn.GRU: (GRU, ("reset", "update", "candidate")),
    nn.RNN: (SimpleRNN, ("candidate",)),
}
_CELLS = {nn.LSTMCell: nn.LSTM, nn.GRUCell: nn.GRU, nn.RNNCell: nn.RNN}
_WEIGHTS = {
    "kernel": "weight_ih",
    "recurrent_kernel": "weight_hh",
    "bias": "bias_ih",
    "recurrent_bias": "bias_hh",
    "projection": "weight_hr",
}


def reference_run(
    model: nn.Module,
    batch: Batch,
    cotangents: Cotangents | None = None,
    *,
    gradients: bool = True,
    regularised: bool = False,
) -> ReferenceRun:
    """Run the model for a certificate: see :meth:`rnnlens.adapters.protocol.Adapter.reference_run`."""
    del regularised  # torch models have no regularisation losses of their own
    model = unwrapped(model)
    if batch.initial_state:
        raise CertificateError("initial_state= was set by rnnlens; the model on its own starts from other states")
    given_x = as_tensors(batch.x, model, "x")
    if gradients:
        _refuse_quadratic(model, given_x)
    with warnings.catch_warnings(), borrowed(model, training=batch.training, seed=batch.seed):
        warnings.simplefilter("ignore")
        with differentiable_weights(model, gradients):
            x, sources = with_sources(given_x)
            outputs = call_model(model, x)
            loss = None if cotangents is not None else evaluate(batch, outputs, model)
            leaves = tensors_of(outputs)
            values, starts = [_array(leaf) for leaf in leaves], [(loss, None)]
            if cotangents is not None:
                given = cotangents(values) if callable(cotangents) else cotangents
                pairs = [(leaf, c) for leaf, c in zip(leaves, given, strict=True) if c is not None]
                starts = [(leaf, torch.as_tensor(c).to(leaf)) for leaf, c in pairs]
            weights = dict(model.named_parameters())
            found = _pulled(starts, [*sources, *weights.values()]) if gradients else None
    if found is None:
        return ReferenceRun(values, _number(loss), [], {})
    by_name = dict(zip(weights, found[len(sources) :], strict=True))
    keys = tuple(given_x) if isinstance(given_x, dict) and len(given_x) == len(sources) else ()
    return ReferenceRun(values, _number(loss), found[: len(sources)], by_name, keys)


#: Largest number of operations of a backward pass that grows with the square of the steps: some 15 s of one core.
QUADRATIC = 2e10


def _refuse_quadratic(model: nn.Module, x: Any) -> None:
    """Raise ``CertificateError`` if the model's own scans would take too long to differentiate.

    Hugging Face's selective scan indexes ``discrete_A[:, :, t]`` in a loop, and the backward pass of each index fills
    an array of all steps with zeros.
    """
    shapes = [leaf.shape for leaf in tensors_of(x) if leaf.dim() > 1]
    samples, steps = max(((s[0], s[1]) for s in shapes), key=lambda shape: shape[1], default=(0, 0))
    axes = [state_sizes(m, family) for _, m, family in sequence_modules(named_modules(model)) if family.is_quadratic]
    operations = float(samples * steps**2 * sum(math.prod(size for _, size in sizes) for sizes in axes))
    if operations > QUADRATIC:
        raise CertificateError(
            f"the backward pass of the model's own scan grows with the square of the {steps} steps: "
            f"{operations:.0e} operations, more than {QUADRATIC:.0e}; a shorter x can be certified"
        )


def place(model: nn.Module, layer: str, direction: str | None, key: str) -> WeightLocation | None:
    """Find the parameter behind a weight: see :meth:`rnnlens.adapters.protocol.Adapter.place`."""
    path, _, number = layer.partition("#")[0].partition("[")
    module = dict(named_modules(unwrapped(model))).get(path)
    if module is None:
        return None
    found = _within(module, int(number.rstrip("]") or 0), direction, key)
    if found is None:
        return None
    parameter, take = found
    names = [name for name, p in unwrapped(model).named_parameters(remove_duplicate=False) if p is parameter]
    return WeightLocation(names[0], take, tied=len(names) > 1) if names else None


def _within(module: Any, layer: int, direction: str | None, key: str) -> tuple[Any, Callable[[Array], Array]] | None:
    """Find the parameter of a module behind a weight, and the function that reorders its gradient; None if absent."""
    known = registered(module)
    if known is not None:
        single = known.single(key)
        parameter = None if single is None else dict(module.named_parameters()).get(single[0])
        turned = single is not None and single[1]
        return None if parameter is None else (parameter, lambda array: array.T if turned else array)
    kind = next((k for k in _GATES if isinstance(module, k)), None)
    cell = next((k for k in _CELLS if isinstance(module, k)), None)
    slot = _WEIGHTS.get(key.rpartition("/")[2], "")
    if (kind is None and cell is None) or has_own_step(module):
        return dict(module.named_parameters()).get(key), lambda array: array
    name = slot if cell is not None else f"{slot}_l{layer}" + ("_reverse" if direction == "backward" else "")
    parameter = module._parameters.get(name)
    if parameter is None:
        return None
    cell_class, order = _GATES[kind or _CELLS[cell]]
    if slot == "weight_hr":
        return parameter, lambda array: array.T
    rows = [order.index(gate) for gate in cell_class.gates]

    def take(array: Array) -> Array:
        """Reorder (gate * unit, ...) in torch's gate order to (..., gate * unit) in the order of rnnlens."""
        by_gate = array.reshape(len(rows), -1, *array.shape[1:])[rows]
        return by_gate.reshape(array.shape).T

    return parameter, take


def _pulled(starts: Sequence[tuple[Any, Any]], sources: Sequence[Tensor]) -> list[Array | None]:
    """Return the gradient at each source, from pairs of a tensor and its cotangent; None without a path."""
    pairs = [(start, c) for start, c in starts if start is not None and start.requires_grad]
    wanted = [s for s in sources if s.requires_grad]
    if not pairs or not wanted:
        return [None] * len(sources)
    grads = backward_pass([s for s, _ in pairs], wanted, [c for _, c in pairs])
    by_source = {id(s): g for s, g in zip(wanted, grads, strict=True)}
    return [None if by_source.get(id(s)) is None else _array(by_source[id(s)]) for s in sources]


def _array(tensor: Any) -> Array:
    tensor = tensor.detach().cpu().resolve_conj()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()


def _number(loss: Tensor | None) -> float | None:
    return None if loss is None else float(loss.detach())
