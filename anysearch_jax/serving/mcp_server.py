"""An agent as a server of the Model Context Protocol.

The tool `answer` asks the policy under a budget, the tool `search` asks the
retriever alone, and the trajectory of each answer is a resource.

Specification: https://modelcontextprotocol.io/specification
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, NotRequired

import pydantic
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError, ToolError
from mcp_types import ToolAnnotations

# Before Python 3.12, pydantic refuses `typing.TypedDict`.
from typing_extensions import TypedDict

from anysearch_jax import budgets, types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import events
from anysearch_jax.environment import citations, records
from anysearch_jax.host import loop, openai_requests
from anysearch_jax.serving import fields

_log = logging.getLogger(__name__)
_URI = "anysearch://trajectories/"
_MAX_PASSAGES = 100  # Of a call of `search`.
_LISTED_EXAMPLES = 5  # In the instructions to a client's model.
_POLL_SECONDS = 0.05
_READS_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=True)


class Source(TypedDict):
  """A passage that a search showed to the policy, with its place if known."""

  id: str
  title: str
  path: NotRequired[str]
  page: NotRequired[int]
  heading: NotRequired[str]
  number: NotRequired[int]


class Query(pydantic.BaseModel):
  """A search of the policy, with the passages that it showed, best first."""

  query: str
  sources: list[Source]


class Answered(pydantic.BaseModel):
  """The result of the tool `answer`."""

  answer: str | None = pydantic.Field(
    description="null if the policy gave none; `reason` then says why."
  )
  outcome: str = pydantic.Field(
    description="answered; invalid or truncated if the policy gave no answer; "
    "failed if the model or the search engine was unavailable."
  )
  reason: str = pydantic.Field(description="Empty if there is an answer.")
  citations: list[Source] = pydantic.Field(
    description="What a mark such as [2] in the answer refers to."
  )
  refused_citations: list[int] = pydantic.Field(
    description="Numbers that were cited and never shown; they are removed."
  )
  searches: int = pydantic.Field(description="Searches that were made.")
  tokens: int = pydantic.Field(description="Tokens that the policy wrote.")
  seconds: float
  queries: list[Query]
  trajectory: str = pydantic.Field(
    description="URI of the resource with the whole episode, as JSON."
  )


class Passage(Source):
  """A passage that the tool `search` found."""

  text: str


class Found(pydantic.BaseModel):
  """The result of the tool `search`, best passage first."""

  passages: list[Passage]


class _Server(MCPServer[Any]):
  """A server that refuses arguments in a sentence of ours, not of pydantic."""

  async def call_tool(
    self,
    name: str,
    arguments: dict[str, Any],
    context: Context | None = None,
  ) -> Any:
    """Calls a tool.

    Args:
      name: the tool's name.
      arguments: what the client sent.
      context: the call, if a client makes it.

    Raises:
      ToolError: an argument is invalid, or the tool failed.
    """
    try:
      return await super().call_tool(name, arguments, context)
    except ToolError as error:
      cause = error.__cause__
      if not isinstance(cause, pydantic.ValidationError):
        raise
      raise ToolError(openai_requests.refusal(cause).detail) from cause


@dataclasses.dataclass
class Service:
  """The tools and resources of one agent.

  Attributes:
    agent: the agent; calls wait while it is being loaded. The caller closes it.
    version: the version that clients see.
    examples: questions that can be asked, if the policy cannot read others.
    max_budget: largest budget of a question.
    passages: default number of passages that `search` finds.
    deadline: seconds in which an answer is due; None: no deadline.
    max_replies: number of the last trajectories, which can be read; older ones
      are dropped.
    prices: prices by which a budget of dollars is charged.
    server: the protocol's server, over any transport.
    locked: False, because clients need no key.
  """

  locked: ClassVar[bool] = False
  agent: concurrent.futures.Future[agent_lib.Agent]
  _: dataclasses.KW_ONLY
  version: str
  examples: Sequence[types.Question] = ()
  max_budget: int = 10
  passages: int = 3
  deadline: float | None = None
  max_replies: int = 256
  prices: budgets.Prices = budgets.NO_CAPS.prices

  def __post_init__(self):
    # The last replies. Their names cannot be guessed: a client reads only the
    # trajectories of its own answers.
    self._replies: dict[str, events.Reply] = {}
    self._under_way = 0
    self.server = _Server(
      "anysearch",
      title="AnySearch",
      version=self.version,
      instructions=_instructions(self.examples),
      log_level="WARNING",
    )
    self.server.add_tool(
      self.answer,
      name="answer",
      title="Answer a question by searching",
      description="Answers a question: a policy reasons and searches, at most "
      f"`budget` times (0 to {self.max_budget}). A larger budget finds more "
      "and takes longer. Tokens, dollars and seconds can be capped too, as in "
      "searches=3,tokens=256,seconds=20. Each search is reported as progress.",
      annotations=_READS_ONLY,
    )
    self.server.add_tool(
      self.search,
      name="search",
      title="Search passages",
      description="Returns the `k` passages that match a query best (1 to "
      f"{_MAX_PASSAGES}, default {self.passages}), without reasoning.",
      annotations=_READS_ONLY,
    )
    self.server.resource(
      _URI + "{name}",
      name="trajectory",
      title="Trajectory of an answer",
      description="What the policy wrote, its searches and the passages: the "
      f"last {self.max_replies} answers are kept.",
      mime_type="application/json",
    )(self.trajectory)

  def on_closed(self, reason: str) -> None:
    """Does nothing: connections that were closed early are not counted."""

  async def drain(self, seconds: float) -> None:
    """Waits at most `seconds` for the calls that are under way."""
    deadline = time.monotonic() + seconds
    while self._under_way and time.monotonic() < deadline:
      await asyncio.sleep(_POLL_SECONDS)

  async def answer(
    self,
    question: Annotated[
      str, pydantic.Field(description="One question, complete in itself.")
    ],
    budget: Annotated[
      int | str,
      pydantic.Field(
        description="Searches allowed, or such as searches=3,tokens=256."
      ),
    ],
    context: Context,
  ) -> Answered:
    """Answers a question; the arguments are described to clients.

    Args:
      question: one question, complete in itself.
      budget: number of searches, or caps such as searches=3,tokens=256.
      context: the call, which reports each search as progress.

    Raises:
      ToolError: the caller can act on it: an argument is invalid, or the model
        or the retriever is unavailable.
    """
    allowed = self._allowed(budget)
    with self._call(question=question):
      agent = await self._loaded()
      refusal = await asyncio.to_thread(agent.refusal, question)
      if refusal is not None:
        raise ToolError(refusal)
      # Cancelling the request cancels this coroutine; leaving the stream then
      # cancels the episode, which frees its pages.
      async with contextlib.aclosing(
        agent.stream_async(question, budget=allowed, deadline=self.deadline)
      ) as agent_events:
        async for event in agent_events:
          if isinstance(event, events.Searching):
            await context.report_progress(
              event.number,
              allowed.searches,
              f"search {event.number}: {event.query}",
            )
          elif isinstance(event, events.Answer):
            return self._answered(event.reply)
    raise ToolError("The episode ended without a reply.")

  async def search(
    self,
    query: Annotated[str, pydantic.Field(description="Words to search for.")],
    k: Annotated[
      int | None, pydantic.Field(description="Largest number of passages.")
    ] = None,
  ) -> Found:
    """Searches without the policy; at most `k` passages, best first."""
    k = self.passages if k is None else k
    if not 1 <= k <= _MAX_PASSAGES:
      raise ToolError(f"k: found {k}, expected 1 to {_MAX_PASSAGES}.")
    with self._call(query=query):
      agent = await self._loaded()
      passages = await agent.search_async(query, k=k)
    return Found(
      passages=[Passage(text=p.text, **_source(p)) for p in passages]
    )

  async def trajectory(self, name: str) -> str:
    """Returns the episode of an answer as JSON."""
    reply = self._replies.get(name)
    if reply is None:
      raise ResourceNotFoundError(
        f"{_URI}{name}: found no such trajectory; the last {self.max_replies} "
        "are kept. Ask the question again."
      )
    episode = reply.trajectory
    values = {"question": episode.question.text, "answer": reply.answer}
    values |= reply.record() | records.trajectory(episode)
    return json.dumps(values | {"reason": reply.reason})

  def _answered(self, reply: events.Reply) -> Answered:
    """Stores a reply and returns the result of its call."""
    name = secrets.token_hex(16)
    if reply.outcome is types.Outcome.FAILED:
      reply = dataclasses.replace(reply, reason=_logged(reply.reason))
    self._replies[name] = reply
    if len(self._replies) > self.max_replies:
      del self._replies[next(iter(self._replies))]
    return Answered(
      answer=reply.answer,
      outcome=reply.outcome.value,
      reason=reply.reason,
      citations=[
        {"number": number, **_source(p)} for number, p in reply.citations
      ],
      refused_citations=list(reply.refused_citations),
      searches=reply.searches,
      tokens=reply.tokens,
      seconds=round(reply.seconds, 3),
      queries=[
        Query(query=query, sources=list(map(_source, passages)))
        for query, passages in zip(
          reply.trajectory.queries, reply.documents, strict=True
        )
      ],
      trajectory=_URI + name,
    )

  def _allowed(self, budget: int | str) -> budgets.Budget:
    """Returns the budget of a call; the default of searches is the maximum."""
    allowed = budgets.NO_CAPS
    searches = budget
    if isinstance(budget, str):
      try:
        allowed = fields.budget_of(budget, self.prices)
      except ValueError as error:
        raise ToolError(f"budget: {error}") from error
      has_searches = "searches" in allowed.units
      searches = allowed.searches if has_searches else self.max_budget
    if not 0 <= int(searches) <= self.max_budget:
      raise ToolError(
        f"budget: found {searches}, expected 0 to {self.max_budget}."
      )
    return dataclasses.replace(allowed, searches=int(searches))

  async def _loaded(self) -> agent_lib.Agent:
    # Cancelling a call must not cancel the loading.
    return await loop.shared(asyncio.wrap_future(self.agent))

  @contextlib.contextmanager
  def _call(self, **texts: str) -> Iterator[None]:
    """Counts a running call, and turns known errors into error results."""
    for name, text in texts.items():
      if not text.strip():
        raise ToolError(f"{name}: found no text, expected some.")
    self._under_way += 1
    try:
      yield
    except (agent_lib.BusyError, agent_lib.ClosedError) as error:
      raise ToolError(str(error)) from error
    except (types.EngineError, types.RetrievalError) as error:
      raise ToolError(_logged(str(error))) from error
    finally:
      self._under_way -= 1


def _source(passage: types.Passage) -> Source:
  names: Any = {"id": passage.id, "title": citations.title(passage)}
  return names | citations.source(passage)


def _logged(reason: str) -> str:
  """Logs why a call failed; returns a sentence that does not show it."""
  request_id = fields.new_id()
  _log.warning("%s: %s", request_id, reason)
  return fields.unavailable(request_id)


def _instructions(examples: Sequence[types.Question]) -> str:
  """Returns the instructions about the server to a client's model."""
  lines = [
    "`answer` answers one question with its own searches; give the whole "
    "question, because nothing is remembered between calls. `search` returns "
    "passages to read yourself."
  ]
  if examples:
    lines.append(
      "The passages are of a generated world. Questions are in its words only; "
      "`search` reads the passages behind the first of these:"
    )
    lines += [f"- {question.text}" for question in examples[:_LISTED_EXAMPLES]]
  return "\n".join(lines)
