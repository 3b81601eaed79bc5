"""Chooses trajectories for readers, and splits them by author."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from anysearch_jax.evaluation import episodes as episodes_lib

_VERIFYING = frozenset({"verdict", "verify", "check"})


class Decoder(Protocol):
  """Decodes token ids to text, including control tokens."""

  def __call__(self, ids: Sequence[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class Sample:
  """Some complete episodes of a row, or of a training run's rollouts.

  `decode` belongs to the row's tokenizer; None if it is unavailable.
  """

  label: str
  episodes: Sequence[episodes_lib.Episode]
  decode: Decoder | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
  """A trajectory to read, why it was chosen, and another row's for it."""

  why: str
  label: str
  episode: episodes_lib.Episode
  other_label: str = ""
  other: episodes_lib.Episode | None = None


def choose(
  samples: Sequence[Sample],
  controls: Sequence[str],
  *,
  trained: int,
  count: int = 12,
  seed: int = 0,
) -> list[Choice]:
  """Chooses trajectories of the first row by rule, then at random.

  Fixed rules avoid hand-picked examples: wins and losses against the first
  control, closed book, a verification, a retry, a violation, an unseen budget.
  `seed` breaks ties, so the order of files does not matter.

  Args:
    samples: samples of the rows; the first is of the system under test.
    controls: labels; the first is compared with. Without one that has a
      sample, the second sample is.
    trained: the largest budget of training.
    count: maximum number of trajectories.
    seed: seed of the random choices.
  """
  picker = _Picker(samples, controls, count=count, seed=seed)
  if picker.rival is not None:
    name = picker.rival.label
    picker.pick(f"right, {name} wrong", lambda e: picker.differs(e, ours=1), 4)
    picker.pick(f"wrong, {name} right", lambda e: picker.differs(e, ours=0), 2)
  picker.pick("no search allowed (B = 0)", lambda e: e["budget"] == 0, 1)
  picker.pick("verifies what it found", verifies, 1)
  picker.pick("asks again after a miss", retries, 1)
  picker.pick("tries to search beyond its budget", lambda e: e["violation"], 1)
  picker.pick("a budget never trained", lambda e: e["budget"] > trained, 1)
  picker.pick("drawn at random", lambda e: True, count)
  return picker.chosen


class _Picker:
  """Picks episodes of the first sample, none twice.

  Attributes:
    rival: the sample that it is compared with; None if there is no other.
    chosen: the choices up to now.
  """

  def __init__(
    self,
    samples: Sequence[Sample],
    controls: Sequence[str],
    *,
    count: int,
    seed: int,
  ):
    self._system = samples[0]
    others = [s for s in samples if s.label in controls[:1]] or samples[1:2]
    self.rival = others[0] if others else None
    theirs = self.rival.episodes if self.rival is not None else ()
    self._theirs = {
      episodes_lib.key_of(e): e for e in episodes_lib.scored(theirs)
    }
    pool = sorted(
      episodes_lib.scored(self._system.episodes), key=episodes_lib.key_of
    )
    order = np.random.default_rng(seed).permutation(len(pool))
    self._pool = [pool[i] for i in order]
    self._count = count
    self._questions: collections.Counter[Any] = collections.Counter()
    self._budgets: collections.Counter[int] = collections.Counter()
    self.chosen: list[Choice] = []

  def pick(
    self, why: str, wanted: Callable[[episodes_lib.Episode], bool], number: int
  ) -> None:
    """Picks up to `number` episodes, of rare questions and budgets first."""
    for _ in range(min(number, self._count - len(self.chosen))):
      left = [e for e in self._pool if wanted(e)]
      if not left:
        return
      best = min(left, key=self._times_picked)
      self._pool.remove(best)
      self._questions[best["question_id"]] += 1
      self._budgets[best["budget"]] += 1
      other = self._theirs.get(episodes_lib.key_of(best))
      label = self.rival.label if self.rival is not None and other else ""
      self.chosen.append(Choice(why, self._system.label, best, label, other))

  def _times_picked(self, episode: episodes_lib.Episode) -> tuple[int, int]:
    question, budget = episode["question_id"], episode["budget"]
    return self._questions[question], self._budgets[budget]

  def differs(self, episode: episodes_lib.Episode, *, ours: int) -> bool:
    """Whether we score `ours` in an episode, and the rival does not."""
    other = self._theirs.get(episodes_lib.key_of(episode))
    if other is None:
      return False
    return episode["em"] == ours and other["em"] == 1 - ours


def verifies(episode: episodes_lib.Episode) -> bool:
  """Whether a query asks for a verdict, or contains a fact with its value."""
  facts = episode.get("metadata", {}).get("facts") or ()
  return any(
    _VERIFYING & set(episodes_lib.words(query).split())
    or any(episodes_lib.mentions(query, f["entity"], f["value"]) for f in facts)
    for query in episode["queries"]
  )


def retries(episode: episodes_lib.Episode) -> bool:
  """Whether a search follows an empty result, or rephrases an earlier one."""
  empty = [
    index
    for index, span in enumerate(episode["spans"])
    if span["author"] != "model" and "No results found" in span["text"]
  ]
  if empty and any(
    span["author"] == "model" and "</search>" in span["text"]
    for span in episode["spans"][empty[0] :]
  ):
    return True
  return any(
    all(
      any(
        episodes_lib.mentions(query, fact["entity"], fact.get(wording) or "")
        for query in episode["queries"]
      )
      for wording in ("relation", "alternative")
    )
    for fact in episode.get("metadata", {}).get("facts") or ()
  )


def authored(episode: episodes_lib.Episode) -> list[tuple[str, str]]:
  """Returns the response as (author, text); joins spans of equal author."""
  joined: list[tuple[str, str]] = []
  for span in episode["spans"]:
    author, text = span["author"], span["text"]
    if joined and joined[-1][0] == author:
      joined[-1] = (author, joined[-1][1] + text)
    else:
      joined.append((author, text))
  return joined
