"""Asks a model that gave no answer once more, by a prompt of its own.

Models that were not trained here, small ones above all, may use up their budget
and their tries without an answer in the form that was asked for. They then get
the question and the passages that they found in one short prompt, as in plain
retrieval, and what they reply is the answer. That turn belongs to no episode to
train on: its context is not the response before it.
"""

from __future__ import annotations

import dataclasses
import re

from anysearch_jax import types
from anysearch_jax.environment import citations, protocol, spec
from anysearch_jax.rollout import episode, episode_state

# Attempts between those of an episode and that of its last answer.
_ATTEMPTS = 1 << 17
_ASKED = "asked for the last answer"
_SLOT = re.compile(r"\{(Question|Passages)\}")
_REASONING = re.compile(r"\A.*</think>", re.S)


def add(environment: spec.Environment) -> spec.Environment:
  """Returns an environment whose episodes ask for a last answer."""
  return dataclasses.replace(environment, step=step)


def step(
  waiting: episode_state.Episode, event: episode_state.Event | None
) -> episode_state.Episode:
  """Advances an episode as `episode.step` does, and asks for a last answer.

  Args:
    waiting: the episode.
    event: the answer to its request; None if its time is over.

  Returns:
    The next episode, at another address when it asks for the last answer.
  """
  if waiting.memory == _ASKED:
    return _answered(waiting, event)
  advanced = episode.step(waiting, event)
  request = advanced.request
  if event is None or not isinstance(request, episode_state.Done):
    return advanced
  if request.trajectory.outcome not in (
    types.Outcome.INVALID,
    types.Outcome.TRUNCATED,
  ):
    return advanced
  return _asking(advanced) or advanced


def _asking(ended: episode_state.Episode) -> episode_state.Episode | None:
  """Returns an ended episode that asks once more; None if it has no room."""
  codec = ended.codec
  content = _prompt(ended)
  _, ids = codec.render(content)
  limit = ended.turn_limit
  if ended.caps.dollars == float("inf"):
    # Its context begins anew.
    limit = min(
      ended.token_cap - ended.written_tokens,
      ended.config.max_context - len(ids),
    )
  if limit <= 0:
    return None
  address = ended.address._replace(attempt=ended.address.attempt + _ATTEMPTS)
  asking_episode = dataclasses.replace(
    ended,
    address=address,
    chunks=(
      *ended.chunks,
      episode.environment_chunk(ended, f"\n\n{content}\n\n"),
    ),
    memory=_ASKED,
    experts=None,
  )
  request = types.GenerateRequest(
    address=address,
    turn=asking_episode.turns,
    token_ids=tuple(ids),
    max_tokens=min(limit, ended.config.max_turn or limit),
    stop=(protocol.STOPS[-1],),
    may_search=False,
  )
  return dataclasses.replace(asking_episode, request=request)


def _prompt(ended: episode_state.Episode) -> str:
  """Returns the prompt with the question and the passages of an episode."""
  environment = ended.environment
  markers = (*ended.codec.control_tokens, *environment.all_markers)
  passages = citations.citable_passages(ended.observations)
  shown_passages = citations.observation(
    passages.items(), markers, begins="", ends=""
  )
  values = {
    "Question": protocol.neutralise(ended.question.text, markers),
    "Passages": shown_passages.strip() if passages else "(none)",
  }
  return _SLOT.sub(lambda slot: values[slot[1]], environment.last)


def _answered(
  asking_episode: episode_state.Episode, event: episode_state.Event | None
) -> episode_state.Episode:
  """Ends an episode by the reply to its last request."""
  if isinstance(event, types.Generation):
    text = _REASONING.sub("", event.text)
    tagged = protocol.last_content(text, "answer")
    answer = protocol.neutralise(text if tagged is None else tagged).strip()
    if answer:
      turn_text = f"<answer>{answer}</answer>"
      ids = tuple(asking_episode.codec.encode(turn_text))
      turn = dataclasses.replace(
        event,
        text=turn_text,
        token_ids=ids,
        logps=(0.0,) * len(ids),
        versions=(event.versions[0],) * len(ids),
      )
      chunk = episode_state.Chunk(
        types.Author.MODEL, turn.token_ids, turn.logps, turn.versions, turn_text
      )
      answered = dataclasses.replace(
        asking_episode, chunks=(*asking_episode.chunks, chunk)
      )
      return episode.finish(answered, types.Outcome.ANSWERED)
  reason = "The model gave no answer, also when it was asked once more."
  if isinstance(event, episode_state.Failure):
    reason = event.reason
    return episode.finish(asking_episode, types.Outcome.FAILED, reason)
  return episode.finish(asking_episode, types.Outcome.TRUNCATED, reason)
