"""Measures of memory as pure functions of arrays, with formula, units and reference in their docstrings.

``rl.diagnose`` combines them with others; each can be used alone.
"""

from ..errors import missing_attribute as _missing_attribute
from ..recurrence.measures import covering_lag, half_life, lag_profile, mean_lag
from .dynamics import effective_rank
from .facts import gate_timescale
from .plain_arrays import of_plain_arrays as _of_plain_arrays
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

covering_lag, half_life = _of_plain_arrays(covering_lag), _of_plain_arrays(half_life)
lag_profile, mean_lag = _of_plain_arrays(lag_profile), _of_plain_arrays(mean_lag)
effective_rank, effective_state_size = _of_plain_arrays(effective_rank), _of_plain_arrays(effective_state_size)
gate_timescale, gradient_reach = _of_plain_arrays(gate_timescale), _of_plain_arrays(gradient_reach)
missed_dependency, decay_half_life = _of_plain_arrays(missed_dependency), _of_plain_arrays(decay_half_life)


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(_missing_attribute(f"module {__name__!r}", name, __all__, "rl.measures."))


def __dir__() -> list[str]:
    return __all__
