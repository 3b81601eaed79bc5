"""Supervised demonstrations: the policy that reinforcement learning starts from.

The rare decisions (saying "nothing found", noticing a conflict, searching the
unknown and recalling the known) decide what reinforcement learning can reach,
so their tokens weigh more, and the result is gated on probes of just these
decisions, not on the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import transformer
from anysearch_jax.training import batching, logprobs, train_step


class Demonstration(NamedTuple):
  """Token ids `[T]` and the loss weight of each as a target `[T]`."""

  token_ids: np.ndarray
  weights: np.ndarray


class Probe(NamedTuple):
  """One decision of a demonstration.

  position: index of the decision's token in `token_ids`; the question is what
    the policy gives `token_ids[position]` after the tokens before it.
  """

  token_ids: np.ndarray
  position: int
  kind: str


def fit(
  params: transformer.Params,
  a: architecture_lib.Architecture,
  demonstrations: Iterator[Demonstration],
  *,
  config: config_lib.WarmStartConfig,
  optimizer: config_lib.OptimizerConfig,
  batch: config_lib.BatchConfig,
  on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> transformer.Params:
  """Minimises the weighted negative log-likelihood of demonstrations.

  Args:
    params: the start.
    a: its sizes.
    demonstrations: as many as the steps ask for.
    config: steps, peak learning rate (linear warm-up over 50 steps, cosine to
      a tenth), tokens a step.
    optimizer: the other rates.
    batch: shapes.
    on_step: called with step and loss every 20 steps.
  """
  schedule = optax.warmup_cosine_decay_schedule(
    0.0,
    config.learning_rate,
    warmup_steps=min(50, config.steps // 2),
    decay_steps=config.steps,
    end_value=config.learning_rate / 10,
  )
  tx = train_step.optimizer(a, optimizer, schedule=schedule)
  step = train_step.make(train_step.cross_entropy_loss(a), tx)
  state = train_step.init(params, tx)
  for i in range(config.steps):
    packed = batching.pack(
      _examples(demonstrations, config.batch_tokens), config=batch
    )
    state, metrics = step(state, None, packed)
    if i % 20 == 0 or i == config.steps - 1:
      on_step(i + 1, float(metrics["loss/total"]))
  return state.params


def _examples(
  demonstrations: Iterator[Demonstration], tokens: int
) -> list[batching.Example]:
  """About `tokens` tokens of demonstrations; weights of the batch sum to 1."""
  chosen, size = [], 0
  while size < tokens:
    chosen.append(next(demonstrations))
    size += len(chosen[-1].token_ids)
  total = sum(float(d.weights[1:].sum()) for d in chosen)
  return [
    batching.Example(
      d.token_ids, d.weights / total, np.zeros(len(d.token_ids), np.float32)
    )
    for d in chosen
  ]


def probe(
  params: transformer.Params,
  a: architecture_lib.Architecture,
  probes: Sequence[Probe],
  *,
  batch: config_lib.BatchConfig,
) -> dict[str, float]:
  """Mean probability of the demonstrated decision, by kind of decision."""
  score = jax.jit(
    lambda params, *inputs: logprobs.token_logprobs(params, a, *inputs)[0]
  )
  lengths = batch.row_lengths
  sums: dict[str, list[float]] = {}
  for length in lengths:
    shorter = [n for n in lengths if n < length]
    least = shorter[-1] + 1 if shorter else 0
    members = [p for p in probes if least <= len(p.token_ids) - 1 <= length]
    rows = max(1, batch.micro_batch_tokens // length)
    for start in range(0, len(members), rows):
      part = members[start : start + rows]
      tokens, targets, segments = (
        np.zeros((rows, length), np.int32) for _ in range(3)
      )
      for r, p in enumerate(part):
        n = len(p.token_ids) - 1
        tokens[r, :n], targets[r, :n] = p.token_ids[:-1], p.token_ids[1:]
        segments[r, :n] = 1
      positions = np.broadcast_to(np.arange(length), tokens.shape)
      logp = np.asarray(score(params, tokens, targets, positions, segments))
      for r, p in enumerate(part):
        sums.setdefault(p.kind, []).append(
          float(np.exp(logp[r, p.position - 1]))
        )
  return {kind: float(np.mean(values)) for kind, values in sums.items()}


def to_device(params: transformer.Params) -> transformer.Params:
  """Parameters as arrays of the local device."""
  return jax.tree.map(jnp.asarray, params)
