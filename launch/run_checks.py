"""Checks of a configuration: devices, space, data, retriever and servers."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.data import evidence, prepared
from anysearch_jax.host import loop, run_lock
from anysearch_jax.methods import systems
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.rollout.sglang import server as sglang_server
from anysearch_jax.rollout.sglang import weights as sglang_weights
from anysearch_jax.training import placement, validation
from launch import doctor, jax_setup, parts, retrievers
from retrieval import recording

_QUERIES = 10
_QUESTION = types.Question("doctor", "Which river flows through Paris?", ("",))


_MASTER = 4  # Bytes of a float32.
_TOKEN = 6  # Bytes of a token's text in a record; enough for most languages.


def configuration(config: config_lib.ExperimentConfig) -> doctor.Finding:
  """Checks that the configuration is valid."""
  validation.validate(config)
  return doctor.ok(f"{config.name} is one that can run")


def mesh(
  a: architecture_lib.Architecture,
  config: config_lib.ExperimentConfig,
  processes: int,
) -> doctor.Finding:
  """Checks that there are enough devices for the mesh."""
  import jax

  m = config.mesh
  wanted = m.data * m.fsdp * m.tensor
  if processes > 1:
    here = jax.local_device_count()
    if wanted > here * processes:
      return doctor.problem(
        f"the mesh takes {wanted} devices, {processes} processes like this one "
        f"have {here * processes}",
        "lower mesh.data, mesh.fsdp or mesh.tensor, or start more processes.",
      )
    return doctor.ok(f"{wanted} of {here * processes} devices train")
  placement.check(
    a,
    config.mesh,
    lora_config=config.lora,
    batch=config.batch,
    engine=config.engine,
    dtype=config.compute_dtype,
  )
  return doctor.ok(
    f"data {m.data} x fsdp {m.fsdp} x tensor {m.tensor} fits this process"
  )


def accelerated(a: architecture_lib.Architecture) -> doctor.Finding:
  """Checks that a policy of full size has an accelerator."""
  if found := jax_setup.cpu_problem(a):
    return doctor.problem(
      found,
      "install JAX for the accelerator (docs/training.md), or pass "
      "--allow_cpu to the command that computes.",
    )
  return doctor.ok("the policy suits the devices")


def memory(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> Iterator[doctor.Finding]:
  """Compares the minimum memory of a device with what the device has."""
  takes = footprint(a, config)
  apart = bool(config.mesh.rollout) and not (
    set(config.mesh.rollout) & set(config.mesh.trainer)
  )
  least = max(takes.trained, takes.sampled) if apart else takes.shared
  has = doctor.device_memory()
  free = doctor.available_memory()
  where = "a device"
  if has is None:
    has, where = free, "free RAM"
    m = config.mesh
    least *= m.fsdp * m.tensor  # All shards share the RAM.
  said = f"at least {doctor.size(least)}, before activations"
  if has is None:
    yield doctor.warning(
      f"{said}; found nobody who says what there is",
      "ask launch.plan with a --target.",
    )
  elif least > has:
    yield doctor.problem(
      f"{said}; {where} has {doctor.size(has)}",
      "cut the policy over more devices (mesh.fsdp, mesh.tensor), train "
      "adapters (lora.rank) or keep a smaller KV cache (engine.kv_tokens); "
      "launch.plan says exactly.",
    )
  else:
    yield doctor.ok(f"{said}; {where} has {doctor.size(has)}")
  in_ram = config.engine.kind == "sglang" and not config.sglang.weights
  beside = takes.handed if in_ram else 0
  if free is not None and takes.checkpoint + beside > free:
    held = f", beside {doctor.size(beside)} for SGLang," if beside else ""
    yield doctor.warning(
      f"a checkpoint is {doctor.size(takes.checkpoint)} and goes through RAM"
      f"{held or ','} of which {doctor.size(free)} are free",
      "end other processes, or train on more hosts.",
    )


def disk(
  a: architecture_lib.Architecture,
  config: config_lib.ExperimentConfig,
  folder: pathlib.Path,
) -> doctor.Finding:
  """Checks the disk space for checkpoints, the export and trajectories."""
  takes = footprint(a, config)
  there = sum(
    path.stat().st_size
    for path in (folder / "checkpoints").rglob("*")
    if path.is_file()
  )
  needed = max(takes.disk - there, 0)
  free = shutil.disk_usage(_nearest(folder)).free
  said = (
    f"the run writes up to {doctor.size(needed)} more (a checkpoint is "
    f"{doctor.size(takes.checkpoint)}); {doctor.size(free)} are free"
  )
  if needed > free:
    return doctor.problem(
      said, "name an --output with more room, or lower checkpoint.keep_last."
    )
  return doctor.ok(said)


def output(folder: pathlib.Path) -> doctor.Finding:
  """Checks that a run can write to the folder and that no other run does."""
  nearest = _nearest(folder)
  if who := run_lock.holder(folder / run_lock.NAME):
    return doctor.problem(
      f"{folder}: {who} writes to it", "wait for it, or name another --output."
    )
  try:
    with tempfile.TemporaryFile(dir=nearest):
      pass
  except OSError as error:
    return doctor.problem(
      f"{nearest} cannot be written to ({error.strerror})",
      "name another --output, or give this user the right to.",
    )
  return doctor.ok(f"{folder} can be written to")


def handed_over(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> doctor.Finding:
  """Checks the space for the weights that SGLang servers read."""
  takes = footprint(a, config).handed
  where = _nearest(
    sglang_weights.folder(config.sglang.weights, config.sglang.urls)
  )
  free = shutil.disk_usage(where).free
  said = f"{where}: weights take {doctor.size(takes)}; {doctor.size(free)} free"
  if takes > free:
    return doctor.problem(
      said,
      "give it more (docker run --shm-size, mount -o remount,size=...), or "
      "name another folder in sglang.weights.",
    )
  if not os.access(where, os.W_OK):
    return doctor.problem(
      f"{where} cannot be written to", "name sglang.weights."
    )
  return doctor.ok(said)


def data(config: config_lib.ExperimentConfig) -> Iterator[doctor.Finding]:
  """Checks the questions; reads prepared ones whole and compares the hashes."""
  if config.data.source != "prepared":
    parts.source(config)
    yield doctor.ok(f"{config.data.source}: its questions are made as needed")
    return
  if not config.data.path:
    raise ValueError(
      "data.path: found nothing, expected a folder of launch.prepare_data."
    )
  folder = prepared.Prepared(config.data.path)
  counts = {name: len(folder.rows(name)) for name in folder.names}
  yield doctor.ok(
    f"{config.data.path}: "
    + ", ".join(f"{name} {count}" for name, count in counts.items())
  )
  rows = folder.rows(config.data.split)
  if systems.get(config.method.name).steps is not None:
    evidence.check(rows)
  datasets = config.evaluation.datasets
  if datasets or folder.evaluated():
    folder.evaluation_questions(datasets, 1)
  else:
    yield doctor.warning(
      f"{config.data.path} has no evaluation split: it can be trained on, and "
      "launch.evaluate has nothing to play",
      "prepare sets with a dev or test split (launch.prepare_data --sets=...).",
    )


def retriever(
  config: config_lib.ExperimentConfig, *, ask_web: bool
) -> Iterator[doctor.Finding]:
  """Checks that the retriever answers, and how fast; does not write its log."""
  c = config.retrieval
  if c.log:
    yield _log(c)
    if c.log_mode == "strict":
      return
  lexical, questions = None, [_QUESTION]
  try:
    source = parts.source(config)
    lexical = source.retriever
    questions = source.evaluation_questions(
      config.evaluation.datasets, _QUERIES
    )[:_QUERIES] or [_QUESTION]
  except ValueError:  # Reported by the check of the questions.
    if c.kind == "lexical":
      raise
  live = dataclasses.replace(
    config,
    retrieval=dataclasses.replace(
      c,
      log="",
      log_mode="record",
      # Simulated and refined passages need the context of an episode.
      simulated="",
      refined="",
      model=config_lib.TextModelConfig(),
    ),
  )
  made = retrievers.make(live, lexical)
  # What costs money is asked on demand.
  web = c.kind == "web" or (c.kind == "mcp" and c.price > 0)
  if web and not ask_web:
    named = c.web or f"MCP tool {c.mcp.tool}".rstrip()
    yield doctor.ok(f"{named}: its key is there; not asked (see --ask_web)")
    return
  asked = questions[:1] if web else questions
  yield from _asked(made, asked, config.episode)


def servers(config: config_lib.ExperimentConfig) -> Iterator[doctor.Finding]:
  """Checks the SGLang servers' health, context and weights; changes nothing."""
  client, each_one = sglang_server.connect(config.sglang, Counter())
  try:
    for server in each_one:
      try:
        yield loop.run(_server(server, config.episode.max_context))
      except types.EngineError as error:
        yield doctor.problem(str(error))
  finally:
    loop.run(sglang_server.close(client, each_one))


