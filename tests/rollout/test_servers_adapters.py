"""Tests of adapters alone on SGLang servers, over a base that is loaded once.

The fake server merges an adapter into its base as PEFT defines it, and its
scores are compared with the decoder's own adapters.
"""

from __future__ import annotations

import asyncio

import fake_sglang
import numpy as np
import policy_scores
import pytest
import sglang_engines as engines

from anysearch_jax import types
from anysearch_jax.rollout.servers import sglang
from anysearch_jax.rollout.servers import weights as weights_lib
from anysearch_jax.training import health

serve = engines.serve
FLAGS = {
  "enable_lora": True,
  "max_lora_rank": 2,
  "lora_target_modules": ["all"],
}
END = fake_sglang.ids("<end>")
LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
WHOLE = "/update_weights_from_disk"


@pytest.fixture
def adapting(serve):
  """Starts servers that load adapters, and an engine that trains them."""
  return lambda script=END, **more: serve(
    script,
    **{"flags": FLAGS, "start": engines.adapted(), "wait": 20} | more,
  )


def _set(engine, *versions):
  """Hands over adapters whose seeds are their versions."""
  for version in versions:
    engine.set_params(engines.adapted(version).params, version)


def _scores(policy):
  return policy_scores.log_probs(policy, engines.PROMPT)


def test_only_adapters_follow_the_base_and_scores_are_of_the_newest(adapting):
  engine, *servers = adapting(count=2)
  assert engine.adapts
  first = engine.counters["handover_bytes"]
  for version in (1, 2, 3):
    engine.counters.clear()
    _set(engine, version)
    found = engine.scores(engines.PROMPT)
    expected = _scores(engines.adapted(version))
    assert len(found) == 2
    for scores in found.values():
      # The servers have them in bfloat16.
      np.testing.assert_allclose(scores, expected, atol=0.03)
      assert np.abs(np.subtract(scores, _scores(engines.policy()))).max() > 0.1
    assert engines.turn(engine, question=version).versions == (version,)
    assert 0 < engine.counters["handover_bytes"] < first
    assert engine.counters["handover_ms"] > 0
  for server in servers:
    assert len(server.bodies(WHOLE)) == 1
    loaded = [body["lora_name"] for body in server.bodies(LOAD)]
    assert [name.partition("-")[2] for name in loaded] == ["0", "1", "2", "3"]
    # Those of the newest version and the one before it.
    assert [*server.adapters] == loaded[-2:]
    # Nothing is sampled without an adapter, and scored once to tell it apart.
    turns = [b for b in server.bodies("/generate") if b["logprob_start_len"]]
    assert turns and all(body["lora_path"] in loaded for body in turns)
  folder = weights_lib.folder("", [s.url for s in servers])
  assert sorted(path.name for path in folder.iterdir()) == sorted(
    [f"{loaded[0]}.base", *loaded[-2:]]
  )
  engine.close()
  assert not folder.exists()


async def test_a_running_turn_keeps_its_adapter_loaded(adapting):
  engine, server = adapting(())
  server.hold_at = 5
  turn = asyncio.create_task(engine.generate(engines.request(most=20)))
  await asyncio.to_thread(
    server.wait_until,
    lambda: any(len(r.versions) == 5 for r in server.running.values()),
  )
  await asyncio.to_thread(_set, engine, 1, 2, 3)
  held = len(server.adapters)
  server.hold_at = -1
  server.note("", {})
  assert (await turn).versions == (0,) * 20
  assert held == 3
  _set(engine, 4)
  assert [name[-1] for name in server.adapters] == ["3", "4"]


@pytest.mark.parametrize("loss", ["restart", "unload", "other run"])
def test_a_server_that_lost_adapters_gets_base_and_adapters_again(
  adapting, loss
):
  engine, server = adapting()
  _set(engine, 1)
  expected, held = engine.scores(engines.PROMPT), [*server.adapters]
  if loss == "restart":
    server.kill()
    server.restart()
  elif loss == "unload":
    del server.adapters[held[-1]]
  else:
    server.adapters = {"of another run": server.policy}
  assert engines.turn(engine).versions == (1,)
  assert engine.scores(engines.PROMPT) == expected
  assert sorted(server.adapters) == sorted(held)
  assert len(server.bodies(WHOLE)) == 1 + (loss == "restart")


