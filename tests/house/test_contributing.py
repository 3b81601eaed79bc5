"""The files for contributors agree with the project."""

from __future__ import annotations

import pathlib
import re
import tomllib

import yaml

import anysearch_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]


def read(name):
  return yaml.safe_load((ROOT / name).read_text())


def test_workflow_does_what_ci_does_on_the_oldest_python_too():
  job = read(".github/workflows/test.yml")["jobs"]["test"]
  runs = [step["run"] for step in job["steps"] if "run" in step]
  assert runs == [".ci/run"]
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  oldest = project["requires-python"].removeprefix(">=")
  assert oldest in job["strategy"]["matrix"]["python"]


def test_commit_hooks_run_the_linter_of_the_environment():
  (repo,) = read(".pre-commit-config.yaml")["repos"]
  makefile = (ROOT / "Makefile").read_text()
  for hook in repo["hooks"]:
    command = " ".join(hook["entry"].split()[:2])
    assert command.replace(".venv/bin", "$(BIN)") in makefile


def test_newest_release_of_the_changelog_is_the_version():
  headings = re.findall(
    r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
  )
  assert headings[:2] == ["Unreleased", anysearch_jax.__version__]


def test_citation_names_the_project_and_the_paper():
  citation = read("CITATION.cff")
  assert {"cff-version", "message", "title", "authors"} <= set(citation)
  assert citation["title"].startswith("anysearch_jax")
  (paper,) = citation["references"]
  assert paper["title"].startswith("One Policy, Any Budget")
  assert len(paper["authors"]) == 5


def test_paths_that_the_contributors_page_names_exist():
  text = (ROOT / "CONTRIBUTING.md").read_text()
  named = re.findall(
    r"[`(]((?:anysearch_jax|configs|docs|tests)/[\w./]*|\w+\.md)[`)]", text
  )
  assert "anysearch_jax/methods/systems.py" in named
  assert [name for name in named if not (ROOT / name).exists()] == []