async def _server(
  server: sglang_server.Server, max_context: int
) -> doctor.Finding:
  start = time.monotonic()
  await server.tell("GET", "/health")
  took = time.monotonic() - start
  info = await server.get("/server_info", "/get_server_info")
  version = await sglang_weights.version(server)
  longest = info.get("max_req_input_len")
  said = (
    f"{server.url}: SGLang {info.get('version', 'of unknown version')}, serves "
    f"{version!r}, answers in {took * 1e3:.0f} ms"
  )
  if type(longest) is int and longest < max_context:
    return doctor.warning(
      f"{said}; contexts up to {longest} of episode.max_context {max_context}",
      "start it with a longer --context-length.",
    )
  return doctor.ok(said)


def _asked(
  made: types.Retriever,
  questions: list[types.Question],
  config: config_lib.EpisodeConfig,
) -> Iterator[doctor.Finding]:
  seconds, empty = [], 0
  for question in questions:
    request = types.SearchRequest(question.text, config.top_k, question.corpus)
    start = time.monotonic()
    try:
      found = loop.run(made.search(request))
    except (types.RetrievalError, recording.MissError) as error:
      yield doctor.problem(str(error))
      return
    seconds.append(time.monotonic() - start)
    empty += not found
  said = (
    f"{len(seconds)} searches: p50 {statistics.median(seconds) * 1e3:.1f} ms, "
    f"slowest {max(seconds) * 1e3:.1f} ms, {empty} without a passage"
  )
  if empty == len(seconds):
    yield doctor.problem(
      said, "see that it searches the corpus that the questions are about."
    )
  elif max(seconds) > config.search_deadline / 2:
    yield doctor.warning(
      said,
      f"give it more devices, or raise episode.search_deadline, now "
      f"{config.search_deadline:g} seconds.",
    )
  else:
    yield doctor.ok(said)


