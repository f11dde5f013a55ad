"""Diagnoses of many models: one after another in this process, or each as a task of a Dask cluster."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..adapters.registry import adapter_for
from ..cluster.travel import (
    dumps,
    dumps_arguments,
    imported_backend,
    keras_file,
    packed,
    propose_backend,
    unpacked,
)
from ..cluster.worker import fit_process, fit_thread, results_of
from ..errors import InputError, shown
from ..results.diagnosis import Diagnosis
from ..settings import Progress
from . import diagnose

#: A diagnosis, or the kind and text of the error that prevented it.
Outcome = Diagnosis | str
Load = Callable[[Any], Any]


@dataclass(frozen=True)
class Candidate:
    """A model to diagnose: itself, the path of a ``.keras`` file, a function that returns it, or a value for ``load``.

    ``backend`` is the engine of Keras in the user's process, where Keras is imported.
    """

    value: Any
    load: Load | None
    backend: str | None

    def model(self) -> Any:
        """Return the model, loaded or made in this process."""
        if self.load is not None:
            return self.load(self.value)
        if isinstance(self.value, str | os.PathLike):
            return keras_file(Path(self.value), self.backend)
        return self.value() if is_function(self.value) else self.value

    def pack(self) -> tuple[str | None, bytes]:
        """Return the engine of Keras and bytes for :func:`diagnose_on_worker`."""
        if self.load is None and not is_function(self.value) and not isinstance(self.value, str | os.PathLike):
            sent = _Sent(packed(self.value, adapter_for(self.value).engine))
            return self.backend, dumps(Candidate(sent, _Sent.model, None))
        parts = {"load": self.load, "model": self.value}
        return self.backend, dumps_arguments(Candidate(self.value, self.load, self.backend), parts)


@dataclass(frozen=True)
class _Sent:
    """A model as bytes."""

    data: bytes

    def model(self) -> Any:
        return unpacked(self.data)


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
            got=shown(value),
            expected="a model, a function that returns one, the path of a .keras file, or a diagnosis",
            hint="give load=, a function that takes this value and returns the model",
        )


def diagnoses_of(
    models: Mapping[Any, Any], load: Load | None, client: Any, arguments: Mapping[str, Any]
) -> dict[Any, Outcome]:
    """Diagnose models by name, in their order; a failure is the text of its error.

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
    """
    outcomes: dict[Any, Outcome] = {name: value for name, value in models.items() if isinstance(value, Diagnosis)}
    backend = imported_backend()
    candidates = {name: Candidate(value, load, backend) for name, value in models.items() if name not in outcomes}
    run: Iterator[tuple[Any, Outcome]]
    if client is None:
        run = ((name, _diagnosed(candidate, arguments)) for name, candidate in candidates.items())
    else:
        run = _run_on_workers(candidates, client, arguments)
    with Progress("diagnoses", len(candidates)) as progress:
        for name, outcome in run:
            outcomes[name] = outcome
            progress.advance()
    return {name: outcomes[name] for name in models}


def _diagnosed(candidate: Candidate, arguments: Mapping[str, Any]) -> Outcome:
    try:
        return diagnose(candidate.model(), **arguments)
    except Exception as error:
        return _text(error)


def _run_on_workers(
    candidates: Mapping[Any, Candidate], client: Any, arguments: Mapping[str, Any]
) -> Iterator[tuple[Any, Outcome]]:
    sent, run = dumps_arguments(dict(arguments), arguments), uuid.uuid4().hex[:8]
    # A task of its own, not scattered data: Dask makes it again when the worker that holds it is killed.
    data = client.submit(bytes, sent, key=f"rnnlens-samples-{run}", pure=False)
    packs = {}
    for name, candidate in candidates.items():
        try:
            packs[name] = candidate.pack()
        except Exception as error:
            yield name, _text(error)

    def outcomes(names: Sequence[Any], attempt: str) -> Iterator[tuple[Any, Any]]:
        keys = {name: f"rnnlens-diagnose-{run}-{attempt}{number}" for number, name in enumerate(names)}
        futures = {client.submit(diagnose_on_worker, *packs[n], data, key=keys[n], pure=False): n for n in names}
        for future, outcome in results_of(client, list(futures)):
            yield futures[future], outcome

    killed = []
    for name, outcome in outcomes(list(packs), ""):
        if type(outcome).__name__ == "KilledWorker":
            killed.append(name)
        else:
            yield name, _text(outcome) if isinstance(outcome, BaseException) else outcome
    # Dask also gives up models that waited at a worker which another one killed; each is tried alone.
    for attempt, suspect in enumerate(killed):
        for name, outcome in outcomes([suspect], f"alone-{attempt}-"):
            yield name, _text(outcome) if isinstance(outcome, BaseException) else outcome


def diagnose_on_worker(backend: str | None, model: bytes, data: bytes) -> Outcome:
    """Rebuild one candidate and diagnose it; the function of the tasks."""
    fit_process()
    propose_backend(backend)
    try:
        candidate, arguments = pickle.loads(model), pickle.loads(data)
    except Exception as error:
        return _text(error)
    fit_thread()
    return _diagnosed(candidate, arguments)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
