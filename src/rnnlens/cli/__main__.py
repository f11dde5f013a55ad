"""``python -m rnnlens.cli``, the same as ``rnnlens``."""

from . import main

main()
