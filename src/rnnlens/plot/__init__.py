"""Figures of finished results: labelled array in, matplotlib Axes out.

Nothing here computes statistics, calls ``show()``, or changes global settings. Figures are made without pyplot; keep
them with ``.save("run.png")``, or let a notebook show what a figure returned: it also is the array of its Axes.
"""

from .comparison import before_after
from .diagnosis import diagnosis
from .dots import points
from .fixed import fixed_points
from .flow import gradient_flow
from .gate_activity import gates
from .histograms import histogram
from .jacobians import time_jacobian
from .lags import lag_profile
from .lines import curves
from .maps import heatmap
from .norms import weight_norms
from .weight_histograms import weights_histogram
from .weight_maps import weights_heatmap

__all__ = [
    "before_after",
    "curves",
    "diagnosis",
    "fixed_points",
    "gates",
    "gradient_flow",
    "heatmap",
    "histogram",
    "lag_profile",
    "points",
    "time_jacobian",
    "weight_norms",
    "weights_heatmap",
    "weights_histogram",
]


def __dir__() -> list[str]:
    return __all__
