"""Rules that steer when a policy searches and when it answers, as values.

A policy proposes an action by its turn: it asks for a search, or it answers. A
rule accepts the action or replaces it by the other one: a search is refused as
if the budget were used up, and an answer is discarded and sampled again until
it searches. If it never does, the answer is kept after all.
`research.control_fit` fits a rule to counterfactual ends and writes it as a
JSON file, `episode.control`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import json_files
from anysearch_jax.methods import systems
from anysearch_jax.rollout import episode, episode_state

ASK, ANSWER = "ask", "answer"
PROPOSALS = (ASK, ANSWER)
# Beyond these, more searches or tokens are as good as any number of them.
MOST_SEARCHES = 8
MOST_TURNS = 10.0
_EDGES = ("left", "turns_left", "logp")
FEATURES = ("made", "left", "turns_left", "repeated", "logp")


class Seen(NamedTuple):
  """What a host sees of an episode after a turn that asks or answers.

  made: searches charged before.
  left: searches that the budget still allows, at most `MOST_SEARCHES`.
  written: tokens that the policy wrote, this turn and discarded ones included.
  turn: mean length of its turns in tokens.
  repeated: 1 if the turn repeats a query, otherwise 0.
  logp: mean log-probability of the turn's tokens.
  """

  made: int
  left: int
  written: int
  turn: float
  repeated: int
  logp: float

  def turns_left(self, cap: float) -> float:
    """Returns how many turns of mean length fit in a cap on tokens."""
    return max(0.0, min(MOST_TURNS, (cap - self.written) / self.turn))

  def features(self, cap: float) -> np.ndarray:
    """Returns the values of `FEATURES` under a cap on tokens, float64 `[5]`."""
    return np.array(
      (
        self.made,
        self.left,
        self.turns_left(cap),
        self.repeated,
        self.logp,
      ),
      float,
    )


def seen(after: episode_state.Episode) -> Seen:
  """Returns what is seen of an episode after its last turn.

  Args:
    after: the state that `episode.step` returned for the turn.
  """
  last = after.chunks[-1]
  match after.request:
    case types.SearchRequest(query=query):
      repeated = query in after.queries
    case _:
      repeated = False
  return Seen(
    after.used,
    min(after.left, MOST_SEARCHES),
    after.written,
    after.generated / after.turns,
    int(repeated),
    round(sum(last.logps) / len(last.logps), 5),
  )


class Score(Protocol):
  """Scores a search against answering; above 0, searching is better."""

  def __call__(self, found: Seen, cap: float) -> float:
    """Returns the score under a cap on tokens, see `cap`."""
    ...


@dataclasses.dataclass(frozen=True)
class Stopping:
  """A logistic regression: the log odds that a search helps and does not hurt.

  Attributes:
    mean, scale: of the features, each `[5]`.
    weights: of the standardised features, `[5]`.
    bias: the log odds at their means.
  """

  mean: tuple[float, ...]
  scale: tuple[float, ...]
  weights: tuple[float, ...]
  bias: float

  def __call__(self, found: Seen, cap: float) -> float:
    standard = (found.features(cap) - self.mean) / self.scale
    return float(standard @ self.weights + self.bias)


Table = tuple[tuple[tuple[float, ...], ...], ...]


@dataclasses.dataclass(frozen=True)
class Value:
  """The value of information of a search for each unit of what is left.

  With the tables' exact match if searching, S, and if answering, A, in the cell
  of (searches left, turns left, likelihood of the turn):

      score = (S - A) / cost - penalty * spent
      cost = (1 / left + 1 / turns left) / 2
      spent = (share of the searches spent + share of the tokens spent) / 2

  where `cost` is the share of both remaining budgets that a search takes.

  Attributes:
    left, turns_left, logp: lower edges of the cells, ascending; the first cell
      also has what is below its edge.
    search, answer: mean exact match, nested in the order of the edges.
    penalty: exact match that a search must be worth besides, for each unit,
      where all is spent.
  """

  left: tuple[float, ...]
  turns_left: tuple[float, ...]
  logp: tuple[float, ...]
  search: Table
  answer: Table
  penalty: float = 0.0

  def cell(self, found: Seen, cap: float) -> tuple[int, int, int]:
    """Returns the cell of an episode."""
    return (
      _bin(self.left, found.left),
      _bin(self.turns_left, found.turns_left(cap)),
      _bin(self.logp, found.logp),
    )

  def __call__(self, found: Seen, cap: float) -> float:
    i, j, k = self.cell(found, cap)
    value = self.search[i][j][k] - self.answer[i][j][k]
    turns = max(found.turns_left(cap), 0.1)
    cost = (1 / max(found.left, 1) + 1 / turns) / 2
    tokens = found.written / cap
    searches = found.made / max(found.made + found.left, 1)
    return value / cost - self.penalty * (searches + tokens) / 2


KINDS = {"stopping": Stopping, "value": Value}


@dataclasses.dataclass(frozen=True)
class Rule:
  """A rule.

  Attributes:
    scores: for a turn that asks and for one that answers; a proposal without a
      score is accepted.
    tries: how often an answer is discarded until the policy asks, at most.
    sha256: hash of the rule.
  """

  scores: Mapping[str, Score]
  tries: int
  sha256: str

  def searches(self, proposal: str, found: Seen, cap: float) -> bool:
    """Returns whether the episode searches.

    Args:
      proposal: what the turn does, one of `PROPOSALS`.
      found: what is seen of the episode.
      cap: on tokens, see `cap`.
    """
    if proposal not in self.scores:
      return proposal == ASK
    return self.scores[proposal](found, cap) > 0


def cap(tokens: int, max_generated: int) -> int:
  """Returns the cap on tokens that a rule sees, when it is fitted and used.

  Args:
    tokens: the cap of the budget, `budgets.UNCAPPED` without one.
    max_generated: the limit of the configuration, which holds without one too.
  """
  return min(tokens, max_generated)


def of(config: config_lib.EpisodeConfig) -> Rule | None:
  """Returns the rule of a configuration; None if the policy decides alone.

  Raises:
    ValueError: the file has no rule, or the environment verifies answers.
  """
  if not config.control:
    return None
  if systems.of_episode(config).verification is not None:
    raise ValueError(
      "config.episode.control: found an environment that verifies answers, "
      "which is steered already; expected one without (bats, not bats_verify)."
    )
  return load(config.control)


@functools.cache
def load(file: str) -> Rule:
  """Returns the rule of a file; a process reads it once.

  Raises:
    ValueError: the file cannot be read or has no rule.
  """
  try:
    values = json_files.read(pathlib.Path(file))
    return parse(values)
  except (OSError, TypeError, KeyError, ValueError) as error:
    why = error.strerror if isinstance(error, OSError) else error
    raise ValueError(
      f"config.episode.control: found no rule in {file} ({why}); expected a "
      "file of research.control_fit."
    ) from error


def parse(values: Mapping[str, Any]) -> Rule:
  """Returns the rule of a file's values.

  Raises:
    ValueError, TypeError, KeyError: they are no rule.
  """
  kind, tries = KINDS.get(values["kind"]), values["tries"]
  if kind is None:
    raise ValueError(
      f"kind: found {values['kind']!r}, expected {' or '.join(KINDS)}"
    )
  if tuple(values["features"]) != FEATURES:
    raise ValueError(f"features: found others than {', '.join(FEATURES)}")
  if type(tries) is not int or tries < 0:
    raise ValueError(f"tries: found {tries!r}, expected 0 or more")
  scores = {
    proposal: _score(kind, proposal, values[proposal])
    for proposal in PROPOSALS
    if values.get(proposal) is not None
  }
  read = {name: values.get(name) for name in ("kind", "tries", *PROPOSALS)}
  canonical = json.dumps(read, sort_keys=True).encode()
  return Rule(scores, tries, hashlib.sha256(canonical).hexdigest())


def _score(kind: type[Any], proposal: str, values: Any) -> Score:
  """Returns a score; every number that it may ever use is checked here."""
  if not isinstance(values, Mapping):
    raise ValueError(f"{proposal}: found {values!r}, expected a JSON object")
  score = kind(**{name: _tuples(value) for name, value in values.items()})
  features = (len(FEATURES),)
  shapes: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("mean", "scale", "weights"), features),
    **dict.fromkeys(("bias", "penalty"), ()),
  }
  if isinstance(score, Value):
    edges = {name: getattr(score, name) for name in _EDGES}
    for name, values_of in edges.items():
      _check(f"{proposal}.{name}", values_of, (np.size(values_of),))
      if not values_of or np.any(np.diff(values_of) <= 0):
        raise ValueError(f"{proposal}.{name}: expected ascending numbers")
    sizes = tuple(map(len, edges.values()))
    shapes |= dict.fromkeys(("search", "answer"), sizes)
  for name in set(values) - set(_EDGES):
    _check(f"{proposal}.{name}", values[name], shapes[name])
  if isinstance(score, Stopping) and min(score.scale) <= 0:
    raise ValueError(f"{proposal}.scale: expected numbers above 0")
  return score


def _check(name: str, value: Any, shape: tuple[int, ...]) -> None:
  """Raises ValueError if a value is not finite numbers of a shape."""
  try:
    found = np.array(value)
  except ValueError:  # Its lists have different lengths.
    found = np.array(None)
  if found.shape != shape or found.dtype.kind not in "iuf":
    what = f"numbers of the shape {list(shape)}" if shape else "a number"
    raise ValueError(f"{name}: found other values than {what}")
  if not np.isfinite(found).all():
    raise ValueError(f"{name}: found a number that is not finite")


def _bin(edges: Sequence[float], value: float) -> int:
  """Returns the index of the last edge that is not above a value."""
  return max(0, sum(edge <= value for edge in edges) - 1)


def _tuples(value: Any) -> Any:
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def step(
  waiting: episode_state.Episode, event: episode_state.Event | None
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Advances an episode as `episode.step` does, and lets its rule decide.

  Args:
    waiting: as returned by `episode.start` or by the last `step`.
    event: the answer to its request; None if its time is over.

  Returns:
    The next episode and its request. Its address differs from that of `waiting`
    while an answer is sampled again; the caller releases the old one.
  """
  rule = of(waiting.config)
  if waiting.answered is not None and rule is not None:
    return _sampled_again(waiting, event, waiting.answered, rule.tries)
  if event is None:
    return episode.land(waiting)
  after, request = episode.step(waiting, event)
  if rule is None or waiting.landing or waiting.stopped:
    return after, request
  if not isinstance(event, types.Generation):
    return after, request
  limit = cap(after.caps.tokens, after.config.max_generated)
  if isinstance(request, types.SearchRequest):
    if rule.searches(ASK, seen(after), limit):
      return after, request
    return refuse(waiting, event)
  if (
    isinstance(request, episode_state.Done)
    and request.trajectory.outcome is types.Outcome.ANSWERED
    and after.left > 0
    and rule.searches(ANSWER, seen(after), limit)
    and rule.tries
    and (redo := again(waiting, event))
  ):
    state, request = redo
    return dataclasses.replace(state, answered=after), request
  return after, request


