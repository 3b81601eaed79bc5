"""Outages during training: failed episodes are excluded from it.

The drills use a policy that searches, the real engine, the real learner and the
clients of retrieval and SGLang servers over HTTP. Faults are scripted, so that
every drill is exact.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import threading
import time
from typing import Any

import fake_sglang
import faulty_retriever
import jax
import numpy as np
import pytest
import scripted
import scripted_runs as runs
import sglang_engines
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.policy import hf
from anysearch_jax.retrieval import lexical
from anysearch_jax.rollout import driver
from anysearch_jax.rollout.jax_engine import engine as engine_lib
from anysearch_jax.rollout.jax_engine import kv_device, kv_store
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.training import (
  batching,
  health,
  learner,
  loop,
  rewards_and_advantages,
)
from anysearch_jax.world import world as world_lib

CORPUS = "snapshot-0"
# As `small_run`'s, for a policy that searches.
CONFIG = config_lib.changed(
  small_run.CONFIG,
  group=3,
  save_every=4,
  optimizer=config_lib.OptimizerConfig(learning_rate=3e-4),
  reward=config_lib.RewardConfig(length_limit=40, length_tolerance=40),
  # Windows so long that they forget nothing during a run.
  curriculum={"window": 64},
  episode=config_lib.EpisodeConfig(
    prompts="world", max_generated=120, max_context=190
  ),
  engine={"slots": 12, "max_context": 192, "lanes": (12,)},
  batch=config_lib.BatchConfig(
    row_lengths=(192,), micro_batch_tokens=384, max_micro_batches=12
  ),
)
# Continues despite failures, as long as there is something to learn from.
PATIENT = dataclasses.replace(
  CONFIG, watch=config_lib.WatchConfig(max_failed=1.0)
)

_run_episode = driver.run_episode


def with_deadlines(config, **seconds):
  return config_lib.changed(config, episode=seconds)


class Learner(learner.Learner):
  """The real learner; learners of equal policies share a compiled step."""

  _compiled: dict[Any, Any] = {}

  def __init__(self, config: config_lib.ExperimentConfig, policy: hf.Policy):
    super().__init__(config, policy)
    self._step = self._compiled.setdefault(self.architecture, self._step)


class Drill:
  """A run of the real engine and learner.

  Args:
    folder: folder of the run.
    config: configuration of the run.
    **parts: arguments of the trainer, except the folder.

  Attributes:
    questions: the questions of the run.
    played: every episode that ended, kept or not, in any order.
    learnt: for each rollout its groups and the batches made from them.
    moved: for each optimizer step whether it changed the weights or the
      optimizer's state.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    config: config_lib.ExperimentConfig,
    **parts: Any,
  ):
    self.folder, self.config, self._parts = folder, config, parts
    self.questions = parts["questions"]
    self.played: list[types.Trajectory] = []
    self.learnt: list[tuple[list, list[batching.TrainBatch]]] = []
    self.moved: list[bool] = []

  def run(self, on_event=lambda event: None) -> Drill:
    drill = self

    class Watched(Learner):
      def pack(self, scored):
        packed = super().pack(scored)
        drill.learnt.append((scored.groups, packed))
        return packed

      def steps(self, packed, start=0):
        before = _copies(self.state)
        for values in super().steps(packed, start):
          after = _copies(self.state)
          drill.moved.append(any(map(np.any, map(np.not_equal, before, after))))
          before = after
          yield values

    self.folder.mkdir(exist_ok=True)
    systems.validate(self.config)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(learner, "Learner", Watched)
      patch.setattr(driver, "run_episode", self._played)
      loop.Trainer(
        self.config,
        method=systems.trained(self.config),
        folder=self.folder,
        **self._parts,
      ).run(on_event)
    return self

  async def _played(self, *args, **kwargs) -> types.Trajectory:
    self.played.append(await _run_episode(*args, **kwargs))
    return self.played[-1]

  def policy(self) -> list[np.ndarray]:
    """Returns the weights that the run exported."""
    return jax.tree.leaves(hf.load(self.folder / "policy").params)

  def metrics(self) -> list[dict[str, float]]:
    """Returns a record per rollout, without values that depend on timing."""
    return [
      {n: x for n, x in r.items() if not n.startswith(("search/", "engine/"))}
      for r in runs.metrics(self.folder)
    ]

  def failed(self) -> list[types.Trajectory]:
    return [t for t in self.played if t.failed]

  def same(self, other: Drill) -> None:
    """Asserts that metrics and weights equal another run's to the bit."""
    assert self.metrics() == other.metrics()
    for ours, theirs in zip(self.policy(), other.policy(), strict=True):
      np.testing.assert_array_equal(ours, theirs)

  def check_bits(self) -> None:
    """Compares the weights with a learner that saw only valid episodes.

    That learner gets each group without its failed members. The comparison is
    exact if such a group has two valid members, because a sum of two terms does
    not depend on their order.
    """
    c = self.config
    alone = Learner(c, self._parts["policy"])
    for groups, packed in self.learnt:
      found = {}
      for q, group in enumerate(groups):
        members = group.trajectories if group else ()
        if valid := tuple(t for t in members if not t.failed):
          scored = rewards_and_advantages.score(
            [types.Group(group.question, group.budget, group.scaffold, valid)],
            np.asarray([group.budget], np.int32),
            samples=len(valid),
            method=systems.trained(c),
            objective=c.objective,
          )
          places = [(q, t.address.sample) for t in valid]
          found |= dict(zip(places, zip(valid, scored.advantages[0])))
      batches = [
        batching.pack(
          [
            batching.Example(t.token_ids, weight, t.logps, float(advantage))
            for (t, advantage), weight in _weighed(step)
          ],
          config=c.batch,
        )
        for step in self._cut(found, len(packed))
      ]
      assert [v["finite"] for v in alone.steps(batches)] == [1] * len(packed)
    for ours, theirs in zip(
      self.policy(), jax.tree.leaves(alone.params()), strict=True
    ):
      np.testing.assert_array_equal(ours, theirs)

  def _cut(self, found, steps):
    """Divides values among optimizer steps, by their place."""
    size = self.config.questions * self.config.group // steps
    for start in range(0, steps * size, size):
      places = [
        divmod(i, self.config.group) for i in range(start, start + size)
      ]
      yield [found[place] for place in places if place in found]


