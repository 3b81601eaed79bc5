"""Experts in MXFP4, as gpt-oss is published, against transformers."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models
import safetensors.numpy
import transformers

from anysearch_jax.policy import hf, sharding, tensor_files

pairs = pytest.importorskip(
  "pairs", reason="oracle tests need torch==2.13.0 (the extra [oracles])"
)

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
PUBLISHED = (
  pathlib.Path(__file__).parents[2] / "configs/shapes/gpt-oss-20b.json"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A random gpt-oss whose experts are quantised."""
  folder = tmp_path_factory.mktemp("mxfp4")
  random_models.make("gpt-oss", folder, **SIZES)
  path, rng = folder / tensor_files.SINGLE_NAME, np.random.default_rng(0)
  tensors = safetensors.numpy.load_file(path)
  for name in [name for name in tensors if name.endswith("_proj")]:
    experts, takes, gives = tensors.pop(name).shape
    shape = experts, gives, takes // 32
    drawn = rng.integers(0, 256, (*shape, 16), np.uint8)
    tensors[f"{name}_blocks"] = drawn
    tensors[f"{name}_scales"] = rng.integers(122, 126, shape, np.uint8)
  safetensors.numpy.save_file(tensors, path, {"format": "pt"})
  path = folder / "config.json"
  config, key = json.loads(path.read_text()), "quantization_config"
  config[key] = json.loads(PUBLISHED.read_text())[key]
  path.write_text(json.dumps(config))
  return folder


def bits(x):
  return np.ascontiguousarray(x).view(np.uint16)


def test_every_scale_and_byte_is_dequantised_to_the_bit(torch, tmp_path):
  from transformers.integrations import mxfp4

  blocks = np.tile(np.arange(256, dtype=np.uint8), 256).reshape(4, 64, 16, 16)
  scales = np.arange(4096).reshape(4, 64, 16) // 16
  stored = {"x_blocks": blocks, "x_scales": scales.astype(np.uint8)}
  path = tmp_path / tensor_files.SINGLE_NAME
  safetensors.numpy.save_file(stored, path)
  (x,) = tensor_files.headers(tmp_path).values()
  assert (x.name, x.shape) == ("x", (4, 512, 64))
  found = tensor_files._read(x, tuple(slice(0, size) for size in x.shape))
  wanted = mxfp4.convert_moe_packed_tensors(
    torch.tensor(blocks), torch.tensor(stored["x_scales"])
  )
  np.testing.assert_array_equal(bits(found), wanted.view(torch.uint16))
  cut = slice(1, 3), slice(17, 99), slice(5, 6)
  part = tensor_files._read(x, cut)
  np.testing.assert_array_equal(bits(part), bits(found[cut]))


def test_a_quantised_folder_is_read_as_by_transformers_and_exported_plain(
  torch, folder, tmp_path
):
  read = transformers.AutoModelForCausalLM.from_pretrained
  policy, tokens = hf.load(folder), random_models.random_tokens((2, 48))
  pair = pairs.Pair(read(folder, dtype=torch.float32).eval(), policy)
  theirs = pair.theirs(tokens)
  assert np.abs(theirs).max() > 1
  np.testing.assert_allclose(pair.ours(tokens), theirs, rtol=0, atol=1e-4)
  hf.save(tmp_path / "plain", policy, dtype=jnp.bfloat16)
  config = json.loads((tmp_path / "plain" / "config.json").read_text())
  assert "quantization_config" not in config and config["dtype"] == "bfloat16"
  again = read(tmp_path / "plain", dtype=torch.float32).state_dict()
  for name, value in pair.model.state_dict().items():
    if name.endswith("_proj"):  # Of the experts; all else was float32.
      assert torch.equal(value, again[name]), name


def test_a_mesh_reads_parts_of_blocks(folder):
  one = hf.load(folder, dtype=jnp.bfloat16)
  mesh = sharding.mesh(fsdp=4, expert=2)
  spread = hf.load(folder, mesh=mesh, dtype=jnp.bfloat16)
  gate = spread.params["layers"]["gate"]
  assert gate.addressable_shards[0].data.shape == (2, 3, 2, 16, 96)
  jax.tree.map(np.testing.assert_array_equal, spread.params, one.params)


def test_scales_that_do_not_fit_are_refused(folder, tmp_path, nothing_loads):
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  path = tmp_path / tensor_files.SINGLE_NAME
  tensors = safetensors.numpy.load_file(path)
  name = "model.layers.0.mlp.experts.down_proj_scales"
  safetensors.numpy.save_file(tensors | {name: tensors[name][:-1]}, path)
  with pytest.raises(ValueError, match=r"lacks tensor 'model.*0.*down_proj'"):
    hf.load(tmp_path)
