"""An allow-list of the keys that a Hugging Face `config.json` may have.

transformers keeps every key of the file as an attribute of the configuration,
and code far from the model reads some of them: `is_causal` alone turns a
decoder into an encoder. The caller names the keys that it understands. Every
other key must be listed here as having no effect on what a model computes.
"""

from __future__ import annotations

import math
import pathlib
import shlex
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from anysearch_jax.host import json_files

# Keys of transformers' base class, and keys about the file itself, about
# returned values, training and classification.
_BOOKKEEPING = """
  _attn_implementation _attn_implementation_autoset
  _attn_implementation_internal _commit_hash
  _experts_implementation_internal _model_name_or_path _name_or_path
  attn_implementation
  bos_token_id chunk_size_feed_forward classifier_dropout
  decoder_start_token_id dtype eos_token_id finetuning_task
  gradient_checkpointing id2label initializer_factor initializer_range
  label2id name_or_path num_labels output_attentions output_hidden_states
  output_past pad_token_id prefix problem_type return_dict sep_token_id
  task_specific_params tf_legacy_loss tie_last_hidden_states tokenizer_class
  torch_dtype torchscript transformers.js_config transformers_version
  unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
  use_return_dict
"""
# Defaults of `generate`, which older versions wrote into the same file. They
# are ignored: the configuration of the run decides how tokens are sampled.
_GENERATION = """
  bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty
  do_sample early_stopping encoder_no_repeat_ngram_size
  encoder_repetition_penalty epsilon_cutoff eta_cutoff
  exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
  length_penalty max_length max_new_tokens min_length min_p
  no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
  output_scores remove_invalid_values repetition_penalty
  return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
_HARMLESS = frozenset((_BOOKKEEPING + _GENERATION).split())
# Keys that are harmless only with these values.
_ONLY: Mapping[str, tuple] = {
  "add_cross_attention": (False, None),
  "auto_map": (None, {}),
  "is_encoder_decoder": (False, None),
  "pruned_heads": (None, {}),
  "quantization_config": (None,),
  "tie_encoder_decoder": (False, None),
}
# What to do with an adapter.
MERGE = "Merge it with PEFT (`merge_and_unload`, then `save_pretrained`)"
# Characters of a value that an error shows.
_MAX_SHOWN = 80


class Kind(NamedTuple):
  """The required type of a value. Booleans do not count as numbers.

  Attributes:
    words: the type in an error's words, after "expected".
    holds: whether a value is of this type.
  """

  words: str
  holds: Callable[[Any], bool]


SIZE = Kind("a positive integer", lambda x: type(x) is int and x > 0)
NUMBER = Kind(
  "a positive number", lambda x: type(x) in (int, float) and 0 < x < math.inf
)
SWITCH = Kind("true or false", lambda x: type(x) is bool)
NAMES = Kind(
  "a list of names",
  lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x),
)
OBJECT = Kind("an object", lambda x: isinstance(x, Mapping))


def check_types(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
  """Raises ValueError for the first key that is missing or of another kind."""
  for key, kind in kinds.items():
    if key not in values or not kind.holds(values[key]):
      value = repr(values[key]) if key in values else "missing"
      raise ValueError(f"config.json: {key} is {value}, expected {kind.words}.")


def check_keys(
  hf: Mapping[str, Any],
  *,
  understood: Collection[str],
  harmless: Collection[str] = (),
  only: Mapping[str, tuple],
) -> None:
  """Refuses keys that may change what a model computes.

  An unknown key with a null value is accepted.

  Args:
    hf: the values of the file.
    understood: keys that the caller reads.
    harmless: keys that change nothing in this family.
    only: keys that change nothing as long as they have one of these values.

  Raises:
    ValueError: names the first refused key, and what was expected.
  """
  only = {**_ONLY, **only}
  known_keys = _HARMLESS | {*understood, *harmless}
  for key, value in hf.items():
    if key in only:
      if not any(type(value) is type(v) and value == v for v in only[key]):
        expected = " or ".join(
          "no such key" if v is None else repr(v) for v in only[key]
        )
        raise ValueError(
          f"config.json: {key} {_shortened(value)} is not supported; "
          f"expected {expected}."
        )
    elif key not in known_keys and value is not None:
      raise ValueError(
        f"config.json: unknown key {key!r} ({_shortened(value)}), which may "
        "change what the model computes; expected keys that are known. Remove "
        "it if you know that it changes nothing."
      )


def refuse_adapter(folder: pathlib.Path) -> None:
  """Raises ValueError if a folder is, or has, a PEFT adapter.

  transformers would add an adapter beside weights to the model.
  """
  path = folder / "adapter_config.json"
  if not path.exists():
    return
  if (folder / "config.json").exists():
    raise ValueError(
      f"{folder}: found adapter_config.json, whose adapter transformers adds "
      f"to the model; expected plain weights. {MERGE}, or remove its files if "
      "the weights already hold it."
    )
  adapter = json_files.read(path)
  base = _shortened(adapter.get("base_model_name_or_path"))
  is_encoder = adapter.get("task_type") == "FEATURE_EXTRACTION"
  task = "FeatureExtraction" if is_encoder else "CausalLM"
  raise ValueError(
    f"{folder}: found a PEFT adapter of {base}, expected a whole model. {MERGE}"
    f': `python -c "from peft import AutoPeftModelFor{task} as Model; '
    f"Model.from_pretrained('{folder}').merge_and_unload()"
    f".save_pretrained('MERGED')\"`, and copy the tokenizer of {base} there."
  )


def refuse_gguf(folder: pathlib.Path) -> None:
  """Raises ValueError for weights of llama.cpp in place of safetensors."""
  files = sorted(folder.glob("*.gguf"))
  if folder.suffix == ".gguf":
    files = [folder]
  if files:
    name = shlex.quote(str(files[0]))
    raise ValueError(
      f"{folder}: found GGUF weights, expected safetensors. Commands convert a "
      f"policy if you name the file itself, --hf={name}; of anything else "
      "download the original model."
    )


def _shortened(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
