"""Every row of the paper's ablation tables and figures, as small overrides.

    python -m launch.study --study=ablations --seeds=3

This command runs all rows in the quickstart's world; `--config` names another
base. To run a single row by hand, here the row without R_abs:

    python -m launch.train --config=configs/quickstart.py \
        --config.reward.use_abs=false --output=runs/study/no_abs-42

The tables are the paper's: `tool` is its table of the tool reward, `format` its
figure of training dynamics; `scaffold`, `sampling` and `phases` are the three
parts of its figure of ablations.
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs.study_rows import UNTRAINED, Row

TABLES = ("tool", "format", "scaffold", "sampling", "phases")


def rows(base: config_lib.ExperimentConfig) -> tuple[Row, ...]:
  """Returns all rows over a base configuration, the full method first."""
  gamma, steps = base.reward.gamma_max, base.curriculum.total_steps

  def fixed(value: float) -> tuple[str, ...]:
    return ("reward.gamma_mode=fixed", f"reward.gamma_fixed={value}")

  return (
    Row("anysearch", "AnySearch", "tool"),
    Row("gamma_max", "Fixed gamma = max", "tool", fixed(gamma)),
    Row("gamma_half", "Fixed gamma = max / 2", "tool", fixed(gamma / 2)),
    Row("no_tool", "No tool reward", "tool", ("reward.gamma_mode=off",)),
    Row("no_abs", "No R_abs", "tool", ("reward.use_abs=false",)),
    Row("no_rel", "No R_rel", "tool", ("reward.use_rel=false",)),
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
