"""Every row of the paper's ablation tables and figures, as small overrides.

    python -m research.study --study=ablations --seeds=5

This command runs all rows in the quickstart's world; `--config` names another
base. To run a single row by hand, here the row without R_abs:

    python -m launch.train --config=configs/quickstart.py \
        --config.reward.use_abs=false --output=runs/study/no_abs-42

The first tables are the paper's: `tool` is its table of the tool reward,
`format` its figure of training dynamics; `scaffold`, `sampling` and `phases`
are the three parts of its figure of ablations. All of them divide advantages by
the deviation of a group. The table `price` changes one part of the priced
reward at a time; `authors` trains as the authors' code does where it differs
from their text; `turns` compares turns instead of episodes; `rivals` has a
Search-R1-like row: an outcome reward, a fixed budget of 5, no scaffold. The
table `one_budget` has the priced reward at fixed budgets, K policies in place
of one; `outside` has programs that play the episodes over OpenAI's client, by
the same method; `unseen` trains with budgets up to 5, so that 6 to 8 are new.
The table `greedy` has the same policies with the most probable token
everywhere, which tells what is lost by sampling from what is lost by deciding.
"""

from __future__ import annotations

import math

import anysearch_jax as aj
from research.claims import AMPLE, TIGHT, UNTRAINED, Claim, Row, above

TITLE = "The ablations, row by row"
TABLES = ("tool", "format", "scaffold", "sampling", "phases")
_BATCH = "objective.normalize=batch"
_OFF = "reward.gamma_mode=off"
_NO_REL = "reward.use_rel=false"
_SEEN = 5  # The largest budget of the trainings that do not see all.
# Searches of policies that are made for one budget.
_FIXED_BUDGETS = (1, 2, 3, 5, 8)
# The rows of docs/evidence.md, which have five trainings each.
MEASURED = {
  "anysearch": "AnySearch",
  "authors": "AnySearch, authors' code",
  "batch_anysearch": "AnySearch, batch",
  "priced": "Priced",
  "priced_turns": "Priced, turns",
  "no_tool": "No tool reward",
  "search_r1": "Search-R1-like",
}


def _fixed(gamma: float) -> tuple[str, ...]:
  return ("reward.gamma_mode=fixed", f"reward.gamma_fixed={gamma}")


# A search costs gamma / B of the reward: R_abs alone, with a fixed gamma.
PRICED = (_BATCH, *_fixed(0.1), _NO_REL)

# The authors' run, where it differs from their text.
_AUTHORS = ("objective.deviation=sample", "objective.kl_estimator=low_var_kl")


# The quickstart's preset `search_r1`.
SEARCH_R1 = (
  "reward.alpha=1.0",
  "reward.beta=0.0",
  "reward.delta=0.0",
  _OFF,
  "curriculum.max_budget=5",
  "curriculum.phase1_steps=0",
  "curriculum.fixed_budget=5",
)


def rows(base: aj.ExperimentConfig) -> tuple[Row, ...]:
  """Returns all rows over a base configuration, the full method first."""
  # The levels of Phase I are whole rollouts.
  curriculum = base.curriculum
  per_rollout = curriculum.steps_per_rollout
  rollouts = math.ceil(curriculum.phase1_steps / (_SEEN * per_rollout))
  up_to_5 = (
    f"curriculum.max_budget={_SEEN}",
    f"curriculum.phase1_steps={rollouts * _SEEN * per_rollout}",
  )
  trained = (
    *_paper(base),
    Row("batch_anysearch", "AnySearch, batch", "price", (_BATCH,)),
    Row("batch_gamma", "Batch, gamma = .1", "price", (_BATCH, *_fixed(0.1))),
    Row("batch_no_rel", "Batch, no R_rel", "price", (_NO_REL, _BATCH)),
    Row("priced", "Priced", "price", PRICED),
    Row("priced_group", "Priced, group", "price", PRICED[1:]),
    Row("no_tool_batch", "No tool reward, batch", "price", (_BATCH, _OFF)),
    Row(
      "price_after",
      "Price after the deviation",
      "price",
      (
        "reward.function=research/price_after_deviation.py:reward",
        "objective.normalize=none",
      ),
    ),
    # It has the gradient's scale that `batch` mends.
    Row("undivided", "Undivided", "price", ("objective.normalize=none",)),
    Row("authors", "AnySearch, authors' code", "authors", _AUTHORS),
    Row(
      "priced_turns",
      "Priced, turns",
      "turns",
      (*PRICED, "objective.baseline=turn"),
    ),
    Row("search_r1", "Search-R1-like", "rivals", SEARCH_R1),
    *(
      Row(
        f"priced_at_{budget}",
        f"Priced, made for {budget}",
        "one_budget",
        (*PRICED, f"curriculum.fixed_budget={budget}"),
      )
      for budget in _FIXED_BUDGETS
    ),
    *(
      Row(
        f"priced_{name}",
        f"Priced, {label}",
        "outside",
        (
          *PRICED,
          f"agents.program=examples/{file}.py:play",
          "agents.states_budget=false",
          "agents.segments=1",
        ),
      )
      for name, label, file in (
        ("outside", "an outside loop", "outside_agent"),
        ("sdk", "the Agents SDK", "agents_sdk"),
      )
    ),
    Row("anysearch_to_5", "AnySearch, up to 5", "unseen", up_to_5),
    Row("priced_to_5", "Priced, up to 5", "unseen", (*PRICED, *up_to_5)),
  )
  greedy = (
    Row(
      f"{row.name}_greedy",
      f"{row.label}, greedy",
      "greedy",
      evaluation=("sampling.temperature=0.0",),
      policy_of=row.name,
    )
    for row in trained
    if row.name in MEASURED
  )
  return (*trained, *greedy)


