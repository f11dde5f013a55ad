"""Every test has a graph of its own."""

from graph_mode import graph, v1

__all__ = ["graph", "v1"]
