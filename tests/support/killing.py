"""A server that starts commands in a moment and kills them in the middle.

    python killing.py  < orders  > outcomes

It has imported what the commands import, so a start is a fork. An order is a
line of JSON: `argv` of a command of `launch` (its name first), and `kill`,
None or [event, number, seconds]: SIGKILL so long after the event happened so
often in that process. The outcome is its exit code (-9: killed) and what it
said. Events are

    turn         an engine answered
    optimize     an optimizer step was taken
    check        a checkpoint is about to be written
    row          an episode of an evaluation was written
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from launch import flags as launch_flags

DEADLINE = 300.0
# None of them starts a device, whose threads a fork would lose.
_LIBRARIES = (
  "anysearch_jax.evaluation.harness",
  "anysearch_jax.export",
  "anysearch_jax.training.loop",
  "launch.evaluate",
  "launch.policies",
  "launch.train",
  "transformers.tokenization_utils_tokenizers",
)


def main() -> None:
  for name in _LIBRARIES:
    importlib.import_module(name)
  for line in sys.stdin:
    print(json.dumps(_obey(**json.loads(line))), flush=True)


def _obey(argv: list[str], kill: list | None) -> dict:
  events, tell = os.pipe()
  with tempfile.TemporaryFile() as said:
    child = os.fork()
    if not child:
      os.close(events)
      _become(argv, tell, said.fileno())
    os.close(tell)
    if kill is not None:
      _kill(child, events, *kill)
    code = _end(child)
    os.close(events)
    said.seek(0)
    return {"code": code, "said": said.read().decode(errors="replace")}


def _kill(child: int, events: int, name: str, number: int, seconds: float):
  """Kills the child at its event, unless it ends before that."""
  seen = 0
  while seen < number:
    letter = os.read(events, 1)
    if not letter:
      return
    seen += letter == name[0].encode()
  time.sleep(seconds)
  with contextlib.suppress(ProcessLookupError):
    os.kill(child, signal.SIGKILL)


def _end(child: int) -> int:
  """The exit code; one that is killed by a signal has its negative number."""
  end = time.monotonic() + DEADLINE
  while time.monotonic() < end:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
      return os.waitstatus_to_exitcode(status)
    time.sleep(0.01)
  os.kill(child, signal.SIGKILL)
  os.waitpid(child, 0)
  raise TimeoutError(f"A command did not end within {DEADLINE:g} seconds.")


def _become(argv: list[str], tell: int, said: int) -> None:
  """Runs a command, as its own process would."""
  os.dup2(said, 1)
  os.dup2(said, 2)
  os.set_blocking(tell, False)  # Nobody may be reading.
  sys.argv = argv
  code = 1
  try:
    _report(lambda name: _write(tell, name))
    command = importlib.import_module(f"launch.{argv[0]}")
    command.define_flags()
    launch_flags.run(command.main)
  except SystemExit as end:
    if isinstance(end.code, str):
      print(end.code, file=sys.stderr)
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
  except BaseException:
    sys.excepthook(*sys.exc_info())
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write(tell: int, name: str) -> None:
  with contextlib.suppress(BlockingIOError, BrokenPipeError):
    os.write(tell, name[0].encode())


def _report(happened: Callable[[str], None]) -> None:
  """Has the events of this process reported."""
  from anysearch_jax.evaluation import journal
  from anysearch_jax.rollout import driver
  from anysearch_jax.training import checkpoint, learner

  answer, steps = driver.answer, learner.Learner.steps
  save, add = checkpoint.Checkpoints.save, journal.Journal.add

  async def answer_and_tell(*args, **kwargs):
    event = await answer(*args, **kwargs)
    happened("turn")
    return event

  def steps_and_tell(self, packed) -> Iterator[dict]:
    for values in steps(self, packed):
      happened("optimize")
      yield values

  def tell_and_save(self, saved, quality):
    happened("check")
    save(self, saved, quality)

  def add_and_tell(self, row):
    add(self, row)
    happened("row")

  driver.answer = answer_and_tell
  learner.Learner.steps = steps_and_tell
  checkpoint.Checkpoints.save = tell_and_save
  journal.Journal.add = add_and_tell


if __name__ == "__main__":
  main()
