"""Reads JSON files, with errors that name the file."""

from __future__ import annotations

import json
import pathlib
from typing import Any


def read(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object in a file.

  Raises:
    ValueError: the file contains something else; the message names the file.
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
