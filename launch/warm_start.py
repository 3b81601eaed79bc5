"""Trains a policy of the generated world on supervised demonstrations.

    python -m launch.warm_start --config=configs/quickstart.py --output=mine

`warm_start.expert` names who demonstrates. The policy starts from nothing, or
from `--start`. Writes a Hugging Face folder (default: config.policy). Held-out
demonstrations first check that the policy makes the decisions that
reinforcement learning builds on; a policy that fails is written to
`<folder>.rejected`.

Until then `<folder>.partial` holds where the training is. If the command is
stopped or killed, running it again resumes there and ends with the same policy
as an uninterrupted run.
"""

from __future__ import annotations

import pathlib
import shutil
import sys
import threading
import time
from typing import Any

from absl import app, flags

from anysearch_jax import budgets
from anysearch_jax import config as config_lib
from anysearch_jax.config import values
from anysearch_jax.host import disk, run_lock
from launch import flags as launch_flags
from launch import jax_setup, parts, progress, shipped, stopping

# Of the episodes that measure what the scaffold adds.
_BUDGET, _PLAYED = 8, 200
_STATE = "state.safetensors"


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  launch_flags.define_config()
  flags.DEFINE_string("output", None, "Folder; default config.policy.")
  flags.DEFINE_string("start", None, "Policy to start from; default: nothing.")
  flags.DEFINE_integer("save_every", 50, "Steps between saves.", lower_bound=1)
  flags.DEFINE_float(
    "grace", 120.0, "Seconds that a stop may take until it has saved.", 0
  )
  launch_flags.define_process()


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  config = launch_flags.read_config()
  jax_setup.configure(threads=flags.FLAGS.threads, cache=flags.FLAGS.cache)
  import numpy as np

  from anysearch_jax.evaluation import journal
  from anysearch_jax.policy import hf
  from anysearch_jax.training import validation
  from anysearch_jax.world import experts, priced_warm_start, warm_start
  from launch import dev_questions, world_source

  w = config.warm_start
  folder = flags.FLAGS.output or config.policy
  if not flags.FLAGS.output and shipped.is_shipped(folder):
    raise app.UsageError(
      f"--output: found nothing, and {folder} belongs to the installation; "
      "expected a folder of yours."
    )
  if not folder:
    raise app.UsageError(
      "--output: found nothing, expected a folder (or one in config.policy)."
    )
  folder = str(pathlib.Path(folder))  # Without a slash at its end.
  partial = pathlib.Path(folder + ".partial")
  try:
    validation.validate(config, trains=False, samples=False)
    warm_start.validate(w)
    source = world_source.make(config.data, config.retrieval.kind)
    # None: the expert with two searches, which has modules of its own.
    priced = w.expert == priced_warm_start.NAME
    expert = None if priced else experts.get(w.expert)
    policy = _start(config, source)
    with disk.translate_errors(partial), run_lock.hold(partial / run_lock.NAME):
      journal.claim(partial, _made_of(config))
      fitted = _fit(config, source, expert, policy, partial)
      lacks = _lacks(config, source, expert, fitted)
      if expert is not None and expert.caps:
        lacks += dev_questions.lacks_under_caps(config, source, fitted, policy)
      if lacks:
        folder += ".rejected"
      hf.save(folder, fitted, dtype=np.float16)
    # First, because without config.json it could be another run's.
    (partial / _STATE).unlink()
    shutil.rmtree(partial)
  except (OSError, ValueError) as error:
    sys.exit(f"launch.warm_start: {error}")
  print(f"policy: {folder}")
  if lacks:
    sys.exit("The warm start is too weak: " + "; ".join(lacks) + ".")


def _made_of(config: config_lib.ExperimentConfig) -> dict[str, dict[str, Any]]:
  """Returns what the policy depends on, by the name of a file."""
  start = flags.FLAGS.start
  return {
    "config.json": values.to_dict(config),
    "start.json": parts.policy(shipped.find(start)) if start else {},
  }


def _fit(config: config_lib.ExperimentConfig, source, expert, policy, folder):
  """Returns the fitted policy; exits with `RESUME` if a signal asks to stop."""
  from anysearch_jax.world import warm_start

  pool = _demonstrations(config, source, expert, policy.tokenizer)
  steps = config.warm_start.steps
  line = progress.Line(steps, unit="step", clock=time.monotonic)
  asked = threading.Event()
  with stopping.saving(asked.set, lambda: flags.FLAGS.grace):
    params = warm_start.fit(
      policy.params,
      policy.architecture,
      pool,
      seed=config.seed,
      config=config.warm_start,
      optimizer=config.optimizer,
      batch=config.batch,
      on_step=lambda step, loss: line.tick(step, f"loss {loss:.3f}"),
      saved=folder / _STATE,
      save_every=flags.FLAGS.save_every,
      stop=asked.is_set,
    )
  if params is None:
    stopping.say(f"saved in {folder}; the same command resumes from it")
    sys.exit(stopping.RESUME)
  return policy._replace(params=params)


