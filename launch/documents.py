"""`--documents`: files of one's own become the index that a policy searches.

The index is kept in the user's cache folder under a name made of the paths, and
the next command brings it up to date by the files that changed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
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
  from anysearch_jax.retrieval.index import search

# Files that cannot be read that are listed.
_LISTED = 5
# Reasons and endings that are listed of what is left out.
_REASONS = 10
# By the values of `--search`, those of `retrieval.ranking`.
_RANKINGS = {"words": "bm25", "dense": "dense", "hybrid": "hybrid"}
_MINUTE = 60  # Seconds.


def define_flags() -> None:
  """Defines `--documents`, `--index` and how they are searched."""
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
  flags.DEFINE_enum(
    "search",
    None,
    list(_RANKINGS),
    "How --documents or --index are searched: by words, by meaning (dense), or "
    "by both; default: hybrid with --embeddings or the packages of the extra "
    "`dense`, otherwise words.",
  )
  flags.DEFINE_string(
    "embeddings",
    None,
    "Address of a server with OpenAI's embeddings, such as "
    "http://127.0.0.1:11434/v1; default: the model of the extra `dense`.",
  )
  flags.DEFINE_string(
    "embeddings_model",
    "",
    "Name of the model at --embeddings; default: the only one that it serves.",
  )
  flags.DEFINE_string(
    "embeddings_key_variable",
    None,
    "Environment variable with the key for --embeddings; default: "
    "OPENAI_API_KEY if it is set and the address is https.",
  )
  define_reading()


def define_reading() -> None:
  """Defines `--ocr`, `--follow_links` and `--ignored_files`."""
  flags.DEFINE_bool(
    "follow_links",
    False,
    "Read files and folders outside of those of --documents to which links in "
    "them lead.",
  )
  flags.DEFINE_bool(
    "ignored_files",
    False,
    "Read also what .gitignore files list, lock files of package managers, and "
    "folders that these and builds write, such as node_modules.",
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
  require_paths()
  is_default = f.config is None
  if is_default:
    platform = "cpu" if platforms.expected() == "cpu" else "gpu"
    preset = platform if f.hf and not (f.sglang or f.vllm) else ""
    f["config"].value = f"configs/documents.py:{preset}"
  config = launch_flags.read_config()
  if is_default and f.hf:
    # The loader of the folder reports what is wrong with it.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
      folder_config = json_files.read(
        pathlib.Path(shipped.find_policy(f.hf)) / "config.json"
      )
      limits = config.episode.within(folder_config["max_position_embeddings"])
      config = dataclasses.replace(config, episode=limits)
  settings = {
    "kind": "index",
    "index": f.index or str(_cache_folder(f.documents)),
    "encoder": f.embeddings or config.retrieval.encoder,
    "key_variable": _key_variable(),
  }
  if f.search:
    settings["ranking"] = _RANKINGS[f.search]
  elif f.documents and not _has_encoder():
    settings["ranking"] = "bm25"
  return config_lib.changed(config, retrieval=settings)


def _has_encoder() -> bool:
  from anysearch_jax.retrieval.encoder import installed

  return bool(flags.FLAGS.embeddings) or installed.is_installed()


def _key_variable() -> str:
  """Returns the variable with the key for --embeddings, or ""."""
  from anysearch_jax.host import openai_endpoint

  f = flags.FLAGS
  if f.embeddings_key_variable is None:
    return openai_endpoint.default_key_variable(f.embeddings or "")
  return f.embeddings_key_variable


def _open_encoder() -> search.Encoder | None:
  """Returns the encoder of the flags; None for a search by words.

  Raises:
    ValueError: there is no encoder.
  """
  from anysearch_jax.retrieval.encoder import installed, served

  f = flags.FLAGS
  if f.search == "words" or not (f.search or _has_encoder()):
    return None
  if not f.embeddings:
    return installed.open_encoder()
  try:
    return served.open_encoder(
      f.embeddings, f.embeddings_model, _key_variable()
    )
  except (ValueError, types.RetrievalError) as error:
    raise ValueError(f"--embeddings: {error}") from error


def require_paths() -> None:
  """Checks what `--documents` and `--ocr` name, before anything that lasts.

  Raises:
    ValueError: a path or a program is missing.
  """
  f = flags.FLAGS
  if f.documents:
    from anysearch_jax.retrieval.documents import finding

    for given_path in f.documents:
      finding.matching_paths(given_path)
  if "ocr" in f and f.ocr:
    from anysearch_jax.retrieval.documents import ocr

    ocr.Command(f.ocr)


def _cache_folder(paths: Sequence[str]) -> pathlib.Path:
  """Returns the folder of the index of some paths in the user's cache."""
  places = {os.path.abspath(os.path.expanduser(path)) for path in paths}
  name = json_files.sha256(sorted(places))[:16]
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
  encoder = _open_encoder()
  try:
    summary = folder.update(
      flags.FLAGS.documents,
      index,
      _settings(),
      encoder=encoder,
      on_file=_progress("read {} of {} files"),
      on_rows=_progress("embedded {} of {} new passages"),
    )
  except types.RetrievalError as error:
    raise ValueError(f"--embeddings: {error}") from error
  except OSError as error:
    sentence = (
      error if isinstance(error, disk.DiskError) else f"{index}: {error}."
    )
    raise ValueError(
      f"{sentence} --index=FOLDER names another place."
    ) from error
  for line in summary_lines(summary, index):
    stopping.say(f"documents: {line}")
  cut = getattr(encoder, "cut", 0)
  if cut:
    stopping.say(
      f"documents: the encoder read only the beginning of {cut} texts; their "
      "ends are found by words"
    )


def _settings() -> folder.Settings:
  from anysearch_jax.retrieval.documents import folder

  f = flags.FLAGS
  return folder.Settings(
    ocr=f.ocr, follow_links=f.follow_links, ignored_files=f.ignored_files
  )


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
  if summary.is_remade:
    yield (
      "all files were read again: the index was damaged, of another version or "
      "of other settings"
    )
  counts = collections.Counter(summary.ignored).most_common()
  counts.sort(key=lambda pair: pair[0].startswith("."))  # Endings come last.
  left_out = [f"{count} {reason}" for reason, count in counts[:_REASONS]]
  if unlisted := sum(count for _, count in counts[_REASONS:]):
    left_out.append(f"{unlisted} more")
  if left_out:
    yield f"left out: {', '.join(left_out)}"
  for path, reason in summary.skipped[:max_skipped]:
    yield f"skipped {terminal.printable(path)}: {terminal.printable(reason)}"
  if (unlisted := len(summary.skipped) - max_skipped) > 0:
    yield f"skipped {unlisted} more"
  for path, loss in summary.partly_read[:max_skipped]:
    yield f"read in part {terminal.printable(path)}: {terminal.printable(loss)}"
  if (unlisted := len(summary.partly_read) - max_skipped) > 0:
    yield f"read in part {unlisted} more"


def _progress(sentence: str) -> Callable[[int, int], None]:
  """Returns a function that says what is done, once a second at most.

  Args:
    sentence: has places for the number that is done and the number of all.
  """
  start = time.monotonic()
  last_report = start

  def tell(done: int, total: int) -> None:
    nonlocal last_report
    now = time.monotonic()
    if now - last_report < 1:
      return
    last_report = now
    minutes = (now - start) / done * (total - done) / _MINUTE
    outlook = f", {minutes:.0f} minutes left" if minutes >= 1 else ""
    stopping.say(f"documents: {sentence.format(done, total)}{outlook}")

  return tell
