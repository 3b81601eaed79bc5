"""ReSearch: the answer's F1 in a well-formed response, and a little for form.

    malformed, or no boxed answer    0
    F1 above 0                       F1
    F1 of 0                          wrong

Its passages come back in `<result>`, and the answer is in `\\boxed{}`. In the
generated world it is played in Search-R1's environment, without a box.
https://arxiv.org/abs/2503.19470
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp

import anysearch_jax as aj

SEARCH = aj.tools.search(begins="<result>", ends="</result>")


@dataclasses.dataclass(frozen=True)
class Options:
  """ReSearch's reward."""

  wrong: float = aj.settings.learning(0.1, aj.settings.REWARD)
  """Reward of a well-formed response whose answer has an F1 of 0."""


def answer(spans: Sequence[aj.Span]) -> str | None:
  """Returns the last box of the model's last answer; None without one."""
  given = aj.protocol.extract_answer(spans)
  return None if given is None else aj.search_o1.boxed(given)


WORDINGS = aj.search_r1.wordings(
  "research",
  folder=pathlib.Path(__file__).with_name("texts"),
  tools=(SEARCH,),
  answer=answer,
  format=functools.partial(aj.scoring.check_format, calls={"search": "result"}),
)


def measure(trajectory: aj.Trajectory) -> dict[str, float]:
  """Returns `well_formed`: 1 if the model's tags are in order, else 0.

  It thought, its thoughts are closed, every search was answered by passages,
  and it answered once.
  """
  said = "".join(aj.scoring.turns(trajectory.spans))
  counts = {
    tag: said.count(f"<{tag}>")
    for tag in ("think", "search", "answer")
    if said.count(f"<{tag}>") == said.count(f"</{tag}>")
  }
  formed = (
    trajectory.outcome is aj.Outcome.ANSWERED
    and counts.get("think", 0) >= 1
    and counts.get("search", -1) == trajectory.searches
    and counts.get("answer", 0) == 1
  )
  return {"well_formed": float(formed)}


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the reward of the table above."""
  formed = (o.measures["well_formed"] != 0) & o.answered
  scored = jnp.where(o.f1 > 0, o.f1, c.wrong)
  return {
    "f1": o.f1,
    "well_formed": formed,
    "total": jnp.where(formed, scored, 0),
  }


METHOD = aj.method.compared(
  "research",
  "ReSearch",
  WORDINGS,
  reward,
  measures=("well_formed",),
  measure=measure,
  options=Options(),
)
