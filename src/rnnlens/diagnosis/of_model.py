"""``rl.diagnose``: measure how much of its past a model uses, apply the rules of the findings, label the measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.registry import adapter_for
from ..arguments import anything, checked, chunked, data_set, either, in_memory, integer, many_examples, text
from ..arguments import loss as a_loss
from ..arguments import seed as random_seed
from ..arguments.data import is_source
from ..errors import InputError
from ..measures.residual import Missed
from ..measures.transfer import steps_are_incomplete
from ..results.diagnosis import Diagnosis, Finding
from ..results.schema import concat_directions, coordinates, to_host
from ..typing import Array
from ..verbs.axes import an_axes_table
from ..verbs.request import in_turn
from ..vocabulary import GATE
from .carried import CarriedMemory, measure_carried
from .everyday import everyday_findings, mixed_samples
from .experiment import Experiment
from .findings import MODEL, ExaminedData, findings, headline, lag_text, layer_sentence, missed_lag
from .how_far_back import count_attributed_steps, differences, measure_steps_back
from .layers import LayerFacts, measure_layers, measure_scans, scan_sentence
from .lazy_data import is_outside_memory, load_samples
from .memory import SOUGHT, Interval, Memory, is_missed, measure_memory, measure_missed
from .prediction import ignored_class
from .samples import Orientation, read_samples
from .signal_path import SignalPath, input_gradient, measure_path, norms_by_lag


@checked(
    model=anything,
    x=chunked(data_set),
    y=chunked(many_examples),
    baseline=anything,
    step=integer(),
    output=either(integer(), text, expected="a whole number, or a name"),
    task=text,
    loss=a_loss,
    optimizer=anything,
    samples=integer(),
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
    optimizer: Any = None,
    samples: int = 512,
    seed: int = 0,
    axes: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Measure how much of its past a trained network uses, and find what it missed and why.

    The memory in use is measured by exchange: all but a sample's last k steps are replaced by another sample's. The
    memory n is the smallest k from which on this changes the prediction by at most 5 % of its variance. Gradients are
    used only to decide whether a training signal could have reached a missed step.

    Parameters
    ----------
    model
        A Keras model (any engine) or ``torch.nn.Module`` with at least one recurrent layer (of a Mamba or another
        whole-sequence layer the state is not exchanged); it is not changed.
    x, y
        Held-out samples (sample, time, ...), at least 128 of them; or a data set whose batches are (x, y). y contains
        classes as integers or one-hot, or numbers. Of arrays of Dask, zarr or h5py, samples first, only ``samples`` of
        them are read, in 16 blocks of neighbours. Without y, as for a
        policy, there is no skill, and the memory in use is that of the output: by the Jensen-Shannon divergence of its
        distribution if ``task`` or ``loss`` says that it has one, or each row sums to 1; else by its variance.
    baseline
        ``"init"`` for the same model re-initialised, or another model, such as this one before training. Its memory is
        reported for comparison, without findings.
    step
        Examined step of a sequence output; the last real one by default. In a forecast it is a step of the forecast.
    output
        Examined output of several: its position, or its name if the outputs are a dict. y is then a dict too, or the
        target of this output alone.
    task
        ``"classes"``, ``"binary"`` or ``"values"``; needed only if y, the output and the loss do not determine it:
        without y for logits, such as those of a policy's actions.
    loss
        As for ``rl.trace``. Its name determines the task, and whether outputs are logits. A function is called once, on
        a few samples, to check that it returns a number.
    optimizer
        Optimizer of the training, in torch; in Keras that of ``compile`` by default. A copy of it takes one step on
        copies of the weights, to compare the size of an update with that of the weights.
    samples
        Largest number of samples to use.
    seed
        Seed of the exchange, of random directions and of resampling.
    axes
        Names of the axes of inputs, outputs or ``"y"``, such as ``{"y": ("time", "sample", "unit")}``; needed only if
        they cannot be detected.

    Returns
    -------
    Diagnosis
        ``print(d)`` shows the sentences and the findings. ``d["lstm"]`` and ``d["model"]`` are Datasets of measures
        with their intervals; of a bidirectional layer measures have a first axis ``direction``: forward, backward.
        ``d.findings`` lists the findings with evidence, threshold and remedy.

    Raises
    ------
    InputError
        If x has no time axis, the target does not fit the output, or the loss returns no number.
    ModelError
        If no recurrent layer runs.

    References
    ----------
    Total Sobol index by exchange: Jansen 1999, doi:10.1016/S0010-4655(98)00154-4.
    Jensen-Shannon divergence: Lin 1991, doi:10.1109/18.61115; as a squared distance, so that its share is such an
    index: Fuglede, Topsoe 2004, doi:10.1109/ISIT.2004.1365067.
    Vanishing gradients and latched memory: Bengio, Simard, Frasconi 1994, doi:10.1109/72.279181.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> class Reader(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gru, self.head = torch.nn.GRU(2, 4, batch_first=True), torch.nn.Linear(4, 1)
    ...     def forward(self, x):
    ...         return self.head(self.gru(x)[0][:, -1])
    >>> x = torch.randn(256, 12, 2)
    >>> diagnosis = rl.diagnose(Reader(), x, x[:, 6, :1], loss=torch.nn.functional.mse_loss)
    >>> "NO_SKILL" in diagnosis.codes  # it was not trained
    True
    """
    _check_arguments(task, samples)
    x, y, sampling_note = _read_lazy(x, y, samples, axes)
    adapter = adapter_for(model)
    mixed = None if axes or y is None or is_source(x) else mixed_samples(adapter, model, x, y)
    if mixed:
        return _diagnosis_of_mixed_samples(mixed, adapter.facts(model).provenance)
    batch = read_samples(x, y, samples, lambda batch: Orientation(adapter, model, batch, axes))
    used_loss = loss if loss is not None else _compiled_loss(model)
    all_samples, batch = batch.count, batch.with_targets(ignored_class(used_loss), step)
    left_out = all_samples - batch.count
    experiment = Experiment(model, batch, step, output, task, used_loss, seed, optimizer)
    if loss is not None:
        experiment.refuse_loss()
    memory = measure_memory(experiment)
    named_baseline = _measure_baseline(baseline, experiment)
    residual_test = measure_missed(experiment)
    scans = measure_scans(experiment)
    layers = [*measure_layers(experiment), *scans]
    path = (
        measure_path(experiment, missed_lag(residual_test))
        if residual_test is not None and is_missed(residual_test, memory)
        else None
    )
    gradient = path.gradient if isinstance(path, SignalPath) else input_gradient(experiment)
    gradient_by_lag = None if gradient is None else norms_by_lag(experiment, gradient)
    attributed_steps = count_attributed_steps(gradient_by_lag)
    rule_findings = findings(
        memory,
        residual_test,
        layers,
        attributed_steps,
        ExaminedData(
            _input_numbers(experiment),
            _mask(experiment),
            xr.DataArray(experiment.prediction, {"sample": batch.labels}, ("sample", "unit")),
        ),
        path,
        everyday_findings(experiment, memory, layers, mixed),
    )
    carried_by_layer, reason = measure_carried(experiment) if memory.is_known else ({}, "")
    datasets = {MODEL: model_dataset(memory, residual_test, attributed_steps, named_baseline, batch.labels)}
    datasets[MODEL].attrs["why_not_carried"] = "" if carried_by_layer else reason or memory.reason
    for name in dict.fromkeys(layer.name for layer in layers):
        datasets[name] = layer_dataset([layer for layer in layers if layer.name == name], carried_by_layer.get(name))
    sentences = {name: layer_sentence(name, carried_memory) for name, carried_memory in carried_by_layer.items()}
    sentences |= {scan.name: scan_sentence(scan) for scan in scans if "half_life" in scan.scan}
    steps_back = measure_steps_back(memory, carried_by_layer, gradient_by_lag)
    return Diagnosis(
        datasets,
        sentences={"the model": headline(memory, named_baseline, residual_test), **sentences},
        findings=rule_findings,
        how_far_back=steps_back,
        why_they_differ=differences(steps_back),
        provenance=experiment.adapter.facts(model).provenance,
        notes=[
            *_notes(memory, residual_test, reason if experiment.replays else "", layers_alone=bool(carried_by_layer)),
            *([sampling_note] if sampling_note else []),
            *(
                f"{name} is called on its own output, over depth; its dynamics: rl.lyapunov(model, x, layer={name!r})."
                for name in experiment.depth_loops
            ),
            *_notes_of_incomplete_steps(experiment),
            *_notes_of_left_out(left_out),
        ],
    )