def _log(c: config_lib.RetrievalConfig) -> doctor.Finding:
  """Checks that the log can be read."""
  if not pathlib.Path(c.log).exists() and c.log_mode != "strict":
    return doctor.ok(f"log {c.log}: not there yet, the run makes it")
  try:
    opened = recording.AnswerLog(c.log, writable=False)
  except types.RetrievalError as error:
    return doctor.problem(f"log: {error}")
  try:
    return doctor.ok(f"log {c.log}: {len(opened)} answers, readable")
  finally:
    opened.close()


def _nearest(folder: pathlib.Path) -> pathlib.Path:
  """Returns the folder, or its nearest parent that exists.

  Raises:
    ValueError: that path is a file.
  """
  folder = folder.absolute()
  found = next(path for path in (folder, *folder.parents) if path.exists())
  if not found.is_dir():
    raise ValueError(
      f"{folder}: found that {found} is not a folder, expected a folder or a "
      "place where one can be made; name another."
    )
  return found


class Footprint(NamedTuple):
  """Bytes of a run.

  Attributes:
    checkpoint: one checkpoint.
    checkpoints: the most checkpoints that exist at a time.
    export: the exported policy.
    trajectories: the recorded trajectories, if all have the maximum length.
    handed: the current weights, which SGLang servers read.
    trained: each training device: weights, moments, gradients, reference.
    sampled: each sampling device: weights and KV cache; 0 for SGLang.
    shared: a device that does both; less than the sum of them where it takes
      turns.
  """

  checkpoint: int
  checkpoints: int
  export: int
  trajectories: int
  handed: int
  trained: int
  sampled: int
  shared: int

  @property
  def disk(self) -> int:
    """Bytes of the run's folder."""
    return self.checkpoints + self.export + self.trajectories


