"""Plays an episode in short prompts, as plain retrieval does.

A conversation with tags or tools is too much for small language models: they
write queries that repeat the prompt, search again and again, or answer out of
form. Here the question itself is the first query; of a conversation it is the
last question. Each request is a new conversation with the question and all
passages so far. While searches remain it asks for one more query (`more`), and
at last for the answer (`last`), which is the model's whole reply:

    question --> search --> more --> search --> ... --> last --> answer

Without a text `more` the first search is the only one: plain retrieval, the
baseline of every agent. With a budget of 0 the model answers from memory.

The query that the model did not write is recorded as its turn. These turns
belong to no episode to train on: their context is not the response before them.
"""

from __future__ import annotations

import dataclasses
import re

from anysearch_jax import types
from anysearch_jax.environment import citations, protocol, spec
from anysearch_jax.rollout import episode, episode_state

# Ends the replies, and tells these requests from the turns of a conversation.
STOP = (protocol.STOPS[-1],)
# Attempts between the conversations of an episode.
_ATTEMPTS = 1 << 17
# What the model was asked for, in an episode's memory.
ANSWER = "asked for the answer"
_QUERY = "asked for a query"
_QUERY_TOKENS = 48
_LEAST_TOKENS = 32  # Of a reply, for which passages make room.
_SLOT = re.compile(r"\{(Question|Passages)\}")
# Up to its end, or all if it has none.
_REASONING = re.compile(r"\A(?:.*</think>|\s*<think>.*)", re.S)
_TAGS = re.compile("</?(?:search|answer|query)>")
# What models write around a query, and before it.
_QUERY_QUOTES = " \t\"'`*“”"
_QUERY_LABEL = re.compile(
  r"\A(?:(?:the |my |next )?(?:search )?query(?: is)?|search(?: for)?)\s*:",
  re.I,
)
# The number of a passage, which some copy.
_NUMBER = re.compile(r"\A\s*\[\d+\]\s*")
# A reply of one of these words asks for no search.
_ENOUGH = frozenset({"answer", "done", "enough", "no", "none", "nothing", ""})


def begin(opened: episode_state.Episode) -> episode_state.Episode:
  """Makes the first move of an episode: it searches for the question."""
  if not isinstance(opened.request, types.GenerateRequest):
    return opened
  if not opened.affords(protocol.SEARCH):
    # The prompt for a budget of 0 asks for the answer.
    return dataclasses.replace(opened, memory=ANSWER)
  return _search(opened, protocol.last_question(opened.question.text))


def step(
  waiting: episode_state.Episode, event: episode_state.Event | None
) -> episode_state.Episode:
  """Advances an episode by the event that answers its request.

  Args:
    waiting: the episode.
    event: the answer to its request; None if its time is over.

  Returns:
    The next episode, at another address when it asks the model.
  """
  if waiting.memory == ANSWER:
    return answered(waiting, event)
  if event is None:
    return _ask_for_answer(waiting)
  if isinstance(event, episode_state.Failure):
    return episode.finish(waiting, types.Outcome.FAILED, event.reason)
  if isinstance(event, types.Generation):
    query = _read_query(event.text)
    if _finds_nothing_new(waiting, query):
      return _ask_for_answer(waiting)
    return _search(waiting, query)
  assert isinstance(event, episode_state.Retrieved)  # It asks for no scores.
  charged, _ = episode.charge_search(waiting, event.passages)
  *earlier, observation = charged.observations
  observation = observation._replace(passages=event.passages)
  charged = dataclasses.replace(charged, observations=(*earlier, observation))
  if charged.environment.more and charged.affords(protocol.SEARCH):
    asking_episode = ask(
      charged, charged.environment.more, memory=_QUERY, limit=_QUERY_TOKENS
    )
    if asking_episode is not None:
      return asking_episode
  return _ask_for_answer(charged)


def ask(
  begun: episode_state.Episode,
  template: str,
  *,
  memory: str,
  limit: int = 0,
) -> episode_state.Episode | None:
  """Returns an episode that asks its model in a new conversation.

  Passages that the context has no room for are left out, the last ones first.

  Args:
    begun: the episode so far.
    template: prompt with `{Question}` and `{Passages}`.
    memory: what is asked for, the episode's new `memory`.
    limit: limit on the tokens of the reply; 0: that of a turn.

  Returns:
    The episode; None if its budget or the context leaves no room for a reply.
  """
  passages = list(citations.citable_passages(begun.observations).items())
  while True:
    content = _fill(begun, template, passages)
    _, ids = begun.codec.render(content)
    room = begun.turn_limit
    if begun.caps.dollars == float("inf"):
      # Its context begins anew.
      room = min(
        begun.token_cap - begun.written_tokens,
        begun.config.max_context - len(ids),
      )
    if room >= _LEAST_TOKENS or not passages:
      break
    passages.pop()
  if room <= 0:
    return None
  address = begun.address._replace(attempt=begun.address.attempt + _ATTEMPTS)
  chunk = episode.environment_chunk(begun, f"\n\n{content}\n\n")
  asking_episode = dataclasses.replace(
    begun,
    address=address,
    chunks=(*begun.chunks, chunk),
    memory=memory,
    experts=None,
  )
  request = types.GenerateRequest(
    address=address,
    turn=asking_episode.turns,
    token_ids=tuple(ids),
    max_tokens=min(room, limit or begun.config.max_turn or room),
    stop=STOP,
    may_search=False,
    # Nothing here is better for being drawn.
    temperature=0.0,
  )
  return dataclasses.replace(asking_episode, request=request)


