"""``rnnlens demo``: what three recurrent networks learn through time, traced before and after training.

scikit-learn's handwritten digits are read pixel by pixel, 64 steps each, and classified after the last pixel. The upper
rows can only be learned if the gradient of the loss, taken at the last step, reaches back that far.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import plot
from ..diagnosis import diagnose
from ..errors import FileError, InputError, MissingDependencyError
from ..verbs.trace import trace

if TYPE_CHECKING:
    from ..results.diagnosis import Diagnosis
    from ..results.trace import Trace


@dataclass(frozen=True)
class Recipe:
    """Training of one network, about 10 seconds on two cores: layer name, epochs and learning rate."""

    layer: str
    epochs: int
    learning_rate: float


#: Recipe by Keras layer. SimpleRNN's steps are cheaper; at a higher rate its trained dynamics are unstable.
RECIPES = {
    "SimpleRNN": Recipe("simple_rnn", 40, 1e-3),
    "GRU": Recipe("gru", 40, 3e-3),
    "LSTM": Recipe("lstm", 40, 3e-3),
}
HELD_OUT = 360


@dataclass(frozen=True)
class Digits:
    """Digits as sequences of pixels: ``(sample, time, feature)``, scaled to mean 0 and standard deviation 1."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


@dataclass(frozen=True)
class Portrait:
    """Results on held-out digits: accuracy and traces before and after training, diagnosis and losses after."""

    layer: str
    accuracy: tuple[float, float]
    diagnosis: Diagnosis
    traces: tuple[Trace, Trace]
    losses: np.ndarray

    @property
    def kind(self) -> str:
        """Kind of the layer, the name of the network in figures: ``GRU``."""
        return str(self.traces[0][self.layer].info.get("kind", self.layer))


