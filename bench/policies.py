"""What benches time of policies: rollouts, decode calls and train steps.

Imports JAX: import it after `jax_setup.configure`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, hf, lora, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import pages as pages_lib
from anysearch_jax.rollout import driver
from anysearch_jax.rollout.jax_engine import kv_memory, kv_store
from anysearch_jax.rollout.jax_engine import sampling as sampling_lib
from anysearch_jax.training import batching, placement, throughput
from anysearch_jax.training import learner as learner_lib
from bench import harness

_BUDGETS = 5
# Share of tokens that have a loss: what a search agent writes of its context,
# so that logits are as many as there.
_SCORED = 0.22


def weights_of(
  a: architecture_lib.Architecture,
  *,
  dtype: Any = jnp.float32,
  where: Any = None,
) -> decoder.Params:
  """Returns random weights; scales of norms are in float32.

  Args:
    a: the policy's architecture; adapters are included.
    dtype: of the weights.
    where: their shardings; None leaves the placement to JAX.
  """
  rows = table.rows(a)

  def fresh() -> decoder.Params:
    keys = jax.random.split(jax.random.key(0), len(rows))
    named = dict(zip((row.path for row in rows), keys, strict=True))
    return weights.tree(
      rows,
      lambda row: (
        jnp.full(row.shape, row.scale, jnp.float32)
        if row.init is None
        else row.init * jax.random.normal(named[row.path], row.shape, dtype)
      ),
    )

  return jax.jit(fresh, out_shardings=where)()


def play(
  questions: Sequence[types.Question],
  parts: driver.EpisodeParts,
  *,
  group: int,
  rollout: int,
  concurrency: int | None = None,
) -> driver.Rollout:
  """Plays a group for each question, under budgets of 1 to 5 in turn."""
  return loop.run(
    driver.run_groups(
      [
        driver.Assignment(i, question, i % _BUDGETS + 1, False)
        for i, question in enumerate(questions)
      ],
      parts,
      group=group,
      rollout=rollout,
      max_concurrency=concurrency,
    )
  )


def trajectories(rollout: driver.Rollout) -> list[types.Trajectory]:
  return [t for group in rollout.groups for t in group.trajectories]


def generated(rollout: driver.Rollout) -> int:
  """Returns the number of sampled tokens of a rollout."""
  return sum(t.generated_tokens for t in trajectories(rollout))


def prepared(
  params: decoder.Params, a: architecture_lib.Architecture, dtype: Any
) -> decoder.Params:
  """Returns weights as the engine prepares them for one device."""
  engine = config_lib.EngineConfig()
  model = kv_store.make_model(engine, a, sharding.mesh(), dtype=dtype)
  return model.prepare(params, a)


class Decoder:
  """Decode calls over rows of the same length, with random weights.

  Args:
    a: the policy's architecture, with its adapters.
    engine: `slots` rows are decoded, `decode_steps` tokens a call. With fewer
      `kv_tokens` than rows at full context, contexts must be shorter.
    dtype: of weights, keys and values.
    params: weights as `prepared` returns them.

  Attributes:
    table: int32 `[rows, M]`, the pages of each row.
  """

  def __init__(
    self,
    a: architecture_lib.Architecture,
    engine: config_lib.EngineConfig,
    *,
    dtype: Any,
    params: decoder.Params,
  ):
    self.a, self.rows, self.steps = a, engine.slots, engine.decode_steps
    self.dtype = jnp.dtype(dtype)
    mesh = sharding.mesh()
    self._model = kv_store.make_model(engine, a, mesh, dtype=self.dtype)
    self.params = params
    pages = kv_memory.pages(engine, a, shards=1)
    stored = self._model.stored
    make = kv_store.allocator(a, pages, engine.page, stored, mesh=mesh)
    self._pages = make()
    # Each row has the same share of the pages, which its tokens fill in turn;
    # page 0 is for padding.
    columns = kv_memory.pages_of(engine.max_context, engine)
    row, column = np.ogrid[: self.rows, :columns]
    shares = [min((n - 1) // self.rows, columns) for n in pages]
    tables = [1 + row * each + column % each for each in shares]
    self.table = np.concatenate(tables, axis=1).astype(np.int32)
    self._gathered = kv_store.empty_rows(
      self._model,
      self._pages,
      lanes=self.rows,
      columns=columns,
      steps=self.steps,
    )
    self._draws = kv_store.Draws(
      jnp.zeros(a.vocab_size, jnp.uint32), jax.random.key(0)
    )

  @property
  def attention(self) -> str:
    """The implementation of attention that the engine chose."""
    return self._model.paged.implementation

  def __call__(self, context: int) -> None:
    """Decodes `steps` tokens for rows of `context` tokens, and waits."""
    jax.block_until_ready(self.sample(np.ones(self.rows, np.int32), context))

  def prefill(self, *calls: kv_store.Chunks[np.ndarray]) -> None:
    """Writes tokens to rows of `table`, and waits."""
    for chunks in calls:
      self._pages, _ = kv_store.prefill(
        self.params, self._pages, chunks, model=self._model
      )
    jax.block_until_ready(self._pages)

  def sample(self, tokens: np.ndarray, context: int) -> kv_store.Decoded:
    """Samples `steps` tokens after `context` cached ones and `tokens`."""
    rows = self.rows
    self._pages, self._gathered, decoded = kv_store.decode(
      self.params,
      self._pages,
      self._gathered,
      kv_store.Turns(
        self.table,
        last=tokens,
        starts=np.full(rows, context, np.int32),
        limits=np.full(rows, self.steps, np.int32),
        addresses=np.zeros((rows, 5), np.uint32),
        sampled=np.zeros(rows, np.int32),
        stops=np.ones(rows, np.uint32),
        settings=sampling_lib.settings([config_lib.SamplingConfig()] * rows),
      ),
      np.int32(0),
      self._draws,
      model=self._model,
      steps=self.steps,
      restricted=False,
    )
    return decoded

  def weight_bytes(self) -> int:
    """Returns the bytes of weights that each step reads."""
    # The embedding is looked up, not read, unless the head is the same array.
    return sum(
      x.nbytes
      for path, x in jax.tree_util.tree_flatten_with_path(self.params)[0]
      if path[0].key != "embed" or self.a.tied
    )

  def cache_bytes(self, context: int) -> int:
    """Returns the bytes of keys and values that each step reads."""
    each = pages_lib.token_bytes(self.a, self._model.stored)
    return round(self.rows * self.a.seen(context) * each)


def train_examples(
  *, row: int, vocab: int, tokens: int, scored: float
) -> list[batching.Example]:
  """Makes trajectories of a half, a quarter or an eighth of a row.

  They fill rows exactly: `tokens` tokens in all, a multiple of an eighth of a
  row, need as many positions, and a side that pads has little padding. The
  share `scored` of them, evenly spread, has a loss.
  """
  rng, out, left = np.random.default_rng(0), [], tokens
  while left:
    size = row >> int(rng.integers(1, 4))
    while size > left:
      size //= 2
    left -= size
    out.append((size, rng.integers(0, vocab, size + 1)))
  return [
    batching.Example(
      ids.astype(np.int32),
      np.asarray(np.arange(size + 1) * scored % 1 >= 1 - scored, np.float32)
      / (tokens * scored),
      np.full(size + 1, -np.log(vocab), np.float32),
      float(rng.normal()),
    )
    for size, ids in out
  ]


class TrainStep:
  """The trainer's step over random weights, on the devices that train.

  Args:
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    micro_batches: of a step, which `train_examples` fill.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    a: architecture_lib.Architecture,
    micro_batches: int,
  ):
    mesh = placement.Placement.of(lora.attach(a, config.lora), config).trainer
    params = weights_of(
      a,
      dtype=config.lora.base_dtype if config.lora.rank else "float32",
      where=sharding.shardings(a, mesh),
    )
    no_tokenizer: Any = None
    policy = hf.Policy(params, a, no_tokenizer)
    self.forwards = int(bool(config.objective.kl_coefficient))
    self.learner = learner_lib.Learner(config, policy)
    self.attention = placement.compute(a, config, mesh).attention
    examples = train_examples(
      row=config.batch.row_lengths[-1],
      vocab=a.vocab_size,
      tokens=micro_batches * config.batch.micro_batch_tokens,
      scored=_SCORED,
    )
    multiple = self.learner.placement.row_multiple
    packed = batching.pack(examples, config=config.batch, multiple=multiple)
    self.packed = [packed]

  def __call__(self) -> None:
    """Takes one step, and waits for it."""
    list(self.learner.steps(self.packed))
    jax.block_until_ready(self.learner.state)