def _paper(base: aj.ExperimentConfig) -> tuple[Row, ...]:
  gamma, steps = base.reward.gamma_max, base.curriculum.total_steps
  return (
    Row("anysearch", "AnySearch", "tool"),
    Row("gamma_max", "Fixed gamma = max", "tool", _fixed(gamma)),
    Row("gamma_half", "Fixed gamma = max / 2", "tool", _fixed(gamma / 2)),
    Row("no_tool", "No tool reward", "tool", (_OFF,)),
    Row("no_abs", "No R_abs", "tool", ("reward.use_abs=false",)),
    Row("no_rel", "No R_rel", "tool", (_NO_REL,)),
    Row("no_format", "No format reward", "format", ("reward.beta=0.0",)),
    Row(
      "full_scaffold",
      "Full scaffold",
      "scaffold",
      ("curriculum.phase2_scaffold=true",),
    ),
    Row(
      "no_scaffold",
      "No scaffold",
      "scaffold",
      ("curriculum.phase1_scaffold=false",),
    ),
    Row(
      "kept_scaffold",
      "AnySearch + scaffold",
      "scaffold",
      policy_of="anysearch",
      scaffold=True,
    ),
    Row(
      "only_scaffold",
      "Only scaffold",
      "scaffold",
      policy_of=UNTRAINED,
      scaffold=True,
    ),
    Row("lambda_0", "lambda = 0", "sampling", ("curriculum.uniform_mix=0.0",)),
    Row("lambda_1", "lambda = 1", "sampling", ("curriculum.uniform_mix=1.0",)),
    Row(
      "phase1_only",
      "Phase I only",
      "phases",
      (f"curriculum.phase1_steps={steps}",),
    ),
    Row(
      "phase2_only", "Phase II only", "phases", ("curriculum.phase1_steps=0",)
    ),
  )


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
      AMPLE,
    ),
    Claim(
      "lambda = 1 loses at small budgets",
      "anysearch",
      "lambda_1",
      "accuracy",
      TIGHT,
    ),
  ),
  # docs/objective.md
  "What the theory of the price says": (
    Claim(
      "Dividing by the group's deviation costs accuracy at large budgets",
      "batch_anysearch",
      "anysearch",
      "accuracy",
      AMPLE,
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
      AMPLE,
    ),
    Claim("The priced reward has more TP than none", "priced", "no_tool", "tp"),
  ),
  "What sampling costs": tuple(
    Claim(
      f"Greedy answers are more accurate: {label}",
      f"{name}_greedy",
      name,
      "accuracy",
    )
    for name, label in MEASURED.items()
  ),
  "The priced reward against its rivals, all answering greedily": tuple(
    claim
    for ours, who in (
      ("priced_greedy", "Priced"),
      ("priced_turns_greedy", "Priced with baselines of turns"),
    )
    for name, label in (
      ("anysearch_greedy", "AnySearch"),
      ("batch_anysearch_greedy", "AnySearch, batch,"),
      ("search_r1_greedy", "Search-R1"),
      ("no_tool_greedy", "no tool reward"),
    )
    for claim in above(who, ours, name, label)
  ),
  "AnySearch against Search-R1": tuple(
    above("AnySearch", "anysearch", "search_r1", "Search-R1")
  ),
  # Both have the rollout's deviation, so that only the price differs.
  "What a price alone does": (
    Claim(
      "Without a price there is more accuracy",
      "no_tool_batch",
      "priced",
      "accuracy",
    ),
    Claim(
      "Without a price there are more searches",
      "no_tool_batch",
      "priced",
      "searches",
    ),
    Claim("A price adds TP", "priced", "no_tool_batch", "tp"),
  ),
  "A price that no group's deviation divides": (
    Claim(
      "It is above AnySearch at large budgets",
      "price_after",
      "anysearch",
      "accuracy",
      AMPLE,
    ),
    Claim("It has more TP than no tool reward", "price_after", "no_tool", "tp"),
    Claim("It is above the priced reward", "price_after", "priced", "accuracy"),
    Claim(
      "The priced reward makes more searches",
      "priced",
      "price_after",
      "searches",
    ),
  ),
  "One policy in place of several": (
    *(
      Claim(
        f"One policy is above the one made for {budget}, at B = {budget}",
        "priced",
        f"priced_at_{budget}",
        "accuracy",
        (budget,),
      )
      for budget in _FIXED_BUDGETS
    ),
    *(
      Claim(
        f"The policy made for {budget} makes more searches at B = 1 to 8",
        f"priced_at_{budget}",
        "priced",
        "searches",
      )
      for budget in (5, 8)
    ),
  ),
  "Budgets that no training saw": tuple(
    Claim(
      f"{label} is above its training with budgets up to 5, at B = 6 to 8",
      name,
      f"{name}_to_5",
      "accuracy",
      AMPLE,
    )
    for name, label in (("anysearch", "AnySearch"), ("priced", "Priced"))
  ),
  "The authors' code against their text": tuple(
    Claim(
      f"The authors' code has more {measure}", "authors", "anysearch", measure
    )
    for measure in ("accuracy", "tp", "searches")
  ),
}
