"""Writes a configuration of your own: an index, questions and a policy.

    anysearch init --documents=my_notes --questions=mine.jsonl
    anysearch init DIR      # writes my_search.py in a folder, not here

It is configs/own_data.py, under a name of your own. The commands that it prints
index your documents, prepare your questions, evaluate and train.
"""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Sequence

from absl import app, flags

from anysearch_jax.launch import documents, shipped
from anysearch_jax.launch import flags as launch_flags

_NAME = "my_search"
_HEAD = '''"""Questions and passages of my own.

Change the names below first, then the numbers. `anysearch train
--config=FILE --helpfull` lists every setting with its meaning.
"""

'''
_NEXT = """wrote {file}. Name your POLICY in it, and run:

  anysearch build_index --documents={documents} --output=indexes/mine
  anysearch prepare_data --input={questions} --split=0.8 --output=data/mine
  anysearch train --config={file} --dry_run
  anysearch train --config={file} --output=runs/mine
  anysearch evaluate --config={file} --hf=runs/mine/policy \\
      --output=runs/mine/evaluation/plain
  anysearch ask --config={file} --hf=runs/mine/policy "QUESTION"

docs/data.md has the form of the questions. Without a training:

  anysearch ask --documents={documents} --openai=URL --openai_model=NAME \\
      "QUESTION"
  anysearch evaluate --documents={documents} --questions={questions} \\
      --openai=URL --openai_model=NAME --output=runs/model/evaluation/plain
"""


def define_flags() -> None:
  flags.DEFINE_list(
    "documents", [], "Files, folders and globs of yours, to search."
  )
  flags.DEFINE_string(
    "questions",
    None,
    "File of questions of yours: JSON lines or a table with question and "
    "answer.",
  )


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  if len(argv) > 2:
    raise app.UsageError(f"Found {len(argv) - 1} folders, expected one.")
  documents.require_paths()
  if f.questions:
    from anysearch_jax.data import prepared  # Imports pyarrow.

    prepared.QuestionFile(f.questions)
  file = pathlib.Path(*argv[1:]) / f"{_NAME}.py"
  template = (shipped.ROOT / "configs" / "own_data.py").read_text()
  code = template[template.index("from __future__") :]
  file.parent.mkdir(parents=True, exist_ok=True)
  try:
    with file.open("x") as out:
      out.write(_HEAD + code.replace('"own_data"', f'"{_NAME}"'))
  except FileExistsError as error:
    raise ValueError(
      f"{file}: found a file, which is kept. Name another folder, as in "
      "`anysearch init DIR`."
    ) from error
  print(
    _NEXT.format(
      file=shlex.quote(str(file)),
      documents=shlex.quote(",".join(f.documents) or "my_notes"),
      questions=shlex.quote(f.questions or "mine.jsonl"),
    ),
    end="",
  )


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, arguments="[DIR]")
