"""A toy bandit of two turns: its policy, its episodes and its PPO batches.

Question c is answered by the word 4 + c, after any word and a fixed
observation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import grpo
from anysearch_jax.policy import decoder
from anysearch_jax.training import batching

A = small_policy.architecture(vocab_size=8)
PPO = config_lib.ObjectiveConfig(advantage="gae", kl_coefficient=0.0)
CONFIG = config_lib.ExperimentConfig(
  compute_dtype="float32",
  curriculum=config_lib.CurriculumConfig(steps_per_rollout=2),
  objective=PPO,
  optimizer=config_lib.OptimizerConfig(learning_rate=0.01, weight_decay=0.0),
  critic=config_lib.CriticConfig(learning_rate=0.02),
  batch=config_lib.BatchConfig(
    row_lengths=(8,), micro_batch_tokens=128, max_micro_batches=2
  ),
)
QUESTIONS, OBSERVATION, EPISODES = 4, 3, 64
MODEL = np.array([False, True, False, True])


def params():
  return small_policy.noisy(decoder.initialize(A, 0), 0)


@jax.jit
def next_logp(params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = decoder.forward(params, A, tokens, positions, jnp.ones_like(tokens))
  return jax.nn.log_softmax(decoder.logits(params, hidden))


def play(params, rng):
  """Plays episodes of two turns; returns tokens, log-probs and rewards."""
  tokens = np.zeros((EPISODES, 4), np.int32)
  tokens[:, 0] = np.arange(EPISODES) % QUESTIONS
  logps = np.zeros(tokens.shape, np.float32)
  tokens[:, 2] = OBSERVATION
  for place in np.flatnonzero(MODEL):
    logp = np.asarray(next_logp(params, tokens))[:, place - 1]
    tokens[:, place] = np.argmax(logp + rng.gumbel(size=logp.shape), -1)
    logps[:, place] = np.take_along_axis(logp, tokens[:, [place]], -1)[:, 0]
  rewards = np.zeros(tokens.shape, np.float32)
  rewards[:, 3] = tokens[:, 3] == 4 + tokens[:, 0]
  return tokens, logps, rewards


def pack(episodes, steps=2):
  """Returns the batches of a rollout."""
  per_step = EPISODES // steps
  weights = grpo.token_weights([MODEL] * per_step, reduction="sequence-mean")
  examples = [
    batching.Example(tokens, weights[0], logps, rewards=rewards)
    for tokens, logps, rewards in zip(*episodes)
  ]
  return [
    batching.pack(examples[i : i + per_step], config=CONFIG.batch, rewards=True)
    for i in range(0, EPISODES, per_step)
  ]
