"""The stages: each measures a part of a training on this device.

Measured times are beside their floor, the shortest time that the device's peaks
allow.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import statistics
import urllib.request
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.configs import one_gpu, qwen3_4b
from anysearch_jax.host import hardware, json_files
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import shipped
from anysearch_jax.methods import systems
from anysearch_jax.planning import targets
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import hf, hf_architecture
from anysearch_jax.retrieval.index import device_scan
from anysearch_jax.rollout import driver, engines
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import rewards_and_advantages, throughput
from bench import harness, policies
from bench import published as published_lib
from bench.first_gpu.notes import MS, SHARE, Notes

_TINY = {
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 8,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "vocab_size": 512,
}
_DTYPE = "bfloat16"
_DIMENSIONS = 768  # Of a passage's vector, as of E5-base.
_WIKI_18 = 21_015_324  # Number of passages of the paper's corpus.


def doctor(notes: Notes) -> None:
  """Reports versions, what launch.doctor finds, and the device's peaks."""
  from anysearch_jax.launch import doctor as doctor_lib
  from anysearch_jax.launch import findings as findings_lib

  notes.add({"backend": jax.default_backend()})
  notes.add({"environment": jax.print_environment_info(return_string=True)})
  for i, finding in enumerate(doctor_lib.examine(None), 1):
    if finding.level != findings_lib.OK:
      notes.add({f"finding {i}": str(finding)})
  size = 256 if notes.rehearse else 8192
  x = jax.random.normal(jax.random.key(0), (size, size), _DTYPE)
  product = jax.jit(jnp.matmul)

  def call() -> None:
    jax.block_until_ready(product(x, x))

  call()
  seconds = min(harness.seconds(call) for _ in range(5))
  read = harness.bandwidth(2**24 if notes.rehearse else 2**32)
  notes.add({"TFLOP/s": 2e-12 * size**3 / seconds, "GB/s": read / 1e9})


