"""Compares runs on meshes of devices with the same run on one device."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.policy import decoder, hf
from anysearch_jax.rollout.jax_engine import kv_store

FULL = config_lib.changed(small_run.CONFIG, curriculum={"total_steps": 6})
APART = config_lib.MeshConfig(
  fsdp=2, tensor=2, trainer=(0, 1, 2, 3), rollout=(4, 5, 6, 7)
)
TOGETHER = config_lib.MeshConfig(fsdp=2, tensor=2, sequence_parallel=True)
# Times differ between runs, and another test may have compiled before.
PASSING = ("time/", "compile/", "train/tokens_per_second")


def train(folder, parts, config, mesh=config_lib.MeshConfig()):  # noqa: B008
  small_run.train(folder, parts, dataclasses.replace(config, mesh=mesh))
  return folder


def metrics(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def repeated(record):
  return {n: x for n, x in record.items() if not n.startswith(PASSING)}


def trajectories(folder):
  paths = sorted((folder / "trajectories").iterdir())
  return [path.read_text() for path in paths]


def assert_same_run(folder, expected):
  for mine, theirs in zip(metrics(folder), metrics(expected), strict=True):
    assert mine.keys() == theirs.keys()
    for name, value in repeated(theirs).items():
      np.testing.assert_allclose(
        mine[name], value, rtol=1e-4, atol=1e-6, err_msg=name
      )
  # A differently sampled token would change the text.
  assert trajectories(folder) == trajectories(expected)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5),
    hf.load(folder / "policy").params,
    hf.load(expected / "policy").params,
  )


@pytest.fixture(scope="module")
def parts():
  """Parts of the small run; their heads divide over four rollout devices."""
  made = small_run.parts()
  policy = made["policy"]
  a = dataclasses.replace(policy.architecture, heads=4, kv_heads=4, head_dim=4)
  policy = policy._replace(params=decoder.initialize(a, 0), architecture=a)
  return made | {"policy": policy}


@pytest.fixture(scope="module")
def alone(parts, tmp_path_factory):
  """A run on one device."""
  return train(tmp_path_factory.mktemp("alone"), parts, FULL)


@pytest.fixture(scope="module")
def apart(parts, tmp_path_factory):
  """The same run, trained on four devices and sampled on four others."""
  for program in (kv_store.prefill, kv_store.decode):
    program.clear_cache()
  return train(tmp_path_factory.mktemp("apart"), parts, FULL, APART)


@pytest.fixture
def unfinished(apart, tmp_path):
  """The folder of such a run, killed after saving its second rollout."""
  folder = shutil.copytree(apart, tmp_path / "run")
  shutil.rmtree(folder / "policy")
  shutil.rmtree(folder / "checkpoints" / "3")
  return folder


def test_a_run_on_a_mesh_is_the_run_on_one_device(alone, apart):
  assert_same_run(apart, alone)


def test_every_program_of_a_mesh_is_compiled_once(apart):
  last = metrics(apart)[-1]
  compiled = {n: x for n, x in last.items() if n.startswith("compile/")}
  assert compiled == {
    "compile/train_step": 1,
    "compile/old_logp": 0,
    "compile/prefill": 1,
    "compile/decode": 1,
  }


def test_a_run_resumes_on_its_mesh_to_the_same_bits(apart, unfinished, parts):
  train(unfinished, parts, FULL, APART)
  assert [repeated(r) for r in metrics(unfinished)] == [
    repeated(r) for r in metrics(apart)
  ]
  jax.tree.map(
    np.testing.assert_array_equal,
    hf.load(unfinished / "policy").params,
    hf.load(apart / "policy").params,
  )


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(alone, unfinished, parts):
  train(unfinished, parts, FULL, TOGETHER)
  assert_same_run(unfinished, alone)
