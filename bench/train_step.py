r"""Measures a train step's time, tokens per second and model FLOPs utilisation.

    python -m bench.train_step
        on a CPU: a Qwen2-shaped policy of 19 M parameters beside torch eager
        (and compiled, with --torch_compile), in turns in one run
    python -m bench.train_step --config=configs/qwen3_4b.py \
        --shape=configs/shapes/Qwen3-4B.json --config.mesh.fsdp=1 \
        --config.mesh.tensor=1 --config.mesh.sequence_parallel=false \
        --config.mesh.trainer='()' --config.mesh.rollout='()' \
        --config.batch.micro_batch_tokens=16384 \
        --config.objective.kl_coefficient=0 --profile=profile
        on one GPU of 141 GB: Qwen3-4B's shape with random weights, packed rows
        of 8192 tokens

The step is the one that `loop.Trainer` runs: sharded, with donated buffers, and
with the reference pass if the configuration has a KL term. Model FLOPs are
those of `training/throughput`: without recomputation and padding, with causal
segments.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from absl import app, flags

from anysearch_jax import config as config_lib
from launch import flags as launch_flags
from launch import jax_setup

_STEPS = flags.DEFINE_integer("steps", 5, "Timed steps (of each side).")
_SHAPE = flags.DEFINE_string(
  "shape", None, "config.json of the policy; default: a small one beside torch."
)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 4, "Of each step.")
_PEAK = flags.DEFINE_float(
  "peak_tflops", 0.0, "Of one device, where its kind is not known."
)
_PROFILE = flags.DEFINE_string("profile", None, "Folder of a profiler trace.")
_COMPILED = flags.DEFINE_bool(
  "torch_compile", False, "Also beside torch.compile, which takes minutes."
)
_JSON = flags.DEFINE_string("json", None, "File for the numbers.")
_COMPILE_SECONDS = 600

# About 19 M parameters, so that a CPU can train them in float32.
_SMALL = {
  "hidden_size": 384,
  "intermediate_size": 1024,
  "num_hidden_layers": 8,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "vocab_size": 8192,
}


def small() -> config_lib.ExperimentConfig:
  """Returns the small policy's configuration, with rows of 256 tokens."""
  return config_lib.ExperimentConfig(
    name="small",
    compute_dtype="float32",
    batch=config_lib.BatchConfig(
      row_lengths=(256,), micro_batch_tokens=1024, max_micro_batches=4
    ),
  )


def examples(config: config_lib.ExperimentConfig, *, vocab: int, tokens: int):
  """Makes trajectories of a half, a quarter or an eighth of the longest row.

  They fill rows exactly: `tokens` tokens in all, a multiple of an eighth of a
  row, need as many positions, and a side that pads has little padding.
  """
  from anysearch_jax.training import batching

  rng, out, left = np.random.default_rng(0), [], tokens
  while left:
    size = config.batch.row_lengths[-1] >> int(rng.integers(1, 4))
    while size > left:
      size //= 2
    left -= size
    out.append((size, rng.integers(0, vocab, size + 1)))
  return [
    batching.Example(
      ids.astype(np.int32),
      np.full(size + 1, 1 / (size * len(out)), np.float32) * (ids >= 0),
      np.full(size + 1, -np.log(vocab), np.float32),
      float(rng.normal()),
    )
    for size, ids in out
  ]