def _read_lazy(x: Any, y: Any, samples: int, axes: Any) -> tuple[Any, Any, str]:
    """Read the samples of data that are not in memory; return other data unchanged, and a note on what was read."""
    if is_source(x) or not (is_outside_memory(x) or is_outside_memory(y)):
        return x, y, ""
    if axes:  # samples may then be on any axis
        return in_memory("x", x), in_memory("y", y), ""
    return load_samples(x, y, samples)


def _diagnosis_of_mixed_samples(mixed: list[Finding], provenance: Mapping[str, str]) -> Diagnosis:
    """Return a diagnosis of that finding alone: nothing else can be measured before it is repaired."""
    memory = Memory(0, None, False, "samples are mixed")
    return Diagnosis(
        {MODEL: model_dataset(memory, None, None, None, np.arange(0))},
        sentences={"the model": headline(memory, None, None)},
        findings=mixed,
        provenance=provenance,
    )


def _input_numbers(experiment: Experiment) -> Any:
    """Return all inputs that are sequences as the user passed them, (sample, time, feature)."""
    leaves = data.leaves_of(experiment.samples.x)
    sequences = (leaves[position] for position in experiment.samples.sequences)
    return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in sequences], axis=-1)


def _mask(experiment: Experiment) -> Any:
    mask = experiment.replays[0][1].mask if experiment.replays else None
    return None if mask is None else to_host(mask)


