"""Settings of an encoder: from arguments, its folder, or its model's name.

Arguments take precedence over the folder. A folder in the layout of
sentence-transformers says how to pool and how long a text may be, and may have
prompts. Otherwise pooling is the usual one of the model (by mean for BERT, the
last token for a decoder; the first token for gte-modernbert), a text has up to
256 tokens, and the prefixes are E5's if the model's name is E5's, Nomic's for
modernbert-embed, an instruction for E5-instruct and
Qwen3-Embedding, or empty.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from typing import Any

from anysearch_jax.config import settings
from anysearch_jax.host import json_files

POOLINGS = ("mean", "cls", "lasttoken")
# "e5" as a word: `e5-small-v2`, `intfloat_e5-base`, not `base5` or `e512`.
E5_NAME = re.compile(r"(?<![a-z0-9])e5(?![a-z0-9])", re.IGNORECASE)
_TASK = (
  "Instruct: Given a web search query, retrieve relevant passages that answer "
  "the query\nQuery:"
)
# The prefixes that models are trained with, by a part of the model's name:
# Nomic's, the retrieval task of models that take an instruction, and E5's.
_TRAINED = (
  (
    re.compile(r"(?<![a-z0-9])modernbert-embed(?![a-z0-9])", re.IGNORECASE),
    {"query_prefix": "search_query: ", "passage_prefix": "search_document: "},
  ),
  (
    re.compile(E5_NAME.pattern + ".*instruct", re.IGNORECASE),
    {"query_prefix": f"{_TASK} "},
  ),
  (re.compile("qwen3-embedding", re.IGNORECASE), {"query_prefix": _TASK}),
  (E5_NAME, {"query_prefix": "query: ", "passage_prefix": "passage: "}),
)
_FIRST_TOKEN = re.compile(r"gte-modernbert", re.IGNORECASE)
_MAX_TOKENS = 256
_INTFLOAT = re.compile(r"e5-(small|base|large)(-v2)?")
# The names under which sentence-transformers looks for the prompts.
_PROMPTS = {
  "query_prefix": ("query",),
  "passage_prefix": ("document", "passage", "corpus"),
}
_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES = {
  "pooling_mode_mean_tokens": "mean",
  "pooling_mode_cls_token": "cls",
  "pooling_mode_lasttoken": "lasttoken",
}
# Reads a JSON file, {} if it is missing.
_object = functools.partial(json_files.read, missing={})


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
  """Processing of texts before and after the model.

  Attributes:
    pooling: one of `POOLINGS`.
    query_prefix, passage_prefix: texts before each query and each passage.
    max_tokens: the most tokens of a text, including prefix and special tokens;
      the end of a longer text is cut off.
  """

  pooling: str
  query_prefix: str
  passage_prefix: str
  max_tokens: int

  def __post_init__(self):
    settings.require("pooling", self.pooling, POOLINGS)


NAMES = tuple(field.name for field in dataclasses.fields(EncoderSettings))


def settle(
  folder: pathlib.Path,
  *,
  default_pooling: str = "mean",
  model_tokens: int,
  **overrides: Any,
) -> EncoderSettings:
  """Returns the settings of an encoder's folder.

  Args:
    folder: a Hugging Face folder.
    default_pooling: the pooling if neither folder nor name decides it.
    model_tokens: the most tokens that the model can read.
    overrides: fields of `EncoderSettings` that take precedence; None leaves a
      field to the folder.

  Raises:
    ValueError: a setting is not supported; the message names it.
  """
  fields = {k: v for k, v in overrides.items() if v is not None}
  path = folder / "sentence_bert_config.json"
  config = _object(path)
  if config.get("do_lower_case"):
    raise ValueError(
      f"{path}: do_lower_case is not supported; the tokenizer itself must "
      "lowercase. If it does, set do_lower_case to false."
    )
  fields = trained_prefixes(_names(folder)) | _prompts(folder) | fields
  if "max_tokens" not in fields:
    length = config.get("max_seq_length")
    length = length if type(length) is int and length > 0 else _MAX_TOKENS
    fields["max_tokens"] = min(length, model_tokens)
  elif fields["max_tokens"] > model_tokens:
    raise ValueError(
      f"max_tokens: found {fields['max_tokens']}, but {folder} has only "
      f"{model_tokens} positions; expected at most that many."
    )
  if "pooling" not in fields:
    fields["pooling"] = _pooling(folder, default_pooling)
  return EncoderSettings(**fields)


def trained_prefixes(name: str) -> dict[str, str]:
  """Returns the prefixes of queries and passages that a model has by its name.

  Args:
    name: name of the model, and perhaps of the one it was made from.
  """
  trained = (prefixes for part, prefixes in _TRAINED if part.search(name))
  return {"query_prefix": "", "passage_prefix": ""} | next(trained, {})


def _names(folder: pathlib.Path) -> str:
  """Returns the names of a folder's model and of the one it was made from."""
  config = _object(folder.resolve() / "config.json")
  made_from = pathlib.PurePath(str(config.get("_name_or_path", "")))
  return f"{model_name(folder)}\n{made_from.name}"


