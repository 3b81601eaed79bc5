"""Tests the expert's episodes: grammar, honesty, weights, probes, caps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re

import commands
import numpy as np
from exact_agents import CODEC, SETTING, WORLD

import anysearch_jax as aj
from anysearch_jax.launch import evaluate
from research import demonstrations
from research import expert as expert_lib

DEFAULT = expert_lib.PLAIN
# Searches for every fact, and again after a miss or a conflict.
THOROUGH = expert_lib.ExpertConfig(1, 1, 1, 1, 0, 0, 0)
NEVER = expert_lib.ExpertConfig(0, 0, 0, 0, 0, 0, 0)
CELLS = tuple((b, scaffold) for b in (0, 1, 2, 5) for scaffold in (False, True))
QUESTIONS = WORLD.questions("train", 40, 0)


def play(question, *, scaffold=False, expert=DEFAULT, seed=0, **options):
  found = demonstrations.demonstrate(
    question,
    dataclasses.replace(SETTING, expert=expert),
    scaffold=scaffold,
    rng=np.random.default_rng(seed),
    **options,
  )
  return found.trajectory, found.weights


@functools.cache
def play_all(expert, cells=CELLS, count=40, split="train"):
  """Plays questions at each (budget, scaffold)."""
  questions = WORLD.questions(split, count, 0)
  return [
    play(question, budget=b, scaffold=scaffold, expert=expert, seed=seed)
    for b, scaffold in cells
    for seed, question in enumerate(questions)
  ]


ENVIRONMENT = aj.get_environment("world")
judge = ENVIRONMENT.judge


def turns(trajectory: aj.Trajectory) -> list[str]:
  return [
    span.text for span in trajectory.spans if span.author is aj.Author.MODEL
  ]


def clauses(turn: str) -> list[str]:
  """Returns the clauses of a turn's thought."""
  thought = re.fullmatch(r"<think> (.*) ; </think> .*", turn)
  return thought[1].split(" ; ")


def test_a_thorough_expert_is_right_when_the_budget_allows():
  for cell, accuracy in (((14, False), 0.98), ((8, True), 0.9)):
    played = play_all(THOROUGH, (cell,), 60, "held-out")
    verdicts = [judge(trajectory) for trajectory, _ in played]
    assert np.mean([verdict.em for verdict in verdicts]) > accuracy
    assert all(verdict.format for verdict in verdicts)


def test_an_expert_that_trusts_memory_needs_the_fewest_searches():
  expert = dataclasses.replace(THOROUGH, p_search_known=0)
  for trajectory, _ in play_all(expert, ((20, False),)):
    metadata = trajectory.question.metadata
    stale = any(fact["stale"] for fact in metadata["facts"])
    assert judge(trajectory).em == (not stale)
    if not stale:
      assert trajectory.searches == metadata["min_searches"]


def test_episodes_are_well_formed_except_violations():
  violations = 0
  for trajectory, _ in play_all(DEFAULT):
    assert trajectory.outcome.value == "answered"
    assert judge(trajectory).format == (not trajectory.violation)
    violations += trajectory.violation
  assert violations > 0


def test_the_texts_are_those_of_the_ids():
  for trajectory, _ in play_all(DEFAULT, CELLS[:4]):
    response = trajectory.token_ids[trajectory.authors != aj.Author.PROMPT]
    texts = (span.text for span in trajectory.spans)
    assert CODEC.decode(response.tolist()) == CODEC.decode(
      [token for text in texts for token in CODEC.encode(text)]
    )
    for turn in turns(trajectory):
      assert CODEC.decode(CODEC.encode(turn)) == turn
    unknown = CODEC.hf.unk_token_id
    assert unknown not in trajectory.token_ids


def test_the_expert_recalls_what_memory_holds_and_guesses_the_rest():
  seen = set()
  for trajectory, _ in play_all(DEFAULT):
    for turn in turns(trajectory):
      said = clauses(turn)
      for need, reply in itertools.pairwise(said):
        if not need.startswith("need"):
          continue
        _, entity, relation = need.split()
        word, value = reply.split()
        seen.add((word, relation == "verdict"))
        if relation != "verdict":
          memory = expert_lib.recall(WORLD, entity, relation)
          assert (word == "recall") == (memory is not None)
          assert (
            value == memory
            if memory
            else value in expert_lib.objects(WORLD, relation)
          )
  assert seen == {("recall", False), ("guess", False), ("guess", True)}


def test_needs_follow_the_chain():
  for trajectory, _ in play_all(THOROUGH, ((20, False),)):
    asked = [
      clause.split()[1:]
      for turn in turns(trajectory)
      for clause in clauses(turn)
      if clause.startswith("need") and "verdict" not in clause
    ]
    facts = trajectory.question.metadata["facts"]
    expected = []
    for fact in facts:
      # After a miss, the same need is stated and the other wording searched.
      expected += [[fact["entity"], fact["relation"]]] * (1 + fact["misses"])
    assert asked == expected


