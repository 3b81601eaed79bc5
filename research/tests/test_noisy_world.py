"""The noisy world: what passages state, the optimum in three ways, rewards."""

from __future__ import annotations

import collections

import commands
import numpy as np
import pytest

import anysearch_jax as aj
from anysearch_jax.launch import evaluate
from research import noisy_agent as agent
from research import noisy_optimum as optimum
from research import noisy_world as world

CONFIG = world.get_config()
V, U = len(world.VALUES), world.NO_ANSWER


def test_questions_and_passages_have_the_stated_probabilities():
  asked = world.questions("train")
  every = [q.id for split in world._SIZES for q in world.questions(split)]
  assert len(set(every)) == len(every)
  for relation, trust in world.TRUST.items():
    known = [q.metadata for q in asked if q.metadata["relation"] == relation]
    answers = [m["answer"] for m in known if m["answer"]]
    assert 1 - len(answers) / len(known) == pytest.approx(U, abs=0.04)
    kept = np.mean([m["memory"] == m["answer"] for m in known if m["answer"]])
    assert kept == pytest.approx(trust, abs=0.05)
    top = max(collections.Counter(answers).values()) / len(answers)
    assert top < 0.25  # No value is the answer more often than others.
  for source, right in world.RIGHT.items():
    shown = [[world.stated(q, source, n) for n in range(2)] for q in asked]
    hits = np.array(
      [[s == q.metadata["answer"] for s in x] for q, x in zip(asked, shown)]
    )
    exists = np.array([q.metadata["answer"] is not None for q in asked])
    np.testing.assert_allclose(hits[exists].mean(0), right, atol=0.03)
    both = hits[exists].all(1).mean()
    assert both == pytest.approx(right**2, abs=0.03)  # They are independent.
    equal = np.array([one == two for one, two in shown])
    assert equal[~exists].mean() == pytest.approx(1 / V, abs=0.04)
    wrong = right**2 + (1 - right) ** 2 / (V - 1)
    assert equal[exists].mean() == pytest.approx(wrong, abs=0.03)


def expectimax(memory, trust, history, left):
  """Returns the best expected reward over all histories, without counters."""
  prior = dict.fromkeys(world.VALUES, (1 - U) / V) | {None: U}
  if memory:
    other = (1 - trust) / (V - 1)
    for v in world.VALUES:
      prior[v] = (1 - U) * (trust if v == memory else other)

  def likelihood(answer, source, value):
    p = world.RIGHT[source]
    if answer is None:
      return 1 / V
    return p if value == answer else (1 - p) / (V - 1)

  joint = {
    answer: p * np.prod([likelihood(answer, *seen) for seen in history])
    for answer, p in prior.items()
  }
  total = sum(joint.values())
  worths = [joint[v] / total for v in world.VALUES] + [world.ABSTAIN]
  for source in world.SOURCES if left else ():
    worth = -world.CHARGE[source]
    for v in world.VALUES:
      p = sum(joint[a] * likelihood(a, source, v) for a in joint) / total
      seen = (*history, (source, v))
      worth += p * expectimax(memory, trust, seen, left - 1)
    worths.append(worth)
  return max(worths)


@pytest.mark.parametrize("trust", world.TRUST.values())
def test_optimum_is_that_of_all_histories(trust):
  memory = world.VALUES[2] if trust else None
  for budget in range(4):
    found = optimum.value(optimum.begin(trust), budget)
    assert found == pytest.approx(expectimax(memory, trust, (), budget), 1e-9)


def simulate(question, budget, decide):
  """Returns the reward of an agent, played without texts."""
  m, seen, cost = question.metadata, (), 0.0
  rng = np.random.default_rng(0)
  for left in range(budget, -1, -1):
    here = agent.Situation(m["subject"], m["relation"], left, seen)
    choice = decide(here, rng)
    if choice not in world.SOURCES:
      break
    cost += world.CHARGE[choice]
    seen += ((choice, world.stated(question, choice, len(seen))),)
  if choice == world.NOTHING:
    return world.ABSTAIN - cost
  return (choice == m["answer"]) - cost


