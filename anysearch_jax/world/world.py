"""A generated world of facts, with an exact line between memory and search.

*Parametric* facts are those that a policy can memorize. Memory may be wrong;
the corpus is right. In the default world a relation says how often a remembered
fact *changes* from snapshot to snapshot; in another version a memory is *stale*
in every snapshot or in none (see `versions`). All other facts are drawn anew in
each snapshot, so that only a search finds them. A passage may use the
alternative wording of its relation, which the usual query misses, or have a
false twin; then one more search finds a verdict on the two.

Everything is a function of `WorldConfig`; snapshots are drawn when first used.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anysearch_jax import types
from anysearch_jax.world import relations as relations_lib

SPLITS = ("train", "dev", "held-out")

# Padding words, which state no fact, and the words of a verdict's passage.
PADS = tuple("also here often long once quite rather then there very".split())
VERDICT = "verdict"
CONFIRMED = "confirmed"


@dataclasses.dataclass(frozen=True)
class WorldConfig:
  """The constants of the world; proportions are in [0, 1].

  Attributes:
    seed: equal configurations, seed included, give equal worlds.
    entities: number of entities of each of `relations.KINDS`.
    known: for each of `relations.ALL`, the probability that a fact is
      parametric.
    stale: share of the parametric facts that memory holds wrongly, in every
      snapshot.
    changes: for each of `relations.ALL`, the probability that a parametric fact
      differs from memory, drawn anew in each snapshot; empty: all are 0.
    alternative: share of a snapshot's facts in the alternative wording only.
    contradicted: share of the non-parametric facts that have a false twin, at
      most one for each entity.
    fillers: number of passages of each entity that state no fact.
    hop_mix: shares of the questions with 1, 2, ... hops.
    snapshots: number of snapshots of each of `SPLITS`.
    chain_shares: relative shares of the chains of each of `SPLITS`.
  """

  seed: int = 0
  entities: tuple[int, ...] = (100, 50, 16, 50, 24)
  known: tuple[float, ...] = (
    *(0.5, 0.45, 0.45, 0.6, 0.55, 0.6),
    *(0.5, 0.5, 0.9, 0.75),
  )
  stale: float = 0.0
  alternative: float = 0.35
  contradicted: float = 0.2
  fillers: int = 3
  hop_mix: tuple[float, ...] = (0.1, 0.2, 0.25, 0.2, 0.15, 0.1)
  changes: tuple[float, ...] = (
    *(0.0, 0.5, 0.5, 0.0, 0.2, 0.5),
    *(0.2, 0.2, 0.0, 0.0),
  )
  snapshots: tuple[int, ...] = (32, 2, 4)
  chain_shares: tuple[int, ...] = (6, 2, 2)


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """The facts of one corpus; `[E, R]` arrays over entities and relations.

  Attributes:
    values: int, the true values, -1 where a relation does not apply.
    alternative: bool, the fact has the alternative wording only.
    twins: int, the false value of a contradicted fact, -1 for the others.
    twin_first: bool, the false twin precedes the fact in the corpus.
  """

  name: str
  values: np.ndarray
  alternative: np.ndarray
  twins: np.ndarray
  twin_first: np.ndarray


class World:
  """Entities, memory, snapshots and questions of one `WorldConfig`.

  Attributes:
    entities: names, one word each, grouped by kind in the order of
      `relations.KINDS`.
    members: for each kind, its entities as a range of indices.
    known: bool `[E, R]`, the fact is parametric.
    memory: int `[E, R]`, the memorized values, -1 for facts not in memory.
    facts: int `[E, R]`, the true values of the parametric facts, -1 elsewhere,
      in all snapshots where they have not changed.
  """

  def __init__(self, config: WorldConfig = WorldConfig()):
    self.config = config
    rng = _generator(config.seed, 0)
    self.entities = _names(rng, sum(config.entities))
    self.index = {name: i for i, name in enumerate(self.entities)}
    ends = itertools.accumulate(config.entities, initial=0)
    ranges = itertools.starmap(range, itertools.pairwise(ends))
    self.members = dict(zip(relations_lib.KINDS, ranges, strict=True))
    values = self._draw_values(rng)
    self.known = (values >= 0) & (rng.random(values.shape) < config.known)
    self.facts = np.where(self.known, values, -1)
    facts = rng.permutation(np.argwhere(self.known))
    stale = tuple(facts[: round(config.stale * len(facts))].T)
    self.memory = self.facts.copy()
    self.memory[stale] = self._draw_values(rng, values)[stale]

  def recall(self, entity: str, relation: str) -> str | None:
    """Returns the memorized value of a fact, true or stale, or None."""
    value = self.memory[self.index[entity], relations_lib.INDEX[relation]]
    return None if value < 0 else self.entities[value]

  def reliability(self, relation: str) -> float:
    """Returns the probability that a memory of this relation is right."""
    changes = self.config.changes or (0.0,) * len(relations_lib.ALL)
    change = changes[relations_lib.INDEX[relation]]
    return (1 - self.config.stale) * (1 - change)

  def objects(self, relation: str) -> Sequence[str]:
    """Returns all entities of the kind that a relation leads to."""
    members = self.members[
      relations_lib.ALL[relations_lib.INDEX[relation]].object
    ]
    return self.entities[members.start : members.stop]

  @functools.cache  # noqa: B019 - a world lives as long as its process.
  def snapshot(self, index: int) -> Snapshot:
    """Returns the facts of snapshot `index`, drawn at the first call.

    Raises:
      ValueError: there is no such snapshot.
    """
    total = sum(self.config.snapshots)
    if not 0 <= index < total:
      raise ValueError(f"Found snapshot {index}; expected 0 to {total - 1}.")
    rng = _generator(self.config.seed, 1, index)
    values = np.where(self.known, self.facts, self._draw_values(rng))
    if self.config.changes:
      values = self._changed(values, _generator(self.config.seed, 4, index))
    alternative = rng.random(values.shape) < self.config.alternative
    twin_first = rng.random(values.shape) < 0.5
    # A verdict names its entity but no relation: one twin for each entity.
    facts = rng.permutation(np.argwhere((values >= 0) & ~self.known))
    _, firsts = np.unique(facts[:, 0], return_index=True)
    wanted = round(self.config.contradicted * len(facts))
    chosen = tuple(facts[np.sort(firsts)[:wanted]].T)
    twins = np.full_like(values, -1)
    twins[chosen] = self._draw_values(rng, values)[chosen]
    return Snapshot(f"snapshot-{index}", values, alternative, twins, twin_first)

  @functools.cache  # noqa: B019
  def corpus(self, name: str) -> tuple[types.Passage, ...]:
    """Returns the passages of the corpus `snapshot-<index>`, in fixed order.

    Raises:
      ValueError: there is no such corpus.
    """
    prefix, _, digits = name.partition("-")
    if prefix != "snapshot" or not digits.isdecimal():
      raise ValueError(f"Found corpus {name!r}; expected `snapshot-<index>`.")
    return tuple(self._write(int(digits)))

  def split_snapshots(self, split: str) -> range:
    """Returns the snapshots of one of `SPLITS`; splits share no snapshot."""
    at = _split_index(split)
    start = sum(self.config.snapshots[:at])
    return range(start, start + self.config.snapshots[at])

  def questions(
    self, split: str, count: int, seed: int
  ) -> list[types.Question]:
    """Samples questions without replacement over (snapshot, chain).

    A chain starts at an entity and follows distinct relations, each from the
    value of the one before; no entity occurs twice. The golden answer is the
    corpus's value. `metadata` holds `hops`, `min_searches` (for an agent that
    knows which memories are stale) and `facts`, one dict for each hop, with the
    `reliability` of its relation if memory is graded.

    Args:
      split: one of `SPLITS`; splits share neither chains nor snapshots.
      count: number of questions, distributed over the hops by `hop_mix`.
      seed: equal seeds give equal questions.

    Returns:
      The questions in random order.

    Raises:
      ValueError: the split is unknown, or has fewer questions.
    """
    snapshots = self.split_snapshots(split)
    rng = _generator(self.config.seed, 2, _split_index(split), seed)
    values = np.stack([self.snapshot(i).values for i in snapshots])
    drawn = []
    for hops, share in enumerate(_shares(count, self.config.hop_mix), 1):
      relations, starts = self._chains(hops, split)
      where, paths = _sample_paths(rng, values, relations, starts, share)
      drawn += [
        self._question(split, snapshots[s], relations[c].tolist(), path)
        for (s, c), path in zip(where.tolist(), paths.tolist(), strict=True)
      ]
    return [drawn[i] for i in rng.permutation(len(drawn))]

  def _draw_values(
    self, rng: np.random.Generator, *avoid: np.ndarray
  ) -> np.ndarray:
    """Draws a value of the right kind for every fact `[E, R]`, -1 elsewhere.

    A value is neither the fact's subject nor its value in one of `avoid`.
    """
    values = np.full((len(self.entities), len(relations_lib.ALL)), -1)
    for r, relation in enumerate(relations_lib.ALL):
      subjects = np.array(self.members[relation.subject])
      taken = [subjects, *(other[subjects, r] for other in avoid)]
      values[subjects, r] = _draw(
        rng, self.members[relation.object], np.stack(taken, 1)
      )
    return values

  def _changed(
    self, values: np.ndarray, rng: np.random.Generator
  ) -> np.ndarray:
    """Replaces some parametric facts by values that differ from memory."""
    changes = rng.random(values.shape) < self.config.changes
    others = self._draw_values(rng, values, self.memory)
    return np.where(self.known & changes, others, values)

  def _write(self, index: int) -> Iterator[types.Passage]:
    """Yields the passages of a snapshot: facts by entity, then fillers.

    BM25 prefers short passages: fillers, then facts not asked for, verdicts.
    """
    snapshot = self.snapshot(index)
    names = self.entities
    rng = _generator(self.config.seed, 3, index)
    pads = itertools.cycle(rng.choice(PADS, 4096).tolist())

    def passage(entity: int, label: str, *words: str, padding: int):
      text = " ".join([*words, *itertools.islice(pads, padding)])
      title = names[entity]
      return types.Passage(f"{snapshot.name}/{title}/{label}", title, text)

    for e, r in np.argwhere(snapshot.values >= 0).tolist():
      relation, value = relations_lib.ALL[r], names[snapshot.values[e, r]]
      alternative = snapshot.alternative[e, r]
      wording = relation.alternative if alternative else relation.name
      fact = passage(e, relation.name, wording, value, padding=2)
      if snapshot.twins[e, r] < 0:
        yield fact
        continue
      other = names[snapshot.twins[e, r]]
      twin = passage(e, f"{relation.name}/twin", wording, other, padding=2)
      yield from (twin, fact) if snapshot.twin_first[e, r] else (fact, twin)
      yield passage(e, VERDICT, VERDICT, value, CONFIRMED, padding=3)
    for e in range(len(names)):
      for i in range(self.config.fillers):
        yield passage(e, f"filler-{i}", padding=2)

  @functools.cache  # noqa: B019
  def _chains(self, hops: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a split's chains: relations `[n, hops]`, first entities `[n]`."""
    chains = [
      (sequence, entity)
      for sequence in relations_lib.sequences(hops)
      for entity in self.members[relations_lib.ALL[sequence[0]].subject]
      if self._split_of(entity, sequence) == split
    ]
    relations = np.array([sequence for sequence, _ in chains], int)
    return relations.reshape(-1, hops), np.array([e for _, e in chains], int)

  def _split_of(self, entity: int, relations: Sequence[int]) -> str:
    """Returns the split of a chain, by a hash; it is the same everywhere."""
    names = (relations_lib.ALL[r].name for r in relations)
    chain = " ".join([self.entities[entity], *names])
    ends = list(itertools.accumulate(self.config.chain_shares))
    place = zlib.crc32(chain.encode()) % ends[-1]
    return SPLITS[bisect.bisect_right(ends, place)]

  def _question(
    self, split: str, index: int, relations: list[int], path: list[int]
  ) -> types.Question:
    snapshot = self.snapshot(index)
    facts: list[dict[str, Any]] = [
      {
        "entity": self.entities[e],
        "relation": relations_lib.ALL[r].name,
        "value": self.entities[v],
        "known": bool(self.known[e, r]),
        "stale": bool(self.known[e, r] and self.memory[e, r] != v),
        "alternative": relations_lib.ALL[r].alternative,
        "misses": bool(snapshot.alternative[e, r]),
        "contradicted": bool(snapshot.twins[e, r] >= 0),
      }
      for r, e, v in zip(relations, path, path[1:], strict=False)
    ]
    if self.config.changes:
      for fact in facts:
        fact["reliability"] = self.reliability(fact["relation"])
    searches = sum(
      1 + fact["misses"] + fact["contradicted"]
      for fact in facts
      if fact["stale"] or not fact["known"]
    )
    names = [fact["relation"] for fact in facts]
    start = self.entities[path[0]]
    return types.Question(
      id=f"{split}/{index}/{start}/{'-'.join(names)}",
      text=" ".join([start, *names, "?"]),
      golden_answers=(self.entities[path[-1]],),
      corpus=snapshot.name,
      metadata={"hops": len(facts), "min_searches": searches, "facts": facts},
    )


