"""An engine whose turns follow the evidence of the question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from anysearch_jax import budgets, types
from anysearch_jax.demonstrations import evidence_chains
from anysearch_jax.environment import protocol
from anysearch_jax.rollout import scripted

# Tokens at the end of a context that may hold an opened `<think>`.
_OPENED_TOKENS = 8


class EvidenceEngine:
  """A `types.Engine` that knows the answers, and searches as `evidence_chains`.

  Args:
    cell: returns seed, budget and question of the episode at an address's
      `variant`, as `harness.Grid.cell`.
    retriever: the one that the episodes search.
    k: passages of a search.
    codec: encodes and decodes the tokens.
  """

  def __init__(
    self,
    cell: Callable[[int], tuple[int, budgets.Budget, types.Question]],
    retriever: types.Retriever,
    *,
    k: int,
    codec: types.TextCodec,
  ):
    self._cell = cell
    self._retriever = retriever
    self._k = k
    self._codec = codec
    self._turns: dict[types.Address, list[str]] = {}
    self.counters: Counter[str] = Counter()

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """Returns the next turn of the episode's chain."""
    if request.address not in self._turns:
      self._turns[request.address] = await self._planned(request)
    turns = self._turns[request.address]
    # After a refused turn, the answer is all that is left to say.
    text = turns[min(request.turn, len(turns) - 1)]
    end = self._codec.decode(request.token_ids[-_OPENED_TOKENS:])
    if protocol.opened_reasoning(end):
      text = text.removeprefix("<think>")
    turn = scripted.generation(text, request, self._codec)
    self.counters["sampled_tokens"] += len(turn.token_ids)
    return turn

  async def _planned(self, request: types.GenerateRequest) -> list[str]:
    _, budget, question = self._cell(request.address.variant)

    async def search(query: str):
      return await self._retriever.search(
        types.SearchRequest(query, k=self._k, corpus=question.corpus)
      )

    turns = await evidence_chains.turns(
      question, budget=budget.searches, search=search
    )
    control_tokens = self._codec.control_tokens
    return [evidence_chains.written(turn, control_tokens) for turn in turns]

  def release(self, address: types.Address) -> None:
    """Forgets an episode that is over."""
    self._turns.pop(address, None)
