"""`--documents`: files of one's own become the index that a policy searches.

The index is kept in the user's cache folder under a name made of the paths, and
the next command brings it up to date by the files that changed.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import json_files, platforms
from launch import flags as launch_flags

if TYPE_CHECKING:
  from retrieval.documents import folder

_CONFIG = "configs/documents.py"
_SHOWN = 5  # Files that cannot be read, of which the user is told.


def define_flags() -> None:
  """Defines `--documents` and `--index`."""
  flags.DEFINE_list(
    "documents", [], "Files, folders and globs of yours, to be searched."
  )
  flags.DEFINE_string(
    "index",
    None,
    "Folder of the index of --documents, default: one in your cache; or of an "
    "index that exists.",
  )


def read_config() -> config_lib.ExperimentConfig:
  """Returns the configuration of the flags, which searches the documents.

  Without --config it is that of configs/documents.py, with the preset and the
  context that suit the policy.

  Raises:
    app.UsageError: there is neither a configuration nor documents, or the
      configuration is invalid.
  """
  f = flags.FLAGS
  if not (f.documents or f.index):
    if f.config is None:
      raise app.UsageError(
        f"{launch_flags.no_config()}, or --documents=FOLDER of files to ask "
        "about."
      )
    return launch_flags.read_config()
  is_default = f.config is None
  if is_default:
    on_cpu = platforms.expected() == "cpu"
    is_elsewhere = f.openai or f.sglang or f.scripted
    preset = "" if is_elsewhere else ":cpu" if on_cpu else ":gpu"
    f.config = _CONFIG + preset
  config = launch_flags.read_config()
  if is_default and f.hf:
    config = _within(config, pathlib.Path(f.hf))
  place = f.index or str(_cached(f.documents))
  return config_lib.changed(config, retrieval={"kind": "index", "index": place})


def _within(
  config: config_lib.ExperimentConfig, policy: pathlib.Path
) -> config_lib.ExperimentConfig:
  """Returns a configuration within the context that a policy was made for.

  What is wrong with the folder is said later, by what loads it.
  """
  try:
    most = json_files.read(policy / "config.json")["max_position_embeddings"]
  except (OSError, ValueError, KeyError, TypeError):
    return config
  context = config.episode.max_context
  if type(most) is not int or most >= context:
    return config
  written = min(config.episode.max_generated, most // 2)
  return config_lib.changed(
    config,
    episode={
      "max_context": most,
      "max_generated": written,
      "answer_room": min(config.episode.answer_room, written // 4),
    },
  )


def _cached(paths: Sequence[str]) -> pathlib.Path:
  """Returns the folder of the index of some paths in the user's cache."""
  cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  absolute = [os.path.abspath(os.path.expanduser(path)) for path in paths]
  name = json_files.sha256(sorted(set(absolute)))[:16]
  return pathlib.Path(cache).expanduser() / "anysearch" / "indexes" / name


def update(config: config_lib.ExperimentConfig) -> None:
  """Builds or updates the index of `--documents`, and says what is in it.

  Args:
    config: from `read_config`.

  Raises:
    ValueError: a path is missing, or no file has any text.
  """
  paths = flags.FLAGS.documents
  if not paths:
    return
  from retrieval.documents import folder

  index = config.retrieval.index
  made = folder.update(
    paths, index, on_file=_progress("files read"), on_rows=_progress("passages")
  )
  for line in described(made, index):
    _say(line)


def described(made: folder.Summary, index: str) -> list[str]:
  """Returns what is said of an index: a line, and one for each skipped file."""
  held = f"{made.files} files, {made.passages} passages"
  news = ", ".join(
    f"{count} {name}"
    for name in ("added", "changed", "removed")
    if (count := getattr(made, name))
  )
  lines = [
    f"documents: {held} ({news}); the index is {index}"
    if made.is_new
    else f"documents: {held}, as before"
  ]
  if made.ignored:
    kinds = sorted(made.ignored.items(), key=lambda kind: -kind[1])
    named = ", ".join(f"{count} {kind}" for kind, count in kinds[:_SHOWN])
    lines.append(f"documents: not read, of other kinds: {named}")
  if made.skipped:
    lines.append(f"documents: {len(made.skipped)} skipped")
    lines += [f"  {path}: {why}" for path, why in made.skipped[:_SHOWN]]
    if len(made.skipped) > _SHOWN:
      lines.append("  ...")
  return lines


def _progress(what: str) -> Callable[[int, int], None]:
  """Returns a function that says how much is done, once a second at most."""
  told = time.monotonic()

  def tell(done: int, of: int) -> None:
    nonlocal told
    if time.monotonic() - told >= 1:
      told = time.monotonic()
      _say(f"documents: {done} of {of} {what}")

  return tell


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)
