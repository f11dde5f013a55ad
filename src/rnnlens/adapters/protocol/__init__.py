"""The contract between a deep-learning framework and rnnlens.

An adapter turns a model and a batch into plain arrays; everything that rnnlens knows about recurrence happens on those
arrays, outside the adapter. What every method leaves behind in the user's model, process and random state: nothing,
also after an exception or an interrupt.

Conventions for every array named here:

* order: sample first, then time: ``(sample, time, feature)``. Time is chronological: index 0 is the first input step,
  also for layers that run backwards (their outputs are turned round by the adapter).
* gates in the order of the cell's own class, also in kernels, whatever the framework's own order.
* kind: NumPy arrays, or the framework's own where they follow the array-API standard and should stay on their device
  (torch). Never attached to a graph, never a view that the user could see change.

``adapter`` has the methods; ``facts``, ``captured`` and ``ports`` what they take and return.
"""

from __future__ import annotations

from .adapter import Adapter, AxisConvention, Cotangents
from .captured import (
    NOT_LOOKED_INTO,
    Batch,
    Capture,
    CaptureRequest,
    NonRecurrentCall,
    Outputs,
    RecurrentCall,
    ReferenceRun,
)
from .facts import ChainLink, LayerInfo, LayerWeights, ModelFacts, Obstacle, Role, Submodule, WeightLocation
from .ports import Port, Pullback, refuse_misfits

__all__ = [
    "NOT_LOOKED_INTO",
    "Adapter",
    "AxisConvention",
    "Batch",
    "Capture",
    "CaptureRequest",
    "ChainLink",
    "Cotangents",
    "LayerInfo",
    "LayerWeights",
    "ModelFacts",
    "NonRecurrentCall",
    "Obstacle",
    "Outputs",
    "Port",
    "Pullback",
    "RecurrentCall",
    "ReferenceRun",
    "Role",
    "Submodule",
    "WeightLocation",
    "refuse_misfits",
]
