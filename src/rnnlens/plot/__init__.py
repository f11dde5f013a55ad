"""Figures of finished results: labelled array in, matplotlib Axes out.

Nothing here computes statistics, calls ``show()``, or changes global settings. Figures are made without pyplot; keep
them with ``.save("run.png")``, or let a notebook show what a figure returned: it also is the array of its Axes.
"""

from .carriers import gradient_carriers
from .comparison import before_after
from .diagnosis import diagnosis
from .dots import points
from .eigen import eigenvalues
from .film import film
from .fixed import fixed_points
from .flow import gradient_flow
from .gate_activity import gates
from .gate_lines import gates_over_time
from .histograms import histogram
from .history import norm_history
from .input_map import input_map
from .jacobians import time_jacobian
from .lags import lag_profile
from .lifetime import memory_lifetime
from .lines import curves
from .maps import heatmap
from .margins import jacobian_margins
from .norms import weight_norms
from .saturation import saturation_arrows
from .timeline import timeline
from .unit_text import unit_over_text
from .weight_histograms import weights_histogram
from .weight_lags import weight_lags
from .weight_maps import weights_heatmap

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
