"""The pages of layers with sliding windows, which rows free as they go on."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models
import small_engine

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout.jax_engine import kv_memory

_ALL = [(q, s) for q in range(4) for s in range(5)]


def poisoned(engine):
  """Makes an engine fill pages of windows with NaN while they are free."""
  (_, pool), device = engine._memory._pools[0], engine._device
  allocate, release, freed = pool.allocate, pool.release, []

  @jax.jit
  def filled(layer, page, value):
    return jax.tree.map(lambda x: x.at[:, page].set(value), layer)

  def fill(pages, value):
    def layer(i, found):
      for page in pages if i in engine._device._a.windowed else ():
        found = filled(found, page, value)
      return found

    def call():
      if device._pages:
        device._pages = tuple(layer(*each) for each in enumerate(device._pages))

    device._submit(call)
    return pages

  def released(pages):
    release(pages)
    gone = [page for page in pages if page in pool._free]
    for page in gone:
      pool._forget_page(page)
    freed.extend(fill(gone, jnp.nan))

  pool.allocate = lambda *count: fill(allocate(*count), 0.0)
  pool.release = released
  return freed


@pytest.mark.parametrize(
  "case",
  [
    "gpt-oss",
    pytest.param("gemma3-tied", marks=pytest.mark.slow),
    pytest.param("olmo3", marks=pytest.mark.slow),
  ],
)
def test_freed_pages_are_not_read_and_turns_equal_a_full_forward(case):
  """With chunks, shared prompts, few pages and episodes in any order."""
  a = random_models.architecture(case, vocab_size=len(small_engine.TEXTS))
  params, rng = random_models.params(a), np.random.default_rng(0)
  engine = small_engine.engine(
    params, architecture=a, slots=5, kv_tokens=228, prefill_lanes=4
  )
  freed = poisoned(engine)
  order = [_ALL[i] for i in rng.permutation(len(_ALL))]
  played = small_engine.play(engine, order, delay=rng)
  assert engine.counters["preemptions"] > 0 < engine.counters["shared_tokens"]
  assert len(freed) > 300 and engine.pages[0] == 0
  for context, generations in played.values():
    at, placed = len(small_engine.prompt(0)), []
    for generation in generations:
      placed.append((at, generation))
      at += len(generation.token_ids) + len(small_engine.ENVIRONMENT)
    small_engine.assert_scored(params, context, placed, a)


SIZE, WINDOW, CHUNK, LANES, STEPS = 2, 5, 3, 3, 3


@pytest.mark.parametrize("seed", range(30))
def test_rows_find_the_tokens_that_their_layers_see(seed):
  """A model of the device: what each place of each page holds."""
  rng, counts = np.random.default_rng(seed), collections.Counter()
  config = config_lib.EngineConfig(
    *("jax", 4, 48, (50, 0)[seed % 2], SIZE, (4,), LANES, CHUNK, STEPS)
  )
  a = dataclasses.replace(small_engine.A, window=WINDOW, windowed=(0,))
  memory, places = kv_memory.KvMemory(config, a), ({}, {})

  def call(ends):
    """Writes new tokens of rows, then reads what each of them sees."""
    for row, end in ends.items():
      for at in range(row.cached, end):
        for pages, place in zip(row.pages, places):
          assert pages[at // SIZE] != kv_memory.PADDING
          place[pages[at // SIZE], at % SIZE] = tuple(row.context[: at + 1])
    for row, end in ends.items():
      for i, (pages, place) in enumerate(zip(row.pages, places)):
        for at in range(i * max(0, row.cached - WINDOW + 1), end):
          found = place[pages[at // SIZE], at % SIZE]
          assert found == tuple(row.context[: at + 1])
      row.cached = end

  def grown(row, tokens, busy):
    counts["preempted"] += len(memory.grow(row, tokens, busy))
    return memory.has_pages(row, tokens)

  def rows(*, missing):
    """Yields rows that were not preempted meanwhile, in a random order."""
    for address in rng.permutation(list(memory._rows)).tolist():
      row = memory.get(types.Address(*address))
      if row is not None and (len(row.context) - 1 > row.cached) == missing:
        yield row

  for n in range(1500):
    kind, ends = rng.integers(8), {}
    if kind == 0:
      context = list(range(rng.integers(3), 30))[: rng.integers(1, 30)]
      context += rng.integers(40, 42, rng.integers(1, 3)).tolist()
      address = types.Address(0, n, 0)
      if memory.is_prefix_filling(context):
        continue
      if (row := memory.open_row(address, context, is_prompt=True)) is not None:
        counts["shared"] += row.first_own
        for place, old, pages in zip(places, row.copy_sources, row.pages):
          for at in range(SIZE):
            place[pages[row.first_own], at] = place.get((old, at))
        memory.mark_ready(row)
    elif kind < 3:  # A prefill call.
      lanes = LANES
      for row in rows(missing=True):
        if lanes and grown(row, len(row.context) - 1, ends):
          end = min(len(row.context) - 1, row.cached + lanes * CHUNK)
          memory.slide_windows(row, end)
          lanes -= -(-(end - row.cached) // CHUNK)
          ends[row] = end
      call(ends)
      for row in ends:
        memory.mark_ready(row)
        before = max(0, row.cached - WINDOW + 1) // SIZE
        assert not any(row.pages[1][:before])
    elif kind < 6:  # A decode call.
      for row in rows(missing=False):
        if row.cached < 44 and grown(row, row.cached + STEPS, ends):
          memory.slide_windows(row, row.cached + STEPS)
          new = rng.integers(40, 42, rng.integers(1, STEPS + 1))
          row.context += new.tolist()
          ends[row] = len(row.context) - 1
      call(ends)
    elif kind == 6 and memory:
      memory.release(list(memory._rows)[rng.integers(len(memory))])
    else:
      for row in rows(missing=False):
        same = row.context[: rng.integers(1, len(row.context) + 1)]
        new = same + rng.integers(42, 44, rng.integers(1, 8)).tolist()
        counts["changed"] += memory.resume(row, new[:40]) > 0
        break
  for address in list(memory._rows):
    memory.release(address)
  assert memory.held_pages[0] == 0 < counts["shared"] * counts["changed"]
  assert counts["preempted"] > 0 or seed % 2


@pytest.mark.parametrize(
  ("layers", "every", "window", "context", "saved"),
  [(32, 4, 4096, 8192, 0.375), (32, 4, 4096, 32768, 0.656)]  # Olmo 3 7B.
  + [(26, 6, 512, 2048, 0.635), (26, 6, 512, 512, 0)],  # Gemma 3 1B.
)
def test_windows_have_fewer_pages(layers, every, window, context, saved):
  windowed = tuple(i for i in range(layers) if (i + 1) % every)
  sizes = {"layers": layers, "window": window, "windowed": windowed}
  a = dataclasses.replace(small_engine.A, **sizes)
  engine = config_lib.EngineConfig(slots=64, max_context=context)
  full, *near = kv_memory.pool_sizes(engine, a, shards=1)
  assert len(near) == (saved > 0)
  fewer = sum(full - count for count in near) * len(windowed) / layers
  assert fewer / full == pytest.approx(saved, abs=0.03)
  # Where all rows are shorter than their windows, a second pool saves nothing.
  few = dataclasses.replace(engine, kv_tokens=16 * context // 8)
  assert kv_memory.pool_sizes(few, a, shards=1) == (1 + context // 8,)
