"""The parameter table, and safetensors that are read and written by it."""

from __future__ import annotations

import dataclasses
import json
import math
import tracemalloc

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import strategies as st

from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import tensor_files

# A table of two rows.
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


def tensors(*, without=""):
  """Returns the file's tensors by name, the same on each call."""
  matrices = np.random.default_rng(0).normal(size=(2, 8, 6))
  found = {
    "model.layers.0.q.weight": np.float32(matrices[0]),
    "model.layers.1.q.weight": np.float32(matrices[1]),
    "norm.weight": np.arange(6, dtype=np.float32),
  }
  return {k: v for k, v in found.items() if k != without}


def write(folder, values, name=tensor_files.SINGLE_NAME):
  safetensors.numpy.save_file(dict(values), folder / name)


def write_shards(folder, shards):
  """Writes `shard-0.safetensors` and further shards, and their index."""
  index = {}
  for i, values in enumerate(shards):
    write(folder, values, f"shard-{i}.safetensors")
    index |= dict.fromkeys(values, f"shard-{i}.safetensors")
  (folder / tensor_files.INDEX_NAME).write_text(
    json.dumps({"weight_map": index})
  )


def assert_loaded(params):
  """Asserts that `params` equal `tensors()` in our layout, per element."""
  file = tensors()
  for layer in range(2):
    matrix = file[f"model.layers.{layer}.q.weight"]
    for d, n, h in np.ndindex(6, 2, 4):
      assert params["layers"]["q"][layer, d, n, h] == matrix[4 * n + h, d]
  np.testing.assert_array_equal(params["norm"], file["norm.weight"])
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))


@st.composite
def _rearrangements(draw):
  """Draws a table row with any split and transpose."""
  split = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
  perm = tuple(draw(st.permutations(range(len(split)))))
  cut = draw(st.integers(1, len(split)))
  file_shape = (math.prod(split[:cut]), math.prod(split[cut:]))
  shape = tuple(split[i] for i in perm)
  return dataclasses.replace(
    VECTOR, shape=shape, split=split, perm=perm, file_shape=file_shape
  )


@hypothesis.given(_rearrangements())
def test_to_file_inverts_from_file(row):
  file = np.arange(math.prod(row.file_shape)).reshape(row.file_shape)
  ours = row.from_file(file)
  assert ours.shape == row.shape
  np.testing.assert_array_equal(row.to_file(ours), file)
  np.testing.assert_array_equal(row.from_file(row.to_file(ours)), ours)


@hypothesis.given(_rearrangements(), st.data())
def test_read_block_equals_slicing_the_whole(row, data):
  file = np.arange(math.prod(row.file_shape)).reshape(row.file_shape)
  block = []
  for size in row.shape:
    start = data.draw(st.integers(0, size - 1))
    block.append(slice(start, data.draw(st.integers(start + 1, size))))
  asked = []

  def read(cuts):
    asked.append(cuts)
    return file[cuts].copy()

  found = row.read_block(tuple(block), read)
  np.testing.assert_array_equal(found, row.from_file(file)[tuple(block)])
  (cuts,) = asked
  assert all(
    0 <= cut.start < cut.stop <= size
    for cut, size in zip(cuts, row.file_shape, strict=True)
  )


def test_initial_values_follow_the_table_and_the_seed():
  rows = ROWS
  params = weights.initialize(rows, 1)
  again = weights.initialize(rows, 1)
  other = weights.initialize(rows, 2)
  np.testing.assert_array_equal(params["norm"], np.ones(6))
  q = params["layers"]["q"]
  np.testing.assert_array_equal(q, again["layers"]["q"])
  assert (q != other["layers"]["q"]).all()
  zeros = weights.initialize([dataclasses.replace(MATRIX, init=0.0)], 1)
  assert not zeros["layers"]["q"].any()
  wide = dataclasses.replace(VECTOR, shape=(20_000,), init=0.5)
  assert abs(weights.initialize([wide], 1)["norm"].std() - 0.5) < 0.02


