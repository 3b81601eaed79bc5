"""Tests what a run measures: speed, its timeline, and metrics of its steps."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json

import jax
import jax.numpy as jnp
import jaxpr_flops
import numpy as np
import pytest
import random_models
import scripted_runs as runs

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import grpo
from anysearch_jax.policy import decoder, lora
from anysearch_jax.training import batching, metrics, throughput, timeline

# Work, model FLOPs and speed, against counts by hand and of the jaxpr.

LENGTHS = (3, 5, 9, 17)


def pack(lengths):
  """Packs sequences whose tokens of odd index have a weight."""
  examples = [
    batching.Example(
      np.ones(n, np.int32), np.float32(np.arange(n) % 2), np.zeros(n)
    )
    for n in lengths
  ]
  return batching.pack(
    examples,
    config=config_lib.BatchConfig(
      row_lengths=(8, 16), micro_batch_tokens=32, max_micro_batches=4
    ),
  )


def test_work_is_counted_in_the_micro_batches_that_run():
  # 2, 4 and 8 predictions in one row of 16 (room after 16's own row), 16 in
  # the other: one micro-batch of two rows, none of the shorter length.
  a = random_models.architecture("llama")
  work = throughput.count([pack(LENGTHS)], a)
  assert work == throughput.Work(
    tokens=2 + 4 + 8 + 16,
    scored=1 + 2 + 4 + 8,
    positions=2 * 16,
    pairs=3 + 10 + 36 + 136,
  )
  both = throughput.count([pack(LENGTHS), pack((3,))], a)
  # Four rows of 8 for two tokens.
  assert both == throughput.Work(30 + 2, 15 + 1, 32 + 32, 185 + 3)
  assert throughput.count([pack(())], a) == throughput.Work(0, 0, 0, 0)
  # In one of two layers, a token sees four: 3, 10, 26 and 58 pairs.
  a = dataclasses.replace(a, layers=2, window=4, windowed=(1,))
  assert throughput.count([pack(LENGTHS)], a).pairs == 3 + 10 + 31 + 97


def test_experts_that_a_token_does_not_use_do_not_count():
  work = throughput.Work(7, 7, 7, pairs=0)

  def flops_of(experts):
    a = random_models.architecture("qwen3-moe", num_experts=experts)
    return throughput.operations(a, work).flops

  a = random_models.architecture("qwen3-moe")
  assert a.active == 2
  routers = a.layers * a.d_model * (8 - 2)
  assert flops_of(8) - flops_of(2) == 6 * 7 * routers


@pytest.mark.parametrize(
  ("case", "rank"),
  [
    ("qwen2", 2),
    ("qwen3-tied", 0),
    pytest.param("llama", 0, marks=pytest.mark.slow),
  ],
)
def test_model_flops_are_those_of_the_jaxpr(case, rank):
  config = config_lib.LoraConfig(rank=rank, targets=("q", "o", "gate", "down"))
  a = lora.attach(random_models.architecture(case), config)
  base = random_models.params(a.without_lora())
  trained = lora.initialize(a, 0) if rank else base
  b, t = 2, 24
  tokens = jnp.ones((b, t), jnp.int32)

  def policy(trained):
    return lora.combine(base, trained) if rank else trained

  def loss(params, a=a):
    hidden = decoder.forward(
      params, a, tokens, tokens, tokens, compute=decoder.Compute()
    )
    # Logits of ten tokens of each row, as if the others had no weight.
    return jnp.sum(decoder.logits(params, hidden[:, :10]))

  step = jax.make_jaxpr(jax.grad(lambda x: loss(policy(x))))(trained)
  forward = jax.make_jaxpr(lambda x: loss(x, a.without_lora()))(base)
  # The program computes all attention scores, also masked ones.
  work = throughput.Work(b * t, b * 10, b * t, pairs=b * t * t)
  assert throughput.operations(a, work).flops == jaxpr_flops.count(step)
  one_more = throughput.operations(a, work, forwards=1).flops
  assert one_more - throughput.operations(a, work).flops == jaxpr_flops.count(
    forward
  )
  # In the first of two epochs only: half of the work.
  once = throughput.operations(a, work, first_forwards=1, epochs=2).flops
  assert 2 * (once - jaxpr_flops.count(step)) == jaxpr_flops.count(forward)


@dataclasses.dataclass
class Device:
  device_kind: str
  stats: dict | None = None

  def memory_stats(self):
    return self.stats


def test_mfu_is_a_share_of_a_known_peak():
  work = throughput.Work(tokens=600, scored=0, positions=800, pairs=0)
  # Half of two H200 (989.4 TFLOP/s each) for three seconds.
  flops = 0.5 * 2 * 989.4e12 * 3
  found = throughput.metrics(
    work, flops, seconds=3.0, devices=[Device("NVIDIA H200")] * 2
  )
  assert found == pytest.approx(
    {"train/tokens_per_second": 200, "train/padding": 0.25, "train/mfu": 0.5}
  )
  unknown = throughput.metrics(
    work, flops, seconds=3.0, devices=[Device("cpu")] * 2
  )
  assert unknown.keys() == found.keys() - {"train/mfu"}


def test_memory_is_the_peak_of_the_fullest_device():
  devices = [Device("a", {"peak_bytes_in_use": n}) for n in (5, 9, 7)]
  assert throughput.memory(devices) == {"device/memory_peak_bytes": 9}
  assert throughput.memory([*devices, Device("a")]) == {}


# Spans, their totals and the trace.


def _spans(*times, track=timeline.SEARCHES, name="search"):
  return [timeline.Span(track, name, *each) for each in times]


def test_metrics_sum_the_spans_of_a_rollout():
  trainer, sampler = timeline.TRAINER, timeline.SAMPLER
  spans = [
    *_spans((0, 4), track=trainer, name="idle"),
    *_spans((4, 9), track=trainer, name="train"),
    *_spans((9, 9.25), track=trainer, name="sync"),
    *_spans((10, 12), track=trainer, name="save"),
    *_spans((0, 0.5), track=sampler, name="idle"),
    *_spans((0.5, 0.75), track=sampler, name="sync"),
    *_spans((0.75, 3), track=sampler, name="collect"),
    *_spans((3, 4), track=sampler, name="score"),
    # Overlapping, nested, touching, separate, out of order.
    *_spans((1.25, 1.5), (1, 2), (1.5, 2.5), track=timeline.TURNS),
    *_spans((3, 4), (2, 2.5), (2.5, 2.75)),
  ]
  assert timeline.metrics(spans) == {
    "time/rollout": 2.25,
    "time/train": 1 + 5 + 0.25 + 0.25,
    "time/generating": 1.5,
    "time/searching": 1.75,
    "time/searches": 1.75,
    "time/scoring": 1,
    "time/training": 5,
    "time/syncing": 0.5,
    "time/saving": 2,
    "time/trainer_idle": 4,
    "time/sampler_idle": 0.5,
    "time/elapsed": 11.25,
  }


def test_taking_a_rollout_removes_its_spans():
  clock = iter(range(100))
  line = timeline.Timeline(lambda: next(clock))
  with pytest.raises(KeyError), line.span(3, timeline.TRAINER, "train"):
    raise KeyError
  assert line.take(3) == [timeline.Span("trainer", "train", 0, 1)]
  assert line.take(3) == []


def test_the_trace_of_a_run_has_all_spans(parts, tmp_path, scripted):
  runs.run(tmp_path, parts, runs.at_level(1), trace=True)
  (path,) = (tmp_path / "profile").rglob("*.trace.json.gz")
  with gzip.open(path) as file:
    events = json.load(file)["traceEvents"]
  spans = {event.get("name", "") for event in events}
  for track, expected in (
    (timeline.TRAINER, {"idle", "train", "sync", "save"}),
    (timeline.SAMPLER, {"sync", "fingerprint", "collect", "score"}),
    (timeline.TURNS, {"turn"}),
  ):
    assert {f"{track}: {name}" for name in expected} <= spans


def test_the_times_of_a_run_add_up(trained):
  records = [json.loads(line) for line in (trained / "metrics.jsonl").open()]
  for r in records:
    assert 0 < r["time/generating"] <= r["time/rollout"]
    assert r["time/searching"] <= r["time/searches"] + 1e-9
    assert r["time/train"] == pytest.approx(
      r["time/scoring"] + r["time/training"] + r["time/syncing"]
    )
    assert r["time/elapsed"] >= r["time/training"] + r["time/trainer_idle"]
    assert r["device/count"] == jax.device_count()
    assert 0 < r["engine/lanes_occupied"] <= 1
  used, offered = (
    records[-1][f"engine/lanes_{name}"] for name in ("used", "offered")
  )
  shares = [r["engine/lanes_occupied"] for r in records]
  assert min(shares) <= used / offered <= max(shares)


# Metrics of a rollout's optimizer steps.

LOSS = jax.jit(
  functools.partial(grpo.grpo_loss, config=config_lib.ObjectiveConfig())
)


def _of_step(difference):
  """Returns a step's metrics for these differences, in three micro-batches."""
  zeros, parts = np.zeros(len(difference), np.float32), []
  for part in np.array_split(np.arange(len(difference)), 3):
    logp = np.where(np.isin(np.arange(len(zeros)), part), difference, 0)
    weight = np.isin(np.arange(len(zeros)), part) / len(zeros)
    _, values = LOSS(np.float32(logp), *[zeros] * 3, np.float32(weight))
    parts.append(values)
  name = "logp_difference_counts"
  return metrics.plain_values(
    {"grad_norm": np.float32(2), f"loss/{name}": sum(p[name] for p in parts)}
  )


