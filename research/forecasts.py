"""How well the searches that an episode still makes can be forecast.

    python -m research.forecasts runs/x/evaluation/plain ...
    python -m research.forecasts --policy=runs/x/policy runs/x/evaluation/plain

Every argument is the folder of an evaluation. Before an episode's first search,
and after each that leaves another, an interval is forecast for the searches
that follow (progressive interval estimation, BAGEN, arXiv 2606.00198):

fitted   holds the middle `LEVEL` of what followed at equal budgets and numbers
         of searches made, in the other half of the questions;
asked    with `--policy`: the policy reads the episode up to there and answers
         with an interval, or with `impossible` if it expects no right answer.
         BAGEN asks for tokens instead of searches; the words are ours. Replies
         are kept in `forecasts.jsonl` of the folder, which a stop loses none
         of.

Prints coverage (the share of intervals that hold the number), mean width, and
BAGEN's score of right episodes (1 - width / number where it is held), with 95 %
intervals over questions and trainings.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

import anysearch_jax as aj
from research.study import load_config

LEVEL = 0.8
REPLIES = "forecasts.jsonl"
QUESTION = """\
Another agent answers a question with a search engine. This is the question:
{question}

This is all that it has written and read so far:
{transcript}

It has made {made} searches and may make {left} more. Judge two things:
1. Will its answer be right within these searches? This matters most.
2. If so, how many more searches will it make? Give the least and the most, as \
close to each other as you can, with the true number between them.

Reply in one of these two forms, with a thought of at most two sentences:
<think> the thought </think><answer>[least, most]</answer>
<think> the thought </think><answer>impossible</answer>
"""
_REPLY = re.compile(
  r"(?:(?!</?answer>).)*<answer>\s*"
  r"(?:\[\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\]|impossible)\s*</answer>\s*",
  re.DOTALL | re.IGNORECASE,
)
_REPLY_TOKENS = 256
_SECONDS = 600  # Deadline of a reply.
# Attempts of addresses that no episode has, so that random numbers differ.
_ATTEMPTS = 1 << 30

Episode = Mapping[str, Any]


def parsed(reply: str) -> tuple[int, ...] | None:
  """Returns (least, most) of a reply, () for `impossible`, otherwise None."""
  match = _REPLY.fullmatch(reply)
  if match is None:
    return None
  ends = tuple(int(end) for end in match.groups() if end)
  return None if ends and ends[0] > ends[1] else ends


def prompts(episode: Episode, control_tokens: Sequence[str] = ()) -> list[str]:
  """Returns what a policy is asked about an episode, one text a forecast.

  What the episode contains opens no tag and holds no control token.
  """
  texts = [span["text"] for span in episode["spans"]]
  turns = [
    place
    for place, span in enumerate(episode["spans"])
    if span["author"] == "model"
  ]
  # What came before the turn that follows a search.
  ends = [0]
  for observation in episode["observations"]:
    following = observation["turn"] + 1
    ends.append(turns[following] if following < len(turns) else len(texts))
  budget = episode["budget"]
  return [
    QUESTION.format(
      question=aj.neutralise(episode["question"], control_tokens),
      transcript=aj.neutralise(
        "".join(texts[:end]) or "(nothing)", control_tokens
      ),
      made=made,
      left=budget - made,
    )
    for made, end in enumerate(ends[:budget])
  ]


async def ask(
  episode: Episode,
  *,
  engine: aj.Engine,
  tokenizer: aj.Tokenizer,
  address: aj.Address,
  max_context: int,
) -> list[str]:
  """Returns the policy's replies about an episode, one a forecast.

  Args:
    episode: a record of `episodes.jsonl` that did not fail.
    engine: samples the policy.
    tokenizer: the policy's.
    address: the random address of the episode.
    max_context: the longest context in tokens; a longer question is not asked,
      and its reply is empty.
  """
  replies = []
  texts = prompts(episode, tokenizer.control_tokens)
  for made, text in enumerate(texts):
    token_ids = tuple(tokenizer.render(text)[1])
    room = min(_REPLY_TOKENS, max_context - len(token_ids))
    if room <= 0:
      replies.append("")
      continue
    own_address = address._replace(attempt=_ATTEMPTS + made)
    request = aj.GenerateRequest(
      own_address, 0, token_ids, room, ("</answer>",), may_search=False
    )
    try:
      async with asyncio.timeout(_SECONDS):
        generation = await engine.generate(request)
    finally:
      engine.release(own_address)
    replies.append(generation.text)
  return replies


def reply_sums(replies: Sequence[str], searches: int) -> np.ndarray:
  """Returns six numbers of an episode's replies, float64 `[6]`.

  They count all replies, those `impossible`, and intervals; and of intervals
  sum whether they hold the searches that follow, widths, and scores.
  """
  intervals = np.zeros(4)
  read = [parsed(reply) for reply in replies]
  for made, ends in enumerate(read):
    if ends:
      follow = searches - made
      width = ends[1] - ends[0]
      holds = ends[0] <= follow <= ends[1]
      score = max(0.0, 1 - width / follow) if follow else width == 0
      intervals += [1, holds, width, holds * score]
  return np.array([len(read), read.count(()), *intervals])


def interval(chances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the ends, int `[...]`, of the middle `LEVEL` of distributions.

  `chances` are probabilities or counts of 0, 1, ..., float `[..., K]`.
  """
  below = np.cumsum(chances, axis=-1)
  # A share that equals the bound exactly must not fall beside it by rounding.
  low, high = (
    (below >= below[..., -1:] * (1 + side * LEVEL) / 2 - 1e-9).argmax(axis=-1)
    for side in (-1, 1)
  )
  return low, high


