"""A model with data of any length for it, and two losses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import rnnlens as rl

#: Samples and steps of the data, unless a test asks for others.
SAMPLES, STEPS = 32, 9


@dataclass
class Specimen:
    """``data(samples, steps)`` returns the keywords of a verb: x and y, and more where the model has it.

    ``layer`` is a recurrent layer of the model. The forward pass raises ``trap.raised``, unless that is None.
    """

    model: Any
    data: Callable[[int, int], dict[str, Any]]
    loss: Any
    other_loss: Any = None
    layer: str = ""
    trap: Any = None

    def trace(self, samples: int = SAMPLES, steps: int = STEPS, **options: Any) -> Any:
        """Return the trace of the model on that many samples and steps."""
        return rl.trace(self.model, **{"loss": self.loss, **self.data(samples, steps), **options})


@dataclass
class Declared:
    """A model, and what its adapter has to read in it without a run.

    ``roles``, ``tables`` and ``statistics``: names of layers by role, and of weights by layer; ``submodules``: all
    layers. ``facts``: attributes of its ``ModelFacts``. ``optimizer``: one of plain descent with rate 0.5, and the
    beginning of the names of the weights that it steps; None where the framework's optimizers are not read.
    """

    model: Any
    data: dict[str, Any]
    submodules: set[str]
    facts: dict[str, Any]
    roles: dict[str, set[str]] = field(default_factory=dict)
    tables: dict[str, set[str]] = field(default_factory=dict)
    statistics: dict[str, set[str]] = field(default_factory=dict)
    optimizer: tuple[Any, str] | None = None


#: ``TRAININGS`` of a framework whose models hold no optimizer.
NO_TRAINING = {"none": (lambda model: None, {"optimizer": "", "clipping": None})}


def generators() -> tuple[Any, ...]:
    """Return the states of the global generators of Python and NumPy."""
    _, key, position, *_ = np.random.get_state()  # noqa: NPY002  the global state must not change
    return random.getstate(), key.tolist(), position
