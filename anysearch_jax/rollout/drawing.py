"""How the tokens of a request are drawn."""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings


def sampling(
  request: types.GenerateRequest, default: config_lib.SamplingConfig
) -> config_lib.SamplingConfig:
  """Returns the settings of a request: its own where it names them.

  Args:
    request: may name temperature, top_p and top_k.
    default: the engine's.

  Raises:
    ValueError: a setting is out of its range.
  """
  own = {
    name: value
    for name in ("temperature", "top_p", "top_k")
    if (value := getattr(request, name)) is not None
  }
  if not own:
    return default
  found = dataclasses.replace(default, **own)
  settings.check(found, "sampling")
  return found
