"""A scripted expert of the generated world, and its demonstrations.

The expert plays the real episode state machine, so its tokens have the form
that reinforcement learning will see. A thought is a sequence of clauses that
end in `;`: the result of the search (`found v`, `nothing`, `conflict`), the
fact needed next (`need e r`) and, without a search for it, `recall v` or `guess
v`. With the scaffold a thought begins with two more: whether the information
suffices, and how much budget is left (the paper's dual-factor analysis).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout import episode, episode_state
from anysearch_jax.world import world as world_lib

PROBE_KINDS = (
  *("nothing", "conflict", "found", "copy", "memory", "relation"),
  *("recall_known", "recall_unknown"),
)
# The kinds of decisions whose tokens get `decision_weight`.
_WEIGHTED = frozenset(PROBE_KINDS) - {"relation"} | {"choice", "answer"}
_AMPLE = 3

Search = Callable[[str, int, str], Sequence[types.Passage]]


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
  """Probabilities of the expert's decisions, the same until no budget is left.

  Attributes:
    p_search_known, p_search_unknown: of searching for a fact that memory holds,
      and for one that it does not.
    p_retry_on_miss: of searching again in the alternative wording.
    p_check_on_conflict: of searching for the verdict on two values.
    p_over_budget: of searching without budget, at most once an episode.
    p_redundant: of repeating a search that has found its value.
    p_early_answer: of answering before the end of the chain, at every hop.
  """

  p_search_known: float = 0.3
  p_search_unknown: float = 0.8
  p_retry_on_miss: float = 0.75
  p_check_on_conflict: float = 0.65
  p_over_budget: float = 0.15
  p_redundant: float = 0.02
  p_early_answer: float = 0.02


class Probes(NamedTuple):
  """Teacher-forced probes of a policy: P(label | tokens before position).

  Attributes:
    token_ids: int32 `[B, T]`, demonstrations, padded with 0 at the end.
    lengths: int32 `[B]`, tokens of each demonstration.
    rows, positions: int32 `[P]`, the position of the label.
    labels: int32 `[P]`, the demonstrated token; but always `recall` for
      `recall_known` and `recall_unknown`, the decisions between search and
      memory before a fact's first search, with budget left.
    kinds: int8 `[P]`, index into `PROBE_KINDS`.
  """

  token_ids: np.ndarray
  lengths: np.ndarray
  rows: np.ndarray
  positions: np.ndarray
  labels: np.ndarray
  kinds: np.ndarray


class _Turn(NamedTuple):
  """Words of a turn, and marks (index of a word, kind of its decision)."""

  words: list[str]
  marks: list[tuple[int, str]]


_Turns = Generator[_Turn, Sequence[types.Passage] | None, None]
_Value = Generator[_Turn, Sequence[types.Passage] | None, str]


class Expert:
  """Writes the turns of one episode."""

  def __init__(
    self,
    question: types.Question,
    *,
    world: world_lib.World,
    budget: int,
    scaffold: bool,
    config: ExpertConfig,
    rng: np.random.Generator,
  ):
    self._chain = question.text.split()[:-1]
    self._world = world
    self._remaining = budget
    self._scaffold = scaffold
    self._config = config
    self._rng = rng
    self._over_budget = False

  def turns(self) -> _Turns:
    """Yields turns; send it a search's passages, or None if it was refused."""
    entity, *relations = self._chain
    self._open(sufficient=False)
    for hop, relation in enumerate(relations, 1):
      last = hop == len(relations)
      entity = yield from self._resolve(entity, relation, last=last)
      if self._chance(self._config.p_early_answer):
        break
    self._turn.words.extend(("</think>", "<answer>"))
    self._write(entity, "answer")
    self._turn.words.append("</answer>")
    yield self._turn

  def _resolve(self, entity: str, relation: str, *, last: bool) -> _Value:
    """Finds, recalls or guesses one value."""
    config, world = self._config, self._world
    memory = world.recall(entity, relation)
    alternative = world_lib.RELATIONS[world_lib.RELATION[relation]].alternative
    candidates = world.objects(relation)
    known = memory is not None
    chance = config.p_search_known if known else config.p_search_unknown
    kind = f"recall_{'known' if known else 'unknown'}"
    need, wording = relation, relation
    while True:
      self._clause("need", entity, (need, "relation"))
      if not self._remaining:
        kind = "choice"
      if not self._searches(chance, known=known):
        break
      passages = yield from self._search(entity, wording, kind)
      kind = "choice"
      if passages is None:
        self._open(sufficient=False)
        chance = 0.0
        continue
      wordings = (
        (wording,)
        if need == world_lib.VERDICT
        else (
          relation,
          alternative,
        )
      )
      values = _values(passages, entity, wordings)
      self._open(sufficient=last and len(values) == 1)
      if len(values) == 1:
        self._clause(("found", "found"), (values[0], "copy"))
        if not (self._remaining and self._chance(config.p_redundant)):
          return values[0]
        chance = 1.0
      elif values:
        self._clause(("conflict", "conflict"))
        candidates = values
        need = wording = world_lib.VERDICT
        chance = config.p_check_on_conflict
      else:
        self._clause(("nothing", "nothing"))
        # After the alternative wording there is no other one to try.
        chance = config.p_retry_on_miss if wording == relation else 0.0
        wording = alternative
    if known:
      self._clause(("recall", kind), (memory, "memory"))
      return memory
    value = candidates[self._rng.integers(len(candidates))]
    self._clause(("guess", kind), value)
    return value

  def _searches(self, chance: float, *, known: bool) -> bool:
    """Decides whether the expert searches for the fact that it needs."""
    if self._remaining or not chance:
      return self._chance(chance)
    if known or self._over_budget:
      return False
    self._over_budget = self._chance(self._config.p_over_budget)
    return self._over_budget

  def _search(
    self, entity: str, wording: str, kind: str
  ) -> Generator[_Turn, Sequence[types.Passage] | None, Sequence | None]:
    """Ends the turn with a search; returns its passages, None if refused."""
    self._write("</think>", kind)
    self._turn.words.extend(("<search>", entity, wording, "</search>"))
    passages = yield self._turn
    self._remaining -= passages is not None
    return passages

  def _open(self, *, sufficient: bool) -> None:
    self._turn = _Turn(["<think>"], [])
    if self._scaffold:
      self._clause("sufficient" if sufficient else "missing")
      ample = "ample" if self._remaining >= _AMPLE else "tight"
      self._clause(ample if self._remaining else "empty")

  def _clause(self, *words: str | tuple[str, str]) -> None:
    """Writes a clause; a word that is a decision comes with its kind."""
    for word in words:
      self._write(*((word,) if isinstance(word, str) else word))
    self._turn.words.append(";")

  def _write(self, word: str, kind: str = "") -> None:
    if kind:
      self._turn.marks.append((len(self._turn.words), kind))
    self._turn.words.append(word)

  def _chance(self, p: float) -> bool:
    return bool(self._rng.random() < p)


