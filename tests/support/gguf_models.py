"""GGUF files of small random models, as llama.cpp's converter writes them.

What the converter does is written here a second time, from its source
(https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py).
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from anysearch_jax.policy import tensor_files

# Text of a tokenizer whose words are characters of bytes.
_BYTES = [
  *range(ord("!"), ord("~") + 1),
  *range(ord("¡"), ord("¬") + 1),
  *range(ord("®"), ord("ÿ") + 1),
]
_ARCHITECTURES = {
  "llama": gguf.MODEL_ARCH.LLAMA,
  "qwen2": gguf.MODEL_ARCH.QWEN2,
  "qwen3": gguf.MODEL_ARCH.QWEN3,
  "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
  "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant"
  "\n{% endif %}"
)


def byte_characters() -> list[str]:
  """Returns the character that byte-level BPE writes for each byte."""
  others = iter(range(256, 512))
  return [chr(b) if b in _BYTES else chr(next(others)) for b in range(256)]


def byte_vocabulary() -> dict[str, Any]:
  """Returns the metadata of a byte-level tokenizer with a few merges."""
  space = byte_characters()[32]
  merges = ["t h", "th e", f"{space} the", "i n", "1 2"]
  tokens = [*byte_characters(), *("".join(m.split(" ")) for m in merges)]
  controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  types = [1] * len(tokens) + [CONTROL] * 3 + [USER_DEFINED]
  tokens += [*controls, "<tool_call>"]
  return {
    "model": "gpt2",
    "pre": "qwen2",
    "tokens": tokens,
    "token_type": types,
    "merges": merges,
    "eos_token_id": tokens.index("<|im_end|>"),
    "padding_token_id": tokens.index("<|endoftext|>"),
  }


def piece_vocabulary() -> dict[str, Any]:
  """Returns the metadata of a SentencePiece tokenizer."""
  pieces = ["▁", "t", "h", "e", "th", "the", "▁the", "i", "n", "in", "▁in"]
  tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
  types = [2, CONTROL, CONTROL, *[BYTE] * 256, *[1] * len(pieces)]
  scores = [0.0] * len(tokens) + [-float(i) for i in range(len(pieces))]
  return {
    "model": "llama",
    "pre": "default",
    "tokens": [*tokens, *pieces],
    "token_type": types,
    "scores": scores,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
  }


def write(
  folder: pathlib.Path,
  path: pathlib.Path,
  *,
  kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
  vocabulary: dict[str, Any] | None = None,
  changes: dict[str, Any] | None = None,
  tensors: dict[str, np.ndarray | None] | None = None,
) -> pathlib.Path:
  """Writes the model of a Hugging Face folder as a GGUF file.

  Args:
    folder: has config.json and safetensors.
    path: the file to write.
    kind: type of the matrices.
    vocabulary: keys of `tokenizer.ggml.`; {} for no tokenizer.
    changes: replace values of the metadata; None removes a key.
    tensors: replace tensors; None removes one.
  """
  config = json.loads((folder / "config.json").read_text())
  table = _ARCHITECTURES[config["model_type"]]
  architecture = gguf.MODEL_ARCH_NAMES[table]
  values = _metadata(config, architecture)
  if vocabulary is None:
    vocabulary = byte_vocabulary()
  values |= {f"tokenizer.ggml.{key}": x for key, x in vocabulary.items()}
  if vocabulary:
    values["tokenizer.chat_template"] = TEMPLATE
  values |= changes or {}
  writer = gguf.GGUFWriter(path, architecture)
  for key, value in values.items():
    add(writer, key, value)
  layers = config["num_hidden_layers"]
  names = gguf.get_tensor_name_map(table, layers)
  found = safetensors.numpy.load_file(folder / tensor_files.SINGLE_NAME)
  converted: dict[str, np.ndarray | None] = {}
  for name, tensor in found.items():
    module, _, suffix = name.rpartition(".")
    converted[f"{names.get_name(module)}.{suffix}"] = _tensor(
      module, tensor, config
    )
  factors = _rope_factors(config)
  if factors is not None:
    converted["rope_freqs.weight"] = factors
  for name, tensor in (converted | (tensors or {})).items():
    if tensor is None:
      continue
    if tensor.ndim == 1:
      writer.add_tensor(name, tensor.astype(np.float32))
    else:
      writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
  """Adds a value to the metadata; None is left out."""
  if key == "general.architecture":
    writer.kv_data[0].pop(key)
  match value:
    case None:
      return
    case bool():
      writer.add_bool(key, value)
    case int():
      writer.add_uint32(key, value)
    case float():
      writer.add_float32(key, value)
    case str():
      writer.add_string(key, value)
    case _:
      writer.add_array(key, value)


def _metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
  """Returns the keys of the architecture."""
  rope = config["rope_parameters"]
  windowed = {}
  if "full_attention" in rope:
    windowed["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    windowed["attention.sliding_window"] = config["sliding_window"]
    windowed["attention.sliding_window_pattern"] = [
      kind == "sliding_attention" for kind in config["layer_types"]
    ]
    rope = rope["full_attention"]
  head_dim = config.get("head_dim")
  head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
  keys = {
    "context_length": config["max_position_embeddings"],
    "block_count": config["num_hidden_layers"],
    "embedding_length": config["hidden_size"],
    "feed_forward_length": config["intermediate_size"],
    "attention.head_count": config["num_attention_heads"],
    "attention.head_count_kv": config["num_key_value_heads"],
    "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    "attention.key_length": head_dim,
    "attention.value_length": head_dim,
    "rope.freq_base": rope["rope_theta"],
    **windowed,
  }
  if architecture == "llama":
    keys["vocab_size"] = config["vocab_size"]
    keys["rope.dimension_count"] = head_dim
  if rope["rope_type"] in ("yarn", "linear"):
    keys["rope.scaling.type"] = rope["rope_type"]
    keys["rope.scaling.factor"] = rope["factor"]
  if rope["rope_type"] == "yarn":
    context = rope["original_max_position_embeddings"]
    keys["rope.scaling.original_context_length"] = context
  return {f"{architecture}.{key}": value for key, value in keys.items()}


def _tensor(
  module: str, tensor: np.ndarray, config: dict[str, Any]
) -> np.ndarray:
  """Returns a tensor as the converter writes it."""
  if config["model_type"] == "gemma3_text" and module.endswith("norm"):
    return tensor + np.float32(1)
  heads = {
    "q_proj": config["num_attention_heads"],
    "k_proj": config["num_key_value_heads"],
  }.get(module.rpartition(".")[2])
  if config["model_type"] != "llama" or heads is None:
    return tensor
  rest = tensor.shape[1:]
  halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *rest)
  return halves.swapaxes(1, 2).reshape(tensor.shape)


def _rope_factors(config: dict[str, Any]) -> np.ndarray | None:
  """Returns the factors of Llama 3.1's RoPE, as the converter computes them."""
  rope = config["rope_parameters"]
  if rope.get("rope_type") != "llama3":
    return None
  head_dim = config.get("head_dim")
  head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
  low, high = rope["low_freq_factor"], rope["high_freq_factor"]
  context = rope["original_max_position_embeddings"]
  factors = []
  for i in range(0, head_dim, 2):
    wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
    if wavelength < context / high:
      factors.append(1.0)
    elif wavelength > context / low:
      factors.append(rope["factor"])
    else:
      smooth = (context / wavelength - low) / (high - low)
      factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
  return np.array(factors, np.float32)
