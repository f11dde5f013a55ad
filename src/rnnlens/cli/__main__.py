"""``python -m rnnlens.cli``, equivalent to ``rnnlens``."""

import sys

# ``-m`` puts the current folder first in sys.path, where a file named keras.py would be imported instead of Keras.
if not sys.flags.safe_path:
    del sys.path[0]

from . import main

main()
