"""BATS with a plan, and with answers that the policy verifies while it can.

Two options of the published system, alone and together: the policy keeps a
plan, and it verifies its own answer while searches remain.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import anysearch_jax as aj

_DECISION = re.compile(r'"decision"\s*:\s*"(SUCCESS|CONTINUE|PIVOT)"')


def accepted(text: str) -> bool:
  """Whether a verification accepts the answer; without a decision it does."""
  # A pattern and not a JSON parser: policies write malformed JSON, and JSON
  # that is nested too deeply to parse.
  return _DECISION.findall(text)[-1:] in ([], ["SUCCESS"])


def step(
  waiting: aj.episode_state.Episode,
  event: aj.episode_state.Event | None,
  *,
  ask: str,
  resume: str,
) -> aj.episode_state.Episode:
  """Advances an episode as `episode.step` does, and has answers verified.

  The verification is skipped if no search or no token is left.

  Args:
    waiting: its `memory` is True while the policy verifies its answer.
    event: the answer to its request; None if its time is over.
    ask: line after an answer that asks the policy to verify it.
    resume: line after a reply that rejects it, which lets the policy continue.
  """
  if waiting.landing or not isinstance(event, aj.Generation):
    return aj.episode.step(waiting, event)
  if waiting.memory:
    verified = aj.episode.record_turn(waiting, event)
    verified = dataclasses.replace(verified, memory=None)
    if accepted(event.text) or verified.reached_limit:
      return aj.episode.finish(verified, aj.Outcome.ANSWERED)
    return aj.episode.next_turn(
      verified, aj.episode.environment_chunk(verified, resume)
    )
  advanced = aj.episode.step(waiting, event)
  match advanced.request:
    case aj.episode_state.Done(aj.Trajectory(outcome=aj.Outcome.ANSWERED)):
      if advanced.searches_left > 0 and not advanced.reached_limit:
        asking = dataclasses.replace(advanced, memory=True)
        return aj.episode.next_turn(
          asking, aj.episode.environment_chunk(asking, ask)
        )
  return advanced


def answer(spans: Sequence[aj.Span], *, ask: str) -> str | None:
  """Returns the model's last answer, ignoring its turns after `ask`."""
  given, asked = [], False
  for span in spans:
    if span.author != aj.Author.MODEL:
      asked |= span.text == ask
    elif asked:
      asked = False
    else:
      given.append(span)
  return aj.protocol.extract_answer(given)


def _bats(
  texts: Mapping[str, str], *, plans: bool, verifies: bool
) -> aj.Environment:
  lines = {name: aj.wording.template(text) for name, text in texts.items()}
  prompt = lines["prompt"].replace("{Plan}", lines["plan"] if plans else "")
  changes: dict[str, Any] = {"scaffold": prompt, "plain": prompt}
  if verifies:
    ask = lines["verify"]
    changes["answer"] = functools.partial(answer, ask=ask)
    changes["step"] = functools.partial(step, ask=ask, resume=lines["resume"])
  return dataclasses.replace(aj.get_environment("bats"), **changes)


def _wording(*, plans: bool, verifies: bool) -> aj.wording.Wording:
  return aj.wording.Wording(
    "bats_verify.toml",
    {
      "prompt": aj.wording.Slots(needs=("Question",), may=("B", "Plan")),
      "plan": aj.wording.LINE,
      "verify": aj.wording.LINE,
      "resume": aj.wording.LINE,
    },
    functools.partial(_bats, plans=plans, verifies=verifies),
    folder=pathlib.Path(__file__).with_name("texts"),
  )


METHOD = aj.method.compared(
  "bats_verify",
  "BATS with verification",
  {
    "bats_plan": _wording(plans=True, verifies=False),
    "bats_verify": _wording(plans=False, verifies=True),
    "bats_plan_verify": _wording(plans=True, verifies=True),
  },
  train=lambda config: config,
)
