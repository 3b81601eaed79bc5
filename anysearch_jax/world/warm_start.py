"""Supervised training on demonstrations, before reinforcement learning.

What reinforcement learning can reach depends on a few rare decisions: saying
"nothing found", noticing a conflict, searching unknown facts and recalling
known ones. Their tokens weigh more in the loss, and the result is accepted by
probes of these decisions, not by its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder
from anysearch_jax.training import batching, train_step
from anysearch_jax.world import demonstrations as demonstrations_lib
from anysearch_jax.world import experts


class Demonstration(NamedTuple):
  """Token ids `[T]` and the loss weight of each as a target `[T]`."""

  token_ids: np.ndarray
  weights: np.ndarray


def validate(config: config_lib.WarmStartConfig) -> None:
  """Checks the sizes of the policy.

  Raises:
    ValueError: `kv_heads` does not divide `heads`, or heads have no even size.
  """
  c = config
  if c.heads % c.kv_heads:
    raise ValueError(
      f"warm_start.kv_heads: found {c.kv_heads}, expected a divisor of "
      f"warm_start.heads, {c.heads}."
    )
  if c.hidden % (2 * c.heads):
    raise ValueError(
      f"warm_start.hidden: found {c.hidden}, expected a multiple of twice "
      f"warm_start.heads, {2 * c.heads}: rotary positions need heads of an "
      "even size."
    )


def fit(
  params: decoder.Params,
  a: architecture_lib.Architecture,
  demonstrations: Iterator[Demonstration],
  *,
  config: config_lib.WarmStartConfig,
  optimizer: config_lib.OptimizerConfig,
  batch: config_lib.BatchConfig,
  on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> decoder.Params:
  """Minimises the weighted negative log-likelihood of demonstrations.

  Args:
    params: the initial parameters.
    a: their architecture.
    demonstrations: at least as many as the steps consume.
    config: steps, tokens a step, and peak learning rate (linear warm-up over 50
      steps or half of them, then cosine decay to a tenth).
    optimizer: the other rates.
    batch: shapes of the batches.
    on_step: called with step and loss every 20 steps and after the last one.

  Returns:
    The trained parameters.
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
  """Takes demonstrations of at least `tokens` tokens; weights sum to 1."""
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
  params: decoder.Params,
  a: architecture_lib.Architecture,
  probes: demonstrations_lib.Probes,
  *,
  rows: int = 16,
) -> np.ndarray:
  """Returns the probability of each probe's label, `[P]`.

  Args:
    params: the policy's parameters.
    a: its architecture.
    probes: teacher-forced decisions.
    rows: number of demonstrations in a forward pass.
  """
  n, t = probes.token_ids.shape
  score = jax.jit(_next_logprobs, static_argnames="a")
  p = np.zeros(len(probes.labels))
  for start in range(0, n, rows):
    tokens = np.zeros((rows, t), np.int32)
    part = probes.token_ids[start : start + rows]
    tokens[: len(part)] = part
    here = np.flatnonzero((probes.rows >= start) & (probes.rows < start + rows))
    logps = score(params, tokens, a=a)
    p[here] = np.exp(
      logps[
        probes.rows[here] - start,
        probes.positions[here] - 1,
        probes.labels[here],
      ]
    )
  return p


def _next_logprobs(
  params: decoder.Params,
  tokens: jax.Array,
  *,
  a: architecture_lib.Architecture,
) -> jax.Array:
  """Returns log P(next token) after each token, `[B, T, V]`.

  Padding counts as text: it is at the end, where causal attention hides it.
  """
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = decoder.forward(params, a, tokens, positions, jnp.ones_like(tokens))
  return jax.nn.log_softmax(decoder.logits(params, hidden))


class Slopes(NamedTuple):
  """How P(search | known) depends on `change` and `slack` (least squares)."""

  change: float
  slack: float


def by_kind(
  p: np.ndarray, probes: demonstrations_lib.Probes
) -> dict[str, float]:
  """Returns the mean of `p` `[P]` over the probes of each kind there is."""
  return {
    kind: float(p[probes.kinds == i].mean())
    for i, kind in enumerate(demonstrations_lib.PROBE_KINDS)
    if np.any(probes.kinds == i)
  }


def slopes(
  p: np.ndarray, probes: demonstrations_lib.Probes
) -> tuple[Slopes, Slopes]:
  """Returns the slopes of a policy, and of the expert that made the probes.

  Args:
    p: `[P]`, the policy's probabilities of the probes' labels.
    probes: with at least three `recall_known` that differ.
  """
  known = probes.kinds == demonstrations_lib.PROBE_KINDS.index("recall_known")
  features = probes.features[known]
  design = np.concatenate([np.ones((len(features), 1)), features], 1)
  searches = np.stack([1 - p[known], probes.searches[known]], 1)
  _, change, slack = np.linalg.lstsq(design, searches, rcond=None)[0]
  policy, expert = map(Slopes, change.tolist(), slack.tolist())
  return policy, expert


def gate(
  p: np.ndarray,
  probes: demonstrations_lib.Probes,
  expert: experts.Demonstrator,
) -> list[str]:
  """Returns in words what the policy lacks to begin reinforcement learning.

  Args:
    p: `[P]`, the policy's probabilities of the probes' labels.
    probes: of the expert's episodes.
    expert: what it must show.
  """
  found = by_kind(p, probes)
  needs = [
    (kind, found[kind], expert.probe)
    for kind in ("nothing", "conflict", "copy", "memory")
  ]
  gap = found["recall_known"] - found["recall_unknown"]
  needs.append(("recall_known - recall_unknown", gap, expert.gap))
  lacks = [
    f"{kind}: found {value:.3f}, expected at least {least}"
    for kind, value, least in needs
    if value < least
  ]
  if expert.slopes:
    for name, mine, its in zip(Slopes._fields, *slopes(p, probes)):
      if abs(mine - its) > 0.05 + abs(its) / 2:
        lacks.append(f"slope by {name}: found {mine:.2f}, expected {its:.2f}")
  return lacks