class Ours:
  """The Trainer's step over random weights, made on the devices that train."""

  def __init__(self, config, a, trajectories, *, params=None):
    import jax

    from anysearch_jax.policy import lora, sharding, table
    from anysearch_jax.policy import parameters as weights
    from anysearch_jax.training import batching, placement, train_step

    self.a = a = lora.attach(a, config.lora)
    self.placed = placed = placement.Placement.of(
      a, config.mesh, dtype=config.compute_dtype
    )
    tx = train_step.optimizer(a, config.optimizer)
    shardings = train_step.shardings(a, tx, placed.trainer)
    compute = placement.compute(
      a,
      config.batch,
      placed.trainer,
      dtype=config.compute_dtype,
      sequence_parallel=config.mesh.sequence_parallel,
    )
    self.attention = compute.attention

    def fresh(rows, where, dtype):
      def make():
        keys = jax.random.split(jax.random.key(0), len(rows))
        named = dict(zip((row.path for row in rows), keys, strict=True))
        return weights.tree(
          rows,
          lambda row: (
            jax.numpy.ones(row.shape, "float32")
            if row.init is None
            else row.init * jax.random.normal(named[row.path], row.shape, dtype)
          ),
        )

      return jax.jit(make, out_shardings=where)()

    if params is None:
      trained = fresh(table.trainable_rows(a), shardings.params, "float32")
    else:
      trained = jax.device_put(params, shardings.params)
    self.reference = None
    if a.lora is not None or config.objective.kl_coefficient:
      base = sharding.shardings(a.without_lora(), placed.trainer)
      dtype = config.lora.base_dtype if a.lora else config.compute_dtype
      self.reference = (
        fresh(table.base_rows(a), base, dtype)
        if params is None
        else placed.frozen(params)
      )
    self.state = train_step.init(trained, tx, shardings)
    self.packed = batching.pack(
      trajectories, config=config.batch, multiple=placed.row_multiple
    )
    self.batch = placed.batch(self.packed)
    self.step = train_step.make(
      train_step.grpo_loss(
        a,
        config.objective,
        temperature=config.sampling.temperature,
        compute=compute,
      ),
      tx,
      shardings,
    )

  def __call__(self) -> float:
    """Takes one step, waits for it, and returns its loss."""
    import jax

    self.state, metrics = self.step(self.state, self.reference, self.batch)
    jax.block_until_ready(self.state)
    return float(metrics["loss/total"])


def timed(call: Callable[[], float]) -> tuple[float, float]:
  """Returns the seconds of `call` and its result."""
  started = time.perf_counter()
  value = call()
  return time.perf_counter() - started, value


def describe(ours: Ours, seconds: Sequence[float], first: float) -> dict:
  """Returns the numbers of a run and the physical limits to compare with."""
  import jax

  from anysearch_jax.policy import parameters as weights
  from anysearch_jax.policy import table
  from anysearch_jax.training import throughput

  work = throughput.count([ours.packed])
  flops = throughput.model_flops(
    ours.a, work, forwards=int(ours.reference is not None)
  )
  devices = list(ours.placed.trainer.devices.flat)
  median = statistics.median(seconds)
  out = {
    "device": devices[0].device_kind,
    "devices": len(devices),
    "parameters": weights.count(table.rows(ours.a)),
    "trained": weights.count(table.trainable_rows(ours.a)),
    "attention": ours.attention,
    "tokens": work.tokens,
    "first call, s": first,
    "step, s": median,
    "fastest, s": min(seconds),
    "slowest, s": max(seconds),
    "model TFLOP a step": flops / 1e12,
    "model TFLOP/s": flops / median / 1e12,
    "programs compiled": throughput.programs(ours.step),
  }
  out |= throughput.metrics(work, flops, seconds=median, devices=devices)
  if _PEAK.value:
    out["train/mfu"] = out["model TFLOP/s"] / _PEAK.value / len(devices)
  if "train/mfu" in out:
    out["limit by FLOPs, s"] = median * out["train/mfu"]
  # Per step, masters and moments are read and written, gradients are read.
  state = sum(x.nbytes for x in jax.tree.leaves(ours.state))
  out["optimizer's least traffic, GB"] = (2 * state + state / 3) / 1e9
  return out | throughput.memory(devices)


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
  """Raises TimeoutError if the block takes longer than `seconds`."""

  def late(*_):
    raise TimeoutError(f"not done after {seconds} s")

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def theirs(folder: pathlib.Path, trajectories, *, compiled: bool):
  """Returns the same step in torch over padded rows, eager or compiled."""
  import torch
  import transformers

  from bench import torch_peer

  def load():
    return transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
    )

  model, frozen = load().train(), load().eval()
  adam = torch.optim.AdamW(
    model.parameters(), lr=1e-6, betas=(0.9, 0.98), weight_decay=0.01
  )
  if compiled:
    model, frozen = torch.compile(model), torch.compile(frozen)
  return lambda: torch_peer.train_step(
    model, frozen, adam, trajectories, rows=4
  )


