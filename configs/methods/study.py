"""The compared systems in the generated world, at equal steps.

    python -m launch.study --study=methods --seeds=1
    python -m launch.study --study=methods --seeds=3 --rows=anysearch,search_r1

Each row is trained by its file in configs/methods/ from the quickstart's warm
start, with as many steps and episodes as the others. Search-o1 and BATS are not
trained: they play the warm start, and again the policy that Search-R1 trained.
Half the quickstart's learning rate: at its own, trainings with a relative tool
reward differ more by their seed than systems do (docs/ablations.md).
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs.study_rows import UNTRAINED, Row

_RATE = 2e-4
# ZeroSearch's search engine is simulated in training only.
_REAL = ("retrieval.simulated=",)


def rows(base: config_lib.ExperimentConfig) -> tuple[Row, ...]:
  """All rows, the paper's own system first; `base` is not looked at."""
  del base
  return (
    _row("anysearch", "AnySearch"),
    _row("search_r1", "Search-R1 (GRPO)"),
    _row("search_r1_ppo", "Search-R1 (PPO)", critic=10 * _RATE),
    _row("stepsearch", "StepSearch", critic=_RATE),
    _row("zerosearch", "ZeroSearch", evaluation=_REAL),
    _row("otc", "OTC-PO"),
    _row("ikea", "IKEA"),
    _played("warm_start", "Warm start", "search_r1", UNTRAINED),
    _played("search_o1", "Search-o1", "search_o1", UNTRAINED),
    _played("bats", "BATS", "bats", UNTRAINED),
    _played("search_o1_r1", "Search-o1 on Search-R1", "search_o1", "search_r1"),
    _played("bats_r1", "BATS on Search-R1", "bats", "search_r1"),
  )


def _row(
  name: str,
  label: str,
  *,
  critic: float = 0.0,
  evaluation: tuple[str, ...] = (),
) -> Row:
  overrides = (f"optimizer.learning_rate={_RATE}",)
  if critic:
    overrides += (f"critic.learning_rate={critic}",)
  return Row(
    name, label, "methods", overrides, evaluation, f"configs/methods/{name}.py"
  )


def _played(name: str, label: str, method: str, policy_of: str) -> Row:
  return Row(
    name,
    label,
    "methods",
    config=f"configs/methods/{method}.py",
    policy_of=policy_of,
  )
