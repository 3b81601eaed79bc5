"""Draws every figure of the report from the measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import markupsafe

from anysearch_jax.evaluation import curves as curves_lib
from anysearch_jax.evaluation import intervals, metrics
from anysearch_jax.evaluation import memory_use as memory_use_lib
from anysearch_jax.evaluation import surfaces as surfaces_lib
from anysearch_jax.evaluation import verification as verification_lib
from anysearch_jax.report import plots
from anysearch_jax.report import rows as study

HISTORIES = {
  "reward/total": "reward, total",
  "reward/em": "reward term: exact match",
  "reward/format": "reward term: format",
  "reward/length": "reward term: length",
  "reward/tool": "reward term: tool use",
  "reward/f1": "reward term: F1",
  "reward/steps": "reward of single searches, an episode's sum",
  "reward/gamma": "adaptive weight γ of the tool term",
  "rollout/searches": "searches per episode",
  "rollout/generated_tokens": "generated tokens per episode",
  "policy/entropy": "policy entropy",
  "value/loss": "loss of the critic",
  "value/explained_variance": "share of the returns' variance explained",
  "loss/kl": "KL to the reference",
  "loss/clip_fraction": "share of clipped tokens",
  "policy/engine_gap_max": "log-prob gap of engine and trainer, largest",
  "policy/advantage_share": "share of trajectories with an advantage",
  "grad_norm": "gradient norm",
  "rollout/truncated": "share of truncated episodes",
  "rollout/invalid": "share of invalid episodes",
}
_PANEL = (
  ("accuracy", "Accuracy", "exact match"),
  ("tp", "Tool productivity", "correct / searches"),
  ("searches", "Searches made", "mean searches"),
  ("tokens", "Tokens, written and read", "mean tokens"),
  ("regret", "Regret to the optimum", "accuracy missed"),
)
_PRICES = {
  "searches": "mean searches",
  "tokens": "mean tokens, written and read",
  "cost": "US dollars an episode",
}


@dataclasses.dataclass(frozen=True)
class Panel:
  """The figures of rows that are drawn together, with one colour for each row.

  Attributes:
    title: heading of the panel.
    rows: colour index and label of each row.
    curves: figures of measures against the budget.
    sets: figures of the accuracy on each dataset, if there are several.
    prices: figures of the accuracy against a price.
    hops: figure of the accuracy by hops; None if no row records them.
    checks: figures of how often what a passage says is checked.
  """

  title: str
  rows: Sequence[tuple[int, str]]
  curves: Sequence[markupsafe.Markup]
  sets: Sequence[markupsafe.Markup]
  prices: Sequence[markupsafe.Markup]
  hops: markupsafe.Markup | None
  checks: Sequence[markupsafe.Markup]


def panel(
  title: str,
  curves: Sequence[curves_lib.Curve],
  by_dataset: Mapping[str, Sequence[curves_lib.Curve]],
  hops: Mapping[str, Mapping[int, intervals.Estimate]],
  checks: Mapping[str, verification_lib.Found],
  index: Mapping[str, int],
  *,
  name: str,
  trained: int,
) -> Panel:
  """Draws the figures of some rows.

  Args:
    title: heading of the panel.
    curves: curves of the rows over all datasets.
    by_dataset: curves on each dataset; drawn only if there are several.
    hops: by label, accuracy by hops.
    checks: by label, see `verification.checked`.
    index: colour index of each label.
    name: name that is unique on the page.
    trained: the largest budget of training.
  """

  def against(
    found: Sequence[curves_lib.Curve], measure: str, title: str, label: str
  ) -> markupsafe.Markup:
    return _svg(
      plots.against_budget(
        [
          plots.Series(
            index[c.label], [(p.budget, getattr(p, measure)) for p in c.points]
          )
          for c in found
        ],
        name=f"{name}-{measure}-{title}",
        title=title,
        y_label=label,
        trained=trained,
        diagonal=measure == "searches",
        optimum=_optimum(found) if measure == "accuracy" else None,
      )
    )

  def measured(name: str) -> bool:
    return any(
      getattr(p, name).value is not None for c in curves for p in c.points
    )

  sets = by_dataset if len(by_dataset) > 1 else {}
  told = {label: points for label, points in hops.items() if points}
  return Panel(
    title,
    [(index[c.label], c.label) for c in curves],
    [
      against(curves, *measure)
      for measure in _PANEL
      if measure[0] != "regret" or measured("regret")
    ],
    [
      against(found, "accuracy", f"Accuracy, {dataset}", "exact match")
      for dataset, found in sets.items()
    ],
    [
      _price(curves, found, index, against=price, name=f"{name}-{price}")
      for price, found in study.offers(curves).items()
    ],
    _hops(told, index, name=f"{name}-hops") if told else None,
    [
      _checks(kind, by_label, index, name=f"{name}-checks-{number}")
      for number, kind in enumerate(verification_lib.KINDS)
      if (
        by_label := {c: row[kind] for c, row in checks.items() if kind in row}
      )
    ],
  )


def _optimum(curves: Sequence[curves_lib.Curve]) -> dict[int, float]:
  """Returns the best agent's accuracy by budget, of the first row that has it.

  A row's regret is that accuracy minus its own.
  """
  for curve in curves:
    found = {
      p.budget: p.accuracy.value + p.regret.value
      for p in curve.points
      if p.accuracy.value is not None and p.regret.value is not None
    }
    if found:
      return found
  return {}


def _svg(text: str) -> markupsafe.Markup:
  """Marks SVG of `plots` as safe; `plots` escapes its inputs."""
  return markupsafe.Markup(text)


def _price(
  curves: Sequence[curves_lib.Curve],
  offers: Sequence[curves_lib.Offer],
  index: Mapping[str, int],
  *,
  against: str,
  name: str,
) -> markupsafe.Markup:
  """Draws accuracy over a price, with rings around the Pareto front."""
  return _svg(
    plots.against_cost(
      [
        plots.Series(
          index[c.label],
          [
            (getattr(p, against).value, p.accuracy)
            for p in c.points
            if getattr(p, against).value is not None
          ],
        )
        for c in curves
      ],
      [(o.price, o.accuracy) for o in offers if not o.dominated],
      name=name,
      title=f"Accuracy for its {against}",
      x_label=_PRICES[against],
      y_label="exact match",
    )
  )


def _hops(
  hops: Mapping[str, Mapping[int, intervals.Estimate]],
  index: Mapping[str, int],
  *,
  name: str,
) -> markupsafe.Markup:
  return _svg(
    plots.against_budget(
      [
        plots.Series(index[label], sorted(points.items()))
        for label, points in hops.items()
      ],
      name=name,
      title="Accuracy by hops, all B ≥ 1",
      x_label="hops of the question",
      y_label="exact match",
    )
  )


def _checks(
  kind: str,
  shares: Mapping[str, Mapping[int, intervals.Estimate]],
  index: Mapping[str, int],
  *,
  name: str,
) -> markupsafe.Markup:
  return _svg(
    plots.against_budget(
      [
        plots.Series(index[label], sorted(points.items()))
        for label, points in shares.items()
      ],
      name=name,
      title=f"Checked by a search: {kind}",
      y_label="share, where a search is left",
    )
  )


def use(counts: Mapping[int, Sequence[int]], *, name: str) -> markupsafe.Markup:
  """Draws the shares of episodes by number of searches at each budget."""
  shares = [
    {k: n / sum(found) for k, n in enumerate(found) if n}
    for found in counts.values()
  ]
  return _svg(
    plots.shares(list(counts), shares, name=name, title="Searches made")
  )


def memory_use(
  found: memory_use_lib.Found, index: int, *, name: str
) -> markupsafe.Markup:
  """Draws how often the first fact is searched although it is remembered."""
  return _svg(
    plots.heat(
      {
        reliability: {b: estimate.value for b, estimate in by_budget.items()}
        for reliability, by_budget in found.items()
      },
      index,
      name=name,
      title="Remembered, but searched (%)",
      x_label="search budget B",
      y_label="memory is right",
    )
  )


def surface(
  found: surfaces_lib.Surface, index: int, *, name: str
) -> markupsafe.Markup:
  """Draws the accuracy at each pair of caps as a heat map."""
  by_tokens: dict[float, dict[int, float | None]] = {}
  for cell in found.cells:
    row = by_tokens.setdefault(cell.tokens, {})
    row[cell.searches] = cell.accuracy.value
  return _svg(
    plots.heat(
      by_tokens,
      index,
      name=name,
      title="Exact match (%)",
      x_label="searches, at most",
      y_label="generated tokens, at most",
    )
  )


def sampling(run: metrics.Training, *, name: str) -> markupsafe.Markup | None:
  """Draws the budgets that each rollout played; None without counts."""
  counts = {r["rollout"]: metrics.drawn(r) for r in run.records}
  if not any(any(found.values()) for found in counts.values()):
    return None
  return _svg(
    plots.drawn(
      counts, phase2=_phase2(run), name=name, title="questions of each budget"
    )
  )


def histories(
  training: Sequence[metrics.Training], index: Mapping[str, int]
) -> list[markupsafe.Markup]:
  """Draws a figure for each logged quantity that any of the runs has."""
  starts = {_phase2(run) for run in training}
  logged = {key for run in training for r in run.records for key in r}
  # The parts of a reward function of the user's have names of their own.
  others = {
    key: f"reward term: {key.removeprefix('reward/')}"
    for key in sorted(logged - HISTORIES.keys())
    if key.startswith("reward/")
  }
  found = []
  for key, title in (HISTORIES | others).items():
    lines = [
      (
        index[run.label],
        [r["rollout"] for r in run.records],
        [_value(r, key) for r in run.records],
      )
      for run in training
      if any(r.get(key) is not None for r in run.records)
    ]
    if lines:
      svg = plots.history(
        lines,
        phase2=next(iter(starts)) if len(starts) == 1 else None,
        name="training-" + key.replace("/", "-"),
        title=title,
      )
      found.append(_svg(svg))
  return found


def _phase2(run: metrics.Training) -> float | None:
  return next((r["rollout"] for r in run.records if r.get("phase") == 2), None)


def _value(record: Mapping[str, Any], key: str) -> float:
  value = record.get(key)
  return float("nan") if value is None else float(value)
