"""Deltas of weights: the changes of a folder's safetensors since a version.

An optimizer step changes few bfloat16 weights. If the servers do not share the
trainer's RAM, only a delta crosses the network. On each host of servers,

    python anysearch_jax/rollout/servers/delta.py SHARED

keeps a copy of the weights in RAM, patches it, and gives its folder the
version's name, after which servers load it like any folder. The program needs
only NumPy and the standard library. SHARED is `servers.weights`.

A delta is a zip file with a checksum of itself at its end. For each chunk of a
safetensors file, changed or not, it has a checksum of the result; for a changed
one also the distances between changed pairs of bytes, and their XOR with the
old ones. A host opens the files of its copy only, whatever names a delta has.
It refuses a delta that does not fit its copy, with the reason in a file next to
the delta; the trainer then sends the whole folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import pathlib
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Collection

import numpy as np

# Folder of a host's copies, each under its version's name.
COPIES = pathlib.Path("/dev/shm/anysearch-copies")
DELTA = ".delta"
REFUSED = ".refused"
_UNFINISHED = ".writing"  # The suffix that `hf.atomic_directory` uses.
_POLL_SECONDS = 0.2
# The fastest level; level 9 takes ten times as long and saves a tenth.
_COMPRESSION_LEVEL = 1
# Values that are compared at a time. Several arrays of 8 bytes a value are in
# memory meanwhile.
_CHUNK_VALUES = 1 << 24
_INDEX = "index.json"
_MAX_INDEX_BYTES = 1 << 26  # A model of 10 TB has 300,000 chunks.
_DIGEST_BYTES = hashlib.sha256().digest_size


def write(path: pathlib.Path, old: pathlib.Path, new: pathlib.Path) -> None:
  """Writes the delta between two folders; the file appears whole.

  The folders' names are the names of their versions.

  Args:
    path: file of the delta.
    old: the folder that hosts have.
    new: the folder that they get.

  Raises:
    ValueError: the folders do not have the same tensors.
  """
  sizes = _sizes(new)
  if sizes != _sizes(old):
    raise ValueError(
      f"{new}: found other tensors than in {old}, expected the same names, "
      "types and shapes."
    )
  unfinished = path.with_name(path.name + _UNFINISHED)
  with open(unfinished, "wb+") as file:
    with zipfile.ZipFile(
      file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION_LEVEL
    ) as archive:
      digests = {}
      for name in sizes:
        old_values = _values(old / name)
        new_values = _values(new / name)
        for start in range(0, len(new_values), _CHUNK_VALUES):
          chunk = new_values[start : start + _CHUNK_VALUES]
          xor = old_values[start : start + _CHUNK_VALUES] ^ chunk
          changed = np.flatnonzero(xor)
          key = f"{name}/{start}"
          digests[key] = hashlib.sha256(chunk.data).hexdigest()
          if not len(changed):
            continue
          # Gaps are small numbers, which compress better than indices.
          gaps = np.diff(changed, prepend=-1).astype("<u4")
          archive.writestr(f"{key}/gaps", _planes(gaps))
          archive.writestr(f"{key}/xor", _planes(xor[changed]))
      index = {"base": old.name, "sha256": digests}
      archive.writestr(_INDEX, json.dumps(index))
    file.seek(0)
    file.write(hashlib.file_digest(file, "sha256").digest())
  unfinished.rename(path)


def apply(path: pathlib.Path, copies: pathlib.Path) -> None:
  """Patches the copy of a delta's base, and gives it the new version's name.

  Args:
    path: file of the delta, named after the new version.
    copies: folder of the copies, each under its version's name.

  Raises:
    ValueError: the delta is damaged, its base is not there or has other files,
      or the result has another checksum; the copy is then removed.
  """
  content = path.read_bytes()
  body = content[:-_DIGEST_BYTES]
  digest = content[-_DIGEST_BYTES:]
  if hashlib.sha256(body).digest() != digest:
    raise ValueError(f"{path}: found a damaged delta, expected a whole one.")
  patched = copies / (path.stem + _UNFINISHED)
  shutil.rmtree(patched, ignore_errors=True)
  try:
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
      index = json.loads(_entry(archive, _INDEX, _MAX_INDEX_BYTES))
      digests = dict(index["sha256"])
      names = sorted(
        p.name
        for p in copies.iterdir()
        if p.is_dir() and p.suffix != _UNFINISHED
      )
      if index["base"] not in names:
        raise ValueError(
          f"is a delta of {index['base']!r}, found {names} in {copies}"
        )
      base = copies / index["base"]
      expected_keys = {f"{name}/{start}" for name, start in _chunks(base)}
      if digests.keys() != expected_keys:
        raise ValueError(
          f"has chunks of other files than those of {index['base']!r}"
        )
      entries = frozenset(archive.namelist())
      base.rename(patched)  # A copy that is being patched is of no version.
      for name, start in _chunks(patched):
        _patch(patched / name, start, archive, entries)
        chunk = _values(patched / name)[start : start + _CHUNK_VALUES]
        if hashlib.sha256(chunk.data).hexdigest() != digests[f"{name}/{start}"]:
          raise ValueError(
            f"{name} has another checksum than expected; the copy of "
            f"{index['base']!r} was damaged"
          )
  except Exception as error:  # A forged delta can raise almost any of them.
    shutil.rmtree(patched, ignore_errors=True)
    raise ValueError(
      f"{path}: found a delta that does not fit, expected one of this host's "
      f"copy: {error}. A copy that is half patched is removed."
    ) from error
  patched.rename(copies / path.stem)


def _patch(
  path: pathlib.Path,
  start: int,
  archive: zipfile.ZipFile,
  entries: Collection[str],
) -> None:
  """Patches the chunk of a file that begins at a value, if it has changed."""
  key = f"{path.name}/{start}"
  if f"{key}/gaps" not in entries:
    return
  chunk = _values(path, "r+")[start : start + _CHUNK_VALUES]
  gaps_type = np.dtype("<u4")
  gaps = _entry(archive, f"{key}/gaps", len(chunk) * gaps_type.itemsize)
  xor = _entry(archive, f"{key}/xor", chunk.nbytes)
  changed = np.cumsum(_from_planes(gaps, gaps_type), dtype=np.intp) - 1
  chunk[changed] ^= _from_planes(xor, chunk.dtype)


def _entry(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
  """Returns the bytes of an entry; raises ValueError for more than allowed."""
  size = archive.getinfo(name).file_size  # Never are more bytes unpacked.
  if size > max_bytes:
    raise ValueError(f"{name} has {size} bytes, expected at most {max_bytes}")
  return archive.read(name)


def _planes(values: np.ndarray) -> bytes:
  """Returns values byte by byte: all lowest bytes, then all second ones, ...

  The upper bytes are mostly 0, so they compress to almost nothing.
  """
  return values.view(np.uint8).reshape(len(values), -1).T.tobytes()


def _from_planes(planes: bytes, kind: np.dtype) -> np.ndarray:
  """Returns the values of `_planes`."""
  rows = np.frombuffer(planes, np.uint8).reshape(kind.itemsize, -1)
  return np.ascontiguousarray(rows.T).view(kind).ravel()


def _sizes(folder: pathlib.Path) -> dict[str, int]:
  """Returns the bytes of a folder's safetensors, by file name."""
  files = folder.glob("*.safetensors")
  return {path.name: path.stat().st_size for path in files}


