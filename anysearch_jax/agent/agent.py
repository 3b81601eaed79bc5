"""The agent: a policy and its retriever, which answer questions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import queue
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.config import settings
from anysearch_jax.environment import protocol
from anysearch_jax.host import loop, turns
from anysearch_jax.methods import systems
from anysearch_jax.rollout import driver, episode_state, searching

if TYPE_CHECKING:
  from anysearch_jax.rollout import endpoints

_YEARS = 1e9  # Seconds; a deadline beyond it is a mistake.


class ClosedError(RuntimeError):
  """The agent is closed, or was closed before the question was answered."""


class BusyError(RuntimeError):
  """A question got no place before its deadline."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a question may cost, and its draws.

  Attributes:
    budget: what is allowed; a number is one of searches, >= 0.
    seed: the random numbers depend on it and on the question's id. Equal
      questions, budgets and seeds give equal episodes; they are those of
      `launch.evaluate` for equal ids.
    deadline: seconds in which the reply is due. The policy is asked for its
      answer after three quarters of them.
    max_tokens: limit on the tokens that the policy writes, if it is lower than
      the configuration's.
    sampling: how tokens are drawn; None: as the engine does.

  Raises:
    ValueError: a value is out of range.
  """

  budget: budgets_lib.Assigned
  seed: int = 42
  deadline: float | None = None
  max_tokens: int | None = None
  sampling: config_lib.SamplingConfig | None = None

  def __post_init__(self):
    counts = {"budget": 0, "seed": 0, "max_tokens": 1}
    if isinstance(self.budget, budgets_lib.Budget):
      del counts["budget"]  # It checks itself.
    if self.max_tokens is None:
      del counts["max_tokens"]
    for name, least in counts.items():
      value = getattr(self, name)
      if type(value) is not int or not least <= value < 2**32:
        raise ValueError(
          f"{name}: found {value!r}, expected a whole number from {least} to "
          "2^32 - 1."
        )
    seconds = self.deadline
    number = type(seconds) in (int, float)
    if seconds is not None and not (number and 0 < seconds <= _YEARS):
      raise ValueError(
        f"deadline: found {seconds!r}, expected seconds above 0, or None."
      )
    if self.sampling is not None:
      settings.check(self.sampling, "sampling")

  def applied(
    self, config: config_lib.EpisodeConfig
  ) -> config_lib.EpisodeConfig:
    """Returns the configuration with the limit of tokens.

    The room for the answer shrinks with it, to a half at most.
    """
    most = self.max_tokens
    if most is None or most >= config.max_generated:
      return config
    room = min(config.answer_room, most // 2)
    return dataclasses.replace(config, max_generated=most, answer_room=room)


class Agent(contextlib.AbstractContextManager["Agent"]):
  """Answers questions with a policy that searches under a budget.

  All methods may be called from any thread and any event loop at once: the
  questions run in the event loop of the process, where the engine samples them
  together and equal searches are made once. A question beyond `slots` waits for
  a place.

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
    passages: how many are searched; 0 if that is unknown.
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
    passages: int = 0,
    close: Callable[[], None] = lambda: None,
  ):
    if slots < 1:
      raise ValueError(f"slots: found {slots}, expected at least 1.")
    searching.attach(retriever, engine, codec)
    self.engine, self.slots, self.passages = engine, slots, passages
    self._parts = driver.EpisodeParts(
      engine, retriever, config, codec, systems.of_episode(config)
    )
    self._scaffold = scaffold
    self._known = {question.text: question for question in known}
    self._corpus = corpus
    self._places = asyncio.Semaphore(slots)
    self._numbers = itertools.count()
    self._process = os.getpid()
    self._close: Callable[[], None] | None = close
    self._scope = loop.Scope(
      lambda: ClosedError("The agent is closed; load another one.")
    )

  @classmethod
  def load(
    cls,
    policy: str | pathlib.Path | endpoints.Endpoint,
    *,
    retriever: types.Retriever | str | pathlib.Path,
    config: config_lib.ExperimentConfig | None = None,
    corpus: str = "",
  ) -> Agent:
    """Loads a policy onto the local devices, or asks one elsewhere.

    Args:
      policy: a Hugging Face folder, or a model behind an address.
      retriever: a retriever, the URL of a retrieval server, or the folder of
        an index.
      config: the environment, limits, sampling and engine. None: those of the
        training run that exported the policy, if it is in a run's folder, and
        otherwise the paper's prompt with `loading.default_config`, or
        `endpoints.default_config` for a model behind an address.
      corpus: the corpus that is searched; "" if there is only one.

    Raises:
      ValueError: the policy, the configuration or the retriever is unusable.
      types.EngineError, types.RetrievalError: a server cannot be used.
    """
    from anysearch_jax.agent import loading  # Imports JAX.

    parts = loading.load(policy, retriever=retriever, config=config)
    return cls(**parts, corpus=corpus)

  @property
  def examples(self) -> tuple[types.Question, ...]:
    """The known questions."""
    return tuple(self._known.values())

  @property
  def cites(self) -> bool:
    """Whether answers cite the passages that were found, as `[2]`."""
    return self._parts.environment.cites

  def refusal(self, text: str) -> str | None:
    """Returns why a question is not worth asking, or None.

    A policy of the generated world has one token for each word that it knows,
    and one for all others. Asked in English, it would answer with noise.
    Tokenizers of real models write every word.
    """
    codec = self._parts.codec
    unknown_id = getattr(getattr(codec, "hf", None), "unk_token_id", None)
    if unknown_id is None:
      return None
    words = (protocol.neutralise(w, codec.control_tokens) for w in text.split())
    unknown = [word for word in words if unknown_id in codec.encode(word)]
    if not unknown:
      return None
    shown = ", ".join(map(repr, dict.fromkeys(unknown[:5])))
    asked = " or ".join(map(repr, list(self._known)[:2]))
    return (
      f"question: the policy has no word for {shown}, so it cannot answer; "
      f"expected words of its training{f', as in {asked}' if asked else ''}, "
      "or a model that reads any text (docs/serving.md)."
    )

  def ask(
    self,
    question: str | types.Question,
    *,
    budget: budgets_lib.Assigned,
    **limits: Any,
  ) -> events.Reply:
    """Answers a question; a reply without an answer says why.

    Args:
      question: a text, or a question with its id and corpus. A text that is not
        known is its own id.
      budget: what is allowed; a number is one of searches, >= 0.
      limits: seed, deadline, max_tokens and sampling, see `Limits`.

    Raises:
      ValueError: an argument is out of range.
      ClosedError: the agent is closed, or was before the reply.
      BusyError: no place was free before the deadline.
    """
    return self._submit(question, Limits(budget, **limits)).wait()

  async def ask_async(
    self,
    question: str | types.Question,
    *,
    budget: budgets_lib.Assigned,
    tell: Callable[[events.Event], None] = lambda event: None,
    pieces: bool = False,
    **limits: Any,
  ) -> events.Reply:
    """As `ask`; cancelling the caller cancels the episode.

    `tell` is called with each event, in the thread of the event loop
    (`host.loop`), which waits for it; what it raises ends the episode. With
    `pieces`, reasoning is told while it is sampled, otherwise once a turn.
    """
    return await asyncio.wrap_future(
      self._submit(question, Limits(budget, **limits), tell, pieces=pieces)
    )

  def ask_many(
    self,
    questions: str | Sequence[str | types.Question],
    *,
    budgets: budgets_lib.Assigned | Sequence[budgets_lib.Assigned],
    **limits: Any,
  ) -> list[list[events.Reply]]:
    """Returns for each question its replies, one for each budget, all at once.

    Raises:
      As `ask`; the other questions are then cancelled.
    """
    works: list[loop.Work[events.Reply]] = []
    questions = [questions] if isinstance(questions, str) else questions
    if isinstance(budgets, int | budgets_lib.Budget):
      budgets = [budgets]
    try:
      for question, budget in itertools.product(questions, budgets):
        works.append(self._submit(question, Limits(budget, **limits)))
      # The first error ends the call, also while earlier questions are played.
      first = concurrent.futures.FIRST_EXCEPTION
      for work in concurrent.futures.wait(works, return_when=first).done:
        work.result()
      replies = iter([work.result() for work in works])
      return [[next(replies) for _ in budgets] for _ in questions]
    finally:
      for work in works:
        work.cancel()

  def stream(
    self,
    question: str | types.Question,
    *,
    budget: budgets_lib.Assigned,
    **limits: Any,
  ) -> Generator[events.Event, None, None]:
    """Yields the events of a question as they happen; arguments as for `ask`.

    The episode starts with the first `next`, and ends with an `Answer` or when
    the generator is closed.
    """
    asked, within = self._question(question), Limits(budget, **limits)

    def listen() -> Generator[events.Event, None, None]:
      told: queue.SimpleQueue[events.Event | None] = queue.SimpleQueue()
      work = self._submit(asked, within, told.put, pieces=True)
      work.add_done_callback(lambda _: told.put(None))
      try:
        while (event := told.get()) is not None:
          yield event
        work.result()
      finally:
        work.cancel()

    return listen()

  async def stream_async(
    self,
    question: str | types.Question,
    *,
    budget: budgets_lib.Assigned,
    **limits: Any,
  ) -> AsyncGenerator[events.Event, None]:
    """As `stream`; cancelling the caller cancels the episode."""
    told: asyncio.Queue[events.Event | None] = asyncio.Queue()
    put = loop.putting(told)
    work = self._submit(question, Limits(budget, **limits), put, pieces=True)
    work.add_done_callback(lambda _: put(None))
    try:
      while (event := await told.get()) is not None:
        yield event
      work.result()
    finally:
      work.cancel()

  async def search_async(self, query: str, *, k: int) -> list[types.Passage]:
    """Returns at most `k` passages, best first, as the policy's searches do.

    Raises:
      ValueError: the retriever answers the searches of a policy only.
      types.RetrievalError: the retriever cannot answer in time.
      ClosedError: the agent is closed, or was before the reply.
    """
    request = types.SearchRequest(query.strip(), k, self._corpus)
    return await asyncio.wrap_future(self._start(self._search(request)))

  def end_questions(self) -> None:
    """Refuses new questions, and ends those under way with a `ClosedError`."""
    self._scope.stop()

  def close(self) -> None:
    """Ends all questions, then closes the engine. May be called twice.

    It does nothing in a forked process, which has neither the event loop nor
    what is to be released.
    """
    close, self._close = self._close, None
    if close is None or os.getpid() != self._process:
      return
    loop.ended(self._scope.stop())
    close()

  def __exit__(self, *error: object) -> None:
    self.close()

  def _start(self, coroutine) -> loop.Work:
    """Starts a coroutine; raises ClosedError if the agent is not usable."""
    if os.getpid() != self._process:
      coroutine.close()
      raise ClosedError(
        "The agent was made in another process; load one in this process."
      )
    return loop.Work(coroutine, self._scope)

  def _question(self, question: str | types.Question) -> types.Question:
    """Returns a question; raises ValueError if it has no text."""
    given = getattr(question, "text", question)
    if not isinstance(given, str) or not (text := given.strip()):
      raise ValueError("question: found no text, expected a question.")
    if not isinstance(question, str):
      return question
    unknown = types.Question(text, text, (), self._corpus)
    return self._known.get(text, unknown)

  def _submit(
    self,
    question: str | types.Question,
    limits: Limits,
    tell: Callable[[events.Event], None] = lambda event: None,
    *,
    pieces: bool = False,
  ) -> loop.Work[events.Reply]:
    asked = self._question(question)
    return self._start(self._play(asked, limits, tell, pieces))

  async def _play(
    self,
    question: types.Question,
    limits: Limits,
    tell: Callable[[events.Event], None],
    pieces: bool,
  ) -> events.Reply:
    """Waits for a place, plays the episode and tells what happens in it."""
    clock = asyncio.get_running_loop().time
    started = clock()
    try:
      async with asyncio.timeout(limits.deadline):
        await self._places.acquire()
    except TimeoutError as error:
      raise BusyError(
        f"All {self.slots} places were taken for the {limits.deadline:g} "
        "seconds of the question's deadline; ask later."
      ) from error
    config = limits.applied(self._parts.config)
    env = self._parts.environment
    told = _Told(self._parts.engine, self._parts.codec, limits, tell, pieces)
    try:
      trajectory = await driver.run_episode(
        question,
        dataclasses.replace(self._parts, engine=told, config=config),
        budget=limits.budget,
        scaffold=self._scaffold,
        address=types.evaluation_address(
          question.id, seed=limits.seed, variant=next(self._numbers)
        ),
        started=started,
        deadline=limits.deadline or math.inf,
        watch=told.watch,
      )
    finally:
      self._places.release()
    cited = env.cited(trajectory)
    reason = trajectory.reason or _NO_ANSWER
    reply = events.Reply(
      answer=cited.answer,
      outcome=trajectory.outcome,
      reason=reason if cited.answer is None else "",
      searches=trajectory.searches,
      documents=tuple(o.passages for o in trajectory.observations),
      tokens=trajectory.written_tokens,
      seconds=clock() - started,
      trajectory=trajectory,
      citations=cited.citations,
      refused_citations=cited.refused,
    )
    tell(events.Answer(reply))
    return reply

  async def _search(self, request: types.SearchRequest) -> list[types.Passage]:
    seconds = self._parts.config.search_deadline
    limit = turns.Limit(seconds, driver.LONGEST_WAIT)
    try:
      async with limit:
        return list(await self._parts.retriever.search(request))
    except TimeoutError as error:
      raise types.RetrievalError(f"The search failed: {limit.why()}") from error


