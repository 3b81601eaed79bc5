"""Tables of comparisons, and of where the uncertainty of numbers comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anysearch_jax.evaluation import columns
from anysearch_jax.evaluation import components as components_lib
from anysearch_jax.evaluation import pairwise as pairwise_lib
from anysearch_jax.report import tables

_SPLIT = {"accuracy": ("EM", 3), "tp": ("TP", 3), "searches": ("searches", 2)}


def components(
  rows: Sequence[tuple[str, int, columns.Columns]],
) -> tables.Table:
  """Tabulates each row's variance by its sources.

  Args:
    rows: label, colour index and episodes of each row.
  """
  found = {
    label: (index, components_lib.split(table, tuple(_SPLIT)))
    for label, index, table in rows
  }
  return tables.Table(
    "uncertainty",
    "Where the uncertainty comes from",
    "Standard errors of the numbers over all episodes (TP: B ≥ 1), by source; "
    "their squares add up. With one training nothing is known of others: the "
    "intervals of such a row are of this policy only. With one training and "
    "one seed, that of questions contains that of seeds; with several "
    "trainings, that of seeds contains how they differ on single questions. "
    "The last column is the standard deviation between trainings.",
    ("measure", "row"),
    (
      tables.Column("trainings", digits=0),
      tables.Column("seeds of each", digits=0),
      tables.Column("questions", digits=0),
      tables.Column("value"),
      tables.Column("from questions", "error", digits=4),
      tables.Column("from seeds", "error", digits=4),
      tables.Column("from trainings", "error", digits=4),
      tables.Column("between trainings", digits=4),
    ),
    tuple(
      tables.Line(
        (title, label),
        (
          tables.Cell(split[name].trainings),
          tables.Cell(split[name].seeds),
          tables.Cell(split[name].questions),
          tables.cell(split[name].estimate),
          tables.Cell(split[name].from_questions),
          tables.Cell(split[name].from_seeds),
          tables.Cell(split[name].from_trainings),
          tables.Cell(split[name].between),
        ),
        index,
      )
      for name, (title, _) in _SPLIT.items()
      for label, (index, split) in found.items()
      if name in split and split[name].estimate.value is not None
    ),
  )


_COMPARED = {
  "accuracy": ("EM", 3),
  "tp": ("TP", 3),
  "searches": ("searches", 2),
  "total_tokens": ("tokens", 1),
  "cost": ("dollars", 6),
}


def pairwise(
  name: str, title: str, found: Sequence[pairwise_lib.Difference]
) -> tables.Table:
  """Tabulates differences of every two rows with p values.

  Each line is one dataset and budget of one pair.
  """
  lines: dict[tuple[str, ...], dict[str, pairwise_lib.Difference]] = {}
  sets = list(dict.fromkeys(d.dataset for d in found))
  for difference in sorted(
    found,
    key=lambda d: (
      sets.index(d.dataset),
      -1 if d.budget is None else d.budget,
    ),
  ):
    key = (
      difference.dataset or "all",
      "all ≥ 1" if difference.budget is None else str(difference.budget),
      f"{difference.ours} − {difference.theirs}",
    )
    lines.setdefault(key, {})[difference.measure] = difference
  several = any(d.between is not None for d in found)
  measured = [
    measure
    for measure in _COMPARED
    if any(d.measure == measure and d.estimate.value is not None for d in found)
  ]

  def cells(at: Mapping[str, pairwise_lib.Difference]) -> list[tables.Cell]:
    out = []
    for measure in measured:
      difference = at[measure]
      first = measure == measured[0]
      out.append(
        tables.cell(difference.estimate, difference.n if first else None)
      )
      out += [
        tables.Cell(difference.detectable),
        tables.Cell(difference.p),
        tables.Cell(difference.adjusted),
      ]
      if several:
        out.append(tables.Cell(difference.between))
      elif measure == "accuracy":
        out.append(tables.Cell(difference.mcnemar))
    return out

  columns = [
    column
    for measure in measured
    for label, digits in (_COMPARED[measure],)
    for column in (
      tables.Column("difference", label, digits, signed=True),
      tables.Column("detectable", label, digits),
      tables.Column("p", label, 4),
      tables.Column("p, Holm", label, 4),
      *(
        [tables.Column("p, trainings", label, 4)]
        if several
        else [tables.Column("p, McNemar", label, 4)]
        if measure == "accuracy"
        else []
      ),
    )
  ]
  return tables.Table(
    f"pairwise_{name}",
    title,
    f"The first row minus the second on the same questions, budgets and seeds, "
    f"with 95 % intervals. {_tested(found)} Detectable: the smallest true "
    "difference found with a probability of 80 %; a difference that is not "
    "found may be as large. Holm corrects over all pairs of this table, in one "
    "measure, at one level of detail (everything together; by budget; by set; "
    "by both).",
    ("set", "B", "pair"),
    tuple(columns),
    tuple(tables.Line(key, tuple(cells(at))) for key, at in lines.items()),
  )


def _tested(found: Sequence[pairwise_lib.Difference]) -> str:
  """Says what intervals and p values cover."""
  if all(max(d.trainings) < 2 for d in found):
    return (
      "Each row is one training: intervals and p values (flipped signs of "
      "questions) are of these policies only. McNemar's mid-p only where each "
      "question has one pair."
    )
  single = any(min(d.trainings) < 2 for d in found)
  return (
    "Intervals and p values (Student's t) cover questions and trainings"
    + ("; a row of one training is that policy only" if single else "")
    + ". p, trainings: exchanging whole trainings, which three against three "
    "cannot bring below .1."
  )


def by_seed(
  name: str, title: str, found: Sequence[pairwise_lib.Difference]
) -> tables.Table:
  """Tabulates the differences of every two rows on each evaluation seed.

  Only those over all sets and budgets; no line if there is one seed.
  """
  whole = [d for d in found if d.dataset is None and d.budget is None]
  seeds = sorted({seed for d in whole for seed in d.seeds})

  def cells(d: pairwise_lib.Difference) -> list[tables.Cell]:
    alone = dict(zip(d.seeds, d.by_seed, strict=True))
    return [tables.Cell(alone.get(seed)) for seed in seeds]

  return tables.Table(
    f"by_seed_{name}",
    title,
    "The first row minus the second over all B ≥ 1, on each evaluation seed "
    "alone, then together with its 95 % interval. Where every training was "
    "evaluated with a seed of its own, these are differences of trainings.",
    ("measure", "pair"),
    (
      *(tables.Column(str(seed), "seed", signed=True) for seed in seeds),
      tables.Column("together", signed=True),
    ),
    tuple(
      tables.Line(
        (_COMPARED[d.measure][0], f"{d.ours} − {d.theirs}"),
        (*cells(d), tables.cell(d.estimate)),
      )
      for measure in _COMPARED
      for d in whole
      if d.measure == measure
      and d.estimate.value is not None
      and len(seeds) > 1
    ),
  )