def _check_arguments(task: str | None, samples: int) -> None:
    if task not in (None, "classes", "binary", "values"):
        raise InputError("task= is not understood.", got=repr(task), expected='"classes", "binary", "values" or None')
    if samples < 2:
        raise InputError("samples= is too small.", got=samples, expected="2 or more; 128 for intervals")


def _compiled_loss(model: Any) -> Any:
    """Return the loss of a compiled Keras model; None if there is none, or several."""
    loss = adapter_for(model).facts(model).loss
    return loss if isinstance(loss, str) or callable(loss) else None


def _measure_baseline(baseline: Any, experiment: Experiment) -> tuple[str, Memory] | None:
    """Measure the memory of the baseline; return its name and memory, or None without a baseline."""
    if baseline is None:
        return None
    if isinstance(baseline, str) and baseline != "init":
        raise InputError("baseline= is not understood.", got=repr(baseline), expected='"init" or a model')
    if isinstance(baseline, str):
        name, model = "re-initialised", experiment.adapter.reinitialised(experiment.model, experiment.seed)
    else:
        name, model = "baseline", baseline
    baseline_experiment = Experiment(
        model, experiment.samples, experiment.step, experiment.output, experiment.task, experiment.loss, experiment.seed
    )
    return name, measure_memory(baseline_experiment)


def _notes(memory: Memory, residual_test: Missed | None, reason: str, *, layers_alone: bool) -> list[str]:
    notes = []
    if residual_test is not None and not is_missed(residual_test, memory):
        notes.append("The residual test finds linear effects and products within a step; no finding is no proof.")
        notes += _power_notes(residual_test)
    if residual_test is not None and residual_test.overlapping:
        notes.append(
            "The samples are overlapping windows of one series: tests and intervals resample blocks of neighbouring "
            "windows."
        )
    if memory.is_known and memory.steps > 1:
        notes.append("Memory in use is what the model uses on these data, not what the task needs.")
    if reason and layers_alone:
        notes.append(f"The memory of each layer was measured on the layer alone: {reason}.")
    elif reason:
        notes.append(f"The memory of each layer was not measured: {reason}.")
    return notes


def _notes_of_incomplete_steps(experiment: Experiment) -> list[str]:
    """Name the layers that are not measured, since their replay does not know a part of each step."""
    names = dict.fromkeys(call.layer for call, run in experiment.replays if steps_are_incomplete(run))
    return [
        f"State transfer, gates and units of {name!r} were not measured: the model's code changes the state between "
        "the steps. rl.gradients and rl.jacobian include that change."
        for name in names
    ]


def _notes_of_left_out(count: int) -> list[str]:
    """Say how many samples have no target that the loss counts."""
    counted = "1 sample was" if count == 1 else f"{count} samples were"
    return [f"{counted} left out: the loss ignores their targets."] if count else []


