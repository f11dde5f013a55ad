"""``tf_keras``, without Keras 3."""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
