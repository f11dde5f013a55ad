"""``rl.compare``: diagnose many models, in this process or on a Dask cluster, and tabulate the results."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import pickle
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ..adapters.registry import adapter_for, adapter_of
from ..arguments import anything, checked, data_set, many_examples, switch
from ..cluster import (
    finished_results,
    imported_backend,
    limit_process,
    limit_thread,
    pack_model,
    pickle_named_parts,
    pickle_value,
    propose_backend,
    unpack_model,
    use_backend,
)
from ..errors import CallError, InputError, did_you_mean, has_attribute, short_repr
from ..measures.intervention import USED, interval, memory_length, resampling_weights
from ..results.diagnosis import Comparison, Diagnosis
from ..settings import Progress
from ..typing import Array
from .of_model import diagnose
from .scorecard import MEASURES, Score, measure_scores, refuse_lazy, scorecard_table, scores_of_diagnosis

Load = Callable[[Any], Any]


@dataclass(frozen=True)
class Outcome:
    """Diagnosis of a model, or kind and text of the error that prevented it; and its scorecard, where one was asked."""

    diagnosis: Diagnosis | None = None
    error: str = ""
    scores: Mapping[str, Score] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A model to diagnose: itself, a ``.keras`` file, a function that returns it, or a value for ``load``."""

    value: Any
    load: Load | None
    backend: str | None

    def model(self) -> Any:
        """Return the model, loaded or made in this process."""
        if self.load is not None:
            return self.load(self.value)
        if isinstance(self.value, str | os.PathLike):
            path = Path(self.value)  # loaded by the Keras that wrote it, which refuses Lambda layers, being code
            with zipfile.ZipFile(path) as archive:
                keras_version = json.loads(archive.read("metadata.json"))["keras_version"]
            if keras_version.startswith("2."):
                return importlib.import_module("tf_keras").models.load_model(path)
            if self.backend is not None:
                use_backend(self.backend)
            return importlib.import_module("keras").models.load_model(path)
        return self.value() if is_function(self.value) else self.value

    def pack(self) -> tuple[str | None, bytes]:
        """Serialise the candidate for :func:`diagnose_on_worker`; return the name of Keras' engine and the bytes."""
        if self.load is None and not is_function(self.value) and not isinstance(self.value, str | os.PathLike):
            serialised = _SerialisedModel(pack_model(self.value, adapter_for(self.value).engine))
            return self.backend, pickle_value(Candidate(serialised, _SerialisedModel.model, None))
        parts = {"load": self.load, "model": self.value}
        return self.backend, pickle_named_parts(Candidate(self.value, self.load, self.backend), parts, "arguments")


@dataclass(frozen=True)
class _SerialisedModel:
    """A model as bytes."""

    data: bytes

    def model(self) -> Any:
        return unpack_model(self.data)


def is_function(value: Any) -> bool:
    """Return whether a value is a function or a partial one; models and their classes are not."""
    return inspect.isroutine(value) or isinstance(value, functools.partial)


def refuse_unloadable(name: str, value: Any) -> None:
    """Raise InputError for a value that is no model and needs ``load=``: a state dict or the file of one."""
    is_path = isinstance(value, str | os.PathLike)
    if is_path and Path(value).suffix == ".keras":
        return
    if is_path or isinstance(value, Mapping | int | float | tuple | list) or value is None:
        raise InputError(
            f"models[{name!r}] is no model.",
            got=short_repr(value),
            expected="a model, a function that returns one, the path of a .keras file, or a diagnosis",
            hint="give load=, a function that takes this value and returns the model",
        )


def outcomes_of(
    models: Mapping[Any, Any], load: Load | None, client: Any, arguments: Mapping[str, Any], *, scorecard: bool
) -> dict[Any, Outcome]:
    """Diagnose models by name, in their order; a failure has the text of its error.

    Parameters
    ----------
    models
        Values as :func:`rnnlens.compare` takes them; diagnoses among them are returned unchanged.
    load
        Returns the model of a value; None if values are models.
    client
        Dask client whose workers diagnose; None for this process.
    arguments
        Keywords of :func:`rnnlens.diagnose`, x and y included.
    scorecard
        Whether each model is also measured for the scorecard.
    """
    outcomes = {
        name: Outcome(value, scores=scores_of_diagnosis(value) if scorecard else {})
        for name, value in models.items()
        if isinstance(value, Diagnosis)
    }
    backend = imported_backend()
    candidates = {name: Candidate(value, load, backend) for name, value in models.items() if name not in outcomes}
    named_outcomes: Iterator[tuple[Any, Outcome]]
    if client is None:
        named_outcomes = (
            (name, _diagnose_candidate(candidate, arguments, scorecard)) for name, candidate in candidates.items()
        )
    else:
        named_outcomes = _run_on_workers(candidates, client, arguments, scorecard)
    with Progress("diagnoses", len(candidates)) as progress:
        for name, outcome in named_outcomes:
            outcomes[name] = outcome
            progress.advance()
    return {name: outcomes[name] for name in models}


