"""Attention over pages against float64 NumPy, and over rows gathered from them.

Blocks of attention are smaller than rows, so that rows have several.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import paged_cases
import pytest

from anysearch_jax.policy import sharding
from anysearch_jax.policy.attention import gathered_attention, paged_attention
from anysearch_jax.policy.attention import pages as pages_lib

# Rows, kv heads, queries of each, head size, tokens of a page, pages of a row.
B, K, G, H, S, M = 4, 2, 3, 8, 4, 6
# Tokens of the rows, the last of which are new.
LENGTHS = np.array([1, 9, 24, 14])
SINKS = jnp.linspace(-2.0, 3.0, K * G)
FLOAT8 = pytest.mark.parametrize("float8", [False, True])


def as_float8(k, v):
  """Rounds vectors in float64 to the nearest float8 that pages can store.

  Returns numbers and scales, in the order of `Pages`.
  """
  exponent, part = np.divmod(np.arange(127), 8)
  numbers = np.where(
    exponent == 0, part / 512, (1 + part / 8) * 2.0 ** (exponent - 7)
  )

  def rounded(x):
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(-1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(np.maximum(largest, 1e-30) / 464))
    nearest = np.abs(np.abs(x / scale)[..., None] - numbers).argmin(-1)
    return np.copysign(numbers[nearest], x), scale[..., 0]

  (k, k_scale), (v, v_scale) = rounded(k), rounded(v)
  dtypes = (jnp.float8_e4m3fn,) * 2 + (jnp.bfloat16,) * 2
  return tuple(map(jnp.asarray, (k, v, k_scale, v_scale), dtypes))


def case(t, starts=None, float8=False):
  """Returns arguments of `Paged`: rows with `t` new tokens, shuffled pages.

  Rows begin with padding where `starts`, by default `LENGTHS - t`, are below 0.
  """
  rng = np.random.default_rng(0)
  pages = rng.normal(size=(2, K, 1 + B * M, S, H))
  table = rng.permutation(np.arange(1, 1 + B * M)).reshape(B, M)
  new = rng.normal(size=(B, t, K * G + 2 * K, H))
  q, k, v = np.split(jnp.float32(new), (K * G, K * G + K), axis=2)
  starts = LENGTHS - t if starts is None else starts
  positions = starts[:, None] + np.arange(t)
  pages = as_float8(*pages) if float8 else map(jnp.float32, pages)
  pages = pages_lib.Pages(*pages)
  return q, k, v, pages, table, np.maximum(positions, 0), positions >= 0


@pytest.mark.parametrize("block", [4, 8, 100])
@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize(
  ("float8", "sinks"), [(False, None), (True, None), (False, SINKS)]
)
def test_paged_attention_equals_the_written_out_sum(t, block, float8, sinks):
  arguments = case(t, float8=float8)
  q, k, v, pages, table, positions, real = arguments
  paged = jax.jit(paged_attention.Paged(block=block))
  out, after = paged(*arguments, sinks=sinks)
  wanted = paged_cases.truth(q, after, table, positions, sinks)
  np.testing.assert_allclose(out[real], wanted[real], atol=2e-6)
  # New tokens are in their pages, padding is in the reserved one, and all else
  # is as before.
  stored = as_float8(k, v) if float8 else (k, v)
  for old, new, written in zip(*map(jax.tree.leaves, (pages, stored, after))):
    expected = np.array(old)
    for row, step in zip(*np.nonzero(real)):
      at = positions[row, step]
      expected[:, table[row, at // S], at % S] = new[row, step]
    np.testing.assert_array_equal(written[:, 1:], expected[:, 1:])


def test_a_row_does_not_depend_on_the_longest_to_the_bit():
  paged = jax.jit(paged_attention.Paged(block=4))
  *others, positions, real = case(1)

  def first_rows(last):
    at = positions.copy()
    at[2] = last
    return np.asarray(paged(*others, at, real)[0])[[0, 1]]

  np.testing.assert_array_equal(first_rows(0), first_rows(23))


def test_a_layer_with_a_window_reads_no_page_before_it():
  q, k, v, pages, table, positions, real = case(1)
  attend = functools.partial(paged_attention.Paged(block=S), window=5)
  _, after = attend(q, k, v, pages, table, positions, real)
  whole = np.maximum(positions[:, 0] - 4, 0) // S  # Pages, of rows of 0 to 5.
  unseen = np.concatenate([row[:n] for row, n in zip(table, whole)])
  assert len(unseen) == 1 + 4 + 2
  pages = jax.tree.map(lambda x: x.at[:, unseen].set(jnp.nan), pages)
  found, _ = attend(q, k, v, pages, table, positions, real)
  wanted = paged_cases.truth(q, after, table, positions, window=5)
  np.testing.assert_allclose(found, wanted, atol=2e-6)


def halved(pages, table):
  """Returns pages and table where each half of the rows has its own pages.

  The table of a half counts its pages from 0, as on a device of a mesh. Also
  returns the number that each page had.
  """
  before, tables = [], []
  for rows in np.split(table, 2):
    numbers = np.unique(rows)
    before += [0, *numbers]
    tables.append(1 + np.searchsorted(numbers, rows))
  before = np.array(before)
  apart = jax.tree.map(lambda x: x[:, before], pages)
  return apart, np.concatenate(tables), before


@pytest.mark.parametrize("sinks", [None, SINKS])
@FLOAT8
def test_a_mesh_cuts_rows_pages_and_heads(float8, sinks):
  paged = paged_attention.Paged(mesh=sharding.mesh(data=2, tensor=2))
  arguments = case(1, float8=float8)
  q, k, v, pages, table, positions, real = arguments
  whole, _ = jax.jit(paged_attention.Paged())(*arguments, sinks=sinks)
  apart, own, _ = halved(pages, table)
  out, _ = jax.jit(paged)(q, k, v, apart, own, positions, real, sinks=sinks)
  np.testing.assert_allclose(out, whole, atol=1e-6)


# A decode call over gathered rows: tokens before it, and tokens that it adds.
STARTS, COUNTS = np.array([0, 9, 19, 14]), np.array([5, 3, 5, 4])
STEPS = 5


def memory(gathered, pages, lanes=B):
  """Returns what an earlier call left: no number of it may be read."""
  empty = gathered.empty(pages, lanes=lanes, columns=M, steps=STEPS)
  return jax.tree.map(lambda x: jnp.full_like(x, 777), empty)


def played(counts, starts=STARTS, pages=None, block=8, float8=False, **more):
  """Returns outputs and pages of a call whose rows add `counts` tokens."""
  gathered = gathered_attention.Gathered(block, rounds=float8)
  q, k, v, found, table, *_ = case(STEPS, STARTS, float8)
  pages = found if pages is None else pages
  cache = gathered.gather(memory(gathered, pages), pages, table, starts)
  out = []
  for step in range(max(counts)):
    which = np.arange(B), np.minimum(step + starts - STARTS, STEPS - 1)
    at, real = starts + np.minimum(step, counts), (step < counts)[:, None]
    attended, cache = jax.jit(gathered.__call__)(
      *(x[which][:, None] for x in (q, k, v)), cache, at[:, None], real, **more
    )
    out.append(np.where(real[..., None, None], attended, 0))
  after = gathered.write_back(pages, cache, table, counts)
  return np.concatenate(out, axis=1), after


def assert_same_pages(found, known):
  """Compares pages to the bit, but not page 0, which is for padding."""
  for x, y in zip(*map(jax.tree.leaves, (found, known)), strict=True):
    np.testing.assert_array_equal(x[:, 1:], y[:, 1:])


@FLOAT8
@pytest.mark.parametrize("block", [1, 8, 100])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_gathered_rows_attend_as_their_pages_do(block, float8, sinks):
  out, pages = played(COUNTS, block=block, float8=float8, sinks=sinks)
  *arguments, positions, _ = case(STEPS, STARTS, float8)
  real = np.arange(STEPS) < COUNTS[:, None]
  paged = jax.jit(paged_attention.Paged())
  wanted, after = paged(*arguments, positions, real, sinks=sinks)
  np.testing.assert_allclose(out[real], wanted[real], atol=2e-6)
  assert_same_pages(pages, after)


def test_a_gathered_row_does_not_depend_on_the_others_to_the_bit():
  together, _ = played(COUNTS)
  # The longest row is absent, and another one halts at once.
  apart, _ = played(COUNTS * [1, 1, 0, 0])
  np.testing.assert_array_equal(apart[:2], together[:2])


@FLOAT8
def test_a_gathered_row_does_not_depend_on_where_calls_end_to_the_bit(float8):
  at_once, pages = played(COUNTS, float8=float8)
  some = np.minimum(COUNTS, 2)
  first, between = played(some, float8=float8)
  rest, after = played(COUNTS - some, STARTS + some, between, float8=float8)
  np.testing.assert_array_equal(np.concatenate([first, rest], 1), at_once)
  assert_same_pages(after, pages)


def test_a_full_row_writes_no_other_page():
  starts = np.array([0, 9, M * S - 2, 14])
  *_, pages, table, _, _ = case(STEPS, STARTS)
  _, after = played(np.array([5, 3, 2, 4]), starts)
  for found, known in zip(after[:2], pages[:2]):
    full = table[2, :-1]
    np.testing.assert_array_equal(found[:, full], known[:, full])


@pytest.mark.parametrize(
  ("platform", "head_dim", "dtype", "page", "kv_dtype", "best"),
  [
    ("cpu", 128, "bfloat16", 64, "auto", "xla"),
    (8.0, 128, "bfloat16", 64, "auto", "xla"),
    (9.0, 256, "bfloat16", 64, "auto", "xla"),
    (9.0, 128, "bfloat16", 128, "auto", "mosaic"),
    (9.0, 128, "bfloat16", 64, "float8", "xla"),
    (9.0, 96, "bfloat16", 64, "auto", "xla"),
    (9.0, 128, "float32", 64, "auto", "xla"),
    (10.0, 128, "bfloat16", 64, "auto", "xla"),
    ("tpu", 128, "bfloat16", 64, "auto", "tpu"),
    ("tpu", 64, "bfloat16", 64, "auto", "xla"),
  ],
)
def test_auto_chooses_the_best_kernel_that_runs(
  platform, head_dim, dtype, page, kv_dtype, best
):
  how = {"head_dim": head_dim, "dtype": dtype, "page": page}
  if isinstance(platform, float):
    platform, how["capability"] = "cuda", str(platform)
  how["stored"] = pages_lib.storage_dtype(kv_dtype, dtype, platform)
  assert paged_attention.choose("auto", platform=platform, **how) == best


@pytest.mark.parametrize(
  ("kv_dtype", "dtype", "platform", "stored"),
  [
    ("auto", "bfloat16", "cuda", "bfloat16"),
    ("auto", "bfloat16", "tpu", "bfloat16"),
    ("auto", "bfloat16", "cpu", "float32"),
    ("auto", "float32", "cpu", "float32"),
    ("float8", "bfloat16", "cpu", "float8_e4m3fn"),
  ],
)
def test_pages_have_the_dtype_that_is_written_fast(
  kv_dtype, dtype, platform, stored
):
  assert pages_lib.storage_dtype(kv_dtype, dtype, platform) == stored


@pytest.mark.parametrize(
  ("kernel", "platform", "capability"),
  [("auto", "tpu", None), ("mosaic", "cuda", "9.0")],
)
def test_float8_is_refused_where_the_kernel_does_not_read_it(
  kernel, platform, capability
):
  how = {"head_dim": 128, "dtype": "bfloat16", "page": 64}
  how |= {"platform": platform, "capability": capability}
  how["stored"] = pages_lib.storage_dtype("float8", "bfloat16", platform)
  with pytest.raises(ValueError, match="engine.kv_dtype: found float8, which"):
    paged_attention.choose(kernel, **how)
  assert paged_attention.choose("xla", **how) == "xla"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float8_vectors_are_the_nearest_and_are_written_back_to_the_bit(dtype):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3000, H)) * np.exp2(rng.integers(-99, 120, (3000, 1)))
  # Zeros, a number below all others, the largest, and where scales change.
  x[:6] = np.array([0, 1e-40, 1.7e38, 464, 466, 232])[:, None] * np.eye(H)[0]
  x = jnp.asarray(x, dtype)
  number, scale = found = jax.jit(pages_lib.quantised)(x)
  wanted, own = (np.float64(x) for x in as_float8(x, x)[::2])
  # Both may be as near.
  off, least = (
    np.abs(np.float64(n) * np.float64(s)[:, None] - np.float64(x))
    for n, s in ((number, scale), (wanted, own))
  )
  np.testing.assert_array_equal(off[2:], least[2:])
  assert not np.float32(number[:2]).any() and (scale > 0).all()
  again = pages_lib.round_to_float8(x)
  assert again.dtype == x.dtype and np.isfinite(again).all()
  for one, other in zip(jax.jit(pages_lib.quantised)(again), found):
    np.testing.assert_array_equal(one, other)


def test_a_gather_is_copies_without_a_loop():
  rng = np.random.default_rng(0)
  shape, lanes, columns = (2, 200, 8, 24), 32, 160  # 20 blocks.
  pages = pages_lib.Pages(*map(jnp.float32, rng.normal(size=(2, *shape))))
  table = rng.integers(1, shape[1], (lanes, columns))
  starts = np.linspace(0, 1000, lanes, dtype=np.int32)
  gathered = gathered_attention.Gathered()
  rows = gathered.empty(pages, lanes=lanes, columns=columns, steps=16)
  program = jax.jit(gathered.gather, donate_argnums=0).lower(
    rows, pages, table, starts
  )
  # On JAX 0.12 a loop becomes one kernel, which takes four times as long.
  text = (compiled := program.compile()).as_text()
  assert not re.search(r" while\(|small_call| copy\(f32\[20,", text)
  found = compiled(rows, pages, table, starts)
  for row, count in enumerate(starts):
    for known, x in zip(pages, (found.k.mT, found.v)):
      tokens = x[:, :, row].swapaxes(0, 1).reshape(2, -1, 24)[:, :count]
      known = known[:, table[row]].reshape(2, -1, 24)[:, :count]
      np.testing.assert_array_equal(tokens, known)
