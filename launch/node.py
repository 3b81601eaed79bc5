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

writes what a cluster starts: an sbatch script, a JobSet or a SkyPilot task, see
docs/cluster.md and `launch/cluster.py`. It runs this command on each node, with
`--hosts` and `--rank`: the first nodes train, the first of them also drives
the episodes, and the others sample.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shlex
from collections.abc import Iterable, Sequence

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import captured_stderr
from anysearch_jax.launch import (
  cluster,
  distributed,
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
_SERVER_PYTHON = ".venv-sglang/bin/python"
_TRAINER = "anysearch_jax.launch.train"
_STARTED = 3600  # Seconds, twice the default of --deadline.
_RESTARTS = 5  # Per server; a server that ends more often is broken.
# Of the flags, those of these modules and `grace` are passed on to the trainer,
# but what is resolved here; a cluster's nodes are given these too.
_TRAINER_MODULES = (launch_flags.__name__, distributed.__name__)
_RESOLVED = ("config", "set_config", "output")
_OF_NODES = (
  *("servers", "sglang_python", "port", "retriever_port", "memory"),
  *("server_command", "deadline", "trainers", "gpus", "controller_port"),
)


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
  processes: int = 1,
  retriever_port: int = 8000,
) -> tuple[list[supervisor.Part], supervisor.Part]:
  """Returns the parts of a run on this node.

  `config` is as resolved, before the overrides added here, and `trainer` the
  command with the flags that make it. Without `servers` the trainer samples
  itself; `processes` is the number of nodes that train together.

  Returns:
    (services, trainer): the retriever and the servers, then the trainer.

  Raises:
    ValueError: the GPUs cannot be divided, or the template is wrong.
  """
  served, command = _retriever(config, trainer, retriever_port)
  if servers is None:
    return served, supervisor.Part("trainer", tuple(command))
  if processes > 1 and servers.count != 0:
    raise ValueError(
      f"--processes: found {processes} with servers on this node, expected "
      "--servers=0: each process asks all servers, so sglang.urls names them "
      "as every node reaches them."
    )
  mesh = config.mesh
  trains = mesh.trainer or tuple(range(mesh.size // processes))
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
  started = [_server(i, gpus, config, servers) for i, gpus in enumerate(shares)]
  urls = [part.health.removesuffix("/health") for part in started]
  overrides = {
    "engine.kind": "sglang",
    "sglang.urls": ",".join(urls or config.sglang.urls),
    # CUDA_VISIBLE_DEVICES hides the other GPUs, so the trainer's count from 0.
    "mesh.trainer": _indices(range(len(trains))),
    "mesh.rollout": "()",
  }
  command += [f"--config.{name}={value}" for name, value in overrides.items()]
  return served + started, supervisor.Part(
    "trainer", tuple(command), {"CUDA_VISIBLE_DEVICES": _indices(trains)} | env
  )


def parts_in_cluster(
  config: config_lib.ExperimentConfig,
  trainer: Sequence[str],
  place: cluster.Place,
  *,
  servers: Servers | None,
  retriever_port: int = 8000,
) -> tuple[list[supervisor.Part], supervisor.Part]:
  """Returns the parts of a run on one of several nodes, as `parts_of` does.

  The first node has the retriever and the process that drives; nodes that train
  are one run of `jax.distributed`. A node that samples serves until it is
  stopped, with weights from the run folder. Without `servers` all nodes train
  and sample.
  """
  trains = len(place.hosts) if servers is None else place.trainers
  many = [
    f"--coordinator={place.hosts[0]}:{place.port + 1}",
    *(f"--processes={trains}", f"--process={place.rank}"),
    # The first one starts when the retriever is healthy.
    f"--connect_timeout={_STARTED}",
  ]
  train = [*trainer, *(many if trains > 1 else ())]
  if servers is None:
    return parts_of(
      config,
      train,
      servers=None,
      processes=trains,
      retriever_port=retriever_port,
    )
  shares = _shares(tuple(range(place.gpus)), servers.count)
  if place.rank >= trains:
    every = "0.0.0.0"  # noqa: S104  Others ask them.
    started = [
      _server(i, gpus, config, servers, host=every)
      for i, gpus in enumerate(shares)
    ]
    return started, supervisor.Part("until-stopped", ("sleep", "infinity"))
  urls = [
    f"http://{host}:{servers.port + i}"
    for host in place.hosts[trains:]
    for i in range(len(shares))
  ]
  overrides = {
    "engine.kind": "sglang",
    "sglang.urls": ",".join(urls),
    "sglang.api_key_variable": cluster.SGLANG_KEY,
    "mesh.trainer": "()",
    "mesh.rollout": "()",
  }
  outputs = [word for word in trainer if word.startswith("--output=")]
  if outputs and not config.sglang.weights:
    output = outputs[-1].removeprefix("--output=")
    overrides["sglang.weights"] = f"{output}/weights"
  named = [f"--config.{name}={value}" for name, value in overrides.items()]
  services, asks = _retriever(config, train, retriever_port)
  part = supervisor.Part("trainer", (*asks, *named))
  return [] if place.rank else services, part


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


def _retriever(
  config: config_lib.ExperimentConfig, trainer: Sequence[str], port: int
) -> tuple[list[supervisor.Part], list[str]]:
  """Returns the retriever's part, if needed, and the trainer's command."""
  c = config.retrieval
  if c.kind != "index":
    return [], list(trainer)
  url = f"http://127.0.0.1:{port}"
  command = [
    *(*shipped.python(), "-m", "anysearch_jax.launch.serve_retriever"),
    *(f"--index={c.index}", f"--port={port}"),
  ]
  if c.encoder:
    command.append(f"--encoder={c.encoder}")
  part = supervisor.Part(
    "retriever",
    tuple(command),
    {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
    health=f"{url}/health",
  )
  asks = {"kind": "http", "url": url, "index": "", "encoder": ""}
  return [part], [
    *trainer,
    *(f"--config.retrieval.{name}={value}" for name, value in asks.items()),
  ]


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
  index: int,
  gpus: tuple[int, ...],
  config: config_lib.ExperimentConfig,
  servers: Servers,
  *,
  host: str = "127.0.0.1",
) -> supervisor.Part:
  port = servers.port + index
  values = {
    "python": shipped.find(servers.python),
    "model": config.policy,
    "port": port,
    "tp": len(gpus),
    "gpus": _indices(gpus),
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
  follows = {"DELTAS": config.sglang.weights} if config.sglang.deltas else {}
  return supervisor.Part(
    f"server-{index}",
    tuple(command),
    {"CUDA_VISIBLE_DEVICES": _indices(gpus)} | follows,
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
  allow_changes: bool = False,
) -> None:
  """Checks a configuration before servers are started for it.

  `config` is without the trainer's own overrides. The trainer resumes the run
  in `output`, if there is one.

  Raises:
    ValueError: the configuration is invalid or does not fit the run.
  """
  with captured_stderr.standard_error():  # JAX warns of missing plugins.
    import jax

  # A reward function that is tried may compute; the GPUs are for the parts.
  jax.config.update("jax_platforms", "cpu")
  words, prefix = trainer.command, "--config."
  added = [w.removeprefix(prefix) for w in words if w.startswith(prefix)]
  resolved = launch_flags.override(config, added)
  many = [w for w in words if w.startswith("--processes=")]
  from anysearch_jax.methods import systems  # Imports JAX.

  systems.validate(
    resolved,
    processes=int(many[-1].partition("=")[2]) if many else 1,
  )
  run_history.check(output, resolved, allow=allow_changes)


def define_flags() -> None:
  launch_flags.define_training()
  distributed.define_flags()
  cluster.define_flags()
  flags.DEFINE_bool("dry_run", False, "Print commands, or a file, and stop.")
  flags.DEFINE_integer(
    "servers",
    None,
    "SGLang servers on this node; default: one for two GPUs of mesh.rollout, "
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
  # Nodes that train together share the run folder, so each logs to its own.
  node = "" if f.process is None else f"process-{f.process}"
  node = f"node-{f.rank}" if len(f.hosts) > 1 else node
  logs = pathlib.Path(f.log_dir or output / "logs" / node)
  by_module = f.flags_by_module_dict()
  of_trainer = {x.name for name in _TRAINER_MODULES for x in by_module[name]}

  def given(names: Iterable[str]) -> list[str]:
    passed = [f[name] for name in names if f[name].present]
    return [f"--{flag.name}={flag.value}" for flag in passed]

  words = [
    f"--config={f.config}",
    *(f"--config.{each}" for each in f.set_config),
    f"--output={output}",
    *given(["grace", *sorted(of_trainer.difference(_RESOLVED))]),
  ]
  own = f.servers, f.port, f.memory, f.sglang_python, f.server_command
  used = Servers(*own) if samples_by_servers(config, f.set_config) else None
  place = cluster.place(config.mesh, samples=used is not None)
  trainer = [*shipped.python(), "-m", _TRAINER, *words]
  make = functools.partial(parts_of, processes=f.processes or 1)
  if len(place.hosts) > 1:
    make = functools.partial(parts_in_cluster, place=place)
  port = f.retriever_port
  services, main_part = make(config, trainer, servers=used, retriever_port=port)
  validate(config, main_part, output, allow_changes=f.allow_changes)
  if f.target:
    words += given(_OF_NODES)
    cluster.write(
      config, place, ["-m", "anysearch_jax.launch.node", *words], output
    )
    return 0
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
  with cluster.key_file():
    return supervisor.run(services, main_part, logs=logs, deadline=f.deadline)


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
