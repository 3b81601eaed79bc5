"""The episode as a pure state machine (the paper's section "Method").

    start --> GenerateRequest --> engine --> Generation
                ^                               |
                |                               v
                +-------------------------- step(turn) --> Done
                |                               |
                |                               v
      step(passages) <-- retriever <-- SearchRequest

`start` and `step` return the next state. Its `request` is the one thing that
the episode waits for. The caller (`driver`), which has an engine and a
retriever, answers the request with an event. Nothing here waits or draws random
numbers: equal events give equal episodes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

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
    budget: the assigned budget; a number is a number of searches, >= 0.
    scaffold: True for the Phase I prompt, False for the prompt of Phase II and
      inference.
    environment: the environment whose prompts are used.
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
    question=protocol.neutralise(question.text, _markers(env, codec)),
  )
  content = render(template)
  other_caps = caps.beyond_searches
  if other_caps.units and env.states_caps:
    content = units.state_assigned(env.units, other_caps) + content
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
    scaffold: whether the environment also states the budget before every turn.
    address: identifies the episode and its random numbers.
    config: the limits of turns and contexts.
    elapsed: returns the seconds since the start, the prompt's rendering
      included. Called only if the budget caps seconds.

  Returns:
    The episode. Its first request is a turn, or `Done` if the prompt leaves no
    room for one (truncated, with no token recorded).

  Raises:
    ValueError: the budget is negative, or it is in dollars and nothing has a
      price.
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
    address=address,
    question=question,
    budget=caps.searches,
    scaffold=scaffold,
    config=config,
    codec=codec,
    environment=environment,
    caps=caps.beyond_searches,
    elapsed=elapsed() if caps.seconds < math.inf else 0.0,
  )
  opened = "" if environment.prefill else protocol.opened_reasoning(text)
  if opened:
    # Encoded again, because a token may begin before the tag. A base model's
    # prompt has special tokens before its text.
    special_count = len(ids) - len(codec.encode(text))
    text = text.removesuffix(opened)
    ids = [*ids[:special_count], *codec.encode(text)]
  prompt_chunk = unsampled_chunk(types.Author.PROMPT, text, ids)
  episode = next_turn(dataclasses.replace(episode, opened=opened), prompt_chunk)
  return environment.begin(episode) if environment.begin else episode


def step(
  episode: episode_state.Episode, event: episode_state.Event | None
) -> episode_state.Episode:
  """Advances an episode by the event that answers its request, or a `Failure`.

  An event of None lands the episode: its time is over.

  Args:
    episode: the state, as returned by `start` or the last `step`.
    event: a `Generation` for a `GenerateRequest`, `Retrieved` for a
      `SearchRequest`, a `Failure` for either, or None.

  Returns:
    The next state.

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
    case types.GenerateRequest(max_tokens=limit), types.Generation():
      return _after_turn(episode, event, limit)
    case types.SearchRequest(), episode_state.Retrieved(passages):
      charged, text = charge_search(episode, passages)
      text += episode.environment.after_search(
        charged.budget, charged.searches_used
      )
      chunk = environment_chunk(charged, text)
      return next_turn(charged, chunk, passages=passages)
  raise ValueError(
    f"Found a {type(event).__name__} while the episode at {episode.address} "
    f"waits on a {type(episode.request).__name__}. Answer each request once."
  )


def charge_search(
  episode: episode_state.Episode, passages: tuple[types.Passage, ...]
) -> tuple[episode_state.Episode, str]:
  """Charges the search that an episode waits for.

  Args:
    episode: the episode, which waits for a `SearchRequest`.
    passages: the answer.

  Returns:
    The charged episode, and the text that shows the passages. Its last
    observation has their numbers; the caller that shows them adds them.
  """
  call = episode.request
  assert isinstance(call, types.SearchRequest)
  env = episode.environment
  markers = _markers(env, episode.codec)
  tool = env.tool(call.tool)
  numbers: tuple[int, ...] = ()
  if tool.numbered is None:
    text = tool.observation(passages, markers)
  else:
    numbers = citations.number_passages(passages, episode.observations)
    text = tool.numbered(tuple(zip(numbers, passages)), markers)
  observation = types.Observation(
    tool=call.tool,
    argument=call.query,
    turn=episode.turns - 1,
    tokens=episode_state.call_tokens(
      episode.chunks[-1], tool.opens, episode.codec
    ),
    numbers=numbers,
  )
  charged = dataclasses.replace(
    episode, observations=(*episode.observations, observation)
  )
  return charged, text


def land(episode: episode_state.Episode) -> episode_state.Episode:
  """Asks for the answer now, and drops the request that was pending.

  The environment's `over_budget` line asks, and one more turn may answer. A
  caller lands an episode when its time is over. An episode that runs out of
  tokens or dollars lands by itself, see `episode_state`. An episode that was
  landed before is `Done`.
  """
  if episode.landing:
    return finish(episode, types.Outcome.TRUNCATED, _NO_ANSWER)
  landing = dataclasses.replace(episode, landing=True)
  line = landing.environment.over_budget
  if landing.chunks[-1].text == line:  # A search has just been refused.
    return next_turn(landing)
  return next_turn(landing, environment_chunk(landing, line))


