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
from launch import shipped

CONTROLLER_KEY, SGLANG_KEY = "CONTROLLER_KEY", "SGLANG_KEY"
_TEMPLATES = pathlib.Path(__file__).parent / "targets"
_FILES = {"slurm": "slurm.sh", "jobset": "jobset.yaml"}
_FILES["skypilot"] = "skypilot.yaml"


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
  flags.DEFINE_enum(
    "target", None, list(_FILES), "Write what this kind of cluster starts."
  )
  flags.DEFINE_integer("nodes", 1, "With --target: how many.", 1)
  flags.DEFINE_string(
    "image", "anysearch", "With --target=jobset: image of the containers."
  )
  flags.DEFINE_string(
    "claim", "anysearch", "With --target=jobset: claim of the shared volume."
  )
  flags.DEFINE_string(
    "accelerator", "H100", "With --target=skypilot: name of the GPUs."
  )
  flags.DEFINE_integer(
    "trainers", None, "Of the nodes, those that train; default: half.", 1
  )
  flags.DEFINE_integer("gpus", 8, "GPUs of each of several nodes.", 0)
  flags.DEFINE_list("hosts", [], "Names of all nodes, those that train first.")
  flags.DEFINE_integer("rank", 0, "Index of this node among --hosts.", 0)
  flags.DEFINE_integer(
    "controller_port", 8400, "Of the controller; JAX has the next.", 1, 65534
  )


def place(*, samples: bool) -> Place:
  """Returns the place that the flags name.

  `samples` says whether there are nodes that only sample.

  Raises:
    ValueError: the numbers do not suit each other.
  """
  f = flags.FLAGS
  nodes = len(f.hosts) or f.nodes
  trainers = (f.trainers or max(1, nodes // 2)) if samples else nodes
  if f.rank >= nodes:
    raise ValueError(f"--rank: found {f.rank}, expected less than {nodes}.")
  if samples and nodes > 1 and trainers >= nodes:
    raise ValueError(
      f"--trainers: found {trainers} of {nodes} nodes, expected some that "
      "sample."
    )
  hosts = tuple(f.hosts) or ("localhost",)
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
  plain = re.sub(r"[^a-z0-9]+", "-", config.name.lower())
  name = plain.strip("-")[:40] or "run"
  counts = {"trainer": where.trainers, "sampler": f.nodes - where.trainers}
  python = shipped.python() if f.target == "slurm" else ["python"]
  command = shlex.join([*python, *words])
  path = output / "cluster" / f"{name}.{_FILES[f.target].rpartition('.')[2]}"
  values = {
    "NAME": name,
    "FILE": path,
    "FOLDER": path.parent,
    "PLACE": shlex.quote(str(path.parent)),
    "NODES": f.nodes,
    "TRAINERS": where.trainers,
    "SAMPLERS": counts["sampler"],
    "GPUS": gpus,
    "ASKED": f"--gpus-per-node={gpus}" if gpus else "--exclusive",
    "ACCELERATORS": f"accelerators: {f.accelerator}:{gpus}"
    if gpus
    else "cpus: 4+",
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
  made = _filled(_FILES[f.target], values)
  if f.dry_run:
    print(made, end="")
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(made)
  print(f"wrote {path}; its first lines say how to start it")


def _filled(template: str, values: Mapping[str, object]) -> str:
  text = (_TEMPLATES / template).read_text()
  return re.sub(r"@([A-Z]+)@", lambda found: str(values[found[1]]), text)
