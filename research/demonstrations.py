"""Demonstrations of the generated world's expert, and probes of decisions.

The expert plays the real episode state machine, so its tokens have the form
that reinforcement learning will see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

import anysearch_jax as aj
from research import expert as expert_lib

PROBE_KINDS = (
  *("nothing", "conflict", "found", "copy", "memory", "relation"),
  *("recall_known", "recall_unknown"),
)
# The kinds of decisions whose tokens get `decision_weight`.
_WEIGHTED = frozenset(PROBE_KINDS) - {"relation"} | {"choice", "answer"}
_LARGEST_BUDGET = 10

Search = Callable[[str, int, str], Sequence[aj.Passage]]


class Demonstration(NamedTuple):
  """Token ids `[T]` and the loss weight of each as a target `[T]`."""

  token_ids: np.ndarray
  weights: np.ndarray


class Probes(NamedTuple):
  """Teacher-forced probes of a policy: P(label | tokens before position).

  Attributes:
    token_ids: int32 `[B, T]`, demonstrations, padded with 0 at the end.
    rows, positions: int32 `[P]`, the position of the label.
    labels: int32 `[P]`, the demonstrated token; but always `recall` for
      `recall_known` and `recall_unknown`, the decisions between search and
      memory before a fact's first search, with budget left.
    kinds: int8 `[P]`, index into `PROBE_KINDS`.
  """

  token_ids: np.ndarray
  rows: np.ndarray
  positions: np.ndarray
  labels: np.ndarray
  kinds: np.ndarray


@dataclasses.dataclass(frozen=True)
class Setting:
  """What all demonstrations of an expert have in common.

  Attributes:
    world: its memory is the expert's.
    search: returns the passages for (query, k, corpus).
    codec: a tokenizer with one token for every word of the world.
    episode: configuration of the episodes, with the `world` prompts.
    expert: probabilities of the expert's decisions; None: `expert.SCAFFOLDED`
      or `expert.PLAIN`, as the episode is.
  """

  world: aj.World
  search: Search
  codec: aj.Tokenizer
  episode: aj.config.EpisodeConfig
  expert: expert_lib.ExpertConfig | None = None


class Played(NamedTuple):
  """An episode of the expert.

  Attributes:
    trajectory: the episode.
    weights: float32 `[T]`, the loss weight of each token as a target.
    marks: (position, kind) of its decisions.
  """

  trajectory: aj.Trajectory
  weights: np.ndarray
  marks: list[tuple[int, str]]


def demonstrate(
  question: aj.Question,
  setting: Setting,
  *,
  budget: int,
  scaffold: bool,
  rng: np.random.Generator,
  decision_weight: float = 3.0,
) -> Played:
  """Plays one episode as the expert.

  Its weights are `decision_weight` on decisions and on copied, recalled and
  answered values, 1 on the model's other tokens, 0 elsewhere.

  Args:
    question: one of the setting's world.
    setting: the world, its search and the expert.
    budget: number of searches, >= 0.
    scaffold: whether to use the prompt of the paper's Phase I.
    rng: the expert's random numbers.
    decision_weight: loss weight of the tokens of decisions.

  Raises:
    ValueError: the codec splits a word, or a limit leaves no room for a turn.
  """
  usual = expert_lib.SCAFFOLDED if scaffold else expert_lib.PLAIN
  expert = expert_lib.Expert(
    question,
    world=setting.world,
    budget=budget,
    scaffold=scaffold,
    config=setting.expert or usual,
    rng=rng,
  )
  turns = expert.turns()
  state = aj.episode.start(
    question,
    budget=budget,
    scaffold=scaffold,
    address=aj.Address(rollout=0, question=0, sample=0),
    config=setting.episode,
    environment=aj.environment_of(setting.episode),
    codec=setting.codec,
  )
  passages: Sequence[aj.Passage] | None = None
  marks: list[tuple[int, str]] = []
  event: aj.episode_state.Retrieved | aj.Generation
  while not isinstance(request := state.request, aj.episode_state.Done):
    if isinstance(request, aj.SearchRequest):
      passages = setting.search(request.query, request.k, request.corpus)
      event = aj.episode_state.Retrieved(tuple(passages))
    else:
      # An episode that is not over waits on a request, and not for scores.
      assert isinstance(request, aj.GenerateRequest)
      start = len(request.token_ids)
      turn = turns.send(passages)
      passages = None
      words = turn.words[: request.max_tokens]
      marks += [
        (start + at, kind) for at, kind in turn.marks if at < len(words)
      ]
      cut = len(words) < len(turn.words)
      event = _generation(words, setting.codec, cut=cut)
    state = aj.episode.step(state, event)
  trajectory = request.trajectory
  weights = (trajectory.authors == aj.Author.MODEL).astype(np.float32)
  weights[[at for at, kind in marks if kind in _WEIGHTED]] = decision_weight
  return Played(trajectory, weights, marks)


def pool(
  setting: Setting,
  questions: Sequence[aj.Question],
  *,
  seed: int,
  decision_weight: float,
) -> list[Demonstration]:
  """Makes a demonstration of each question, under budgets of 0 to 10 searches.

  40 % of the episodes have the scaffold.

  Args:
    setting: the world, its search and the expert.
    questions: of the setting's world.
    seed: of budgets and of the expert.
    decision_weight: loss weight of the tokens of decisions.
  """
  rng = np.random.Generator(np.random.PCG64(seed))
  made: list[Demonstration] = []
  for question in questions:
    budget = int(rng.integers(0, _LARGEST_BUDGET + 1))
    scaffold = bool(rng.random() < 0.4)
    played = demonstrate(
      question,
      setting,
      budget=budget,
      scaffold=scaffold,
      rng=rng,
      decision_weight=decision_weight,
    )
    made.append(Demonstration(played.trajectory.token_ids, played.weights))
  return made


def probe_sets(
  setting: Setting,
  split: str,
  *,
  count: int,
  seed: int,
  scaffold: bool = False,
) -> Probes:
  """Makes the probes of `count` demonstrations, with 1 to 8 searches each.

  Args:
    setting, scaffold: as for `demonstrate`.
    split, count, seed: as for `World.questions`; also the expert's seed.

  Returns:
    The probes, in the order of the demonstrations.
  """
  rng = np.random.Generator(np.random.PCG64(seed))
  (recall,) = setting.codec.encode("recall")
  rows, probes = [], []
  for row, question in enumerate(setting.world.questions(split, count, seed)):
    found = demonstrate(
      question,
      setting,
      budget=int(rng.choice(range(1, 9))),
      scaffold=scaffold,
      rng=rng,
    )
    rows.append(found.trajectory.token_ids)
    for at, kind in found.marks:
      if kind in PROBE_KINDS:
        label = recall if kind.startswith("recall") else rows[-1][at]
        probes.append((row, at, label, PROBE_KINDS.index(kind)))
  most = max(map(len, rows), default=0)
  token_ids = np.stack([np.pad(ids, (0, most - len(ids))) for ids in rows])
  at_rows, positions, labels, kinds = np.array(probes, np.int32).T
  return Probes(
    token_ids.astype(np.int32),
    at_rows,
    positions,
    labels,
    kinds.astype(np.int8),
  )


def _generation(
  words: Sequence[str], codec: aj.Tokenizer, *, cut: bool
) -> aj.Generation:
  """Returns `words` as if an engine had sampled them with probability 1."""
  text = " ".join(words)
  ids = codec.encode(text)
  if len(ids) != len(words):
    raise ValueError(
      f"Found {len(ids)} tokens for the {len(words)} words of {text!r}; "
      "expected one each. Use the tokenizer of the world."
    )
  n = len(ids)
  finish = aj.Finish.LENGTH if cut else aj.Finish.STOP
  return aj.Generation(tuple(ids), (0.0,) * n, text, finish, (0,) * n)
