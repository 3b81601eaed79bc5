"""Recognizes the text of pictures by a command of the user's."""

from __future__ import annotations

import pathlib
import shlex
import shutil
import subprocess

from anysearch_jax.retrieval.documents import parts

_SECONDS = 120
_PATH = "{}"
_TESSERACT = ("tesseract", _PATH, "stdout")


class Command:
  """Reads the text of a picture by a command.

  Args:
    command: a line such as `tesseract {} stdout -l deu`. The path of a PNG file
      takes the place of `{}`, or follows the words; the file is the standard
      input too. The text is the standard output. `tesseract` alone is enough.

  Raises:
    ValueError: there is no such program.
  """

  def __init__(self, command: str):
    words = shlex.split(command)
    if words == ["tesseract"]:
      words = list(_TESSERACT)
    if not words or not shutil.which(words[0]):
      raise ValueError(
        f"--ocr: found no program {command!r}, expected `tesseract` or another "
        "command that prints the text of a picture; install it, or name its "
        "path."
      )
    self._words = words if _PATH in words else [*words, _PATH]

  def __call__(self, picture: pathlib.Path) -> str:
    """Returns the text of a picture.

    Raises:
      parts.ReadError: the command fails or takes too long.
    """
    words = [str(picture) if word == _PATH else word for word in self._words]
    try:
      with picture.open("rb") as file:
        done = subprocess.run(
          words, stdin=file, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
      raise parts.ReadError(
        f"{words[0]} took more than {_SECONDS} seconds"
      ) from error
    if done.returncode:
      message = " ".join(done.stderr.decode(errors="replace").split())
      raise parts.ReadError(
        f"{words[0]} ended with code {done.returncode} ({message:.200})"
      )
    return parts.decode(done.stdout)