def footprint(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> Footprint:
  """Returns the footprint of a run.

  Args:
    a: architecture of the policy, without adapters.
    config: configuration of the run.
  """
  a = lora.attach(a, config.lora)
  trained = weights.count(table.trainable_rows(a))
  base = weights.count(table.base_rows(a))
  compute = _bytes(config.compute_dtype)
  checkpoint = 3 * _MASTER * trained  # Weights and both moments.
  keep = config.checkpoint
  c = config.curriculum
  rollouts = math.ceil(c.total_steps / c.steps_per_rollout)
  recorded = math.ceil(rollouts / config.save_every) + 1
  tokens = config.questions * config.group * config.episode.max_context
  export = base * _bytes(keep.export_dtype)
  frozen = 0
  if config.lora.rank:
    export += _MASTER * trained
    frozen = base * _bytes(config.lora.base_dtype)
  elif config.objective.kl_coefficient:
    frozen = base * compute
  mesh = config.mesh
  state = _MASTER * trained // (mesh.fsdp * mesh.tensor)
  trains = 4 * state + frozen // (mesh.fsdp * mesh.tensor)
  weights_size, cache = _sampled(
    a,
    config,
    # In float32 the engine may sample with the trained arrays themselves.
    0
    if compute == _MASTER and not (mesh.rollout or config.lora.rank)
    else base * compute,
  )
  return Footprint(
    checkpoint=checkpoint,
    checkpoints=checkpoint * (keep.keep_last + keep.keep_best + 1),
    export=export,
    trajectories=recorded * tokens * _TOKEN,
    handed=base * compute,
    trained=trains,
    sampled=weights_size + cache,
    shared=weights_size
    + _phases(config, state=state, trains=trains, cache=cache),
  )


def _phases(
  config: config_lib.ExperimentConfig, *, state: int, trains: int, cache: int
) -> int:
  """Returns the bytes of a shared device without the engine's weights.

  Args:
    config: configuration of the run.
    state: bytes of the masters; both moments and gradients are as large each.
    trains: bytes of training, gradients included.
    cache: bytes of the KV cache.
  """
  if config.pipeline.async_level:
    return trains + cache
  offloaded = {"none": 0, "moments": 2, "state": 3}[config.pipeline.offload]
  freed = cache if config.engine.free_kv_while_training else 0
  return max(
    trains + cache - freed,
    # Gradients exist only while training.
    trains - (1 + offloaded) * state + cache,
  )


def _sampled(
  a: architecture_lib.Architecture,
  config: config_lib.ExperimentConfig,
  policy: int,
) -> tuple[int, int]:
  """Returns a sampling device's bytes of weights and of KV cache.

  Args:
    a: architecture of the policy.
    config: configuration of the run.
    policy: bytes of the policy that the devices share.
  """
  e, mesh = config.engine, config.mesh
  if e.kind != "jax":
    return 0, 0
  tokens = e.kv_tokens or e.slots * e.max_context
  cache = 2 * a.layers * a.kv_heads * a.head_dim * tokens
  devices = len(mesh.rollout) or mesh.data * mesh.fsdp * mesh.tensor
  cache *= _bytes(config.compute_dtype)
  parts = math.gcd(devices, a.kv_heads)
  return policy // parts, cache // parts


def _bytes(dtype: str) -> int:
  return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
