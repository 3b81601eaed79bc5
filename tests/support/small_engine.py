"""An engine of a small random policy, and turns that tests request of it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.policy import decoder, hf
from anysearch_jax.rollout.jax_engine import engine as engine_lib

# Stop texts occur as one piece, in parts, and in a piece that extends further.
TEXTS = ["<pad>", "<end>", "</search>", "</", "search", ">", ">x", "answer"]
TEXTS += [f"w{i}" for i in range(40 - len(TEXTS))]
A = small_policy.qwen3(
  len(TEXTS), d_model=32, layers=2, heads=4, kv_heads=2, mlp_dim=48
)
CONFIG = config_lib.EngineConfig(
  slots=12,
  max_context=152,
  page=4,
  lanes=(8,),
  prefill_lanes=8,
  prefill_chunk=8,
  decode_steps=4,
)
ENVIRONMENT = (9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19)


class Tokenizer:
  """Pieces joined without spaces."""

  end_of_turn_ids = frozenset([1])

  def token_texts(self):
    return TEXTS

  def decode(self, ids):
    return "".join(TEXTS[i] for i in ids if i > 1)


def params():
  """Returns parameters larger than initial ones, for non-flat distributions."""
  return jax.tree.map(
    lambda p: jnp.asarray(p) * (8.0 if p.ndim > 2 else 1.0),
    decoder.initialize(A, 0),
  )


def engine(
  params,
  *,
  architecture=A,
  sampling=None,
  seed=7,
  mesh=None,
  dtype=jnp.float32,
  **changes,
):
  """Returns an engine of `CONFIG` with `changes`."""
  return engine_lib.JaxEngine(
    hf.Policy(params, architecture, Tokenizer()),
    config=dataclasses.replace(CONFIG, **changes),
    sampling=sampling or config_lib.SamplingConfig(),
    seed=seed,
    mesh=mesh,
    dtype=dtype,
  )


def prompt(question):
  return (20 + question, *range(21, 39))


async def episode(engine, question, sample, *, turns=3, delay=None):
  """Plays turns with environment text between them, like the driver."""
  address = types.Address(0, question, sample)
  context, generations = list(prompt(question)), []
  for turn in range(turns):
    if delay is not None:
      await asyncio.sleep(delay.random() * 0.01)
    generations.append(
      await engine.generate(
        types.GenerateRequest(address, turn, tuple(context), 20, protocol.STOPS)
      )
    )
    context += [*generations[-1].token_ids, *ENVIRONMENT]
  engine.release(address)
  return context, generations


def play(engine, order, *, delay=None):
  """Plays episodes concurrently; returns results by question and sample."""

  async def run():
    results = await asyncio.gather(
      *(episode(engine, q, s, delay=delay) for q, s in order)
    )
    return dict(zip(order, results, strict=True))

  return asyncio.run(run())


def log_probs(params, context, a=A):
  """Returns the log-probabilities of one full forward, `[max_context, V]`."""
  # Padding at the end does not affect causal attention.
  tokens = np.zeros((1, CONFIG.max_context), np.int32)
  tokens[0, : len(context)] = context
  return _score(params, tokens, a)


def assert_scored(params, context, generations, a=A):
  """Asserts log-probabilities equal to those of one full forward, to 1e-5.

  Args:
    params: parameters of the policy.
    context: the tokens up to the end of the last generation.
    generations: each with the index of its first token.
    a: the policy's architecture.
  """
  logps = log_probs(params, context, a)
  for start, generation in generations:
    ids = np.asarray(generation.token_ids)
    assert tuple(context[start : start + len(ids)]) == generation.token_ids
    found = logps[np.arange(start - 1, start - 1 + len(ids)), ids]
    np.testing.assert_allclose(generation.logps, found, atol=1e-5)


@functools.partial(jax.jit, static_argnames="a")
def _score(params, tokens, a):
  positions = jnp.arange(tokens.shape[1])[None]
  hidden = decoder.forward(params, a, tokens, positions, jnp.ones_like(tokens))
  return jax.nn.log_softmax(decoder.logits(params, hidden)[0])
