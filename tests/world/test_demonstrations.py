"""Tests the expert's episodes: grammar, honesty, weights, probes."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import prompts, protocol
from anysearch_jax.policy import tokenizer
from anysearch_jax.world import demonstrations, world_tokenizer
from anysearch_jax.world import expert as expert_lib
from anysearch_jax.world import world as world_lib
from retrieval import lexical

WORLD = world_lib.World()
CODEC = tokenizer.Tokenizer(world_tokenizer.build_tokenizer(WORLD))
SETTING = demonstrations.Setting(
  WORLD,
  lexical.LexicalRetriever(WORLD.corpus).lookup,
  CODEC,
  config_lib.EpisodeConfig(prompts="world"),
)
DEFAULT = expert_lib.PLAIN
# Searches for every fact, and again after a miss or a conflict.
THOROUGH = expert_lib.ExpertConfig(
  p_search_known=1,
  p_search_unknown=1,
  p_retry_on_miss=1,
  p_check_on_conflict=1,
  p_over_budget=0,
  p_redundant=0,
  p_early_answer=0,
)
NEVER = expert_lib.ExpertConfig(0, 0, 0, 0, 0, 0, 0)
CELLS = [(b, scaffold) for b in (0, 1, 2, 5, 8) for scaffold in (False, True)]
QUESTIONS = WORLD.questions("train", 40, 0)


def play(
  question,
  *,
  budget,
  scaffold=False,
  expert=DEFAULT,
  codec=CODEC,
  seed=0,
  **options,
):
  found = demonstrations.demonstrate(
    question,
    dataclasses.replace(SETTING, expert=expert, codec=codec),
    budget=budget,
    scaffold=scaffold,
    rng=np.random.default_rng(seed),
    **options,
  )
  return found.trajectory, found.weights


def play_all(expert, cells=CELLS, questions=QUESTIONS):
  for budget, scaffold in cells:
    for seed, question in enumerate(questions):
      yield play(
        question, budget=budget, scaffold=scaffold, expert=expert, seed=seed
      )


judge = prompts.PROMPTS["world"].judge


def turns(trajectory: types.Trajectory) -> list[str]:
  return [
    span.text for span in trajectory.spans if span.author is types.Author.MODEL
  ]


def clauses(turn: str) -> list[str]:
  """Returns the clauses of a turn's thought."""
  thought = re.fullmatch(r"<think> (.*) ; </think> .*", turn)
  return thought[1].split(" ; ")


def met(trajectory: types.Trajectory) -> list[tuple[str, str]]:
  """Returns what each search found, by its passages, and the next thought.

  The pairs are (`found v`, `conflict` or `nothing`; the thought after it).
  """
  wordings = {r.name: {r.name, r.alternative} for r in world_lib.RELATIONS}
  wordings |= {r.alternative: wordings[r.name] for r in world_lib.RELATIONS}
  wordings["verdict"] = {"verdict"}
  said = []
  texts = [span.text for span in trajectory.spans]
  model = [i for i, s in enumerate(trajectory.spans) if s.author == 1]
  for i, following in itertools.pairwise(model):
    entity, wording = protocol.last_content(texts[i], "search").split()
    page = protocol.last_content(
      "".join(texts[i + 1 : following]), "information"
    )
    if page is None:  # An error line.
      continue
    lines = re.findall(rf"\(Title: {entity}\) (\w+) (\w+)", page)
    values = {value for word, value in lines if word in wordings[wording]}
    truth = ("nothing", f"found {''.join(values)}", "conflict")[len(values)]
    said.append((truth, texts[following]))
  return said


def test_a_thorough_expert_is_right_when_the_budget_allows():
  questions = WORLD.questions("held-out", 120, 0)
  played = list(play_all(THOROUGH, [(14, False)], questions))
  right = [judge(trajectory).em for trajectory, _ in played]
  assert np.mean(right) > 0.99
  played = list(play_all(THOROUGH, [(8, True)], questions))
  verdicts = [judge(trajectory) for trajectory, _ in played]
  assert np.mean([verdict.em for verdict in verdicts]) > 0.9
  assert all(verdict.format for verdict in verdicts)


def test_an_expert_that_trusts_memory_needs_the_fewest_searches():
  expert = dataclasses.replace(THOROUGH, p_search_known=0)
  for trajectory, _ in play_all(expert, [(20, False)]):
    metadata = trajectory.question.metadata
    stale = any(fact["stale"] for fact in metadata["facts"])
    assert judge(trajectory).em == (not stale)
    if not stale:
      assert trajectory.searches == metadata["min_searches"]


def test_episodes_are_well_formed_except_violations():
  violations = 0
  for trajectory, _ in play_all(DEFAULT):
    assert trajectory.outcome is types.Outcome.ANSWERED
    assert judge(trajectory).format == (not trajectory.violation)
    violations += trajectory.violation
  assert violations > 0


