"""Demonstrations of the generated world's expert, and probes of decisions.

The expert plays the real episode state machine, so its tokens have the form
that reinforcement learning will see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout import episode, episode_state
from anysearch_jax.world import expert as expert_lib
from anysearch_jax.world import world as world_lib

PROBE_KINDS = (
  *("nothing", "conflict", "found", "copy", "memory", "relation"),
  *("recall_known", "recall_unknown"),
)
# The kinds of decisions whose tokens get `decision_weight`.
_WEIGHTED = frozenset(PROBE_KINDS) - {"relation"} | {"choice", "answer"}

Search = Callable[[str, int, str], Sequence[types.Passage]]


class Probes(NamedTuple):
  """Teacher-forced probes of a policy: P(label | tokens before position).

  Attributes:
    token_ids: int32 `[B, T]`, demonstrations, padded with 0 at the end.
    lengths: int32 `[B]`, tokens of each demonstration.
    rows, positions: int32 `[P]`, the position of the label.
    labels: int32 `[P]`, the demonstrated token; but always `recall` for
      `recall_known` and `recall_unknown`, the decisions between search and
      memory before a fact's first search, with budget left.
    kinds: int8 `[P]`, index into `PROBE_KINDS`.
    features: float32 `[P, 2]`, of a `recall_known`: `change` and `slack`, see
      `expert.ExpertConfig`; 0 for other kinds.
    searches: float32 `[P]`, of a `recall_known`: the expert's probability of
      searching; 0 for other kinds.
  """

  token_ids: np.ndarray
  lengths: np.ndarray
  rows: np.ndarray
  positions: np.ndarray
  labels: np.ndarray
  kinds: np.ndarray
  features: np.ndarray
  searches: np.ndarray


class _Choice(NamedTuple):
  """A decision between memory and a search, see `Probes`."""

  features: tuple[float, float]
  search: float


@dataclasses.dataclass(frozen=True)
class Setting:
  """What all demonstrations of an expert have in common.

  Attributes:
    world: its memory is the expert's.
    search: returns the passages for (query, k, corpus).
    codec: a tokenizer with one token for every word of the world.
    episode: configuration of the episodes, with the `world` prompts.
    expert: probabilities of the expert's decisions.
  """

  world: world_lib.World
  search: Search
  codec: types.TextCodec
  episode: config_lib.EpisodeConfig
  expert: expert_lib.ExpertConfig = expert_lib.ExpertConfig()


def demonstrate(
  question: types.Question,
  setting: Setting,
  *,
  budget: budgets_lib.Assigned,
  scaffold: bool,
  rng: np.random.Generator,
  decision_weight: float = 3.0,
) -> tuple[types.Trajectory, np.ndarray]:
  """Plays one episode as the expert.

  Args:
    question: one of the setting's world.
    setting: the world, its search and the expert.
    budget: what is assigned: a number of searches, or searches and tokens.
    scaffold: whether to use the prompt of the paper's Phase I.
    rng: the expert's random numbers.
    decision_weight: loss weight of the tokens of decisions.

  Returns:
    The trajectory, and float32 `[T]` loss weights: `decision_weight` on
    decisions and on copied, recalled and answered values, 1 on the model's
    other tokens, 0 elsewhere. If the episode asked for its answer, only that
    answer has weights: what led there ignored the cap.

  Raises:
    ValueError: the codec splits a word, or a limit leaves no room for a turn.
  """
  trajectory, marks, _, asked = _play(
    question,
    setting,
    budget=budget,
    scaffold=scaffold,
    rng=rng,
  )
  weights = (trajectory.authors == types.Author.MODEL).astype(np.float32)
  weights[[at for at, kind in marks if kind in _WEIGHTED]] = decision_weight
  weights[:asked] = 0
  return trajectory, weights


def probe_sets(
  setting: Setting,
  split: str,
  *,
  count: int,
  seed: int,
  budgets: Sequence[int] = range(1, 9),
  scaffold: bool = False,
) -> Probes:
  """Makes the probes of `count` demonstrations of a split.

  Args:
    setting, scaffold: as for `demonstrate`.
    split, count, seed: as for `World.questions`; also the expert's seed.
    budgets: each demonstration draws one of them uniformly.

  Returns:
    The probes, in the order of the demonstrations.
  """
  rng = np.random.Generator(np.random.PCG64(seed))
  (recall,) = setting.codec.encode("recall")
  rows, probes, features = [], [], []
  for row, question in enumerate(setting.world.questions(split, count, seed)):
    trajectory, marks, choices, _ = _play(
      question,
      setting,
      budget=int(rng.choice(budgets)),
      scaffold=scaffold,
      rng=rng,
    )
    rows.append(trajectory.token_ids)
    made = iter(choices)
    for at, kind in marks:
      if kind not in PROBE_KINDS:
        continue
      label = recall if kind.startswith("recall") else rows[-1][at]
      probes.append((row, at, label, PROBE_KINDS.index(kind)))
      choice = next(made) if kind == "recall_known" else _Choice((0, 0), 0)
      features.append((*choice.features, choice.search))
  return packed(rows, probes, features)


def packed(
  rows: Sequence[np.ndarray],
  probes: Sequence[tuple[int, int, int, int]],
  features: Sequence[tuple[float, float, float]] | np.ndarray,
) -> Probes:
  """Returns probes as arrays.

  Args:
    rows: the token ids of each demonstration.
    probes: row, position, label and index of the kind of each probe.
    features: change, slack and the expert's probability of searching of each.
  """
  lengths = np.array([len(ids) for ids in rows], np.int32)
  token_ids = np.zeros((len(rows), max(lengths, default=0)), np.int32)
  for row, ids in zip(token_ids, rows, strict=True):
    row[: len(ids)] = ids
  at_rows, positions, labels, kinds = (
    np.array(probes, np.int32).reshape(-1, 4).T
  )
  *of_choices, searches = np.array(features, np.float32).reshape(-1, 3).T
  return Probes(
    token_ids,
    lengths,
    at_rows,
    positions,
    labels,
    kinds.astype(np.int8),
    np.stack(of_choices, 1),
    searches,
  )


def _play(
  question: types.Question,
  setting: Setting,
  *,
  budget: budgets_lib.Assigned,
  scaffold: bool,
  rng: np.random.Generator,
) -> tuple[types.Trajectory, list[tuple[int, str]], list[_Choice], int]:
  """Plays an episode.

  Returns:
    The trajectory, (position, kind) of its decisions, a choice for each
    `recall_known` among them, and the position from which on it was asked for
    its answer (0 if it was not).
  """
  decide = setting.expert.strategy(setting.world)
  choices = []

  def strategy(situation: expert_lib.Situation) -> float:
    chance = decide(situation)
    if situation.decision == "known" and situation.remaining:
      features = expert_lib.features(situation, setting.world)
      choices.append(_Choice(features, chance))
    return chance

  expert = expert_lib.Expert(
    question,
    world=setting.world,
    budget=budgets_lib.of(budget).searches,
    scaffold=scaffold,
    config=setting.expert,
    rng=rng,
    strategy=strategy,
  )
  turns = expert.turns()
  state, request = episode.start(
    question,
    budget=budget,
    scaffold=scaffold,
    address=types.Address(rollout=0, question=0, sample=0),
    config=setting.episode,
    codec=setting.codec,
  )
  passages: Sequence[types.Passage] | None = None
  marks: list[tuple[int, str]] = []
  asked = 0
  event: episode_state.Retrieved | types.Generation
  while not isinstance(request, episode_state.Done):
    if isinstance(request, types.SearchRequest):
      passages = setting.search(request.query, request.k, request.corpus)
      event = episode_state.Retrieved(tuple(passages))
    else:
      start = len(request.token_ids)
      if state.landing:
        asked, expert.room = start, request.max_tokens
      turn = turns.send(passages)
      passages = None
      words = turn.words[: request.max_tokens]
      marks += [
        (start + at, kind) for at, kind in turn.marks if at < len(words)
      ]
      cut = len(words) < len(turn.words)
      event = generation(words, setting.codec, cut=cut)
    state, request = episode.step(state, event)
  return request.trajectory, marks, choices, asked


def generation(
  words: Sequence[str], codec: types.TextCodec, *, cut: bool = False
) -> types.Generation:
  """Returns `words` as if an engine had sampled them with probability 1."""
  text = " ".join(words)
  ids = codec.encode(text)
  if len(ids) != len(words):
    raise ValueError(
      f"Found {len(ids)} tokens for the {len(words)} words of {text!r}; "
      "expected one each. Use the tokenizer of the world."
    )
  n = len(ids)
  finish = types.Finish.LENGTH if cut else types.Finish.STOP
  return types.Generation(tuple(ids), (0.0,) * n, text, finish, (0,) * n)
