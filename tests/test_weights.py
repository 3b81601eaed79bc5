"""The two-way weight table: every tensor once, or a sentence."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import strategies as st

from anysearch_jax import tensor_files, weights

MATRIX = weights.Weight(
  path=("layers", "q"),
  shape=(2, 6, 2, 4),
  axes=("layers", "model", "heads", "head_dim"),
  name="model.layers.{layer}.q.weight",
  split=(2, 4, 6),
  perm=(2, 0, 1),
  file_shape=(8, 6),
  init=0.5,
)
VECTOR = weights.Weight(
  path=("norm",),
  shape=(6,),
  axes=(None,),
  name="norm.weight",
  split=(6,),
  perm=(0,),
  file_shape=(6,),
  init=None,
)
ROWS = [MATRIX, VECTOR]


def tensors():
  rng = np.random.default_rng(0)
  return {
    "model.layers.0.q.weight": rng.normal(size=(8, 6)).astype(np.float32),
    "model.layers.1.q.weight": rng.normal(size=(8, 6)).astype(np.float32),
    "norm.weight": np.arange(6, dtype=np.float32),
  }


def write(folder, values, name=tensor_files.SINGLE_NAME):
  safetensors.numpy.save_file(values, folder / name)


def write_shards(folder, shards):
  index = {}
  for i, values in enumerate(shards):
    write(folder, values, f"shard-{i}.safetensors")
    index |= dict.fromkeys(values, f"shard-{i}.safetensors")
  (folder / tensor_files.INDEX_NAME).write_text(json.dumps({"weight_map": index}))


def assert_is_table(params):
  file = tensors()
  for layer in range(2):
    matrix = file[f"model.layers.{layer}.q.weight"]
    for d, n, h in np.ndindex(6, 2, 4):
      assert params["layers"]["q"][layer, d, n, h] == matrix[4 * n + h, d]
  np.testing.assert_array_equal(params["norm"], file["norm.weight"])
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))


def test_a_file_is_read_into_the_nested_dict(tmp_path):
  write(tmp_path, tensors())
  assert_is_table(tensor_files.load(tmp_path, ROWS))


def test_shards_are_read_through_their_index(tmp_path):
  file = tensors()
  norm = {"norm.weight": file.pop("norm.weight")}
  write_shards(tmp_path, [file, norm])
  assert_is_table(tensor_files.load(tmp_path, ROWS))


def _without(name):
  return {k: v for k, v in tensors().items() if k != name}


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    (_without("norm.weight"), r"lacks tensor 'norm.weight' \(1 in all\)"),
    (
      _without("model.layers.1.q.weight"),
      r"lacks tensor 'model.layers.1.q.weight'",
    ),
    (
      tensors() | {"model.layers.2.q.weight": np.zeros((8, 6), np.float32)},
      r"has unknown tensor 'model.layers.2.q.weight' \(1 in all\)",
    ),
    (
      tensors() | {"norm.weight": np.zeros(7, np.float32)},
      r"'norm.weight' has shape \(7,\), expected \(6,\)",
    ),
    (
      tensors() | {"model.layers.1.q.weight": np.zeros((6, 8), np.float32)},
      r"'model.layers.1.q.weight' has shape \(6, 8\), expected \(8, 6\)",
    ),
  ],
)
def test_what_is_not_the_table_is_refused(tmp_path, values, sentence):
  write(tmp_path, values)
  with pytest.raises(ValueError, match=sentence):
    tensor_files.load(tmp_path, ROWS)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
  matrices = _without("norm.weight")
  write_shards(tmp_path, [matrices, _without("model.layers.1.q.weight")])
  sentence = "stands in shard-0.safetensors and in shard-1.safetensors"
  with pytest.raises(ValueError, match=sentence):
    tensor_files.load(tmp_path, ROWS)


def test_a_missing_file_is_refused(tmp_path):
  with pytest.raises(ValueError, match="model.safetensors: no such file"):
    tensor_files.load(tmp_path, ROWS)
  write_shards(tmp_path, [tensors()])
  (tmp_path / "shard-0.safetensors").unlink()
  with pytest.raises(ValueError, match="shard-0.safetensors: no such file"):
    tensor_files.load(tmp_path, ROWS)


def test_an_ignored_tensor_may_be_there_and_may_be_absent(tmp_path):
  write(tmp_path, tensors() | {"extra": np.zeros(3, np.float32)})
  assert_is_table(tensor_files.load(tmp_path, ROWS, ignored="extra"))
  write(tmp_path, tensors())
  assert_is_table(tensor_files.load(tmp_path, ROWS, ignored="extra"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_saving_then_loading_rounds_once_to_the_file_type(tmp_path, dtype):
  params = weights.initialize(ROWS, 3)
  path = tmp_path / tensor_files.SINGLE_NAME
  tensor_files.save(path.parent, params, ROWS, dtype=dtype)
  assert [p.name for p in tmp_path.iterdir()] == [path.name]
  assert all(
    x.dtype == dtype for x in safetensors.numpy.load_file(path).values()
  )
  loaded = tensor_files.load(tmp_path, ROWS)
  jax.tree.map(
    lambda ours, back: np.testing.assert_array_equal(
      ours.astype(dtype).astype(np.float32), back
    ),
    params,
    loaded,
  )


def test_bfloat16_is_read_where_jax_was_not_imported(tmp_path):
  path = tmp_path / tensor_files.SINGLE_NAME
  tensor_files.save(
    path.parent, weights.initialize(ROWS, 3), ROWS, dtype=ml_dtypes.bfloat16
  )
  code = (
    "import sys; from anysearch_jax import weights as w\n"
    "row = w.Weight(('norm',), (6,), (None,), 'norm.weight', (6,), (0,), (6,),"
    " None)\n"
    "names = [f'model.layers.{i}.q.weight' for i in (0, 1)]\n"
    "print(w.load(sys.argv[1], [row], ignored=names)['norm'].dtype)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path)],
    cwd=pathlib.Path(__file__).resolve().parent.parent,
    capture_output=True,
    text=True,
    check=False,
  )
  assert (done.stdout, done.stderr) == ("float32\n", "")


@st.composite
def _rearrangements(draw):
  """A table row of any split and transpose."""
  split = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
  perm = tuple(draw(st.permutations(range(len(split)))))
  cut = draw(st.integers(1, len(split)))
  file_shape = (int(np.prod(split[:cut])), int(np.prod(split[cut:])))
  shape = tuple(split[i] for i in perm)
  return dataclasses.replace(
    VECTOR, shape=shape, split=split, perm=perm, file_shape=file_shape
  )


@hypothesis.given(_rearrangements())
def test_there_and_back_is_the_identity(row):
  file = np.arange(np.prod(row.file_shape)).reshape(row.file_shape)
  ours = row.from_file(file)
  assert ours.shape == row.shape
  np.testing.assert_array_equal(row.to_file(ours), file)
  np.testing.assert_array_equal(row.from_file(row.to_file(ours)), ours)


def test_fresh_values_follow_the_table_and_the_seed():
  params = weights.initialize(ROWS, 1)
  again = weights.initialize(ROWS, 1)
  other = weights.initialize(ROWS, 2)
  np.testing.assert_array_equal(params["norm"], np.ones(6))
  q = params["layers"]["q"]
  np.testing.assert_array_equal(q, again["layers"]["q"])
  assert (q != other["layers"]["q"]).all()
  zeros = weights.initialize([dataclasses.replace(MATRIX, init=0.0)], 1)
  assert not zeros["layers"]["q"].any()
  wide = dataclasses.replace(VECTOR, shape=(20_000,), init=0.5)
  assert abs(weights.initialize([wide], 1)["norm"].std() - 0.5) < 0.02
