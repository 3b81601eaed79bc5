"""BATS, inference only: a budget tracker that gives advice.

After each observation the policy reads how many searches it has used, how many
remain, and advice. The advice depends on the remaining share of the budget, in
the four regimes of the paper's appendix: high from 70 %, medium from 30 %, low
from 10 %, critical below. Two options: the policy keeps a plan, and the policy
verifies its own answer while searches remain.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from anysearch_jax import types
from anysearch_jax.algorithms import method
from anysearch_jax.environment import prompts, protocol, spec, wording
from anysearch_jax.rollout import episode, episode_state

REGIMES = ((0.7, "HIGH"), (0.3, "MEDIUM"), (0.1, "LOW"), (0.0, "CRITICAL"))
_DECISION = re.compile(r'"decision"\s*:\s*"(SUCCESS|CONTINUE|PIVOT)"')


def regime(budget: int, used: int) -> str:
  """Returns the regime for the remaining share of the budget."""
  share = (budget - used) / budget if budget else 0.0
  return next(name for least, name in REGIMES if share >= least)


def track(budget: int, used: int, *, texts: Mapping[str, str]) -> str:
  """Returns the budget block that follows an observation."""
  name = regime(budget, used)
  return texts["tracker"].format(
    used=used,
    left=budget - used,
    regime=name,
    advice=wording.template(texts[f"advice_{name.lower()}"]),
  )


def accepted(text: str) -> bool:
  """Whether a verification accepts the answer; without a decision it does."""
  # A pattern and not a JSON parser: policies write malformed JSON, and JSON
  # that is nested too deeply to parse.
  return _DECISION.findall(text)[-1:] in ([], ["SUCCESS"])


def step(
  waiting: episode_state.Episode,
  event: episode_state.Event | None,
  *,
  ask: str,
  resume: str,
) -> episode_state.Episode:
  """Advances an episode as `episode.step` does, and has answers verified.

  The verification is skipped if no search or no token is left.

  Args:
    waiting: its `memory` is True while the policy verifies its answer.
    event: the answer to its request; None if its time is over.
    ask: line after an answer that asks the policy to verify it.
    resume: line after a reply that rejects it, which lets the policy continue.
  """
  if waiting.landing or not isinstance(event, types.Generation):
    return episode.step(waiting, event)
  if waiting.memory:
    verified = episode.recorded(waiting, event)
    verified = dataclasses.replace(verified, memory=None)
    if accepted(event.text) or verified.full:
      return episode.finish(verified, types.Outcome.ANSWERED)
    return episode.next_turn(verified, episode.written(verified, resume))
  advanced = episode.step(waiting, event)
  match advanced.request:
    case episode_state.Done(types.Trajectory(outcome=types.Outcome.ANSWERED)):
      if advanced.left > 0 and not advanced.full:
        asking = dataclasses.replace(advanced, memory=True)
        return episode.next_turn(asking, episode.written(asking, ask))
  return advanced


def answer(spans: Sequence[types.Span], *, ask: str) -> str | None:
  """Returns the model's last answer, ignoring its turns after `ask`."""
  given, asked = [], False
  for span in spans:
    if span.author != types.Author.MODEL:
      asked |= span.text == ask
    elif asked:
      asked = False
    else:
      given.append(span)
  return protocol.extract_answer(given)


def _bats(
  texts: Mapping[str, str],
  plans: bool = False,
  verifies: bool = False,
  advises: bool = True,
) -> spec.Environment:
  lines = {name: wording.template(text) for name, text in texts.items()}
  prompt = lines["prompt"].replace("{Plan}", lines["plan"] if plans else "")
  if not advises:
    texts = {**texts, "tracker": texts["tracker_numbers"]}
  verifying = functools.partial(
    step, ask=lines["verify"], resume=lines["resume"]
  )
  return spec.Environment(
    *(prompt, prompt, lines["over_budget"], lines["no_action"]),
    answer=functools.partial(answer, ask=lines["verify"]),
    format=None,
    after_search=functools.partial(track, texts=texts),
    step=verifying if verifies else None,
  )


_NUMBERS = wording.Slots(needs=("used", "left"))
_SLOTS = {
  "prompt": wording.Slots(needs=("Question",), may=("B", "Plan")),
  "tracker": _NUMBERS._replace(may=("regime", "advice")),
  "tracker_numbers": _NUMBERS,
} | dict.fromkeys(
  (
    *("plan", "over_budget", "no_action", "verify", "resume"),
    *(f"advice_{name.lower()}" for _, name in REGIMES),
  ),
  wording.LINE,
)
_FILE = wording.Wording("bats.toml", _SLOTS, _bats)


def _option(**options: bool) -> wording.Wording:
  return dataclasses.replace(_FILE, build=lambda texts: _bats(texts, **options))


WORDINGS = {
  "bats": _FILE,
  "bats_plan": _option(plans=True),
  "bats_verify": _option(verifies=True),
  "bats_plan_verify": _option(plans=True, verifies=True),
  "bats_numbers": _option(advises=False),
  # Without advice: the world's vocabulary has no words for it.
  "bats_world": prompts.WORLD.then(
    lambda env: dataclasses.replace(
      env, format=None, after_search=env.before_turn
    )
  ),
}

METHOD = method.compared("bats", "BATS", WORDINGS, train=lambda config: config)
