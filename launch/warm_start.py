"""Trains a policy of the generated world on supervised demonstrations.

    python -m launch.warm_start --config=configs/quickstart.py --output=mine

The policy starts from nothing, or from `--start`. Writes a Hugging Face folder
(default: config.policy). Held-out demonstrations first check that the policy
makes the decisions that reinforcement learning builds on; a policy that fails
is written to `<folder>.rejected`.

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
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.host import disk, loop, run_lock
from anysearch_jax.training import validation
from launch import flags as launch_flags
from launch import jax_setup, parts, progress, shipped, stopping

# The least accuracy that the scaffold adds, at this budget over so many
# questions.
_SCAFFOLD_GAIN, _BUDGET, _PLAYED = 0.08, 8, 200
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


def main(argv: Sequence[str]) -> None:
  del argv
  config = launch_flags.read_config()
  validation.check(config, trains=False, samples=False)
  jax_setup.configure(threads=flags.FLAGS.threads, cache=flags.FLAGS.cache)
  import numpy as np

  from anysearch_jax.evaluation import journal
  from anysearch_jax.policy import hf
  from anysearch_jax.world import warm_start
  from launch import world_source

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
  validation.validate(config, trains=False, samples=False)
  warm_start.validate(config.warm_start)
  source = world_source.make(config.data, config.retrieval.kind)
  policy = _start(config, source)
  with disk.translate_errors(partial), run_lock.hold(partial / run_lock.NAME):
    journal.claim(partial, _made_of(config))
    fitted = _fit(config, source, policy, partial)
    lacks = _lacks(config, source, fitted)
    if lacks:
      folder += ".rejected"
    hf.save(folder, fitted, dtype=np.float16)
  # First, because without config.json it could be another run's.
  (partial / _STATE).unlink()
  shutil.rmtree(partial)
  print(f"policy: {folder}")
  if lacks:
    sys.exit("The warm start is too weak: " + "; ".join(lacks) + ".")


def _made_of(config: config_lib.ExperimentConfig) -> dict[str, dict[str, Any]]:
  """Returns what the policy depends on, by the name of a file."""
  start = flags.FLAGS.start
  return {
    "config.json": settings.to_dict(config),
    "start.json": parts.policy(shipped.find(start)) if start else {},
  }


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


def _setting(config: config_lib.ExperimentConfig, source, codec):
  from anysearch_jax.world import demonstrations

  return demonstrations.Setting(
    source.world, source.retriever.lookup, codec, config.episode
  )


def _fit(config: config_lib.ExperimentConfig, source, policy, folder):
  """Returns the fitted policy; exits with `RESUME` if a signal asks to stop."""
  from anysearch_jax.world import demonstrations, warm_start

  w = config.warm_start
  making = progress.Line(
    w.demonstrations, unit="demonstration", clock=time.monotonic
  )
  pool = demonstrations.pool(
    _setting(config, source, policy.tokenizer),
    source.questions("train", w.demonstrations, config.seed),
    seed=config.seed,
    decision_weight=w.decision_weight,
    on_done=making.tick,
  )
  line = progress.Line(w.steps, unit="step", clock=time.monotonic)
  asked = threading.Event()
  with stopping.saving(asked.set, lambda: flags.FLAGS.grace):
    params = warm_start.fit(
      policy.params,
      policy.architecture,
      pool,
      seed=config.seed,
      config=w,
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


def _lacks(config: config_lib.ExperimentConfig, source, policy) -> list[str]:
  """Probes the policy, prints what it found, and returns what it lacks."""
  from anysearch_jax.world import demonstrations, warm_start

  lacks, right = [], []
  for scaffold in (False, True):
    with_scaffold = ", with scaffold" if scaffold else ""
    probes = demonstrations.probe_sets(
      _setting(config, source, policy.tokenizer),
      "dev",
      count=600,
      seed=config.seed,
      scaffold=scaffold,
    )
    p = warm_start.probe(policy.params, policy.architecture, probes)
    for kind, mean in warm_start.by_kind(p, probes).items():
      print(f"P({kind}{with_scaffold}) {mean:.3f}")
    mine, its = warm_start.slopes(p, probes)
    print(
      f"P(search | known{with_scaffold}) by change {mine.change:.2f} (the "
      f"expert's {its.change:.2f}), by slack {mine.slack:.2f} "
      f"({its.slack:.2f})"
    )
    lacks += [each + with_scaffold for each in warm_start.gate(p, probes)]
    right.append(_accuracy(config, source, policy, scaffold=scaffold))
  plain, scaffolded = right
  print(f"accuracy at budget {_BUDGET} {plain:.3f}, scaffold {scaffolded:.3f}")
  if scaffolded - plain < _SCAFFOLD_GAIN:
    lacks.append(
      f"gain by the scaffold: found {scaffolded - plain:.3f}, expected at "
      f"least {_SCAFFOLD_GAIN}"
    )
  return lacks


def _accuracy(
  config: config_lib.ExperimentConfig, source, policy, *, scaffold: bool
) -> float:
  """Returns the share of right answers to questions of the split "dev"."""
  from anysearch_jax.methods import systems
  from anysearch_jax.rollout import driver, engines

  engine = engines.make(policy, config, seed=config.seed)
  questions = source.evaluation_questions(each=_PLAYED, split="dev")
  try:
    played = loop.run(
      driver.run_groups(
        [
          driver.Assignment(i, question, _BUDGET, scaffold)
          for i, question in enumerate(questions)
        ],
        driver.EpisodeParts(
          engine, source.retriever, config.episode, policy.tokenizer
        ),
        group=1,
        rollout=0,
        max_concurrency=config.engine.slots,
      )
    )
  finally:
    engine.close()
  judge = systems.of_episode(config.episode).judge
  right = [judge(t).em for group in played.groups for t in group.trajectories]
  return sum(right) / len(right)


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
