"""What a run needs: a policy that carries the protocol, devices, space, data.

Each check is a method of `Checks` and says what it found. Those of the policy
say whether its tokenizer and its chat template support the protocol.
"""

from __future__ import annotations

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

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.data import evidence, prepared
from anysearch_jax.environment import protocol
from anysearch_jax.host import loop, run_lock, turns
from anysearch_jax.launch import jax_setup, parts, policies, retrievers
from anysearch_jax.launch.findings import (
  Finding,
  Look,
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
from anysearch_jax.rollout import episode
from anysearch_jax.rollout.servers import fleet as fleet_lib
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import sglang
from anysearch_jax.rollout.servers import weights as weights_lib
from anysearch_jax.training import placement, validation

_QUERIES = 10
_QUESTION = types.Question("doctor", "Which river flows through Paris?", ("",))
_BEFORE_TAGS = ("a ", "a.", "a\n", "a", "?")
_MASTER = 4  # Bytes of a float32.
_TOKEN = 6  # Bytes of a token's text in a record; enough for most languages.


@dataclasses.dataclass
class Checks:
  """The checks of a run.

  Attributes:
    config: its configuration.
    folder: its folder.
    processes: number of processes like this one that will train.
    ask_web: whether to send a query to a web search engine.
  """

  config: config_lib.ExperimentConfig
  folder: pathlib.Path
  processes: int = 1
  ask_web: bool = False

  def all(self) -> Iterator[tuple[str, Look]]:
    """Yields the checks by name; each before the next one is asked for."""
    served = self.config.engine.kind == "sglang"
    yield "config", self.configuration
    yield "policy", self.policy
    # What needs the policy reports no second problem if it is missing.
    if "_policy" in vars(self):
      yield "texts", lambda: texts(self._policy[1], self.config)
      yield "mesh", self.mesh
      yield "accelerator", lambda: accelerated(self._policy[0])
      yield "disk", self.disk
      if served:
        yield "weights", self.handed_over
    yield "output", self.output
    yield "data", self.data
    yield "retriever", self.retriever
    if served:
      yield "servers", self.servers

  @functools.cached_property
  def _policy(
    self,
  ) -> tuple[architecture_lib.Architecture, tokenizer_lib.Tokenizer]:
    """Architecture and tokenizer; of the weights only the headers are read."""
    a, codec = policies.describe(self.config)
    held = tensor_files.headers(self.config.policy)
    wanted = {name for row in table.base_rows(a) for name in row.tensor_names()}
    if missing := sorted(wanted - held.keys()):
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
    config, m = self.config, self.config.mesh
    if self.processes > 1:
      return ok(f"{m}, of {self.processes} processes; not compared")
    placement.check_devices(self._policy[0], config)
    return ok(f"{m} fits this process")

  def disk(self) -> Finding:
    """Checks the space for checkpoints, the export and trajectories."""
    there = sum(
      path.stat().st_size
      for path in (self.folder / "checkpoints").rglob("*")
      if path.is_file()
    )
    return room(
      self.folder,
      footprint(self._policy[0], self.config).disk - there,
      "name an --output with more room, or lower checkpoint.keep_last.",
    )

  def handed_over(self) -> Finding:
    """Checks the space for the weights that SGLang servers read."""
    c = self.config.sglang
    return room(
      weights_lib.folder(c.weights, c.urls),
      footprint(self._policy[0], self.config).handed,
      "give it more (docker run --shm-size, mount -o remount,size=...), or "
      "name another folder in sglang.weights.",
    )

  def output(self) -> Finding:
    """Checks that this run, and no other, can write to the folder."""
    if who := run_lock.holder(self.folder / run_lock.NAME):
      return problem(
        f"{self.folder}: {who} writes to it",
        "wait for it, or name another --output.",
      )
    return room(
      self.folder, 0, "name another --output, or give this user the right to."
    )

  def data(self) -> Iterator[Finding]:
    """Checks the questions; reads prepared ones whole and compares hashes."""
    config, path = self.config, self.config.data.path
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
        "launch.evaluate has nothing to play",
        "prepare sets with a dev or test split (launch.prepare_data "
        "--sets=...).",
      )

  def retriever(self) -> Iterator[Finding]:
    """Checks that the retriever answers, and how fast; writes no log."""
    config, c = self.config, self.config.retrieval
    if c.log_mode == "strict":
      yield ok(f"log {c.log}: nothing else is asked")
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
    # Simulated and refined passages need the context of an episode.
    plain = {"log": "", "log_mode": "record", "simulated": "", "refined": ""}
    bare = {**plain, "model": config_lib.TextModelConfig()}
    live = config_lib.changed(config, retrieval=bare)
    made = retrievers.make(live, lexical)
    # What costs money is asked on demand.
    web = c.kind == "web" or (c.kind == "mcp" and c.price > 0)
    if web and not self.ask_web:
      named = c.web or f"MCP tool {c.mcp.tool}".rstrip()
      yield ok(f"{named}: its key is there; not asked (see --ask_web)")
      return
    yield from asked(made, questions[:1] if web else questions, config.episode)

  def servers(self) -> Iterator[Finding]:
    """Checks that the SGLang servers, and the router of turns, answer."""
    c = self.config.sglang
    client, make = server_lib.connect(sglang.SglangServer, c, Counter())
    try:
      urls: Sequence[str] = c.urls
      if c.gateway:
        urls = loop.run(fleet_lib.listed_workers(make(c.gateway)))
        if not urls:
          yield problem(f"{c.gateway} lists no SGLang server", "add one.")
      routers = [c.router] if c.router else []
      for url in [*urls, *routers]:
        yield loop.run(_server(make(url)))
    except types.EngineError as error:
      yield problem(str(error))
    finally:
      loop.run(server_lib.close(client))


