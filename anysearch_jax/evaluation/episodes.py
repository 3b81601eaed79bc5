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

REQUIRED = (
  "question_id",
  "question",
  "golden_answers",
  "budget",
  "scaffold",
  "seed",
  "spans",
  "answer",
  "em",
  "format",
  "searches",
  "queries",
  "violation",
  "outcome",
  "generated_tokens",
  "retrieved_tokens",
  "total_tokens",
)


def read(lines: Iterable[str | bytes], *, source: str) -> Iterator[Episode]:
  """Reads the lines of an `episodes.jsonl`, one at a time.

  Args:
    lines: one JSON object each; blank lines are skipped.
    source: what to call the file in an error.

  Raises:
    ValueError: a line that is not JSON, or a key that is missing.
  """
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    episode = _decode(line, f"{source}, line {number}")
    missing = [key for key in REQUIRED if key not in episode]
    if missing:
      raise ValueError(
        f"{source}, line {number}: the episode lacks {', '.join(missing)}; "
        "evaluate this row again with this version."
      )
    yield episode


def _decode(line: str | bytes, where: str) -> Episode:
  try:
    return orjson.loads(line)
  except orjson.JSONDecodeError:
    pass
  # Half a surrogate pair, which a model may emit, is refused by the fast one.
  try:
    return json.loads(line)
  except ValueError as error:
    raise ValueError(
      f"{where}: found text that is not JSON ({error}); "
      "expected one episode a line. Evaluate this row again."
    ) from error


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
