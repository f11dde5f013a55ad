"""``rl.tf1``: describe a part of a TensorFlow 1 graph, with its session, as a model that rnnlens functions take.

>>> import rnnlens as rl  # doctest: +SKIP
>>> net = rl.tf1.graph(session, inputs={"x": x}, outputs={"y": y}, loss=loss, targets=labels)  # doctest: +SKIP
>>> trace = rl.trace(net, data, truth)  # doctest: +SKIP
"""

from ..adapters.tf_graph.public import Net, graph

__all__ = ["Net", "graph"]
