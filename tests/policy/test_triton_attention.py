"""The GPU's attention kernel, interpreted, against float64 NumPy.

Its error must not exceed that of XLA's path, on the same bfloat16 values.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paged_cases
import pytest

from anysearch_jax.policy.attention import triton_attention

# Query heads to a kv head, and numbers of a head: Qwen3, Qwen2.5-0.5B, others.
HEADS = [
  (4, 128),
  (7, 64),
  *(
    pytest.param(heads, marks=pytest.mark.slow)
    for heads in ((8, 128), (7, 128), (4, 64), (8, 64))
  ),
]


interpreted = functools.partial(triton_attention.attend, interpret=True)


def assert_as_exact_as_xla(arguments, tolerance=1.0):
  paged_cases.assert_as_exact_as_xla(interpreted, arguments, tolerance)


@pytest.mark.parametrize("heads", HEADS)
def test_decode_is_as_exact_as_xla(heads):
  ends = (1, 65, 8192)
  assert_as_exact_as_xla(
    paged_cases.case(heads=heads, ends=ends, new=1, columns=128)
  )


@pytest.mark.parametrize("heads", HEADS)
def test_prefill_of_ragged_rows_is_as_exact_as_xla(heads):
  """Each row is a chunk of another sequence, of 1 to 1500 tokens."""
  ends = (64, 65, 100, 640, 1500)
  assert_as_exact_as_xla(
    paged_cases.case(heads=heads, ends=ends, new=64, columns=24)
  )


@pytest.mark.slow
def test_long_prefill_is_as_exact_as_xla():
  arguments = paged_cases.case(
    heads=(4, 128), ends=(8192,), new=64, columns=128
  )
  assert_as_exact_as_xla(arguments)


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize(("new", "end"), [(1, 200), (20, 300)])
def test_pages_of_any_size_and_tiles_that_are_not_full(size, new, end):
  arguments = paged_cases.case(
    heads=(3, 64),
    ends=(end, new),
    new=new,
    columns=512 // size,
    size=size,
    kv=2,
  )
  # Where there is one block both round the same numbers.
  assert_as_exact_as_xla(arguments, tolerance=1.01)


@pytest.mark.parametrize("new", [1, 32])
def test_a_row_depends_on_no_other_row_to_the_bit(new):
  q, pages, table, positions = paged_cases.case(
    heads=(4, 64), ends=(100, 40, 500), new=new, columns=8
  )

  def first(last):
    at = positions.copy()
    at[2] = np.arange(last - new, last)
    return np.asarray(interpreted(q, pages, table, at), np.float32)[:2]

  np.testing.assert_array_equal(first(new), first(500))


def test_partial_results_are_float32():
  arguments = paged_cases.case(heads=(4, 128), ends=(1000,), new=1, columns=16)
  traced = jax.make_jaxpr(interpreted)(*arguments)
  (call,) = [x for x in traced.jaxpr.eqns if x.primitive.name == "pallas_call"]
  assert [x.aval.dtype for x in call.outvars] == [jnp.float32] * 3
