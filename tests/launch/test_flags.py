"""`--config` flags: typed overrides, and errors for invalid ones."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.host import json_files
from anysearch_jax.policy import architecture, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.training import validation
from configs import paper
from launch import flags

DEFAULT = config_lib.ExperimentConfig()


def read(config, path):
  for key in path.split("."):
    config = getattr(config, key)
  return config


@pytest.mark.parametrize(
  ("path", "text", "value"),
  [
    ("seed", "7", 7),
    ("seed", "-7", -7),
    ("name", "7", "7"),
    ("name", "", ""),
    ("name", "a=b", "a=b"),
    ("policy", "runs/x,y", "runs/x,y"),
    ("reward.alpha", "1", 1.0),
    ("reward.alpha", "1e-3", 0.001),
    ("reward.gamma_mode", "fixed", "fixed"),
    ("reward.use_abs", "false", False),
    ("reward.use_abs", "True", True),
    ("batch.row_lengths", "8,16", (8, 16)),
    ("batch.row_lengths", "(8, 16)", (8, 16)),
    ("batch.row_lengths", "[8]", (8,)),
    ("batch.row_lengths", "8", (8,)),
    ("lora.targets", "q,v", ("q", "v")),
    ("lora.targets", "q", ("q",)),
    ("lora.targets", "('q', 'v')", ("q", "v")),
    ("lora.base_dtype", "bfloat16", "bfloat16"),
    ("evaluation.budgets", "()", ()),
  ],
)
def test_an_override_is_typed_and_changes_nothing_else(path, text, value):
  config = flags.override(DEFAULT, [f"{path}={text}"])
  assert read(config, path) == value
  assert type(read(config, path)) is type(value)
  restored = flags.override(
    config, [f"{path}={read(DEFAULT, path)}"] if path != "name" else []
  )
  if path != "name":
    assert restored == DEFAULT


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
    ("seed=1.5", r"config.seed: found 1.5 \(float\), expected int"),
    ("seed=true", r"config.seed: found True \(bool\), expected int"),
    ("reward.alpha=high", "config.reward.alpha: found 'high'"),
    ("reward.use_abs=1", r"config.reward.use_abs: found 1 \(int\)"),
    ("reward.use_abs=no", "config.reward.use_abs: found 'no'"),
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
  ],
)
def test_invalid_configuration_file_is_refused(tmp_path, name, text, sentence):
  if text is not None:
    (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=sentence):
    flags.load_config(str(tmp_path / name))


def test_a_file_gives_its_configuration(tmp_path):
  (tmp_path / "a.py").write_text(CONFIG_FILE)
  config = flags.load_config(str(tmp_path / "a.py"))
  assert config == config_lib.ExperimentConfig(name="mine")


@pytest.mark.parametrize(
  ("policy", "parameters"),
  [
    ("qwen2_5_7b", 7_615_616_512),
    ("llama3_1_8b", 8_030_261_248),
    ("qwen3_4b", 4_022_468_096),
  ],
)
def test_the_papers_configurations_can_run_in_every_preset(policy, parameters):
  name = f"configs/{policy}.py"
  found = {}
  for preset in paper.PRESETS:
    config = flags.load_config(f"{name}:{preset}" if preset else name)
    validation.validate(config)
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
    # What separates engine and trainer there is corrected.
    assert config.objective.old_logp == "trainer"
    assert config.objective.importance_cap == 2.0
  shape = f"configs/shapes/{pathlib.Path(found[''].policy).name}.json"
  a = architecture.from_hf(json_files.read(pathlib.Path(shape)))
  assert weights.count(table.rows(a)) == parameters


@pytest.mark.parametrize(
  ("preset", "sentence"),
  [
    (
      "configs/qwen3_4b.py:all",
      "preset 'all', expected one of questions, lora",
    ),
    ("configs/own_data.py:lora80", "has no presets; leave it out"),
  ],
)
def test_unknown_preset_is_refused(preset, sentence):
  with pytest.raises(ValueError, match=sentence):
    flags.load_config(preset)


COMMAND = """
from launch import flags
flags.define_config()
def main(argv):
  config = flags.read_config()
  print(config.name, config.seed, config.batch.row_lengths, argv[1:])
flags.run(main)
"""


def command(tmp_path, *args):
  (tmp_path / "a.py").write_text(CONFIG_FILE)
  return subprocess.run(
    [sys.executable, "-c", COMMAND, f"--config={tmp_path / 'a.py'}", *args],
    cwd=pathlib.Path(__file__).resolve().parents[2],
    capture_output=True,
    text=True,
    check=False,
  )


def test_a_command_reads_overrides_from_its_command_line(tmp_path):
  done = command(
    tmp_path, "--config.seed=7", "-config.batch.row_lengths=8,16", "rest"
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == "mine 7 (8, 16) ['rest']"


@pytest.mark.parametrize(
  ("argument", "sentence"),
  [
    ("--config=", "--config=: found no such file"),
    ("--config.sead=7", "--config.sead: unknown key 'sead'"),
    ("--sead=7", "Unknown command line flag 'sead'"),
  ],
)
def test_unknown_flag_is_refused(tmp_path, argument, sentence):
  done = command(tmp_path, argument)
  assert done.returncode == 2
  said = done.stderr.splitlines()
  assert sentence in said[0] and len(said) == 2, done.stderr
  assert not done.stdout


@pytest.mark.parametrize("asked", ["--help", "-h", "-?"])
def test_help_exits_with_0(tmp_path, asked):
  done = command(tmp_path, asked)
  assert done.returncode == 0
  assert "--config" in done.stdout and not done.stderr


def listed(text):
  """Returns the configuration flags of a help text as overrides."""
  return [
    line.strip().removeprefix("--config.")
    for line in text.splitlines()
    if line.startswith("  --config.")
  ]


@pytest.mark.parametrize(
  "name", ["configs/quickstart.py", "configs/methods.py:search_r1", ""]
)
def test_help_lists_every_value_as_a_flag_that_gives_it_again(name):
  config = flags.load_config(name) if name else DEFAULT
  overrides = listed(flags.help_text(config, name))
  assert flags.override(DEFAULT, overrides) == config
  leaves = dict(settings.leaves(settings.to_dict(config)))
  assert {each.partition("=")[0] for each in overrides} == set(leaves)


def test_help_says_what_a_value_means_and_may_be():
  text = flags.help_text(DEFAULT, "the paper")
  assert "--config.curriculum: Budget curriculum (section" in text
  alpha = "--config.reward.alpha=0.5\n      Weight of accuracy. (learning, at"
  assert alpha in text


def test_help_has_the_values_of_the_configuration_named_before_it(tmp_path):
  done = command(tmp_path, "--config.seed=7", "--help")
  assert done.returncode == 0, done.stderr
  assert {"name=mine", "seed=7"} <= {*listed(done.stdout)}
  refused = command(tmp_path, "--config.sead=7", "--help")
  assert refused.returncode == 2 and "'sead'" in refused.stderr


def test_help_into_a_closed_pipe_prints_no_traceback(tmp_path):
  (tmp_path / "a.py").write_text(CONFIG_FILE)
  process = subprocess.Popen(
    [sys.executable, "-c", COMMAND, f"--config={tmp_path / 'a.py'}", "--help"],
    cwd=pathlib.Path(__file__).resolve().parents[2],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  process.stdout.close()
  assert process.stderr.read() == ""
  process.wait(60)
