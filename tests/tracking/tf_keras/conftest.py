"""Settings: TensorFlow uses ``tf_keras`` (Keras 2) instead of Keras 3."""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
