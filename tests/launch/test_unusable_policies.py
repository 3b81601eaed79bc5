"""Policies that could only play nonsense are refused by every command."""

from __future__ import annotations

import json
import shutil

import commands
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from anysearch_jax.configs import quickstart
from anysearch_jax.launch import ask, evaluate, serve, train
from anysearch_jax.methods import systems
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.training import validation

CONFIG = quickstart.get_config()
FLAGS = ("--config=configs/quickstart.py", "--cache=")


@pytest.fixture
def policy(tmp_path):
  """Returns a copy of the shipped policy."""
  folder = tmp_path / "policy"
  shutil.copytree(CONFIG.policy, folder)
  return folder


def make_special(folder, tag):
  """Makes a tag a special token, and the weights unreadable."""
  path = folder / "tokenizer.json"
  values = json.loads(path.read_text())
  (token_id,) = tokenizers.Tokenizer.from_file(str(path)).encode(tag).ids
  entry = values["added_tokens"][0] | {"id": token_id, "content": tag}
  values["added_tokens"].append(entry | {"special": True})
  path.write_text(json.dumps(values))
  (weights,) = folder.glob("*.safetensors")
  weights.write_bytes(b"not read")


@pytest.mark.parametrize("tag", ["<search>", "</answer>"])
def test_a_tag_that_is_a_special_token_is_refused_before_weights_are_read(
  policy, tmp_path, tag
):
  make_special(policy, tag)
  expected = f"The policy's tokenizer loses {tag}"
  output = f"--output={tmp_path / 'out'}"
  policy_flag = f"--hf={policy}"
  for command, *arguments in (
    (ask, policy_flag, "gebos employer founder ?"),
    (serve, policy_flag, "--port=0"),
    (evaluate, policy_flag, output),
    (train, f"--config.policy={policy}", output),
  ):
    assert expected in str(commands.run(command, *FLAGS, *arguments)), command
  with pytest.raises(ValueError, match=expected):
    aj.Agent.load(policy, retriever=tmp_path / "nowhere", config=CONFIG)


def metaspace(scheme):
  """Returns the parts of SentencePiece's tokenizers as folders now have them.

  Args:
    scheme: which texts get a space before them.
  """
  settings = {"replacement": "\u2581", "prepend_scheme": scheme}
  return {
    "pre_tokenizer": tokenizers.pre_tokenizers.Metaspace(**settings),
    "decoder": tokenizers.decoders.Metaspace(**settings),
  }


def legacy_metaspace():
  """Returns the parts that Llama 2's folder has."""
  normalizers = tokenizers.normalizers
  decoders = tokenizers.decoders
  return {
    "normalizer": normalizers.Sequence(
      [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    ),
    "decoder": decoders.Sequence(
      [
        decoders.Replace("\u2581", " "),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
      ]
    ),
  }


@pytest.mark.parametrize(
  "parts",
  [metaspace("always"), metaspace("first"), legacy_metaspace()],
  ids=["always", "first", "legacy"],
)
def test_a_tokenizer_that_adds_a_space_where_texts_join_is_refused(
  tmp_path, parts
):
  """As SentencePiece's with a prefix space does, of Llama 2 and TinyLlama."""
  pieces = ["<s>", "</s>", "\u2581", *map(chr, range(10, 127))]
  core = tokenizers.Tokenizer(
    tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [])
  )
  for name, part in parts.items():
    setattr(core, name, part)
  core.add_special_tokens(["<s>", "</s>"])
  core.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
  environment = systems.of_episode(config_lib.EpisodeConfig())
  codec = tokenizer_lib.Tokenizer.from_folder(tmp_path)
  with pytest.raises(ValueError, match="adds a space where two texts are join"):
    validation.check_codec(codec, environment)
  if "normalizer" not in parts:
    for name, part in metaspace("never").items():  # As Gemma's.
      setattr(codec.hf.backend_tokenizer, name, part)
    validation.check_codec(codec, environment)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_policy_whose_numbers_are_not_finite_says_so(policy, value):
  (path,) = policy.glob("*.safetensors")
  tensors = safetensors.numpy.load_file(path)
  tensors["model.norm.weight"] = np.full_like(
    tensors["model.norm.weight"], value
  )
  safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
  ended, printed = commands.printed(
    ask, *FLAGS, f"--hf={policy}", "gebos employer founder ?"
  )
  assert ended == 1
  assert "no answer: " in printed and "are not finite" in printed
