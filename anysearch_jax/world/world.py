"""A generated world of facts, with an exact line between memory and search.

*Parametric* facts are those that a policy can memorize. Memory may be wrong;
the corpus is right: a relation says how often a remembered fact *changes* from
snapshot to snapshot. All other facts are drawn anew in each snapshot, so that
only a search finds them. A passage may use the alternative wording of its
relation, which the usual query misses, or have a false twin; then one more
search finds a verdict on the two.

A search of the world reads one subject and one word of a relation, so that no
query finds several passages that would cost a search each.

Everything is a function of the seed; snapshots are drawn when first used.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import types

# Version of the generator. With one seed, two versions give different worlds.
VERSION = 2
SPLITS = ("train", "dev", "held-out")

# Padding words, which state no fact, and the words of a verdict's passage.
PADS = (
  "also",
  "here",
  "often",
  "long",
  "once",
  "quite",
  "rather",
  "then",
  "there",
  "very",
)
VERDICT = "verdict"
CONFIRMED = "confirmed"

# Evaluations of different sizes can be paired: smaller sets are the first
# questions of a shuffled pool, the same one for every policy.
_EVALUATION_SEED = 2024
_POOL = {"train": 1000, "dev": 600, "held-out": 1000}


# Kinds of entities, and how many there are of each.
KINDS = {"person": 100, "city": 50, "country": 16, "company": 50, "river": 24}


class Relation(NamedTuple):
  """A relation between two kinds of entity.

  Attributes:
    name, alternative: its two wordings.
    subject, object: of `KINDS`.
    known: the probability that a fact is parametric.
    change: the probability that a parametric fact differs from memory, drawn
      anew in each snapshot.
  """

  name: str
  alternative: str
  subject: str
  object: str
  known: float
  change: float


RELATIONS = (
  Relation("birthplace", "born", "person", "city", 0.5, 0.0),
  Relation("employer", "works", "person", "company", 0.45, 0.5),
  Relation("mentor", "taught", "person", "person", 0.45, 0.5),
  Relation("country", "nation", "city", "country", 0.6, 0.0),
  Relation("river", "stream", "city", "river", 0.55, 0.2),
  Relation("mayor", "governs", "city", "person", 0.6, 0.5),
  Relation("headquarters", "based", "company", "city", 0.5, 0.2),
  Relation("founder", "founded", "company", "person", 0.5, 0.2),
  Relation("capital", "seat", "country", "city", 0.9, 0.0),
  Relation("mouth", "ends", "river", "city", 0.75, 0.0),
)
INDEX = {relation.name: i for i, relation in enumerate(RELATIONS)}
# Words that a search reads beside a subject.
_SEARCHED = {VERDICT, *(word for r in RELATIONS for word in r[:2])}

# Share of a snapshot's facts in the alternative wording only.
ALTERNATIVE = 0.35
# Share of the non-parametric facts that have a false twin, at most one for each
# entity.
_CONTRADICTED = 0.2
# Number of passages of each entity that state no fact.
_FILLERS = 3
# Shares of the questions with 1, 2, ... hops.
_HOP_MIX = (0.1, 0.2, 0.25, 0.2, 0.15, 0.1)
# Number of snapshots of each split. Questions of a snapshot share the memories
# that are wrong in it, so many snapshots say more than many questions.
_SNAPSHOTS = {"train": 32, "dev": 6, "held-out": 24}
# Relative shares of the chains, in the order of `SPLITS`.
_CHAIN_SHARES = (6, 2, 2)


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
  """Entities, memory, snapshots and questions; equal seeds give equal ones.

  Args:
    seed: seed of all draws.
    reliability: the probability that a memory is right, in every relation; 0:
      each relation has its own.

  Attributes:
    identity: JSON values that identify what is asked and found.
    entities: names, one word each, grouped by kind in the order of
      `KINDS`.
    members: for each kind, its entities as a range of indices.
    known: bool `[E, R]`, the fact is parametric.
    memory: int `[E, R]`, the memorized values, -1 for facts not in memory; they
      are true in all snapshots where they have not changed.
  """

  def __init__(self, seed: int = 0, reliability: float = 0.0):
    self._seed = seed
    self.identity: dict[str, object] = {
      "seed": seed,
      "reliability": reliability,
      "version": VERSION,
    }
    self._change = [
      1 - reliability if reliability else relation.change
      for relation in RELATIONS
    ]
    rng = _generator(seed, 0)
    self.entities = _names(rng, sum(KINDS.values()))
    self.index = {name: i for i, name in enumerate(self.entities)}
    ends = itertools.accumulate(KINDS.values(), initial=0)
    ranges = itertools.starmap(range, itertools.pairwise(ends))
    self.members = dict(zip(KINDS, ranges, strict=True))
    values = self._draw_values(rng)
    shares = [relation.known for relation in RELATIONS]
    self.known = (values >= 0) & (rng.random(values.shape) < shares)
    self.memory = np.where(self.known, values, -1)

  def reliability(self, relation: str) -> float:
    """Returns the probability that a memory of this relation is right."""
    return 1 - self._change[INDEX[relation]]

  @functools.cache  # noqa: B019 - a world lives as long as its process.
  def snapshot(self, index: int) -> Snapshot:
    """Returns the facts of snapshot `index`, drawn at the first call.

    Raises ValueError if there is no such snapshot.
    """
    total = sum(_SNAPSHOTS.values())
    if not 0 <= index < total:
      raise ValueError(f"Found snapshot {index}; expected 0 to {total - 1}.")
    rng = _generator(self._seed, 1, index)
    values = np.where(self.known, self.memory, self._draw_values(rng))
    changing = _generator(self._seed, 4, index)
    changes = changing.random(values.shape) < self._change
    others = self._draw_values(changing, values)
    values = np.where(self.known & changes, others, values)
    alternative = rng.random(values.shape) < ALTERNATIVE
    twin_first = rng.random(values.shape) < 0.5
    # A verdict names its entity but no relation: one twin for each entity.
    facts = rng.permutation(np.argwhere((values >= 0) & ~self.known))
    _, firsts = np.unique(facts[:, 0], return_index=True)
    twin_count = round(_CONTRADICTED * len(facts))
    with_twin = tuple(facts[np.sort(firsts)[:twin_count]].T)
    twins = np.full_like(values, -1)
    twins[with_twin] = self._draw_values(rng, values)[with_twin]
    return Snapshot(
      name=f"snapshot-{index}",
      values=values,
      alternative=alternative,
      twins=twins,
      twin_first=twin_first,
    )

  @functools.cache  # noqa: B019
  def corpus(self, name: str) -> tuple[types.Passage, ...]:
    """Returns the passages of the corpus `snapshot-<index>`, in fixed order.

    Raises ValueError if there is no such corpus.
    """
    prefix, _, digits = name.partition("-")
    if prefix != "snapshot" or not digits.isdecimal():
      raise ValueError(
        f"Found corpus {name!r}; expected `snapshot-<index>`. Ask a question "
        "of `World.questions`, or name a corpus: `Agent.load(corpus=...)`."
      )
    return tuple(self._write(int(digits)))

  def searched(self, query: str) -> str:
    """Returns the words of a query that a search reads.

    They are a subject and a relation's word. With two subjects or two
    relations' words a search reads nothing.
    """
    words = set(re.findall(r"\w+", query.lower()))
    subjects = words & self.index.keys()
    wordings = words & _SEARCHED
    if max(len(subjects), len(wordings)) > 1:
      return ""
    return " ".join((*subjects, *wordings))

  def questions(
    self, split: str, count: int, seed: int
  ) -> list[types.Question]:
    """Samples questions without replacement over (snapshot, chain).

    A chain starts at an entity and follows distinct relations, each from the
    value of the one before; no entity occurs twice. The golden answer is the
    corpus's value. `metadata` holds `hops`, `min_searches` (for an agent that
    knows which memories are stale) and `facts`, one dict for each hop.

    Args:
      split: one of `SPLITS`; splits share neither chains nor snapshots.
      count: number of questions, distributed over the hops by `_HOP_MIX`.
      seed: equal seeds give equal questions, in random order.

    Raises:
      ValueError: the split is unknown, or has fewer questions.
    """
    split_index = _split_index(split)
    first = sum(_SNAPSHOTS[earlier] for earlier in SPLITS[:split_index])
    snapshots = range(first, first + _SNAPSHOTS[split])
    rng = _generator(self._seed, 2, split_index, seed)
    values = np.stack([self.snapshot(i).values for i in snapshots])
    questions = []
    for hops, hop_count in enumerate(_shares(count, _HOP_MIX), 1):
      relations, starts = self._chains(hops, split)
      pairs, paths = _sample_paths(
        rng, values, relations=relations, starts=starts, count=hop_count
      )
      questions += [
        self._question(split, snapshots[s], relations[c].tolist(), path)
        for (s, c), path in zip(pairs.tolist(), paths.tolist(), strict=True)
      ]
    return [questions[i] for i in rng.permutation(len(questions))]

  def evaluation_questions(
    self, count: int = 0, split: str = "held-out"
  ) -> list[types.Question]:
    """Returns evaluation questions; a smaller set is a prefix of a larger one.

    A count of 0 returns 1000 (600 of "dev") of one of `SPLITS`. Raises
    ValueError if the split is unknown, or has fewer questions.
    """
    _split_index(split)
    size = max(count, _POOL[split])
    pool = self.questions(split, size, _EVALUATION_SEED)
    order = _generator(_EVALUATION_SEED).permutation(size)
    return [pool[i] for i in order[: count or None]]

  def _draw_values(
    self, rng: np.random.Generator, *avoid: np.ndarray
  ) -> np.ndarray:
    """Draws a value of the right kind for every fact `[E, R]`, -1 elsewhere.

    A value is neither the fact's subject nor its value in one of `avoid`.
    """
    values = np.full((len(self.entities), len(RELATIONS)), -1)
    for r, relation in enumerate(RELATIONS):
      subjects = np.array(self.members[relation.subject])
      excluded = [subjects, *(other[subjects, r] for other in avoid)]
      values[subjects, r] = _draw(
        rng, self.members[relation.object], np.stack(excluded, 1)
      )
    return values

  def _write(self, index: int) -> Iterator[types.Passage]:
    """Yields the passages of a snapshot: facts by entity, then fillers.

    BM25 prefers short passages: fillers, then facts not asked for, verdicts.
    """
    snapshot = self.snapshot(index)
    names = self.entities
    rng = _generator(self._seed, 3, index)
    pads = itertools.cycle(rng.choice(PADS, 4096).tolist())

    def passage(entity: int, label: str, *words: str, padding: int):
      text = " ".join([*words, *itertools.islice(pads, padding)])
      title = names[entity]
      return types.Passage(f"{snapshot.name}/{title}/{label}", title, text)

    for e, r in np.argwhere(snapshot.values >= 0).tolist():
      relation = RELATIONS[r]
      value = names[snapshot.values[e, r]]
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
      for i in range(_FILLERS):
        yield passage(e, f"filler-{i}", padding=2)

  @functools.cache  # noqa: B019
  def _chains(self, hops: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a split's chains: relations `[n, hops]`, first entities `[n]`."""
    chains = [
      (sequence, entity)
      for sequence in _sequences(hops)
      for entity in self.members[RELATIONS[sequence[0]].subject]
      if self._split_of(entity, sequence) == split
    ]
    relations = np.array([sequence for sequence, _ in chains], int)
    return relations.reshape(-1, hops), np.array([e for _, e in chains], int)

  def _split_of(self, entity: int, relations: Sequence[int]) -> str:
    """Returns the split of a chain, by a hash; it is the same everywhere."""
    names = (RELATIONS[r].name for r in relations)
    chain = " ".join([self.entities[entity], *names])
    ends = list(itertools.accumulate(_CHAIN_SHARES))
    place = zlib.crc32(chain.encode()) % ends[-1]
    return SPLITS[bisect.bisect_right(ends, place)]

  def _question(
    self, split: str, index: int, relations: list[int], path: list[int]
  ) -> types.Question:
    snapshot = self.snapshot(index)
    facts: list[dict[str, Any]] = [
      {
        "entity": self.entities[e],
        "relation": RELATIONS[r].name,
        "value": self.entities[v],
        "known": bool(self.known[e, r]),
        "stale": bool(self.known[e, r] and self.memory[e, r] != v),
        "alternative": RELATIONS[r].alternative,
        "misses": bool(snapshot.alternative[e, r]),
        "contradicted": bool(snapshot.twins[e, r] >= 0),
        "reliability": self.reliability(RELATIONS[r].name),
      }
      for r, e, v in zip(relations, path, path[1:], strict=False)
    ]
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


