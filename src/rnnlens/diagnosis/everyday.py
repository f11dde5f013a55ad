"""Everyday bugs: mixed samples, weights without gradient, a carried state, scale, leaks, an unrelated target.

Each check computes what its sentence says: by the framework's own run of the untouched model and its loss, or from the
data. A check that does not apply, or cannot be made, finds nothing and rules nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Adapter, Batch, Taps
from ..errors import RnnlensError
from ..recurrence.replay import Replay
from ..results.diagnosis import Finding
from ..results.schema import to_host
from ..typing import Array
from ..verbs.differentiation.request import is_trainable
from ..verbs.names import Catalogue, TensorName, read
from ..verbs.weight_layout import sources
from .experiment import Experiment
from .layers import LayerFacts
from .loss_arguments import class_form, exchanged_arguments, output_form, target_shape
from .memory import EFFECT, P_VALUE, SOUGHT, Memory, finds_nothing, measure_relation
from .updates import update_findings

MODEL = "model"
#: Root mean square of float inputs outside of which they are badly scaled.
SMALLEST, LARGEST = 1e-3, 30.0
#: Distance of a gate value from 0 or 1, and of the size of a state from 1, below which it is saturated.
EDGE = 0.02
#: Largest deviation of any class probability from 1 / classes, for a uniform output.
UNIFORM = 0.02
#: Squared correlation of a feature with the target from which on it is the target itself.
SAME = 0.9999
#: Smallest number of classes, and of rows, for the checks that need some.
_ROWS = 8


@dataclass
class Checked:
    """Findings on everyday bugs, and what was ruled out, in words."""

    findings: list[Finding] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)

    def add(self, found: Sequence[Finding] | None, ruled_out: str) -> None:
        """Add the findings of one check, or what it rules out; None for a check that could not be made."""
        if found is None:
            return
        self.findings += found
        if not found:
            self.ruled_out.append(ruled_out)


def mixed_samples(adapter: Adapter, model: Any, x: Any, y: Any) -> list[Finding] | None:
    """Test whether the output of one sample depends on another sample, by the gradient of the untouched model.

    Samples are what the first axis of both x and y counts. A model that reads (time, sample, ...) gets another axis
    first on purpose, and its y has the same two axes. None if this cannot be tested.
    """
    x_leaves, y_leaves = data.leaves_of(x), data.leaves_of(y)
    if not x_leaves or not y_leaves or any(getattr(leaf, "ndim", 0) < 1 for leaf in (*x_leaves, *y_leaves)):
        return None
    count = int(x_leaves[0].shape[0])
    if any(leaf.shape[0] != count for leaf in (*x_leaves, *y_leaves)) or x_leaves[0].ndim < 2:
        return None
    steps_in_y = y_leaves[0].ndim > 1 and y_leaves[0].shape[1] == x_leaves[0].shape[1]
    if count < 2 or count == x_leaves[0].shape[1] or steps_in_y:
        return None
    rows = data.map_leaves(lambda leaf: to_host(leaf)[: min(count, _ROWS)], x)
    n_rows, asked = min(count, _ROWS), min(count, _ROWS) - 1

    def cotangents(values: Sequence[Array]) -> list[Array | None]:
        one_row = []
        for value in values:
            cotangent = np.zeros_like(value)
            if value.shape[:1] == (n_rows,):
                cotangent[asked] = np.random.default_rng(0).normal(size=value.shape[1:])
            one_row.append(cotangent)
        return list(one_row)

    try:
        run = adapter.run(model, Batch(rows, seed=0), Taps.nothing()).reference(cotangents)
    except (RnnlensError, RuntimeError, ValueError, TypeError):  # the diagnosis meets the model's own error again
        return None
    if not any(value.shape[:1] == (n_rows,) for value in run.outputs):
        return None
    for leaf, gradient in zip(data.leaves_of(rows), run.input_grads, strict=False):
        if gradient is None or gradient.shape != leaf.shape:
            continue
        others = np.abs(np.asarray(gradient).reshape(n_rows, -1)).max(axis=1)
        others[asked] = 0.0
        if others.max() > 0:
            other = int(others.argmax())
            finding = Finding(
                "SAMPLES_MIXED",
                "fault",
                MODEL,
                f"Samples are mixed: the output of sample {asked} depends on the input of sample {other} (the gradient "
                f"of one by the other is {others.max():.2g}; it should be 0). The model takes the first axis of x, of "
                f"shape {tuple(x_leaves[0].shape)}, for time, or joins samples.",
                {"sample": asked, "other": other, "gradient": float(others.max()), "shape": list(x_leaves[0].shape)},
                "the gradient of one sample's output by another sample's input is not 0",
                "batch_first=True in the recurrent layer, or x.transpose(0, 1) before it and the output's axes back "
                "after it. If x has time first on purpose, name the axes: axes={...}.",
            )
            return [finding]
    return [] if any(gradient is not None for gradient in run.input_grads) else None


def everyday_findings(
    experiment: Experiment, memory: Memory, layers: Sequence[LayerFacts], mixed: list[Finding] | None
) -> Checked:
    """Run all checks of everyday bugs; that of ``mixed`` samples comes before the experiment."""
    checked = Checked()
    checked.add(mixed, "mixed samples")
    has_skill = memory.skill is not None and memory.skill.proven
    checked.add(target_shape(experiment), "a target that the loss broadcasts")
    checked.add(class_form(experiment), "one-hot targets for a loss of indices, or the reverse")
    checked.add(exchanged_arguments(experiment), "exchanged arguments of the loss")
    checked.add(output_form(experiment), "an output in another form than the loss expects")
    loss_run, _ = experiment.loss_run
    gradients = None if loss_run is None else loss_run.weight_grads
    checked.add(_weights_without_gradient(experiment, gradients), "weights without gradient")
    checked.add(_frozen(experiment), "frozen layers")
    checked.add(_state_carried(experiment), "a state carried from an earlier batch")
    checked.add(_first_step_of_backward_half(experiment, layers), "a backward half read at its first step")
    checked.add(_leak(experiment), "a target among the inputs")
    checked.add(_uniform_output(experiment), "an output that is uniform over the classes")
    if not has_skill:
        checked.add(_input_scale(experiment), "badly scaled inputs")
        checked.add(_unrelated_target(experiment), "a target that no input explains")
    if memory.skill is None or not memory.skill.raw.low > 0:  # an untrained network may have skill once recalibrated
        checked.add(update_findings(experiment, gradients), "a learning rate that is far too small or too large")
    return checked


def _weights_without_gradient(
    experiment: Experiment, gradients: Mapping[str, Array | None] | None
) -> list[Finding] | None:
    """Find trained weights whose gradient of the loss is None or 0 in every entry."""
    if gradients is None:
        return None
    catalogue = Catalogue(experiment.adapter, experiment.model, experiment.first_inputs)
    without, count = [], 0
    for name in read("weights", catalogue) if catalogue.weights else ():
        if not is_trainable(name, catalogue):
            continue
        locations = _locations(catalogue, name)
        if not locations or any(location not in gradients for location in locations):
            continue
        count += 1
        if not any(np.any(gradients[location]) for location in locations if gradients[location] is not None):
            without.append(name.text)
    if not count:
        return None
    if not without:
        return []
    recurrent = {call.layer.partition("#")[0] for call, _ in experiment.replays}
    listing = ", ".join(without[:6]) + (", ..." if len(without) > 6 else "")
    return [
        Finding(
            "WEIGHTS_WITHOUT_GRADIENT",
            "fault" if any(name.partition("/")[0] in recurrent for name in without) else "caution",
            MODEL,
            f"{len(without)} of {count} trained weights have no gradient, or one that is 0 in every entry: {listing}.",
            {"weights": without, "count": count},
            "the framework's gradient of the loss by the weight is None or 0 in every entry",
            "rl.gradients(model, x, y, loss=...).disconnected gives the reasons: a layer that is not called, detach, "
            "no_grad, saturated or dead units.",
        )
    ]


def _locations(catalogue: Catalogue, name: TensorName) -> list[str]:
    """Return the framework's names of the weights behind one weight; empty if they are not known."""
    layer, names = str(name.layer), []
    for source in sources(catalogue.weights[layer])[name.key]:
        location = catalogue.facts.weight_location(layer, source.direction, source.key)
        if location is None:
            return []
        names.append(location.name)
    return names


