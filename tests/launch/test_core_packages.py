"""What needs no package of an extra, and what the others say without it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import tomllib
import urllib.request

import chat_endpoint
import pytest
import source_tree
from packaging import requirements

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = {"faiss-cpu": "faiss", "orbax-checkpoint": "orbax"}
# Python imports this file by itself when it starts.
SITECUSTOMIZE = """
import sys

class Missing:
  def find_spec(self, name, path=None, target=None):
    if name.partition(".")[0] in {missing!r}:
      raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(params=["core"])
def environment(tmp_path, request):
  """Returns the environment of a Python without [train] and [serve].

  The parameter "dense" leaves the packages of [dense] in it.
  """
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  names = [
    requirements.Requirement(line).name
    for line in project["optional-dependencies"]["train"]
  ]
  missing = {"jaxlib", "mcp", *(MODULES.get(name, name) for name in names)}
  if request.param == "dense":
    missing -= {"tokenizers"}
  folder = tmp_path / "site"
  folder.mkdir()
  (folder / "sitecustomize.py").write_text(
    SITECUSTOMIZE.format(missing=missing)
  )
  notes = tmp_path / "notes"
  notes.mkdir()
  (notes / "lease.md").write_text("# Lease\n\nThe lease ends in June 2027.\n")
  return os.environ | {
    "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
    "XDG_CACHE_HOME": str(tmp_path / "cache"),
  }


def flags_of(server, tmp_path):
  return f"--documents={tmp_path / 'notes'}", f"--openai={server.url}"


@pytest.mark.parametrize("behaviour", ["tools", "tags"])
def test_ask_over_an_endpoint(environment, tmp_path, behaviour):
  with chat_endpoint.served(behaviour) as server:
    done = source_tree.python(
      *("-m", "launch.ask", *flags_of(server, tmp_path), "--budget=2"),
      "When does the lease end?",
      env=environment,
    )
  assert done.returncode == 0, done.stderr
  assert "answer: In June 2027 [1]." in done.stdout
  assert "lease.md" in done.stdout.splitlines()[-2]


@pytest.mark.parametrize("environment", ["dense"], indirect=True)
def test_ask_searches_by_meaning_without_jax(environment, tmp_path):
  (tmp_path / "notes/cat.md").write_text("A young cat sleeps on the couch.")
  with chat_endpoint.served(queries=["nap of the kitten"]) as server:
    done = source_tree.python(
      *("-m", "launch.ask", *flags_of(server, tmp_path), "--budget=1"),
      "Where does the kitten take its nap?",
      env=environment,
    )
  assert done.returncode == 0, done.stderr
  search, hit = done.stdout.splitlines()[1:3]
  assert search == "search 1: nap of the kitten"
  assert "cat.md" in hit


def test_serve_over_an_endpoint(environment, tmp_path):
  with chat_endpoint.served() as server:
    process = source_tree.started(
      *("-m", "launch.serve", *flags_of(server, tmp_path), "--port=0"),
      env=environment,
    )
    try:
      line = next(line for line in process.stdout if "serving " in line)
      url = re.search(r"http://\S+", line)[0]
      body = json.dumps({"input": "When does the lease end?"}).encode()
      request = urllib.request.Request(
        f"{url}/v1/responses", body, {"content-type": "application/json"}
      )
      reply = json.load(urllib.request.urlopen(request, timeout=60))
    finally:
      process.terminate()
      process.communicate(timeout=60)
  assert reply["output"][-1]["content"][0]["text"] == "In June 2027 [1]."
  assert process.returncode == 0


@pytest.mark.parametrize(
  ("extra", "arguments"),
  [
    ("train", ("launch.report", "runs")),
    ("train", ("launch.ask", "--config=configs/quickstart.py", "a question")),
    ("serve", ("launch.serve", "--mcp", "--config=configs/quickstart.py")),
  ],
)
def test_what_is_missing_is_named_with_the_extra(environment, extra, arguments):
  done = source_tree.python("-m", *arguments, env=environment)
  assert done.returncode == 1
  (line,) = done.stderr.splitlines()
  assert re.fullmatch(
    r"anysearch: found no package '\w+', which this command needs; pip install "
    rf"'anysearch_jax\[{extra}\]'",
    line,
  ), line
