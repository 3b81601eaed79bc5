"""Every table of a report: columns over the rows of a study.

Headings and notes stand in report.toml.
"""

from __future__ import annotations

import collections
import pathlib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from anysearch_jax.evaluation import (
  columns,
  comparison,
  curves,
  metrics,
)
from anysearch_jax.report import study as study_lib
from anysearch_jax.report.study import Row, Study
from anysearch_jax.report.tables import Cell, Column, Table, make

with (pathlib.Path(__file__).parent / "report.toml").open("rb") as file:
  _WORDS = tomllib.load(file)["tables"]
_TIGHT = (4, 5, 6)  # Budgets of the paper's efficiency table.
_USUAL = 5  # Budget of the paper's main, token and ablation tables.
_SPANS = 6  # Maximum number of lines of a phase in the sampling table.
# Heading and decimals of a measure.
_HEADS = {
  "accuracy": ("EM", 3),
  "tp": ("TP", 3),
  "searches": ("searches", 2),
  "total_tokens": ("tokens", 1),
  "cost": ("dollars", 6),
  "regret": ("regret", 3),
}


def tables(study: Study) -> list[Table]:
  """Returns every table; those that do not apply have no lines."""
  rows = study.rows
  by_set: dict[str, list[curves.Curve]] = {
    name: [row.curves[name] for row in rows if name in row.curves]
    for name in study_lib.datasets(rows)
  }
  # Averages over datasets are comparable only if they cover the same datasets.
  alike = [
    row.curve
    for row in rows
    if study_lib.complete(row, rows, [p.budget for p in row.curve.points])
  ]
  if len(by_set) > 1:
    by_set["average"] = alike
  found = [
    overview(rows),
    _main(rows),
    _scorers(rows),
    _efficiency(rows),
    *(_ablation(name, *group) for name, group in study.groups.items()),
    _tokens(rows),
    _formats(rows),
    _hops(rows),
    _budget_use(rows),
    _knowledge(rows),
    _early_stopping(study),
  ]
  for name, differences in study.differences.items():
    title = study.groups[name][0]
    found.append(_pairwise(name, title, differences))
    found.append(_by_seed(name, title, differences))
  return [
    *found,
    _training(study.training),
    _curves(rows, by_set),
    _areas(by_set),
    _surfaces(study),
    _surface_areas(study),
  ]


def _table(
  kind: str,
  keys: str,
  columns: Sequence[Column],
  lines: Iterable[tuple[tuple, Any]],
  *,
  name: str = "",
  **words: str,
) -> Table:
  """Fills a table; `name` tells several of a kind apart, see `tables.make`."""
  title, note = (
    _WORDS[kind][part].format(**words) for part in ("title", "note")
  )
  kind = f"{kind}_{name}" if name else kind
  return make(kind, title, note, keys, columns, lines)


def _at_budgets(budgets: Iterable[int], **how: Any) -> list[Column]:
  """Returns a column for each budget, of subjects that map budgets."""
  return [Column(f"B = {b}", b, **how) for b in budgets]


def _played(
  rows: Sequence[Row], budgets: Sequence[int]
) -> Iterator[tuple[tuple, Any]]:
  """Yields a line of every dataset, budget and row that was played."""
  for dataset in study_lib.datasets(rows):
    for budget in budgets:
      for row in rows:
        if part := row.cells.get((dataset, budget)):
          yield (dataset, budget, row.label), part


def overview(rows: Sequence[Row]) -> Table:
  at, known = study_lib.budgets(rows), study_lib.know_optimum(rows)

  def lines() -> Iterator[tuple[tuple, Any]]:
    measures = ("accuracy", *["regret"] * known, "searches", "tp")
    for measure in measures:
      title = _HEADS[measure][0]
      for row in rows:
        found: dict[Any, Any] = {
          p.budget: getattr(p, measure)
          for p in row.curve.points
          if study_lib.complete(row, rows, [p.budget])
        }
        if study_lib.complete(row, rows):
          found["mean"] = getattr(row.mean, measure)
        yield (title, row.label), found
      if measure == "accuracy" and known:
        # Rows have the same questions, but some have fewer of them.
        best: dict[Any, Any] = next(
          dict(row.optimum) for row in rows if study_lib.know_optimum([row])
        )
        if set(at) <= set(best):
          best["mean"] = sum(best[b] for b in at) / len(at)
        yield (title, "the optimum, computed"), best

  return _table(
    "overview",
    "measure, row",
    [*_at_budgets(at), Column("mean", "mean")],
    lines(),
    regret=_WORDS["overview"]["regret"] if known else "",
  )


