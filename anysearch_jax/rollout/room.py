"""How much an episode may still spend, and what it keeps for its answer.

Three limits bound the tokens of a turn: the configuration's (`max_generated`,
`max_context`), the budget's cap on tokens, and what its dollars still buy. An
episode lands while each of them has just enough left for an answer. Seconds are
the driver's.
"""

from __future__ import annotations

import dataclasses
import math

from anysearch_jax import budgets
from anysearch_jax.environment import spec
from anysearch_jax.rollout import episode_state

# Tokens of an answer where `episode.answer_room` does not say.
_ANSWER = 128
# The largest share of a cap that is then kept. The same share of a cap on
# seconds is, see `driver.LANDING`.
_SHARE = 4


def priced(budget: budgets.Budget, env: spec.Environment) -> budgets.Budget:
  """Returns a budget of dollars with the prices of the environment's tools.

  Raises:
    ValueError: it has dollars, and nothing has a price.
  """
  if budget.dollars == math.inf:
    return budget
  prices = env.prices(budget.prices)
  if not prices:
    raise ValueError(
      f"Found a budget of {budget.dollars:g} dollars where nothing has a "
      "price; expected a price of searches, of tokens or of a tool. Set "
      "search_price, input_price, output_price or tool_prices of "
      "config.evaluation."
    )
  return dataclasses.replace(budget, prices=prices)


def turn(episode: episode_state.Episode) -> int:
  """Returns the tokens that the next turn may sample at most; may be <= 0."""
  return min(_configured(episode), _capped(episode), _affordable(episode))


def before_landing(episode: episode_state.Episode) -> int | None:
  """Returns the tokens of a turn after which the episode can still land.

  Returns:
    None if nothing is kept for the answer, or it is being asked for; a number
    of 0 or below if the episode must land now.
  """
  caps, kept = episode.caps, reserve(episode)
  limits = []
  if kept:
    limits.append(_configured(episode) - kept)
  if not episode.landing:
    # A controller keeps room by refusing searches.
    if caps.tokens < budgets.UNCAPPED and not episode.config.control:
      limits.append(_capped(episode) - _answer(episode, caps.tokens))
    if caps.dollars < math.inf:
      limits.append(_affordable(episode, lands=True))
  return min([*limits, turn(episode)]) if limits else None


def is_spent(episode: episode_state.Episode) -> bool:
  """Returns whether the next turn has to be the answer.

  It has if a turn as short as the episode's shortest would take what is kept
  for the answer. Before the first turn nothing is known of its length.
  """
  most = before_landing(episode)
  return most is not None and most < max(1, episode.shortest_turn)


def reads(episode: episode_state.Episode) -> bool:
  """Returns whether an episode that lands can still read all of its context."""
  limits = [_configured(episode) - max(reserve(episode), _line(episode))]
  if episode.caps.dollars < math.inf:
    limits.append(_affordable(episode, lands=True))
  return min(limits) > 0 and _capped(episode) > 0


def lands(episode: episode_state.Episode) -> bool:
  """Returns whether something is kept for the answer of an episode."""
  return before_landing(episode) is not None


def call(episode: episode_state.Episode, tool: str) -> bool:
  """Returns whether the budget has a call of a tool left, and an answer."""
  if episode.left <= 0:
    return False
  return _cost(episode, tool, **_landing(episode)) <= episode.caps.dollars


def reserve(episode: episode_state.Episode) -> int:
  """Returns the tokens that turns leave free for `land` by configuration."""
  if not episode.config.answer_room or episode.landing:
    return 0
  return episode.config.answer_room + _line(episode)


def limit(episode: episode_state.Episode) -> str:
  """Returns the limit that leaves no room for a token, "" if there is room."""
  config, caps = episode.config, episode.caps
  if episode.written >= config.max_generated:
    return (
      f"The model wrote all of its {config.max_generated} tokens "
      "(max_generated)."
    )
  if episode.tokens >= config.max_context:
    return (
      f"The context of {config.max_context} tokens has no room to write after "
      f"{episode.tokens} (max_context)."
    )
  if _capped(episode) <= 0:
    return f"The model wrote all of the {caps.tokens} tokens of its budget."
  if _affordable(episode) <= 0:
    return (
      f"Of a budget of {caps.dollars:g} dollars {_cost(episode):g} are spent, "
      "and the rest does not pay for another turn."
    )
  return ""


def _configured(episode: episode_state.Episode) -> int:
  return min(
    episode.config.max_generated - episode.written,
    episode.config.max_context - episode.tokens,
  )


def _capped(episode: episode_state.Episode) -> int:
  return episode.caps.tokens - episode.written


def _affordable(episode: episode_state.Episode, *, lands: bool = False) -> int:
  """Returns the tokens of a turn that the budget's dollars pay for.

  Args:
    episode: before the turn.
    lands: whether landing after the turn has to be paid for as well.
  """
  caps = episode.caps
  if caps.dollars == math.inf:
    return budgets.UNCAPPED
  # A landing after the turn reads the turn's tokens too.
  after = _landing(episode) if lands else {"read": 0, "written": 0}
  read = after["read"] + episode.tokens

  def cost(tokens: int) -> float:
    return _cost(
      episode,
      read=read + (tokens if lands else 0),
      written=after["written"] + tokens,
    )

  each = caps.prices.output + (caps.prices.input if lands else 0)
  if cost(1) > caps.dollars:
    return 0
  if not each:
    return budgets.UNCAPPED
  tokens = int((caps.dollars - cost(0)) * 1e6 / each) + 1
  # Rounding must not buy a token too many.
  while cost(tokens) > caps.dollars:
    tokens -= 1
  return tokens


def _landing(episode: episode_state.Episode) -> dict[str, int]:
  """Returns what landing now reads and writes."""
  price = episode.caps.prices.output
  most = episode.caps.dollars * 1e6 / price if price else math.inf
  return {
    "read": episode.tokens + _line(episode),
    "written": _answer(episode, most) if price else 0,
  }


def _answer(episode: episode_state.Episode, cap: float) -> int:
  """Returns the tokens kept for an answer where `cap` may be written."""
  if room := episode.config.answer_room:
    return max(1, int(min(room, cap // 2)))
  return max(1, int(min(_ANSWER, cap // _SHARE)))


def _line(episode: episode_state.Episode) -> int:
  """Returns the length of the texts that ask for the answer, in tokens."""
  line = episode.environment.over_budget
  if episode.scaffold:
    line += episode.budget_line
  return len(episode.codec.encode(line))


def _cost(
  episode: episode_state.Episode,
  *calls: str,
  read: int = 0,
  written: int = 0,
) -> float:
  """Returns the dollars spent, with these counts more."""
  if episode.caps.dollars == math.inf:
    return 0.0
  return episode.caps.prices.of_calls(
    [*episode.tools, *calls],
    input_tokens=episode.read + read,
    output_tokens=episode.written + written,
  )
