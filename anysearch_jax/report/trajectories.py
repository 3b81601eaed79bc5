"""Trajectories for readers: a sample to browse.

The browser's rows show the same (question, budget, seed) if they have them:
each row orders its keys by their hash, which needs no knowledge of the others.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from anysearch_jax.environment import citations, records
from anysearch_jax.evaluation import columns as columns_lib

# Decodes token ids to text, including control tokens.
Decoder = Callable[[Sequence[int]], str]

# Keys of an episode that every entry has, and those it has if they are set.
_ENTRY_KEYS = (
  "question_id", "question", "golden_answers", "budget", "seed", "answer",
  "em", "format", "searches", "violation", "outcome", "generated_tokens",
  "retrieved_tokens",
)  # fmt: skip
_OPTIONAL_KEYS = ("reason", "cost", "reward", "advantage", "training")

# Approximate JSON bytes of a token's text in the vocabulary.
_WORD_BYTES = 12


@dataclasses.dataclass(frozen=True)
class Sample:
  """Some complete episodes of a row, or of a training run's rollouts.

  `decode` belongs to the row's tokenizer; None if it is unavailable.
  """

  label: str
  episodes: Sequence[columns_lib.Episode]
  decode: Decoder | None = None


def sources(episode: columns_lib.Episode) -> list[str]:
  """Returns title and place of the passages shown, numbered as for citations.

  It is empty if none of them is from a file.
  """
  observations = episode.get("observations", ())
  passages = [passage for o in observations for passage in o["passages"]]
  if not any("source" in passage for passage in passages):
    return []
  distinct = {(p["id"], p["title"], p["text"]): p for p in passages}
  return list(map(citations.head, map(records.passage, distinct.values())))


def _spread(
  episodes: Iterable[columns_lib.Episode],
) -> list[columns_lib.Episode]:
  """Orders episodes by draw, in a round robin over (dataset, budget)."""
  turns: collections.Counter[tuple[str, int]] = collections.Counter()
  placed = []
  for episode in sorted(episodes, key=columns_lib.draw):
    cell = columns_lib.dataset_of(episode), episode["budget"]
    placed.append((turns[cell], episode))
    turns[cell] += 1
  return [episode for _, episode in sorted(placed, key=lambda pair: pair[0])]


def browser_data(
  samples: Sequence[Sample],
  *,
  max_entries: int = 320,
  max_bytes: int = 5_000_000,
) -> dict[str, Any]:
  """Returns the browser's `rows`, `entries` and `vocabulary` of token texts.

  Args:
    samples: rows in the page's order, then training runs.
    max_entries: maximum number of trajectories, divided equally among the
      samples.
    max_bytes: approximate limit of their JSON; when it is exceeded, the
      remaining trajectories of each sample are left out.
  """
  vocabulary: dict[tuple[int, str], int] = {}
  limit = max_entries // max(1, len(samples))
  columns = [_spread(sample.episodes)[:limit] for sample in samples]
  entries: list[dict[str, Any]] = []
  size = 0
  # Turn by turn over all rows, so that a truncated page keeps the same keys in
  # every row.
  for turn in range(max(map(len, columns), default=0)):
    for index, (sample, column) in enumerate(zip(samples, columns)):
      if turn < len(column):
        words_before = len(vocabulary)
        entry = _entry(index, column[turn], sample.decode, vocabulary)
        new_words = len(vocabulary) - words_before
        size += len(json.dumps(entry)) + _WORD_BYTES * new_words
        entries.append(entry)
    if size > max_bytes:
      break
  entries.sort(key=lambda e: e["row"])
  return {
    "rows": [sample.label for sample in samples],
    "entries": entries,
    "vocabulary": [text for _, text in vocabulary],
  }


def script(data: Mapping[str, Any]) -> str:
  """Returns JSON that cannot close the `<script>` element that holds it."""
  text = json.dumps(data, separators=(",", ":"), allow_nan=False)
  return (
    text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
  )


def _entry(
  row: int,
  episode: columns_lib.Episode,
  decode: Decoder | None,
  vocabulary: dict[tuple[int, str], int],
) -> dict[str, Any]:
  entry = {key: episode.get(key) for key in _ENTRY_KEYS}
  entry |= {
    key: episode[key]
    for key in _OPTIONAL_KEYS
    if episode.get(key) not in (None, "")
  }
  entry |= {
    "row": row,
    "dataset": columns_lib.dataset_of(episode),
    "hops": (episode.get("metadata") or {}).get("hops"),
    "sources": sources(episode),
  }
  tokens = episode.get("tokens")
  if isinstance(tokens, Mapping) and decode is not None:
    return entry | _tokens(tokens, decode, vocabulary)
  return entry | {
    "pieces": [[s["author"], s["text"]] for s in episode["spans"]]
  }


def _tokens(
  tokens: Mapping[str, Any],
  decode: Decoder,
  vocabulary: dict[tuple[int, str], int],
) -> dict[str, Any]:
  ids = tokens["ids"]
  authors = [tuple(run) for run in tokens["authors"]]
  prompt = sum(count for author, count in authors if author == "prompt")
  texts = token_texts(ids[prompt:], decode)
  logps = tokens.get("logps")
  return {
    "prompt": decode(ids[:prompt]),
    "tokens": {
      "texts": [
        vocabulary.setdefault(pair, len(vocabulary))
        for pair in zip(ids[prompt:], texts, strict=True)
      ],
      "authors": [run for run in authors if run[0] != "prompt"],
      "logps": None if logps is None else [round(x, 3) for x in logps],
      "versions": tokens.get("versions"),
    },
  }


def token_texts(ids: Sequence[int], decode: Decoder) -> list[str]:
  """Returns the text that each token adds; their concatenation is the text.

  A token that ends inside a multi-byte character adds "", and the token that
  completes the character adds all of it.
  """
  texts: list[str] = []
  # The previous window, start to done, is decoded again as context: decoders
  # treat a first token differently (its leading space).
  start = done = 0
  for stop in range(1, len(ids) + 1):
    context = decode(ids[start:done])
    extended = decode(ids[start:stop])
    # The replacement character stands for the bytes of an incomplete character.
    if extended.endswith("\ufffd") and stop < len(ids):
      texts.append("")
      continue
    texts.append(extended[len(context) :])
    start = done
    done = stop
  return texts
