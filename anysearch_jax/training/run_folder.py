"""Writes a run's files for people and tools, on the first process."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import records
from anysearch_jax.host import disk, processes
from anysearch_jax.policy import hf
from anysearch_jax.rollout import episode


class RunFolder:
  """The files of one run, except its checkpoints and metrics.

  path: an existing folder.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path

  def begin(
    self,
    policy: hf.Policy,
    question: types.Question,
    *,
    config: config_lib.ExperimentConfig,
  ) -> None:
    """Writes `source/` and `prompts.json`, and creates `trajectories/`.

    Args:
      policy: the initial policy; later exports copy its files.
      question: the example question of the prompts.
      config: of the run.
    """

    def write() -> None:
      (self.path / "trajectories").mkdir(exist_ok=True)
      source = self.path / "source"
      if not source.is_dir():
        with hf.appears_whole(source) as beside:
          hf.save_files(beside, policy)
      self._write_prompts(policy, question, config)

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

  def export(
    self, policy: hf.Policy, *, config: config_lib.ExperimentConfig
  ) -> None:
    """Writes `policy/`, and `adapter/` of adapters; all processes call it."""
    policy = policy._replace(source=self.path / "source")
    with disk.translate_errors(self.path / "policy"):
      hf.save(
        self.path / "policy", policy, dtype=config.checkpoint.export_dtype
      )
    if policy.architecture.lora is not None:
      with disk.translate_errors(self.path / "adapter"):
        hf.save_adapter(self.path / "adapter", policy, base=config.policy)

  def _write_prompts(
    self,
    policy: hf.Policy,
    question: types.Question,
    config: config_lib.ExperimentConfig,
  ) -> None:
    """Writes both prompts of one question, as the policy reads them."""
    rendered = {
      name: episode.prompt(
        question,
        budget=config.curriculum.max_budget,
        scaffold=scaffold,
        config=config.episode,
        codec=policy.tokenizer,
      )[0]
      for name, scaffold in (("scaffold", True), ("plain", False))
    }
    text = json.dumps(rendered, indent=2) + "\n"
    (self.path / "prompts.json").write_text(text)
