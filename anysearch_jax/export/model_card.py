"""The model card of an exported policy: its training, data and evaluations."""

from __future__ import annotations

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
from anysearch_jax.report import tables

_METHOD = """\
A search agent: it reasons, searches and answers, and each search costs one
unit of a budget that the prompt tells. Trained by GRPO under a budget
curriculum, the method of "One Policy, Any Budget: Internalizing Budget-Aware
Search via Reinforcement Learning" (AnySearch)."""


def render(
  *,
  config: Mapping[str, Any],
  provenance: Mapping[str, Any],
  base_model: str,
  licence: Mapping[str, str],
  rollout: int,
  dtype: str,
  evaluated_dtype: str = "",
  prompt: str = "",
  rows: Sequence[metrics.Row] = (),
  resamples: int = 10_000,
) -> str:
  """Returns the text of README.md, with the metadata block of the hub.

  Args:
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
    resamples: number of bootstrap resamples for TP's intervals.
  """
  c = config["curriculum"]
  rollouts = c["total_steps"] // c["steps_per_rollout"]
  parts = [
    _front_matter(base_model, licence),
    f"# {tables.escaped(config['name'])}",
    _METHOD,
    "## Training",
    _table(
      ("", ""),
      [
        ("base model", base_model or "unknown"),
        ("trained", _trained(config)),
        ("rollouts", f"{rollout} of {rollouts}"),
        (
          "a rollout",
          f"{config['questions']} questions x {config['group']} samples, "
          f"{c['steps_per_rollout']} optimizer steps",
        ),
        ("budgets", _budgets(c)),
        ("scaffold", _scaffold(c)),
        (
          "reward",
          _values(provenance.get("reward"))
          if config["reward"].get("function")
          else _reward(config["reward"]),
        ),
        ("objective", _objective(config["objective"])),
        ("optimizer", _optimizer(config["optimizer"])),
        ("sampling", _sampling(config["sampling"])),
        ("seed", str(config["seed"])),
        ("questions", _values(provenance.get("questions"))),
        ("corpus and retriever", _values(provenance.get("retriever"))),
        ("packages", _values(provenance.get("packages"))),
        *(
          (f"changed from rollout {change['rollout']} on", _changed(change))
          for change in provenance.get("changes", ())
        ),
        ("weights", dtype),
      ],
    ),
  ]
  if prompt:
    fence = "`" * (4 if "```" in prompt else 3)
    parts += ["## Prompt", f"{fence}\n{prompt}\n{fence}"]
  parts += ["## Evaluation", *(_evaluation(row, resamples) for row in rows)]
  if rows and evaluated_dtype not in ("", dtype):
    parts.append(f"Measured with the weights in {evaluated_dtype}.")
  if not rows:
    parts.append("This policy was not evaluated when it was exported.")
  parts += [
    "## Limits",
    "The policy learned with the retriever, corpus and budgets above. Others "
    "are covered by what is measured here or not at all. It repeats what "
    "passages say, right or wrong. The base model's licence applies.",
  ]
  return "\n\n".join(parts) + "\n"


def _front_matter(base_model: str, licence: Mapping[str, str]) -> str:
  data = huggingface_hub.ModelCardData(
    library_name="transformers",
    pipeline_tag="text-generation",
    tags=["anysearch", "search-agent", "reinforcement-learning", "grpo"],
    base_model=base_model if is_hub_name(base_model) else None,
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


def _changed(change: Mapping[str, Any]) -> str:
  """Lists the settings that a resumed run changed."""
  return ", ".join(
    f"{path} {old} -> {new}" for path, (old, new) in change["settings"].items()
  )


def _values(values: Mapping[str, Any] | None) -> str:
  if not values:
    return "not recorded"
  return ", ".join(f"{key} {value}" for key, value in values.items())


def _trained(config: Mapping[str, Any]) -> str:
  lora = config["lora"]
  if not lora["rank"]:
    return "every weight"
  return (
    f"LoRA, rank {lora['rank']}, alpha {lora['alpha']:g}, on "
    f"{', '.join(lora['targets'])}; merged here"
  )


def _budgets(c: Mapping[str, Any]) -> str:
  if c["fixed_budget"] >= 0:
    return f"{c['fixed_budget']} throughout"
  first = f"{c['max_budget']} down to 1 in the first {c['phase1_steps']} steps"
  second = (
    f"1 to {c['max_budget']} drawn adaptively (lambda {c['uniform_mix']:g}) in "
    f"the other {c['total_steps'] - c['phase1_steps']}"
  )
  if not c["phase1_steps"]:
    return second.replace("the other", "all")
  if c["phase1_steps"] == c["total_steps"]:
    return first.replace("the first", "all")
  return f"{first}, {second}"


def _scaffold(c: Mapping[str, Any]) -> str:
  phases = [
    name
    for name, on in (
      ("Phase I", c["phase1_scaffold"] and c["phase1_steps"]),
      (
        "Phase II",
        c["phase2_scaffold"] and c["phase1_steps"] < c["total_steps"],
      ),
    )
    if on
  ]
  return f"in {' and '.join(phases)}" if phases else "none"


def _reward(r: Mapping[str, Any]) -> str:
  gamma = {
    "adaptive": f"adaptive, at most {r['gamma_max']:g}",
    "fixed": f"{r['gamma_fixed']:g}",
    "off": "off",
  }[r["gamma_mode"]]
  without = [
    name
    for name, on in (("R_abs", r["use_abs"]), ("R_rel", r["use_rel"]))
    if not on
  ]
  return (
    f"alpha {r['alpha']:g} EM, beta {r['beta']:g} format, delta "
    f"{r['delta']:g} length, gamma (tool) {gamma}"
    + (f", without {' and '.join(without)}" if without else "")
  )


def _objective(o: Mapping[str, Any]) -> str:
  return (
    f"GRPO, clip {o['clip_low']:g} / {o['clip_high']:g}, KL "
    f"{o['kl_coefficient']:g} ({o['kl_estimator']})"
  )


def _optimizer(o: Mapping[str, Any]) -> str:
  return (
    f"AdamW, learning rate {o['learning_rate']:g}, betas {o['b1']:g} / "
    f"{o['b2']:g}, weight decay {o['weight_decay']:g}, gradient norm at most "
    f"{o['max_grad_norm'] or 'unbounded'}"
  )


def _sampling(s: Mapping[str, Any]) -> str:
  return f"temperature {s['temperature']:g}"


def _evaluation(row: metrics.Row, resamples: int) -> str:
  """Returns a table of one evaluation with a line for each budget."""
  table = row.columns
  scaffold = "with" if table.scaffold.any() else "no"
  seeds = len(columns.by_seed(table))
  tp = comparison.productivities(table, resamples=resamples)
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
    "clustered by question; TP, correct answers per search, bootstrap over "
    "questions).\n\n" + _table(head, lines)
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