_NO_ANSWER = (
  "The model's last turn had neither a search that its budget allows nor an "
  "answer."
)


@dataclasses.dataclass
class _Told:
  """The engine of one episode, which draws and tells as a question asks.

  `watch` tells what the episode's states have besides; see `driver.play`.
  """

  engine: types.Engine
  codec: types.TextCodec
  limits: Limits
  tell: Callable[[events.Event], None]
  pieces: bool
  used: int = -1  # Searches that were told of.

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """Samples a turn, and tells its reasoning."""
    told = events.Reasoning(
      self.codec.decode, lambda piece: self.tell(events.Thinking(piece))
    )
    if (s := self.limits.sampling) is not None:
      request = dataclasses.replace(
        request, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k
      )
    if self.pieces:
      request = dataclasses.replace(request, on_tokens=told.add)
    turn = await self.engine.generate(request)
    told.end(turn.text)
    return turn

  def release(self, address: types.Address) -> None:
    self.engine.release(address)

  def watch(self, state: episode_state.Episode) -> None:
    """Tells the searches of an episode, and what they found."""
    if state.searches_used > self.used:
      for last in state.observations[-1:]:  # What had no room was not shown.
        self.tell(
          events.Found(state.searches_used, last.passages, last.numbers)
        )
      total = budgets_lib.of(self.limits.budget).searches
      self.tell(events.Budget(state.searches_used, total))
      self.used = state.searches_used
    if isinstance(state.request, types.SearchRequest):
      self.tell(events.Searching(state.searches_used + 1, state.request.query))
