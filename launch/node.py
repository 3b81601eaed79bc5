r"""Trains on one node: a retriever, SGLang servers on some GPUs, the trainer.

    python -m launch.node --config=configs/qwen2_5_7b.py --dry_run
    python -m launch.node --config=configs/qwen2_5_7b.py \
        --sglang_python=.venv-sglang/bin/python --output=runs/qwen2_5_7b

`mesh.trainer` and `mesh.rollout` name the GPUs, which must differ, unless
servers and trainer take turns on them (`sglang.colocated`). SGLang servers are
started if `engine.kind` is `sglang`, or if `mesh.rollout` has GPUs that are not
in `mesh.trainer`, unless `--config.engine.kind=jax` is given. An index
(`retrieval.kind`) is served by a process on the CPU. Each process logs to
`<name>.log` in `--log_dir`, by default `<output>/logs`.

A signal or a failing process stops the trainer first, see `supervisor`. An
SGLang server that ends is restarted at most five times, and the trainer waits
for it. The exit code is that of the trainer, or 1 if another process failed. To
use servers of other nodes, pass `--servers=0 --config.sglang.urls=...`.

    python -m launch.node --config=configs/qwen2_5_7b.py --target=slurm \
        --nodes=4 --output=/shared/run --dry_run

writes what a cluster starts on several nodes: an sbatch script, a JobSet or a
SkyPilot task, see docs/cluster.md and `launch/cluster.py`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Mapping, Sequence

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.launch import (
  cluster,
  jax_setup,
  run_history,
  shipped,
  supervisor,
)
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.rollout.servers import sglang

SERVER = (
  "env HOST={host} PYTHON={python} TP={tp} STATIC={memory} "
  "CONTEXT={context} launch/serve_sglang.sh {model} {port} --dtype {dtype}"
)
_TRAINER = "anysearch_jax.launch.train"
_SERVER_PYTHON = ".venv-sglang/bin/python"
_RESTARTS = 5  # Per server; a server that ends more often is broken.
# Seconds within which the servers and the retriever of other nodes may start.
_STARTED = 1800.0
_EVERYWHERE = "0.0.0.0"  # noqa: S104  Other nodes ask.
# What starts Python on the nodes of a target; elsewhere as here.
_PYTHONS = {"jobset": ["python"], "skypilot": [".venv/bin/python"]}
# Flags that a job of one node is given too.
_OF_NODE = (
  *("servers", "sglang_python", "port", "retriever_port", "memory"),
  *("server_command", "deadline"),
)
# Flags that the trainer is not given as they are.
_RESOLVED = ("config", "set_config", "output")
_CPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


@dataclasses.dataclass(frozen=True)
class Servers:
  """Settings of the SGLang servers that are started on a node.

  Attributes:
    count: number of servers, which share the GPUs equally; None: one server
      for every two GPUs, or for each that it shares with the trainer.
    port: port of the first server, on 127.0.0.1; the others follow it.
    memory: share of a GPU's memory for weights and KV cache.
    python: interpreter of an environment with SGLang.
    command: template of the command. It may use the names in `SERVER`, and
      `{gpus}` for the server's GPUs, as 4,5.
  """

  count: int | None = None
  port: int = 30000
  memory: float = 0.6
  python: str = _SERVER_PYTHON
  command: str = SERVER


def parts_of(
  config: config_lib.ExperimentConfig,
  trainer: Sequence[str],
  *,
  servers: Servers | None,
  retriever_port: int = 8000,
) -> tuple[list[supervisor.Part], supervisor.Part]:
  """Returns the parts of a run on this node.

  Args:
    config: as resolved, before the overrides added here.
    trainer: the command of the trainer, with the flags that make `config`.
    servers: what samples; None: the trainer itself.
    retriever_port: port of the retriever.

  Returns:
    (services, trainer): the retriever and the servers, then the trainer.

  Raises:
    ValueError: the GPUs cannot be divided, or the template is wrong.
  """
  services = []
  overrides: dict[str, str] = {}
  if config.retrieval.kind == "index":
    services.append(
      _retriever(shipped.python(), config.retrieval, retriever_port)
    )
    overrides |= _asks(f"http://127.0.0.1:{retriever_port}")
  if servers is None:
    command = (*trainer, *_flags(overrides))
    return services, supervisor.Part("trainer", command)
  mesh = config.mesh
  trains = mesh.trainer or tuple(range(mesh.size))
  rollout, count, env = mesh.rollout, servers.count, {}
  if config.sglang.colocated:
    rollout = rollout or trains
    count = len(rollout) if count is None else count
    env = jax_setup.SHARED_MEMORY
  shares = _shares(rollout, count)
  if shares and not env and set(trains) & set(rollout):
    raise ValueError(
      f"mesh.rollout: found {rollout} for the servers and {trains} for the "
      "trainer; expected GPUs that are not the trainer's, or "
      "sglang.colocated=true, with which they take turns."
    )
  urls = list(config.sglang.urls)
  if shares:
    urls = [f"http://127.0.0.1:{servers.port + i}" for i in range(len(shares))]
  for index, gpus in enumerate(shares):
    part = _server(
      config,
      servers,
      name=f"server-{index}",
      gpus=_indices(gpus),
      size=len(gpus),
      port=str(servers.port + index),
    )
    services.append(part)
  overrides |= {
    "engine.kind": "sglang",
    "sglang.urls": ",".join(urls),
    # CUDA_VISIBLE_DEVICES hides the other GPUs, so the trainer's count from 0.
    "mesh.trainer": _indices(range(len(trains))),
    "mesh.rollout": "()",
  }
  return services, supervisor.Part(
    "trainer",
    (*trainer, *_flags(overrides)),
    {"CUDA_VISIBLE_DEVICES": _indices(trains)} | env,
  )


def roles_of(
  config: config_lib.ExperimentConfig,
  words: Sequence[str],
  *,
  output: pathlib.Path,
  python: Sequence[str],
  servers: Servers | None,
  training: int,
  gpus: int,
) -> cluster.Roles:
  """Returns the commands of a run on several nodes, see `cluster.Roles`.

  Args:
    config: as resolved, before the overrides added here.
    words: the flags of a trainer, which make `config`.
    output: the run's folder; servers read their weights there if
      `sglang.weights` names no other folder that all nodes see.
    python: the words that start Python on a node.
    servers: of each node that samples; None: the trainers sample themselves.
    training: the number of nodes that train.
    gpus: of each node.
  """
  overrides: dict[str, str] = {}
  retriever = server = None
  shares: list[tuple[int, ...]] = []
  if config.retrieval.kind == "index":
    retriever = _retriever(
      python,
      config.retrieval,
      cluster.RETRIEVER,
      f"--host={_EVERYWHERE}",
      f"--token_variable={cluster.RETRIEVER_KEY}",
    )
    overrides |= _asks(f"http://${{retriever}}:{cluster.RETRIEVER}")
    overrides["retrieval.key_variable"] = cluster.RETRIEVER_KEY
  if servers is not None:
    shares = _shares(tuple(range(gpus)), servers.count)
    server = _server(
      config,
      servers,
      name="server",
      gpus="${gpus}",
      size=len(shares[0]) if shares else 0,
      port="${port}",
      host=_EVERYWHERE,
    )
    overrides |= {
      "engine.kind": "sglang",
      "sglang.urls": "${urls}",
      "sglang.weights": config.sglang.weights or str(output / "weights"),
      "sglang.wait": str(max(config.sglang.wait, _STARTED)),
      "sglang.api_key_variable": cluster.SGLANG_KEY,
      "mesh.trainer": "()",
      "mesh.rollout": "()",
    }
  command = (
    *python,
    "-m",
    _TRAINER,
    *words,
    f"--coordinator=${{first}}:{cluster.COORDINATOR}",
    f"--processes={training}",
    "--process=${rank}",
    f"--connect_timeout={2 * _STARTED:.0f}",
    *_flags(overrides),
  )
  return cluster.Roles(
    trainer=supervisor.Part("trainer", command),
    server=server,
    retriever=retriever,
    shares=shares,
    port=servers.port if servers is not None else 0,
  )


def samples_by_servers(
  config: config_lib.ExperimentConfig, assignments: Sequence[str]
) -> bool:
  """Returns whether a configuration uses SGLang servers; see the module.

  `assignments` are the overrides of the command line, as `path=value`.
  """
  if any(each.startswith("engine.kind=") for each in assignments):
    return config.engine.kind == "sglang"
  separate = bool(set(config.mesh.rollout) - set(config.mesh.trainer))
  return config.engine.kind == "sglang" or separate


def _flags(overrides: Mapping[str, str]) -> list[str]:
  return [f"--config.{name}={value}" for name, value in overrides.items()]


def _asks(url: str) -> dict[str, str]:
  """Returns the overrides of a run whose index is served at an address."""
  return {
    "retrieval.kind": "http",
    "retrieval.url": url,
    "retrieval.index": "",
    "retrieval.encoder": "",
  }


def _retriever(
  python: Sequence[str],
  retrieval: config_lib.RetrievalConfig,
  port: int,
  *more: str,
) -> supervisor.Part:
  """Returns the service of an index; `more` are flags of `serve_retriever`."""
  command = [
    *python,
    "-m",
    "anysearch_jax.launch.serve_retriever",
    f"--index={retrieval.index}",
    f"--port={port}",
    *more,
  ]
  if retrieval.encoder:
    command.append(f"--encoder={retrieval.encoder}")
  health = f"http://127.0.0.1:{port}/health"
  return supervisor.Part("retriever", tuple(command), _CPU, health=health)


def _shares(gpus: tuple[int, ...], count: int | None) -> list[tuple[int, ...]]:
  """Divides the GPUs equally among `count` servers."""
  if count == 0:
    return []
  if not gpus:
    raise ValueError(
      "mesh.rollout: found no GPUs for the servers, expected some beside the "
      "trainer's, or --servers=0 and servers of other nodes in sglang.urls."
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


def _server(
  config: config_lib.ExperimentConfig,
  servers: Servers,
  *,
  name: str,
  gpus: str,
  size: int,
  port: str,
  host: str = "127.0.0.1",
) -> supervisor.Part:
  """Returns a server on `size` GPUs, which are named in `gpus`."""
  values = {
    "python": shipped.find(servers.python),
    "model": config.policy,
    "port": port,
    "tp": size,
    "gpus": gpus,
    "memory": servers.memory,
    "context": config.episode.max_context,
    "dtype": config.compute_dtype,
    "host": host,
  }
  try:
    # Split into words before filling in: a folder's name may contain spaces.
    command = [
      shipped.find(word.format(**values))
      for word in shlex.split(servers.command)
    ]
    if not command:
      raise ValueError("it is empty")
  except (ValueError, LookupError) as error:
    raise ValueError(
      f"--server_command: found {servers.command!r} ({error}), expected a "
      f"command with no other names in braces than {', '.join(values)}."
    ) from error
  if config.sglang.colocated:
    command.append("--enable-memory-saver")
  if config.objective.router != "own":
    command.append("--enable-return-routed-experts")
  if config.lora.rank:
    command += sglang.adapter_flags(config.lora.rank, config.lora.targets)
  env = {"CUDA_VISIBLE_DEVICES": gpus}
  if config.sglang.deltas:
    env["DELTAS"] = config.sglang.weights
  return supervisor.Part(
    name,
    tuple(command),
    env,
    health=f"http://127.0.0.1:{port}/health",
    # The trainer waits for a restarted server and sends it the weights.
    restarts=_RESTARTS,
  )


def _indices(values: Sequence[int]) -> str:
  return ",".join(map(str, values))


def validate(
  config: config_lib.ExperimentConfig,
  trainer: supervisor.Part,
  output: pathlib.Path,
  *,
  processes: int = 1,
  allow_changes: bool = False,
) -> None:
  """Checks a configuration before servers are started for it.

  Args:
    config: the run's, without the trainer's own overrides.
    trainer: the trainer; what its shell will know is replaced by an example.
    output: the run's folder; the trainer resumes the run in it.
    processes: how many train together.
    allow_changes: whether learning settings may differ from that run's.

  Raises:
    ValueError: the configuration is invalid or does not fit the run.
  """
  import jax

  # A reward function that is tried may compute; the GPUs are for the parts.
  jax.config.update("jax_platforms", "cpu")
  prefix, urls = "--config.", "http://node:30000"
  overrides = [
    word.removeprefix(prefix).replace("${urls}", urls)
    for word in trainer.command
    if word.startswith(prefix)
  ]
  resolved = launch_flags.override(config, overrides)
  from anysearch_jax.methods import systems  # Imports JAX.

  systems.validate(resolved, processes=processes)
  run_history.check(output, resolved, allow=allow_changes)


def define_flags() -> None:
  launch_flags.define_training()
  cluster.define_flags()
  flags.DEFINE_bool("dry_run", False, "Print commands, or a file, and stop.")
  flags.DEFINE_integer(
    "servers",
    None,
    "SGLang servers on a node; default: one for two GPUs of mesh.rollout, "
    "or for each that it shares. 0: those of sglang.urls are used.",
    lower_bound=0,
  )
  flags.DEFINE_string(
    "sglang_python", _SERVER_PYTHON, "With launch/requirements-sglang.txt."
  )
  flags.DEFINE_integer("port", 30000, "Of the first server.", 1, 65535)
  flags.DEFINE_integer("retriever_port", 8000, "Of the retriever.", 1, 65535)
  flags.DEFINE_float("memory", 0.6, "Share of a GPU for weights and KV.", 0, 1)
  flags.DEFINE_string(
    "server_command", SERVER, "Template of a server's command, for containers."
  )
  flags.DEFINE_float("deadline", 1800, "Seconds for servers to be ready.", 0)
  flags.DEFINE_float(
    "grace", None, "Seconds for the trainer to stop; default: its own.", 0
  )


def main(argv: Sequence[str]) -> int:
  config, f = launch_flags.read_config(), flags.FLAGS
  output = launch_flags.run_folder(config, f.output)
  of_trainer = f.flags_by_module_dict()[launch_flags.__name__]
  passed = sorted(flag.name for flag in of_trainer if flag.present)
  words = [
    f"--config={f.config}",
    *(f"--config.{assignment}" for assignment in f.set_config),
    f"--output={output}",
  ]
  for name in ("grace", *passed):
    if f[name].present and name not in _RESOLVED:
      words.append(f"--{name}={f[name].value}")
  servers = None
  if samples_by_servers(config, f.set_config):
    servers = Servers(
      count=f.servers,
      port=f.port,
      memory=f.memory,
      python=f.sglang_python,
      command=f.server_command,
    )
  python = _PYTHONS.get(f.target) or shipped.python()
  if f.nodes > 1 and f.target:
    serves = servers is not None
    training = cluster.trainers(config.mesh, serves=serves)
    roles = roles_of(
      config,
      words,
      output=output,
      python=python,
      servers=servers,
      training=training,
      gpus=f.gpus,
    )
    validate(
      config,
      roles.trainer,
      output,
      processes=training,
      allow_changes=f.allow_changes,
    )
    cluster.write(config, roles, training=training, output=output)
    return 0
  if f.nodes > 1:
    raise ValueError(f"--nodes: found {f.nodes}, expected --target with it.")
  trainer = [*shipped.python(), "-m", _TRAINER, *words]
  services, main_part = parts_of(
    config, trainer, servers=servers, retriever_port=f.retriever_port
  )
  validate(config, main_part, output, allow_changes=f.allow_changes)
  if f.target:  # One node, on which this command runs.
    for name in _OF_NODE:
      if f[name].present:
        words.append(f"--{name}={f[name].value}")
    node = (*python, "-m", "anysearch_jax.launch.node", *words)
    roles = cluster.Roles(supervisor.Part("node", node))
    cluster.write(config, roles, training=1, output=output)
    return 0
  logs = pathlib.Path(f.log_dir or output / "logs")
  if f.dry_run:
    # As a user can run them by hand.
    for part in (*services, main_part):
      ready = f"; ready when {part.health} answers" if part.health else ""
      print(f"# {part.name}, log {logs / part.name}.log{ready}")
      print(part.shown())
    return 0
  if not pathlib.Path(config.policy, "config.json").is_file():
    raise ValueError(
      f"policy: found no config.json in {config.policy!r}, expected a Hugging "
      "Face folder; name it with --config.policy."
    )
  return supervisor.run(services, main_part, logs=logs, deadline=f.deadline)


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
