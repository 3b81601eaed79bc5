"""Episodes as plain records: one line of `episodes.jsonl` each.

A failed episode (the engine or the retriever was unavailable) says nothing
about the policy. Failed episodes are counted but excluded from every mean.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from anysearch_jax import types
from anysearch_jax.environment import observed

Episode = Mapping[str, Any]

_NUMBER, _TEXT = (int, float), (str,)
_WHOLE, _LIST = (int,), (list,)  # bool is a subclass of int, so it passes.

# The keys that every episode must have, and the types of their values.
_REQUIRED = {
  "question_id": (str, int),
  "question": _TEXT,
  "golden_answers": _LIST,
  "budget": _WHOLE,
  "scaffold": _WHOLE,
  "seed": _WHOLE,
  "spans": _LIST,
  "answer": (str, type(None)),
  "em": _NUMBER,
  "format": (*_NUMBER, type(None)),
  "searches": _WHOLE,
  "queries": _LIST,
  "violation": _WHOLE,
  "outcome": _TEXT,
  "generated_tokens": _WHOLE,
  "retrieved_tokens": _WHOLE,
  "total_tokens": _WHOLE,
}
_KINDS = _REQUIRED | {"dataset": (str, type(None)), "metadata": (dict,)}


def read(lines: Iterable[str | bytes], *, source: str) -> Iterator[Episode]:
  """Reads the lines of an `episodes.jsonl`, one at a time.

  Args:
    lines: one JSON object each; blank lines are skipped.
    source: name of the file in error messages.

  Raises:
    ValueError: a line is not a JSON object, or a key is missing or its value
      has the wrong type.
  """
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    where = f"{source}, line {number}"
    episode = _decode(line, where)
    if missing := [key for key in _REQUIRED if key not in episode]:
      raise ValueError(
        f"{where}: the episode lacks {', '.join(missing)}; evaluate this row "
        "again with this version."
      )
    for key, kinds in _KINDS.items():
      if key in episode and not isinstance(episode[key], kinds):
        raise ValueError(
          f"{where}: found {key} {episode[key]!r:.60}, expected "
          f"{' or '.join(kind.__name__ for kind in kinds)}; evaluate this row "
          "again with this version."
        )
    yield episode


def _decode(line: str | bytes, where: str) -> Episode:
  try:
    episode = orjson.loads(line)
  except orjson.JSONDecodeError:
    # orjson rejects an unpaired surrogate, which a model may emit; json does
    # not.
    try:
      episode = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"{where}: found text that is not JSON ({error}); "
        "expected one episode a line. Evaluate this row again."
      ) from error
  if not isinstance(episode, dict):
    raise ValueError(
      f"{where}: found {type(episode).__name__}, expected a JSON object. "
      "Evaluate this row again."
    )
  return episode


def twice(source: str, question: str, budget: int, seed: int) -> ValueError:
  """Returns the error for an episode that occurs twice."""
  return ValueError(
    f"{source}: question {question!r} occurs twice at budget {budget} and seed "
    f"{seed} in one training; expected once. Name each evaluation of a row "
    "once, and give those of one policy different seeds."
  )


class Sample:
  """A random sample of a stream of episodes; only the sample is in memory.

  Each episode gets a priority, the hash of its (question, budget, seed), and
  the smallest ones are kept. Rows over the same questions, budgets and seeds
  therefore keep the same episodes, whatever the order of their lines, and these
  can be compared.
  """

  def __init__(self, n: int, seed: int = 0):
    """Args: n: episodes at most, >= 0. seed: of the draw."""
    self._n, self._seed = n, seed
    # Draws are negated: heapq pops the smallest item, here the largest draw.
    self._kept: list[tuple[int, int, Episode]] = []
    self._seen = 0

  def add(self, episode: Episode) -> None:
    """Adds an episode; if there are more than `n`, drops the largest draw."""
    text = repr((self._seed, *key_of(episode))).encode("utf-8", "replace")
    draw = -int.from_bytes(hashlib.blake2b(text, digest_size=16).digest())
    self._seen += 1
    heapq.heappush(self._kept, (draw, self._seen, episode))
    if len(self._kept) > self._n:
      heapq.heappop(self._kept)

  def episodes(self) -> list[Episode]:
    """Returns the sample, ordered by (question, budget, seed)."""
    return sorted((episode for *_, episode in self._kept), key=key_of)


def key_of(episode: Episode) -> tuple[str, int, int]:
  """Returns (question, budget, seed), which pairs episodes across rows."""
  return str(episode["question_id"]), episode["budget"], episode["seed"]


def dataset_of(episode: Episode) -> str:
  """Returns the dataset of an episode's question; `world` if unrecorded."""
  return (
    episode.get("dataset")
    or episode.get("metadata", {}).get("dataset")
    or "world"
  )


