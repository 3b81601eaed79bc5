"""Reads and writes Hugging Face folders."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.host import json_files, processes
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import (
  hf_architecture,
  hf_config,
  lora,
  sharding,
  table,
  tensor_files,
)
from anysearch_jax.policy import tokenizer as tokenizer_lib

# The files of a checkpoint that an export copies: all but weights and card.
_FILES = (
  "config.json",
  "generation_config.json",
  "tokenizer*",
  "vocab.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "merges.txt",
  "chat_template*",
  "LICENSE*",
  "NOTICE*",
  "USE_POLICY*",
)
# Buffers in old checkpoints that can be computed from the config.
_IGNORED = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"

# The hub's owner of a policy, by the first letters of its name.
_OWNERS = {
  "Qwen": "Qwen",
  "Llama": "meta-llama",
  "SmolLM": "HuggingFaceTB",
  "Olmo": "allenai",
  "gemma": "google",
  "gpt-oss": "openai",
}
_WRITING = ".writing"  # Ends the name of a folder that is not whole yet.


class Policy(NamedTuple):
  """The content of a folder.

  Attributes:
    params: nested dict laid out by `table.rows(architecture)`.
    architecture: sizes and switches.
    tokenizer: the policy's tokenizer.
    source: folder whose configuration and tokenizer files an export copies;
      None generates these files.
  """

  params: dict[str, Any]
  architecture: architecture_lib.Architecture
  tokenizer: tokenizer_lib.Tokenizer
  source: pathlib.Path | None = None


def load(
  folder: str | pathlib.Path,
  *,
  mesh: jax.sharding.Mesh | None = None,
  dtype: Any = jnp.float32,
) -> Policy:
  """Loads a policy of a supported family (`families.FAMILIES`).

  Each device reads only its shard. Nothing is allocated before the folder is
  known to be complete and supported.

  Args:
    folder: has `config.json`, safetensors and a fast tokenizer.
    mesh: the devices to shard the weights over; None means the first device.
    dtype: type of the weights, whatever the type in the files.

  Raises:
    ValueError: something is missing or not supported; the message names it.
  """
  folder = pathlib.Path(folder)
  a, tokenizer = describe(folder)
  params = tensor_files.load(
    folder,
    table.base_rows(a),
    shardings=None if mesh is None else sharding.shardings(a, mesh),
    dtype=dtype,
    ignored=_IGNORED,
    copies={"lm_head.weight": "model.embed_tokens.weight"} if a.tied else {},
  )
  return Policy(params, a, tokenizer, folder)


def describe(
  folder: str | pathlib.Path,
) -> tuple[architecture_lib.Architecture, tokenizer_lib.Tokenizer]:
  """Reads architecture and tokenizer of a folder; raises as `load` does."""
  folder = pathlib.Path(folder)
  path = folder / "config.json"
  hf_config.refuse_adapter(folder)
  if not path.is_file():
    hf_config.refuse_gguf(folder)
    name = folder.name
    owners = (_OWNERS[x] for x in _OWNERS if name.startswith(x))
    owner = next(owners, "OWNER")
    advice = f"Download one by `hf download {owner}/{name} --local-dir DIR`."
    if name == "graded_world_policy":  # In configs/.
      advice = "Make the shipped one again by `python -m research.warm_start`."
    raise ValueError(
      f"{folder}: no config.json; expected a Hugging Face folder. {advice}"
    )
  config = json_files.read(path)
  try:
    a = hf_architecture.from_hf(config)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error
  tokenizer = tokenizer_lib.Tokenizer.from_folder(folder)
  if tokenizer.vocab_size > a.vocab_size:
    raise ValueError(
      f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the "
      f"embedding {a.vocab_size} rows; they are not of one model."
    )
  largest_id = max(tokenizer.end_of_turn_ids, default=0)
  if largest_id >= tokenizer.vocab_size:
    raise ValueError(
      f"{folder}: eos_token_id {largest_id} of generation_config.json or "
      f"config.json is none of the tokenizer's {tokenizer.vocab_size} tokens; "
      "expected a smaller id."
    )
  return a, tokenizer


def save(
  folder: str | pathlib.Path,
  policy: Policy,
  *,
  dtype: Any = np.float32,
  shard_bytes: int = tensor_files.SHARD_BYTES,
  texts: Mapping[str, str] | None = None,
) -> None:
  """Writes a folder that `load` and transformers can read, or nothing at all.

  A folder that exists is replaced. Adapters are merged into the weights, which
  may be on any mesh. In a run of several processes all must call this function;
  the first one writes the files.

  Args:
    folder: the folder to write.
    policy: the policy.
    dtype: type of the weights in the files.
    shard_bytes: maximum bytes of a file, unless one tensor is larger.
    texts: further text files by name, such as a model card.
  """
  a = policy.architecture
  with _atomic_directory_of_main(folder) as temporary:
    if processes.is_main():
      save_files(temporary, policy, dtype=dtype)
      for name, text in (texts or {}).items():
        (temporary / name).write_text(text)
    tensor_files.save(
      temporary,
      policy.params,
      table.base_rows(a),
      dtype=dtype,
      shard_bytes=shard_bytes,
      part_of=functools.partial(lora.merged_weight, policy.params, a),
    )


def cast(
  params: dict[str, Any], a: architecture_lib.Architecture, dtype: Any
) -> dict[str, Any]:
  """Casts weights for an engine, except the scales of norms.

  Args:
    params: nested dict laid out by `table.rows(a)`.
    a: the architecture.
    dtype: the type of all other weights.
  """
  scales = {row.path for row in table.rows(a) if row.init is None}
  return jax.tree_util.tree_map_with_path(
    lambda path, x: (
      x if tuple(k.key for k in path) in scales else x.astype(dtype)
    ),
    params,
  )


def save_files(
  folder: str | pathlib.Path, policy: Policy, *, dtype: Any = None
) -> None:
  """Writes configuration and tokenizer; copies those of `source` if it is set.

  Args:
    folder: the folder to write to, which must exist.
    policy: the policy, whose parameters are not used.
    dtype: the weights' type in config.json; None keeps the source's value.
  """
  folder = pathlib.Path(folder)
  if policy.source is None:
    ids = sorted(policy.tokenizer.end_of_turn_ids)
    # The default of transformers may be beyond a small embedding.
    pad = policy.tokenizer.hf.pad_token_id
    hf = hf_architecture.to_hf(
      policy.architecture, dtype="float32", eos_token_id=ids, pad_token_id=pad
    )
    policy.tokenizer.hf.save_pretrained(folder)
    json_files.write(folder / "generation_config.json", {"eos_token_id": ids})
  else:
    for pattern in _FILES:
      for path in sorted(policy.source.glob(pattern)):
        if path.is_file():
          shutil.copyfile(path, folder / path.name)
    hf = json_files.read(policy.source / "config.json")
    hf.pop("quantization_config", None)  # Weights are written as numbers.
  if dtype is not None:  # By the older and the newer name, as the folder does.
    keys = [key for key in ("torch_dtype", "dtype") if key in hf] or ["dtype"]
    hf |= dict.fromkeys(keys, jnp.dtype(dtype).name)
  json_files.write(folder / "config.json", hf)


def save_adapter(
  folder: str | pathlib.Path,
  policy: Policy,
  *,
  base: str,
  dtype: Any = np.float32,
) -> None:
  """Writes only the adapters, as a PEFT folder; see `save`.

  Args:
    folder: the folder to write.
    policy: a policy with adapters.
    base: the name or the path of the base model.
    dtype: type of the adapters in the file.

  Raises:
    ValueError: the policy has no adapters.
  """
  a = policy.architecture
  if a.lora is None:
    raise ValueError("Found a policy without adapters; expected one with them.")
  with _atomic_directory_of_main(folder) as temporary:
    tensor_files.save(
      temporary,
      policy.params,
      table.adapter_rows(a),
      dtype=dtype,
      name="adapter_model.safetensors",
    )
    if not processes.is_main():
      return
    json_files.write(
      temporary / "adapter_config.json",
      {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": a.lora.rank,
        "lora_alpha": a.lora.alpha,
        "target_modules": [
          p.module.split(".")[-1]
          for key, p in table.projections(a).items()
          if key in a.lora.targets
        ],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
      },
    )


@contextlib.contextmanager
def atomic_directory(folder: str | pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a temporary folder that replaces `folder` if no error occurs.

  Until then `folder` is unchanged. If `folder` is a symbolic link, its target
  is replaced.

  Raises:
    ValueError: `folder` is a file.
  """
  folder = pathlib.Path(folder).resolve()
  if folder.exists() and not folder.is_dir():
    raise ValueError(f"{folder} is a file; expected a folder or nothing.")
  temporary = folder.with_name(folder.name + _WRITING)
  replaced = folder.with_name(folder.name + ".replaced")
  if replaced.exists() and not folder.exists():
    replaced.rename(folder)  # A process was killed between the renames below.
  for left_over in (temporary, replaced):
    shutil.rmtree(left_over, ignore_errors=True)
  temporary.mkdir(parents=True)
  try:
    yield temporary
    if folder.exists():
      folder.rename(replaced)
    temporary.rename(folder)
  except BaseException:
    if replaced.exists() and not folder.exists():
      replaced.rename(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    raise
  shutil.rmtree(replaced, ignore_errors=True)


def _atomic_directory_of_main(
  folder: str | pathlib.Path,
) -> contextlib.AbstractContextManager[pathlib.Path]:
  """Returns `atomic_directory` in process 0, its folder in all others."""
  if processes.is_main():
    return atomic_directory(folder)
  folder = pathlib.Path(folder).resolve()
  return contextlib.nullcontext(folder.with_name(folder.name + _WRITING))