def decode(notes: Notes) -> None:
  """Times decode calls at several rows and contexts.

  The floor of a step is to read every weight once and each row's cache.
  """
  a = _architecture(rehearse=notes.rehearse)
  params = policies.engine_weights(
    policies.random_weights(a, dtype=_DTYPE), a, _DTYPE
  )
  steps = 4 if notes.rehearse else 32
  calls = 2 if notes.rehearse else 5

  def measure(rows: int, context: int) -> Mapping[str, Any]:
    engine = config_lib.EngineConfig(
      slots=rows,
      max_context=-(-(context + steps * (calls + 1)) // 64) * 64,
      page=64,
      lanes=(rows,),
      decode_steps=steps,
    )
    decoder = policies.Decoder(a, engine, dtype=_DTYPE, params=params)
    first = harness.seconds(lambda: decoder(context))
    seconds = statistics.median(
      harness.seconds(functools.partial(decoder, context + i * steps)) / steps
      for i in range(calls)
    )
    read = decoder.weight_bytes()
    return {
      "attention": decoder.attention,
      "first call, s": first,
      "tokens/s": rows / seconds,
      **_with_floor(
        notes,
        seconds,
        flops=2.0 * rows * (read // decoder.dtype.itemsize),
        read=read + decoder.cache_bytes(context + calls * steps // 2),
      ),
    }

  for rows in (2,) if notes.rehearse else (32, 128, 256):
    for context in (32, 64) if notes.rehearse else (2048, 8192):
      case = functools.partial(measure, rows, context)
      notes.case(f"{rows} rows of {context}", case)


def step(notes: Notes) -> None:
  """Times optimizer steps on random weights, in packed rows of 8,192 tokens."""
  a = _architecture(rehearse=notes.rehearse)
  row = 128 if notes.rehearse else 8192

  def measure(preset: str, remat: str, rows: int) -> Mapping[str, Any]:
    changes = [
      f"batch.row_lengths=({row},)",
      f"batch.remat={remat}",
      f"batch.micro_batch_tokens={rows * row}",
      "batch.max_micro_batches=2",
    ]
    if not preset:  # Without the KL term there is no copy of the reference.
      changes.append("objective.kl_coefficient=0")
    config = launch_flags.override(qwen3_4b.get_config(preset), changes)
    config = config_lib.changed(
      config, mesh=config_lib.MeshConfig(), pipeline=config_lib.PipelineConfig()
    )
    figures = policies.measure_steps(config, a, micro_batches=2, steps=3)
    return figures | _with_floor(
      notes,
      figures["step, s"],
      flops=1e12 * figures["model TFLOP a step"],
      read=1e9 * figures["optimizer's least traffic, GB"],
    )

  notes.case("every weight", lambda: measure("", "full", 1))
  notes.case("adapters", lambda: measure("lora80", "dots", 2))


def published(notes: Notes) -> None:
  """Takes the steps whose speed others published, of one GPU.

  docs/will_it_fit.md compares them with their plans.
  """

  def measure(step: published_lib.PublishedStep) -> Mapping[str, Any]:
    a = step.architecture
    if notes.rehearse:
      a = _architecture(rehearse=True)
      step = step._replace(row=128)
    figures = policies.measure_steps(
      step.config, a, micro_batches=step.rows, steps=3, whole_rows=True
    )
    peaks = throughput.memory(jax.local_devices())
    peak_gib = {name: size / hardware.GIB for name, size in peaks.items()}
    return {
      "step, s": figures["step, s"],
      f"{step.source} on {step.device}, s": step.seconds,
      "plan, s": step.predicted(targets.ASSUMED),
      "times as fast": step.seconds / figures["step, s"],
      f"{step.source}, GiB": step.gib,
      "largest until now, GiB": peak_gib.get("device/memory_peak_bytes"),
    }

  for step in published_lib.read():
    if step.devices == 1 and step.policy in ("Qwen3-0.6B", "Qwen3-4B"):
      trained = f"rank {step.adapter_rank}" if step.adapter_rank else "all"
      notes.case(
        f"{step.policy}, {trained}, rows of {step.row}",
        functools.partial(measure, step),
      )


def loop(notes: Notes) -> None:
  """Samples, trains adapters and hands over, in turns on one device."""
  a = _architecture(rehearse=notes.rehearse)
  context = 1024 if notes.rehearse else 4096
  generated = 24 if notes.rehearse else 512
  slots = 4 if notes.rehearse else 160
  lanes = 4 if notes.rehearse else 128
  questions = 1 if notes.rehearse else 32
  group = 2 if notes.rehearse else 5
  config = launch_flags.override(
    one_gpu.get_config("qwen3_4b-80"),
    [
      f"questions={questions}",
      f"group={group}",
      "curriculum.steps_per_rollout=1",
      f"episode.max_generated={generated}",
      f"episode.max_context={context}",
      f"engine.max_context={context}",
      f"engine.slots={slots}",
      f"engine.lanes=({lanes},)",
      f"engine.kv_tokens={slots * context if notes.rehearse else 1 << 17}",
      f"batch.row_lengths=({context},)",
      f"batch.micro_batch_tokens={context}",
      f"batch.max_micro_batches={questions * group}",
    ],
  )
  params = policies.random_weights(a, dtype=config.lora.base_dtype)
  start = hf.Policy(params, a, policies.WordTokenizer(a.vocab_size))
  learner = learner_lib.Learner(config, start)
  published = start._replace(
    params=learner.published(), architecture=learner.architecture
  )
  sampler = engines.make(published, config, seed=config.seed)
  parts = driver.EpisodeParts(
    sampler,
    policies.InventedRetriever(),
    config.episode,
    start.tokenizer,
    systems.of_episode(config.episode),
  )
  played_questions = [
    types.Question(id=str(i), text=f"word{i} ", golden_answers=(f"word{i}",))
    for i in range(config.questions)
  ]

  def measure(number: int) -> dict[str, Any]:
    rollout, played = harness.timed(
      lambda: policies.play(
        played_questions, parts, group=group, rollout=number
      )
    )
    scored = rewards_and_advantages.score(
      rollout.groups,
      np.asarray([g.budget for g in rollout.groups]),
      samples=group,
      method=systems.trained(config),
      objective=config.objective,
    )
    packed = learner.pack(scored)
    values, trained = harness.timed(lambda: list(learner.steps(packed)))
    handed = harness.seconds(
      lambda: sampler.set_params(
        jax.block_until_ready(learner.published()), number + 1
      )
    )
    episodes = policies.all_trajectories(rollout)
    return {
      "sampled, s": played,
      "trained, s": trained,
      "handed over, s": handed,
      "failed episodes": sum(t.failed for t in episodes),
      "searches": sum(t.searches for t in episodes),
      "generated tokens/s": policies.generated_tokens(rollout) / played,
      "trained tokens/s": throughput.count(packed, learner.architecture).tokens
      / trained,
      "loss": values[-1]["loss/total"],
    }

  for number in range(1 if notes.rehearse else 2):
    notes.case(f"rollout {number}", functools.partial(measure, number))
  notes.add(throughput.memory(jax.local_devices()))


def server(notes: Notes) -> None:
  """Times an SGLang server that samples rows of `decode`'s shorter context."""
  context = 8 if notes.rehearse else 2048
  tokens = 4 if notes.rehearse else 128

  def measure(rows: int) -> Mapping[str, Any]:
    rng = np.random.default_rng(rows)
    body = {
      "input_ids": rng.integers(1, 500, (rows, context)).tolist(),
      "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
      f"{notes.server.rstrip('/')}/generate",
      json.dumps(body).encode(),
      {"Content-Type": "application/json"},
    )

    def generate() -> list[dict[str, Any]]:
      with urllib.request.urlopen(request, timeout=100) as reply:
        return json.load(reply)

    answers, seconds = harness.timed(generate)
    written = sum(x["meta_info"]["completion_tokens"] for x in answers)
    return {"rows": rows, "tokens": written, "tokens/s": written / seconds}

  for rows in (2,) if notes.rehearse else (32, 128, 256):
    case = functools.partial(measure, rows)
    notes.case(f"{rows} rows of {context}", case)


def vectors(notes: Notes) -> None:
  """Compares searches of random vectors with the bandwidth of reads."""
  count = 1000 if notes.rehearse else _WIKI_18
  block = 1024 if notes.rehearse else 32768
  calls = 2 if notes.rehearse else 7

  def units(key: jax.Array, rows: int) -> jax.Array:
    x = jax.random.normal(key, (rows, _DIMENSIONS))
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)

  @jax.jit
  def make(key: jax.Array) -> jax.Array:
    """Makes vectors block by block; all in float32 would not fit."""
    return jax.lax.map(
      lambda i: units(jax.random.fold_in(key, i), block).astype(_DTYPE),
      jnp.arange(-(-count // block)),
    ).reshape(-1, _DIMENSIONS)

  values = jax.block_until_ready(make(jax.random.key(0)))
  search = functools.partial(
    device_scan.search_devices,
    values=values,
    k=3,
    mesh=jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("rows",)),
    count=count,
    rows_per_device=len(values),
    block=block,
  )
  floor = values.nbytes / harness.bandwidth(min(values.nbytes, 1 << 32))
  for queries in (1, 8) if notes.rehearse else (1, 32, 128):
    query_vectors = units(jax.random.key(1), queries)

    def call(query_vectors: jax.Array = query_vectors) -> None:
      jax.block_until_ready(search(query_vectors))

    call()
    seconds = statistics.median(harness.seconds(call) for _ in range(calls))
    notes.add({f"{queries} queries, {MS}": 1e3 * seconds})
    notes.add({f"{queries} queries, {SHARE}": floor / seconds})


def _with_floor(
  notes: Notes, seconds: float, *, flops: float, read: float
) -> dict[str, float]:
  """Returns measured milliseconds, their floor, and its share.

  The floor follows from the peaks of the device's data sheet, or from those
  that `doctor` measured if the sheet is unknown.

  Args:
    notes: the folder of the run.
    seconds: measured seconds.
    flops: floating-point operations of the measured work.
    read: bytes that it reads from memory.
  """
  doctor_file = notes.folder / "stages/doctor.json"
  peaks = json_files.read(doctor_file, missing={"figures": {}})["figures"]
  device = hardware.of_kind(jax.local_devices()[0].device_kind)
  products = device.flops if device else 1e12 * peaks.get("TFLOP/s", math.nan)
  bandwidth = 1e9 * peaks.get("GB/s", math.nan)
  reads = device.memory_bandwidth if device else bandwidth
  floor = max(flops / products, read / reads)
  return {MS: 1e3 * seconds, "floor, ms": 1e3 * floor, SHARE: floor / seconds}


def _architecture(*, rehearse: bool) -> architecture_lib.Architecture:
  """Returns the architecture of Qwen3-4B, or a tiny one."""
  path = pathlib.Path(shipped.find("configs/shapes/Qwen3-4B.json"))
  shape = json.loads(path.read_text())
  return hf_architecture.from_hf(shape | _TINY if rehearse else shape)
