"""Tests official scores against a table worked out by hand.

Each row was derived on paper from the script that `official_scoring` names.
"""

from __future__ import annotations

import dataclasses
import json

import point_values
import pytest
import study

from anysearch_jax import config as config_lib
from anysearch_jax.environment import official_scoring, scoring
from anysearch_jax.evaluation import columns, measures
from anysearch_jax.launch import score

# Data set, answer, accepted answers, EM, F1.
TABLE = [
  # HotpotQA: yes and no share no word with other answers.
  ("hotpotqa", "Yes.", ["yes"], 1, 1),
  ("hotpotqa", "yes it is", ["yes"], 0, 0),
  ("hotpotqa", "no", ["No Doubt"], 0, 0),
  ("hotpotqa", "noanswer", ["noanswer here"], 0, 0),
  ("hotpotqa", "the Rush band", ["Rush"], 0, 2 / 3),
  ("hotpotqa", "the", ["an"], 1, 0),  # Both normalise to nothing.
  ("hotpotqa", "", ["Rush"], 0, 0),
  # 2WikiMultihopQA: the same rule, over all aliases.
  ("2wikimultihopqa", "USA", ["United States", "U.S.A."], 1, 1),
  ("2wikimultihopqa", "no one", ["no", "One"], 0, 2 / 3),
  # MuSiQue: no special rule for yes and no; two empty answers are equal.
  ("musique", "yes it is", ["yes"], 0, 1 / 2),
  ("musique", "the", ["a"], 1, 1),
  ("musique", "the", ["Stanley"], 0, 0),
  ("musique", "Stanley Hall", ["G. Stanley Hall", "Hall"], 0, 4 / 5),
  # TriviaQA: punctuation separates words, including underscores and quotes.
  ("triviaqa", "Jay-Z", ["jay z"], 1, 1),
  ("triviaqa", "O’Neill", ["o neill"], 1, 1),
  ("triviaqa", "Spider_Man", ["spider man"], 1, 1),
  ("triviaqa", "don´t`stop", ["don t stop"], 1, 1),
  ("triviaqa", "JayZ", ["jay z"], 0, 0),
  # NQ: an accent is a separate character, so both encodings of it are equal.
  ("nq", "Beyonc\u00e9", ["Beyonce\u0301"], 1, 1),
  ("nq", "Beyonce", ["Beyonc\u00e9"], 0, 0),
  ("nq", "March 14, 2018", ["14 March 2018"], 0, 1),
  # PopQA: the answer contains an accepted one, in one of three spellings.
  ("popqa", "an American politician", ["politician"], 1, 2 / 3),
  ("popqa", "Politician", ["politician"], 1, 1),
  ("popqa", "POLITICIAN", ["politician"], 0, 1),
  ("popqa", "politician", ["Politician"], 1, 1),
  ("popqa", "", ["Politician"], 0, 0),
  ("popqa", "x", ["", "y"], 1, 0),
  # Bamboogle has no script.
  ("bamboogle", "James Madison", ["james madison"], 1, 1),
  # A word counts as often as it is in both.
  ("bamboogle", "cat cat", ["cat"], 0, 2 / 3),
]


@pytest.mark.parametrize(("dataset", "answer", "accepted", "em", "f1"), TABLE)
def test_an_answer_scores_as_in_the_script(dataset, answer, accepted, em, f1):
  found = official_scoring.score(dataset, answer, accepted)
  assert found.em == em
  assert found.f1 == pytest.approx(f1)


def test_a_missing_answer_scores_zero_and_an_unknown_set_has_no_score():
  assert official_scoring.score("nq", None, ["x"]) == (0, 0.0)
  assert official_scoring.score("nq", "x", []) == (0, 0.0)
  assert official_scoring.score("world", "x", ["x"]) is None


def _episode(dataset, answer, golden, **metadata):
  (episode,) = study.row("a", questions=1, budgets=(1,), plain=True).episodes
  return {
    **episode,
    "dataset": dataset,
    "question_id": f"{dataset}/{answer}",
    "answer": answer,
    "golden_answers": golden,
    "em": scoring.exact_match(answer, golden),
    "metadata": metadata,
    "outcome": "answered",
  }


def test_a_report_has_the_papers_and_the_official_scores():
  rows = [
    _episode("hotpotqa", "yes it is", ["yes"]),
    _episode("2wikimultihopqa", "USA", ["America"], official_answers=["usa"]),
  ]
  parts = columns.by_dataset(rows)
  hotpot, wiki = (
    point_values.cell(parts[name]) for name in ("hotpotqa", "2wikimultihopqa")
  )
  assert (hotpot.f1, hotpot.official_f1) == (0.5, 0.0)
  assert (wiki.accuracy, wiki.official_accuracy) == (0.0, 1.0)
  average = measures.estimates(rows, ("official_accuracy",), weigh_sets=True)
  assert average["official_accuracy"].value == 0.5


def test_official_answers_must_be_a_list_of_texts():
  for wrong in ("x", [1], {"x": 1}):
    with pytest.raises(ValueError, match="'nq/x': Found answers .* list of"):
      columns.of([_episode("nq", "x", ["x"], official_answers=wrong)])


def test_the_official_scorer_only_adds_columns_to_a_score_file(tmp_path):
  spans = [
    {"author": "model", "text": "<think>t</think><answer>Jay-Z</answer>"}
  ]
  item = {"spans": spans, "searches": 0, "generated_tokens": 5}
  line = {
    "question": "q?",
    "golden_answers": ["jay z"],
    "dataset": "triviaqa",
    "budget": 1,
    "scaffold": False,
    "trajectories": [item, {**item, "failed": True}],
  }
  source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  plain = config_lib.ExperimentConfig()
  config = dataclasses.replace(
    plain, evaluation=config_lib.EvaluationConfig(scorer="official")
  )

  def scored(line, config):
    source.write_text(json.dumps(line) + "\n")
    score.score_file(source, target, config)
    return json.loads(target.read_text())["trajectories"]

  before, after = scored(line, plain), scored(line, config)
  extra = [
    {key: row.pop(key) for key in official_scoring.NAMES} for row in after
  ]
  assert after == before and before[0]["em"] == 0
  assert extra == [
    {"official_em": 1, "official_f1": 1.0},
    {"official_em": None, "official_f1": None},
  ]
  line["official_answers"] = ["other"]
  assert scored(line, config)[0]["official_em"] == 0
  del line["dataset"]
  assert scored(line, plain) == before
  with pytest.raises(ValueError, match="1: dataset: found .* Field required"):
    scored(line, config)
