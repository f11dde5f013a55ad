"""``python -m rnnlens``, equivalent to ``rnnlens``: it runs on import what ``python -m rnnlens.cli`` runs."""

from .cli import __main__ as __main__
