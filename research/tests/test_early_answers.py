"""Early answers: played beside the episode, and what BRPO makes of them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
import scripted
from scripted import CODEC, answer, search
from spoken import of_authors

import anysearch_jax as aj
from research.methods import brpo, early_answers

CONFIG = aj.config.EpisodeConfig(prompts="world", max_generated=900)
HITS = {f"q{i}": [aj.Passage(str(i), f"T{i}", "text")] for i in range(9)}
PROMPT, MODEL, _ = aj.Author


class OneSlot(scripted.Engine):
  """Refuses a turn while another episode has its slot."""

  holder: aj.Address | None = None

  async def generate(self, request):
    assert self.holder in (None, request.address)
    self.holder = request.address
    return await super().generate(request)

  def release(self, address):
    self.holder = None if self.holder == address else self.holder
    super().release(address)


def test_early_answers_are_recorded_and_are_no_part_of_the_episode():
  def answers(request):
    if used := request.address.attempt >> 16:  # Of an early answer.
      read = CODEC.decode(request.token_ids)
      assert f"guide budget {used} question" in read and not request.may_search
      if "; answer now\n" in read:
        return answer("asked") if used == 1 else "nothing"
      return search("q2") if request.turn == used < 3 else answer("early 3")
    return search("q1") if request.turn < 3 else answer("last")

  question = aj.Question("id3", "Question 3?", ("a",))
  given = aj.Assignment(13, question, 3, True)
  engines = [OneSlot(answers) for _ in range(2)]
  environment = aj.environment_of(CONFIG)
  asking = dataclasses.replace(environment, step=early_answers.step)
  plain, early = (
    asyncio.run(
      aj.run_groups(
        [given],
        aj.EpisodeParts(engine, scripted.Retriever(HITS), CONFIG, CODEC, each),
        group=1,
        rollout=4,
      )
    )
    .groups[0]
    .trajectories[0]
    for engine, each in zip(engines, (environment, asking))
  )
  said = [each.answer for each in early.observations]
  assert said == ["asked", None, "early 3"]
  assert plain.spans == early.spans and plain.searches == early.searches == 3
  assert plain.token_ids.tolist() == early.token_ids.tolist()
  assert set(engines[1].released) == {
    request.address for request in engines[1].requests
  }


def test_budget_relative_advantages_equal_their_equation():
  rng, given = np.random.default_rng(3), {}
  words = {0: "no", 0.5: "tol a x x", 1: "tol"}  # F1 of 1/2: 2 (1/3) / (4/3).
  drawn = {}
  for q, g in itertools.product(range(3), range(4)):
    made = int(rng.integers(0, 6))
    scores = rng.choice(list(words), made + 1)
    said = [words[x] for x in scores]
    drawn[q, g] = [*scores[: max(made - 1, 0)], *[scores[-1]] * 5][:5]
    given[q, g] = of_authors(
      q,
      g,
      [PROMPT, MODEL],
      budget=5,
      searches=made,
      spans=(aj.Span(MODEL, f"<answer>{said[-1]}</answer>"),),
      observations=tuple(
        aj.Observation("search", "x", 0, answer=x) for x in said[:-1]
      ),
    )
  for (q, g), values in brpo.turns(given, None).items():
    made = given[q, g].searches
    for t, value in enumerate(values):
      s = min(t, max(made - 1, 0))
      returns = [sum(drawn[q, j][s:]) / 5 for j in range(4)]
      before = [2.0**b * drawn[q, g][b] for b in range(s)]
      v1 = sum(before) / max(2**s - 1, 1) * (5 - s) / 5
      baseline = (s * v1 + (5 - s) * sum(returns) / 4) / 5
      expected = returns[g] - baseline
      assert value == pytest.approx(expected, abs=1e-6)