def test_the_texts_are_those_of_the_ids():
  for trajectory, _ in play_all(DEFAULT, CELLS[:4]):
    response = trajectory.token_ids[trajectory.authors != types.Author.PROMPT]
    texts = (span.text for span in trajectory.spans)
    assert CODEC.decode(response.tolist()) == CODEC.decode(
      [token for text in texts for token in CODEC.encode(text)]
    )
    for turn in turns(trajectory):
      assert CODEC.decode(CODEC.encode(turn)) == turn
    unknown = CODEC.hf.unk_token_id
    assert unknown not in trajectory.token_ids


def test_a_thought_states_what_the_passages_state():
  kinds = set()
  for trajectory, _ in play_all(DEFAULT):
    for truth, following in met(trajectory):
      first = clauses(following)[2 if trajectory.scaffold else 0]
      assert first == truth
      kinds.add(first.split()[0])
  assert kinds == {"nothing", "found", "conflict"}


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
          memory = WORLD.recall(entity, relation)
          assert (word == "recall") == (memory is not None)
          assert value == memory if memory else value in WORLD.objects(relation)
  assert seen == {("recall", False), ("guess", False), ("guess", True)}


def test_needs_follow_the_chain():
  for trajectory, _ in play_all(THOROUGH, [(20, False)]):
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
  for trajectory, _ in play_all(THOROUGH, [(4, True)]):
    left = 4
    for turn in turns(trajectory):
      sufficiency, budget, *_ = clauses(turn)
      assert budget == ("empty", "tight", "tight", "ample", "ample")[left]
      # The information suffices once the only remaining action is to answer.
      assert (sufficiency == "sufficient") == ("need" not in turn)
      states.add((sufficiency, budget))
      left -= "<search>" in turn
  assert {("missing", "ample"), ("sufficient", "tight")} <= states


def test_no_budget_means_no_search():
  for trajectory, _ in play_all(THOROUGH, [(0, False)]):
    assert len(turns(trajectory)) == 1
    assert trajectory.queries == ()
    assert not trajectory.violation


def test_one_search_over_budget_is_followed_by_an_answer():
  expert = dataclasses.replace(DEFAULT, p_over_budget=1, p_search_unknown=1)
  tried = 0
  for trajectory, _ in play_all(expert, [(0, False), (0, True)]):
    assert len(turns(trajectory)) == 1 + trajectory.violation
    assert "recall" in turns(trajectory)[0] or trajectory.violation
    assert trajectory.outcome is types.Outcome.ANSWERED
    tried += trajectory.violation
  assert tried > 50


def test_redundant_searches_and_early_answers_follow_the_probabilities():
  expert = dataclasses.replace(THOROUGH, p_redundant=0.5)
  repeated = [
    len(trajectory.queries) - len(set(trajectory.queries))
    for trajectory, _ in play_all(expert, [(8, False)])
  ]
  assert np.mean(repeated) > 0.5
  for trajectory, _ in play_all(THOROUGH, [(8, False)]):
    assert len(set(trajectory.queries)) == trajectory.searches
  expert = dataclasses.replace(NEVER, p_early_answer=1)
  for trajectory, _ in play_all(expert, [(3, False)]):
    (turn,) = turns(trajectory)
    (need,) = [c for c in clauses(turn) if c.startswith("need")]
    assert need == f"need {' '.join(trajectory.question.text.split()[:2])}"


def test_equal_seeds_give_equal_episodes():
  one, weights = play(QUESTIONS[0], budget=4, seed=3)
  other, same = play(QUESTIONS[0], budget=4, seed=3)
  np.testing.assert_array_equal(one.token_ids, other.token_ids)
  np.testing.assert_array_equal(weights, same)


def test_weights_mark_only_decisions_of_the_model():
  for trajectory, weights in play_all(DEFAULT, CELLS[3:6]):
    assert weights.dtype == np.float32
    by_model = trajectory.authors == types.Author.MODEL
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


def test_decision_weight_is_an_argument():
  _, weights = play(QUESTIONS[0], budget=4, decision_weight=7.0)
  assert set(weights.tolist()) == {0.0, 1.0, 7.0}


def test_a_tokenizer_that_splits_words_is_refused():
  class Split:
    end_of_turn_ids = frozenset({0})
    control_tokens = ()

    def encode(self, text):
      return list(map(ord, text))

    def render(self, content):
      return content, self.encode(content)

  with pytest.raises(ValueError, match="Use the tokenizer of the world"):
    play(QUESTIONS[0], budget=0, codec=Split())


@pytest.mark.parametrize("scaffold", [False, True])
def test_probes_are_at_the_positions_of_their_decisions(scaffold):
  probes = demonstrations.probe_sets(
    SETTING, "dev", count=150, seed=0, scaffold=scaffold
  )
  assert set(probes.kinds.tolist()) == set(
    range(len(demonstrations.PROBE_KINDS))
  )
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
      memory = WORLD.recall(entity, relation)
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
