"""A text encoder: a Hugging Face folder of the BERT family, on any devices.

Texts are grouped into buckets by length. Every call of a bucket has the same
number of rows, padded if necessary. So each bucket compiles only once, and a
text's vector does not depend, to the last bit, on the other texts in the call.
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

from anysearch_jax.host import platforms
from anysearch_jax.policy import hf_config, tensor_files
from retrieval.encoder import bert, encoder_settings, encoder_tokenizer

# Concurrent calls: the single-threaded parts of one overlap with the other.
_CALLS_AT_ONCE = 2
# Up to this many tokens, as in most queries, texts are padded in smaller steps.
_SHORT = 32
# Tokens of a call, for each CPU core or for each accelerator.
_CORE_TOKENS, _DEVICE_TOKENS = 256, 1 << 16


class Shapes(NamedTuple):
  """Shapes of calls, on all devices together.

  Attributes:
    step: row lengths are multiples of it (of half of it for short texts), up to
      the maximum length.
    query_rows: rows of a call for queries; small, because queries seldom come
      in hundreds.
    passage_tokens: tokens of a call for passages, including padding.
  """

  step: int
  query_rows: int
  passage_tokens: int


class Encoder:
  """A `search.Encoder` from a folder; `load` makes one. It is thread-safe.

  Attributes:
    settings: prefixes, pooling and the maximum length.
    architecture: sizes of the model.
    dim: width of a vector.
  """

  def __init__(
    self,
    params: bert.Params,
    architecture: bert.Architecture,
    tokenizer: encoder_tokenizer.EncoderTokenizer,
    settings: encoder_settings.EncoderSettings,
    *,
    mesh: jax.sharding.Mesh,
    shapes: Shapes,
    identity: dict[str, Any],
  ):
    """Stores the parts; see `load`.

    Args:
      params: the weights, replicated on every device of `mesh`.
      architecture: architecture of the weights.
      tokenizer: the tokenizer, which cuts texts to `settings.max_tokens`.
      settings: prefixes, pooling and the maximum length.
      mesh: has the axis `data`, over which the rows of a call are sharded.
      shapes: shapes of calls.
      identity: hashes of the weights and the tokenizer, and the dtype.
    """
    self.architecture, self.settings = architecture, settings
    self.dim = architecture.d_model
    self._params, self._tokenizer = params, tokenizer
    self._shapes, self._identity = shapes, identity
    self._devices = mesh.size
    self._batch = jax.sharding.NamedSharding(mesh, jax.P("data"))
    self._lock = threading.Lock()
    self._programs: dict[tuple[int, int], Callable[..., jax.Array]] = {}

  @classmethod
  def load(
    cls,
    folder: str | os.PathLike,
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
      folder: contains `config.json`, safetensors and `tokenizer.json`.
      pooling: `mean` or `cls`; None here and below: see `encoder_settings`.
      query_prefix: text before each query.
      passage_prefix: text before each passage.
      max_tokens: the most tokens of a text, including prefix and special
        tokens; longer texts are cut.
      dtype: dtype of the weights and the matrix products; vectors are float32.
      devices: devices over which rows are sharded, each with all weights; None:
        one CPU device, because accelerators are for the policy.
      batch_tokens: tokens of a call for passages on each device; None: a
        default for the kind of device.

    Raises:
      ValueError: a file or a setting is missing or not supported; the message
        names it.
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
        f"max_tokens: found {max_tokens}, but {folder} has only "
        f"{a.positions} positions; expected at most that many."
      )
    tokenizer = encoder_tokenizer.EncoderTokenizer(
      folder, vocab_size=a.vocab_size, max_tokens=max_tokens
    )
    if devices is None:
      devices = [platforms.cpu()]
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
      "tokenizer_sha256": tokenizer.sha256,
      "dtype": jnp.dtype(dtype).name,
    }
    return cls(
      params,
      a,
      tokenizer,
      settings,
      mesh=mesh,
      shapes=_shapes(devices, batch_tokens),
      identity=identity,
    )

  @classmethod
  def like(
    cls,
    identity: Mapping[str, Any],
    folder: str | os.PathLike | None = None,
    **options: Any,
  ) -> Encoder:
    """Loads an encoder with the settings of another one.

    The weights are not compared; the caller compares the identities.

    Args:
      identity: identity of the other encoder.
      folder: folder to load; None: the folder of the other encoder.
      **options: `devices` and `batch_tokens` of `load`.

    Raises:
      ValueError: as for `load`.
    """
    said = (*encoder_settings.NAMES, "dtype")
    return cls.load(
      identity["folder"] if folder is None else folder,
      **{name: identity[name] for name in said},
      **options,
    )

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the vectors, and the `folder`."""
    return (
      self._identity
      | dataclasses.asdict(self.architecture)
      | dataclasses.asdict(self.settings)
    )

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    """Returns float32 unit vectors `[Q, dim]`, in the order of `texts`.

    Args:
      texts: any texts, including empty ones.

    Raises:
      ValueError: the vectors are not finite.
    """
    return self._encode(
      texts,
      self.settings.query_prefix,
      lambda length: self._shapes.query_rows,
    )

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors of passages, as `queries` does, in larger calls."""
    return self._encode(
      texts,
      self.settings.passage_prefix,
      lambda length: max(1, self._shapes.passage_tokens // length),
    )

  def programs(self) -> int:
    """Returns the number of compiled programs, one for each shape of call."""
    return len(self._programs)

  def _encode(
    self,
    texts: Sequence[str],
    prefix: str,
    rows_of: Callable[[int], int],
  ) -> np.ndarray:
    """Returns vectors of prefixed texts, by calls of `rows_of(length)` rows."""
    tokens = self._tokenizer.ids(texts, prefix)
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
        "The encoder returned vectors that are not finite. Load it in float32, "
        "or copy its folder again."
      )
    return out

  def _length(self, tokens: int) -> int:
    """Returns the padded row length for a text of `tokens` tokens."""
    step = self._shapes.step // (2 if tokens <= _SHORT else 1)
    return min(-(-tokens // step) * step, self.settings.max_tokens)

  def _call(
    self, tokens: Sequence[np.ndarray], shape: tuple[int, int]
  ) -> np.ndarray:
    """Returns vectors `[rows, D]`: first those of `tokens`, then padding."""
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
  """Returns the shapes that suit the devices."""
  if devices[0].platform == "cpu":
    # Small steps: on CPUs arithmetic is expensive and compiling is cheap.
    cores = max(2, _cores())
    shapes = Shapes(8, cores, _CORE_TOKENS * cores)
  else:
    shapes = Shapes(32, 32, _DEVICE_TOKENS)
  if batch_tokens is not None:
    shapes = shapes._replace(passage_tokens=batch_tokens)
  return shapes._replace(passage_tokens=shapes.passage_tokens * len(devices))


def _cores() -> int:
  """Returns the number of cores that this process may use."""
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
