"""`--documents`: files of one's own become the index that a policy searches.

The index is kept in the user's cache folder under a name made of the paths, and
the next command brings it up to date by the files that changed.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import disk, json_files, platforms
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import shipped, stopping

if TYPE_CHECKING:
  from anysearch_jax.retrieval.documents import folder

_SHOWN = 5  # Files that cannot be read, of which the user is told.


def define_flags() -> None:
  """Defines `--documents` and `--index`."""
  flags.DEFINE_list(
    "documents", [], "Files, folders and globs of yours, to be searched."
  )
  flags.DEFINE_string(
    "index", None, "Folder of their index, or of another; default: your cache."
  )


def read_config() -> config_lib.ExperimentConfig:
  """Returns the configuration of the flags, which searches the documents.

  Without --config it is that of configs/documents.py, for a context that suits
  the policy.

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
    here = "cpu" if platforms.expected() == "cpu" else "gpu"
    preset = here if f.hf and not f.sglang else ""
    f["config"].value = f"configs/documents.py:{preset}"
  config = launch_flags.read_config()
  if is_default and f.hf:
    config = _within(config, pathlib.Path(shipped.find(f.hf)))
  place = f.index or str(_cached(f.documents))
  return config_lib.changed(config, retrieval={"kind": "index", "index": place})


def _within(
  config: config_lib.ExperimentConfig, policy: pathlib.Path
) -> config_lib.ExperimentConfig:
  """Returns a configuration within the context that a policy was made for."""
  # What loads the folder says what is wrong with it.
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
    most = json_files.read(policy / "config.json")["max_position_embeddings"]
    context = min(most, config.episode.max_context)
    written = min(context // 2, config.episode.max_generated)
    limits = {"max_context": context, "max_generated": written}
    return config_lib.changed(config, episode=limits)
  return config


def _cached(paths: Sequence[str]) -> pathlib.Path:
  """Returns the folder of the index of some paths in the user's cache."""
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  absolute = {os.path.abspath(os.path.expanduser(path)) for path in paths}
  name = json_files.sha256(sorted(absolute))[:16]
  return cache.expanduser() / "anysearch" / "indexes" / name


def update(config: config_lib.ExperimentConfig) -> None:
  """Builds or updates the index of `--documents`, and says what is in it.

  Raises:
    ValueError: a path is missing, or no file has any text.
  """
  if not flags.FLAGS.documents:
    return
  from anysearch_jax.retrieval.documents import folder

  index = config.retrieval.index
  try:
    made = folder.update(flags.FLAGS.documents, index, on_file=_progress())
  except OSError as error:
    said = error if isinstance(error, disk.DiskError) else f"{index}: {error}."
    raise ValueError(f"{said} --index=FOLDER names another place.") from error
  for line in described(made, index):
    stopping.say(f"documents: {line}")


def described(
  made: folder.Summary, index: str, most: int = _SHOWN
) -> Iterator[str]:
  """Yields what a user is told of an index, with `most` files skipped."""
  news = [
    f"{count} {name}"
    for name in ("added", "changed", "removed")
    if (count := getattr(made, name))
  ]
  held = f"{made.files} files, {made.passages} passages in {index}"
  yield f"{held} ({', '.join(news) or 'as before'})"
  if made.ignored:
    kinds = collections.Counter(made.ignored).most_common(_SHOWN)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds)
    yield f"left out, of other kinds: {named}"
  for path, why in made.skipped[:most]:
    yield f"skipped {path}: {why}"
  if (more := len(made.skipped) - most) > 0:
    yield f"skipped {more} more"


def _progress() -> Callable[[int, int], None]:
  """Returns a function that says how much is read, once a second at most."""
  told = time.monotonic()

  def tell(done: int, of: int) -> None:
    nonlocal told
    if time.monotonic() - told >= 1:
      told = time.monotonic()
      stopping.say(f"documents: read {done} of {of} files")

  return tell
