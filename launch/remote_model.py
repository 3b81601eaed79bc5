"""A model that runs elsewhere, behind OpenAI's text completions."""

from __future__ import annotations

import asyncio
import contextlib
import typing
from collections.abc import Iterator

from anysearch_jax import config as config_lib

if typing.TYPE_CHECKING:
  from anysearch_jax.evaluation import harness
  from anysearch_jax.rollout import completions


@contextlib.contextmanager
def player(
  name: str,
  config: config_lib.ExperimentConfig,
  *,
  tokenizer: str,
  key_variable: str,
) -> Iterator[harness.Player]:
  """Yields the model, ready to play, after it has sampled one token.

  Args:
    name: MODEL@URL.
    config: sampling, deadlines, and the number of turns at a time.
    tokenizer: folder of the model's tokenizer; "": there is none.
    key_variable: environment variable with the server's key; "": no key.

  Raises:
    ValueError: the key or the tokenizer is missing.
    types.EngineError: the server cannot be used.
  """
  from anysearch_jax.evaluation import harness
  from anysearch_jax.rollout import completions

  model, _, url = name.rpartition("@")
  known = codec(tokenizer)
  engine = completions.CompletionsEngine(
    url,
    known,
    model=model,
    key_variable=key_variable,
    sampling=config.sampling,
    deadline=config.episode.turn_deadline,
    concurrency=config.engine.slots,
  )
  try:
    asyncio.run(engine.probe())
    yield harness.Player(engine, known)
  finally:
    engine.close()


def codec(folder: str) -> completions.Codec:
  """Returns the codec of a tokenizer's folder; "": one that estimates.

  Raises:
    ValueError: the folder has no tokenizer.
  """
  if folder:
    from anysearch_jax.policy import tokenizer

    return tokenizer.Tokenizer.from_folder(folder)
  from anysearch_jax.rollout import plain_text

  return plain_text.PlainText()
