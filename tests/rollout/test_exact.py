"""`engine.exact`: sampling and scoring agree to the bit, whatever runs beside.

The oracle is equality: the same turns under other traffic (order, delays, free
slots, evictions), and their score by `score_exactly` in another order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import paged_cases
import pytest
import random_models
import small_engine
import small_run
from jax._src.pallas.mosaic_gpu.interpret import params as mosaic

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.policy import decoder, experts, sharding
from anysearch_jax.policy.attention import (
  mosaic_attention,
  paged_attention,
)
from anysearch_jax.rollout.jax_engine import kv_store
from anysearch_jax.training import batching, learner

_WINDOWED = dataclasses.replace(small_engine.A, window=10, windowed=(1,))
_ALL = [(q, s) for q in range(4) for s in range(5)]


def _assert_scored(engine, params, played, rng):
  """Scores all episodes in a random order; compares with their sampling."""
  keys = [list(played)[i] for i in rng.permutation(len(played))]
  contexts = [np.array(played[key][0]) for key in keys]
  for key, logps in zip(keys, engine.score_exactly(params, contexts)):
    assert len(logps) == len(played[key][0]) - 1
    at = len(small_engine.prompt(0)) - 1
    for turn in played[key][1]:
      end = at + len(turn.token_ids)
      assert turn.logps == tuple(logps[at:end].tolist())
      at = end + len(small_engine.ENVIRONMENT)


def slow(*values):
  """A case that only `make test-all` runs."""
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("dtype", "axes", "changes"),
  [
    ("float32", {}, {}),
    slow("float32", {}, {"architecture": _WINDOWED}),
    # Each token by its own experts alone, and by all.
    slow("float32", {}, {"case": "qwen3-moe", "few": 0}),
    slow("float32", {"data": 2, "expert": 2}, {"case": "qwen3-moe", "few": 0}),
    ("bfloat16", {}, {"case": "gpt-oss", "few": 8}),
    slow("bfloat16", {}, {"kv_dtype": "float8"}),
    ("bfloat16", {"data": 2, "tensor": 2}, {}),
  ],
)
def test_traffic_and_scoring_change_no_bit(dtype, axes, changes, monkeypatch):
  params, a = small_engine.params(), small_engine.A
  if "case" in changes:
    sizes = {"vocab_size": len(small_engine.TEXTS)}
    a = random_models.architecture(changes["case"], **sizes)
    monkeypatch.setattr(experts, "_FEW", changes["few"])
    monkeypatch.setattr(experts, "_BLOCK", 8)
    params, changes = random_models.params(a), {"architecture": a}
  if axes:
    changes = changes | {"lanes": (16,), "mesh": sharding.mesh(**axes)}
    params = jax.device_put(params, sharding.shardings(a, changes["mesh"]))
  engine = functools.partial(
    *(small_engine.engine, params),
    **{"dtype": jnp.dtype(dtype), "exact": True} | changes,
  )
  first = engine()
  played = small_engine.play(first, _ALL)
  assert first.counters["shared_tokens"] > 0
  assert first.counters["prefill_calls"] == 0
  rng = np.random.default_rng(0)
  _assert_scored(first, params, played, rng)
  # There is room for one and a half contexts in each part.
  small = engine(slots=20, kv_tokens=240 * axes.get("data", 1))
  shuffled = [_ALL[i] for i in rng.permutation(len(_ALL))]
  assert small_engine.play(small, shuffled, delay=rng) == played
  assert small.counters["preemptions"] > 0
  _assert_scored(small, params, played, rng)
  if not changes:
    # The fast path, whose calls have other shapes, agrees to rounding only.
    fast = small_engine.play(small_engine.engine(params), _ALL)
    assert fast != played
    for key, (context, turns) in fast.items():
      assert context == played[key][0]
      for one, other in zip(turns, played[key][1], strict=True):
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)


def test_a_token_changes_no_bit_of_the_tokens_before_it(monkeypatch):
  how = mosaic.InterpretGPUParams()
  attend = functools.partial(mosaic_attention.attend, interpret=how)
  monkeypatch.setattr(mosaic_attention, "attend", attend)
  monkeypatch.setattr(mosaic_attention, "_MAX_SPLITS", 2)
  q, pages, table, positions = paged_cases.case(
    heads=(4, 64), ends=(100, 300), new=2, columns=8
  )
  new, unreal = q[:, :, :1], np.zeros_like(positions, bool)

  def first(last, *, exact):
    """Returns the result of row 0's first token; its second is at `last`."""
    model = kv_store.Model(
      *(small_engine.A, q.dtype, q.dtype, paged_attention.Paged("mosaic")),
      *(None, False, sharding.mesh()),
      exact=exact,
    )
    at = positions.copy()
    at[:, 1] = last
    found, _ = model.over_pages(table)(q, new, new, pages, at, unreal, None)
    return np.asarray(found, np.float32)[0, 0]

  np.testing.assert_array_equal(first(99, exact=True), first(500, exact=True))


@pytest.mark.parametrize("mesh", [slow({}), {"fsdp": 2, "tensor": 2}])
def test_ratios_of_a_rollouts_first_step_are_exactly_1(
  mesh, tmp_path, monkeypatch
):
  config = config_lib.changed(
    small_run.CONFIG,
    engine={"exact": True, "lanes": (16,)},
    mesh=mesh and mesh | {"rollout_tensor": 2},
  )
  parts = small_run.parts()
  policy = parts["policy"]
  a = dataclasses.replace(policy.architecture, kv_heads=2)
  policy = policy._replace(params=decoder.initialize(a, 0), architecture=a)
  steps, scored = learner.Learner.steps, []

  def checked(self, packed, start):
    """Scores the first step too, whose log-probabilities are the engine's."""
    scorer = functools.partial(self.scorer, self.published())
    found = batching.rescored(packed[0], scorer)
    for rows, exact in zip(packed[0], found, strict=True):
      live = rows.weight != 0
      np.testing.assert_array_equal(exact[live], rows.behaviour_logp[live])
      scored.append(int(live.sum()))
    yield from steps(self, packed, start)

  monkeypatch.setattr(learner.Learner, "steps", checked)
  small_run.train(tmp_path, parts | {"policy": policy}, config)
  rows = small_run.records(tmp_path, "steps.jsonl")
  assert len(scored) == 4 and min(scored) > 0
  assert [row["loss/ratio_max"] for row in rows[::2]] == [1.0] * 4
  # Those of the second step are of other weights.
  assert all(1.001 < row["loss/ratio_max"] < 1.1 for row in rows[1::2])


def test_what_cannot_be_exact_is_refused():
  params = small_engine.params()
  for changes in ({"lanes": (4, 8)}, {"lanes": (17,)}):
    with pytest.raises(ValueError, match="one size and a multiple of 8"):
      small_engine.engine(params, exact=True, **changes)
  engine = small_engine.engine(params, exact=True)
  turn = types.Address(0, 0, 0), 0, (9,), 1, ()
  with pytest.raises(ValueError, match=r"found top_p 0\.9 and top_k 0"):
    asyncio.run(engine.generate(types.GenerateRequest(*turn, top_p=0.9)))
