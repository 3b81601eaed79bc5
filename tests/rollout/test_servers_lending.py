"""Tests SGLang servers that lend their memory to a trainer on the same GPUs.

The fake server dies where a real one does (`fake_sglang`), so a turn with the
right version says that nothing was asked of it twice or too early.
"""

from __future__ import annotations

import asyncio

import fake_sglang
import jax
import pytest
import sglang_engines as engines
from waits import wait_for

from anysearch_jax import types
from anysearch_jax.rollout.servers import fleet as fleet_lib
from anysearch_jax.rollout.servers import server as server_lib

serve = engines.serve
SAID = fake_sglang.ids("b", "<end>")
RELEASE, RESUME = (f"/{x}_memory_occupation" for x in ("release", "resume"))
LOAD = "/update_weights_from_disk"


@pytest.fixture
def lending(serve, monkeypatch):
  """Starts servers of the trainer's GPUs, which are looked at all the time."""
  monkeypatch.setattr(fleet_lib, "_CHECK_SECONDS", 0.01)
  return lambda *script, **more: serve(
    *script, **{"colocated": True, "wait": 20, "deadline": 20.0} | more
  )


def test_memory_is_away_until_a_turn_and_weights_precede_the_cache(lending):
  engine, server = lending(SAID)
  # It lent before the learner was made, and gets version 0 with the first turn.
  assert server.away == fake_sglang.MEMORY and not server.bodies(LOAD)
  assert engines.turn(engine).versions == (0, 0)
  for version in (1, 2):
    first = len(server.asked)
    assert engine.free_cache() == 0
    changed = jax.tree.map(
      lambda p, by=version: p + by, engines.policy().params
    )
    engine.set_params(changed, version)
    engine.free_cache()  # Nothing is left to release.
    scores = engine.scores(engines.PROMPT)[server.url]
    assert engines.turn(engine).versions == (version, version)
    asked = [each for each in server.asked[first:] if each[0] != "/model_info"]
    paths = [path.split("?")[0] for path, _ in asked]
    assert paths[:5] == [
      *("/pause_generation", "/flush_cache", "/update_weight_version"),
      *(RELEASE, "/pause_generation"),
    ]
    assert paths[5:8] == [RESUME, LOAD, RESUME]
    assert asked[5][1] == {"tags": ["weights"]}
    assert asked[7][1] == {"tags": ["kv_cache", "cuda_graph"]}
    assert paths[8:] == [
      *("/flush_cache", "/continue_generation", "/generate", "/generate")
    ]
  assert engine.scores(engines.PROMPT)[server.url] == scores
  assert not server.died and not engine.counters["server_down"]


def test_a_server_that_is_put_aside_lends_and_stays_aside(lending):
  engine, first, second = lending(SAID, count=2)
  assert engines.turn(engine).server == first.url
  engine.put_aside(first.url, "of a test")
  engine.free_cache()
  assert first.away == second.away == fake_sglang.MEMORY
  looks = len(first.asked)
  wait_for(lambda: len(first.asked) > looks + 5)
  engine.set_params(engines.policy().params, 1)
  for question in range(3):
    assert engines.turn(engine, question=question).server == second.url
  assert first.away == fake_sglang.MEMORY
  assert not first.died and not second.died


def test_turns_are_aborted_before_memory_is_released(lending):
  engine, server = lending()
  engine.scores(engines.PROMPT)

  async def run():
    server.hold_at = 5
    turn = asyncio.create_task(engine.generate(engines.request()))
    await asyncio.to_thread(server.wait_until, lambda: server.running)
    await asyncio.to_thread(engine.free_cache)
    with pytest.raises(types.EngineError, match="was aborted"):
      await turn

  asyncio.run(run())
  assert server.away == fake_sglang.MEMORY and not server.died
  assert len(engines.turn(engine).token_ids) == 20


@pytest.mark.parametrize("path", [RELEASE, RESUME, LOAD, "/pause_generation"])
@pytest.mark.parametrize("fault", ["hang", "die"])
def test_a_server_that_fails_meanwhile_gets_its_memory_and_weights_again(
  lending, monkeypatch, caplog, path, fault
):
  """Nothing is asked twice; if it dies of that, it is started again."""
  monkeypatch.setattr(server_lib, "_CONTROL_SECONDS", 0.5)
  engine, server = lending(SAID, retries=0, deadline=3.0)
  engine.scores(engines.PROMPT)
  kill = server.kill
  monkeypatch.setattr(server, "kill", lambda: (kill(), server.restart()))
  server.faults[path] = [fault]
  engine.free_cache()
  # A health check may be the first that waits.
  if (path, fault) == (RELEASE, "hang") and "is down" not in caplog.text:
    assert "It may still hold the memory that training needs." in caplog.text
  engine.set_params(engines.policy().params, 1)
  assert engines.turn(engine).versions == (1, 1)
  assert not server.away


def test_a_server_restarted_while_training_lends_again(lending):
  engine, server = lending(SAID)
  server.kill()
  wait_for(lambda: engine.counters["server_down"] == 1)
  server.restart()
  assert not server.away
  wait_for(lambda: server.away and engine.counters["server_up"] == 1)
  assert engines.turn(engine).versions == (0, 0)
  assert not server.died


@pytest.mark.parametrize("path", [RELEASE, RESUME, "/flush_cache?timeout=20"])
def test_a_server_that_refuses_is_an_error(lending, path):
  engine, server = lending(SAID)
  engine.scores(engines.PROMPT)
  # A health check may be the first that is refused.
  server.faults[path] = [(400, {"error": {"message": "No."}})] * 99
  with pytest.raises(types.EngineError, match="HTTP 400: No."):
    engine.free_cache()
    engine.scores(engines.PROMPT)
  server.faults.clear()
  assert engines.turn(engine).versions == (0, 0)
  assert not server.away and not server.died


def test_memory_that_a_killed_run_released_is_given_back(lending):
  engine, server = lending(SAID)
  engine.free_cache()
  engine.close()
  assert server.away
  later = engines.connect(urls=(server.url,), wait=20)  # Not colocated.
  assert engines.turn(later).versions == (0, 0)
  assert not server.away and not server.died
  later.close()
