"""Every row of the paper's ablation tables and figures, as small overrides.

    python -m research.study --study=ablations --seeds=5

This command runs all rows in the quickstart's world; `--config` names another
base. To run a single row by hand, here the row without R_abs:

    python -m launch.train --config=configs/quickstart.py \
        --config.reward.use_abs=false --output=runs/study/no_abs-42

The first tables are the paper's: `tool` is its table of the tool reward,
`format` its figure of training dynamics; `scaffold`, `sampling` and `phases`
are the three parts of its figure of ablations. All of them divide advantages by
the deviation of a group; the tables `batch ...` are the same rows with that of
the rollout. More tables ask what else could explain a difference:
`price` changes one part of the priced reward at a time, `charge` charges for
searches of wrong answers too, `credit` compares turns instead of episodes,
`length` trains longer, `rate` faster and slower, `reuse` with several passes
over each rollout. The table `greedy` has the same policies with the most
probable token everywhere, which tells what is lost by sampling from what is
lost by deciding. The table `cool` trains at a temperature of .7 and answers
greedily. `rivals` has a Search-R1-like row: an outcome reward, a fixed budget
of 5, no scaffold.
"""

from __future__ import annotations

import dataclasses

import anysearch_jax as aj
from research.claims import AMPLE, TIGHT, UNTRAINED, Claim, Row, above

TITLE = "The ablations, row by row"
TABLES = ("tool", "format", "scaffold", "sampling", "phases")
_BATCH = "objective.normalize=batch"
_OFF = "reward.gamma_mode=off"
_NO_REL = "reward.use_rel=false"
_TURNS = ("objective.baseline=turn",)
_GREEDY = ("sampling.temperature=0.0",)


def _fixed(gamma: float) -> tuple[str, ...]:
  return ("reward.gamma_mode=fixed", f"reward.gamma_fixed={gamma}")


# A search costs gamma / B of the reward: R_abs alone, with a fixed gamma.
def _priced(gamma: float) -> tuple[str, ...]:
  return (_BATCH, *_fixed(gamma), _NO_REL)


PRICED = _priced(0.1)

# The authors' run, where it differs from their text.
_AUTHORS = ("objective.deviation=sample", "objective.kl_estimator=low_var_kl")


# A search costs a share of a right answer, also if the answer is wrong.
def _charged(share: float, alpha: float) -> tuple[str, ...]:
  return (_BATCH, _OFF, f"reward.charge={share * alpha:g}")


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
  paper = _paper(base)
  return (
    *paper,
    *(_with_batch(row) for row in paper if row.policy_of != UNTRAINED),
    *_price(),
    *_charge(base.reward.alpha),
    *_credit(base),
    *_length(base),
    *_rate(base.optimizer.learning_rate),
    *_reuse(base.curriculum),
    Row("search_r1", "Search-R1-like", "rivals", SEARCH_R1),
    *(_greedy_of(name, label) for name, label, _ in _THREE),
    _greedy_of("undivided", "Undivided"),
    _greedy_of("authors", "AnySearch, authors' code"),
    _greedy_of("batch_anysearch", "AnySearch, batch"),
    _greedy_of("search_r1", "Search-R1-like"),
    *_cool(),
  )


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


def _with_batch(row: Row) -> Row:
  """Returns the same row with advantages divided by the rollout's deviation."""
  return dataclasses.replace(
    row,
    name=f"batch_{row.name}",
    label=f"{row.label}, batch",
    table=f"batch {row.table}",
    overrides=() if row.policy_of else (*row.overrides, _BATCH),
    policy_of=f"batch_{row.policy_of}" if row.policy_of else "",
  )


def _price() -> tuple[Row, ...]:
  """The priced reward, and the paper's with each part of it alone.

  `batch_anysearch` and `no_rel` are two more; `undivided` has the gradient's
  scale that `batch` mends.
  """
  return (
    Row("priced", "Priced", "price", PRICED),
    Row("priced_group", "Priced, group", "price", (*_fixed(0.1), _NO_REL)),
    Row("batch_gamma", "Batch, gamma = .1", "price", (_BATCH, *_fixed(0.1))),
    Row("undivided", "Undivided", "price", ("objective.normalize=none",)),
    Row("priced_3", "Priced, gamma = .3", "price", _priced(0.3)),
    Row("authors", "AnySearch, authors' code", "price", _AUTHORS),
  )


def _charge(alpha: float) -> tuple[Row, ...]:
  return tuple(
    row
    for percent in (5, 10)
    for row in _both_ways(
      f"charged_{percent:02d}",
      f"Charged, {percent} %",
      "charge",
      _charged(percent / 100, alpha),
    )
  )


