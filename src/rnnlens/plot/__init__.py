"""Figures of finished results: labelled array in, matplotlib Axes out.

No function here computes statistics, calls ``show()``, or changes global settings. Figures are made without pyplot.
Save one with ``.save("run.png")``, or let a notebook display the returned value, which is an array of its Axes.
"""

from .curves import curves as curves
from .curves import points as points
from .diagnosis import diagnosis as diagnosis
from .diagnosis import eigenvalues as eigenvalues
from .diagnosis import fixed_points as fixed_points
from .diagnosis import gradient_carriers as gradient_carriers
from .gates import gates as gates
from .gates import gates_over_time as gates_over_time
from .gates import saturation_arrows as saturation_arrows
from .gradient_flow import gradient_flow as gradient_flow
from .heatmap import before_after as before_after
from .heatmap import heatmap as heatmap
from .histograms import histogram as histogram
from .histograms import weights_histogram as weights_histogram
from .history import norm_history as norm_history
from .history import weight_norms as weight_norms
from .maps import maps as maps
from .memory import decay_by_lag as decay_by_lag
from .memory import lag_profile as lag_profile
from .memory import memory_lifetime as memory_lifetime
from .texts import input_map as input_map
from .texts import unit_over_text as unit_over_text
from .time_jacobian import jacobian_margins as jacobian_margins
from .time_jacobian import time_jacobian as time_jacobian
from .time_jacobian import total_and_frozen as total_and_frozen
from .training import film as film
from .training import timeline as timeline
from .weights import weight_lags as weight_lags
from .weights import weights_heatmap as weights_heatmap

__all__ = sorted(name for name, figure in vars().items() if getattr(figure, "__module__", "").startswith(__name__))


def __dir__() -> list[str]:
    return __all__
