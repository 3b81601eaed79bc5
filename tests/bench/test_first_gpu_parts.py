"""What the stages of bench.first_gpu invent: words, passages, references."""

from __future__ import annotations

import asyncio

import numpy as np
import packed_rows
import pytest

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.world import world as world_lib
from bench.first_gpu import engine, machine, rollouts


def test_some_words_search_and_some_answer():
  words = engine.Words(512)
  texts = words.token_texts()
  assert len(texts) == 512
  actions = [protocol.last_action(text) for text in texts]
  kinds = [action.kind for action in actions if action]
  assert {*kinds} == {*protocol.ActionKind}
  assert 5 < len(kinds) < 50
  ids = words.encode("what is word7 and word7")
  assert ids[2] == ids[4] and all(0 < i < 512 for i in ids)
  assert words.decode([3, 4]) == texts[3] + texts[4]


def test_overlap_finds_the_passage_that_has_the_words():
  world = world_lib.World()
  (question,) = world.questions("train", 1, 0)
  wanted = world.corpus(question.corpus)[7]
  found = asyncio.run(
    rollouts.WordOverlap(world).search(
      types.SearchRequest(wanted.contents, 3, question.corpus)
    )
  )
  assert found[0] == wanted
  assert len(found) == 3


@pytest.mark.parametrize(
  "heads", [machine.Heads(4, 2, 8), machine.Heads(3, 1, 4)]
)
def test_reference_in_float64_equals_sums_written_out(heads):
  rng = np.random.default_rng(0)
  lengths = (5, 9)
  ids = np.repeat([1, 2], lengths)
  q, k, v, g = (
    rng.normal(size=(len(ids), n, heads.size))
    for n in (heads.query, heads.kv, heads.kv, heads.query)
  )
  found = machine._float64(ids, q, k, v, g)
  for number in (1, 2):
    some = ids == number
    expected = packed_rows.written_out(q[some], k[some], v[some], g[some])
    for ours, theirs in zip(found, expected, strict=True):
      np.testing.assert_allclose(ours[some], theirs, atol=1e-10)
