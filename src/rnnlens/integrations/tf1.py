"""``rl.tf1``: what only users of sessions and placeholders need: a part of a graph as a model that every verb takes.

>>> import rnnlens as rl  # doctest: +SKIP
>>> net = rl.tf1.graph(session, inputs={"x": x}, outputs={"y": y}, loss=loss, targets=labels)  # doctest: +SKIP
>>> trace = rl.trace(net, data, truth)  # doctest: +SKIP
"""

from ..adapters.tf_graph.public import Net, graph

__all__ = ["Net", "graph"]
