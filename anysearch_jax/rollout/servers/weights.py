"""The weights that servers sample: a folder, with adapters over it, by name.

Every reply names the weights that sampled it. Names begin with a random part of
the run, so that a run does not mistake the weights of another run for its own:
`1a2b3c4d.5-3` is the sixth hand-over of the run `1a2b3c4d`, policy version 3.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import safetensors

from anysearch_jax import types
from anysearch_jax.rollout.servers import delta

ADAPTER_FILE = "adapter_model.safetensors"
_RAM = pathlib.Path("/dev/shm")
# The name of a server's weights ends with this while their memory is released,
_RELEASED = ".released"
# and with this while they are not yet compared, or if turns must not count.
_HIDDEN = ".hidden"


class BaseServedError(types.EngineError):
  """A server samples its base where it was asked for an adapter."""


class Adapter(NamedTuple):
  """A PEFT folder that servers load over their base, under a name."""

  name: str
  path: pathlib.Path

  def changes_base(self) -> bool:
    """Returns whether it changes the base; an untrained one has a B of 0."""
    with safetensors.safe_open(
      self.path / ADAPTER_FILE, framework="numpy"
    ) as file:
      return any(
        bool(np.any(file.get_tensor(name)))
        for name in file.keys()
        if "lora_B" in name
      )


class Sampled(NamedTuple):
  """The weights that sample a turn.

  Attributes:
    weights: the name that replies state.
    version: version of the policy.
    adapter: the adapter that a request names; None: the weights alone.
  """

  weights: str
  version: int
  adapter: Adapter | None = None

  def is_refused_by(self, error: Exception) -> bool:
    """Returns whether a server refused a request because it lacks the adapter.

    A server names the adapter in that error and in no other.
    """
    return self.adapter is not None and self.adapter.name in str(error)


class Weights(NamedTuple):
  """Weights that servers must serve.

  Attributes:
    path: Hugging Face folder, at the same path for each server.
    name: every reply states it.
    deadline: seconds that one server may take to load.
    adapters: adapters over these weights, oldest first; every request names one
      of them.
    sender: sends the whole folder to a host that cannot make it from a delta;
      None if no delta was sent.
  """

  path: pathlib.Path
  name: str
  deadline: float
  adapters: tuple[Adapter, ...] = ()
  sender: delta.Sender | None = None

  def sampled(self, version: int) -> Sampled:
    """Returns the weights that sample the newest version."""
    newest = self.adapters[-1] if self.adapters else None
    return Sampled(self.name, version, newest)


def released_name(run: str) -> str:
  """Returns the name of a run's weights while their memory is released."""
  return run + _RELEASED


def hidden_name(run: str) -> str:
  """Returns the name of a run's weights whose turns must not count."""
  return run + _HIDDEN


def run_of(name: str) -> str:
  """Returns the run's part of the name of weights."""
  return name.partition(".")[0]


def is_released(name: str) -> bool:
  """Returns whether a server whose weights have this name has no memory."""
  return name.endswith(_RELEASED)


def is_of_run(name: str, run: str) -> bool:
  """Returns whether weights of this name were handed over by `run`."""
  return name.startswith(f"{run}.")


def is_of_another_run(name: str, run: str) -> bool:
  """Returns whether weights of this name are of a run that is not `run`.

  A restarted server names the weights of its own folder in another form.
  """
  match = re.fullmatch(
    rf"([0-9a-f]{{8}})(\.\d+-\d+|{_RELEASED}|{_HIDDEN})", name
  )
  return match is not None and match[1] != run


def folder(root: str, urls: Iterable[str]) -> pathlib.Path:
  """Returns the folder for the weights of servers.

  Only one run may use a set of servers. So files that a run finds in this
  folder are from a run that was killed.

  Args:
    root: folder that all servers can read; "" is RAM (/dev/shm), or the
      temporary folder if that does not exist.
    urls: addresses of the servers.
  """
  name = hashlib.sha256("\n".join(urls).encode()).hexdigest()[:12]
  default = _RAM if _RAM.is_dir() else pathlib.Path(tempfile.gettempdir())
  base = pathlib.Path(root).absolute() if root else default
  return base / f"anysearch-weights-{name}"
