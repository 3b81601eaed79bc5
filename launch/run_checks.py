"""Checks what a run needs: its policy, devices, disk space and data.

Each check is a method of `Checks` and says what it found. Those of the policy
say whether its tokenizer and its chat template support the protocol.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.data import evidence, prepared
from anysearch_jax.environment import protocol
from anysearch_jax.host import loop, run_lock, turns
from anysearch_jax.launch import jax_setup, parts, policies, retrievers
from anysearch_jax.launch.findings import (
  Check,
  Finding,
  ok,
  problem,
  size,
  warning,
)
from anysearch_jax.methods import systems
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, table, tensor_files
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.rollout import driver, episode, searching
from anysearch_jax.rollout.servers import dialects
from anysearch_jax.rollout.servers import fleet as fleet_lib
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import weights as weights_lib
from anysearch_jax.training import (
  health,
  placement,
  rewards_and_advantages,
  validation,
)

PLAY = "play"  # The check that plays episodes.
_QUERIES = 10  # Searches that measure a retriever.
_QUESTION = types.Question("doctor", "Which river flows through Paris?", ("",))
_PROMPT_END = 40  # Characters of a prompt that are shown.
_MASTER_BYTES = 4  # Of a float32.
# Of a token's text in a record; enough for most languages.
_TOKEN_BYTES = 6


@dataclasses.dataclass
class Checks:
  """The checks of a run.

  Attributes:
    config: configuration of the run.
    folder: folder of the run.
    processes: number of processes like this one that will train.
    ask_web: whether to send a query to a web search engine.
    episodes: number of episodes to play; 0: none.
  """

  config: config_lib.ExperimentConfig
  folder: pathlib.Path
  processes: int = 1
  ask_web: bool = False
  episodes: int = 0

  def all(self) -> Iterator[tuple[str, Check]]:
    """Yields the checks by name; run each before asking for the next one."""
    has_servers = self.config.engine.has_servers
    yield "config", self.configuration
    yield "policy", self.policy
    # Without a policy these would only report the same problem again.
    if "_policy" in vars(self):
      yield "texts", lambda: check_texts(self._policy[1], self.config)
      yield "mesh", self.mesh
      yield "accelerator", lambda: check_accelerator(self._policy[0])
      yield "disk", self.disk
      if has_servers:
        yield "weights", self.handed_over
    yield "output", self.output
    yield "data", self.data
    yield "retriever", self.retriever
    if has_servers:
      yield "servers", self.servers
    if self.episodes and "_policy" in vars(self):
      yield PLAY, self.play

  @functools.cached_property
  def _policy(
    self,
  ) -> tuple[architecture_lib.Architecture, tokenizer_lib.Tokenizer]:
    """Architecture and tokenizer; of the weights only the headers are read."""
    a, codec = policies.describe(self.config)
    stored = tensor_files.headers(self.config.policy)
    expected = {
      name for row in table.base_rows(a) for name in row.tensor_names()
    }
    if missing := sorted(expected - stored.keys()):
      raise ValueError(
        f"{self.config.policy}: lacks tensor {missing[0]!r} ({len(missing)} in "
        "all); copy the folder again."
      )
    return a, codec

  def configuration(self) -> Finding:
    """Checks that the configuration is valid."""
    systems.validate(self.config)
    return ok(f"{self.config.name} is one that can run")

  def policy(self) -> Finding:
    """Checks that the policy's folder can be used."""
    a, codec = self._policy
    return ok(
      f"{self.config.policy}: {a.family}, {a.layers} layers of {a.d_model}, "
      f"{codec.vocab_size} tokens"
    )

  def mesh(self) -> Finding:
    """Checks that there are enough devices for the mesh."""
    config = self.config
    m = self.config.mesh
    if self.processes > 1:
      return ok(f"{m}, of {self.processes} processes; not compared")
    placement.check_devices(self._policy[0], config)
    return ok(f"{m} fits this process")

  def disk(self) -> Finding:
    """Checks the space for checkpoints, the export and trajectories."""
    stored_bytes = sum(
      path.stat().st_size
      for path in (self.folder / "checkpoints").rglob("*")
      if path.is_file()
    )
    return check_space(
      self.folder,
      footprint(self._policy[0], self.config).disk - stored_bytes,
      "name an --output with more room, or lower checkpoint.keep_last.",
    )

  def handed_over(self) -> Finding:
    """Checks the space for the weights that servers read."""
    c = self.config.servers
    return check_space(
      weights_lib.folder(c.weights, c.urls),
      footprint(self._policy[0], self.config).handed,
      "give it more (docker run --shm-size, mount -o remount,size=...), or "
      "name another folder in servers.weights.",
    )

  def output(self) -> Finding:
    """Checks that this run, and no other, can write to the folder."""
    if holder := run_lock.holder(self.folder / run_lock.NAME):
      return problem(
        f"{self.folder}: {holder} writes to it",
        "wait for it, or name another --output.",
      )
    return check_space(
      self.folder, 0, "name another --output, or give this user the right to."
    )

  def data(self) -> Iterator[Finding]:
    """Checks the questions; reads prepared ones whole and compares hashes."""
    config = self.config
    path = self.config.data.path
    source = parts.source(config)
    if not isinstance(source, prepared.Prepared):
      yield ok(f"{config.data.source}: its questions are made as needed")
      return
    counts = {name: len(source.rows(name)) for name in source.names}
    yield ok(f"{path}: " + ", ".join(f"{k} {n}" for k, n in counts.items()))
    if systems.get(config.method.name).steps is not None:
      evidence.check(source.rows(config.data.split))
    datasets = config.evaluation.datasets
    if datasets or source.evaluated():
      source.evaluation_questions(datasets, 1)
    else:
      yield warning(
        f"{path} has no evaluation split: it can be trained on, and "
        "anysearch evaluate has nothing to play",
        "prepare sets with a dev or test split (anysearch prepare_data "
        "--sets=...).",
      )

  def retriever(self) -> Iterator[Finding]:
    """Checks that the retriever answers, and how fast; writes no log."""
    config = self.config
    c = self.config.retrieval
    if config.agents.program:
      yield ok("the program searches by itself (agents.program)")
      return
    if c.log_mode == "strict":
      yield ok(f"log {c.log}: nothing else is asked")
      return
    lexical = None
    questions: Sequence[types.Question] = [_QUESTION]
    try:
      source = parts.source(config)
      lexical = source.retriever
      questions = _example_questions(source, config)
    except ValueError:  # Reported by the check of the questions.
      if c.kind == "lexical":
        raise
    # Simulated and refined passages need the context of an episode.
    plain = {
      "log": "",
      "log_mode": "record",
      "simulated": "",
      "refined": "",
      "model": config_lib.TextModelConfig(),
    }
    live_config = config_lib.changed(config, retrieval=plain)
    retriever = retrievers.make(live_config, lexical)
    # Searches that cost money are made only on demand.
    is_paid = c.kind == "web" or (c.kind == "mcp" and c.price > 0)
    if is_paid and not self.ask_web:
      tool_name = c.web or f"MCP tool {c.mcp.tool}".rstrip()
      yield ok(f"{tool_name}: its key is there; not asked (see --ask_web)")
      return
    yield from check_answers(
      retriever, questions[:1] if is_paid else questions, config.episode
    )

  def servers(self) -> Iterator[Finding]:
    """Checks that the servers, and the router of turns, answer."""
    c = self.config.servers
    dialect = dialects.BY_KIND[self.config.engine.kind]
    client, make = server_lib.connect(dialect, c, Counter())
    try:
      urls: Sequence[str] = c.urls
      if c.gateway:
        urls = loop.run(fleet_lib.listed_workers(make(c.gateway)))
        if not urls:
          yield problem(f"{c.gateway} lists no SGLang server", "add one.")
      for url in urls:
        yield loop.run(_server(make(url)))
      if c.router:
        yield loop.run(_server(make(c.router), samples=False))
    except types.EngineError as error:
      yield problem(str(error))
    finally:
      loop.run(server_lib.close(client))

  def play(self) -> Finding:
    """Plays groups of episodes, and checks that their rewards differ."""
    config = self.config
    samples = min(config.group, self.episodes)
    count = math.ceil(self.episodes / samples)
    method = systems.trained(config)
    source = parts.source(config)
    questions = source.questions(config.data.split, count, config.seed)
    retriever = searching.BatchingRetriever(
      retrievers.make(config, source.retriever), config.search
    )
    assignments = [
      driver.Assignment(
        index=i,
        question=questions[i],
        budget=1 + i % config.curriculum.max_budget,
        scaffold=config.curriculum.phase1_scaffold,
      )
      for i in range(count)
    ]
    choice = policies.PolicyChoice("hf", config.policy)
    with (
      policies.player(choice, config, source) as player,
      parts.program(config) as program,
    ):
      searching.attach(retriever, player.engine, player.codec)
      parts_of_play = driver.EpisodeParts(
        player.engine,
        retriever,
        config.episode,
        player.codec,
        method.environment,
        player=program,
      )
      played = loop.run(
        driver.run_groups(
          assignments,
          parts_of_play,
          group=samples,
          rollout=0,
          max_concurrency=config.engine.slots,
        )
      )
    if not played.groups:
      return problem(f"found {played.failed} failed episodes: {played.reason}")
    scored = rewards_and_advantages.score(
      played.groups,
      np.array([group.budget for group in played.groups], np.int32),
      samples=samples,
      method=method,
      objective=config.objective,
    )
    values = rewards_and_advantages.metrics(scored)
    example = played.groups[0].trajectories[0]
    sentence = (
      f"played {count * samples} episodes. "
      f"{health.describe_rewards(values, example)}"
    )
    totals = np.where(scored.valid, scored.rewards["total"], np.nan)
    spread = np.nanmax(totals, axis=1) - np.nanmin(totals, axis=1)
    if not spread.any():
      return problem(
        f"found equal rewards in each of {len(played.groups)} groups: a run "
        f"learns nothing from them; {sentence}",
        f"{health.EQUAL_REWARDS_ADVICE}.",
      )
    return ok(sentence)


