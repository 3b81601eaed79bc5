r"""Evaluates a policy under several budgets on held-out questions.

    anysearch evaluate --config=configs/quickstart.py \
        --hf=runs/quickstart/priced-42/policy --budgets=0..8 --seeds=3 \
        --output=runs/quickstart/priced-42/evaluation/seeds

    anysearch evaluate --documents=my_notes --questions=mine.csv \
        --openai=URL --openai_model=NAME --output=evaluations/mine

Plays all questions with all budgets and seeds in one pass. Writes
episodes.jsonl, one episode per line, which `anysearch report` reads, and
config.json, provenance.json and summary.json beside it. If the command is
killed or episodes fail (it exits with 1), running it again plays what is
missing. See docs/evaluation.md.
"""

from __future__ import annotations

import itertools
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings as config_settings
from anysearch_jax.host import disk, json_files, run_lock
from anysearch_jax.launch import (
  documents,
  jax_setup,
  parts,
  policies,
  progress,
  retrievers,
)
from anysearch_jax.launch import flags as launch_flags

_FIRST_SEED = 42
_SUMMARY = "summary.json"


def define_flags() -> None:
  policies.define_flags()
  launch_flags.define_agents()
  flags.DEFINE_string(
    "questions",
    None,
    "A file of questions of yours: JSON lines or a table with question and "
    "answer. All are asked unless config.evaluation.questions is set.",
  )
  flags.DEFINE_string(
    "split",
    "",
    "Split of the questions, such as test; default: the one that the source "
    "evaluates on.",
  )
  flags.DEFINE_string(
    "budgets",
    None,
    "Budgets to play: numbers of searches as 0..8 or 0,1,5, or grids over "
    "several units as searches=1|3,tokens=64|128; default: config.evaluation.",
  )
  flags.DEFINE_integer(
    "seeds",
    None,
    "Number of seeds that play each question and budget, from "
    f"{_FIRST_SEED} on; default: config.evaluation.seeds.",
    1,
  )
  flags.DEFINE_string(
    "output",
    None,
    "Folder of the evaluation, which the same command completes.",
    required=True,
  )
  launch_flags.define_process()


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  if not f.output:
    raise app.UsageError("--output: found nothing, expected a folder.")
  config = apply_short_flags(documents.read_config())
  # The configuration saved beside the episodes must name the policy played.
  config, choice = policies.read_flags(config)
  if config.agents.program and choice.endpoint is not None:
    raise ValueError(
      "--agents: found a model behind an address, expected a policy whose "
      "tokens are sampled here (--hf, --checkpoint or config.policy); let the "
      "program ask that model itself."
    )
  documents.update(config)
  jax_setup.configure(threads=f.threads, cache=f.cache)
  from anysearch_jax.evaluation import harness
  from anysearch_jax.methods import systems
  from anysearch_jax.rollout import searching

  folder = pathlib.Path(f.output)
  systems.validate(config, trains=False, samples=choice.is_local)
  source = parts.source(config)
  e = config.evaluation
  questions = source.evaluation_questions(
    e.datasets, e.questions, split=f.split
  )
  policies.check_playable(
    choice, config, source, questions, allow_cpu=f.allow_cpu
  )
  retriever = retrievers.make(config, source.retriever)
  provenance: dict[str, Any] = {
    "policy": policies.identity(choice),
    "questions": {"split": f.split, **parts.questions_digest(questions)},
    "retriever": retriever.identity(sorted({q.corpus for q in questions})),
    "world": parts.world(config.data),
    "prompts": parts.prompts(config.episode),
    "own": parts.user_code(config),
  }
  with disk.translate_errors(folder):
    claim(folder, config, provenance)
    if _failed(folder) != 0:
      with run_lock.hold(folder / run_lock.NAME):
        searcher = searching.BatchingRetriever(retriever, config.search)
        _play(
          config,
          choice,
          source,
          questions=questions,
          retriever=searcher,
          folder=folder,
        )
  print(f"episodes: {folder / harness.EPISODES}")
  if failed := _failed(folder):
    sys.exit(f"{failed} episodes failed; the same command plays them again.")


def claim(
  folder: pathlib.Path,
  config: config_lib.ExperimentConfig,
  provenance: Mapping[str, Any],
) -> None:
  """Creates a folder of episodes, or checks that it holds the same ones.

  Args:
    folder: the folder.
    config: the configuration of the episodes.
    provenance: what they depend on besides, as JSON values.

  Raises:
    ValueError: it holds episodes of other settings or inputs.
  """
  from anysearch_jax.evaluation import journal

  stored_config = json_files.read(folder / "config.json", missing={})
  if stored_config:
    changes = config_settings.changes(stored_config, config)
    if changes:
      raise ValueError(
        f"{folder}: found {', '.join(map(str, changes))}; it holds the "
        "results of other settings. Name another folder, or remove it."
      )
  settings = stored_config or config_settings.to_dict(config)
  journal.claim_folder(
    folder, {"config.json": settings, "provenance.json": provenance}
  )


def _failed(folder: pathlib.Path) -> int | None:
  """Returns how many episodes failed; None if not all have been played."""
  summary = json_files.read(folder / _SUMMARY, missing={})
  return sum(cell["failed"] for cell in summary["cells"]) if summary else None


