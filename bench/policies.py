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

_MAX_BUDGET = 5  # Episodes have budgets of 1 to 5 searches.
# Share of tokens that have a loss. It is the share of its context that a search
# agent writes, so the number of logits is realistic.
_SCORED = 0.22


def random_weights(
  a: architecture_lib.Architecture,
  *,
  dtype: Any = jnp.float32,
  shardings: Any = None,
) -> decoder.Params:
  """Returns random weights; scales of norms are in float32.

  Args:
    a: the policy's architecture; adapters are included.
    dtype: dtype of the weights.
    shardings: shardings of the weights; None leaves the placement to JAX.
  """
  rows = table.rows(a)

  def draw() -> decoder.Params:
    keys = jax.random.split(jax.random.key(0), len(rows))
    key_by_path = dict(zip((row.path for row in rows), keys, strict=True))
    return weights.tree(
      rows,
      lambda row: (
        jnp.full(row.shape, row.scale, jnp.float32)
        if row.init is None
        else row.init
        * jax.random.normal(key_by_path[row.path], row.shape, dtype)
      ),
    )

  return jax.jit(draw, out_shardings=shardings)()


class InventedRetriever:
  """Answers every search with three passages of about 195 words."""

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    words = np.random.default_rng(len(request.query)).integers(0, 9999, 190)
    text = " ".join(f"word{n}" for n in words)
    return [types.Passage(str(i), f'"{i}"', text) for i in range(request.k)]


class WordTokenizer(tokenizer_lib.Tokenizer):
  """A tokenizer of invented words, for policies with random weights.

  Most ids are words. Some are a whole search or a whole answer, so that a
  policy that draws ids at random searches now and then, and answers.
  """

  def __init__(self, vocab_size: int):
    self.vocab_size = vocab_size
    self.end_of_turn_ids = frozenset({0})
    self.control_tokens = ()
    # Multiples of these ids are a whole search or a whole answer.
    self._search = 61 if vocab_size < 2000 else 601
    self._answer = 63 if vocab_size < 2000 else 1999

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
  """Plays a group of episodes for each question, under budgets of 1 to 5.

  Args:
    questions: the questions; budgets rotate over them.
    parts: the engine, the retriever and the environment.
    group: number of episodes of a question.
    rollout: number of the rollout, which addresses random draws.
  """
  return loop.run(
    driver.run_groups(
      [
        driver.Assignment(i, question, i % _MAX_BUDGET + 1, False)
        for i, question in enumerate(questions)
      ],
      parts,
      group=group,
      rollout=rollout,
    )
  )


def all_trajectories(rollout: driver.Rollout) -> list[types.Trajectory]:
  return [t for group in rollout.groups for t in group.trajectories]


def generated_tokens(rollout: driver.Rollout) -> int:
  """Returns the number of sampled tokens of a rollout."""
  return sum(t.generated_tokens for t in all_trajectories(rollout))


def engine_weights(
  params: decoder.Params, a: architecture_lib.Architecture, dtype: Any
) -> decoder.Params:
  """Returns weights as the engine prepares them for one device.

  Args:
    params: weights of the policy.
    a: the policy's architecture.
    dtype: dtype of the engine's computations.
  """
  engine = config_lib.EngineConfig()
  model = kv_store.make_model(engine, a, sharding.mesh(), dtype=dtype)
  return model.prepare(params, a)


class Decoder:
  """Decode calls over rows of the same length, with random weights.

  Args:
    a: the policy's architecture, with its adapters.
    engine: sizes; a call decodes `decode_steps` tokens of `slots` rows.
    dtype: dtype of weights, keys and values.
    params: weights as `engine_weights` returns them.

  Attributes:
    table: int `[R, columns]`, the pages of each row.
  """

  def __init__(
    self,
    a: architecture_lib.Architecture,
    engine: config_lib.EngineConfig,
    *,
    dtype: Any,
    params: decoder.Params,
  ):
    self.a = a
    self.rows = engine.slots
    self.steps = engine.decode_steps
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
    rows = self.rows
    self._pages, self._gathered, decoded = kv_store.decode(
      self.params,
      self._pages,
      self._gathered,
      kv_store.Turns(
        self.table,
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

  def prefill(self, chunks: kv_store.Chunks[np.ndarray]) -> None:
    """Caches chunks of rows, whose pages `table` lists, and waits."""
    self._pages, _ = kv_store.prefill(
      self.params, self._pages, chunks, model=self._model
    )
    jax.block_until_ready(self._pages)

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
    token_bytes = pages_lib.token_bytes(self.a, self._model.stored)
    return round(self.rows * self.a.mean_attended(context) * token_bytes)


def train_examples(
  *, row: int, vocab: int, tokens: int, scored: float, whole_rows: bool = False
) -> list[batching.Example]:
  """Makes trajectories of a half, a quarter or an eighth of a row.

  They fill rows exactly, so that trainers that pad have little padding.

  Args:
    row: length of a row, in tokens.
    vocab: size of the vocabulary.
    tokens: number of all tokens, a multiple of an eighth of a row.
    scored: share of the tokens that have a loss, evenly spread.
    whole_rows: whether each trajectory is a whole row instead.
  """
  rng = np.random.default_rng(0)
  segments = []
  remaining = tokens
  while remaining:
    size = row if whole_rows else row >> int(rng.integers(1, 4))
    while size > remaining:
      size //= 2
    remaining -= size
    segments.append((size, rng.integers(0, vocab, size + 1)))
  return [
    batching.Example(
      ids.astype(np.int32),
      np.asarray(np.arange(size + 1) * scored % 1 >= 1 - scored, np.float32)
      / (tokens * scored),
      np.full(size + 1, -np.log(vocab), np.float32),
      float(rng.normal()),
    )
    for size, ids in segments
  ]


def measure_steps(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  *,
  micro_batches: int,
  steps: int,
  whole_rows: bool = False,
) -> dict[str, Any]:
  """Times the trainer's step over random weights.

  Args:
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    micro_batches: number of micro-batches of a step, filled by
      `train_examples`.
    steps: number of steps after a first one, which compiles.
    whole_rows: whether each row is one trajectory that is scored whole.

  Returns:
    The median's seconds, and the FLOPs and bytes of a step.
  """
  mesh = placement.Placement.of(lora.attach(a, config.lora), config).trainer
  params = random_weights(
    a,
    dtype=config.lora.base_dtype if config.lora.rank else "float32",
    shardings=sharding.shardings(a, mesh),
  )
  no_tokenizer: Any = None
  learner = learner_lib.Learner(config, hf.Policy(params, a, no_tokenizer))
  examples = train_examples(
    row=config.batch.row_lengths[-1],
    vocab=a.vocab_size,
    tokens=micro_batches * config.batch.micro_batch_tokens,
    scored=1.0 if whole_rows else _SCORED,
    whole_rows=whole_rows,
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
  operations = throughput.operations(trained, work, forwards=forwards)
  # Per step, masters and moments are read and written, gradients are read.
  state = sum(x.nbytes for x in jax.tree.leaves(learner.state))
  return {
    "parameters": weights.count(table.rows(trained)),
    "trained": weights.count(table.trainable_rows(trained)),
    "attention": placement.compute(a, config, mesh).attention,
    "tokens": work.tokens,
    "first call, s": first,
    "step, s": median,
    "model TFLOP a step": operations.flops / 1e12,
    **learner.speed(packed, median),
    "optimizer's least traffic, GB": (2 * state + state / 3) / 1e9,
  }
