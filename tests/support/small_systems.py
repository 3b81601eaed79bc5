"""Trains small policies with a system's reward, and measures as it does."""

from __future__ import annotations

import dataclasses
import json

import scripted_runs as runs
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.generative_retrieval import simulation
from anysearch_jax.launch import retrievers
from anysearch_jax.methods import systems
from anysearch_jax.rollout import engines, searching
from anysearch_jax.training import rewards_and_advantages


class Engine(runs.Engine):
  """Plays scripted episodes for a real learner."""

  def set_params(self, params, version):
    self.version = version


class ScoringEngine(Engine):
  """Scores texts by the policy's real engine."""

  def __init__(self, parts, config):
    super().__init__(parts, questions=config.questions)
    self._real = engines.make(parts["policy"], config, seed=0)
    self.scores = self._real.scores

  def set_params(self, params, version):
    super().set_params(params, version)
    self._real.set_params(params, version)


def trained(name, parts, folder, *, scores=False):
  """Trains two rollouts of scripted episodes, with real steps.

  Args:
    name: of the system.
    parts: the policy, questions and retriever.
    folder: of the run.
    scores: whether the engine scores texts.
  """
  config = config_lib.changed(
    small_run.CONFIG, group=4, episode={"max_context": 110}
  )
  config = systems.select(config, name)
  if scores:
    engine = ScoringEngine(parts, config)
  else:
    engine = Engine(parts, questions=config.questions)
  retriever = searching.BatchingRetriever(
    retrievers.make(config, parts["retriever"]), config.search
  )
  made = parts | {"engine": engine, "retriever": retriever}
  small_run.train(folder, made, config, rollouts=2)
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  steps = (folder / "steps.jsonl").read_text().splitlines()
  groups = [
    json.loads(line)
    for file in sorted((folder / "trajectories").iterdir())
    for line in file.read_text().splitlines()
  ]
  return list(map(json.loads, lines)), list(map(json.loads, steps)), groups


def measured(config, measure, trajectories):
  """Returns what a run measures with `measure`, and why it failed to."""
  method = dataclasses.replace(systems.trained(config), measure=measure)
  return rewards_and_advantages.measure(method, trajectories)


def noisy_searches(config):
  """Counts the noisy answers of a run whose searches are simulated."""
  made = retrievers.make(config, small_run.parts()["retriever"])
  assert isinstance(made, simulation.SimulatedRetriever)
  question = types.Question("q", "Who is the mayor?", ("tol",))
  context = types.SearchContext(types.Address(9, 0, 0), 0, question, "")
  return sum(
    made.noisy(
      dataclasses.replace(context, address=types.Address(rollout, q, 0))
    )
    for rollout in range(8)
    for q in range(20)
  )
