"""What is timed of policies: rollouts, decode calls and train steps.

Imports JAX: import it after `jax_setup.configure`.
"""

from __future__ import annotations

import statistics
import zlib
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
from anysearch_jax.policy import tokenizer as tokenizer_lib
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


def play(
  questions: Sequence[types.Question],
  parts: driver.EpisodeParts,
  *,
  group: int,
  rollout: int,
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
    engine: `slots` rows are decoded, `decode_steps` tokens a call.
    dtype: of weights, keys and values.
    params: weights as `prepared` returns them.
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
    pages = kv_memory.pool_sizes(engine, a, shards=1)
    stored = self._model.stored
    make = kv_store.allocator(a, pages, engine.page, stored, mesh=mesh)
    self._pages = make()
    # Each row has pages of its own for a whole context; page 0 is for padding.
    columns = kv_memory.page_count(engine.max_context, engine)
    row, column = np.ogrid[: self.rows, :columns]
    tables = [1 + row * columns + column] * len(pages)
    self._table = np.concatenate(tables, axis=1).astype(np.int32)
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
    rows = self.rows
    self._pages, self._gathered, decoded = kv_store.decode(
      self.params,
      self._pages,
      self._gathered,
      kv_store.Turns(
        self._table,
        last=np.ones(rows, np.int32),
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
    jax.block_until_ready(decoded)

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


def measure_steps(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  *,
  micro_batches: int,
  steps: int,
) -> dict[str, Any]:
  """Times the trainer's step over random weights.

  Args:
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    micro_batches: of a step, which `train_examples` fill.
    steps: number of steps after a first one, which compiles.

  Returns:
    The median's seconds, and what a step has to compute, read and write.
  """
  mesh = placement.Placement.of(lora.attach(a, config.lora), config).trainer
  params = weights_of(
    a,
    dtype=config.lora.base_dtype if config.lora.rank else "float32",
    where=sharding.shardings(a, mesh),
  )
  no_tokenizer: Any = None
  learner = learner_lib.Learner(config, hf.Policy(params, a, no_tokenizer))
  examples = train_examples(
    row=config.batch.row_lengths[-1],
    vocab=a.vocab_size,
    tokens=micro_batches * config.batch.micro_batch_tokens,
    scored=_SCORED,
  )
  multiple = learner.placement.row_multiple
  packed = [batching.pack(examples, config=config.batch, multiple=multiple)]

  def step() -> None:
    list(learner.steps(packed))
    jax.block_until_ready(learner.state)

  first = harness.seconds(step)
  median = statistics.median(harness.seconds(step) for _ in range(steps))
  trained = learner.architecture
  work = throughput.count(packed, trained)
  forwards = int(bool(config.objective.kl_coefficient))
  flops = throughput.model_flops(trained, work, forwards=forwards)
  # Per step, masters and moments are read and written, gradients are read.
  state = sum(x.nbytes for x in jax.tree.leaves(learner.state))
  return {
    "parameters": weights.count(table.rows(trained)),
    "trained": weights.count(table.trainable_rows(trained)),
    "attention": placement.compute(a, config, mesh).attention,
    "tokens": work.tokens,
    "first call, s": first,
    "step, s": median,
    "model TFLOP a step": flops / 1e12,
    **learner.speed(packed, median),
    "optimizer's least traffic, GB": (2 * state + state / 3) / 1e9,
  }
