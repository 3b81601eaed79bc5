"""Invalid runs are refused with one sentence before anything is allocated.

Whole commands run as a user types them; no weight is read, no folder created.
"""

from __future__ import annotations

import commands
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.launch import evaluate, train
from anysearch_jax.launch import flags as launch_flags

WORLD = "with data.source 'world', whose questions are each of one of many"


def refused(command, folder, flags, *more):
  """Returns a command's error message; asserts that it left no files."""
  said = commands.run(
    command,
    "--config=configs/quickstart.py",
    f"--output={folder / 'run'}",
    "--cache=",
    *flags.split(),
    *more,
  )
  assert not (folder / "run").exists()
  return said


@pytest.mark.parametrize(
  ("flags", "sentence"),
  [
    # Numbers that mean nothing.
    ("seed=-1", "seed: found -1, expected 0 to 2^32 - 1."),
    ("group=1", "group: found 1, expected at least 2: an advantage is a"),
    ("optimizer.b1=1", "optimizer.b1: found 1.0, expected 0 to below 1."),
    ("engine.lanes=32,16", "engine.lanes: found (32, 16), expected numbers"),
    ("engine.kv_tokens=100", "engine.kv_tokens: found 100 in 1 parts, which"),
    ("evaluation.budgets=0,-1", "evaluation.budgets[1]: found -1, expected at"),
    # Names of nothing.
    ("reward.gamma_mode=on", "reward.gamma_mode: found 'on', expected one of"),
    ("name=../../outside", "name: found '../../outside', expected the name of"),
    ("policy=", "policy: found nothing, expected a Hugging Face folder"),
    ("policy=configs", "configs: no config.json; expected a Hugging Face fol"),
    # Geometry.
    ("group=3", "16 questions x 3 samples = 48 trajectories do not divide int"),
    (
      "engine.max_context=100",
      "episode.max_context 544 exceeds engine.max_con",
    ),
    ("episode.max_context=12", "episode.max_context: found 12, expected more "),
    ("batch.max_micro_batches=15", "found 15, expected at least 16: an optimi"),
    ("batch.attention=cudnn", "cudnn runs on NVIDIA GPUs; found platform cpu"),
    ("engine.attention=mosaic", "engine.attention: mosaic does not run on cpu"),
    ("mesh.data=9", "tensor 1 needs 9 devices; found 8."),
    ("mesh.tensor=8", "found 8, expected a divisor of the policy's heads, 4."),
    ("mesh.rollout=9", "mesh.rollout: found device 9, but a process has 8 dev"),
    ("mesh.rollout=0,1,2", "engine: found 32 lanes for 3 parts of the devices"),
    ("lora.rank=97", "lora.rank: found 97, expected at most the policy's wid"),
    # What does not go together.
    ("retrieval.encoder=x", "found 'x' with retrieval.kind 'lexical'; expect"),
    ("retrieval.price=1", "expected it with kind web or mcp only."),
    ("retrieval.log_mode=strict", "found 'strict' with retrieval.kind"),
    ("data.path=qa", "data.path: found 'qa' with data.source 'world', which"),
    ("retrieval.kind=index retrieval.index=x", f"found 'index' {WORLD}"),
    ("retrieval.kind=http retrieval.url=http://a:1", f"found 'http' {WORLD}"),
    ("engine.kind=sglang servers.urls=a:1", "servers.urls: found 'a:1', expec"),
    (
      "engine.kind=sglang servers.api_key_variable=NO",
      "NO is not set; expected",
    ),
    ("engine.kind=vllm servers.urls=a:1", "servers.urls: found 'a:1', expec"),
  ],
)
def test_training_refuses(flags, sentence, tmp_path, nothing_loads):
  flags = " ".join(f"--config.{each}" for each in flags.split())
  said = refused(train, tmp_path, flags)
  assert sentence in said
  assert said.startswith("anysearch train: ") and said.count("\n") == 0


