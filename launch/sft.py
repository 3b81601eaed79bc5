r"""Trains a policy on demonstrations, before reinforcement learning.

    anysearch sft --config=configs/small.py:smollm2-cpu \
        --demonstrations=runs/small/demonstrations --output=runs/small/sft
    anysearch sft --config=configs/small.py:smollm2-cpu --config.lora.rank=0 \
        --demonstrations=runs/small/demonstrations --output=runs/small/whole

A demonstration is an episode of `anysearch demonstrate` or `evaluate`; what
its policy wrote is imitated. Several folders, separated by commas, are mixed.
The steps and rates are in `config.sft`, adapters in `config.lora`. While it
trains, it plays questions of the evaluation's split, which must not be
demonstrated, at the evaluation's budgets.

The run folder is that of `launch.train`: metrics.jsonl, checkpoints/, policy/
and, with LoRA, adapter/. `launch.train --config.policy=RUN/policy` trains from
there. Running the same command again resumes, with the same result.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import pathlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings as config_settings
from anysearch_jax.evaluation import journal
from anysearch_jax.host import disk, json_files, run_lock
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import (
  jax_setup,
  parts,
  policies,
  progress,
  retrievers,
  run_history,
  stopping,
)
from anysearch_jax.training import validation

if TYPE_CHECKING:
  from anysearch_jax.training import imitation

# Metrics in the progress line of a step.
_LINE_METRICS = {
  "loss": "loss/total",
  "tokens/s": "train/tokens_per_second",
  "format": "play/format",
  "em": "play/accuracy",
  "searches": "play/searches",
}


def define_flags() -> None:
  launch_flags.define_training()
  flags.DEFINE_list(
    "demonstrations",
    None,
    "Folders of `demonstrate`, or episodes.jsonl of evaluations.",
    required=True,
  )


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  if f.output == "":
    raise app.UsageError("--output: found nothing, expected a folder.")
  config = launch_flags.read_config()
  # Reads the values alone, so a wrong one is refused before JAX is imported.
  validation.check_settings(config)
  retrievers.validate(config.retrieval)
  jax_setup.configure(threads=f.threads, cache=f.cache)
  folder = launch_flags.run_folder(config, f.output)
  inputs = _inputs(config)
  print(_described(config, inputs), flush=True)
  if f.dry_run:
    return
  with disk.translate_errors(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with run_lock.hold(folder / run_lock.NAME):
      finished = _train(config, folder, inputs)
  if not finished:
    stopping.say(_resume_sentence(folder))
    sys.exit(stopping.RESUME)
  print(f"trained policy: {folder / 'policy'}")


class _Inputs(NamedTuple):
  """What a training reads, checked before the weights are read.

  Attributes:
    demonstrations: the episodes to imitate.
    left_out: number of other episodes, by reason.
    held_out: what is played meanwhile.
    provenance: the inputs with their hashes.
  """

  demonstrations: list[imitation.Demonstration]
  left_out: Counter[str]
  held_out: imitation.HeldOut
  provenance: dict[str, Any]


def _inputs(config: config_lib.ExperimentConfig) -> _Inputs:
  """Returns the inputs of a training.

  Raises:
    ValueError: they do not fit each other or the policy.
  """
  from anysearch_jax.methods import systems
  from anysearch_jax.rollout import searching
  from anysearch_jax.training import imitation, placement

  f = flags.FLAGS
  systems.validate(config)
  a, codec = policies.describe(config)
  jax_setup.refuse_cpu(a, allow=f.allow_cpu)
  placement.check_devices(a, config)
  environment = systems.of_episode(config.episode)
  paths = [_episodes_file(name) for name in f.demonstrations]
  for path in paths:
    _check_prompts(path, parts.prompts(config.episode))
  rows = [row for path in paths for row in journal.read(path)]
  demonstrations, left_out = imitation.encode_all(
    rows,
    longest=config.episode.max_context,
    environment=environment,
    codec=codec,
  )
  if not demonstrations:
    raise ValueError(
      f"--demonstrations: found none that fits among {len(rows)}; expected "
      "some. Raise episode.max_context."
    )
  source = parts.source(config)
  questions = _held_out(config, source, rows)
  validation.check_prompts(
    questions,
    codec,
    config=config.episode,
    environment=environment,
    max_budget=config.curriculum.max_budget,
  )
  retriever = retrievers.make(config, source.retriever)
  provenance = parts.provenance(config, retriever, questions)
  digest = hashlib.sha256()
  for path in paths:
    digest.update(path.read_bytes())
  provenance["demonstrations"] = {
    "folder": ", ".join(map(str, paths)),
    "sha256": digest.hexdigest(),
  }
  searcher = searching.BatchingRetriever(retriever, config.search)
  return _Inputs(
    demonstrations,
    left_out,
    imitation.HeldOut(questions, searcher),
    provenance,
  )


def _episodes_file(name: str) -> pathlib.Path:
  """Returns the file of episodes that a value of --demonstrations names."""
  path = pathlib.Path(name)
  return path / "episodes.jsonl" if path.is_dir() else path


def _check_prompts(path: pathlib.Path, prompts: dict[str, Any] | None) -> None:
  """Refuses demonstrations that were played with other texts.

  Raises:
    ValueError: the provenance beside the file names other texts.
  """
  provenance = json_files.read(path.parent / "provenance.json", missing={})
  stored = provenance.get("prompts", prompts)
  if stored and prompts and stored["sha256"] != prompts["sha256"]:
    raise ValueError(
      f"{path}: found episodes with the texts of {stored['environment']!r} "
      f"({stored['file']}), expected those of {prompts['environment']!r}; set "
      f"--config.episode.prompts={stored['environment']}, or make the "
      "demonstrations again."
    )


def _held_out(
  config: config_lib.ExperimentConfig,
  source: parts.Source,
  rows: Sequence[dict[str, Any]],
) -> list[types.Question]:
  """Returns the questions to play, evenly from the evaluated datasets.

  Raises:
    ValueError: all of them are demonstrated.
  """
  evaluation = config.evaluation
  demonstrated = {row["question"] for row in rows}
  questions = source.evaluation_questions(
    evaluation.datasets, config.sft.play_questions
  )
  unseen = [q for q in questions if q.text not in demonstrated]
  by_dataset: dict[str, list[types.Question]] = {}
  for question in unseen:
    name = question.metadata.get("dataset", "")
    by_dataset.setdefault(name, []).append(question)
  turns = itertools.zip_longest(*by_dataset.values())
  even = [q for turn in turns for q in turn if q is not None]
  if not even:
    raise ValueError(
      f"--demonstrations: found all of {len(questions)} evaluation questions "
      "in them; expected questions that are held out, to measure what is "
      "learned. Prepare a split for evaluation (launch.prepare_data)."
    )
  return even[: config.sft.play_questions]


def _described(config: config_lib.ExperimentConfig, inputs: _Inputs) -> str:
  """Returns what is trained on, in a line."""
  demonstrations = inputs.demonstrations
  size = config.sft.steps * config.sft.demonstrations
  tokens = sum(len(d.token_ids) for d in demonstrations)
  imitated = sum(int(d.by_model.sum()) for d in demonstrations)
  count = len(demonstrations)
  left_out = "".join(
    f", without {number:,} {reason}"
    for reason, number in inputs.left_out.items()
  )
  return (
    f"demonstrations: {count:,} of {tokens / count:.0f} tokens, "
    f"{imitated / count:.0f} of them imitated{left_out}; passes over them: "
    f"{size / count:.1f}; held out: {len(inputs.held_out.questions)} questions"
  )


def _resume_sentence(folder: pathlib.Path) -> str:
  """Returns a sentence that says from where a training resumes."""
  from anysearch_jax.training import checkpoint

  if steps := checkpoint.rollouts(folder / "checkpoints"):
    return f"The same command resumes after step {steps[-1]}."
  return "The same command begins anew: no step was saved yet."


def _train(
  config: config_lib.ExperimentConfig, folder: pathlib.Path, inputs: _Inputs
) -> bool:
  """Trains; returns whether it finished. Exits with a sentence on an error."""
  from anysearch_jax.methods import systems
  from anysearch_jax.policy import hf, lora, sharding
  from anysearch_jax.training import checkpoint, imitation

  f = flags.FLAGS
  run_history.begin(folder, config, inputs.provenance, allow=f.allow_changes)
  line = progress.Line(config.sft.steps, unit="step")

  def tick(step: int, values: dict[str, float]) -> None:
    note = " ".join(
      f"{name} {values[metric]:.3g}"
      for name, metric in _LINE_METRICS.items()
      if metric in values
    )
    line.tick(step, note)

  def note(step: int, changes: Sequence[config_settings.Change]) -> None:
    run_history.record_start(
      folder, config, inputs.provenance, rollout=step, changes=changes
    )

  try:
    trainer = imitation.Trainer(
      config,
      policy=hf.load(
        config.policy,
        mesh=sharding.training_mesh(config.mesh),
        dtype=lora.base_dtype(config.lora),
      ),
      demonstrations=inputs.demonstrations,
      held_out=inputs.held_out,
      environment=systems.of_episode(config.episode),
      folder=folder,
      allow_changes=f.allow_changes,
    )
    with stopping.saving(
      trainer.stop,
      trainer.stop_seconds if f.grace is None else lambda: f.grace,
      functools.partial(_resume_sentence, folder),
    ):
      return trainer.run(tick, note)
  except checkpoint.DamagedError as error:
    sys.exit(f"anysearch sft: {error}")


if __name__ == "__main__":
  define_flags()
  launch_flags.run(
    main,
    resumes=True,
    first_flags=("config", "demonstrations", "output", "threads", "cache"),
  )
