"""Evaluations of small policies that several tests share."""

from __future__ import annotations

import dataclasses
import json

import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.evaluation import harness
from anysearch_jax.methods import systems
from anysearch_jax.rollout.jax_engine import engine as engine_lib


def configured(**evaluation):
  return dataclasses.replace(
    small_run.CONFIG,
    episode=config_lib.EpisodeConfig(),
    evaluation=config_lib.EvaluationConfig(
      **{"budgets": (0, 2), "seeds": (1, 2)} | evaluation
    ),
  )


def jax_player(parts, config):
  policy = parts["policy"]
  return harness.Player(
    engine_lib.JaxEngine(
      policy,
      config=config.engine,
      sampling=config.sampling,
      seed=harness.ENGINE_SEED,
    ),
    policy.tokenizer,
  )


def playing(config):
  return harness.Playing(
    config.episode,
    systems.of_episode(config.episode),
    config.engine.slots,
    config.watch.quiet_seconds,
  )


def play(config, player, questions, retriever, folder, **settings):
  folder.mkdir(exist_ok=True)
  summary = harness.evaluate(
    config.evaluation,
    playing(config),
    player=player,
    questions=questions,
    retriever=retriever,
    folder=folder,
    **settings,
  )
  return summary, (folder / "episodes.jsonl").read_bytes()


def rows_of(text):
  return [json.loads(line) for line in text.splitlines()]