def demonstrate(
  question: types.Question,
  *,
  world: world_lib.World,
  retriever_search: Search,
  budget: int,
  scaffold: bool,
  codec: types.TextCodec,
  episode_config: config_lib.EpisodeConfig,
  expert: ExpertConfig,
  rng: np.random.Generator,
  decision_weight: float = 3.0,
) -> tuple[types.Trajectory, np.ndarray]:
  """Plays one episode as the expert.

  Args:
    question: one of `world`.
    world: its memory is the expert's.
    retriever_search: returns the passages for (query, k, corpus).
    budget: number of searches assigned, >= 0.
    scaffold: whether to use the prompt of the paper's Phase I.
    codec: a tokenizer with one token for every word of the world.
    episode_config: with the `world` prompts.
    expert: probabilities of its decisions.
    rng: its random numbers.
    decision_weight: loss weight of the tokens of decisions.

  Returns:
    The trajectory, and float32 `[T]` loss weights: `decision_weight` on
    decisions and on copied, recalled and answered values, 1 on the model's
    other tokens, 0 elsewhere.

  Raises:
    ValueError: the codec splits a word, or a limit leaves no room for a turn.
  """
  trajectory, marks = _play(
    question,
    world=world,
    retriever_search=retriever_search,
    budget=budget,
    scaffold=scaffold,
    codec=codec,
    episode_config=episode_config,
    expert=expert,
    rng=rng,
  )
  weights = (trajectory.authors == types.Author.MODEL).astype(np.float32)
  weights[[at for at, kind in marks if kind in _WEIGHTED]] = decision_weight
  return trajectory, weights


