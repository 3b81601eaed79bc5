"""What the rows of configs/ablations.py are to decide, by family."""

from __future__ import annotations

from anysearch_jax.report.evidence_tables import Claim

_THREE = (
  ("anysearch", "AnySearch"),
  ("priced", "Priced"),
  ("no_tool", "No tool reward"),
)
_TIGHT, _AMPLE = (1, 2, 3), (6, 7, 8)
# By family; Holm's correction is within a family.
CLAIMS = {
  "The paper's orderings": (
    *(
      Claim(f"AnySearch is above {label}", "anysearch", name, measure)
      for name, label in (
        ("gamma_max", "fixed gamma = max"),
        ("gamma_half", "fixed gamma = max / 2"),
        ("no_tool", "no tool reward"),
        ("no_abs", "no R_abs"),
        ("no_rel", "no R_rel"),
      )
      for measure in ("accuracy", "tp")
    ),
    Claim(
      "A fixed gamma at its half is above its maximum",
      "gamma_half",
      "gamma_max",
      "accuracy",
    ),
    Claim(
      "Without the tool reward there are more searches",
      "no_tool",
      "anysearch",
      "searches",
    ),
    *(
      Claim(f"AnySearch is above {label}", "anysearch", name, "accuracy")
      for name, label in (
        ("full_scaffold", "the scaffold kept in Phase II"),
        ("no_scaffold", "no scaffold"),
        ("only_scaffold", "the scaffold without training"),
        ("phase1_only", "Phase I alone"),
        ("phase2_only", "Phase II alone"),
        ("no_format", "no format reward"),
      )
    ),
    Claim(
      "lambda = 0 loses at large budgets",
      "anysearch",
      "lambda_0",
      "accuracy",
      _AMPLE,
    ),
    Claim(
      "lambda = 1 loses at small budgets",
      "anysearch",
      "lambda_1",
      "accuracy",
      _TIGHT,
    ),
  ),
  # docs/objective.md
  "What the theory of the price says": (
    Claim(
      "Dividing by the group's deviation costs accuracy at large budgets",
      "batch_anysearch",
      "anysearch",
      "accuracy",
      _AMPLE,
    ),
    *(
      Claim(
        f"With the rollout's deviation, {label} adds searches",
        name,
        "batch_anysearch",
        "searches",
      )
      for name, label in (
        ("batch_gamma", "gamma = .1"),
        ("batch_no_rel", "no R_rel"),
        ("priced", "gamma = .1 without R_rel"),
      )
    ),
    Claim(
      "The priced reward is above the paper's at large budgets",
      "priced",
      "anysearch",
      "accuracy",
      _AMPLE,
    ),
    Claim("The priced reward has more TP than none", "priced", "no_tool", "tp"),
  ),
  "What sampling costs": (
    *(
      Claim(
        f"Greedy answers are more accurate: {label}",
        f"{name}_greedy",
        name,
        "accuracy",
      )
      for name, label in _THREE
    ),
    *(
      Claim(
        f"Training at .7 helps greedy answers: {label}",
        f"{name}_cool",
        f"{name}_greedy",
        "accuracy",
      )
      for name, label in _THREE
    ),
  ),
  "Baselines of turns, all answering greedily": tuple(
    Claim(
      f"Priced with baselines of turns is above {label} {where}",
      ours,
      name,
      *pool,
    )
    for ours, name, label in (
      ("priced_turns_greedy", "priced_greedy", "priced"),
      ("priced_turns_greedy", "search_r1_greedy", "Search-R1"),
      ("priced_turns_greedy", "anysearch_greedy", "AnySearch"),
      ("priced_turns_greedy", "batch_anysearch_greedy", "AnySearch, batch,"),
      ("priced_turns_cool", "search_r1_cool", "Search-R1, both cool,"),
    )
    for where, pool in (
      ("at B = 1 to 3", ("accuracy", _TIGHT)),
      ("at B = 6 to 8", ("accuracy", _AMPLE)),
      ("in all", ("accuracy",)),
      ("in all", ("tp",)),
    )
  ),
  "The priced reward against its rivals, all answering greedily": tuple(
    Claim(f"Priced is above {label} {where}", priced, name, *pool)
    for priced, name, label in (
      ("priced_greedy", "anysearch_greedy", "AnySearch"),
      ("priced_greedy", "batch_anysearch_greedy", "AnySearch, batch,"),
      ("priced_greedy", "search_r1_greedy", "Search-R1"),
      ("priced_greedy", "no_tool_greedy", "no tool reward"),
      ("priced_cool", "search_r1_cool", "Search-R1, both cool,"),
      ("priced_cool", "no_tool_cool", "no tool reward, both cool,"),
    )
    for where, pool in (
      ("at B = 1 to 3", ("accuracy", _TIGHT)),
      ("at B = 6 to 8", ("accuracy", _AMPLE)),
      ("in all", ("tp",)),
    )
  ),
}
