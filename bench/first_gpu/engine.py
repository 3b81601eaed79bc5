"""The in-process engine on this device, beside floors and a plan's figures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import statistics
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.configs import qwen3_4b
from anysearch_jax.host import hardware, json_files
from anysearch_jax.launch import shipped
from anysearch_jax.planning import targets, whole_step
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder as decoder_lib
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import sharding, table
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.rollout.jax_engine import kv_store
from anysearch_jax.training import logprobs, placement
from bench import harness, policies
from bench.first_gpu import running

_CONFIG = qwen3_4b.get_config()
EPISODES = whole_step.episodes_of(_CONFIG)
_PROMPTS = whole_step.PROMPT * (1 - 1 / _CONFIG.group)
# Tokens of an episode that the engine prefills.
PREFILLED = EPISODES.tokens - EPISODES.generated - _PROMPTS
_TINY = {
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 8,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "vocab_size": 512,
}
# Every so many ids, one is a whole search or a whole answer.
_SEARCH, _ANSWER = 601, 1999
_FEW = 61  # The same in a tiny vocabulary.
_HEAD_ROOM = 0.95
_DTYPE = "bfloat16"
_CALLS = 5
_STEPS = 32
_PAGE = 64
# A search's passages, as tokens of Qwen2.5 over wiki-18: 3 of about 195.
_PASSAGES = 590
# Rows that wait for passages, and the chunks of a call and their tokens.
_PREFILL_ROWS, _LANES, _CHUNK = 16, 32, 64


def decode(
  notes: running.Notes,
  *,
  policy: str,
  kv_dtype: str = "auto",
  profile: bool = False,
) -> None:
  """Times decode calls at several rows and contexts.

  A step reads every weight once for all rows, and the keys and values of every
  row: these bytes at the measured bandwidth are its floor.

  All contexts use one compiled program, as in a run: the table has columns for
  the longest, and the pool has pages for the longest that fits.

  Args:
    notes: gets the figures.
    policy: of configs/shapes.
    kv_dtype: as `engine.kv_dtype`.
    profile: whether to trace the smallest size alone.
  """
  a = architecture(policy, rehearse=notes.rehearse)
  params = _random(a)
  contexts = (32, 64) if notes.rehearse else (2048, 8192)
  steps, count = (4, 2) if notes.rehearse else (_STEPS, _CALLS)

  def tokens(context: int) -> int:
    """Returns the tokens of a row after all calls, in whole pages."""
    return -(-(context + steps * (count + 2)) // _PAGE) * _PAGE

  def size(rows: int, context: int) -> float:
    return _engine_bytes(a, params, rows * tokens(context))

  @functools.cache
  def decoder(rows: int) -> policies.Decoder:
    longest = max(c for c in contexts if fits(size(rows, c)))
    engine = config_lib.EngineConfig(
      slots=rows,
      max_context=tokens(contexts[-1]),
      kv_tokens=rows * tokens(longest),
      page=_PAGE,
      lanes=(rows,),
      decode_steps=steps,
      kv_dtype=kv_dtype,
    )
    return policies.Decoder(a, engine, dtype=_DTYPE, params=params)

  trace = str(notes.traces) if profile else None

  def measure(rows: int, context: int) -> Mapping[str, Any]:
    need(size(rows, context))
    ours = decoder(rows)
    starts = range(context, context + count * steps, steps)
    first = harness.seconds(lambda: ours(context))
    with jax.profiler.trace(trace) if trace else contextlib.nullcontext():
      times = [
        harness.seconds(functools.partial(ours, start)) / steps
        for start in starts
      ]
    seconds, middle = statistics.median(times), context + count * steps // 2
    read, cache = ours.weight_bytes(), ours.cache_bytes(middle)
    return {
      "attention": ours.attention,
      "tokens in each row": middle,
      "first call, s": first,
      "slowest, ms": 1e3 * max(times),
      "tokens/s": rows / seconds,
      "weights, GB a step": read / 1e9,
      "keys and values, GB a step": cache / 1e9,
      **beside(
        notes,
        seconds,
        flops=2.0 * rows * (read // ours.dtype.itemsize),
        read=read + cache,
        paper=EPISODES.generated * seconds / rows,
      ),
    }

  every_rows = (2,) if notes.rehearse else (32, 128, 256)
  if profile:
    notes.case("traced", lambda: measure(every_rows[0], contexts[0]))
    notes.add({"trace": trace})
    return
  for rows in every_rows:
    for context in contexts:
      name = f"{rows} rows of {context}"
      notes.case(name, functools.partial(measure, rows, context))
    decoder.cache_clear()


def _random(a: architecture_lib.Architecture) -> decoder_lib.Params:
  """Returns random weights as the engine holds them."""
  return policies.prepared(policies.weights_of(a, dtype=_DTYPE), a, _DTYPE)


def _engine_bytes(
  a: architecture_lib.Architecture, params: decoder_lib.Params, tokens: int
) -> float:
  """Returns the bytes of weights and cache, and of the copy that is timed."""
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  each = a.layers * 2 * a.kv_heads * a.head_dim * jnp.dtype(_DTYPE).itemsize
  return weights + tokens * each + 3 * 2**30


def prefill(notes: running.Notes, *, policy: str) -> None:
  """Times the prefill of passages behind contexts of several lengths.

  One search's passages are prefilled for each row, packed as the engine does.
  """
  a = architecture(policy, rehearse=notes.rehearse)
  params = _random(a)
  contexts = (0, 16) if notes.rehearse else (0, 2048, 6144)
  rows, lanes, chunk, length = (_PREFILL_ROWS, _LANES, _CHUNK, _PASSAGES)
  if notes.rehearse:
    rows, lanes, chunk, length = 2, 2, 16, 20
  # Pages for the longest context, so that all cases share a program.
  engine = config_lib.EngineConfig(
    slots=rows,
    max_context=contexts[-1] + length + chunk,
    page=16 if notes.rehearse else _PAGE,
    lanes=(rows,),
    prefill_lanes=lanes,
    prefill_chunk=chunk,
  )
  need(_engine_bytes(a, params, rows * engine.max_context))
  held = sum(x.nbytes for x in jax.tree.leaves(params))
  ours = policies.Decoder(a, engine, dtype=_DTYPE, params=params)

  def measure(context: int) -> Mapping[str, Any]:
    calls = _chunks(engine, ours.table, length, context)

    def run() -> None:
      ours.prefill(*calls)

    first = harness.seconds(run)
    seconds = min(harness.seconds(run) for _ in range(_CALLS))
    tokens = rows * length
    return {
      "tokens": tokens,
      "calls": len(calls),
      "padding": 1 - tokens / (len(calls) * lanes * chunk),
      "first, s": first,
      "tokens/s": tokens / seconds,
    } | beside(
      notes,
      seconds,
      flops=2 * parameters(a) * tokens,
      read=len(calls) * held,
      paper=PREFILLED * seconds / tokens,
    )

  for context in contexts:
    name = f"passages after {context} tokens"
    notes.case(name, functools.partial(measure, context))


def _chunks(
  engine: config_lib.EngineConfig, table: np.ndarray, length: int, context: int
) -> list[kv_store.Chunks[np.ndarray]]:
  """Returns the calls that prefill `length` tokens of each row of `table`.

  The chunks of all rows fill whole calls.
  """
  lanes, size = engine.prefill_lanes, engine.prefill_chunk
  starts = np.arange(0, length, size, dtype=np.int32)
  chunks = kv_store.Chunks(
    np.repeat(table, len(starts), axis=0),
    np.ones((engine.slots * len(starts), size), np.int32),
    np.tile(context + starts, engine.slots),
    np.tile(np.minimum(length - starts, size), engine.slots),
  )
  return [
    kv_store.Chunks(*(field[first : first + lanes] for field in chunks))
    for first in range(0, len(chunks.starts), lanes)
  ]


def gaps(notes: running.Notes, *, policy: str, kv_dtype: str = "auto") -> None:
  """Compares sampled log-probabilities with the trainer's, in bfloat16.

  Both are also compared with the trainer's computation in float32.
  """
  a = architecture(policy, rehearse=notes.rehearse)
  rows, prompt, steps = (2, 20, 8) if notes.rehearse else (16, 256, 128)
  need(6 * parameters(a) + 8 * 2**30)
  masters = policies.weights_of(a)
  # Larger logits than at random: a trained policy is seldom undecided.
  masters["embed"] = 4 * masters["embed"]
  (tokens, sampled), again = (
    _sampled(a, masters, rows, prompt, steps, kv_dtype) for _ in range(2)
  )
  notes.add({"same bits twice": np.array_equal(sampled, again[1])})
  targets = tokens[:, 1:]
  run = functools.partial(_trained, a, masters, tokens[:, :-1], targets)
  ours = run(_DTYPE)[:, prompt - 1 :]
  exact = run("float32")[:, prompt - 1 :]
  for name, difference in (
    ("engine - trainer", sampled - ours),
    ("engine - float32", sampled - exact),
    ("trainer - float32", ours - exact),
  ):
    size = np.abs(difference)
    notes.add(
      {
        f"{name}: mean": float(size.mean()),
        f"{name}: 99 of 100 below": float(np.quantile(size, 0.99)),
        f"{name}: largest": float(size.max()),
        f"{name}: bias": float(difference.mean()),
      }
    )
  notes.add(
    {"tokens": sampled.size, "mean log-probability": float(exact.mean())}
  )


def _sampled(
  a: architecture_lib.Architecture,
  masters: decoder_lib.Params,
  rows: int,
  prompt: int,
  steps: int,
  kv_dtype: str,
) -> tuple[np.ndarray, np.ndarray]:
  """Samples after random prompts; returns all tokens, and log-probabilities."""
  engine = config_lib.EngineConfig(
    slots=rows,
    max_context=prompt + 2 * steps,
    page=16,
    lanes=(rows,),
    prefill_lanes=rows,
    prefill_chunk=prompt,
    decode_steps=steps,
    kv_dtype=kv_dtype,
  )
  half = jax.tree.map(lambda x: x.astype(_DTYPE), masters)
  params = policies.prepared(half, a, _DTYPE)
  decoder = policies.Decoder(a, engine, dtype=_DTYPE, params=params)
  prompts = np.random.default_rng(0).integers(1, a.vocab_size, (rows, prompt))
  prompts = prompts.astype(np.int32)
  decoder.prefill(
    kv_store.Chunks(
      decoder.table,
      tokens=prompts[:, :-1],
      starts=np.zeros(rows, np.int32),
      counts=np.full(rows, prompt - 1, np.int32),
    )
  )
  found = jax.device_get(decoder.sample(prompts[:, -1], prompt - 1))
  return np.concatenate([prompts, found.tokens], 1), np.asarray(found.logps)


def _trained(
  a: architecture_lib.Architecture,
  masters: decoder_lib.Params,
  tokens: np.ndarray,
  targets: np.ndarray,
  dtype: str,
) -> np.ndarray:
  """Returns the log-probabilities as the train step computes them."""
  mesh = sharding.mesh()
  compute = placement.compute(
    a,
    config_lib.ExperimentConfig(
      compute_dtype=dtype,
      batch=config_lib.BatchConfig(row_lengths=(tokens.shape[1],)),
    ),
    mesh,
  )
  # Devices multiply float32 in fewer bits unless told otherwise.
  with jax.default_matmul_precision(
    "highest" if dtype == "float32" else "default"
  ):
    logps, _ = jax.jit(
      functools.partial(logprobs.token_logprobs, a=a, compute=compute)
    )(
      masters,
      tokens=tokens,
      targets=targets,
      positions=np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
      segment_ids=np.ones_like(tokens),
    )
  return np.asarray(logps)


def beside(
  notes: running.Notes,
  seconds: float,
  *,
  flops: float,
  read: float,
  paper: float,
  planned_flops: float = 0.0,
) -> dict[str, float]:
  """Returns measured milliseconds with their floor and a plan's prediction.

  Args:
    notes: of the stage, beside those of `peaks`.
    seconds: measured.
    flops: of the mathematics.
    read: bytes that have to be read.
    paper: the same work in seconds for each episode of the paper's step.
    planned_flops: those that the program computes; 0: as `flops`.
  """
  out = {
    running.MS: 1e3 * seconds,
    "TFLOP/s": flops / seconds / 1e12,
    running.PAPER: EPISODES.trajectories * paper,
  }
  if (found := _hardware(notes)) is None:
    return out
  predict = functools.partial(
    targets.predict, targets.Target(found, (1,)), read=read, traffic={}
  )
  floor = predict(flops=flops).floor
  planned = predict(flops=planned_flops or flops)
  sixty = predict(flops=planned_flops or flops, assumed=whole_step.SIXTY)
  return out | {
    "floor, ms": 1e3 * floor,
    running.PLANNED: 1e3 * planned.total,
    "planned at 60 % of the peaks, ms": 1e3 * sixty.total,
    running.SHARE: floor / seconds,
  }


def _hardware(notes: running.Notes) -> hardware.Hardware | None:
  """Returns the data sheet of the device, or what `peaks` measured."""
  device = jax.local_devices()[0]
  if known := hardware.of_kind(device.device_kind):
    return known
  path = notes.folder / "stages/peaks.json"
  figures = json_files.read(path)["figures"] if path.is_file() else {}
  flops, moved = (
    max((case.get(unit, 0.0) for case in figures.values()), default=0.0)
    for unit in ("TFLOP/s", "GB/s")
  )
  if not flops or not moved:
    return None
  return dataclasses.replace(
    hardware.HARDWARE["h100"],
    name=device.device_kind,
    flops=1e12 * flops,
    memory_bandwidth=1e9 * moved,
    source="measured",
  )


def architecture(
  policy: str, *, rehearse: bool
) -> architecture_lib.Architecture:
  """Returns the architecture of a policy in configs/shapes."""
  path = pathlib.Path(shipped.find(f"configs/shapes/{policy}.json"))
  shape = json.loads(path.read_text())
  return architecture_lib.from_hf(shape | _TINY if rehearse else shape)


def parameters(a: architecture_lib.Architecture) -> int:
  return weights.count(table.rows(a))


def need(size: float) -> None:
  """Raises SkippedError if the first device cannot hold `size` bytes."""
  if not fits(size):
    raise running.SkippedError(f"needs {size / 2**30:.1f} GiB")


def fits(size: float) -> bool:
  """Returns whether the first device can hold `size` bytes."""
  stats = jax.local_devices()[0].memory_stats() or {}
  return size <= _HEAD_ROOM * stats.get("bytes_limit", math.inf)


class Words(tokenizer_lib.Tokenizer):
  """A tokenizer of invented words, for policies with random weights.

  Most ids are words. Some are a whole search or a whole answer, so that a
  policy that draws ids at random searches now and then, and answers.
  """

  def __init__(self, vocab_size: int):
    self.vocab_size = vocab_size
    self.end_of_turn_ids = frozenset({0})
    self.control_tokens = ()
    self._every = (
      (_FEW, _FEW + 2) if vocab_size < _ANSWER else (_SEARCH, _ANSWER)
    )

  def encode(self, text: str) -> list[int]:
    return [
      1 + zlib.crc32(word.encode()) % (self.vocab_size - 1)
      for word in text.split()
    ]

  def decode(self, ids: Sequence[int]) -> str:
    return "".join(map(self._text, ids))

  def render(self, content: str, *_: object) -> tuple[str, list[int]]:
    return content, self.encode(content)

  def token_texts(self) -> list[str]:
    return [self._text(i) for i in range(self.vocab_size)]

  def _text(self, token: int) -> str:
    search, answer = self._every
    if token and token % search == 0:
      return f"<search>word{token}</search>"
    if token and token % answer == 0:
      return f"<answer>word{token}</answer>"
    return f"word{token} " if token else ""
