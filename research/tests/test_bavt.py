"""BAVT's tree: its draws, and that nothing that it spends is forgotten."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import scripted

import anysearch_jax as aj
from research import methods
from research.methods import bavt

PROMPTS = methods.prompts_name("bavt")
BAVT = aj.get_environment(PROMPTS)
ASKS = BAVT.step.keywords["critic"].asks


def test_less_budget_makes_draws_greedier_by_hand():
  values = np.array([0.3, 0.6])
  np.testing.assert_allclose(bavt.chances(values, 1), [1 / 3, 2 / 3])
  np.testing.assert_allclose(bavt.chances(values, 0.5), [0.2, 0.8])
  np.testing.assert_allclose(bavt.chances(values, 0.2), [1 / 33, 32 / 33])


@pytest.mark.parametrize(
  ("reply", "delta"),
  [
    ('{"reason": "new", "delta": 3}', 3),
    ('{"delta": 1} no: {"delta" : "-2"}', -2),
    ('{"delta": 99}', 4),
    ("delta 3", 0),
    ("", 0),
  ],
)
def test_progress_is_read_from_the_reply(reply, delta):
  assert bavt.progress(reply) == delta


def test_progress_in_the_world_is_what_a_search_found():
  asks = "<search> bedur mayor </search>"
  one, two = (f"Doc 1(Title: bedur ) mayor {x} ; " for x in ("tol", "gan"))
  other = "Doc 3(Title: bedur ) river tol ; Doc 4(Title: tol ) mayor gan ;"
  for step, progress in (
    *((asks + one + other, 4), (asks + one + two, 0), (asks + other, -4)),
    *((asks + one + one, 4), ("<answer> tol </answer>", 0)),
  ):
    assert bavt.found(step) == progress, step


@pytest.mark.parametrize("said", [scripted.search("q"), scripted.answer("x")])
def test_a_deadline_in_the_critics_turn_leaves_no_question(said):
  """The step that was judged is kept: it is landed, or it was the answer."""
  late = aj.episode.start(
    scripted.QUESTION,
    budget=aj.budgets.Budget(searches=3, seconds=9),
    scaffold=True,
    address=aj.Address(0, 0, 0),
    config=aj.config.EpisodeConfig(prompts=PROMPTS),
    environment=BAVT,
    codec=scripted.CODEC,
  )
  while not scripted.CODEC.decode(late.context).endswith(ASKS):
    is_turn = isinstance(late.request, aj.GenerateRequest)
    turn = scripted.turn(late.request, said) if is_turn else None
    late = BAVT.step(late, turn or aj.episode_state.Retrieved(()))
  late = BAVT.step(dataclasses.replace(late, elapsed=7.0), None)
  expected, searches = [said], 0
  if late.landing:
    expected, searches = [said, scripted.answer("x")], 1
    late = BAVT.step(late, scripted.turn(late.request, expected[1]))
  t = late.request.trajectory
  assert (t.outcome.value, t.seconds, t.searches) == ("answered", 7, searches)
  assert ASKS not in "".join(s.text for s in t.spans)
  assert [s.text for s in t.spans if s.author == aj.Author.MODEL] == expected
  assert len(expected) == 1 + ("</search>" in said)


def play(seed, budget, most):
  """Plays a policy and a critic that draw what they do."""
  rng, stated = np.random.default_rng(seed), []

  def say(request):
    read = scripted.CODEC.decode(request.token_ids)
    if used := re.findall(r"<budget>\w+=\d+; used=(\d+)", read):
      stated.append((int(used[-1]), len(found.requests)))
    if read.endswith(ASKS):
      return f'{{"delta": {rng.integers(-4, 5)}}}'
    hit, kind = rng.integers(3), rng.integers(8)
    if kind == 7:
      return "Hm."
    return scripted.answer("x") if kind < 3 else scripted.search(f"q{hit}")

  engine = scripted.Engine(say)
  found = scripted.Retriever({"q0": (aj.Passage("1", "t", "x"),)})
  made, generate = [], engine.generate

  async def counted(request):
    made.append(await generate(request))
    return made[-1]

  engine.generate = counted
  config = aj.config.EpisodeConfig(
    prompts=PROMPTS, max_generated=most, max_context=10**6
  )
  t = scripted.play(
    engine, found, config, budget=budget, scaffold=bool(seed % 2)
  )
  # After the backstop the budget is stated as used up.
  assert all(u in (n, t.budget) for u, n in stated)
  return t, engine, found, made


def test_every_call_and_token_of_every_branch_is_charged():
  left = answered = 0
  for seed in range(90):
    budget, most = aj.budgets.Budget(seed % 6), 100_000
    if seed % 5 == 3:
      budget = dataclasses.replace(budget, tokens=400)
    elif seed % 5 == 4:
      most = 300
    t, engine, found, made = play(seed, budget, most)
    assert len(found.requests) == t.searches <= budget.searches
    written = sum(len(turn.token_ids) for turn in made)
    assert written == t.written_tokens <= min(most, budget.tokens)
    read = sum(len(request.token_ids) for request in engine.requests)
    assert aj.records.input_tokens(t) == read
    assert ASKS not in "".join(s.text for s in t.spans)
    assert {r.address for r in engine.requests} <= {*engine.released}
    scripted.check_alignment(t)
    prices = aj.config.EvaluationConfig(search_price=1000.0).prices
    verdict = aj.scoring.Verdict("x", 1, None)
    row = aj.records.episode(t, verdict, seed=0, prices=prices)
    assert row["cost"] == pytest.approx(t.searches)
    left += t.searches - len(t.queries)
    answered += t.outcome is aj.Outcome.ANSWERED
  assert left > 30 and answered > 60  # The trees did branch.