def test_tensors_are_named_layer_by_layer():
  bias = dataclasses.replace(
    MATRIX, path=("layers", "b"), name="model.layers.{layer}.b"
  )
  head = dataclasses.replace(VECTOR, path=("head",), name="head")
  rows = [VECTOR, MATRIX, bias, head]
  assert [(name, i) for name, _, i in weights.tensors(rows)] == [
    ("norm.weight", ()),
    ("model.layers.0.q.weight", (0,)),
    ("model.layers.0.b", (0,)),
    ("model.layers.1.q.weight", (1,)),
    ("model.layers.1.b", (1,)),
    ("head", ()),
  ]
  assert weights.count(rows) == 6 + 2 * 48 + 2 * 48 + 6


EXTRA = {"extra": np.zeros(3, np.float32)}
# A row of the embedding, and its copy under another name.
HEAD = dataclasses.replace(
  VECTOR,
  path=("embed",),
  shape=(5000, 3),
  axes=("vocab", None),
  name="embed.weight",
  split=(5000, 3),
  perm=(0, 1),
  file_shape=(5000, 3),
)


def test_a_file_is_read_into_the_nested_dict(tmp_path):
  write(tmp_path, tensors())
  assert_loaded(tensor_files.load(tmp_path, ROWS))


def test_shards_are_read_through_their_index(tmp_path):
  file = tensors()
  norm = {"norm.weight": file.pop("norm.weight")}
  write_shards(tmp_path, [file, norm])
  assert_loaded(tensor_files.load(tmp_path, ROWS))


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    (
      tensors(without="norm.weight"),
      r"lacks tensor 'norm.weight' \(1 in all\)",
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
      tensors() | {"norm.weight": np.zeros(6, np.int64)},
      r"'norm.weight' is of type I64, expected one of F64, .*quantised",
    ),
  ],
)
def test_tensors_that_differ_from_the_table_are_refused(
  tmp_path, nothing_loads, values, sentence
):
  write(tmp_path, values)
  with pytest.raises(ValueError, match=sentence):
    tensor_files.load(tmp_path, ROWS)


def test_types_of_quantised_weights_are_refused(tmp_path, nothing_loads):
  header = {"dtype": "F8_E4M3", "shape": [6], "data_offsets": [0, 6]}
  text = json.dumps({"norm.weight": header}).encode()
  path = tmp_path / tensor_files.SINGLE_NAME
  path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(6))
  sentence = "'norm.weight' is of type F8_E4M3.*quantised weights are not"
  with pytest.raises(ValueError, match=sentence):
    tensor_files.load(tmp_path, [VECTOR])


@pytest.mark.parametrize("kept", [0, 40, -1])
def test_a_damaged_file_is_refused(tmp_path, nothing_loads, kept):
  write(tmp_path, tensors())
  path = tmp_path / tensor_files.SINGLE_NAME
  path.write_bytes(path.read_bytes()[:kept])
  sentence = "model.safetensors: not a whole safetensors file .*copy it again"
  with pytest.raises(ValueError, match=sentence):
    tensor_files.load(tmp_path, ROWS)


def test_a_tensor_in_two_shards_is_refused(tmp_path, nothing_loads):
  matrices = tensors(without="norm.weight")
  rest = tensors(without="model.layers.1.q.weight")
  write_shards(tmp_path, [matrices, rest])
  sentence = "stands in shard-0.safetensors and in shard-1.safetensors"
  with pytest.raises(ValueError, match=sentence):
    tensor_files.load(tmp_path, ROWS)


@pytest.mark.parametrize(
  "wrapped",
  [
    "_orig_mod.{}",
    "module.{}",
    "base_model.model.{}",
    "module._orig_mod.{}",
    "_fsdp_wrapped_module.{}",
  ],
)
def test_names_lose_what_wrappers_added(tmp_path, wrapped):
  write_shards(
    tmp_path,
    [{wrapped.format(name): tensor} for name, tensor in tensors().items()],
  )
  assert_loaded(tensor_files.load(tmp_path, ROWS))