def _diagnose_candidate(candidate: Candidate, arguments: Mapping[str, Any], scorecard: bool) -> Outcome:
    try:
        model = candidate.model()
    except Exception as error:
        return _failed(error, scorecard)
    try:
        outcome = Outcome(diagnose(model, **arguments))
    except Exception as error:
        outcome = _failed(error, scorecard)
    if not scorecard:
        return outcome
    return replace(outcome, scores=measure_scores(model, outcome.diagnosis, outcome.error, **_data_of(arguments)))


def _data_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Split the arguments of a diagnosis into x, y and keywords."""
    keywords = {name: value for name, value in arguments.items() if name not in ("x", "y")}
    return {"x": arguments["x"], "y": arguments["y"], "keywords": keywords}


def _failed(error: BaseException, scorecard: bool) -> Outcome:
    """Return the outcome of a model that could not be diagnosed; all its measures have that reason."""
    text = f"{type(error).__name__}: {error}"
    return Outcome(
        error=text, scores=dict.fromkeys(MEASURES, Score(reason=text.partition("\n")[0])) if scorecard else {}
    )


def _run_on_workers(
    candidates: Mapping[Any, Candidate], client: Any, arguments: Mapping[str, Any], scorecard: bool
) -> Iterator[tuple[Any, Outcome]]:
    serialised, run_id = pickle_named_parts(dict(arguments), arguments, "arguments"), uuid.uuid4().hex[:8]
    # A task of its own, not scattered data: Dask makes it again when the worker that holds it is killed.
    data_future = client.submit(bytes, serialised, key=f"rnnlens-samples-{run_id}", pure=False)
    packed_candidates = {}
    for name, candidate in candidates.items():
        try:
            packed_candidates[name] = candidate.pack()
        except Exception as error:
            yield name, _failed(error, scorecard)

    def outcomes(names: Sequence[Any], attempt: str) -> Iterator[tuple[Any, Any]]:
        keys = {name: f"rnnlens-diagnose-{run_id}-{attempt}{number}" for number, name in enumerate(names)}
        futures = {
            client.submit(
                diagnose_on_worker,
                *packed_candidates[task_name],
                data_future,
                scorecard,
                key=keys[task_name],
                pure=False,
            ): task_name
            for task_name in names
        }
        for future, outcome in finished_results(client, list(futures)):
            yield futures[future], outcome

    killed_names = []
    for name, outcome in outcomes(list(packed_candidates), ""):
        if type(outcome).__name__ == "KilledWorker":
            killed_names.append(name)
        else:
            yield name, _failed(outcome, scorecard) if isinstance(outcome, BaseException) else outcome
    # Dask also gives up models that waited at a worker which another one killed; each is tried alone.
    for attempt, suspect in enumerate(killed_names):
        for name, outcome in outcomes([suspect], f"alone-{attempt}-"):
            yield name, _failed(outcome, scorecard) if isinstance(outcome, BaseException) else outcome


def diagnose_on_worker(backend: str | None, model: bytes, data: bytes, scorecard: bool) -> Outcome:
    """Rebuild one candidate model from bytes and diagnose it; this is the function of the Dask tasks."""
    limit_process()
    propose_backend(backend)
    try:
        candidate, arguments = pickle.loads(model), pickle.loads(data)
    except Exception as error:
        return _failed(error, scorecard)
    limit_thread()
    return _diagnose_candidate(candidate, arguments, scorecard)


_UNKNOWN = (float("nan"), None)
_TABLE_KEYS = ("skill", "memory", "memory_1_percent", "memory_needed")


def _check_function(name: str, value: Any) -> Any:
    if not callable(value):
        raise InputError(f"{name}= is a function.", got=short_repr(value), expected="a function of one value")
    return value


def _check_client(name: str, value: Any) -> Any:
    if not all(has_attribute(value, method) for method in ("submit", "scatter", "cancel")):
        expected, hint = "a Dask client", "from dask.distributed import Client; client=Client()"
        raise InputError(f"{name}= is no client.", got=short_repr(value), expected=expected, hint=hint)
    return value


@checked(models=anything, x=data_set, y=many_examples, load=_check_function, client=_check_client, scorecard=switch)
def compare(
    models: Mapping[str, Any] | Sequence[Any],
    x: Any = None,
    y: Any = None,
    *,
    load: Callable[[Any], Any] | None = None,
    client: Any = None,
    scorecard: bool = False,
    **keywords: Any,
) -> Comparison:
    """Tabulate diagnoses of several models, with differences from the first; models are diagnosed before.

    Parameters
    ----------
    models
        By name, or in a list: diagnoses as ``rl.diagnose`` returns them; models; functions without arguments that
        return a model; paths of ``.keras`` files; or any values that ``load`` takes. A list is named by its values:
        the stems of paths, words, seeds; otherwise by position.
    x, y
        Samples of ``rl.diagnose`` (sample, time, ...), the same for all models; not needed for diagnoses.
    load
        Function that takes one value of ``models`` and returns the model, such as
        ``lambda path: restored(Net(), path)``. It runs where the model is diagnosed, so that one model at a time is
        in memory, and paths are those of that machine.
    client
        Client of a Dask cluster. Each model is then diagnosed by a task of its own on a worker; x and y are sent once
        to each worker. Without a client the models are diagnosed here, one after another.
    scorecard
        Whether to measure each model by the other verbs too: number of weights, state in use, exponents, influence of
        a step. Runs each model some dozen times more, on arrays in memory.
    **keywords
        Further arguments of ``rl.diagnose``, such as ``step``, ``samples`` or ``loss``.

    Returns
    -------
    Comparison
        ``print(c)`` shows a table; ``c.table`` is a Dataset over ``name``; ``c["a"]`` is the diagnosis of one model,
        and ``c.diagnoses`` has all by name.
        The difference of the memory from that of the first diagnosis has a paired interval, from the same resamples of
        both. It is NaN if the numbers of samples differ. A model that fails is a row of NaN with its error in
        ``c.table.error``; the others are not affected. With ``scorecard=True`` ``c.scorecard`` is a Dataset over
        ``name`` and ``measure``: ``value``, its ``interval`` where there is one, the ``verb`` that gives the number,
        the ``layer`` of several in which it is largest, and the ``reason`` where it is not defined (NaN).
        ``rl.plot.scorecard(c)`` draws it.

    Raises
    ------
    InputError
        If there is nothing to compare, models come without data, or ``load`` is needed.
    UnsupportedError
        If x, y or another argument cannot be sent to workers.

    References
    ----------
    Efron 1979, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7(1).

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
    >>> x = torch.randn(128, 12, 2)
    >>> table = rl.compare({"a": Reader(), "b": Reader()}, x, x[:, -1, :1], loss=torch.nn.functional.mse_loss)
    >>> table.table.sizes["name"], list(table.diagnoses)
    (2, ['a', 'b'])
    """
    by_name = _models_by_name(models)
    _refuse_keywords(keywords)
    undiagnosed = {name: value for name, value in by_name.items() if not isinstance(value, Diagnosis)}
    if undiagnosed and x is None:
        received = ", ".join(f"{name}: {type(value).__name__}" for name, value in undiagnosed.items())
        expected, hint = "what rl.diagnose returns", "rl.compare(models, x, y) diagnoses models"
        raise InputError("These are no diagnoses.", got=received, expected=expected, hint=hint)
    if undiagnosed and has_attribute(x, "__next__"):
        message, hint = "x is an iterator, which the first model would use up.", "x=list(x), or arrays"
        raise InputError(message, got=type(x).__name__, hint=hint)
    for name, value in undiagnosed.items():
        if load is None:
            refuse_unloadable(name, value)
    if scorecard:
        refuse_lazy(x, y)
    outcomes = outcomes_of(by_name, load, client, {"x": x, "y": y, **keywords}, scorecard=scorecard)
    diagnoses = {name: outcome.diagnosis for name, outcome in outcomes.items() if outcome.diagnosis is not None}
    provenance = next((d.provenance for d in diagnoses.values()), None)
    datasets = {"comparison": _comparison_table(outcomes)}
    if scorecard:
        datasets["scorecard"] = scorecard_table({name: outcome.scores for name, outcome in outcomes.items()})
    return Comparison(datasets, diagnoses=diagnoses, provenance=provenance)


def _models_by_name(models: Any) -> dict[Any, Any]:
    if isinstance(models, Mapping):
        by_name = dict(models)
    elif isinstance(models, list | tuple):
        names = _model_names(models)
        by_name = dict(zip(names, models, strict=True))
        if len(by_name) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise InputError("Two models have the same name.", got=duplicate, hint="a dict with a name for each")
    else:
        by_name = {}
    if not by_name:
        is_model = adapter_of(models) is not None
        problem = "One model alone is no comparison." if is_model else "Nothing to compare."
        hint = 'rl.compare({"lstm": model, "gru": other}, x, y), or diagnoses in place of the models'
        if is_model:
            hint += "; of one model: rl.diagnose(model, x, y)"
        raise InputError(problem, got=type(models).__name__ if is_model else short_repr(models), hint=hint)
    return by_name


def _model_names(models: Sequence[Any]) -> list[str]:
    are_paths = [isinstance(value, str | os.PathLike) for value in models]
    if all(are_paths):
        stems = [Path(value).stem for value in models]
        return stems if len(set(stems)) == len(stems) else [str(value) for value in models]
    return [str(value if isinstance(value, str | int) else i) for i, value in enumerate(models)]


def _refuse_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise for arguments that ``rl.diagnose`` does not have, or that do not pass its checks."""
    parameters: Any = inspect.signature(diagnose).parameters
    for name, value in keywords.items():
        if name not in parameters or name == "model":
            hint = did_you_mean(name, [*parameters][1:])
            raise CallError(f"compare and diagnose have no argument {name!r}.", hint=hint)
        if value is not parameters[name].default:
            diagnose.table[name](name, value)  # type: ignore[attr-defined]


