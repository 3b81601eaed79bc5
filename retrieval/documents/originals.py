"""Opens the files that an index of documents was made of."""

from __future__ import annotations

import os
import pathlib
from typing import BinaryIO

from anysearch_jax import types
from anysearch_jax.retrieval.documents import folder
from anysearch_jax.retrieval.index import building


class MissingError(LookupError):
  """An original cannot be opened; the message is a sentence."""


class Originals:
  """The files of the newest build of an index that have passages.

  Args:
    index: folder of the index. An index of a corpus has no such files.
  """

  def __init__(self, index: str | os.PathLike):
    self._index = index
    self._build = pathlib.Path()
    self._files: dict[str, folder.File] = {}

  def name(self, passage: types.Passage) -> str:
    """Returns the name of the file that a passage is from, "" if of none."""
    name = passage.id.rpartition("#")[0]
    return name if name in self._newest_files() else ""

  def open(self, name: str) -> BinaryIO:
    """Opens a file.

    It is the one that was indexed, by its size and the time of its last change:
    no other file that its path leads to now, as by a link.

    Args:
      name: what `name` returned.

    Raises:
      MissingError: the index has no such file, or it is gone or another one.
    """
    indexed = self._newest_files().get(name)
    if indexed is None:
      raise MissingError(
        f"Found no document {name!r} in the index, expected one that an answer "
        "cites."
      )
    try:
      # Without waiting, if a pipe has taken the place of the file.
      descriptor = os.open(indexed.path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
      raise MissingError(
        f"The document {name!r} cannot be opened ({error.strerror}); ask again "
        "to search what is there now."
      ) from error
    if folder.stamp(descriptor) == indexed.stamp:
      return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise MissingError(
      f"The document {name!r} was changed or replaced after it was indexed; "
      "ask again to search what is there now."
    )

  def _newest_files(self) -> dict[str, folder.File]:
    build = building.newest_build(self._index)
    if build != self._build:
      files = folder.files(build)
      self._files = {file.name: file for file in files if file.rows}
      self._build = build
    return self._files
