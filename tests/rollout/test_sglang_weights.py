"""Weights of SGLang servers: loading, verification, versions of tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib

import fake_sglang
import jax
import numpy as np
import pytest
import sglang_engines as engines

from anysearch_jax import types
from anysearch_jax.policy import hf
from anysearch_jax.rollout.sglang import server as sglang_server

serve = engines.serve


def test_all_servers_load_weights_and_the_last_folder_remains(serve):
  engine, *servers = serve(fake_sglang.ids("<end>"), count=2)
  before = list(engine.scores(engines.PROMPT).values())
  changed = jax.tree.map(lambda p: p + 1, engines.policy().params)
  engine.set_params(changed, 7)
  after = list(engine.scores(engines.PROMPT).values())
  assert before[0] == before[1] != after[0] == after[1]
  assert engines.turn(engine).versions == (7,)
  for server in servers:
    assert server.version.endswith("-7")
    assert server.last_paused == "in_place"
  # The last folder remains for servers that come back; older ones are removed.
  folder = sglang_server.folder("", [s.url for s in servers])
  assert [str(path) for path in folder.iterdir()] == [
    servers[0].bodies("/update_weights_from_disk")[-1]["model_path"]
  ]
  engine.close()
  assert not folder.exists()


def test_the_folder_is_a_policy_that_loads(serve, monkeypatch, tmp_path):
  engine, server = serve(weights=str(tmp_path))
  kept = tmp_path / "kept"
  right = server._update_weights_from_disk

  def keep(body):
    pathlib.Path(body["model_path"]).rename(kept)
    return right(body | {"model_path": str(kept)})

  server._update_weights_from_disk = keep
  policy = engines.policy()
  engine.set_params(policy.params, 1)
  loaded = hf.load(kept)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8),
    loaded.params,
    policy.params,
  )
  assert loaded.architecture == policy.architecture
  assert loaded.tokenizer.vocab_size == policy.tokenizer.vocab_size


def test_a_dead_runs_weights_are_removed(serve):
  engine, server = serve()
  left = sglang_server.folder("", [server.url]) / "left"
  left.mkdir(parents=True)
  engine.set_params(engines.policy().params, 1)
  assert not left.exists()


def _update_meanwhile(engine, server, version):
  """Returns a turn of 20 tokens, of which 5 were sampled before an update."""

  async def run():
    server.hold_at = 5
    turn = asyncio.create_task(engine.generate(engines.request(most=20)))
    await asyncio.to_thread(
      server.wait_until,
      lambda: any(len(r.versions) == 5 for r in server.running.values()),
    )
    await asyncio.to_thread(engine.set_params, engines.policy().params, version)
    return await turn

  return asyncio.run(run())


def test_a_turn_that_outlives_an_update_has_the_versions_of_both(serve):
  engine, server = serve()
  generation = _update_meanwhile(engine, server, 4)
  assert generation.versions == (0,) * 5 + (4,) * 15
  # Prefixes of the old weights could not be flushed, but are not used.
  engines.turn(engine)
  assert engine.counters["shared_tokens"] == 0


def test_dropped_tokens_take_their_versions_with_them(serve):
  said = fake_sglang.ids("b", "</search>")
  engine, server = serve(said)
  engines.overrun(server)
  server.faults["/generate"] = [engines.spans(("", 0, 3), ("", 3, 6))]
  assert engines.turn(engine, most=6).versions == (0, 0)


def test_failed_update_names_the_server_and_what_each_serves(serve):
  engine, good, bad = serve(fake_sglang.ids("<end>"), count=2)
  old = bad.version
  bad.faults["/update_weights_from_disk"] = [
    (400, '{"success": false, "message": "No space left"}')
  ]
  with pytest.raises(types.EngineError) as raised:
    engine.set_params(engines.policy().params, 1)
  text = str(raised.value)
  assert f"{bad.url}/update_weights_from_disk: HTTP 400: No space left" in text
  assert f"{good.url} serves {good.version!r}" in text
  assert f"{bad.url} serves {old!r}" in text
  # Only replies with the old weights count, from the server that has them.
  for question in (0, 1):
    assert engines.turn(engine, question=question).versions == (0,)
  engine.set_params(engines.policy().params, 1)
  assert engines.turn(engine, question=0).versions == (1,)
  assert engines.turn(engine, question=1).versions == (1,)


@pytest.mark.parametrize(
  "path", ["/pause_generation", "/update_weights_from_disk"]
)
@pytest.mark.parametrize("fault", ["hang", "die", (500, "oops")])
def test_server_is_resumed_after_any_update_failure(serve, path, fault):
  engine, server = serve(fake_sglang.ids("<end>"), wait=60)
  patient = engine._config
  engine._config = dataclasses.replace(patient, deadline=0.3)
  server.faults[path] = [fault] * 2
  asked = len(server.bodies("/continue_generation"))
  if isinstance(fault, str):  # The server counts as unavailable and is retried.
    engine.set_params(engines.policy().params, 1)
    assert engine.counters["server_down"] >= 1
    version = 1
  else:
    with pytest.raises(types.EngineError, match="did not reach every server"):
      engine.set_params(engines.policy().params, 1)
    folder = sglang_server.folder("", [server.url])
    assert not folder.exists()
    version = 0
  assert len(server.bodies("/continue_generation")) > asked
  engine._config = patient
  assert engines.turn(engine).versions == (version,)


def test_server_that_keeps_its_old_weights_is_detected(serve):
  engine, server = serve()
  right = server._update_weights_from_disk

  def pretend(body):
    return right(body | {"weight_version": server.version})

  server._update_weights_from_disk = pretend
  with pytest.raises(
    types.EngineError, match=r"serves '.*-0', expected '.*-1'"
  ):
    engine.set_params(engines.policy().params, 1)


def test_a_server_that_was_started_again_scores_nothing(serve):
  engine, server = serve()
  server.version = "default"
  assert engine.scores(engines.PROMPT) == {}
  assert engine.counters["unscored"] == 1


def test_other_weights_under_the_same_version_share_no_prefix(serve):
  engine, server = serve(fake_sglang.ids("<end>"))
  server.faults["/flush_cache"] = [(400, "Flush cache failed.")]
  engines.turn(engine)
  before = server.version
  engine.set_params(engines.policy().params, 0)
  assert engines.turn(engine).versions == (0,)
  assert server.version != before
  assert engine.counters["shared_tokens"] == 0


def test_runs_do_not_mistake_each_others_weights(serve):
  engine, server = serve(fake_sglang.ids("<end>"))
  serve(urls=(server.url,))
  with pytest.raises(types.EngineError, match="did another run hand weights"):
    engines.turn(engine)