def _comparison_table(outcomes: Mapping[Any, Outcome]) -> xr.Dataset:
    """Return the Dataset of all diagnoses, with one row per model along ``name``; rows of failures are NaN."""
    diagnoses = [outcome.diagnosis for outcome in outcomes.values()]
    models = [xr.Dataset(attrs={"known": False}) if d is None else d["model"] for d in diagnoses]
    succeeded = [d is not None for d in diagnoses]
    variables: dict[str, Any] = {}
    for key in _TABLE_KEYS:
        values_with_bounds = [_value_with_interval(model, key) for model in models]
        variables[key] = ("name", np.array([value for value, _ in values_with_bounds]))
        variables[f"{key}_interval"] = (("name", "bound"), np.stack([bounds for _, bounds in values_with_bounds]))
    reference = succeeded.index(True) if any(succeeded) else 0
    reference_memory = _resampled_memory(models[reference])
    sample_counts = [model.sizes.get("sample", 0) for model in models]
    same_counts = [count == sample_counts[reference] for count in sample_counts]
    comparable_memories = [
        _resampled_memory(model) if is_comparable else _UNKNOWN
        for model, is_comparable in zip(models, same_counts, strict=True)
    ]
    differences = [_difference(reference_memory, memory) for memory in comparable_memories]
    variables["difference"] = ("name", np.array([v for v, _ in differences]))
    variables["difference_interval"] = (("name", "bound"), np.array([b for _, b in differences]))
    codes = ["" if d is None else " ".join(d.codes) for d in diagnoses]
    variables["findings"] = ("name", np.array(codes))
    variables["known"] = ("name", np.array([bool(model.attrs["known"]) for model in models]))
    variables["error"] = ("name", np.array([outcome.error for outcome in outcomes.values()]))
    coords = {"name": list(outcomes), "bound": ["low", "high"]}
    return xr.Dataset(variables, coords=coords, attrs={"reference": reference})