@pytest.mark.parametrize(
  ("flags", "sentence"),
  [
    ("engine.kind=tgi", "engine.kind: found 'tgi', expected one of"),
    ("retrieval.kind=any", "retrieval.kind: found 'any', expected"),
    (
      "checkpoint.keep_best=1 checkpoint.best_metric=em",
      "checkpoint.best_metric: found 'em', expected one of reward/em, ",
    ),
  ],
)
def test_a_dry_run_refuses_what_training_would(flags, sentence, tmp_path):
  flags = " ".join(f"--config.{each}" for each in flags.split())
  said = refused(train, tmp_path, f"--dry_run {flags}")
  assert sentence in said
  assert said.startswith("anysearch train: ") and said.count("\n") == 0


@pytest.mark.parametrize(
  ("flags", "sentence"),
  [
    ("--config.sampling.top_p=0", "found 0.0, expected above 0, at most 1."),
    ("--config.evaluation.seeds=()", "evaluation.seeds: found (), expected o"),
    ("--config.compute_dtype=float16", "compute_dtype: found 'float16', expe"),
    ("--config.engine.max_context=9", "exceeds engine.max_context 9; raise"),
    ("--config.episode.max_context=12", "found 12, expected more than the "),
    ("--config.mesh.rollout=8", "mesh.rollout: found device 8, but a process"),
    ("--hf=configs", "configs: no config.json; expected a Hugging Face folder"),
    ("--checkpoint=configs", "configs: no source/; expected the folder of a"),
    ("--scripted=nowhere:x", "ModuleNotFoundError: No module named 'nowhere'"),
    ("--sglang=a:1", "servers.urls: found 'a:1', expected addresses such as"),
    ("--vllm=a:1", "servers.urls: found 'a:1', expected addresses such as"),
    ("--split=none", "Found split 'none'; expected train, dev, held-out."),
    ("--config.evaluation.datasets=nq", "Dataset 'nq': data.source 'world' "),
  ],
)
def test_an_evaluation_refuses(flags, sentence, tmp_path, nothing_loads):
  said = refused(evaluate, tmp_path, flags)
  assert sentence in said
  assert said.startswith("anysearch evaluate: ") and said.count("\n") == 0


@pytest.mark.parametrize("command", [train, evaluate])
def test_an_empty_folder_is_not_the_one_that_is_worked_in(command, tmp_path):
  said = refused(command, tmp_path, "", "--output=")
  assert said == "--output: found nothing, expected a folder."


FILE = """
from anysearch_jax import config as c
def get_config():
  return c.ExperimentConfig({})
"""


@pytest.mark.parametrize(
  ("text", "sentence"),
  [
    ("questions='16'", "config.questions: found '16' (str), expected int."),
    ("seed=True", "config.seed: found True (bool), expected int."),
    ("reward=None", "config.reward: found None, expected a group of values."),
    ("sead=1", "a.py, line 4: TypeError: ExperimentConfig.__init__() got an"),
    ("reward=c.RewardConfig(alfa=1)", "unexpected keyword argument 'alfa'"),
    ("name='x", "a.py: SyntaxError: unterminated string literal"),
  ],
)
def test_a_file_of_wrong_values_is_refused(text, sentence, tmp_path):
  path = tmp_path / "a.py"
  path.write_text(FILE.format(text))
  said = refused(train, tmp_path, "", f"--config={path}")
  assert sentence in said


def test_numbers_and_lists_of_a_file_are_what_their_fields_are(tmp_path):
  path = tmp_path / "a.py"
  path.write_text(
    FILE.format(
      "reward=c.RewardConfig(alpha=1), lora=c.LoraConfig(0, 1, ['q'])"
    )
  )
  config = launch_flags.load_config(str(path))
  assert type(config.reward.alpha) is float
  assert config.lora == config_lib.LoraConfig(alpha=1.0, targets=("q",))
