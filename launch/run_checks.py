"""Checks of a configuration: devices, space, data, retriever and servers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.data import evidence, prepared
from anysearch_jax.host import run_lock
from anysearch_jax.methods import systems
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.rollout.sglang import server as sglang_server
from anysearch_jax.rollout.sglang import weights as sglang_weights
from anysearch_jax.training import placement, validation
from launch import (
  accelerator,
  checks,
  footprint,
  machine_checks,
  parts,
  pipelines,
  retrievers,
)
from retrieval.recording import answer_log

_QUERIES = 10
_QUESTION = types.Question("doctor", "Which river flows through Paris?", ("",))


def configuration(config: config_lib.ExperimentConfig) -> checks.Finding:
  """Checks that the configuration is valid."""
  validation.validate(config)
  return checks.ok(f"{config.name} is one that can run")


def mesh(
  a: architecture_lib.Architecture,
  config: config_lib.ExperimentConfig,
  processes: int,
) -> checks.Finding:
  """Checks that there are enough devices for the mesh."""
  import jax

  m = config.mesh
  wanted = m.data * m.fsdp * m.tensor
  if processes > 1:
    here = jax.local_device_count()
    if wanted > here * processes:
      return checks.problem(
        f"the mesh takes {wanted} devices, {processes} processes like this one "
        f"have {here * processes}",
        "lower mesh.data, mesh.fsdp or mesh.tensor, or start more processes.",
      )
    return checks.ok(f"{wanted} of {here * processes} devices train")
  placement.check(
    a,
    config.mesh,
    lora_config=config.lora,
    batch=config.batch,
    engine=config.engine,
    dtype=config.compute_dtype,
  )
  return checks.ok(
    f"data {m.data} x fsdp {m.fsdp} x tensor {m.tensor} fits this process"
  )


def accelerated(a: architecture_lib.Architecture) -> checks.Finding:
  """Checks that a policy of full size has an accelerator."""
  if found := accelerator.problem(a):
    return checks.problem(
      found,
      "install JAX for the accelerator (docs/accelerators.md), or pass "
      "--allow_cpu to the command that computes.",
    )
  return checks.ok("the policy suits the devices")


def memory(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> Iterator[checks.Finding]:
  """Compares the minimum memory of a device with what the device has."""
  takes = footprint.of(a, config)
  apart = bool(config.mesh.rollout) and not (
    set(config.mesh.rollout) & set(config.mesh.trainer)
  )
  least = max(takes.trained, takes.sampled) if apart else takes.shared
  has = machine_checks.device_memory()
  free = machine_checks.available_memory()
  where = "a device"
  if has is None:
    has, where = free, "free RAM"
    m = config.mesh
    least *= m.fsdp * m.tensor  # All shards share the RAM.
  said = f"at least {checks.size(least)}, before activations"
  if has is None:
    yield checks.warning(
      f"{said}; found nobody who says what there is",
      "ask launch.plan with a --target.",
    )
  elif least > has:
    yield checks.problem(
      f"{said}; {where} has {checks.size(has)}",
      "cut the policy over more devices (mesh.fsdp, mesh.tensor), train "
      "adapters (lora.rank) or keep a smaller KV cache (engine.kv_tokens); "
      "launch.plan says exactly.",
    )
  else:
    yield checks.ok(f"{said}; {where} has {checks.size(has)}")
  in_ram = config.engine.kind == "sglang" and not config.sglang.weights
  beside = takes.handed if in_ram else 0
  if free is not None and takes.checkpoint + beside > free:
    held = f", beside {checks.size(beside)} for SGLang," if beside else ""
    yield checks.warning(
      f"a checkpoint is {checks.size(takes.checkpoint)} and goes through RAM"
      f"{held or ','} of which {checks.size(free)} are free",
      "end other processes, or train on more hosts.",
    )


def disk(
  a: architecture_lib.Architecture,
  config: config_lib.ExperimentConfig,
  folder: pathlib.Path,
) -> checks.Finding:
  """Checks the disk space for checkpoints, the export and trajectories."""
  takes = footprint.of(a, config)
  there = sum(
    path.stat().st_size
    for path in (folder / "checkpoints").rglob("*")
    if path.is_file()
  )
  needed = max(takes.disk - there, 0)
  free = shutil.disk_usage(_nearest(folder)).free
  said = (
    f"the run writes up to {checks.size(needed)} more (a checkpoint is "
    f"{checks.size(takes.checkpoint)}); {checks.size(free)} are free"
  )
  if needed > free:
    return checks.problem(
      said, "name an --output with more room, or lower checkpoint.keep_last."
    )
  return checks.ok(said)


def output(folder: pathlib.Path) -> checks.Finding:
  """Checks that a run can write to the folder and that no other run does."""
  nearest = _nearest(folder)
  if who := run_lock.holder(folder / run_lock.NAME):
    return checks.problem(
      f"{folder}: {who} writes to it", "wait for it, or name another --output."
    )
  try:
    with tempfile.TemporaryFile(dir=nearest):
      pass
  except OSError as error:
    return checks.problem(
      f"{nearest} cannot be written to ({error.strerror})",
      "name another --output, or give this user the right to.",
    )
  return checks.ok(f"{folder} can be written to")


def handed_over(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> checks.Finding:
  """Checks the space for the weights that SGLang servers read."""
  takes = footprint.of(a, config).handed
  where = _nearest(
    sglang_weights.folder(config.sglang.weights, config.sglang.urls)
  )
  free = shutil.disk_usage(where).free
  said = f"{where}: weights take {checks.size(takes)}; {checks.size(free)} free"
  if takes > free:
    return checks.problem(
      said,
      "give it more (docker run --shm-size, mount -o remount,size=...), or "
      "name another folder in sglang.weights.",
    )
  if not os.access(where, os.W_OK):
    return checks.problem(
      f"{where} cannot be written to", "name sglang.weights."
    )
  return checks.ok(said)


def data(config: config_lib.ExperimentConfig) -> Iterator[checks.Finding]:
  """Checks the questions; reads prepared ones whole and compares the hashes."""
  if config.data.source != "prepared":
    parts.source(config)
    yield checks.ok(f"{config.data.source}: its questions are made as needed")
    return
  if not config.data.path:
    raise ValueError(
      "data.path: found nothing, expected a folder of launch.prepare_data."
    )
  folder = prepared.Prepared(config.data.path)
  counts = {name: len(folder.rows(name)) for name in folder.names}
  yield checks.ok(
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
    yield checks.warning(
      f"{config.data.path} has no evaluation split: it can be trained on, and "
      "launch.evaluate has nothing to play",
      "prepare sets with a dev or test split (launch.prepare_data --sets=...).",
    )


def retriever(
  config: config_lib.ExperimentConfig, *, ask_web: bool
) -> Iterator[checks.Finding]:
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
  each_one = [c]
  if c.kind == "pipeline":
    each_one = pipelines.configs(c.pipeline)
    yield from _in_time(c.pipeline, config.episode)
  # What costs money is asked on demand.
  web = any(
    each.kind == "web" or (each.kind == "mcp" and each.price > 0)
    for each in each_one
  )
  if web and not ask_web:
    named = c.web or c.pipeline or f"MCP tool {c.mcp.tool}".rstrip()
    yield checks.ok(f"{named}: its key is there; not asked (see --ask_web)")
    return
  asked = questions[:1] if web else questions
  yield from _asked(made, asked, config.episode)


def _in_time(
  path: str, episode: config_lib.EpisodeConfig
) -> Iterator[checks.Finding]:
  """Warns if a search may end before a pipeline leaves out a late stage."""
  longest = pipelines.longest(path)
  if longest > episode.search_deadline:
    yield checks.warning(
      f"the deadlines of {path}'s stages take up to {longest:g} seconds, a "
      f"search {episode.search_deadline:g}, so a late stage fails the search "
      "before it is left out",
      "lower the deadlines of stages, or raise episode.search_deadline.",
    )


def servers(config: config_lib.ExperimentConfig) -> Iterator[checks.Finding]:
  """Checks the SGLang servers' health, context and weights; changes nothing."""
  client, each_one = sglang_server.connect(config.sglang, Counter())
  background = sglang_server.Background()
  try:
    for server in each_one:
      try:
        yield background.run(_server(server, config.episode.max_context))
      except types.EngineError as error:
        yield checks.problem(str(error))
  finally:
    background.close(client.aclose)


