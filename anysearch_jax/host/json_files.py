"""JSON files of others, or a sentence that says what is wrong with them."""

from __future__ import annotations

import json
import pathlib
from typing import Any


def read(path: pathlib.Path) -> dict[str, Any]:
  """The object that a file holds.

  Raises:
    ValueError: the file holds something else, by its name.
  """
  try:
    values = json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f"{path}: not a whole JSON file ({error}); copy it again."
    ) from error
  if not isinstance(values, dict):
    raise ValueError(
      f"{path}: found {type(values).__name__}, expected a JSON object."
    )
  return values