def accelerated(a: architecture_lib.Architecture) -> Finding:
  """Checks that a policy of full size has an accelerator."""
  if found := jax_setup.cpu_problem(a):
    return problem(
      found,
      "install JAX for the accelerator (docs/one_gpu.md), or pass "
      "--allow_cpu to the command that computes.",
    )
  return ok("the policy suits the devices")


def room(folder: pathlib.Path, needed: int, advice: str) -> Finding:
  """Checks that a folder can be written to and has space.

  Args:
    folder: which may be missing.
    needed: bytes that will be written there.
    advice: what to do where they do not fit.
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


async def _server(server: server_lib.Server) -> Finding:
  try:
    await server.healthy()
  except types.EngineError as error:
    return problem(str(error))
  return ok(f"{server.url} answers")


def asked(
  made: types.Retriever,
  questions: Sequence[types.Question],
  config: config_lib.EpisodeConfig,
) -> Iterator[Finding]:
  """Checks a retriever's answers to some questions, one after the other."""
  slowest = 0.0
  empty = 0
  most = config.search_deadline

  async def search(request: types.SearchRequest) -> Sequence[types.Passage]:
    async with turns.Limit(most, most):  # A run waits for longer.
      return await made.search(request)

  for question in questions:
    request = types.SearchRequest(question.text, config.top_k, question.corpus)
    start = time.monotonic()
    try:
      found = loop.run(search(request))
    except (types.RetrievalError, TimeoutError) as error:
      yield problem(str(error) or f"no answer within {most:g} seconds.")
      return
    slowest = max(slowest, time.monotonic() - start)
    if not found:
      empty += 1
  said = (
    f"{len(questions)} searches: slowest {slowest * 1e3:.1f} ms, {empty} "
    "without a passage"
  )
  if empty == len(questions):
    yield problem(
      said, "see that it searches the corpus that the questions are about."
    )
  elif slowest > most / 2:
    yield warning(
      said,
      f"give it more devices, or raise episode.search_deadline, now {most:g} "
      "seconds.",
    )
  else:
    yield ok(said)


