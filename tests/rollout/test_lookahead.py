"""Guesses from the context change how many tokens a step gives, not which."""

from __future__ import annotations

import asyncio

import jax
import numpy as np
import pytest
import small_engine

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.policy import sharding
from anysearch_jax.rollout.jax_engine import lookahead

GREEDY = config_lib.SamplingConfig(temperature=0.0)
NUCLEUS = config_lib.SamplingConfig(temperature=0.7, top_p=0.9, top_k=20)
ORDER = [(q, s) for q in range(3) for s in range(4)]


def guessed(tokens, size):
  """Returns the guesses after some tokens by the definition, None if none."""
  best, period = 0, 0
  for back in range(len(tokens) - 1, 0, -1):
    earlier = tokens[: len(tokens) - back]
    pairs = zip(earlier[::-1], tokens[::-1][: lookahead.LONGEST], strict=False)
    same = [a == b for a, b in pairs]
    length = (same + [False]).index(False)
    if 0 < length >= best:
      best, period = length, back
  found = list(tokens)
  for _ in range(size):
    found.append(found[-period])
  return found[len(tokens) :] if best else None


@pytest.mark.parametrize("alphabet", [2, 5, 40])
def test_guesses_follow_the_latest_of_the_longest_occurrences(alphabet):
  rng = np.random.default_rng(alphabet)
  rows = [rng.integers(0, alphabet, n).tolist() for n in (*range(1, 41), 40)]
  window = [[lookahead.EMPTY] * (40 - len(row)) + row for row in rows]
  found, known = lookahead.propose(np.array(window), 6)
  for row, guesses, some in zip(rows, found.tolist(), known, strict=True):
    assert (guesses if some else None) == guessed(row, 6)


def test_draws_count_up_to_the_first_that_was_not_guessed_or_halts():
  rng = np.random.default_rng(0)
  drawn, guesses = (rng.integers(0, 2, (300, n)) for n in (5, 4))
  seen, halts = rng.integers(0, 5, 300), rng.random((300, 5)) < 0.1
  counts = np.asarray(lookahead.accepted(drawn, guesses, seen, halts))
  window, at = rng.integers(0, 9, (300, 7)), rng.integers(0, 4, 300)
  after = lookahead.shifted(window, drawn, counts).tolist()
  put = lookahead.put(np.zeros((300, 9), int), drawn, at, counts).tolist()
  for r, count in enumerate(counts.tolist()):
    right = (drawn[r, :4] == guesses[r]) & ~halts[r, :4]
    wrong = [i for i in range(4) if i >= seen[r] or not right[i]]
    assert count == 1 + min([*wrong, 4])
    tokens = drawn[r, :count].tolist()
    assert after[r] == [*window[r], *tokens][-7:]
    assert put[r] == ([0] * at[r] + tokens + [0] * 9)[:9]


def alike(found, expected):
  for one, other in zip(found, expected, strict=True):
    assert one.token_ids == other.token_ids
    assert (one.text, one.finish) == (other.text, other.finish)
    np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)


@pytest.mark.parametrize(
  ("sampling", "guesses", "changes"),
  [
    (None, 3, {}),
    (GREEDY, 7, {"kv_tokens": 456}),  # Room for three contexts.
    (NUCLEUS, 3, {"lanes": (2, 8), "page": 16}),
    pytest.param(GREEDY, 3, {"axes": {"data": 4, "tensor": 2}}, id="mesh"),
  ],
)
def test_episodes_are_those_without_guesses(sampling, guesses, changes):
  params, changes = small_engine.params(), {"decode_steps": 8} | changes
  expected = small_engine.play(
    small_engine.engine(params, sampling=sampling), ORDER
  )
  if axes := changes.pop("axes", None):
    changes["mesh"] = mesh = sharding.mesh(**axes)
    params = jax.device_put(params, sharding.shardings(small_engine.A, mesh))
  engine = small_engine.engine(
    params, sampling=sampling, lookahead=guesses, **changes
  )
  found = small_engine.play(engine, ORDER)
  for key in ORDER:
    alike(found[key][1], expected[key][1])
  counts = engine.counters
  assert 0 < counts["accepted_tokens"] < counts["proposed_tokens"]
  used = counts["sampled_tokens"] - counts["accepted_tokens"]
  assert counts["lanes_used"] == used <= counts["lanes_offered"]
  assert (counts["preemptions"] > 0) == ("kv_tokens" in changes)
  if guesses == 7:  # A greedy policy repeats itself.
    assert counts["accepted_tokens"] > 0.3 * counts["lanes_used"]
  if not changes.keys() & {"kv_tokens", "lanes", "mesh"}:
    # To the bit whatever runs beside it.
    assert small_engine.play(engine, ORDER[5:6]) == {ORDER[5]: found[ORDER[5]]}


def test_a_stop_or_a_limit_in_a_run_of_right_guesses_ends_it():
  def generate(context, stop, most, guesses=7):
    engine = small_engine.engine(
      small_engine.params(), sampling=GREEDY, lookahead=guesses, decode_steps=8
    )
    request = types.GenerateRequest(
      types.Address(0, 0, 0), 0, tuple(context), most, stop
    )
    return asyncio.run(engine.generate(request)), engine.counters

  prompt = small_engine.prompt(0)
  free, _ = generate(prompt, (), 60, guesses=0)
  # By then it is in a loop, so that all guesses are right.
  context, rest = (*prompt, *free.token_ids[:40]), free.token_ids[40:]
  word = small_engine.TEXTS[rest[2]]
  for stop, most, count in (
    ((), 3, 3),
    ((word,), 20, 3),
    ((f"?{word}",), 20, 20),  # Halts at the word, and goes on.
  ):
    found, counts = generate(context, stop, most)
    alike([found], [generate(context, stop, most, guesses=0)[0]])
    assert found.token_ids == rest[:count]
    assert counts["lanes_used"] < count