def _chunks(folder: pathlib.Path) -> list[tuple[str, int]]:
  """Returns the name of the file and the start of each chunk of a folder."""
  return [
    (name, start)
    for name in _sizes(folder)
    for start in range(0, len(_values(folder / name)), _CHUNK_VALUES)
  ]


def _values(path: pathlib.Path, mode: str = "r") -> np.ndarray:
  """Returns a whole mapped file as pairs of bytes, or bytes if it is odd."""
  kind = "u1" if path.stat().st_size % 2 else "<u2"
  return np.memmap(path, kind, mode)  # type: ignore


class Sender:
  """Sends versions as deltas, or whole.

  Args:
    shared: folder that hosts see; gets deltas and whole versions.
  """

  def __init__(self, shared: pathlib.Path):
    self._shared = shared
    self._last: pathlib.Path | None = None
    self._lock = threading.Lock()

  def send(self, folder: pathlib.Path) -> pathlib.Path:
    """Sends the version in a folder, which stays until the next one is sent.

    Returns:
      The delta from the last version, or the whole folder if there is none.
    """
    last = self._last
    self._last = folder
    self._shared.mkdir(parents=True, exist_ok=True)
    if last is None or not last.is_dir():
      return self.whole_folder(folder.name)
    path = self._shared / (folder.name + DELTA)
    write(path, last, folder)
    return path

  @property
  def is_first(self) -> bool:
    """Whether the next version is the first, which is sent whole."""
    return self._last is None

  def whole_folder(self, name: str) -> pathlib.Path:
    """Returns the shared folder of a version, written if it is not.

    Raises FileNotFoundError if it is not the last version that was sent.
    """
    with self._lock:
      if self._last is None or self._last.name != name:
        raise FileNotFoundError(f"{name}: a newer version was sent.")
      path = self._shared / name
      if not path.is_dir():
        _copy(self._last, path)
      return path

  def refusal(self) -> str:
    """Returns why hosts refused the last version, "" if none did."""
    if self._last is None:
      return ""
    path = self._shared / (self._last.name + REFUSED)
    return path.read_text() if path.is_file() else ""