async def _server(
  server: sglang_server.Server, max_context: int
) -> checks.Finding:
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
    return checks.warning(
      f"{said}; contexts up to {longest} of episode.max_context {max_context}",
      "start it with a longer --context-length.",
    )
  return checks.ok(said)


def _asked(
  made: types.Retriever,
  questions: list[types.Question],
  config: config_lib.EpisodeConfig,
) -> Iterator[checks.Finding]:
  seconds, empty = [], 0
  for question in questions:
    request = types.SearchRequest(question.text, config.top_k, question.corpus)
    start = time.monotonic()
    try:
      found = asyncio.run(made.search(request))
    except (types.RetrievalError, answer_log.MissError) as error:
      yield checks.problem(str(error))
      return
    seconds.append(time.monotonic() - start)
    empty += not found
  said = (
    f"{len(seconds)} searches: p50 {statistics.median(seconds) * 1e3:.1f} ms, "
    f"slowest {max(seconds) * 1e3:.1f} ms, {empty} without a passage"
  )
  if empty == len(seconds):
    yield checks.problem(
      said, "see that it searches the corpus that the questions are about."
    )
  elif max(seconds) > config.search_deadline / 2:
    yield checks.warning(
      said,
      f"give it more devices, or raise episode.search_deadline, now "
      f"{config.search_deadline:g} seconds.",
    )
  else:
    yield checks.ok(said)


def _log(c: config_lib.RetrievalConfig) -> checks.Finding:
  """Checks that the log can be read."""
  if not pathlib.Path(c.log).exists() and c.log_mode != "strict":
    return checks.ok(f"log {c.log}: not there yet, the run makes it")
  try:
    opened = answer_log.AnswerLog(c.log, writable=False)
  except types.RetrievalError as error:
    return checks.problem(f"log: {error}")
  try:
    return checks.ok(f"log {c.log}: {len(opened)} answers, readable")
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
