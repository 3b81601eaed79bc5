"""The TPU's kernel for prefill, interpreted, against float64 NumPy.

Its error must not exceed that of XLA's path, on the same bfloat16 values.
"""

from __future__ import annotations

import functools

import numpy as np
import paged_cases
import pytest

from anysearch_jax.policy.attention import tpu_attention

# Query heads to a kv head, and numbers of a head: Qwen3, Qwen2.5-0.5B, others.
HEADS = [
  (4, 128),
  (7, 64),
  *(
    pytest.param(heads, marks=pytest.mark.slow)
    for heads in ((8, 128), (7, 128), (4, 64), (8, 64))
  ),
]

interpreted = functools.partial(tpu_attention.attend, interpret=True)


def assert_as_exact_as_xla(arguments, tolerance=1.0001):
  """Both round the same numbers, of blocks of 512 tokens, in another order."""
  paged_cases.assert_as_exact_as_xla(interpreted, arguments, tolerance)


@pytest.mark.parametrize("heads", HEADS)
def test_ragged_rows_are_as_exact_as_xla(heads):
  """Each row is a chunk of another sequence, of 1 to 1500 tokens."""
  ends = (64, 65, 640, 1500)
  assert_as_exact_as_xla(
    paged_cases.case(heads=heads, ends=ends, new=64, columns=24)
  )


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 16])
def test_1_to_16_rows_of_8192_tokens_are_as_exact_as_xla(rows):
  ends = np.linspace(8192, 64, rows).astype(int)
  assert_as_exact_as_xla(
    paged_cases.case(heads=(4, 128), ends=ends, new=64, columns=128)
  )


@pytest.mark.parametrize(
  ("size", "new", "end"),
  [(16, 20, 300), (128, 1, 200), (128, 20, 300), (128, 300, 300)],
)
def test_pages_of_any_size_and_tiles_that_are_not_full(size, new, end):
  """A row of 300 new tokens has several tiles."""
  arguments = paged_cases.case(
    heads=(3, 128),
    ends=(end, new, end),
    new=new,
    columns=512 // size,
    size=size,
    kv=2,
  )
  # Of so few numbers, a handful that round otherwise are seen.
  assert_as_exact_as_xla(arguments, tolerance=1.01)


def test_padding_at_the_end_of_a_row_changes_none_of_its_tokens():
  q, pages, table, positions = paged_cases.case(
    heads=(4, 128), ends=(100, 90), new=32, columns=8
  )
  padded = positions.copy()
  padded[1] = np.minimum(padded[1], padded[1, 9])
  whole, part = (
    np.asarray(interpreted(q, pages, table, x), np.float32)
    for x in (positions, padded)
  )
  np.testing.assert_array_equal(whole[0], part[0])
  np.testing.assert_array_equal(whole[1, :10], part[1, :10])


def test_a_row_depends_on_no_other_row_to_the_bit():
  q, pages, table, positions = paged_cases.case(
    heads=(4, 64), ends=(100, 40, 1000, 64), new=32, columns=16
  )

  def others(last):
    at = positions.copy()
    at[2] = np.arange(last - 32, last)
    return np.asarray(interpreted(q, pages, table, at), np.float32)[[0, 1, 3]]

  np.testing.assert_array_equal(others(32), others(1000))
