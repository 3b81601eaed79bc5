"""Runs with an engine and a learner that are small functions of their inputs.

Any wrong order in a run therefore changes its numbers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import random
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.training import (
  checkpoint,
  learner,
  loop,
  train_step,
)

ROLLOUTS = 6
SCRIPTED = config_lib.changed(
  small_run.CONFIG, save_every=2, curriculum={"total_steps": 2 * ROLLOUTS}
)


def at_level(level, config=SCRIPTED, *, extra_groups=0, **changes):
  made = config_lib.PipelineConfig(level, extra_groups)
  return dataclasses.replace(config, pipeline=made, **changes)


class Engine:
  """Derives its text from weights, address and turn; sometimes it answers.

  `script` is called and awaited with every request first. `open` has the
  episodes that were not released.
  """

  def __init__(self, parts, script=None, *, lie=0, questions=4):
    self._codec = parts["policy"].tokenizer
    self._questions = parts["questions"]
    self._script = script
    self._lie = lie
    self._each = questions  # Of a rollout.
    self.open: set[types.Address] = set()
    self._weights, self.version = b"start", 0
    self.versions: list[int] = []
    self.counters = Counter()

  def set_params(self, params, version):
    assert not self.open
    self._weights, self.version = np.asarray(params["w"]).tobytes(), version
    self.versions.append(version)

  async def generate(self, request):
    a = request.address
    self.open.add(a)
    if self._script is not None:
      await self._script(request)
    drawn = random.Random(f"{self._weights} {a} {request.turn}")
    question = self._questions[(self._each * a.rollout + a.question) % 32]
    text = "<think> x </think>" + drawn.choice(
      [
        f"<answer> {question.golden_answers[0]} </answer>",
        "<answer> nobody </answer>",
        f"<search> {question.text} </search>",
      ]
    )
    ids = self._codec.encode(text)[: request.max_tokens]
    logps = [-drawn.random() for _ in ids]
    self.counters["sampled_tokens"] += len(ids)
    return types.Generation(
      tuple(ids),
      tuple(np.asarray(logps, np.float32).tolist()),
      text,
      types.Finish.STOP,
      (max(0, self.version + self._lie),) * len(ids),
    )

  def release(self, address):
    self.open.discard(address)

  def close(self):
    pass


class Learner:
  """A learner whose weights are a digest of its training data, in order.

  `made` is the newest learner, `trained` has version and ages of every
  rollout's tokens, and `on_step` is called before every step.
  """

  made: Learner
  steps_alone = True
  on_step = staticmethod(lambda rollout, step: None)

  def __init__(self, config, policy):
    type(self).made = self
    self._config, self._policy = config, policy
    self.architecture = policy.architecture
    self.placement = None
    w = jnp.zeros(4)
    self.state = train_step.TrainState({"w": w}, {"m": w}, jnp.int32(0))
    self.trained: list[tuple[int, int]] = []

  def params(self):
    return self._policy.params

  def published(self):
    return jax.tree.map(jnp.copy, self.state.params)

  def scores(self, prompt):
    return np.zeros(0, np.float32)

  def release(self):
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      self.state,
    )

  def pack(self, scored):
    return [scored, scored]

  def steps(self, packed, start=0):
    for i, scored in enumerate(packed[start:]):
      trajectories = [t for g in scored.groups if g for t in g.trajectories]
      rollout = int(self.state.step) // 2
      type(self).on_step(rollout, i)
      if i == 0:
        versions = {v for t in trajectories for v in t.versions.tolist()}
        self.trained += [(rollout, v) for v in versions - {-1}]
      content = hashlib.sha256(np.asarray(self.state.params["w"]).tobytes())
      content.update(scored.advantages.tobytes() + scored.budgets.tobytes())
      for t in trajectories:
        for x in (t.token_ids, t.authors, t.logps, t.versions):
          content.update(x.tobytes())
        content.update(f"{t.address} {t.question.id} {t.queries}".encode())
      w = np.frombuffer(content.digest()[:4], np.uint8).astype(np.float32)
      self.state = train_step.TrainState(
        {"w": jnp.asarray(w)},
        {"m": self.state.params["w"]},
        self.state.step + 1,
      )
      gap = float(w.sum())
      yield {
        "finite": 1.0,
        "loss/total": gap,
        "loss/kl": 0.0,
        # The sampler's weights are the learner's.
        "loss/logp_difference": 1e-9 * gap,
        "loss/logp_difference_p50": 1e-9 * gap,
        "loss/logp_difference_p99": 1e-9 * gap,
        "loss/logp_difference_far": 0.0,
        "loss/logp_difference_max": 1e-9 * gap,
        "policy/entropy": 1.0,
      }

  def speed(self, packed, seconds):
    return {}


class KilledError(Exception):
  pass


def run(folder, parts, config, *, engine=None, kill=None, **kwargs):
  """Trains with the scripted engine; is killed after rollout `kill`."""

  def on_event(event):
    if event.rollout == kill:
      raise KilledError

  folder.mkdir(exist_ok=True)
  systems.validate(config)
  engine = engine or Engine(parts)
  trainer = loop.Trainer(
    config,
    method=systems.trained(config),
    folder=folder,
    engine=engine,
    **parts,
    **kwargs,
  )
  try:
    trainer.run(on_event)
  except KilledError:
    pass
  assert "sampler" not in {thread.name for thread in threading.enumerate()}
  return engine


metrics = small_run.records


def left(folder):
  """Returns everything that is equal in two equal runs."""
  newest = checkpoint.sound(folder / "checkpoints")
  path = folder / "checkpoints" / str(newest)
  with checkpoint.ocp.StandardCheckpointer() as reader:
    arrays = [
      [
        np.asarray(x).tolist()
        for x in jax.tree.leaves(reader.restore(path / i))
      ]
      for i in ("params", "optimizer", "curriculum")
    ]
  progress = checkpoint.read_json(folder / "checkpoints", newest, "progress")
  trajectories = sorted((folder / "trajectories").iterdir())
  texts = {path.name: path.read_text() for path in trajectories}
  return metrics(folder), newest, arrays, progress, texts


def played(folder):
  """Returns the groups of every rollout."""
  for path in sorted((folder / "trajectories").iterdir()):
    yield [json.loads(line) for line in path.read_text().splitlines()]


def fails_in(rollout, error):
  """Returns a script of an engine with a bug in one rollout."""

  async def script(request):
    if request.address.rollout == rollout:
      raise error

  return script


def slow(*slow):
  """Returns a script in which some questions of each rollout take an hour."""

  async def script(request):
    if request.address.question in slow:
      await asyncio.sleep(3600)

  return script


def finished(parts, factory):
  """Makes one undisturbed run per level: its folder, versions and training.

  Args:
    parts: the result of `small_run.parts`.
    factory: factory of temporary folders.
  """

  @functools.cache
  def make(level):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(learner, "Learner", Learner)
      folder = factory.mktemp(f"level{level}")
      config = at_level(level, save_every=1 if level == ROLLOUTS else 2)
      engine = run(folder, parts, config)
      return folder, engine.versions, Learner.made.trained

  return make
