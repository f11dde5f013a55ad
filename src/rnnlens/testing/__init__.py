"""For authors of adapters and cells: the contract of an adapter as a check, and a float64 reference.

``keras_models`` is for Keras, and not loaded from here.
"""

from __future__ import annotations

from .check import check_adapter
from .reference import bptt

__all__ = ["bptt", "check_adapter"]