def fitted(table: aj.columns.Columns) -> np.ndarray:
  """Forecasts every scored episode by the other half of its row's questions.

  Questions are halved by their place in `table.ids`. A forecast without any
  episode to learn from is [0, searches left].

  Returns:
    Float64 `[P, 4]` of P episodes: the number of forecasts, how many of their
    intervals hold the searches that follow, the sum of widths, and that of
    BAGEN's score: 1 - width / searches that follow, at least 0, of an interval
    that holds them (of 0: 1 for [0, 0]).
  """
  made, budget = table.searches.astype(int), table.budget
  count = np.minimum(made + 1, budget)
  episode = np.repeat(np.arange(len(table)), count)
  done = np.arange(len(episode)) - np.repeat(np.cumsum(count) - count, count)
  follow = made[episode] - done
  left = budget[episode] - done
  half = table.question[episode] % 2
  keys = np.stack(
    [table.run[episode], table.dataset[episode], budget[episode], done]
  )
  cells, cell = np.unique(keys, axis=1, return_inverse=True)
  counts = np.zeros((cells.shape[1], 2, int(follow.max(initial=0)) + 1))
  np.add.at(counts, (cell.reshape(-1), half, follow), 1)
  other_half = counts[cell.reshape(-1), 1 - half]
  low, high = interval(other_half)  # 0 and 0 without an episode.
  high = np.where(other_half.any(axis=1), high, left)
  holds = (low <= follow) & (follow <= high)
  width = high - low
  score = holds * np.clip(1 - width / np.maximum(follow, 1), 0, 1)
  score *= (follow > 0) | (width == 0)
  sums = np.ones(len(episode)), holds, width, score
  return np.stack([np.bincount(episode, x, len(table)) for x in sums], axis=1)


def measured(
  table: aj.columns.Columns, sums: np.ndarray
) -> dict[str, aj.inference.Estimate]:
  """Returns coverage, width and score of intervals, with 95 % intervals.

  Nothing is returned without a forecast. `sums` are what `fitted` returns.
  """
  n, holds, width, score = sums.T
  if not n.any():
    return {}
  shares = {"coverage": (holds, n), "score": (score * table.em, n * table.em)}
  return _estimated(table, shares, width, n)


def measured_replies(
  table: aj.columns.Columns, sums: np.ndarray
) -> dict[str, aj.inference.Estimate]:
  """Returns the same of what the policy said, and three shares of replies.

  `impossible_wrong` and `impossible_right` are the shares of `impossible` in
  wrong and in right episodes, `unparsable` that of replies in another form. The
  score of replies that are no interval is 0; coverage and width skip them.
  `sums` are those of `reply_sums`, float `[P, 6]`.
  """
  replies, never, n, holds, width, score = sums.T
  right = replies * table.em
  wrong = replies * (1 - table.em)
  shares = {
    "coverage": (holds, n),
    "score": (score * table.em, right),
    "impossible_wrong": (never * (1 - table.em), wrong),
    "impossible_right": (never * table.em, right),
    "unparsable": (replies - never - n, replies),
  }
  return _estimated(table, shares, width, n) if replies.any() else {}


def _estimated(
  table: aj.columns.Columns,
  shares: dict[str, tuple[np.ndarray, np.ndarray]],
  width: np.ndarray,
  n: np.ndarray,
) -> dict[str, aj.inference.Estimate]:
  tops, bottoms = zip(*shares.values(), (width, n), strict=True)
  linear = aj.measures.ratios(table, tops, bottoms)
  rates = aj.inference.rates(linear.columns(range(len(shares))))
  means = aj.inference.effects(linear.columns([len(shares)]))
  estimates = (effect.estimate for effect in (*rates, *means))
  return dict(zip((*shares, "width"), estimates, strict=True))


