"""The model card of an exported policy: its training, data and evaluations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import huggingface_hub

from anysearch_jax.evaluation import (
  columns,
  comparison,
  intervals,
  measures,
  metrics,
)
from anysearch_jax.export import settings_text
from anysearch_jax.report import tables

_LIMITS = (
  "The policy learned with the retriever, corpus and budgets above. Others "
  "are covered by what is measured here or not at all. It repeats what "
  "passages say, right or wrong. The base model's licence applies."
)


@dataclasses.dataclass(frozen=True)
class Exported:
  """What the card says of an exported policy.

  Attributes:
    config: the run's resolved configuration, as nested plain values.
    provenance: the run's records: `questions`, `retriever`, `reward`,
      `packages`, each a mapping, and `changes`, a list; each may be missing.
    base_model: name of the model that training started from, "" if unknown.
    licence: licence of that model, as returned by `hf_export.licence`.
    rollout: number of rollouts trained.
    dtype: type of the exported weights.
    evaluated_dtype: type of the evaluated weights, "" for the same.
    prompt: an example prompt, as the policy reads it.
    rows: evaluations of exactly this policy.
  """

  config: Mapping[str, Any]
  provenance: Mapping[str, Any]
  base_model: str
  licence: Mapping[str, str]
  rollout: int
  dtype: str
  evaluated_dtype: str = ""
  prompt: str = ""
  rows: Sequence[metrics.Row] = ()


def render(policy: Exported) -> str:
  """Returns the text of README.md, with the metadata block of the hub.

  Args:
    policy: what the card says.
  """
  return (
    "\n\n".join(
      [
        _front_matter(policy),
        f"# {tables.escaped(policy.config['name'])}",
        settings_text.introduction(policy.config),
        "## Training",
        _training(policy),
        *_prompt(policy.prompt),
        "## Evaluation",
        *_evaluations(policy),
        "## Limits",
        _LIMITS,
      ]
    )
    + "\n"
  )


def _training(policy: Exported) -> str:
  """Returns the table of how the policy was trained."""
  config, noted = policy.config, policy.provenance
  c = config["curriculum"]
  rollouts = c["total_steps"] // c["steps_per_rollout"]
  return _table(
    ("", ""),
    [
      ("base model", policy.base_model or "unknown"),
      ("trained", settings_text.trained(config)),
      ("rollouts", f"{policy.rollout} of {rollouts}"),
      (
        "a rollout",
        f"{config['questions']} questions x {config['group']} samples, "
        f"{c['steps_per_rollout']} optimizer steps",
      ),
      ("budgets", settings_text.budgets(c)),
      ("scaffold", settings_text.scaffold(c)),
      ("reward", settings_text.reward(config, noted.get("reward", {}))),
      ("objective", settings_text.objective(config["objective"])),
      ("optimizer", settings_text.optimizer(config["optimizer"])),
      ("sampling", settings_text.sampling(config["sampling"])),
      ("seed", str(config["seed"])),
      ("questions", settings_text.values(noted.get("questions"))),
      ("corpus and retriever", settings_text.values(noted.get("retriever"))),
      ("packages", settings_text.values(noted.get("packages"))),
      *(
        (
          f"changed from rollout {change['rollout']} on",
          settings_text.changed(change),
        )
        for change in noted.get("changes", ())
      ),
      ("weights", policy.dtype),
    ],
  )


def _prompt(prompt: str) -> list[str]:
  """Returns the section with an example prompt, if there is one."""
  if not prompt:
    return []
  fence = "`" * (4 if "```" in prompt else 3)
  return ["## Prompt", f"{fence}\n{prompt}\n{fence}"]


def _evaluations(policy: Exported) -> list[str]:
  """Returns the paragraphs of the section on evaluations."""
  if not policy.rows:
    return ["This policy was not evaluated when it was exported."]
  parts = [_evaluation(row) for row in policy.rows]
  if policy.evaluated_dtype not in ("", policy.dtype):
    parts.append(f"Measured with the weights in {policy.evaluated_dtype}.")
  return parts


def _front_matter(policy: Exported) -> str:
  licence = policy.licence
  algorithm = settings_text.algorithm(policy.config["objective"]).lower()
  data = huggingface_hub.ModelCardData(
    library_name="transformers",
    pipeline_tag="text-generation",
    tags=["anysearch", "search-agent", "reinforcement-learning", algorithm],
    base_model=policy.base_model if is_hub_name(policy.base_model) else None,
    license=licence.get("license"),
    license_name=licence.get("license_name"),
    license_link=licence.get("license_link"),
  )
  return f"---\n{data.to_yaml()}\n---"


def is_hub_name(name: str) -> bool:
  """Whether the hub accepts a name as `base_model`: `owner/name`, no path."""
  try:
    huggingface_hub.utils.validate_repo_id(name)
  except huggingface_hub.errors.HFValidationError:
    return False
  return "/" in name


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(tables.escaped, cells))} |"

  return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def _evaluation(row: metrics.Row) -> str:
  """Returns a table of one evaluation with a line for each budget."""
  table = row.columns
  scaffold = "with" if table.scaffold.any() else "no"
  seeds = len(columns.by_seed(table))
  tp = comparison.productivities(table)
  lines = []
  for budget, part in columns.by_budget(table).items():
    cell = metrics.cell(part)
    accuracy = measures.estimates(part, ("accuracy",))["accuracy"]
    lines.append(
      (
        str(budget),
        str(cell.n),
        _interval(accuracy, scale=100, digits=1),
        "-" if cell.searches is None else f"{cell.searches:.2f}",
        _interval(tp.get(budget, intervals.Estimate(None, None, None))),
        str(cell.failed),
      )
    )
  head = ("budget", "n", "exact match, %", "searches", "TP", "failed")
  return (
    f"**{tables.escaped(row.label)}**: {scaffold} scaffold, {seeds} "
    f"seed{'s' if seeds > 1 else ''}; 95% intervals in brackets (Wilson, "
    "clustered by question; TP, correct answers per search, Student's).\n\n"
    + _table(head, lines)
  )


def _interval(
  estimate: intervals.Estimate, *, scale: float = 1, digits: int = 3
) -> str:
  def text(value: float) -> str:
    return f"{scale * value:.{digits}f}"

  value, low, high = estimate
  if value is None:
    return "-"
  if low is None or high is None:
    return text(value)
  return f"{text(value)} [{text(low)}, {text(high)}]"
