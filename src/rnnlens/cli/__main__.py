"""``python -m rnnlens.cli``, the same as ``rnnlens``."""

import sys

# ``-m`` puts the current folder first, where a file named keras.py would be run instead of Keras.
if not sys.flags.safe_path:
    del sys.path[0]

from . import main

main()
