"""Episodes as plain records: one line of `episodes.jsonl` each.

Failed episodes (engine or retriever out of reach) are nobody's doing: they are
counted and enter no mean.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

Episode = Mapping[str, Any]

_NUMBER, _TEXT = (int, float), (str,)
_WHOLE, _LIST = (int,), (list,)  # True and false are whole numbers too.

# What every episode has, and of which kinds.
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
    source: what to call the file in an error.

  Raises:
    ValueError: a line that is not a JSON object, or a key that is missing or
      holds another kind of value.
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
    # Half a surrogate pair, which a model may emit, is refused by that one.
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


def parse(lines: Iterable[str | bytes], *, source: str) -> tuple[Episode, ...]:
  """All episodes of a file at once, whole; see `columns.read` for large ones.

  Raises:
    ValueError: as `read`; also no episode, or a (question, budget, seed) that
      occurs twice.
  """
  episodes: dict[tuple[str, int, int], Episode] = {}
  for episode in read(lines, source=source):
    key = key_of(episode)
    if key in episodes:
      raise twice(source, *key)
    episodes[key] = episode
  if not episodes:
    raise ValueError(f"{source}: found no episode, expected at least one.")
  return tuple(episodes.values())


def twice(source: str, question: str, budget: int, seed: int) -> ValueError:
  """The error of an episode that occurs twice."""
  return ValueError(
    f"{source}: question {question!r} occurs twice at budget {budget} and seed "
    f"{seed}; expected once. Evaluate this row again into an empty folder, and "
    "give every run of a row its own evaluation seed."
  )


class Sample:
  """Some whole episodes of many, without holding the others.

  The draw goes by (question, budget, seed) and not by place: other rows over
  the same episodes give the same ones, so that they can be compared, and the
  order of lines changes nothing.
  """

  def __init__(self, n: int, seed: int = 0):
    """Args: n: episodes at most, >= 0. seed: of the draw."""
    self._n, self._seed = n, seed
    # The largest draw first: what the next smaller one replaces.
    self._kept: list[tuple[int, int, Episode]] = []
    self._seen = 0

  def add(self, episode: Episode) -> None:
    """Considers one more."""
    text = repr((self._seed, *key_of(episode))).encode("utf-8", "replace")
    draw = -int.from_bytes(hashlib.blake2b(text, digest_size=16).digest())
    self._seen += 1
    heapq.heappush(self._kept, (draw, self._seen, episode))
    if len(self._kept) > self._n:
      heapq.heappop(self._kept)

  def episodes(self) -> list[Episode]:
    """Those drawn, ordered by (question, budget, seed)."""
    return sorted((episode for *_, episode in self._kept), key=key_of)


def sample_rows(path: pathlib.Path, n: int, seed: int = 0) -> list[Episode]:
  """The `Sample` of a file's episodes.

  Raises:
    ValueError: as `read`.
  """
  sample = Sample(n, seed)
  with path.open("rb") as lines:
    for episode in read(lines, source=str(path)):
      sample.add(episode)
  return sample.episodes()


def key_of(episode: Episode) -> tuple[str, int, int]:
  """What pairs an episode with another row's: question, budget, seed."""
  return str(episode["question_id"]), episode["budget"], episode["seed"]


def dataset_of(episode: Episode) -> str:
  """The set an episode's question is from; `world` where nothing tells."""
  return (
    episode.get("dataset")
    or episode.get("metadata", {}).get("dataset")
    or "world"
  )


def scored(episodes: Iterable[Episode]) -> list[Episode]:
  """The episodes that count: all but the failed ones."""
  return [e for e in episodes if e["outcome"] != "failed"]


def words(text: str) -> str:
  """Lower-case words between single spaces, a space at both ends."""
  return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def mentions(query: str, *phrases: str) -> bool:
  """Whether `query` holds every phrase, as whole words and in one piece."""
  spaced = words(query)
  return all(phrase.strip() and words(phrase) in spaced for phrase in phrases)


def asks_for(query: str, fact: Mapping[str, Any]) -> bool:
  """Whether `query` names the entity and either wording of the relation."""
  return any(
    mentions(query, fact["entity"], fact.get(wording) or "")
    for wording in ("relation", "alternative")
  )


def first_hop(episode: Episode) -> tuple[str, bool] | None:
  """Whether the first fact of the chain was searched, and what was known of it.

  The first fact is the only one that every episode reaches. A stale fact (the
  model's memory holds an old value) is neither known nor unknown.

  Returns:
    (`known` | `unknown` | `stale`, searched); None without a budget or where
    the question does not list its facts.
  """
  facts = episode.get("metadata", {}).get("facts")
  if episode["budget"] < 1 or not facts:
    return None
  fact = facts[0]
  kind = "known" if fact.get("known") else "unknown"
  kind = "stale" if fact.get("stale") else kind
  return kind, any(asks_for(query, fact) for query in episode["queries"])
