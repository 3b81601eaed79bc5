"""What the stages measure on this device, beside floors."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import pathlib
import statistics
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.configs import one_gpu, qwen3_4b
from anysearch_jax.host import hardware, json_files
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import shipped
from anysearch_jax.methods import systems
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import hf, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.retrieval.index import flat
from anysearch_jax.rollout import driver, engines
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import rewards_and_advantages, throughput
from bench import harness, policies
from bench.first_gpu.notes import MS, SHARE, Notes, SkippedError

_TINY = {
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 8,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "vocab_size": 512,
}
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_DTYPE = "bfloat16"
_DIM = 768
WIKI_18 = 21_015_324  # Passages of the paper's corpus.


def doctor(notes: Notes) -> None:
  """Reports versions, what launch.doctor finds, and the device's peaks."""
  from anysearch_jax.launch import doctor as doctor_lib
  from anysearch_jax.launch import findings as findings_lib

  notes.add({name: importlib.metadata.version(name) for name in _PACKAGES})
  notes.add({"backend": jax.default_backend()})
  notes.add({"environment": jax.print_environment_info(return_string=True)})
  ok = findings_lib.OK
  findings = [x for x in doctor_lib.examine(None) if x.level != ok]
  notes.add({f"finding {i}": str(x) for i, x in enumerate(findings, 1)})
  size = 256 if notes.rehearse else 8192
  x = jax.random.normal(jax.random.key(0), (size, size), _DTYPE)
  product = jax.jit(jnp.matmul)

  def call() -> None:
    jax.block_until_ready(product(x, x))

  call()
  seconds = min(harness.seconds(call) for _ in range(5))
  read = harness.bandwidth(2**24 if notes.rehearse else 2**32)
  notes.add({"TFLOP/s": 2e-12 * size**3 / seconds, "GB/s": read / 1e9})


