"""A rollout that is being sampled goes on with new weights, over servers."""

from __future__ import annotations

import collections
import dataclasses

import fake_sglang
import scripted
import sglang_engines
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.training import sampler


def _served(server):
  """Returns parts and configuration of a run over a server."""
  parts = {
    "policy": sglang_engines.policy(),
    "questions": [types.Question(str(i), "c", ("b",)) for i in range(16)],
    "retriever": scripted.Retriever({"b": [types.Passage("1", "a", "b")]}),
  }
  config = dataclasses.replace(
    small_run.CONFIG,
    save_every=1,
    pipeline=config_lib.PipelineConfig(async_level=1, partial=True),
  )
  return parts, config_lib.changed(
    config,
    episode={"max_generated": 20, "max_context": 150},
    engine={"kind": "sglang", "max_context": 150},
    batch={"row_lengths": (160,), "micro_batch_tokens": 320},
    servers={"urls": (server.url,)},
    watch={"gap_rollouts": 1000},
  )


def test_an_episode_under_way_goes_on_with_new_weights(tmp_path, monkeypatch):
  """A turn of rollout 1 waits for weights that training on rollout 0 makes."""
  monkeypatch.setattr(server_lib, "_FIRST_PAUSE", 0.001)
  monkeypatch.setattr(fake_sglang, "CONTEXT", 200)
  sample, versions = sampler.Sampler.sample, collections.defaultdict(set)

  def held(self, rollout):
    if rollout == 1:
      server.hold_at = 3
    found = sample(self, rollout)
    for group in found.collected.groups:
      versions[rollout] |= {frozenset(t.versions) for t in group.trajectories}
    return found

  monkeypatch.setattr(sampler.Sampler, "sample", held)
  answer = fake_sglang.ids("<", "answer", ">", "b", "</answer>")
  with fake_sglang.Server(answer) as server:
    parts, config = _served(server)
    config = config_lib.changed(
      config, servers={"weights": str(tmp_path / "weights")}
    )
    small_run.train(tmp_path / "run", parts, config)
  # Tokens of the driver have no version.
  assert any({0, 1} <= {*each} for each in versions[1])
  assert versions[0] == {frozenset((-1, 0))}
  records = small_run.records(tmp_path / "run")
  staleness = [record["policy/staleness_mean"] for record in records]
  assert len(staleness) == 4 and 0 < staleness[1] < 1
