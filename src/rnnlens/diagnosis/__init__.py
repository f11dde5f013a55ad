"""Does a model use long-term dependencies: ``rl.diagnose``, ``rl.compare`` and the dynamics of one layer."""

from .of_model import diagnose

__all__ = ["diagnose"]
