"""Writes a configuration of your own: an index, questions and a policy.

    anysearch init          writes my_search.py here
    anysearch init DIR      writes it in a folder

It is configs/own_data.py, under a name of your own.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import app

from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import shipped

_NAME = "my_search"
_HEAD = '''"""Questions and passages of my own.

Change the three names below first, then the numbers. `anysearch train
--config=FILE --helpfull` lists every setting with its meaning.
"""

'''
_NEXT = """wrote {file}. Change INDEX, QUESTIONS and POLICY in it, and run:

  anysearch build_index --documents=my_notes --output=indexes/mine
  anysearch prepare_data --input=mine:train=train.jsonl \\
      --input=mine:test=test.jsonl --mix=mine --output=data/mine
  anysearch train --config={file} --dry_run
  anysearch train --config={file} --output=runs/mine
  anysearch ask --config={file} --hf=runs/mine/policy "QUESTION"

docs/data.md has the form of the questions. To ask without a training:
anysearch ask --documents=my_notes --openai=URL --openai_model=NAME "QUESTION"
"""


def define_flags() -> None:
  """Defines no flag: the command has none."""


def main(argv: Sequence[str]) -> None:
  if len(argv) > 2:
    raise app.UsageError(f"Found {len(argv) - 1} folders, expected one.")
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
  print(_NEXT.format(file=file), end="")


if __name__ == "__main__":
  launch_flags.run(main, arguments="[DIR]")