def _example_questions(
  source: parts.Source, config: config_lib.ExperimentConfig
) -> Sequence[types.Question]:
  """Returns some questions of a run, to evaluate or else to train on.

  Raises:
    ValueError: the source has neither.
  """
  with contextlib.suppress(ValueError):
    datasets = config.evaluation.datasets
    if questions := source.evaluation_questions(datasets, _QUERIES)[:_QUERIES]:
      return questions
  return list(source.questions(config.data.split, _QUERIES, config.seed))


def check_accelerator(a: architecture_lib.Architecture) -> Finding:
  """Checks that a large policy has an accelerator."""
  if reason := jax_setup.cpu_problem(a):
    return problem(
      reason,
      "install JAX for the accelerator (docs/one_gpu.md), or pass "
      "--allow_cpu to the command that computes.",
    )
  return ok("the policy suits the devices")


def check_space(folder: pathlib.Path, needed: int, advice: str) -> Finding:
  """Checks that a folder can be written to and has space.

  Args:
    folder: a folder, which may be missing.
    needed: bytes that will be written to it.
    advice: remedy, if they do not fit.
  """
  nearest = _nearest(folder)
  try:
    tempfile.TemporaryFile(dir=nearest).close()
  except OSError as error:
    return problem(f"{nearest}: cannot be written to ({error})", advice)
  free = shutil.disk_usage(nearest).free
  space = f"{folder}: {size(max(needed, 0))} needed, {size(free)} are free"
  if needed > free:
    return problem(space, advice)
  return ok(space)


