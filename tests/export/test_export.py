"""Exported Hugging Face folders: readable by transformers and by this code."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import pytest
import random_models
import transformers

from anysearch_jax.policy import hf, sharding, tensor_files
from anysearch_jax.policy import tokenizer as tokenizer_lib

# One of each family; the others run with `make test-all`.
_QUICK = "qwen2 qwen3-biased qwen3-moe llama-tied smollm3 gpt-oss".split()


def born_here(case="qwen2-tied"):
  a = random_models.architecture(case)
  tokenizer = tokenizer_lib.Tokenizer(random_models.tokenizer())
  return hf.Policy(random_models.params(a), a, tokenizer)


def read_json(path):
  return json.loads(path.read_text())


def files_of(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_by_transformers(folder, **options):
  """Loads a model; keys must not be missing, unexpected or mismatched."""
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    folder, output_loading_info=True, **options
  )
  for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
    assert not report[kind], kind
  return model.eval()


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, marks=() if case in _QUICK else pytest.mark.slow)
    for case in random_models.CASES
  ],
)
def test_an_export_is_the_model_it_came_from(torch, make_pair, tmp_path, case):
  pair = make_pair(case)
  hf.save(tmp_path, pair.policy)
  reloaded = read_by_transformers(tmp_path)
  assert type(reloaded) is type(pair.model)
  assert reloaded.dtype == torch.float32
  ours, theirs = reloaded.state_dict(), pair.model.state_dict()
  assert ours.keys() == theirs.keys()
  for name in theirs:
    assert torch.equal(ours[name], theirs[name]), name
  tokens = torch.tensor(random_models.random_tokens((2, 64)))
  with torch.no_grad():  # The logits also depend on the configuration.
    assert torch.equal(reloaded(tokens).logits, pair.model(tokens).logits)


@pytest.mark.parametrize("case", ["llama-biased", "smollm3"])
def test_transformers_reads_an_export_of_a_policy_born_here(
  torch, tmp_path, case
):
  hf.save(tmp_path, born_here(case))
  model = read_by_transformers(tmp_path)
  assert model.config.max_position_embeddings == 512
  assert model.config.eos_token_id == [random_models.TOKENS - 2]
  assert model.generation_config.eos_token_id == [random_models.TOKENS - 2]
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  assert tokenizer("w5 w9")["input_ids"] == [5, 9]


@pytest.mark.parametrize(
  ("case", "shape", "dtype"),
  [
    ("llama-biased", {"fsdp": 8}, "float32"),
    ("smollm3", {"fsdp": 8}, "bfloat16"),
    ("qwen3-moe", {"fsdp": 2, "expert": 2, "tensor": 2}, "bfloat16"),
    ("gpt-oss", {"fsdp": 2, "expert": 2, "tensor": 2}, "bfloat16"),
    *(
      (case, {"data": 2, "fsdp": 2, "tensor": 2}, "bfloat16")
      for case in ("llama-biased", "olmo3", "gemma3-tied")
    ),
  ],
)
def test_parameters_on_a_mesh_export_to_the_same_bytes(
  tmp_path, case, shape, dtype
):
  policy = born_here(case)
  mesh = sharding.mesh(**shape)
  spread = jax.device_put(
    policy.params, sharding.shardings(policy.architecture, mesh)
  )
  dtype = jax.numpy.dtype(dtype)
  hf.save(tmp_path / "one", policy, dtype=dtype)
  hf.save(tmp_path / "mesh", policy._replace(params=spread), dtype=dtype)
  one, other = (files_of(tmp_path / side) for side in ("one", "mesh"))
  assert "model.safetensors" in one and one == other


def older_dialect(config):
  """Rewrites a configuration into the form before transformers 5."""
  config = dict(config)
  rope = dict(config.pop("rope_parameters"))
  config["torch_dtype"] = config.pop("dtype")
  config["rope_theta"] = rope.pop("rope_theta")
  scaled = rope["rope_type"] != "default"
  return config | {"rope_scaling": rope if scaled else None}


OTHER_FILES = {
  "generation_config.json": '{"eos_token_id": [3, 59],   "top_p": 0.8}',
  "chat_template.jinja": "{{ messages[0]['content'] }}\r\n",
  "special_tokens_map.json": '{"eos_token": "<eos>"}',
  "merges.txt": "a b\n",
  "LICENSE": "Do what the licence says.\n",
  "NOTICE.txt": "Built with care.\n",
  "USE_POLICY.md": "Nicely.\n",
}
LEFT_BEHIND = {"README.md": "A card.", "pytorch_model.bin": "Pickled."}


@pytest.mark.parametrize(
  "dialect", [dict, older_dialect, lambda x: x | {"torch_dtype": "float32"}]
)
@pytest.mark.parametrize("case", ["qwen3-tied", "llama"])
def test_export_keeps_every_setting_of_its_source(tmp_path, case, dialect):
  source, out = tmp_path / "source", tmp_path / "out"
  policy = born_here(case)
  hf.save(source, policy)
  config = read_json(source / "config.json")
  for name in ("rope_theta", "transformers_version"):
    config.pop(name, None)
  config = dialect(
    config | {"eos_token_id": 59, "task_specific_params": {"us": ["é", 1.5]}}
  )
  (source / "config.json").write_text(json.dumps(config))
  for name, text in (OTHER_FILES | LEFT_BEHIND).items():
    (source / name).write_bytes(text.encode())

  loaded = hf.load(source)
  assert loaded.architecture == policy.architecture
  assert loaded.tokenizer.end_of_turn_ids == {3, 59}
  hf.save(out, loaded, dtype=jax.numpy.bfloat16)
  found = dict.fromkeys({"torch_dtype", "dtype"} & config.keys(), "bfloat16")
  assert read_json(out / "config.json") == config | found
  kept = {"tokenizer.json", "tokenizer_config.json", *OTHER_FILES}
  made, given = files_of(out), files_of(source)
  for name in kept:
    assert made[name] == given[name], name
  assert set(made) == kept | {"config.json", "model.safetensors"}
  assert hf.load(out).architecture == policy.architecture


def test_saving_replaces_the_whole_folder(tmp_path):
  folder, policy = tmp_path / "policy", born_here()
  hf.save(folder, policy)
  (folder / "stale.safetensors").write_text("old")
  hf.save(folder, policy, texts={"README.md": "# A card\n"})
  assert not (folder / "stale.safetensors").exists()
  assert (folder / "README.md").read_text() == "# A card\n"
  assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.fixture
def saved(tmp_path):
  """A policy and its folder, which no failure may change."""
  folder, policy = tmp_path / "policy", born_here()
  hf.save(folder, policy)
  before = files_of(folder)
  yield folder, policy
  assert files_of(folder) == before
  assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_failed_export_leaves_the_old_folder_unchanged(
  saved, monkeypatch, error
):
  folder, policy = saved

  def half_a_file(beside, *args, **kwargs):
    (beside / tensor_files.SINGLE_NAME).write_text("half")
    raise error

  monkeypatch.setattr(tensor_files, "save", half_a_file)
  changed = dataclasses.replace(policy.architecture, max_context=7)
  with pytest.raises(type(error)):
    hf.save(folder, policy._replace(architecture=changed))


def test_a_killed_export_leaves_nothing_behind_and_loses_nothing(tmp_path):
  folder, policy = tmp_path / "policy", born_here()
  left_over = tmp_path / "policy.writing"
  left_over.mkdir()
  (left_over / "model-00001-of-00009.safetensors").write_text("half")
  hf.save(folder, policy)
  assert [path.name for path in tmp_path.iterdir()] == ["policy"]
  assert not list(folder.glob("model-*"))
  # Killed between its renames.
  folder.rename(tmp_path / "policy.replaced")
  with pytest.raises(KeyboardInterrupt), hf.atomic_directory(folder):
    raise KeyboardInterrupt
  assert [path.name for path in tmp_path.iterdir()] == ["policy"]
  assert hf.load(folder).architecture == policy.architecture


def test_failed_rename_restores_the_old_folder(saved, monkeypatch):
  rename = pathlib.Path.rename

  def refuse(path, target):
    if path.name == "policy.writing":
      raise OSError("device busy")
    return rename(path, target)

  monkeypatch.setattr(pathlib.Path, "rename", refuse)
  with pytest.raises(OSError, match="device busy"):
    hf.save(*saved)


def test_symbolic_link_to_the_output_is_kept(tmp_path):
  (tmp_path / "real").mkdir()
  (tmp_path / "link").symlink_to(tmp_path / "real")
  for _ in range(2):
    hf.save(tmp_path / "link", born_here())
  assert (tmp_path / "link").readlink() == tmp_path / "real"
  assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
  assert hf.load(tmp_path / "real").architecture == born_here().architecture


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
  (tmp_path / "policy").write_text("mine")
  with pytest.raises(ValueError, match="policy is a file; expected a folder"):
    hf.save(tmp_path / "policy", born_here())
  assert (tmp_path / "policy").read_text() == "mine"
