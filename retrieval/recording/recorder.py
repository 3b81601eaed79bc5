"""Records and replays the answers of a retriever, to make runs repeatable.

The first recorded answer to a query is final: it is returned to every later
request for the same query, so the log has exactly what a run saw.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from anysearch_jax import types
from retrieval import requests as requests_lib
from retrieval.recording import answer_log

Answer = tuple[types.Passage, ...]

MODES = ("record", "replay", "strict")


class Recorder(requests_lib.OneByBatch):
  """A retriever that combines another retriever with a log of answers.

  Modes:
    record: always asks the retriever, and writes the answers. If the log
      already has other passages, `counters["conflicts"]` counts them, and the
      log's passages are returned.
    replay: asks the retriever only for answers that the log lacks, and writes
      them.
    strict: asks only the log; needs no retriever.

  Failures are not recorded. Searches may come from any event loop and thread,
  and several processes may use one file; see `answer_log`.

  Args:
    retriever: the wrapped retriever; a strict recorder does not ask it.
    path: path of the log.
    mode: one of `MODES`.
    identity: JSON values; retrievers with equal values give equal answers. None
      without a retriever: the only identity in the log.

  Raises:
    ValueError: the mode is unknown, or needs a retriever or an identity.
    RetrievalError: the log is missing or is not a log of answers.

  `counters` has the `hits` (answers from the log), the `misses`, the `failures`
  among the misses, the answers `recorded`, and the `conflicts`.
  """

  def __init__(
    self,
    retriever: types.BatchRetriever | None,
    path: str | os.PathLike,
    *,
    mode: str,
    identity: Any = None,
  ):
    if mode not in MODES:
      raise ValueError(f"mode: found {mode!r}, expected one of {MODES}.")
    if retriever is None and mode != "strict":
      raise ValueError(f"Mode {mode!r} needs a retriever; 'strict' needs none.")
    self._retriever = None if mode == "strict" else retriever
    self._mode = mode
    self._log = answer_log.AnswerLog(path, writable=mode != "strict")
    if identity is None:
      identity = self._only_identity(is_wrapping=retriever is not None)
    self._identity = json.dumps(
      identity, sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    self._counting = threading.Lock()
    self.counters: Counter[str] = Counter()

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Sequence[types.Passage] | Exception]:
    """Returns answers in the order of the requests.

    The retriever gets all queries that it must answer in one call.

    Returns:
      For each request its passages, or the retriever's exception; in mode
      strict an `answer_log.MissError` if the log has no answer.

    Raises:
      RetrievalError: the log cannot be read or written.
    """
    keys = [
      answer_log.Key(r.query, r.k, r.corpus, self._identity) for r in requests
    ]
    held: list[Answer | None] = [None] * len(keys)
    if self._mode != "record":
      held = await asyncio.to_thread(self._log.read, keys)
    missing = [i for i, answer in enumerate(held) if answer is None]
    self._count(hits=len(keys) - len(missing), misses=len(missing))
    if not missing:
      others: Sequence[Answer | Exception] = ()
    elif self._retriever is None:
      known = await asyncio.to_thread(self._log.identities)
      others = [self._miss(keys[i], known) for i in missing]
    else:
      found = await _ask(self._retriever, [requests[i] for i in missing])
      others = await self._recorded([keys[i] for i in missing], found)
    filled = iter(others)
    return [next(filled) if answer is None else answer for answer in held]

  def identity(self) -> Any:
    """Returns JSON values that identify the retriever that answers or did."""
    return json.loads(self._identity)

  def close(self) -> None:
    """Closes the log; the retriever stays open."""
    self._log.close()

  async def _recorded(
    self,
    keys: Sequence[answer_log.Key],
    found: Sequence[Sequence[types.Passage] | Exception],
  ) -> list[Answer | Exception]:
    """Writes the retriever's answers; returns those that the log has now."""
    good = [
      (key, _plain(answer))
      for key, answer in zip(keys, found, strict=True)
      if not isinstance(answer, Exception)
    ]
    held, new, others = await asyncio.to_thread(self._log.write, good)
    self._count(failures=len(keys) - len(good), recorded=new, conflicts=others)
    kept = iter(held)
    return [
      answer if isinstance(answer, Exception) else next(kept)
      for answer in found
    ]

  def _miss(
    self, key: answer_log.Key, known: list[str]
  ) -> answer_log.MissError:
    others = [identity for identity in known if identity != key.identity]
    hint = (
      ""
      if key.identity in known
      else f" It holds answers of {', '.join(others) or 'nobody'} only."
    )
    return answer_log.MissError(
      f"{self._log.path}: found no answer to {key.query!r} with k={key.k}, "
      f"corpus {key.corpus!r}, identity {key.identity}.{hint} Record it in "
      "mode replay with the retriever."
    )

  def _only_identity(self, *, is_wrapping: bool) -> Any:
    known = self._log.identities()
    if not is_wrapping and len(known) == 1:
      return json.loads(known[0])
    self._log.close()
    raise ValueError(
      f"No identity is given, and {self._log.path} holds answers of "
      f"{', '.join(known) or 'no retriever'}; pass the retriever's identity."
    )

  def _count(self, **more: int) -> None:
    with self._counting:
      self.counters.update(more)


async def _ask(
  retriever: types.BatchRetriever, requests: Sequence[types.SearchRequest]
) -> Sequence[Sequence[types.Passage] | Exception]:
  """Returns the retriever's answers, or for each request what it raised."""
  try:
    found = await retriever.search_many(requests)
    if len(found) != len(requests):
      raise types.RetrievalError(
        f"Found {len(found)} answers to {len(requests)} queries, expected "
        "one for each."
      )
  # An error must not lose the answers that the log gave to other requests.
  except Exception as error:
    return [error] * len(requests)
  return found


def _plain(answer: Sequence[types.Passage]) -> Answer:
  """Returns passages as the log does: in a tuple, with scores of Python."""
  return tuple(
    types.Passage(p.id, p.title, p.text, float(p.score)) for p in answer
  )