def _power_notes(residual_test: Missed) -> list[str]:
    """Say what is above chance without a finding, and what the test could not have found with these samples."""
    lag = missed_lag(residual_test)
    if residual_test.exceeds_chance:
        return [
            f"The errors are associated with the input {lag_text(lag)} beyond 99 % of chance, but inputs "
            f"explain {100 * max(residual_test.effect, 0.0):.1f} % of the variance of the target only."
        ]
    if residual_test.detectable <= SOUGHT or residual_test.largest_possible <= SOUGHT:
        return []
    if residual_test.detectable > residual_test.largest_possible:
        return [
            f"With {residual_test.samples} samples the residual test could not have found an effect of one input, "
            f"however large; for one of {100 * SOUGHT:.0f} % of the variance of the target it needs about "
            f"{residual_test.samples_for(SOUGHT)} samples."
        ]
    return [
        f"With {residual_test.samples} samples the residual test finds an effect of one input from "
        f"{100 * residual_test.detectable:.0f} % of the variance of the target on; for {100 * SOUGHT:.0f} % it "
        f"needs about {residual_test.samples_for(SOUGHT)} samples."
    ]


BOUNDS = ["low", "high"]


def model_dataset(
    memory: Memory,
    residual_test: Missed | None,
    attributed_steps: int | None,
    named_baseline: tuple[str, Memory] | None,
    samples: Array,
) -> xr.Dataset:
    """Label the measures of the model: curves over ``context``, lengths with intervals, skill, residual test by lag."""
    share = f"share of {'divergence' if memory.of_distribution else 'variance'}"
    variables = {
        "use": _variable(("context",), memory.use, "use of older inputs", share, "U(k), total Sobol index"),
        "use_interval": _variable(("context", "bound"), memory.use_band, "95 % interval of use", share),
        "benefit": _variable(("context",), memory.benefit, "benefit of older inputs", "share of the score", "B(k)"),
        "benefit_interval": _variable(("context", "bound"), memory.benefit_band, "95 % interval of benefit", "share"),
        "steps": _variable((), memory.steps, "steps that the output can have seen", "step"),
        **_interval_variables("memory", memory.length, "memory in use, n at 5 %"),
        **_interval_variables("memory_1_percent", memory.rare_length, "memory in use, n at 1 %"),
        **_interval_variables("memory_needed", memory.needed_length, "memory by benefit, n at 5 %"),
    }
    if memory.change.size:
        long_name = f"{'Jensen-Shannon divergence' if memory.of_distribution else 'squared change'} of the prediction"
        variables["change"] = _variable(
            ("context", "sample"), memory.change, long_name, "nat" if memory.of_distribution else "1"
        )
    if memory.skill is not None:
        long_name = "mean loss: cross-entropy, or squared error summed over outputs"
        variables |= _interval_variables("loss", memory.skill.loss, long_name, "1")
        variables |= _interval_variables("skill", memory.skill.raw, "skill: 1 - loss / best constant loss", "1")
        variables |= _interval_variables("skill_recalibrated", memory.skill.recalibrated, "skill, recalibrated", "1")
    if memory.later_steps[1]:
        variables["later_steps_used"] = _variable(
            (), memory.later_steps[0], "steps after the output's own step in use", "step"
        )
    if residual_test is not None:
        variables["missed"] = _variable(
            ("lag",), residual_test.by_step[::-1], "squared covariances of errors and inputs, summed, over Var y", "1"
        )
        variables["missed_threshold"] = _variable((), residual_test.threshold, "99 % of permuted maxima", "1")
        variables["missed_learned"] = _variable(
            (), residual_test.learned, "share of the association that the prediction has", "1"
        )
        variables["missed_effect"] = _variable(
            (), residual_test.effect, "share of Var y that ridge explains in the errors", "1"
        )
    if attributed_steps is not None:
        variables["attributed_memory"] = _variable(
            (), attributed_steps, "last steps that hold 95 % of the squared gradient", "step"
        )
    coords = {"context": memory.context, "bound": BOUNDS}
    if named_baseline is not None:
        name, baseline_memory = named_baseline
        variables |= _interval_variables(
            "memory_before", baseline_memory.length, f"memory in use of the {name} model, n at 5 %"
        )
        variables["use_before"] = _variable(
            ("context_before",), baseline_memory.use, f"use of older inputs by the {name} model", "share of variance"
        )
        coords["context_before"] = baseline_memory.context
    dataset = xr.Dataset(variables, attrs={"known": memory.is_known, "why": memory.reason, "censored": memory.censored})
    if memory.change.size:
        coords["sample"] = samples
    return dataset.assign_coords(coords)