def decode(notes: Notes) -> None:
  """Times decode calls at several rows and contexts.

  A step reads every weight once for all rows, and the keys and values of every
  row: these bytes are its floor.
  """
  a = _architecture(rehearse=notes.rehearse)
  params = policies.prepared(policies.weights_of(a, dtype=_DTYPE), a, _DTYPE)
  steps, calls = (4, 2) if notes.rehearse else (32, 5)

  def measure(rows: int, context: int) -> Mapping[str, Any]:
    engine = config_lib.EngineConfig(
      slots=rows,
      max_context=-(-(context + steps * (calls + 1)) // 64) * 64,
      page=64,
      lanes=(rows,),
      decode_steps=steps,
    )
    held = sum(x.nbytes for x in jax.tree.leaves(params))
    cache = 4 * a.layers * a.kv_heads * a.head_dim * engine.max_context
    _need(held + rows * cache + 3 * 2**30)
    ours = policies.Decoder(a, engine, dtype=_DTYPE, params=params)
    first = harness.seconds(lambda: ours(context))
    starts = range(context, context + calls * steps, steps)
    seconds = statistics.median(
      harness.seconds(functools.partial(ours, start)) / steps
      for start in starts
    )
    read = ours.weight_bytes()
    return {
      "attention": ours.attention,
      "first call, s": first,
      "tokens/s": rows / seconds,
      **_beside(
        notes,
        seconds,
        flops=2.0 * rows * (read // ours.dtype.itemsize),
        read=read + ours.cache_bytes(context + calls * steps // 2),
      ),
    }

  for rows in (2,) if notes.rehearse else (32, 128, 256):
    for context in (32, 64) if notes.rehearse else (2048, 8192):
      case = functools.partial(measure, rows, context)
      notes.case(f"{rows} rows of {context}", case)


def step(notes: Notes) -> None:
  """Times optimizer steps on random weights, in packed rows of 8,192 tokens."""
  a = _architecture(rehearse=notes.rehearse)
  row = 128 if notes.rehearse else 8192

  def measure(preset: str, remat: str, rows: int) -> Mapping[str, Any]:
    # Masters, two moments, gradients and no reference; or the frozen base,
    # which is the reference too.
    count = weights.count(table.rows(a))
    _need((2 if preset else 16) * count + 6 * 2**30)
    changes = [
      *(f"batch.row_lengths=({row},)", f"batch.remat={remat}"),
      *(f"batch.micro_batch_tokens={rows * row}", "batch.max_micro_batches=2"),
      *(() if preset else ("objective.kl_coefficient=0",)),
    ]
    config = launch_flags.override(qwen3_4b.get_config(preset), changes)
    config = config_lib.changed(
      config, mesh=config_lib.MeshConfig(), pipeline=config_lib.PipelineConfig()
    )
    figures = policies.measure_step(policies.TrainStep(config, a, 2), 3)
    return figures | _beside(
      notes,
      figures["step, s"],
      flops=1e12 * figures["model TFLOP a step"],
      read=1e9 * figures["optimizer's least traffic, GB"],
    )

  notes.case("every weight", lambda: measure("", "full", 1))
  notes.case("adapters", lambda: measure("lora80", "dots", 2))


def loop(notes: Notes) -> None:
  """Samples, trains adapters and hands over, in turns on one device."""
  a = _architecture(rehearse=notes.rehearse)
  _need(2 * weights.count(table.rows(a)) + 30 * 2**30)
  context, generated, group = (
    (1024, 24, 2) if notes.rehearse else (4096, 512, 5)
  )
  slots, lanes, questions = (4, 4, 1) if notes.rehearse else (160, 128, 32)
  config = launch_flags.override(
    one_gpu.get_config("qwen3_4b-80"),
    [
      *(f"questions={questions}", f"group={group}"),
      "curriculum.steps_per_rollout=1",
      f"episode.max_generated={generated}",
      *(f"episode.max_context={context}", f"engine.max_context={context}"),
      *(f"engine.slots={slots}", f"engine.lanes=({lanes},)"),
      f"engine.kv_tokens={slots * context if notes.rehearse else 1 << 17}",
      *(("engine.prefill_lanes=2",) if notes.rehearse else ()),
      f"batch.row_lengths=({context},)",
      f"batch.micro_batch_tokens={context}",
      f"batch.max_micro_batches={questions * group}",
    ],
  )
  start = hf.Policy(
    policies.weights_of(a, dtype=config.lora.base_dtype), a, Words(a.vocab_size)
  )
  learner = learner_lib.Learner(config, start)
  published = start._replace(
    params=learner.published(), architecture=learner.architecture
  )
  sampler = engines.make(published, config, seed=config.seed)
  parts = driver.EpisodeParts(
    sampler,
    Invented(),
    config.episode,
    start.tokenizer,
    systems.of_episode(config.episode),
  )
  asked = [
    types.Question(id=str(i), text=f"word{i} ", golden_answers=(f"word{i}",))
    for i in range(config.questions)
  ]

  def measure(number: int) -> dict[str, Any]:
    rollout, played = harness.timed(
      lambda: policies.play(
        asked, parts, group=group, rollout=number, concurrency=slots
      )
    )
    scored = rewards_and_advantages.score(
      rollout.groups,
      np.asarray([g.budget for g in rollout.groups]),
      samples=config.group,
      method=systems.trained(config),
      objective=config.objective,
    )
    packed = learner.pack(scored)
    values, trained = harness.timed(lambda: list(learner.steps(packed)))
    handed = harness.seconds(
      lambda: sampler.set_params(
        jax.block_until_ready(learner.published()), number + 1
      )
    )
    episodes = policies.trajectories(rollout)
    return {
      "sampled, s": played,
      "trained, s": trained,
      "handed over, s": handed,
      "failed episodes": sum(t.failed for t in episodes),
      "searches": sum(t.searches for t in episodes),
      "generated tokens/s": policies.generated(rollout) / played,
      "trained tokens/s": throughput.count(packed, learner.architecture).tokens
      / trained,
      "loss": values[-1]["loss/total"],
    }

  for number in range(1 if notes.rehearse else 2):
    notes.case(f"rollout {number}", functools.partial(measure, number))
  notes.add(throughput.memory(jax.local_devices()))


def server(notes: Notes) -> None:
  """Times an SGLang server that samples rows of `decode`'s shorter context."""
  if not notes.server:
    raise SkippedError("no --server; docs/one_node.md says how to start one")
  context, tokens = (8, 4) if notes.rehearse else (2048, 128)
  for rows in (2,) if notes.rehearse else (32, 128, 256):
    rng = np.random.default_rng(rows)
    body = {
      "input_ids": rng.integers(1, 500, (rows, context)).tolist(),
      "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
      f"{notes.server.rstrip('/')}/generate",
      json.dumps(body).encode(),
      {"Content-Type": "application/json"},
    )

    def measure(request=request, rows=rows) -> Mapping[str, Any]:
      with urllib.request.urlopen(request, timeout=100) as reply:
        answers = json.load(reply)
      written = [answer["meta_info"]["completion_tokens"] for answer in answers]
      return {"rows": rows, "tokens": sum(written)}

    def timed(measure=measure) -> Mapping[str, Any]:
      figures, seconds = harness.timed(measure)
      return {**figures, "tokens/s": figures["tokens"] / seconds}

    notes.case(f"{rows} rows of {context}", timed)


def vectors(notes: Notes) -> None:
  """Compares searches of random vectors with the bandwidth of reads."""
  count = 1000 if notes.rehearse else WIKI_18
  block, calls = (1024, 2) if notes.rehearse else (32768, 7)
  _need(2 * count * _DIM + 2**33)
  blocks = -(-count // block)

  def units(key: jax.Array, rows: int) -> jax.Array:
    x = jax.random.normal(key, (rows, _DIM))
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)

  @jax.jit
  def make(key: jax.Array) -> jax.Array:
    """Makes vectors block by block; all in float32 would not fit."""
    return jax.lax.map(
      lambda i: units(jax.random.fold_in(key, i), block).astype(_DTYPE),
      jnp.arange(blocks),
    ).reshape(blocks * block, _DIM)

  values = jax.block_until_ready(make(jax.random.key(0)))
  search = functools.partial(
    flat.held,
    values=values,
    k=3,
    mesh=jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("rows",)),
    count=count,
    each=len(values),
    block=block,
  )
  floor = values.nbytes / harness.bandwidth(min(values.nbytes, 1 << 32))
  for queries in (1, 8) if notes.rehearse else (1, 32, 128):
    asked = units(jax.random.key(1), queries)

    def call(asked: jax.Array = asked) -> None:
      jax.block_until_ready(search(asked))

    call()
    seconds = statistics.median(harness.seconds(call) for _ in range(calls))
    notes.add({f"{queries} queries, {MS}": 1e3 * seconds})
    notes.add({f"{queries} queries, {SHARE}": floor / seconds})


def _beside(
  notes: Notes, seconds: float, *, flops: float, read: float
) -> dict[str, float]:
  """Returns measured milliseconds beside their floor.

  The floor is by the device's data sheet, or else by what `doctor` measured.

  Args:
    notes: of the stage, beside those of `doctor`.
    seconds: measured.
    flops: of the mathematics.
    read: bytes that have to be read.
  """
  path = notes.folder / "stages/doctor.json"
  peaks = json_files.read(path)["figures"] if path.is_file() else {}
  device = hardware.of_kind(jax.local_devices()[0].device_kind)
  products = device.flops if device else 1e12 * peaks.get("TFLOP/s", math.nan)
  reads = (
    device.memory_bandwidth if device else 1e9 * peaks.get("GB/s", math.nan)
  )
  floor = max(flops / products, read / reads)
  return {MS: 1e3 * seconds, "floor, ms": 1e3 * floor, SHARE: floor / seconds}


def _architecture(*, rehearse: bool) -> architecture_lib.Architecture:
  """Returns the architecture of Qwen3-4B, or a tiny one."""
  path = pathlib.Path(shipped.find("configs/shapes/Qwen3-4B.json"))
  shape = json.loads(path.read_text())
  return architecture_lib.from_hf(shape | _TINY if rehearse else shape)


def _need(size: float) -> None:
  """Raises SkippedError if the first device cannot hold `size` bytes."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if size > 0.95 * stats.get("bytes_limit", math.inf):
    raise SkippedError(f"needs {size / 2**30:.1f} GiB")


class Invented:
  """Answers every search with three passages of about 195 words."""

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    words = np.random.default_rng(len(request.query)).integers(0, 9999, 190)
    text = " ".join(f"word{n}" for n in words)
    return [types.Passage(str(i), f'"{i}"', text) for i in range(request.k)]


class Words(tokenizer_lib.Tokenizer):
  """A tokenizer of invented words, for policies with random weights.

  Most ids are words. Some are a whole search or a whole answer, so that a
  policy that draws ids at random searches now and then, and answers.
  """

  def __init__(self, vocab_size: int):
    self.vocab_size = vocab_size
    self.end_of_turn_ids = frozenset({0})
    self.control_tokens = ()
    self._search, self._answer = (61, 63) if vocab_size < 2000 else (601, 1999)

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
    if token and token % self._search == 0:
      return f"<search>word{token}</search>"
    if token and token % self._answer == 0:
      return f"<answer>word{token}</answer>"
    return f"word{token} " if token else ""