def _main(rows: Sequence[Row]) -> Table:
  sets, known = study_lib.datasets(rows), study_lib.know_optimum(rows)
  several = len(sets) > 1

  def lines() -> Iterator[tuple[tuple, Any]]:
    for budget in study_lib.budgets(rows):
      for row in rows:
        parts = {s: p for (s, b), p in row.cells.items() if b == budget}
        if not parts:
          continue
        found: dict[str, Any] = {
          s: p.cell("accuracy") for s, p in parts.items()
        }
        found["regret of all"] = row.by_budget[budget].regret
        if len(parts) == len(sets):
          mean = row.whole.over([budget], weigh_sets=True)
          found["mean of sets"] = mean.cell("accuracy")
        yield (budget, row.label), found

  return _table(
    "main",
    "B, row",
    [
      *(
        Column(head, name, group, best=True)
        for name in sets
        for group, head in [study_lib.NAMES.get(name, ("", name))]
      ),
      *[Column("regret", "regret of all")] * known,
      *[Column("Avg.", "mean of sets", best=True)] * several,
    ],
    lines(),
  )


def _scorers(rows: Sequence[Row]) -> Table:
  budgets = study_lib.budgets(rows)
  averages = [
    (("average", b, row.label), row.whole.over([b], weigh_sets=True))
    for b in budgets
    for row in rows
    if len(study_lib.datasets(rows)) > 1 and study_lib.complete(row, rows, [b])
  ]
  return _table(
    "scorers",
    "set, B, row",
    [
      Column("EM", "accuracy", "ours", best=True, n=True),
      Column("F1", "f1", "ours", best=True),
      Column("EM", "official_accuracy", "official script", best=True),
      Column("F1", "official_f1", "official script", best=True),
    ],
    (
      (keys, part)
      for keys, part in (*_played(rows, budgets), *averages)
      if part.official_f1.value is not None
    ),
  )


def _efficiency(rows: Sequence[Row]) -> Table:
  return _table(
    "efficiency",
    "set, B, row",
    [
      Column("EM", "accuracy", best=True, n=True),
      Column("searches", "searches", digits=2),
      Column("TP", "tp", best=True),
      *[Column("regret", "regret")] * study_lib.know_optimum(rows),
    ],
    _played(rows, _TIGHT),
  )


def _ablation(name: str, title: str, rows: Sequence[Row]) -> Table:
  budgets = study_lib.budgets(rows)
  usual = min(budgets, key=lambda b: (abs(b - _USUAL), -b))
  pools = {f"B = {usual}": [usual], "all B ≥ 1": [b for b in budgets if b >= 1]}
  measures = ["accuracy", "tp", "searches"]
  measures += ["regret"] * study_lib.know_optimum(rows)

  def measured(row: Row) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for group, pool in pools.items():
      part = row.whole.over(pool)
      if part.n and study_lib.complete(row, rows, pool):
        found |= {(group, m): getattr(part, m) for m in measures}
        found[group, "accuracy"] = part.cell("accuracy")
    return found

  return _table(
    "ablation",
    "row",
    [
      Column(head, (group, m), group, digits, best=m in ("accuracy", "tp"))
      for group in pools
      for m in measures
      for head, digits in [_HEADS[m]]
    ],
    (((row.label,), measured(row)) for row in rows),
    name=name,
    title=title,
    usual=str(usual),
  )


def _tokens(rows: Sequence[Row]) -> Table:
  return _table(
    "tokens",
    "set, B, row",
    [
      Column("generated", "generated_tokens", digits=1, n=True),
      Column("retrieved", "retrieved_tokens", digits=1),
      Column("total", "total_tokens", digits=1),
      Column("retrieved share", "retrieval_share"),
    ],
    _played(rows, study_lib.budgets(rows)),
  )


