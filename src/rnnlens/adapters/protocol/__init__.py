"""The contract between a deep-learning framework and rnnlens.

An adapter turns a model and a batch into plain arrays. All computation on recurrences uses these arrays, outside the
adapter. No method changes the user's model, process or random state, also after an exception or an interrupt.

Conventions for every array in this package:

* Order of axes: sample first, then time: ``(sample, time, feature)``. Time is chronological: index 0 is the first input
  step, also for layers that run backwards. The adapter reverses their outputs.
* Gates have the order of the cell's own class, also in kernels, whatever the framework's own order.
* Type: NumPy arrays, or the framework's own where they follow the array-API standard and should stay on their device
  (torch). They are never attached to a graph and never a view that the user could see change.

``adapter`` defines the methods, ``run`` what a run of the model records and offers, ``facts`` what needs no run.
"""

from __future__ import annotations

from .adapter import Adapter, AxisConvention
from .by_ports import RunByPorts
from .data import Batch, EndPort, Port, refuse_misfits
from .facts import (
    ChainLink,
    LayerInfo,
    LayerWeights,
    ModelFacts,
    Obstacle,
    Role,
    Submodule,
    WeightChange,
    WeightLocation,
)
from .run import (
    NOT_LOOKED_INTO,
    Capture,
    Cotangents,
    NonRecurrentCall,
    Outputs,
    RecurrentCall,
    ReferenceRun,
    Run,
    SequenceCall,
    Taps,
)

__all__ = [
    "NOT_LOOKED_INTO",
    "Adapter",
    "AxisConvention",
    "Batch",
    "Capture",
    "ChainLink",
    "Cotangents",
    "EndPort",
    "LayerInfo",
    "LayerWeights",
    "ModelFacts",
    "NonRecurrentCall",
    "Obstacle",
    "Outputs",
    "Port",
    "RecurrentCall",
    "ReferenceRun",
    "Role",
    "Run",
    "RunByPorts",
    "SequenceCall",
    "Submodule",
    "Taps",
    "WeightChange",
    "WeightLocation",
    "refuse_misfits",
]
