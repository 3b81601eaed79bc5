"""A retriever that answers in stages; see `spec`.

Retrievers are asked at the same time and fused, then each further stage sees
the passages of the one before it. A batch of queries goes through each stage
together. A stage has a deadline and keeps results.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from anysearch_jax import types
from anysearch_jax.host import counting
from retrieval import requests as requests_lib
from retrieval.pipeline import stages as stages_lib

FUSED = "fused"
_log = logging.getLogger(__name__)

Found = stages_lib.Answer | Exception


class Step(NamedTuple):
  """What a stage made of a batch of queries.

  Attributes:
    name: name of the stage, or `FUSED`.
    answers: for each query its passages after the stage, or why it failed.
    seconds: time that the stage took.
  """

  name: str
  answers: Sequence[Found]
  seconds: float


class PipelineRetriever(requests_lib.OneByBatch):
  """Answers queries in stages; usable from any event loop.

  A stage that fails, or takes longer than its deadline, fails the queries that
  it has no result for. If it is optional, they go on without it: a retriever
  adds nothing to the fusion, a reranker leaves the order as it was. The search
  fails if no retriever answers. The fusion keeps as many passages as the
  retriever that keeps most.

  Args:
    stages: those that retrieve come first.

  `counters` has, for all stages together, `left_out`, the number of queries
  that went on without an optional stage; and for each stage NAME `NAME.queries`
  (that were asked), `NAME.cached`, `NAME.failures` (of queries, left out or
  not), `NAME.left_out` and `NAME.seconds`. `NAME/...` are the counters of the
  stage's retriever or reranker, such as the `cost` of a search engine.
  """

  def __init__(self, stages: Sequence[stages_lib.Stage]):
    first = [isinstance(each, stages_lib.Retrieve) for each in stages]
    count = sum(first)
    if not count or not all(first[:count]):
      raise ValueError(
        "Found a pipeline that does not begin with its retrievers; expected "
        "one or more, before all other stages."
      )
    self._first, self._then = stages[:count], stages[count:]
    self._fused = max(each.settings.keep for each in self._first)
    self.stages = tuple(stages)
    self._counters: Counter[str] = Counter()

  @property
  def counters(self) -> Counter[str]:
    """The counts so far; see the class."""
    # Of copies, because other threads may count meanwhile.
    parts = (
      (stage.settings.name, dict(counting.counters(stage.part)))
      for stage in self.stages
    )
    return Counter(dict(self._counters)) + Counter(
      {
        f"{name}/{key}": n
        for name, counts in parts
        for key, n in counts.items()
      }
    )

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers of all stages."""
    return {"kind": "pipeline", "stages": [s.identity() for s in self.stages]}

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Found]:
    """Returns answers in the order of the requests.

    An answer has at most `k` passages, and no more than the last stage keeps.

    Raises:
      ValueError: a request asks for fewer than 1 passage.
    """
    for request in requests:
      # Each retriever checks whether it has the corpus.
      requests_lib.check([request], request.corpus)
    queries = [stages_lib.Query(r.query, r.corpus) for r in requests]
    asked = list(dict.fromkeys(queries))
    steps = await self.steps(asked)
    found = dict(zip(asked, steps[-1].answers, strict=True)) if steps else {}
    return [
      answer if isinstance(answer, Exception) else answer[: request.k]
      for request, query in zip(requests, queries, strict=True)
      for answer in (found[query],)
    ]

  async def steps(self, queries: Sequence[stages_lib.Query]) -> list[Step]:
    """Returns what each stage makes of different queries, in order.

    With several retrievers their fusion is a step too.
    """
    if not queries:
      return []
    started = time.perf_counter()
    nothing: list[Found] = [()] * len(queries)
    steps = list(
      await asyncio.gather(
        *(self._step(stage, queries, nothing) for stage in self._first)
      )
    )
    each = zip(*(step.answers for step in steps), strict=True)
    retrieved = [self._retrieved(found) for found in each]
    if len(steps) > 1:
      steps.append(Step(FUSED, retrieved, time.perf_counter() - started))
    else:
      steps[0] = steps[0]._replace(answers=retrieved)
    for stage in self._then:
      steps.append(await self._step(stage, queries, steps[-1].answers))
    return steps

  def _retrieved(self, found: Sequence[Found]) -> Found:
    """Returns the fused passages of a query, or why it failed."""
    answers: list[stages_lib.Answer] = []
    failures: list[Exception] = []
    for stage, answer in zip(self._first, found, strict=True):
      if not isinstance(answer, Exception):
        answers.append(answer)
      elif _may_be_left_out(stage, answer):
        failures.append(answer)
      else:
        return answer
    if not answers:
      return failures[0]
    if len(self._first) == 1:
      return answers[0]
    return stages_lib.fuse(answers, self._fused)

  async def _step(
    self,
    stage: stages_lib.Stage,
    queries: Sequence[stages_lib.Query],
    before: Sequence[Found],
  ) -> Step:
    """Runs one stage for the queries that have not failed before it."""
    started = time.perf_counter()
    out: list[Found] = list(before)
    places: list[int] = []
    known: list[stages_lib.Answer] = []
    for i, some in enumerate(before):
      if isinstance(some, Exception):
        continue
      kept = stage.kept(queries[i], some)
      if kept is None:
        places.append(i)
        known.append(some)
      else:
        out[i] = kept
        self._counters[f"{stage.settings.name}.cached"] += 1
    if places:
      found = await self._asked(stage, [queries[i] for i in places], known)
      for i, answer in zip(places, found, strict=True):
        out[i] = answer
    seconds = time.perf_counter() - started
    self._counters[f"{stage.settings.name}.seconds"] += seconds  # type: ignore[assignment]  # A float.
    return Step(stage.settings.name, out, seconds)

  async def _asked(
    self,
    stage: stages_lib.Stage,
    queries: Sequence[stages_lib.Query],
    before: Sequence[stages_lib.Answer],
  ) -> Sequence[Found]:
    """Asks a stage within its deadline; what may be left out, is.

    A retriever that is left out answers with its exception, because there is
    nothing before it.
    """
    settings = stage.settings
    self._counters[f"{settings.name}.queries"] += len(queries)
    found: Sequence[Found]
    try:
      async with asyncio.timeout(settings.deadline):
        found = await stage.answers(queries, before)
    except TimeoutError:
      late = types.RetrievalError(
        f"The stage {settings.name!r} of the pipeline had no answer to "
        f"{len(queries)} queries within {settings.deadline:g} seconds. Give it "
        "a longer deadline, or set optional = true to go on without it."
      )
      found = [late] * len(queries)
    except types.RetrievalError as error:
      found = [error] * len(queries)
    out = list(found)
    failed = [i for i, some in enumerate(found) if isinstance(some, Exception)]
    left = [i for i in failed if _may_be_left_out(stage, found[i])]
    self._counters[f"{settings.name}.failures"] += len(failed)
    if left:
      self._leave_out(settings.name, len(left), found[left[0]])
      if not isinstance(stage, stages_lib.Retrieve):
        for i in left:
          out[i] = before[i]
    return out

  def _leave_out(self, name: str, queries: int, why: object) -> None:
    """Counts queries without a stage; the log has every doubling of them."""
    was = self._counters[f"{name}.left_out"]
    self._counters["left_out"] += queries
    self._counters[f"{name}.left_out"] += queries
    if (was + queries).bit_length() > was.bit_length():
      _log.warning(
        "%d queries of the pipeline went on without its stage %r; the last "
        "because: %s",
        *(was + queries, name, why),
      )


def _may_be_left_out(stage: stages_lib.Stage, answer: object) -> bool:
  """Returns whether a failure is of a stage that is optional, and no bug."""
  return stage.settings.optional and isinstance(answer, types.RetrievalError)
