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
import json
import pathlib
import re
from typing import Any

POOLINGS = ("mean", "cls", "lasttoken")
_E5 = {"query_prefix": "query: ", "passage_prefix": "passage: "}
# "e5" as a word: `e5-small-v2`, `intfloat_e5-base`, not `base5` or `e512`.
_E5_NAME = re.compile(r"(?<![a-z0-9])e5(?![a-z0-9])", re.IGNORECASE)
# Models that were trained with a task before each query, and its usual text.
_INSTRUCTED = re.compile(r"e5.*instruct|qwen3-embedding", re.IGNORECASE)
_TASK = (
  "Instruct: Given a web search query, retrieve relevant passages that answer "
  "the query\nQuery:"
)
# Of modernbert-embed, which was trained with Nomic's data.
_NOMIC = {
  "query_prefix": "search_query: ",
  "passage_prefix": "search_document: ",
}
_NOMIC_NAME = re.compile(
  r"(?<![a-z0-9])modernbert-embed(?![a-z0-9])", re.IGNORECASE
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
    if self.pooling not in POOLINGS:
      raise ValueError(
        f"pooling: found {self.pooling!r}, expected one of "
        f"{', '.join(POOLINGS)}."
      )
    if self.max_tokens < 1:
      raise ValueError(
        f"max_tokens: found {self.max_tokens}, expected 1 or more."
      )


NAMES = tuple(field.name for field in dataclasses.fields(EncoderSettings))


def settle(
  folder: pathlib.Path,
  *,
  pooling: str | None,
  query_prefix: str | None,
  passage_prefix: str | None,
  max_tokens: int | None,
  usual: str = "mean",
  most: int | None = None,
) -> EncoderSettings:
  """Returns the settings of a folder; None stands for the module's defaults.

  Args:
    folder: folder of the encoder.
    pooling, query_prefix, passage_prefix, max_tokens: see `EncoderSettings`.
    usual: the pooling of a folder that names none.
    most: the most tokens that the model can read; None: any number.

  Raises:
    ValueError: a setting is not supported; the message names it.
  """
  path = folder / "sentence_bert_config.json"
  said = read(path, dict) if path.is_file() else {}
  if said.get("do_lower_case"):
    raise ValueError(
      f"{path}: do_lower_case is not supported; the tokenizer itself must "
      "lowercase. If it does, set do_lower_case to false."
    )
  if query_prefix is None or passage_prefix is None:
    prompts = _prompts(folder) or _named(folder)
    if query_prefix is None:
      query_prefix = prompts.get("query_prefix", "")
    if passage_prefix is None:
      passage_prefix = prompts.get("passage_prefix", "")
  if max_tokens is None:
    length = said.get("max_seq_length")
    max_tokens = length if type(length) is int and length > 0 else _MAX_TOKENS
    max_tokens = max_tokens if most is None else min(max_tokens, most)
  elif most is not None and max_tokens > most:
    raise ValueError(
      f"max_tokens: found {max_tokens}, but {folder} has only {most} "
      "positions; expected at most that many."
    )
  return EncoderSettings(
    pooling=_pooling(folder, usual) if pooling is None else pooling,
    query_prefix=query_prefix,
    passage_prefix=passage_prefix,
    max_tokens=max_tokens,
  )


def _named(folder: pathlib.Path) -> dict[str, str]:
  """Returns the prefixes that models of this name are trained with."""
  names = _names(folder)
  if any(map(_NOMIC_NAME.search, names)):
    return _NOMIC
  if any(map(_INSTRUCTED.search, names)):
    space = " " if any(map(is_e5_name, names)) else ""
    return {"query_prefix": _TASK + space}
  return _E5 if any(map(is_e5_name, names)) else {}


def _names(folder: pathlib.Path) -> tuple[str, str]:
  """Returns the names of a folder's model and of the one it was made from."""
  config = read(folder.resolve() / "config.json", dict)
  made_from = pathlib.PurePath(str(config.get("_name_or_path", "")))
  return model_name(folder), made_from.name


def _pooling(folder: pathlib.Path, usual: str) -> str:
  path = folder / "modules.json"
  if not path.is_file():
    return "cls" if any(map(_FIRST_TOKEN.search, _names(folder))) else usual
  modules = {}
  for module in read(path, list):
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
    return usual
  at = folder / str(modules["Pooling"])
  if not at.resolve().is_relative_to(folder.resolve()):
    raise ValueError(
      f"{path}: found the module's folder {modules['Pooling']!r}, expected one "
      "inside this folder."
    )
  path = at / "config.json"
  config = read(path, dict)
  if "pooling_mode" in config and config.get("include_prompt", True):
    return str(config["pooling_mode"])
  modes = [
    key for key, on in config.items() if key.startswith("pooling_mode") and on
  ]
  known = len(modes) == 1 and modes[0] in _MODES
  if not known or not config.get("include_prompt", True):
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
  values = read(path, dict) if path.is_file() else {}
  prompts = values.get("prompts")
  if not isinstance(prompts, dict):
    return {}
  default = str(values.get("default_prompt_name"))
  said = {
    side: str(
      next((prompts[n] for n in (*names, default) if n in prompts), "") or ""
    )
    for side, names in _PROMPTS.items()
  }
  return said if any(said.values()) else {}


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


def is_e5_name(name: str) -> bool:
  """Returns whether a model's name contains the word "e5"."""
  return _E5_NAME.search(name) is not None


def read(path: pathlib.Path, kind: type) -> Any:
  try:
    values = json.loads(path.read_bytes())
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(
      f"{path}: the JSON is incomplete or damaged ({error}); copy it again."
    ) from error
  if not isinstance(values, kind):
    raise ValueError(
      f"{path}: found {type(values).__name__}, expected {kind.__name__}."
    )
  return values
