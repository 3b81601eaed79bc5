"""Asks a policy how many searches an episode still needs (BAGEN's question).

A finished episode is replayed: before its first search and after each that left
another, the policy reads the episode up to there and answers with an interval,
or with `impossible` if it expects no right answer. BAGEN (arXiv 2606.00198)
asks for tokens instead of searches; the words are ours. The episode itself does
not change.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.rollout import driver, episode_state

QUESTION = """\
Another agent answers a question with a search engine. This is the question:
{question}

This is all that it has written and read so far:
{transcript}

It has made {made} searches and may make {left} more. Judge two things:
1. Will its answer be right within these searches? This matters most.
2. If so, how many more searches will it make? Give the least and the most, as \
close to each other as you can, with the true number between them.

Reply in one of these two forms, with a thought of at most two sentences:
<think> the thought </think><answer>[least, most]</answer>
<think> the thought </think><answer>impossible</answer>
"""
_REPLY = re.compile(
  r"(?:(?!</?answer>).)*<answer>\s*"
  r"(?:\[\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\]|impossible)\s*</answer>\s*",
  re.DOTALL | re.IGNORECASE,
)
_MOST = 256  # Tokens of a reply.
_ATTEMPTS = 1 << 30  # Beyond those of episodes and their early answers.


def parsed(reply: str) -> tuple[int, ...] | None:
  """Returns (least, most) of a reply, () for `impossible`, otherwise None."""
  match = _REPLY.fullmatch(reply)
  found = tuple(int(end) for end in match.groups() if end) if match else None
  return None if found and found[0] > found[1] else found


async def asked(
  t: types.Trajectory, parts: driver.EpisodeParts
) -> tuple[types.Trajectory, list[str]]:
  """Returns an episode with the policy's replies; an outage fails it."""
  texts = [span.text for span in t.spans]
  model = types.Author.MODEL
  turns = [i for i, span in enumerate(t.spans) if span.author == model]
  # A search's turn, and what came before the next turn.
  ends = [0, *([*turns, None][seen.turn + 1] for seen in t.observations)]
  replies: list[str] = []
  for made, end in enumerate(ends[: t.budget]):
    question, transcript = (
      protocol.neutralise(text, parts.codec.control_tokens)
      for text in (t.question.text, "".join(texts[:end]) or "(nothing)")
    )
    text = QUESTION.format(
      question=question, transcript=transcript, made=made, left=t.budget - made
    )
    ids = tuple(parts.codec.render(text)[1])
    address = t.address._replace(attempt=_ATTEMPTS + made)
    most = min(_MOST, parts.config.max_context - len(ids))
    request = types.GenerateRequest(
      address, 0, ids, most, ("</answer>",), may_search=False
    )
    if most <= 0:  # It cannot read the episode.
      replies.append("")
      continue
    try:
      event = await driver.answer(request, parts)
    finally:
      parts.engine.release(address)
    if isinstance(event, episode_state.Failure):
      failed, reason = types.Outcome.FAILED, event.reason
      return dataclasses.replace(t, outcome=failed, reason=reason), []
    assert isinstance(event, types.Generation)
    replies.append(event.text)
  return t, replies


def sums(episode: Mapping[str, Any]) -> tuple[float, ...]:
  """Returns six numbers of an episode's replies.

  They count all, those `impossible` and intervals, and of these: those that
  hold the number, and the sums of widths and of scores, as `forecast.fitted`.
  """
  replies = [parsed(reply) for reply in episode.get("forecasts", ())]
  found = np.zeros(4)
  for made, reply in enumerate(replies):
    if reply:
      follow, width = episode["searches"] - made, reply[1] - reply[0]
      held = reply[0] <= follow <= reply[1]
      score = max(0.0, 1 - width / follow) if follow else width == 0
      found += 1, held, width, held * score
  return len(replies), replies.count(()), *found
