"""Writes a run's files for people and tools, on the first process."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from anysearch_jax.environment import records
from anysearch_jax.host import disk, processes
from anysearch_jax.policy import hf


class RunFolder:
  """The files of one run, except its checkpoints and metrics.

  path: an existing folder.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path

  def begin(
    self,
    policy: hf.Policy,
    prompts: Mapping[str, str],
  ) -> None:
    """Writes `source/` and `prompts.json`, and creates `trajectories/`.

    Args:
      policy: the initial policy; later exports copy its files.
      prompts: by name, the prompts of an example question.
    """

    def write() -> None:
      (self.path / "trajectories").mkdir(exist_ok=True)
      source = self.path / "source"
      if not source.is_dir():
        with hf.appears_whole(source) as beside:
          hf.save_files(beside, policy)
      text = json.dumps(dict(prompts), indent=2) + "\n"
      (self.path / "prompts.json").write_text(text)

    with disk.translate_errors(self.path):
      processes.on_main(write)

  def record(
    self, name: str, groups: Iterable[Mapping[str, Any]]
  ) -> pathlib.Path:
    """Writes groups of trajectories, one a line; returns the file's path."""
    path = self.path / "trajectories" / f"{name}.jsonl"
    if processes.is_main():
      with disk.translate_errors(path):
        records.write(path, groups)
    return path

  def export(self, policy: hf.Policy, *, base: str, dtype: str) -> None:
    """Writes `policy/`, and `adapter/` of adapters; all processes call it.

    Args:
      policy: the trained policy.
      base: folder of the initial policy, which the adapters belong to.
      dtype: of the files in `policy/`.
    """
    policy = policy._replace(source=self.path / "source")
    with disk.translate_errors(self.path / "policy"):
      hf.save(self.path / "policy", policy, dtype=dtype)
    if policy.architecture.lora is not None:
      with disk.translate_errors(self.path / "adapter"):
        hf.save_adapter(self.path / "adapter", policy, base=base)
