"""Every figure of the report, drawn from what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import markupsafe

from anysearch_jax.evaluation import curves as curves_lib
from anysearch_jax.evaluation import intervals, metrics
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
)
_PRICES = {
  "searches": "mean searches",
  "tokens": "mean tokens, written and read",
  "cost": "US dollars an episode",
}


@dataclasses.dataclass(frozen=True)
class Panel:
  """Rows that are drawn together: the same colours mean the same rows.

  Attributes:
    rows: colour and label.
    curves: over the budget; sets: of each set, where there are several.
    prices: accuracy over what it took.
    hops: accuracy by the hops of the question, None where no row tells them.
  """

  title: str
  rows: Sequence[tuple[int, str]]
  curves: Sequence[markupsafe.Markup]
  sets: Sequence[markupsafe.Markup]
  prices: Sequence[markupsafe.Markup]
  hops: markupsafe.Markup | None


def panel(
  title: str,
  curves: Sequence[curves_lib.Curve],
  by_dataset: Mapping[str, Sequence[curves_lib.Curve]],
  hops: Mapping[str, Mapping[int, intervals.Estimate]],
  index: Mapping[str, int],
  *,
  name: str,
  trained: int,
) -> Panel:
  """Draws some rows.

  Args:
    title: over the panel.
    curves: of the rows, all sets together.
    by_dataset: likewise of each set; only drawn where there are several.
    hops: accuracy by hops of each row.
    index: colour of each label.
    name: unique on the page.
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
      )
    )

  sets = by_dataset if len(by_dataset) > 1 else {}
  told = {label: points for label, points in hops.items() if points}
  return Panel(
    title,
    [(index[c.label], c.label) for c in curves],
    [against(curves, *measure) for measure in _PANEL],
    [
      against(found, "accuracy", f"Accuracy, {dataset}", "exact match")
      for dataset, found in sets.items()
    ],
    [
      _price(curves, found, index, against=price, name=f"{name}-{price}")
      for price, found in study.offers(curves).items()
    ],
    _hops(told, index, name=f"{name}-hops") if told else None,
  )


def _svg(text: str) -> markupsafe.Markup:
  """Drawn by `plots`, which escapes what it is given."""
  return markupsafe.Markup(text)


def _price(
  curves: Sequence[curves_lib.Curve],
  offers: Sequence[curves_lib.Offer],
  index: Mapping[str, int],
  *,
  against: str,
  name: str,
) -> markupsafe.Markup:
  """Accuracy over a price, the Pareto front ringed."""
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


def use(counts: Mapping[int, Sequence[int]], *, name: str) -> markupsafe.Markup:
  """How many searches were made of each budget, as shares."""
  shares = [
    {k: n / sum(found) for k, n in enumerate(found) if n}
    for found in counts.values()
  ]
  return _svg(
    plots.shares(list(counts), shares, name=name, title="Searches made")
  )


def sampling(run: metrics.Training, *, name: str) -> markupsafe.Markup | None:
  """The budgets that each rollout played; None without counts of them."""
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
  """What the runs logged, one figure a quantity that any of them has."""
  starts = {_phase2(run) for run in training}
  found = []
  for key, title in HISTORIES.items():
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
