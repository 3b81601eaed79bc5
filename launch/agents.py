"""The agent that a command's flags describe; see `anysearch_jax.agent`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.launch import parts, policies, retrievers

# Stands for the questions that nobody has asked yet.
_SHORTEST = types.Question("?", "?", ())


class Prepared(NamedTuple):
  """An agent before its weights are read.

  config: of the agent, with room for answers.
  chosen: the policy.
  source: the generated world; None if that is not what is asked about.
  examples: questions that can be asked, if they are known.
  """

  config: config_lib.ExperimentConfig
  chosen: policies.Chosen
  source: parts.WorldSource | None
  examples: list[types.Question]


def prices(config: config_lib.ExperimentConfig) -> budgets.Prices:
  """Returns the prices of a configuration, with those of its tools."""
  from anysearch_jax.methods import systems  # Imports JAX.

  env = systems.of_episode(config.episode)
  return env.prices(config.evaluation.prices)


def prepare(
  config: config_lib.ExperimentConfig,
  chosen: policies.Chosen,
  *,
  allow_cpu: bool = False,
) -> Prepared:
  """Checks what an agent is made of.

  Call `jax_setup.configure` before. The configuration gets room for the answer,
  see `loading.with_answer_room`. With `allow_cpu` a policy of full size may be
  played on a CPU. Raises ValueError if the policy or the configuration cannot
  be used.
  """

  from anysearch_jax.agent import loading  # Imports JAX.
  from anysearch_jax.methods import systems

  config = loading.with_answer_room(config)
  systems.validate(config, trains=False, samples=chosen.local)
  source, known = None, list[types.Question]()
  if config.data.source == "world":
    source = parts.world_source(config.data, config.retrieval.kind)
    first: dict[str, types.Question] = {}
    for question in source.evaluation_questions():
      first.setdefault(question.text, question)
    known = list(first.values())
  policies.check(
    chosen, config, source, known or [_SHORTEST], allow_cpu=allow_cpu
  )
  return Prepared(config, chosen, source, known)


@contextlib.contextmanager
def loaded(prepared: Prepared) -> Iterator[agent_lib.Agent]:
  """Yields an agent; leaving the context closes it.

  Raises:
    ValueError: the policy or the retriever cannot be used.
    types.EngineError: the SGLang servers cannot be used.
  """
  from anysearch_jax.rollout import searching

  config, chosen, source, known = prepared
  found = retrievers.make(config, source.retriever if source else None)
  retriever = searching.BatchingRetriever(found, config.search)
  passages = 0  # Unknown.
  if config.retrieval.kind == "index":
    index = found.identity().get("identity", {})
    passages = index.get("corpus", {}).get("passages", 0)
  with policies.player(chosen, config, source) as player:
    with agent_lib.Agent(
      player.engine,
      player.codec,
      retriever,
      config=config.episode,
      slots=config.engine.slots,
      examples=known,
      corpus=known[0].corpus if known else "",
      scaffold=config.evaluation.scaffold,
      passages=passages,
    ) as agent:
      yield agent


@contextlib.contextmanager
def loading_agent(
  prepared: Prepared, before: Callable[[], None]
) -> Iterator[concurrent.futures.Future[agent_lib.Agent]]:
  """Yields an agent that a thread loads; leaving the context closes it.

  The thread calls `before` first. The future has the exception if the agent
  cannot be loaded. An agent that is still being loaded at the end is abandoned
  with its thread.
  """
  found = concurrent.futures.Future[agent_lib.Agent]()
  with contextlib.ExitStack() as held:

    def load() -> None:
      try:
        before()
        found.set_result(held.enter_context(loaded(prepared)))
      except BaseException as error:
        found.set_exception(error)

    threading.Thread(target=load, name="loading", daemon=True).start()
    yield found