def page(
  episodes: Sequence[Episode],
  replies: Mapping[str, Sequence[str]],
) -> str:
  """Returns the table of an evaluation, a line for each budget and forecaster.

  Args:
    episodes: all of the evaluation.
    replies: what the policy said, by `key` of the episode.
  """
  scored = [e for e in episodes if e["outcome"] != "failed"]
  table = aj.columns.as_columns(scored)
  sums = fitted(table)
  said = np.stack(
    [reply_sums(replies.get(key(e), ()), e["searches"]) for e in scored]
  )
  lines = ["  B  forecaster  coverage              width  score"]
  for budget in sorted({e["budget"] for e in scored}):
    at = table.budget == budget
    part = table.where(at)
    forecasters = {"fitted": measured(part, sums[at])}
    forecasters["asked"] = measured_replies(part, said[at])
    for name, estimates in forecasters.items():
      if estimates:
        lines.append(_line(budget, name, estimates))
  return "\n".join(lines)


def _line(
  budget: int, name: str, estimates: Mapping[str, aj.inference.Estimate]
) -> str:
  coverage, score = estimates["coverage"], estimates["score"]
  width = estimates["width"].value
  cells = [f"{budget:>3}", f"{name:10}", _interval_text(coverage)]
  cells.append("" if width is None else f"{width:5.2f}")
  cells.append(_interval_text(score))
  for extra in ("impossible_wrong", "impossible_right", "unparsable"):
    share = estimates.get(extra)
    if share and share.value is not None:
      cells.append(f"{extra} {share.value:.3f}")
  return "  ".join(cells)


def _interval_text(estimate: aj.inference.Estimate) -> str:
  value, low, high = estimate
  if value is None:
    return "-"
  if low is None or high is None:
    return f"{value:.3f}"
  return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def key(episode: Episode) -> str:
  """Identifies an episode in its evaluation."""
  return "\t".join(
    str(episode[name]) for name in ("question_id", "budget", "seed")
  )


def asked(
  folder: pathlib.Path,
  episodes: Sequence[Episode],
  policy: aj.Policy,
  config: aj.ExperimentConfig,
) -> dict[str, list[str]]:
  """Returns the policy's replies about all episodes; asks for those it lacks.

  Args:
    folder: of the evaluation; its file `REPLIES` has those of earlier calls.
    episodes: what is asked about.
    policy: the policy that played them.
    config: of its engine and contexts.
  """
  path = folder / REPLIES
  replies: dict[str, list[str]] = {}
  if path.is_file():
    rows = (json.loads(line) for line in path.read_text().splitlines())
    replies = {row["episode"]: row["replies"] for row in rows}
  missing = [
    (place, episode)
    for place, episode in enumerate(episodes)
    if episode["outcome"] != "failed" and key(episode) not in replies
  ]
  engine = aj.make_engine(policy, config, seed=config.seed)

  async def ask_one(item: tuple[int, Episode]) -> None:
    place, episode = item
    address = aj.evaluation_address(
      episode["question_id"], seed=episode["seed"], variant=place
    )
    texts = await ask(
      episode,
      engine=engine,
      tokenizer=policy.tokenizer,
      address=address,
      max_context=config.episode.max_context,
    )
    replies[key(episode)] = texts
    row = {"episode": key(episode), "replies": texts}
    with path.open("a") as file:
      file.write(json.dumps(row) + "\n")

  aj.run(aj.run_each(missing, ask_one, at_once=config.engine.slots))
  return replies


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("config", "configs/quickstart.py", "Of the evaluation.")
  flags.DEFINE_string("policy", None, "Folder of the policy to ask.")


def main(argv: Sequence[str]) -> None:
  if len(argv) < 2:
    raise app.UsageError("Name at least one folder of an evaluation.")
  f = flags.FLAGS
  config = load_config(f.config)
  policy = aj.load_policy(pathlib.Path(f.policy)) if f.policy else None
  for name in argv[1:]:
    folder = pathlib.Path(name)
    if not (folder / "episodes.jsonl").is_file():
      sys.exit(f"{folder}: no episodes.jsonl; expected an evaluation's folder.")
    episodes = list(aj.read_episodes(folder / "episodes.jsonl"))
    replies: dict[str, list[str]] = {}
    if policy is not None:
      replies = asked(folder, episodes, policy, config)
    print(f"{folder}\n{page(episodes, replies)}\n")


if __name__ == "__main__":
  define_flags()
  app.run(main)