def _land_before_passages(
  episode: episode_state.Episode, extended: episode_state.Episode
) -> episode_state.Episode:
  """Asks for the answer, then shows the passages that `extended` adds.

  The answer then follows the passages directly, as other turns do. A small
  policy may have learned to read only the text right before its turn.
  """
  passage_chunks = extended.chunks[len(episode.chunks) :]
  line = environment_chunk(episode, episode.environment.over_budget)
  chunks = (*episode.chunks, line, *passage_chunks)
  return next_turn(dataclasses.replace(extended, chunks=chunks, landing=True))


def record_turn(
  episode: episode_state.Episode, generation: types.Generation
) -> episode_state.Episode:
  """Adds the turn that an episode waits for to its chunks.

  Raises:
    ValueError: the turn breaks the limits of its request.
  """
  assert isinstance(episode.request, types.GenerateRequest)
  limit = episode.request.max_tokens
  sampled = len(generation.token_ids)
  logps = len(generation.logps)
  versions = len(generation.versions)
  if not 1 <= sampled <= limit or not sampled == logps == versions:
    raise ValueError(
      f"The engine returned {sampled} tokens, {logps} log-probabilities "
      f"and {versions} versions for turn {episode.turns} of "
      f"{episode.address}; expected one of each a token and 1 to {limit} "
      "tokens."
    )
  turn = episode_state.Chunk(
    author=types.Author.MODEL,
    token_ids=tuple(generation.token_ids),
    logps=tuple(generation.logps),
    versions=tuple(generation.versions),
    text=generation.text,
    server=generation.server,
  )
  return dataclasses.replace(
    episode, chunks=(*episode.chunks, turn), experts=generation.experts
  )


def _after_turn(
  episode: episode_state.Episode, generation: types.Generation, limit: int
) -> episode_state.Episode:
  """Records a turn and carries out its action.

  An answer ends the episode, and a search becomes the next request. Any other
  turn is a bad one: an error line answers it, and the policy may try again
  while tries are left. But if a limit of the episode cut the turn off, the
  episode lands, or is truncated.

  Args:
    episode: the state before the turn.
    generation: the turn.
    limit: maximum number of tokens that was requested.
  """
  episode = record_turn(episode, generation)
  sampled = len(generation.token_ids)
  # A turn that was cut off at `max_turn` leaves room for another one.
  is_cut = generation.finish is types.Finish.LENGTH
  is_full = is_cut and sampled != episode.config.max_turn

  env = episode.environment
  match env.action(generation.text):
    case protocol.Action(protocol.ActionKind.ANSWER, _):
      return finish(episode, types.Outcome.ANSWERED)
    case _ if episode.landing:
      return finish(episode, types.Outcome.TRUNCATED, _NO_ANSWER)
    case protocol.Action(protocol.ActionKind.SEARCH, query, tool) if query:
      if not episode.affords(tool):
        # A search that a rule refused (`stopped`) is not beyond the budget.
        is_violation = episode.violation or not episode.stopped
        episode = dataclasses.replace(episode, violation=is_violation)
        line = env.over_budget
      elif env.repeated and query in episode.queries:
        line = env.repeated
      else:
        return request_search(episode, query, env.tool(tool))
    case _ if env.ends_itself and not is_full:
      return finish(episode, types.Outcome.INVALID)
    case _:
      line = env.no_action

  # The turn is bad; `line` answers it.
  if is_full:
    if episode.limit_before_landing is not None:
      return land(episode)
    reason = episode.reached_limit or (
      f"The engine stopped turn {episode.turns - 1} at {sampled} of the "
      f"{limit} tokens that were left to it."
    )
    return finish(episode, types.Outcome.TRUNCATED, reason)
  if env.turns_are_budget:
    tries = episode.searches_left
  else:
    tries = episode.config.answered_bad_turns - episode.bad_turns
  if tries <= 0:
    return finish(episode, types.Outcome.INVALID)
  episode = dataclasses.replace(episode, bad_turns=episode.bad_turns + 1)
  return next_turn(episode, environment_chunk(episode, line))


def request_search(
  episode: episode_state.Episode, argument: str, tool: tools.Tool
) -> episode_state.Episode:
  """Requests a call of a tool.

  The request's context is the response so far, which retrievers that ask a
  language model read.

  Args:
    episode: the episode, whose last turn made the call.
    argument: the query, or what the tool takes in its place.
    tool: one of its environment's tools.
  """
  response = "".join(
    chunk.text
    for chunk in episode.chunks
    if chunk.author != types.Author.PROMPT
  )
  query = argument
  if tool.target is not None:
    query = tool.target(argument, episode.observations)
  request = types.SearchRequest(
    query,
    k=episode.config.top_k if tool.results is None else tool.results,
    corpus=episode.question.corpus,
    tool=tool.name,
    context=types.SearchContext(
      address=episode.address,
      turn=episode.turns - 1,
      question=episode.question,
      text=response,
    ),
  )
  return dataclasses.replace(episode, request=request)


