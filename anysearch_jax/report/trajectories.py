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
  system = samples[0]
  others = [s for s in samples if s.label in controls[:1]]
  others = others or list(samples[1:2])
  rival = (
    {episodes_lib.key_of(e): e for e in episodes_lib.scored(others[0].episodes)}
    if others
    else {}
  )
  pool = sorted(episodes_lib.scored(system.episodes), key=episodes_lib.key_of)
  order = np.random.default_rng(seed).permutation(len(pool))
  pool = [pool[i] for i in order]
  chosen: list[Choice] = []
  questions: collections.Counter[Any] = collections.Counter()
  budgets: collections.Counter[int] = collections.Counter()

  def pick(
    why: str, wanted: Callable[[episodes_lib.Episode], bool], number: int
  ) -> None:
    for _ in range(min(number, count - len(chosen))):
      left = [e for e in pool if wanted(e)]
      if not left:
        return
      best = min(
        left, key=lambda e: (questions[e["question_id"]], budgets[e["budget"]])
      )
      pool.remove(best)
      questions[best["question_id"]] += 1
      budgets[best["budget"]] += 1
      other = rival.get(episodes_lib.key_of(best))
      label = others[0].label if other else ""
      chosen.append(Choice(why, system.label, best, label, other))

  def differs(episode: episodes_lib.Episode, *, ours: int) -> bool:
    other = rival.get(episodes_lib.key_of(episode))
    if other is None:
      return False
    return episode["em"] == ours and other["em"] == 1 - ours

  if others:
    name = others[0].label
    pick(f"right, {name} wrong", lambda e: differs(e, ours=1), 4)
    pick(f"wrong, {name} right", lambda e: differs(e, ours=0), 2)
  pick("no search allowed (B = 0)", lambda e: e["budget"] == 0, 1)
  pick("verifies what it found", verifies, 1)
  pick("asks again after a miss", retries, 1)
  pick("tries to search beyond its budget", lambda e: e["violation"], 1)
  pick("a budget never trained", lambda e: e["budget"] > trained, 1)
  pick("drawn at random", lambda e: True, count)
  return chosen


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