def test_names_lose_wrappers_of_inner_modules(tmp_path):
  inner = "layers.{}._fsdp_wrapped_module._checkpoint_wrapped_module.q"
  values = tensors()
  for layer in range(2):
    tensor = values.pop(f"model.layers.{layer}.q.weight")
    values[f"model._orig_mod.{inner.format(layer)}.weight"] = tensor
  write(tmp_path, values)
  assert_loaded(tensor_files.load(tmp_path, ROWS))


def test_names_in_a_model_that_also_reads_pictures_are_the_decoders(tmp_path):
  part = "model.language_model."
  values = {k.replace("model.", part): v for k, v in tensors().items()}
  write(tmp_path, values)
  assert_loaded(tensor_files.load(tmp_path, ROWS))


def test_a_prefix_of_some_names_stays(tmp_path, nothing_loads):
  values = tensors()
  values["module.norm.weight"] = values.pop("norm.weight")
  write(tmp_path, values)
  with pytest.raises(ValueError, match="lacks tensor 'norm.weight'"):
    tensor_files.load(tmp_path, ROWS)


def test_a_tensor_with_and_without_a_wrapper_is_refused(
  tmp_path, nothing_loads
):
  values = tensors()
  values["_orig_mod.norm.weight"] = values["norm.weight"]
  write(tmp_path, values)
  with pytest.raises(ValueError, match="'norm.weight' stands in .* once"):
    tensor_files.load(tmp_path, ROWS)


def test_weights_with_unmerged_adapters_are_refused(tmp_path, nothing_loads):
  values = {f"base_model.model.{k}": v for k, v in tensors().items()}
  layer = "base_model.model.model.layers.0.q"
  values[f"{layer}.base_layer.weight"] = values.pop(f"{layer}.weight")
  values[f"{layer}.lora_A.default.weight"] = np.zeros((2, 6), np.float32)
  write(tmp_path, values)
  with pytest.raises(ValueError, match="found the adapter tensor .* Merge it"):
    tensor_files.load(tmp_path, ROWS)


@pytest.mark.parametrize("name", ["../{}", "{}", "a/../../{}"])
def test_an_index_opens_no_file_outside_its_folder(
  tmp_path, nothing_loads, name
):
  folder = tmp_path / "policy"
  folder.mkdir()
  write(tmp_path, tensors(), "other.safetensors")
  outside = name.format("other.safetensors")
  if name == "{}":
    outside = str(tmp_path / "other.safetensors")
  (folder / tensor_files.INDEX_NAME).write_text(
    json.dumps({"weight_map": dict.fromkeys(tensors(), outside)})
  )
  with pytest.raises(ValueError, match="nothing is read from elsewhere"):
    tensor_files.load(folder, ROWS)


def test_a_missing_file_is_refused(tmp_path, nothing_loads):
  with pytest.raises(ValueError, match="model.safetensors: no such file"):
    tensor_files.load(tmp_path, ROWS)
  write_shards(tmp_path, [tensors()])
  (tmp_path / "shard-0.safetensors").unlink()
  with pytest.raises(ValueError, match="shard-0.safetensors: no such file"):
    tensor_files.load(tmp_path, ROWS)


@pytest.mark.parametrize("index", ["{", '{"weight_map": []}'])
def test_an_index_that_names_no_files_is_refused(
  tmp_path, nothing_loads, index
):
  (tmp_path / tensor_files.INDEX_NAME).write_text(index)
  with pytest.raises(ValueError, match="index.json: no JSON object with a w"):
    tensor_files.load(tmp_path, ROWS)


def test_ignored_tensor_may_be_present_or_absent(tmp_path):
  write(tmp_path, tensors() | EXTRA)
  assert_loaded(tensor_files.load(tmp_path, ROWS, ignored=r"ex\w+"))
  with pytest.raises(ValueError, match="unknown tensor 'extra'"):
    tensor_files.load(tmp_path, ROWS, ignored="extr")
  write(tmp_path, tensors())
  assert_loaded(tensor_files.load(tmp_path, ROWS, ignored="extra"))


