"""Measures of memory as pure functions of arrays, with formula, units and reference in their docstrings.

``rl.diagnose`` combines them with others; each can be used alone.
"""

from ..errors import missing_attribute as _missing_attribute
from ..recurrence.measures import covering_lag, half_life, lag_profile, mean_lag
from .dynamics import effective_rank
from .facts import gate_timescale
from .profiles import gradient_reach
from .residual import missed_dependency
from .transfer import decay_half_life, effective_state_size

__all__ = [
    "covering_lag",
    "decay_half_life",
    "effective_rank",
    "effective_state_size",
    "gate_timescale",
    "gradient_reach",
    "half_life",
    "lag_profile",
    "mean_lag",
    "missed_dependency",
]


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(_missing_attribute(f"module {__name__!r}", name, __all__, "rl.measures."))
