"""Supervised training on demonstrations, before reinforcement learning.

What reinforcement learning can reach depends on a few rare decisions: saying
"nothing found", noticing a conflict, searching unknown facts and recalling
known ones. Their tokens weigh more in the loss, and the result is accepted by
probes of these decisions, not by its loss.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors
from safetensors import numpy as safetensors_numpy

import anysearch_jax as aj
from research import demonstrations, warm_start_settings

# What a policy must show before reinforcement learning: the least mean
# probability of each probed decision, and the least P(recall | known) -
# P(recall | unknown).
_PROBE, _GAP = 0.99, 0.2


def fresh(
  world: aj.World, size: warm_start_settings.WarmStart, *, seed: int
) -> aj.Policy:
  """Returns a policy with random weights, and the world's tokenizer."""
  codec = aj.Tokenizer(aj.world_tokenizer(world))
  a = aj.Architecture(
    family="qwen3",
    vocab_size=codec.vocab_size,
    d_model=size.hidden,
    layers=size.layers,
    heads=size.heads,
    kv_heads=size.kv_heads,
    head_dim=size.hidden // size.heads,
    mlp_dim=size.mlp,
    qk_norm=True,
    tied=True,
  )
  return aj.Policy(aj.decoder.initialize(a, seed), a, codec)


def fit(
  params: aj.decoder.Params,
  a: aj.Architecture,
  pool: Sequence[demonstrations.Demonstration],
  *,
  seed: int,
  config: warm_start_settings.WarmStart,
  optimizer: aj.config.OptimizerConfig,
  batch: aj.config.BatchConfig,
  on_step: Callable[[int, float], None] = lambda step, loss: None,
  saved: pathlib.Path,
  save_every: int = 50,
) -> aj.decoder.Params:
  """Minimises the weighted negative log-likelihood of demonstrations.

  A fit that is killed resumes from `saved`, and ends with the same bits as an
  uninterrupted one.

  Args:
    params: the initial parameters.
    a: their architecture.
    pool: the demonstrations, at least one; they repeat in new orders.
    seed: seed of the orders.
    config: steps, tokens a step, and peak learning rate (linear warm-up over 50
      steps or half of them, then cosine decay to a tenth).
    optimizer: the other rates.
    batch: shapes of the batches.
    on_step: called with step and loss every 20 steps and after the last one.
    saved: file of the position. It must come from a fit with the same
      arguments.
    save_every: number of steps between saves, >= 1.

  Returns:
    The trained parameters.

  Raises:
    ValueError: `saved` is damaged or of another policy.
  """
  schedule = optax.warmup_cosine_decay_schedule(
    0.0,
    config.learning_rate,
    warmup_steps=min(50, config.steps // 2),
    decay_steps=config.steps,
    end_value=config.learning_rate / 10,
  )
  tx = aj.optimizers.adamw(a, optimizer, schedule=schedule)
  step = aj.train_step.make(aj.train_step.cross_entropy_loss(a), tx)
  state, steps = aj.train_step.init(params, tx), 0
  if saved.is_file():
    state, steps = _load(saved, state)
  batches = _batches(pool, seed, config.batch_tokens)
  for chosen in itertools.islice(batches, steps, config.steps):
    packed = aj.batching.pack(_examples(chosen), config=batch)
    state, metrics = step(state, None, packed)
    steps += 1
    if steps % 20 == 1 or steps == config.steps:
      on_step(steps, float(metrics["loss/total"]))
    if steps % save_every == 0 or steps == config.steps:
      _save(saved, state, steps)
  return state.params


def _save(
  path: pathlib.Path, state: aj.train_step.TrainState, steps: int
) -> None:
  """Replaces the file at once: a kill leaves the old one or the new one."""
  leaves = map(np.asarray, jax.tree.leaves(state))
  arrays = {str(i): leaf for i, leaf in enumerate(leaves)}
  beside = path.with_name(path.name + ".writing")
  safetensors_numpy.save_file(arrays, beside, {"steps": str(steps)})
  beside.replace(path)


def _load(
  path: pathlib.Path, like: aj.train_step.TrainState
) -> tuple[aj.train_step.TrainState, int]:
  """Returns the saved state, bit for bit, and the steps taken.

  Args:
    path: of the file.
    like: a state with the same arrays, such as the one before the first step.

  Raises:
    ValueError: the file is damaged, or its arrays are those of another policy.
  """
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      steps = int(file.metadata()["steps"])
      found = [file.get_tensor(str(i)) for i in range(len(file.keys()))]
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path}: not a whole safetensors file ({error}); remove it to begin "
      "anew."
    ) from error
  expected, tree = jax.tree.flatten(like)
  if [(x.shape, x.dtype) for x in found] != [
    (x.shape, x.dtype) for x in expected
  ]:
    raise ValueError(
      f"{path}: found the arrays of another policy or optimizer, expected "
      f"{len(expected)} arrays of this one; remove it to begin anew."
    )
  return jax.tree.unflatten(tree, map(jax.device_put, found)), steps


