"""Loggers: records written to TensorBoard, Weights & Biases and MLflow, each through its own client."""

from .given import beside, sinks

__all__ = ["beside", "sinks"]