def follow(shared: pathlib.Path, copies: pathlib.Path) -> None:
  """Brings the copy of this host to the newest version in `shared`, once.

  A whole version replaces the copy; a delta patches it. If a delta does not
  fit, a file next to it says why.

  Args:
    shared: folder with the deltas and whole versions of a run.
    copies: folder of this host's copy.
  """
  copies.mkdir(parents=True, exist_ok=True)
  sent = [
    path
    for path in shared.glob("anysearch-weights-*/*")
    if path.suffix == DELTA or (path / "config.json").is_file()
    if path.suffix != _UNFINISHED
  ]
  if not sent:
    return
  path = max(sent, key=lambda path: path.stat().st_mtime_ns)
  version = path.stem if path.suffix == DELTA else path.name
  if (copies / version).is_dir():
    return
  if path.suffix != DELTA:
    for old in copies.iterdir():
      if old.is_dir():
        shutil.rmtree(old)
    _copy(path, copies / version)
  elif not path.with_suffix(REFUSED).exists():
    try:
      apply(path, copies)
    except ValueError as error:
      print(error, file=sys.stderr, flush=True)
      unfinished = path.with_suffix(REFUSED + _UNFINISHED)
      unfinished.write_text(str(error))
      unfinished.rename(path.with_suffix(REFUSED))


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies a folder, which appears whole."""
  unfinished = target.with_name(target.name + _UNFINISHED)
  shutil.rmtree(unfinished, ignore_errors=True)
  shutil.copytree(source, unfinished)
  os.utime(unfinished)  # The newest version is the one that appeared last.
  unfinished.rename(target)


def main(shared: str, copies: str = str(COPIES)) -> None:
  """Follows versions until the process that started this one has ended."""
  folder = pathlib.Path(copies)
  parent = os.getppid()
  is_holder = False
  folder.mkdir(parents=True, exist_ok=True)
  # Each server of a host starts this program; one of them holds the lock.
  with open(folder / "lock", "w") as lock:
    while os.getppid() == parent:
      with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_holder = True
      if is_holder:
        try:
          follow(pathlib.Path(shared), folder)
        except OSError as error:
          # The version was removed meanwhile, or the RAM is full.
          print(error, file=sys.stderr, flush=True)
      time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
  main(*sys.argv[1:])
