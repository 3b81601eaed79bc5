"""What the pages name exists, and README's Python runs."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pathlib
import re
import shlex

import commands
import pytest
from absl import flags

import anysearch_jax
from anysearch_jax import config as config_lib
from anysearch_jax.launch import flags as launch_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [
  *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
  *sorted((ROOT / "docs").glob("*.md")),
]
FLAG = re.compile(r"DEFINE_\w+\(\s*\"(\w+)\"")
# Of absl and of `--config.X`, which have their own tests.
OTHER_FLAGS = {"help"}


def anchors(page: pathlib.Path) -> set[str]:
  """Returns the anchors that GitHub makes from the headings of a page."""
  headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
  return {
    re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    for heading in headings
  }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page):
  text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
  for target in re.findall(r"\]\(([^)\s]+)\)", text):
    if re.match(r"https?:", target):
      continue
    name, _, anchor = target.partition("#")
    path = (page.parent / name) if name else page
    assert path.exists(), target
    assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_files_exist(page):
  text = page.read_text()
  for folder, name in re.findall(
    r"\b(launch|bench|(?<=-m )research)\.([a-z]\w*)", text
  ):
    module, package = f"{name}.py", f"{name}/__main__.py"
    found = [(ROOT / folder / path).is_file() for path in (module, package)]
    assert any(found), name
  for path in re.findall(
    r"(?<!/)\b(?:configs|docs|tests|research)/[\w/]+\.\w+", text
  ):
    # Made from a finished quickstart.
    assert path.endswith(".svg") or (ROOT / path).is_file(), path
  targets = re.findall(r"^[\w-]+(?=:)", (ROOT / "Makefile").read_text(), re.M)
  for target in re.findall(r"(?:`|^    )make ([\w-]+)", text, re.MULTILINE):
    assert target in targets, target


def test_site_lists_every_page():
  """Those of docs/ and, by docs/site_pages.py, those of the root."""
  listed = re.findall(
    r"^ +- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M
  )
  of_root = re.findall(
    r"\"\w+\.md\": \"(\w+\.md)\"", (ROOT / "docs/site_pages.py").read_text()
  )
  assert len(of_root) == 4
  pages = [page.name for page in PAGES[2:]]
  # Those of the settings and of the API are made from the code.
  made = ["configuration.md", "api.md"]
  assert sorted(listed) == sorted([*pages, *of_root, *made])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_exist(page):
  known = set(OTHER_FLAGS)
  for path in [
    *(ROOT / "launch").glob("*.py"),
    *(ROOT / "bench").rglob("*.py"),
    *(ROOT / "research").glob("*.py"),
  ]:
    known |= set(FLAG.findall(path.read_text()))
    known |= set(re.findall(r"DEFINE_alias\(\"(\w+)\"", path.read_text()))
  commands = re.findall(
    r"(?:launch|bench|research)\.\w+(?:\\\n|[^\n`])*", page.read_text()
  )
  for command in commands:
    for flag in re.findall(r" --(\w+)\b(?!\.)", command):
      assert flag in known, (flag, command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_configuration_values_exist(page):
  for path in re.findall(r"--config\.([a-z][\w.]*\w)", page.read_text()):
    node = config_lib.ExperimentConfig()
    for name in path.split("."):
      assert name in {f.name for f in dataclasses.fields(node)}, path
      node = getattr(node, name)


MADE = re.compile(r"--(?:output|local-dir)[= ](\S+)")
# What the project's commands make; `runs/x` is any run of the reader's.
READ = re.compile(r"(?:^|[=+,])((?:runs|data|indexes)/(?!\w\b)[^@+,\s]*)", re.M)


def parsed(argv):
  """Reads the configuration of a command, and ends."""
  if "config" in flags.FLAGS and flags.FLAGS.config != "FILE":
    launch_flags.read_config()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_start_and_an_earlier_one_made_what_they_read(
  page, monkeypatch
):
  monkeypatch.chdir(ROOT)
  text, made = page.read_text().replace("\\\n", " "), set()
  for line in re.findall(r"^ {4}(.+)$", text, re.MULTILINE):
    module = re.search(r"-m (launch\.\w+) ", line)
    if module and "--help" not in line:
      _, *given = shlex.split(line[module.start(1) :], comments=True)
      command = importlib.import_module(module[1])
      monkeypatch.setattr(command, "main", parsed)
      assert commands.run(command, *given) == "", line
      for path in READ.findall("\n".join(given)):
        parents = {path, *map(str, pathlib.Path(path).parents)}
        assert f"--output={path}" in given or parents & made, (path, line)
    made |= {*MADE.findall(line)}
    if "make quickstart" in line:
      made.add("runs/quickstart")


def test_python_of_the_readme_plays_within_its_budgets(monkeypatch, capsys):
  monkeypatch.chdir(ROOT)  # Where README says to run it.
  (code,) = re.findall(
    r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
  )
  exec(compile(code, "README.md", "exec"), {})
  printed = capsys.readouterr().out
  assert "right: ('mibus',)" in printed
  lines = re.findall(r"^B=(\d): (\w+) (\(.*\))$", printed, re.MULTILINE)
  assert [budget for budget, _, _ in lines] == ["0", "1", "3"]
  for budget, _, queries in lines:
    assert len(ast.literal_eval(queries)) <= int(budget)


def test_newest_release_of_the_changelog_is_the_version():
  text = (ROOT / "CHANGELOG.md").read_text()
  headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
  assert headings[:2] == ["Unreleased", anysearch_jax.__version__]
