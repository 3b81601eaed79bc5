"""A table of two rows and a folder of its tensors, for tests of files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import safetensors.numpy

from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import tensor_files

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


def tensors(*, without: str = "") -> dict[str, np.ndarray]:
  """Returns the file's tensors by name, the same on each call."""
  rng = np.random.default_rng(0)
  all_of_them = {
    "model.layers.0.q.weight": rng.normal(size=(8, 6)).astype(np.float32),
    "model.layers.1.q.weight": rng.normal(size=(8, 6)).astype(np.float32),
    "norm.weight": np.arange(6, dtype=np.float32),
  }
  return {k: v for k, v in all_of_them.items() if k != without}


def write(
  folder: pathlib.Path,
  values: Mapping[str, np.ndarray],
  name: str = tensor_files.SINGLE_NAME,
) -> None:
  safetensors.numpy.save_file(dict(values), folder / name)


def write_shards(
  folder: pathlib.Path, shards: Sequence[Mapping[str, np.ndarray]]
) -> None:
  """Writes `shard-0.safetensors` and further shards, and their index."""
  index = {}
  for i, values in enumerate(shards):
    write(folder, values, f"shard-{i}.safetensors")
    index |= dict.fromkeys(values, f"shard-{i}.safetensors")
  (folder / tensor_files.INDEX_NAME).write_text(
    json.dumps({"weight_map": index})
  )


def assert_loaded(params) -> None:
  """Asserts that `params` equal `tensors()` in our layout, per element."""
  file = tensors()
  for layer in range(2):
    matrix = file[f"model.layers.{layer}.q.weight"]
    for d, n, h in np.ndindex(6, 2, 4):
      assert params["layers"]["q"][layer, d, n, h] == matrix[4 * n + h, d]
  np.testing.assert_array_equal(params["norm"], file["norm.weight"])
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))
