"""Lists the files of a folder with checksums, to detect later damage.

`write` lists every file with its size and SHA-256; `damage` finds files that
have changed since. Neither interprets the files.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import pathlib
from collections.abc import Collection
from typing import Any

from anysearch_jax.host import disk

NAME = "manifest.json"
_WRITING = NAME + disk.SUFFIX
_THREADS = 4

# Path in the folder -> {"bytes": size, "sha256": hexadecimal digest}.
Entries = dict[str, dict[str, Any]]


def write(
  folder: pathlib.Path,
  known: Entries | None = None,
  *,
  late: Collection[str] = (),
) -> Entries:
  """Lists the files of a folder in its `manifest.json`.

  Args:
    folder: its files are final, except the late ones.
    known: entries to keep without reading their files again.
    late: names of files that are not final yet; they are not listed.

  Returns:
    All entries, those of `known` included.
  """
  entries = dict(known or {})
  names = _names(folder) - entries.keys() - set(late)
  entries |= _entries(folder, names)
  text = json.dumps(entries, indent=1, sort_keys=True) + "\n"
  disk.write_whole(folder / NAME, text)
  return entries


def damage(folder: pathlib.Path, *, late: Collection[str] = ()) -> str:
  """Compares a folder with its manifest.

  Args:
    folder: with a manifest.
    late: names of files that need not be listed.

  Returns:
    "" if every file is as listed; otherwise a sentence that names the first
    difference.
  """
  try:
    listed = dict(json.loads((folder / NAME).read_bytes()))
  except FileNotFoundError:
    return f"{folder} has no {NAME}."
  except (OSError, ValueError, TypeError) as error:
    return f"{folder / NAME} cannot be read: {error}."
  names = _names(folder)
  if lacking := sorted(listed.keys() - names):
    return f"{folder} lacks {lacking[0]} ({len(lacking)} files in all)."
  if unknown := sorted(names - listed.keys() - set(late)):
    return f"{folder} has {unknown[0]}, which its manifest does not list."
  try:
    found = _entries(folder, listed)
  except OSError as error:
    return f"{folder} cannot be read: {error}."
  for name, entry in found.items():
    if entry != listed[name]:
      return f"{folder / name} is {entry}; its manifest says {listed[name]}."
  return ""


def _names(folder: pathlib.Path) -> set[str]:
  return {
    path.relative_to(folder).as_posix()
    for path in folder.rglob("*")
    if path.is_file()
  } - {NAME, _WRITING}


def _entries(folder: pathlib.Path, names: Collection[str]) -> Entries:
  def entry(name: str) -> dict[str, Any]:
    with (folder / name).open("rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
      return {"bytes": file.tell(), "sha256": digest}

  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    return dict(zip(names, pool.map(entry, names)))