def probe_sets(
  world: world_lib.World,
  split: str,
  *,
  count: int,
  seed: int,
  retriever_search: Search,
  codec: types.TextCodec,
  episode_config: config_lib.EpisodeConfig,
  expert: ExpertConfig = ExpertConfig(),
  budgets: Sequence[int] = range(1, 9),
  scaffold: bool = False,
) -> Probes:
  """Makes the probes of `count` demonstrations of a split.

  Args:
    world, retriever_search, codec, episode_config, expert, scaffold: as for
      `demonstrate`.
    split, count, seed: as for `World.questions`; also the expert's seed.
    budgets: each demonstration draws one of them uniformly.

  Returns:
    The probes, in the order of the demonstrations.
  """
  rng = np.random.Generator(np.random.PCG64(seed))
  (recall,) = codec.encode("recall")
  rows, probes = [], []
  for row, question in enumerate(world.questions(split, count, seed)):
    trajectory, marks = _play(
      question,
      world=world,
      retriever_search=retriever_search,
      budget=int(rng.choice(budgets)),
      scaffold=scaffold,
      codec=codec,
      episode_config=episode_config,
      expert=expert,
      rng=rng,
    )
    rows.append(trajectory.token_ids)
    probes += [
      (
        row,
        at,
        recall if kind.startswith("recall") else rows[-1][at],
        PROBE_KINDS.index(kind),
      )
      for at, kind in marks
      if kind in PROBE_KINDS
    ]
  lengths = np.array([len(ids) for ids in rows], np.int32)
  token_ids = np.zeros((len(rows), max(lengths, default=0)), np.int32)
  for row, ids in zip(token_ids, rows, strict=True):
    row[: len(ids)] = ids
  columns = np.array(probes, np.int32).reshape(-1, 4).T
  return Probes(token_ids, lengths, *columns[:3], columns[3].astype(np.int8))


def _play(
  question: types.Question,
  *,
  world: world_lib.World,
  retriever_search: Search,
  budget: int,
  scaffold: bool,
  codec: types.TextCodec,
  episode_config: config_lib.EpisodeConfig,
  expert: ExpertConfig,
  rng: np.random.Generator,
) -> tuple[types.Trajectory, list[tuple[int, str]]]:
  """Plays an episode; returns it, and (position, kind) of its decisions."""
  turns = Expert(
    question,
    world=world,
    budget=budget,
    scaffold=scaffold,
    config=expert,
    rng=rng,
  ).turns()
  state, request = episode.start(
    question,
    budget=budget,
    scaffold=scaffold,
    address=types.Address(rollout=0, question=0, sample=0),
    config=episode_config,
    codec=codec,
  )
  passages = None
  marks = []
  while not isinstance(request, episode_state.Done):
    if isinstance(request, types.SearchRequest):
      passages = retriever_search(request.query, request.k, request.corpus)
      event = episode_state.Retrieved(tuple(passages))
    else:
      turn = turns.send(passages)
      passages = None
      start = len(request.token_ids)
      marks += [(start + at, kind) for at, kind in turn.marks]
      event = _generation(turn.words, codec)
    state, request = episode.step(state, event)
  return request.trajectory, marks


def _generation(
  words: Sequence[str], codec: types.TextCodec
) -> types.Generation:
  """Returns `words` as if an engine had sampled them with probability 1."""
  text = " ".join(words)
  ids = codec.encode(text)
  if len(ids) != len(words):
    raise ValueError(
      f"Found {len(ids)} tokens for the {len(words)} words of {text!r}; "
      "expected one each. Use the tokenizer of the world."
    )
  n = len(ids)
  return types.Generation(
    tuple(ids), (0.0,) * n, text, types.Finish.STOP, (0,) * n
  )


def _values(
  passages: Sequence[types.Passage], entity: str, wordings: Sequence[str]
) -> list[str]:
  """Returns the distinct values of `entity` in passages with these wordings."""
  values = {}
  for passage in passages:
    wording, value, *_ = passage.text.split()
    if passage.title == entity and wording in wordings:
      values[value] = None
  return list(values)
