"""The agent: a policy, its retriever, and an event loop that serves both."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import pathlib
import queue
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Self

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import asking, background, events, mailbox
from anysearch_jax.agent import limits as limits_lib
from anysearch_jax.environment import protocol
from anysearch_jax.evaluation import harness
from anysearch_jax.rollout import driver, searching


def _nothing(event: events.Event) -> None:
  """Tells nobody."""


class Agent:
  """Answers questions with a policy that searches under a budget.

  All methods may be called from any thread and any event loop at once: the
  questions run in one private event loop, where the engine samples them
  together and equal searches are made once. A question beyond `slots` waits for
  a place.

  `load` makes an agent from a folder. An agent that nobody refers to any more
  ends its event loop; only `close` frees the engine at once.

  Attributes:
    engine, slots: as given.

  Args:
    engine: samples the policy; `close` closes it.
    codec: the policy's tokenizer.
    retriever: answers the searches; a `searching.BatchingRetriever` answers
      many at once.
    config: limits of an episode; its `prompts` name the environment.
    slots: questions that are worked on at the same time, >= 1.
    known: questions that are recognised by their text, with their ids and
      corpora. A policy of the generated world, whose words nobody knows, is
      asked these.
    corpus: the corpus of all other questions; "" if there is only one.
    scaffold: whether the environment states the budget before every turn.
    close: called once when the agent is closed.
  """

  def __init__(
    self,
    engine: types.Engine,
    codec: types.TextCodec,
    retriever: types.Retriever,
    *,
    config: config_lib.EpisodeConfig,
    slots: int,
    known: Sequence[types.Question] = (),
    corpus: str = "",
    scaffold: bool = False,
    close: Callable[[], None] = lambda: None,
  ):
    if slots < 1:
      raise ValueError(f"slots: found {slots}, expected at least 1.")
    searching.attach(retriever, engine, codec)
    self.engine, self.slots = engine, slots
    self._parts = driver.EpisodeParts(engine, retriever, config, codec)
    self._scaffold = scaffold
    self._known = {question.text: question for question in known}
    self._corpus = corpus
    self._close = close
    self._places = asyncio.Semaphore(slots)
    self._numbers = itertools.count()
    self._background = background.Background()

  @classmethod
  def load(
    cls,
    policy: str | pathlib.Path,
    *,
    retriever: types.Retriever | str | pathlib.Path,
    config: config_lib.ExperimentConfig | None = None,
    corpus: str = "",
  ) -> Agent:
    """Loads a policy onto the local devices.

    Args:
      policy: a Hugging Face folder.
      retriever: a retriever, the URL of a retrieval server, or the folder of an
        index.
      config: the environment, limits, sampling and engine. None: those of the
        training run that exported the policy, if it is in a run's folder, and
        otherwise the paper's prompt with `loading.default_config`.
      corpus: the corpus that is searched; "" if there is only one.

    Raises:
      ValueError: the policy, the configuration or the retriever is unusable.
    """
    from anysearch_jax.agent import loading  # Imports JAX.

    loaded = loading.load(policy, retriever=retriever, config=config)
    return cls(
      loaded.engine,
      loaded.codec,
      loaded.retriever,
      config=loaded.config.episode,
      slots=loaded.config.engine.slots,
      corpus=corpus,
      scaffold=loaded.config.evaluation.scaffold,
      close=loaded.engine.close,
    )

  @property
  def examples(self) -> tuple[types.Question, ...]:
    """The known questions."""
    return tuple(self._known.values())

  def unknown_words(self, text: str) -> list[str]:
    """Returns the words of `text` that the policy's tokenizer cannot write."""
    codec = self._parts.codec
    return [
      word
      for word in text.split()
      if codec.decode(codec.encode(protocol.neutralise(word))).strip() != word
    ]

  def ask(
    self,
    question: str | types.Question,
    *,
    budget: budgets_lib.Assigned,
    seed: int = 42,
    deadline: float | None = None,
    max_tokens: int | None = None,
    sampling: config_lib.SamplingConfig | None = None,
  ) -> events.Reply:
    """Answers a question.

    Args:
      question: a text, or a question with its id and corpus. The random numbers
        depend on its id, which for a text that is not known is the text, and on
        `seed`.
      budget: what is allowed; a number is one of searches, >= 0.
      seed: equal questions, budgets and seeds give equal episodes; they are
        those of `launch.evaluate` for equal ids.
      deadline: seconds in which the reply is due. The policy is asked for its
        answer after three quarters of them.
      max_tokens: limit on the tokens that the policy writes, if it is lower
        than the configuration's.
      sampling: how tokens are drawn; None: as the engine does.

    Returns:
      The reply. If an engine or a retriever fails, it has no answer and says
      why.

    Raises:
      ValueError: an argument is out of range.
      background.ClosedError: the agent is closed, or was before the reply.
      limits.BusyError: no place was free before the deadline.
    """
    future = self._submit(
      question, limits_lib.Limits(budget, seed, deadline, max_tokens, sampling)
    )
    try:
      return future.result()
    finally:
      future.cancel()  # Ctrl-C also ends the episode.

  async def ask_async(
    self,
    question: str | types.Question,
    *,
    budget: budgets_lib.Assigned,
    seed: int = 42,
    deadline: float | None = None,
    max_tokens: int | None = None,
    sampling: config_lib.SamplingConfig | None = None,
    tell: Callable[[events.Event], None] = _nothing,
    pieces: bool = False,
  ) -> events.Reply:
    """As `ask`; cancelling the caller cancels the episode.

    Args:
      question, budget, seed, deadline, max_tokens, sampling: as for `ask`.
      tell: called with each event, in the agent's own thread, which waits for
        it. An exception of it ends the episode and is raised.
      pieces: whether reasoning is told while it is sampled; otherwise it is
        told once a turn.
    """
    limits = limits_lib.Limits(budget, seed, deadline, max_tokens, sampling)
    return await asyncio.wrap_future(
      self._submit(question, limits, tell, pieces=pieces)
    )

  def ask_many(
    self,
    questions: Sequence[str | types.Question],
    *,
    budgets: Sequence[budgets_lib.Assigned],
    seed: int = 42,
    deadline: float | None = None,
    max_tokens: int | None = None,
    sampling: config_lib.SamplingConfig | None = None,
  ) -> list[list[events.Reply]]:
    """Answers every question under every budget, all at once.

    Returns:
      For each question its replies, one for each budget.

    Raises:
      As `ask`; the other questions are then cancelled.
    """
    futures: list[list[concurrent.futures.Future[events.Reply]]] = []
    try:
      for question in questions:
        futures.append([])
        for budget in budgets:
          futures[-1].append(
            self._submit(
              question,
              limits_lib.Limits(budget, seed, deadline, max_tokens, sampling),
            )
          )
      # The first error ends the call, also while earlier questions are played.
      done, _ = concurrent.futures.wait(
        itertools.chain.from_iterable(futures),
        return_when=concurrent.futures.FIRST_EXCEPTION,
      )
      for future in done:
        future.result()
      return [[future.result() for future in row] for row in futures]
    finally:
      for future in itertools.chain.from_iterable(futures):
        future.cancel()

  def stream(
    self,
    question: str | types.Question,
    *,
    budget: budgets_lib.Assigned,
    seed: int = 42,
    deadline: float | None = None,
    max_tokens: int | None = None,
    sampling: config_lib.SamplingConfig | None = None,
  ) -> Generator[events.Event, None, None]:
    """Yields the events of a question as they happen; arguments as for `ask`.

    The episode starts with the first `next`. The last event is an `Answer`.
    Closing the generator cancels the episode.
    """
    limits = limits_lib.Limits(budget, seed, deadline, max_tokens, sampling)
    limits.check()
    limits_lib.check_question(question)

    def listen() -> Generator[events.Event, None, None]:
      told: queue.SimpleQueue[events.Event | None] = queue.SimpleQueue()
      future = self._submit(question, limits, told.put, pieces=True)
      future.add_done_callback(lambda _: told.put(None))
      try:
        while (event := told.get()) is not None:
          yield event
        future.result()
      finally:
        future.cancel()

    return listen()

  async def stream_async(
    self,
    question: str | types.Question,
    *,
    budget: budgets_lib.Assigned,
    seed: int = 42,
    deadline: float | None = None,
    max_tokens: int | None = None,
    sampling: config_lib.SamplingConfig | None = None,
  ) -> AsyncGenerator[events.Event, None]:
    """As `stream`; cancelling the caller cancels the episode."""
    told: mailbox.Mailbox[events.Event | None] = mailbox.Mailbox()
    limits = limits_lib.Limits(budget, seed, deadline, max_tokens, sampling)
    future = self._submit(question, limits, told.put, pieces=True)
    future.add_done_callback(lambda _: told.put(None))
    try:
      while True:
        for event in await told.take():
          if event is None:
            future.result()
            return
          yield event
    finally:
      future.cancel()

  async def search_async(self, query: str, *, k: int) -> list[types.Passage]:
    """Finds passages as the policy's searches do, without the policy.

    Args:
      query: what is searched for.
      k: the largest number of passages, >= 1.

    Returns:
      The passages, best first.

    Raises:
      ValueError: an argument is out of range, or the retriever answers the
        searches of a policy only.
      types.RetrievalError: the retriever cannot answer in time.
      background.ClosedError: the agent is closed, or was before the reply.
    """
    if not query.strip():
      raise ValueError("query: found no text, expected words to search for.")
    if k < 1:
      raise ValueError(f"k: found {k}, expected at least 1.")
    request = types.SearchRequest(query.strip(), k, self._corpus)
    return await asyncio.wrap_future(
      self._background.start(lambda: asking.search(request, self._parts))
    )

  def end_questions(self) -> None:
    """Refuses new questions, and ends those under way with a `ClosedError`."""
    self._background.end()

  def close(self) -> None:
    """Ends all questions, then closes the engine. May be called twice."""
    self._background.close(self._close)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def _submit(
    self,
    question: str | types.Question,
    limits: limits_lib.Limits,
    tell: Callable[[events.Event], None] = _nothing,
    *,
    pieces: bool = False,
  ) -> concurrent.futures.Future[events.Reply]:
    """Starts an episode on the private event loop."""
    limits.check()
    limits_lib.check_question(question)
    if isinstance(question, str):
      text = question.strip()
      question = self._known.get(text) or types.Question(
        text, text, (), self._corpus
      )
    asked = question
    return self._background.start(
      lambda: self._run(asked, limits, tell, pieces=pieces)
    )

  async def _run(
    self,
    question: types.Question,
    limits: limits_lib.Limits,
    tell: Callable[[events.Event], None],
    *,
    pieces: bool,
  ) -> events.Reply:
    """Waits for a place and plays the episode."""
    started = asyncio.get_running_loop().time()
    try:
      async with asyncio.timeout(limits.deadline):
        await self._places.acquire()
    except TimeoutError as error:
      raise limits_lib.BusyError(
        f"All {self.slots} places were taken for the {limits.deadline:g} "
        "seconds of the question's deadline; ask later."
      ) from error
    try:
      return await asking.ask(
        question,
        limits.applied(self._parts),
        budget=limits.budget,
        scaffold=self._scaffold,
        address=harness.address(
          question.id, seed=limits.seed, variant=next(self._numbers)
        ),
        started=started,
        deadline=limits.deadline,
        sampling=limits.sampling,
        tell=tell,
        pieces=pieces,
      )
    finally:
      self._places.release()
