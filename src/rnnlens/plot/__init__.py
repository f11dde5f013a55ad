"""Figures of finished results: labelled array in, matplotlib Axes out.

No function here computes statistics, calls ``show()``, or changes global settings. Figures are made without pyplot.
Save one with ``.save("run.png")``, or let a notebook display the returned value, which is an array of its Axes.
"""

from .curves import curves, points
from .diagnosis import diagnosis
from .dynamics import eigenvalues, fixed_points, gradient_carriers
from .gates import gates, gates_over_time, saturation_arrows
from .gradient_flow import gradient_flow
from .heatmap import before_after, heatmap
from .histograms import histogram, weights_histogram
from .history import norm_history, weight_norms
from .maps import maps
from .memory import lag_profile, memory_lifetime
from .texts import input_map, unit_over_text
from .time_jacobian import jacobian_margins, time_jacobian
from .training import film, timeline
from .weights import weight_lags, weights_heatmap

__all__ = [
    "before_after",
    "curves",
    "diagnosis",
    "eigenvalues",
    "film",
    "fixed_points",
    "gates",
    "gates_over_time",
    "gradient_carriers",
    "gradient_flow",
    "heatmap",
    "histogram",
    "input_map",
    "jacobian_margins",
    "lag_profile",
    "maps",
    "memory_lifetime",
    "norm_history",
    "points",
    "saturation_arrows",
    "time_jacobian",
    "timeline",
    "unit_over_text",
    "weight_lags",
    "weight_norms",
    "weights_heatmap",
    "weights_histogram",
]


def __dir__() -> list[str]:
    return __all__
