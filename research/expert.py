r"""A scripted expert of the generated world, which made its warm start.

    python -m launch.evaluate --config=configs/quickstart.py \
        --scripted=research/expert.py:play --output=runs/expert

Its accuracy is what imitation can reach. It writes the turns of an episode,
word by word. A thought is a sequence of clauses that end in `;`: the result of
the search (`found v`, `nothing`, `conflict`), the fact needed next (`need e r`)
and, without a search for it, `recall v` or `guess v`. With the scaffold a
thought begins with two more: whether the information suffices, and how much
budget is left (the paper's dual-factor analysis).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

import anysearch_jax as aj

_FACTS = aj.generated_world
_PROMPT = re.compile(r"(guide )?budget (\d+) question (.*? \?)")
_AFTER_SEARCH = re.compile(
  r"</search>\s*(?:<information>(.*?)</information>)?", re.S
)

_AMPLE = 3  # From this remaining budget on, the scaffold calls it ample.


class Situation(NamedTuple):
  """What a decision to search depends on.

  Attributes:
    decision: `known` or `unknown`, before the first search for a fact that
      memory holds or does not; `miss`, after a search that found nothing;
      `conflict`, after one that found two values.
    relations: those of the facts that are still needed, the present one first.
    remaining: searches left.
  """

  decision: str
  relations: tuple[str, ...]
  remaining: int


# Returns the probability of searching.
Strategy = Callable[[Situation], float]


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
  """Probabilities of the expert's decisions while budget is left.

  P(search) for a fact that memory holds is

    p_search_known + change_slope (change - 0.2) + slack_slope slack

  within [0.03, 0.97] if a slope is not 0, where `change` is how often memories
  of the relation are wrong, and slack is (searches left - facts left) / 3,
  within [-1, 1].

  Attributes:
    p_search_known, p_search_unknown: of searching for a fact that memory holds,
      and for one that it does not.
    p_retry_on_miss: of searching again in the alternative wording.
    p_check_on_conflict: of searching for the verdict on two values.
    p_over_budget: of searching without budget, at most once an episode.
    p_redundant: of repeating a search that has found its value.
    p_early_answer: of answering before the end of the chain, at every hop.
  """

  p_search_known: float = 0.6
  p_search_unknown: float = 0.75
  p_retry_on_miss: float = 0.7
  p_check_on_conflict: float = 0.5
  p_over_budget: float = 0.15
  p_redundant: float = 0.02
  p_early_answer: float = 0.02
  change_slope: float = 0.0
  slack_slope: float = 0.0

  def strategy(self, world: aj.World) -> Strategy:
    """Returns these probabilities as a function of the situation."""

    def chance(situation: Situation) -> float:
      match situation.decision:
        case "miss":
          return self.p_retry_on_miss
        case "conflict":
          return self.p_check_on_conflict
        case "unknown":
          return self.p_search_unknown
      if not (self.change_slope or self.slack_slope):
        return self.p_search_known
      change = 1 - world.reliability(situation.relations[0])
      slack = (situation.remaining - len(situation.relations)) / 3
      chance = self.p_search_known + self.change_slope * (change - 0.2)
      chance += self.slack_slope * min(max(slack, -1.0), 1.0)
      return min(max(chance, 0.03), 0.97)

    return chance


# The experts whose demonstrations made the shipped warm start. They also search
# what memory holds, a little more often if the memory is less reliable or
# budget is left over. With the scaffold they depend on both more strongly, so
# that the scaffold helps before any training.
PLAIN = ExpertConfig(change_slope=0.6, slack_slope=0.15)
SCAFFOLDED = ExpertConfig(
  p_search_known=0.5,
  p_search_unknown=0.95,
  p_retry_on_miss=0.85,
  p_check_on_conflict=0.7,
  change_slope=1.2,
  slack_slope=0.4,
)


class Turn(NamedTuple):
  """Words of a turn, and marks (index of a word, kind of its decision)."""

  words: list[str]
  marks: list[tuple[int, str]]

  def clause(self, *words: str | tuple[str, str]) -> None:
    """Writes a clause; a word that is a decision comes with its kind."""
    for word in words:
      self.write(*((word,) if isinstance(word, str) else word))
    self.words.append(";")

  def write(self, word: str, kind: str = "") -> None:
    """Writes a word, and marks it if it is a decision of this kind."""
    if kind:
      self.marks.append((len(self.words), kind))
    self.words.append(word)


Turns = Generator[Turn, Sequence[aj.Passage] | None, None]
_Value = Generator[Turn, Sequence[aj.Passage] | None, str]


class Expert:
  """Writes the turns of one episode.

  Args:
    question: a chain of facts.
    world: its memory is the expert's.
    budget: number of searches, >= 0.
    scaffold: whether thoughts begin with the paper's dual-factor analysis.
    config: probabilities of decisions.
    rng: random numbers of the decisions.
  """

  def __init__(
    self,
    question: aj.Question,
    *,
    world: aj.World,
    budget: int,
    scaffold: bool,
    config: ExpertConfig,
    rng: np.random.Generator,
  ):
    self._strategy = config.strategy(world)
    self._settled = 0
    self._chain = question.text.split()[:-1]
    self._world = world
    self._remaining = budget
    self._scaffold = scaffold
    self._config = config
    self._rng = rng
    self._over_budget = False
    self._turn = Turn([], [])

  def turns(self) -> Turns:
    """Yields turns.

    Send it a search's passages, or None if it was refused or its turn was cut.
    An answer that was cut is repeated without a thought.
    """
    entity, *relations = self._chain
    self._open(sufficient=False)
    for hop, relation in enumerate(relations, 1):
      last = hop == len(relations)
      entity = yield from self._resolve(entity, relation, last=last)
      if self._chance(self._config.p_early_answer):
        break
    while True:
      self._turn.words.extend(("</think>", "<answer>"))
      self._turn.write(entity, "answer")
      self._turn.words.append("</answer>")
      yield self._turn
      self._turn = Turn(["<think>"], [])

  def _resolve(self, entity: str, relation: str, *, last: bool) -> _Value:
    """Finds, recalls or guesses one value."""
    config, world = self._config, self._world
    memory = recall(world, entity, relation)
    alternative = _FACTS.RELATIONS[_FACTS.INDEX[relation]].alternative
    candidates = objects(world, relation)
    known = memory is not None
    chance = self._wants("known" if known else "unknown")
    kind = f"recall_{'known' if known else 'unknown'}"
    need, wording = relation, relation
    while True:
      left = self._remaining
      self._turn.clause("need", entity, (need, "relation"))
      if not left:
        kind = "choice"
      if not self._searches(chance, left, known=known):
        break
      passages = yield from self._search(entity, wording, kind)
      kind = "choice"
      if passages is None:
        self._open(sufficient=False)
        chance = 0.0
        continue
      verdict = need == _FACTS.VERDICT
      wordings = (wording,) if verdict else (relation, alternative)
      values = aj.world_agents.values_of(passages, entity, wordings)
      self._open(sufficient=last and len(values) == 1)
      if len(values) == 1:
        self._turn.clause(("found", "found"), (values[0], "copy"))
        if not (self._remaining and self._chance(config.p_redundant)):
          return self._settle(values[0])
        chance = 1.0
      elif values:
        self._turn.clause(("conflict", "conflict"))
        candidates = values
        need = wording = _FACTS.VERDICT
        chance = self._wants("conflict")
      else:
        self._turn.clause(("nothing", "nothing"))
        # After the alternative wording there is no other one to try.
        chance = self._wants("miss") if wording == relation else 0.0
        wording = alternative
    if memory is not None:
      self._turn.clause(("recall", kind), (memory, "memory"))
      return self._settle(memory)
    value = candidates[int(self._rng.integers(len(candidates)))]
    self._turn.clause(("guess", kind), value)
    return self._settle(value)

  def _wants(self, decision: str) -> float:
    """Returns the probability of a search, by the strategy."""
    needed = tuple(self._chain[1 + self._settled :])
    return self._strategy(Situation(decision, needed, self._remaining))

  def _settle(self, value: str) -> str:
    self._settled += 1
    return value

  def _searches(self, chance: float, left: int, *, known: bool) -> bool:
    """Decides whether the expert searches for the fact that it needs."""
    if left or not chance:
      return self._chance(chance)
    if known or self._over_budget:
      return False
    self._over_budget = self._chance(self._config.p_over_budget)
    return self._over_budget

  def _search(
    self, entity: str, wording: str, kind: str
  ) -> Generator[Turn, Sequence[aj.Passage] | None, Sequence | None]:
    """Ends the turn with a search; returns its passages, None if refused."""
    self._turn.write("</think>", kind)
    self._turn.words.extend(("<search>", entity, wording, "</search>"))
    passages = yield self._turn
    self._remaining -= passages is not None
    return passages

  def _open(self, *, sufficient: bool) -> None:
    self._turn = Turn(["<think>"], [])
    if self._scaffold:
      self._turn.clause("sufficient" if sufficient else "missing")
      ample = "ample" if self._remaining >= _AMPLE else "tight"
      self._turn.clause(ample if self._remaining else "empty")

  def _chance(self, p: float) -> bool:
    return bool(self._rng.random() < p)


def play(config: aj.ExperimentConfig, source: Any) -> aj.Player:
  """Returns the expert of a source's world, for `--scripted`.

  The engine keeps no state between turns: in each turn it replays the episode
  from the context, with the same random numbers.
  """
  del config
  codec = aj.Tokenizer(aj.world_tokenizer(source.world))

  def say(request: aj.GenerateRequest, context: str) -> str:
    prompt = _PROMPT.search(context)
    if prompt is None:
      raise ValueError(
        f"Found the context {context[:80]!r}, expected the prompt of a "
        "question of the world (episode.prompts 'world')."
      )
    turns = Expert(
      aj.Question("", prompt[3], ()),
      world=source.world,
      budget=int(prompt[2]),
      scaffold=bool(prompt[1]),
      config=SCAFFOLDED if prompt[1] else PLAIN,
      rng=np.random.default_rng(request.address[:4]),
    ).turns()
    said = " ".join(next(turns).words)
    for searched in _AFTER_SEARCH.finditer(context, prompt.end()):
      if said not in context:
        raise aj.EngineError(
          "Found a turn that the scripted expert did not write; it can "
          "continue only its own episodes, so they cannot branch."
        )
      shown = searched[1]
      passages = None if shown is None else aj.world_agents.passages_of(shown)
      said = " ".join(turns.send(passages).words)
    return said

  return aj.Player(aj.world_agents.ScriptedEngine(say, codec), codec)


def recall(world: aj.World, entity: str, relation: str) -> str | None:
  """Returns the memorized value of a fact, or None."""
  value = world.memory[world.index[entity], _FACTS.INDEX[relation]]
  return None if value < 0 else world.entities[value]


def objects(world: aj.World, relation: str) -> Sequence[str]:
  """Returns all entities of the kind that a relation leads to."""
  kind = _FACTS.RELATIONS[_FACTS.INDEX[relation]].object
  members = world.members[kind]
  return world.entities[members.start : members.stop]
