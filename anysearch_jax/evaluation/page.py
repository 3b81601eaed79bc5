"""The report's page: figures, trajectories and the template around them."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import markupsafe

from anysearch_jax.evaluation import (
  intervals,
  metrics,
  plots,
  trajectories,
)

HISTORIES = {
  "reward/total": "reward, total",
  "reward/em": "reward term: exact match",
  "reward/format": "reward term: format",
  "reward/length": "reward term: length",
  "reward/tool": "reward term: tool use",
  "reward/gamma": "adaptive weight γ of the tool term",
  "loss/kl": "KL to the reference",
  "policy/entropy": "policy entropy",
  "rollout/generated_tokens": "generated tokens per episode",
  "rollout/searches": "searches per episode",
}


def render(
  data: Mapping[str, Any],
  rows: Sequence[metrics.Row],
  controls: Sequence[str],
  training: Sequence[metrics.Training],
  *,
  title: str,
) -> str:
  """One HTML page that needs nothing but itself.

  Args:
    data: what `report.build` returned for the other arguments.
  """
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters |= {
    "fixed": fixed,
    "signed": lambda x, digits=3: fixed(x, digits, sign="+"),
    "glyph": plots.glyph,
    "authored": trajectories.authored,
  }
  figures = {
    name: markupsafe.Markup(svg)
    for name, svg in {
      **_budget_figures(data),
      **_training_figures(data, training),
    }.items()
  }
  chosen = trajectories.choose(rows, controls, trained=data["trained_budget"])
  return environment.get_template("template.html").render(
    data=data,
    title=title,
    figures=figures,
    choices=chosen,
    series=plots.SERIES,
  )


def fixed(value: float | None, digits: int = 3, *, sign: str = "") -> str:
  """A number for a table; a dash where it is not defined."""
  if value is None:
    return "–"
  return f"{value:{sign}.{digits}f}".replace("-", "−")


def _budget_figures(data: Mapping[str, Any]) -> dict[str, str]:
  def series(value: str, interval: str = "") -> list[plots.Series]:
    return [
      plots.Series(
        row["index"],
        [
          (
            int(budget),
            intervals.Estimate(
              cell[value], *(cell[interval] if interval else (None, None))
            ),
          )
          for budget, cell in row["cells"].items()
        ],
      )
      for row in data["rows"]
    ]

  def against_cost(row: Mapping[str, Any]) -> plots.Series:
    return plots.Series(
      row["index"],
      [
        (cell["searches"], intervals.Estimate(cell["accuracy"], None, None))
        for cell in row["cells"].values()
        if cell["n"]
      ],
    )

  trained = data["trained_budget"]
  return {
    "accuracy": plots.against_budget(
      series("accuracy", "accuracy_interval"),
      name="accuracy",
      title="Accuracy",
      y_label="exact match",
      trained=trained,
    ),
    "searches": plots.against_budget(
      series("searches"),
      name="searches",
      title="Searches made",
      y_label="mean searches",
      trained=trained,
      diagonal=True,
    ),
    "productivity": plots.against_budget(
      series("tp", "tp_interval"),
      name="productivity",
      title="Tool productivity",
      y_label="correct / searches",
      trained=trained,
    ),
    "cost": plots.against_searches(
      [against_cost(row) for row in data["rows"]],
      name="cost",
      title="Accuracy for the searches it took",
      y_label="exact match",
    ),
  }


def _training_figures(
  data: Mapping[str, Any], training: Sequence[metrics.Training]
) -> dict[str, str]:
  figures = {}
  starts = {run.label: _phase2(run) for run in training}
  for number, run in enumerate(training):
    told = [r for r in run.records if "curriculum/p1" in r]
    budgets = [
      b for b in range(1, 100) if any(f"curriculum/p{b}" in r for r in told)
    ]
    if told:
      figures[f"training-sampling-{number}"] = plots.sampling(
        [r["rollout"] for r in told],
        [[_value(r, f"curriculum/p{b}") for r in told] for b in budgets],
        phase2=starts[run.label],
        name=f"sampling-{number}",
        title="sampling probability",
      )
  phase2 = (
    None if len(set(starts.values())) != 1 else next(iter(starts.values()))
  )
  for key, title in HISTORIES.items():
    lines = [
      (
        described["index"],
        [r["rollout"] for r in run.records],
        [_value(r, key) for r in run.records],
      )
      for described, run in zip(data["training"], training, strict=True)
      if any(key in r for r in run.records)
    ]
    if lines:
      name = "training-" + key.replace("/", "-")
      figures[name] = plots.history(
        lines,
        phase2=phase2,
        name=name,
        title=title,
      )
  return figures


def _phase2(run: metrics.Training) -> float | None:
  return next((r["rollout"] for r in run.records if r.get("phase") == 2), None)


def _value(record: Mapping[str, Any], key: str) -> float:
  value = record.get(key)
  return float("nan") if value is None else float(value)