def run(
    output: str | Path = "demo-output",
    *,
    cells: Sequence[str] = tuple(RECIPES),
    units: int = 64,
    epochs: int | None = None,
    train: int | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> list[Portrait]:
    """Train networks, trace them before and after, diagnose them, print table and sentences, write figures.

    ``cells`` are keys of ``RECIPES``. If they are not given, ``epochs`` are those of the recipe, and ``train``, the
    number of training digits, is that of all that are not held out. Raise FileError before training if the folder
    cannot be written to.
    """
    if epochs is not None and epochs < 1:
        raise InputError("Nothing to compare without training.", got=f"epochs={epochs}", expected=">= 1")
    folder = make_folder(Path(output))
    console = console or Console()
    keras = load_keras()
    digits = load_digits(train, seed)
    portraits = []
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs, loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for cell_name in cells:
            set_seeds(keras, seed)
            model, epoch_count = build(keras, cell_name, units), epochs or RECIPES[cell_name].epochs
            task = progress.add_task(cell_name, total=epoch_count, loss="?")

            def update_progress(epoch: int, logs: Mapping[str, float], task: TaskID = task) -> None:
                progress.update(task, completed=epoch + 1, loss=f"{logs['loss']:.3f}")

            callback = keras.callbacks.LambdaCallback(on_epoch_end=update_progress)
            fit_options = {"batch_size": 32, "epochs": epoch_count, "verbose": 0, "callbacks": [callback]}
            fit = partial(model.fit, digits.x_train, digits.y_train, **fit_options)
            portraits.append(portray(keras, model, digits, fit))
    console.print(table(portraits))
    for portrait in portraits:
        console.print(sentence(portrait), highlight=False)
    for path in draw(portraits, folder):
        console.print(f"wrote {path}", highlight=False)
    return portraits


def make_folder(folder: Path) -> Path:
    """Create the folder if needed, check that files can be written to it, and return it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        got = f"{folder}: {error.strerror}"
        raise FileError("Figures cannot be written there.", got=got, expected="a folder") from error
    return folder


def load_keras() -> Any:
    """Import Keras, with JAX as its backend unless ``KERAS_BACKEND`` is set."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import keras
    except ImportError as error:
        raise MissingDependencyError(
            "The demo trains Keras models.", got=str(error), hint="pip install 'rnnlens[demo]'"
        ) from error
    return keras


def set_seeds(keras: Any, seed: int) -> None:
    """Fix the seeds of initial weights and batches; with JAX directly, since Keras' own function imports TensorFlow."""
    if keras.backend.backend() == "jax":
        random.seed(seed)  # Keras draws the seed of each initializer from it
        np.random.seed(seed)  # noqa: NPY002  Keras draws the order of the batches from it
    else:
        keras.utils.set_random_seed(seed)


def load_digits(train: int | None, seed: int) -> Digits:
    """Return the digits of scikit-learn, shuffled; the last 360 are held out."""
    try:
        from sklearn.datasets import load_digits as load_bundled
    except ImportError as error:
        raise MissingDependencyError(
            "The demo reads scikit-learn's digits.", got=str(error), hint="pip install 'rnnlens[demo]'"
        ) from error
    pixels, labels = load_bundled(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    x = ((pixels - pixels.mean()) / pixels.std()).astype("float32")[order, :, np.newaxis]
    y = labels.astype("int32")[order]
    train_end = len(y) - HELD_OUT
    train_slice = slice(0, train_end if train is None else min(train, train_end))
    return Digits(x[train_slice], y[train_slice], x[train_end:], y[train_end:])


def build(keras: Any, cell_name: str, units: int) -> Any:
    """Build and compile a model of one recurrent layer, with a dense layer on its last output."""
    recipe = RECIPES[cell_name]
    recurrent = getattr(keras.layers, cell_name)(units, name=recipe.layer)
    model = keras.Sequential([keras.Input((64, 1)), recurrent, keras.layers.Dense(10, name="digit")])
    optimizer = keras.optimizers.Adam(recipe.learning_rate, clipnorm=1.0)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def portray(keras: Any, model: Any, digits: Digits, fit: Callable[[], Any]) -> Portrait:
    """Trace a network before and after training, and diagnose it."""
    untrained_model = keras.models.clone_model(model)
    untrained_model.set_weights(model.get_weights())
    trace_before, accuracy_before, _ = trace_and_score(keras, model, digits)
    fit()
    trace_after, accuracy_after, losses = trace_and_score(keras, model, digits)
    diagnosis = diagnose(model, digits.x_test, digits.y_test, baseline=untrained_model)
    return Portrait(
        model.layers[0].name, (accuracy_before, accuracy_after), diagnosis, (trace_before, trace_after), losses
    )


def trace_and_score(keras: Any, model: Any, digits: Digits) -> tuple[Trace, float, np.ndarray]:
    """Trace a model on the held-out digits; return the trace, the accuracy, and the loss of each digit."""
    scores = model.predict(digits.x_test, batch_size=HELD_OUT, verbose=0)
    accuracy = float(np.mean(np.argmax(scores, axis=-1) == digits.y_test))
    losses = keras.losses.sparse_categorical_crossentropy(digits.y_test, scores, from_logits=True)
    return trace(model, digits.x_test, digits.y_test), accuracy, keras.ops.convert_to_numpy(losses)


def table(portraits: Sequence[Portrait]) -> Table:
    """Return a table with one row per network."""
    result = Table(title="How many of its 64 pixels a digit is recognised by", box=SIMPLE_HEAD, pad_edge=False)
    result.add_column("layer", no_wrap=True)
    # Lines of the headings are broken so that the table fits into 80 characters.
    for column in (
        "memory\nin use",
        "95 %\ninterval",
        "at 1 %",
        "untrained",
        "training\nsignal\nat lag 63",
        "accuracy",
    ):
        result.add_column(column, justify="right", no_wrap=True)
    for portrait in portraits:
        result.add_row(portrait.layer, *_cells(portrait))
    result.caption = (
        "On held-out digits. Memory in use: how many of the last steps the prediction depends on.\n"
        "Training signal: share of a gradient at the final state that is left 63 steps back, after training."
    )
    return result


def _cells(portrait: Portrait) -> tuple[str, ...]:
    model, layer = portrait.diagnosis["model"], portrait.diagnosis[portrait.layer]
    step_count = int(model["steps"])
    lower, upper = (steps(float(bound), step_count) for bound in model["memory_interval"].values)
    is_known = bool(model.attrs["known"])
    accuracy_before, accuracy_after = (percent(share) for share in portrait.accuracy)
    return (
        steps(float(model["memory"]), step_count) if is_known else "unknown",
        f"{lower} to {upper}" if is_known else "",
        steps(float(model["memory_1_percent"]), step_count) if is_known else "",
        steps(float(model["memory_before"]), step_count),
        f"{float(layer['kappa'][step_count - 1]):.1e}",
        f"{accuracy_before} → {accuracy_after}",
    )


def percent(share: float) -> str:
    """Format a share in whole percent."""
    return f"{100 * share:.0f} %"


def steps(count: float, step_count: int) -> str:
    """Format a number of steps; ``>= last`` if it reaches the whole sequence, ``unknown`` for NaN."""
    return "unknown" if math.isnan(count) else f">= {step_count}" if count >= step_count else f"{count:.0f}"


def sentence(portrait: Portrait) -> str:
    """Return the first sentence of the diagnosis, and the accuracy before and after training."""
    accuracy_before, accuracy_after = portrait.accuracy
    diagnosis_sentence = next(iter(portrait.diagnosis.sentences.values()))
    return f"{diagnosis_sentence} Accuracy {percent(accuracy_before)} → {percent(accuracy_after)}."


#: Names of the two traces in figures.
MOMENTS = ("before training", "after training")


def draw(portraits: Sequence[Portrait], folder: Path) -> list[Path]:
    """Write the figures, of all networks and of each one, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"gradient-by-step.svg": draw_steps(portraits)}
    figures["gradient-by-step-narrow.svg"] = draw_steps(portraits, narrow=True)
    for portrait in portraits:
        figures[f"{portrait.layer}-before-after.png"] = draw_units(portrait)
        figures[f"{portrait.layer}-samples.png"] = draw_samples(portrait)
        figures[f"{portrait.layer}-diagnosis.png"] = plot.diagnosis(portrait.diagnosis)
    for name, figure in figures.items():
        figure.save(folder / name, dpi=110)
    return [folder / name for name in figures]


def draw_steps(portraits: Sequence[Portrait], narrow: bool = False) -> Any:
    """Draw the total gradient at each step before the answer, a panel per network; stacked if ``narrow``."""
    traces = {moment: {p.kind: p.traces[i][p.layer] for p in portraits} for i, moment in enumerate(MOMENTS)}
    figure = Figure((3.9, 2.2 * len(portraits) + 1.2), layout="constrained") if narrow else None
    title = "Gradient at each step before the answer"  # also readable on a phone
    axes = plot.gradient_flow(traces, title=title, figure=figure)
    last_step = int(next(iter(portraits)).diagnosis["model"]["steps"]) - 1
    lags = range(0, last_step + 1, 20 if last_step > 30 else 5)
    for ax in axes:
        ax.set_xticks([last_step - lag for lag in lags], labels=[str(lag) for lag in lags])
        if ax.get_xlabel():
            ax.set_xlabel("steps before the answer", fontsize="small")
    return axes


def draw_units(portrait: Portrait) -> Any:
    """Draw units by time, before and after: the RMS over held-out digits, each digit divided by its own peak."""
    trace_before, trace_after = (moment_trace[portrait.layer] for moment_trace in portrait.traces)
    title = f"{portrait.kind}: total gradient of the hidden state"
    return plot.before_after(trace_before, trace_after, samples="rms", names=MOMENTS, log=True, title=title)


def draw_samples(portrait: Portrait) -> Any:
    """Draw units by time for single digits, named with their losses; the typical digit comes first."""
    trace_before, trace_after = (moment_trace[portrait.layer] for moment_trace in portrait.traces)
    title = f"{portrait.kind}: total gradient of the hidden state, single digits"
    appearance: dict[str, Any] = {"names": MOMENTS, "log": True, "max_rows": 3, "title": title}
    return plot.before_after(trace_before, trace_after, losses=portrait.losses, **appearance)
