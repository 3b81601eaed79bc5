"""Deltas of weights: what changed in a folder's safetensors since a version.

An optimizer step changes few bfloat16 weights. So where servers do not share
the trainer's RAM, a delta crosses the network. Beside the servers of a host,

    python anysearch_jax/rollout/sglang/delta.py SHARED

keeps a copy of the weights in that host's RAM, patches it, and gives its folder
the version's name, after which servers load it as any folder. It needs NumPy
and the standard library only. SHARED is `sglang.weights`.

A delta names its base and has a checksum of itself and of each tensor that it
makes. What does not fit is refused, with the reason in a file beside it, and
the whole folder is sent. Of a tensor, either the changed values are sent, as
distances between them and their XOR with the old ones, or all of it.

Trainers with a controller put a delta into the whole folder that they publish;
hosts see it when the controller hands over that version.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

# Where hosts have their copies, each under its version's name.
COPIES = pathlib.Path("/dev/shm/anysearch-copies")
DELTA, REFUSED = ".delta", ".refused"
_COPYING = ".writing"  # As of `hf.appears_whole`.
_LOOK_SECONDS = 0.2
# Fast; level 9 takes ten times as long for a tenth of the bytes.
_LEVEL = 1


class _Tensor(NamedTuple):
  """A tensor in a file: its first byte, its end, and bytes of a value."""

  file: str
  start: int
  end: int
  size: int


def write(path: pathlib.Path, old: pathlib.Path, new: pathlib.Path) -> None:
  """Writes what makes the folder `old` equal to `new`; appears whole.

  Their names are the versions'.

  Raises:
    ValueError: the folders do not have the same tensors.
  """
  before, after = dict(_tensors(old)), dict(_tensors(new))
  if before != after:
    raise ValueError(
      f"{new}: found other tensors than in {old}, expected the same names, "
      "types and shapes."
    )
  tensors: list[dict[str, Any]] = []
  beside = path.with_name(path.name + _COPYING)
  digest = hashlib.sha256()
  with open(beside, "wb") as file:
    for tensor in after.values():
      was, now = _bytes(old, tensor), _bytes(new, tensor)
      if np.array_equal(was, now):
        continue
      parts = _changes(was, now, tensor.size)
      if sum(map(len, parts)) >= len(now):
        parts = [now.tobytes()]
      for part in parts:
        file.write(part)
        digest.update(part)
      tensors.append(
        {
          "place": tensor,
          "parts": [len(part) for part in parts],
          "sha256": hashlib.sha256(now.data).hexdigest(),
        }
      )
    said = {"base": old.name, "sha256": digest.hexdigest(), "tensors": tensors}
    text = json.dumps(said).encode()
    file.write(text + len(text).to_bytes(8, "little"))
    file.write(hashlib.sha256(text).digest())
  beside.rename(path)


def apply(path: pathlib.Path, copies: pathlib.Path) -> None:
  """Makes the copy of a delta's base the version that the delta is named after.

  Raises:
    ValueError: the delta is damaged, its base is not there, or the result has
      another checksum; the copy is then removed.
  """
  content = path.read_bytes()
  end = len(content) - 40  # A size and a checksum follow the text.
  begin = end - int.from_bytes(content[end : end + 8], "little")
  body, text = memoryview(content)[: max(begin, 0)], content[begin:end]
  said = {}
  if hashlib.sha256(text).digest() == content[end + 8 :]:
    said = json.loads(text)
  if said.get("sha256") != hashlib.sha256(body).hexdigest():
    raise ValueError(f"{path}: found a damaged delta, expected a whole one.")
  base, patched = copies / said["base"], copies / (path.stem + _COPYING)
  if not base.is_dir():
    held = sorted(p.name for p in copies.iterdir() if p.is_dir())
    raise ValueError(
      f"{path}: is a delta of {said['base']!r}, found {held} in {copies}."
    )
  shutil.rmtree(patched, ignore_errors=True)
  base.rename(patched)  # A copy that is being patched is of no version.
  start = 0
  for each in said["tensors"]:
    tensor = _Tensor(*each["place"])
    values = _bytes(patched, tensor, "r+")
    parts = []
    for length in each["parts"]:
      parts.append(bytes(body[start : start + length]))
      start += length
    if len(parts) == 1:
      values[:] = np.frombuffer(parts[0], np.uint8)
    else:
      _change(values, parts, tensor.size)
    if hashlib.sha256(values.data).hexdigest() != each["sha256"]:
      shutil.rmtree(patched)
      raise ValueError(
        f"{path}: a tensor of {tensor.file} has another checksum than "
        f"expected; the copy of {said['base']!r} was damaged and is removed."
      )
  patched.rename(copies / path.stem)


def _changes(was: np.ndarray, now: np.ndarray, size: int) -> list[bytes]:
  """Returns distances between changed values, and their XOR, compressed."""
  kind = np.dtype(f"<u{size}")
  xor = was.view(kind) ^ now.view(kind)
  where = np.flatnonzero(xor)
  gaps = np.diff(where, prepend=-1)
  # As planes of bytes: the upper ones are mostly 0.
  planes = [
    x.view(np.uint8).reshape(len(where), -1).T.tobytes()
    for x in (gaps.astype("<u8"), xor[where])
  ]
  return [zlib.compress(plane, _LEVEL) for plane in planes]


def _change(values: np.ndarray, parts: list[bytes], size: int) -> None:
  """Changes values in place, the inverse of `_changes`."""

  def read(part: bytes, size: int) -> np.ndarray:
    plane = np.frombuffer(zlib.decompress(part), np.uint8).reshape(size, -1)
    return np.ascontiguousarray(plane.T).view(f"<u{size}").ravel()

  where = np.cumsum(read(parts[0], 8)) - np.uint64(1)
  values.view(f"<u{size}")[where.astype(np.intp)] ^= read(parts[1], size)


def _tensors(folder: pathlib.Path) -> Iterator[tuple[str, _Tensor]]:
  """Yields the places of all tensors in a folder, by file and name."""
  for path in sorted(folder.glob("*.safetensors")):
    with open(path, "rb") as file:
      size = int.from_bytes(file.read(8), "little")
      head = json.loads(file.read(size))
    for name, each in head.items():
      if name == "__metadata__":
        continue
      start, end = (8 + size + x for x in each["data_offsets"])
      bits = int("".join(c for c in each["dtype"].split("_")[0] if c.isdigit()))
      yield f"{path.name} {name}", _Tensor(path.name, start, end, bits // 8)


def _bytes(
  folder: pathlib.Path, tensor: _Tensor, mode: str = "r"
) -> np.ndarray:
  """Returns the bytes of a tensor in a folder, mapped."""
  path, size = folder / tensor.file, tensor.end - tensor.start
  return np.memmap(path, np.uint8, mode, tensor.start, (size,))  # type: ignore


class Sender:
  """Sends versions as deltas, or whole; one process writes.

  Args:
    shared: folder that hosts see; gets deltas and whole versions.
    ram: own folder, for the last version whole.
  """

  def __init__(self, shared: pathlib.Path, ram: pathlib.Path):
    self._shared, self._ram = shared, ram
    self._last: pathlib.Path | None = None
    self._lock = threading.Lock()

  def send(
    self, name: str, save: Callable[[pathlib.Path], None], *, writes: bool
  ) -> pathlib.Path:
    """Writes a version by `save`, and sends it; returns what hosts get.

    Only the process that `writes` sends; `save` is called in all of them.
    """
    last, new = self._last, self._ram / name
    if last is None and writes:
      self.close()  # What a run left that was killed.
    save(new)
    self._last = new
    if not writes:
      return new
    self._shared.mkdir(parents=True, exist_ok=True)
    if last is None or not last.is_dir():
      return self.whole(name)
    sent = self._shared / (name + DELTA)
    write(sent, last, new)
    shutil.rmtree(last)
    return sent

  def forward(self, whole: pathlib.Path) -> pathlib.Path:
    """Sends a folder that trainers published, by the delta in it if any."""
    self._last = whole
    self._shared.mkdir(parents=True, exist_ok=True)
    if not (whole / DELTA).is_file():
      return self.whole(whole.name)
    sent = self._shared / (whole.name + DELTA)
    _copy(whole / DELTA, sent)
    return sent

  @property
  def begins(self) -> bool:
    """Whether the next version is the first, which is sent whole."""
    return self._last is None

  def whole(self, name: str) -> pathlib.Path:
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

  def why(self) -> str:
    """Returns why hosts refused the last version, "" if none did."""
    if self._last is None:
      return ""
    path = self._shared / (self._last.name + REFUSED)
    return path.read_text() if path.is_file() else ""

  def close(self) -> None:
    """Removes the last version from this host's RAM."""
    shutil.rmtree(self._ram, ignore_errors=True)


