"""The compared systems in the generated world, at equal steps.

    python -m launch.study --study=methods --seeds=1
    python -m launch.study --study=methods --seeds=3 --rows=anysearch,search_r1

Each row is trained with its file in configs/methods/ from the quickstart's warm
start, with the same number of steps and episodes. Search-o1 and BATS are not
trained: they are evaluated with the warm start, and again with the policy that
Search-R1 trained.
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs.study_rows import UNTRAINED, Row

# ZeroSearch simulates its search engine only in training.
_REAL = ("retrieval.simulated=",)


def rows(base: config_lib.ExperimentConfig) -> tuple[Row, ...]:
  """Returns all rows, the paper's own system first; `base` is ignored."""
  del base
  return (
    _row("anysearch", "AnySearch"),
    _row("search_r1", "Search-R1 (GRPO)"),
    _row("search_r1_ppo", "Search-R1 (PPO)"),
    _row("stepsearch", "StepSearch"),
    _row("zerosearch", "ZeroSearch", evaluation=_REAL),
    _row("otc", "OTC-PO"),
    _row("ikea", "IKEA"),
    _row("warm_start", "Warm start", "search_r1", UNTRAINED),
    _row("search_o1", "Search-o1", "search_o1", UNTRAINED),
    _row("bats", "BATS", "bats", UNTRAINED),
    _row("search_o1_r1", "Search-o1 on Search-R1", "search_o1", "search_r1"),
    _row("bats_r1", "BATS on Search-R1", "bats", "search_r1"),
  )


def _row(
  name: str,
  label: str,
  method: str = "",
  policy_of: str = "",
  evaluation: tuple[str, ...] = (),
) -> Row:
  return Row(
    name,
    label,
    "methods",
    evaluation=evaluation,
    config=f"configs/methods/{method or name}.py",
    policy_of=policy_of,
  )
