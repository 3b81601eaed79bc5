"""The episode as a pure state machine (the paper's section "Method").

`start` and `step` return the next state, whose `request` is the one thing that
the episode waits for. The caller, which has an engine and a retriever, answers
the request with an event. Nothing here waits or draws random numbers: equal
events give equal episodes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import citations, protocol, spec, tools, units
from anysearch_jax.rollout import episode_state

_NO_ANSWER = (
  "The model gave no answer when a limit was near and it was asked for one."
)


def prompt(
  question: types.Question,
  *,
  budget: budgets.Assigned,
  scaffold: bool,
  environment: spec.Environment,
  codec: types.TextCodec,
) -> tuple[str, list[int]]:
  """Renders the prompt of an episode (the paper's appendix "Prompt Design").

  Args:
    question: its text is neutralised before the chat template is applied.
    budget: what is assigned; a number is one of searches, >= 0.
    scaffold: True for the Phase I prompt, False for the prompt of Phase II and
      inference.
    environment: has the prompts.
    codec: renders the messages.

  Returns:
    The prompt's text, chat template included, and its token ids.

  Raises:
    ValueError: the budget is negative.
  """
  env = environment
  caps = budgets.of(budget)
  template = env.scaffold if scaffold else env.plain
  if env.closed and caps.searches == 0:
    template = env.closed
  searches: int | str = caps.searches
  if caps.searches >= budgets.UNCAPPED:
    searches = units.texts(env.units).values["unlimited"]
  render = functools.partial(
    protocol.render,
    searches=searches,
    question=protocol.neutralise(question.text, _unwanted(env, codec)),
  )
  content = render(template)
  others = caps.beyond_searches
  if others.units and env.states_caps:
    content = units.state_assigned(env.units, others) + content
  return codec.render(content, render(env.system), env.prefill, env.chat)


def start(
  question: types.Question,
  *,
  budget: budgets.Assigned,
  scaffold: bool,
  address: types.Address,
  config: config_lib.EpisodeConfig,
  environment: spec.Environment,
  codec: types.TextCodec,
  elapsed: Callable[[], float] = lambda: 0.0,
) -> episode_state.Episode:
  """Opens an episode.

  Args:
    question, budget, environment, codec: as in `prompt`.
    config: has the limits.
    scaffold: whether the environment also states the budget before every turn.
    address: identifies the episode and its random numbers.
    elapsed: returns the seconds that have passed, with those of the prompt;
      they count if seconds are capped.

  Returns:
    The episode. Its first request is a turn, or `Done` if the prompt leaves no
    room for one (truncated, with no token recorded).

  Raises:
    ValueError: the budget is negative, or it is one of dollars and nothing has
      a price.
  """
  text, ids = prompt(
    question,
    budget=budget,
    scaffold=scaffold,
    environment=environment,
    codec=codec,
  )
  caps = episode_state.priced(budgets.of(budget), environment)
  episode = episode_state.Episode(
    address,
    question,
    caps.searches,
    scaffold,
    config,
    codec,
    environment,
    caps=caps.beyond_searches,
    elapsed=elapsed() if caps.seconds < math.inf else 0.0,
  )
  return next_turn(episode, _given(types.Author.PROMPT, text, ids))


def step(
  episode: episode_state.Episode, event: episode_state.Event | None
) -> episode_state.Episode:
  """Advances an episode by the event that answers its request, or a `Failure`.

  An event of None lands it: its time is over.

  Raises:
    ValueError: the event does not answer the request, or a generation breaks
      the request's limits.
  """
  match episode.request, event:
    case _, None:
      return land(episode)
    case types.GenerateRequest() | types.SearchRequest(), episode_state.Failure(
      reason
    ):
      return finish(episode, types.Outcome.FAILED, reason)
    case types.GenerateRequest(max_tokens=most), types.Generation():
      return _after_turn(episode, event, most)
    case types.SearchRequest(query=query) as call, episode_state.Retrieved(
      passages
    ):
      env = episode.environment
      unwanted = _unwanted(env, episode.codec)
      tool = env.tool(call.tool)
      numbers: tuple[int, ...] = ()
      if tool.numbered is None:
        text = tool.observation(passages, unwanted)
      else:
        numbers = citations.number_passages(passages, episode.observations)
        text = tool.numbered(tuple(zip(numbers, passages)), unwanted)
      tokens = episode_state.call_tokens(
        episode.chunks[-1], tool.opens, episode.codec
      )
      made = types.Observation(
        call.tool, query, episode.turns - 1, (), tokens, numbers
      )
      charged = dataclasses.replace(
        episode, observations=(*episode.observations, made)
      )
      text += env.after_search(charged.budget, charged.used)
      return next_turn(charged, written(charged, text), shown=passages)
  raise ValueError(
    f"Found a {type(event).__name__} while the episode at {episode.address} "
    f"waits on a {type(episode.request).__name__}. Answer each request once."
  )


def land(episode: episode_state.Episode) -> episode_state.Episode:
  """Asks for the answer now; what the episode waited for is not recorded.

  The environment's `over_budget` line asks, and one more turn may answer. A
  caller lands an episode whose time is over; one whose tokens or dollars are
  lands by itself, see `episode_state`. One that was landed before is `Done`.
  """
  if episode.landing:
    return finish(episode, types.Outcome.TRUNCATED, _NO_ANSWER)
  landing = dataclasses.replace(episode, landing=True)
  line = landing.environment.over_budget
  if landing.chunks[-1].text == line:  # A search has just been refused.
    return next_turn(landing)
  return next_turn(landing, written(landing, line))


def _land_before(
  episode: episode_state.Episode, told: episode_state.Episode
) -> episode_state.Episode:
  """Asks for the answer before the passages by which `told` is longer.

  So the answer follows the passages directly, as other turns do. A policy may
  read what is right before its turn and nothing else.
  """
  passages = told.chunks[len(episode.chunks) :]
  line = written(episode, episode.environment.over_budget)
  chunks = (*episode.chunks, line, *passages)
  return next_turn(dataclasses.replace(told, chunks=chunks, landing=True))


def recorded(
  episode: episode_state.Episode, generation: types.Generation
) -> episode_state.Episode:
  """Returns the episode with the turn that it waits for.

  Raises:
    ValueError: the turn breaks the limits of its request.
  """
  assert isinstance(episode.request, types.GenerateRequest)
  most = episode.request.max_tokens
  sampled = len(generation.token_ids)
  lengths = (len(generation.logps), len(generation.versions))
  if not 1 <= sampled <= most or lengths != (sampled, sampled):
    raise ValueError(
      f"The engine returned {sampled} tokens, {lengths[0]} log-probabilities "
      f"and {lengths[1]} versions for turn {episode.turns} of "
      f"{episode.address}; expected one of each a token and 1 to {most} tokens."
    )
  turn = episode_state.Chunk(
    types.Author.MODEL,
    tuple(generation.token_ids),
    tuple(generation.logps),
    tuple(generation.versions),
    generation.text,
    generation.server,
  )
  return dataclasses.replace(
    episode, chunks=(*episode.chunks, turn), experts=generation.experts
  )


def _after_turn(
  episode: episode_state.Episode, generation: types.Generation, most: int
) -> episode_state.Episode:
  """Records a turn and carries out its action."""
  episode = recorded(episode, generation)
  sampled = len(generation.token_ids)
  # A turn that its own limit ended leaves room for another one.
  is_full = generation.finish is types.Finish.LENGTH
  is_full = is_full and sampled != episode.config.max_turn

  env = episode.environment
  match env.action(generation.text):
    case protocol.Action(protocol.ActionKind.ANSWER, _):
      return finish(episode, types.Outcome.ANSWERED)
    case _ if episode.landing:
      return finish(episode, types.Outcome.TRUNCATED, _NO_ANSWER)
    case protocol.Action(protocol.ActionKind.SEARCH, query, tool) if query:
      if not episode.affords(tool):
        beyond = episode.violation or not episode.stopped
        episode = dataclasses.replace(episode, violation=beyond)
        line = env.over_budget
      elif env.repeated and query in episode.queries:
        line = env.repeated
      else:
        return _call(episode, query, env.tool(tool))
    case _ if env.ends_itself and not is_full:
      return finish(episode, types.Outcome.INVALID)
    case _:
      line = env.no_action

  if is_full:
    if episode.before_landing is not None:
      return land(episode)
    reason = episode.full or (
      f"The engine stopped turn {episode.turns - 1} at {sampled} of the {most} "
      "tokens that were left to it."
    )
    return finish(episode, types.Outcome.TRUNCATED, reason)
  answered = episode.config.answered_bad_turns
  spare = episode.left if env.turns_are_budget else answered - episode.bad_turns
  if spare <= 0:
    return finish(episode, types.Outcome.INVALID)
  episode = dataclasses.replace(episode, bad_turns=episode.bad_turns + 1)
  return next_turn(episode, written(episode, line))


def _call(
  episode: episode_state.Episode, argument: str, tool: tools.Tool
) -> episode_state.Episode:
  """Requests a call of a tool."""
  said = (c.text for c in episode.chunks if c.author != types.Author.PROMPT)
  query = argument
  if tool.target is not None:
    query = tool.target(argument, episode.observations)
  request = types.SearchRequest(
    query,
    episode.config.top_k if tool.results is None else tool.results,
    episode.question.corpus,
    tool=tool.name,
    context=types.SearchContext(
      episode.address, episode.turns - 1, episode.question, "".join(said)
    ),
  )
  return dataclasses.replace(episode, request=request)


def next_turn(
  episode: episode_state.Episode,
  *chunks: episode_state.Chunk,
  shown: tuple[types.Passage, ...] | None = None,
) -> episode_state.Episode:
  """Records `chunks` and requests a turn, or truncates if there is no room.

  On truncation `chunks` are dropped, with the passages `shown` in them. So a
  trajectory never exceeds the context, and never ends with an observation that
  the policy did not read. If only an answer has room, the episode lands,
  without `chunks` if those would take what is kept for it.
  """
  told = dataclasses.replace(episode, chunks=episode.chunks + chunks)
  if shown is not None:
    *before, last = episode.observations
    seen = (*before, last._replace(passages=shown))
    told = dataclasses.replace(told, observations=seen)
  asking = told
  if episode.scaffold:
    line = written(episode, episode.budget_line)
    asking = dataclasses.replace(told, chunks=(*told.chunks, line))
  if episode.chunks and asking.is_spent:
    if not asking.reads_all:
      if shown is None:  # An empty notice: its turn was whole, not cut.
        empty = _given(types.Author.ENVIRONMENT, "", [])
        episode = dataclasses.replace(episode, chunks=(*episode.chunks, empty))
      return land(episode)
    return land(told) if shown is None else _land_before(episode, told)
  most = asking.before_landing
  if reason := asking.full:
    return finish(episode, types.Outcome.TRUNCATED, reason)
  most = most if most is not None and most > 0 else asking.most_tokens
  request = types.GenerateRequest(
    address=asking.address,
    turn=asking.turns,
    token_ids=asking.context,
    max_tokens=min(most, asking.config.max_turn or most),
    stop=asking.environment.stops,
    may_search=not asking.landing
    and any(asking.affords(tool.name) for tool in asking.environment.tools),
  )
  return dataclasses.replace(asking, request=request)


def _unwanted(env: spec.Environment, codec: types.TextCodec) -> tuple[str, ...]:
  """Returns the texts to neutralise in questions and passages.

  Otherwise a passage could forge a control token or a marker of the system.
  """
  return (*codec.control_tokens, *env.all_markers)


def written(episode: episode_state.Episode, text: str) -> episode_state.Chunk:
  """Returns a text of the environment as a chunk."""
  ids = episode.codec.encode(text)
  return _given(types.Author.ENVIRONMENT, text, ids)


def _given(
  author: types.Author, text: str, ids: list[int]
) -> episode_state.Chunk:
  """Returns a chunk of tokens that the policy did not sample."""
  return episode_state.Chunk(
    author, tuple(ids), (0.0,) * len(ids), (-1,) * len(ids), text
  )


def without(
  waiting: episode_state.Episode, turn: types.Generation
) -> episode_state.Episode:
  """Returns the episode charged for a turn that is discarded."""
  asked = waiting.request
  assert isinstance(asked, types.GenerateRequest)
  spent = waiting.aside
  return dataclasses.replace(
    waiting,
    aside=spent._replace(
      written=spent.written + len(turn.token_ids),
      read=spent.read + len(asked.token_ids),
    ),
  )


def finish(
  episode: episode_state.Episode, outcome: types.Outcome, reason: str = ""
) -> episode_state.Episode:
  """Ends an episode with its trajectory.

  Args:
    episode: what was played.
    outcome: how it ends.
    reason: why, if it failed or was truncated.
  """
  done = episode_state.Done(episode.trajectory(outcome, reason))
  return dataclasses.replace(episode, request=done)
