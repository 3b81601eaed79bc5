"""The frugal expert stays within a cap on tokens, and answers when asked."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from anysearch_jax import budgets, types
from anysearch_jax.environment import prompts
from anysearch_jax.policy import tokenizer
from anysearch_jax.world import (
  demonstrations,
  expert,
  experts,
  versions,
  world_tokenizer,
)
from anysearch_jax.world import world as world_lib
from configs import dual_budgets
from retrieval import lexical

WORLD = world_lib.World(versions.config("graded", 0))
FRUGAL = experts.get("frugal")
SETTING = demonstrations.Setting(
  WORLD,
  lexical.LexicalRetriever(WORLD.corpus).lookup,
  tokenizer.Tokenizer(world_tokenizer.build_tokenizer(WORLD)),
  dual_budgets.get_config().episode,
  FRUGAL.plain,
)
ROOM = SETTING.episode.answer_room
QUESTIONS = WORLD.questions("train", 80, 1)
THOROUGH = expert.ExpertConfig(1, 1, 1, 1, 0, 0, 0)
ENVIRONMENT = prompts.PROMPTS["world"]


def turns_with(limits, *, facts, found=True):
  """Returns the turns of a thorough expert, all under the same limits."""
  question = next(
    q
    for q in QUESTIONS
    if len(q.metadata["facts"]) == facts
    and all(f["known"] for f in q.metadata["facts"])
  )
  pupil = expert.Expert(
    question,
    world=WORLD,
    budget=8,
    scaffold=False,
    config=THOROUGH,
    rng=np.random.default_rng(0),
  )
  script, said, reply = pupil.turns(), [], None
  for limit in limits:
    pupil.limits = limit
    said.append(" ".join(script.send(reply).words))
    reply = []
  first, second = question.metadata["facts"][0], question.metadata["facts"][-1]
  return said, first, second


@pytest.mark.parametrize(
  ("left", "turn", "searches"),
  [
    # <think> need e r ; recall v ; </think> <answer> v </answer> are 12 tokens,
    # and a search that finds its value takes 6 more.
    (17, 17, False),
    (18, 18, True),
    # The turn itself has room for a search: 10 tokens.
    (18, 9, False),
    (40, 10, True),
  ],
)
def test_one_fact_is_searched_if_search_and_answer_fit(left, turn, searches):
  limits = expert.Limits(turn=turn, left=left)
  (said,), fact, _ = turns_with([limits], facts=1)
  need = f"<think> need {fact['entity']} {fact['relation']} ;"
  if searches:
    assert said.startswith(f"{need} </think> <search>")
  elif turn >= 12:
    value = WORLD.recall(fact["entity"], fact["relation"])
    assert said == (
      f"{need} recall {value} ; </think> <answer> {value} </answer>"
    )
  else:
    # The best guess of a turn without room for a thought is memory.
    value = WORLD.recall(fact["entity"], fact["relation"])
    assert said == f"<think> </think> <answer> {value} </answer>"


@pytest.mark.parametrize(
  ("left", "kind"),
  [
    # Two facts take 19 tokens by memory, 25 with a search for one of them.
    (18, "guess"),
    (19, "memory"),
    (24, "memory"),
    (25, "search"),
  ],
)
def test_two_facts_by_the_tokens_left(left, kind):
  (said,), first, last = turns_with(
    [expert.Limits(turn=left, left=left)], facts=2
  )
  need = f"<think> need {first['entity']} {first['relation']} ;"
  if kind == "guess":
    *start, value, end = said.split()
    assert start == ["<think>", "</think>", "<answer>"]
    assert value in WORLD.objects(last["relation"])
  elif kind == "memory":
    assert said.startswith(f"{need} recall") and said.count("recall") == 2
  else:
    assert said.startswith(f"{need} </think> <search>")


def test_expert_that_is_asked_does_not_search():
  plain = expert.Limits(turn=40, left=48)
  asked = expert.Limits(turn=38, left=38, asked=True)
  (_, said), _, _ = turns_with([plain, asked], facts=1)
  assert "recall" in said and said.endswith("</answer>")


def test_answer_that_was_cut_is_repeated_without_a_thought():
  (first, again), _, _ = turns_with(
    [expert.Limits(turn=12, left=12), expert.Limits(5, 5, asked=True)], facts=1
  )
  assert again == f"<think> </think> {first.partition('</think> ')[2]}"


@hypothesis.given(
  at=st.integers(0, len(QUESTIONS) - 1),
  searches=st.integers(0, 10),
  tokens=st.sampled_from(FRUGAL.caps),
  seed=st.integers(0, 2**31),
  careless=st.booleans(),
)
def test_episodes_answer_within_their_caps(
  at, searches, tokens, seed, careless
):
  trajectory, weights = demonstrations.demonstrate(
    QUESTIONS[at],
    SETTING,
    budget=budgets.Budget(searches, tokens),
    scaffold=False,
    rng=np.random.default_rng(seed),
    careless=careless,
  )
  assert trajectory.outcome is types.Outcome.ANSWERED
  assert trajectory.searches <= searches
  assert trajectory.generated_tokens <= tokens
  by_model = trajectory.authors == types.Author.MODEL
  assert not weights[~by_model].any()
  if not careless:
    assert ENVIRONMENT.judge(trajectory).format
    assert (weights > 0).sum() == by_model.sum()
    return
  texts = [span.text for span in trajectory.spans]
  if ENVIRONMENT.over_budget in texts and not trajectory.violation:
    # Only the answer that was asked for is learned from.
    asked = len(SETTING.codec.encode(texts[-1]))
    assert (weights > 0).sum() == asked


def test_cap_that_binds_nothing_changes_no_word():
  for seed, question in enumerate(QUESTIONS):
    free, capped = (
      demonstrations.demonstrate(
        question,
        dataclasses.replace(SETTING, expert=THOROUGH),
        budget=budget,
        scaffold=False,
        rng=np.random.default_rng(seed),
      )[0]
      for budget in (5, budgets.Budget(5, 250))
    )
    assert [s.text for s in free.spans] == [s.text for s in capped.spans]
