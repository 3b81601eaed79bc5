"""Tests the fingerprint: an engine with wrong weights stops the run."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import fake_sglang
import jax
import numpy as np
import pytest
import sglang_engines
import small_engine
import small_run
import waits

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.policy import sharding
from anysearch_jax.rollout import episode
from anysearch_jax.rollout.jax_engine import engine as engine_lib
from anysearch_jax.training import health

serve = sglang_engines.serve


def _other(params):
  """Returns the weights of a policy that is far from `params`."""
  return jax.tree.map(lambda p: -20 * p, params)


def test_a_run_logs_the_fingerprint_of_every_rollout(trained):
  records = small_run.records(trained)
  # Before and after each rollout.
  assert [r["engine/fingerprints"] for r in records] == [2, 4, 6, 8]
  for r in records:
    assert 0 <= r["rollout/fingerprint"] <= r["rollout/fingerprint_max"] < 1e-5


@pytest.mark.parametrize("when", ["handed over", "while it samples"])
def test_an_engine_with_wrong_weights_stops_the_run_and_it_resumes(
  when, parts, trained, tmp_path, monkeypatch
):
  folder = tmp_path / "run"
  with monkeypatch.context() as patch:
    if when == "handed over":
      set_params = engine_lib.JaxEngine.set_params

      def other(self, params, version):
        params = _other(params) if version == 3 else params
        set_params(self, params, version)

      patch.setattr(engine_lib.JaxEngine, "set_params", other)
    else:
      generate = engine_lib.JaxEngine.generate

      async def disturbed(self, request):
        generation = await generate(self, request)
        if request.address.rollout == 3:
          # Another client replaces the weights, without a version.
          self._device.set_params(_other(parts["policy"].params))
        return generation

      patch.setattr(engine_lib.JaxEngine, "generate", disturbed)
    with pytest.raises(
      types.EngineError,
      match="Rollout 3: part 0 of the engine .* nats a token .* of version 3, "
      "expected 0.1 at most .* other weights .* the same command",
    ):
      small_run.train(folder, parts)
  assert small_run.records(folder) == small_run.records(trained)[:3]
  small_run.train(folder, parts)
  small_run.assert_same_bits(folder, trained)


def test_a_rollout_that_a_server_spoilt_is_sampled_again(
  parts, trained, tmp_path, monkeypatch
):
  """One that joined meanwhile has other weights; what was played counts."""
  made, bad, aside = engine_lib.JaxEngine, [], []
  generate, scores = made.generate, made.scores

  async def disturbed(self, request):
    if request.address.rollout == 2 and not aside:
      bad[:] = ["late"]
    return await generate(self, request)

  def of_two(self, token_ids):
    (found,) = scores(self, token_ids).values()
    return {"first": found} | {part: [-9.0] * len(found) for part in bad}

  def put_aside(self, part, why):
    aside.append(part)
    bad.clear()

  for name, method in (("generate", disturbed), ("scores", of_two)):
    monkeypatch.setattr(made, name, method)
  monkeypatch.setattr(made, "put_aside", put_aside, raising=False)
  monkeypatch.setattr(made, "expect", lambda *_: None, raising=False)
  small_run.train(tmp_path / "run", parts)
  assert aside == ["late"]
  small_run.assert_same_bits(tmp_path / "run", trained, ["steps.jsonl"])
  found, usual = (small_run.records(x)[2] for x in (tmp_path / "run", trained))
  assert found["run/failed_rollouts"] > usual["run/failed_rollouts"] == 0
  assert found["engine/sampled_tokens"] > usual["engine/sampled_tokens"]
  assert found["engine/fingerprints"] == usual["engine/fingerprints"] + 2


def test_without_a_fingerprint_the_gap_stops_the_run(
  parts, tmp_path, monkeypatch
):
  config = dataclasses.replace(
    small_run.CONFIG,
    watch=config_lib.WatchConfig(max_fingerprint_gap=1e9, gap_rollouts=2),
  )
  set_params = engine_lib.JaxEngine.set_params
  monkeypatch.setattr(
    engine_lib.JaxEngine,
    "set_params",
    lambda self, params, version: set_params(self, _other(params), version),
  )
  gaps = [{"a": (2.0, 5.0), "b": (4.0, 9.0)}, {"a": (3.0, 4.0)}]
  found = itertools.cycle(gaps)  # Before and after.
  monkeypatch.setattr(health.Fingerprint, "check", lambda self, _: next(found))
  with pytest.raises(
    health.WrongWeightsError, match="Rollout 2: .* in 2 rollouts in a row"
  ):
    small_run.train(tmp_path / "run", parts, config)
  # Of the parts that were asked again, the mean and the largest of both times.
  record = small_run.records(tmp_path / "run")[0]
  assert record["rollout/fingerprint"] == 3.0
  assert record["rollout/fingerprint_max"] == 5.0


def test_scores_are_those_of_one_forward_and_change_no_sample():
  order = [(q, s) for q in range(2) for s in range(2)]
  params, mesh = small_engine.params(), sharding.mesh(data=2, tensor=2)
  placed = jax.device_put(params, sharding.shardings(small_engine.A, mesh))
  prompt = small_engine.prompt(0)
  scores = small_engine.engine(placed, mesh=mesh).scores(prompt)
  expected = health._score(
    placed, np.asarray(prompt, np.int32), a=small_engine.A, dtype=np.float32
  )
  engine = small_engine.engine(params)
  one = engine.scores(prompt)
  assert (len(scores), len(one)) == (2, 1)
  for found in (*scores.values(), *one.values()):
    np.testing.assert_allclose(found, expected, atol=1e-5)
  assert not engine.counters
  played = small_engine.play(engine, order[:2])
  assert engine.scores(prompt) == one
  assert played | small_engine.play(engine, order[2:]) == small_engine.play(
    small_engine.engine(params), order
  )


def test_scores_where_positions_are_sharded_are_those_of_one_device():
  """Nine positions over four devices: the last ones are padding."""
  params, ids = small_engine.params(), np.arange(10, dtype=np.int32)
  score = functools.partial(health._score, a=small_engine.A, dtype=np.float32)
  layout = sharding.Layout(sharding.mesh(fsdp=2, context=4))
  placed = jax.device_put(
    params, sharding.shardings(small_engine.A, layout.mesh)
  )
  found = score(placed, ids, layout=layout, rows=2)
  np.testing.assert_allclose(found, score(params, ids), atol=1e-5)


def _of_servers(engine, policy):
  _, prompt = episode.prompt(
    types.Question("q", "abc", ("a",)),
    budget=5,
    scaffold=True,
    environment=systems.environment("world"),
    codec=policy.tokenizer,
  )
  ids = np.asarray(prompt, np.int32)
  score = functools.partial(
    health._score, ids=ids, a=policy.architecture, dtype=np.float32
  )
  bound = config_lib.WatchConfig().max_fingerprint_gap
  prints = health.Fingerprint(engine, prompt=prompt, bound=bound)
  return prints, lambda params, version: prints.expect(score(params), version)


def test_a_server_with_wrong_weights_is_put_aside(serve, caplog):
  engine, *servers = serve(count=2)
  policy = sglang_engines.policy()
  prints, expect = _of_servers(engine, policy)
  expect(policy.params, 0)
  # The servers have them in bfloat16.
  assert all(0 < mean < 0.02 for mean, _ in prints.check(0).values())
  servers[1].policy = wrong = policy._replace(params=_other(policy.params))
  engine._fleet.members[0].missed_lists = 1  # Of one list of a gateway.
  gaps = [mean for mean, _ in prints.check(1).values()]
  assert gaps[0] < 0.1 < gaps[1]
  said = f"{servers[1].url} is down; 1 of 2 are up: it is put aside"
  assert said in caplog.text
  assert "away from the trainer's policy, the others 0.0" in caplog.text
  assert engine.scores(sglang_engines.PROMPT).keys() == {servers[0].url}
  # One that is alone is not: nothing is left to sample with.
  servers[0].policy = wrong
  said = f"Rollout 2: {servers[0].url} of the engine scores .*it has other"
  with pytest.raises(types.EngineError, match=said):
    prints.check(2)
  servers[0].policy = policy
  assert len(prints.check(3)) == 1


def test_a_server_that_returns_with_other_weights_samples_nothing(
  serve, caplog, monkeypatch
):
  engine, *servers = serve(count=2, wait=60)
  policy = sglang_engines.policy()
  prints, expect = _of_servers(engine, policy)
  expect(policy.params, 0)
  assert len(prints.check(0)) == 2

  def restart():
    servers[1].kill()
    for question in range(4):  # One of them is asked, and misses it.
      sglang_engines.turn(engine, question=question)
    servers[1].restart()

  with monkeypatch.context() as patch:
    wrong = policy._replace(params=_other(policy.params))
    patch.setattr(fake_sglang.hf, "load", lambda folder: wrong)
    restart()
    said = f"{servers[1].url}: it scores the prompt of the first question"
    waits.wait_for(lambda: said in caplog.text)
  for question in range(4, 8):
    turn = sglang_engines.turn(engine, question=question)
    assert turn.server == servers[0].url
  restart()
  waits.wait_for(lambda: len(engine.scores(sglang_engines.PROMPT)) == 2)


def test_a_server_that_cannot_score_is_skipped_and_counted(serve):
  engine, *servers = serve(count=2)
  policy = sglang_engines.policy()
  prints, expect = _of_servers(engine, policy)
  expect(policy.params, 0)
  for fault in ("die", (500, "oops")):
    servers[0].faults["/generate"] = [fault] * 2
    assert len(prints.check(0)) == 1
  # Its turns are refused because of the name of its weights.
  servers[0].faults.clear()
  servers[0].version = "default"
  assert len(prints.check(0)) == 1
  assert engine.counters["unscored"] == 3


def test_an_engine_without_scores_is_not_verified():
  prints, expect = _of_servers(object(), sglang_engines.policy())
  prints.expect(np.zeros(3, np.float32), 0)
  assert not prints.check(0)


def test_weights_that_are_broken_on_both_sides_are_the_same_weights():
  nan = float("nan")
  a, b = np.array([[nan, -1.0, -2.0], [nan, -1.5, -2.0]])
  np.testing.assert_array_equal(health._difference(a, b), [0.0, 0.5, 0.0])
  assert np.isnan(health._difference(np.array([nan]), np.array([-1.0])))
