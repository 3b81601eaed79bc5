r"""Makes episodes to imitate, for `sft`.

    anysearch demonstrate --config=configs/small.py:smollm2-cpu \
        --output=runs/demonstrations
    anysearch demonstrate --config=configs/small.py:smollm2-cpu \
        --source=policy --openai=URL --openai_calls=tags --seeds=4 \
        --output=runs/from_a_larger_model

From `evidence`, the rows say what leads to the answer (supporting passages,
`gold_doc_ids`) or at least the answer: at each budget a chain of searches asks
the real retriever until a passage, which is then named, tells it. From
`policy`, the policy of --hf, --checkpoint, --openai or --scripted plays the
questions. Either way the right and well-formed episodes are kept, of a question
and a budget the cheapest one.

Writes episodes.jsonl, in the format of `launch.evaluate`, with config.json,
provenance.json and summary.json, which counts what was left out and why. All
played episodes are in played/. The same command resumes.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import disk, json_files, run_lock
from anysearch_jax.launch import (
  documents,
  evaluate,
  jax_setup,
  parts,
  policies,
  progress,
  retrievers,
)
from anysearch_jax.launch import flags as launch_flags

_SUMMARY = "summary.json"


def define_flags() -> None:
  evaluate.define_flags()
  flags.DEFINE_enum(
    "source",
    "evidence",
    ["evidence", "policy"],
    "evidence: chains of searches that the rows' evidence leads; policy: "
    "episodes that the policy plays.",
  )


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  if not f.output:
    raise app.UsageError("--output: found nothing, expected a folder.")
  config = evaluate.apply_short_flags(documents.read_config())
  config, choice = policies.read_flags(config)
  documents.update(config)
  jax_setup.configure(threads=f.threads, cache=f.cache)
  from anysearch_jax.methods import systems
  from anysearch_jax.rollout import searching

  folder = pathlib.Path(f.output)
  plays = f.source == "policy"
  systems.validate(config, trains=False, samples=plays and choice.is_local)
  source = parts.source(config)
  questions = _questions(config, source, f.split)
  _check_environment(config.episode, plays=plays)
  if plays:
    policies.check_playable(
      choice, config, source, questions, allow_cpu=f.allow_cpu
    )
  retriever = retrievers.make(config, source.retriever)
  provenance: dict[str, Any] = {
    "source": f.source,
    "policy": policies.identity(choice) if plays else None,
    "questions": parts.questions_digest(questions),
    "retriever": retriever.identity(sorted({q.corpus for q in questions})),
    "world": parts.world(config.data),
    "prompts": parts.prompts(config.episode),
    "own": parts.user_code(config),
  }
  with disk.translate_errors(folder):
    evaluate.claim(folder, config, provenance)
    (folder / "played").mkdir(exist_ok=True)
    with run_lock.hold(folder / run_lock.NAME):
      searcher = searching.BatchingRetriever(retriever, config.search)
      _play(config, choice, source, questions, searcher, folder / "played")
      summary = _choose(folder, pareto=plays)
  print(_table(summary["cells"]))
  print(f"demonstrations: {folder} ({summary['kept']:,} episodes)")


def _questions(
  config: config_lib.ExperimentConfig, source: parts.Source, split: str
) -> Sequence[types.Question]:
  """Returns the distinct questions of the split that is trained on.

  `evaluation.questions` limits them if it was set; 0 and the default take all.
  """
  from anysearch_jax.data import dataset_iterator

  f = flags.FLAGS
  if f.questions is not None:
    return source.evaluation_questions(per_dataset=0)
  limited = any(x.startswith("evaluation.questions=") for x in f.set_config)
  limit = config.evaluation.questions if limited else 0
  name = split or config.data.split
  stream = source.questions(name, max(limit, 1), config.seed)
  if isinstance(stream, dataset_iterator.Stream):
    count = limit or len(stream.rows)
    stream = source.questions(name, min(count, len(stream.rows)), config.seed)
  elif not limit:  # The generated world has no end.
    stream = source.questions(name, config.evaluation.questions, config.seed)
  return list(dataset_iterator.distinct(stream))


def _check_environment(
  episode: config_lib.EpisodeConfig, *, plays: bool
) -> None:
  """Refuses an environment in which nothing can be written in tags.

  Raises:
    ValueError: it has no tags, and evidence is to be followed.
  """
  from anysearch_jax.methods import systems

  if not plays and systems.of_episode(episode).format is None:
    raise ValueError(
      f"episode.prompts: found {episode.prompts!r}, which has no format to "
      "write; expected one with tags, such as compact or paper, or "
      "--source=policy."
    )


def _play(
  config: config_lib.ExperimentConfig,
  choice: policies.PolicyChoice,
  source: parts.Source,
  questions: Sequence[types.Question],
  retriever: Any,
  folder: pathlib.Path,
) -> None:
  """Plays the episodes that `folder` lacks."""
  from anysearch_jax.demonstrations import evidence_engine
  from anysearch_jax.evaluation import harness
  from anysearch_jax.methods import systems

  e = config.evaluation
  playing = harness.Playing(
    episode=config.episode,
    environment=systems.of_episode(config.episode),
    slots=config.engine.slots,
    quiet_seconds=config.watch.quiet_seconds,
  )
  grid = harness.Grid(e, questions)
  line = progress.Line(len(grid), unit="episode")

  def play(player: harness.Player) -> None:
    harness.evaluate(
      e,
      playing,
      player=player,
      questions=questions,
      retriever=retriever,
      folder=folder,
      on_done=lambda done, _: line.tick(done),
    )

  with line.reporting_waits(retriever.waits):
    if flags.FLAGS.source == "policy":
      with policies.player(choice, config, source) as player:
        play(player)
      return
    codec = choice.endpoint.codec if choice.endpoint else None
    if codec is None:
      _, codec = policies.describe(
        dataclasses.replace(config, policy=choice.name)
      )
    engine = evidence_engine.EvidenceEngine(
      grid.cell, retriever, k=config.episode.top_k, codec=codec
    )
    play(harness.Player(engine, codec))


def _choose(folder: pathlib.Path, *, pareto: bool) -> dict[str, Any]:
  """Writes the chosen episodes and the summary, which it returns."""
  from anysearch_jax.demonstrations import selection
  from anysearch_jax.environment import records
  from anysearch_jax.evaluation import harness, journal

  rows = list(journal.read(folder / "played" / harness.EPISODES))
  kept_rows, reasons = selection.chosen(rows, pareto=pareto)
  if not kept_rows:
    raise ValueError(
      f"{folder}: found no right and well-formed episode among {len(rows)}; "
      "expected some. Look at played/episodes.jsonl, and try another policy, "
      "more --seeds, or --source=evidence."
    )
  records.write(folder / harness.EPISODES, kept_rows)
  cells = [
    {"dataset": dataset, "budget": budget, **cell._asdict()}
    for (dataset, budget), cell in selection.counted(rows, reasons).items()
  ]
  summary = {"played": len(rows), "kept": len(kept_rows), "cells": cells}
  json_files.write(folder / _SUMMARY, summary)
  return summary


def _table(cells: Sequence[Mapping[str, Any]]) -> str:
  """Returns what was kept of each dataset and budget, and what was not."""
  lines = [f"{'':24}   kept  searches  tokens  dropped"]
  for cell in cells:
    name = f"{cell['dataset']} budget {cell['budget']}"
    kept_count = max(cell["kept"], 1)
    dropped = ", ".join(
      f"{count} {reason}" for reason, count in sorted(cell["dropped"].items())
    )
    lines.append(
      f"{name:24} {cell['kept']:6}  {cell['searches'] / kept_count:8.2f}  "
      f"{cell['tokens'] / kept_count:6.0f}  {dropped}".rstrip()
    )
  return "\n".join(lines)


if __name__ == "__main__":
  define_flags()
  launch_flags.run(
    main,
    resumes=True,
    first_flags=(
      "config",
      "output",
      "budgets",
      "source",
      "questions",
      "documents",
      "hf",
      "openai",
      "openai_model",
      "seeds",
    ),
  )