def scored(episodes: Iterable[Episode]) -> list[Episode]:
  """Returns the episodes that did not fail."""
  return [e for e in episodes if e["outcome"] != "failed"]


def words(text: str) -> str:
  """Returns lower-case words between single spaces, with one at each end."""
  return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def mentions(query: str, *phrases: str) -> bool:
  """Whether `query` contains every phrase, as consecutive whole words."""
  spaced = words(query)
  return all(phrase.strip() and words(phrase) in spaced for phrase in phrases)


def asks_for(query: str, fact: Mapping[str, Any]) -> bool:
  """Whether `query` names the entity and either wording of the relation."""
  return any(
    mentions(query, fact["entity"], fact.get(wording) or "")
    for wording in ("relation", "alternative")
  )


def reliability(episode: Episode) -> float | None:
  """Returns how often memories as that of the first fact are right.

  Returns:
    A probability; None if memory does not hold the fact, or the question does
    not tell.
  """
  facts = episode.get("metadata", {}).get("facts")
  if not facts or not facts[0].get("known"):
    return None
  return facts[0].get("reliability")


class Checks(NamedTuple):
  """What an episode checked of what its passages said, with searches left.

  Attributes:
    shown: 1 if passages held a right answer, otherwise 0.
    verified: 1 if another search followed the first such passages.
    contradicted: number of the question's facts of which a search found two
      values.
    resolved: number of those whose entity a later query names.
  """

  shown: int
  verified: int
  contradicted: int
  resolved: int


def checks(episode: Episode) -> Checks:
  """Returns what an episode checked by a further search.

  The last search of a budget cannot be checked. Only episodes that ended with
  an answer count: the others ended at a limit, not by a decision. Neither do
  those with a search that showed nothing, or nothing that is stored.
  """
  queries, told = episode["queries"], observed.from_values(episode)
  if episode["outcome"] != "answered" or not all(map(_texts, told)):
    return Checks(0, 0, 0, 0)
  able = told[: max(0, episode["budget"] - 1)]
  golden = episode["golden_answers"]
  holding = (n for n, o in enumerate(able, 1) if _holds(_texts(o), golden))
  shown = next(holding, None)
  checked = []
  for fact in episode.get("metadata", {}).get("facts") or ():
    for n, seen in enumerate(able, 1):
      if asks_for(queries[n - 1], fact) and len(_values(seen, fact)) > 1:
        checked.append(any(mentions(q, fact["entity"]) for q in queries[n:]))
        break
  verified = shown is not None and len(queries) > shown
  return Checks(shown is not None, verified, len(checked), sum(checked))


def _texts(shown: types.Observation) -> str:
  """Returns the passages of an observation; "" if no text of one is known."""
  if not any(passage.text for passage in shown.passages):
    return ""
  return "\n".join(passage.contents for passage in shown.passages)


def _holds(text: str, phrases: Iterable[str]) -> bool:
  """Whether a long text mentions any of some phrases."""
  lower = text.lower()
  # Splitting a text takes far longer than looking for substrings.
  return any(
    all(word in lower for word in words(phrase).split())
    and mentions(text, phrase)
    for phrase in phrases
  )


def _values(shown: types.Observation, fact: Mapping[str, Any]) -> set[str]:
  """Returns the values of a fact in the passages of an observation.

  Passages of the generated world begin with a relation and a value.
  """
  wordings = fact["relation"], fact.get("alternative")
  said = [p.text.split() for p in shown.passages if p.title == fact["entity"]]
  return {x[1] for x in said if len(x) > 1 and x[0] in wordings}


def first_hop(episode: Episode) -> tuple[str, bool] | None:
  """Returns what the policy knew of a chain's first fact, and if it searched.

  The first fact is the only one that every episode reaches. A stale fact (the
  policy's memory holds an old value) is neither known nor unknown.

  Returns:
    (`known` | `unknown` | `stale`, searched); None if the budget is 0 or the
    question does not list its facts.
  """
  facts = episode.get("metadata", {}).get("facts")
  if episode["budget"] < 1 or not facts:
    return None
  fact = facts[0]
  kind = "known" if fact.get("known") else "unknown"
  kind = "stale" if fact.get("stale") else kind
  return kind, any(asks_for(query, fact) for query in episode["queries"])