def _value_with_interval(model: xr.Dataset, key: str) -> tuple[float, Array]:
    if key not in model or (key != "skill" and not bool(model.attrs["known"])):
        return float("nan"), np.full(2, np.nan)
    return float(model[key]), np.asarray(model[f"{key}_interval"], dtype=np.float64)


def _resampled_memory(model: xr.Dataset) -> tuple[float, Array | None]:
    """Return the memory n of a diagnosis, and n in each resample; equal numbers of samples get the same weights."""
    if "change" not in model or not bool(model.attrs["known"]):
        return float("nan"), None
    change, context = model["change"].values, model["context"].values
    use, steps = model["use"].values, int(model["steps"])
    weights = resampling_weights(change.shape[1])
    # Use is the mean change divided by twice the variance, so this is twice the variance.
    scale = float(change.mean(axis=1)[0] / use[0]) if use[0] else float("nan")
    curves = change @ weights.T / scale
    return float(model["memory"]), np.array(
        [memory_length(dict(zip(context, curve, strict=True)), steps, USED) for curve in curves.T], dtype=float
    )


def _difference(
    reference: tuple[float, Array | None], compared: tuple[float, Array | None]
) -> tuple[float, tuple[float, float]]:
    if reference[1] is None or compared[1] is None or reference[1].shape != compared[1].shape:
        return float("nan"), (float("nan"), float("nan"))
    return compared[0] - reference[0], interval(compared[1] - reference[1])
