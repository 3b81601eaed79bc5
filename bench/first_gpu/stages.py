"""The stages, in order of worth: what is known first if time is short."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from bench.first_gpu import notes as notes_lib

# XLA chooses between its own Triton kernels and cuBLAS for matrix products.
_CUBLAS = "--xla_gpu_enable_triton_gemm=false"
# Command buffers (CUDA graphs) save launches, which dominate small programs.
_NO_GRAPHS = "--xla_gpu_enable_command_buffer="


@dataclasses.dataclass(frozen=True)
class Stage:
  """One measurement.

  name: a word, also of its files.
  measures: what, as a phrase.
  function: `module.function` of this package.
  seconds: limit.
  options: keyword arguments of the function.
  xla_flags: that its process adds to XLA_FLAGS.
  """

  name: str
  measures: str
  function: str
  seconds: float
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  xla_flags: str = ""

  def run(self, notes: notes_lib.Notes) -> None:
    """Measures, in this process."""
    module, _, function = self.function.partition(".")
    imported = importlib.import_module(f"bench.first_gpu.{module}")
    getattr(imported, function)(notes, **self.options)
    notes.check()


_LORA = {"lora": True, "remat": "dots", "rows": 2}
_4B = {"policy": "Qwen3-4B", "lora": False}

STAGES = (
  Stage("doctor", "installation and devices", "machine.doctor", 90),
  Stage("peaks", "matrix products and copies", "machine.peaks", 90),
  Stage("kernels", "attention against float64", "kernels.attention", 180),
  Stage("small", "the quickstart's policy, twice", "rollouts.small", 180),
  Stage("decode", "decode, Qwen3-4B", "engine.decode", 300, _4B),
  Stage(
    "step",
    "train step, Qwen3-4B, adapters, remat dots",
    "steps.step",
    240,
    _LORA,
  ),
  Stage(
    "prefill",
    "prefill of passages, Qwen3-4B",
    "engine.prefill",
    150,
    {"policy": "Qwen3-4B"},
  ),
  Stage(
    "gaps",
    "sampled against trained log-probabilities, Qwen3-0.6B",
    "engine.gaps",
    200,
    {"policy": "Qwen3-0.6B"},
  ),
  Stage(
    "colocated",
    "rollout, step and hand-over on one device, Qwen3-4B with adapters",
    "rollouts.colocated",
    240,
    {"policy": "Qwen3-4B"},
  ),
  Stage("vectors", "exact search of 21 M x 768", "vectors.search", 120),
  Stage(
    "step_full",
    "train step, Qwen3-4B, all weights, remat full",
    "steps.step",
    240,
    {"lora": False, "remat": "full", "rows": 1},
  ),
  Stage(
    "step_remat",
    "train step, Qwen3-4B, adapters, remat full",
    "steps.step",
    200,
    _LORA | {"remat": "full"},
  ),
  Stage(
    "trace_decode",
    "profile of a decode call",
    "engine.decode",
    120,
    _4B | {"profile": True},
  ),
  Stage(
    "trace_step",
    "profile of a train step",
    "steps.step",
    180,
    _LORA | {"profile": True},
  ),
  Stage(
    "decode_cublas",
    "decode, Qwen3-4B, matrix products by cuBLAS",
    "engine.decode",
    300,
    _4B,
    _CUBLAS,
  ),
  Stage(
    "step_cublas",
    "train step, Qwen3-4B, adapters, matrix products by cuBLAS",
    "steps.step",
    200,
    _LORA,
    _CUBLAS,
  ),
  Stage(
    "decode_no_graphs",
    "decode, Qwen3-4B, without command buffers",
    "engine.decode",
    300,
    _4B,
    _NO_GRAPHS,
  ),
  Stage(
    "decode_lora",
    "decode, Qwen3-4B with adapters",
    "engine.decode",
    300,
    _4B | {"lora": True},
  ),
  Stage(
    "decode_7b",
    "decode, Qwen2.5-7B",
    "engine.decode",
    300,
    {"policy": "Qwen2.5-7B-Instruct", "lora": False},
  ),
)
BY_NAME = {stage.name: stage for stage in STAGES}