def _formats(rows: Sequence[Row]) -> Table:
  return _table(
    "formats",
    "row, B",
    [
      Column("well formed", "format_rate", n=True),
      Column("truncated", "truncated_rate"),
      Column("invalid", "invalid_rate"),
      Column("over budget", "violation_rate"),
      Column("failed", "failed", digits=0),
    ],
    (
      ((row.label, budget), part)
      for row in rows
      for budget, part in row.by_budget.items()
    ),
  )


def _hops(rows: Sequence[Row]) -> Table:
  return _table(
    "hops",
    "row, hops",
    _at_budgets(study_lib.budgets(rows), digits=2),
    (
      (
        (row.label, hops),
        {
          budget: study_lib.Part(part).cell("accuracy")
          for budget, part in columns.by_budget(found).items()
        },
      )
      for row in rows
      for hops, found in columns.by_hops(row.whole.table).items()
    ),
  )


def _budget_use(rows: Sequence[Row]) -> Table:
  shares = [
    ((row.label, budget), dict(enumerate(found)))
    for row in rows
    for budget, found in metrics.search_shares(row.episodes).items()
  ]
  most = max((len(found) for _, found in shares), default=0)
  return _table(
    "budget_use",
    "row, B",
    [Column(str(k), k, "searches made", 2) for k in range(most)],
    shares,
  )


def _knowledge(rows: Sequence[Row]) -> Table:
  return _table(
    "knowledge",
    "row",
    [
      Column("known", "known"),
      Column("unknown", "unknown"),
      Column("unknown − known", "gap"),
      Column("stale", "stale"),
    ],
    (
      (
        (row.label,),
        {k: Cell(*x.estimate, n=x.n) for k, x in row.knowledge.items()},
      )
      for row in rows
      if row.knowledge
    ),
  )


def _early_stopping(study: Study) -> Table:
  counts = {
    "π wrong, other right": "losses",
    "of these, π left budget unused": "losses_unused",
    "π right, other wrong": "wins",
  }
  return _table(
    "early_stopping",
    "other, B",
    [
      Column("pairs", "n", digits=0),
      *(Column(name, of, "count", 0) for name, of in counts.items()),
      Column("net gain", "net", "count", 0),
      *(
        Column(name, lambda line, of=of: getattr(line, of) / line.n, "rate")
        for name, of in counts.items()
      ),
      Column("net gain", "difference", "rate", signed=True),
      Column("detectable", "detectable", "rate"),
      Column("difference", "tp_difference", "TP", signed=True),
      Column("detectable", "tp_detectable", "TP"),
    ],
    (
      ((label, "all ≥ 1" if line.budget is None else line.budget), line)
      for label, (_, found) in study.compared.items()
      for line in found
    ),
    system=study.system if study.rows else "",
  )


def _pairwise(
  name: str, title: str, found: Sequence[comparison.Difference]
) -> Table:
  """Tabulates differences of every two rows with p values."""
  several = any(d.between is not None for d in found)
  measured = [
    measure
    for measure in _HEADS
    if any(d.measure == measure and d.estimate.value is not None for d in found)
  ]
  ps = {"p": "p", "p, Holm": "adjusted"}
  if several:
    ps["p, trainings"] = "between"
  heads = []
  for m in measured:
    group, digits = _HEADS[m]
    heads.append(Column("difference", (m, ""), group, digits, signed=True))
    heads.append(Column("detectable", (m, "detectable"), group, digits))
    own = ps
    if m == "accuracy" and not several:
      own = ps | {"p, McNemar": "mcnemar"}
    heads += [Column(head, (m, p), group, 4) for head, p in own.items()]
  # What intervals and p values cover.
  tested = (
    "policies" if all(max(d.trainings) < 2 for d in found) else "trainings"
  )
  if tested == "trainings" and any(min(d.trainings) < 2 for d in found):
    tested = "mixed"
  sets = list(dict.fromkeys(d.dataset for d in found))
  lines: dict[tuple, dict[tuple, Any]] = collections.defaultdict(dict)
  for d in sorted(
    found,
    key=lambda d: (sets.index(d.dataset), -1 if d.budget is None else d.budget),
  ):
    at = "all ≥ 1" if d.budget is None else d.budget
    line = lines[d.dataset or "all", at, f"{d.ours} − {d.theirs}"]
    n = d.n if d.measure == measured[0] else None
    line[d.measure, ""] = Cell(*d.estimate, n=n)
    for of in ("detectable", "p", "adjusted", "between", "mcnemar"):
      line[d.measure, of] = getattr(d, of)
  return _table(
    "pairwise",
    "set, B, pair",
    heads,
    lines.items(),
    name=name,
    title=title,
    tested=_WORDS["pairwise"][tested],
  )