def _copies(tree: Any) -> list[np.ndarray]:
  """Copies arrays, because the next step donates them."""
  return [np.array(x) for x in jax.tree.leaves(tree)]


def _weighed(step):
  """Returns the trajectories of a step, each with its tokens' weights."""
  for t, advantage in step:
    by_model = t.authors == types.Author.MODEL
    weight = by_model / (by_model.sum() * len(step))
    yield (t, advantage), weight.astype(np.float32)


@pytest.fixture(scope="module")
def parts():
  """Returns the shipped policy, and questions that make it search.

  They are about one corpus, and their episodes are short.
  """
  world = world_lib.World()
  folder = pathlib.Path(__file__).parents[2] / "configs/graded_world_policy"
  return {
    "policy": hf.load(folder),
    "questions": [
      q
      for q in world.questions("train", 3000, 0)
      if q.corpus == CORPUS
      and q.metadata["min_searches"] in (1, 2)
      and q.metadata["hops"] <= 2
    ],
    "retriever": lexical.LexicalRetriever(world.corpus, reads=world.searched),
  }


@pytest.fixture(scope="module", autouse=True)
def undisturbed(parts, tmp_path_factory):
  """A run without faults; it also compiles programs before deadlines matter."""
  return Drill(tmp_path_factory.mktemp("run"), CONFIG, **parts).run()


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
  drill = Drill(
    tmp_path_factory.mktemp("run"), CONFIG, **parts | {"retriever": retriever}
  ).run()
  drill.check_bits()
  return drill


@pytest.fixture
def server(parts):
  with faulty_retriever.Server(parts["retriever"], CORPUS) as server:
    yield server


# No call is refused because of earlier ones, and none waits in a queue.
ENDLESS = {"concurrency": 64}


@pytest.fixture
def drill(parts, server, tmp_path):
  """Returns a function that makes a run whose searches go to the server."""
  with faulty_retriever.connect(server.url, batch=1, **ENDLESS) as asking:

    def make(config=CONFIG, retriever=asking):
      given = parts | {"retriever": retriever}
      return Drill(tmp_path / "run", config, **given)

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
    "broken",
    *(
      pytest.param(fault, marks=pytest.mark.slow)
      for fault in ("hangs", "dies", "html")
    ),
  ],
)
def test_http_faults_give_the_same_run_as_scripted_failures(
  fault, drill, server, victims, expected
):
  server.fault, server.hits = fault, victims.__contains__
  seconds = 2.5 if fault == "hangs" else 60.0
  drill = drill(with_deadlines(CONFIG, search_deadline=seconds)).run()
  check_reasons(drill, victims, faulty_retriever.FAULTS[fault])
  drill.same(expected)


