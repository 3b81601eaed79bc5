"""Compares policies under pairs of caps with policies that are cut at them.

    python -m research.under_caps \
        --capped=runs/dual-42/pairs,runs/dual-43/pairs \
        --cut=runs/priced-42/free,runs/priced-43/free

`--capped` are evaluations under pairs of searches and tokens, one for each
training; `--cut` are evaluations of the same questions and searches without a
cap on tokens. An answer of theirs counts if its episode wrote no more tokens
than the cap. Prints a line for each pair and one for all of them.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

import anysearch_jax as aj

_NORMAL = 1.96


class Line(NamedTuple):
  """One pair of caps, or the mean over pairs.

  Attributes:
    name: the pair.
    capped, cut: accuracies.
    less: capped minus cut.
    half: half of its 95 % interval: over questions and, if there are several
      trainings, between them.
    over: share of episodes without the cap that took more tokens.
    truncated: share of episodes under the caps that gave no answer.
    within: share of episodes under the caps that spent no more than them.
  """

  name: str
  capped: float
  cut: float
  less: float
  half: float
  over: float
  truncated: float
  within: float


def compare(
  capped: Sequence[Iterable[Mapping[str, Any]]],
  cut: Sequence[Iterable[Mapping[str, Any]]],
) -> list[Line]:
  """Returns a line for each pair, ascending, and one for their mean.

  Args:
    capped: rows of the evaluations under caps, one for each training.
    cut: rows of those without a cap on tokens, in the same order.

  Raises:
    ValueError: the numbers of trainings differ, or an episode under caps has no
      other one with its question and searches.
  """
  if len(capped) != len(cut):
    raise ValueError(
      f"Found {len(capped)} evaluations under caps and {len(cut)} without; "
      "expected one of each for each training."
    )
  lines, effects = [], []
  played = [
    {(r["budget"], r["caps"]["tokens"], r["question_id"]): r for r in rows}
    for rows in capped
  ]
  free = [{(r["budget"], r["question_id"]): r for r in rows} for rows in cut]
  for pair in sorted({key[:2] for key in played[0]}):
    ids = sorted(key[2] for key in played[0] if key[:2] == pair)
    try:
      ours = [[rows[*pair, i] for i in ids] for rows in played]
      theirs = [[rows[pair[0], i] for i in ids] for rows in free]
    except KeyError as error:
      raise ValueError(
        f"Found no episode of {error}; expected the same questions with the "
        "same searches in all evaluations."
      ) from None
    line, effect = _line(pair, ours, theirs)
    lines.append(line)
    effects.append(effect)
  means = np.mean([line[1:] for line in lines], axis=0).tolist()
  every = Line._make(["all pairs", *means])
  return [*lines, every._replace(half=_half(np.mean(effects, axis=0)))]


def _line(
  pair: tuple[int, int], ours: list[list], theirs: list[list]
) -> tuple[Line, np.ndarray]:
  searches, tokens = pair

  def each(rows: list[list], of) -> np.ndarray:
    return np.array([[float(of(r)) for r in row] for row in rows])

  def fits(row: Mapping[str, Any]) -> bool:
    return row["generated_tokens"] <= tokens and row["searches"] <= searches

  over = each(theirs, lambda r: r["generated_tokens"] > tokens)
  right = each(ours, lambda r: r["em"])
  kept = each(theirs, lambda r: r["em"]) * (1 - over)
  effect = right - kept
  none = each(ours, lambda r: r["outcome"] != "answered")
  shown = (right, kept, effect, over, none, each(ours, fits))
  means = [values.mean() for values in shown]
  means.insert(3, _half(effect))
  return Line(f"{searches} searches, {tokens} tokens", *means), effect


def _half(effect: np.ndarray) -> float:
  """Returns half of the interval of a mean, `effect` being `[T, N]`."""
  trainings, questions = effect.shape
  variance = effect.mean(0).var(ddof=1) / questions
  if trainings > 1:
    variance += effect.mean(1).var(ddof=1) / trainings
  return float(_NORMAL * variance**0.5)


def table(lines: Sequence[Line]) -> str:
  """Returns the lines as text."""
  head = ("capped", "cut", "less", "+-", "over", "none", "within")
  out = [f"{'':24}" + "".join(f"{each:>8}" for each in head)]
  for name, *numbers in lines:
    out.append(f"{name:24}" + "".join(f"{each:8.3f}" for each in numbers))
  return "\n".join(out)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  files = [
    [pathlib.Path(folder) / "episodes.jsonl" for folder in folders]
    for folders in (flags.FLAGS.capped, flags.FLAGS.cut)
  ]
  try:
    capped, cut = ([list(aj.read_episodes(f)) for f in each] for each in files)
    print(table(compare(capped, cut)))
  except (OSError, ValueError) as error:
    sys.exit(f"research.under_caps: {error}")


if __name__ == "__main__":
  flags.DEFINE_list("capped", None, "Folders of evaluations.", required=True)
  flags.DEFINE_list("cut", None, "Folders of evaluations.", required=True)
  app.run(main)