def _by_seed(
  name: str, title: str, found: Sequence[comparison.Difference]
) -> Table:
  """Tabulates differences on each seed; no line if there is one seed."""
  whole = [d for d in found if d.dataset is None and d.budget is None]
  seeds = sorted({seed for d in whole for seed in d.seeds})
  return _table(
    "by_seed",
    "measure, pair",
    [
      *(Column(str(seed), seed, "seed", signed=True) for seed in seeds),
      Column("together", "together", signed=True),
    ],
    (
      (
        (_HEADS[measure][0], f"{d.ours} − {d.theirs}"),
        {"together": d.estimate} | dict(zip(d.seeds, d.by_seed, strict=True)),
      )
      for measure in _HEADS
      for d in whole
      if d.measure == measure
      and d.estimate.value is not None
      and len(seeds) > 1
    ),
    name=name,
    title=title,
  )


def _training(training: Sequence[metrics.Training]) -> Table:
  def total(key: str, divisor: int = 1) -> Callable:
    return lambda run: sum(r.get(key) or 0 for r in run.records) / divisor

  return _table(
    "training",
    "run",
    [
      Column("rollouts", lambda run: len(run.records), digits=0),
      Column("minutes of rollouts", total("time/rollout", 60), digits=1),
      Column("minutes of updates", total("time/train", 60), digits=1),
      Column("failed episodes", total("rollout/failed"), digits=0),
    ],
    (((run.label,), run) for run in training),
  )


def _curves(
  rows: Sequence[Row], by_set: Mapping[str, Sequence[curves.Curve]]
) -> Table:
  """Tabulates every measure of every row at every budget."""

  def lines() -> Iterator[tuple[tuple, Any]]:
    for dataset, found in by_set.items():
      for budget in study_lib.budgets(rows):
        for curve in found:
          for p in curve.points:
            if p.budget == budget:
              at = f"{budget}{'*' * p.unseen}"
              yield (
                (dataset, at, curve.label),
                vars(p)
                | {
                  "accuracy": Cell(*p.accuracy, p.n),
                },
              )

  return _table(
    "curves",
    "set, B, row",
    [
      Column("EM", "accuracy"),
      Column("TP", "tp"),
      Column("searches", "searches", digits=2),
      Column("tokens", "tokens", digits=1),
      Column("dollars", "cost", digits=5),
    ],
    lines(),
  )


def _areas(by_set: Mapping[str, Sequence[curves.Curve]]) -> Table:
  return _table(
    "area",
    "set, row",
    [
      Column(
        "area",
        lambda c: Cell(
          c.area.value, c.area.low, c.area.high, sum(p.n for p in c.points)
        ),
        best=True,
      ),
      Column("from B", lambda c: c.points[0].budget, digits=0),
      Column("to B", lambda c: c.points[-1].budget, digits=0),
    ],
    (
      ((dataset, curve.label), curve)
      for dataset, found in by_set.items()
      for curve in found
      if curve.area.value is not None
    ),
  )


def _surfaces(study: Study) -> Table:
  """Tabulates every row at every pair of caps."""
  cells = [
    ((cell.searches, cell.tokens, found.label), cell)
    for found in study.surfaces
    for cell in found.cells
  ]
  return _table(
    "surface",
    "searches, tokens, row",
    [
      Column("EM", "accuracy", best=True, n=True),
      Column("searches", "used", digits=2),
      Column("tokens", "generated", digits=1),
      Column("no answer", "truncated"),
      Column("within", "within"),
      Column("dollars", "cost", digits=5),
    ],
    sorted(cells, key=lambda line: line[0][:2]),
  )


def _surface_areas(study: Study) -> Table:
  return _table(
    "surface_area",
    "row",
    [Column("EM", "area", best=True)],
    (
      ((found.label,), found)
      for found in study.surfaces
      if found.area.value is not None
    ),
  )
