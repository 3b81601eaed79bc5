"""What is lost in the noisy world: by hand, and what agents lose."""

from __future__ import annotations

import json

import numpy as np
import pytest

from research import noisy_agent as agent
from research import noisy_losses as lib
from research import noisy_optimum as optimum
from research import noisy_world as world

A, B = world.VALUES[:2]
M = {"subject": "s", "relation": "birthplace", "memory": None, "answer": A}


def record(budget, shown, answer, *, metadata=M, seed=0):
  """Returns an episode with (last word of the query, value) of its searches."""
  queries = [f"{metadata['subject']} {word}" for word, _ in shown]
  return {
    "metadata": metadata,
    "budget": budget,
    "seed": seed,
    "answer": answer,
    "em": int(answer == metadata["answer"] and answer is not None),
    "searches": len(shown),
    "queries": queries,
    "failed": False,
    "observations": [
      {"argument": query, "passages": [{"text": f"r {v}"}] if v else []}
      for query, (_, v) in zip(queries, shown)
    ],
  }


# P(A) after one cheap passage: .8 (1/6) .5 / (.8 / 6 + .2 / 6) = .4.
# After a dear one: .8 (1/6) .8 / (1/6) = .64. After both, P(A) - P(B):
BOTH = 0.8 * (0.4 - 0.1 * 0.04) / (0.8 * (0.4 + 5 * 0.1 * 0.04) + 0.2 / 6)


@pytest.mark.parametrize(
  "budget, shown, answer, losses",
  [
    # At B = 0 every value has .8 / 6, silence .4.
    (0, [], A, {lib.LOUD: 0.4 - 0.8 / 6}),
    (0, [], world.NOTHING, {}),
    # A dear search at B = 1 is worth .64 - .1.
    (1, [], world.NOTHING, {lib.STOP: 0.14}),
    (1, [], A, {lib.STOP: 0.14, lib.LOUD: 0.4 - 0.8 / 6}),
    (1, [("birthplace", A)], A, {lib.CHEAP: 0.14}),
    (1, [("verdict", A)], A, {}),
    (1, [("verdict", A)], world.NOTHING, {lib.SILENT: 0.24}),
    (1, [("verdict", A)], B, {lib.OTHER: 0.64 - 0.8 * 0.04}),
    (1, [("verdict", A)], None, {lib.SLIP: 0.64}),
    (1, [("verdict", A)], "other", {lib.SLIP: 0.64}),
    # What finds nothing costs a search: after it, silence is best.
    (1, [("country", None)], world.NOTHING, {lib.SLIP: 0.14}),
    (1, [("verdict x", None)], world.NOTHING, {lib.SLIP: 0.24}),
    # A cheap search and then a dear one is best at B = 2.
    (2, [("birthplace", A), ("verdict", A)], B, {lib.OTHER: BOTH}),
  ],
)
def test_losses_by_hand(budget, shown, answer, losses):
  found = lib.lost(record(budget, shown, answer))
  for kind in lib.KINDS[:-1]:
    assert found[kind] == pytest.approx(losses.get(kind, 0), abs=1e-9), kind
  reward = int(answer == A) + 0.4 * (answer == world.NOTHING)
  reward -= 0.1 * sum("verdict" in word for word, _ in shown)
  assert found["reward"] == pytest.approx(reward)
  assert found["optimum"] == optimum.value(optimum.begin(0), budget)
  lost = sum(found[kind] for kind in lib.KINDS[:-1])
  assert found["expected"] == pytest.approx(found["optimum"] - lost)
  assert found["expected"] == pytest.approx(reward + found[lib.LUCK])


@pytest.mark.parametrize(
  "left, kind", [(0, lib.REPEAT), (3, lib.DEAR)], ids=["last", "with more left"]
)
def test_a_dear_search_that_changes_nothing_costs_its_charge(left, kind):
  """After three dear passages that agree, no passage changes the answer."""
  shown = [("verdict", A)] * 3
  before = lib.lost(record(4 + left, shown, A))
  found = lib.lost(record(4 + left, [*shown, ("verdict", A)], A))
  assert found[kind] - before[kind] == pytest.approx(0.1, abs=0.001)


def played(decide, budget, count):
  rows = []
  for number, q in enumerate(world.questions("dev")[:count]):
    m, shown = q.metadata, []
    rng = np.random.default_rng(number)
    while True:
      seen = tuple(
        (world.DEAR if w == world.VERDICT else world.CHEAP, v) for w, v in shown
      )
      here = agent.Situation(
        m["subject"], m["relation"], budget - len(shown), seen
      )
      choice = decide(here, rng)
      if choice not in world.SOURCES:
        break
      word = m["relation"] if choice == world.CHEAP else world.VERDICT
      shown.append((word, world.stated(q, choice, len(shown))))
    rows.append(record(budget, shown, choice, metadata=m))
  return rows


def test_the_best_agent_loses_nothing_and_luck_is_0_on_average():
  for row in played(agent.best, 6, 200):
    found = lib.lost(row)
    assert max(found[kind] for kind in lib.KINDS[:-1]) < 1e-9
  for decide in (agent.best, agent.softly):
    found = [lib.lost(row) for row in played(decide, 4, 600)]
    luck = np.array([each[lib.LUCK] for each in found])
    assert abs(luck.mean()) < 3 * luck.std() / len(luck) ** 0.5
    assert min(each[kind] for each in found for kind in lib.KINDS[:-1]) > -1e-9


def test_the_command_prints_rows_of_trainings_and_draws_them(tmp_path, capsys):
  for seed in (42, 43):
    folder = tmp_path / f"soft-{seed}" / "evaluation" / "plain"
    folder.mkdir(parents=True)
    rows = [r for b in (0, 2) for r in played(agent.softly, b, 20 + seed % 2)]
    (folder / "episodes.jsonl").write_text("\n".join(map(json.dumps, rows)))
  trainings = [
    [json.loads(line) for line in path.read_text().splitlines()]
    for path in sorted(tmp_path.glob("*/*/*/episodes.jsonl"))
  ]
  row = lib.Row("soft", trainings)
  text = lib.table([row])
  assert "soft                         B=0     B=2   pooled" in text
  # Trainings count equally; B = 0 is not pooled.
  means = [
    np.mean([lib.lost(r)["reward"] for r in rows if r["budget"]])
    for rows in trainings
  ]
  np.testing.assert_allclose(row.pooled("reward"), means)
  assert f"{np.mean(means):9.3f} +- {np.std(means, ddof=1):.3f}" in text
  lib.figure([row], tmp_path / "f.svg")
  assert "lost reward" in (tmp_path / "f.svg").read_text()