def test_scaffold_states_sufficiency_and_budget():
  states = set()
  for trajectory, _ in play_all(THOROUGH, ((4, True),)):
    left = 4
    for turn in turns(trajectory):
      sufficiency, budget, *_ = clauses(turn)
      assert budget == ("empty", "tight", "tight", "ample", "ample")[left]
      # The information suffices once the only remaining action is to answer.
      assert (sufficiency == "sufficient") == ("need" not in turn)
      states.add((sufficiency, budget))
      left -= "<search>" in turn
  assert {("missing", "ample"), ("sufficient", "tight")} <= states


def test_redundant_searches_and_early_answers_follow_the_probabilities():
  expert = dataclasses.replace(THOROUGH, p_redundant=0.5)
  repeated = [
    len(trajectory.queries) - len(set(trajectory.queries))
    for trajectory, _ in play_all(expert, ((8, False),))
  ]
  assert np.mean(repeated) > 0.5
  for trajectory, _ in play_all(THOROUGH, ((8, False),)):
    assert len(set(trajectory.queries)) == trajectory.searches
  expert = dataclasses.replace(NEVER, p_early_answer=1)
  for trajectory, _ in play_all(expert, ((3, False),)):
    (turn,) = turns(trajectory)
    (need,) = [c for c in clauses(turn) if c.startswith("need")]
    assert need == f"need {' '.join(trajectory.question.text.split()[:2])}"


def test_weights_mark_only_decisions_of_the_model():
  for trajectory, weights in play_all(DEFAULT, CELLS[3:6]):
    assert weights.dtype == np.float32
    by_model = trajectory.authors == aj.Author.MODEL
    np.testing.assert_array_equal(weights > 0, by_model)
    assert set(weights[by_model].tolist()) <= {1.0, 3.0}
    words = CODEC.hf.convert_ids_to_tokens(trajectory.token_ids.tolist())
    for i in np.flatnonzero(by_model):
      before = words[i - 1]
      decides = (
        words[i] in ("nothing", "conflict", "found", "recall", "guess")
        or before in ("found", "recall", "<answer>")
        or (words[i] == "</think>" and words[i - 4] == "need")
      )
      assert (weights[i] == 3) == decides, words[max(i - 5, 0) : i + 1]


def test_equal_seeds_give_equal_episodes_whatever_the_weights():
  one, weights = play(QUESTIONS[0], budget=4, seed=3)
  other, heavier = play(QUESTIONS[0], budget=4, seed=3, decision_weight=7.0)
  np.testing.assert_array_equal(one.token_ids, other.token_ids)
  assert set(heavier.tolist()) == {0.0, 1.0, 7.0}
  np.testing.assert_array_equal(heavier == 7, weights == 3)


def test_probes_are_at_the_positions_of_their_decisions():
  probes = demonstrations.probe_sets(
    SETTING, "dev", count=150, seed=0, scaffold=True
  )
  assert {*probes.kinds.tolist()} == {*range(len(demonstrations.PROBE_KINDS))}
  words = [CODEC.hf.convert_ids_to_tokens(row) for row in probes.token_ids]
  for row, at, label, kind in zip(*probes[1:5], strict=True):
    assert at >= 1
    name = demonstrations.PROBE_KINDS[kind]
    before = words[row][:at]
    actual = words[row][at]
    said = CODEC.hf.convert_ids_to_tokens(int(label))
    if name in ("recall_known", "recall_unknown"):
      *_, need, entity, relation, end = before
      assert (need, end, said) == ("need", ";", "recall")
      assert actual in ("recall", "guess", "</think>")
      memory = expert_lib.recall(WORLD, entity, relation)
      assert (memory is not None) == (name == "recall_known")
      continue
    assert actual == said
    if name in ("nothing", "conflict", "found"):
      assert said == name
    else:
      verb, back = {"copy": ("found", 1), "memory": ("recall", 1)}.get(
        name, ("need", 2)
      )
      assert before[-back] == verb


def test_the_expert_plays_its_episodes_as_a_command_plays_them(tmp_path):
  said = commands.run(
    evaluate,
    "--config=configs/quickstart.py",
    "--scripted=research/expert.py:play",
    "--budgets=0,3",
    "--seeds=1",
    "--config.evaluation.questions=40",
    f"--output={tmp_path / 'played'}",
  )
  assert said == ""
  lines = (tmp_path / "played/episodes.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert {row["outcome"] for row in rows} == {"answered"}
  assert all(row["format"] != row["violation"] for row in rows)
  # Unlike exact agents, it also searches beyond its budget.
  assert any(row["violation"] for row in rows)