def _generator(*entropy: int) -> np.random.Generator:
  return np.random.Generator(np.random.PCG64(entropy))


def _split_index(split: str) -> int:
  if split not in SPLITS:
    raise ValueError(f"Found split {split!r}; expected {', '.join(SPLITS)}.")
  return SPLITS.index(split)


def _names(rng: np.random.Generator, count: int) -> tuple[str, ...]:
  """Draws distinct pronounceable names; none is a relation, as "river" is."""
  parts = ("bdfgklmnprstvz", "aeiou", "bdfgklmnprstvz", "aeiou", "lnrs")
  every = ["".join(letters) for letters in itertools.product(*parts)]
  names = [name for name in every if name not in relations_lib.INDEX]
  return tuple(rng.choice(names, count, replace=False).tolist())


def _draw(
  rng: np.random.Generator, members: range, avoid: np.ndarray
) -> np.ndarray:
  """Draws one uniform member for each row of `avoid`, but none of that row."""
  values = rng.integers(members.start, members.stop, len(avoid))
  while (clash := (values[:, None] == avoid).any(1)).any():
    values[clash] = rng.integers(members.start, members.stop, clash.sum())
  return values


def _shares(count: int, mix: Sequence[float]) -> list[int]:
  """Splits `count` by `mix` into integers that sum to it."""
  ends = np.rint(np.cumsum(mix) / sum(mix) * count).astype(int)
  return np.diff(ends, prepend=0).tolist()


def _sample_paths(
  rng: np.random.Generator,
  values: np.ndarray,
  relations: np.ndarray,
  starts: np.ndarray,
  count: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Draws `count` (snapshot, chain) pairs whose paths repeat no entity.

  `values` is `[S, E, R]`. Returns the pairs and their paths `[n, hops + 1]`.
  """
  total = len(values) * len(starts)
  size = count
  while True:
    size = min(2 * size + 16, total)
    drawn = rng.choice(total, size, replace=False)
    snapshot, chain = np.divmod(drawn, max(len(starts), 1))
    path = [starts[chain]]
    for relation in relations[chain].T:
      path.append(values[snapshot, path[-1], relation])
    paths = np.stack(path, 1)
    simple = (np.diff(np.sort(paths), axis=1) > 0).all(1)
    if simple.sum() >= count:
      pairs = np.stack([snapshot, chain], 1)
      return pairs[simple][:count], paths[simple][:count]
    if size == total:
      raise ValueError(
        f"Found {simple.sum()} questions of {relations.shape[1]} hops in the "
        f"split; {count} were asked for. Ask for fewer."
      )
