"""Settings of the tests of research: one CPU device, programs compiled fast."""

from __future__ import annotations

import os

# Set before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
