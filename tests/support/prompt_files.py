"""Files of an environment's texts, for tests."""

from __future__ import annotations

import json


def toml(values, comment="of a test") -> str:
  """Returns TOML with these texts, whose escapes are those of JSON."""
  lines = [
    f"{name} = {json.dumps(text, ensure_ascii=False)}"
    for name, text in values.items()
  ]
  return "\n".join([f"# {comment}", *lines])
