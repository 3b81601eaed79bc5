"""Train steps of Qwen3-4B: time, memory beside the compiler's plan, MFU."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import jax

from anysearch_jax import config as config_lib
from bench import harness, train_step
from bench.first_gpu import notes as notes_lib
from bench.first_gpu import shapes
from configs import qwen3_4b

_POLICY = "Qwen3-4B"
_STEPS = 3
_MICRO_BATCHES = 2


def step(
  notes: notes_lib.Notes,
  *,
  lora: bool,
  remat: str,
  rows: int,
  profile: bool = False,
) -> None:
  """Times optimizer steps on random weights, in packed rows of 8,192 tokens.

  Args:
    notes: gets the figures.
    lora: whether adapters of rank 32 are trained, instead of all weights.
    remat: what the backward pass computes again.
    rows: rows of a micro-batch.
    profile: whether to trace one more step.
  """
  config = _config(lora=lora, remat=remat, rows=rows, rehearse=notes.rehearse)
  a = shapes.architecture(_POLICY, rehearse=notes.rehearse)
  count = shapes.parameters(a)
  # Masters, two moments and gradients; or the frozen base.
  shapes.need(2 * count if lora else 16 * count)
  work = train_step.examples(
    row=config.batch.row_lengths[-1],
    vocab=a.vocab_size,
    tokens=_MICRO_BATCHES * config.batch.micro_batch_tokens,
  )
  ours = train_step.Ours(config, a, work)
  arguments = (ours.state, ours.reference, ours.batch)
  compiled, took = harness.timed(lambda: ours.step.lower(*arguments).compile())
  notes.add({"compile, s": took.seconds} | _planned(compiled))
  first = harness.seconds(ours)
  seconds = [harness.seconds(ours) for _ in range(_STEPS)]
  found = train_step.describe(ours, seconds, first)
  trained = found["trained"]
  # Forward and activations' gradients cost 4 N, gradients of weights 2 T.
  flops = (4 * count + 2 * trained) * found["tokens"]
  notes.add(
    found | {"TFLOP/s by 6 N": flops / statistics.median(seconds) / 1e12}
  )
  if profile:
    with _trace(notes):
      notes.add({"traced step, s": harness.seconds(ours)})


def _config(
  *, lora: bool, remat: str, rows: int, rehearse: bool
) -> config_lib.ExperimentConfig:
  config = qwen3_4b.get_config("lora80" if lora else "")
  row = 128 if rehearse else config.batch.row_lengths[-1]
  return dataclasses.replace(
    config,
    mesh=config_lib.MeshConfig(),
    pipeline=config_lib.PipelineConfig(),
    # Without a KL term there is no reference beside the masters.
    objective=dataclasses.replace(config.objective, kl_coefficient=0.0),
    batch=dataclasses.replace(
      config.batch,
      row_lengths=(row,),
      micro_batch_tokens=rows * row,
      max_micro_batches=_MICRO_BATCHES,
      remat=remat,
    ),
  )


def _planned(compiled: Any) -> dict[str, float]:
  """Returns the bytes that the compiler counts, by its own analysis."""
  analysis = compiled.memory_analysis()
  if analysis is None:
    return {}
  return {
    "compiler: arguments, GiB": analysis.argument_size_in_bytes / 2**30,
    "compiler: temporaries, GiB": analysis.temp_size_in_bytes / 2**30,
    "compiler: peak, GiB": analysis.peak_memory_in_bytes / 2**30,
  }


@contextlib.contextmanager
def _trace(notes: notes_lib.Notes) -> Iterator[None]:
  notes.traces.mkdir(parents=True, exist_ok=True)
  with jax.profiler.trace(str(notes.traces)):
    yield
  notes.add({"trace": str(notes.traces)})
