"""Writes a GGUF file's model as a Hugging Face folder.

Numbers are exact: a tensor of blocks becomes float32, any other keeps its type.
The file is read and written in parts of some megabytes.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import gguf
import numpy as np

from anysearch_jax.host import disk, json_files
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import (
  families,
  gguf_files,
  gguf_tokenizer,
  hf,
  hf_architecture,
  table,
  tensor_files,
)

# By `general.architecture`: the family, and the package's tables of names.
_FAMILIES = {
  "llama": ("llama", gguf.MODEL_ARCH.LLAMA),
  "qwen2": ("qwen2", gguf.MODEL_ARCH.QWEN2),
  "qwen3": ("qwen3", gguf.MODEL_ARCH.QWEN3),
  "gemma3": ("gemma3_text", gguf.MODEL_ARCH.GEMMA3),
}
_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
# Factors of RoPE's frequencies, of models whose RoPE is Llama 3.1's.
_ROPE_FACTORS = "rope_freqs.weight"
# By the family's key: sizes that every file has.
_SIZES = {
  "max_position_embeddings": "context_length",
  "num_hidden_layers": "block_count",
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_attention_heads": "attention.head_count",
}
_EPSILON = "attention.layer_norm_rms_epsilon"
# Other keys whose values are read.
_READ = (
  _EPSILON,
  "attention.head_count_kv",
  "attention.key_length",
  "attention.sliding_window",
  "attention.sliding_window_pattern",
  "rope.freq_base",
  "rope.freq_base_swa",
  "rope.scaling.factor",
  "rope.scaling.original_context_length",
  "rope.scaling.type",
)
# Keys that change nothing.
_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout", "vocab_size")
_ROPE_THETA = 10_000.0
# Llama 3.1's RoPE is known by its frequencies alone: only the ratio of the
# original context to each factor counts, so two of its settings are given.
_LOW_FREQ_FACTOR = 1.0
_HIGH_FREQ_FACTOR = 4.0
_MAX_CONTEXT_BITS = 24
_FACTOR_TOLERANCE = 1e-4  # Relative; files were written in float32.
# llama.cpp knows Gemma 3's 27B, whose queries have a scale of their own, by its
# layers.
_LAYERS_OF_27B = 62
# Gemma 3 has a layer of full attention after five with windows.
_WINDOW_PERIOD = 6
_DTYPE_NAMES = {
  gguf.GGMLQuantizationType.F16: "F16",
  gguf.GGMLQuantizationType.BF16: "BF16",
}


class _Entry(NamedTuple):
  """A tensor to write.

  Attributes:
    name: its name in the folder.
    tensor: where its numbers are.
    heads: llama.cpp keeps the rows of Llama's queries and keys in another
      order within each of so many heads; 0: in the family's.
    offset: what the file added to its numbers.
  """

  name: str
  tensor: gguf_files.Tensor
  heads: int
  offset: float

  @property
  def dtype(self) -> str:
    """The type in the folder, by safetensors' name."""
    return "F32" if self.offset else _DTYPE_NAMES.get(self.tensor.kind, "F32")

  @property
  def size(self) -> int:
    """The bytes in the folder."""
    return math.prod(self.tensor.shape) * (4 if self.dtype == "F32" else 2)


def convert(
  path: str | pathlib.Path, folder: str | pathlib.Path
) -> architecture_lib.Architecture:
  """Writes a folder that `hf.load` and transformers read, or nothing at all.

  Args:
    path: the GGUF file.
    folder: the folder to write; replaced if it exists.

  Returns:
    The model's architecture.

  Raises:
    ValueError: the file is damaged, or its model is not supported; the message
      names the file.
    disk.DiskError: the folder cannot be written.
  """
  path = pathlib.Path(path)
  file = gguf_files.read(path)
  with (
    disk.translate_errors(folder),
    hf.atomic_directory(folder) as temporary,
  ):
    try:
      config = _config(file)
      a = hf_architecture.from_hf(config)
      entries = _entries(file, a)
      tokenizer, ends = gguf_tokenizer.make(file.metadata)
      tokenizer.save_pretrained(temporary)
      ids = {"eos_token_id": ends} if ends else {}
      json_files.write(temporary / "config.json", config | ids)
      json_files.write(temporary / "generation_config.json", ids)
      hf.describe(temporary)
    except ValueError as error:
      sentence = str(error).removeprefix(f"{temporary}: ").removesuffix(".")
      raise ValueError(f"{path}: {sentence}.") from error
    except (ArithmeticError, AttributeError, TypeError) as error:
      raise ValueError(
        f"{path}: a value of its metadata is of the wrong type ({error}); copy "
        "the file again."
      ) from error
    _write(temporary / tensor_files.SINGLE_NAME, file, entries)
  return a


