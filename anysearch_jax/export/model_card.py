"""The model card of an exported policy: its training, data and evaluations.

Its text is in model_card.jinja; what the settings mean is what they say of
themselves (`config/settings`).
"""

from __future__ import annotations

import pathlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import huggingface_hub
import jinja2

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.evaluation import inference, metrics
from anysearch_jax.methods import systems
from anysearch_jax.report import tables

_WIDTH = 79  # Of the lines of a paragraph.
_PAPER = (
  '"One Policy, Any Budget: Internalizing Budget-Aware Search via '
  'Reinforcement Learning" (AnySearch)'
)


class Exported(NamedTuple):
  """The facts that the card states about an exported policy.

  Attributes:
    config: the run's resolved configuration.
    provenance: the run's records: `questions`, `retriever`, `own`, `packages`,
      each a mapping, and `changes`, a list; each may be missing.
    base_model: name of the model that training started from, "" if unknown.
    licence: licence of that model, as returned by `hf_export.licence`.
    rollout: number of rollouts trained.
    dtype: type of the exported weights.
    evaluated_dtype: type of the evaluated weights, "" for the same.
    prompt: an example prompt, as the policy reads it.
    rows: evaluations of exactly this policy.
  """

  config: config_lib.ExperimentConfig
  provenance: Mapping[str, Any]
  base_model: str
  licence: Mapping[str, str]
  rollout: int
  dtype: str
  evaluated_dtype: str = ""
  prompt: str = ""
  rows: Sequence[metrics.Row] = ()


def render(policy: Exported) -> str:
  """Returns the text of README.md, with the metadata block of the hub."""
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
    autoescape=False,  # Texts are escaped for Markdown.
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters["escaped"] = tables.escaped
  return environment.get_template("model_card.jinja").render(
    policy=policy,
    header=_header(policy),
    introduction=_introduction(policy.config),
    settings=list(_settings(policy.config)),
    fence="`" * (1 + max([2, *map(len, re.findall("`+", policy.prompt))])),
    rows=[_evaluation(row) for row in policy.rows],
  )


def _header(policy: Exported) -> str:
  """Returns the hub's metadata as YAML."""
  name = _algorithm(policy.config).lower()
  data = huggingface_hub.ModelCardData(
    library_name="transformers",
    pipeline_tag="text-generation",
    tags=["anysearch", "search-agent", "reinforcement-learning", name],
    base_model=policy.base_model if is_hub_name(policy.base_model) else None,
    license=policy.licence.get("license"),
    license_name=policy.licence.get("license_name"),
    license_link=policy.licence.get("license_link"),
  )
  return str(data.to_yaml())


def is_hub_name(name: str) -> bool:
  """Whether the hub accepts a name as `base_model`: `owner/name`, no path."""
  try:
    huggingface_hub.utils.validate_repo_id(name)
  except huggingface_hub.errors.HFValidationError:
    return False
  return "/" in name


def _algorithm(config: config_lib.ExperimentConfig) -> str:
  return "PPO" if config.objective.advantage == "gae" else "GRPO"


def _introduction(config: config_lib.ExperimentConfig) -> str:
  """Says what kind of policy this is and which method trained it."""
  name = config.method.name
  fixed = config.curriculum.fixed_budget >= 0
  if config.reward.function:
    method = "with a reward function of its own"
  elif name == "anysearch":
    method = f"{'with the reward' if fixed else 'the method'} of {_PAPER}"
  else:
    system = systems.METHODS.get(name)
    label = tables.escaped(name) if system is None else system.label
    method = f"with the reward of {label}, which {_PAPER} is compared with"
  return textwrap.fill(
    "A search agent: it reasons, searches and answers, and each search costs "
    "one unit of a budget that the prompt tells. Trained by "
    f"{_algorithm(config)} "
    f"{'with a fixed budget' if fixed else 'under a budget curriculum'}, "
    f"{method}.",
    _WIDTH,
  )


def _settings(
  config: config_lib.ExperimentConfig,
) -> Iterator[tuple[str, str, str]]:
  """Yields name, value and meaning of each setting that affects learning."""
  names = ("objective", "optimizer", "sampling", "curriculum")
  groups = [(name, getattr(config, name)) for name in names]
  system = systems.METHODS.get(config.method.name)
  if system and system.reward and not config.reward.function:
    constants = system.constants_of(config)
    if constants is config:  # The paper's reward gets the whole configuration.
      constants = config.reward
    groups.insert(0, ("reward", constants))
  if options := config.method.options:
    yield "method.options", ", ".join(options), "Options of the system."
  for name, group in groups:
    for setting in config_settings.listed(group, name):
      kind = setting.meta and setting.meta.kind
      value = setting.value
      is_set = value not in ("", ())
      if kind is config_settings.Kind.LEARNING and is_set:
        text = f"{value:g}" if isinstance(value, float) else str(value)
        yield setting.path, text, setting.sentence


def _evaluation(row: metrics.Row) -> dict[str, Any]:
  """Returns the values of a table of the template, a line for each budget."""
  table = row.columns
  lines = []
  for budget, measured in row.by_budget.items():
    # The card shows the mean number of searches without its interval.
    searches = measured.searches._replace(low=None, high=None)
    lines.append(
      (
        str(budget),
        str(measured.n),
        _interval(measured.accuracy, scale=100, digits=1),
        _interval(searches, digits=2),
        _interval(measured.tp),
        str(measured.failed),
      )
    )
  return {
    "label": row.label,
    "scaffold": "with" if table.scaffold.any() else "no",
    "seeds": len(set(table.seed.tolist())),
    "lines": lines,
  }


def _interval(
  estimate: inference.Estimate, *, scale: float = 1, digits: int = 3
) -> str:
  """Formats an estimate, with its interval if it has one; "-" if empty."""
  texts = [f"{scale * x:.{digits}f}" for x in estimate if x is not None]
  if not texts:
    return "-"
  if len(texts) < 3:
    return texts[0]
  value, low, high = texts
  return f"{value} [{low}, {high}]"
