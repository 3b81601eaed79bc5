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


class Prepared(NamedTuple):
  """An agent before its weights are read.

  config: configuration of the agent, with room for answers.
  choice: the policy.
  source: the generated world; None for questions about anything else.
  examples: questions that the agent can answer, if some are known.
  """

  config: config_lib.ExperimentConfig
  choice: policies.PolicyChoice
  source: parts.WorldSource | None
  examples: list[types.Question]


def prices(config: config_lib.ExperimentConfig) -> budgets.Prices:
  """Returns the prices of a configuration, with those of its tools."""
  from anysearch_jax.methods import systems  # Imports JAX.

  env = systems.of_episode(config.episode)
  return env.prices(config.evaluation.prices)


def prepare(
  config: config_lib.ExperimentConfig,
  choice: policies.PolicyChoice,
  *,
  allow_cpu: bool = False,
) -> Prepared:
  """Checks the parts of an agent.

  Call `jax_setup.configure` before.

  Args:
    config: a configuration; it gets room for the answer, see
      `loading.with_answer_room`.
    choice: the policy.
    allow_cpu: whether a large policy may be played on a CPU.

  Raises:
    ValueError: the policy or the configuration cannot be used.
  """
  from anysearch_jax.agent import loading  # Imports JAX.
  from anysearch_jax.methods import systems

  config = loading.with_answer_room(config)
  systems.validate(config, trains=False, samples=choice.is_local)
  source = None
  examples: list[types.Question] = []
  if config.data.source == "world":
    source = parts.world_source(config.data, config.retrieval.kind)
    questions_by_text: dict[str, types.Question] = {}
    for question in source.evaluation_questions():
      questions_by_text.setdefault(question.text, question)
    examples = list(questions_by_text.values())
  policies.check_playable(
    choice,
    config,
    source,
    examples or [loading.ANY_QUESTION],
    allow_cpu=allow_cpu,
  )
  return Prepared(
    config=config, choice=choice, source=source, examples=examples
  )


def _open_once(
  config: config_lib.ExperimentConfig,
  open_retriever: Callable[[], types.Retriever],
) -> types.Retriever:
  return open_retriever()


@contextlib.contextmanager
def open_agent(
  prepared: Prepared, follow: Callable[..., types.Retriever] = _open_once
) -> Iterator[agent_lib.Agent]:
  """Yields an agent; leaving the context closes it.

  Args:
    prepared: the agent before its weights are read.
    follow: returns the retriever, given the configuration and a function that
      opens it; `documents.followed` opens it again when documents change.

  Raises:
    ValueError: the policy or the retriever cannot be used.
    types.EngineError: the servers cannot be used.
  """
  from anysearch_jax.rollout import searching

  config, choice, source, examples = prepared
  passages = 0  # Unknown.

  def open_retriever() -> types.Retriever:
    nonlocal passages
    raw_retriever = retrievers.make(
      config, source.retriever if source else None
    )
    if config.retrieval.kind == "index":
      index = raw_retriever.identity().get("identity", {})
      passages = index.get("corpus", {}).get("passages", 0)
    return searching.BatchingRetriever(raw_retriever, config.search)

  retriever = follow(config, open_retriever)
  with policies.player(choice, config, source) as player:
    with agent_lib.Agent(
      player.engine,
      player.codec,
      retriever,
      config=config.episode,
      slots=config.engine.slots,
      examples=examples,
      corpus=examples[0].corpus if examples else "",
      scaffold=config.evaluation.scaffold,
      passages=passages,
    ) as agent:
      yield agent


@contextlib.contextmanager
def open_in_thread(
  prepared: Prepared,
  preparation: Callable[[], None],
  follow: Callable[..., types.Retriever] = _open_once,
) -> Iterator[concurrent.futures.Future[agent_lib.Agent]]:
  """Yields an agent that a thread loads; leaving the context closes it.

  If the agent cannot be loaded, the future raises the exception. An agent that
  is still being loaded at the end is abandoned with its thread.

  Args:
    prepared: the agent before its weights are read.
    preparation: the thread calls it first.
    follow: as for `open_agent`.
  """
  future = concurrent.futures.Future[agent_lib.Agent]()
  with contextlib.ExitStack() as stack:

    def load() -> None:
      try:
        preparation()
        future.set_result(stack.enter_context(open_agent(prepared, follow)))
      except BaseException as error:
        future.set_exception(error)

    threading.Thread(target=load, name="loading", daemon=True).start()
    yield future
