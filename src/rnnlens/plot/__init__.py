"""Figures of finished results: labelled array in, matplotlib Axes out.

No function here computes statistics, calls ``show()``, or changes global settings. Figures are made without pyplot.
Save one with ``.save("run.png")``, or let a notebook display the returned value, which is an array of its Axes.

Examples draw an LSTM of four units, ``trace = rl.trace(model, x, y, loss=mse_loss)``, and ``before``, of another one;
``run`` is a followed training, ``mamba`` a model of transformers.
"""

from ..errors import missing_attribute as _missing_attribute
from ._style import style as style
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
from .hidden_attention import hidden_attention as hidden_attention
from .histograms import histogram as histogram
from .histograms import weights_histogram as weights_histogram
from .history import norm_history as norm_history
from .history import weight_norms as weight_norms
from .maps import maps as maps
from .memory import decay_by_lag as decay_by_lag
from .memory import lag_profile as lag_profile
from .memory import memory_lifetime as memory_lifetime
from .side_by_side import how_far_back as how_far_back
from .side_by_side import scorecard as scorecard
from .texts import input_map as input_map
from .texts import unit_over_text as unit_over_text
from .time_jacobian import jacobian_margins as jacobian_margins
from .time_jacobian import time_jacobian as time_jacobian
from .time_jacobian import total_and_frozen as total_and_frozen
from .training import film as film
from .training import timeline as timeline
from .trajectories import trajectories as trajectories
from .weights import weight_lags as weight_lags
from .weights import weights_heatmap as weights_heatmap

__all__ = sorted(name for name, figure in vars().items() if getattr(figure, "__module__", "").startswith(__name__))

#: Figure that users of other libraries may expect -> what to type instead.
_OTHER_FIGURES = {
    "attention": "rl.plot.hidden_attention(rl.hidden_attention(model, x)), of a layer of Mamba",
    "saliency": 'rl.plot.input_map(rl.gradients(model, x, y, wrt="input"))',
    "phase_portrait": "rl.plot.trajectories(trace[layer].hidden, fixed_points=...)",
    "pca": "rl.plot.trajectories(trace[layer].hidden)",
    "loss": "rl.plot.timeline(run)",
    "features_0d": "rl.plot.points(array)",
    "features_1d": "rl.plot.curves(array)",
    "features_2d": "rl.plot.heatmap(array)",
    "features_hist": "rl.plot.histogram(array)",
    "rnn_heatmap": "rl.plot.weights_heatmap(weights[layer])",
    "rnn_histogram": "rl.plot.weights_histogram(weights[layer])",
}


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(
        _missing_attribute("module 'rnnlens.plot'", name, __all__, "rl.plot.", _OTHER_FIGURES.get(name.lower()))
    )


def __dir__() -> list[str]:
    return __all__
