"""Types used across the package. ``Array`` is any array of the array-API standard: NumPy, torch, JAX, CuPy."""

from __future__ import annotations

from typing import Any

Array = Any
Namespace = Any