def check_reasons(drill, victims, met):
  """Checks that exactly the episodes with these queries failed, and why."""
  assert drill.failed()
  for t in drill.played:
    assert not victims & set(t.queries)
    if t.failed:
      assert met in t.reason
      assert any(f"The search for {q!r} failed: " in t.reason for q in victims)


def test_too_many_failed_searches_stop_the_run_with_the_cause(
  parts, server, tmp_path
):
  """Searches are batched here, as they are in production."""
  server.stop()
  with faulty_retriever.connect(server.url, batch=256) as asking:
    drill = Drill(tmp_path, CONFIG, **parts | {"retriever": asking})
    with pytest.raises(health.FailedEpisodesError) as raised:
      drill.run()
  sentence = str(raised.value)
  assert sentence.startswith(f"Rollout 0: {len(drill.failed())} of ")
  assert "failed, more than watch.max_failed, 0.5; " in sentence
  assert "met ConnectError: All connection attempts failed. Is a" in sentence
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


# Engines, in process and over HTTP; faults by address or prompt.


def faults(monkeypatch, of_turn):
  """Awaits `of_turn(request)` before every turn of the engine."""
  generate = engine_lib.JaxEngine.generate

  async def faulty(self, request):
    await of_turn(request)
    return await generate(self, request)

  monkeypatch.setattr(engine_lib.JaxEngine, "generate", faulty)


def test_optimizer_step_without_episodes_changes_no_weights(
  parts, tmp_path, monkeypatch
):
  """Both groups of the second step of rollout 1 are lost."""

  async def of_turn(request):
    if request.address.rollout == 1 and request.address.question >= 2:
      raise types.EngineError("Out of reach.")

  faults(monkeypatch, of_turn)
  drill = Drill(tmp_path, PATIENT, **parts).run()
  lengths = [
    [sum(int(rows.used) for rows in batch) > 0 for batch in packed]
    for _, packed in drill.learnt
  ]
  assert lengths == [[True, True], [True, False], [True, True], [True, True]]
  assert drill.moved == sum(lengths, [])


def test_a_device_that_hangs_stops_the_run(parts, tmp_path, monkeypatch):
  freed, decode = threading.Event(), kv_store.decode

  def hang(*args, **kwargs):
    assert freed.wait(60)
    return decode(*args, **kwargs)

  monkeypatch.setattr(kv_store, "decode", hang)
  # Shortens the wait for a running call whose result is no longer needed.
  monkeypatch.setattr(kv_device, "_DRAIN_SECONDS", 0.1)
  drill = Drill(tmp_path, with_deadlines(CONFIG, turn_deadline=0.5), **parts)
  sentence = (
    "24 of 24 episodes failed.* Turn 0 failed: no answer within 0.5 sec"
  )
  with pytest.raises(health.FailedEpisodesError, match=sentence):
    drill.run()
  freed.set()
  assert not drill.moved


def test_device_error_is_a_bug_and_not_an_outage(
  parts, tmp_path, monkeypatch, undisturbed
):
  config = dataclasses.replace(CONFIG, save_every=1)

  def broken(*args, **kwargs):
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

  with monkeypatch.context() as patch:
    drill = Drill(tmp_path, config, **parts)
    with pytest.raises(ExceptionGroup) as raised:
      drill.run(lambda event: patch.setattr(kv_store, "decode", broken))
  assert raised.group_contains(RuntimeError, match="RESOURCE_EXHAUSTED")
  assert not drill.failed()
  assert len(drill.moved) == 2
  Drill(tmp_path, config, **parts).run().same(undisturbed)


SERVED = config_lib.changed(
  CONFIG,
  group=2,
  episode=config_lib.EpisodeConfig(
    prompts="world", max_generated=20, max_context=150
  ),
  engine=config_lib.EngineConfig(kind="sglang", max_context=150),
  # The server's texts and log-probabilities are scripted.
  watch={"gap_rollouts": 1000},
)


