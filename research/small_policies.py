"""A real language model: its configuration, the rows of its study, its claims.

`python -m research.small_walk` makes the policy that the trainings begin with,
and runs the study. All rows are asked questions that none was trained on.
"""

from __future__ import annotations

import pathlib

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from anysearch_jax.configs import small
from research import ablations
from research.claims import UNTRAINED, Claim, Row

TITLE = "A real language model"
ROOT = pathlib.Path("runs/small")
UNTRAINED_SUFFIX = "-untrained"
# The questions of a rollout, and the rollouts, on each machine.
_SIZES = {"cpu": (8, 40), "80": (32, 300)}
PRESETS = tuple(
  preset for preset in small.PRESETS if preset.rsplit("-", 1)[1] in _SIZES
)
_NAME = "small-policies-"
# Rows that evaluate the model as its package has it.
_SHORT_PROMPTS = "episode.prompts=documents_short"
_PLAIN = "episode.prompts=plain_retrieval"
CLAIMS = {
  "A real language model": (
    Claim("Training by reward adds accuracy", "priced", "sft", "accuracy"),
    Claim("AnySearch is above its start", "anysearch", "sft", "accuracy"),
    Claim("Priced is above AnySearch", "priced", "anysearch", "accuracy"),
    Claim(
      "Without the tool reward there are more searches",
      "no_tool_batch",
      "anysearch",
      "searches",
    ),
  )
}


def get_config(preset: str) -> aj.ExperimentConfig:
  """Returns the configuration of a model, from its supervised policy on.

  Args:
    preset: one of `PRESETS`, a model and a machine, and `-untrained` after it
      for the model before it was trained. SmolLM2 is that of its package, Qwen
      the folder that configs/small.py names.
  """
  trained = preset.removesuffix(UNTRAINED_SUFFIX)
  if trained not in PRESETS:
    raise ValueError(
      f"preset: found {preset!r}, expected one of {', '.join(PRESETS)}, and "
      f"perhaps {UNTRAINED_SUFFIX} after it."
    )
  base = small.get_config(trained)
  model, machine = trained.rsplit("-", 1)
  questions, rollouts = _SIZES[machine]
  untrained_policy = "smollm2" if model == "smollm2" else base.policy
  is_untrained = trained != preset
  return config_lib.changed(
    base,
    name=f"{_NAME}{preset}",
    questions=questions,
    policy=untrained_policy if is_untrained else str(ROOT / "sft" / "policy"),
    data={"path": str(ROOT / "questions")},
    retrieval={"index": str(ROOT / "bm25")},
    curriculum={"total_steps": rollouts},
    optimizer={"learning_rate": 1e-4},
  )


def rows(base: aj.ExperimentConfig) -> tuple[Row, ...]:
  """Returns the rows: the model in three states, and three trainings."""
  preset = base.name.removeprefix(_NAME)
  untrained = f"research/small_policies.py:{preset}{UNTRAINED_SUFFIX}"

  def as_it_is(name: str, label: str, *evaluation: str) -> Row:
    return Row(
      name,
      label,
      "start",
      config=untrained,
      evaluation=evaluation,
      policy_of=UNTRAINED,
    )

  return (
    as_it_is("untrained", "Untrained"),
    as_it_is("short_prompts", "Untrained, short prompts", _SHORT_PROMPTS),
    as_it_is("plain", "Plain retrieval", _PLAIN),
    Row("sft", "Supervised", "start", policy_of=UNTRAINED),
    Row("anysearch", "AnySearch", "trained"),
    Row("priced", "Priced", "trained", ablations.PRICED),
    Row(
      "no_tool_batch",
      "No tool reward, batch",
      "trained",
      ("reward.gamma_mode=off", "objective.normalize=batch"),
    ),
  )
