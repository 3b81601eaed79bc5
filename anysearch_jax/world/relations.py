"""The kinds of entities in the generated world, and the relations they have."""

from __future__ import annotations

import dataclasses

KINDS = ("person", "city", "country", "company", "river")


@dataclasses.dataclass(frozen=True)
class Relation:
  """A relation between two kinds of entity, with its two wordings."""

  name: str
  alternative: str
  subject: str
  object: str


ALL = (
  Relation("birthplace", "born", "person", "city"),
  Relation("employer", "works", "person", "company"),
  Relation("mentor", "taught", "person", "person"),
  Relation("country", "nation", "city", "country"),
  Relation("river", "stream", "city", "river"),
  Relation("mayor", "governs", "city", "person"),
  Relation("headquarters", "based", "company", "city"),
  Relation("founder", "founded", "company", "person"),
  Relation("capital", "seat", "country", "city"),
  Relation("mouth", "ends", "river", "city"),
)
INDEX = {relation.name: i for i, relation in enumerate(ALL)}


def sequences(hops: int) -> list[tuple[int, ...]]:
  """Returns all sequences of distinct relations whose kinds chain."""
  rows: list[tuple[int, ...]] = [(r,) for r in range(len(ALL))]
  for _ in range(hops - 1):
    rows = [
      (*row, r)
      for row in rows
      for r in range(len(ALL))
      if r not in row and ALL[row[-1]].object == ALL[r].subject
    ]
  return rows
