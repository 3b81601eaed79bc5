"""Writes what clusters start: an sbatch script, a JobSet, a SkyPilot task.

Each runs `launch.node` on all of its nodes; the files are those of
`launch/targets/` with their `@NAMES@` filled in. Keys are never in them: they
name secrets, or a private file of the user's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.launch import shipped

CONTROLLER_KEY, SGLANG_KEY = "CONTROLLER_KEY", "SGLANG_KEY"
_TEMPLATES = pathlib.Path(__file__).parent / "targets"
_KINDS = {"slurm": "sh", "jobset": "yaml", "skypilot": "yaml"}  # Of files.
_TRACKERS = {"wandb": "WANDB_API_KEY", "mlflow": "MLFLOW_TRACKING_URI"}


@dataclasses.dataclass(frozen=True)
class Place:
  """A node among those of a run.

  Attributes:
    hosts: names of all nodes; the first `trainers` train, the others sample.
    rank: the index of this one.
    gpus: of each node.
    port: of the controller, on the first node; JAX's coordinator has the next.
  """

  hosts: tuple[str, ...]
  trainers: int
  rank: int = 0
  gpus: int = 8
  port: int = 8400


def define_flags() -> None:
  flags.DEFINE_enum("target", None, list(_KINDS), "Write what this starts.")
  flags.DEFINE_integer("nodes", 1, "With --target: how many.", 1)
  flags.DEFINE_string("image", "anysearch", "Of containers, for a JobSet.")
  flags.DEFINE_string("claim", "anysearch", "Of the volume, for a JobSet.")
  flags.DEFINE_string("accelerator", "H100", "The GPUs' name, for SkyPilot.")
  flags.DEFINE_integer("trainers", None, "Nodes that train; default: half.", 1)
  flags.DEFINE_integer("gpus", 8, "GPUs of each of several nodes.", 0)
  flags.DEFINE_list("hosts", [], "Names of all nodes, those that train first.")
  flags.DEFINE_integer("rank", 0, "Index of this node among --hosts.", 0)
  flags.DEFINE_integer(
    "controller_port", 8400, "Of the controller; JAX has the next.", 1, 65534
  )


def place(mesh: config_lib.MeshConfig, *, samples: bool) -> Place:
  """Returns the place that the flags name, for a run with a mesh.

  `samples` says whether there are nodes that only sample.

  Raises:
    ValueError: the numbers do not suit each other.
  """
  f = flags.FLAGS
  nodes = len(f.hosts) or f.nodes
  trainers = (f.trainers or max(1, nodes // 2)) if samples else nodes
  if nodes > 1 and not (f.hosts or f.target):
    raise ValueError(f"--nodes: found {nodes}, expected --target or --hosts.")
  if f.rank >= nodes:
    raise ValueError(f"--rank: found {f.rank}, expected less than {nodes}.")
  if samples and nodes > 1 and trainers >= nodes:
    raise ValueError(f"--trainers: found {trainers}, expected below {nodes}.")
  devices = trainers * ((not samples and len(mesh.trainer)) or f.gpus)
  if nodes > 1 and f.gpus and mesh.size != devices:
    raise ValueError(
      f"mesh: found {mesh} = {mesh.size} devices, expected {devices}, those of "
      f"{trainers} nodes that train (--trainers, --gpus): set mesh.fsdp."
    )
  hosts = tuple(f.hosts) or tuple(f"node-{i}" for i in range(nodes))
  return Place(hosts, trainers, f.rank, f.gpus, f.controller_port)


@contextlib.contextmanager
def key_file() -> Iterator[None]:
  """Gives servers that are started inside a private file of their key.

  It is in a folder of its own, because `serve_sglang.sh` puts another beside.
  """
  key = os.environ.get(SGLANG_KEY)
  if "KEY_FILE" in os.environ or not key:
    yield
    return
  with tempfile.TemporaryDirectory(prefix="anysearch_key.") as folder:
    path = pathlib.Path(folder, "key")
    path.touch(0o600)
    path.write_text(key + "\n")
    os.environ["KEY_FILE"] = str(path)
    try:
      yield
    finally:
      del os.environ["KEY_FILE"]


def write(
  config: config_lib.ExperimentConfig,
  where: Place,
  words: Sequence[str],
  output: pathlib.Path,
) -> None:
  """Writes the files of `--target`, or prints them with `--dry_run`.

  `words` follow Python: `-m launch.node` and its flags.
  """
  f, gpus = flags.FLAGS, where.gpus
  # Names of services begin with a letter and end with no hyphen (RFC 1035).
  plain = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")
  name = (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")
  listed = config_settings.listed(config)
  named = [x for path, x, _, _ in listed if x and path.endswith("key_variable")]
  trackers = [each for each in _TRACKERS if f[each].value]
  named += [_TRACKERS[each] for each in trackers]
  keys = {each: f'"${each}"' for each in named}
  drawn = '"$(openssl rand -hex 24)"'
  keys |= dict.fromkeys((CONTROLLER_KEY, SGLANG_KEY), drawn)
  counts = {"trainer": where.trainers, "sampler": f.nodes - where.trainers}
  python = {"slurm": shipped.python(), "skypilot": [".venv/bin/python"]}
  command = shlex.join([*python.get(f.target, ["python"]), *words])
  path = output / "cluster" / f"{name}.{_KINDS[f.target]}"
  extras = ["cuda12"] * bool(gpus) + trackers
  devices = f"accelerators: {f.accelerator}:{gpus}" if gpus else "cpus: 4+"
  values = {
    "NAME": name,
    "FILE": shlex.quote(str(path)),
    "PLACE": shlex.quote(str(path.parent)),
    "NODES": f.nodes,
    "TRAINERS": where.trainers,
    "SAMPLERS": counts["sampler"],
    "GPUS": gpus,
    "SECRETS": "".join(f"\n  {key}: null" for key in keys),
    "GIVEN": "".join(f" --secret {key}" for key in keys),
    "MADE": "".join(f" {key}={made}" for key, made in keys.items()),
    "LITERALS": "".join(
      f" \\\n#     --from-literal={key}={made}" for key, made in keys.items()
    ),
    "EXTRAS": f"'.[{','.join(extras)}]'" if extras else ".",
    "ACCELERATORS": devices,
    "PORT": where.port,
    "SERVER": f.port,
    "COMMAND": command,
    "QUOTED": command.replace("'", "'\\''"),  # In a shell's single quotes.
    "IMAGE": f.image,
    "CLAIM": f.claim,
    "HOSTS": ",".join(
      f"{name}-{role}-0-{index}.{name}"
      for role, count in counts.items()
      for index in range(count)
    ),
  }
  values["JOBS"] = "".join(
    _filled("job.yaml", values | {"ROLE": role, "COUNT": count, "FIRST": first})
    + (_filled("probe.yaml", values) if role == "sampler" else "")
    for (role, count), first in zip(counts.items(), (0, where.trainers))
    if count
  )
  made = _filled(f"{f.target}.{_KINDS[f.target]}", values)
  if f.dry_run:
    print(made, end="")
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(made)
  print(f"wrote {path}; its first lines say how to start it")


def _filled(template: str, values: Mapping[str, object]) -> str:
  text = (_TEMPLATES / template).read_text()
  return re.sub(r"@([A-Z]+)@", lambda found: str(values[found[1]]), text)
