"""``rl.diagnose``: does it learn long-term dependencies, in one sentence that the numbers bear out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..adapters.registry import adapter_for
from ..arguments import anything, checked, data_set, either, many_examples, text, whole
from ..arguments import loss as a_loss
from ..arguments import seed as random_seed
from ..errors import InputError, message
from ..measures.residual import Missed
from ..results.diagnosis import Diagnosis
from ..results.schema import to_host
from ..verbs.axes import an_axes_table
from ..verbs.turns import in_turn
from .carried import measure_carried
from .experiment import Experiment
from .findings import MODEL, findings
from .label import layer_dataset, model_dataset
from .layers import measure_layers
from .memory import Memory, measure_memory
from .missed import is_missed, measure_missed
from .orientation import Orientation
from .samples import read_samples
from .words import by_layer, headline

__all__ = ["diagnose"]


@checked(
    model=anything,
    x=data_set,
    y=many_examples,
    baseline=anything,
    step=whole(),
    output=either(whole(), text, expected="a whole number, or a name"),
    task=text,
    loss=a_loss,
    samples=whole(),
    seed=random_seed,
    axes=an_axes_table,
)
@in_turn
def diagnose(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    baseline: Any = None,
    step: int = -1,
    output: int | str = 0,
    task: str | None = None,
    loss: Any = None,
    samples: int = 512,
    seed: int = 0,
    axes: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Say how much of its past a trained network uses, what it misses, and why.

    The memory in use is measured by intervention: each sample's last k steps are put behind another sample's prefix,
    and n is the smallest k from which on the prediction moves by at most 5 % of its variance. Gradients tell how a
    missed step could be reached; they are never the measure.

    Parameters
    ----------
    model
        A Keras model (any engine) or ``torch.nn.Module`` with at least one recurrent layer; left exactly as found.
    x, y
        Held-out samples, at least 128 of them, sample first; or a data set whose batches are (x, y). y: classes as
        integers or one-hot, or numbers. Without y nothing can be said about what was learned.
    baseline
        ``"init"``: the same model with fresh weights; or another model, such as this one before training. Its memory is
        shown beside, never judged.
    step
        Of sequence outputs, the one step that is looked at; the last real one by default.
    output
        Of several outputs, which: its place, or its name where they are a dict; y then is a dict, too, or that one.
    task
        ``"classes"``, ``"binary"`` or ``"values"``, where it cannot be told from y, the output and the loss.
    loss
        As for ``rl.trace``; only its name is looked at, to tell the task.
    samples
        At most so many are used.
    seed
        Who lends a prefix to whom, random directions, resampling.
    axes
        What the axes of inputs, outputs or ``"y"`` count, where that cannot be found out:
        ``{"y": ("time", "sample", "unit")}``.

    Returns
    -------
    Diagnosis
        ``print(d)`` shows the sentence and the findings; ``d["lstm"]`` and ``d["model"]`` hold the measures with
        their intervals; ``d.findings`` the findings with evidence, threshold and remedy.

    Raises
    ------
    InputError
        If x has no time axis, or the target does not fit the output.
    ModelError
        If nothing recurrent runs.

    References
    ----------
    Total Sobol index by exchange: Jansen 1999, doi:10.1016/S0010-4655(98)00154-4.
    Vanishing gradients and latched memory: Bengio, Simard, Frasconi 1994, doi:10.1109/72.279181.
    """
    _check(task, samples)
    adapter = adapter_for(model)
    data = read_samples(x, y, samples, lambda batch: Orientation(adapter, model, batch, axes))
    experiment = Experiment(model, data, step, output, task, loss if loss is not None else _compiled(model), seed)
    memory = measure_memory(experiment)
    before = _before(baseline, experiment)
    missed = measure_missed(experiment)
    layers, attributed = measure_layers(experiment)
    mask = experiment.runs[0][1].mask
    fed = data.x if not isinstance(data.x, (tuple, list, dict)) else None
    numbers = np.asarray(to_host(experiment.runs[0][1].input)) if fed is None or fed.dtype.kind != "f" else fed
    numbers = numbers.reshape(*numbers.shape[:2], -1)
    found = findings(
        memory, missed, layers, attributed, numbers, None if mask is None else to_host(mask), experiment.prediction
    )
    names = list(dict.fromkeys(layer.name for layer in layers))
    speaker = names[0] if len(names) == 1 else "the model"
    carried, why = measure_carried(experiment) if len(names) > 1 and memory.known else ({}, "")
    datasets = {MODEL: model_dataset(memory, missed, attributed, before)}
    for name in names:
        datasets[name] = layer_dataset([layer for layer in layers if layer.name == name], carried.get(name))
    return Diagnosis(
        datasets,
        sentences={
            speaker: headline(speaker, memory, before, is_missed(missed)),
            **{name: by_layer(name, found) for name, found in carried.items()},
        },
        findings=found,
        provenance=experiment.adapter.provenance(model),
        notes=[*_notes(memory, missed), *([f"The memory of each layer was not measured: {why}."] if why else [])],
    )


def _check(task: str | None, samples: int) -> None:
    if task not in (None, "classes", "binary", "values"):
        raise InputError(
            message("task= is not understood.", got=repr(task), expected='"classes", "binary", "values" or None')
        )
    if samples < 2:
        raise InputError(message("samples= is too small.", got=samples, expected="2 or more; 128 to be heard"))


def _compiled(model: Any) -> Any:
    """The loss that a compiled Keras model trains with, as far as its name goes."""
    loss = adapter_for(model).facts(model).loss
    return loss if isinstance(loss, str) or callable(loss) else None


def _before(baseline: Any, experiment: Experiment) -> Memory | None:
    if baseline is None:
        return None
    if isinstance(baseline, str) and baseline != "init":
        raise InputError(message("baseline= is not understood.", got=repr(baseline), expected='"init" or a model'))
    fresh = isinstance(baseline, str)
    model = experiment.adapter.reinitialised(experiment.model, experiment.seed) if fresh else baseline
    other = Experiment(
        model, experiment.samples, experiment.step, experiment.output, experiment.task, experiment.loss, experiment.seed
    )
    return measure_memory(other)


def _notes(memory: Memory, missed: Missed | None) -> list[str]:
    notes = []
    if missed is not None and not is_missed(missed):
        notes.append("The test of the residual sees linear effects and products within a step: no finding is no proof.")
    if memory.known and memory.steps > 1:
        notes.append("Memory is what is used on these data, not what the task needs.")
    return notes
