r"""Runs every command of the paper's experiment at a small size on a CPU.

    python -m launch.rehearsal --family=qwen2_5 --tokenizer=DIR \
        --questions=DIR --corpus=FILE --output=runs/rehearsal

--questions is a folder for `launch.prepare_data --folder`, --corpus a file for
`launch.build_index`, and --tokenizer a folder with a tokenizer of the family.
The policy is random, so nothing is learnt; the rehearsal shows that the parts
work together. Training is killed once (SIGKILL) and resumes from its
checkpoint. If torch is installed, transformers reads the exported policy;
otherwise that step is left out, and the first and the last line say so. Each
command is printed when it starts. With other paths, and with
configs/qwen2_5_7b.py or another instead of configs/rehearsal.py, the commands
are the paper's experiment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from absl import app, flags

from configs import rehearsal
from launch import children, progress, shipped
from launch import flags as launch_flags

T = TypeVar("T")

_DEADLINE = 600.0  # Seconds that a command may take.
_POLL = 0.02
_ADDRESS = re.compile(r"at (http://\S+)")
# The commands that accept --threads and --cache.
_COMPUTING = {
  "launch.train",
  "launch.evaluate",
  "launch.export_hf",
  "launch.build_index",
  "launch.serve_retriever",
}
_RELOAD = """
import sys, transformers
folder = sys.argv[1]
policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
codec = transformers.AutoTokenizer.from_pretrained(folder)
prompt = codec("Where is", return_tensors="pt")
print(repr(codec.decode(policy.generate(**prompt, max_new_tokens=8)[0])))
"""


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_enum("family", None, [*rehearsal.FAMILIES], "Of the policy.")
  flags.DEFINE_string("tokenizer", None, "Folder with the real tokenizer.")
  flags.DEFINE_string("questions", None, "Folder of question files.")
  flags.DEFINE_string("corpus", None, "Passages, JSON lines, plain or gzip.")
  flags.DEFINE_string("output", "runs/rehearsal", "Folder; must not exist.")
  flags.DEFINE_string("cache", ".jax_cache", "Folder of compiled programs.")
  flags.mark_flags_as_required(["family", "tokenizer", "questions", "corpus"])


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  root = pathlib.Path(f.output)
  if root.exists():
    sys.exit(f"launch.rehearsal: {root} exists; remove it or name another.")
  started = time.monotonic()
  left_out = ""
  if importlib.util.find_spec("torch") is None:
    left_out = (
      "; not checked, because torch is not installed: that transformers reads "
      "the export"
    )
    print(f"launch.rehearsal{left_out}")
  try:
    play(
      root,
      family=f.family,
      tokenizer=pathlib.Path(f.tokenizer),
      questions=f.questions,
      corpus=f.corpus,
      cache=f.cache,
      reload=not left_out,
    )
  except (RuntimeError, ValueError) as error:
    sys.exit(f"launch.rehearsal: {error}")
  took = progress.duration(time.monotonic() - started)
  print(f"\nthe rehearsal went through in {took}{left_out}")
  print(f"report: {root / 'report.html'}")


def play(
  root: pathlib.Path,
  *,
  family: str,
  tokenizer: pathlib.Path,
  questions: str,
  corpus: str,
  cache: str,
  reload: bool,
) -> None:
  """Runs the rehearsal in `root`.

  Args:
    root: the folder to create.
    family: family of the policy, one of `rehearsal.FAMILIES`.
    tokenizer: folder with the family's tokenizer.
    questions: folder of question files.
    corpus: file of passages.
    cache: folder of compiled programs.
    reload: whether transformers reads the export, which needs torch.

  Raises:
    RuntimeError: a command failed.
    ValueError: the tokenizer does not belong to the family.
  """
  config = f"--config=configs/rehearsal.py:{family}"
  run, export = root / "run", root / "export"
  root.mkdir(parents=True)
  _make_policy(family, tokenizer, root / "policy")
  stage = _Stage(root, ["--threads=0", f"--cache={cache}"])
  stage(
    "launch.prepare_data",
    f"--folder={questions}",
    "--sets=all",
    "--mix=hotpotqa",
    f"--output={root / 'data'}",
  )
  stage(
    "launch.build_index",
    f"--corpus={corpus}",
    "--kind=bm25",
    f"--output={root / 'index'}",
  )
  with stage.service(f"--index={root / 'index'}") as url:
    of_run = (
      config,
      f"--config.policy={root / 'policy'}",
      "--config.data.source=prepared",
      f"--config.data.path={root / 'data'}",
      "--config.retrieval.kind=http",
      f"--config.retrieval.url={url}",
    )
    train = ("launch.train", *of_run, f"--output={run}")
    stage.killed(*train, once=run / "checkpoints" / "1")
    stage(*train)
    stage(
      "launch.export_hf",
      f"--checkpoint={run}",
      f"--output={export}",
      "--dtype=float32",
    )
    if reload:
      stage.reload(export)
    stage(
      "launch.evaluate",
      *of_run,
      f"--hf={export}",
      "--datasets=nq,musique",
      f"--output={run / 'evaluation' / 'plain'}",
    )
  stage("launch.report", str(run), f"--output={root / 'report.html'}")


def _make_policy(
  family: str, tokenizer: pathlib.Path, output: pathlib.Path
) -> None:
  from anysearch_jax.host import json_files
  from anysearch_jax.world import rehearsal_policy

  shape = json_files.read(
    pathlib.Path(shipped.find(rehearsal.FAMILIES[family][1]))
  )
  rehearsal_policy.make(shape, tokenizer, output)


class _Stage:
  """Runs commands one after the other, each with its own log."""

  def __init__(self, root: pathlib.Path, process: Sequence[str]):
    self._logs, self._process = root / "logs", list(process)
    self._logs.mkdir()
    self._count = 0

  def __call__(self, module: str, *arguments: str) -> None:
    """Runs a command of the project."""
    self._finish(self._start(module, ["-m", module, *arguments]))

  def killed(self, module: str, *arguments: str, once: pathlib.Path) -> None:
    """Starts a command and kills it as soon as the path `once` exists."""
    child = self._start(module, ["-m", module, *arguments])
    with _ended(child):
      _wait(child, once.exists)
      child.kill()
    print("  killed; the same command again:", flush=True)

  @contextlib.contextmanager
  def service(self, *arguments: str) -> Iterator[str]:
    """Runs a retriever on a free port and yields its address."""
    module = "launch.serve_retriever"
    child = self._start(module, ["-m", module, *arguments, "--port=0"])
    with _ended(child):
      yield _wait(child, lambda: _ADDRESS.search(child.text()))[1]

  def reload(self, folder: pathlib.Path) -> None:
    """Loads the exported policy with transformers and continues a text."""
    self._finish(self._start("transformers", ["-c", _RELOAD, str(folder)]))

  def _start(self, name: str, command: list[str]) -> children.Child:
    if name in _COMPUTING:
      command += self._process
    self._count += 1
    log = self._logs / f"{self._count:02}-{name}.log"
    print(f"\n{shlex.join(['python', *command])}", flush=True)
    return children.Child([sys.executable, *command], log)

  def _finish(self, child: children.Child) -> None:
    with _ended(child):
      _wait(child, lambda: child.code is not None)
    if child.code:
      raise _failure(child, f"failed with {child.code}")
    print(f"  {child.took}: {''.join(child.tail(1))}", flush=True)


@contextlib.contextmanager
def _ended(child: children.Child) -> Iterator[None]:
  """Ends the child on exit, if it still runs."""
  try:
    yield
  finally:
    children.stop([child])


def _wait(child: children.Child, there: Callable[[], T | None]) -> T:
  """Returns the first true result of `there`.

  Raises:
    RuntimeError: the child ended before, or it hangs.
  """
  end = time.monotonic() + _DEADLINE
  while True:
    code = child.code  # Read first: what ends has written everything.
    if found := there():
      return found
    if code is not None:
      raise _failure(child, f"ended with {code}")
    if time.monotonic() > end:
      raise _failure(child, f"did not get on within {_DEADLINE:g} seconds")
    time.sleep(_POLL)


def _failure(child: children.Child, what: str) -> RuntimeError:
  return RuntimeError(f"{child.log.stem} {what}:\n{child.text()[-3000:]}")


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
