"""What the layers of a decoder differ in, as values that a scan can pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from anysearch_jax.policy import architecture as architecture_lib

# The window of a layer whose queries see every token.
NO_WINDOW = np.iinfo(np.int32).max


class LayerOptions(NamedTuple):
  """Options of one layer, or arrays `[L]` of all; None if all are alike.

  They are arrays because `nn.scan` compiles one layer for all of them.

  Attributes:
    rotated: bool, whether the layer has rotary positions.
    window: int32, tokens that a query sees, itself included; `NO_WINDOW`: all.
  """

  rotated: Any = None
  window: Any = None


def layer_options(a: architecture_lib.Architecture) -> LayerOptions:
  """Returns the options of all layers."""
  indices = np.arange(a.layers)
  rotated = None
  if a.unrotated:
    rotated = np.isin(indices, a.unrotated, invert=True)
  window = None
  if a.windowed:
    window = np.where(np.isin(indices, a.windowed), a.window, NO_WINDOW)
    window = window.astype(np.int32)
  return LayerOptions(rotated, window)
