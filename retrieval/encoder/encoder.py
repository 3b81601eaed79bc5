"""A text encoder: a Hugging Face folder of the BERT family, on any devices.

Texts are sorted by length into buckets. A call has one number of rows a bucket,
whatever it is asked, so that each bucket compiles once and a text's vector does
not depend, to the last bit, on the texts that come with it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy import hf_config, tensor_files
from retrieval.encoder import bert, encoder_settings
from retrieval.encoder import pieces as pieces_lib

# Calls under way: what one does on one thread is time for the other.
_CALLS_AT_ONCE = 2
# Texts of so many tokens are padded less: most queries are.
_SHORT = 32
# Tokens of a call for each core, or for each device of another kind.
_CORE_TOKENS, _DEVICE_TOKENS = 256, 1 << 16


class Shapes(NamedTuple):
  """Shapes of calls, on all devices together.

  step: tokens of a row are a multiple of it, or the most there may be; of half
    of it, where they are few.
  query_rows: of a call for queries: few, for they seldom come in hundreds.
  passage_tokens: of a call for passages, padding included.
  """

  step: int
  query_rows: int
  passage_tokens: int


class Encoder:
  """`search.Encoder` of a folder; `load` makes one. Any thread may ask.

  Attributes:
    settings: prefixes, pooling and the most tokens.
    architecture: the model's sizes.
    dim: numbers of a vector.
  """

  def __init__(
    self,
    params: bert.Params,
    architecture: bert.Architecture,
    pieces: pieces_lib.Pieces,
    settings: encoder_settings.EncoderSettings,
    *,
    mesh: jax.sharding.Mesh,
    shapes: Shapes,
    identity: dict[str, Any],
  ):
    """Holds the parts; see `load`.

    Args:
      params: on every device of `mesh`.
      architecture: theirs.
      pieces: of texts, `settings.max_tokens` at most.
      settings: of texts.
      mesh: has the axis `data`, which rows of a call are cut over.
      shapes: of calls.
      identity: of the weights and the tokenizer.
    """
    self.architecture, self.settings = architecture, settings
    self.dim = architecture.d_model
    self._params, self._pieces = params, pieces
    self._shapes, self._identity = shapes, identity
    self._devices = mesh.size
    self._batch = jax.sharding.NamedSharding(mesh, jax.P("data"))
    self._lock = threading.Lock()
    self._programs: dict[tuple[int, int], Callable[..., jax.Array]] = {}

  @classmethod
  def load(
    cls,
    folder: str | pathlib.Path,
    *,
    pooling: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    max_tokens: int = 256,
    dtype: Any = jnp.float32,
    devices: Sequence[jax.Device] | None = None,
    batch_tokens: int | None = None,
  ) -> Encoder:
    """Loads a folder: BERT, E5, MiniLM, BGE and others of this architecture.

    Args:
      folder: `config.json`, safetensors, `tokenizer.json`.
      pooling: `mean` or `cls`; None here and below: see `encoder_settings`.
      query_prefix: put before each query.
      passage_prefix: put before each passage.
      max_tokens: longer texts are cut, prefix and special tokens counted.
      dtype: of the weights on the devices and of the products; vectors are
        float32.
      devices: that rows are cut over, each with all weights; None: the
        accelerators that this process has, or else one CPU device.
      batch_tokens: of a call for passages, on each device; None: by the kind
        of device.

    Raises:
      ValueError: what is missing or not supported, by name.
    """
    folder = pathlib.Path(folder)
    a = _architecture(folder)
    settings = encoder_settings.settle(
      folder,
      pooling=pooling,
      query_prefix=query_prefix,
      passage_prefix=passage_prefix,
      max_tokens=max_tokens,
    )
    if max_tokens > a.positions:
      raise ValueError(
        f"max_tokens: found {max_tokens}, but {folder} has {a.positions} "
        "positions; expected no more of them."
      )
    pieces = pieces_lib.Pieces(
      folder, vocab_size=a.vocab_size, max_tokens=max_tokens
    )
    if devices is None:
      devices = jax.local_devices()
      devices = devices[:1] if devices[0].platform == "cpu" else devices
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
    params = bert.load(
      folder,
      a,
      sharding=jax.sharding.NamedSharding(mesh, jax.P()),
      dtype=dtype,
    )
    identity = {
      "folder": str(folder.absolute()),
      "weights_sha256": tensor_files.digest(folder),
      "tokenizer_sha256": pieces.sha256,
      "dtype": jnp.dtype(dtype).name,
    }
    return cls(
      params,
      a,
      pieces,
      settings,
      mesh=mesh,
      shapes=_shapes(devices, batch_tokens),
      identity=identity,
    )

  @classmethod
  def like(
    cls,
    identity: Mapping[str, Any],
    folder: str | pathlib.Path | None = None,
    **options: Any,
  ) -> Encoder:
    """Loads with the settings of another one; it may still differ from it.

    Args:
      identity: of the other one.
      folder: None: where that one was.
      **options: `devices` and `batch_tokens` of `load`.

    Raises:
      ValueError: as `load` does.
    """
    said = (*encoder_settings.NAMES, "dtype")
    return cls.load(
      identity["folder"] if folder is None else folder,
      **{name: identity[name] for name in said},
      **options,
    )

  def identity(self) -> dict[str, Any]:
    """What vectors come from, as JSON values; `folder` alone may change."""
    return (
      self._identity
      | dataclasses.asdict(self.architecture)
      | dataclasses.asdict(self.settings)
    )

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    """float32 unit vectors `[Q, dim]`, in the order of `texts`.

    Args:
      texts: anything; empty ones too.

    Raises:
      ValueError: the model gives numbers that are not finite.
    """
    return self._encode(
      texts,
      self.settings.query_prefix,
      lambda length: self._shapes.query_rows,
    )

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """As `queries`; in larger calls."""
    return self._encode(
      texts,
      self.settings.passage_prefix,
      lambda length: max(1, self._shapes.passage_tokens // length),
    )

  def programs(self) -> int:
    """How many have been compiled: one a shape of call."""
    return len(self._programs)

  def _encode(
    self,
    texts: Sequence[str],
    prefix: str,
    rows_of: Callable[[int], int],
  ) -> np.ndarray:
    """Vectors of prefixed texts; `rows_of` a length are rows of its calls."""
    tokens = self._pieces.ids(texts, prefix)
    buckets = collections.defaultdict(list)
    for i, ids in enumerate(tokens):
      buckets[self._length(len(ids))].append(i)
    calls = []
    for length, members in sorted(buckets.items(), reverse=True):
      rows = -(-rows_of(length) // self._devices) * self._devices
      for start in range(0, len(members), rows):
        calls.append(((rows, length), members[start : start + rows]))
    out = np.zeros((len(tokens), self.dim), np.float32)

    def answer(call: tuple[tuple[int, int], list[int]]) -> None:
      shape, some = call
      vectors = self._call([tokens[i] for i in some], shape)
      out[some] = vectors[: len(some)]

    if len(calls) > 1:
      with futures.ThreadPoolExecutor(min(_CALLS_AT_ONCE, _cores())) as pool:
        list(pool.map(answer, calls))
    elif calls:
      answer(calls[0])
    if not np.isfinite(out).all():
      raise ValueError(
        "The encoder gave vectors that are not finite; expected numbers. Load "
        "it in float32, or copy its folder again."
      )
    return out

  def _length(self, tokens: int) -> int:
    """Of the row that a text of so many tokens stands in."""
    step = self._shapes.step // (2 if tokens <= _SHORT else 1)
    return min(-(-tokens // step) * step, self.settings.max_tokens)

  def _call(
    self, tokens: Sequence[np.ndarray], shape: tuple[int, int]
  ) -> np.ndarray:
    """Vectors `[rows, D]`, the first of them of `tokens`."""
    ids = np.zeros(shape, np.int32)
    lengths = np.zeros(shape[0], np.int32)
    for row, some in enumerate(tokens):
      ids[row, : len(some)] = some
      lengths[row] = len(some)
    batch = jax.device_put((ids, lengths), self._batch)
    return np.asarray(self._program(shape)(self._params, *batch))

  def _program(self, shape: tuple[int, int]) -> Callable[..., jax.Array]:
    if shape in self._programs:
      return self._programs[shape]
    with self._lock:
      if shape not in self._programs:
        vectors = functools.partial(
          _vectors, a=self.architecture, pooling=self.settings.pooling
        )
        batch = (
          jax.ShapeDtypeStruct(axes, jnp.int32, sharding=self._batch)
          for axes in (shape, shape[:1])
        )
        self._programs[shape] = (
          jax.jit(vectors, out_shardings=self._batch)
          .lower(self._params, *batch)
          .compile()
        )
      return self._programs[shape]


def _shapes(devices: Sequence[jax.Device], batch_tokens: int | None) -> Shapes:
  """What suits devices of that kind."""
  if devices[0].platform == "cpu":
    # Short steps, for arithmetic is dear and compiling cheap.
    cores = max(2, _cores())
    shapes = Shapes(8, cores, _CORE_TOKENS * cores)
  else:
    shapes = Shapes(32, 32, _DEVICE_TOKENS)
  if batch_tokens is not None:
    shapes = shapes._replace(passage_tokens=batch_tokens)
  return shapes._replace(passage_tokens=shapes.passage_tokens * len(devices))


def _cores() -> int:
  """That this process may run on."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _vectors(
  params: bert.Params,
  ids: jax.Array,
  lengths: jax.Array,
  *,
  a: bert.Architecture,
  pooling: str,
) -> jax.Array:
  return bert.pool(bert.forward(params, a, ids, lengths), lengths, pooling)


def _architecture(folder: pathlib.Path) -> bert.Architecture:
  path = folder / "config.json"
  if not path.is_file():
    raise ValueError(
      f"{folder}: no config.json; expected a Hugging Face folder of an encoder."
    )
  hf_config.refuse_adapter(folder)
  try:
    return bert.from_hf(encoder_settings.read(path, dict))
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error
