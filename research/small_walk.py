"""A real language model, from its package to a curve over the budget.

    python -m research.small_walk --questions=DATA --passages=FILE

DATA has files of real questions, FILE their passages (docs/data.md).
Qwen2.5-0.5B, in the folder that configs/small.py names, or SmolLM2-135M
(`--preset=smollm2-cpu`) is shown episodes, trained on them, and then trained by
reward in three ways; all policies are evaluated on questions that none was
trained on. Each step is a command of the package, and is printed when it
starts. What is there is not made again, and a training that was stopped
resumes: run the command again. It ends with the study's own command:

    python -m research.study --study=small --jobs=2 --threads=1 \\
        --config=research/small_policies.py:qwen2_5_0_5b-cpu --seeds=1 \\
        --budgets=0,1,2,3,5 --questions=43

Every third question, counted over all files in the order of their names, is
held out. `--questions` of the study are of each of the seven sets, about 300.

With `--preset=qwen2_5_0_5b-80`, a GPU, a rollout has 256 episodes instead of
40. A time limit ends the command, which saves first; the same command goes on
from there:

    timeout 9m python -m research.small_walk --preset=qwen2_5_0_5b-80 ...
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Sequence

from absl import app, flags

from research import study
from research.small_policies import PRESETS, ROOT, UNTRAINED_SUFFIX

# The sets of questions, in the mixture that is trained on.
SETS = (
  "nq",
  "hotpotqa",
  "2wikimultihopqa",
  "musique",
  "triviaqa",
  "popqa",
  "bamboogle",
)
_HELD_OUT = 3  # Every so manyth question.
_EVALUATED = 43  # Questions of each set.
_BUDGETS = "0,1,2,3,5"


def split(files: Sequence[pathlib.Path], folder: pathlib.Path) -> None:
  """Writes each file's questions as `<set>_train.jsonl` and `<set>_test.jsonl`.

  Every third question, counted over all files, is for tests.

  Args:
    files: JSON lines, `<set>_<anything>.jsonl`, in order.
    folder: it is made.

  Raises:
    OSError: a file cannot be read.
  """
  folder.mkdir(parents=True, exist_ok=True)
  lines: dict[tuple[str, str], list[str]] = {}
  index = 0
  for path in files:
    name = path.stem.rpartition("_")[0]
    for line in path.read_text().splitlines():
      part = "test" if index % _HELD_OUT == _HELD_OUT - 1 else "train"
      lines.setdefault((name, part), []).append(line)
      index += 1
  for (name, part), questions in lines.items():
    text = "\n".join(questions) + "\n"
    (folder / f"{name}_{part}.jsonl").write_text(text)


def jobs(config: str, *, passages: str) -> list[study.Job]:
  """Returns the commands that make the supervised policy, in order.

  Args:
    config: the file of the untrained configuration.
    passages: file of the corpus.
  """
  demonstrations = ROOT / "demonstrations"
  commands = {
    "prepare_data": (
      (
        f"--folder={ROOT / 'split'}",
        "--sets=all",
        f"--passages={passages}",
        f"--mix={','.join(SETS)}",
        f"--output={ROOT / 'questions'}",
      ),
      ROOT / "questions" / "manifest.json",
    ),
    "build_index": (
      (f"--corpus={passages}", f"--output={ROOT / 'bm25'}"),
      ROOT / "bm25" / "index.json",
    ),
    "demonstrate": (
      (f"--config={config}", f"--output={demonstrations}"),
      demonstrations / "summary.json",
    ),
    "sft": (
      (
        f"--config={config}",
        f"--demonstrations={demonstrations}",
        f"--output={ROOT / 'sft'}",
      ),
      ROOT / "sft" / "policy" / "config.json",
    ),
  }
  made = []
  after: tuple[str, ...] = ()
  for name, (arguments, result) in commands.items():
    command = ["-m", f"anysearch_jax.launch.{name}", *arguments]
    made.append(study.Job(name, command, result, after))
    after = (name,)
  return made


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("questions", None, "Folder of files.", required=True)
  flags.DEFINE_string("passages", None, "The corpus.", required=True)
  flags.DEFINE_enum("preset", "qwen2_5_0_5b-cpu", PRESETS, "Model, machine.")
  flags.DEFINE_integer("seeds", 1, "Trainings of a row.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  args = flags.FLAGS
  config = f"research/small_policies.py:{args.preset}"
  try:
    files = sorted(pathlib.Path(args.questions).glob("*.jsonl"))
    if not files:
      raise ValueError(f"--questions={args.questions}: found no .jsonl file.")
    split(files, ROOT / "split")
  except (OSError, ValueError) as error:
    sys.exit(f"research.small_walk: {error}")
  study.run(
    jobs(config + UNTRAINED_SUFFIX, passages=args.passages),
    ROOT / "logs",
    at_once=1,
  )
  on_cpu = args.preset.endswith("-cpu")
  command = [
    "-m",
    "research.study",
    "--study=small",
    f"--config={config}",
    f"--seeds={args.seeds}",
    f"--budgets={_BUDGETS}",
    f"--questions={_EVALUATED}",
    f"--jobs={2 if on_cpu else 1}",
    f"--threads={1 if on_cpu else 0}",
  ]
  sys.exit(subprocess.run([sys.executable, *command], check=False).returncode)


if __name__ == "__main__":
  define_flags()
  app.run(main)
