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
from anysearch_jax import types
from anysearch_jax.host import disk, json_files, platforms, terminal
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import shipped, stopping

if TYPE_CHECKING:
  from anysearch_jax.retrieval.documents import folder

# Files that cannot be read, and kinds of other files, that are listed.
_LISTED = 5


def define_flags() -> None:
  """Defines `--documents` and `--index`."""
  flags.DEFINE_list(
    "documents",
    [],
    "Files, folders and globs of yours to search, separated by commas; their "
    "index is kept up to date.",
  )
  flags.DEFINE_string(
    "index",
    None,
    "Folder for the index of --documents or, without these, of an index to "
    "search; default: a folder in your cache.",
  )
  define_reading()


def define_reading() -> None:
  """Defines `--ocr` and `--follow_links`."""
  flags.DEFINE_bool(
    "follow_links",
    False,
    "Read files and folders outside of those of --documents to which links in "
    "them lead.",
  )
  flags.DEFINE_string(
    "ocr",
    "",
    "Command that reads pages of PDFs that are pictures: `tesseract`, or a "
    "line such as `tesseract {} stdout -l deu`, where {} stands for a PNG "
    "file; it prints the text.",
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
    platform = "cpu" if platforms.expected() == "cpu" else "gpu"
    preset = platform if f.hf and not f.sglang else ""
    f["config"].value = f"configs/documents.py:{preset}"
  config = launch_flags.read_config()
  if is_default and f.hf:
    config = _within_context(config, pathlib.Path(shipped.find_policy(f.hf)))
  index_folder = f.index or str(_cache_folder(f.documents))
  return config_lib.changed(
    config, retrieval={"kind": "index", "index": index_folder}
  )


def _within_context(
  config: config_lib.ExperimentConfig, policy: pathlib.Path
) -> config_lib.ExperimentConfig:
  """Returns a configuration within the context that a policy was made for."""
  # The loader of the folder reports what is wrong with it.
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
    policy_config = json_files.read(policy / "config.json")
    max_positions = policy_config["max_position_embeddings"]
    context = min(max_positions, config.episode.max_context)
    generated = min(context // 2, config.episode.max_generated)
    limits = {"max_context": context, "max_generated": generated}
    return config_lib.changed(config, episode=limits)
  return config


def _cache_folder(paths: Sequence[str]) -> pathlib.Path:
  """Returns the folder of the index of some paths in the user's cache."""
  # The rows of an index have the paths as they were typed, so each spelling
  # has an index of its own.
  spellings = {
    (os.path.abspath(os.path.expanduser(path)), path) for path in paths
  }
  name = json_files.sha256(sorted(spellings))[:16]
  return disk.user_cache() / "indexes" / name


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
    summary = folder.update(
      flags.FLAGS.documents,
      index,
      _settings(),
      on_file=_progress(),
    )
  except OSError as error:
    sentence = (
      error if isinstance(error, disk.DiskError) else f"{index}: {error}."
    )
    raise ValueError(
      f"{sentence} --index=FOLDER names another place."
    ) from error
  for line in summary_lines(summary, index):
    stopping.say(f"documents: {line}")


def _settings() -> folder.Settings:
  from anysearch_jax.retrieval.documents import folder

  f = flags.FLAGS
  return folder.Settings(ocr=f.ocr, follow_links=f.follow_links)


def followed(
  config: config_lib.ExperimentConfig,
  open_retriever: Callable[[], types.Retriever],
) -> types.Retriever:
  """Returns a retriever whose index follows `--documents`.

  Without them, or if a log answers the searches, it is the one that is opened.
  """
  if not flags.FLAGS.documents or config.retrieval.log:
    return open_retriever()
  from anysearch_jax.retrieval.documents import folder, following

  index = config.retrieval.index
  settings = _settings()
  return following.FollowingRetriever(
    index,
    open_retriever,
    is_current=lambda: folder.is_current(
      flags.FLAGS.documents, index, settings
    ),
    update=lambda: update(config),
    tell=lambda sentence: stopping.say(f"documents: {sentence}"),
  )


def summary_lines(
  summary: folder.Summary, index: str, max_skipped: int = _LISTED
) -> Iterator[str]:
  """Yields the lines that tell a user what is in an index.

  Args:
    summary: what the update of the index found.
    index: folder of the index.
    max_skipped: limit on the skipped files that are listed by name.
  """
  changes = [
    f"{count} {name}"
    for name in ("added", "changed", "removed")
    if (count := getattr(summary, name))
  ]
  contents = f"{summary.files} files, {summary.passages} passages in {index}"
  yield f"{contents} ({', '.join(changes) or 'as before'})"
  if summary.ignored:
    kinds = collections.Counter(summary.ignored).most_common(_LISTED)
    ignored = ", ".join(f"{count} {kind}" for kind, count in kinds)
    yield f"left out, of other kinds: {ignored}"
  for path, reason in summary.skipped[:max_skipped]:
    yield f"skipped {terminal.printable(path)}: {terminal.printable(reason)}"
  if (unlisted := len(summary.skipped) - max_skipped) > 0:
    yield f"skipped {unlisted} more"
  for path, loss in summary.partly_read[:max_skipped]:
    yield f"read in part {terminal.printable(path)}: {terminal.printable(loss)}"
  if (unlisted := len(summary.partly_read) - max_skipped) > 0:
    yield f"read in part {unlisted} more"


def _progress() -> Callable[[int, int], None]:
  """Returns a function that says how much is read, once a second at most."""
  last_report = time.monotonic()

  def tell(done: int, total: int) -> None:
    nonlocal last_report
    if time.monotonic() - last_report >= 1:
      last_report = time.monotonic()
      stopping.say(f"documents: read {done} of {total} files")

  return tell
