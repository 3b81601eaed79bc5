"""Checks the value of one more search in a scripted world with known truth.

    python -m research.search_value --replicates=2000

Every question is of one of four kinds: the less often the policy asks for a
search, the less a search is worth. Prints, by the number of tries, the mean
estimates and how often their 95 % intervals hold the truth, and how often the
bounds hold the mean over all cuts. `reached` is the mean over cuts at which an
end asked: what reports showed before, and what depends on the tries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

from research import branch_values

TRIES = (1, 4, 16, 64)


class Kind(NamedTuple):
  """Probabilities at the cuts of a kind of questions.

  Attributes:
    asks: that a sampled turn asks for a search.
    granted, refused, stored: that the answer is right.
  """

  asks: float
  granted: float
  refused: float
  stored: float


KINDS = (
  Kind(0.9, 0.95, 0.45, 0.5),
  Kind(0.4, 0.7, 0.4, 0.5),
  Kind(0.05, 0.35, 0.5, 0.5),
  Kind(0.01, 0.1, 0.5, 0.6),
)


class Size(NamedTuple):
  """Numbers of questions, of cuts of each, and of ends of each cut."""

  questions: int = 160
  cuts: int = 2
  samples: int = 4


def truth() -> dict[str, float]:
  """Returns worth and gain as the policy asks, and their means over cuts."""
  asks, granted, refused, stored = np.array(KINDS).T
  return {
    "worth": float(asks @ (granted - refused) / asks.sum()),
    "gain": float(asks @ (granted - stored) / asks.sum()),
    "asks": float(asks.mean()),
    "worth_bounds": float(np.mean(granted - refused)),
    "gain_bounds": float(np.mean(granted - stored)),
  }


def ends(
  size: Size, tries: int, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
  """Yields the rows of `branches.jsonl` of an evaluation in this world."""
  for question, kind in enumerate(
    rng.integers(len(KINDS), size=size.questions)
  ):
    k = KINDS[kind]
    for cut in range(size.cuts):
      before = int(rng.random() < k.stored)
      attempts = rng.geometric(k.asks, size.samples)
      right = rng.random((size.samples, 2)) < (k.granted, k.refused)
      for attempt, (granted, refused) in zip(attempts, right.astype(int)):
        asked = attempt <= tries
        yield {
          "question_id": f"q{question}",
          "budget": cut,
          "seed": 1,
          "kind": "continue",
          "cut": 0,
          "hops": None,
          "budget_left": 1,
          "tries": int(min(attempt, tries)),
          "outcome": "answered" if asked else None,
          "stored_em": before,
          "worth": int(granted - refused) if asked else None,
          "gain": int(granted - before) if asked else None,
        }


def mean_of_reached(rows: list[dict[str, Any]]) -> float:
  """Returns the mean over cuts of the mean worth of the ends that asked."""
  cuts: dict[tuple[str, int], list[int]] = {}
  for row in rows:
    if row["worth"] is not None:
      key = row["question_id"], row["budget"]
      cuts.setdefault(key, []).append(row["worth"])
  return float(np.mean([np.mean(values) for values in cuts.values()]))


def measured(
  size: Size, tries: int, replicates: int, seed: int = 0
) -> dict[str, float]:
  """Returns mean estimates and coverages over simulated evaluations."""
  rng = np.random.default_rng(seed)
  true = truth()
  totals = dict.fromkeys(("reached", "worth", "gain", "asks"), 0.0)
  held = dict.fromkeys(true, 0)
  for _ in range(replicates):
    rows = list(ends(size, tries, rng))
    found = branch_values.summary(rows)["continue"]
    totals["reached"] += mean_of_reached(rows)
    for name in ("worth", "gain", "asks"):
      totals[name] += found[name]["value"]
    for name, value in true.items():
      held[name] += _holds(found[name], value)
  return {name: total / replicates for name, total in totals.items()} | {
    f"{name}, held": count / replicates for name, count in held.items()
  }


def _holds(found: Mapping[str, float], value: float) -> bool:
  return found["low"] <= value <= found["high"]


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  print("truth:", *(f"{name} {value:+.3f}" for name, value in truth().items()))
  for size in (Size(), Size(questions=40)):
    print(*(f"{n} {name}" for name, n in size._asdict().items()), sep=", ")
    for tries in TRIES:
      found = measured(size, tries, flags.FLAGS.replicates)
      values = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
      print(f"{tries:>3} tries  {values}", flush=True)


if __name__ == "__main__":
  flags.DEFINE_integer(
    "replicates", 2000, "Simulated evaluations of a line.", lower_bound=10
  )
  app.run(main)
