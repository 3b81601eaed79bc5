"""Compares plans with training steps whose speed and memory others published.

    python -m bench.published                 seconds and GiB, half an hour
    python -m bench.published --memory=false  seconds only, at once

`bench/published.csv` has the steps, as their trainers measured them:

* prime-rl, benchmarks/baselines: GRPO on rows that are one segment each.
  Seconds are those of `step_time`; its tokens/s of runs that train every weight
  also count the broadcast of the weights, .8 to 40 s a step. GiB are what
  PyTorch's allocator reserved. Adapters of rank 16 lie on a float32 base.
* MaxText: JAX-Toolbox's table of the H100 and MaxText's own of TPUs, for
  pretraining. `recomputed` is the share of a forward pass that its recipe
  computes again.

A plan assumes four constants (`planning.targets.Efficiency`). Two are what
kernels reach alone: products with weights 70 % of the peak, reads 80 % of the
bandwidth. The other two, of attention and of what goes through memory between
products, are fitted here to every second of prime-rl's steps on Hopper GPUs;
all other lines are held out. Needs the extra [plan] for GiB.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import hardware
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import plan as plan_command
from anysearch_jax.planning import compilation, programs, targets, whole_step
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.report import tables
from anysearch_jax.training import throughput

_STEPS = pathlib.Path(__file__).with_suffix(".csv")
# How Llama 2 differs from Llama 3.1 of about the same size.
_LLAMA_2: dict[str, tuple[str, dict[str, int]]] = {
  "Llama-2-7B": (
    "Llama-3.1-8B-Instruct",
    {"kv_heads": 32, "mlp_dim": 11008, "vocab_size": 32000},
  ),
  "Llama-2-70B": ("Llama-3.1-70B-Instruct", {"vocab_size": 32000}),
}
# NeMo-RL's recipes: a rollout, its optimizer steps, tokens of the longest
# sample and, about, of a prompt.
_NEMO_QUESTIONS = 64
_NEMO_GROUP = 32
_NEMO_STEPS = 4
_NEMO_LONGEST = 4096
_NEMO_PROMPT = 150


class PublishedStep(NamedTuple):
  """A training step that another trainer published.

  Attributes:
    source: the trainer.
    policy: name of the policy.
    device: name of the device, a key of `hardware.HARDWARE`.
    devices: number of devices.
    adapter_rank: rank of the trained adapters; 0 if every weight is trained.
    row: tokens of a row, which is one segment.
    rows: rows of a device in a step.
    recomputed: share of a forward pass that the gradients compute again.
    seconds: of the step.
    gib: a device's memory; None if it was not published.
  """

  source: str
  policy: str
  device: str
  devices: int
  adapter_rank: int
  row: int
  rows: int
  recomputed: float
  seconds: float
  gib: float | None

  @property
  def architecture(self) -> architecture_lib.Architecture:
    """The policy's architecture, without adapters."""
    name, changes = _LLAMA_2.get(self.policy, (self.policy, {}))
    return dataclasses.replace(plan_command.read_architecture(name), **changes)

  @property
  def lora(self) -> config_lib.LoraConfig:
    """The adapters; of experts, which this trainer cannot adapt, none."""
    settings = config_lib.LoraConfig(
      rank=self.adapter_rank, alpha=32.0, base_dtype="float32"
    )
    if self.architecture.experts:
      return dataclasses.replace(settings, targets=("q", "k", "v", "o"))
    return settings

  @property
  def operations(self) -> throughput.Operations:
    """The operations of a device."""
    a = lora.attach(self.architecture, self.lora)
    tokens = self.row * self.rows
    work = throughput.Work(
      tokens=tokens,
      scored=tokens,
      positions=tokens,
      # A token in the middle of its row sees half of it.
      pairs=tokens * a.mean_attended(self.row // 2),
    )
    return throughput.operations(a, work, forwards=self.recomputed)

  @property
  def config(self) -> config_lib.ExperimentConfig:
    """The configuration with which this trainer takes the same step."""
    return config_lib.ExperimentConfig(
      name="published",
      policy=self.policy,
      mesh=config_lib.MeshConfig(fsdp=self.devices),
      compute_dtype="bfloat16",
      lora=self.lora,
      objective=config_lib.ObjectiveConfig(kl_coefficient=0.0),
      batch=config_lib.BatchConfig(
        row_lengths=(self.row,),
        micro_batch_tokens=self.row * self.devices,
        max_micro_batches=self.rows,
        remat="full",
      ),
    )

  @property
  def peak_share(self) -> float:
    """The share of the device's peak that the published step reaches."""
    peak = hardware.HARDWARE[self.device].flops
    return self.operations.flops / self.seconds / peak

  def predicted(self, efficiency: targets.Efficiency) -> float:
    """Returns the seconds of the step by the planner's formula."""
    device = hardware.HARDWARE[self.device]
    return targets.seconds(device, self.operations, efficiency=efficiency)


class PublishedRollout(NamedTuple):
  """A rollout and its training, of NeMo-RL's performance summary.

  A rollout has 64 groups of 32 samples of at most 4,096 tokens, which the
  policy and the reference score before four optimizer steps.

  Attributes:
    policy: name of the policy.
    devices: number of H100 GPUs.
    sampled_by: number of GPUs of a copy of the policy that samples.
    tokens: of a sample, with its prompt, on average.
    overlapped: whether the next rollout is sampled beside the training.
    seconds: of everything.
  """

  policy: str
  devices: int
  sampled_by: int
  tokens: int
  overlapped: bool
  seconds: float

  def predicted(self) -> float:
    """Returns the seconds of everything by the planner's formulas."""
    a = plan_command.read_architecture(self.policy)
    samples = _NEMO_QUESTIONS * _NEMO_GROUP
    config = config_lib.ExperimentConfig(
      name="published",
      policy=self.policy,
      questions=_NEMO_QUESTIONS,
      group=_NEMO_GROUP,
      curriculum=config_lib.CurriculumConfig(
        steps_per_rollout=_NEMO_STEPS, total_steps=_NEMO_STEPS, phase1_steps=0
      ),
      objective=config_lib.ObjectiveConfig(old_logp="trainer"),
      compute_dtype="bfloat16",
      mesh=config_lib.MeshConfig(fsdp=self.devices),
      engine=config_lib.EngineConfig(
        lanes=(samples,), slots=samples, max_context=_NEMO_LONGEST
      ),
      batch=config_lib.BatchConfig(row_lengths=(_NEMO_LONGEST,)),
    )
    expected = whole_step.episodes_of(
      config, tokens=self.tokens, generated=self.tokens - _NEMO_PROMPT
    )
    size = 2 * weights.count(table.base_rows(a)) // self.sampled_by
    decode = compilation.Part(
      name="decode",
      devices=self.devices,
      kinds={"engine weights": size},
      held={},
      arguments=size,
      temporary=0,
      peak=size,
    )
    target = targets.parse(f"h100:{self.devices}")
    step = whole_step.predict(config, a, expected, decode=decode, target=target)
    step = step._replace(overlapped=self.overlapped)
    return _NEMO_STEPS * step.seconds


ROLLOUTS = (
  PublishedRollout("Llama-3.1-8B-Instruct", 16, 1, 1060, False, 97.7),
  PublishedRollout("Llama-3.1-8B-Instruct", 16, 1, 1060, True, 74.6),
  PublishedRollout("Qwen3-30B-A3B", 32, 2, 3203, False, 192),
  PublishedRollout("Qwen3-30B-A3B", 32, 2, 3201, True, 152),
)


def read(path: pathlib.Path = _STEPS) -> list[PublishedStep]:
  """Reads published steps from a CSV file."""
  with path.open() as file:
    return [
      PublishedStep(
        source=row["source"],
        policy=row["policy"],
        device=row["device"],
        devices=int(row["devices"]),
        adapter_rank=int(row["adapter_rank"]),
        row=int(row["row"]),
        rows=int(row["rows"]),
        recomputed=float(row["recomputed"]),
        seconds=float(row["seconds"]),
        gib=float(row["gib"]) if row["gib"] else None,
      )
      for row in csv.DictReader(file)
    ]


def halves(
  steps: Sequence[PublishedStep],
) -> tuple[list[PublishedStep], list[PublishedStep]]:
  """Returns the steps to fit constants to, and those that are held out.

  Fitted are every second of prime-rl's steps of Qwen3 on Hopper GPUs.
  """
  candidates = [
    step
    for step in steps
    if step.source == "prime-rl"
    and step.device in ("h100", "h200")
    and step.policy.startswith("Qwen3")
  ]
  fitted = candidates[::2]
  return fitted, [step for step in steps if step not in fitted]


def fit(
  steps: Sequence[PublishedStep], start: targets.Efficiency
) -> targets.Efficiency:
  """Fits the efficiency of attention and the passes through memory.

  The sum of squared relative errors is least.

  Args:
    steps: two or more published steps.
    start: has the other constants.
  """
  columns = []
  remainders = []
  for step in steps:
    device = hardware.HARDWARE[step.device]
    operations = step.operations
    products = operations._replace(attention=0, activations=0)
    attention = operations._replace(products=0, activations=0)
    moved = operations._replace(products=0, attention=0)
    unscaled = start._replace(attention=1.0, passes=1.0)
    seconds = functools.partial(targets.seconds, device, efficiency=unscaled)
    columns.append([seconds(x) / step.seconds for x in (attention, moved)])
    remainders.append(1 - seconds(products) / step.seconds)
  (attention_slowness, passes), *_ = np.linalg.lstsq(
    np.asarray(columns), np.asarray(remainders), rcond=None
  )
  return start._replace(attention=1 / attention_slowness, passes=passes)


def passes_of(step: PublishedStep, start: targets.Efficiency) -> float:
  """Returns the passes through memory with which one step has no error."""
  without_passes = step.predicted(start._replace(passes=0.0))
  pass_seconds = step.predicted(start._replace(passes=1.0)) - without_passes
  return (step.seconds - without_passes) / pass_seconds


def planned_gib(step: PublishedStep) -> float:
  """Compiles this trainer's step of the same size; returns GiB of a device."""
  target = targets.parse(f"{step.device}:{step.devices}")
  train_step, *_ = programs.programs(
    step.config, step.architecture, devices=targets.devices(target)
  )
  part = compilation.measure(train_step, [train_step], target)
  return part.total / hardware.GIB


def _row(
  step: PublishedStep,
  fitted: targets.Efficiency,
  *,
  held_out: bool,
  gib: float | None,
) -> list[str]:
  """Returns a row of the table."""
  assumed = step.predicted(targets.ASSUMED)
  trained = f"rank {step.adapter_rank}" if step.adapter_rank else "all"
  cells = [
    step.source,
    step.policy,
    f"{step.device}:{step.devices}",
    trained,
    f"{step.rows} x {step.row:,}",
    f"{step.seconds:.2f}",
    f"{assumed:.2f}",
    f"{assumed / step.seconds:.2f}",
    f"{step.predicted(fitted) / step.seconds:.2f}",
    "held out" if held_out else "",
  ]
  if gib is not None and step.gib is not None:
    cells += [f"{step.gib:.1f}", f"{gib:.1f}", f"{gib / step.gib:.2f}"]
  return cells


def _errors(
  steps: Sequence[PublishedStep], efficiency: targets.Efficiency
) -> str:
  """Summarises the relative errors of predictions."""
  errors = [abs(x.predicted(efficiency) / x.seconds - 1) for x in steps]
  return (
    f"median {statistics.median(errors):.0%}, largest {max(errors):.0%}, "
    f"{sum(error <= 0.2 for error in errors)} of {len(errors)} within 20 %"
  )


def main(argv: Sequence[str]) -> None:
  steps = read()
  to_fit, held_out = halves(steps)
  fitted = fit(to_fit, targets.PRIME_RL)
  hopper = [
    step
    for step in held_out
    if step.source == "prime-rl" and step.device != "b200"
  ]
  maxtext = [step for step in steps if step.source == "MaxText"]
  shares = [step.peak_share for step in (*to_fit, *hopper)]
  on_gpus, *on_tpus = maxtext
  jax_efficiency = fitted._replace(passes=passes_of(on_gpus, fitted))
  gibs: dict[tuple, float] = {}
  rows = []
  for step in steps:
    # A GPU's name changes no memory.
    shape = (step.policy, step.devices, step.adapter_rank, step.row)
    if flags.FLAGS.memory and step.gib is not None and step.device != "b200":
      if shape not in gibs:
        gibs[shape] = planned_gib(step)
        print(f"compiled {shape}: {gibs[shape]:.1f} GiB", flush=True)
    efficiency = jax_efficiency if step in maxtext else fitted
    rows.append(
      _row(step, efficiency, held_out=step in held_out, gib=gibs.get(shape))
    )
  header = ["trainer", "policy", "devices", "trained", "rows", "s"]
  header += ["plan, s", "plan / s", "fitted / s", ""]
  if gibs:
    header += ["GiB", "plan, GiB", "plan / GiB"]
  width = len(header)
  padded = [header, *([*row, *[""] * (width - len(row))] for row in rows)]
  print("\n".join(tables.aligned(padded)))
  print(
    f"\nprime-rl: attention {fitted.attention:.2f} of the peak, "
    f"{fitted.passes:.1f} passes; {len(to_fit)} fitted steps: "
    f"{_errors(to_fit, fitted)}; held out, Hopper: {_errors(hopper, fitted)}. "
    f"They reach {min(shares):.0%} to {max(shares):.0%} of the peak."
    f"\nMaxText: {jax_efficiency.passes:.1f} passes, from its step on H100s; "
    f"on TPUs: {_errors(on_tpus, jax_efficiency)}."
  )

  print("\nNeMo-RL, a rollout of 2,048 samples with its training:")
  for rollout in ROLLOUTS:
    planned = rollout.predicted()
    schedule = "one step off" if rollout.overlapped else "in turns"
    print(
      f"{rollout.policy}, {rollout.devices} H100, {schedule}: published "
      f"{rollout.seconds:.1f} s, plan {planned:.1f} s, "
      f"{planned / rollout.seconds:.2f}"
    )


if __name__ == "__main__":
  flags.DEFINE_bool("memory", True, "Compiles this trainer's steps for GiB.")
  launch_flags.run(main)
