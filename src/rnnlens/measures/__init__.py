"""Measures of memory, each a pure function of finished arrays: formula, units and reference in its docstring.

``rl.diagnose`` puts them together; each can be had alone.
"""

from ..recurrence.measures import (
    bootstrap_interval,
    covering_lag,
    half_life,
    horizon,
    lag_profile,
    mean_lag,
    saturation_share,
    share_above,
)
from .facts import (
    census,
    constant_features,
    dead_units,
    gate_timescale,
    padding_share,
    static_share,
    stuck_gates,
    unit_spread,
)
from .intervention import benefit, donors, memory_length, skill, total_variance, use
from .profiles import attributed_memory, attribution, band, own_peak
from .resampling import bootstrap
from .residual import missed_dependency
from .spectrum import effective_rank, kaplan_yorke_dimension, kernel_spectrum, lyapunov_spectrum
from .transfer import state_transfer, step_jacobians, theil_sen

__all__ = [
    "attributed_memory",
    "attribution",
    "band",
    "benefit",
    "bootstrap",
    "bootstrap_interval",
    "census",
    "constant_features",
    "covering_lag",
    "dead_units",
    "donors",
    "effective_rank",
    "gate_timescale",
    "half_life",
    "horizon",
    "kaplan_yorke_dimension",
    "kernel_spectrum",
    "lag_profile",
    "lyapunov_spectrum",
    "mean_lag",
    "memory_length",
    "missed_dependency",
    "own_peak",
    "padding_share",
    "saturation_share",
    "share_above",
    "skill",
    "state_transfer",
    "static_share",
    "step_jacobians",
    "stuck_gates",
    "theil_sen",
    "total_variance",
    "unit_spread",
    "use",
]
