"""An installed wheel gives what a checkout gives, in any folder."""

from __future__ import annotations

import email.message
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import source_tree

import anysearch_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("anysearch_jax", "configs", "launch", "retrieval")
EXTRAS = "cuda12 cuda13 docs mlflow plan test tpu wandb".split()


def pip(*arguments: object) -> None:
  done = source_tree.python(
    "-m", "pip", "--disable-pip-version-check", *arguments
  )
  assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
  """Builds a wheel from a copy, because setuptools writes beside sources."""
  pytest.importorskip(
    "setuptools", reason="building needs setuptools (the extra [test])"
  )
  copy = tmp_path_factory.mktemp("source")
  for package in PACKAGES:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
      ROOT / package, copy / package, ignore=ignored, symlinks=True
    )
  for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, copy)
  shutil.copy(ROOT / "requirements.txt", copy)
  output = tmp_path_factory.mktemp("wheel")
  # From the source distribution, which has to hold what a build needs.
  code = "from setuptools import build_meta; import sys\n"
  code += "build_meta.build_sdist(sys.argv[1])"
  source_tree.python("-c", code, output, cwd=copy, check=True)
  (source,) = output.glob("*.tar.gz")
  pip(
    *("wheel", "--no-deps", "--no-build-isolation", "--no-index"),
    *(f"--wheel-dir={output}", source),
  )
  (path,) = output.glob("*.whl")
  return path


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("site")
  pip("install", "--no-deps", "--no-index", f"--target={folder}", wheel)
  return folder


def run(site, folder, *command: str) -> subprocess.CompletedProcess[str]:
  """Runs a command that must end well."""
  env = os.environ | {"PYTHONPATH": str(site)}
  how = {"capture_output": True, "text": True, "timeout": 300}
  done = subprocess.run(command, cwd=folder, env=env, **how)
  assert done.returncode == 0, done.stderr
  return done


def test_wheel_has_every_file_of_the_packages(wheel):
  tracked = subprocess.run(
    ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True
  ).stdout.split("\n")
  present = [x for x in tracked if x and (ROOT / x).is_file()]
  if not present:
    pytest.skip("needs a git checkout, which says what the packages hold")
  held = set(zipfile.ZipFile(wheel).namelist())
  installed = {
    x if x.startswith("anysearch_jax") else f"anysearch_jax/{x}"
    for x in present
  }
  assert installed - held == set()
  assert "anysearch_jax/configs/graded_world_policy/model.safetensors" in held
  tops = {name.partition("/")[0] for name in held}
  assert {name for name in tops if "." not in name} == {"anysearch_jax"}


def test_wheel_names_its_version_and_its_extras(site):
  (found,) = importlib.metadata.distributions(
    name="anysearch_jax", path=[str(site)]
  )
  assert found.version == anysearch_jax.__version__
  metadata: email.message.Message = found.metadata
  assert set(EXTRAS) <= set(metadata.get_all("Provides-Extra"))
  required = found.requires
  assert any("jax[cuda12]" in x and 'extra == "cuda12"' in x for x in required)
  # The core needs no JAX.
  jax_lines = [x for x in required if re.match(r"jax[<>=\[]", x)]
  assert jax_lines and all("extra ==" in x for x in jax_lines)
  assert any(re.match("httpx2[<>=]", x) and "extra" not in x for x in required)


def test_description_has_no_link_that_an_index_cannot_follow(site):
  (found,) = importlib.metadata.distributions(
    name="anysearch_jax", path=[str(site)]
  )
  text = found.metadata.get_payload() or found.metadata["Description"]
  assert found.metadata["Description-Content-Type"] == "text/markdown"
  assert "make quickstart" in text and "(docs/" not in text
  links = re.findall(r"\]\(([^)]*)\)", text)
  assert [x for x in links if not x.startswith("https://")] == []
  assert found.metadata["License-Expression"] == "Apache-2.0"


def test_installed_quickstart_is_found_from_another_folder(site, tmp_path):
  done = run(
    *(site, tmp_path, sys.executable, "-m", "anysearch_jax.launch.train"),
    *("--config=configs/quickstart.py", "--dry_run"),
  )
  configs = site / "anysearch_jax" / "configs"
  assert str(configs / "graded_world_policy") in done.stdout
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_script_of_the_server_stays_executable(site, kind):
  assert os.access(
    site / "anysearch_jax" / "launch" / f"serve_{kind}.sh", os.X_OK
  )


def test_installed_command_runs_by_its_name(site, tmp_path):
  done = run(site, tmp_path, str(site / "bin" / "anysearch"), "--version")
  assert done.stdout.split()[:2] == ["anysearch", anysearch_jax.__version__]
  # It reads the sources of the commands, wherever they are installed.
  command = str(site / "bin" / "anysearch")
  script = run(site, tmp_path, command, "completion", "bash").stdout
  assert "--openai_calls=" in script and "--max_topk=" in script


@pytest.fixture
def hostile(tmp_path) -> pathlib.Path:
  """A folder with packages that are named as the project's, and a module."""
  for package in PACKAGES:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise ImportError('no')")
  (tmp_path / "mine.py").write_text(
    "def reward(outcomes, config):\n  return {'total': outcomes.em * 1.0}\n"
  )
  return tmp_path


def test_installed_command_runs_beside_packages_of_the_same_names(
  site, hostile
):
  command = str(site / "bin" / "anysearch")
  listed = run(site, hostile, command, "list")
  assert "search_r1" in listed.stdout
  dry = run(
    *(site, hostile, command, "train", "--dry_run"),
    *("--config=configs/quickstart.py", "--reward=mine:reward"),
  )
  assert '"function": "mine:reward"' in dry.stdout


def test_a_script_imports_the_library_beside_packages_of_its_rooms_names(
  site, hostile
):
  shutil.rmtree(hostile / "anysearch_jax")
  (hostile / "script.py").write_text(
    "import anysearch_jax as aj\n"
    "from anysearch_jax.configs import quickstart\n"
    "quickstart.get_config()\n"
    "print(aj.fuse.__module__, aj.LexicalRetriever.__module__)\n"
  )
  printed = run(site, hostile, sys.executable, "script.py").stdout.split()
  assert printed == [
    "anysearch_jax.retrieval.pipeline",
    "anysearch_jax.retrieval.lexical",
  ]
  run(site, hostile, sys.executable, "-m", "anysearch_jax.launch.list")


@pytest.mark.slow
def test_installed_commands_answer_and_train_there(site, hostile):
  command = str(site / "bin" / "anysearch")
  asked = run(
    *(site, hostile, command, "ask", "--config=configs/quickstart.py"),
    *("--policy=configs/graded_world_policy", "--budget=3", "--json"),
    "bupor mayor employer ?",
  )
  assert json.loads(asked.stdout)["searches"] <= 3
  run(
    *(site, hostile, command, "train", "--config=configs/quickstart.py"),
    *("--reward=mine:reward", "--output=run", "--mlflow"),
    *("--config.curriculum.total_steps=2", "--config.questions=2"),
    *("--config.curriculum.steps_per_rollout=1", "--config.group=2"),
    "--config.curriculum.phase1_steps=0",
  )
  assert (hostile / "run" / "policy" / "config.json").is_file()
  assert list(json.loads((hostile / "run" / "trackers.json").read_text()))
