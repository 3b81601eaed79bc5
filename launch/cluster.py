"""Writes what clusters start: an sbatch script, a JobSet, a SkyPilot task.

A run has three roles: trainers, which are one `jax.distributed` run with a
process a node; SGLang servers; and a retriever. Each is a step or a replicated
job of its own, which the scheduler starts again, and is found by host name. The
files are those of `launch/targets/` with their `@NAMES@` filled in and without
the `#[role` blocks of roles that a run has not. Keys are never in them: they
name secrets, or a private file of the user's.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.launch import supervisor

SGLANG_KEY, RETRIEVER_KEY = "SGLANG_KEY", "RETRIEVER_KEY"
COORDINATOR = 8400  # The port of JAX's coordinator, on the first node.
RETRIEVER = 8000
_TEMPLATES = pathlib.Path(__file__).parent / "targets"
_KINDS = {"slurm": "sh", "jobset": "yaml", "skypilot": "yaml"}  # Of files.
_TRACKERS = {"wandb": "WANDB_API_KEY", "mlflow": "MLFLOW_TRACKING_URI"}
# What a command may leave to the shell of its node, as "${rank}".
_VARIABLES = re.compile(r"(\$\{(?:first|retriever|urls|rank|port|gpus)\})")


@dataclasses.dataclass(frozen=True)
class Roles:
  """The commands of a run's roles, over the variables of `_VARIABLES`.

  Attributes:
    trainer: of a node that trains; the `rank`-th, the `first` one coordinates.
    server: of one server, which has `gpus` and listens at `port`; or None.
    retriever: on the first node, or in a pod of its own; or None.
    shares: the GPUs of each server of a node; empty without servers.
    port: of a node's first server; the others follow it.
  """

  trainer: supervisor.Part
  server: supervisor.Part | None = None
  retriever: supervisor.Part | None = None
  shares: Sequence[tuple[int, ...]] = ()
  port: int = 30000


def define_flags() -> None:
  flags.DEFINE_enum("target", None, list(_KINDS), "Write what this starts.")
  flags.DEFINE_integer("nodes", 1, "With --target: how many.", 1)
  flags.DEFINE_string("image", "anysearch", "Of containers, for a JobSet.")
  flags.DEFINE_string("claim", "anysearch", "Of the volume, for a JobSet.")
  flags.DEFINE_string("accelerator", "H100", "The GPUs' name, for SkyPilot.")
  flags.DEFINE_integer("trainers", None, "Nodes that train; default: half.", 1)
  flags.DEFINE_integer("gpus", 8, "GPUs of each node, with --target.", 0)


def trainers(mesh: config_lib.MeshConfig, *, serves: bool) -> int:
  """Returns how many of the `--nodes` train a mesh.

  Args:
    mesh: of the run; it covers all GPUs of these nodes.
    serves: whether other nodes have servers; otherwise every node trains.

  Raises:
    ValueError: the numbers do not suit each other.
  """
  f = flags.FLAGS
  count = f.nodes
  if serves:
    count = f.trainers or max(1, f.nodes // 2)
  if serves and count >= f.nodes:
    raise ValueError(
      f"--trainers: found {count}, expected below {f.nodes}, the number of "
      "--nodes: servers have nodes of their own."
    )
  devices = count * f.gpus
  if not serves and mesh.trainer:
    devices = count * len(mesh.trainer)
  if f.nodes > 1 and f.gpus and mesh.size != devices:
    raise ValueError(
      f"mesh: found {mesh} = {mesh.size} devices, expected {devices}, those of "
      f"{count} nodes that train (--trainers, --gpus): set mesh.fsdp."
    )
  return count


def write(
  config: config_lib.ExperimentConfig,
  roles: Roles,
  *,
  training: int,
  output: pathlib.Path,
) -> None:
  """Writes the file of `--target`, or prints it with `--dry_run`.

  Args:
    config: the run's; names the job and the keys.
    roles: the run's commands.
    training: the number of nodes that train; they come first.
    output: the run's folder; the file is in its `cluster/`.
  """
  f = flags.FLAGS
  # Names of services begin with a letter and end with no hyphen (RFC 1035).
  plain = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")
  name = (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")
  drawn = []
  if roles.server is not None:
    drawn.append(SGLANG_KEY)
  if roles.retriever is not None:
    drawn.append(RETRIEVER_KEY)
  trackers = [tracker for tracker in _TRACKERS if f[tracker].value]
  keys = {
    variable: f'"${variable}"'
    for path, variable, _, _ in config_settings.listed(config)
    if variable and path.endswith("key_variable")
  }
  for tracker in trackers:
    variable = _TRACKERS[tracker]
    keys[variable] = f'"${variable}"'
  for variable in drawn:
    keys[variable] = '"$(openssl rand -hex 24)"'
  file = output / "cluster" / f"{name}.{_KINDS[f.target]}"
  extras = ["cuda12"] * bool(f.gpus) + trackers
  sampling = f.nodes - training
  servers = sampling * len(roles.shares)
  size = len(roles.shares[0]) if roles.shares else 0
  urls = [
    f"http://{name}-server-0-{index}.{name}:{roles.port}"
    for index in range(servers)
  ]
  values = {
    "NAME": name,
    "FILE": shlex.quote(str(file)),
    "PLACE": shlex.quote(str(file.parent)),
    "NODES": f.nodes,
    "TRAINERS": training,
    "SAMPLERS": sampling,
    # Of the nodes that need SGLang; alone, a node has both.
    "SAMPLES": training if f.nodes > 1 else 0,
    "SERVERS": servers,
    "GPUS": f.gpus,
    "TP": size,
    "POD": ",".join(map(str, range(size))),
    "PORT": roles.port,
    "LAST": len(roles.shares) - 1,
    "LASTPORT": roles.port + len(roles.shares) - 1,
    "COORDINATOR": COORDINATOR,
    "URLS": ",".join(urls),
    "DRAWN": " ".join(drawn),
    "SECRETS": "".join(f"\n  {key}: null" for key in keys) or " {}",
    "GIVEN": "".join(f" --secret {key}" for key in keys),
    "MADE": "".join(f" {key}={value}" for key, value in keys.items()),
    "LITERALS": "".join(
      f" \\\n#     --from-literal={key}={value}" for key, value in keys.items()
    ),
    "EXTRAS": f"'.[{','.join(extras)}]'" if extras else ".",
    "ACCELERATORS": (
      f"accelerators: {f.accelerator}:{f.gpus}" if f.gpus else "cpus: 4+"
    ),
    "IMAGE": f.image,
    "CLAIM": f.claim,
  }
  for role in ("trainer", "server", "retriever"):
    part = getattr(roles, role)
    if part is not None:
      values[role.upper()] = _in_shell(part)
  script = _filled(f"{f.target}.{_KINDS[f.target]}", values)
  if f.dry_run:
    print(script, end="")
    return
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(script)
  print(f"wrote {file}; its first lines say how to start it")


def _in_shell(part: supervisor.Part) -> str:
  """Returns a command as a shell reads it, its variables left to the shell."""
  words = list(part.command)
  if part.env:
    words = ["env", *(f"{key}={x}" for key, x in part.env.items()), *words]
  quoted = []
  for word in words:
    pieces = [
      f'"{piece}"' if _VARIABLES.fullmatch(piece) else shlex.quote(piece)
      for piece in _VARIABLES.split(word)
      if piece
    ]
    quoted.append("".join(pieces) or "''")
  return " ".join(quoted)


def _filled(template: str, values: Mapping[str, object]) -> str:
  """Returns a file of `launch/targets/` with values, and blocks of roles."""

  def block(match: re.Match) -> str:
    return match[2] if match[1].upper() in values else ""

  def value(match: re.Match) -> str:
    if match[2] == "NODES_SH":
      return textwrap.indent(_filled("nodes.sh", values).rstrip(), match[1])
    return match[1] + str(values[match[2]])

  text = (_TEMPLATES / template).read_text()
  text = re.sub(r"(?ms)^ *#\[(\w+)\n(.*?)^ *#\]\n", block, text)
  return re.sub(r"(?m)((?:^ +)?)@([A-Z_]+)@", value, text)
