"""The adapter under test, and its models.

A suite names the adapter in ``RNNLENS_ADAPTER``: torch (also without the variable), keras, tf_keras, jax or tf1. Its
models are in specimens_torch, specimens_keras (of both), specimens_jax, and in the helpers of its own distribution,
specimens_tf1:

- ``INDEPENDENT``: by name, functions that make a ``Specimen`` whose samples do not depend on each other
- ``mixing``: makes one whose samples do
- ``stateful``: makes one whose forward pass changes all that its framework can change
- ``tagger``: makes a small model of one LSTM for x (2, 5, 3) and y (2, 5, 2), and its loss
- ``declared``: makes a ``Declared``, a model whose facts stand in it without a run
- ``TRAININGS``: by name, functions that prepare such a model for training, and facts that it then has
- ``guarded``: makes a model with a layer of the user's own whose attribute raises an error when it is read, an x, and
  the set of the layers that are ReLU
- ``FOREIGN``: by name, functions that make values of the framework that fit almost no argument
- ``state_of``: returns all that a call must leave of a model and of arrays as it was, as values that can be compared
- ``change``: changes the weights of a stateful model, and an array, in place
- ``forget``: makes the framework itself forget all models
- ``surroundings``: a context manager, within which each test runs
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

ADAPTER = os.environ.get("RNNLENS_ADAPTER", "torch")
specimens: Any = importlib.import_module(f"specimens_{ADAPTER.removeprefix('tf_')}")


def on_keras(*marks: pytest.MarkDecorator) -> list[pytest.MarkDecorator]:
    """Return marks that choose between Keras' engines, if the adapter is one of Keras."""
    return list(marks) if "keras" in ADAPTER else []
