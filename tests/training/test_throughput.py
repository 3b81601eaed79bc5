"""Tests work, model FLOPs and speed against counts by hand and of the jaxpr."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.planning import flops
from anysearch_jax.policy import decoder, lora
from anysearch_jax.training import batching, throughput
from bench import random_models

LENGTHS = (3, 5, 9, 17)


def pack(lengths):
  examples = [
    batching.Example(
      np.ones(n, np.int32), np.ones(n, np.float32), np.zeros(n, np.float32)
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
  work = throughput.count([pack(LENGTHS)])
  assert work == throughput.Work(
    tokens=2 + 4 + 8 + 16, positions=2 * 16, pairs=3 + 10 + 36 + 136
  )
  both = throughput.count([pack(LENGTHS), pack((3,))])
  # Four rows of 8 for two tokens.
  assert both == throughput.Work(30 + 2, 32 + 32, 185 + 3)
  assert throughput.count([pack(())]) == throughput.Work(0, 0, 0)


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
    return jnp.sum(decoder.logits(params, hidden))

  step = jax.make_jaxpr(jax.grad(lambda x: loss(policy(x))))(trained)
  forward = jax.make_jaxpr(lambda x: loss(x, a.without_lora()))(base)
  # The program computes all attention scores, also masked ones.
  work = throughput.Work(b * t, b * t, pairs=b * t * t)
  assert throughput.model_flops(a, work) == flops.count(step)
  one_more = throughput.model_flops(a, work, forwards=1)
  assert one_more - throughput.model_flops(a, work) == flops.count(forward)
  # In the first of two epochs only: half of the work.
  once = throughput.model_flops(a, work, first_forwards=1, epochs=2)
  assert 2 * (once - flops.count(step)) == flops.count(forward)


@dataclasses.dataclass
class Device:
  device_kind: str
  stats: dict | None = None

  def memory_stats(self):
    return self.stats


def test_mfu_is_a_share_of_a_known_peak():
  work = throughput.Work(tokens=600, positions=800, pairs=0)
  # Half of two H200 (989.4 TFLOP/s each) for three seconds.
  flops = 0.5 * 2 * 989.4e12 * 3
  found = throughput.metrics(
    work, flops, seconds=3.0, devices=[Device("NVIDIA H200")] * 2
  )
  assert found == pytest.approx(
    {
      "train/tokens_per_second": 200,
      "train/padding": 0.25,
      "train/mfu": 0.5,
    }
  )
  unknown = throughput.metrics(
    work, flops, seconds=3.0, devices=[Device("cpu")] * 2
  )
  assert unknown.keys() == found.keys() - {"train/mfu"}


def test_memory_is_the_peak_of_the_fullest_device():
  devices = [Device("a", {"peak_bytes_in_use": n}) for n in (5, 9, 7)]
  assert throughput.memory(devices) == {"device/memory_peak_bytes": 9}
  assert throughput.memory([*devices, Device("a")]) == {}
