"""The compared systems in the generated world, at equal steps.

    python -m research.study --study=methods --seeds=1
    python -m research.study --study=methods --rows=anysearch,search_r1

Each row is trained as configs/methods.py or research/methods/configs.py has it,
from the quickstart's warm start, with the same number of steps and episodes.
Search-o1, BATS and BAVT are
not trained: they are evaluated with the warm start, the first two again with
the policy that Search-R1 trained. Budgets that are fixed are the largest, 8;
`search_r1_5` has the quickstart's. The rows `search_r1_format` and
`search_r1_phase1` give Search-R1 what AnySearch has besides its reward.
"""

from __future__ import annotations

import anysearch_jax as aj
from research import ablations, methods
from research.claims import UNTRAINED, Row, above

TITLE = "The compared systems, row by row"
# ZeroSearch and SSRL simulate their search engine only in training.
_REAL, _SIMULATED = ("retrieval.simulated=",), ("zerosearch", "ssrl")
_FORMAT = ("method.options=format_variant=true",)
_SAVERS = (
  ("otc", "OTC-PO"),
  ("ikea", "IKEA"),
  ("saas", "SAAS"),
  ("slimsearcher", "SlimSearcher"),
)
_UNTRAINED = ("search_o1", "bats")
_RIVALS = (
  ("search_r1", "Search-R1 (GRPO)"),
  ("search_r1_ppo", "Search-R1 (PPO)"),
  ("stepsearch", "StepSearch"),
  ("zerosearch", "ZeroSearch"),
  *_SAVERS,
  ("research", "ReSearch"),
  ("autorefine", "AutoRefine"),
  ("mt_grpo", "MT-GRPO"),
  ("r1_searcher", "R1-Searcher"),
  ("ssrl", "SSRL"),
  ("hiprag", "HiPRAG"),
  ("beta_grpo", "beta-GRPO"),
  ("autosearch", "AutoSearch"),
  ("igpo", "IGPO"),
  ("search_o1", "Search-o1"),
  ("bats", "BATS"),
)
_BRPO = methods.method_name("brpo")
# By family; Holm's correction is within a family.
CLAIMS = {
  "AnySearch and its rivals": tuple(
    claim
    for name, label in _RIVALS
    for claim in above("AnySearch", "anysearch", name, label)
  ),
  "The priced reward and its rivals": tuple(
    claim
    for name, label in (("anysearch", "AnySearch"), *_RIVALS[:1], *_SAVERS)
    for claim in above("The priced reward", "priced", name, label)
  ),
}


def rows(base: aj.ExperimentConfig) -> tuple[Row, ...]:
  """Returns all rows, the paper's own system first."""
  played = "search_r1_world" if base.data.source == "world" else "search_r1"
  phase1 = f"curriculum.phase1_steps={base.curriculum.phase1_steps}"
  return (
    _row("anysearch", "AnySearch"),
    _row("priced", "Priced", "anysearch", overrides=ablations.PRICED),
    _row("search_r1", "Search-R1 (GRPO)"),
    _row(
      "search_r1_format", "Search-R1 + format", "search_r1", overrides=_FORMAT
    ),
    _row(
      "search_r1_phase1",
      "Search-R1 + Phase I",
      "search_r1",
      overrides=(phase1, "curriculum.fixed_budget=-1"),
    ),
    _row(
      "search_r1_5",
      "Search-R1, B = 5",
      "search_r1",
      overrides=("curriculum.fixed_budget=5",),
    ),
    *(
      _row(name, label, evaluation=_REAL if name in _SIMULATED else ())
      for name, label in _RIVALS
      if name not in ("search_r1", *_UNTRAINED)
    ),
    _row(
      "search_r1_budgets",
      "Search-R1, all budgets (BRPO)",
      "search_r1",
      overrides=(
        f"method.name={_BRPO}",
        f"episode.prompts={_BRPO}#{played}",
      ),
    ),
    _row("warm_start", "Warm start", "search_r1", UNTRAINED),
    _row("search_o1", "Search-o1", policy_of=UNTRAINED),
    _row("bats", "BATS", policy_of=UNTRAINED),
    _row("bavt", "BAVT", policy_of=UNTRAINED),
    _row("search_o1_r1", "Search-o1 on Search-R1", "search_o1", "search_r1"),
    _row("bats_r1", "BATS on Search-R1", "bats", "search_r1"),
  )


def _row(
  name: str,
  label: str,
  method: str = "",
  policy_of: str = "",
  evaluation: tuple[str, ...] = (),
  overrides: tuple[str, ...] = (),
) -> Row:
  return Row(
    name,
    label,
    "methods",
    overrides=overrides,
    evaluation=evaluation,
    config=f"{_configs(method or name)}:{method or name}",
    policy_of=policy_of,
  )


def _configs(system: str) -> str:
  """Returns the file that has the configuration of a system."""
  is_plug_in = system in methods.COMPARED
  return f"{'research/methods/configs' if is_plug_in else 'configs/methods'}.py"
