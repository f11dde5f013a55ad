"""Tools for authors of adapters and cells: a check of an adapter's contract, and BPTT in float64 as a reference.

The module ``keras_models`` needs Keras and is not imported here.
"""

from .adapter_contract import check_adapter
from .reference import bptt

__all__ = ["bptt", "check_adapter"]