def _start(config: config_lib.ExperimentConfig, source):
  """Returns the policy of --start, or one with random weights."""
  from anysearch_jax.policy import architecture as architecture_lib
  from anysearch_jax.policy import decoder, hf
  from anysearch_jax.policy import tokenizer as tokenizer_lib
  from anysearch_jax.world import world_tokenizer

  if flags.FLAGS.start:
    return hf.load(shipped.find(flags.FLAGS.start))
  w = config.warm_start
  codec = tokenizer_lib.Tokenizer(world_tokenizer.build_tokenizer(source.world))
  a = architecture_lib.Architecture(
    family="qwen3",
    vocab_size=codec.vocab_size,
    d_model=w.hidden,
    layers=w.layers,
    heads=w.heads,
    kv_heads=w.kv_heads,
    head_dim=w.hidden // w.heads,
    mlp_dim=w.mlp,
    qk_norm=True,
    tied=True,
  )
  return hf.Policy(decoder.initialize(a, config.seed), a, codec)


def _lacks(config: config_lib.ExperimentConfig, source, expert, policy):
  """Probes the policy, prints what it found, and returns what it lacks."""
  from anysearch_jax.world import demonstrations as demonstrations_lib
  from anysearch_jax.world import warm_start
  from launch import dev_questions

  if expert is None:
    return _priced_lacks(config, source, policy)
  lacks = []
  for scaffold in (False, True) if expert.slopes else (False,):
    with_scaffold = ", with scaffold" if scaffold else ""
    probes = demonstrations_lib.probe_sets(
      demonstrations_lib.Setting(
        source.world,
        source.retriever.lookup,
        policy.tokenizer,
        config.episode,
        expert.scaffolded if scaffold else expert.plain,
      ),
      "dev",
      count=600,
      seed=config.seed,
      scaffold=scaffold,
    )
    p = warm_start.probe(policy.params, policy.architecture, probes)
    for kind, mean in warm_start.by_kind(p, probes).items():
      print(f"P({kind}{with_scaffold}) {mean:.3f}")
    if expert.slopes:
      mine, its = warm_start.slopes(p, probes)
      print(
        f"P(search | known{with_scaffold}) by change {mine.change:.2f} (the "
        f"expert's {its.change:.2f}), by slack {mine.slack:.2f} "
        f"({its.slack:.2f})"
      )
    lacks += [
      lack + with_scaffold for lack in warm_start.gate(p, probes, expert)
    ]
  if expert.scaffold_gain is not None:
    plain, scaffolded = (
      dev_questions.accuracy(
        config,
        dev_questions.play(
          config,
          source,
          policy,
          budget=_BUDGET,
          scaffold=scaffold,
          count=_PLAYED,
        ),
      )
      for scaffold in (False, True)
    )
    gain = scaffolded - plain
    print(
      f"accuracy at budget {_BUDGET} {plain:.3f}, scaffold {scaffolded:.3f}"
    )
    if gain < expert.scaffold_gain:
      lacks.append(
        f"gain by the scaffold: found {gain:.3f}, expected at least "
        f"{expert.scaffold_gain}"
      )
  return lacks


def _priced_setting(config: config_lib.ExperimentConfig, source, codec):
  """Returns what demonstrations with two searches have in common."""
  from anysearch_jax.world import cheap_retrieval, priced_demonstrations

  return priced_demonstrations.Setting(
    source.world,
    source.retriever.lookup,
    cheap_retrieval.CheapRetriever(source.world).lookup,
    codec,
    config.episode,
    config.evaluation.prices,
  )


def _priced_lacks(config: config_lib.ExperimentConfig, source, policy):
  """Does what `_lacks` does for a policy with two searches."""
  from anysearch_jax.world import priced_warm_start

  found = priced_warm_start.probe(
    policy.params,
    policy.architecture,
    _priced_setting(config, source, policy.tokenizer),
    count=600,
    seed=config.seed,
  )
  for kind, mean in found.items():
    print(f"P({kind}) {mean:.3f}")
  return priced_warm_start.gate(found)


def _demonstrations(
  config: config_lib.ExperimentConfig, source, expert, codec
) -> list:
  """Makes the pool of demonstrations: training questions, 40% with scaffold."""
  import numpy as np

  from anysearch_jax.world import demonstrations as demonstrations_lib
  from anysearch_jax.world import priced_warm_start, warm_start

  count = config.warm_start.demonstrations
  rng = np.random.Generator(np.random.PCG64(config.seed))
  line = progress.Line(count, unit="demonstration", clock=time.monotonic)
  if expert is None:
    return priced_warm_start.pool(
      source.questions("train", count, config.seed),
      _priced_setting(config, source, codec),
      seed=config.seed,
      decision_weight=config.warm_start.decision_weight,
      on_done=line.tick,
    )
  pool = []
  plain, scaffolded = (
    demonstrations_lib.Setting(
      source.world, source.retriever.lookup, codec, config.episode, decisions
    )
    for decisions in (expert.plain, expert.scaffolded)
  )
  for question in source.questions("train", count, config.seed):
    budget = int(rng.integers(0, expert.largest_budget + 1))
    scaffold = bool(rng.random() < 0.4)
    assigned = budgets.of(budget)
    if expert.caps and not scaffold and rng.random() < 0.6:
      assigned = budgets.Budget(budget, int(rng.choice(expert.caps)))
    trajectory, weights = demonstrations_lib.demonstrate(
      question,
      scaffolded if scaffold else plain,
      budget=assigned,
      scaffold=scaffold,
      rng=rng,
      decision_weight=config.warm_start.decision_weight,
    )
    pool.append(warm_start.Demonstration(trajectory.token_ids, weights))
    line.tick(len(pool))
  return pool


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
