"""Trains through an outage and compares the run with its valid episodes."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import oracles
import pytest
import scripted_runs as runs
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import scoring
from anysearch_jax.methods import systems
from anysearch_jax.policy import hf
from anysearch_jax.rollout import driver
from anysearch_jax.training import (
  batching,
  learner,
  loop,
  rewards_and_advantages,
  validation,
)
from anysearch_jax.world import world as world_lib
from retrieval import lexical

CORPUS = "snapshot-0"
# As `small_run`'s, for a policy that searches.
CONFIG = dataclasses.replace(
  small_run.CONFIG,
  group=3,
  save_every=4,
  optimizer=config_lib.OptimizerConfig(learning_rate=3e-4),
  reward=config_lib.RewardConfig(length_limit=40, length_tolerance=40),
  # Windows so long that they forget nothing during a run.
  curriculum=dataclasses.replace(small_run.CONFIG.curriculum, window=64),
  episode=config_lib.EpisodeConfig(
    prompts="world", max_generated=120, max_context=190
  ),
  engine=dataclasses.replace(
    small_run.CONFIG.engine, slots=12, max_context=192, lanes=(12,)
  ),
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
  return dataclasses.replace(
    config, episode=dataclasses.replace(config.episode, **seconds)
  )


def parts() -> dict[str, Any]:
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
    "retriever": lexical.LexicalRetriever(world.corpus),
  }


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

      def steps(self, packed):
        before = _copies(self.state)
        for values in super().steps(packed):
          after = _copies(self.state)
          drill.moved.append(any(map(np.any, map(np.not_equal, before, after))))
          before = after
          yield values

    self.folder.mkdir(exist_ok=True)
    validation.validate(self.config)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(learner, "Learner", Watched)
      patch.setattr(driver, "run_episode", self._played)
      loop.Trainer(self.config, folder=self.folder, **self._parts).run(on_event)
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

  def check(self) -> None:
    """Checks that the run learnt exactly from its valid episodes.

    Counts include all played episodes. Rewards, advantages and the windows that
    budgets are drawn from are recomputed in float64, group by group.
    """
    records = self.metrics()
    windows = oracles.Windows(self.config.curriculum)
    pairs = zip(records, self.learnt, strict=True)
    for rollout, (record, (groups, packed)) in enumerate(pairs):
      self._check_counts(rollout, record, groups)
      if record["phase"] == 2 and records[rollout - 1]["phase"] == 2:
        drawn_by = [record["curriculum/p1"], record["curriculum/p2"]]
        np.testing.assert_allclose(drawn_by, windows.probabilities(), rtol=1e-5)
      self._check_batches(record, groups, packed, windows)

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
        valid = _valid(group)
        if valid:
          scored = rewards_and_advantages.score(
            [types.Group(group.question, group.budget, group.scaffold, valid)],
            np.asarray([group.budget], np.int32),
            samples=len(valid),
            method=systems.trained(c),
            objective=c.objective,
          )
          found |= dict(
            zip(_places(q, group), zip(valid, scored.advantages[0]))
          )
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

  def _check_counts(self, rollout, record, groups) -> None:
    tries = collections.defaultdict(dict)
    for t in self.played:
      if t.address.rollout == rollout:
        key = t.address.question, t.address.attempt
        tries[key][t.address.sample] = t
    stands = {
      key: sum(not t.failed for t in samples.values()) >= 2
      for key, samples in tries.items()
    }
    again = {q for (q, _), stood in stands.items() if not stood}
    assert {q for q, attempt in tries if attempt == 1} == again
    lost = [
      q for (q, attempt), stood in stands.items() if attempt and not stood
    ]
    assert [q for q, group in enumerate(groups) if group is None] == sorted(
      lost
    )
    for q, group in enumerate(groups):
      if group is not None:
        last = tries[q, int(q in again)]
        assert [*map(_text, group.trajectories)] == [
          _text(last[sample]) for sample in sorted(last)
        ]
    assert record["rollout/resampled_groups"] == len(again)
    assert record["rollout/dropped_groups"] == len(lost)
    assert record["rollout/failed"] == sum(
      t.failed for samples in tries.values() for t in samples.values()
    )

  def _check_batches(self, record, groups, packed, windows) -> None:
    """Checks rewards and advantages in float64, and every token's place."""
    c, found, rewards = self.config, {}, []
    for q, group in enumerate(groups):
      valid = _valid(group)
      verdicts = [_verdict(t) for t in valid]
      em, form = ([getattr(v, name) for v in verdicts] for name in _VERDICT)
      everyone = [True] * len(valid)
      table = oracles.rewards(
        em,
        form,
        [t.generated_tokens for t in valid],
        [t.searches for t in valid],
        group.budget if group else 0,
        everyone,
        c.reward,
      )
      (advantages,) = oracles.advantages(
        [table["total"]],
        [everyone],
        c.objective.advantage_epsilon,
        c.objective.normalize,
      )
      found |= dict(zip(_places(q, group), zip(valid, advantages)))
      windows.record([t.budget for t in valid], em, everyone)
      rewards += table["total"]
    assert record["reward/total"] == pytest.approx(np.mean(rewards), abs=1e-6)
    # Each sequence is in the batch of its step, with its advantage.
    for step, batch in zip(self._cut(found, len(packed)), packed, strict=True):
      expected = sorted((t.token_ids.tolist(), a) for t, a in step)
      assert [ids for ids, _ in _segments(batch)] == [i for i, _ in expected]
      for (_, ours), (_, advantage) in zip(_segments(batch), expected):
        np.testing.assert_allclose(ours, advantage, rtol=1e-4, atol=1e-6)

  def _cut(self, found, steps):
    """Divides values among optimizer steps, by their place."""
    size = self.config.questions * self.config.group // steps
    for start in range(0, steps * size, size):
      places = [
        divmod(i, self.config.group) for i in range(start, start + size)
      ]
      yield [found[place] for place in places if place in found]


_VERDICT = ("em", "format")


def _copies(tree: Any) -> list[np.ndarray]:
  """Copies arrays, because the next step donates them."""
  return [np.array(x) for x in jax.tree.leaves(tree)]


def _text(t: types.Trajectory) -> tuple:
  return t.address, t.outcome, t.token_ids.tolist()


def _valid(group: types.Group | None) -> tuple[types.Trajectory, ...]:
  return tuple(t for t in group.trajectories if not t.failed) if group else ()


def _places(q: int, group: types.Group | None) -> list[tuple[int, int]]:
  return [(q, t.address.sample) for t in _valid(group)]


def _verdict(t: types.Trajectory) -> scoring.Verdict:
  return scoring.judge(
    t.spans,
    golden_answers=t.question.golden_answers,
    budget=t.budget,
    searches=t.searches,
    scaffold=t.scaffold,
  )


def _weighed(step):
  """Returns the trajectories of a step, each with its tokens' weights."""
  for t, advantage in step:
    by_model = t.authors == types.Author.MODEL
    weight = by_model / (by_model.sum() * len(step))
    yield (t, advantage), weight.astype(np.float32)


def _segments(batch: batching.TrainBatch):
  """Returns a batch's sequences: their ids and advantages."""
  found = []
  for rows in batch:
    for a, b in np.ndindex(*rows.segment_ids.shape[:2]):
      segments = rows.segment_ids[a, b]
      assert not rows.weight[a, b][segments == 0].any()
      for segment in range(1, segments.max() + 1):
        here = np.s_[a, b, segments == segment]
        ids = [int(rows.tokens[here][0]), *rows.targets[here].tolist()]
        found.append((ids, rows.advantage[here]))
  return sorted(found, key=lambda each: each[0])
