r"""Evaluates a policy under several budgets on held-out questions.

    python -m launch.evaluate --config=configs/quickstart.py \
        --hf=runs/quickstart/priced-42/policy --budgets=0..8 --seeds=3 \
        --output=runs/quickstart/priced-42/evaluation/seeds

    anysearch evaluate --documents=my_notes --questions=mine.csv \
        --openai=URL --openai_model=NAME --output=evaluations/mine

Plays all questions with all budgets and seeds in one pass. Writes
episodes.jsonl, one episode per line, which `launch.report` reads, and
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
  flags.DEFINE_string(
    "questions",
    None,
    "A file of questions of yours: JSON lines or a table with question and "
    "answer. All are asked unless config.evaluation.questions is set.",
  )
  flags.DEFINE_string(
    "split", "", "Of the questions; default: what the source evaluates on."
  )
  flags.DEFINE_string(
    "budgets", None, "As 0..8 or 0,1,5, or as searches=1|3,tokens=64|128."
  )
  flags.DEFINE_integer("seeds", None, f"How many, from {_FIRST_SEED} on.", 1)
  flags.DEFINE_string("output", None, "Folder.", required=True)
  launch_flags.define_process()


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  if not f.output:
    raise app.UsageError("--output: found nothing, expected a folder.")
  config = short_flags(documents.read_config())
  # The configuration saved beside the episodes must name the policy played.
  config, chosen = policies.read_flags(config)
  documents.update(config)
  jax_setup.configure(threads=f.threads, cache=f.cache)
  from anysearch_jax.evaluation import harness, journal
  from anysearch_jax.methods import systems
  from anysearch_jax.rollout import searching

  folder = pathlib.Path(f.output)
  systems.validate(config, trains=False, samples=chosen.local)
  source = parts.source(config)
  e = config.evaluation
  questions = source.evaluation_questions(
    e.datasets, e.questions, split=f.split
  )
  policies.check(chosen, config, source, questions, allow_cpu=f.allow_cpu)
  retriever = retrievers.make(config, source.retriever)
  played: dict[str, Any] = {
    "policy": policies.identity(chosen),
    "questions": {"split": f.split, **parts.hashed(questions)},
    "retriever": retriever.identity(sorted({q.corpus for q in questions})),
    "world": parts.world(config.data),
    "prompts": parts.prompts(config.episode),
    "own": parts.own(config),
  }
  with disk.translate_errors(folder):
    stored = json_files.read(folder / "config.json", missing={})
    if changed := stored and config_settings.changes(stored, config):
      raise ValueError(
        f"{folder}: found {', '.join(map(str, changed))}; it holds the results "
        "of other settings. Name another folder, or remove it."
      )
    made = stored or config_settings.to_dict(config)
    journal.claim_folder(
      folder, {"config.json": made, "provenance.json": played}
    )
    if _failed(folder) != 0:
      with run_lock.hold(folder / run_lock.NAME):
        searcher = searching.BatchingRetriever(retriever, config.search)
        _play(config, chosen, source, questions, searcher, folder)
  print(f"episodes: {folder / harness.EPISODES}")
  if failed := _failed(folder):
    sys.exit(f"{failed} episodes failed; the same command plays them again.")


def _failed(folder: pathlib.Path) -> int | None:
  """Returns how many episodes failed; None if not all have been played."""
  summary = json_files.read(folder / _SUMMARY, missing={})
  return sum(cell["failed"] for cell in summary["cells"]) if summary else None


def _play(
  config: config_lib.ExperimentConfig,
  chosen: policies.Chosen,
  source: parts.Source,
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
    policies.player(chosen, config, source) as player,
    line.telling(retriever.waits),
  ):
    summary = harness.evaluate(
      e,
      harness.Playing(
        config.episode,
        systems.of_episode(config.episode),
        config.engine.slots,
        config.watch.quiet_seconds,
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
    script = _interval(cell, len(e.seeds))
    if "official_em" in cell:
      script += " ({official_em} by the set's own script)".format(**cell)
    budget = cell.get("caps", cell["budget"])
    noun = "search" if cell["searches"] == 1 else "searches"
    print(
      f"{cell['dataset']} budget {budget}: {cell['em']} of {cell['n']} right"
      f"{script}, {cell['searches']} {noun}, {cell['failed']} failed"
    )

  used = summary["last_start"]["engine"]
  if chosen.endpoint is not None and used:
    read, written = used["prompt_tokens"], used["sampled_tokens"]
    cost = e.prices.of_calls((), input_tokens=read, output_tokens=written)
    by_prices = f": ${cost:.4f} by --prices" if cost else ""
    print(
      f"the server counted {read:,} tokens read and {written:,} written"
      f"{by_prices}"
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


def short_flags(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns the configuration with --questions, --budgets, ... applied.

  Raises app.UsageError if --budgets is invalid.
  """
  f = flags.FLAGS
  values: dict[str, Any] = {}
  if f.questions is not None:
    data = {"source": "prepared", "path": f.questions}
    config = config_lib.changed(config, data=data)
    if not any(
      each.startswith("evaluation.questions") for each in f.set_config
    ):
      values["questions"] = 0
  if f.budgets is not None:
    pairs = "=" in f.budgets
    values["budgets"] = () if pairs else parse_budgets(f.budgets)
    values["pairs"] = parse_pairs(f.budgets) if pairs else ()
  if f.seeds is not None:
    values["seeds"] = tuple(range(_FIRST_SEED, _FIRST_SEED + f.seeds))
  return config_lib.changed(config, evaluation=values)


def parse_budgets(text: str, flag: str = "--budgets") -> tuple[int, ...]:
  """Parses budgets such as "0..8", "0,1,5" or "0..3,8"; `flag` gave them.

  Raises app.UsageError if the text has another form.
  """
  budgets: list[int] = []
  for part in text.split(","):
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part.strip())
    if not match:
      raise app.UsageError(
        f"{flag}={text}: found {part!r}, expected numbers as 0..8 or 0,1,5."
      )
    first = int(match[1])
    budgets += range(first, int(match[2] or first) + 1)
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
    for part in grid.split(","):
      unit, _, caps = part.strip().partition("=")
      units.append([f"{unit}={cap}" for cap in caps.split("|")])
    budgets += [",".join(caps) for caps in itertools.product(*units)]
  return tuple(budgets)


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