@pytest.mark.parametrize("budget", [0, 2, 5, 8])
def test_played_optimum_has_the_computed_value_and_others_less(budget):
  asked = world.questions("train")
  best = np.array([simulate(q, budget, agent.best) for q in asked])
  expected = np.mean(
    [
      optimum.value(optimum.begin(world.TRUST[q.metadata["relation"]]), budget)
      for q in asked
    ]
  )
  noise = best.std() / len(asked) ** 0.5
  assert abs(best.mean() - expected) < 3 * noise
  softly = [simulate(q, budget, agent.softly) for q in asked]
  assert np.mean(softly) < best.mean() - 3 * noise


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
  """Episodes of the warm start's expert, as the command plays them."""
  folder = tmp_path_factory.mktemp("played") / "soft"
  said = commands.run(
    evaluate,
    "--config=research/noisy_world.py",
    "--scripted=research/noisy_agent.py:soft",
    "--budgets=4,8",
    "--config.evaluation.questions=40",
    f"--output={folder}",
  )
  assert said == ""
  return list(aj.read_episodes(folder / "episodes.jsonl"))


def test_agents_write_what_they_have_seen(episodes):
  passages = {}
  for row in episodes:
    m, seen, budget = row["metadata"], [], row["budget"]
    question = next(
      q for q in world.questions("test") if q.id == row["question_id"]
    )
    assert row["format"] == 1 and row["outcome"] == "answered"
    assert row["em"] == (row["answer"] == m["answer"])
    for at, observation in enumerate(row["observations"]):
      (passage,) = observation["passages"]
      source = world.source_of(
        observation["argument"], m["subject"], m["relation"]
      )
      value = passage["text"].split()[1]
      # A query that is repeated shows another passage, of all that ask so.
      assert value == world.stated(question, source, at)
      assert passages.setdefault(passage["id"], passage) == passage
      seen.append((source, value))
    texts = [s["text"] for s in row["spans"]]
    for n, text in enumerate(texts[::2]):
      here = agent.Situation(
        m["subject"], m["relation"], budget - n, (*seen[:n],)
      )
      assert f" budget {budget - n} " in text
      found = text.partition(" found ")[2].partition(" </think>")[0].split()
      tally = {v: (*map(int, c),) for v, *c in zip(*[iter(found)] * 3)}
      assert tally == here.stated()
      prompt = f"budget {budget} question {question.text} "
      assert agent.read(prompt + " ".join(texts[: 2 * n])) == here
  assert max(row["searches"] for row in episodes) > 5


def test_a_query_of_other_words_finds_nothing():
  for query in ("", "s", "r", "s r verdict", "verdict s", "t r"):
    assert world.source_of(query, "s", "r") is None


def outcomes(answers, em, queries):
  shape = (1, len(answers))
  questions = [world.questions("dev")[0]] * len(answers)
  trajectories = np.empty(shape, object)
  for g, made in enumerate(queries):
    trajectories[0, g] = collections.namedtuple("T", "question queries")(
      questions[g], made
    )
  count = np.array([[len(made) for made in queries]])
  one = np.ones(shape, np.int32)
  return aj.Outcomes(
    em=np.array([em]),
    f1=one * 1.0,
    format=one,
    answered=one > 0,
    generated_tokens=one,
    searches=count,
    violation=one < 0,
    budget=np.array([4]),
    valid=one > 0,
    measures={},
    answers=np.array([answers], object),
    trajectories=trajectories,
  )


def test_reward_adds_silence_and_dear_searches_to_the_row_s():
  o = outcomes(
    ["a", "nothing", "b", None],
    [1, 0, 0, 0],
    [("s r", "s verdict"), ("s r",), ("s verdict",) * 2, ()],
  )
  found = world.reward(o, CONFIG)
  own = aj.get_method("anysearch").reward(o, CONFIG)["total"]
  np.testing.assert_allclose(
    found["total"] - own, 0.5 * np.array([[-0.1, 0.4, -0.2, 0]]), atol=1e-6
  )
  assert CONFIG.reward.alpha == 0.5