def _frozen(experiment: Experiment) -> list[Finding]:
    """Find recurrent layers none of whose weights is trained."""
    weights = experiment.adapter.weights(experiment.model)
    names = dict.fromkeys(call.layer.partition("#")[0] for call, _ in experiment.replays)
    frozen = [
        name
        for name in names
        if name in weights and weights[name].trainable and not any(weights[name].trainable.values())
    ]
    if not frozen:
        return []
    return [
        Finding(
            "FROZEN",
            "caution",
            frozen[0],
            f"No weight of {', '.join(frozen)} is trained (requires_grad or trainable is False).",
            {"layers": frozen},
            "all weights of a recurrent layer are excluded from training",
            "for p in layer.parameters(): p.requires_grad_(True), or layer.trainable = True and compile again.",
        )
    ]


def _state_carried(experiment: Experiment) -> list[Finding]:
    """Find layers that start from states that are stored: not alike, not drawn, and not computed from the samples."""
    starts_by_call = [[to_host(state) for state in call.initial_state] for call, _ in experiment.replays]
    if not any(_differ(starts) for starts in starts_by_call):
        return []
    in_place = np.arange(len(starts_by_call[0][0]))
    exchanged = experiment.capture_of(np.roll(in_place, 1)).calls
    # A random state is the same in runs of one seed.
    redrawn = experiment.capture_of(in_place, seed=experiment.seed + 1).calls
    for i, (call, _) in enumerate(experiment.replays):
        starts = starts_by_call[i]
        if not _differ(starts):
            continue
        if all(
            np.array_equal(to_host(state), start)
            for other in (exchanged[i], redrawn[i])
            for state, start in zip(other.initial_state, starts, strict=True)
        ):
            return [
                Finding(
                    "STATE_CARRIED",
                    "caution",
                    call.layer,
                    "It starts from a stored state, as an earlier batch leaves it: it differs between samples, and "
                    "stays the same if the samples change places.",
                    {"largest": float(max(np.abs(start).max() for start in starts))},
                    "initial states differ between samples, and depend neither on the input nor on random numbers",
                    "reset the state where sequences begin: reset_states(), or h = None.",
                )
            ]
    return []