@pytest.fixture
def sampler(monkeypatch):
  """A server that searches for "b" once, then answers "b" or "c" in turn."""
  answers = itertools.cycle("bc")

  def says(context):
    text = fake_sglang.tokenizer().decode(context)
    searched = "</search>" in text
    tag, what = ("answer", next(answers)) if searched else ("search", "b")
    return fake_sglang.ids("<", tag, ">", what, f"</{tag}>")

  # The server's default context is too short for an observation.
  monkeypatch.setattr(fake_sglang, "CONTEXT", 200)
  with fake_sglang.Server(says) as server:
    yield server


@pytest.fixture
def served(sampler, tmp_path, monkeypatch):
  """Returns a function that makes a run whose turns the server samples."""
  monkeypatch.setattr(server_lib, "_FIRST_PAUSE", 0.001)

  def make(level=0, offload="none", **settings):
    servers = config_lib.ServersConfig(
      urls=(sampler.url,), weights=str(tmp_path / "ram"), **settings
    )
    config = runs.at_level(level, SERVED, servers=servers, save_every=2)
    return Drill(
      tmp_path / "run",
      config_lib.changed(config, pipeline={"offload": offload}),
      policy=sglang_engines.policy(),
      questions=[
        types.Question(str(i), "c" * (i + 1), ("b",)) for i in range(16)
      ],
      retriever=scripted.Retriever({"b": [types.Passage("1", "a", "b")]}),
    )

  return make


def test_memory_of_a_shared_gpu_belongs_to_who_computes(
  served, sampler, monkeypatch
):
  """The server's while it samples, the trainer's state's while it trains."""
  made, seen = [], collections.defaultdict(set)

  def note(phase, call):
    def noted(*args):
      if phase == "make":
        made.append(args[0])
      state = jax.tree.leaves(getattr(made[-1], "state", ()))
      where = {x.sharding.memory_kind for x in state}
      seen[phase].add((bool(sampler.away), *sorted(where)))
      return call(*args)

    return noted

  for phase, name in (("train", "steps"), ("make", "__init__")):
    noted = note(phase, getattr(learner.Learner, name))
    monkeypatch.setattr(learner.Learner, name, noted)
  sampler._generate = note("sample", sampler._generate)
  drill = served(offload="state", colocated=True).run()
  assert not drill.failed() and not sampler.died
  assert seen == {
    "make": {(True,)},
    "train": {(True, "device")},
    "sample": {(False, "device", "pinned_host")},
  }
  assert [r["policy/staleness_max"] for r in drill.metrics()] == [0] * 4


def test_a_run_resumes_when_its_server_is_back(served, sampler):
  """The server is down during rollout 2, which checkpoint 2 then contains."""
  generate = sampler._generate

  def down(body):
    text = fake_sglang.tokenizer().decode(body["input_ids"]).partition("<")[0]
    gone = len(text) - len(text.rstrip("c")) > 8  # Questions from 8 on.
    return (503, {"message": "Restarting."}) if gone else generate(body)

  sampler._generate = down
  with pytest.raises(health.FailedEpisodesError, match="Rollout 2: 16 of 16"):
    served(level=1, retries=0).run()
  sampler._generate = generate
  records = served(level=1, retries=0).run().metrics()
  assert [r["rollout"] for r in records] == [0, 1, 2, 3]
  assert [r["rollout/failed"] for r in records] == [0] * 4
  assert [r["policy/staleness_max"] for r in records] == [0, 1, 0, 1]
  assert records[-1]["run/failed_rollouts"] == 1


def test_a_server_that_is_killed_and_started_again_loses_nothing(
  served, sampler
):
  """The server dies in the middle of the second rollout."""
  generate, asked = sampler._generate, itertools.count()

  def restart():
    sampler.kill()
    time.sleep(0.3)  # Longer than the retries of a single request.
    sampler.restart()

  def dies(body):
    if next(asked) == 20:
      threading.Thread(target=restart, daemon=True).start()
      sampler._released.wait(60)
    return generate(body)

  sampler._generate = dies
  drill = served(retries=1, wait=60, level=1).run()
  assert not drill.failed()
  assert [r["rollout/failed"] for r in drill.metrics()] == [0] * 4
  assert all(r["policy/staleness_max"] <= 1 for r in drill.metrics())
  counted = runs.metrics(drill.folder)[-1]
  assert counted["engine/server_down"] == 1
  assert counted["engine/server_up"] == 1
  assert counted["engine/failovers"] > 0
