"""Writes what clusters start: an sbatch script, a JobSet, a SkyPilot task.

A run has three roles: trainers, which are one `jax.distributed` run with a
process a node; SGLang servers; and a retriever. Each is a step or a replicated
job of its own, which the scheduler starts again, and is found by host name. The
files are those of `launch/targets/`, which Jinja fills in. Keys are never in
them: they name secrets, or a private file of the user's.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import unicodedata
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

  Raises:
    ValueError: a value cannot be written into the file.
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
  _check_values(config, arguments, output, keys)
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
  environment.filters["sbatch"] = _quote_for_sbatch
  environment.filters["yaml"] = _quote_for_yaml
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


def _check_values(
  config: config_lib.ExperimentConfig,
  arguments: Sequence[str],
  output: pathlib.Path,
  keys: Sequence[str],
) -> None:
  """Refuses values that no quoting keeps to one line, and keys without a name.

  Args:
    config, arguments, output: as for `write`.
    keys: environment variables of the file.

  Raises:
    ValueError: names the value.
  """
  f = flags.FLAGS
  retrieval = config.retrieval
  written_values = [
    ("--output", str(output)),
    ("--image", f.image),
    ("--claim", f.claim),
    ("--accelerator", f.accelerator),
    ("--config.policy", config.policy),
    ("--config.retrieval.index", retrieval.index),
    ("--config.retrieval.encoder", retrieval.encoder),
    ("--config.servers.weights", config.servers.weights),
  ]
  for argument in arguments:
    name, _, text = argument.partition("=")
    written_values.append((name, text))
  for name, text in written_values:
    if not all(map(_is_writable, text)):
      raise ValueError(
        f"{name}: found {text!r}, which the file of --target={f.target} cannot "
        "hold; expected a text without control characters, such as line ends."
      )
  for key in keys:
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", key):
      raise ValueError(
        f"key_variable: found {key!r}, expected the name of an environment "
        "variable: letters, digits and underscores."
      )


def _is_writable(character: str) -> bool:
  return character.isprintable() or unicodedata.category(character) == "Zs"


def _quote_for_sbatch(text: str) -> str:
  """Quotes a path of an #SBATCH line, where `%` begins a placeholder."""
  return shlex.quote(text.replace("%", "%%"))


def _quote_for_yaml(text: str) -> str:
  """Quotes a scalar of YAML, of which JSON's strings are a part."""
  return json.dumps(text, ensure_ascii=False)
