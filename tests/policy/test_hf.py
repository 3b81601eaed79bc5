"""Loading Hugging Face folders, and refusing invalid ones by name."""

from __future__ import annotations

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
import random_models
import safetensors.numpy

from anysearch_jax.policy import hf, table, tensor_files
from anysearch_jax.policy import tokenizer as tokenizer_lib


@pytest.fixture
def tiny(tmp_path):
  """A policy with tied embeddings, initialised here and saved in `folder`."""
  a = random_models.architecture("qwen2-tied")
  tokenizer = tokenizer_lib.Tokenizer(
    random_models.tokenizer(), end_of_turn_ids=[3]
  )
  policy = hf.Policy(random_models.params(a), a, tokenizer)
  hf.save(tmp_path / "policy", policy)
  return types.SimpleNamespace(folder=tmp_path / "policy", policy=policy)


def add_tensors(folder, **values):
  path = folder / tensor_files.SINGLE_NAME
  safetensors.numpy.save_file(safetensors.numpy.load_file(path) | values, path)


def test_saved_folder_loads_unchanged(tiny):
  loaded = hf.load(tiny.folder)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, tiny.policy.params)
  assert loaded.architecture == tiny.policy.architecture
  assert loaded.tokenizer.end_of_turn_ids == {3, random_models.TOKENS - 2}
  assert loaded.tokenizer.encode("w5 w9") == [5, 9]
  assert loaded.source == tiny.folder


def test_a_tied_folder_may_hold_its_head_again(tiny):
  untied = dataclasses.replace(tiny.policy.architecture, tied=False)
  params = tiny.policy.params
  with_head = params | {"head": params["embed"]}
  tensor_files.save(tiny.folder, with_head, table.base_rows(untied))
  assert "head" not in hf.load(tiny.folder).params


def test_a_tied_folder_with_another_head_is_refused(tiny, nothing_loads):
  head = np.array(tiny.policy.params["embed"])
  head[-1, -1] += 1e-5
  add_tensors(tiny.folder, **{"lm_head.weight": head})
  with pytest.raises(ValueError, match=r"'lm_head.weight' differs .*tie_word"):
    hf.load(tiny.folder)


@pytest.mark.parametrize("at", ["model", "model.layers.1.self_attn"])
def test_buffers_of_old_checkpoints_are_not_read(tiny, at):
  name = f"{at}.rotary_emb.inv_freq"
  add_tensors(tiny.folder, **{name: np.ones(4, np.float32)})
  loaded = hf.load(tiny.folder)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, tiny.policy.params)


def test_the_embedding_may_have_more_rows_than_the_tokenizer(tmp_path):
  a = random_models.architecture("qwen2")
  assert a.vocab_size > random_models.TOKENS
  tokenizer = tokenizer_lib.Tokenizer(random_models.tokenizer())
  hf.save(tmp_path, hf.Policy(random_models.params(a), a, tokenizer))
  loaded = hf.load(tmp_path)
  assert loaded.params["embed"].shape[0] == a.vocab_size
  assert loaded.tokenizer.vocab_size == random_models.TOKENS


def test_embedding_with_fewer_rows_than_the_tokenizer_is_refused(
  tmp_path, nothing_loads
):
  a = random_models.architecture("qwen2", vocab_size=random_models.TOKENS - 1)
  tokenizer = tokenizer_lib.Tokenizer(random_models.tokenizer())
  hf.save(tmp_path, hf.Policy(random_models.params(a), a, tokenizer))
  with pytest.raises(ValueError, match="has 61 tokens, the embedding 60 rows"):
    hf.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_without_a_part_is_refused(tiny, nothing_loads, name):
  (tiny.folder / name).unlink()
  sentence = f"no {name}; expected a Hugging Face folder"
  with pytest.raises(ValueError, match=sentence):
    hf.load(tiny.folder)


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive"),
    # Weights that do not belong to the config's model.
    ({"tie_word_embeddings": False}, "lacks tensor 'lm_head.weight'"),
    ({"intermediate_size": 64}, r"has shape \(48, 32\), expected \(64, 32\)"),
    (
      {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
      "unknown tensor .*bias",
    ),
  ],
)
def test_wrong_config_is_refused_with_the_folder_name(
  tiny, nothing_loads, change, sentence
):
  path = tiny.folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  with pytest.raises(ValueError, match=f"policy: .*{sentence}"):
    hf.load(tiny.folder)


def test_an_adapter_beside_the_weights_is_refused(tiny, nothing_loads):
  """transformers would add the adapter to the folder's weights."""
  (tiny.folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
  with pytest.raises(
    ValueError, match="adapter_config.json, whose .* Merge it"
  ):
    hf.load(tiny.folder)


def test_an_adapter_is_not_taken_for_a_model(tmp_path, nothing_loads):
  config = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-4B"}
  (tmp_path / "adapter_config.json").write_text(json.dumps(config))
  (tmp_path / "adapter_model.safetensors").write_bytes(b"")
  sentence = (
    "found a PEFT adapter of 'Qwen/Qwen3-4B', expected a whole model. Merge it "
    ".*AutoPeftModelForCausalLM.*copy the tokenizer of 'Qwen/Qwen3-4B' there"
  )
  with pytest.raises(ValueError, match=sentence):
    hf.load(tmp_path)


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("is_folder", [True, False])
def test_gguf_weights_are_named(tiny, nothing_loads, has_config, is_folder):
  (tiny.folder / tensor_files.SINGLE_NAME).unlink()
  file = tiny.folder / "Qwen3-4B-Q4_K_M.gguf"
  file.write_bytes(b"GGUF")
  if not has_config:
    (tiny.folder / "config.json").unlink()
  sentence = f"found GGUF weights, expected safetensors.* --hf={file}"
  with pytest.raises(ValueError, match=sentence):
    hf.load(tiny.folder if is_folder else file)


def test_gguf_weights_beside_safetensors_are_not_read(tiny):
  (tiny.folder / "Qwen3-4B-Q4_K_M.gguf").write_bytes(b"GGUF")
  hf.load(tiny.folder)


@pytest.mark.parametrize(
  "name", ["config.json", "tokenizer.json", "model.safetensors"]
)
def test_a_pointer_of_git_lfs_is_named(tiny, nothing_loads, name):
  (tiny.folder / name).write_text(
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
  )
  sentence = f"{name}: is a pointer of git-lfs, .* type `git lfs pull`"
  with pytest.raises(ValueError, match=sentence):
    hf.load(tiny.folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
  ("text", "why"), [(b'{"a":', r"line \d+ column"), (b'{"a": "\xff"}', "utf-8")]
)
def test_a_damaged_json_file_is_refused_by_name(
  tiny, nothing_loads, name, text, why
):
  (tiny.folder / name).write_bytes(text)
  sentence = rf"policy/{name}: not a whole JSON file \(.*{why}"
  with pytest.raises(ValueError, match=sentence):
    hf.load(tiny.folder)


def test_end_of_turn_id_that_is_no_token_is_refused(tiny, nothing_loads):
  path = tiny.folder / "generation_config.json"
  path.write_text(json.dumps({"eos_token_id": [3, random_models.TOKENS - 1]}))
  assert max(hf.describe(tiny.folder)[1].end_of_turn_ids) == 60
  path.write_text(json.dumps({"eos_token_id": [3, random_models.TOKENS]}))
  with pytest.raises(ValueError, match="policy: eos_token_id 61 .* 61 tokens"):
    hf.load(tiny.folder)