def answered(
  asking_episode: episode_state.Episode, event: episode_state.Event | None
) -> episode_state.Episode:
  """Ends an episode by the reply to its request for the answer.

  Args:
    asking_episode: the episode.
    event: the reply, which is the answer without reasoning and tags.
  """
  if isinstance(event, types.Generation):
    text = without_reasoning(event.text)
    tagged = protocol.last_content(text, "answer")
    answer = protocol.neutralise(text if tagged is None else tagged).strip()
    if answer:
      turn_text = f"<answer>{answer}</answer>"
      turn = _turn(asking_episode, turn_text, version=event.versions[0])
      ended = dataclasses.replace(
        asking_episode, chunks=(*asking_episode.chunks, turn)
      )
      return episode.finish(ended, types.Outcome.ANSWERED)
  if isinstance(event, episode_state.Failure):
    return episode.finish(asking_episode, types.Outcome.FAILED, event.reason)
  reason = "The model gave no answer when it was asked for that alone."
  return episode.finish(asking_episode, types.Outcome.TRUNCATED, reason)


def without_reasoning(text: str) -> str:
  """Returns a reply without the reasoning before it."""
  return _REASONING.sub("", text).strip()


def _ask_for_answer(begun: episode_state.Episode) -> episode_state.Episode:
  """Returns an episode that asks for the answer, or has no room for it."""
  landing = dataclasses.replace(begun, landing=True)
  asking_episode = ask(landing, begun.environment.last, memory=ANSWER)
  if asking_episode is not None:
    return asking_episode
  reason = begun.reached_limit or "The budget leaves no room for an answer."
  return episode.finish(begun, types.Outcome.TRUNCATED, reason)


def _search(begun: episode_state.Episode, query: str) -> episode_state.Episode:
  """Returns an episode that searches, as if a turn had written the query."""
  text = protocol.neutralise(" ".join(query.split()))
  turn = _turn(begun, f"<search>{text}</search>", version=0)
  searching = dataclasses.replace(begun, chunks=(*begun.chunks, turn))
  tool = begun.environment.tool(protocol.SEARCH)
  return episode.request_search(searching, text, tool)


def _turn(
  begun: episode_state.Episode, text: str, *, version: int
) -> episode_state.Chunk:
  """Returns a text as a turn of the model."""
  ids = tuple(begun.codec.encode(text))
  return episode_state.Chunk(
    types.Author.MODEL,
    token_ids=ids,
    logps=(0.0,) * len(ids),
    versions=(version,) * len(ids),
    text=text,
  )


def _fill(
  begun: episode_state.Episode,
  template: str,
  passages: list[tuple[int, types.Passage]],
) -> str:
  """Returns a prompt with the question and passages."""
  markers = (*begun.codec.control_tokens, *begun.environment.all_markers)
  shown_passages = citations.observation(passages, markers, begins="", ends="")
  values = {
    "Question": protocol.neutralise(begun.question.text, markers),
    "Passages": shown_passages.strip() if passages else "(none)",
  }
  return _SLOT.sub(lambda slot: values[slot[1]], template)


def _finds_nothing_new(begun: episode_state.Episode, query: str) -> bool:
  """Returns whether a query is none, repeats one, or names a shown passage."""
  passages = citations.citable_passages(begun.observations).values()
  heads = map(citations.head, passages)
  known_texts = map(str.casefold, (*_ENOUGH, *begun.queries, *heads))
  return query.casefold() in known_texts


def _read_query(text: str) -> str:
  """Returns the query of a reply: its first line, without what is around it."""
  text = _TAGS.sub("", without_reasoning(text)).strip()
  line = text.splitlines()[0] if text else ""
  line = _NUMBER.sub("", line)
  unlabelled = _QUERY_LABEL.sub("", line.strip(_QUERY_QUOTES))
  return unlabelled.strip(_QUERY_QUOTES + ".")


def add(environment: spec.Environment) -> spec.Environment:
  """Returns an environment whose episodes are played in short prompts."""
  return dataclasses.replace(environment, begin=begin, step=step)