def _play(
  config: config_lib.ExperimentConfig,
  choice: policies.PolicyChoice,
  source: parts.Source,
  *,
  questions: Sequence[types.Question],
  retriever: Any,
  folder: pathlib.Path,
) -> None:
  """Plays the remaining episodes and prints a summary of all."""
  from anysearch_jax.evaluation import harness
  from anysearch_jax.methods import systems

  e = config.evaluation
  total = (len(e.budgets) + len(e.pairs)) * len(e.seeds) * len(questions)
  line = progress.Line(total, unit="episode")
  with (
    policies.player(choice, config, source) as player,
    parts.program(config) as program,
    line.reporting_waits(retriever.waits, compiles=choice.is_local),
  ):
    summary = harness.evaluate(
      e,
      harness.Playing(
        episode=config.episode,
        environment=systems.of_episode(config.episode),
        slots=config.engine.slots,
        quiet_seconds=config.watch.quiet_seconds,
        program=program,
      ),
      player=player,
      questions=questions,
      retriever=retriever,
      folder=folder,
      on_done=lambda done, _: line.tick(done),
    )
  # Written last: this file marks the folder as finished.
  json_files.write(folder / _SUMMARY, summary)
  for cell in summary["cells"]:
    interval = _interval(cell, len(e.seeds))
    if "official_em" in cell:
      interval += " ({official_em} by the set's own script)".format(**cell)
    # Chat models answer in sentences, which exact match counts as wrong.
    if choice.endpoint is not None and cell["n"]:
      f1 = cell["f1"] / cell["n"]
      cover = cell["cover_em"] / cell["n"]
      interval += f", F1 {f1:.2f}, cover EM {cover:.2f}"
    budget = cell.get("caps", cell["budget"])
    noun = "search" if cell["searches"] == 1 else "searches"
    print(
      f"{cell['dataset']} budget {budget}: {cell['em']} of {cell['n']} right"
      f"{interval}, {cell['searches']} {noun}, {cell['failed']} failed"
    )

  usage = summary["last_start"]["engine"]
  if choice.endpoint is not None and usage:
    input_tokens = usage["prompt_tokens"]
    output_tokens = usage["sampled_tokens"]
    cost = e.prices.of_calls(
      (), input_tokens=input_tokens, output_tokens=output_tokens
    )
    by_prices = f": ${cost:.4f} by --prices" if cost else ""
    print(
      f"the server counted {input_tokens:,} tokens read and "
      f"{output_tokens:,} written{by_prices}"
    )


def _interval(cell: Mapping[str, Any], seeds: int) -> str:
  """Returns the share of right answers of a cell with its 95 % interval.

  The answers to one question count as one trial.
  """
  if not cell["n"]:
    return ""
  from anysearch_jax.evaluation import inference

  rate = cell["em"] / cell["n"]
  low, high = inference.score(rate, cell["n"] / seeds, 1.96)
  return f" ({rate:.2f} [{low:.2f}, {high:.2f}])"


def apply_short_flags(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns the configuration with --questions, --budgets, ... applied.

  Raises app.UsageError if --budgets is invalid.
  """
  f = flags.FLAGS
  changes: dict[str, Any] = {}
  if f.questions is not None:
    data = {"source": "prepared", "path": f.questions}
    config = config_lib.changed(config, data=data)
    if not pathlib.Path(f.questions).exists():
      raise ValueError(
        f"--questions={f.questions}: found no file, expected rows of question "
        "and answer."
      )
    if not any(
      assignment.startswith("evaluation.questions")
      for assignment in f.set_config
    ):
      changes["questions"] = 0
  if f.budgets is not None:
    has_units = "=" in f.budgets
    changes["budgets"] = () if has_units else parse_budgets(f.budgets)
    changes["pairs"] = parse_pairs(f.budgets) if has_units else ()
  if f.seeds is not None:
    changes["seeds"] = tuple(range(_FIRST_SEED, _FIRST_SEED + f.seeds))
  return config_lib.changed(config, evaluation=changes)


def parse_budgets(text: str, flag: str = "--budgets") -> tuple[int, ...]:
  """Parses budgets such as "0..8", "0,1,5" or "0..3,8".

  Args:
    text: the value of a flag.
    flag: name of the flag, for the error.

  Raises:
    app.UsageError: the text has another form.
  """
  budgets: list[int] = []
  for item in text.split(","):
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", item.strip())
    if not match:
      raise app.UsageError(
        f"{flag}={text}: found {item!r}, expected numbers as 0..8 or 0,1,5."
      )
    low = int(match[1])
    budgets += range(low, int(match[2] or low) + 1)
  if not budgets:
    raise app.UsageError(f"{flag}={text}: found no budget, expected some.")
  return tuple(budgets)


def parse_pairs(text: str) -> tuple[str, ...]:
  """Parses grids of budgets in several units, as `searches=1|3,tokens=64|128`.

  These are four budgets, each as `budgets.parse` reads it; `;` separates grids.
  """
  budgets: list[str] = []
  for grid in text.split(";"):
    units = []
    for item in grid.split(","):
      unit, _, caps = item.strip().partition("=")
      units.append([f"{unit}={cap}" for cap in caps.split("|")])
    budgets += [",".join(caps) for caps in itertools.product(*units)]
  return tuple(budgets)


if __name__ == "__main__":
  define_flags()
  launch_flags.run(
    main,
    resumes=True,
    first_flags=(
      "documents",
      "questions",
      "openai",
      "openai_model",
      "local",
      "hf",
      "config",
      "budgets",
      "seeds",
      "output",
    ),
  )
