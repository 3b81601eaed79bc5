"""IGPO: a search earns what it adds to the probability of the right answer.

    r_s = p_s - p_(s - 1)     search s
    r_T = F1, or -malformed   the last turn
    A_t = sum of gamma^(k - t) (r_k - mean) / deviation over k >= t

p_s is the policy's own probability of the first accepted answer, if it answered
after search s: exp of the mean log-probability of the answer's tokens after an
empty thought. It is asked for when the episode is over, with the weights that
played it (`types.ScoreRequest`), and not charged. A context without room for
the answer leaves p as it was. Mean and deviation are those of all turns of a
question's trajectories. It is played in Search-R1's environment.
https://arxiv.org/abs/2510.14967
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

import anysearch_jax as aj

# The thought of the authors' sentence is empty here, because no policy of the
# generated world knows its words.
_OPENING = "<think></think><answer>"
_EPSILON = 1e-6  # Added to the deviation.


@dataclasses.dataclass(frozen=True)
class Options:
  """IGPO's rewards of turns."""

  gamma: float = aj.settings.learning(1.0, aj.settings.SHARE)
  """Discount of the rewards of later turns."""
  malformed: float = aj.settings.learning(2.0, aj.settings.at_least(0))
  """Loss of a response whose tags do not pair, or which has no answer."""


def step(
  waiting: aj.episode_state.Episode, event: aj.episode_state.Event | None
) -> aj.episode_state.Episode:
  """Advances an episode as `episode.step` does, and scores it at its end.

  Args:
    waiting: while it is scored, its `memory` is its trajectory; None otherwise.
    event: the answer to its request; None if its time is over.

  Returns:
    The next episode. Each search of a scored one has its gain as its `value`.
    One that could not be scored is failed.
  """
  played = waiting.memory
  if played is None:
    return _asking(aj.episode.step(waiting, event))
  if isinstance(event, aj.episode_state.Scored):
    count = len(_answer(waiting))
    beliefs = [np.exp(np.mean(logps[-count:])) for logps in event.logps]
    gains = np.diff(beliefs).tolist()
    gains += [0.0] * (len(played.observations) - len(gains))
    played = dataclasses.replace(
      played,
      observations=tuple(
        search._replace(value=gain)
        for search, gain in zip(played.observations, gains)
      ),
    )
  else:
    reason = "It was not scored in time."
    if isinstance(event, aj.episode_state.Failure):
      reason = event.reason
    played = dataclasses.replace(
      played, outcome=aj.Outcome.FAILED, reason=reason
    )
  done = aj.episode_state.Done(played)
  return dataclasses.replace(waiting, request=done)


def _asking(
  advanced: aj.episode_state.Episode,
) -> aj.episode_state.Episode:
  """Returns an episode that asks for scores if it is over and searched."""
  ended = advanced.request
  if not isinstance(ended, aj.episode_state.Done):
    return advanced
  if ended.trajectory.failed or not advanced.observations:
    return advanced
  answer = _answer(advanced)
  texts = []
  turn = -1
  context: tuple[int, ...] = ()
  after = {-1, *(search.turn for search in advanced.observations)}
  for chunk in advanced.chunks:
    if chunk.author == aj.Author.MODEL:
      if turn in after:
        texts.append(context)
      turn += 1
    context += chunk.token_ids
  if turn in after:
    texts.append(context)
  opening = tuple(advanced.codec.encode(_OPENING))
  room = advanced.config.max_context - len(opening) - len(answer)
  sequences = tuple(
    text + opening + answer for text in texts if len(text) <= room
  )
  return dataclasses.replace(
    advanced,
    request=aj.ScoreRequest(sequences),
    memory=ended.trajectory,
    landing=True,
  )


def _answer(episode: aj.episode_state.Episode) -> tuple[int, ...]:
  """Returns the tokens of the first accepted answer."""
  gold = episode.question.golden_answers[0]
  return tuple(episode.codec.encode(f" {gold}"))


def measure(trajectory: aj.Trajectory) -> dict[str, float]:
  """Returns `well_formed`: 1 if it answered and its tags pair, else 0."""
  said = "".join(aj.scoring.turns(trajectory.spans))
  paired = all(
    said.count(f"<{tag}>") == said.count(f"</{tag}>")
    for tag in ("think", "search", "answer")
  )
  answer = aj.protocol.extract_answer(trajectory.spans)
  return {"well_formed": float(paired and answer is not None)}


def turns(
  trajectories: Mapping[aj.Place, aj.Trajectory], options: Options
) -> dict[aj.Place, np.ndarray]:
  """Returns the advantages of each trajectory's turns.

  They are float32 `[searches + 1]`; the last turn follows the last search.
  """
  rewards: dict[aj.Place, np.ndarray] = {}
  pools: dict[int, list[np.ndarray]] = {}
  for place, played in trajectories.items():
    answer = aj.protocol.extract_answer(played.spans)
    outcome = aj.scoring.f1(answer, played.question.golden_answers)
    if not measure(played)["well_formed"]:
      outcome = -options.malformed
    gains = [search.value or 0.0 for search in played.observations]
    rewards[place] = np.array([*gains, outcome])
    pools.setdefault(place[0], []).append(rewards[place])
  advantages = {}
  for place, earned in rewards.items():
    pool = np.concatenate(pools[place[0]])
    returns = (earned - np.mean(pool)) / (np.std(pool) + _EPSILON)
    for turn in reversed(range(len(returns) - 1)):
      returns[turn] += options.gamma * returns[turn + 1]
    advantages[place] = returns.astype(np.float32)
  return advantages


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the reward of the last turn; searches have those of `turns`."""
  formed = o.measures["well_formed"]
  return {
    "well_formed": formed,
    "total": jnp.where(formed != 0, o.f1, -c.malformed),
  }


METHOD = aj.method.compared(
  "igpo",
  "IGPO",
  aj.search_r1.WORDINGS,
  reward,
  measures=("well_formed",),
  measure=measure,
  step=step,
  turns=turns,
  options=Options(),
)
