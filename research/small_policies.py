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
# The questions of a rollout, and the rollouts, on each machine.
MACHINES = {"cpu": (8, 120), "80": (32, 300)}
UNTRAINED_SUFFIX = "-untrained"
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


def get_config(preset: str = "cpu") -> aj.ExperimentConfig:
  """Returns the configuration of a machine, from the supervised policy on.

  Args:
    preset: one of `MACHINES`, and `-untrained` after it for the model as its
      package has it.
  """
  machine = preset.removesuffix(UNTRAINED_SUFFIX)
  if machine not in MACHINES:
    raise ValueError(
      f"preset: found {preset!r}, expected one of {', '.join(MACHINES)}, and "
      f"perhaps {UNTRAINED_SUFFIX} after it."
    )
  is_untrained = machine != preset
  questions, rollouts = MACHINES[machine]
  return config_lib.changed(
    small.get_config(f"smollm2-{machine}"),
    name=f"{_NAME}{preset}",
    questions=questions,
    policy="smollm2" if is_untrained else str(ROOT / "sft" / "policy"),
    data={"path": str(ROOT / "questions")},
    retrieval={"index": str(ROOT / "bm25")},
    curriculum={"total_steps": rollouts},
    optimizer={"learning_rate": 1e-4},
  )


def rows(base: aj.ExperimentConfig) -> tuple[Row, ...]:
  """Returns the rows: the model in three states, and three trainings."""
  machine = base.name.removeprefix(_NAME)
  untrained = f"research/small_policies.py:{machine}{UNTRAINED_SUFFIX}"

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