async def _server(
  server: server_lib.Server, *, samples: bool = True
) -> Finding:
  """Checks that a server answers and, if it samples, has what a run needs."""
  try:
    await server.healthy()
    if not samples:
      return ok(f"{server.url} answers")
    server.info = await server.describe()
    return ok(f"{server.url} answers, in contexts of {server.context()} tokens")
  except types.EngineError as error:
    return problem(str(error))


def check_answers(
  retriever: types.Retriever,
  questions: Sequence[types.Question],
  config: config_lib.EpisodeConfig,
) -> Iterator[Finding]:
  """Checks a retriever's answers to some questions, one after the other.

  Args:
    retriever: the retriever.
    questions: questions that are its queries.
    config: has the number of passages and the deadline of a search.

  Yields:
    One finding.
  """
  slowest = 0.0
  empty = 0
  max_seconds = config.search_deadline

  async def search(request: types.SearchRequest) -> Sequence[types.Passage]:
    async with turns.Limit(max_seconds, max_seconds):  # A run waits for longer.
      return await retriever.search(request)

  for question in questions:
    request = types.SearchRequest(question.text, config.top_k, question.corpus)
    start = time.monotonic()
    try:
      passages = loop.run(search(request))
    except (types.RetrievalError, TimeoutError) as error:
      yield problem(str(error) or f"no answer within {max_seconds:g} seconds.")
      return
    slowest = max(slowest, time.monotonic() - start)
    if not passages:
      empty += 1
  sentence = (
    f"{len(questions)} searches: slowest {slowest * 1e3:.1f} ms, {empty} "
    "without a passage"
  )
  if empty == len(questions):
    yield problem(
      sentence, "see that it searches the corpus that the questions are about."
    )
  elif slowest > max_seconds / 2:
    yield warning(
      sentence,
      "give it more devices, or raise episode.search_deadline, now "
      f"{max_seconds:g} seconds.",
    )
  else:
    yield ok(sentence)


