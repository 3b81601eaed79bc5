"""Writes what clusters start: an sbatch script, a JobSet, a SkyPilot task.

A run has three roles: trainers, which are one `jax.distributed` run with a
process a node; SGLang servers; and a retriever. Each is a step or a replicated
job of its own, which the scheduler starts again, and is found by host name. The
files are those of `launch/targets/`, which Jinja fills in. Keys are never in
them: they name secrets, or a private file of the user's.
"""

from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Sequence

import jinja2
from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.launch import shipped, supervisor

_SGLANG_KEY = "SGLANG_KEY"
_RETRIEVER_KEY = "RETRIEVER_KEY"
_TEMPLATES = pathlib.Path(__file__).parent / "targets"
# The suffix of the file that each target starts.
_SUFFIXES = {"slurm": "sh", "jobset": "yaml", "skypilot": "yaml"}
# The words that start Python on the nodes of a target; SLURM's as here.
_PYTHONS = {"jobset": ["python"], "skypilot": [".venv/bin/python"]}
_TRACKERS = {"wandb": "WANDB_API_KEY", "mlflow": "MLFLOW_TRACKING_URI"}


def define_flags() -> None:
  flags.DEFINE_enum(
    "target",
    None,
    list(_SUFFIXES),
    "Do not train here: write the file that starts the run on a cluster, an "
    "sbatch script, a JobSet for Kubernetes or a SkyPilot task.",
  )
  flags.DEFINE_integer(
    "nodes", 1, "Nodes of the run; more than one needs --target.", 1
  )
  flags.DEFINE_string(
    "image", "anysearch", "Container image with the project, for a JobSet."
  )
  flags.DEFINE_string(
    "claim",
    "anysearch",
    "PersistentVolumeClaim (ReadWriteMany) that holds the run folder, for a "
    "JobSet.",
  )
  flags.DEFINE_string(
    "accelerator", "H100", "SkyPilot's name of the GPUs to ask for."
  )
  flags.DEFINE_integer(
    "gpus", 8, "GPUs of each node, with --target; 0: train on CPUs.", 0
  )


def trainer_nodes(mesh: config_lib.MeshConfig, *, serves: bool) -> int:
  """Returns how many of the `--nodes` train: those that the mesh covers.

  Args:
    mesh: mesh of the run.
    serves: whether other nodes run servers; otherwise every node trains.

  Raises:
    ValueError: the mesh does not cover whole nodes, or not as many.
  """
  f = flags.FLAGS
  if not f.gpus:
    return f.nodes
  node_devices = f.gpus if serves else len(mesh.trainer) or f.gpus
  count, remainder = divmod(mesh.size, node_devices)
  max_nodes = f.nodes - 1 if serves else f.nodes
  if remainder or count > max_nodes or (count < max_nodes and not serves):
    least = "1 to" if serves else "all"
    raise ValueError(
      f"mesh: found {mesh} = {mesh.size} devices, expected those of whole "
      f"nodes of {node_devices}, {least} {max_nodes} (--nodes, --gpus): set "
      "mesh.fsdp."
    )
  return count


def write(
  config: config_lib.ExperimentConfig,
  arguments: Sequence[str],
  output: pathlib.Path,
  *,
  training: int = 1,
  shares: Sequence[tuple[int, ...]] = (),
  server: supervisor.Part | None = None,
) -> None:
  """Writes the file of `--target`, or prints it with `--dry_run`.

  Args:
    config: configuration of the run; names the job, the index and the keys.
    arguments: the flags of a trainer or, on one node, of `launch.node`.
    output: folder of the run; the file is in its `cluster/`.
    training: number of nodes that train; they come first.
    shares: GPUs of each server on a node that does not train.
    server: command of such a server, over `${port}` and `${gpus}`.
  """
  f = flags.FLAGS
  # Names of services begin with a letter and end with no hyphen (RFC 1035).
  plain = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")
  name = (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")
  file = output / "cluster" / f"{name}.{_SUFFIXES[f.target]}"
  has_retriever = f.nodes > 1 and config.retrieval.kind == "index"
  generated_keys = []
  if shares:
    generated_keys.append(_SGLANG_KEY)
  if has_retriever:
    generated_keys.append(_RETRIEVER_KEY)
  trackers = [tracker for tracker in _TRACKERS if f[tracker].value]
  keys = [
    variable
    for path, variable, _, _ in config_settings.listed(config)
    if variable and path.endswith("key_variable")
  ]
  server_command = ""
  if server is not None:
    env = (f"{variable}={value}" for variable, value in server.env.items())
    server_command = shlex.join(["env", *env, *server.command])
    for variable in ("port", "gpus"):  # Those words are in single quotes.
      quoted_variable = f"'\"${variable}\"'"
      server_command = server_command.replace(
        f"${{{variable}}}", quoted_variable
      )
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATES),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters["quote"] = shlex.quote
  script = environment.get_template(f"{f.target}.{_SUFFIXES[f.target]}").render(
    name=name,
    output=str(output),
    file=str(file),
    folder=str(file.parent),
    config=config,
    flags=f,
    python=shlex.join(_PYTHONS.get(f.target) or shipped.python()),
    words=shlex.join(arguments),
    server=server_command,
    has_retriever=has_retriever,
    trainers=training,
    samplers=f.nodes - training,
    shares=shares,
    port=f.port,
    keys=keys + [_TRACKERS[tracker] for tracker in trackers],
    drawn=generated_keys,
    extras=["cuda12"] * bool(f.gpus) + trackers,
  )
  if f.dry_run:
    print(script, end="")
    return
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(script)
  print(f"wrote {file}; its first lines say how to start it")
