"""Servers of a run that are late, join, leave, are slow or sample garbage."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import itertools
import math

import fake_sglang
import httpx2
import pytest
import sglang_engines as engines
from waits import wait_for

from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.rollout.servers import fleet as fleet_lib
from anysearch_jax.rollout.servers import member as member_lib
from anysearch_jax.rollout.servers import server as server_lib

serve = engines.serve
SAID = fake_sglang.ids("b", "</search>")
UP = True
DOWN = False


def state(engine, server):
  found = [m for m in engine._fleet.members if m.server.url == server.url]
  return found[0].is_up if found else None


@pytest.fixture
def start():
  """Starts fake servers, which end with the test."""
  made = []

  def start(count, script=SAID, **settings):
    new = [fake_sglang.Server(script, **settings) for _ in range(count)]
    made.extend(server.__enter__() for server in new)
    return new

  yield start
  for server in made:
    server.__exit__()


@pytest.fixture
def gateway(start, monkeypatch):
  """Returns a gateway, and a function that says which servers it lists."""
  monkeypatch.setattr(fleet_lib, "_LIST_SECONDS", 0.05)
  (found,) = start(1)

  def lists(*servers):
    found.workers = [
      {"id": str(i), "base_url": server.url + "/", "engine": "sglang"}
      for i, server in enumerate(servers)
    ] + [{"id": "v", "base_url": "http://127.0.0.1:1", "engine": "vllm"}]

  return found, lists


def test_a_run_begins_with_the_first_server_and_uses_late_ones(serve, start):
  early, late = start(2)
  late.kill()
  engine, _ = serve(urls=(late.url, early.url), wait=60)
  assert engines.turn(engine).server == early.url
  late.restart()
  wait_for(lambda: state(engine, late) is UP)
  assert late.version == early.version
  assert engines.turn(engine, question=1).server == late.url


def test_a_run_waits_for_its_first_server(serve, start, monkeypatch):
  monkeypatch.setattr(fleet_lib, "_START_SECONDS", 0.05)
  (busy,) = start(1)
  busy.faults["/health"] = [(503, "")] * 8
  engine, _ = serve(urls=(busy.url,), wait=60)
  assert engines.turn(engine).server == busy.url


def play(engine, questions, samples, turns, between=lambda turn: None):
  """Plays episodes of several turns; returns their turns by address."""
  found = collections.defaultdict(list)

  async def episode(question, sample):
    context = engines.PROMPT
    for turn in range(turns):
      request = engines.request(
        question=question, sample=sample, context=context, turn=turn
      )
      found[question, sample].append(await engine.generate(request))
      between(sum(map(len, found.values())))
      context = (*context, *found[question, sample][-1].token_ids)
    engine.release(types.Address(0, question, sample))

  async def play_all():
    pairs = [(q, s) for q in range(questions) for s in range(samples)]
    await asyncio.gather(*(episode(*pair) for pair in pairs))

  asyncio.run(play_all())
  return found


def test_two_servers_become_four_and_then_one_and_no_turn_is_lost(
  start, gateway
):
  """One of those that leave is killed in the middle of its turns."""
  _, lists = gateway
  a, b, c, d = start(4, seconds=0.01)
  lists(a, b)
  engine = engines.connect(gateway=gateway[0].url, wait=60, deadline=30)
  events = {
    20: lambda: lists(a, b, c, d),
    60: a.kill,
    70: lambda: lists(d),
  }

  def between(done):
    if event := events.get(done):
      event()

  found = play(engine, 24, 3, 4, between)
  try:
    assert len(found) == 72
    assert all(len(turns) == 4 for turns in found.values())
    assert all(
      turn.token_ids == SAID and turn.versions == (0, 0)
      for turns in found.values()
      for turn in turns
    )
    by_server = collections.Counter(
      turn.server for turns in found.values() for turn in turns
    )
    wait_for(lambda: len(engine._fleet.members) == 1)
    assert [m.server.url for m in engine._fleet.members] == [d.url]
    assert {by_server[x.url] > 0 for x in (a, b, d)} == {True}
    for server in (c, d):
      paths = [path for path, _ in server.asked]
      if "/generate" in paths:
        loaded = paths.index("/update_weights_from_disk")
        assert loaded < paths.index("/generate")
    # Every turn is counted once, at the server that answered it.
    for server in (a, b, c, d):
      name = f"server/{server.url.partition('://')[2]}/turns"
      assert engine.counters[name] == by_server[server.url]
  finally:
    engine.close()


def test_a_gateway_that_fails_or_forgets_changes_nothing(
  start, gateway, caplog
):
  fake, lists = gateway
  a, b = start(2)
  lists(a, b)
  engine = engines.connect(gateway=fake.url, wait=60)
  try:
    fake.faults["/v1/rl/workers"] = [(500, "oops")] * 4
    wait_for(lambda: not fake.faults["/v1/rl/workers"])
    lists()  # Only the worker of another engine.
    asked = len(fake.asked)
    wait_for(lambda: len(fake.asked) > asked + 4)
    assert {engines.turn(engine, question=q).server for q in range(2)} == {
      a.url,
      b.url,
    }
    assert caplog.text.count("The servers stay as they are") == 1
  finally:
    engine.close()


def test_turns_wait_while_no_server_that_is_listed_is_up(start, gateway):
  fake, lists = gateway
  a, b = start(2)
  lists(a, b)
  engine = engines.connect(gateway=fake.url, wait=20)
  try:
    engine.put_aside(b.url, "of a test")
    lists(b)
    wait_for(lambda: not engine._fleet.members[0].samples)
    waiting = concurrent.futures.ThreadPoolExecutor(1).submit(
      engines.turn, engine
    )
    wait_for(lambda: engine.counters["waits"])
    lists(a, b)
    assert waiting.result(10).server == a.url
    engine._fleet.wait = 0.2
    lists(b)
    wait_for(lambda: state(engine, a) is None)
    with pytest.raises(types.EngineError, match="No server is up for"):
      engines.turn(engine)
  finally:
    engine.close()


def test_a_late_server_that_is_refused_says_why_once(serve, start, caplog):
  early, late = start(2)
  late.kill()
  engine, _ = serve(urls=(late.url, early.url), wait=60)
  late._server_info = lambda body: (200, {"max_req_input_len": 9})
  late.restart()
  said = f"Server {late.url}: {late.url}: came back with contexts of 8"
  wait_for(lambda: said in caplog.text)
  loop.run(engine._fleet._check_member(engine._fleet.members[0]))
  assert caplog.text.count(said) == 1
  assert engines.turn(engine).server == early.url


def test_a_gateway_of_another_kind_is_refused(start):
  (other,) = start(1)
  other.workers = None
  with pytest.raises(types.EngineError, match="smg gateway that was started"):
    engines.connect(gateway=other.url)
  with pytest.raises(ValueError, match="servers.gateway: found"):
    engines.connect(gateway="localhost")


class Slow:
  """Stands for a server; only its address is read."""

  def __init__(self, url):
    self.url = url


def member(name):
  made = member_lib.Member(Slow(f"http://{name}"))
  made.is_up = True
  return made


def members_of(*some):
  made = fleet_lib.Fleet(
    (), Slow, run="", wait=1.0, counters=collections.Counter()
  )
  made.members += some
  return made


def test_questions_are_shared_evenly():
  members = [member("a"), member("b"), member("c")]
  fleet = members_of(*members)
  for question in range(10):
    fleet.choose_member(types.Address(0, question, 0), members[1:2])
  addresses = [types.Address(0, question, 0) for question in range(50, 70)]
  homes = [fleet.choose_member(address, members) for address in addresses]
  assert [homes.count(each) for each in members] == [10, 0, 10]


def test_a_question_stays_until_its_last_episode_ends():
  first, second = member("a"), member("b")
  fleet = members_of(first, second)
  episodes = [types.Address(0, 7, sample) for sample in range(3)]
  assert {fleet.choose_member(e, [first, second]) for e in episodes} == {first}
  for _ in range(3):
    assert fleet.choose_member(episodes[0], [second, first]) is first
  assert fleet.choose_member(episodes[0], [second]) is second
  for episode in episodes:
    assert fleet.choose_member(episodes[-1], [first, second]) is second
    fleet.end_episode(episode)
  assert fleet.choose_member(episodes[0], [first, second]) is first


def broken(reply):
  entries = reply["meta_info"]["output_token_logprobs"]
  return engines.changed(
    output_token_logprobs=[[math.nan, token, None] for _, token, _ in entries]
  )(reply)


def test_a_server_with_broken_numbers_is_put_aside_until_it_restarts(
  serve, caplog
):
  engine, first, second = serve(SAID, count=2, wait=60)
  first.faults["/generate"] = [broken] * 3
  assert engines.turn(engine).server == second.url
  assert state(engine, first) is DOWN
  assert "it is put aside until it is restarted" in caplog.text
  name = first.url.partition("://")[2]
  assert engine.counters[f"server/{name}/not_finite"] == 1
  engine.set_params(engines.policy().params, 1)
  loop.run(engine._fleet._check_member(engine._fleet.members[0]))
  assert state(engine, first) is DOWN
  first.faults.clear()
  first.kill()
  first.restart()
  wait_for(lambda: state(engine, first) is UP)
  assert first.version == second.version


def test_the_only_server_is_not_put_aside(serve):
  engine, server = serve(SAID)
  server.faults["/generate"] = [broken]
  with pytest.raises(types.EngineError, match="log-probability nan"):
    engines.turn(engine)
  assert state(engine, server) is UP
  assert engines.turn(engine).token_ids == SAID


class Router(fake_sglang.Server):
  """Passes turns to servers in turn, and knows nothing of weights."""

  def __init__(self, *servers):
    super().__init__()
    self.targets = itertools.cycle(servers)

  def answer(self, path, body):
    assert path in ("/generate", "/v1/rl/workers"), path
    if path != "/generate":
      return super().answer(path, body)
    body = {k: v for k, v in body.items() if k != "connection"}
    try:
      response = httpx2.post(
        next(self.targets).url + path, json=body, trust_env=False, timeout=30
      )
    except httpx2.TransportError:
      return 502, {"message": "no worker"}
    return response.status_code, response.json()


@pytest.fixture
def routed(start, monkeypatch):
  """Starts two servers behind a router, and an engine that uses it."""
  monkeypatch.setattr(fleet_lib, "_CHECK_SECONDS", 0.05)
  opened = []

  def make(script=SAID, **config):
    servers = start(2, script)
    router = Router(*servers).__enter__()
    settings = {"wait": 20, "urls": tuple(s.url for s in servers)}
    engine = engines.connect(**settings | config, router=router.url)
    opened.append((engine, router))
    return engine, router, *servers

  yield make
  for engine, router in opened:
    engine.close()
    router.__exit__()


def paths(server):
  return {path for path, _ in server.asked}


def test_turns_go_to_a_router_and_all_else_to_each_server(routed):
  engine, router, *servers = routed()
  for version in (1, 2):
    engine.set_params(engines.policy().params, version)
    for question in range(4):
      turn = engines.turn(engine, question=question)
      assert (turn.token_ids, turn.server) == (SAID, router.url)
      assert turn.versions == (version,) * len(SAID)
  assert engine.scores(engines.PROMPT).keys() == {s.url for s in servers}
  assert paths(router) == {"/generate"}
  for server in servers:
    assert len(server.bodies("/update_weights_from_disk")) == 3
    # Four turns, and the scores.
    assert len(server.bodies("/generate")) == 5
  name = router.url.partition("://")[2]
  assert engine.counters[f"server/{name}/turns"] == 8


def test_servers_behind_a_router_are_listed_by_a_gateway(start, gateway):
  fake, lists = gateway
  first, second = start(2)
  lists(first, second)
  router = Router(first, second)
  router.workers = fake.workers
  with router:
    engine = engines.connect(gateway=router.url, router=router.url, wait=20)
    try:
      assert [engines.turn(engine).token_ids for _ in range(2)] == [SAID] * 2
      assert first.version == second.version
      assert paths(router) == {"/generate", "/v1/rl/workers"}
    finally:
      engine.close()


def test_a_restarted_server_behind_a_router_gets_the_present_weights(routed):
  engine, _, first, second = routed()
  engine.set_params(engines.policy().params, 3)
  first.kill()
  first.restart()
  for question in range(4):
    turn = engines.turn(engine, question=question)
    assert turn.versions == (3,) * len(SAID)
  wait_for(lambda: first.version == second.version)


def test_no_turn_of_a_server_put_aside_behind_a_router_counts(routed):
  engine, _, first, second = routed()
  engine.put_aside(first.url, "of a test")
  wait_for(lambda: first.version.endswith(".hidden"))
  for question in range(3):
    assert engines.turn(engine, question=question).token_ids == SAID
  assert engine.counters["failovers"] >= 1
  engine.set_params(engines.policy().params, 1)
  assert engines.turn(engine).versions == (1,) * len(SAID)
  assert first.version.endswith(".hidden")
  first.kill()
  first.restart()
  wait_for(lambda: first.version == second.version)


@pytest.mark.parametrize("why", ["", "is wrong"])
def test_a_server_is_compared_before_a_router_may_use_it(routed, why):
  """Its weights have another name until then, also if it samples turns."""
  engine, _, first, second = routed()
  names = []

  def wrong(scores):
    names.append(first.version)
    return why

  engine.expect(engines.PROMPT, wrong)
  first.kill()
  first.restart()
  for question in range(2):
    assert engines.turn(engine, question=question).token_ids == SAID
  wait_for(lambda: names)
  assert names[0].endswith(".hidden")
  if why:
    wait_for(lambda: state(engine, first) is DOWN)
    assert not first.version == second.version
  else:
    wait_for(lambda: state(engine, first) is UP)
    assert first.version == second.version


def test_a_router_that_answers_nothing_fails_the_turn(routed, monkeypatch):
  monkeypatch.setattr(server_lib, "_LONGEST_PAUSE", 0.01)
  engine, router, *_ = routed(retries=0)
  router.faults["/generate"] = [(503, "no worker")] * 99
  with pytest.raises(types.EngineError, match="HTTP 503: no worker"):
    engines.turn(engine)
  assert len(router.bodies("/generate")) == fleet_lib._ROUTED_MOVES + 1
  with pytest.raises(ValueError, match="servers.router: found 'localhost'"):
    engines.connect(router="localhost")
