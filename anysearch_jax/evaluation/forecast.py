"""How well the searches that an episode still makes can be forecast.

Before its first search and after every one, while the budget allows another,
an interval is forecast for the searches that follow (progressive interval
estimation, BAGEN, arXiv 2606.00198). There the policy is asked in words, as
`asking` does. Besides, an interval is fitted: it holds the middle `LEVEL` of
what followed at equal budgets and numbers of searches made, in the other half
of the questions.
"""

from __future__ import annotations

import numpy as np

from anysearch_jax.evaluation import columns, inference, measures

LEVEL = 0.8


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


def fitted(table: columns.Columns) -> np.ndarray:
  """Forecasts every scored episode by the other half of its row's questions.

  Questions are halved by their place in `table.ids`. A forecast without any
  episode to learn from is [0, searches left]. Float `[P, 4]` has of each
  episode its number of forecasts, how many of their intervals hold the searches
  that follow, the sum of widths, and of BAGEN's score: 1 - width / searches
  that follow, at least 0, of an interval that holds them (of 0: 1 for [0, 0]).
  """
  made, budget = table.searches.astype(int), table.budget
  count = np.minimum(made + 1, budget)
  at = np.repeat(np.arange(len(table)), count)
  done = np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count)
  follow, left = made[at] - done, budget[at] - done
  half = table.question[at] % 2
  keys = np.stack([table.run[at], table.dataset[at], budget[at], done])
  cells, cell = np.unique(keys, axis=1, return_inverse=True)
  counts = np.zeros((cells.shape[1], 2, int(follow.max(initial=0)) + 1))
  np.add.at(counts, (cell.reshape(-1), half, follow), 1)
  other = counts[cell.reshape(-1), 1 - half]
  low, high = interval(other)  # 0 and 0 without an episode.
  high = np.where(other.any(axis=1), high, left)
  held, width = (low <= follow) & (follow <= high), high - low
  score = held * np.clip(1 - width / np.maximum(follow, 1), 0, 1)
  score *= (follow > 0) | (width == 0)
  sums = np.ones(len(at)), held, width, score
  return np.stack([np.bincount(at, x, len(table)) for x in sums], axis=1)


def measured(
  table: columns.Columns, sums: np.ndarray
) -> dict[str, inference.Estimate]:
  """Returns coverage, width and score, with 95 % intervals.

  The score is of the forecasts in right episodes, as in BAGEN. Nothing is
  returned without a forecast. `sums` are what `fitted` returns of `table`.
  """
  n, held, width, score = sums.T
  if not n.any():
    return {}
  shares = {"coverage": (held, n), "score": (score * table.em, n * table.em)}
  return _estimated(table, shares, width, n)


def asked(table: columns.Columns) -> dict[str, inference.Estimate]:
  """Returns the same of what the policy said, and three shares of replies.

  `impossible_wrong` and `impossible_right` are the shares of `impossible` in
  wrong and in right episodes, `unparsable` that of replies in another form. The
  score of replies that are no interval is 0; coverage and width skip them.
  """
  said, never, n, held, width, score = table.said.T
  right, wrong = said * table.em, said * (1 - table.em)
  shares = {
    "coverage": (held, n),
    "score": (score * table.em, right),
    "impossible_wrong": (never * (1 - table.em), wrong),
    "impossible_right": (never * table.em, right),
    "unparsable": (said - never - n, said),
  }
  return _estimated(table, shares, width, n) if said.any() else {}


def _estimated(
  table: columns.Columns,
  shares: dict[str, tuple[np.ndarray, np.ndarray]],
  width: np.ndarray,
  n: np.ndarray,
) -> dict[str, inference.Estimate]:
  tops, bottoms = zip(*shares.values(), (width, n), strict=True)
  found, last = measures.ratios(table, tops, bottoms), len(shares)
  rates = inference.rates(found.columns(range(last)))
  means = inference.effects(found.columns([last]))
  made = (each.estimate for each in (*rates, *means))
  return dict(zip((*shares, "width"), made, strict=True))
