"""Decode attention over gathered rows, against attention over their pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax.policy import sharding
from anysearch_jax.policy.attention import gathered_attention, paged_attention
from anysearch_jax.policy.attention import pages as pages_lib

# Rows, kv heads, queries of each, head size, tokens of a page, pages of a row.
B, K, G, H, S, M = 4, 2, 3, 8, 4, 6
STEPS = 5
STARTS = np.array([0, 9, 19, 14])


def case(seed=0):
  """Returns pages, their table, and queries, keys, values of new tokens."""
  rng = np.random.default_rng(seed)
  pages = rng.normal(size=(2, K, 1 + B * M, S, H))
  table = rng.permutation(np.arange(1, 1 + B * M)).reshape(B, M)
  new = rng.normal(size=(STEPS, B, 1, G + 2, K, H))
  q = new[..., :G, :, :].swapaxes(3, 4).reshape(STEPS, B, 1, K * G, H)
  k, v = new[..., G, :, :], new[..., G + 1, :, :]
  pages = pages_lib.Pages(*map(jnp.float32, pages))
  return pages, table, *map(jnp.float32, (q, k, v))


def memory(gathered, pages, lanes=B):
  """Returns what an earlier call left: no number of it may be read."""
  empty = gathered.empty(pages, lanes=lanes, columns=M, steps=STEPS)
  return jax.tree.map(lambda x: jnp.full_like(x, 777), empty)


def played(gathered, counts, rows=slice(None), starts=STARTS, pages=None):
  """Returns outputs and pages of a call whose rows add `counts` tokens."""
  found, table, q, k, v = case()
  pages = found if pages is None else pages
  table, starts, counts = table[rows], starts[rows], np.asarray(counts)[rows]
  offset = starts - STARTS[rows]
  cache = gathered.gather(
    memory(gathered, pages, len(table)), pages, table, starts
  )
  out = []
  for step in range(max(counts)):
    which = np.minimum(step + offset, STEPS - 1), np.arange(B)[rows]
    at = starts + np.minimum(step, counts)
    attended, cache = jax.jit(gathered.__call__)(
      q[which], k[which], v[which], cache, at[:, None], (step < counts)[:, None]
    )
    out.append(np.where((step < counts)[:, None, None, None], attended, 0))
  return np.stack(out), gathered.write_back(pages, cache, table, counts)


def expected(counts):
  """Returns the same by attention over pages."""
  pages, table, q, k, v = case()
  paged, out = paged_attention.Paged(block=8), []
  for step in range(STEPS):
    real = (step < counts)[:, None]
    at = (STARTS + np.minimum(step, counts))[:, None]
    attended, pages = paged(
      q[step], k[step], v[step], pages, table, jnp.asarray(at), real
    )
    out.append(np.where(real[..., None, None], attended, 0))
  return np.stack(out), pages


COUNTS = np.array([5, 3, 5, 4])


@pytest.mark.parametrize("block", [1, 8, 100])
def test_gathered_rows_attend_as_their_pages_do(block):
  gathered = gathered_attention.Gathered(block)
  (out, pages), (wanted, after) = played(gathered, COUNTS), expected(COUNTS)
  np.testing.assert_allclose(out, wanted, atol=2e-6)
  for found, known in zip(pages, after):
    # Page 0 is padding's.
    np.testing.assert_array_equal(found[:, 1:], known[:, 1:])


def test_a_row_does_not_depend_on_the_others_to_the_bit():
  gathered = gathered_attention.Gathered(8)
  together, _ = played(gathered, COUNTS)
  # The longest row is absent, and another one halts at once.
  apart, _ = played(gathered, COUNTS * [1, 1, 0, 0])
  np.testing.assert_array_equal(apart[:, :2], together[:, :2])


def test_a_row_does_not_depend_on_where_calls_end_to_the_bit():
  gathered = gathered_attention.Gathered(8)
  at_once, pages = played(gathered, COUNTS)
  first, between = played(gathered, np.minimum(COUNTS, 2))
  rest, after = played(
    gathered,
    COUNTS - np.minimum(COUNTS, 2),
    starts=STARTS + np.minimum(COUNTS, 2),
    pages=between,
  )
  np.testing.assert_array_equal(np.concatenate([first, rest]), at_once)
  for found, known in zip(after, pages):
    np.testing.assert_array_equal(found[:, 1:], known[:, 1:])


def test_a_full_row_writes_no_other_rows_page():
  starts = np.array([0, 9, M * S - 2, 14])
  gathered = gathered_attention.Gathered(8)
  pages, table, *_ = case()
  _, after = played(gathered, [5, 3, 2, 4], starts=starts)
  others = np.setdiff1d(np.arange(1, 1 + B * M), table)
  assert not len(others)
  untouched = table[2, :-1]
  for found, known in zip(after, pages):
    np.testing.assert_array_equal(found[:, untouched], known[:, untouched])


def test_a_mesh_cuts_rows_pages_and_heads():
  mesh = sharding.mesh(data=2, tensor=2)
  alone, cut = (
    gathered_attention.Gathered(8, mesh=mesh) for mesh in (None, mesh)
  )
  pages, table, q, k, v = case()
  # Each half of the rows has its own pages, counted from 0.
  halves, tables = [], []
  for rows in (slice(0, 2), slice(2, 4)):
    numbers = np.unique(table[rows])
    halves.append(np.concatenate([[0], numbers]))
    lookup = {page: i + 1 for i, page in enumerate(numbers)}
    tables.append(np.vectorize(lookup.get)(table[rows]))
  split = jax.tree.map(lambda x: x[:, np.concatenate(halves)], pages)

  def call(gathered, pages, table):
    @jax.jit
    def run(pages, table):
      cache = gathered.gather(
        memory(gathered, pages), pages, table, jnp.asarray(STARTS)
      )
      out, cache = gathered(
        q[0], k[0], v[0], cache, STARTS[:, None], np.ones((B, 1), bool)
      )
      return out, gathered.write_back(pages, cache, table, jnp.ones(B, int))

    return run(pages, table)

  out, after = call(cut, split, np.concatenate(tables))
  wanted, known = call(alone, pages, table)
  np.testing.assert_allclose(out, wanted, atol=1e-6)
  for found, there in zip(after, known):
    real = np.concatenate(halves) > 0
    np.testing.assert_array_equal(
      found[:, real], there[:, np.concatenate(halves)[real]]
    )
