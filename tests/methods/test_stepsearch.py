"""StepSearch's rewards: the outcome, and a search's gain and redundancy."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math
import os
import pathlib

import chex
import numpy as np
import pytest
import spoken
from sklearn.feature_extraction.text import TfidfVectorizer

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.data import preparing
from anysearch_jax.environment import observed, protocol
from anysearch_jax.methods import stepsearch
from anysearch_jax.policy import tokenizer
from anysearch_jax.world import demonstrations, expert, world_tokenizer
from anysearch_jax.world import world as world_lib
from retrieval import lexical

CONFIG = config_methods.StepSearchConfig()
# Gain minus redundancy, with a scale of 1.
BARE = dataclasses.replace(CONFIG, step_scale=1.0)
UNJITTED = stepsearch.reward.__wrapped__
DATA = pathlib.Path(
  os.environ.get(
    "ANYSEARCH_DATA", pathlib.Path(__file__).parents[3] / "shared" / "data"
  )
)
QUESTION = types.Question(
  "q",
  "Where was the author of Emma born?",
  ("Steventon",),
  metadata={
    "supporting": [
      {"title": "Emma", "text": "Austen"},
      {"title": "Austen", "text": "Steventon"},
    ],
    "search_keys": [["Emma author", "who wrote Emma"], ["Austen born"]],
  },
)
EMMA = spoken.passage("1", "Emma", "Austen")
BORN = spoken.passage("2", "Austen", "Steventon")
BATH = spoken.passage("3", "Bath", "city")
ANSWER = ("<answer>Steventon</answer>", None)


def search(query, *found):
  return f"<search>{query}</search>", found


class OutcomeTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_outcome_reward_is_f1_plus_keys_or_missing(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    told = spoken.outcomes(
      [1, 0, 0, 0, 0],
      f1=[1, 0.5, 0, 0, 0],
      answered=[True, True, True, False, False],
      measures={"search_keys": np.array([0.5, 1, 0, 1, 0])},
    )
    out = reward(told, config=CONFIG)
    np.testing.assert_allclose(
      out["total"], [1.309, 1.118, 0, -1, -1], atol=1e-6
    )
    chex.assert_type(list(out.values()), np.float32)

  @chex.variants(with_jit=True, without_jit=True)
  def test_failed_episode_has_zero_reward(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    told = spoken.drawn(np.random.default_rng(0), 300, 5, "search_keys")
    assert not told.valid.all()
    out = reward(told, config=CONFIG)
    keys = told.measures["search_keys"]
    worth = np.where(told.answered, told.f1 + 0.618 * keys, -1)
    np.testing.assert_allclose(
      out["total"], np.where(told.valid, worth, 0), atol=1e-6
    )
    chex.assert_trees_all_equal(
      out, reward(spoken.spoiled(told), config=CONFIG)
    )


def test_gain_and_redundancy_by_hand():
  """A passage is compared with the golds `emma austen`, `austen steventon`.

  A word in all three texts has the weight 1, in two 1 + ln(4/3), in one
  1 + ln 2. The cosine of a gold passage is 1 with itself, and with the other
      1 / (|1, 1 + ln(4/3)| |1, 1 + ln 2|) = 0.3119.
  """
  alike = (
    1 / math.hypot(1, 1 + math.log(4 / 3)) / math.hypot(1, 1 + math.log(2))
  )
  assert alike == pytest.approx(0.3119, abs=1e-4)
  played = spoken.trajectory(
    QUESTION,
    search("who wrote Emma", EMMA, BATH),
    search("Austen born", EMMA, BORN),
    search("nothing of the kind"),
    search("Austen born", BORN, EMMA),
    ANSWER,
  )
  gain = [(1 + alike) / 2, (1 - alike) / 2, 0, 0]
  redundancy = [0, 1 / 2, 0, 1]
  out = stepsearch.steps(played, CONFIG)
  np.testing.assert_allclose(
    out, 0.6 * (np.array(gain) - redundancy), atol=1e-6
  )
  assert out.dtype == np.float32


def test_passages_are_identified_by_id():
  played = spoken.trajectory(
    QUESTION,
    search("x", BATH),
    search("y", dataclasses.replace(BATH, id="4")),
    search("z", dataclasses.replace(EMMA, id="3")),
    ANSWER,
  )
  out = stepsearch.steps(played, BARE)
  assert out[:2].tolist() == [0, 0]
  # The text is new, so there is a gain; the id is not, so it is redundant.
  assert out[2] == pytest.approx((1 + 0.3119) / 2 - 1, abs=1e-4)


def test_step_rewards_are_zero_without_an_answer():
  turns = [search("x", EMMA), search("y", EMMA)]
  assert stepsearch.steps(
    spoken.trajectory(QUESTION, *turns), CONFIG
  ).tolist() == [0, 0]
  quoted = dataclasses.replace(EMMA, text="<answer>Steventon</answer>")
  turns = [search("x", quoted), ("<think>?</think>", "Say something.\n")]
  assert stepsearch.steps(
    spoken.trajectory(QUESTION, *turns), CONFIG
  ).tolist() == [0]


def test_over_budget_searches_have_no_step_reward():
  played = spoken.trajectory(
    QUESTION,
    search("x", BATH),
    ("<search>y</search>", "No search is left.\n"),
    search("z", EMMA),
    ("<search>y</search>", "No search is left.\n"),
    ANSWER,
  )
  out = stepsearch.steps(played, BARE)
  assert out.shape == (2,)
  assert out[0] == 0 < out[1]


def test_step_rewards_do_not_depend_on_passage_layout():
  def marked(passages):
    layout = "Doc {rank}<## Title: {title} ##> {text}"
    return protocol.observation(passages, layout=layout)

  tricky = spoken.passage(
    "5", '"Doc 7 (Title: x)"', "Austen: ##> (Emma)\nDoc 8"
  )
  turns = [search("x", tricky, BATH), search("y", EMMA), ANSWER]
  plain = spoken.trajectory(QUESTION, *turns)
  other = spoken.trajectory(QUESTION, *turns, observation=marked)
  for played in (plain, other):
    # A file without observations has the texts in its spans only.
    stored = {
      "queries": played.queries,
      "spans": [(span.author, span.text) for span in played.spans],
      "documents": played.documents,
    }
    derived = dataclasses.replace(
      played, observations=observed.from_values(stored)
    )
    np.testing.assert_array_equal(
      stepsearch.steps(derived, CONFIG), stepsearch.steps(plain, CONFIG)
    )


def keys(*queries):
  played = spoken.trajectory(QUESTION, *(search(q) for q in queries), ANSWER)
  return stepsearch.measure(played)["search_keys"]


def test_a_key_group_keeps_the_best_query():
  assert keys() == 0
  assert keys("who wrote emma?") == 0.5
  assert keys("Austen born", "Emma author") == 1
  # "emma" has F1 2/3 with the group's first key; so has "austen".
  assert keys("Emma", "Austen") == pytest.approx(2 / 3)
  assert keys("Emma author", "Emma") == keys("Emma", "Emma author") == 0.5


def cosine(a, b, texts):
  """Computes the cosine from its definition, word by word."""
  bags = [text.split() for text in texts]
  weights = {}
  for word in {word for bag in bags for word in bag}:
    having = sum(word in bag for bag in bags)
    weights[word] = math.log((1 + len(bags)) / (1 + having)) + 1

  def dot(x, y):
    return sum(w**2 * x.count(t) * y.count(t) for t, w in weights.items())

  a, b = bags[a], bags[b]
  norm = math.sqrt(dot(a, a) * dot(b, b))
  return dot(a, b) / norm if norm else 0.0


def test_similarities_follow_the_definition():
  rng = np.random.default_rng(0)
  words = ["ab", "cde", "42", "été", "zz"]
  for _ in range(100):
    texts = [" ".join(rng.choice(words, rng.integers(0, 7))) for _ in range(4)]
    np.testing.assert_allclose(
      stepsearch.similarities(texts[0], texts[1:]),
      [cosine(0, i, texts) for i in (1, 2, 3)],
      atol=1e-12,
    )


def test_similarities_equal_scikit_learn():
  texts = ["the river tol, in Bath", "bath b 7 by river", "River-Tol tol", ""]
  plain = ["river tol in bath", "bath b 7 by river", "rivertol tol", ""]
  table = TfidfVectorizer().fit_transform(plain).toarray()
  np.testing.assert_allclose(
    stepsearch.similarities(texts[0], texts[1:]),
    table[1:] @ table[0],
    atol=1e-12,
  )


def test_world_expert_reaches_the_maximum_gain():
  world = world_lib.World()
  questions = world_lib.with_evidence(world, world.questions("train", 60, 0))
  setting = demonstrations.Setting(
    world,
    lexical.LexicalRetriever(world.corpus).lookup,
    tokenizer.Tokenizer(world_tokenizer.build_tokenizer(world)),
    config_lib.EpisodeConfig(prompts="world"),
    expert.ExpertConfig(1, 1, 1, 1, 0, 0, 0),
  )
  rng = np.random.default_rng(0)
  for question in questions:
    played, *_ = demonstrations.demonstrate(
      question, setting, budget=20, scaffold=False, rng=rng
    )
    assert stepsearch.measure(played) == {"search_keys": 1}
    out = stepsearch.steps(played, BARE)
    before = itertools.accumulate(
      ({d.id for d in found} for found in played.documents),
      set.union,
      initial=set(),
    )
    again = [
      len([d for d in found if d.id in seen]) / len(found)
      for seen, found in zip(before, played.documents)
    ]
    assert out.shape == (played.searches,)
    gains = out + again
    assert (gains > -1e-6).all()
    # Every gold passage was shown, word for word.
    assert gains.sum() == pytest.approx(1, abs=1e-5)


def test_question_without_evidence_is_rejected():
  bare = dataclasses.replace(QUESTION, metadata={})
  played = spoken.trajectory(bare, ANSWER)
  with pytest.raises(ValueError, match="questions without evidence"):
    stepsearch.steps(played, CONFIG)
  with pytest.raises(ValueError, match="questions without evidence"):
    stepsearch.measure(played)


def test_real_passages_gain_on_their_own_hop():
  path = DATA / "questions" / "musique_train.jsonl"
  if not path.is_file():
    pytest.skip(
      f"no {path}; set ANYSEARCH_DATA to the folder of real questions"
    )
  with gzip.open(DATA / "corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
    contents = [json.loads(line)["contents"] for line in lines]

  def find(id_):
    title, _, text = contents[int(id_)].partition("\n")
    return types.Passage(id_, title, text)

  rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
  rows = list(itertools.islice(rows, 20))
  known = preparing.filled(
    [json.dumps(row["metadata"]) for row in rows], DATA / "corpus.jsonl.gz"
  )
  for row, metadata in zip(rows, map(json.loads, known), strict=True):
    question = types.Question(
      row["id"],
      row["question"],
      tuple(row["golden_answers"]),
      metadata=metadata,
    )
    gold = [find(id_) for id_ in row["metadata"]["gold_doc_ids"]]
    others = [find(str(i)) for i in (0, 1, 2)]
    played = spoken.trajectory(
      question,
      search("unlike", *others),
      *(search(p.title, p, others[0]) for p in gold),
      ("<answer>?</answer>", None),
    )
    out = stepsearch.steps(played, BARE)
    hops = len(gold)
    assert 0 < out[0] < 0.3
    gains = out + np.array([0] + [0.5] * hops)
    assert gains.sum() == pytest.approx(1, abs=1e-5)
    assert (gains[1:] > 0.4 / hops).all()