def _nearest(folder: pathlib.Path) -> pathlib.Path:
  """Returns the folder, or its nearest parent that exists."""
  folder = folder.absolute()
  parent = next(path for path in (folder, *folder.parents) if path.exists())
  if not parent.is_dir():
    raise ValueError(
      f"{folder}: found that {parent} is not a folder, expected a folder or a "
      "place where one can be made; name another."
    )
  return parent


def check_texts(
  codec: tokenizer_lib.Tokenizer, config: config_lib.ExperimentConfig
) -> Iterator[Finding]:
  """Checks the tags, the prompt and the tokens that end a turn."""
  environment = systems.of_episode(config.episode)
  budget = config.curriculum.max_budget
  missing_tags = validation.lost_tags(codec, protocol.tags())
  if missing_tags:
    yield problem(
      f"the tokenizer loses {', '.join(missing_tags)}",
      "take a tokenizer that writes plain text as it is; tags that are special "
      "tokens of it must be ordinary ones.",
    )
  validation.check_prompts(
    [_QUESTION],
    codec,
    config=config.episode,
    environment=environment,
    max_budget=budget,
  )
  text, ids = episode.prompt(
    _QUESTION,
    budget=budget,
    scaffold=False,
    environment=environment,
    codec=codec,
  )
  yield ok(
    f"the tags survive the tokenizer; a prompt has {len(ids)} tokens and ends "
    f"in {text[-_PROMPT_END:]!r}"
  )
  if codec.hf.chat_template:
    text_after_question = codec.render(_QUESTION.text)[0].rpartition(
      _QUESTION.text
    )[2]
    closing = [
      token
      for token in codec.control_tokens
      if text_after_question.lstrip().startswith(token)
    ]
    template_end = max(closing, key=len, default="")
    # gpt-oss ends answers otherwise than questions; its template has both ends.
    text = template_end + codec.hf.get_chat_template()
    template_tokens = [token for token in codec.control_tokens if token in text]
    template_ids = set(codec.hf.convert_tokens_to_ids(template_tokens))
    if template_end and not codec.end_of_turn_ids & template_ids:
      yield warning(
        f"the chat template ends messages with {template_end}, which ends no "
        "turn",
        "add its id to eos_token_id in generation_config.json.",
      )


class Footprint(NamedTuple):
  """Bytes that a run writes; `anysearch plan` says what its devices hold.

  Attributes:
    disk: of the run folder: the checkpoints that exist at a time, the export,
      and the recorded trajectories, if all have the maximum length.
    handed: of the current weights, which servers read.
  """

  disk: int
  handed: int


def footprint(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> Footprint:
  """Returns the footprint of a run; `a` is without adapters."""
  a = lora.attach(a, config.lora)
  trained_count = weights.count(table.trainable_rows(a))
  base_count = weights.count(table.base_rows(a))
  optimized_count = trained_count
  if config.objective.has_critic:
    optimized_count += weights.count(table.critic_rows(a))
  checkpoint_bytes = (
    3 * _MASTER_BYTES * optimized_count
  )  # Weights and both moments.
  checkpoints = config.checkpoint
  curriculum = config.curriculum
  recorded_rollouts = math.ceil(curriculum.rollouts / config.save_every)
  tokens = config.questions * config.group * config.episode.max_context
  export_bytes = base_count * jnp.dtype(checkpoints.export_dtype).itemsize
  if config.lora.rank:
    export_bytes += _MASTER_BYTES * trained_count
  return Footprint(
    disk=checkpoint_bytes * (checkpoints.keep_last + checkpoints.keep_best + 1)
    + export_bytes
    + (recorded_rollouts + 1) * tokens * _TOKEN_BYTES,
    handed=base_count * jnp.dtype(config.compute_dtype).itemsize,
  )
