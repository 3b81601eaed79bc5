"""Hugging Face folders in and out."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import tokenizer as tokenizer_lib
from anysearch_jax import weights
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import table


class Policy(NamedTuple):
  """What a folder holds: parameters (float32), sizes, tokenizer."""

  params: dict[str, Any]
  architecture: architecture_lib.Architecture
  tokenizer: tokenizer_lib.Tokenizer


def load(folder: str | pathlib.Path) -> Policy:
  """Loads a Qwen2.5, Qwen3 or Llama-3.x folder.

  Raises:
    ValueError: what is missing or not supported, by name.
  """
  folder = pathlib.Path(folder)
  path = folder / "config.json"
  if not path.is_file():
    raise ValueError(
      f"{folder}: no config.json; expected a Hugging Face folder (the "
      "quickstart's is made by `python -m launch.warm_start`)."
    )
  a = architecture_lib.from_hf(json.loads(path.read_text()))
  ignored = ("lm_head.weight",) if a.tied else ()
  params = weights.load(folder, table.rows(a), ignored=ignored)
  return Policy(params, a, tokenizer_lib.Tokenizer.from_folder(folder))


def save(
  folder: str | pathlib.Path,
  policy: Policy,
  *,
  dtype: np.dtype | type = np.float32,
) -> None:
  """Writes a folder that `load` and transformers read; whole or not at all."""
  folder = pathlib.Path(folder)
  beside = folder.with_name(folder.name + ".writing")
  shutil.rmtree(beside, ignore_errors=True)
  beside.mkdir(parents=True)
  a = policy.architecture
  hf = architecture_lib.to_hf(
    a,
    dtype=np.dtype(dtype).name,
    eos_token_id=sorted(policy.tokenizer.end_of_turn_ids),
  )
  (beside / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
  (beside / "generation_config.json").write_text(
    json.dumps({"eos_token_id": hf["eos_token_id"]}, indent=2) + "\n"
  )
  policy.tokenizer.hf.save_pretrained(beside)
  weights.save(
    beside / weights.SINGLE_NAME, policy.params, table.rows(a), dtype=dtype
  )
  if folder.exists():
    shutil.rmtree(folder)
  beside.rename(folder)
