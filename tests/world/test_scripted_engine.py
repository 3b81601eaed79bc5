"""The engine whose turns a function writes."""

from __future__ import annotations

import asyncio

import pytest
import scripted as peer

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.world import expert_policy


@pytest.mark.parametrize(
  ("said", "most", "text", "finish"),
  [
    ("<search>q</search> more", 99, "<search>q</search>", types.Finish.STOP),
    ("no tag", 99, "no tag", types.Finish.END_OF_TURN),
    ("<search>q</search>", 4, "<sea", types.Finish.LENGTH),
    ("no tag", 6, "no tag", types.Finish.LENGTH),
  ],
)
def test_scripted_turn_ends_like_a_sampled_one(said, most, text, finish):
  asked = []

  def say(request, context):
    asked.append((request, context))
    return said

  engine = expert_policy.ScriptedEngine(say, peer.CODEC)
  request = types.GenerateRequest(
    types.Address(0, 1, 2),
    0,
    tuple(peer.CODEC.encode("the context")),
    most,
    protocol.STOPS,
  )
  found = asyncio.run(engine.generate(request))
  assert asked == [(request, "the context")]
  assert (found.text, found.finish) == (text, finish)
  assert peer.CODEC.decode(found.token_ids) == text
  ended = found.token_ids[-1] == peer.END_ID
  assert ended == (finish is types.Finish.END_OF_TURN)
  assert len(found.token_ids) == len(found.logps) == len(found.versions)
  assert engine.counters["sampled_tokens"] == len(found.token_ids)