def layer_dataset(facts: Sequence[LayerFacts], carried_memory: CarriedMemory | None = None) -> xr.Dataset:
    """Label the measures of a layer, by direction: state transfer, adjoint, leading exponent, gates, units."""
    datasets = [_facts_dataset(direction_facts) for direction_facts in facts]
    for dim in ("lag", "lag_out"):  # both directions are padded with NaN to the length of the longer one
        padding_lengths = [max(d.sizes.get(dim, 0) for d in datasets) - d.sizes.get(dim, 0) for d in datasets]
        datasets = [
            d.pad({dim: (0, n)}) if n and dim in d.dims else d for d, n in zip(datasets, padding_lengths, strict=True)
        ]
    dataset = concat_directions(datasets)
    if carried_memory is not None:
        long_name = (
            "use of the layer's state by "
            f"{'the prediction' if carried_memory.quantity == 'prediction' else 'its last state'}"
        )
        dataset["carried"] = _variable(
            ("context",), carried_memory.use, long_name, "share of variance", "U(k), its state exchanged"
        )
        dataset["carried_memory"] = _variable(
            (), carried_memory.length, "memory carried by the layer, n at 5 %", "step"
        )
        dataset = dataset.assign_coords(context=carried_memory.context)
    return dataset.assign_attrs(cell=facts[0].cell)


def _facts_dataset(facts: LayerFacts) -> xr.Dataset:
    rate, error = facts.transfer.leading_exponent()
    low, high = facts.transfer.quartiles()
    variables = {
        "kappa": _variable(
            ("lag",), facts.transfer.kappa, "state transfer", "1", "share of a cotangent on the final state left"
        ),
        "kappa_low": _variable(("lag",), low, "state transfer, lower quartile", "1"),
        "kappa_high": _variable(("lag",), high, "state transfer, upper quartile", "1"),
        "lambda_1": _variable((), rate, "leading exponent", "1 / step"),
        "lambda_1_stderr": _variable((), error, "standard error of the leading exponent", "1 / step"),
        "growth": _variable((), facts.growth, "growth of the output's adjoint", "decades"),
        "decay": _variable((), facts.decay, "Theil-Sen slope of the adjoint", "1 / step"),
        "nan": _variable((), facts.states.nan / facts.states.count, "share of the states that is NaN", "1"),
        "infinite": _variable(
            (), facts.states.infinite / facts.states.count, "share of the states that is infinite", "1"
        ),
        "subnormal": _variable(
            (), facts.states.underflow / facts.states.count, "share of the states that is subnormal", "1"
        ),
        **facts.scan,
    }
    if facts.dead.size:
        variables["dead"] = _variable(("unit",), facts.dead, "dead units", "1")
    if facts.adjoint_norms is not None:
        variables["adjoint_size"] = _variable(
            (), facts.adjoint_size, "largest norm of the adjoint of a sample, median", "1"
        )
    if facts.adjoint is not None:
        variables["adjoint"] = _variable(
            ("lag_out",), facts.adjoint.median, "adjoint of the output by own peak, median", "1"
        )
        variables["adjoint_low"] = _variable(("lag_out",), facts.adjoint.low, "lower quartile", "1")
        variables["adjoint_high"] = _variable(("lag_out",), facts.adjoint.high, "upper quartile", "1")
    if facts.timescale is not None:
        variables["timescale"] = _variable(("cell_unit",), facts.timescale, "gate time constant", "step")
    if facts.stuck_shut is not None and facts.stuck_open is not None:
        variables["stuck_shut"] = _variable(("gate", "cell_unit"), facts.stuck_shut, "gates nearly always shut", "1")
        variables["stuck_open"] = _variable(("gate", "cell_unit"), facts.stuck_open, "gates nearly always open", "1")
        variables["gate"] = coordinates({GATE: len(facts.gates)}, {"gates": facts.gates})[GATE]
    return xr.Dataset(variables)


def _variable(dims: tuple[str, ...], values: object, long_name: str, units: str, definition: str = "") -> xr.Variable:
    attrs = {"long_name": long_name, "units": units}
    return xr.Variable(dims, np.asarray(values), {**attrs, "definition": definition} if definition else attrs)


def _interval_variables(name: str, interval: Interval, long_name: str, units: str = "step") -> dict[str, xr.Variable]:
    return {
        name: _variable((), interval.value, long_name, units),
        f"{name}_interval": _variable(
            ("bound",), np.array([interval.low, interval.high]), f"95 % interval of {long_name}", units
        ),
    }