def next_turn(
  episode: episode_state.Episode,
  *chunks: episode_state.Chunk,
  passages: tuple[types.Passage, ...] | None = None,
) -> episode_state.Episode:
  """Appends `chunks` and requests a turn, or truncates if there is no room.

  On truncation `chunks` are dropped, with the `passages` in them. So a
  trajectory never exceeds the context, and never ends with an observation that
  the policy did not read. If only an answer has room, the episode lands; it
  drops `chunks` if they would use the tokens kept for the answer.

  Args:
    episode: the state before `chunks`.
    *chunks: texts that the next turn reads.
    passages: those in `chunks` if they answer the last search; else None.

  Returns:
    The next state. It requests a turn, or is `Done`.
  """
  extended = dataclasses.replace(episode, chunks=episode.chunks + chunks)
  if passages is not None:
    *earlier, last = episode.observations
    observations = (*earlier, last._replace(passages=passages))
    extended = dataclasses.replace(extended, observations=observations)
  with_line = extended
  if episode.scaffold:
    line = environment_chunk(episode, episode.budget_line)
    with_line = dataclasses.replace(extended, chunks=(*extended.chunks, line))
  if episode.opened and not episode.chunks:
    # It follows the budget, as a model's own `<think>` does.
    opened = environment_chunk(episode, episode.opened)
    with_line = dataclasses.replace(
      with_line, chunks=(*with_line.chunks, opened)
    )
  if episode.chunks and with_line.is_spent:
    if with_line.reads_all:
      if passages is None:
        return land(extended)
      return _land_before_passages(episode, extended)
    if passages is None:
      # An empty chunk marks that the last turn was complete, not cut off.
      empty = unsampled_chunk(types.Author.ENVIRONMENT, "", [])
      episode = dataclasses.replace(episode, chunks=(*episode.chunks, empty))
    return land(episode)
  if reason := with_line.reached_limit:
    return finish(episode, types.Outcome.TRUNCATED, reason)
  limit = with_line.limit_before_landing
  if limit is None or limit <= 0:
    limit = with_line.turn_limit
  can_search = any(
    with_line.affords(tool.name) for tool in with_line.environment.tools
  )
  request = types.GenerateRequest(
    address=with_line.address,
    turn=with_line.turns,
    token_ids=with_line.context,
    max_tokens=min(limit, with_line.config.max_turn or limit),
    stop=with_line.environment.stops,
    may_search=can_search and not with_line.landing,
  )
  return dataclasses.replace(with_line, request=request)


def _markers(env: spec.Environment, codec: types.TextCodec) -> tuple[str, ...]:
  """Returns the texts to neutralise in questions and passages.

  Otherwise a passage could forge a control token or a marker of the system.
  """
  return (*codec.control_tokens, *env.all_markers)


def environment_chunk(
  episode: episode_state.Episode, text: str
) -> episode_state.Chunk:
  """Returns a text of the environment as a chunk."""
  ids = episode.codec.encode(text)
  return unsampled_chunk(types.Author.ENVIRONMENT, text, ids)


def unsampled_chunk(
  author: types.Author, text: str, ids: Sequence[int]
) -> episode_state.Chunk:
  """Returns a chunk of tokens that the policy did not sample.

  Args:
    author: who wrote them.
    text: their text.
    ids: the tokens.
  """
  return episode_state.Chunk(
    author,
    token_ids=tuple(ids),
    logps=(0.0,) * len(ids),
    versions=(-1,) * len(ids),
    text=text,
  )


def charge_discarded_turn(
  waiting: episode_state.Episode, turn: types.Generation
) -> episode_state.Episode:
  """Charges an episode for a turn that is discarded.

  Args:
    waiting: the episode before the turn.
    turn: the sampled turn; it is not added to the chunks.
  """
  request = waiting.request
  assert isinstance(request, types.GenerateRequest)
  spent = waiting.discarded
  return dataclasses.replace(
    waiting,
    discarded=spent._replace(
      written_tokens=spent.written_tokens + len(turn.token_ids),
      read_tokens=spent.read_tokens + len(request.token_ids),
    ),
  )


def finish(
  episode: episode_state.Episode, outcome: types.Outcome, reason: str = ""
) -> episode_state.Episode:
  """Ends an episode with its trajectory.

  Args:
    episode: the episode so far.
    outcome: how it ends.
    reason: why, if it failed or was truncated.
  """
  done = episode_state.Done(episode.trajectory(outcome, reason))
  return dataclasses.replace(episode, request=done)
