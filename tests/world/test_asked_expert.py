"""The expert answers when an episode asks it to, as at a cap on tokens."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import prompts
from anysearch_jax.policy import tokenizer
from anysearch_jax.world import demonstrations, expert, world_tokenizer
from anysearch_jax.world import world as world_lib
from retrieval import lexical

WORLD = world_lib.World()
SETTING = demonstrations.Setting(
  WORLD,
  lexical.LexicalRetriever(WORLD.corpus).lookup,
  tokenizer.Tokenizer(world_tokenizer.build_tokenizer(WORLD)),
  # An answer to what a search has found takes 8 tokens.
  config_lib.EpisodeConfig(
    prompts="world", max_generated=300, max_context=544, answer_room=8
  ),
)
QUESTIONS = WORLD.questions("train", 80, 1)
THOROUGH = expert.ExpertConfig(1, 1, 1, 1, 0, 0, 0)
ENVIRONMENT = prompts.PROMPTS["world"]


def turns_with(rooms, *, facts):
  """Returns the turns of a thorough expert, whose searches find nothing.

  Args:
    rooms: for each turn, what `Expert.room` is.
    facts: of the question's chain; memory holds all of them.
  """
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
  for room in rooms:
    pupil.room = room
    said.append(" ".join(script.send(reply).words))
    reply = []
  return said, question.metadata["facts"]


@pytest.mark.parametrize(
  ("facts", "room", "by_memory"),
  [
    # `<think>` is 1 token, `need e r ; recall v ;` 7 for each fact, and
    # `</think> <answer> v </answer>` 4.
    (1, 12, True),
    (1, 11, False),
    (2, 19, True),
    (2, 18, False),
    (2, 5, False),
  ],
)
def test_asked_expert_ends_the_chain_by_memory_if_that_fits(
  facts, room, by_memory
):
  (said,), chain = turns_with([room], facts=facts)
  memories = [WORLD.recall(f["entity"], f["relation"]) for f in chain]
  if by_memory:
    clauses = "".join(
      f"need {f['entity']} {f['relation']} ; recall {memory} ; "
      for f, memory in zip(chain, memories, strict=True)
    )
    answer = f"</think> <answer> {memories[-1]} </answer>"
    assert said == f"<think> {clauses}{answer}"
    return
  *start, value, end = said.split()
  assert start == ["<think>", "</think>", "<answer>"] and end == "</answer>"
  if facts == 1:
    assert value == memories[0]
  else:
    assert value in WORLD.objects(chain[-1]["relation"])


def test_expert_searches_until_it_is_asked():
  (free, asked), _ = turns_with([None, 38], facts=1)
  assert free.endswith("</search>")
  assert "recall" in asked and asked.endswith("</answer>")


def test_answer_that_was_cut_is_repeated_without_a_thought():
  (first, again), _ = turns_with([12, 5], facts=1)
  assert again == f"<think> </think> {first.partition('</think> ')[2]}"


@hypothesis.given(
  at=st.integers(0, len(QUESTIONS) - 1),
  searches=st.integers(0, 10),
  tokens=st.sampled_from(range(20, 201, 10)),
  seed=st.integers(0, 2**31),
)
def test_episodes_answer_within_their_caps(at, searches, tokens, seed):
  trajectory, weights, *_ = demonstrations.demonstrate(
    QUESTIONS[at],
    SETTING,
    budget=budgets.Budget(searches, tokens),
    scaffold=False,
    rng=np.random.default_rng(seed),
  )
  assert trajectory.outcome is types.Outcome.ANSWERED
  assert trajectory.searches <= searches
  assert trajectory.generated_tokens <= tokens
  by_model = trajectory.authors == types.Author.MODEL
  assert not weights[~by_model].any()
  learned = (weights > 0).sum()
  texts = [span.text for span in trajectory.spans]
  if ENVIRONMENT.over_budget not in texts:
    assert learned == by_model.sum()
  elif not trajectory.violation:
    # Only the answer that was asked for is learned from.
    assert learned == len(SETTING.codec.encode(texts[-1]))


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
