"""Rewards of systems against tables by hand, and properties of all of them."""

from __future__ import annotations

import dataclasses

import chex
import numpy as np
import spoken

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import method as method_lib

FIELDS = method_lib.Outcomes._fields


def constants(system, **changes):
  found = system.constants_of(config_lib.ExperimentConfig())
  return dataclasses.replace(found, **changes)


def scored(system, told, **changes):
  return system.reward(told, constants(system, **changes))


def assert_equals(system, changes, columns, rows):
  """Compares a reward with a table.

  Args:
    system: the `Method`.
    changes: of its constants.
    columns: names of outcomes or measures.
    rows: their values; the last number is the reward.
  """
  *given, total = np.array(rows, float).T
  values = dict(zip(columns.split(), given, strict=True))
  em = values.pop("em", 0 * total)
  measures = {key: values.pop(key) for key in {*values} - {*FIELDS}}
  told = spoken.outcomes(em, **values, measures=measures)
  out = scored(system, told, **changes)
  np.testing.assert_allclose(out["total"], total, atol=1e-6)
  chex.assert_type(list(out.values()), np.float32)


def drawn(system, changes, columns, group=5):
  """Returns drawn groups and their reward, which failed episodes do not change.

  Args:
    system: the `Method`.
    changes: of its constants.
    columns: names of outcomes or measures.
    group: trajectories of a group.
  """
  measures = {*columns.split()} - {*FIELDS}
  told = spoken.drawn(np.random.default_rng(group), 100, group, *measures)
  assert not told.valid.all()
  out = scored(system, told, **changes)
  chex.assert_trees_all_equal(
    out, scored(system, spoken.spoiled(told), **changes)
  )
  for value in out.values():
    assert not np.asarray(value)[~told.valid].any()
  return told, out
