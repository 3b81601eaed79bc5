"""SGLang servers that die, hang and recover: no turn of a rollout is lost."""

from __future__ import annotations

import asyncio
import logging

import fake_sglang
import pytest
import sglang_engines as engines

from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.rollout.sglang import health

serve = engines.serve
SAID = fake_sglang.ids("b", "<end>")


async def _until(holds):
  """Polls a condition that other threads make true."""
  async with asyncio.timeout(20):
    while not holds():
      await asyncio.sleep(0.005)


def _is(engine, place, state):
  return lambda: engine._fleet._members[place].state is state


def test_a_turn_goes_to_another_server_while_its_own_is_down(serve, caplog):
  engine, first, second = serve(SAID, count=2)
  first.kill()
  for question in range(4):
    assert engines.turn(engine, question=question).text == "b"
  assert not first.bodies("/generate")
  assert len(second.bodies("/generate")) == 4
  # After the outage is known, later turns of its questions skip the server.
  assert engine.counters["failovers"] == 1
  assert engine.counters["server_suspect"] == 1
  assert f"SGLang server {first.url} was up and is suspect; 1 of 2" in (
    caplog.text
  )


def test_the_questions_of_a_dead_server_are_spread_over_the_others(serve):
  engine, *servers = serve(SAID, count=3)
  servers[0].kill()
  for question in range(12):
    engines.turn(engine, question=question)
  found = [len(server.bodies("/generate")) for server in servers]
  assert found == [0, 6, 6]


def test_turn_of_a_dead_server_is_sampled_again_as_a_whole(serve):
  engine, first, second = serve(count=2)

  async def run():
    first.hold_at = 5
    turn = asyncio.create_task(engine.generate(engines.request(most=20)))
    await asyncio.to_thread(
      first.wait_until,
      lambda: any(len(r.versions) == 5 for r in first.running.values()),
    )
    await asyncio.to_thread(first.kill)
    return await turn

  generation = asyncio.run(run())
  assert len(generation.token_ids) == 20
  assert generation.versions == (0,) * 20
  (asked,) = second.bodies("/generate")
  assert asked["input_ids"] == list(engines.PROMPT)
  assert engine.counters["sampled_tokens"] == 20


def test_turn_is_sampled_again_even_if_its_server_recovers_at_once(serve):
  """The server recovers before the turn has noticed the outage."""
  engine, server = serve()

  async def down_and_up():
    (member,) = engine._fleet._members
    engine._fleet._enter(member, health.State.DOWN)
    engine._fleet._enter(member, health.State.UP)

  async def run():
    server.hold_at = 5
    turn = asyncio.create_task(engine.generate(engines.request(most=20)))
    await asyncio.to_thread(
      server.wait_until,
      lambda: any(len(r.versions) == 5 for r in server.running.values()),
    )
    server.hold_at = -1
    await asyncio.to_thread(loop.run, down_and_up())
    return await turn

  assert len(asyncio.run(run()).token_ids) == 20
  assert len(server.bodies("/generate")) == 2
  assert engine.counters["failovers"] == 1


def test_a_server_that_restarts_while_it_is_handed_weights_gets_them_again(
  serve,
):
  engine, server = serve(SAID, wait=60)
  server.faults["/model_info"] = [lambda reply: {"weight_version": "default"}]
  engine.set_params(engines.policy().params, 1)
  assert engine.counters["server_down"] == 1
  assert engines.turn(engine).versions == (1, 1)


def test_turns_wait_for_a_server_that_gets_the_present_weights_first(
  serve, caplog
):
  engine, server = serve(SAID, wait=60)
  engine.set_params(engines.policy().params, 3)

  async def run():
    server.kill()
    before = len(server.asked)
    turns = [
      asyncio.create_task(engine.generate(engines.request(question=q)))
      for q in range(3)
    ]
    await _until(_is(engine, 0, health.State.DOWN))
    await _until(lambda: engine.counters["waits"] == 3)
    server.restart()
    return await asyncio.gather(*turns), server.asked[before:]

  found, asked = asyncio.run(run())
  assert [g.versions for g in found] == [(3, 3)] * 3
  assert server.version.endswith("-3")
  paths = [path for path, _ in asked]
  update = paths.index("/update_weights_from_disk")
  assert paths.index("/generate") > update
  assert "/health" in paths[:update]
  assert engine.counters["server_down"] == 1
  assert engine.counters["server_catching_up"] == 1
  assert engine.counters["failovers"] == 3
  assert "turns wait for one, up to 60 seconds (sglang.wait)" in caplog.text
  assert "was catching up and is up; 1 of 1 are up." in caplog.text


def test_unnoticed_server_restart_reloads_the_weights(serve):
  engine, server = serve(SAID, wait=60)
  engine.set_params(engines.policy().params, 2)
  server.kill()
  server.restart()
  assert engines.turn(engine).versions == (2, 2)
  assert engine.counters["server_catching_up"] == 1
  # Tokens sampled with the weights of the server's own folder do not count.
  assert engine.counters["sampled_tokens"] == 2


def test_a_server_that_fell_back_to_older_weights_gets_the_present_ones(serve):
  engine, server = serve(SAID, wait=60)
  older = server.version
  engine.set_params(engines.policy().params, 1)
  server.version = older
  assert engines.turn(engine).versions == (1, 1)
  assert server.version != older


def test_weights_reach_a_server_that_was_down_when_they_were_new(serve):
  engine, first, second = serve(SAID, count=2, wait=60)
  first.kill()
  engine.set_params(engines.policy().params, 5)
  assert second.version.endswith("-5")
  assert engines.turn(engine, question=0).versions == (5, 5)
  first.restart()
  asyncio.run(_until(_is(engine, 0, health.State.UP)))
  assert first.version == second.version
  assert engines.turn(engine, question=0).versions == (5, 5)
  assert len(first.bodies("/generate")) == 1


