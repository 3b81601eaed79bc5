r"""Evaluates any Hugging Face folder on questions and passages of your own.

    python -m examples.evaluate_folder models/Qwen2.5-7B-Instruct \
        --questions=questions.jsonl --passages=passages.jsonl --output=runs/mine

A line of questions is {"question": "...", "golden_answers": ["..."]}, one of
passages {"title": "...", "text": "..."}. BM25 searches the passages in memory;
for more than some hundred thousand of them see docs/retrieval.md. The output
gets each episode as a line of JSON; the same command again resumes. The command
`launch.evaluate` does this and more, for prepared questions.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence

import anysearch_jax as aj
from anysearch_jax import config as config_lib


def read(path: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines() if line]


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("folder", type=pathlib.Path)
  for name in ("questions", "passages", "output"):
    parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
  parser.add_argument("--prompts", default="paper", help="environment")
  parser.add_argument("--budgets", type=int, nargs="+", default=[0, 1, 3, 5])
  parser.add_argument("--context", type=int, default=8192, help="tokens")
  parser.add_argument("--slots", type=int, default=16, help="at the same time")
  parser.add_argument("--dtype", default="bfloat16")
  args = parser.parse_args(argv)
  config = aj.ExperimentConfig(
    compute_dtype=args.dtype,
    episode=config_lib.EpisodeConfig(
      prompts=args.prompts, max_context=args.context
    ),
    engine=config_lib.EngineConfig(
      slots=args.slots, max_context=args.context, lanes=(args.slots,)
    ),
    evaluation=config_lib.EvaluationConfig(budgets=tuple(args.budgets)),
  )
  questions = [
    aj.Question(f"{i}", row["question"], tuple(row["golden_answers"]))
    for i, row in enumerate(read(args.questions))
  ]
  passages = [
    aj.Passage(f"{i}", row["title"], row["text"])
    for i, row in enumerate(read(args.passages))
  ]
  policy = aj.load_policy(args.folder, dtype=config.compute_dtype)
  engine = aj.make_engine(policy, config, seed=0)
  env = aj.environment_of(config.episode)
  # Refuses a folder with the episodes of another evaluation.
  asked = {name: str(value) for name, value in vars(args).items()}
  aj.claim_folder(args.output, {"evaluation.json": asked})
  summary = aj.evaluate(
    config.evaluation,
    aj.Playing(config.episode, env, config.engine.slots),
    player=aj.Player(engine, policy.tokenizer),
    questions=questions,
    retriever=aj.LexicalRetriever({"": passages}),
    folder=args.output,
  )
  for cell in summary["cells"]:
    print(
      "budget {budget}: {em} of {n} right, {searches} searches, {failed} "
      "failed".format(**cell)
    )


if __name__ == "__main__":
  main()
