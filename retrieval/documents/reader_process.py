"""Reads documents in processes of their own, with limits of time and memory.

A file may be damaged or hostile: it may let its reader run for hours, take all
memory or end the process. Such a file then costs its own text only. A process
reads one file after the other and is replaced when it ends.

The standard input has the settings and then a path on each line, the standard
output a line for each file, all in JSON.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from anysearch_jax.retrieval.documents import ocr, parts, reading, splitting

# Limits of one file. A recognizer of pictures has a limit for each page too.
MAX_SECONDS = 60
MAX_OCR_SECONDS = 3600
MAX_BYTES = 1 << 30
_END_SECONDS = 5
# The most characters of a title, and of headings, which each passage has.
_HEADING_CHARACTERS = 1000
_PROCESSES = min(2, os.cpu_count() or 1)
# Files that are read before the first of them is taken.
_AHEAD = 32
_MODULE = "anysearch_jax.retrieval.documents.reader_process"


class Settings(NamedTuple):
  """How files become passages.

  Attributes:
    tokens, overlap: as for `splitting.Splitter`.
    tokenizer: the JSON of its tokenizer; "" estimates tokens from bytes.
    ocr: as for `ocr.Command`; "" for none.
    max_seconds: limit on the seconds of a file.
    max_bytes: limit on the memory of a process that reads files; Linux keeps
      it, macOS does not.
  """

  tokens: int
  overlap: int
  tokenizer: str = ""
  ocr: str = ""
  max_seconds: int = MAX_SECONDS
  max_bytes: int = MAX_BYTES

  @property
  def too_large(self) -> str:
    """Why a file that takes more memory is not read, a clause about it."""
    return f"needs more than {self.max_bytes >> 20} MB of memory"


class Passage(NamedTuple):
  """A passage of a file; see `parts.Part`."""

  title: str
  text: str
  page: int
  heading: str


class FileText(NamedTuple):
  """What a file holds.

  Attributes:
    passages: its passages in order.
    reason: why it has none, or what was lost of it; "" if all was read.
  """

  passages: tuple[Passage, ...]
  reason: str


class Readers:
  """Reads files by processes, which start when they are needed.

  Args:
    settings: how files become passages.
  """

  def __init__(self, settings: Settings):
    self._settings = settings
    self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None]
    self._idle = queue.SimpleQueue()
    for _ in range(_PROCESSES):
      self._idle.put(None)
    self._threads = concurrent.futures.ThreadPoolExecutor(_PROCESSES)
    self._running: set[subprocess.Popen[bytes]] = set()

  def __enter__(self) -> Readers:
    return self

  def __exit__(self, *error: object) -> None:
    self._threads.shutdown(wait=False, cancel_futures=True)
    if error[0] is not None:  # Such as Ctrl-C: wait for no file.
      for running_process in list(self._running):
        running_process.kill()
    self._threads.shutdown()
    for _ in range(_PROCESSES):
      process = self._idle.get()
      if process is not None:
        _end(process)

  def read_all(self, paths: Iterable[str]) -> Iterator[FileText]:
    """Yields the text of each file, in their order.

    Args:
      paths: the files.
    """
    pending: collections.deque[concurrent.futures.Future[FileText]]
    pending = collections.deque()
    for path in paths:
      pending.append(self._threads.submit(self._read, path))
      if len(pending) > _AHEAD:
        yield pending.popleft().result()
    while pending:
      yield pending.popleft().result()

  def _read(self, path: str) -> FileText:
    process = self._idle.get()
    try:
      if process is None:
        process = _start(self._settings)
        self._running.add(process)
      assert process.stdin is not None and process.stdout is not None
      reply = b""
      with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(path).encode() + b"\n")
        process.stdin.flush()
        # For a process that stalls before it sets its own alarm.
        stall = threading.Timer(
          self._settings.max_seconds + _END_SECONDS, process.kill
        )
        stall.start()
        reply = process.stdout.readline()
        stall.cancel()
      if not reply.endswith(b"\n"):
        self._running.discard(process)
        reason = self._why_ended(_end(process))
        process = None
        return FileText((), reason)
      passages, reason = json.loads(reply)
      if reason == self._settings.too_large:
        # What the file took of its memory would be missing for the next one.
        self._running.discard(process)
        _end(process)
        process = None
    finally:
      self._idle.put(process)
    return FileText(tuple(Passage(*values) for values in passages), reason)

  def _why_ended(self, return_code: int) -> str:
    """Returns why a file ended its process, a clause about the file."""
    if return_code == -signal.SIGALRM:
      return f"takes more than {self._settings.max_seconds} seconds to read"
    if return_code in (-signal.SIGKILL, -signal.SIGABRT):
      return f"{self._settings.too_large}, or its reader was stopped"
    return f"ends its reader (code {return_code})"


def _start(settings: Settings) -> subprocess.Popen[bytes]:
  """Returns a process that reads files."""
  process = subprocess.Popen(
    # With -P the current folder, which may be a stranger's, is not searched.
    [sys.executable, "-P", "-m", _MODULE],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    # Ctrl-C is for the parent, which then closes the pipe.
    start_new_session=True,
  )
  assert process.stdin is not None
  with contextlib.suppress(BrokenPipeError):
    process.stdin.write(json.dumps(settings).encode() + b"\n")
  return process


def _end(process: subprocess.Popen[bytes]) -> int:
  """Closes the pipes of a process, and returns the code with which it ends."""
  assert process.stdin is not None and process.stdout is not None
  with contextlib.suppress(BrokenPipeError):
    process.stdin.close()
  process.stdout.close()
  try:
    return process.wait(timeout=_END_SECONDS)
  except subprocess.TimeoutExpired:
    process.kill()
    return process.wait()
  finally:
    # A recognizer that it started may still run.
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(process.pid, signal.SIGKILL)


def read_file(
  path: str, splitter: splitting.Splitter, recognizer: ocr.Command | None
) -> FileText:
  """Reads a file in this process.

  Args:
    path: the file.
    splitter: makes the passages.
    recognizer: as for `reading.read`.
  """
  passages: list[Passage] = []
  losses: list[str] = []
  name = os.path.basename(path)
  try:
    for part in reading.read(path, recognizer):
      if part.lost:
        losses.append(part.lost)
      if not part.text:
        continue
      for heading, text in splitter(part.text, is_markdown=part.is_markdown):
        passages.append(
          Passage(
            title=(part.title or name)[:_HEADING_CHARACTERS],
            text=text,
            page=part.page,
            heading=(heading or part.heading)[:_HEADING_CHARACTERS],
          )
        )
  except parts.ReadError as error:
    return FileText((), str(error))
  if not passages:
    losses.append("has no text")
  return FileText(tuple(passages), "; ".join(losses))


def _limit_memory(max_bytes: int) -> None:
  """Limits the memory of this process, where the system can."""
  try:
    import resource
  except ImportError:  # Windows.
    return
  with contextlib.suppress(ValueError, OSError):
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))


def main() -> None:
  """Reads the files that the standard input names."""
  # Libraries may print; only replies go to the parent.
  replies = os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)
  settings = Settings(*json.loads(sys.stdin.buffer.readline()))
  tokenizer: Any = None
  if settings.tokenizer:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(settings.tokenizer)
  splitter = splitting.Splitter(settings.tokens, settings.overlap, tokenizer)
  recognizer = ocr.Command(settings.ocr) if settings.ocr else None
  _limit_memory(settings.max_bytes)
  for line in sys.stdin.buffer:
    # The signal ends this process, also in the middle of a C library.
    signal.alarm(settings.max_seconds)
    try:
      text = read_file(json.loads(line), splitter, recognizer)
      reply = json.dumps(text).encode()
    except MemoryError:
      reply = json.dumps(FileText((), settings.too_large)).encode()
    signal.alarm(0)
    replies.write(reply + b"\n")
    replies.flush()


if __name__ == "__main__":
  main()
