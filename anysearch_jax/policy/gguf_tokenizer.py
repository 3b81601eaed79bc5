"""Makes a fast tokenizer of the metadata of a GGUF file.

A file names the kind of its vocabulary and, for byte-level BPE, how text is
split into words first. Both are rebuilt as the families' own tokenizers have
them, so that ids equal theirs, and llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

if TYPE_CHECKING:
  import transformers

_KEYS = "tokenizer.ggml."
# Values of `token_type`.
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
# SentencePiece writes a space so.
_SPACE = "▁"
_UNKNOWN = "<unk>"
# Control tokens that end a turn wherever they are in a vocabulary: llama.cpp's
# list, because a file names only one.
_ENDS = frozenset(
  (
    "</s>",
    "<end_of_turn>",
    "<eos>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
  )
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _word_pattern(numbers: str) -> tokenizers.Regex:
  """Returns GPT-4's pattern of words; `numbers` matches a group of digits."""
  return tokenizers.Regex(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  )


class _Words(NamedTuple):
  """How a vocabulary of byte-level BPE splits text into words.

  Attributes:
    splits: what comes before bytes become characters.
    gpt2: whether words are then split by GPT-2's pattern.
    normalizer: the normalizer, if any.
    whole_words: whether a word that is a token is not merged from its parts.
    begins: whether texts begin with BOS unless the file says otherwise.
  """

  splits: tuple[pre_tokenizers.PreTokenizer, ...] = ()
  gpt2: bool = False
  normalizer: normalizers.Normalizer | None = None
  whole_words: bool = False
  begins: bool = False


_DIGITS = pre_tokenizers.Split(_word_pattern(r"\p{N}"), "isolated")
_TRIPLETS = pre_tokenizers.Split(_word_pattern(r"\p{N}{1,3}"), "isolated")
_LLAMA3 = _Words((_TRIPLETS,), whole_words=True, begins=True)
# By `tokenizer.ggml.pre`.
_WORDS: Mapping[str, _Words] = {
  "deepseek-r1-qwen": _Words((_DIGITS,)),
  "gpt-2": _Words(gpt2=True),
  "llama-bpe": _LLAMA3,
  "llama-v3": _LLAMA3,
  "llama3": _LLAMA3,
  "qwen2": _Words((_DIGITS,), normalizer=normalizers.NFC()),
  "smollm": _Words((pre_tokenizers.Digits(True),), gpt2=True),
}


def make(
  metadata: Mapping[str, Any],
) -> tuple[transformers.PreTrainedTokenizerFast, list[int]]:
  """Returns the tokenizer of a file, and the ids that end a turn.

  Args:
    metadata: the file's, as `gguf_files.read` returns it.

  Raises:
    ValueError: there is no tokenizer, it is of another kind, or its parts do
      not fit each other.
  """
  import transformers

  values = {
    key.removeprefix(_KEYS): value
    for key, value in metadata.items()
    if key.startswith(_KEYS)
  }
  tokens = values.get("tokens")
  kind = values.get("model")
  if not isinstance(tokens, list) or not tokens or kind is None:
    raise ValueError(
      "has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens); "
      "expected a model that was converted with its vocabulary"
    )
  types = list(values.get("token_type", [_NORMAL] * len(tokens)))
  scores = list(values.get("scores", [0.0] * len(tokens)))
  if not len(tokens) == len(types) == len(scores):
    raise ValueError(
      f"has {len(tokens)} tokens, {len(types)} types of tokens and "
      f"{len(scores)} scores; expected one of each for a token"
    )
  # Names of rows of the embedding that no text has.
  while types and types[-1] == _UNUSED:
    types.pop()
  tokens = tokens[: len(types)]
  ids = {token: i for i, token in enumerate(tokens)}
  if len(ids) < len(tokens):
    raise ValueError("has a token twice, expected every one once")
  if kind == "gpt2":
    backend, begins = _byte_level(values, ids)
  elif kind == "llama":
    backend, begins = _sentencepiece(values, ids, types, scores)
  else:
    raise ValueError(
      f"has a tokenizer of the kind {kind!r} (tokenizer.ggml.model), which is "
      "not supported; expected 'gpt2' or 'llama'"
    )
  for type_, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
    backend.add_tokens(
      [
        tokenizers.AddedToken(token, normalized=False, special=is_special)
        for token, token_type in zip(tokens, types)
        if token_type == type_
      ]
    )
  special = {
    role: _token(values, f"{key}_token_id", tokens)
    for role, key in (
      ("bos_token", "bos"),
      ("eos_token", "eos"),
      ("unk_token", "unknown"),
      ("pad_token", "padding"),
    )
  }
  first = special["bos_token"]
  last = special["eos_token"]
  begins = bool(values.get("add_bos_token", begins) and first)
  ends = bool(values.get("add_eos_token") and last)
  if begins or ends:
    template = [*[first] * begins, "$A", *[last] * ends]
    backend.post_processor = processors.TemplateProcessing(
      single=template,
      special_tokens=[(token, ids[token]) for token in {first, last} if token],
    )
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    clean_up_tokenization_spaces=False,
    **{role: token for role, token in special.items() if token},
  )
  tokenizer.chat_template = metadata.get("tokenizer.chat_template")
  end_names = {_token(values, key, tokens) for key in _END_KEYS} - {None}
  end_names |= {
    token
    for token, type_ in zip(tokens, types)
    if type_ == _CONTROL and token in _ENDS
  }
  return tokenizer, sorted(ids[token] for token in end_names)


