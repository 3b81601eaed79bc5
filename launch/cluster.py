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

_SGLANG_KEY, _RETRIEVER_KEY = "SGLANG_KEY", "RETRIEVER_KEY"
_TEMPLATES = pathlib.Path(__file__).parent / "targets"
_KINDS = {"slurm": "sh", "jobset": "yaml", "skypilot": "yaml"}  # Of files.
# What starts Python on the nodes of a target; elsewhere as here.
_PYTHONS = {"jobset": ["python"], "skypilot": [".venv/bin/python"]}
_TRACKERS = {"wandb": "WANDB_API_KEY", "mlflow": "MLFLOW_TRACKING_URI"}


def define_flags() -> None:
  flags.DEFINE_enum("target", None, list(_KINDS), "Write what this starts.")
  flags.DEFINE_integer("nodes", 1, "With --target: how many.", 1)
  flags.DEFINE_string("image", "anysearch", "Of containers, for a JobSet.")
  flags.DEFINE_string("claim", "anysearch", "Of the volume, for a JobSet.")
  flags.DEFINE_string("accelerator", "H100", "The GPUs' name, for SkyPilot.")
  flags.DEFINE_integer("gpus", 8, "GPUs of each node, with --target.", 0)


def trainers(mesh: config_lib.MeshConfig, *, serves: bool) -> int:
  """Returns how many of the `--nodes` train: those that the mesh covers.

  Args:
    mesh: of the run.
    serves: whether other nodes have servers; otherwise every node trains.

  Raises:
    ValueError: the mesh does not cover whole nodes, or not as many.
  """
  f = flags.FLAGS
  if not f.gpus:
    return f.nodes
  of_node = f.gpus if serves else len(mesh.trainer) or f.gpus
  count, rest = divmod(mesh.size, of_node)
  most = f.nodes - 1 if serves else f.nodes
  if rest or count > most or (count < most and not serves):
    least = "1 to" if serves else "all"
    raise ValueError(
      f"mesh: found {mesh} = {mesh.size} devices, expected those of whole "
      f"nodes of {of_node}, {least} {most} (--nodes, --gpus): set "
      "mesh.fsdp."
    )
  return count


def write(
  config: config_lib.ExperimentConfig,
  words: Sequence[str],
  output: pathlib.Path,
  *,
  training: int = 1,
  shares: Sequence[tuple[int, ...]] = (),
  server: supervisor.Part | None = None,
) -> None:
  """Writes the file of `--target`, or prints it with `--dry_run`.

  Args:
    config: the run's; names the job, the index and the keys.
    words: the flags of a trainer or, on one node, of `launch.node`.
    output: the run's folder; the file is in its `cluster/`.
    training: the number of nodes that train; they come first.
    shares: the GPUs of each server of another node.
    server: one of these, over `${port}` and `${gpus}`.
  """
  f = flags.FLAGS
  # Names of services begin with a letter and end with no hyphen (RFC 1035).
  plain = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")
  name = (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")
  file = output / "cluster" / f"{name}.{_KINDS[f.target]}"
  has_retriever = f.nodes > 1 and config.retrieval.kind == "index"
  drawn = []
  if shares:
    drawn.append(_SGLANG_KEY)
  if has_retriever:
    drawn.append(_RETRIEVER_KEY)
  trackers = [tracker for tracker in _TRACKERS if f[tracker].value]
  keys = [
    variable
    for path, variable, _, _ in config_settings.listed(config)
    if variable and path.endswith("key_variable")
  ]
  started = ""
  if server is not None:
    env = (f"{variable}={value}" for variable, value in server.env.items())
    started = shlex.join(["env", *env, *server.command])
    for variable in ("port", "gpus"):  # Those words are in single quotes.
      shown = f"'\"${variable}\"'"
      started = started.replace(f"${{{variable}}}", shown)
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATES),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters["quote"] = shlex.quote
  script = environment.get_template(f"{f.target}.{_KINDS[f.target]}").render(
    name=name,
    output=str(output),
    file=str(file),
    folder=str(file.parent),
    config=config,
    flags=f,
    python=shlex.join(_PYTHONS.get(f.target) or shipped.python()),
    words=shlex.join(words),
    server=started,
    has_retriever=has_retriever,
    trainers=training,
    samplers=f.nodes - training,
    shares=shares,
    port=f.port,
    keys=keys + [_TRACKERS[tracker] for tracker in trackers],
    drawn=drawn,
    extras=["cuda12"] * bool(f.gpus) + trackers,
  )
  if f.dry_run:
    print(script, end="")
    return
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(script)
  print(f"wrote {file}; its first lines say how to start it")