def measure_step(ours: TrainStep, steps: int) -> dict[str, Any]:
  """Times steps; returns numbers and the physical limits to compare with.

  Args:
    ours: the step; a first one, which compiles, is timed by itself.
    steps: number of the others.
  """
  first = harness.seconds(ours)
  seconds = [harness.seconds(ours) for _ in range(steps)]
  learner, a = ours.learner, ours.learner.architecture
  work = throughput.count(ours.packed, a)
  devices = learner.placement.trainer.devices.flat
  flops = throughput.model_flops(a, work, forwards=ours.forwards)
  median = statistics.median(seconds)
  out: dict[str, Any] = {
    "device": devices[0].device_kind,
    "devices": len(devices),
    "parameters": weights.count(table.rows(a)),
    "trained": weights.count(table.trainable_rows(a)),
    "attention": ours.attention,
    "tokens": work.tokens,
    "first call, s": first,
    "step, s": median,
    "fastest, s": min(seconds),
    "slowest, s": max(seconds),
    "model TFLOP a step": flops / 1e12,
    "model TFLOP/s": flops / median / 1e12,
    **learner.speed(ours.packed, median),
  }
  if "train/mfu" in out:
    out["limit by FLOPs, s"] = median * out["train/mfu"]
  # Per step, masters and moments are read and written, gradients are read.
  state = sum(x.nbytes for x in jax.tree.leaves(learner.state))
  out["optimizer's least traffic, GB"] = (2 * state + state / 3) / 1e9
  return out
