"""Checks of the loss: does it get its target and the output in the form, shape and order that it expects.

Each check runs the user's loss on the first samples, as it is called and with one thing changed.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Batch, Taps
from ..results.diagnosis import Finding
from ..results.schema import to_host
from ..typing import Array
from .experiment import MOST_CAPTURED, Experiment

MODEL = "model"


def target_shape(experiment: Experiment) -> list[Finding] | None:
    """Compare the loss of y as it is given with that of y in the shape of the output."""
    y, output = experiment.samples.y, experiment.capture.outputs
    if experiment.loss is None or y is None or len(data.leaves_of(y)) != 1 or len(data.leaves_of(output)) != 1:
        return None
    first_y = data.leaves_of(experiment.first_targets)[0]
    shape = tuple(to_host(data.leaves_of(output)[0]).shape)
    if first_y.shape == shape or first_y.size != int(np.prod(shape)):
        return []
    joint_shape = np.broadcast_shapes(first_y.shape, shape) if _can_broadcast(first_y.shape, shape) else shape
    as_given, reshaped = (_loss(experiment, target) for target in (first_y, first_y.reshape(shape)))
    # An adapter refuses a loss that would broadcast: then there is no value as given.
    is_same = as_given is not None and reshaped is not None and np.isclose(as_given, reshaped, rtol=1e-4, atol=1e-7)
    if reshaped is None or is_same or (as_given is None and joint_shape == shape):
        return []
    joined = f"they broadcast to {joint_shape}" if as_given is None else f"it is {as_given:.4g}"
    return [
        Finding(
            "TARGET_SHAPE",
            "fault",
            MODEL,
            f"The loss compares every prediction with every target: with y of shape {first_y.shape} and an output of "
            f"shape {shape} {joined}. With y in the shape of the output the loss is {reshaped:.4g}.",
            {"target": list(first_y.shape), "output": list(shape), "loss": as_given, "loss_reshaped": reshaped},
            "y and output have different shapes that broadcast, or the loss changes if y gets the output's shape",
            "y[:, None], or output.squeeze(-1): both of one shape.",
        )
    ]


def class_form(experiment: Experiment) -> list[Finding] | None:
    """Pass targets that the loss refuses in the other form of classes: indices for one-hot, or one-hot for indices."""
    target = experiment.target
    if target is None or target.task != "classes" or experiment.loss is None:
        return None
    y, classes = data.leaves_of(experiment.first_targets)[0], target.values.shape[1]
    if _loss(experiment, y) is not None:
        return []
    if y.ndim > 1 and y.shape[-1] == classes:
        index, how = y.argmax(-1), "y.argmax(-1)"
    else:
        index, how = (y[..., 0], "y[..., 0]") if y.ndim > 1 and y.shape[-1] == 1 else (y, "y")
    if index.size == 0 or index.min() < 0 or index.max() >= classes:
        return None
    forms = {
        "class indices": (index.astype("int64"), f"{how}, or the loss of one-hot targets."),
        "one-hot": (np.eye(classes, dtype="float32")[index.astype("int64")], "one-hot y, or the loss of indices."),
    }
    for name, (other_y, remedy) in forms.items():
        value = None if other_y.shape == y.shape and other_y.dtype == y.dtype else _loss(experiment, other_y)
        if value is not None and np.isfinite(value):
            return [
                Finding(
                    "TARGET_SHAPE",
                    "fault",
                    MODEL,
                    f"The loss refuses y of shape {y.shape}, {y.dtype}; with {name} of shape {other_y.shape} it is "
                    f"{value:.4g}.",
                    {"target": list(y.shape), "accepted": list(other_y.shape), "loss": None, "loss_reshaped": value},
                    "the loss raises an error for y, and not for the same classes in the other form",
                    remedy,
                )
            ]
    return None


def exchanged_arguments(experiment: Experiment) -> list[Finding] | None:
    """Compare the loss with the cross entropy of the prediction: as it is, and with its two arguments exchanged."""
    target, loss = experiment.target, experiment.loss
    if target is None or target.task == "values" or experiment.is_sequence or not inspect.isroutine(loss):
        return None
    rows = np.arange(min(MOST_CAPTURED, experiment.samples.count))
    entropy = float(target.select_samples(rows).loss(experiment.prediction[rows]).mean())
    y = experiment.first_targets
    as_given = _loss(experiment, y)
    exchanged = _loss(experiment, y, lambda first, second: loss(second, first))
    if exchanged is None or not np.isclose(exchanged, entropy, rtol=1e-3):
        return None if as_given is None else []
    if as_given is not None and np.isclose(as_given, entropy, rtol=1e-2):
        return []
    received = "fails" if as_given is None else f"is {as_given:.4g}"
    return [
        Finding(
            "TARGET_SHAPE",
            "fault",
            MODEL,
            f"The loss takes its two arguments in the other order: as it is called it {received}; with the arguments "
            f"exchanged it is {exchanged:.4g}, the cross entropy of the prediction.",
            {"loss": as_given, "loss_exchanged": exchanged, "cross_entropy": entropy},
            "the loss is the cross entropy of the prediction only if its arguments are exchanged",
            "torch: loss(output, y); Keras: loss(y_true, y_pred).",
        )
    ]


def output_form(experiment: Experiment) -> list[Finding] | None:
    """Compare what the loss takes, logits or probabilities, with what the output is."""
    target = experiment.target
    if target is None or target.task == "values" or experiment.takes_logits is None:
        return None
    raw = np.asarray(experiment.raw_output, dtype=np.float64)
    inside = bool(((raw >= -1e-6) & (raw <= 1 + 1e-6)).all())
    # Small logits lie between 0 and 1, too: of one number per output the range must be nearly all of it.
    sums_to_one = bool(np.allclose(raw.sum(axis=-1), 1, atol=1e-4)) if target.task == "classes" else np.ptp(raw) > 0.5
    form = "softmax" if target.task == "classes" else "sigmoid"
    if experiment.takes_logits and inside and sums_to_one and raw.std() > 0:
        text = "between 0 and 1" + (" and sum to 1 in every sample" if target.task == "classes" else " in every sample")
        return [
            Finding(
                "OUTPUT_FORM",
                "fault",
                MODEL,
                f"The outputs are probabilities already ({text}), and the loss applies a {form} to them once more.",
                {"takes": "logits", "smallest": float(raw.min()), "largest": float(raw.max())},
                "all outputs are probabilities, and the loss takes logits",
                f"return the values before the {form}, or use the loss of probabilities.",
            )
        ]
    if not experiment.takes_logits and not inside:
        share = float(np.mean((raw < -1e-6) | (raw > 1 + 1e-6)))
        return [
            Finding(
                "OUTPUT_FORM",
                "fault",
                MODEL,
                f"{100 * share:.0f} % of the outputs lie outside of 0 to 1, and the loss takes probabilities.",
                {"takes": "probabilities", "smallest": float(raw.min()), "largest": float(raw.max())},
                "outputs outside of [0, 1], and the loss takes probabilities",
                f"from_logits=True, or a {form} as the last activation.",
            )
        ]
    return []


def _can_broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    pairs = zip(first[::-1], second[::-1], strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def _loss(experiment: Experiment, target: Array, loss: Any = None) -> float | None:
    """Return the user's loss, or another, of the first samples with this target; None if it refuses the target."""
    batch = Batch(experiment.first_inputs, target, loss=loss or experiment.loss, seed=experiment.seed)
    try:
        return experiment.adapter.run(experiment.model, batch, Taps.nothing(gradients=False)).reference().loss
    except Exception:  # of the user's loss, which may be any function
        return None