def _config(file: gguf_files.GgufFile) -> dict[str, Any]:
  """Returns the config.json of a file's model."""
  architecture = file.metadata.get("general.architecture")
  if architecture not in _FAMILIES:
    raise ValueError(
      f"has a model of the architecture {architecture!r}, which is not "
      f"supported in a GGUF file; expected one of {', '.join(_FAMILIES)}"
    )
  family, _ = _FAMILIES[architecture]
  prefix = f"{architecture}."
  values = {
    key.removeprefix(prefix): value
    for key, value in file.metadata.items()
    if key.startswith(prefix)
  }
  config = {key: _size(values, name) for key, name in _SIZES.items()}
  layers = config["num_hidden_layers"]
  if layers > len(file.tensors):
    raise ValueError(
      f"has {len(file.tensors)} tensors for {layers} layers "
      f"({prefix}block_count); expected some for each"
    )
  heads = config["num_attention_heads"]
  width = config["hidden_size"]
  head_dim = _size(values, "attention.key_length", width // heads)
  _check_keys(values, prefix, head_dim)
  if _EMBEDDING not in file.tensors:
    raise ValueError(f"lacks the tensor {_EMBEDDING!r}")
  config |= {
    "architectures": [families.FAMILIES[family].class_name],
    "model_type": family,
    "vocab_size": file.tensors[_EMBEDDING].rows,
    "num_key_value_heads": _size(values, "attention.head_count_kv", heads),
    "head_dim": head_dim,
    "rms_norm_eps": _number(values, _EPSILON),
    "tie_word_embeddings": _HEAD not in file.tensors,
    "attention_bias": "blk.0.attn_output.bias" in file.tensors,
    "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
  }
  rope = _rope(file, values, head_dim)
  if family == "gemma3_text":
    return config | _gemma3(values, rope, config)
  return config | {"hidden_act": "silu", "rope_parameters": rope}


def _gemma3(
  values: dict[str, Any], rope: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
  """Returns the keys of config.json that only Gemma 3 has."""
  layers = config["num_hidden_layers"]
  window = values.get("attention.sliding_window", 0)
  period_key = "attention.sliding_window_pattern"
  period = values.get(period_key)
  if isinstance(period, np.ndarray):
    has_window = [bool(x) for x in period]
  else:
    period = _size(values, period_key, _WINDOW_PERIOD)
    has_window = [(i + 1) % period != 0 for i in range(layers)]
  scalar = config["head_dim"]
  if layers == _LAYERS_OF_27B:
    scalar = config["hidden_size"] // config["num_attention_heads"]
  theta = _number(values, "rope.freq_base_swa", _ROPE_THETA)
  return {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": scalar,
    "sliding_window": window or config["max_position_embeddings"],
    "layer_types": [
      "sliding_attention" if window and is_windowed else "full_attention"
      for is_windowed in has_window
    ],
    "rope_parameters": {
      "full_attention": rope,
      "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    },
  }


def _check_keys(values: dict[str, Any], prefix: str, head_dim: int) -> None:
  """Refuses keys of the architecture that may change what it computes."""
  supported = {
    "attention.causal": True,
    "attention.value_length": head_dim,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.dimension_count": head_dim,
  }
  for key, value in values.items():
    if key in supported and value != supported[key]:
      raise ValueError(
        f"{prefix}{key} is {value!r}, which is not supported; expected "
        f"{supported[key]!r}"
      )
    if key not in {*supported, *_SIZES.values(), *_READ, *_HARMLESS}:
      raise ValueError(
        f"has the unknown key {prefix}{key} ({value!r:.80}), which may change "
        "what the model computes; expected keys that are known, so download "
        "the model's safetensors"
      )


def _size(values: dict[str, Any], key: str, default: int | None = None) -> int:
  """Returns a positive integer of the metadata."""
  value = values.get(key, default)
  if type(value) is not int or value < 1:
    raise ValueError(f"{key} is {value!r}, expected a positive integer")
  return value


def _number(
  values: dict[str, Any], key: str, default: float | None = None
) -> float:
  """Returns a positive number of the metadata, as it was before float32."""
  value = values.get(key, default)
  if type(value) is not float or not 0 < value < math.inf:
    raise ValueError(f"{key} is {value!r}, expected a positive number")
  return float(str(np.float32(value)))


def _rope(
  file: gguf_files.GgufFile, values: dict[str, Any], head_dim: int
) -> dict[str, Any]:
  """Returns the `rope_parameters` of config.json."""
  theta = _number(values, "rope.freq_base", _ROPE_THETA)
  rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
  kind = values.get("rope.scaling.type", "none")
  if kind not in ("none", "linear", "yarn"):
    raise ValueError(
      f"rope.scaling.type is {kind!r}, which is not supported; expected "
      "'none', 'linear' or 'yarn'"
    )
  if kind != "none":
    rope |= {
      "rope_type": kind,
      "factor": _number(values, "rope.scaling.factor"),
    }
  if kind == "yarn":
    rope[hf_architecture.ORIGINAL_CONTEXT] = _size(
      values,
      "rope.scaling.original_context_length",
      values["context_length"],
    )
  if _ROPE_FACTORS not in file.tensors:
    return rope
  if kind != "none":
    raise ValueError(
      f"scales RoPE by {kind!r} and by the tensor {_ROPE_FACTORS!r}; expected "
      "one of them"
    )
  tensor = file.tensors[_ROPE_FACTORS]
  if tensor.shape != (head_dim // 2,):
    raise ValueError(
      f"the tensor {_ROPE_FACTORS!r} has shape {tensor.shape}, expected "
      f"{(head_dim // 2,)}"
    )
  factors = np.concatenate(list(gguf_files.blocks(file, tensor)))
  return rope | _llama3_rope(factors.astype(np.float64), theta, head_dim)


def _llama3_rope(
  factors: np.ndarray, theta: float, head_dim: int
) -> dict[str, Any]:
  """Returns the settings of Llama 3.1's RoPE whose factors these are."""
  factor = float(factors.max())
  turns = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
  spread = _HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR
  for context in (2**bits for bits in range(_MAX_CONTEXT_BITS)):
    share = np.clip((turns * context - _LOW_FREQ_FACTOR) / spread, 0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if np.allclose(factors, expected, rtol=_FACTOR_TOLERANCE, atol=0):
      return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        hf_architecture.ORIGINAL_CONTEXT: context,
      }
  raise ValueError(
    f"scales RoPE by the tensor {_ROPE_FACTORS!r} in a way that is not "
    "Llama 3.1's; expected that one, so download the model's safetensors"
  )


def _entries(
  file: gguf_files.GgufFile, a: architecture_lib.Architecture
) -> list[_Entry]:
  """Returns all tensors to write.

  Raises:
    ValueError: a tensor is missing, unknown or misshaped.
  """
  architecture = file.metadata["general.architecture"]
  _, tables = _FAMILIES[architecture]
  names = gguf.get_tensor_name_map(tables, a.layers)
  # llama.cpp rotates neighbouring numbers of Llama's heads.
  heads_by_module = (
    {"q_proj": a.heads, "k_proj": a.kv_heads} if a.family == "llama" else {}
  )
  entries = []
  unknown = {*file.tensors} - {_ROPE_FACTORS}
  for row in table.base_rows(a):
    for name in row.tensor_names():
      module, _, suffix = name.rpartition(".")
      name_in_file = f"{names.get_name(module)}.{suffix}"
      tensor = file.tensors.get(name_in_file)
      if tensor is None:
        raise ValueError(
          f"lacks the tensor {name_in_file!r}; expected all of a model of "
          f"the architecture {architecture!r}"
        )
      if tensor.shape != row.file_shape:
        raise ValueError(
          f"the tensor {name_in_file!r} has shape {tensor.shape}, expected "
          f"{row.file_shape}"
        )
      heads = heads_by_module.get(module.rpartition(".")[2], 0)
      offset = a.norm_offset if row.init is None else 0.0
      entries.append(_Entry(name, tensor, heads, offset))
      unknown.discard(name_in_file)
  if unknown:
    raise ValueError(
      f"has the unknown tensor {min(unknown)!r} ({len(unknown)} in all); "
      f"expected those of a model of the architecture {architecture!r}"
    )
  return entries


def _write(
  path: pathlib.Path, file: gguf_files.GgufFile, entries: list[_Entry]
) -> None:
  """Writes a file of safetensors, tensor by tensor.

  Its format is a header of JSON after its length, and the numbers:
  https://huggingface.co/docs/safetensors.
  """
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for entry in entries:
    start = end
    end += entry.size
    header[entry.name] = {
      "dtype": entry.dtype,
      "shape": entry.tensor.shape,
      "data_offsets": [start, end],
    }
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with path.open("wb") as output:
    output.write(len(text).to_bytes(8, "little"))
    output.write(text)
    for entry in entries:
      for numbers in _numbers(file, entry):
        output.write(numbers.data)


def _numbers(file: gguf_files.GgufFile, entry: _Entry) -> Iterator[np.ndarray]:
  """Yields the numbers of a tensor as the folder has them."""
  order = None
  rows = entry.tensor.rows
  if entry.heads:
    positions = np.arange(rows).reshape(entry.heads, -1, 2)
    order = positions.swapaxes(1, 2).reshape(-1)
  for numbers in gguf_files.blocks(file, entry.tensor, order=order):
    if entry.offset:
      numbers = numbers.astype(np.float32) - np.float32(entry.offset)
    yield numbers.view(np.uint8)
