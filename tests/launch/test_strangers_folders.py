"""Folders of strangers are opened by every command, and none of it is run."""

from __future__ import annotations

import json
import pathlib

import commands
import jax
import pytest
import random_encoders
import small_run
import source_tree

from anysearch_jax.config import settings as config_settings
from anysearch_jax.host import json_files, plugins
from anysearch_jax.launch import ask, evaluate, report
from anysearch_jax.policy import hf
from anysearch_jax.retrieval.encoder import encoder

# Runs when it is imported, and when any name in it is called.
CODE = """import pathlib
pathlib.Path({marker!r}).touch()
class Theirs(dict): pass
def __getattr__(name): return Theirs
"""
# Reaches the interpreter where a template is not in a sandbox.
TEMPLATE = (
  "{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}"
  "{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}"
)
OWN_SETTINGS = (
  *("method.name", "reward.function", "episode.prompts", "method.judge"),
  *("retrieval.kind", "data.source"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder with `code.py`, which writes `marker`; it is the current one."""
  marker = tmp_path / "marker"
  (tmp_path / "their_code.py").write_text(CODE.format(marker=str(marker)))
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  return tmp_path


@pytest.fixture
def policy(folder):
  """A policy whose files name code, in the folder of a run that does too."""
  parent = folder / "run"
  hf.save(parent / "policy", small_run.parts()["policy"])
  values = config_settings.to_dict(small_run.CONFIG)
  for setting in OWN_SETTINGS:
    group, _, name = setting.partition(".")
    values[group][name] = "their_code.py:METHOD#e"
  values["search"]["tools"] = ["count=their_code.py:METHOD"]
  for place in (parent, parent / "evaluation" / "plain"):
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(values))
  return parent / "policy"


def changed(path, **values):
  """Adds keys to a JSON file, or writes it."""
  json_files.write(path, json_files.read(path, missing={}) | values)


@pytest.fixture
def config_file(folder):
  """The configuration of whoever opens the folder."""
  path = folder / "mine.py"
  path.write_text(
    "from anysearch_jax import config\n"
    "def get_config():\n"
    "  return config.ExperimentConfig(\n"
    f"    episode=config.{small_run.CONFIG.episode!r},\n"
    f"    engine=config.{small_run.CONFIG.engine!r},\n"
    "  )\n"
  )
  return f"--config={path}"


def test_code_is_run_if_the_caller_names_it(folder):
  """So the marker of the other tests can be written at all."""
  plugins.load("their_code.py:Theirs", setting="--reward", expected="a dict")
  assert (folder / "marker").exists()


def test_commands_run_nothing_that_a_run_names(folder, policy, config_file):
  place = policy.parent / "evaluation" / "plain"
  arguments = config_file, f"--hf={policy}", "--allow_cpu"
  asked = *arguments, "--budget=0", "--cache=", "--json", "budget ?"
  ended, printed = commands.printed(ask, *asked)
  assert json.loads(printed)["searches"] == 0, ended
  played = (
    *arguments,
    *("--budgets=0", "--seeds=1", "--config.evaluation.questions=2"),
    "--cache=",
  )
  said = commands.run(evaluate, *played, f"--output={place}")
  assert "it holds the results of other settings" in said
  (place / "config.json").rename(folder / "theirs.json")
  assert commands.run(evaluate, *played, f"--output={place}") == ""
  (folder / "theirs.json").replace(place / "config.json")
  assert commands.run(report, str(policy.parent), "--output=page/it.html") == ""
  assert pathlib.Path("page/it.html").is_file()
  assert not (folder / "marker").exists()


def test_packages_of_the_current_folder_are_not_imported(folder):
  """JAX imports each package of `jax_plugins` that it finds."""
  package = folder / "jax_plugins" / "theirs"
  package.mkdir(parents=True)
  (folder / "their_code.py").rename(package / "__init__.py")
  (folder / "mine.py").write_text("def reward(outcomes, config): ...\n")
  arguments = "-m", "anysearch_jax.launch.ask", "--budget=0", "zzz ?"
  notes = folder / "notes" / "a.txt"
  notes.parent.mkdir()
  notes.write_text("A note.")
  documents = "--documents=notes"
  policy = f"--hf={source_tree.ROOT / 'configs/graded_world_policy'}"
  done = source_tree.python("-P", *arguments, documents, policy, cwd=folder)
  assert "no word for 'zzz'" in done.stderr, done.stderr
  assert not (folder / "marker").exists()
  # What the user names is found in the current folder.
  code = (
    "import sys; sys.argv = ['-m']; import anysearch_jax.launch; "
    "from anysearch_jax.host import plugins; "
    "plugins.load('mine:reward', setting='--reward', expected='a function')"
  )
  done = source_tree.python("-P", "-c", code, cwd=folder)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_model_is_not_run(folder, policy, file):
  for name in ("tokenization_theirs", "modeling_theirs"):
    (policy / f"{name}.py").write_text((folder / "their_code.py").read_text())
  mapping = {
    "AutoTokenizer": ["tokenization_theirs.Theirs"] * 2,
    "AutoConfig": "modeling_theirs.Theirs",
    "AutoModelForCausalLM": "modeling_theirs.Theirs",
  }
  changed(policy / file, auto_map=mapping, tokenizer_class="Theirs")
  try:
    hf.describe(policy)
    hf.load(policy)
  except ValueError as error:
    assert "auto_map" in str(error) or "Theirs" in str(error)
  assert not (folder / "marker").exists()


def test_templates_of_a_model_reach_no_interpreter(folder, policy):
  template = TEMPLATE.format(marker=folder / "marker")
  changed(policy / "tokenizer_config.json", chat_template=template)
  (policy / "chat_template.jinja").write_text(template)
  _, codec = hf.describe(policy)
  with pytest.raises(Exception, match="unsafe|cycler|undefined"):
    codec.hf.apply_chat_template([{"role": "user", "content": "?"}])
  assert not (folder / "marker").exists()


def test_modules_of_an_encoder_are_not_run(folder):
  random_encoders.make(folder / "encoder")
  (folder / "encoder" / "their_code.py").write_text(
    (folder / "their_code.py").read_text()
  )
  modules = [{"idx": 0, "name": "0", "path": "", "type": "their_code.Theirs"}]
  random_encoders.write(folder / "encoder" / "modules.json", modules)
  with pytest.raises(ValueError, match="module 'Theirs' is not supported"):
    encoder.Encoder(folder / "encoder", devices=jax.devices("cpu"))
  assert not (folder / "marker").exists()
