"""Rules: what they see, what is replaced, and what it is charged."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import scripted

import anysearch_jax as aj
from research import methods
from research.methods import control

HITS = {"look": [aj.Passage("p", "T", "x")]}
LIMITS = {"max_generated": 2000, "max_context": 9000}
REFUSED = "No search is left"
NEVER, ALWAYS = -1.0, 1.0


def of_scores(ask=ALWAYS, answer=NEVER, tries=2):
  """Returns a rule with these scores, whatever it sees."""
  scores = {control.ASK: ask, control.ANSWER: answer}
  return control.Rule(lambda proposal, seen, cap: scores[proposal] > 0, tries)


def play(script, rule=None, budget=2, scaffold=False, **limits):
  """Plays an episode; `script` is of an engine, or is the engine."""
  is_engine = isinstance(script, scripted.Engine)
  engine = script if is_engine else scripted.Engine(script)
  config = aj.config.EpisodeConfig(**LIMITS | limits)
  environment = aj.environment_of(config)
  if rule is not None:
    environment = control.steered(environment, rule)
  trajectory = scripted.play(
    engine,
    scripted.Retriever(HITS),
    config,
    budget=budget,
    scaffold=scaffold,
    environment=environment,
  )
  # The engine forgets every address that it was asked for.
  assert {r.address for r in engine.requests} <= set(engine.released)
  return trajectory, engine


def context(request):
  return scripted.CODEC.decode(request.token_ids)


def asks_until_refused(request):
  refused = REFUSED in context(request)
  return scripted.answer("x") if refused else scripted.search("look")


def test_refused_search_is_answered_as_if_the_budget_were_used_up():
  found, engine = play(asks_until_refused, of_scores(ask=NEVER))
  assert (found.searches, found.outcome) == (0, aj.Outcome.ANSWERED)
  assert found.budget == 2 and not found.violation
  assert found.discarded_tokens == 0
  alone, _ = play(asks_until_refused, budget=0)
  assert [span.text for span in found.spans] == [s.text for s in alone.spans]
  # And it stays refused.
  stubborn, _ = play(lambda _: scripted.search("look"), of_scores(ask=NEVER))
  assert (stubborn.searches, stubborn.outcome) == (0, aj.Outcome.INVALID)


def hesitant(request):
  """Searches at its third attempt, once."""
  searched = "<information>Doc" in context(request)
  if request.address.attempt == 4 and not searched:
    return scripted.search("look")
  return scripted.answer("x" if searched else "y")


def test_replaced_answer_is_charged():
  found, engine = play(hesitant, of_scores(answer=ALWAYS), budget=1)
  assert found.searches == 1 and len(engine.requests) == 4
  tries = [engine.requests[i].token_ids for i in range(3)]
  assert tries[0] == tries[1] == tries[2]
  answer = len(scripted.answer("y"))
  assert found.discarded_tokens == 2 * answer
  assert found.discarded_input == 2 * len(tries[0])
  assert found.written_tokens == found.generated_tokens + 2 * answer
  row = aj.records.trajectory(found)
  assert row["generated_tokens"] == found.written_tokens
  assert row["discarded_tokens"] == 2 * answer
  assert aj.records.input_tokens(found) == sum(
    len(request.token_ids) for request in engine.requests
  )
  prices = aj.budgets.Prices(output=1e6)
  assert aj.records.dollars(found, prices) == found.written_tokens


def test_stated_budget_is_that_of_now():
  """The scaffold states what discarded turns and a refusal left."""

  def stated(*arguments, prompts="paper", **budget):
    budget = aj.budgets.Budget(**budget)
    _, engine = play(*arguments, budget, scaffold=True, prompts=prompts)
    blocks = (context(r).rpartition("<budget>")[2] for r in engine.requests)
    return [block.partition("</budget>")[0] for block in blocks]

  used, answer = "remaining=1; used=0; total=1", len(scripted.answer("y"))
  always = of_scores(answer=ALWAYS)
  assert stated(hesitant, always, searches=1, tokens=400)[:3] == [
    f"{used} ; tokens remaining={400 - n}; used={n}; total=400"
    for n in (0, answer, 2 * answer)
  ]
  never = of_scores(ask=NEVER)
  for name in ("paper", "zerosearch"):  # There, turns are the budget.
    refused = stated(asks_until_refused, never, prompts=name, searches=2)
    assert refused[1] == "remaining=0; used=2; total=2"
  assert stated(asks_until_refused, never, tokens=400)[1].startswith("used=0 ;")


def test_answer_that_never_asks_is_kept():
  def sure(request):
    return scripted.answer("xyz"[request.address.attempt // 2])

  found, engine = play(sure, of_scores(answer=ALWAYS))
  assert len(engine.requests) == 3
  assert found.spans[-1].text == scripted.answer("x")
  assert found.discarded_tokens == 2 * len(scripted.answer("x"))
  # Without a search left there is nothing to gain.
  found, engine = play(sure, of_scores(answer=ALWAYS), budget=0)
  assert len(engine.requests) == 1


def test_engine_that_fails_meanwhile_leaves_the_answer():
  def failing(request):
    if request.address.attempt:
      raise aj.EngineError("down")
    return scripted.answer("x")

  found, _ = play(failing, of_scores(answer=ALWAYS))
  assert found.outcome is aj.Outcome.ANSWERED
  assert found.discarded_tokens == 0


def test_rule_that_accepts_changes_nothing():
  rule = of_scores(ask=ALWAYS, answer=NEVER)
  for script in (asks_until_refused, hesitant):
    alone, _ = play(script)
    steered, _ = play(script, rule)
    assert aj.records.trajectory(steered) == aj.records.trajectory(alone)
    assert steered.token_ids.tolist() == alone.token_ids.tolist()


@hypothesis.given(
  tokens=st.integers(1, 400),
  searches=st.integers(0, 3),
  tries=st.integers(0, 4),
)
@hypothesis.settings(
  max_examples=60,
  deadline=None,
)
def test_caps_hold_with_what_is_discarded(tokens, searches, tries):
  rule = of_scores(answer=ALWAYS, tries=tries)
  budget = aj.budgets.Budget(searches=searches, tokens=tokens)
  found, engine = play(hesitant, rule, budget)
  sampled = 0
  for request in engine.requests:
    sampled += len(scripted.turn(request, hesitant(request)).token_ids)
  assert found.written_tokens == sampled <= tokens
  assert found.searches <= searches


def test_rule_keeps_no_room_besides():
  # An answer that takes the whole cap is not cut for the sake of a landing.
  answer = scripted.answer("x" * 60)
  budget = aj.budgets.Budget(searches=1, tokens=len(answer))
  found, _ = play(
    lambda _: answer, of_scores(ask=ALWAYS), budget, answer_room=40
  )
  assert found.outcome is aj.Outcome.ANSWERED
  cut, _ = play(lambda _: answer, None, budget, answer_room=40)
  assert cut.outcome is not aj.Outcome.ANSWERED


def test_what_is_seen_of_an_episode():
  config = aj.config.EpisodeConfig(max_generated=900, max_context=5000)
  state = aj.episode.start(
    aj.Question("q", "Q?", ()),
    budget=aj.budgets.Budget(searches=3, tokens=300),
    scaffold=False,
    address=aj.Address(0, 0, 0),
    config=config,
    environment=aj.environment_of(config),
    codec=scripted.CODEC,
  )
  written = 0
  for query, repeated in (("a", 0), ("b", 0), ("a", 1)):
    turn = scripted.turn(state.request, scripted.search(query))
    state = aj.episode.step(state, turn)
    written += len(turn.token_ids)
    found = control.seen(state)
    assert found[:3] == (state.searches_used, 3 - state.searches_used, written)
    assert found.turn == written / state.turns
    assert found.repeated == repeated
    mean = sum(turn.logps) / len(turn.logps)
    assert found.logp == pytest.approx(mean, abs=1e-5)
    assert state.token_cap == 300
    assert isinstance(state.request, aj.SearchRequest)
    state = aj.episode.step(state, aj.episode.episode_state.Retrieved(()))


def steered_by_itself():
  rule = of_scores()
  return control.steered(aj.get_environment("paper"), rule)


@pytest.mark.parametrize(
  "environment",
  [
    aj.get_environment(methods.prompts_name("bats_verify")),
    aj.get_environment(methods.prompts_name("bavt")),
    steered_by_itself(),
  ],
)
def test_environment_that_is_steered_already_is_refused(environment):
  with pytest.raises(ValueError, match="steered already"):
    control.steered(environment, of_scores())


RULE = """import anysearch_jax as aj
from research.methods import control
rule = control.Rule(lambda proposal, seen, cap: seen.{attribute} > 0)
environment = control.steered(aj.get_environment("paper"), rule)
SYSTEM = aj.Method("steered", "Steered", {{"paper": environment}})
"""


def by_name(folder, attribute):
  """Plays an episode whose rule is in a file of a user's."""
  path = folder / "mine.py"
  path.write_text(RULE.format(attribute=attribute))
  prompts = f"{path}:SYSTEM#paper"
  return play(asks_until_refused, prompts=prompts)[0]


def test_rule_of_a_user_is_named_as_an_environment(tmp_path):
  assert by_name(tmp_path, "made").searches == 0


def test_error_of_a_rule_names_its_line(tmp_path):
  with pytest.raises(ValueError, match="mine.py, line 3: AttributeErr"):
    by_name(tmp_path, "nothing")
