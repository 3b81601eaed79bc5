"""Stored episodes are restored to the state in which a turn was sampled."""

from __future__ import annotations

import asyncio

import pytest
import scripted

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import records
from anysearch_jax.evaluation import branch_points
from anysearch_jax.methods import systems
from anysearch_jax.rollout import episode, episode_state, steering

TURNS = {
  "search_o1": ("<|begin_search_query|> {} <|end_search_query|>", "\\boxed{x}"),
  "": ("<think> a </think> <search> {} </search>", "<answer> x </answer>"),
}


@pytest.mark.parametrize("name", sorted(systems.ENVIRONMENTS))
def test_restored_state_equals_the_original_in_every_environment(name):
  """Compares restored states with those recorded while the episode ran."""
  env = systems.environment(name)
  search, answer = TURNS.get(name, TURNS[""])
  config = config_lib.EpisodeConfig(prompts=name)
  turns = [search.format(q) for q in ("one", "one", "two", "three", "four")]
  engine, stood = scripted.Engine([*turns, answer]), {}
  at, request = episode.start(
    types.Question("0", "item 0", ("x",)),
    budget=3,
    scaffold=False,
    address=types.Address(0, 0, 0),
    config=config,
    codec=scripted.CODEC,
  )
  while not isinstance(request, episode_state.Done):
    if isinstance(request, types.GenerateRequest):
      stood[request.turn] = at
      event = asyncio.run(engine.generate(request))
    else:
      event = episode_state.Retrieved((types.Passage("p", "T", request.query),))
    at, request = episode.step(at, event)
  played = request.trajectory
  row = records.episode(
    played,
    env.judge(played),
    seed=1,
    prices=budgets_lib.Prices(),
  )
  if env.verification:
    with pytest.raises(ValueError, match="that verifies answers"):
      branch_points.of(row, env)
    return
  found = [
    point for point in branch_points.of(row, env) if point.kind == "stop"
  ]
  assert [stood[point.turn].used for point in found] == list(
    range(played.searches)
  )
  for turn, before in stood.items():
    taken = branch_points.restore(
      row,
      branch_points.BranchPoint("continue", before.used, turn),
      config=config,
      codec=scripted.CODEC,
    )
    for field in ("queries", "observations", "search_ends", "budget", "left"):
      assert getattr(taken, field) == getattr(before, field), (turn, field)
    for field in ("bad_turns", "violation", "tokens", "turns"):
      assert getattr(taken, field) == getattr(before, field), (turn, field)
    if turn in [point.turn for point in found]:
      (point,) = [point for point in found if point.turn == turn]
      stopped = branch_points.restore(
        row, point, config=config, codec=scripted.CODEC
      )
      asking, _ = episode.resume_turn(stopped)
      stored = branch_points.stored_turn(row, point, codec=scripted.CODEC)
      _, request = steering.refuse(asking, stored)
      assert isinstance(request, types.GenerateRequest)
      assert env.over_budget in scripted.CODEC.decode(request.token_ids)
