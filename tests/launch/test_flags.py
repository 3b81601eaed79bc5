"""`--config` flags: typed overrides, and errors for invalid ones."""

from __future__ import annotations

import dataclasses
import subprocess

import commands
import pytest
import source_tree

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.configs import methods, paper
from anysearch_jax.launch import flags
from anysearch_jax.methods import systems

DEFAULT = config_lib.ExperimentConfig()


def read(config, path):
  for key in path.split("."):
    config = getattr(config, key)
  return config


@pytest.mark.parametrize(
  ("path", "text", "value"),
  [
    ("seed", "7", 7),
    ("name", "a=b", "a=b"),
    ("policy", "runs/x,y", "runs/x,y"),
    ("reward.alpha", "1e-3", 0.001),
    ("reward.gamma_mode", "fixed", "fixed"),
    ("reward.use_abs", "false", False),
    ("reward.use_abs", "True", True),
    ("batch.row_lengths", "8,16", (8, 16)),
    ("batch.row_lengths", "(8, 16)", (8, 16)),
    ("batch.row_lengths", "8", (8,)),
    ("lora.targets", "q,v", ("q", "v")),
    ("lora.targets", "q", ("q",)),
    ("lora.targets", "('q', 'v')", ("q", "v")),
    ("evaluation.budgets", "()", ()),
  ],
)
def test_an_override_is_typed_and_changes_nothing_else(path, text, value):
  config = flags.override(DEFAULT, [f"{path}={text}"])
  assert read(config, path) == value
  assert type(read(config, path)) is type(value)
  if path != "name":
    assert flags.override(config, [f"{path}={read(DEFAULT, path)}"]) == DEFAULT


def test_overrides_apply_in_order():
  config = flags.override(
    DEFAULT, ["seed=1", "reward.alpha=2", "seed=3", "reward.beta=4"]
  )
  assert (config.seed, config.reward.alpha, config.reward.beta) == (3, 2, 4)


@pytest.mark.parametrize(
  ("assignment", "sentence"),
  [
    ("sead=1", "--config.sead: unknown key 'sead'; expected one of .*seed"),
    ("reward.alfa=1", "--config.reward.alfa: unknown key 'alfa'.*alpha"),
    ("reward=1", "--config.reward is a group; name one of its values"),
    ("seed.x=1", "--config.seed.x: 'seed' is a value and has no keys"),
    ("seed", "--config.seed: no value; write --config.seed=..."),
    ("seed=x", r"config.seed: found 'x' \(str\), expected int"),
    ("reward.alpha=high", "config.reward.alpha: found 'high'"),
    ("reward.use_abs=1", r"config.reward.use_abs: found 1 \(int\)"),
    ("batch.row_lengths=8,x", "config.batch.row_lengths: found '8,x'"),
    ("batch.row_lengths=8,9.5", r"row_lengths\[1\]: found 9.5 \(float\)"),
  ],
)
def test_invalid_override_is_refused(assignment, sentence):
  with pytest.raises(ValueError, match=sentence):
    flags.override(DEFAULT, [assignment])


CONFIG_FILE = """
from anysearch_jax import config
def get_config():
  return config.ExperimentConfig(name="mine")
"""


@pytest.mark.parametrize(
  ("name", "text", "sentence"),
  [
    ("a.py", None, "no such file"),
    ("a.py", "x = 1", r"no get_config\(\)"),
    ("a.txt", CONFIG_FILE, "expected a Python file"),
    ("a.py", "def get_config(): return {}", "returned dict, expected an Exp"),
    ("a.py:lora", CONFIG_FILE, "has no presets; leave it out"),
  ],
)
def test_invalid_configuration_file_is_refused(tmp_path, name, text, sentence):
  if text is not None:
    (tmp_path / name.partition(":")[0]).write_text(text)
  with pytest.raises(ValueError, match=sentence):
    flags.load_config(str(tmp_path / name))


@pytest.mark.parametrize("policy", methods.BACKBONES)
def test_the_papers_configurations_can_run_in_every_preset(policy):
  name = f"configs/{policy}.py"
  found = {}
  for preset in paper.PRESETS:
    config = flags.load_config(f"{name}:{preset}" if preset else name)
    systems.validate(config)
    found[preset] = config
  steps = {
    preset: c.questions * c.group // c.curriculum.steps_per_rollout
    for preset, c in found.items()
  }
  assert (steps[""], steps["questions"]) == (512, 2560)
  assert found[""].optimizer == config_lib.OptimizerConfig()
  assert found["lora80"].lora.rank and found["lora141"].lora.rank
  assert len({c.name for c in found.values()}) == len(paper.PRESETS)
  for config in found.values():
    assert config.compute_dtype == "bfloat16"
    # What separates engine and trainer there has a bound.
    assert config.objective.old_logp == "engine"
    assert config.objective.importance_cap == 3.0


