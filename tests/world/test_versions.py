"""Tests the versions of the generated world."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from anysearch_jax.world import relations as relations_lib
from anysearch_jax.world import versions
from anysearch_jax.world import world as world_lib

FIXED = world_lib.World(versions.config("fixed", 0))
GRADED = world_lib.World(versions.config("graded", 0))


def test_the_fixed_world_is_the_world_before_it_had_a_name():
  digest = hashlib.sha256()
  for index in (0, 33, 37):
    s = FIXED.snapshot(index)
    for array in (s.values, s.alternative, s.twins, s.twin_first):
      digest.update(np.ascontiguousarray(array).tobytes())
    digest.update(repr(FIXED.corpus(s.name)).encode())
  for question in FIXED.questions("held-out", 200, 3):
    digest.update(repr(question).encode())
  assert digest.hexdigest() == (
    "49fda33db4b97b0a62bb8917d75181c3fc9db7bc218017c5c9772a44b2bf651f"
  )


def test_versions_share_names_and_no_memory_is_wrong_by_itself():
  assert GRADED.entities == FIXED.entities
  np.testing.assert_array_equal(GRADED.memory, GRADED.facts)
  assert 0.5 < GRADED.known.sum() / (GRADED.snapshot(0).values >= 0).sum() < 0.6


def test_each_relation_changes_as_often_as_it_says():
  snapshots = range(sum(GRADED.config.snapshots))
  wrong = np.stack(
    [GRADED.snapshot(i).values != GRADED.memory for i in snapshots]
  )
  for r, relation in enumerate(relations_lib.ALL):
    changed = wrong[:, GRADED.known[:, r], r]
    change = GRADED.config.changes[r]
    error = 4 * np.sqrt(change * (1 - change) / changed.size)
    assert abs(changed.mean() - change) <= error
    assert GRADED.reliability(relation.name) == 1 - change
    # No fact is wrong always, as it would be if it could be learned by heart.
    assert change == 0 or not changed.all(0).any()


def test_what_memory_does_not_hold_is_drawn_as_before():
  config = dataclasses.replace(GRADED.config, changes=())
  plain = world_lib.World(config).snapshot(7)
  snapshot = GRADED.snapshot(7)
  unknown = ~GRADED.known
  np.testing.assert_array_equal(snapshot.values[unknown], plain.values[unknown])
  np.testing.assert_array_equal(snapshot.twins >= 0, plain.twins >= 0)
  assert not (snapshot.twins[GRADED.known] >= 0).any()
  changed = snapshot.values[GRADED.known]
  assert (changed != plain.values[GRADED.known]).any() and (changed >= 0).all()


def test_questions_state_how_reliable_memory_is():
  for question in GRADED.questions("dev", 40, 0):
    for fact in question.metadata["facts"]:
      assert fact["reliability"] == GRADED.reliability(fact["relation"])
      memory = GRADED.recall(fact["entity"], fact["relation"])
      assert fact["known"] == (memory is not None)
      assert fact["stale"] == (fact["known"] and memory != fact["value"])


def test_an_unknown_version_is_refused():
  with pytest.raises(
    ValueError, match="data.world: found 'flat', expected one"
  ):
    versions.config("flat", 0)