def test_servers_that_lend_their_memory_get_all_adapters_again(adapting):
  engine, server = adapting(colocated=True, deadline=20.0)
  engine.free_cache()
  _set(engine, 1)
  assert not server.bodies(LOAD)
  assert engines.turn(engine).versions == (1,)
  engine.free_cache()
  expected = _scores(engines.adapted(1))
  (scores,) = engine.scores(engines.PROMPT).values()
  np.testing.assert_allclose(scores, expected, atol=0.03)
  names = [body["lora_name"] for body in server.bodies(LOAD)]
  assert sorted(names[:2]) == sorted(names[2:])


def test_a_server_that_samples_its_base_is_refused(adapting):
  engine, *servers = adapting(count=2)
  servers[1].serves_base = True
  policy = engines.adapted()
  prints = health.Fingerprint(engine, prompt=engines.PROMPT, bound=0.1)
  # A new adapter is its base.
  prints.expect(np.asarray(_scores(policy)), 0)
  assert len(prints.check(0)) == 2
  # Too small a change for the bound of fingerprints.
  small = engines.adapted(1)
  layers = {
    key: value * 1e-2 if "lora_b" in key else value
    for key, value in small.params["layers"].items()
  }
  small = small._replace(params=small.params | {"layers": layers})
  gap = np.abs(np.subtract(_scores(small), _scores(engines.policy())))
  assert 0 < gap.mean() < 0.05
  engine.set_params(small.params, 1)
  prints.expect(np.asarray(_scores(small)), 1)
  with pytest.raises(types.EngineError, match="it samples its base") as raised:
    prints.check(1)
  assert servers[1].url in str(raised.value)
  servers[1].serves_base = False
  assert len(prints.check(1)) == 2


def test_a_failed_adapter_leaves_the_one_before(adapting):
  engine, server = adapting()
  _set(engine, 1)
  server.faults[LOAD] = [(400, '{"success": false, "error_message": "full"}')]
  with pytest.raises(types.EngineError, match="does not have adapter.*full"):
    _set(engine, 2)
  assert engines.turn(engine).versions == (1,)
  _set(engine, 2)
  assert engines.turn(engine, question=1).versions == (2,)


def test_adapters_are_merged_for_a_server_without_them(serve, caplog):
  engine, server = serve(END, start=engines.adapted(1))
  assert not engine.adapts and not server.bodies(LOAD)
  assert "because of " + server.url in caplog.text
  assert "it was started without --enable-lora" in caplog.text
  (scores,) = engine.scores(engines.PROMPT).values()
  expected = _scores(engines.adapted(1))
  np.testing.assert_allclose(scores, expected, atol=0.03)


ALL = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.mark.parametrize(
  ("info", "targets", "why"),
  [
    (FLAGS, ALL, ""),
    (FLAGS, ("q", "v"), ""),
    (FLAGS, ("o", "gate", "down"), ""),
    (FLAGS | {"lora_target_modules": ["q_proj", "v_proj"]}, ("q", "v"), ""),
    (FLAGS, ("k", "v"), "both q and v, or neither"),
    (FLAGS, ("q", "k"), "both q and v, or neither"),
    (FLAGS, ("up", "down"), "with gate where they have up"),
    ({}, ALL, "without --enable-lora"),
    (FLAGS | {"dp_size": 2}, ALL, "--dp-size"),
    (FLAGS | {"max_lora_rank": 1}, ALL, "--max-lora-rank is 1, the run's rank"),
    (
      FLAGS | {"lora_target_modules": ["q_proj", "v_proj"]},
      ("q", "v", "o"),
      "lack o_proj",
    ),
  ],
)
def test_refusal_says_what_a_server_lacks(info, targets, why):
  found = sglang.adapter_refusal(info, 2, targets)
  assert bool(found) == bool(why) and why in found


def test_flags_have_room_for_every_adapter_and_the_base():
  flags = sglang.adapter_flags(16, ("q", "v"))
  assert " ".join(flags) == (
    "--enable-lora --max-lora-rank 16 "
    "--max-loras-per-batch 3 --lora-target-modules q_proj v_proj"
  )