def _nearest(folder: pathlib.Path) -> pathlib.Path:
  """Returns the folder, or its nearest parent that exists."""
  folder = folder.absolute()
  found = next(path for path in (folder, *folder.parents) if path.exists())
  if not found.is_dir():
    raise ValueError(
      f"{folder}: found that {found} is not a folder, expected a folder or a "
      "place where one can be made; name another."
    )
  return found


def texts(
  codec: tokenizer_lib.Tokenizer, config: config_lib.ExperimentConfig
) -> Iterator[Finding]:
  """Checks the tags, the stop texts and the prompt."""
  tags = [f"<{slash}{name}>" for name in protocol.TAGS for slash in ("", "/")]

  def survives(tag: str) -> bool:
    said = (f"{before}{tag} b" for before in _BEFORE_TAGS)
    return all(tag in codec.decode(codec.encode(text)) for text in said)

  lost = [tag for tag in tags if not survives(tag)]
  if lost:
    yield problem(
      f"the tokenizer loses {', '.join(lost)}",
      "take a tokenizer that writes plain text as it is; tags that are special "
      "tokens of it must be ordinary ones.",
    )
  else:
    yield ok(f"all {2 * len(protocol.TAGS)} tags survive the tokenizer")
  yield from _prompt(codec, config)


def _prompt(
  codec: tokenizer_lib.Tokenizer, config: config_lib.ExperimentConfig
) -> Iterator[Finding]:
  """Checks the prompt of a question and the tokens that end a turn."""
  ends = codec.end_of_turn_ids
  if not ends:
    yield problem(
      "no token ends a turn",
      "name eos_token_id in generation_config.json of the policy's folder.",
    )
  environment = systems.of_episode(config.episode)
  budget = config.curriculum.max_budget
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
    scaffold=True,
    environment=environment,
    codec=codec,
  )
  if _QUESTION.text not in text:
    yield problem(
      "the chat template leaves the question out of the prompt",
      "look at chat_template in the policy's folder.",
    )
  else:
    yield ok(f"a prompt of {len(ids)} tokens")
  if codec.hf.chat_template:
    after = codec.render(_QUESTION.text)[0].rpartition(_QUESTION.text)[2]
    closing = [t for t in codec.control_tokens if after.lstrip().startswith(t)]
    end = max(closing, key=len, default="")
    # gpt-oss ends answers otherwise than questions; its template has both ends.
    text = end + codec.hf.get_chat_template()
    named = [token for token in codec.control_tokens if token in text]
    if end and not ends & {*codec.hf.convert_tokens_to_ids(named)}:
      yield warning(
        f"the chat template ends messages with {end}, which ends no turn",
        "add its id to eos_token_id in generation_config.json.",
      )


class Footprint(NamedTuple):
  """Bytes that a run writes; `launch.plan` says what its devices hold.

  Attributes:
    disk: the run's folder: the most checkpoints that exist at a time, the
      export, and the recorded trajectories, if all have the maximum length.
    handed: the current weights, which SGLang servers read.
  """

  disk: int
  handed: int


def footprint(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> Footprint:
  """Returns the footprint of a run; `a` is without adapters."""
  a = lora.attach(a, config.lora)
  trained = weights.count(table.trainable_rows(a))
  base = weights.count(table.base_rows(a))
  learned = trained
  if config.objective.has_critic:
    learned += weights.count(table.critic_rows(a))
  checkpoint = 3 * _MASTER * learned  # Weights and both moments.
  keep = config.checkpoint
  curriculum = config.curriculum
  recorded = math.ceil(curriculum.rollouts / config.save_every)
  tokens = config.questions * config.group * config.episode.max_context
  export = base * jnp.dtype(keep.export_dtype).itemsize
  if config.lora.rank:
    export += _MASTER * trained
  return Footprint(
    disk=checkpoint * (keep.keep_last + keep.keep_best + 1)
    + export
    + (recorded + 1) * tokens * _TOKEN,
    handed=base * jnp.dtype(config.compute_dtype).itemsize,
  )
