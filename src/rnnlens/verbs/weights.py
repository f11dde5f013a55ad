"""``rl.weights``: weights by kernel and gate, their gradients, also per timestep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from ..adapters.protocol import Batch, LayerWeights
from ..adapters.registry import adapter_for
from ..arguments import anything, checked, class_weights, examples, names, one_batch, one_of, seed_or_none, switch
from ..arguments import loss as a_loss
from ..errors import InputError, LayerNotFoundError, did_you_mean, message
from ..results.certificate import Certificate
from ..results.checks import warn_about
from ..results.schema import to_host
from ..results.weights import Weights
from .certify import wanted as asked_for
from .certify_weights import certify_weights
from .turns import in_turn
from .weight_gradients import FoundGradients, find_gradients
from .weight_labels import Labelled, label_cell, label_plain, node_dataset


@checked(
    model=anything,
    x=one_batch,
    y=examples,
    layers=names,
    by_time=switch,
    measure=one_of("norm"),
    loss=a_loss,
    sample_weight=examples,
    class_weight=class_weights,
    training=switch,
    seed=seed_or_none,
)
@in_turn
def weights(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    layers: str | Iterable[str] | None = None,
    by_time: bool = False,
    measure: Literal["norm"] | None = None,
    loss: str | Callable[..., Any] | None = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    training: bool = False,
    seed: int | None = 0,
) -> Weights:
    """Weights of every layer; recurrent ones split by gate and direction. With data, also their gradients.

    Parameters
    ----------
    model, x, y, loss, sample_weight, class_weight, training, seed
        As for :func:`rnnlens.trace`; without data there are no gradients.
    layers
        Names of the layers wanted; all layers with weights by default.
    by_time
        Recurrent layers: the contribution of each timestep to dL/dW instead of their sum, ``(time, unit_in, gate,
        unit)``.
    measure
        ``"norm"``, with ``by_time=True``: the Frobenius norm of each contribution per gate,
        ``recurrent_kernel_grad_norm (time, gate)``, in little memory.

    Returns
    -------
    Weights
        ``result["lstm"].kernel (feature, gate, unit)``, ``recurrent_kernel (unit_in, gate, unit)``, ``bias (gate,
        unit)``; bidirectional layers with a leading ``direction``. torch's two biases are ``bias`` and
        ``recurrent_bias``, their sum ``bias_total``. Gradients are called ``kernel_grad`` and so on. They are those of
        the loss without weight regularisation, whose own part is not of any timestep; ``rl.gradients(of="loss")``
        includes it. ``*_nan_count`` and ``*_inf_count`` count per gate what is not finite.

    Raises
    ------
    TooLargeError
        If the gradients by time would not fit ``rl.options(memory=...)``; raised before they are computed.

    References
    ----------
    dL/dW as the sum of per-step contributions: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eq. 3.
    """
    if measure is not None and not by_time:
        raise InputError(message("measure= is of single steps.", got=f"measure={measure!r}", expected="by_time=True"))
    if x is None and (by_time or y is not None or loss is not None):
        raise InputError(message("Gradients of weights need data.", got="x=None", hint="rl.weights(model, x, y)"))
    adapter = adapter_for(model)
    found = _selected(adapter.weights(model), layers)
    labelled = {name: _label(layer) for name, layer in found.items()}
    provenance, differentiated = adapter.provenance(model), FoundGradients()
    batch = Batch(x, y, sample_weight, class_weight, loss, training, None, seed)
    certified = x is not None and asked_for(model, "weights", batch)
    if x is not None:
        steps = measure or by_time
        differentiated = find_gradients(adapter, model, batch, found, by_time=steps, certified=certified)
        for name, gradients in _labelled_gradients(differentiated, found, steps).items():
            labelled[name] |= gradients
    datasets = {name: node_dataset(name, variables, provenance) for name, variables in labelled.items()}
    certificate = None if x is None else Certificate()
    if certified:
        certificate = certify_weights(adapter, model, batch, found, datasets, differentiated)
    warn_about([*differentiated.checks, *(certificate.checks if certificate else ())])
    return Weights(
        datasets,
        penalties=_penalties(found),
        loss=differentiated.loss,
        provenance=provenance,
        checks=differentiated.checks,
        certificate=certificate,
        notes=[] if differentiated.capture is None else differentiated.capture.notes,
    )


def _labelled_gradients(
    found: FoundGradients, weights: Mapping[str, LayerWeights], by_time: bool | str
) -> dict[str, dict[str, Labelled]]:
    """Gradients by layer, laid out as the weights are."""
    labelled = {
        name: label_cell(gradients, weights[name].cells, suffix="_grad", by_time=by_time)
        for name, gradients in found.recurrent.items()
    }
    for name, gradients in found.others.items():
        labelled[name] = label_plain({f"{key}_grad": gradient for key, gradient in gradients.items()})
    return labelled


def _selected(found: Mapping[str, LayerWeights], layers: str | Iterable[str] | None) -> dict[str, LayerWeights]:
    if layers is None:
        return dict(found)
    names = [layers] if isinstance(layers, str) else list(layers)
    for name in names:
        if name not in found:
            raise LayerNotFoundError(message(f"No layer named {name!r} with weights.", hint=did_you_mean(name, found)))
    return {name: found[name] for name in names}


def _label(layer: LayerWeights) -> dict[str, Labelled]:
    if layer.cells:
        return label_cell({direction: cell.weights() for direction, cell in layer.cells.items()}, layer.cells)
    return label_plain(layer.values)


def _penalties(found: Mapping[str, LayerWeights]) -> dict[str, float]:
    """What each weight regulariser adds to the loss."""
    return {
        f"{layer}/{name}": float(to_host(regularizer(entry.values[name])))
        for layer, entry in found.items()
        for name, regularizer in entry.penalties.items()
    }
