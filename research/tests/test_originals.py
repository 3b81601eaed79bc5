"""The tables of fidelity, against checkouts of the originals if there are any.

`ANYSEARCH_ORIGINALS` names the folder of checkouts, see `research.originals`.
"""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from research import originals

CHECKOUTS = os.environ.get("ANYSEARCH_ORIGINALS", "")
SYSTEMS = sorted({row["system"] for row in originals.rows("fidelity")})


def checkout(system):
  known = originals.places().get(system, {})
  folder = pathlib.Path(CHECKOUTS) / known.get("checkout", system)
  if not CHECKOUTS or not folder.is_dir():
    pytest.skip(f"ANYSEARCH_ORIGINALS has no checkout of {folder.name}")
  if (folder / ".git").exists():
    git = ("git", "-C", str(folder), "rev-parse", "HEAD")
    assert subprocess.check_output(git, text=True).strip() == known["commit"]
  return folder


def test_the_page_names_the_repositories_and_commits():
  root = pathlib.Path(__file__).parents[2]
  pages = ("docs/fidelity.md", "research/methods/README.md")
  text = "\n".join((root / page).read_text("utf-8") for page in pages)
  for system, each in originals.places().items():
    named = f"{each['repository']} at `{each['commit'][:7]}`"
    lines = [line for line in text.splitlines() if f"`{system}`" in line]
    assert any(named in line for line in lines), system


@pytest.mark.parametrize("system", SYSTEMS)
def test_cited_lines_say_what_the_tables_say(system):
  lines, wrong = originals.compared(system, checkout(system))
  assert not wrong, "\n".join(wrong)
  assert lines
  print(f"{system}: {lines} cited lines")


SCRIPT = """
BATCH=256
while true; do case "$1" in --batch) BATCH="$2";; esac; done
python3 main.py \\
    # rollout.top_p=0.5
    data.train_batch_size=${BATCH} \\
    rollout.top_p=1.0 \\
    rollout.n=5 \\
    rollout.n=6
"""
YAML = "data:\n  n: 0\nrollout: # sampling\n  top_p: 0.95\n  top_k: -1\n"
PYTHON = 'add("--lr", default=1e-6)\nbetas=(0.9, 0.999)\n'


@pytest.mark.parametrize(
  ("where", "authors", "original", "rule", "sentence"),
  [
    ("run.sh:7", "1.0", 1.0, "", None),
    ("run.sh:2", "256 questions", 2, "mini-batch of questions", None),
    ("run.sh:2", "256", 10, "mini-batch", None),
    ("a.yaml:5", "-1", 0, "differs", None),
    ("a.py:2", "0.999", 0.999, "", None),
    ("a.py:2", "betas", "adam", "reading", None),
    ("a.yaml:5", "top_k", "top_k", "", None),
    ("a.yaml:5", "1", 1, "", "expected '1'"),
    ("a.yaml:4", "0.95", 0.95, "", "run.sh:7 sets {'rollout.top_p'}"),
    ("run.sh:8", "5", 5, "", "later lines set {'rollout.n'} again"),
    ("run.sh:7", "1.0", 0.9, "", "found 0.9 in our recipe; expected 1.0"),
    ("a.yaml:5", "-1", -1, "differs", "found the rule 'differs' for -1"),
    ("a.yaml:9", "1", 1, "", "fewer lines than 9"),
    ("b.py:1", "1", 1, "", "found no b.py"),
  ],
)
def test_a_row_is_compared_with_its_line_and_what_overrides_it(
  tmp_path, where, authors, original, rule, sentence
):
  for name, text in {"run.sh": SCRIPT, "a.yaml": YAML, "a.py": PYTHON}.items():
    (tmp_path / name).write_text(text)
  row = {"setting": "x", "where": where, "authors": authors}
  row |= {"rule": rule, "why": "A reason."}
  ours = {"x": original, "questions": 512, "group": 5, "curriculum.epochs": 1}
  wrong = originals.problems(row, tmp_path, "run.sh", ours.get)
  assert len(wrong) == (sentence is not None)
  assert not sentence or sentence in wrong[0]