@pytest.mark.parametrize("changed", [None, (4999, 2), "shape"])
def test_copy_that_differs_is_refused(tmp_path, changed):
  embed = np.random.default_rng(0).normal(size=(5000, 3)).astype(np.float32)
  copy = embed[:4] if changed == "shape" else embed.copy()
  if isinstance(changed, tuple):
    copy[changed] += 1e-6
  write(tmp_path, {"embed.weight": embed, "head.weight": copy})
  copies = {"head.weight": "embed.weight", "absent": "embed.weight"}
  if not changed:
    loaded = tensor_files.load(tmp_path, [HEAD], copies=copies)
    assert loaded.keys() == {"embed"}
    return
  with pytest.raises(ValueError, match="'head.weight' differs from 'embed.w"):
    tensor_files.load(tmp_path, [HEAD], copies=copies)


@pytest.mark.parametrize(
  "of_file", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_file_type_converts_to_every_array_type(tmp_path, of_file, dtype):
  file = {k: v.astype(of_file) for k, v in tensors().items()}
  write(tmp_path, file)
  loaded = tensor_files.load(tmp_path, ROWS, dtype=dtype)
  q = loaded["layers"]["q"]
  assert q.dtype == loaded["norm"].dtype == dtype
  for layer in range(2):
    expected = file[f"model.layers.{layer}.q.weight"].astype(dtype)
    np.testing.assert_array_equal(
      np.asarray(q[layer]).transpose(1, 2, 0).reshape(8, 6), expected
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("lives", [np.asarray, jnp.asarray])
def test_saving_then_loading_rounds_once_to_the_file_type(
  tmp_path, dtype, lives
):
  params = weights.initialize(ROWS, 3)
  tensor_files.save(tmp_path, jax.tree.map(lives, params), ROWS, dtype=dtype)
  path = tmp_path / tensor_files.SINGLE_NAME
  assert [p.name for p in tmp_path.iterdir()] == [path.name]
  assert all(
    x.dtype == dtype for x in safetensors.numpy.load_file(path).values()
  )
  jax.tree.map(
    lambda ours, back: np.testing.assert_array_equal(
      ours.astype(dtype).astype(np.float32), back
    ),
    params,
    tensor_files.load(tmp_path, ROWS),
  )
  # Tensors start at multiples of 8 bytes, because readers map the file.
  assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_unsupported_export_types_are_refused(tmp_path):
  params = weights.initialize(ROWS, 3)
  with pytest.raises(ValueError, match="expected one of float32, float16, bfl"):
    tensor_files.save(tmp_path, params, ROWS, dtype="float8_e4m3fn")
  assert not list(tmp_path.iterdir())


# A matrix has 192 bytes, the vector 24.
@pytest.mark.parametrize(
  ("shard_bytes", "held"),
  [(408, [3]), (407, [2, 1]), (383, [1, 2]), (1, [1, 1, 1])],
)
def test_shards_respect_the_size_limit_and_match_the_index(
  tmp_path, shard_bytes, held
):
  params = weights.initialize(ROWS, 3)
  tensor_files.save(tmp_path, params, ROWS, shard_bytes=shard_bytes)
  names = ["model.safetensors"]
  if len(held) > 1:
    n = len(held)
    names = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    index = json.loads((tmp_path / tensor_files.INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": 2 * 192 + 24}
    assert index["weight_map"] == {
      tensor: name
      for name in names
      for tensor in safetensors.numpy.load_file(tmp_path / name)
    }
  files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
  assert files == names
  assert held == [
    len(safetensors.numpy.load_file(tmp_path / name)) for name in names
  ]
  jax.tree.map(
    np.testing.assert_array_equal, params, tensor_files.load(tmp_path, ROWS)
  )


def test_a_load_holds_one_layer_on_the_host_at_a_time(tmp_path):
  """Measures NumPy's memory; the file has ten layers."""
  deep = dataclasses.replace(
    MATRIX, shape=(10, 600, 20, 40), split=(20, 40, 600), file_shape=(800, 600)
  )
  size = math.prod(deep.file_shape) * 4
  write(
    tmp_path,
    {n: np.zeros(deep.file_shape, np.float32) for n in deep.tensor_names()},
  )
  tracemalloc.start()
  try:
    loaded = tensor_files.load(tmp_path, [deep])
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert loaded["layers"]["q"].shape == deep.shape
  assert size <= peak < 4 * size