def follow(shared: pathlib.Path, copies: pathlib.Path) -> None:
  """Brings the copy of this host to the newest version in `shared`, once.

  A whole version replaces the copy; a delta changes it. A delta that does not
  fit gets a file beside it that says why.
  """
  copies.mkdir(parents=True, exist_ok=True)
  found = [
    path
    for path in shared.glob("anysearch-weights-*/*")
    if path.suffix == DELTA or (path / "config.json").is_file()
    if path.suffix != _COPYING
  ]
  if not found:
    return
  path = max(found, key=lambda path: path.stat().st_mtime_ns)
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
      beside = path.with_suffix(REFUSED + _COPYING)
      beside.write_text(str(error))
      beside.rename(path.with_suffix(REFUSED))


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies a delta, or a folder without the one in it; it appears whole."""
  beside = target.with_name(target.name + _COPYING)
  shutil.rmtree(beside, ignore_errors=True)
  if source.is_dir():
    shutil.copytree(source, beside, ignore=shutil.ignore_patterns(DELTA))
  else:
    shutil.copyfile(source, beside)
  os.utime(beside)  # The newest version is the one that appeared last.
  beside.rename(target)


def main(shared: str, copies: str = str(COPIES)) -> None:
  """Follows versions until the process that started this one has ended."""
  folder, parent, held = pathlib.Path(copies), os.getppid(), False
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / "lock", "w") as lock:  # Of several servers of a host.
    while os.getppid() == parent:
      with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
      if held:
        try:
          follow(pathlib.Path(shared), folder)
        except OSError as error:  # It was removed meanwhile, or RAM is full.
          print(error, file=sys.stderr, flush=True)
      time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
  main(*sys.argv[1:])
