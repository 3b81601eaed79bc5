"""The TPU's kernel of paged attention, interpreted, against float64 NumPy.

Its error must not exceed that of XLA's path, on
the same bfloat16 values.
"""

from __future__ import annotations

import functools

import numpy as np
import paged_cases
import pytest

from anysearch_jax.policy.attention import tpu_attention

TPU = pytest.param(
  functools.partial(tpu_attention.attend, interpret=True), id="tpu"
)
# Query heads to a kv head, and numbers of a head: Qwen3, Qwen2.5-0.5B, others.
HEADS = [
  (4, 128),
  *(
    pytest.param(heads, marks=pytest.mark.slow)
    for heads in ((7, 64), (8, 128), (7, 128), (4, 64), (8, 64))
  ),
]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kernel", [TPU])
def test_prefill_of_ragged_rows_is_as_exact_as_xla(kernel, heads):
  """Each row is a chunk of another sequence, of 1 to 640 tokens."""
  arguments = paged_cases.case(heads=heads, ends=(64, 640), new=64, columns=10)
  paged_cases.assert_as_exact_as_xla(kernel, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("kernel", [TPU])
def test_rows_of_8192_tokens_are_as_exact_as_xla(kernel, rows):
  ends = np.linspace(8192, 64, rows).astype(int)
  arguments = paged_cases.case(heads=(4, 128), ends=ends, new=64, columns=128)
  paged_cases.assert_as_exact_as_xla(kernel, arguments)


@pytest.mark.parametrize(
  ("kernel", "size", "new", "end"),
  [
    (*TPU.values, 16, 20, 300),
    # A row of 300 new tokens has several tiles.
    pytest.param(*TPU.values, 128, 300, 300, marks=pytest.mark.slow),
  ],
)
def test_pages_of_any_size_and_tiles_that_are_not_full(kernel, size, new, end):
  arguments = paged_cases.case(
    heads=(3, 128),
    ends=(end, new),
    new=new,
    columns=512 // size,
    size=size,
    kv=2,
  )
  paged_cases.assert_as_exact_as_xla(kernel, arguments)


@pytest.mark.parametrize(
  ("kernel", "new"),
  [(*TPU.values, 32)],
)
def test_a_row_depends_on_no_other_row_to_the_bit(kernel, new):
  q, pages, table, positions = paged_cases.case(
    heads=(4, 64), ends=(100, 40, 600), new=new, columns=10
  )

  def first(last):
    at = positions.copy()
    at[2] = np.arange(last - new, last)
    return np.asarray(kernel(q, pages, table, at), np.float32)[:2]

  np.testing.assert_array_equal(first(new), first(600))


def test_padding_at_the_end_of_a_row_changes_none_of_its_tokens():
  (kernel,) = TPU.values
  q, pages, table, positions = paged_cases.case(
    heads=(4, 128), ends=(100, 90), new=32, columns=8
  )
  padded = positions.copy()
  padded[1] = np.minimum(padded[1], padded[1, 9])
  whole, part = (
    np.asarray(kernel(q, pages, table, x), np.float32)
    for x in (positions, padded)
  )
  np.testing.assert_array_equal(whole[0], part[0])
  np.testing.assert_array_equal(whole[1, :10], part[1, :10])