def _sampled_again(
  waiting: episode_state.Episode,
  event: episode_state.Event | None,
  answered: episode_state.Episode,
  tries: int,
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Takes a turn that searches; tries again, or keeps the answer otherwise."""
  spent = waiting
  if isinstance(event, types.Generation):
    after, request = episode.step(waiting, event)
    if isinstance(request, types.SearchRequest):
      return dataclasses.replace(after, answered=None), request
    redo = again(waiting, event)
    made = waiting.address.attempt - answered.address.attempt
    if redo is not None and made < 2 * tries:
      return redo
    spent = _without(waiting, event)
  # The answer counts as written now, not as discarded.
  first, ended = answered.chunks[-1], answered.request
  assert isinstance(ended, episode_state.Done)
  trajectory = ended.trajectory
  is_timed = answered.caps.seconds < math.inf
  done = episode_state.Done(
    dataclasses.replace(
      trajectory,
      discarded_tokens=spent.discarded - len(first.token_ids),
      discarded_input=spent.reread - (answered.tokens - len(first.token_ids)),
      seconds=spent.elapsed if is_timed else trajectory.seconds,
    )
  )
  return dataclasses.replace(answered, request=done), done


def refuse(
  asking: episode_state.Episode, turn: types.Generation
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Answers a turn that searches as if its budget were used up.

  Args:
    asking: the episode that waits for the turn.
    turn: the turn, which searches.

  Returns:
    As `step`. Where turns are the budget, the next turn must answer.
  """
  if asking.environment.turns_are_budget:
    return episode.land(episode.step(asking, turn)[0])
  return episode.step(dataclasses.replace(asking, stopped=True), turn)


def again(
  waiting: episode_state.Episode, turn: types.Generation
) -> tuple[episode_state.Episode, types.GenerateRequest] | None:
  """Asks for a turn once more; `turn` is discarded and remains charged.

  Args:
    waiting: the episode that waits for the turn.
    turn: what was sampled.

  Returns:
    The episode with an address of its own, because its random numbers differ,
    and the request. None if no token is left for it.

  Raises:
    ValueError: the episode does not wait for a turn.
  """
  asked = waiting.request
  if not isinstance(asked, types.GenerateRequest):
    raise ValueError(
      f"Found the episode at {waiting.address} waiting on a "
      f"{type(asked).__name__}; expected one that waits for a turn."
    )
  redo = _without(waiting, turn)
  most = min(asked.max_tokens, redo.most_tokens)
  if most <= 0:
    return None
  # Groups are sampled as attempts 0 and 1.
  address = waiting.address._replace(attempt=waiting.address.attempt + 2)
  request = dataclasses.replace(asked, address=address, max_tokens=most)
  return dataclasses.replace(redo, address=address, request=request), request


def _without(
  waiting: episode_state.Episode, turn: types.Generation
) -> episode_state.Episode:
  """Returns the episode charged for a turn that is discarded."""
  asked = waiting.request
  assert isinstance(asked, types.GenerateRequest)
  return dataclasses.replace(
    waiting,
    discarded=waiting.discarded + len(turn.token_ids),
    reread=waiting.reread + len(asked.token_ids),
  )