def _credit(base: aj.ExperimentConfig) -> tuple[Row, ...]:
  """The priced reward with baselines of turns, and with larger groups."""
  groups = (f"questions={base.questions // 2}", f"group={2 * base.group}")
  return tuple(
    row
    for name, label, overrides in (
      ("turns", "turns", _TURNS),
      ("groups", "larger groups", groups),
    )
    for row in _both_ways(
      f"priced_{name}", f"Priced, {label}", "credit", (*PRICED, *overrides)
    )
  )


def _both_ways(
  name: str, label: str, table: str, overrides: tuple[str, ...]
) -> tuple[Row, Row]:
  """Returns a row that samples its answers and one that answers greedily."""
  return Row(name, label, table, overrides), _greedy_of(name, label, table)


def _greedy_of(name: str, label: str, table: str = "greedy") -> Row:
  return Row(
    f"{name}_greedy",
    f"{label}, greedy",
    table,
    evaluation=_GREEDY,
    policy_of=name,
  )


def _length(base: aj.ExperimentConfig) -> tuple[Row, ...]:
  """Five rows at 3 and 6 times the rollouts, Phase I unchanged."""
  steps = base.curriculum.total_steps
  charged = _charged(0.05, base.reward.alpha)
  return tuple(
    row
    for times in (3, 6)
    for name, label, overrides in (
      *_THREE,
      ("charged_05", "Charged, 5 %", charged),
      ("search_r1", "Search-R1-like", SEARCH_R1),
    )
    for row in _both_ways(
      f"{name}_x{times}",
      f"{label}, {times} times as long",
      "length",
      (*overrides, f"curriculum.total_steps={times * steps}"),
    )
  )


def _rate(rate: float) -> tuple[Row, ...]:
  return tuple(
    Row(
      f"{name}_{word}_rate",
      f"{label}, {word} the learning rate",
      "rate",
      (*overrides, f"optimizer.learning_rate={times * rate}"),
    )
    for word, times in (("half", 0.5), ("twice", 2))
    for name, label, overrides in _THREE
  )


def _reuse(c: aj.config.CurriculumConfig) -> tuple[Row, ...]:
  """Three rows with four passes over each rollout: no more is sampled."""
  times = 4
  steps = tuple(
    f"curriculum.{name}={times * getattr(c, name)}"
    for name in ("epochs", "steps_per_rollout", "total_steps", "phase1_steps")
  )
  return tuple(
    Row(
      f"{name}_reuse",
      f"{label}, {times} epochs",
      "reuse",
      (*overrides, *steps),
    )
    for name, label, overrides in _THREE
  )


def _cool() -> tuple[Row, ...]:
  return tuple(
    Row(
      f"{name}_cool",
      f"{label}, cool",
      "cool",
      (*overrides, "sampling.temperature=0.7"),
      _GREEDY,
    )
    for name, label, overrides in (
      *_THREE,
      ("priced_05", "Priced, gamma = .05", _priced(0.05)),
      ("priced_turns", "Priced, turns", (*PRICED, *_TURNS)),
      ("batch_anysearch", "AnySearch, batch", (_BATCH,)),
      ("batch_no_tool", "No tool reward, batch", (_BATCH, _OFF)),
      ("search_r1", "Search-R1-like", SEARCH_R1),
    )
  )


_THREE = (
  ("anysearch", "AnySearch", ()),
  ("priced", "Priced", PRICED),
  ("no_tool", "No tool reward", (_OFF,)),
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
  "What sampling costs": (
    *(
      Claim(
        f"Greedy answers are more accurate: {label}",
        f"{name}_greedy",
        name,
        "accuracy",
      )
      for name, label, _ in _THREE
    ),
    *(
      Claim(
        f"Training at .7 helps greedy answers: {label}",
        f"{name}_cool",
        f"{name}_greedy",
        "accuracy",
      )
      for name, label, _ in _THREE
    ),
  ),
  "Baselines of turns, all answering greedily": tuple(
    claim
    for ours, name, label in (
      ("priced_turns_greedy", "priced_greedy", "priced"),
      ("priced_turns_greedy", "search_r1_greedy", "Search-R1"),
      ("priced_turns_greedy", "anysearch_greedy", "AnySearch"),
      ("priced_turns_greedy", "batch_anysearch_greedy", "AnySearch, batch,"),
      ("priced_turns_cool", "search_r1_cool", "Search-R1, both cool,"),
    )
    for claim in above("Priced with baselines of turns", ours, name, label)
  ),
  "The priced reward against its rivals, all answering greedily": tuple(
    claim
    for priced, name, label in (
      ("priced_greedy", "anysearch_greedy", "AnySearch"),
      ("priced_greedy", "batch_anysearch_greedy", "AnySearch, batch,"),
      ("priced_greedy", "search_r1_greedy", "Search-R1"),
      ("priced_greedy", "no_tool_greedy", "no tool reward"),
      ("priced_cool", "search_r1_cool", "Search-R1, both cool,"),
      ("priced_cool", "no_tool_cool", "no tool reward, both cool,"),
    )
    for claim in above("Priced", priced, name, label, pooled=False)
  ),
}
