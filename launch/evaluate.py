"""Evaluates a policy under several budgets on held-out questions.

    python -m launch.evaluate --config=configs/quickstart.py \
        --policy=runs/quickstart/anysearch/policy \
        --output=runs/quickstart/anysearch/evaluation/plain

Writes episodes.jsonl, one episode a line; `launch.report` reads it.
`--config.evaluation.budgets=0,1,2,3,5,8` and the other evaluation values say
what is measured.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

from absl import app, flags

from anysearch_jax import config as config_lib
from launch import flags as launch_flags
from launch import parts, progress

launch_flags.define_config()
_POLICY = flags.DEFINE_string(
  "policy", None, "Hugging Face folder; default: config.policy."
)
_SPLIT = flags.DEFINE_enum(
  "split", "held-out", ["train", "dev", "held-out"], "Questions."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder.", required=True)
_THREADS = flags.DEFINE_integer("threads", 0, "CPU threads; 0: XLA's choice.")
_CACHE = flags.DEFINE_string("cache", ".jax_cache", "Compilation cache.")
# Common to every evaluated policy, so that all see the same questions.
_QUESTION_SEED = 2024


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  config = launch_flags.read_config()
  parts.setup_jax(threads=_THREADS.value, cache=_CACHE.value)
  from anysearch_jax.evaluation import harness
  from anysearch_jax.policy import hf

  try:
    source = parts.source(config)
    policy = hf.load(_POLICY.value or config.policy)
  except ValueError as error:
    sys.exit(f"launch.evaluate: {error}")
  e = config.evaluation
  questions = source.questions(_SPLIT.value, e.questions, _QUESTION_SEED)
  folder = pathlib.Path(_OUTPUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(
    json.dumps(config_lib.to_dict(config), indent=2) + "\n"
  )
  total = len(e.budgets) * len(e.seeds) * len(questions)
  line = progress.Line(total, unit="episode", clock=time.monotonic)
  harness.evaluate(
    config,
    policy=policy,
    questions=questions,
    retriever=source.retriever,
    path=folder / "episodes.jsonl",
    on_done=lambda done, _: line.tick(done),
  )
  print(f"episodes: {folder / 'episodes.jsonl'}")


if __name__ == "__main__":
  launch_flags.run(main)
