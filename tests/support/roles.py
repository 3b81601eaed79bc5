"""The processes of a run and its servers, restarted when they end."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import small_run
import waits

from anysearch_jax.policy import hf

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 900  # Seconds; on a busy machine a start takes a minute.
# Exit codes of a process that lost another: its own, and JAX's.
LOST = (75, -signal.SIGABRT)
# Seconds for trainers to leave that lost one of them; those that still connect
# would wait longer, and get a signal.
_LEAVING = 30
CONFIG = """
from anysearch_jax import config as c

def get_config():
  return c.ExperimentConfig(
    policy={policy!r},
    compute_dtype="float32",
    questions=4,
    group=2,
    save_every=1,
    curriculum=c.CurriculumConfig(
      max_budget=2, phase1_steps=0, total_steps=8, steps_per_rollout=2, window=4
    ),
    reward=c.RewardConfig(length_limit=2, length_tolerance=40),
    optimizer=c.OptimizerConfig(learning_rate=1e-3),
    episode=c.EpisodeConfig(
      prompts="world", max_generated=24, max_context=110
    ),
    engine=c.EngineConfig(
      slots=8, max_context=112, page=8, lanes=(8,), prefill_lanes=4,
      prefill_chunk=16, decode_steps=8
    ),
    batch=c.BatchConfig(
      row_lengths=(128,), micro_batch_tokens=256, max_micro_batches=8
    ),
    pipeline=c.PipelineConfig(async_level=1),
    checkpoint=c.CheckpointConfig(export_dtype="float32", keep_last=2),
  )
"""


def prepare(root: pathlib.Path) -> pathlib.Path:
  """Writes a policy and a configuration; returns the folder."""
  hf.save(root / "policy", small_run.parts()["policy"])
  (root / "config.py").write_text(CONFIG.format(policy=str(root / "policy")))
  return root


class Roles:
  """The processes of a run; use as a context manager, which ends them.

  kills: the number of processes that were killed. servers: commands that run
  until the end, by name.
  """

  def __init__(self, root, output, *arguments, trainers=2, servers=None):
    self._root, self.output, self._arguments = root, output, arguments
    self._count, self.servers = trainers, servers or {}
    self.running: dict[str, subprocess.Popen] = {}
    self.ended: dict[str, int] = {}
    self.kills = 0
    self._lost_at = 0.0

  def command(self, name: str) -> list[str]:
    if name in self.servers:
      return self.servers[name]
    out = [
      *(sys.executable, "-m", "anysearch_jax.launch.train", "--threads=1"),
      *(f"--config={self._root / 'config.py'}", f"--output={self.output}"),
      *(f"--cache={self._root / 'cache'}", *self._arguments),
      f"--config.mesh.data={self._count}",
    ]
    if self._count > 1:
      out += [f"--coordinator={self._address}", f"--processes={self._count}"]
      out += [f"--process={name}", "--heartbeat=20"]
    return out

  def start(self, *names: str) -> None:
    for name in names:
      with self.log(name).open("a") as out:
        self.running[name] = subprocess.Popen(
          self.command(name),
          stdout=out,
          stderr=subprocess.STDOUT,
          env=os.environ
          | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("=8", "=1")}
          | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"},
          cwd=ROOT,
        )

  def log(self, name: str) -> pathlib.Path:
    return self._root / f"{self.output.name}-{name}.log"

  def start_trainers(self) -> None:
    self._address = f"127.0.0.1:{waits.free_port()}"
    self.start(*map(str, range(self._count)))

  def look(self) -> bool:
    """Restarts what died, as a supervisor does; returns whether all is over."""
    for name, process in list(self.running.items()):
      if (code := process.poll()) is not None:
        del self.running[name]
        assert code in (0, -signal.SIGKILL, *LOST), self.log(name).read_text()[
          -3000:
        ]
        if name in self.servers:
          self.start(name)
          continue
        self.ended[name] = code
        self._lost_at = time.monotonic()
    trainers = [str(i) for i in range(self._count)]
    here = [name for name in trainers if name in self.running]
    if len(here) < self._count and time.monotonic() - self._lost_at > _LEAVING:
      for name in here:
        self.running[name].kill()
    if any(name in self.running for name in trainers):
      return False
    if all(self.ended[name] == 0 for name in trainers):
      return True
    self.start_trainers()
    return False

  def wait(self, what=lambda: False) -> None:
    """Restarts what dies until the end, or until `what()`."""
    waits.wait_for(lambda: what() or self.look(), DEADLINE)

  def wait_for_lines(self, count: int, seconds: float = DEADLINE) -> None:
    end = time.monotonic() + seconds
    self.wait(lambda: self.lines() >= count or time.monotonic() > end)

  def kill(self, name: str) -> None:
    if name in self.running:
      self.running[name].kill()
      self.running[name].wait()
      self.kills += 1

  def lines(self) -> int:
    """Returns the number of rollouts that were trained on."""
    path = self.output / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0

  def __enter__(self) -> Roles:
    self.start_trainers()
    self.start(*self.servers)
    return self

  def __exit__(self, *unused) -> None:
    for process in self.running.values():
      process.kill()
      process.wait()
