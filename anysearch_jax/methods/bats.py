"""BATS, inference only: a budget tracker that gives advice.

After each observation the policy reads how many searches it has used, how many
remain, and advice. The advice depends on the remaining share of the budget, in
the four regimes of the paper's appendix: high from 70 %, medium from 30 %, low
from 10 %, critical below. `research/methods/bats_verify.py` adds a plan and the
policy's verification of its own answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from anysearch_jax.algorithms import method
from anysearch_jax.environment import prompts, spec, wording

REGIMES = ((0.7, "HIGH"), (0.3, "MEDIUM"), (0.1, "LOW"), (0.0, "CRITICAL"))


def regime(budget: int, used: int) -> str:
  """Returns the regime for the remaining share of the budget."""
  share = (budget - used) / budget if budget else 0.0
  return next(name for least, name in REGIMES if share >= least)


def track(
  budget: int, used: int, *, texts: Mapping[str, str], tracker: str
) -> str:
  """Returns the budget block that follows an observation.

  Args:
    budget: searches assigned.
    used: searches charged.
    texts: the texts of the environment's file.
    tracker: name of the text of the block.
  """
  name = regime(budget, used)
  return texts[tracker].format(
    used=used,
    left=budget - used,
    regime=name,
    advice=wording.template(texts[f"advice_{name.lower()}"]),
  )


def _bats(
  texts: Mapping[str, str], tracker: str = "tracker"
) -> spec.Environment:
  """Returns the environment; `tracker` names the text after an observation."""
  prompt = wording.template(texts["prompt"])
  return spec.Environment(
    scaffold=prompt,
    plain=prompt,
    over_budget=wording.template(texts["over_budget"]),
    no_action=wording.template(texts["no_action"]),
    format=None,
    after_search=functools.partial(track, texts=texts, tracker=tracker),
  )


_NUMBERS = wording.Slots(needs=("used", "left"))
_SLOTS = {
  "prompt": wording.PROMPT,
  "tracker": _NUMBERS._replace(may=("regime", "advice")),
  "tracker_numbers": _NUMBERS,
  "over_budget": wording.LINE,
  "no_action": wording.LINE,
} | {f"advice_{name.lower()}": wording.LINE for _, name in REGIMES}
_FILE = wording.Wording("bats.toml", _SLOTS, _bats)

WORDINGS = {
  "bats": _FILE,
  "bats_numbers": dataclasses.replace(
    _FILE, build=functools.partial(_bats, tracker="tracker_numbers")
  ),
  # Without advice: the world's vocabulary has no words for it.
  "bats_world": prompts.WORLD.then(
    lambda env: dataclasses.replace(
      env, format=None, after_search=env.before_turn
    )
  ),
}

METHOD = method.compared("bats", "BATS", WORDINGS, train=lambda config: config)