def with_evidence(
  world: World, questions: Iterable[types.Question]
) -> list[types.Question]:
  """Returns questions of the world with evidence from its corpora.

  The evidence of a question has a passage for each fact of its chain, known or
  not, and the query in the wording that finds it. A fact with a false twin also
  has the passage and the query of the verdict. They are `supporting` and
  `search_keys` of the metadata.
  """
  corpora: dict[str, dict[str, types.Passage]] = {}
  out = []
  for question in questions:
    name = question.corpus
    if name not in corpora:
      corpora[name] = {passage.id: passage for passage in world.corpus(name)}
    supporting = []
    search_keys = []
    for fact in question.metadata["facts"]:
      wording = fact["alternative" if fact["misses"] else "relation"]
      steps = [(fact["relation"], wording)]
      if fact["contradicted"]:
        steps.append((VERDICT, VERDICT))
      for label, word in steps:
        passage = corpora[name][f"{name}/{fact['entity']}/{label}"]
        supporting.append({"title": passage.title, "text": passage.text})
        search_keys.append([f"{fact['entity']} {word}"])
    metadata = {
      **question.metadata,
      "supporting": supporting,
      "search_keys": search_keys,
    }
    out.append(dataclasses.replace(question, metadata=metadata))
  return out


def _sequences(hops: int) -> list[tuple[int, ...]]:
  """Returns all sequences of distinct relations whose kinds chain."""
  rows: list[tuple[int, ...]] = [(r,) for r in range(len(RELATIONS))]
  for _ in range(hops - 1):
    rows = [
      (*row, r)
      for row in rows
      for r in range(len(RELATIONS))
      if r not in row and RELATIONS[row[-1]].object == RELATIONS[r].subject
    ]
  return rows


