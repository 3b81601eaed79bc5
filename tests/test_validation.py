"""What cannot run is refused in a sentence, wherever it is asked."""

from __future__ import annotations

import dataclasses
import re

import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.training import validation


def changed(part, **values):
  """The small run's configuration with some values of one part replaced."""
  new = dataclasses.replace(getattr(small_run.CONFIG, part), **values)
  return dataclasses.replace(small_run.CONFIG, **{part: new})


@pytest.mark.parametrize(
  ("part", "values"),
  [
    ("objective", {"reduction": "token-mean"}),
    ("objective", {"old_logp": "trainer"}),
    ("objective", {"old_logp": "trainer", "importance_cap": 2.0}),
    ("batch", {"remat": "none", "attention": "auto"}),
    ("batch", {"remat": "dots", "attention": "xla"}),
    ("batch", {"remat": "attention", "attention": "cudnn"}),
    ("batch", {"remat": "full", "attention": "splash"}),
    ("batch", {"max_segments": 1, "attention_chunk": 1, "logprob_chunk": 1}),
    ("mesh", {"tensor": 4, "sequence_parallel": True}),
    # 128 divides by no 3, which only sequence parallelism asks for.
    ("mesh", {"tensor": 3}),
    ("mesh", {"fsdp": 4, "trainer": (0, 1, 2, 3), "rollout": (4, 5, 6, 7)}),
    # Four processes of two devices; both sample too.
    ("mesh", {"data": 2, "fsdp": 4, "trainer": (3, 1), "rollout": (1, 3)}),
    # More than any machine has: devices are not asked for.
    ("mesh", {"data": 4096}),
  ],
)
def test_what_can_run_is_let_through(part, values):
  validation.validate(changed(part, **values))


@pytest.mark.parametrize(
  ("part", "values", "sentence"),
  [
    (
      "objective",
      {"kl_estimator": "k4"},
      "objective.kl_estimator: found 'k4', expected one of k1, k2, k3.",
    ),
    (
      "objective",
      {"reduction": "mean"},
      "objective.reduction: found 'mean', expected one of sequence-mean, "
      "token-mean.",
    ),
    (
      "objective",
      {"old_logp": "vllm"},
      "objective.old_logp: found 'vllm', expected one of engine, trainer.",
    ),
    (
      "objective",
      {"old_logp": "trainer", "importance_cap": -1.0},
      "objective.importance_cap: found -1.0, expected at least 0.",
    ),
    (
      "objective",
      {"old_logp": "trainer", "importance_cap": float("nan")},
      "objective.importance_cap: found nan, expected at least 0.",
    ),
    (
      "objective",
      {"importance_cap": 2.0},
      "objective.importance_cap: found 2.0 with old_logp 'engine'",
    ),
    (
      "batch",
      {"remat": "all"},
      "batch.remat: found 'all', expected one of none",
    ),
    (
      "batch",
      {"attention": "flash"},
      "batch.attention: found 'flash', expected one of auto",
    ),
    ("batch", {"row_lengths": ()}, "batch.row_lengths: found ()"),
    ("batch", {"row_lengths": (128, 128)}, "expected ascending lengths"),
    (
      "batch",
      {"row_lengths": (0, 128)},
      "row_lengths[0]: found 0, expected at",
    ),
    *(
      ("batch", {name: 0}, f"batch.{name}: found 0, expected at least 1.")
      for name in (
        "micro_batch_tokens",
        "max_micro_batches",
        "max_segments",
        "attention_chunk",
        "logprob_chunk",
      )
    ),
    *(
      ("mesh", {name: 0}, f"mesh.{name}: found 0, expected at least 1.")
      for name in ("data", "fsdp", "tensor")
    ),
    (
      "mesh",
      {"tensor": 3, "sequence_parallel": True},
      "mesh.sequence_parallel: found a row of 128 tokens in batch.row_lengths, "
      "expected multiples of mesh.tensor, 3",
    ),
    (
      "mesh",
      {"fsdp": 2, "trainer": (1, 1)},
      "mesh.trainer: found (1, 1), expected indices of devices from 0, each "
      "once.",
    ),
    ("mesh", {"rollout": (-1,)}, "mesh.rollout: found (-1,), expected indices"),
    (
      "mesh",
      {"data": 2, "fsdp": 2, "trainer": (0, 1, 2)},
      "mesh.trainer: found 3 devices of each process for a mesh of data 2 x "
      "fsdp 2 x tensor 1 = 4; expected a number that divides it.",
    ),
  ],
)
def test_what_cannot_run_is_refused(part, values, sentence):
  with pytest.raises(ValueError, match=re.escape(sentence)):
    validation.validate(changed(part, **values))


def test_one_uneven_row_length_is_enough_for_a_refusal():
  config = changed("mesh", tensor=4, sequence_parallel=True)
  batch = config_lib.BatchConfig(row_lengths=(32, 50, 128))
  with pytest.raises(ValueError, match="found a row of 50 tokens"):
    validation.validate(dataclasses.replace(config, batch=batch))
