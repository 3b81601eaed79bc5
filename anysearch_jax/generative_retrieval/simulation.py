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
import functools
import re
from collections.abc import Hashable, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.environment import wording
from anysearch_jax.generative_retrieval import text_model
from anysearch_jax.host import json_files
from anysearch_jax.methods import zerosearch
from anysearch_jax.rollout import searching

# A title may hold parentheses.
_DOCUMENT = re.compile(
  r"^\W*Doc(?:ument)?\s*\d+[\s*]*[:.]?[\s*]*"
  r"(?:\(\s*Title:((?:[^()\n]|\([^()\n]*\))*)\))?[:.]?",
  re.IGNORECASE | re.MULTILINE,
)
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")


@dataclasses.dataclass
class SimulatedRetriever:
  """A `types.Retriever` that asks a simulator.

  Attributes:
    simulator: generates the passages: has `find` and `identity` as
      `ModelSimulator`.
    noise: the schedule of noisy passages.
    rollouts: number of rollouts of the run; the progress in the schedule is the
      share of them that is done, at most 1.
    seed: the run's seed.
  """

  simulator: Any
  noise: zerosearch.Options
  _: dataclasses.KW_ONLY
  rollouts: int
  seed: int

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """See `types.EngineUser`."""
    searching.attach(self.simulator, engine, codec)

  def context_key(self, context: types.SearchContext) -> Hashable:
    """Returns what the draws depend on: each turn of each episode differs."""
    return context.address, context.turn

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Returns useful or noisy passages; raises as the simulator."""
    context = request.known_context()
    passages = await self.simulator.find(request, noisy=self.noisy(context))
    return tuple(passages[: request.k])

  def noisy(self, context: types.SearchContext) -> bool:
    """Returns whether a search is answered by noisy passages."""
    progress = min(context.address.rollout / self.rollouts, 1.0)
    drawn = text_model.uniform(
      context.address, context.turn, "noisy", self.seed
    )
    return drawn < zerosearch.noise(progress, self.noise)

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns JSON values that identify simulator and schedule, with a hash."""
    values = {
      "kind": "simulated",
      "by": self.simulator.identity(corpora),
      "noise": dataclasses.asdict(self.noise),
      "rollouts": self.rollouts,
      "seed": self.seed,
    }
    return {**values, "sha256": json_files.sha256(values)}


class ModelSimulator:
  """A simulator whose prompts may hold the question and the right answers.

  Args:
    model: writes the passages.
    texts: ZeroSearch's; `simulator_useful` and `simulator_noisy` are used.
  """

  def __init__(
    self, model: text_model.TextModel, texts: wording.Texts | None = None
  ):
    self._model = model
    self.attach = functools.partial(searching.attach, model)
    self._texts = texts or zerosearch.WORDINGS["zerosearch"].texts()

  async def find(
    self, request: types.SearchRequest, *, noisy: bool
  ) -> Sequence[types.Passage]:
    """Returns noisy or useful passages.

    `request.context` has the question and its right answers.

    Raises:
      types.EngineError, types.RetrievalError: the model gave no reply, or one
        without a passage.
    """
    context = request.known_context()
    kind = "noisy" if noisy else "useful"
    prompt = self._texts.values[f"simulator_{kind}"].format(
      k=request.k,
      question=context.question.text,
      answer=" or ".join(context.question.golden_answers),
      query=request.query,
    )
    reply = await self._model.complete(
      prompt, address=context.address, turn=context.turn
    )
    documents = passages(reply, kind)
    if not documents:
      raise types.RetrievalError(
        f"Found no passage in the simulator's reply {reply[:80]!r}; expected "
        "documents."
      )
    return documents[: request.k]

  def identity(self, corpora: Sequence[str]) -> dict[str, Any]:
    """Returns JSON values that identify the simulator."""
    return {**self._model.identity(), "texts": self._texts.sha256}


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
  pairs = list(zip(parts[::2], parts[1::2], strict=True)) or [
    ("", _BULLET.sub("", line)) for line in reply.splitlines()
  ]
  documents: list[types.Passage] = []
  for title, text in pairs:
    title = (title or "").strip(' "')
    text = " ".join(text.split())
    if text:
      id_ = f"simulated/{kind}/{len(documents) + 1}"
      quoted_title = f'"{title}"' if title else ""
      documents.append(types.Passage(id_, quoted_title, text))
  return documents
