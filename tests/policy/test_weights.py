"""The parameter table: rearrangement, blocks, initial values, shardings."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import jax
import numpy as np
import pytest
import small_table
from hypothesis import strategies as st

from anysearch_jax.policy import parameters as weights


@st.composite
def _rearrangements(draw):
  """Draws a table row with any split and transpose."""
  split = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
  perm = tuple(draw(st.permutations(range(len(split)))))
  cut = draw(st.integers(1, len(split)))
  file_shape = (math.prod(split[:cut]), math.prod(split[cut:]))
  shape = tuple(split[i] for i in perm)
  return dataclasses.replace(
    small_table.VECTOR,
    shape=shape,
    split=split,
    perm=perm,
    file_shape=file_shape,
  )


@hypothesis.given(_rearrangements())
def test_to_file_inverts_from_file(row):
  file = np.arange(math.prod(row.file_shape)).reshape(row.file_shape)
  ours = row.from_file(file)
  assert ours.shape == row.shape
  np.testing.assert_array_equal(row.to_file(ours), file)
  np.testing.assert_array_equal(row.from_file(row.to_file(ours)), ours)


@hypothesis.given(_rearrangements(), st.data())
def test_read_block_equals_slicing_the_whole(row, data):
  file = np.arange(math.prod(row.file_shape)).reshape(row.file_shape)
  block = []
  for size in row.shape:
    start = data.draw(st.integers(0, size - 1))
    block.append(slice(start, data.draw(st.integers(start + 1, size))))
  asked = []

  def read(cuts):
    asked.append(cuts)
    return file[cuts].copy()

  found = row.read_block(tuple(block), read)
  np.testing.assert_array_equal(found, row.from_file(file)[tuple(block)])
  (cuts,) = asked
  assert all(
    0 <= cut.start < cut.stop <= size
    for cut, size in zip(cuts, row.file_shape, strict=True)
  )


@pytest.mark.parametrize(
  ("block", "asked"),
  [
    # The file's matrix is [heads * head_dim, model]; ours [model, heads,
    # head_dim] of sizes 6, 2 and 4.
    (np.s_[0:6, 0:2, 0:4], np.s_[0:8, 0:6]),
    (np.s_[2:4, 0:2, 0:4], np.s_[0:8, 2:4]),
    (np.s_[0:6, 1:2, 0:4], np.s_[4:8, 0:6]),
    (np.s_[3:6, 0:1, 0:4], np.s_[0:4, 3:6]),
    # head_dim is the inner part of its file axis, so whole heads are read.
    (np.s_[0:6, 1:2, 1:3], np.s_[4:8, 0:6]),
  ],
)
def test_read_block_reads_only_what_it_needs(block, asked):
  seen = []

  def read(cuts):
    seen.append(cuts)
    return np.zeros((8, 6))[cuts]

  small_table.MATRIX.read_block(block, read)
  assert seen == [asked]


def test_initial_values_follow_the_table_and_the_seed():
  rows = small_table.ROWS
  params = weights.initialize(rows, 1)
  again = weights.initialize(rows, 1)
  other = weights.initialize(rows, 2)
  np.testing.assert_array_equal(params["norm"], np.ones(6))
  q = params["layers"]["q"]
  np.testing.assert_array_equal(q, again["layers"]["q"])
  assert (q != other["layers"]["q"]).all()
  zeros = weights.initialize(
    [dataclasses.replace(small_table.MATRIX, init=0.0)], 1
  )
  assert not zeros["layers"]["q"].any()
  wide = dataclasses.replace(small_table.VECTOR, shape=(20_000,), init=0.5)
  assert abs(weights.initialize([wide], 1)["norm"].std() - 0.5) < 0.02


def test_tensors_are_named_layer_by_layer():
  bias = dataclasses.replace(
    small_table.MATRIX, path=("layers", "b"), name="model.layers.{layer}.b"
  )
  head = dataclasses.replace(small_table.VECTOR, path=("head",), name="head")
  rows = [small_table.VECTOR, small_table.MATRIX, bias, head]
  assert [(name, layer) for name, _, layer in weights.tensors(rows)] == [
    ("norm.weight", 0),
    ("model.layers.0.q.weight", 0),
    ("model.layers.0.b", 0),
    ("model.layers.1.q.weight", 1),
    ("model.layers.1.b", 1),
    ("head", 0),
  ]
  assert weights.count(rows) == 6 + 2 * 48 + 2 * 48 + 6


def test_axes_are_sharded_only_if_the_mesh_divides_them():
  mesh = jax.make_mesh((3, 2), ("fsdp", "tensor"))
  rules = {
    "layers": None,
    "model": "fsdp",
    "heads": "tensor",
    "head_dim": None,
  }
  found = weights.shardings(small_table.ROWS, mesh, rules)
  assert found["layers"]["q"].spec == jax.P(None, "fsdp", "tensor", None)
  assert found["norm"].spec == jax.P(None)
  odd = dataclasses.replace(small_table.MATRIX, shape=(2, 7, 3, 4))
  found = weights.shardings([odd], mesh, rules)
  assert found["layers"]["q"].spec == jax.P(None, None, None, None)
