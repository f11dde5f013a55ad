"""Figures of finished results: labelled array in, matplotlib Axes out.

Nothing here computes statistics, calls ``show()``, or changes global settings. Figures are made without pyplot; keep
them with ``axes[0].figure.savefig("run.png")``, or let a notebook show ``axes[0].figure``.
"""

from .dots import points
from .histograms import histogram
from .lines import curves
from .maps import heatmap
from .weight_histograms import weights_histogram
from .weight_maps import weights_heatmap

__all__ = ["curves", "heatmap", "histogram", "points", "weights_heatmap", "weights_histogram"]
