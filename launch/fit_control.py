r"""Fits a rule that steers searching, from counterfactual ends.

    python -m launch.fit_control --branches=runs/x/dev/branches \
        --tokens=40,60,90,140 --kind=stopping --output=rule.json
    python -m launch.evaluate --hf=runs/x/policy --output=runs/x/steered \
        --config.episode.control=rule.json --config.episode.budget_file=silent \
        --budgets='searches=1|3|5,tokens=40|60|90|140' ...

--branches names folders of launch.branch, of an evaluation on other questions
than those that the rule will be judged by (launch.evaluate --split=dev). The
file is small JSON: `stopping` is a logistic regression of what a search does,
`value` tables of what searching and answering earn, whose difference is scored
by what the search takes of the remaining budget. docs/budgets.md has the
formulas.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from launch import flags as launch_flags


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_list(
    "branches", None, "Folders of launch.branch.", required=True
  )
  flags.DEFINE_string("output", None, "File to write.", required=True)
  flags.DEFINE_enum(
    "kind", "stopping", ["stopping", "value"], "Form of the rule."
  )
  flags.DEFINE_list(
    "tokens", [], "Caps on tokens under which ends are counted."
  )
  flags.DEFINE_integer(
    "tries",
    4,
    "How often an answer is sampled again until it searches; 0: never.",
    lower_bound=0,
  )
  flags.DEFINE_float(
    "penalty",
    0.0,
    "Of --kind=value: exact match that a search must be worth besides, for "
    "each share of the budget that it takes, where all is spent.",
    lower_bound=0,
  )


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  try:
    print(fit())
  except (OSError, ValueError) as error:
    sys.exit(f"launch.fit_control: {error}")


def fit() -> str:
  """Fits the rule that the flags describe and returns a summary as text.

  Raises:
    ValueError: a folder or a flag cannot be used.
  """
  from anysearch_jax.evaluation import control_fit
  from anysearch_jax.host import json_files

  f = flags.FLAGS
  rows, ends, most = branches(f.branches)
  plan = control_fit.Plan(f.kind, _tokens(f.tokens), most, f.tries, f.penalty)
  values, fitted = control_fit.fit(rows, plan)
  values["fitted"] = {"to": ends, "tokens": list(plan.tokens), **fitted}
  json_files.write(pathlib.Path(f.output), values)
  return "\n".join(
    f"{name}: {found['turns']} turns and caps, {found['replaced']:.0%} "
    f"replaced; exact match {found['accept']:.3f} if all are accepted, "
    f"{found['replace']:.3f} if all are replaced, {found['rule']:.3f} by the "
    "rule"
    for name, found in fitted.items()
  )


def branches(
  folders: Sequence[str],
) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]], int]:
  """Reads folders of branches.

  Returns:
    The rows of all, each folder's name with its policy, and the tokens that the
    episodes could write without a cap.

  Raises:
    ValueError: a folder is unfinished, or the folders are of several policies
      or limits.
  """
  from anysearch_jax.evaluation import branching, journal
  from anysearch_jax.host import json_files

  rows: list[Mapping[str, Any]] = []
  ends: list[dict[str, Any]] = []
  limits: dict[str, int] = {}
  for folder in map(pathlib.Path, folders):
    path = folder / branching.BRANCHES
    if not path.is_file():
      raise ValueError(
        f"{folder}: no {branching.BRANCHES}; expected a finished folder of "
        "launch.branch."
      )
    played = json_files.read(folder / "provenance.json")
    rows += journal.read(path)
    ends.append({"branches": str(folder), "policy": played["policy"]})
    limits[str(folder)] = _max_generated(folder)
  _check_one("policy", {e["branches"]: _name(e["policy"]) for e in ends})
  _check_one("episode.max_generated", limits)
  return rows, ends, min(limits.values())


def _max_generated(folder: pathlib.Path) -> int:
  """Returns the tokens that the episodes of branches could write."""
  from anysearch_jax.host import json_files

  path = pathlib.Path(json_files.read(folder / "config.json")["evaluation"])
  if not (path / "config.json").is_file():
    raise ValueError(
      f"{folder}: found no configuration of its evaluation in {path}, which "
      "says how many tokens its episodes could write; expected the folder "
      "that launch.branch was given."
    )
  return json_files.read(path / "config.json")["episode"]["max_generated"]


def _name(policy: Mapping[str, Any]) -> str:
  """Returns what identifies a policy, wherever it is."""
  names = ("sha256", "scripted", "openai")
  found = (str(policy[name]) for name in names if name in policy)
  return next(found, str(dict(policy)))


def _check_one(what: str, found: Mapping[str, Any]) -> None:
  """Refuses branches that differ; `found` has a value by folder."""
  if len(set(found.values())) > 1:
    shown = ", ".join(f"{str(v):.12} ({k})" for k, v in found.items())
    raise ValueError(
      f"--branches: found more than one {what}: {shown}; expected branches of "
      "one policy under one limit. Fit a rule for each."
    )


def _tokens(texts: list[str]) -> tuple[int, ...]:
  if not all(text.isdecimal() and int(text) for text in texts):
    raise ValueError(
      f"--tokens={','.join(texts)}: expected numbers above 0, as 40,60,90."
    )
  return tuple(sorted({int(text) for text in texts}))


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
