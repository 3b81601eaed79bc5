r"""Trains on one node: a retriever, servers on some GPUs, and the trainer.

    anysearch node --config=configs/qwen2_5_7b.py --dry_run
    anysearch node --config=configs/qwen2_5_7b.py --output=runs/x

`mesh.trainer` and `mesh.rollout` name the GPUs, which must differ, unless
servers and trainer take turns on them (`servers.colocated`). Servers are
started if `engine.kind` names their kind, or if `mesh.rollout` has GPUs that
are not in `mesh.trainer`, unless `--config.engine.kind=jax` is given. They are
SGLang's unless `--server=vllm` or `engine.kind` says otherwise.
`launch/serve_sglang.sh` or `launch/serve_vllm.sh` starts one; PYTHON in the
environment is an interpreter with that engine, or a script that runs it in a
container, and STATIC the share of a GPU's memory for weights and KV cache. An
index (`retrieval.kind`) is served by a process on the CPU. Each process logs to
`<name>.log` in `<output>/logs`.

A signal or a failing process stops the trainer first, see `supervisor`. A
server that ends is restarted at most five times, and the trainer waits for it.
The exit code is that of the trainer, or 1 if another process failed. To use
servers of other nodes, pass `--servers=0 --config.servers.urls=...`.

    anysearch cluster --config=configs/qwen2_5_7b.py --nodes=4 \
        --output=/shared/run --dry_run
    anysearch cluster --config=configs/qwen2_5_7b.py --target=jobset \
        --nodes=4 --output=/shared/run

writes what a cluster starts on several nodes: an sbatch script, a JobSet or a
SkyPilot task, see docs/cluster.md and `launch/cluster.py`.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import captured_stderr
from anysearch_jax.launch import (
  cluster,
  jax_setup,
  run_history,
  shipped,
  supervisor,
)
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.rollout.servers import sglang, vllm


class _Starter(NamedTuple):
  """How a server is started.

  Attributes:
    script: starts it.
    python: its interpreter, unless PYTHON names another.
    lending_flag: makes it able to lend its memory.
    adapter_flags: returns the flags for adapters of a rank and targets.
  """

  script: str
  python: str
  lending_flag: str
  adapter_flags: Callable[[int, Sequence[str]], list[str]]


_STARTERS = {
  "sglang": _Starter(
    "launch/serve_sglang.sh",
    ".venv-sglang/bin/python",
    "--enable-memory-saver",
    sglang.adapter_flags,
  ),
  "vllm": _Starter(
    "launch/serve_vllm.sh",
    ".venv-vllm/bin/python",
    "--enable-sleep-mode",
    vllm.adapter_flags,
  ),
}
_RESTARTS = 5  # Per server; a server that ends more often is broken.
# Flags that the command of a role has in another form, or not at all.
_NOT_PASSED = ("config", "set_config", "output", "dry_run")
_CPU_ENV = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


def run_parts(
  config: config_lib.ExperimentConfig,
  trainer: Sequence[str],
  *,
  serves: bool,
  servers: int | None = None,
  port: int = 30000,
  retriever_port: int = 8000,
) -> tuple[list[supervisor.Part], supervisor.Part]:
  """Returns the parts of a run on this node.

  Args:
    config: the resolved configuration, before the overrides added here.
    trainer: the command of the trainer, with the flags that make `config`.
    serves: whether servers sample; otherwise the trainer itself does.
    servers: number of servers to start, which share the GPUs equally; None: one
      for every two GPUs, or one for each GPU that the trainer shares.
    port: port of the first server; the others take the next ones.
    retriever_port: port of the retriever.

  Returns:
    (services, trainer): the retriever and the servers, then the trainer.

  Raises:
    ValueError: the GPUs cannot be divided.
  """
  services = []
  overrides: dict[str, str] = {}
  env: dict[str, str] = {}
  if config.retrieval.kind == "index" and not config.agents.program:
    retriever = _retriever(config.retrieval, retriever_port)
    services.append(retriever)
    overrides["retrieval.kind"] = "http"
    overrides["retrieval.url"] = retriever.health.removesuffix("/health")
    overrides["retrieval.index"] = ""
    overrides["retrieval.encoder"] = ""
  if serves:
    trainer_gpus = config.mesh.trainer or tuple(range(config.mesh.size))
    rollout = config.mesh.rollout
    if config.servers.colocated:
      rollout = rollout or trainer_gpus
      servers = len(rollout) if servers is None else servers
      env |= jax_setup.SHARED_MEMORY
    shares = shared_gpus(rollout, servers)
    if shares and not env and set(trainer_gpus) & set(rollout):
      raise ValueError(
        f"mesh.rollout: found {rollout} for the servers and {trainer_gpus} for "
        "the trainer; expected GPUs that are not the trainer's, or "
        "servers.colocated=true, with which they take turns."
      )
    urls = list(config.servers.urls)
    if shares:
      ports = range(port, port + len(shares))
      urls = [f"http://127.0.0.1:{number}" for number in ports]
    for index, gpus in enumerate(shares):
      part = server(
        config,
        name=f"server-{index}",
        gpus=_indices(gpus),
        size=len(gpus),
        port=str(port + index),
      )
      services.append(part)
    overrides["engine.kind"] = server_kind(config)
    overrides["servers.urls"] = ",".join(urls)
    # CUDA_VISIBLE_DEVICES hides the other GPUs, so the trainer's count from 0.
    overrides["mesh.trainer"] = _indices(range(len(trainer_gpus)))
    overrides["mesh.rollout"] = "()"
    env = {"CUDA_VISIBLE_DEVICES": _indices(trainer_gpus)} | env
  override_flags = [
    f"--config.{name}={value}" for name, value in overrides.items()
  ]
  return services, supervisor.Part("trainer", (*trainer, *override_flags), env)


def samples_by_servers(
  config: config_lib.ExperimentConfig, assignments: Sequence[str]
) -> bool:
  """Returns whether a configuration uses servers; see the module.

  `assignments` are the overrides of the command line, as `path=value`.
  """
  is_given = any(text.startswith("engine.kind=") for text in assignments)
  separate = bool(set(config.mesh.rollout) - set(config.mesh.trainer))
  return config.engine.has_servers or (separate and not is_given)


def server_kind(config: config_lib.ExperimentConfig) -> str:
  """Returns the kind of the servers of a configuration that uses some."""
  return config.engine.kind if config.engine.has_servers else "sglang"


def _retriever(
  retrieval: config_lib.RetrievalConfig, port: int
) -> supervisor.Part:
  """Returns the service of an index."""
  module = "anysearch_jax.launch.serve_retriever"
  index = f"--index={retrieval.index}"
  command = [*shipped.python(), "-m", module, index, f"--port={port}"]
  if retrieval.encoder:
    command.append(f"--encoder={retrieval.encoder}")
  health = f"http://127.0.0.1:{port}/health"
  return supervisor.Part("retriever", tuple(command), _CPU_ENV, health=health)


def shared_gpus(
  gpus: tuple[int, ...], count: int | None
) -> list[tuple[int, ...]]:
  """Divides the GPUs equally among `count` servers; None: two for each."""
  if count == 0:
    return []
  if not gpus:
    raise ValueError(
      "mesh.rollout: found no GPUs for the servers, expected some beside the "
      "trainer's, or --servers=0 and servers of other nodes in servers.urls."
    )
  if count is None:
    count = max(1, len(gpus) // 2)
  if len(gpus) % count:
    raise ValueError(
      f"--servers: found {count} for the {len(gpus)} GPUs of mesh.rollout "
      f"{gpus}, expected a number that divides them."
    )
  size = len(gpus) // count
  return [gpus[i : i + size] for i in range(0, len(gpus), size)]


def server(
  config: config_lib.ExperimentConfig,
  *,
  name: str,
  gpus: str,
  size: int,
  port: str,
  host: str = "127.0.0.1",
) -> supervisor.Part:
  """Returns a server.

  Args:
    config: configuration of the run.
    name: name of the part.
    gpus: the numbers of its GPUs, as 4,5.
    size: number of its GPUs.
    port: port to listen at.
    host: address to listen at.
  """
  starter = _STARTERS[server_kind(config)]
  script = shipped.find(starter.script)
  command = [script, config.policy, port, "--dtype", config.compute_dtype]
  if config.servers.colocated:
    command.append(starter.lending_flag)
  if config.objective.router != "own":
    command.append("--enable-return-routed-experts")
  if config.lora.rank:
    command += starter.adapter_flags(config.lora.rank, config.lora.targets)
  env = {
    "CUDA_VISIBLE_DEVICES": gpus,
    "HOST": host,
    "PYTHON": os.environ.get("PYTHON") or shipped.find(starter.python),
    "TP": str(size),
    "STATIC": os.environ.get("STATIC", "0.6"),
    "CONTEXT": str(config.episode.max_context),
  }
  if config.servers.deltas:
    env["DELTAS"] = config.servers.weights
  health = f"http://127.0.0.1:{port}/health"
  # The trainer waits for a restarted server and sends it the weights.
  return supervisor.Part(
    name, tuple(command), env, health=health, restarts=_RESTARTS
  )


def _indices(values: Sequence[int]) -> str:
  return ",".join(map(str, values))


def trainer_config(
  config: config_lib.ExperimentConfig, *, serves: bool
) -> config_lib.ExperimentConfig:
  """Returns a configuration as the trainer has it, except for its addresses."""
  if not serves:
    return config
  return config_lib.changed(
    config,
    engine={"kind": server_kind(config)},
    servers={"urls": config.servers.urls or ("http://node:30000",)},
    mesh={"trainer": (), "rollout": ()},
  )


def define_flags() -> None:
  launch_flags.define_training()
  cluster.define_flags()
  flags.DEFINE_integer(
    "servers",
    None,
    "Servers to start on a node, which share mesh.rollout equally; "
    "default: one for every two GPUs, or one for each GPU that the trainer "
    "shares. 0: start none and use those of servers.urls.",
    lower_bound=0,
  )
  flags.DEFINE_enum(
    "server",
    None,
    ["sglang", "vllm"],
    "Kind of these servers; default: engine.kind, or SGLang's.",
  )
  flags.DEFINE_integer(
    "port",
    30000,
    "TCP port of the first server; the others take the next ones.",
    1,
    65535,
  )
  flags.DEFINE_integer(
    "retriever_port",
    8000,
    "TCP port of the retriever that serves retrieval.index.",
    1,
    65535,
  )
  flags.DEFINE_float(
    "deadline",
    1800,
    "Seconds within which all servers must be ready; raise it for large "
    "policies on slow disks.",
    0,
  )


def _flags_to_pass(module: str) -> list[str]:
  """Returns the flags of a module that are given, for another command."""
  f = flags.FLAGS
  present_flags = [
    flag for flag in f.flags_by_module_dict()[module] if flag.present
  ]
  return sorted(
    f"--{flag.name}={flag.value}"
    for flag in present_flags
    if flag.name not in _NOT_PASSED
  )


def main(argv: Sequence[str]) -> int:
  config = launch_flags.read_config()
  f = flags.FLAGS
  if f.server:
    if any(text.startswith("engine.kind=") for text in f.set_config):
      raise ValueError(
        f"--server={f.server}: found --config.engine.kind too, expected one of "
        "them."
      )
    config = config_lib.changed(config, engine={"kind": f.server})
  output = launch_flags.run_folder(config, f.output)
  arguments = [
    f"--config={f.config}",
    *(f"--config.{assignment}" for assignment in f.set_config),
    f"--output={output}",
    *_flags_to_pass(launch_flags.__name__),
  ]
  serves = samples_by_servers(config, f.set_config)
  if f.target and serves and server_kind(config) == "vllm":
    raise ValueError(
      "--target: found vLLM servers, expected SGLang's: jobs of a cluster do "
      "not start vLLM. Start its servers yourself and name them in "
      "servers.urls of a training."
    )
  training = 1
  if f.nodes > 1 and not f.target:
    raise ValueError(f"--nodes: found {f.nodes}, expected --target with it.")
  if f.nodes > 1:
    has_server_nodes = serves and f.servers != 0  # Nodes with servers.
    training = cluster.trainer_nodes(config.mesh, serves=has_server_nodes)
  with captured_stderr.standard_error():  # JAX warns of missing plugins.
    import jax

  # A reward function that is tried may compute; the GPUs are for the parts.
  jax.config.update("jax_platforms", "cpu")
  from anysearch_jax.methods import systems  # Imports JAX.

  # Checked here, because servers take long to start.
  trained_config = trainer_config(config, serves=serves)
  systems.validate(trained_config, processes=training)
  run_history.check_config(output, trained_config, allow=f.allow_changes)
  if f.nodes > 1:
    shares = shared_gpus(tuple(range(f.gpus)), f.servers if serves else 0)
    part = server(
      config,
      name="server",
      gpus="${gpus}",
      size=len(shares[0]) if shares else 0,
      port="${port}",
      host="0.0.0.0",  # noqa: S104  Other nodes ask.
    )
    cluster.write(
      config,
      arguments,
      output,
      training=training,
      server=part if serves else None,
      shares=shares,
    )
    return 0
  services, main_part = run_parts(
    config,
    [*shipped.python(), "-m", "anysearch_jax.launch.train", *arguments],
    serves=serves,
    servers=f.servers,
    port=f.port,
    retriever_port=f.retriever_port,
  )
  if f.target:  # One node, on which this command runs.
    module = f.find_module_defining_flag("servers")
    assert module is not None  # `define_flags` was called.
    arguments += _flags_to_pass(module)
    cluster.write(config, arguments, output)
    return 0
  logs = output / "logs"
  if f.dry_run:
    # The commands, in a form that a user can run by hand.
    for part in (*services, main_part):
      ready = f"; ready when {part.health} answers" if part.health else ""
      print(f"# {part.name}, log {logs / part.name}.log{ready}")
      print(part.shell_text())
    return 0
  if not pathlib.Path(config.policy, "config.json").is_file():
    raise ValueError(
      f"policy: found no config.json in {config.policy!r}, expected a Hugging "
      "Face folder; name it with --config.policy."
    )
  return supervisor.run(services, main_part, logs=logs, deadline=f.deadline)


if __name__ == "__main__":
  define_flags()
  launch_flags.run(
    main,
    resumes=True,
    first_flags=(
      "config",
      "output",
      "dry_run",
      "servers",
      "server",
      "port",
      "target",
      "nodes",
      "gpus",
      "allow_changes",
      "deadline",
    ),
  )
