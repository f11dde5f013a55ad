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
from .lags import gradient_decay, gradient_reach, input_totals, lag_shares
from .lifetime import kept_by_gates, own_diagonal
from .profiles import attributed_memory, attribution, band, input_sensitivity, own_peak
from .resampling import bootstrap
from .residual import missed_dependency
from .samples import (
    by_own_peak,
    carriers,
    far_out,
    lorenz,
    peak_band,
    rms_of_shapes,
    sample_peaks,
    typical_first,
)
from .spectrum import (
    effective_rank,
    kaplan_yorke_dimension,
    kernel_spectrum,
    lyapunov_spectrum,
    step_eigenvalues,
)
from .transfer import state_transfer, step_jacobians, theil_sen

__all__ = [
    "attributed_memory",
    "attribution",
    "band",
    "benefit",
    "bootstrap",
    "bootstrap_interval",
    "by_own_peak",
    "carriers",
    "census",
    "constant_features",
    "covering_lag",
    "dead_units",
    "donors",
    "effective_rank",
    "far_out",
    "gate_timescale",
    "gradient_decay",
    "gradient_reach",
    "half_life",
    "horizon",
    "input_sensitivity",
    "input_totals",
    "kaplan_yorke_dimension",
    "kept_by_gates",
    "kernel_spectrum",
    "lag_profile",
    "lag_shares",
    "lorenz",
    "lyapunov_spectrum",
    "mean_lag",
    "memory_length",
    "missed_dependency",
    "own_diagonal",
    "own_peak",
    "padding_share",
    "peak_band",
    "rms_of_shapes",
    "sample_peaks",
    "saturation_share",
    "share_above",
    "skill",
    "state_transfer",
    "static_share",
    "step_eigenvalues",
    "step_jacobians",
    "stuck_gates",
    "theil_sen",
    "total_variance",
    "typical_first",
    "unit_spread",
    "use",
]
