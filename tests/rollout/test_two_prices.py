"""Episodes with a cheap and a dear tool under a budget of cents."""

from __future__ import annotations

import asyncio

import hypothesis
import hypothesis.strategies as st
import pytest
import scripted

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import prompts, records, tools
from anysearch_jax.methods import systems
from anysearch_jax.rollout import driver, searching

PRICES = budgets.Prices(tools=(("search", 30.0), ("cheap", 10.0)))
QUESTION = types.Question("q", "Who wrote Emma?", ("Jane Austen",))
CHEAP_TOOL = tools.Tool("cheap", "<cheap>", "</cheap>")
HITS = {"a b": (types.Passage("1", "a", "b c"),)}


@pytest.fixture(autouse=True, scope="module")
def two_tools():
  env = prompts.PROMPTS["world"].with_tools(CHEAP_TOOL)
  systems.ENVIRONMENTS["two_prices"] = env
  yield
  del systems.ENVIRONMENTS["two_prices"]


def play(turns, cents, *, hits=HITS):
  found = scripted.Retriever(hits)
  return asyncio.run(
    driver.run_episode(
      QUESTION,
      driver.EpisodeParts(
        scripted.Engine(turns),
        searching.Toolbox({"search": found, "cheap": found}),
        config_lib.EpisodeConfig(prompts="two_prices"),
        scripted.CODEC,
      ),
      budget=budgets.Budget(dollars=cents / 100, prices=PRICES),
      scaffold=False,
      address=types.Address(0, 0, 0),
    )
  )


def think(action):
  return f"<think> x ; </think> {action}"


CHEAP = think("<cheap> a b </cheap>")
DEAR = think("<search> a b </search>")
ANSWER = think("<answer> c </answer>")


@pytest.mark.parametrize(
  "turns, cents, spent, tools, violation",
  [
    ([DEAR, ANSWER], 3, 0.03, ["search"], False),
    ([CHEAP, DEAR, ANSWER], 4, 0.04, ["cheap", "search"], False),
    # 2 cents do not pay for the dear one, and still pay for the cheap one.
    ([DEAR, CHEAP, ANSWER], 2, 0.01, ["cheap"], True),
    ([CHEAP, CHEAP, CHEAP, ANSWER], 2, 0.02, ["cheap", "cheap"], True),
    ([ANSWER], 1, 0.0, [], False),
  ],
)
def test_calls_are_charged_by_their_tool(turns, cents, spent, tools, violation):
  found = play(turns, cents)
  assert records.dollars(found) == pytest.approx(spent, abs=1e-15)
  assert [each.tool for each in found.observations] == tools
  assert found.violation is violation
  assert found.outcome is types.Outcome.ANSWERED


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  st.lists(
    st.sampled_from([CHEAP, DEAR, "Hm.", think("<cheap> </cheap>")]),
    max_size=14,
  ),
  st.integers(1, 20),
  st.lists(st.tuples(st.text(max_size=9), st.text(max_size=30)), max_size=3),
)
def test_no_episode_spends_more_than_its_cents(turns, cents, shown):
  """Whatever the retriever returns, and to the last affordable cent."""
  hits = {"a b": tuple(types.Passage("i", *each) for each in shown)}
  found = play([*turns, *[ANSWER] * 20], cents, hits=hits)
  made = [each.tool for each in found.observations]
  cost = sum({"cheap": 1, "search": 3}[tool] for tool in made)
  assert cost <= cents
  assert records.dollars(found) <= cents / 100
  # What was affordable was carried out.
  left, expected, bad = cents, [], 0
  for text in turns:
    price = {CHEAP: 1, DEAR: 3}.get(text)
    if price is None or price > left:
      bad += 1
      if bad > 2:
        break
      continue
    left -= price
    expected.append("cheap" if price == 1 else "search")
  assert made == expected
