"""Outages during training: failed episodes are excluded from it.

The drills use a policy that searches, the real engine, the real learner and the
client of retrieval servers over HTTP. Faults are scripted, so that every drill
is exact.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib

import drills
import faulty_retriever
import pytest
import scripted
import scripted_runs as runs

from anysearch_jax import types
from anysearch_jax.training import health

CONFIG, PATIENT, CORPUS = drills.CONFIG, drills.PATIENT, drills.CORPUS


@pytest.fixture(scope="module")
def parts():
  return drills.parts()


@pytest.fixture(scope="module")
def undisturbed(parts, tmp_path_factory):
  return drills.Drill(tmp_path_factory.mktemp("run"), CONFIG, **parts).run()


@pytest.fixture(scope="module")
def victims(undisturbed):
  """Queries of the first rollout: of one sample, and of most of a group."""
  groups, _ = undisturbed.learnt[0]
  asked = collections.Counter(
    (query, q)
    for q, group in enumerate(groups)
    for t in group.trajectories
    for query in dict.fromkeys(t.queries)
  )
  one, of_one = next(pair for pair, count in asked.items() if count == 1)
  most = next(
    query for (query, q), count in asked.items() if count > 1 and q != of_one
  )
  return {one, most}


class Parted:
  """Sends the given queries to another retriever."""

  def __init__(self, retriever, queries, other):
    self._retriever, self._queries, self._other = retriever, queries, other

  async def search(self, request):
    theirs = request.query in self._queries
    return await (self._other if theirs else self._retriever).search(request)


@pytest.fixture(scope="module")
def expected(parts, victims, tmp_path_factory):
  """The run in which a scripted retriever fails the victims' queries."""
  gone = scripted.Retriever(error=types.RetrievalError("The index is gone."))
  retriever = Parted(parts["retriever"], victims, gone)
  drill = drills.Drill(
    tmp_path_factory.mktemp("run"), CONFIG, **parts | {"retriever": retriever}
  ).run()
  drill.check()
  drill.check_bits()
  return drill


@pytest.fixture
def server(parts):
  with faulty_retriever.Server(parts["retriever"], CORPUS) as server:
    yield server


# No call is refused because of earlier ones, and none waits in a queue.
ENDLESS = {"failures": 10**9, "concurrency": 64}


@pytest.fixture
def drill(parts, server, tmp_path):
  """Returns a function that makes a run whose searches go to the server."""
  with faulty_retriever.connect(
    server.url, CORPUS, batch=1, **ENDLESS
  ) as asking:

    def make(config=CONFIG, retriever=asking):
      given = parts | {"retriever": retriever}
      return drills.Drill(tmp_path / "run", config, **given)

    make.asking = asking
    yield make


def test_expected_run_lost_a_sample_and_resampled_a_group(
  expected, undisturbed
):
  groups, _ = expected.learnt[0]
  left = [sum(not t.failed for t in g.trajectories) for g in groups if g]
  assert 2 in left and 3 in left
  assert expected.metrics()[0]["rollout/resampled_groups"] == 1
  assert expected.metrics() != undisturbed.metrics()


@pytest.mark.parametrize(
  "fault",
  [
    "hangs",
    *(
      pytest.param(fault, marks=pytest.mark.slow)
      for fault in ("broken", "dies", "html")
    ),
  ],
)
def test_http_faults_give_the_same_run_as_scripted_failures(
  fault, drill, server, victims, expected
):
  server.fault, server.hits = fault, victims.__contains__
  seconds = 2.5 if fault == "hangs" else 60.0
  drill = drill(drills.with_deadlines(CONFIG, search_deadline=seconds)).run()
  check_reasons(drill, victims, faulty_retriever.FAULTS[fault])
  drill.same(expected)


def test_refused_connections_give_the_same_run_as_scripted_failures(
  drill, victims, expected
):
  with faulty_retriever.connect(
    faulty_retriever.nobody(), CORPUS, batch=1, **ENDLESS
  ) as nobody:
    drill = drill(retriever=Parted(drill.asking, victims, nobody)).run()
  check_reasons(drill, victims, REFUSED)
  drill.same(expected)


REFUSED = "met ConnectError: All connection attempts failed. Is a retriever"


def check_reasons(drill, victims, met):
  """Checks that exactly the episodes with these queries failed, and why."""
  assert drill.failed()
  for t in drill.played:
    assert not victims & set(t.queries)
    if t.failed:
      assert met in t.reason
      assert any(f"The search for {q!r} failed: " in t.reason for q in victims)


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_run_survives_half_of_the_answers_missing(level, drill, server):
  server.fault = "broken"
  server.hits = lambda query: zlib.crc32(query.encode()) % 2 == 0
  drill = drill(runs.at_level(level, PATIENT)).run()
  assert 0.2 < len(drill.failed()) / len(drill.played) < 0.9
  for t in drill.played:
    assert not any(map(server.hits, t.queries))
  drill.check()
  drill.check_bits()


def test_an_empty_answer_is_an_observation_and_no_failure(
  drill, server, victims
):
  server.fault, server.hits = "empty", victims.__contains__
  drill = drill().run()
  assert not drill.failed()
  asked = [t for t in drill.played if victims & set(t.queries)]
  assert asked
  for t in asked:
    assert t.searches == len(t.queries) <= t.budget
    assert "No results found." in "".join(span.text for span in t.spans)
  assert [r["rollout/failed"] for r in drill.metrics()] == [0] * 4
  drill.check()


@pytest.mark.parametrize(
  "fault",
  [
    "refused",
    *(
      pytest.param(fault, marks=pytest.mark.slow)
      for fault in faulty_retriever.FAULTS
    ),
  ],
)
def test_too_many_failed_searches_stop_the_run_with_the_cause(
  fault, parts, server, tmp_path
):
  """Searches are batched here, as they are in production."""
  server.fault = fault
  if fault == "refused":
    server.stop()
  seconds = 0.5 if fault == "hangs" else 60.0
  with faulty_retriever.connect(server.url, CORPUS, batch=256) as asking:
    drill = drills.Drill(
      tmp_path,
      drills.with_deadlines(CONFIG, search_deadline=seconds),
      **parts | {"retriever": asking},
    )
    with pytest.raises(health.FailedEpisodesError) as raised:
      drill.run()
  sentence = str(raised.value)
  assert sentence.startswith(f"Rollout 0: {len(drill.failed())} of ")
  assert "failed, more than watch.max_failed, 0.5; " in sentence
  assert (faulty_retriever.FAULTS | {"refused": REFUSED})[fault] in sentence
  assert not drill.moved
  assert not (tmp_path / "metrics.jsonl").read_text()


def test_run_stopped_by_an_outage_resumes_bit_for_bit(
  drill, server, undisturbed
):
  config = dataclasses.replace(CONFIG, save_every=1)

  def on_event(event):
    if event.rollout == 0:
      server.stop()

  with pytest.raises(health.FailedEpisodesError, match="Rollout 1: "):
    drill(config).run(on_event)
  server.start()
  drill(config).run().same(undisturbed)