def _differ(states: Sequence[Array]) -> bool:
    """Return whether states (sample, unit) differ between samples."""
    return any(bool((state != state[:1]).any()) for state in states)


def _first_step_of_backward_half(experiment: Experiment, layers: Sequence[LayerFacts]) -> list[Finding] | None:
    """Find backward halves by whose states the output has a gradient at their first step only."""
    if experiment.is_sequence or not any(layer.bidirectional for layer in layers):
        return None
    found = []
    for layer in layers:
        norms = layer.adjoint_norms
        if not (layer.bidirectional and layer.direction == "backward") or norms is None or norms.shape[1] < 3:
            continue
        is_read = np.nan_to_num(norms).any(axis=0)
        if is_read[-1] and not is_read[:-1].any():
            found.append(
                Finding(
                    "BACKWARD_HALF_AT_ITS_FIRST_STEP",
                    "caution",
                    layer.name,
                    f"The output reads the backward half after its first step: it has seen 1 of {norms.shape[1]} steps "
                    "(the gradient of the output by its state is 0 at all others).",
                    {"steps": int(norms.shape[1])},
                    "the output's gradient by the backward state is 0 at all but the first step of that half",
                    "read that half at step 0 (torch: h_n, or out[:, 0, units:]; Keras: return_sequences=False).",
                )
            )
    return found


def _leak(experiment: Experiment) -> list[Finding] | None:
    """Find features that are the target itself at the examined step."""
    target = experiment.target
    leaf = data.leaves_of(experiment.samples.x)[experiment.samples.sequences[0]]
    if target is None or leaf.dtype.kind != "f":
        return None
    rows = np.arange(len(leaf))
    last = leaf[rows, experiment.examined_lengths - 1].reshape(len(leaf), -1).astype(np.float64)
    values, meanings = target.values, [f"number {i} of the target" for i in range(target.values.shape[1])]
    if target.task == "classes":
        values = np.concatenate([values, values @ np.arange(values.shape[1])[:, None]], axis=1)
        meanings = [f"whether the class is {i}" for i in range(len(meanings))]
    meanings += ["the target itself"] if len(meanings) < values.shape[1] else []
    meanings = ["the target itself"] if len(meanings) == 1 else meanings
    correlation = _squared_correlations(last, values)
    if correlation.size == 0 or correlation.max() < SAME or len(leaf) < _ROWS:
        return []
    # The number of the class stands last, and says more than one class.
    column = int(np.flatnonzero(correlation.max(axis=0) >= SAME)[-1])
    feature = int(correlation[:, column].argmax())
    r_squared = float(correlation[feature, column])
    return [
        Finding(
            "LEAK",
            "caution",
            MODEL,
            f"Feature {feature} of the input at the examined step is {meanings[column]}, up to scale and offset "
            f"(squared correlation {r_squared:.5f}).",
            {"feature": feature, "r_squared": r_squared},
            f"squared correlation of a feature with the target >= {SAME}",
            "leave the feature out, or shift it by one step, if it is not known when predictions are made.",
        )
    ]