def _token(
  values: Mapping[str, Any], key: str, tokens: Sequence[str]
) -> str | None:
  """Returns the token whose id is at a key; None without that key."""
  i = values.get(key)
  if i is None:
    return None
  if type(i) is not int or not 0 <= i < len(tokens):
    raise ValueError(
      f"{_KEYS}{key} is {i!r}, expected the id of one of {len(tokens)} tokens"
    )
  return tokens[i]


def _byte_level(
  values: Mapping[str, Any], ids: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
  """Returns a tokenizer of byte-level BPE, and whether it writes BOS."""
  name = values.get("pre")
  words = _WORDS.get(name) if isinstance(name, str) else None
  if words is None:
    raise ValueError(
      f"splits text into words by {name!r} (tokenizer.ggml.pre), which is not "
      f"supported; expected one of {', '.join(_WORDS)}"
    )
  merges = [tuple(merge.split(" ")) for merge in values.get("merges", ())]
  for merge in merges:
    if len(merge) != 2 or not {*merge, "".join(merge)} <= ids.keys():
      raise ValueError(
        f"merges {' '.join(merge)!r} (tokenizer.ggml.merges), expected two "
        "tokens that make a third"
      )
  backend = tokenizers.Tokenizer(
    models.BPE(ids, merges, ignore_merges=words.whole_words)
  )
  backend.normalizer = words.normalizer
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      *words.splits,
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.gpt2),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  return backend, words.begins


def _sentencepiece(
  values: Mapping[str, Any],
  ids: dict[str, int],
  types: Sequence[int],
  scores: Sequence[float],
) -> tuple[tokenizers.Tokenizer, bool]:
  """Returns a tokenizer of SentencePiece's BPE, and whether it writes BOS."""
  if _UNKNOWN not in ids:
    raise ValueError(f"has no token {_UNKNOWN!r}; expected SentencePiece's")
  # SentencePiece merges the pair whose token has the highest score; merges are
  # those pairs in this order.
  ranked = sorted(
    (
      (-score, len(token) - cut, token[:cut], token[cut:])
      for token, score, type_ in zip(ids, scores, types)
      if type_ == _NORMAL
      for cut in range(1, len(token))
      if token[:cut] in ids and token[cut:] in ids
    )
  )
  model = models.BPE(
    ids,
    [tuple(pair) for _, _, *pair in ranked],
    unk_token=_UNKNOWN,
    fuse_unk=True,
    byte_fallback=True,
  )
  backend = tokenizers.Tokenizer(model)
  steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
  last_steps: list[decoders.Decoder] = []
  if values.get("add_space_prefix", True):
    steps.insert(0, normalizers.Prepend(_SPACE))
    last_steps.append(decoders.Strip(" ", left=1))
  backend.normalizer = normalizers.Sequence(steps)
  backend.decoder = decoders.Sequence(
    [
      decoders.Replace(_SPACE, " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      *last_steps,
    ]
  )
  return backend, True
