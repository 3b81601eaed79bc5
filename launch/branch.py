r"""Measures the value of one more search by replaying ends of stored episodes.

    python -m launch.branch --evaluation=runs/x/evaluation/plain \
        --hf=runs/x/policy --episodes=200 --samples=4 \
        --output=runs/x/evaluation/plain/branches

Writes branches.jsonl, one end per line, and summary.json: the value of a search
that the policy asks for, with its interval, for episodes that stopped with
budget left and for episodes that searched, by hops and by remaining budget.
`evaluation/branching.py` describes the sampling, `evaluation/branch_values.py`
the numbers. The configuration is that of the evaluation. If the command is
killed, running it again resumes where it stopped.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import values
from anysearch_jax.host import json_files, run_lock
from launch import flags as launch_flags
from launch import jax_setup, parts, policies, progress, retrievers


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  policies.define_flags()
  flags.DEFINE_string(
    "evaluation", None, "Folder of launch.evaluate.", required=True
  )
  flags.DEFINE_string("output", None, "Folder.", required=True)
  flags.DEFINE_integer("episodes", 200, "Of each kind; 0: all.", lower_bound=0)
  flags.DEFINE_integer(
    "samples", 4, "Ends of each cut of an episode.", lower_bound=1
  )
  flags.DEFINE_integer(
    "tries",
    16,
    "Turns sampled until one searches, at most; more narrow the bounds, and no "
    "other number depends on it.",
    lower_bound=1,
  )
  launch_flags.define_process()


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  jax_setup.configure(threads=flags.FLAGS.threads, cache=flags.FLAGS.cache)
  try:
    print(branch())
  except (ValueError, types.EngineError) as error:
    sys.exit(f"launch.branch: {error}")


def branch() -> str:
  """Plays the ends that the flags ask for and returns a summary as text.

  Raises:
    ValueError: the evaluation, the policy or the folder cannot be used.
    types.EngineError: the SGLang servers cannot be used.
  """
  from anysearch_jax.evaluation import (
    branch_values,
    branching,
    harness,
    journal,
  )
  from anysearch_jax.rollout import searching
  from anysearch_jax.training import validation

  f = flags.FLAGS
  evaluation, folder = pathlib.Path(f.evaluation), pathlib.Path(f.output)
  config, played = _evaluated(evaluation)
  config, chosen = policies.read_flags(
    config, policies.identified(played["policy"])
  )
  identity = policies.identity(chosen)
  for name in ("sha256", "scripted"):
    if identity.get(name) != played["policy"].get(name):
      raise ValueError(
        f"{chosen.name} is not the policy that played {evaluation} (another "
        f"{name}); name that one, else the worth of a search would be that of "
        "another policy."
      )
  # Evaluations of earlier versions did not record their texts.
  texts = parts.prompts(config.episode)
  if texts and _hashes(texts) != _hashes(played.get("prompts") or texts):
    raise ValueError(
      f"{evaluation}: found other texts of episode.prompts="
      f"{config.episode.prompts} than its episodes were played with (another "
      "sha256); expected episode.prompt_file and "
      "budget_file to hold the same ones."
    )
  validation.validate(config, trains=False, samples=chosen.local)
  source = parts.source(config)
  policies.check(
    chosen,
    config,
    source,
    source.evaluation_questions((), 1),
    allow_cpu=f.allow_cpu,
  )
  retriever = retrievers.make(config, source.retriever)
  journal.claim(
    folder,
    {
      "config.json": {
        "evaluation": str(evaluation),
        "episodes": f.episodes,
        "samples": f.samples,
        "tries": f.tries,
      },
      "provenance.json": {"policy": identity, "episodes": _digest(evaluation)},
    },
  )
  if not (folder / branching.BRANCHES).is_file():
    line: progress.Line | None = None

    def tick(done: int, total: int) -> None:
      nonlocal line
      line = line or progress.Line(total, unit="end", clock=time.monotonic)
      line.tick(done)

    with (
      run_lock.hold(folder / run_lock.NAME),
      policies.player(chosen, config, source) as player,
    ):
      branching.branch(
        harness.Playing(
          config.episode, config.engine.slots, config.watch.quiet_seconds
        ),
        branching.Plan(f.episodes, f.samples, f.tries),
        evaluation=evaluation,
        player=player,
        retriever=searching.BatchingRetriever(retriever, config.search),
        folder=folder,
        on_done=tick,
      )
  summary = branch_values.summary(journal.read(folder / branching.BRANCHES))
  json_files.write(folder / "summary.json", summary)
  return "\n".join(map(_line, summary, summary.values()))


def _evaluated(
  evaluation: pathlib.Path,
) -> tuple[config_lib.ExperimentConfig, dict[str, Any]]:
  """Returns the configuration and the provenance of an evaluation.

  Raises:
    ValueError: it is not finished, or a rule steered it.
  """
  from anysearch_jax.evaluation import harness

  if not (evaluation / harness.EPISODES).is_file():
    raise ValueError(
      f"{evaluation}: no {harness.EPISODES}; expected the folder of a finished "
      "evaluation."
    )
  config = values.from_dict(
    config_lib.ExperimentConfig,
    values.renamed(json_files.read(evaluation / "config.json")),
  )
  if config.episode.control:
    raise ValueError(
      f"{evaluation}: found an evaluation that {config.episode.control} "
      "steered; expected one of the policy alone (episode.control empty)."
    )
  return config, json_files.read(evaluation / "provenance.json")


def _hashes(texts: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns the hashes of an environment's texts and of its caps' texts."""
  return texts["sha256"], texts.get("budget", {}).get("sha256")


def _line(kind: str, measured: Mapping[str, Any]) -> str:
  """Returns one kind of a summary as text."""

  def ends(found: Mapping[str, float | None]) -> str:
    low, high = (
      "-" if found[name] is None else f"{found[name]:+.3f}"
      for name in ("low", "high")
    )
    return f"[{low}, {high}]"

  def mean(name: str) -> str:
    value = measured[name]["value"]
    shown = "-" if value is None else f"{value:+.3f}"
    return f"{shown} {ends(measured[name])}"

  line = f"{kind}: a search that the policy asks for is worth {mean('worth')}"
  if kind == "stop":
    return f"{line}, {measured['cuts']} searches"
  return (
    f"{line}, beside the stored answer {mean('gain')}; at all "
    f"{measured['cuts']} cuts, {measured['cuts_reached']} of them reached, "
    f"within {ends(measured['worth_bounds'])}"
  )


def _digest(evaluation: pathlib.Path) -> str:
  """Returns the SHA-256 of the stored episodes."""
  with (evaluation / "episodes.jsonl").open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