def beside_torch(config: config_lib.ExperimentConfig) -> dict:
  """Measures our step and torch's in turns, on equal weights and examples."""
  from anysearch_jax.policy import hf
  from bench import random_models

  tokens = 2 * config.batch.micro_batch_tokens
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    random_models.make("qwen2", folder, **_SMALL)
    policy = hf.load(folder)
    work = examples(config, vocab=_SMALL["vocab_size"], tokens=tokens)
    sides = {
      "ours": Ours(config, policy.architecture, work, params=policy.params),
      "torch eager": theirs(folder, work, compiled=False),
    }
    first = {name: timed(side) for name, side in sides.items()}
    seconds = by_turns(sides)
    if _COMPILED.value:
      try:
        with deadline(_COMPILE_SECONDS):
          side = theirs(folder, work, compiled=True)
          first["torch compiled"] = timed(side)
      except Exception as error:  # torch.compile may fail in many ways.
        print(f"torch.compile: {type(error).__name__}: {str(error)[:200]}")
      else:
        sides["torch compiled"] = side
        seconds = by_turns(sides)
  out = describe(sides["ours"], seconds["ours"], first["ours"][0])
  for name in sides:
    out[f"{name}: first loss"] = first[name][1]
    out[f"{name}: first call, s"] = first[name][0]
    out[f"{name}: step, s"] = statistics.median(seconds[name])
    if name != "ours":
      pairs = zip(seconds[name], seconds["ours"], strict=True)
      ratios = sorted(t / o for t, o in pairs)
      out[f"{name} / ours"] = statistics.median(ratios)
      out[f"{name} / ours, each"] = " ".join(f"{r:.2f}" for r in ratios)
  return out


def by_turns(sides: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
  """Returns the seconds of each side's steps, which alternate."""
  seconds: dict[str, list[float]] = {name: [] for name in sides}
  for _ in range(_STEPS.value):
    for name, side in sides.items():
      seconds[name].append(timed(side)[0])
  return seconds


def alone(config: config_lib.ExperimentConfig, shape: str) -> dict:
  """Measures our step on random weights of a shape."""
  import jax

  from anysearch_jax.host import json_files
  from anysearch_jax.policy import architecture

  a = architecture.from_hf(json_files.read(pathlib.Path(shape)))
  tokens = _MICRO_BATCHES.value * config.batch.micro_batch_tokens
  work = examples(config, vocab=a.vocab_size, tokens=tokens)
  ours = Ours(config, a, work)
  first, _ = timed(ours)
  trace = (
    jax.profiler.trace(_PROFILE.value)
    if _PROFILE.value
    else contextlib.nullcontext()
  )
  with trace:
    seconds = [timed(ours)[0] for _ in range(_STEPS.value)]
  return describe(ours, seconds, first)


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  os.environ.setdefault("HF_HUB_OFFLINE", "1")
  named = flags.FLAGS.config is not None
  config = launch_flags.read_config() if named else small()
  if not named:
    config = launch_flags.override(config, flags.FLAGS.set_config)
  jax_setup.configure(threads=flags.FLAGS.threads, cache=flags.FLAGS.cache)
  if _SHAPE.value:
    out = alone(config, _SHAPE.value)
  else:
    out = beside_torch(config)
  for name, value in out.items():
    print(
      f"{name:32} {value:.4g}"
      if isinstance(value, float)
      else f"{name:32} {value}"
    )
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
  launch_flags.define_config(required=False)
  launch_flags.define_process()
  launch_flags.run(main)
