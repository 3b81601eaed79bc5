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
from collections.abc import (
  AsyncGenerator,
  Callable,
  Collection,
  Generator,
  Sequence,
)
from typing import TYPE_CHECKING, Any

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.config import settings
from anysearch_jax.environment import protocol
from anysearch_jax.host import loop, turns
from anysearch_jax.methods import systems
from anysearch_jax.rollout import (
  driver,
  episode_state,
  searching,
  short_prompts,
)

if TYPE_CHECKING:
  from anysearch_jax.rollout import endpoints

# Seconds, about 30 years. A longer deadline is a mistake, such as milliseconds.
_LONGEST_DEADLINE = 1e9


class ClosedError(RuntimeError):
  """The agent is closed, or was closed before the question was answered."""


class BusyError(RuntimeError):
  """All slots were taken until the question's deadline."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a question may cost, and how its tokens are sampled.

  Attributes:
    budget: what the episode may spend; a number counts searches, >= 0.
    seed: seeds the random numbers, together with the question's id, in
      [0, 2^32). Equal questions, budgets and seeds give equal episodes, the
      same as `launch.evaluate` plays for equal ids.
    deadline: seconds until the reply is due, > 0; None: no deadline. After
      three quarters of them the policy is asked for its answer.
    max_tokens: limit on the tokens that the policy writes, >= 1, if it is lower
      than the configuration's.
    sampling: temperature, top-p and top-k; None: those of the engine.

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
    is_number = type(seconds) in (int, float)
    if seconds is not None and not (
      is_number and 0 < seconds <= _LONGEST_DEADLINE
    ):
      raise ValueError(
        f"deadline: found {seconds!r}, expected seconds above 0, or None."
      )
    if self.sampling is not None:
      settings.check(self.sampling, "sampling")

  def applied(
    self, config: config_lib.EpisodeConfig
  ) -> config_lib.EpisodeConfig:
    """Returns the configuration with this limit of tokens.

    The room reserved for the answer is then at most half of the limit.
    """
    limit = self.max_tokens
    if limit is None or limit >= config.max_generated:
      return config
    room = min(config.answer_room, limit // 2)
    return dataclasses.replace(config, max_generated=limit, answer_room=room)


class Agent(contextlib.AbstractContextManager["Agent"]):
  """Answers questions with a policy that searches under a budget.

  All methods may be called from any thread and any event loop at once. The
  questions run in the event loop of the process, where the engine samples them
  in one batch and equal searches are made once. When `slots` questions are
  running, the next one waits.

  Args:
    engine: samples the policy; the argument `close` must close it.
    codec: the policy's tokenizer.
    retriever: answers the searches; a `searching.BatchingRetriever` answers
      many at once.
    config: limits of an episode; its `prompts` name the environment.
    slots: number of questions that run at the same time, >= 1.
    examples: questions that are recognised by their text, with their ids and
      corpora. Users of a policy of the generated world, whose vocabulary nobody
      knows, choose from them.
    corpus: the corpus of all other questions; "" if there is only one.
    scaffold: whether the environment states the budget before every turn.
    passages: number of passages in the index; 0 if it is unknown.
    close: called once, when the agent is closed.

  Attributes:
    engine, slots, passages: the arguments.
  """

  def __init__(
    self,
    engine: types.Engine,
    codec: types.TextCodec,
    retriever: types.Retriever,
    *,
    config: config_lib.EpisodeConfig,
    slots: int,
    examples: Sequence[types.Question] = (),
    corpus: str = "",
    scaffold: bool = False,
    passages: int = 0,
    close: Callable[[], None] = lambda: None,
  ):
    if slots < 1:
      raise ValueError(f"slots: found {slots}, expected at least 1.")
    searching.attach(retriever, engine, codec)
    self.engine = engine
    self.slots = slots
    self.passages = passages
    self._parts = driver.EpisodeParts(
      engine, retriever, config, codec, systems.of_episode(config)
    )
    self._scaffold = scaffold
    self._examples = {question.text: question for question in examples}
    self._corpus = corpus
    self._free_slots = asyncio.Semaphore(slots)
    # Distinguishes the cache entries of equal questions that run at a time.
    self._variants = itertools.count()
    self._process_id = os.getpid()
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
    plugins: Collection[str] = (),
  ) -> Agent:
    """Loads a policy onto the local devices, or connects to a served one.

    Args:
      policy: a Hugging Face folder, or a model behind an address.
      retriever: a retriever, the URL of a retrieval server, or the folder of
        an index.
      config: the environment, limits, sampling and engine. None: the
        configuration of the training run, if the policy's folder is inside a
        run's folder. Otherwise None is `loading.default_config`, which has the
        paper's prompt, or `endpoints.default_config` for a model behind an
        address.
      corpus: the corpus that is searched; "" if there is only one.
      plugins: code of your own that the stored configuration of a run may name,
        such as `file.py:NAME`; it runs. Other code that it names is refused.

    Returns:
      An agent, which the caller closes.

    Raises:
      ValueError: the policy, the configuration or the retriever is unusable.
      types.EngineError, types.RetrievalError: a server cannot be used.
    """
    from anysearch_jax.agent import loading  # Imports JAX.

    parts = loading.load(
      policy, retriever=retriever, config=config, plugins=plugins
    )
    return cls(**parts, corpus=corpus)

  @property
  def examples(self) -> tuple[types.Question, ...]:
    """Questions that can be asked, if the agent was given some."""
    return tuple(self._examples.values())

  @property
  def cites(self) -> bool:
    """Whether answers cite passages by numbers, as `[2]`."""
    return self._parts.environment.cites

  @property
  def history_characters(self) -> int:
    """The most characters of a question and the turns before it.

    They fill half of the policy's context, at four characters a token. A policy
    that knows only the words of its world reads single questions: 0.
    """
    if self.refusal("user: assistant: question:") is not None:
      return 0
    return 2 * self._parts.config.max_context

  def refusal(self, text: str) -> str | None:
    """Returns why the policy cannot read a question; None if it can.

    A policy of the generated world has one token for each word that it knows,
    and a single one for all others: it would answer an English question with
    noise. Tokenizers of real models encode every word.

    Args:
      text: the question.
    """
    codec = self._parts.codec
    unknown_id = getattr(getattr(codec, "hf", None), "unk_token_id", None)
    if unknown_id is None:
      return None
    unknown = []
    for word in text.split():
      word = protocol.neutralise(word, codec.control_tokens)
      if unknown_id in codec.encode(word):
        unknown.append(word)
    if not unknown:
      return None
    words = ", ".join(map(repr, dict.fromkeys(unknown[:5])))
    examples = " or ".join(map(repr, list(self._examples)[:2]))
    hint = f", as in {examples}" if examples else ""
    return (
      f"question: the policy has no word for {words}, so it cannot answer; "
      f"expected words of its training{hint}, or a model that reads any text "
      "(docs/serving.md)."
    )

  def ask(
    self,
    question: str | types.Question,
    *,
    budget: budgets_lib.Assigned,
    **limits: Any,
  ) -> events.Reply:
    """Answers a question.

    Args:
      question: a text, or a question with its id and corpus. The text of one of
        the `examples` stands for that question; any other text is its own id.
      budget: what the episode may spend; a number counts searches, >= 0.
      **limits: `seed`, `deadline`, `max_tokens` and `sampling` of `Limits`.

    Returns:
      The reply. Without an answer, its `reason` says why.

    Raises:
      ValueError: an argument is out of range.
      ClosedError: the agent is closed, or was closed before the reply.
      BusyError: all slots were taken until the deadline.
    """
    return self._submit(question, Limits(budget, **limits)).wait()

  async def ask_async(
    self,
    question: str | types.Question,
    *,
    budget: budgets_lib.Assigned,
    tell: Callable[[events.Event], None] = lambda event: None,
    pieces: bool = False,
    drafts: bool = False,
    **limits: Any,
  ) -> events.Reply:
    """Answers a question in a coroutine; cancelling it cancels the episode.

    Args:
      question: as for `ask`.
      budget: as for `ask`.
      tell: called with each event, in the thread of the event loop
        (`host.loop`), which waits for it. An error that it raises ends the
        episode.
      pieces: whether reasoning is told while it is sampled; otherwise it is
        told once a turn.
      drafts: whether, with `pieces`, the text of an answer is told too.
      **limits: as for `ask`.

    Returns:
      The reply, as `ask`.

    Raises:
      Exception: the errors of `ask`, or an error that `tell` raised.
    """
    return await asyncio.wrap_future(
      self._submit(
        question, Limits(budget, **limits), tell, pieces=pieces, drafts=drafts
      )
    )

  def ask_many(
    self,
    questions: str | Sequence[str | types.Question],
    *,
    budgets: budgets_lib.Assigned | Sequence[budgets_lib.Assigned],
    **limits: Any,
  ) -> list[list[events.Reply]]:
    """Answers each question under each budget, all of them at the same time.

    Args:
      questions: one or more, each as for `ask`.
      budgets: one or more, each as for `ask`.
      **limits: as for `ask`; they hold for every episode.

    Returns:
      For each question a list of its replies, in the order of the budgets.

    Raises:
      Exception: the first error, as of `ask`; it cancels the other episodes.
    """
    works: list[loop.Work[events.Reply]] = []
    if isinstance(questions, str):
      questions = [questions]
    if isinstance(budgets, int | budgets_lib.Budget):
      budgets = [budgets]
    try:
      for question, budget in itertools.product(questions, budgets):
        works.append(self._submit(question, Limits(budget, **limits)))
      # The first error ends the call, also while earlier questions are played.
      stop_at = concurrent.futures.FIRST_EXCEPTION
      for work in concurrent.futures.wait(works, return_when=stop_at).done:
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
    """Yields the events of a question as they happen.

    The episode starts with the first `next`. It ends with an `Answer`, or when
    the generator is closed.

    Args:
      question: as for `ask`.
      budget: as for `ask`.
      **limits: as for `ask`.

    Yields:
      Reasoning in pieces, searches and their passages; the reply is last.

    Raises:
      Exception: the errors of `ask`.
    """
    # Wrong arguments are refused here, not at the first `next`.
    checked_question = self._question(question)
    checked_limits = Limits(budget, **limits)

    def listen() -> Generator[events.Event, None, None]:
      pending: queue.SimpleQueue[events.Event | None] = queue.SimpleQueue()
      work = self._submit(
        checked_question, checked_limits, pending.put, pieces=True
      )
      work.add_done_callback(lambda _: pending.put(None))
      try:
        while (event := pending.get()) is not None:
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
    """Yields the events of `stream`; cancelling the caller ends the episode.

    Args:
      question: as for `ask`.
      budget: as for `ask`.
      **limits: as for `ask`.

    Raises:
      Exception: the errors of `ask`.
    """
    pending: asyncio.Queue[events.Event | None] = asyncio.Queue()
    put = loop.thread_safe_put(pending)
    work = self._submit(question, Limits(budget, **limits), put, pieces=True)
    work.add_done_callback(lambda _: put(None))
    try:
      while (event := await pending.get()) is not None:
        yield event
      work.result()
    finally:
      work.cancel()

  async def search_async(self, query: str, *, k: int) -> list[types.Passage]:
    """Searches as the policy does.

    Args:
      query: words to search for.
      k: the largest number of passages, >= 1.

    Returns:
      At most `k` passages, best first.

    Raises:
      ValueError: the retriever answers only searches within an episode.
      types.RetrievalError: the retriever cannot answer in time.
      ClosedError: the agent is closed, or was closed before the reply.
    """
    request = types.SearchRequest(query.strip(), k, self._corpus)
    return await asyncio.wrap_future(self._start(self._search(request)))

  def end_questions(self) -> None:
    """Refuses new questions, and ends running ones with a `ClosedError`."""
    self._scope.stop()

  def close(self) -> None:
    """Ends all questions, then closes the engine; a second call does nothing.

    A forked process has neither the event loop nor the engine, so the method
    does nothing there.
    """
    close = self._close
    self._close = None
    if close is None or os.getpid() != self._process_id:
      return
    loop.wait_for_cleanup(self._scope.stop())
    close()

  def __exit__(self, *error: object) -> None:
    self.close()

  def _start(self, coroutine) -> loop.Work:
    """Starts a coroutine; raises ClosedError if the agent is not usable."""
    if os.getpid() != self._process_id:
      coroutine.close()
      raise ClosedError(
        "The agent was made in another process; load one in this process."
      )
    return loop.Work(coroutine, self._scope)

  def _question(self, question: str | types.Question) -> types.Question:
    """Returns a question; raises ValueError if it has no text."""
    text = getattr(question, "text", question)
    if not isinstance(text, str) or not text.strip():
      raise ValueError("question: found no text, expected a question.")
    if not isinstance(question, str):
      return question
    text = text.strip()
    new_question = types.Question(text, text, (), self._corpus)
    return self._examples.get(text, new_question)

  def _submit(
    self,
    question: str | types.Question,
    limits: Limits,
    tell: Callable[[events.Event], None] = lambda event: None,
    *,
    pieces: bool = False,
    drafts: bool = False,
  ) -> loop.Work[events.Reply]:
    return self._start(
      self._play(self._question(question), limits, tell, pieces, drafts)
    )

  async def _play(
    self,
    question: types.Question,
    limits: Limits,
    tell: Callable[[events.Event], None],
    pieces: bool,
    drafts: bool,
  ) -> events.Reply:
    """Waits for a free slot, then plays the episode and tells its events."""
    clock = asyncio.get_running_loop().time
    started = clock()
    try:
      async with asyncio.timeout(limits.deadline):
        await self._free_slots.acquire()
    except TimeoutError as error:
      raise BusyError(
        f"All {self.slots} places were taken for the {limits.deadline:g} "
        "seconds of the question's deadline; ask later."
      ) from error
    config = limits.applied(self._parts.config)
    env = self._parts.environment
    engine = _TellingEngine(
      self._parts.engine, self._parts.codec, limits, tell, pieces, drafts
    )
    try:
      trajectory = await driver.run_episode(
        question,
        dataclasses.replace(self._parts, engine=engine, config=config),
        budget=limits.budget,
        scaffold=self._scaffold,
        address=types.evaluation_address(
          question.id, seed=limits.seed, variant=next(self._variants)
        ),
        started=started,
        deadline=limits.deadline or math.inf,
        watch=engine.watch,
      )
    finally:
      self._free_slots.release()
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
class _TellingEngine:
  """The engine of one episode: samples by its limits and tells the reasoning.

  `watch` tells the searches, which are in the episode's states; `driver.play`
  calls it with each state.

  Attributes:
    told_searches: the charged searches whose `Budget` was told; -1 before the
      first one, because the whole budget is told too.
  """

  engine: types.Engine
  codec: types.TextCodec
  limits: Limits
  tell: Callable[[events.Event], None]
  pieces: bool
  drafts: bool
  told_searches: int = -1

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """Samples a turn, and tells its reasoning."""
    sampling = self.limits.sampling
    if sampling is not None:
      request = dataclasses.replace(
        request,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
      )
    if request.stop == short_prompts.STOP:
      # The reply is a query or the answer, which other events tell.
      return await self.engine.generate(request)
    reasoning = events.Reasoning(
      self.codec.decode,
      tell=lambda piece: self.tell(events.Thinking(piece)),
      draft=self._tell_draft if self.drafts else None,
    )
    if self.pieces:
      request = dataclasses.replace(request, on_tokens=reasoning.add)
    turn = await self.engine.generate(request)
    reasoning.end(turn.text)
    return turn

  def _tell_draft(self, piece: str) -> None:
    self.tell(events.Drafting(piece))

  def release(self, address: types.Address) -> None:
    self.engine.release(address)

  def watch(self, state: episode_state.Episode) -> None:
    """Tells the searches of an episode, and the passages that they showed."""
    if state.searches_used > self.told_searches:
      if state.observations:  # Passages that had no room are not in it.
        last = state.observations[-1]
        self.tell(
          events.Found(state.searches_used, last.passages, last.numbers)
        )
      total = budgets_lib.of(self.limits.budget).searches
      self.tell(events.Budget(state.searches_used, total))
      self.told_searches = state.searches_used
    if isinstance(state.request, types.SearchRequest):
      self.tell(events.Searching(state.searches_used + 1, state.request.query))
