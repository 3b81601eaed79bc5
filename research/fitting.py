"""Supervised training on demonstrations, before reinforcement learning.

What reinforcement learning can reach depends on a few rare decisions: saying
"nothing found", noticing a conflict, searching unknown facts and recalling
known ones. Their tokens weigh more in the loss, and the result is accepted by
probes of these decisions, not by its loss.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import anysearch_jax as aj
from research import demonstrations, warm_start_settings

# What a policy must show before reinforcement learning: the least mean
# probability of each probed decision, and the least P(recall | known) -
# P(recall | unknown).
_PROBE, _GAP = 0.99, 0.2
_SHOWN_EVERY = 20  # Steps.


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
  policy: aj.Policy,
  pool: Sequence[aj.imitation.Demonstration],
  *,
  config: aj.ExperimentConfig,
  warm_start: warm_start_settings.WarmStart,
  held_out: aj.imitation.HeldOut,
  folder: pathlib.Path,
) -> aj.Policy:
  """Returns the policy after it has imitated demonstrations.

  A fit that is killed resumes from its newest checkpoint, and ends with the
  same bits as an uninterrupted one.

  Args:
    policy: where it starts from.
    pool: the demonstrations, at least one; they repeat in new orders.
    config: whose seed, optimizer, batches and checkpoints are used.
    warm_start: the steps, their size and their learning rate.
    held_out: questions that are not demonstrated.
    folder: an existing folder, of a run with the same arguments.

  Raises:
    ValueError: the folder's checkpoints are of another fit.
  """
  trainer = aj.imitation.Trainer(
    aj.config.changed(
      config,
      # The policy is probed and plays after the fit.
      sft=aj.config.SftConfig(
        steps=warm_start.steps,
        demonstrations=warm_start.batch,
        learning_rate=warm_start.learning_rate,
        play_every=0,
      ),
      checkpoint={"export_dtype": "float32"},
    ),
    policy=policy,
    demonstrations=pool,
    held_out=held_out,
    environment=aj.environment_of(config.episode),
    folder=folder,
  )

  def show(step: int, values: dict[str, float]) -> None:
    if step % _SHOWN_EVERY == 1 or step == warm_start.steps:
      loss = values["loss/total"]
      print(f"step {step}/{warm_start.steps} loss {loss:.3f}", flush=True)

  trainer.run(show)
  return aj.load_policy(folder / "policy")


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