class Command:
  """A command that notes what it was called with."""

  define_flags = staticmethod(flags.define_config)

  def main(self, argv):
    self.config = config = flags.read_config()
    self.read = config.name, config.seed, config.batch.row_lengths, argv[1:]


def run(tmp_path, *arguments):
  (tmp_path / "a.py").write_text(CONFIG_FILE)
  command = Command()
  said = commands.run(command, f"--config={tmp_path / 'a.py'}", *arguments)
  return said or command.read


def test_a_command_reads_overrides_from_its_command_line(tmp_path):
  lengths = "-config.batch.row_lengths=8,16"
  found = run(tmp_path, "--config.seed=7", lengths, "rest")
  assert found == ("mine", 7, (8, 16), ["rest"])
  # As absl reads its own flags.
  found = run(tmp_path, lengths, "--config.seed", "7", "rest")
  assert found == ("mine", 7, (8, 16), ["rest"])
  found = run(tmp_path, "--config.seed", lengths)
  assert found == "--config.seed: no value; write --config.seed=..."


@pytest.mark.parametrize(
  ("argument", "sentence"),
  [
    ("--config=", "--config=: found no such file"),
    ("--config.sead=7", "--config.sead: unknown key 'sead'"),
    ("--config.steps=3", "Did you mean --config.curriculum.total_steps=3?"),
    ("--sead=7", "flag 'sead'. Did you mean --config.seed=7?"),
    ("--lr=1e-4", "Did you mean --config.optimizer.learning_rate=1e-4?"),
    ("--total_steps=1", "Did you mean --config.curriculum.total_steps=1?"),
    # A name alone would keep AnySearch's schedule.
    ("--config.method.name=search_r1", "expected --method=search_r1 with"),
  ],
)
def test_unknown_flag_is_refused(tmp_path, argument, sentence):
  said = run(tmp_path, argument)
  assert sentence in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("name", sorted(systems.METHODS))
def test_a_system_by_name_is_its_preset(name):
  command = Command()
  arguments = ("--config=configs/quickstart.py", f"--method={name}")
  commands.run(command, *arguments, f"--config.method.name={name}")
  expected = methods.get_config(name)
  found = dataclasses.replace(command.config, name=expected.name)
  assert found == dataclasses.replace(expected, policy=found.policy)


def test_a_system_on_another_preset_is_refused_with_its_command():
  with pytest.raises(ValueError, match="qwen3_1_7b-24 --method=zerosearch"):
    methods.get_config("zerosearch:qwen3_1_7b-24")


def test_a_system_does_not_inherit_from_another(tmp_path):
  named = CONFIG_FILE.replace(
    "name=", "method=config.MethodConfig('zerosearch'), name="
  )
  (tmp_path / "own.py").write_text(named)
  command = Command()
  own = f"--config={tmp_path / 'own.py'}"
  commands.run(command, own, "--config.method.name=zerosearch")
  assert command.config.method.name == "zerosearch"
  for flag in ("--method=anysearch", "--config.method.name=anysearch"):
    assert "settings of 'zerosearch'" in commands.run(command, own, flag)


def listed(text):
  """Returns the configuration flags of a help text as overrides."""
  return [
    line.strip().removeprefix("--config.")
    for line in text.splitlines()
    if line.startswith("  --config.")
  ]


@pytest.mark.parametrize("name", ["configs/methods.py:search_r1", ""])
def test_help_lists_every_value_as_a_flag_that_gives_it_again(name):
  config = flags.load_config(name) if name else DEFAULT
  overrides = listed(flags.help_text(config, name))
  assert flags.override(DEFAULT, overrides) == config
  leaves = dict(settings.leaves(settings.to_dict(config)))
  assert {each.partition("=")[0] for each in overrides} == set(leaves)


COMMAND = """
from anysearch_jax.launch import flags
flags.define_config()
flags.run(lambda argv: None)
"""


def test_help_has_the_values_of_the_configuration_named_before_it(tmp_path):
  (tmp_path / "a.py").write_text(CONFIG_FILE)
  command = ("-c", COMMAND, f"--config={tmp_path / 'a.py'}")
  found = source_tree.python(
    *command, "--config.seed=7", "--helpfull", check=True
  )
  assert {"name=mine", "seed=7"} <= {*listed(found.stdout)}
  closed = source_tree.started(*command, "--help", stderr=subprocess.PIPE)
  closed.stdout.close()
  assert closed.stderr.read() == ""
  closed.wait(60)


def test_unexpected_argument_is_refused(capsys):
  with pytest.raises(SystemExit):
    flags.call_command(len, ["launch.x", "rest"], arguments=False)
  assert "Unexpected argument 'rest'" in capsys.readouterr().err