def _batches(
  pool: Sequence[demonstrations.Demonstration], seed: int, tokens: int
) -> Iterator[list[demonstrations.Demonstration]]:
  """Yields batches of at least `tokens` tokens; each pass has a new order."""
  rng = np.random.Generator(np.random.PCG64(seed))
  chosen: list[demonstrations.Demonstration] = []
  size = 0
  while True:
    for i in rng.permutation(len(pool)):
      chosen.append(pool[i])
      size += len(pool[i].token_ids)
      if size >= tokens:
        yield chosen
        chosen, size = [], 0


def _examples(
  chosen: Sequence[demonstrations.Demonstration],
) -> list[aj.batching.Example]:
  """Returns demonstrations as examples of a batch, whose weights sum to 1."""
  total = sum(float(d.weights[1:].sum()) for d in chosen)
  return [
    aj.batching.Example(
      d.token_ids, d.weights / total, np.zeros(len(d.token_ids), np.float32)
    )
    for d in chosen
  ]


def probe(
  params: aj.decoder.Params,
  a: aj.Architecture,
  probes: demonstrations.Probes,
) -> np.ndarray:
  """Returns the probability of each probe's label, `[P]`.

  Args:
    params: the policy's parameters.
    a: its architecture.
    probes: teacher-forced decisions.
  """
  (n, t), rows = probes.token_ids.shape, 16  # Of a forward pass.
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
  params: aj.decoder.Params,
  tokens: jax.Array,
  *,
  a: aj.Architecture,
) -> jax.Array:
  """Returns log P(next token) after each token, `[B, T, V]`.

  Padding counts as text: it is at the end, where causal attention hides it.
  """
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = aj.decoder.forward(
    params, a, tokens, positions, jnp.ones_like(tokens)
  )
  return jax.nn.log_softmax(aj.decoder.logits(params, hidden))


def by_kind(p: np.ndarray, probes: demonstrations.Probes) -> dict[str, float]:
  """Returns the mean of `p` `[P]` over the probes of each kind there is."""
  return {
    kind: float(p[probes.kinds == i].mean())
    for i, kind in enumerate(demonstrations.PROBE_KINDS)
    if np.any(probes.kinds == i)
  }


def gate(p: np.ndarray, probes: demonstrations.Probes) -> list[str]:
  """Returns in words what the policy lacks to begin reinforcement learning.

  Args:
    p: `[P]`, the policy's probabilities of the probes' labels.
    probes: of the expert's episodes.
  """
  found = by_kind(p, probes)
  needs = [
    (kind, found[kind], _PROBE)
    for kind in ("nothing", "conflict", "copy", "memory")
  ]
  gap = found["recall_known"] - found["recall_unknown"]
  needs.append(("recall_known - recall_unknown", gap, _GAP))
  return [
    f"{kind}: found {value:.4f}, expected at least {least}"
    for kind, value, least in needs
    if value < least
  ]
