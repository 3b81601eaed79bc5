"""ZeroSearch's simulated search engine: a model generates the passages.

Passages are noisy with a probability that follows a schedule over training, and
useful otherwise. The draw depends only on the address of the search, not on
timing. See https://arxiv.org/abs/2505.04588.

Deviation from the released code: each search is simulated with its own question
and right answer. The released code uses those of another question once any
trajectory of the batch does not search. Passages have titles, like real ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Protocol

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.generative_retrieval import text_model
from anysearch_jax.methods import zerosearch_reward

_PROMPT = """\
You play a web search engine. Below is a query, and what the searcher does not \
see: the question behind it and its right answer. Write {k} {kind} documents \
that could come back for the query, of about 30 words each, as they stand on \
web pages.
{meaning}
Write nothing but the documents, one a line, in this form:
Doc 1(Title: title of the page) text of the page

Question: {question}
Right answer: {answer}
Query: {query}
{kind} documents:"""
_MEANING = {
  "useful": (
    "Useful documents state what the query asks for, and get their reader on "
    "towards the right answer."
  ),
  "noisy": (
    "Noisy documents fit the words of the query and are of no help: vague, "
    "beside the point or mistaken. None of them gives the right answer."
  ),
}
# A title may hold parentheses.
_DOCUMENT = re.compile(
  r"^\W*Doc(?:ument)?\s*\d+[\s*]*[:.]?[\s*]*"
  r"(?:\(\s*Title:((?:[^()\n]|\([^()\n]*\))*)\))?[:.]?",
  re.IGNORECASE | re.MULTILINE,
)
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")


class Simulator(Protocol):
  """Generates passages."""

  async def find(
    self, request: types.SearchRequest, *, noisy: bool
  ) -> Sequence[types.Passage]:
    """Returns at most `request.k` noisy or useful passages.

    `request.asker` has the question and its right answers.

    Raises:
      types.EngineError, types.RetrievalError: the simulator cannot answer.
    """
    ...

  def identity(self, corpora: Sequence[str]) -> dict[str, Any]:
    """Returns JSON values that identify the simulator."""
    ...


class SimulatedRetriever:
  """A `types.Retriever` that asks a simulator.

  Args:
    simulator: generates the passages.
    config: the schedule of the noise.
    rollouts: number of rollouts of the run; the progress in the schedule is the
      share of them that is done, at most 1.
    seed: of the run.
  """

  by_asker = True

  def __init__(
    self,
    simulator: Simulator,
    config: config_methods.ZeroSearchConfig,
    *,
    rollouts: int,
    seed: int,
  ):
    self._simulator, self._config = simulator, config
    self._rollouts, self._seed = rollouts, seed

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """See `text_model.attach`."""
    text_model.attach(self._simulator, engine, codec)

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Returns useful or noisy passages; raises as `Simulator.find`."""
    asker = asking(request)
    found = await self._simulator.find(request, noisy=self.noisy(asker))
    return tuple(found[: request.k])

  def noisy(self, asker: types.Asker) -> bool:
    """Returns whether a search is answered by noisy passages."""
    progress = min(asker.address.rollout / self._rollouts, 1.0)
    drawn = text_model.uniform(asker.address, asker.turn, "noisy", self._seed)
    return drawn < zerosearch_reward.noise(progress, self._config)

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns JSON values that identify simulator and schedule, with a hash."""
    return text_model.identified(
      {
        "kind": "simulated",
        "by": self._simulator.identity(corpora),
        "noise": dataclasses.asdict(self._config),
        "rollouts": self._rollouts,
        "seed": self._seed,
      }
    )


class ModelSimulator:
  """A simulator whose prompt contains the question and the right answers.

  Args:
    model: writes the passages.
  """

  def __init__(self, model: text_model.TextModel):
    self._model = model

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """See `text_model.attach`."""
    text_model.attach(self._model, engine, codec)

  async def find(
    self, request: types.SearchRequest, *, noisy: bool
  ) -> Sequence[types.Passage]:
    """See `Simulator`; a reply without a passage raises RetrievalError."""
    asker = asking(request)
    kind = "noisy" if noisy else "useful"
    prompt = _PROMPT.format(
      k=request.k,
      kind=kind,
      meaning=_MEANING[kind],
      question=asker.question.text,
      answer=" or ".join(asker.question.golden_answers),
      query=request.query,
    )
    reply = await self._model.complete(
      prompt, address=asker.address, turn=asker.turn
    )
    found = passages(reply, kind)
    if not found:
      raise types.RetrievalError(
        f"Found no passage in the simulator's reply {reply[:80]!r}; expected "
        "documents."
      )
    return found[: request.k]

  def identity(self, corpora: Sequence[str]) -> dict[str, Any]:
    """See `Simulator`."""
    del corpora
    return self._model.identity()


def asking(request: types.SearchRequest) -> types.Asker:
  """Returns the asker of a request. Raises ValueError if it is missing."""
  if request.asker is None:
    raise ValueError(
      f"Found the search {request.query!r} without an asker; expected one of "
      "an episode, because this retriever answers each in its own way."
    )
  return request.asker


def passages(reply: str, kind: str) -> list[types.Passage]:
  """Parses the passages of a simulator's reply.

  Args:
    reply: documents marked by `Doc 1`, `Doc 2`, ..., or one per line without
      such marks. Text before `</think>` is ignored.
    kind: part of the passages' ids, which a trajectory's record shows.
  """
  reply = reply.rpartition("</think>")[2]
  # The text before the first mark, then a title and a text for each document.
  _, *parts = _DOCUMENT.split(reply)
  titles, texts = parts[::2], parts[1::2]
  if not parts:
    texts = [_BULLET.sub("", line) for line in reply.splitlines()]
    titles = [""] * len(texts)
  found = []
  for title, text in zip(titles, texts, strict=True):
    title = (title or "").strip(' "')
    if text := " ".join(text.split()):
      found.append(
        types.Passage(
          f"simulated/{kind}/{len(found) + 1}", title and f'"{title}"', text
        )
      )
  return found