def _squared_correlations(x: Array, y: Array) -> Array:
    """Return the squared correlation of each column of x with each of y; 0 for columns that do not vary.

    So it is for columns that have a number that is not finite.
    """
    units = []
    for columns in (x, y):
        values = np.where(np.isfinite(columns).all(axis=0), columns, 0.0)
        centred = values - values.mean(axis=0)
        norms = np.linalg.norm(centred, axis=0)
        varies = (np.ptp(values, axis=0) > 0) & (norms > 0)
        units.append(np.where(varies, centred / np.where(varies, norms, 1.0), 0.0))
    squared: Array = (units[0].T @ units[1]) ** 2
    return squared


def _unrelated_target(experiment: Experiment) -> list[Finding] | None:
    """Test whether any input explains the target; None with too few samples to tell."""
    relation = measure_relation(experiment)
    if relation is None:
        return None
    if relation.effect >= EFFECT or not finds_nothing(relation):
        return [] if relation.p_value < P_VALUE else None
    return [
        Finding(
            "TARGET_UNRELATED",
            "unknown",
            MODEL,
            f"No input explains the target: its association with the inputs of any step is that of chance (p = "
            f"{relation.p_value:.2f}, {relation.samples} samples), and ridge regression on them explains "
            f"{100 * max(relation.effect, 0.0):.1f} % of its variance.",
            {"effect": relation.effect, "p_value": relation.p_value, "detectable": relation.detectable},
            f"no skill, p >= {P_VALUE:g}, less than {100 * EFFECT:g} % explained, in a test that finds "
            f"{100 * SOUGHT:g} % by one input",
            "check that x and y have the same order: shuffle both by one permutation. A target that depends on "
            "combinations of steps alone (parity) looks the same.",
        )
    ]


def _input_scale(experiment: Experiment) -> list[Finding] | None:
    """Find inputs whose size is far from 1, with the share of gate values that are saturated."""
    leaf = data.leaves_of(experiment.samples.x)[experiment.samples.sequences[0]]
    if leaf.dtype.kind != "f":
        return None
    size = float(np.sqrt(np.mean(np.square(leaf, dtype=np.float64))))
    if not np.isfinite(size) or SMALLEST <= size <= LARGEST or size == 0:
        return []
    saturated, of_what = max(
        [_saturated_share(run) for _, run in experiment.replays], key=lambda pair: pair[0], default=(0.0, "")
    )
    return [
        Finding(
            "INPUT_SCALE",
            "fault",
            MODEL,
            f"The inputs are badly scaled: their root mean square is {size:.3g}"
            + (f", and {100 * saturated:.0f} % of {of_what}." if size > 1 and of_what else "."),
            {"rms": size, "saturated": saturated},
            f"root mean square below {SMALLEST:g} or above {LARGEST:g}",
            "standardise each feature with the mean and standard deviation of the training data.",
        )
    ]


def _saturated_share(run: Replay) -> tuple[float, str]:
    """Return the share of gate values, or of states where there are no gates, that are saturated, and of what it is."""
    shares = [i for i, gate in enumerate(run.cell.gates) if gate not in run.cell.proposals]
    if run.gates is not None and shares:
        gates = to_host(run.gates)[:, :, shares]
        return float(np.mean((gates < EDGE) | (gates > 1 - EDGE))), "the gate values are saturated"
    sizes = np.abs(to_host(run.states[0]))
    if len(run.states) != 1 or sizes.max() > 1:
        return 0.0, ""
    return float(np.mean(sizes > 1 - EDGE)), "the values of the state are saturated"


def _uniform_output(experiment: Experiment) -> list[Finding] | None:
    """Find outputs that give every class the same probability in every sample."""
    target = experiment.target
    if target is None or target.task != "classes":
        return None
    classes = target.values.shape[1]
    deviation = float(np.abs(experiment.prediction - 1 / classes).max())
    if deviation > UNIFORM:
        return []
    loss = float(target.loss(experiment.prediction).mean())
    return [
        Finding(
            "UNIFORM_OUTPUT",
            "unknown",
            MODEL,
            f"Every class gets the probability 1 / {classes} in every sample, within {_rounded_up(deviation)}: the "
            f"loss is {loss:.3f}, and that of guessing, ln {classes}, is {np.log(classes):.3f}.",
            {"classes": classes, "deviation": deviation, "loss": loss},
            f"no probability differs from 1 / classes by more than {UNIFORM:g}",
            "check the learning rate and the gradients of the last layer.",
        )
    ]


def _rounded_up(value: float) -> str:
    """Return a positive number with one digit that is not below it."""
    exponent = int(np.floor(np.log10(value))) if value > 0 else 0
    return f"{np.ceil(value / 10.0**exponent) * 10.0**exponent:.1g}"
