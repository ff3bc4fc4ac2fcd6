"""Keras runs on torch in this process, whatever the machine's own configuration says."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ["KERAS_TORCH_DEVICE"] = "cpu"