def _generator(*entropy: int) -> np.random.Generator:
  return np.random.Generator(np.random.PCG64(entropy))


def _split_index(split: str) -> int:
  if split not in SPLITS:
    raise ValueError(f"Found split {split!r}; expected {', '.join(SPLITS)}.")
  return SPLITS.index(split)


def _names(rng: np.random.Generator, count: int) -> tuple[str, ...]:
  """Draws distinct pronounceable names; none is a relation, as "river" is."""
  consonants = "bdfgklmnprstvz"
  vowels = "aeiou"
  letters = itertools.product(consonants, vowels, consonants, vowels, "lnrs")
  names = [name for name in map("".join, letters) if name not in INDEX]
  return tuple(rng.choice(names, count, replace=False).tolist())


def _draw(
  rng: np.random.Generator, members: range, avoid: np.ndarray
) -> np.ndarray:
  """Draws one uniform member for each row of `avoid`, but none of that row."""
  values = rng.integers(members.start, members.stop, len(avoid))
  clash = (values[:, None] == avoid).any(1)
  while clash.any():
    values[clash] = rng.integers(members.start, members.stop, clash.sum())
    clash = (values[:, None] == avoid).any(1)
  return values


def _shares(count: int, mix: Sequence[float]) -> list[int]:
  """Splits `count` by `mix` into integers that sum to it."""
  ends = np.rint(np.cumsum(mix) / sum(mix) * count).astype(int)
  return np.diff(ends, prepend=0).tolist()


def _sample_paths(
  rng: np.random.Generator,
  values: np.ndarray,
  *,
  relations: np.ndarray,
  starts: np.ndarray,
  count: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Draws (snapshot, chain) pairs whose paths repeat no entity.

  Args:
    rng: draws the pairs, without replacement.
    values: int `[S, E, R]`, the facts of S snapshots.
    relations: int `[C, hops]`, the relations of C chains.
    starts: int `[C]`, their first entities.
    count: number n of pairs.

  Returns:
    The pairs, int `[n, 2]`, and their paths, int `[n, hops + 1]`.
  """
  total = len(values) * len(starts)
  size = count
  while True:
    size = min(2 * size + 16, total)
    codes = rng.choice(total, size, replace=False)
    snapshot, chain = np.divmod(codes, max(len(starts), 1))
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
