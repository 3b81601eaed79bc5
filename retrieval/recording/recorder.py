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
from typing import TYPE_CHECKING, Any

from anysearch_jax.host.http import errors
from retrieval import passages
from retrieval.recording import answer_log

if TYPE_CHECKING:
  from retrieval import lexical  # It imports JAX.

Answer = tuple[passages.Passage, ...]

MODES = ("live", "record", "replay", "strict")


class Recorder:
  """A retriever that combines another retriever with a log of answers.

  Modes:
    live: asks the retriever; there is no log.
    record: always asks the retriever, and writes the answers. If the log
      already has other passages, `counters["conflicts"]` counts them, and the
      log's passages are returned.
    replay: asks the retriever only for answers that the log lacks, and writes
      them.
    strict: asks only the log; needs no retriever.

  Failures are not recorded. Searches may come from any event loop and thread,
  and several processes may use one file; see `answer_log`.

  Args:
    retriever: the wrapped retriever, called by `search_many` if it has this
      method, otherwise by `search`.
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
    retriever: Any | None,
    path: str | os.PathLike,
    *,
    mode: str,
    identity: Any = None,
  ):
    if mode not in MODES:
      raise ValueError(f"mode: found {mode!r}, expected one of {MODES}.")
    if retriever is None and mode != "strict":
      raise ValueError(f"Mode {mode!r} needs a retriever; 'strict' needs none.")
    self._retriever, self._mode = retriever, mode
    self._log = None
    if mode != "live":
      self._log = answer_log.AnswerLog(path, writable=mode != "strict")
      if identity is None:
        identity = self._only_identity()
    self._identity = json.dumps(
      identity, sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    self._counting = threading.Lock()
    self.counters: Counter[str] = Counter()

  async def search(self, request: lexical.Request) -> Sequence[Any]:
    """Answers one query; see `search_many`."""
    (answer,) = await self.search_many([request])
    if isinstance(answer, Exception):
      raise answer
    return answer

  async def search_many(
    self, requests: Sequence[lexical.Request]
  ) -> list[Sequence[Any] | Exception]:
    """Returns answers in the order of the requests.

    The retriever gets all queries that it must answer in one call.

    Returns:
      For each request its passages, or the retriever's exception; in mode
      strict an `errors.MissError` if the log has no answer.

    Raises:
      RetrievalError: the log cannot be read or written.
    """
    if self._log is None:
      return await self._ask(requests)
    keys = [
      answer_log.Key(r.query, r.k, r.corpus, self._identity) for r in requests
    ]
    answers: list[Any] = [None] * len(keys)
    if self._mode != "record":
      answers = await asyncio.to_thread(self._log.read, keys)
    missing = [i for i, answer in enumerate(answers) if answer is None]
    self._count(hits=len(keys) - len(missing), misses=len(missing))
    if missing and self._mode == "strict":
      known = await asyncio.to_thread(self._log.identities)
      for i in missing:
        answers[i] = self._miss(keys[i], known)
    elif missing:
      found = await self._ask([requests[i] for i in missing])
      for i, answer in zip(missing, found, strict=True):
        answers[i] = answer
      good = [i for i in missing if not isinstance(answers[i], Exception)]
      held, new, others = await asyncio.to_thread(
        self._log.write, [(keys[i], _plain(answers[i])) for i in good]
      )
      for i, answer in zip(good, held, strict=True):
        answers[i] = answer
      self._count(
        failures=len(missing) - len(good), recorded=new, conflicts=others
      )
    return answers

  def identity(self) -> Any:
    """Returns JSON values that identify the retriever that answers or did."""
    return json.loads(self._identity)

  def close(self) -> None:
    """Closes the log; the retriever stays open."""
    if self._log is not None:
      self._log.close()

  async def _ask(
    self, requests: Sequence[lexical.Request]
  ) -> Sequence[Sequence[Any] | Exception]:
    many = getattr(self._retriever, "search_many", None)
    if many is None:
      return await asyncio.gather(
        *map(self._retriever.search, requests), return_exceptions=True
      )
    try:
      found = await many(requests)
      if len(found) != len(requests):
        raise errors.RetrievalError(
          f"Found {len(found)} answers to {len(requests)} queries, expected "
          "one for each."
        )
    # An error must not lose the answers that the log gave to other requests.
    except Exception as error:
      found = [error] * len(requests)
    return found

  def _miss(self, key: answer_log.Key, known: list[str]) -> errors.MissError:
    others = [identity for identity in known if identity != key.identity]
    hint = (
      ""
      if key.identity in known
      else f" It holds answers of {', '.join(others) or 'nobody'} only."
    )
    return errors.MissError(
      f"{self._log.path}: found no answer to {key.query!r} with k={key.k}, "
      f"corpus {key.corpus!r}, identity {key.identity}.{hint} Record it in "
      "mode replay with the retriever."
    )

  def _only_identity(self) -> Any:
    known = self._log.identities()
    if self._retriever is None and len(known) == 1:
      return json.loads(known[0])
    self._log.close()
    raise ValueError(
      f"No identity is given, and {self._log.path} holds answers of "
      f"{', '.join(known) or 'nobody'}; expected the retriever's."
    )

  def _count(self, **more: int) -> None:
    with self._counting:
      self.counters.update(more)


def _plain(answer: Sequence[Any]) -> Answer:
  """Converts the passages of any retriever to those that the log returns."""
  return tuple(
    passages.Passage(p.id, p.title, p.text, float(getattr(p, "score", 0.0)))
    for p in answer
  )