def test_quantiles_of_the_gap_are_those_of_all_tokens():
  rng = np.random.default_rng(0)
  difference = np.exp(rng.normal(-4, 2.5, 1001)) * rng.choice([-1, 1], 1001)
  values = _of_step(difference)
  assert values.keys() == {
    "grad_norm",
    *(f"loss/logp_difference_{name}" for name in ("p50", "p99", "far")),
  }
  for name, quantile in (("p50", 0.5), ("p99", 0.99)):
    exact = np.quantile(np.abs(difference), quantile, method="inverted_cdf")
    found = values[f"loss/logp_difference_{name}"]
    assert exact <= found < exact * 10 ** (1 / 8)
  far = np.mean(np.abs(difference) > 1)
  assert 0.01 < far
  np.testing.assert_allclose(values["loss/logp_difference_far"], far)


def test_quantiles_beyond_all_edges_and_without_tokens():
  assert _of_step(np.full(1001, 500.0))["loss/logp_difference_p50"] == np.inf
  counts = np.zeros(1 + len(grpo.GAP_EDGES), np.float32)
  assert metrics.plain_values({"loss/logp_difference_counts": counts}) == {
    "loss/logp_difference_p50": grpo.GAP_EDGES[0],
    "loss/logp_difference_p99": grpo.GAP_EDGES[0],
    "loss/logp_difference_far": 0.0,
  }


def test_the_gap_of_the_engine_is_that_of_the_first_step():
  names = ("", "_p50", "_p99", "_far", "_max")
  steps = [
    {
      f"loss/logp_difference{name}": float(step + i)
      for i, name in enumerate(names)
    }
    for step in (1, 7)
  ]
  on_policy = metrics.over_steps(steps, on_policy=True)
  gaps = [on_policy[f"policy/engine_gap{name}"] for name in names]
  assert gaps == [1, 2, 3, 4, 5]
  assert on_policy["loss/logp_difference"] == 4
  assert on_policy["loss/logp_difference_max"] == 11
  stale = metrics.over_steps(steps, on_policy=False)
  assert not any(name.startswith("policy/") for name in stale)
