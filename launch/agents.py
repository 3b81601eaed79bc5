"""The agent that a command's flags describe; see `anysearch_jax.agent`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from launch import policies, retrievers

if TYPE_CHECKING:
  from launch import world_source


@contextlib.contextmanager
def opened(
  config: config_lib.ExperimentConfig,
  chosen: policies.Chosen,
  *,
  allow_cpu: bool = False,
) -> Iterator[agent_lib.Agent]:
  """Yields an agent; leaving the context closes it.

  Call `jax_setup.configure` before. Unless the configuration says how much room
  an episode keeps for its answer, an eighth of what the policy may write is
  kept.

  Args:
    config: environment, limits, retriever and engine.
    chosen: the policy.
    allow_cpu: whether a policy of full size may be played on a CPU.

  Raises:
    ValueError: the policy or the retriever cannot be used.
    types.EngineError: the SGLang servers cannot be used.
  """
  from anysearch_jax.agent import loading
  from anysearch_jax.rollout import searching
  from anysearch_jax.training import validation

  config = loading.with_answer_room(config)
  validation.validate(config, trains=False, samples=chosen.local)
  source = _source(config)
  known = _examples(source)
  policies.check(
    chosen, config, source, known or [_SHORTEST], allow_cpu=allow_cpu
  )
  retriever = searching.BatchingRetriever(
    retrievers.make(config, source.retriever if source else None),
    config.search,
  )
  with policies.player(chosen, config, source) as player:
    with agent_lib.Agent(
      player.engine,
      player.codec,
      retriever,
      config=config.episode,
      slots=config.engine.slots,
      known=known,
      corpus=known[0].corpus if known else "",
      scaffold=config.evaluation.scaffold,
    ) as agent:
      yield agent


# Stands for the questions that nobody has asked yet.
_SHORTEST = types.Question("?", "?", ())


def _source(
  config: config_lib.ExperimentConfig,
) -> world_source.WorldSource | None:
  """Returns the generated world; None if that is not what is asked about."""
  if config.data.source != "world":
    return None
  from launch import world_source

  return world_source.make(config.data, config.retrieval.kind)


def _examples(source: world_source.WorldSource | None) -> list[types.Question]:
  """Returns the questions of the world's evaluation, the first of each text."""
  questions = source.evaluation_questions() if source else []
  first = {question.text: question for question in reversed(questions)}
  return [
    question for question in questions if first[question.text] is question
  ]
