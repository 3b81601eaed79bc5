r"""Trains a policy by GRPO under the budget curriculum.

    anysearch train --config=configs/quickstart.py \
        --output=runs/quickstart/anysearch
    anysearch train --config=my_search.py --config.seed=7 --dry_run

`--reward=path/to/file.py:function` trains with a reward of your own, see
docs/own.md. The run folder gets config.json, provenance.json, source/,
prompts.json, metrics.jsonl, steps.jsonl, tensorboard/, checkpoints/,
trajectories/, policy/ (the trained policy as a Hugging Face folder) and, with
LoRA, adapter/ (a PEFT folder).

Running the same command again resumes from the newest checkpoint that is not
damaged. Placement settings may then differ, learning settings only with
`--allow_changes`; provenance.json records both. docs/operations.md says how a
run stops. Several hosts can train one policy together, see
`launch/distributed.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings as config_settings
from anysearch_jax.host import disk, plugins
from anysearch_jax.launch import (
  distributed,
  jax_setup,
  parts,
  policies,
  progress,
  retrievers,
  run_history,
  stopping,
)
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.training import validation

if TYPE_CHECKING:
  from anysearch_jax.training import loop

# Metrics in the progress line of a rollout; some systems have no format.
_LINE_METRICS = {
  "em": "reward/em",
  "format": "reward/format",
  "searches": "rollout/searches",
  "reward": "reward/total",
  "entropy": "policy/entropy",
}

# Passes over the questions after which a policy may know their answers.
_MAX_PASSES = 10


def define_flags() -> None:
  launch_flags.define_training()
  distributed.define_flags()
  flags.DEFINE_bool(
    "timeline",
    False,
    "Trace the run into profile/ of its folder, for XProf in TensorBoard.",
  )


def main(argv: Sequence[str]) -> None:
  if flags.FLAGS.output == "":
    raise app.UsageError("--output: found nothing, expected a folder.")
  config = launch_flags.read_config()
  # Reads the values alone, so a wrong one is refused before JAX is imported.
  validation.check_settings(config)
  retrievers.validate(config.retrieval)
  if flags.FLAGS.dry_run:
    dry_run(config)
    return
  if config.servers_share:
    for name, value in jax_setup.SHARED_MEMORY.items():
      os.environ.setdefault(name, value)
  jax_setup.configure(threads=flags.FLAGS.threads, cache=flags.FLAGS.cache)
  folder = launch_flags.run_folder(config, flags.FLAGS.output)
  distributed.connect()
  resume_sentence = functools.partial(_resume_sentence, folder)
  with (
    distributed.leaves_at_once(resume_sentence),
    contextlib.ExitStack() as stack,
  ):
    _train(config, folder, stack)


def _resume_sentence(folder: pathlib.Path) -> str:
  """Returns a sentence that says from where a run resumes."""
  from anysearch_jax.training import checkpoint

  if rollouts := checkpoint.rollouts(folder / "checkpoints"):
    return f"The same command resumes from checkpoint {rollouts[-1]}."
  return "The same command begins anew: no rollout was saved yet."


def _train(
  config: config_lib.ExperimentConfig,
  folder: pathlib.Path,
  stack: contextlib.ExitStack,
) -> None:
  """Trains, and exits with a sentence if that fails."""
  from anysearch_jax.host import processes
  from anysearch_jax.training import checkpoint, health

  grace = flags.FLAGS.grace
  trainer = None
  line = progress.Line(config.curriculum.rollouts, unit="rollout")

  def tick(event: loop.Event) -> None:
    """Prints a line for a rollout."""
    if processes.is_main():
      metrics = " ".join(
        f"{name} {event.values[metric]:.2f}"
        for name, metric in _LINE_METRICS.items()
        if metric in event.values
      )
      line.tick(event.rollout + 1, f"phase {event.values['phase']} {metrics}")

  def note(rollout: int, changes: Sequence[config_settings.Change]) -> None:
    """Notes in the run folder what this start changed."""

    def write() -> None:
      differences = run_history.record_start(
        folder, config, provenance, rollout=rollout, changes=changes
      )
      if differences:
        sentence = ", ".join(
          f"{change} ({change.kind})" for change in differences
        )
        stopping.say(f"changed from rollout {rollout} on: {sentence}")

    processes.on_main(write)

  try:
    trainer, provenance = _trainer(config, folder, stack, line)
    with (
      disk.translate_errors(folder),
      stopping.saving(
        trainer.stop,
        trainer.stop_seconds if grace is None else lambda: grace,
        functools.partial(_resume_sentence, folder),
      ),
    ):
      finished = trainer.run(tick, note)
  except disk.DiskError as error:
    sys.exit(f"anysearch train: {error} {_resume_sentence(folder)}")
  except (
    checkpoint.DamagedError,
    health.NoGradientError,
    health.NotFiniteError,
    health.FailedEpisodesError,
    health.WrongWeightsError,
    types.EngineError,
  ) as error:
    sys.exit(f"anysearch train: {error}")
  except ValueError as error:
    refused_errors = checkpoint.MismatchError, plugins.PluginError
    if trainer is not None and not isinstance(error, refused_errors):
      raise RuntimeError("Found a bug; its traceback is above.") from error
    sys.exit(f"anysearch train: {error}")
  if not finished:
    newest = checkpoint.rollouts(folder / "checkpoints")[-1]
    stopping.say(f"saved checkpoint {newest}; the same command resumes from it")
    sys.exit(stopping.RESUME)
  if processes.is_main():
    print(f"trained policy: {folder / 'policy'}")


def _trainer(
  config: config_lib.ExperimentConfig,
  folder: pathlib.Path,
  stack: contextlib.ExitStack,
  line: progress.Line,
) -> tuple[loop.Trainer, dict]:
  """Returns the trainer and the provenance of a run, whose folder it creates.

  `stack` keeps the lock of the folder; `line` tells that the searches wait.
  """
  import jax

  from anysearch_jax.host import processes, run_lock
  from anysearch_jax.methods import systems
  from anysearch_jax.policy import hf, lora, sharding
  from anysearch_jax.rollout import searching
  from anysearch_jax.training import loop, trackers

  systems.validate(config, processes=jax.process_count())
  questions, retriever, provenance = processes.barrier_call(
    lambda: _begin(config)
  )
  main_identity = processes.on_main(lambda: provenance["retriever"])
  if retriever is None:
    provenance["retriever"] = main_identity
  if processes.is_main():
    print(passes(questions), flush=True)
  check_agreement(config, provenance)
  allow = flags.FLAGS.allow_changes
  sinks: list[trackers.Sender] = []

  def begin() -> None:
    stack.enter_context(run_lock.hold(folder / run_lock.NAME))
    run_history.begin(folder, config, provenance, allow=allow)
    values = config_settings.to_dict(config)
    names = [name for name in trackers.KINDS if flags.FLAGS[name].value]
    sinks.extend(
      stack.enter_context(
        trackers.open_senders(names, folder=folder, config=values)
      )
    )

  with disk.translate_errors(folder):
    processes.on_main(begin)
  searcher = None
  if retriever is not None:
    searcher = searching.BatchingRetriever(retriever, config.search)
    if processes.is_main():
      stack.enter_context(line.reporting_waits(searcher.waits))
  player = None
  if retriever is not None:
    player = stack.enter_context(parts.program(config))
  trainer = loop.Trainer(
    config,
    method=systems.trained(config),
    policy=hf.load(
      config.policy,
      mesh=sharding.training_mesh(config.mesh),
      dtype=lora.base_dtype(config.lora),
    ),
    questions=questions,
    retriever=searcher,
    folder=folder,
    player=player,
    trace=flags.FLAGS.timeline,
    allow_changes=allow,
    sinks=sinks,
    hangs=_stop_hanging_step,
  )
  return trainer, provenance


def _stop_hanging_step() -> None:
  """Stops this process, which gives up a step that does not end."""
  stopping.say("a step takes hours, or ten times any before; do devices hang?")
  os.kill(os.getpid(), signal.SIGTERM)


def _questions(
  config: config_lib.ExperimentConfig, source: parts.Source
) -> Sequence[types.Question]:
  """Returns the training stream: as many questions as the rollouts take."""
  of_rollout = config.questions + config.pipeline.extra_groups
  count = config.curriculum.rollouts * of_rollout
  return source.questions(config.data.split, count, config.seed)


def passes(questions: Sequence[types.Question]) -> str:
  """Returns how often a run asks each question, with a warning above ten."""
  from anysearch_jax.data import dataset_iterator

  distinct = dataset_iterator.progress(questions, 0)["of"]
  times = len(questions) / distinct
  line = (
    f"passes over the questions: {times:.1f} ({len(questions):,} of "
    f"{distinct:,} questions)"
  )
  if times > _MAX_PASSES:
    line += (
      f"; after {_MAX_PASSES} a policy may know the answers: prepare more "
      "questions, or set a smaller curriculum.total_steps"
    )
  return line


def _begin(
  config: config_lib.ExperimentConfig,
) -> tuple[Sequence[types.Question], Any, dict]:
  """Returns questions, retriever and provenance of a run.

  The retriever is None in a process that samples nothing. Every check here
  comes before the run folder is created or locked.
  """
  from anysearch_jax.data import dataset_iterator, evidence
  from anysearch_jax.methods import systems
  from anysearch_jax.training import loop, placement

  a, codec = policies.describe(config)
  jax_setup.refuse_cpu(a, allow=flags.FLAGS.allow_cpu)
  check_alone(config.servers)
  placement.check_devices(a, config)
  source = parts.source(config)
  questions = _questions(config, source)
  if systems.get(config.method.name).steps is not None:
    from anysearch_jax.world import world

    if isinstance(source, parts.WorldSource):
      questions = world.with_evidence(source.world, questions)
    evidence.check(dataset_iterator.distinct(questions))
  validation.check_prompts(
    questions,
    codec,
    config=config.episode,
    environment=systems.of_episode(config.episode),
    max_budget=config.curriculum.max_budget,
  )
  retriever = None
  if loop.samples(config):
    retriever = retrievers.make(config, source.retriever)
  return questions, retriever, parts.provenance(config, retriever, questions)


def check_alone(config: config_lib.ServersConfig) -> None:
  """Refuses a folder of deltas that another run uses.

  Raises:
    ValueError: weights of other servers are in it.
  """
  if not config.deltas:
    return
  from anysearch_jax.rollout.servers import weights as weights_lib

  urls = (config.gateway,) if config.gateway else config.urls
  own_folder = weights_lib.folder(config.weights, urls)
  prefix = own_folder.name.rpartition("-")[0]
  for folder in sorted(own_folder.parent.glob(f"{prefix}-*")):
    if folder != own_folder:
      raise ValueError(
        f"servers.weights: found {folder} of another run, expected a folder "
        "for this run alone with servers.deltas, because hosts patch their "
        "copies by the newest delta in it. Name another folder, here and as "
        "DELTAS of the servers, or remove that one if its run has ended."
      )


def dry_run(config: config_lib.ExperimentConfig) -> None:
  """Prints the resolved configuration, and how often it asks a question."""
  os.environ["JAX_PLATFORMS"] = "cpu"  # Before JAX is imported.
  from anysearch_jax.methods import systems

  systems.validate(config)
  print(describe(config))
  try:
    print(passes(_questions(config, parts.source(config))))
  except (OSError, ValueError) as error:
    print(f"passes over the questions: unknown ({error})")
  print("hours and memory: anysearch plan --target=h100:1 predicts them there")


def describe(config: config_lib.ExperimentConfig) -> str:
  """Returns the resolved configuration and values derived from it, as text."""
  c = config.curriculum
  trajectories = config.questions * config.group
  derived = {
    "rollouts": c.rollouts,
    "trajectories a rollout": trajectories,
    "trajectories an optimizer step": trajectories // c.batches_per_rollout,
    "optimizer steps in Phase I": c.phase1_steps,
    "optimizer steps in Phase II": c.total_steps - c.phase1_steps,
  }
  lines = [json.dumps(config_settings.to_dict(config), indent=2)]
  return "\n".join(lines + [f"{k}: {v}" for k, v in derived.items()])


def check_agreement(
  config: config_lib.ExperimentConfig, provenance: dict
) -> None:
  """Checks that all processes have the same configuration and provenance.

  Raises:
    ValueError: a process differs from process 0.
  """
  from anysearch_jax.host import processes

  values = {"config": config_settings.to_dict(config), **provenance}
  main_values, *other_values = processes.all_gather(
    lambda: dict(config_settings.leaves(values))
  )
  for process, process_values in enumerate(other_values, start=1):
    for name in {**main_values, **process_values}:
      if main_values.get(name) != process_values.get(name):
        raise ValueError(
          f"Process {process} has {name} {process_values.get(name)!r}, not "
          f"{main_values.get(name)!r} as process 0; start the same command on "
          "the same data."
        )


if __name__ == "__main__":
  define_flags()
  launch_flags.run(
    main,
    resumes=True,
    first_flags=(
      "config",
      "output",
      "method",
      "reward",
      "agents",
      "dry_run",
      "allow_changes",
      "grace",
      "wandb",
      "mlflow",
      "threads",
    ),
  )