def _pooling(folder: pathlib.Path, default_pooling: str) -> str:
  path = folder / "modules.json"
  if not path.is_file():
    return "cls" if _FIRST_TOKEN.search(_names(folder)) else default_pooling
  modules = {}
  for module in json_files.read(path, list):
    kind = str(module.get("type") if isinstance(module, dict) else module)
    kind = kind.rsplit(".", 1)[-1]
    if kind not in _MODULES:
      raise ValueError(
        f"{path}: module {kind!r} is not supported; expected "
        f"{', '.join(_MODULES)}. Name the pooling, then this file is not "
        "read."
      )
    modules[kind] = module.get("path")
  if "Pooling" not in modules:
    return default_pooling
  module_folder = folder / str(modules["Pooling"])
  if not module_folder.resolve().is_relative_to(folder.resolve()):
    raise ValueError(
      f"{path}: found the module's folder {modules['Pooling']!r}, expected one "
      "inside this folder."
    )
  path = module_folder / "config.json"
  config = _object(path)
  if "pooling_mode" in config and config.get("include_prompt", True):
    return str(config["pooling_mode"])
  modes = [
    key for key, on in config.items() if key.startswith("pooling_mode") and on
  ]
  is_supported = len(modes) == 1 and modes[0] in _MODES
  if not is_supported or not config.get("include_prompt", True):
    raise ValueError(
      f"{path}: pooling by {', '.join(modes) or 'nothing'} is not supported; "
      f"expected one of {', '.join(_MODES)}, prompts included."
    )
  return _MODES[modes[0]]


def _prompts(folder: pathlib.Path) -> dict[str, str]:
  """Returns both prefixes, or {} if all prompts of the folder are empty.

  sentence-transformers writes empty prompts by default, so these mean nothing.
  """
  path = folder / "config_sentence_transformers.json"
  values = _object(path)
  prompts = values.get("prompts")
  if not isinstance(prompts, dict):
    return {}
  default = str(values.get("default_prompt_name"))
  prefixes = {}
  for prefix, names in _PROMPTS.items():
    present = [prompts[name] for name in (*names, default) if name in prompts]
    prefixes[prefix] = str(present[0] or "") if present else ""
  return prefixes if any(prefixes.values()) else {}


def model_name(folder: pathlib.Path) -> str:
  """Returns the name of a folder's model, with its owner on the Hub if known.

  The Hub's cache has both in a folder's name; plain names of E5's models get
  the owner intfloat.
  """
  folder = folder.resolve()
  if folder.parent.name == "snapshots":
    cached = folder.parent.parent.name
    return cached.removeprefix("models--").replace("--", "/")
  of_intfloat = _INTFLOAT.fullmatch(folder.name) is not None
  return f"intfloat/{folder.name}" if of_intfloat else folder.name
