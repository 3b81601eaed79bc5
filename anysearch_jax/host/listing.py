"""Lists names in a message, which stays short whatever a file holds."""

from __future__ import annotations

from collections.abc import Collection

_LISTED_NAMES = 8
_NAME_CHARACTERS = 40


def first_names(
  names: Collection[object],
  *,
  limit: int = _LISTED_NAMES,
  characters: int = _NAME_CHARACTERS,
) -> str:
  """Returns the first names, separated by commas, and how many more there are.

  Args:
    names: names of any length, which are cut.
    limit: number of names that are listed.
    characters: number of characters of a name that are shown.
  """
  listed = []
  for name in list(names)[:limit]:
    text = " ".join(str(name).split())
    is_long = len(text) > characters
    listed.append(text[:characters] + "..." if is_long else text)
  if len(names) > limit:
    listed.append(f"and {len(names) - limit:,} more")
  return ", ".join(listed)