def test_new_weights_wait_for_a_server_too(serve):
  engine, server = serve(SAID, wait=60)
  server.kill()

  async def run():
    new = asyncio.to_thread(engine.set_params, engines.policy().params, 1)
    setting = asyncio.create_task(new)
    await _until(_is(engine, 0, health.State.DOWN))
    server.restart()
    await setting
    return await engine.generate(engines.request())

  assert asyncio.run(run()).versions == (1, 1)


def test_error_without_servers_states_bound_and_reasons(serve):
  engine, *servers = serve(SAID, count=2, wait=0.1)
  for server in servers:
    server.kill()
  with pytest.raises(types.EngineError) as raised:
    engines.turn(engine)
  said = str(raised.value)
  assert "No SGLang server is up for 0.1 seconds (sglang.wait)" in said
  assert all(f"{server.url} is " in said for server in servers)
  assert "Is an SGLang server running there" in said
  # The bound applies to the outage, not to each turn.
  engine._fleet._wait = 3600.0
  engine._fleet._dark_since -= 3601.0
  with pytest.raises(types.EngineError, match="for 3600 seconds"):
    engines.turn(engine)


@pytest.mark.parametrize(
  ("fault", "met"),
  [("die", "RemoteProtocolError"), ((429, "busy"), "HTTP 429: busy")],
)
def test_turn_that_no_server_answers_fails(serve, fault, met):
  """The turn may itself crash servers: each one is healthy when it is asked."""
  engine, server = serve(SAID, wait=60)
  server.faults["/generate"] = [fault] * 99
  with pytest.raises(types.EngineError, match=f"tried 2 times, .* met {met}"):
    engines.turn(engine)
  asked = health._MOVES + 1
  assert len(server.bodies("/generate")) == 2 * asked
  assert engine.counters["failovers"] == asked - 1
  server.faults.clear()
  assert engines.turn(engine).text == "b"


def test_turns_move_from_a_machine_that_left_the_network(serve, monkeypatch):
  """Connections stay open, but no request is answered."""
  monkeypatch.setattr(health, "_LOOK_SECONDS", 0.01)
  engine, first, second = serve(SAID, count=2)
  # From here on, health checks are not answered either.
  engine._servers[0]._patience = 0.1
  first.faults["/generate"] = ["hang"]
  first.faults["/model_info"] = first.faults["/health"] = ["hang"] * 9999
  assert engines.turn(engine, question=0).text == "b"
  assert len(second.bodies("/generate")) == 1
  assert engine.counters["server_down"] == 1


def test_server_that_does_not_load_the_weights_is_not_used(serve):
  engine, server = serve(SAID, wait=60)
  server.kill()
  server.faults["/update_weights_from_disk"] = [
    (400, '{"success": false, "message": "No space left"}')
  ]
  server.restart()
  before = len(server.bodies("/generate"))
  assert engines.turn(engine).versions == (0, 0)
  assert engine.counters["server_catching_up"] == 2
  # One reply came from the weights of the server's folder and did not count.
  assert len(server.bodies("/generate")) <= before + 2


def test_a_server_that_comes_back_smaller_stays_down(serve, monkeypatch):
  engine, server = serve(SAID, wait=0.5)
  server.kill()
  monkeypatch.setattr(fake_sglang, "CONTEXT", 40)

  async def run():
    turn = asyncio.create_task(engine.generate(engines.request()))
    await _until(_is(engine, 0, health.State.DOWN))
    server.restart()
    await turn

  with pytest.raises(
    types.EngineError, match="came back with contexts of 33 tokens, expected 57"
  ):
    asyncio.run(run())


def test_servers_of_another_run_are_not_used(serve):
  engine, first, _ = serve(SAID, count=2)
  other, _ = serve(urls=(first.url,))
  theirs = first.version
  with pytest.raises(types.EngineError, match="did another run hand weights"):
    engines.turn(engine, question=0)
  loop.run(engine._fleet._look(engine._fleet._members[0]))
  loop.run(engine._fleet._look(engine._fleet._members[0]))
  assert _is(engine, 0, health.State.DOWN)()
  assert first.version == theirs
  # Its questions go to the other server.
  assert engines.turn(engine, question=0).versions == (0, 0)


def test_bug_in_a_health_check_is_raised(serve, monkeypatch):
  engine, server = serve(SAID, wait=3600)

  async def broken(self, member):
    raise ZeroDivisionError("a bug")

  monkeypatch.setattr(health.Fleet, "_look", broken)
  server.kill()
  with pytest.raises(ZeroDivisionError):
    engines.turn(engine)
  engine._fleet.stop()


def test_waiting_for_a_server_can_be_cancelled(serve):
  engine, server = serve(SAID, wait=3600)
  server.kill()

  async def run():
    turn = asyncio.create_task(engine.generate(engines.request()))
    await _until(lambda: engine.counters["waits"])
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
      await turn

  asyncio.run(run())


def test_states_are_logged_once(serve, caplog):
  caplog.set_level(logging.INFO)
  engine, server = serve(SAID, wait=60)
  server.kill()

  async def run():
    turn = asyncio.create_task(engine.generate(engines.request()))
    await _until(_is(engine, 0, health.State.DOWN))
    looks = engine.counters["retries"]
    await _until(lambda: engine.counters["retries"] > looks + 5)
    server.restart()
    await turn

  asyncio.run(run())
  said = [
    r.message for r in caplog.records if "SGLang server http" in r.message
  ]
  assert [line.split(";")[0].partition(" was ")[2] for line in said] == [
    "up and is suspect",
    "suspect and is down",
    "down and is catching up",
    "catching up and is up",
  ]
