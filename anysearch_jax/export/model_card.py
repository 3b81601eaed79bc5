"""The model card of an exported policy: its training, data and evaluations."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import huggingface_hub

from anysearch_jax.evaluation import (
  columns,
  inference,
  measures,
  metrics,
)
from anysearch_jax.methods import systems
from anysearch_jax.report import tables

_WIDTH = 79  # Of the lines of a paragraph.
_PAPER = (
  '"One Policy, Any Budget: Internalizing Budget-Aware Search via '
  'Reinforcement Learning" (AnySearch)'
)
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
        introduction(policy.config),
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
      ("trained", trained(config)),
      ("rollouts", f"{policy.rollout} of {rollouts}"),
      (
        "a rollout",
        f"{config['questions']} questions x {config['group']} samples, "
        f"{c['steps_per_rollout']} optimizer steps",
      ),
      ("budgets", budgets(c)),
      ("scaffold", scaffold(c)),
      ("reward", reward(config, noted.get("reward", {}))),
      ("objective", objective(config["objective"])),
      ("optimizer", optimizer(config["optimizer"])),
      ("sampling", sampling(config["sampling"])),
      ("seed", str(config["seed"])),
      ("questions", values(noted.get("questions"))),
      ("corpus and retriever", values(noted.get("retriever"))),
      ("packages", values(noted.get("packages"))),
      *(
        (
          f"changed from rollout {change['rollout']} on",
          changed(change),
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
  name = algorithm(policy.config["objective"]).lower()
  data = huggingface_hub.ModelCardData(
    library_name="transformers",
    pipeline_tag="text-generation",
    tags=["anysearch", "search-agent", "reinforcement-learning", name],
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
  seeds = len(set(table.seed.tolist()))
  lines = []
  for budget, part in columns.by_budget(table).items():
    found = measures.estimates(part, ("accuracy", "searches", "tp"))
    searches, n = found["searches"].value, len(part.scored())
    lines.append(
      (
        str(budget),
        str(n),
        _interval(found["accuracy"], scale=100, digits=1),
        "-" if searches is None else f"{searches:.2f}",
        _interval(found["tp"]),
        str(len(part) - n),
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
  estimate: inference.Estimate, *, scale: float = 1, digits: int = 3
) -> str:
  def text(value: float) -> str:
    return f"{scale * value:.{digits}f}"

  value, low, high = estimate
  if value is None:
    return "-"
  if low is None or high is None:
    return text(value)
  return f"{text(value)} [{text(low)}, {text(high)}]"


def introduction(config: Mapping[str, Any]) -> str:
  """Says what kind of policy this is and which method trained it."""
  name = config["method"]["name"]
  fixed = config["curriculum"]["fixed_budget"] >= 0
  if config["reward"].get("function"):
    whose = "with a reward function of its own"
  elif name == "anysearch":
    whose = f"{'with the reward' if fixed else 'the method'} of {_PAPER}"
  else:
    system = systems.METHODS.get(name)
    label = name if system is None else system.label
    whose = f"with the reward of {label}, which {_PAPER} is compared with"
  return textwrap.fill(
    "A search agent: it reasons, searches and answers, and each search costs "
    "one unit of a budget that the prompt tells. Trained by "
    f"{algorithm(config['objective'])} "
    f"{'with a fixed budget' if fixed else 'under a budget curriculum'}, "
    f"{whose}.",
    _WIDTH,
  )


def changed(change: Mapping[str, Any]) -> str:
  """Lists the settings that a resumed run changed."""
  return ", ".join(
    f"{path} {old} -> {new}" for path, (old, new) in change["settings"].items()
  )


def values(found: Mapping[str, Any] | None) -> str:
  """Lists recorded values by name."""
  if not found:
    return "not recorded"
  return ", ".join(f"{key} {value}" for key, value in found.items())


def trained(config: Mapping[str, Any]) -> str:
  lora = config["lora"]
  if not lora["rank"]:
    return "every weight"
  return (
    f"LoRA, rank {lora['rank']}, alpha {lora['alpha']:g}, on "
    f"{', '.join(lora['targets'])}; merged here"
  )


def budgets(c: Mapping[str, Any]) -> str:
  if c["fixed_budget"] >= 0:
    return f"{c['fixed_budget']} throughout"
  if c.get("cent_levels"):
    return "cents, " + ", ".join(map(str, c["cent_levels"]))
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


def scaffold(c: Mapping[str, Any]) -> str:
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


def reward(config: Mapping[str, Any], recorded: Mapping[str, Any]) -> str:
  """Describes the reward that the run trained with.

  Args:
    config: the run's configuration.
    recorded: what the run noted of a reward function of the user's.
  """
  if config["reward"].get("function"):
    return values(recorded)
  name = config["method"]["name"]
  describe = _REWARDS.get(name)
  if describe is None:
    return f"the reward of {name}"
  own = config["reward"] if name == "anysearch" else config["method"][name]
  return describe(own)


def _anysearch(r: Mapping[str, Any]) -> str:
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
    + (f", {r['charge']:g} less for each search" if r.get("charge") else "")
  )


def _search_r1(r: Mapping[str, Any]) -> str:
  if not r["format_variant"]:
    return "EM"
  found = (
    f", {r['retrieval']:g} more if a passage shown has an accepted answer"
    if r["retrieval"]
    else ""
  )
  return (
    f"EM, {r['structure']:g} less in a malformed response; otherwise "
    f"{r['structure']:g} for a well-formed response{found}, {r['final']:g} for "
    "an answer in a malformed one"
  )


def _stepsearch(r: Mapping[str, Any]) -> str:
  return (
    f"F1 + {r['key_weight']:g} search keys, {r['missing']:g} without an "
    f"answer; for each search {r['step_scale']:g} (gain - redundancy)"
  )


def _zerosearch(r: Mapping[str, Any]) -> str:
  return "F1"


def _otc(r: Mapping[str, Any]) -> str:
  return (
    f"alpha {r['alpha']:g} EM x tool productivity ({r['form']} form, c "
    f"{r['c']:g})"
  )


def _ikea(r: Mapping[str, Any]) -> str:
  bonus = ", ".join(f"{value:g}" for value in r["kb"])
  return (
    f"{r['right']:g} for a right answer plus {bonus} after 0, 1, 2, ... "
    f"searches; {r['searched_wrong']:g} for a wrong one after a search; "
    f"{r['bad_format']:g} for a malformed response"
  )


def _research(r: Mapping[str, Any]) -> str:
  return (
    f"F1, {r['wrong']:g} if that is 0; 0 for a response that is malformed or "
    "has no boxed answer"
  )


def _autorefine(r: Mapping[str, Any]) -> str:
  return (
    f"F1; if that is 0, {r['refined']:g} for a refinement that holds an "
    "accepted answer"
  )


def _mt_grpo(r: Mapping[str, Any]) -> str:
  return (
    f"{r['exact']:g} EM + {r['contained']:g} for an answer that holds an "
    f"accepted one + {r['well_formed']:g} format; for each search "
    f"{r['executed']:g}, {r['found']:g} more if its passages hold an accepted "
    "answer"
  )


def _r1_searcher(r: Mapping[str, Any]) -> str:
  return (
    f"in the first {r['stage_one']:g} of the training {r['answer']:g} for an "
    f"answer that holds an accepted one and {-r['answer']:g} otherwise, "
    f"{r['formed']:g} format, {r['searched']:g} more with a search; then F1, "
    f"{r['malformed']:g} less in a malformed response"
  )


def _ssrl(r: Mapping[str, Any]) -> str:
  return f"{r['right']:g} EM + {r['formed']:g} format"


def _beta_grpo(r: Mapping[str, Any]) -> str:
  return f"EM, 0 if a token of a query had a probability below {r['beta']:g}"


def _hiprag(r: Mapping[str, Any]) -> str:
  return (
    f"1 for an answer that holds an accepted one, {r['formed']:g} less in a "
    f"malformed response, up to {r['process']:g} more for the share of steps "
    f"that searched if and only if they had to; {r['formed']:g} for a wrong "
    "answer in a well-formed response"
  )


_REWARDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
  "anysearch": _anysearch,
  "search_r1": _search_r1,
  "stepsearch": _stepsearch,
  "zerosearch": _zerosearch,
  "otc": _otc,
  "ikea": _ikea,
  "research": _research,
  "autorefine": _autorefine,
  "mt_grpo": _mt_grpo,
  "r1_searcher": _r1_searcher,
  "ssrl": _ssrl,
  "beta_grpo": _beta_grpo,
  "hiprag": _hiprag,
}


def algorithm(o: Mapping[str, Any]) -> str:
  """Returns the name of the training algorithm."""
  return "PPO" if o["advantage"] == "gae" else "GRPO"


def objective(o: Mapping[str, Any]) -> str:
  return (
    f"{algorithm(o)}, clip {o['clip_low']:g} / {o['clip_high']:g}, KL "
    f"{o['kl_coefficient']:g} ({o['kl_estimator']})"
  )


def optimizer(o: Mapping[str, Any]) -> str:
  return (
    f"AdamW, learning rate {o['learning_rate']:g}, betas {o['b1']:g} / "
    f"{o['b2']:g}, weight decay {o['weight_decay']:g}, gradient norm at most "
    f"{o['max_grad_norm'] or 'unbounded'}"
  )


def sampling(s: Mapping[str, Any]) -> str:
  return f"temperature {s['temperature']:g}"
